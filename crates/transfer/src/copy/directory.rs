//! Directories of the volume that are being filled.
//!
//! A directory gets its times when everything in it was made, because making things changes them.
//! The walk and every job hold a [`CopyDirectoryRef`]; the last one that goes finishes the
//! directory, on whatever thread that is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use offshoot_vfs::{Attr, FileId, HeldFile};

use super::{CopySource, CopyTrouble, target};

struct CopyDirectory<'a> {
    /// What it is to become.
    attr: Attr,
    held: HeldFile<'a>,
    is_new: bool,
    /// The directory of the host that it is a copy of.
    host: Option<OwnedFd>,
}

/// A share in a directory; see the top of this file.
pub(super) struct CopyDirectoryRef<'a> {
    source: &'a CopySource<'a>,
    /// Taken out only while it is dropped.
    directory: Option<Arc<CopyDirectory<'a>>>,
}

impl<'a> CopyDirectoryRef<'a> {
    /// The directory `held`, which becomes a copy of one with the attributes `attr`.
    pub(super) fn new(
        source: &'a CopySource<'a>,
        held: HeldFile<'a>,
        attr: Attr,
        is_new: bool,
        host: Option<OwnedFd>,
    ) -> Self {
        Self { source, directory: Some(Arc::new(CopyDirectory { attr, held, is_new, host })) }
    }

    fn directory(&self) -> &CopyDirectory<'a> {
        self.directory.as_ref().expect("only `drop` takes it, and nothing runs after it")
    }

    /// The source that it belongs to.
    pub(super) fn source(&self) -> &'a CopySource<'a> {
        self.source
    }

    /// The directory in the volume.
    pub(super) fn file(&self) -> FileId {
        self.directory().held.file()
    }

    /// The filesystem that holds the directory that this is a copy of.
    pub(super) fn device(&self) -> u64 {
        self.directory().attr.file.dev
    }

    /// The directory of the host that this is a copy of.
    pub(super) fn host_fd(&self) -> BorrowedFd<'_> {
        self.directory().host.as_ref().expect("a walk of the host opened it").as_fd()
    }
}

impl Clone for CopyDirectoryRef<'_> {
    fn clone(&self) -> Self {
        Self { source: self.source, directory: self.directory.clone() }
    }
}

impl Drop for CopyDirectoryRef<'_> {
    fn drop(&mut self) {
        // Of several threads that let go at once, exactly one gets it.
        let Some(directory) = self.directory.take().and_then(Arc::into_inner) else { return };
        let CopyDirectory { attr, held, is_new, .. } = &directory;
        let file = held.file();
        if let Err(error) = target::finish_directory(self.source.into, file, attr, *is_new) {
            self.source.report(file, b".", &CopyTrouble::Target(error));
        }
    }
}
