//! A volume that is open already, because this process serves a mount of it: what verbs have
//! instead of opening one.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use offshoot_fuse::KernelCaches;
use offshoot_vfs::{Error, FileId, Place};

use crate::args::OpenArguments;
use crate::edit::Caller;
use crate::place::Place as NamedPlace;
use crate::rights::Rights;
use crate::session::OpenTree;

/// A volume that is mounted, for a verb that somebody else asks for.
pub(crate) struct Live {
    /// The tree of files that is mounted.
    pub(crate) fs: OpenTree,
    /// The image or block device.
    pub(crate) volume: PathBuf,
    /// The number of the subvolume that was mounted first.
    pub(crate) first: u64,
    /// The options that it was mounted with first.
    pub(crate) options: Vec<String>,
    /// What the kernel has in its caches.
    pub(crate) caches: KernelCaches,
    /// Who asks.
    pub(crate) caller: Caller,
    /// What the caller may do in it; `None` for root, who may do everything.
    pub(crate) rights: Option<Rights>,
    /// Whether he still waits for it.
    pub(crate) is_wanted: Box<dyn Fn() -> bool + Send + Sync>,
}

impl OpenArguments {
    /// The place that `text` names. In what is mounted it is a path, whatever it looks like.
    pub(crate) fn place(&self, text: &OsStr) -> NamedPlace {
        match &self.live {
            Some(live) => {
                NamedPlace { volume: live.volume.clone(), path: text.as_bytes().to_vec() }
            }
            None => NamedPlace::parse(text),
        }
    }

    /// What the caller may do, where that is to be asked: not on an image, which the caller opened.
    pub(crate) fn rights(&self) -> Option<&Rights> {
        self.live.as_ref().and_then(|live| live.rights.as_ref())
    }

    /// The subvolume at `place` is about to be deleted: programs that use it can go on. Its root,
    /// if they could and it is not damaged.
    pub(crate) fn deleting(&self, place: Place<'_>) -> Result<Option<FileId>, Error> {
        let Some(live) = &self.live else { return Ok(None) };
        let Ok(root) = live.fs.lookup(place.dir, place.name) else { return Ok(None) };
        // What cannot be opened nobody uses. The kernel may forget it at any moment, so it is open
        // before that is asked.
        if live.fs.open(root).is_err() {
            return Ok(None);
        }
        if !live.caches.hold(root) {
            live.fs.release(root)?;
        }
        Ok(Some(root))
    }

    /// Waits a moment for the kernel to let go of the subvolume with this root, which was deleted.
    /// When programs use it, it goes with the last of them.
    pub(crate) fn deleted(&self, root: Option<FileId>) {
        /// The kernel says so as soon as it was told that the name is gone.
        const PATIENCE: Duration = Duration::from_secs(1);
        if let (Some(live), Some(root)) = (&self.live, root) {
            let _is_in_use = !live.caches.wait_until_forgotten(root, PATIENCE);
        }
    }

    /// A name has come or gone. Who calls this holds nothing that a request of the kernel may wait
    /// for.
    pub(crate) fn changed(&self, place: Place<'_>) -> Result<(), Error> {
        match &self.live {
            Some(live) => live.caches.forget_name(place.dir, place.name),
            None => Ok(()),
        }
    }
}
