//! The file in a destination that says that it is half done.
//!
//! It is made before anything else and removed when everything is there, so it is left where an
//! extraction was interrupted, ran out of space or was killed.
//! Until then the destination is for its owner alone, so what is in it is what that extraction
//! made. One of the same source goes on there: a file
//! whose size and time are right is whole, because its time is set last; any other one is made
//! anew.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use offshoot_vfs::{Attr, FileType as Kind};
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Its name.
pub(super) const NAME: &str = ".offshoot-extract";

/// The longest one.
const LEN_MAX: u64 = 4096;

/// The mark in `directory`, if there is one.
pub(super) fn read(directory: impl AsFd) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match fs::openat(directory, NAME, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let mut mark = Vec::new();
    file.take(LEN_MAX).read_to_end(&mut mark)?;
    Ok(Some(mark))
}

/// Makes it.
pub(super) fn write(directory: impl AsFd, mark: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = fs::openat(directory, NAME, flags, Mode::RUSR | Mode::WUSR)?;
    File::from(file).write_all(mark)
}

/// Removes it.
pub(super) fn remove(directory: impl AsFd) -> io::Result<()> {
    Ok(fs::unlinkat(directory, NAME, AtFlags::empty())?)
}

/// The refusal of a destination that another extraction left half done.
pub(super) fn other(path: &Path) -> io::Error {
    let path = path.display();
    let what = format!(
        "an extraction of another place was left half done in {path}; name another directory"
    );
    io::Error::new(io::ErrorKind::DirectoryNotEmpty, what)
}

/// The refusal of a destination that others may have put files into.
pub(super) fn not_ours(path: &Path) -> io::Error {
    let path = path.display();
    let what = format!(
        "an extraction was left half done in {path} by another user, or others can write there \
         now; name another directory"
    );
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

/// Whether `stat` is the whole regular file that one with `attr` becomes.
pub(super) fn is_whole(stat: &Stat, attr: &Attr) -> bool {
    attr.file_type == Kind::Regular
        && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && u64::try_from(stat.st_size) == Ok(attr.size)
        && stat.st_mtime == attr.mtime.secs
        && stat.st_mtime_nsec == u64::from(attr.mtime.nanos)
}
