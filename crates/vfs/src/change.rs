//! What a filesystem is to callers that change it.
//!
//! [`FileSystemMut`] adds to [`FileSystem`] the calls that change names, attributes and data. The
//! rules of POSIX that depend on the user stay with the caller, because an image builder, a mount
//! and a test each answer them differently:
//!
//! - permission checks, and clearing set-id bits when the owner changes;
//! - a group or set-group-id bit inherited from a directory;
//! - the clock: every call is given its moment, so the same calls make the same volume.
//!
//! Access control lists and permissions are kept in step as [`crate::acl`] says.
//!
//! The filesystem itself enforces what a file forbids to all users: immutable and append-only
//! files, and read-only subvolumes.
//!
//! A call is done altogether or not at all, also after a crash, but where it says that it is done
//! piece by piece. It is durable when a later [`FileSystemMut::fsync`] or [`FileSystemMut::sync`]
//! returned.

use crate::{Errno, Error, FileFlags, FileId, FileSystem, FileType, Result, Timestamp};

/// What a new file begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewFile {
    /// Permission, set-id and sticky bits. A symbolic link has 0o777, whatever is said here.
    pub permissions: u32,
    /// The user that owns it.
    pub uid: u32,
    /// The group that owns it.
    pub gid: u32,
    /// How a system call makes files: with the default access control list of the directory, or
    /// where that has none, without these permissions. `None` makes a file with exactly the given
    /// permissions, whatever the directory has.
    pub umask: Option<u32>,
    /// The moment at which it is made: all its times, and those of the directory.
    pub at: Timestamp,
}

/// What kind of file [`FileSystemMut::mknod`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewNode {
    /// The type: everything but a directory and a symbolic link.
    pub file_type: FileType,
    /// Major (below 2^12) and minor (below 2^20) number of a device; (0, 0) otherwise.
    pub rdev: (u32, u32),
}

/// What a time becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The moment of the call (`UTIME_NOW`).
    Now,
    /// This one.
    To(Timestamp),
}

impl SetTime {
    /// What the time is then, where the call is made at `now`.
    #[must_use]
    pub fn at(self, now: Timestamp) -> Timestamp {
        match self {
            Self::Now => now,
            Self::To(time) => time,
        }
    }
}

/// Attributes to be changed. An attribute that is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission, set-id and sticky bits.
    pub permissions: Option<u32>,
    /// The user that owns it.
    pub uid: Option<u32>,
    /// The group that owns it.
    pub gid: Option<u32>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the contents.
    pub mtime: Option<SetTime>,
    /// The length in bytes.
    pub size: Option<u64>,
}

impl SetAttr {
    /// Both times become now, and nothing else changes: all that a file which can only be appended
    /// to lets be set.
    pub const TOUCH: Self = Self {
        permissions: None,
        uid: None,
        gid: None,
        atime: Some(SetTime::Now),
        mtime: Some(SetTime::Now),
        size: None,
    };
}

/// Whether an extended attribute must be there before it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrMode {
    /// It does not matter.
    Set,
    /// It must not be there: `EEXIST` (`XATTR_CREATE`).
    Create,
    /// It must be there: `ENODATA` (`XATTR_REPLACE`).
    Replace,
}

/// What a move does with what stands at the new name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rename {
    /// It is removed as [`FileSystemMut::unlink`] or [`FileSystemMut::rmdir`] would.
    Replace,
    /// It is an error: `EEXIST` (`RENAME_NOREPLACE`).
    NoReplace,
    /// It gets the old name, and must be there: `ENOENT` (`RENAME_EXCHANGE`).
    Exchange,
    /// A whiteout gets the old name: a character device 0:0, by which an overlay filesystem knows
    /// that nothing is there (`RENAME_WHITEOUT`).
    Whiteout {
        /// What the whiteout begins with.
        new: NewFile,
        /// What stands at the new name is removed; otherwise it is an error: `EEXIST`.
        replaces: bool,
    },
}

impl Rename {
    /// Whether what stands at the new name is removed.
    #[must_use]
    pub fn replaces(self) -> bool {
        matches!(self, Self::Replace | Self::Whiteout { replaces: true, .. })
    }

    /// What the whiteout that the move leaves begins with, if it leaves one.
    #[must_use]
    pub fn whiteout(self) -> Option<NewFile> {
        if let Self::Whiteout { new, .. } = self { Some(new) } else { None }
    }
}

/// What [`FileSystemMut::fallocate`] does to a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallocate {
    /// Space is allocated where there is none, so that writing there does not fail for want of it.
    /// A reader sees no change: space that was not written reads as zeros.
    Allocate {
        /// The file does not become longer.
        keeps_size: bool,
    },
    /// The range becomes a hole. The file stays as long as it is.
    PunchHole,
    /// The range reads as zeros, and has space allocated.
    Zero {
        /// The file does not become longer.
        keeps_size: bool,
    },
    /// The range goes, and the data behind it moves down. It is whole sectors and ends before the
    /// file does: `EINVAL`.
    Collapse,
    /// A hole comes in, and what was there and behind moves up. It is whole sectors and begins in
    /// the file: `EINVAL`.
    Insert,
}

/// What [`FileSystemMut::dedupe_range`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dedupe {
    /// All bytes that were compared are the same, and shared now. Of data that is too small to be
    /// shared each file keeps its own.
    Same {
        /// How many bytes they are, from where both ranges begin: not the rest of a sector that one
        /// of the files goes on in.
        len: u64,
    },
    /// Some are not the same, and nothing is shared.
    Differs,
}

/// A file and a place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePosition {
    /// The file.
    pub file: FileId,
    /// The place, in bytes.
    pub offset: u64,
}

/// A directory and a name in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPlace<'a> {
    /// The directory.
    pub dir: FileId,
    /// The name.
    pub name: &'a [u8],
}

/// A filesystem that can be changed.
///
/// Errors are those of [`FileSystem`] and, for all calls, `EROFS` in what is read-only, `ENOSPC`
/// when there is no space, `EPERM` for immutable files, `ENAMETOOLONG` for a name of more than 255
/// bytes and `EINVAL` for one that holds `/` or NUL. Others are listed where they arise.
pub trait FileSystemMut: FileSystem {
    /// Makes an empty regular file. `EEXIST` when the name is taken.
    fn create(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        self.mknod(place, NewNode { file_type: FileType::Regular, rdev: (0, 0) }, new)
    }

    /// Makes a file of any type but a directory (`EPERM`) and a symbolic link (`EINVAL`).
    /// `EEXIST` when the name is taken.
    fn mknod(&self, place: EntryPlace<'_>, node: NewNode, new: &NewFile) -> Result<FileId>;

    /// Makes an empty directory. `EEXIST` when the name is taken.
    fn mkdir(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId>;

    /// Makes a symbolic link to `target`. `EEXIST` when the name is taken, `ENOENT` for an empty
    /// target and `ENAMETOOLONG` for one that is too long for the volume.
    fn symlink(&self, place: EntryPlace<'_>, target: &[u8], new: &NewFile) -> Result<FileId>;

    /// Makes an empty regular file without a name in the filesystem of `dir`, as if it were made
    /// there, and counts it as opened once: it goes with its last [`FileSystemMut::release`], and
    /// in a crash, unless it got a name by then. It can get one when `is_linkable`.
    fn create_unnamed(&self, dir: FileId, is_linkable: bool, new: &NewFile) -> Result<FileId>;

    /// Gives `file` one more name. `EPERM` for a directory, `EEXIST` when the name is taken,
    /// `EMLINK` when it can have no more names, `ENOENT` when it lost its last one, `EXDEV` in
    /// another subvolume.
    fn link(&self, file: FileId, place: EntryPlace<'_>, at: Timestamp) -> Result<()>;

    /// Removes a name of a file that is no directory (`EISDIR`); the file goes with its last
    /// name, or when it is no longer open.
    fn unlink(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()>;

    /// Removes an empty directory; `ENOTDIR` and `ENOTEMPTY` for anything else.
    fn rmdir(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()>;

    /// Moves a file, and replaces what stands at `to`.
    fn rename(&self, from: EntryPlace<'_>, to: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.rename_with(from, to, Rename::Replace, at)
    }

    /// Moves a file. Two names of one file are left alone, unless nothing may stand at `to`.
    /// `EINVAL` for a directory moved below itself, `EXDEV` for a move into another subvolume,
    /// where only subvolumes themselves go.
    fn rename_with(
        &self,
        from: EntryPlace<'_>,
        to: EntryPlace<'_>,
        how: Rename,
        at: Timestamp,
    ) -> Result<()>;

    /// Changes attributes; the change time becomes `at`. Permissions change the access control list
    /// too. `EPERM` for all but [`SetAttr::TOUCH`] of a file that can only be appended to.
    ///
    /// The length comes before the others, and what is cut off goes piece by piece from the end: a
    /// crash may leave a file that is shorter than it was, or as long as it was to become, with its
    /// old owner and permissions. (So it is with the kernel's btrfs.) The others change together.
    fn set_attr(&self, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()>;

    /// Sets the flags of a file, all of them; also of one that is immutable. `EOPNOTSUPP` for flags
    /// that the filesystem does not have, `EINVAL` for those that contradict each other. Those of
    /// directories are left out elsewhere. Whether a file is copied on write cannot be changed any
    /// more when it has data: that flag stays as it is then.
    fn set_flags(&self, file: FileId, flags: FileFlags, at: Timestamp) -> Result<()>;

    /// Writes all of `data` at byte `offset` of a regular file, which becomes longer when it ends
    /// before that; what lies between is a hole. `EISDIR` and `EINVAL` for anything else, `EFBIG`
    /// beyond the largest file, `EPERM` for a file that can only be appended to, unless `offset` is
    /// its end.
    ///
    /// A long write is done piece by piece: a crash may leave its beginning.
    fn write(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()>;

    /// Writes as [`write`](Self::write) does, and leaves nothing of the file in memory: what was
    /// written is on its devices then, and durable with the next [`fsync`](Self::fsync) or
    /// [`sync`](Self::sync).
    fn write_direct(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()>;

    /// Allocates, frees, zeros or moves `len` bytes from byte `offset` on of a regular file.
    /// `EISDIR` and `EINVAL` for anything else, `EINVAL` for no bytes, `EFBIG` beyond the largest
    /// file, `EPERM` for all but allocation in a file that can only be appended to.
    ///
    /// A long range is done piece by piece: a crash may leave its beginning. On btrfs, what moves,
    /// moves in one piece: a file of more extents than that can be done with is not supported.
    /// (Files of the kernel's btrfs do not move at all.) On XFS it moves extent by extent, as with
    /// the kernel: a crash, or a device that fails, may leave a part where it was.
    fn fallocate(
        &self,
        file: FileId,
        what: Fallocate,
        offset: u64,
        len: u64,
        at: Timestamp,
    ) -> Result<()>;

    /// Lets `to` have the `len` bytes at `from`, or for 0 all that is there up to the end, without
    /// a copy: both share them until one is written.
    ///
    /// `EINVAL` for what is behind the end of `from`, for ranges of one file that overlap, and for
    /// what is not whole sectors, but that the end of `from` may become the end of `to`; also where
    /// only one of the two has checksums. `EISDIR` and `EINVAL` for what is no regular file,
    /// `EFBIG` beyond the largest one, `EPERM` where `to` can only be appended to.
    ///
    /// A long range is done piece by piece: a crash may leave its beginning.
    fn clone_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<()>;

    /// Lets two ranges share their space if all their bytes are the same, and says whether they
    /// are. No reader sees a change in either file, so `to` may be one that can only be appended
    /// to, or is in a read-only subvolume.
    ///
    /// All is compared before anything is shared. What is left of a sector at the end is neither
    /// compared nor shared, unless both files end there. For no bytes only the files are looked at:
    /// whether these two can share anything.
    ///
    /// Errors are those of [`clone_range`](Self::clone_range), and `EINVAL` for what is behind the
    /// end of `to`.
    ///
    /// A long range is shared piece by piece: a crash may leave its beginning.
    fn dedupe_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<Dedupe>;

    /// Copies `len` bytes, or fewer when `from` ends before that, and gives how many they were.
    /// What can be shared is, as with [`clone_range`](Self::clone_range). `EINVAL` for ranges of
    /// one file that overlap; other errors as for [`write`](Self::write).
    fn copy_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<u64>;

    /// Sets an extended attribute. An access control list changes the permissions, and is not
    /// stored when they say the same. `ERANGE` for a name and `E2BIG` for a value that no system
    /// call takes, `ENOSPC` for what is too large for the volume, `EOPNOTSUPP` for a namespace that
    /// it does not store.
    fn set_xattr(
        &self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()>;

    /// Removes an extended attribute, `ENODATA` when there is none.
    fn remove_xattr(&self, file: FileId, name: &[u8], at: Timestamp) -> Result<()>;

    /// Counts one more opening of `file`: until as many [`FileSystemMut::release`]s it can be used
    /// without a name.
    fn open(&self, file: FileId) -> Result<()>;

    /// Counts one opening of `file` less, and removes the file if it was the last and no name is
    /// left.
    fn release(&self, file: FileId) -> Result<()>;

    /// Makes everything durable that was done to `file`.
    fn fsync(&self, file: FileId) -> Result<()>;

    /// The same, but that its times may stay behind: what its data, its length, its names and its
    /// attributes are is durable.
    fn fdatasync(&self, file: FileId) -> Result<()> {
        self.fsync(file)
    }

    /// Makes everything durable that was done.
    fn sync(&self) -> Result<()>;
}

/// Gives `place` to what `make` makes. The file that is there has it until then, and keeps it when
/// that fails: it is made under another name first.
pub fn make_over(
    fs: &dyn FileSystemMut,
    place: EntryPlace<'_>,
    at: Timestamp,
    make: impl Fn(EntryPlace<'_>) -> Result<()>,
) -> Result<()> {
    /// One of so many names is free. Other threads have some, and crashes may leave some behind.
    const TRIES: usize = 1024;
    let mut result = Err(Error::posix(Errno::EXIST, "a temporary name"));
    for number in 0..TRIES {
        // The name is not random: a directory of XFS remembers it for a while, and the same calls
        // have to make the same bytes.
        let name = format!(".offshoot-{number:016x}");
        let temporary = EntryPlace { dir: place.dir, name: name.as_bytes() };
        result = make(temporary);
        match &result {
            Err(Error::Posix { errno: Errno::EXIST, .. }) => {}
            Err(_) => break,
            Ok(()) => {
                let Err(error) = fs.rename(temporary, place, at) else { return Ok(()) };
                return Err(match fs.unlink(temporary, at) {
                    Ok(()) => error,
                    Err(stays) => {
                        let what = format!("{error}; removing the temporary name {name}");
                        Error::io(what, stays.errno())
                    }
                });
            }
        }
    }
    result
}
