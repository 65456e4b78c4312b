//! A volume that is open already, because this process serves a mount of it. Verbs use it instead
//! of opening the volume.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use offshoot_fuse::KernelCaches;
use offshoot_vfs::{EntryPlace, Error, FileId};

use crate::args::OpenArguments;
use crate::edit::Caller;
use crate::place::VolumePath;
use crate::rights::Rights;
use crate::session::OpenTree;

/// A mounted volume, for a verb that a client asks for.
pub(crate) struct ServedVolume {
    /// The tree of files that is mounted.
    pub(crate) fs: OpenTree,
    /// The image or block device.
    pub(crate) volume: PathBuf,
    /// The id of the subvolume that was mounted first.
    pub(crate) first: u64,
    /// The options of the first mount.
    pub(crate) options: Vec<String>,
    /// The control of the kernel's caches.
    pub(crate) caches: KernelCaches,
    /// The client that asks for the verb.
    pub(crate) caller: Caller,
    /// The rights of the client; `None` for root, which has all of them.
    pub(crate) rights: Option<Rights>,
    /// Whether the client still waits for the result.
    pub(crate) is_wanted: Box<dyn Fn() -> bool + Send + Sync>,
}

impl OpenArguments {
    /// The place that `text` names. On a mounted volume it is always a path, whatever it looks
    /// like.
    pub(crate) fn place(&self, text: &OsStr) -> VolumePath {
        match &self.live {
            Some(live) => {
                VolumePath { volume: live.volume.clone(), path: text.as_bytes().to_vec() }
            }
            None => VolumePath::parse(text),
        }
    }

    /// The rights to check; `None` on an image, which the caller opened with its own rights.
    pub(crate) fn rights(&self) -> Option<&Rights> {
        self.live.as_ref().and_then(|live| live.rights.as_ref())
    }

    /// Prepares to delete the subvolume at `place` so that programs that use it can go on. Returns
    /// its root, or `None` if the volume is not mounted or the root cannot be opened.
    pub(crate) fn deleting(&self, place: EntryPlace<'_>) -> Result<Option<FileId>, Error> {
        let Some(live) = &self.live else { return Ok(None) };
        let Ok(root) = live.fs.lookup(place.dir, place.name) else { return Ok(None) };
        // No program uses a root that cannot be opened. The kernel may forget the root at any
        // moment, so open it before asking the kernel.
        if live.fs.open(root).is_err() {
            return Ok(None);
        }
        if !live.caches.hold(root) {
            live.fs.release(root)?;
        }
        Ok(Some(root))
    }

    /// Waits a moment until the kernel releases the root of a deleted subvolume. If programs still
    /// use it, it is dropped after the last of them.
    pub(crate) fn deleted(&self, root: Option<FileId>) {
        /// The kernel releases the root right after it learns that the name is gone, unless it is
        /// in use.
        const PATIENCE: Duration = Duration::from_secs(1);
        if let (Some(live), Some(root)) = (&self.live, root) {
            let _is_in_use = !live.caches.wait_until_forgotten(root, PATIENCE);
        }
    }

    /// Tells the kernel that a name was added or removed. The caller must not hold a lock that a
    /// request of the kernel may wait for.
    pub(crate) fn changed(&self, place: EntryPlace<'_>) -> Result<(), Error> {
        match &self.live {
            Some(live) => live.caches.forget_name(place.dir, place.name),
            None => Ok(()),
        }
    }
}
