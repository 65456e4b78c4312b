//! Files that go: those that a later layer removes, and what is where a file comes.

use std::ops::ControlFlow;

use offshoot_vfs::{EntryPlace, Errno, Error, FileId, FileType};

use super::way::Way;
use super::{Builder, at};
use crate::build::LayeredSink;
use crate::build::entry::split_path;
use crate::{Result, TransferFailure};

/// How many names of a directory that is being emptied are in memory.
const EMPTIED_NAMES: usize = 256;

/// A directory that is being emptied.
struct EmptiedDirectory {
    file: FileId,
    /// Its name in the one before.
    name: Vec<u8>,
    /// Everything up to here is removed.
    cookie: u64,
}

/// Why a call failed that may remove what is in its way.
pub(super) enum Removal {
    Volume(Error),
    Interrupted,
}

impl From<Error> for Removal {
    fn from(error: Error) -> Self {
        Self::Volume(error)
    }
}

impl Removal {
    /// The failure that this is for the file at `path`.
    pub(super) fn at(self, path: &[u8]) -> TransferFailure {
        match self {
            Self::Volume(error) => at(error, path),
            Self::Interrupted => TransferFailure::Interrupted,
        }
    }
}

impl LayeredSink for Builder<'_> {
    /// Removes what is at `path`, if anything is.
    fn remove(&mut self, path: &[u8]) -> Result {
        let (parent, name) = split_path(path);
        if let Way::Lacks(..) = self.enter(parent, false)? {
            return Ok(());
        }
        let place = EntryPlace { dir: self.here()?.file, name };
        self.touch_here();
        self.remove_place(place).map_err(|failure| failure.at(path))
    }

    /// Removes what is at `path`, unless it is a directory.
    fn remove_unless_directory(&mut self, path: &[u8]) -> Result {
        let (parent, name) = split_path(path);
        if path.is_empty() || matches!(self.enter(parent, false)?, Way::Lacks(..)) {
            return Ok(());
        }
        if self.directory_at(name)?.is_some() {
            return Ok(());
        }
        self.remove(path)
    }

    /// Removes what is in the directory at `path`, if there is one. A symbolic link there is none:
    /// what a layer says of its directory `lib` is not about the one that a link `lib` leads to.
    fn clear(&mut self, path: &[u8]) -> Result {
        let (parent, name) = split_path(path);
        if let Way::Lacks(..) = self.enter(parent, false)? {
            return Ok(());
        }
        if !path.is_empty() && self.directory_at(name)?.is_none() {
            return Ok(());
        }
        self.enter(path, false)?;
        let dir = self.here()?.file;
        self.touch_here();
        self.clear_directory(dir).map_err(|failure| failure.at(path))
    }

    fn end_layer(&mut self) -> Result {
        self.make_waiting_links()
    }
}

impl Builder<'_> {
    /// Removes what is at `place`, if anything is, with everything in it.
    pub(super) fn remove_place(&self, place: EntryPlace<'_>) -> Result<(), Removal> {
        let at = self.context.options.at;
        match self.context.fs.unlink(place, at) {
            Err(error) if error.errno() == Errno::ISDIR => {
                let dir = self.context.fs.lookup(place.dir, place.name)?;
                self.clear_directory(dir)?;
                Ok(self.context.fs.rmdir(place, at)?)
            }
            Err(error) if error.errno() == Errno::NOENT => Ok(()),
            unlinked => Ok(unlinked?),
        }
    }

    /// Removes everything in a directory. Each name is read once: what is removed may stay in the
    /// trees until a commit, and reading from the beginning would pass it again and again.
    fn clear_directory(&self, top: FileId) -> Result<(), Removal> {
        let (fs, at) = (self.context.fs, self.context.options.at);
        let mut stack = vec![EmptiedDirectory { file: top, name: Vec::new(), cookie: 0 }];
        while let Some(last) = stack.last_mut() {
            let (dir, mut batch) = (last.file, Vec::new());
            fs.read_dir(dir, last.cookie, &mut |entry| {
                batch.push((entry.name.to_vec(), entry.file, entry.cookie));
                let is_last =
                    batch.len() == EMPTIED_NAMES || entry.file_type == FileType::Directory;
                if is_last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            let is_empty = batch.is_empty();
            let mut inner = None;
            for (name, file, cookie) in batch {
                if self.context.problems.is_stopped() {
                    return Err(Removal::Interrupted);
                }
                last.cookie = cookie;
                match fs.unlink(EntryPlace { dir, name: &name }, at) {
                    Err(error) if error.errno() == Errno::ISDIR => {
                        inner = Some(EmptiedDirectory { file, name, cookie: 0 });
                        break;
                    }
                    unlinked => unlinked?,
                }
            }
            stack.extend(inner);
            if is_empty {
                let emptied = stack.pop();
                if let (Some(parent), Some(emptied)) = (stack.last(), emptied) {
                    fs.rmdir(EntryPlace { dir: parent.file, name: &emptied.name }, at)?;
                }
            }
        }
        Ok(())
    }
}
