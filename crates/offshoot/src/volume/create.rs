//! Making volumes.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{MkfsOptions, mkfs};
use offshoot_device::{BlockDevice, FileDevice, VolumeFormat};
use offshoot_vfs::{Error, Result};
use offshoot_xfs::{XfsMkfsOptions, mkfs_xfs};
use uuid::Uuid;

use super::{Volume, only_in_btrfs};
use crate::CreateOptions;

impl Volume {
    /// Makes a volume of `size_bytes` in the image file at `path`, and opens it. A file that exists
    /// is kept if nothing that is known is in it, and made longer where needed.
    ///
    /// # Errors
    /// `EEXIST` when something is in the file, `ENOSPC` when it is too small, `EINVAL` for options
    /// that the format has not, and those of the host. A file that this call made is removed then.
    pub fn create(
        path: impl AsRef<Path>,
        size_bytes: u64,
        options: &CreateOptions,
    ) -> Result<Self> {
        let path = path.as_ref();
        let is_new = !path.try_exists().unwrap_or(true);
        let device = FileDevice::create(path, size_bytes)
            .map_err(|error| Error::io(path.display().to_string(), error))?;
        let made = Self::create_on(vec![Arc::new(device)], options);
        if made.is_err() && is_new {
            // The failure that led here is what the caller has to know of.
            let _ = fs::remove_file(path);
        }
        made
    }

    /// Makes a volume over all of `devices`, and opens it.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_on(devices: Vec<Arc<dyn BlockDevice>>, options: &CreateOptions) -> Result<Self> {
        let mut opened = options.opened.clone().write(true);
        opened.subvolume = None;
        let id = options.id.map_or_else(Uuid::new_v4, Uuid::from_bytes);
        let time = opened.time.unwrap_or_else(offshoot_vfs::Timestamp::now);
        let (label, is_forced, root_owner) =
            (options.label.clone(), options.is_forced, opened.owner);
        match options.format {
            VolumeFormat::Btrfs => {
                let new = MkfsOptions::new(id, time);
                mkfs(&devices, &MkfsOptions { label, is_forced, root_owner, ..new })?;
            }
            VolumeFormat::Xfs => {
                let [device] = &devices[..] else {
                    return Err(only_in_btrfs("another number of devices than one"));
                };
                opened.for_xfs()?;
                let new = XfsMkfsOptions::new(id, time);
                mkfs_xfs(&**device, &XfsMkfsOptions { label, is_forced, root_owner, ..new })?;
            }
        }
        Self::over(devices, &opened)
    }
}
