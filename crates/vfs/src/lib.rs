//! What a filesystem is to its callers.
//!
//! An engine implements [`FileSystem`], [`FileSystemMut`] if it writes ([`ReadOnlyFiles`] stands in
//! for it otherwise), and [`Volume`] for what is about no file; the command line, the mount and the
//! tests call it and know nothing of the format behind it. Three rules hold for every
//! implementation:
//!
//! 1. All methods may be called from many threads at once.
//! 2. Names, link targets and extended attributes are bytes. A name is 1 to 255
//!    bytes without `/` and NUL, and is never `.` or `..`; an engine refuses an
//!    image that holds another one before a caller sees it.
//! 3. Data and metadata were verified before they are returned. What could not be
//!    verified is an [`Error`], never bytes.
//!
//! A file is named by its [`FileId`]. It stays valid as long as the file has a name or is open;
//! where [numbers are given again](FileSystem::reuses_numbers) it may name another file then, and
//! [`HeldFiles`] is for callers that keep it. Asking for one that does not exist is an error, not
//! undefined. [`path`] finds the file that a path leads to, [`walk`](mod@walk) goes through a tree,
//! and [`escape`] shows names as text.

pub mod acl;
mod attr;
mod change;
mod code;
pub mod enter;
mod error;
pub mod escape;
mod flags;
mod forward;
pub mod globs;
mod held;
mod name;
pub mod path;
mod read_only;
mod volume;
pub mod walk;
pub mod wildcard;
pub mod xattr;

use std::ops::{ControlFlow, Range};

pub use attr::{Attr, FileId, FileType, StatFs, Timestamp};
pub use change::{
    Dedupe, EntryPlace, Fallocate, FilePosition, FileSystemMut, NewFile, NewNode, Rename, SetAttr,
    SetTime, XattrMode, make_over,
};
pub use code::{Code, Structure};
pub use error::{Corrupt, Errno, Error, Malformed, Nameless, OsReason, Result};
pub use flags::FileFlags;
pub use held::{HeldFile, HeldFiles};
pub use name::SafeName;
pub use read_only::ReadOnlyFiles;
pub use volume::{Trimmed, Volume, VolumeVersion};

/// The longest name of a directory entry, in bytes.
pub const NAME_MAX: usize = 255;

/// One entry of a directory, as [`FileSystem::read_dir`] shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// The name, 1 to 255 bytes.
    pub name: &'a [u8],
    /// The file that the entry leads to, nested subvolumes already crossed.
    pub file: FileId,
    /// The type that the directory itself records for the entry.
    pub file_type: FileType,
    /// Where to go on after this entry: give it to [`FileSystem::read_dir`] as `after`.
    /// Stable while the entry exists, whatever happens to others.
    pub cookie: u64,
}

/// Where a directory stands: the directory that holds it, and its name there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The directory that holds the entry.
    pub dir: FileId,
    /// The name of the entry.
    pub name: Vec<u8>,
}

/// The error about an entry `name` that leads to `file`, which has no inode.
#[must_use]
pub fn missing(name: &[u8], file: FileId) -> Error {
    let problem = format!("`{}` leads to {file}, which is missing", name.escape_ascii());
    Error::corrupt(Structure::DirectoryEntry, problem)
}

/// A filesystem that is open.
///
/// Every method fails with [`Error::Io`] when a device does, with
/// [`Error::Corrupt`] when what it read does not verify, and with
/// [`Error::Posix`] as POSIX has it for the call of that name.
pub trait FileSystem: Send + Sync {
    /// The directory that the tree starts at.
    fn root(&self) -> FileId;

    /// Whether a file that is made may get the number of one that has gone. A caller that keeps a
    /// number must hold the file then ([`HeldFiles`], [`HeldFile`]).
    fn reuses_numbers(&self) -> bool {
        true
    }

    /// Sizes and free space of the whole filesystem.
    fn statfs(&self) -> Result<StatFs>;

    /// The file called `name` in `dir`; `ENOENT` when there is none and `ENOTDIR`
    /// when `dir` is not a directory. `.` and `..` are not looked up.
    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId>;

    /// The directory that holds the directory `dir`; `None` for the root.
    ///
    /// A directory has exactly one parent. A caller that walks a tree that it does
    /// not trust compares this with where it comes from: that alone rules out
    /// cycles and directories that are reached twice.
    ///
    /// A directory that only stands in for something that is elsewhere (what a snapshot
    /// shows in place of a subvolume nested in its source) has no parent either, and is
    /// always empty: it may be reached in several ways, and leads nowhere.
    fn parent(&self, dir: FileId) -> Result<Option<Parent>>;

    /// The attributes of a file.
    fn attr(&self, file: FileId) -> Result<Attr>;

    /// The attributes of `file`, which the entry `name` of `dir` was found to lead to.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the entry is there and its file is not. `ENOENT` when the name is
    /// gone, or leads to another file: then another thread removed it meanwhile.
    fn attr_of_entry(&self, dir: FileId, name: &[u8], file: FileId) -> Result<Attr> {
        match self.attr(file) {
            // A name goes before its file does, so one that is still there leads nowhere.
            Err(Error::Posix { errno: Errno::NOENT, .. }) if self.lookup(dir, name)? == file => {
                Err(missing(name, file).in_file(dir))
            }
            found => found,
        }
    }

    /// The flags of a file. A filesystem that has none need not say so.
    fn flags(&self, file: FileId) -> Result<FileFlags> {
        self.attr(file).map(|_| FileFlags::empty())
    }

    /// Calls `visit` for the entries of `dir` in the order of their cookies, from
    /// the first one whose cookie is greater than `after` until `visit` breaks.
    /// Start with 0. `.` and `..` are not shown.
    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()>;

    /// The target of a symbolic link.
    fn read_link(&self, file: FileId) -> Result<Vec<u8>>;

    /// The value of one extended attribute, `ENODATA` when there is none; `EOPNOTSUPP` and `EINVAL`
    /// where there can be none of that name.
    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>>;

    /// Calls `visit` with name and value of every extended attribute, in no particular
    /// order, until it breaks.
    ///
    /// All of them together may be as large as the volume: a caller that keeps them sets
    /// a bound of its own.
    #[expect(clippy::type_complexity, reason = "it has the form of `read_dir`")]
    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()>;

    /// Reads into `buf` from byte `offset` on; holes read as zeros. The count is
    /// short only at the end of the file.
    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize>;

    /// Gives the data in `range` to `visit`, piece by piece in ascending order,
    /// each with its offset in the file. Holes, and preallocated space that was
    /// never written, are left out. This is the fast way to read a whole file:
    /// a compressed extent is decoded once and nothing is copied.
    ///
    /// Stops with the error that `visit` returns.
    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()>;

    /// The first range at or after `offset` that holds data, cut at the end of the
    /// file; `None` when only a hole follows. Adjacent data is one range.
    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>>;

    /// Where data begins at or after `offset`, as `SEEK_DATA` has it: `ENXIO` when there is none,
    /// and behind the end.
    fn seek_data(&self, file: FileId, offset: u64) -> Result<u64> {
        let next = self.next_data(file, offset)?;
        next.map(|data| data.start).ok_or_else(|| no_such_place(file, offset))
    }

    /// Where a hole begins at or after `offset`, as `SEEK_HOLE` has it: the end of the file is one.
    /// `ENXIO` at the end and behind it.
    fn seek_hole(&self, file: FileId, offset: u64) -> Result<u64> {
        match self.next_data(file, offset)? {
            Some(data) if data.start == offset => Ok(data.end),
            None if offset >= self.attr(file)?.size => Err(no_such_place(file, offset)),
            _ => Ok(offset),
        }
    }

    /// Tells that the caller is about to read all of these regular files. The
    /// filesystem may start to fetch their data, in the order of the device.
    /// It is a hint: a file that cannot be read fails when it is read.
    fn prefetch(&self, files: &[FileId]);

    /// Tells that the caller is about to ask for the attributes of all of these files, and to list
    /// those that are directories. It is a hint too. Does nothing unless a filesystem says more.
    fn prefetch_listed(&self, _files: &[(FileId, FileType)]) {}
}

/// `ENXIO`: what was looked for is not in `file` at or after `offset`.
fn no_such_place(file: FileId, offset: u64) -> Error {
    Error::posix(Errno::NXIO, format!("from {offset} on in {file}"))
}
