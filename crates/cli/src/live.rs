//! A volume that is open already, because this process serves a mount of it: what verbs have instead of opening one.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use offshoot_btrfs::Filesystem;
use offshoot_fuse::KernelCaches;
use offshoot_vfs::{Error, Place};

use crate::args::OpenArguments;
use crate::edit::Caller;
use crate::place::Place as NamedPlace;

/// A volume that is mounted, for a verb that somebody else asks for.
pub(crate) struct Live {
    /// The tree of files that is mounted.
    pub(crate) fs: Filesystem,
    /// The image or block device.
    pub(crate) volume: PathBuf,
    /// What the kernel has in its caches.
    pub(crate) caches: KernelCaches,
    /// Who asks.
    pub(crate) caller: Caller,
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

    /// A name has come or gone. Who calls this holds nothing that a request of the kernel may wait for.
    pub(crate) fn changed(&self, place: Place<'_>) -> Result<(), Error> {
        match &self.live {
            Some(live) => live.caches.forget_name(place.dir, place.name),
            None => Ok(()),
        }
    }
}
