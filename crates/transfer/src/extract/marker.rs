//! The file in a destination that says that it is half done.
//!
//! It is made before anything else and removed when everything is there, so it is left where an
//! extraction was interrupted, ran out of space or was killed. Until then the destination is for
//! its owner alone, so all files in it are files that this extraction made. One of the same place
//! in the same state goes on there: a file whose size and time are right has its data, because its
//! time is set last, and gets its attributes once more; any other one is made anew.
//!
//! ```text
//! 8f6f2c1e-... 5 256              volume, subvolume and inode
//! generation 17, log 30408704, boot 1b4e...   the commit, the log since then, the run of the host
//! ```

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use offshoot_vfs::{Attr, FileType as Kind};
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Its name.
pub(crate) const NAME: &str = ".offshoot-extract";

/// The longest one.
const LEN_MAX: u64 = 4096;

/// What a mark says.
pub struct Mark {
    /// The file or directory that is extracted.
    pub place: String,
    /// The state of the volume.
    pub state: String,
}

impl Mark {
    fn text(&self) -> String {
        format!("{}\n{}\n", self.place, self.state)
    }

    /// Whether `found` is this mark.
    pub(super) fn is(&self, found: &[u8]) -> bool {
        found == self.text().as_bytes()
    }

    /// The refusal of the destination `path` with the mark `found`, which is another one.
    pub(super) fn refuse(&self, found: &[u8], path: &Path) -> io::Error {
        let path = path.display();
        let is_here =
            found.strip_prefix(self.place.as_bytes()).is_some_and(|r| r.starts_with(b"\n"));
        let what = if is_here {
            format!(
                "an extraction was left half done in {path}, and the volume was changed, or \
                 this machine was started, since; name another directory, or remove this one \
                 and begin again"
            )
        } else {
            format!(
                "an extraction of another place was left half done in {path}; \
                 name another directory"
            )
        };
        io::Error::new(io::ErrorKind::DirectoryNotEmpty, what)
    }
}

/// The mark in `directory`, if there is one. It is empty where the extraction was killed before it
/// made anything else.
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
pub(super) fn write(directory: impl AsFd, mark: &Mark) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = fs::openat(directory, NAME, flags, Mode::RUSR | Mode::WUSR)?;
    File::from(file).write_all(mark.text().as_bytes())
}

/// Removes it.
pub(super) fn remove(directory: impl AsFd) -> io::Result<()> {
    Ok(fs::unlinkat(directory, NAME, AtFlags::empty())?)
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

/// Whether `stat` is a regular file with all data of the one with `attr`.
pub(super) fn is_whole(stat: &Stat, attr: &Attr) -> bool {
    attr.file_type == Kind::Regular
        && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && u64::try_from(stat.st_size) == Ok(attr.size)
        && stat.st_mtime == attr.mtime.secs
        && stat.st_mtime_nsec == i64::from(attr.mtime.nanos)
}
