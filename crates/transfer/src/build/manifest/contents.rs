//! The directory that has the contents of the files of a manifest.
//!
//! The kernel resolves each path with this directory as the root: `/` in a path or a link means it,
//! and `..` ends at it. So a manifest reads nothing outside of it, whatever its paths say and
//! whatever links the directory holds.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use offshoot_vfs::{Attr, Errno, Error, FileType, Nameless, Result as VfsResult};
use rustix::fs::{self, CWD, Mode, OFlags, ResolveFlags};

use super::super::entry::SourceProblem;
use crate::copy::{HostFile, Original, attr_of, doing};
use crate::{Result, TransferFailure};

/// A directory with contents.
pub(super) struct ContentsDirectory {
    path: PathBuf,
    directory: OwnedFd,
}

/// A file in it that was looked at, and not opened.
pub(super) struct ContentsFile {
    pub(super) attr: Attr,
    file: OwnedFd,
}

impl ContentsFile {
    /// The target of a symbolic link.
    pub(super) fn read_link(&self) -> VfsResult<Vec<u8>> {
        let target = fs::readlinkat(&self.file, "", Vec::new());
        Ok(target.map_err(doing("reading the link"))?.into_bytes())
    }
}

impl ContentsDirectory {
    /// The directory at `path`.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = fs::openat(CWD, path, flags, Mode::empty()).map_err(|errno| {
            SourceProblem::Unreadable(errno.into()).at(path.as_os_str().as_bytes())
        })?;
        Ok(Self { path: path.to_path_buf(), directory })
    }

    /// The path of the directory.
    pub(super) fn path(&self) -> &[u8] {
        self.path.as_os_str().as_bytes()
    }

    /// What an error about the file at `path` in it becomes.
    pub(super) fn failed(&self, path: &[u8], error: &Error) -> TransferFailure {
        let shown = [self.path(), b"/", path].concat();
        SourceProblem::Failed(Nameless(error).to_string()).at(&shown)
    }

    /// What is at `path`, if anything is. A link at its end is followed if `follows`.
    pub(super) fn find(&self, path: &[u8], follows: bool) -> Result<Option<ContentsFile>> {
        let mut flags = OFlags::PATH | OFlags::CLOEXEC;
        flags.set(OFlags::NOFOLLOW, !follows);
        let file = match self.resolve(path, flags) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            opened => opened.map_err(|errno| self.failed(path, &doing("looking at it")(errno)))?,
        };
        let attr = fs::fstat(&file).map_err(doing("looking at it")).and_then(|stat| attr_of(&stat));
        let attr = attr.map_err(|error| self.failed(path, &error))?;
        Ok(Some(ContentsFile { attr, file }))
    }

    /// Opens the regular file at `path`, if anything is there.
    pub(super) fn open_regular(&self, path: &[u8]) -> Result<Option<HostFile<'static>>> {
        let failed = |error: &Error| self.failed(path, error);
        let not_regular = || failed(&Error::posix(Errno::INVAL, "it is no regular file"));
        // A device or a FIFO is not opened: that might do something.
        let Some(found) = self.find(path, true)? else { return Ok(None) };
        if found.attr.file_type != FileType::Regular {
            return Err(not_regular());
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = self.resolve(path, flags).map_err(doing("opening it"));
        let file = opened.and_then(|opened| HostFile::of_open(File::from(opened)));
        let file = file.map_err(|error| failed(&error))?;
        if file.attr().file_type == FileType::Regular { Ok(Some(file)) } else { Err(not_regular()) }
    }

    fn resolve(&self, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.is_empty() { b"." } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        fs::openat2(self.directory.as_fd(), path, flags, Mode::empty(), resolve)
    }
}
