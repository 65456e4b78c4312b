//! A walk through a tree that is not trusted.
//!
//! Depth first, every entry once, in the order of the directories. What a hostile image could do,
//! and why it does not work:
//!
//! 1. *Cycles, and directories reached on many ways.* [`may_enter`] lets no directory be entered
//!    twice.
//! 2. *Depth.* There is no recursion, and a depth is given beyond which a directory is an
//!    error. The entries that are buffered on all levels together are bounded
//!    ([`BUFFERED_MAX`]): a level whose buffer is given up reads on from its cookie later.
//! 3. *Endless directories.* The cookies must ascend, so a directory ends.
//! 4. *Names.* They are checked, see [`SafeName`].
//!
//! The walk gives the visitor the errors of files that it cannot read, and goes on beside them.
//!
//! Other threads may change the tree meanwhile. The walk [holds](HeldFile) each directory that it
//! is in, and each file while the visitor is shown it. What has lost its name since its directory
//! was read is left out.

use std::ops::ControlFlow;

use crate::enter::{Entrance, attr_of, may_enter};
use crate::{
    Attr, Code, Error, FileId, FileSystemMut, FileType, HeldFile, Result, SafeName, Structure,
};

/// How many entries of one directory are read at a time.
const BATCH: usize = 512;

/// How many entries may wait on all levels together. An entry takes about 64 bytes.
const BUFFERED_MAX: usize = 64 * 1024;

/// What the walk shows of a file.
pub struct WalkedFile<'a> {
    /// The directory that holds it.
    pub parent: FileId,
    /// Its name there.
    pub name: &'a SafeName,
    /// Its path from the top of the walk, without a `/` in front.
    pub path: &'a [u8],
    /// Its attributes.
    pub attr: &'a Attr,
}

/// What a walk calls for each file.
pub trait WalkVisitor {
    /// What the visitor keeps for a directory while the walk is in it.
    type Directory;

    /// A directory, before its entries; `None` leaves it out.
    fn enter(
        &mut self,
        parent: &Self::Directory,
        entry: &WalkedFile<'_>,
    ) -> Option<Self::Directory>;

    /// A directory that was entered, after its entries, and its path from the top.
    fn leave(&mut self, directory: Self::Directory, _path: &[u8]) {
        drop(directory);
    }

    /// Any other file.
    fn visit(&mut self, parent: &Self::Directory, entry: &WalkedFile<'_>);

    /// Something at `path` that could not be read, or must not be entered.
    fn failed(&mut self, path: &[u8], error: &Error);

    /// Whether the walk should end early.
    fn is_stopped(&self) -> bool;
}

/// One directory that the walk is in.
struct WalkLevel<'a, D> {
    directory: D,
    held: HeldFile<'a>,
    /// The length of the walk's path without this directory's own name.
    path_len: usize,
    waiting: std::vec::IntoIter<WaitingDirectory>,
    /// The cookie of the last entry that was taken from `waiting`.
    after: u64,
    /// No entries follow those in `waiting`.
    is_read: bool,
}

struct WaitingDirectory {
    name: Box<[u8]>,
    file: FileId,
    cookie: u64,
}

/// The deepest tree that a caller without a limit of its own walks: far deeper than any path.
pub const DEPTH_MAX: usize = 1 << 16;

/// Shows everything below `top`, which the caller holds, and the visitor has entered as
/// `directory`.
pub fn walk<V: WalkVisitor>(
    fs: &dyn FileSystemMut,
    top: FileId,
    directory: V::Directory,
    depth_max: usize,
    visitor: &mut V,
) {
    let mut walk =
        DirectoryWalk { fs, top, depth_max, levels: Vec::new(), path: Vec::new(), buffered: 0 };
    match HeldFile::new(fs, top) {
        Ok(held) => walk.push(directory, held, 0),
        Err(error) => return visitor.failed(b"", &error),
    }
    while !walk.levels.is_empty() && !visitor.is_stopped() {
        walk.step(visitor);
    }
}

struct DirectoryWalk<'a, D> {
    fs: &'a dyn FileSystemMut,
    top: FileId,
    depth_max: usize,
    levels: Vec<WalkLevel<'a, D>>,
    path: Vec<u8>,
    buffered: usize,
}

impl<'a, D> DirectoryWalk<'a, D> {
    fn push(&mut self, directory: D, held: HeldFile<'a>, path_len: usize) {
        self.levels.push(WalkLevel {
            directory,
            held,
            path_len,
            waiting: Vec::new().into_iter(),
            after: 0,
            is_read: false,
        });
    }

    /// Takes one entry of the innermost directory, or leaves it.
    fn step<V: WalkVisitor<Directory = D>>(&mut self, visitor: &mut V) {
        let Some(level) = self.levels.last_mut() else { return };
        let Some(waiting) = level.waiting.next() else {
            if level.is_read {
                if let Some(level) = self.levels.pop() {
                    visitor.leave(level.directory, &self.path);
                    self.path.truncate(level.path_len);
                }
            } else if let Err(error) = self.fill() {
                visitor.failed(&self.path, &error);
            }
            return;
        };
        level.after = waiting.cookie;
        self.buffered -= 1;
        let path_len = self.path.len();
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(&waiting.name);
        match self.show(&waiting, visitor) {
            Ok(Some((directory, held))) => {
                self.give_up_buffer();
                self.push(directory, held, path_len);
            }
            Ok(None) => self.path.truncate(path_len),
            Err(error) => {
                visitor.failed(&self.path, &error);
                self.path.truncate(path_len);
            }
        }
    }

    /// Shows one entry; `Some` when it is a directory that is to be walked.
    fn show<V: WalkVisitor<Directory = D>>(
        &self,
        waiting: &WaitingDirectory,
        visitor: &mut V,
    ) -> Result<Option<(D, HeldFile<'a>)>> {
        let Some(level) = self.levels.last() else { return Ok(None) };
        let (name, parent) = (SafeName::new(&waiting.name)?, level.held.file());
        let held = HeldFile::of_entry(self.fs, parent, &name, waiting.file);
        let held = self.unless_gone(parent, (waiting, waiting.file), held)?;
        let Some(held) = held else { return Ok(None) };
        let file = held.file();
        let attr = attr_of(self.fs, &name, file);
        let Some(attr) = self.unless_gone(parent, (waiting, file), attr)? else { return Ok(None) };
        let entry = WalkedFile { parent, name: &name, path: &self.path, attr: &attr };
        if attr.file_type != FileType::Directory {
            visitor.visit(&level.directory, &entry);
            return Ok(None);
        }
        let entrance = may_enter(self.fs, self.top, parent, &name, file);
        match self.unless_gone(parent, (waiting, file), entrance)? {
            None => return Ok(None),
            Some(Entrance::Walk) => {}
            Some(Entrance::StandIn) => {
                if let Some(directory) = visitor.enter(&level.directory, &entry) {
                    visitor.leave(directory, &self.path);
                }
                return Ok(None);
            }
        }
        if self.levels.len() >= self.depth_max {
            return Err(Error::unsupported(
                Code::TooDeep,
                format!("a directory more than {} levels deep", self.depth_max),
            ));
        }
        Ok(visitor.enter(&level.directory, &entry).map(|directory| (directory, held)))
    }

    /// What was found of an entry that leads to `file`; `None` for an error when the directory does
    /// not list the entry any more, because another thread has changed it.
    fn unless_gone<T>(
        &self,
        parent: FileId,
        (entry, file): (&WaitingDirectory, FileId),
        found: Result<T>,
    ) -> Result<Option<T>> {
        let Err(error) = found else { return found.map(Some) };
        let mut is_there = false;
        let listed = self.fs.read_dir(parent, entry.cookie.saturating_sub(1), &mut |now| {
            is_there = (now.cookie, now.file, now.name) == (entry.cookie, file, &*entry.name);
            ControlFlow::Break(())
        });
        if is_there || listed.is_err() { Err(error) } else { Ok(None) }
    }

    /// Reads the next entries of the innermost directory. After an error there are none.
    fn fill(&mut self) -> Result<()> {
        let Some(level) = self.levels.last_mut() else { return Ok(()) };
        let (mut batch, mut listed) = (Vec::new(), Vec::new());
        let mut last = level.after;
        let mut descends = false;
        let result = self.fs.read_dir(level.held.file(), level.after, &mut |entry| {
            descends = entry.cookie <= last;
            if descends || batch.len() == BATCH {
                return ControlFlow::Break(());
            }
            last = entry.cookie;
            batch.push(WaitingDirectory {
                name: entry.name.into(),
                file: entry.file,
                cookie: last,
            });
            listed.push((entry.file, entry.file_type));
            ControlFlow::Continue(())
        });
        level.is_read = result.is_err() || descends || batch.len() < BATCH;
        self.buffered += batch.len();
        level.waiting = batch.into_iter();
        self.fs.prefetch_listed(&listed);
        result?;
        if descends {
            return Err(Error::corrupt(
                Structure::Directory,
                "its entries are not in ascending order",
            ));
        }
        Ok(())
    }

    /// Before going deeper: forgets what waits on this level, if too much waits.
    fn give_up_buffer(&mut self) {
        if self.buffered <= BUFFERED_MAX {
            return;
        }
        if let Some(level) = self.levels.last_mut()
            && level.waiting.len() > 0
        {
            self.buffered -= level.waiting.len();
            level.waiting = Vec::new().into_iter();
            level.is_read = false;
        }
    }
}
