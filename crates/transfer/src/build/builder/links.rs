//! Hard links, some of which wait for their files.
//!
//! A hard link to a file that has not come yet waits until the source ends, or the layer. Then each
//! is made, or waits for the one name that its way to the file lacks. Making that name wakes it. So
//! a chain of links takes time in proportion to its length, in whatever order it comes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::{Attr, Errno, Error, FileId, FileType, SafeName};

use super::replace::Removal;
use super::way::Way;
use super::{Builder, at};
use crate::build::entry::{BuildEntry, SourceProblem, split_path};
use crate::extract::{LinkName, Unapplied};
use crate::{Result, TransferFailure};

/// How much memory the paths of hard links may take that wait for their files.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// What a waiting hard link takes beside its paths.
const WAITING_EACH_BYTES: usize = 128;

/// A hard link that waits.
struct WaitingLink {
    path: Vec<u8>,
    target: Vec<u8>,
}

/// Hard links while they are made that waited.
#[derive(Default)]
pub(super) struct WokenLinks {
    /// Those that wait for a name in a directory.
    waiting: BTreeMap<(FileId, Vec<u8>), Vec<WaitingLink>>,
    /// Those to try next.
    ready: VecDeque<WaitingLink>,
}

impl WokenLinks {
    /// The directory has this name now.
    pub(super) fn wake(&mut self, dir: FileId, name: &[u8]) {
        if !self.waiting.is_empty()
            && let Some(woken) = self.waiting.remove(&(dir, name.to_vec()))
        {
            self.ready.extend(woken);
        }
    }
}

impl Builder<'_> {
    /// Makes the hard links that waited.
    pub(super) fn make_waiting_links(&mut self) -> Result {
        let waiting = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let links = waiting.into_iter().map(|(path, target)| WaitingLink { path, target });
        self.woken = WokenLinks { ready: links.collect(), ..WokenLinks::default() };
        while let Some(link) = self.woken.ready.pop_front() {
            self.require_not_interrupted()?;
            if let Way::Lacks(dir, name) = self.link(&link.path, &link.target)? {
                self.woken.waiting.entry((dir, name)).or_default().push(link);
            }
        }
        let left = self.woken.waiting.values().flatten();
        if let Some(link) = left.min_by(|one, other| one.path.cmp(&other.path)) {
            let target = Escaped(&link.target);
            let what = format!("it is a hard link to {target}, which is not there");
            return Err(SourceProblem::Refused(what).at(&link.path));
        }
        Ok(())
    }

    /// Gives the file at `target` the name `path`, if there is a way to the file.
    pub(super) fn link(&mut self, path: &[u8], target: &[u8]) -> Result<Way> {
        let (target_parent, target_name) = split_path(target);
        if let Way::Lacks(dir, name) = self.enter(target_parent, false)? {
            return Ok(Way::Lacks(dir, name));
        }
        let (fs, dir) = (self.context.fs, self.here()?.file);
        let file = match fs.lookup(dir, target_name) {
            Err(error) if error.errno() == Errno::NOENT => {
                return Ok(Way::Lacks(dir, target_name.to_vec()));
            }
            found => found.map_err(|error| at(error, target))?,
        };
        let (parent, name) = split_path(path);
        self.enter(parent, true)?;
        self.link_to(file, name).map_err(|failure| failure.at(path))?;
        Ok(Way::Found)
    }

    /// Gives `file` one more name in the directory that the way leads to.
    pub(super) fn link_to(&mut self, file: FileId, name: &[u8]) -> Result<(), Removal> {
        let (fs, now) = (self.context.fs, self.context.options.at);
        let Some(level) = self.levels.last() else {
            return Err(Error::posix(Errno::NOENT, "the way").into());
        };
        // GNU tar writes a file that it was told to archive twice as a link to itself.
        let is_itself = match fs.lookup(level.file, name) {
            Ok(there) => there == file,
            Err(error) if error.errno() == Errno::NOENT => false,
            Err(error) => return Err(error.into()),
        };
        if is_itself {
            return Ok(());
        }
        if fs.attr(file)?.file_type == FileType::Directory {
            return Err(Error::posix(Errno::INVAL, "it is a hard link to a directory").into());
        }
        self.make(name, |fs, place| fs.link(file, place, now).map(|()| file))?;
        self.context.counters.files.fetch_add(1, Ordering::Relaxed);
        self.context.progress.add_file();
        Ok(())
    }

    /// Keeps a hard link until its file comes.
    pub(super) fn wait_for(&mut self, path: Vec<u8>, target: Vec<u8>) -> Result {
        self.waiting_bytes += waiting_bytes(&path, &target);
        if self.waiting_bytes > WAITING_BYTES_MAX {
            let what = "too many hard links come before the files that they lead to".to_owned();
            return Err(SourceProblem::Refused(what).at(&path));
        }
        self.waiting.insert(path, target);
        Ok(())
    }

    /// Forgets the hard links that wait for the name `path`, and unless a directory comes there,
    /// for names below it: the later of two entries with one name counts.
    pub(super) fn forget_waiting(&mut self, path: &[u8], is_directory: bool) {
        if self.waiting.is_empty() {
            return;
        }
        if let Some(target) = self.waiting.remove(path) {
            self.waiting_bytes -= waiting_bytes(path, &target);
        }
        let below = [path, b"/"].concat();
        while !is_directory
            && let Some((inner, _)) = self.waiting.range(below.clone()..).next()
            && inner.starts_with(&below)
        {
            let inner = inner.clone();
            if let Some(target) = self.waiting.remove(&inner) {
                self.waiting_bytes -= waiting_bytes(&inner, &target);
            }
        }
    }

    /// Gives the name of `entry` to the file that another name of its inode became. Whether it did.
    pub(super) fn link_to_known(&mut self, entry: &BuildEntry, inode: &Attr) -> Result<bool> {
        let failed = |error: std::io::Error| {
            TransferFailure::Host("the table of hard links".to_owned(), error)
        };
        let (_, name) = split_path(&entry.path);
        // Each subvolume has files of its own. The name of the one in this subvolume is searched,
        // because the newest may be in another.
        let (mut fitting, mut is_elsewhere) = (None, false);
        let dev = self.here()?.file.dev;
        for known in self.links.names(inode).map_err(failed)? {
            let known = known.map_err(failed)?;
            if known.parent.dev == dev {
                fitting = Some(known);
                break;
            }
            is_elsewhere = true;
        }
        let mut errno = is_elsewhere.then_some(Errno::XDEV);
        if let Some(known) = fitting {
            let fs = self.context.fs;
            let file = fs.lookup(known.parent, &known.name);
            let file = file.map_err(|error| at(error, &entry.path))?;
            match self.link_to(file, name) {
                Ok(()) => return Ok(true),
                // More names than the volume gives a file.
                Err(Removal::Volume(error)) if error.errno() == Errno::MLINK => {
                    errno = Some(Errno::MLINK);
                }
                Err(failure) => return Err(failure.at(&entry.path)),
            }
        }
        if let Some(errno) = errno {
            // It becomes a file of its own, to which later names are given.
            let path = || entry.path.clone();
            self.context.problems.unapplied(Unapplied::HardLink, path, errno);
        }
        let known = LinkName { parent: self.here()?.file, name: SafeName::new(name)? };
        self.links.add(inode, &known).map_err(failed)?;
        Ok(false)
    }
}

/// The memory that a waiting hard link takes, about.
fn waiting_bytes(path: &[u8], target: &[u8]) -> usize {
    path.len() + target.len() + WAITING_EACH_BYTES
}
