//! Directories that are being filled.
//!
//! A directory gets its attributes when everything in it was made, because making things changes
//! its times and a read-only mode would stop the making. The walk and every job hold a
//! [`ExtractDirectoryRef`]; the last one that goes applies the attributes and closes the directory,
//! on whatever thread that is. A directory does not keep the one above it: that one has its entry
//! already, so they may finish in any order. The top alone is held by the extraction until all
//! threads are done, because it keeps others out.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use offshoot_vfs::{Attr, Errno, FileId, SafeName};
use rustix::fs::{self, AtFlags, CWD, Mode, OFlags};

use super::attributes::{MadeFile, MadeHandle, with_own_path};
use super::context::{ExtractTrouble, TransferContext};
use super::existing;

/// A directory of the destination.
struct ExtractDirectory {
    fd: File,
    /// It was made here, and no other user can enter it.
    is_private: bool,
    file: FileId,
    /// What it is to become; `None` for a top that has nothing to become.
    attr: Option<Attr>,
    parent: FileId,
    name: Box<[u8]>,
}

/// A share in a directory; see the top of this file.
pub(crate) struct ExtractDirectoryRef<'a> {
    context: &'a TransferContext<'a>,
    /// Taken out only while it is dropped.
    directory: Option<Arc<ExtractDirectory>>,
}

impl<'a> ExtractDirectoryRef<'a> {
    /// The destination itself, made with mode 0700.
    pub(crate) fn top(
        context: &'a TransferContext<'a>,
        fd: File,
        file: FileId,
        attr: Option<Attr>,
    ) -> Self {
        Self::with(context, fd, file, attr, true)
    }

    /// A directory that was there, to which others may have access.
    pub(crate) fn shared(
        context: &'a TransferContext<'a>,
        fd: File,
        file: FileId,
        attr: Option<Attr>,
    ) -> Self {
        Self::with(context, fd, file, attr, false)
    }

    fn with(
        context: &'a TransferContext<'a>,
        fd: File,
        file: FileId,
        attr: Option<Attr>,
        is_private: bool,
    ) -> Self {
        let name = Box::default();
        let directory = ExtractDirectory { fd, is_private, file, attr, parent: file, name };
        Self { context, directory: Some(Arc::new(directory)) }
    }

    /// Makes a directory in this one, for its owner alone until it is finished. A copy takes
    /// the one that is there.
    pub(crate) fn make(&self, name: &SafeName, attr: &Attr) -> Result<Self, ExtractTrouble> {
        let fail = |errno| ExtractTrouble::Host("cannot make the directory", errno);
        let mut is_resumed = false;
        let mut is_private = match fs::mkdirat(self.fd(), &**name, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => match self.context.overwrite {
                Some(overwrite) => {
                    is_resumed = overwrite.is_resumed;
                    false
                }
                None => return Err(fail(Errno::EXIST)),
            },
            Err(errno) => return Err(fail(errno)),
        };
        if is_resumed {
            // It may have its permissions already, which may keep us out.
            with_own_path(self.fd(), name, |path| {
                fs::chmodat(CWD, path, Mode::RWXU, AtFlags::empty())
            })
            .map_err(fail)?;
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = fs::openat(self.fd(), &**name, flags, Mode::empty()).map_err(fail)?;
        if is_resumed {
            Self::unshare_always(&fd).map_err(fail)?;
            is_private = true;
        } else if is_private && !self.is_private() {
            self.unshare(&fd).map_err(fail)?;
        }
        let directory = ExtractDirectory {
            fd: fd.into(),
            is_private,
            file: attr.file,
            attr: Some(*attr),
            parent: self.file(),
            name: (&**name).into(),
        };
        Ok(Self { context: self.context, directory: Some(Arc::new(directory)) })
    }

    fn directory(&self) -> &ExtractDirectory {
        self.directory.as_ref().expect("only `drop` takes it, and nothing runs after it")
    }

    /// The directory in the destination.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.directory().fd.as_fd()
    }

    /// Whether no other user can enter it.
    pub(crate) fn is_private(&self) -> bool {
        self.directory().is_private
    }

    /// Takes off a new file or directory what this one gave to it: a set-group-id bit, lists.
    pub(crate) fn unshare(&self, file: impl AsFd) -> rustix::io::Result<()> {
        if self.is_private() { Ok(()) } else { Self::unshare_always(file) }
    }

    fn unshare_always(file: impl AsFd) -> rustix::io::Result<()> {
        for list in ["system.posix_acl_access", "system.posix_acl_default"] {
            match fs::fremovexattr(&file, list) {
                Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
        let is_directory = fs::FileType::from_raw_mode(fs::fstat(&file)?.st_mode).is_dir();
        fs::fchmod(&file, Mode::from_raw_mode(if is_directory { 0o700 } else { 0o600 }))
    }

    /// Makes something under `name`. A copy removes what else has the name.
    ///
    /// The inner error is that of the host.
    pub(crate) fn make_named<T>(
        &self,
        name: &SafeName,
        make: impl Fn() -> rustix::io::Result<T>,
    ) -> Result<rustix::io::Result<T>, ExtractTrouble> {
        let result = make();
        let Some(overwrite) = self.context.overwrite else { return Ok(result) };
        if !matches!(result, Err(Errno::EXIST)) {
            return Ok(result);
        }
        Ok(existing::remove(self.context, self, name, &overwrite)?.and_then(|()| make()))
    }

    /// The directory in the volume.
    pub(crate) fn file(&self) -> FileId {
        self.directory().file
    }
}

impl Clone for ExtractDirectoryRef<'_> {
    fn clone(&self) -> Self {
        Self { context: self.context, directory: self.directory.clone() }
    }
}

impl Drop for ExtractDirectoryRef<'_> {
    fn drop(&mut self) {
        // Of several threads that let go at once, exactly one gets it.
        let Some(directory) = self.directory.take().and_then(Arc::into_inner) else { return };
        let Some(attr) = &directory.attr else { return };
        // A half done directory stays closed to other users, so that a later run can go on there.
        if self.context.is_extraction() && self.context.problems.is_stopped() {
            return;
        }
        let made = MadeFile {
            handle: MadeHandle::Open(directory.fd.as_fd()),
            attr,
            mode_now: directory.is_private.then_some(0o700),
            parent: directory.parent,
            name: &directory.name,
        };
        if let Err(error) = made.apply(self.context) {
            let path = self.context.path(directory.parent, &directory.name);
            self.context.problems.unreadable(&path, &error);
        }
    }
}
