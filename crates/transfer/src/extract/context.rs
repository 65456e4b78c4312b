//! What all threads of an extraction share.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use offshoot_vfs::escape::message;
use offshoot_vfs::path::climb;
use offshoot_vfs::{
    self as vfs, Attr, Errno, Error, FileId, FileSystemMut, OsReason, SafeName, Structure,
};
use rustix::fs::{self, Mode, OFlags};

use super::directory::ExtractDirectoryRef;
use super::links::LinkTable;
use super::onto::Overwrite;
use super::problems::{Problems, Unapplied};
use crate::TransferProgress;
use crate::copy::PreservedAttribute;

/// How long a path may be that is made only to be shown.
const SHOWN_PATH_MAX: usize = 64 * 1024;

/// How long a path may be that is followed in the destination: the greatest depth, with a
/// name of 255 bytes on every level.
const FOLLOWED_PATH_MAX: usize = 4 << 20;

/// Why a file could not be extracted.
#[derive(Debug)]
pub(crate) enum ExtractTrouble {
    /// The volume cannot give it.
    Volume(Error),
    /// The host cannot take it; the text is what was being done.
    Host(&'static str, Errno),
    /// The host could take it, and something of value would be lost; the text says what.
    Refused(String),
    /// Another name of the same inode could not be read before.
    OtherName,
}

impl From<Error> for ExtractTrouble {
    fn from(error: Error) -> Self {
        Self::Volume(error)
    }
}

impl ExtractTrouble {
    /// For errors of the standard library, which carries the same numbers.
    pub(crate) fn from_io(what: &'static str, error: &std::io::Error) -> Self {
        let errno = error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
        Self::Host(what, errno)
    }
}

/// How much was extracted.
#[derive(Default)]
pub struct TransferCounters {
    /// Directories, the top included.
    pub directories: AtomicU64,
    /// Names of everything else.
    pub files: AtomicU64,
    /// Bytes of data, holes not counted.
    pub bytes: AtomicU64,
}

impl TransferCounters {
    /// Adds what another part did.
    pub(crate) fn add(&self, other: &Self) {
        let pairs = [
            (&self.directories, &other.directories),
            (&self.files, &other.files),
            (&self.bytes, &other.bytes),
        ];
        for (sum, more) in pairs {
            sum.fetch_add(more.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// What all threads of an extraction or a copy share.
pub(crate) struct TransferContext<'a> {
    /// The volume.
    pub(crate) fs: &'a dyn FileSystemMut,
    /// Where the extraction starts in it.
    pub(crate) top: FileId,
    /// The path of `top` as the caller gave it, without a `/` at its end.
    pub(crate) prefix: &'a [u8],
    /// Everything that goes wrong.
    pub(crate) problems: &'a Problems<'a>,
    /// The directory that is extracted into, unless it is an archive.
    pub(crate) destination: OnceLock<File>,
    /// What may be there before; an extraction finds nothing.
    pub(crate) overwrite: Option<Overwrite<'a>>,
    /// Owner and group of new files in the destination.
    pub(crate) owner_of_new: Option<(u32, u32)>,
    /// Names of inodes that have several.
    pub(crate) links: Mutex<LinkTable>,
    /// How far it is.
    pub(crate) progress: &'a dyn TransferProgress,
    /// Totals.
    pub(crate) counters: TransferCounters,
}

impl<'a> TransferContext<'a> {
    /// An extraction from `top`.
    pub(crate) fn new(
        fs: &'a dyn FileSystemMut,
        top: FileId,
        prefix: &'a [u8],
        problems: &'a Problems<'a>,
        progress: &'a dyn TransferProgress,
    ) -> Self {
        Self {
            fs,
            top,
            prefix,
            problems,
            destination: OnceLock::new(),
            overwrite: None,
            owner_of_new: None,
            links: Mutex::new(LinkTable::default()),
            progress,
            counters: TransferCounters::default(),
        }
    }

    /// Says which directory the top became.
    pub(crate) fn set_destination(
        &self,
        directory: &ExtractDirectoryRef<'_>,
    ) -> Result<(), ExtractTrouble> {
        let fd = directory.fd().try_clone_to_owned();
        let fd =
            fd.map_err(|error| ExtractTrouble::from_io("cannot keep the directory open", &error))?;
        self.destination.get_or_init(|| fd.into());
        Ok(())
    }

    /// Whether it is an extraction, into a directory of its own, and no copy.
    pub(crate) fn is_extraction(&self) -> bool {
        self.overwrite.is_none_or(|overwrite| overwrite.is_resumed)
    }

    /// The attributes that a file with the attributes `attr` gets.
    pub(crate) fn wanted(&self, attr: &Attr) -> Attr {
        self.overwrite.map_or(*attr, |overwrite| overwrite.preserve.of(attr))
    }

    /// Whether extended attributes are wanted.
    pub(crate) fn wants_xattrs(&self) -> bool {
        self.overwrite.is_none_or(|overwrite| overwrite.preserve.keeps(PreservedAttribute::Xattr))
    }

    /// The path in the volume of something at `path` below the top.
    pub(crate) fn shown(&self, path: &[u8]) -> Vec<u8> {
        [self.prefix, b"/", path].concat()
    }

    /// The path in the volume of `name` in `parent`, for messages. Only the name is sure to be
    /// in it: the way to it is read from the volume, which may be what is damaged.
    pub(crate) fn path(&self, parent: FileId, name: &[u8]) -> Vec<u8> {
        match climb(self.fs, self.top, parent, SHOWN_PATH_MAX) {
            Ok(Some(path)) if path.is_empty() => self.shown(name),
            Ok(Some(path)) => self.shown(&[&path[..], b"/", name].concat()),
            Ok(None) | Err(_) => [b".../", name].concat(),
        }
    }

    /// The path on the host of `name` in what became of `parent`, for messages.
    pub(crate) fn host_path(&self, parent: FileId, name: &SafeName) -> PathBuf {
        let top = self.overwrite.map_or(Path::new(""), |overwrite| overwrite.parent);
        let below = climb(self.fs, self.top, parent, SHOWN_PATH_MAX).ok().flatten();
        let below = below.unwrap_or_else(|| b"...".to_vec());
        top.join(OsStr::from_bytes(&below)).join(OsStr::from_bytes(name))
    }

    /// Whether `name` at `path` below the top is left out. A file that the caller named has been
    /// asked about, and `name` is that of its copy.
    pub(crate) fn leaves_out(&self, name: &[u8], path: &[u8]) -> bool {
        let leaves_out =
            |overwrite: Overwrite<'_>| overwrite.manner.leaves_out(name, || path.to_vec());
        self.overwrite.filter(|overwrite| !overwrite.is_named).is_some_and(leaves_out)
    }

    /// Tells that `name` in `parent` was made, if that is asked for.
    pub(crate) fn tell(&self, parent: FileId, name: &SafeName) {
        if let Some(overwrite) = self.overwrite {
            let to = || self.host_path(parent, name).into_os_string().into_encoded_bytes();
            overwrite.manner.tell(|| self.path(parent, name), to);
        }
    }

    /// Reports that the file at `path` (as shown) is not there as it should be.
    pub(crate) fn report(&self, path: &[u8], trouble: &ExtractTrouble) {
        match trouble {
            ExtractTrouble::Volume(error) => self.problems.unreadable(path, error),
            ExtractTrouble::OtherName => self.problems.unreadable(
                path,
                &vfs::Error::corrupt(Structure::File, "another name of it could not be read"),
            ),
            ExtractTrouble::Refused(why) => self.problems.not_made(path, &message(why)),
            ExtractTrouble::Host(what, errno) => {
                if self.problems.is_stopped() {
                    return;
                }
                let reason = format!("{what}: {}", OsReason(errno));
                self.problems.not_made(path, &message(&reason));
                // These come back for every file that follows.
                if matches!(*errno, Errno::NOSPC | Errno::DQUOT | Errno::IO | Errno::ROFS) {
                    self.problems.stop();
                }
            }
        }
    }

    /// Calls with the directory of the destination that became of `directory`, reached from
    /// the top name by name, never through a symbolic link.
    pub(crate) fn with_directory<T>(
        &self,
        directory: FileId,
        call: impl FnOnce(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> rustix::io::Result<T> {
        let top = self.destination.get().ok_or(Errno::BADF)?;
        let path = climb(self.fs, self.top, directory, FOLLOWED_PATH_MAX)
            .map_err(|error| error.errno())?
            .ok_or(Errno::NAMETOOLONG)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at = None;
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let name = SafeName::new(name).map_err(|error| error.errno())?;
            let from = at.as_ref().map_or(top.as_fd(), AsFd::as_fd);
            at = Some(fs::openat(from, &*name, flags, Mode::empty())?);
        }
        call(at.as_ref().map_or(top.as_fd(), AsFd::as_fd))
    }

    /// Notes an attribute of `name` in `parent` that could not be applied.
    pub(crate) fn unapplied(&self, kind: Unapplied, parent: FileId, name: &[u8], errno: Errno) {
        self.problems.unapplied(kind, || self.path(parent, name), errno);
    }

    /// Counts a file.
    pub(crate) fn count_file(&self) {
        self.counters.files.fetch_add(1, Ordering::Relaxed);
        self.progress.add_file();
    }

    /// Counts data.
    pub(crate) fn count_bytes(&self, bytes: usize) {
        self.counters.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.progress.add_bytes(bytes as u64);
    }
}
