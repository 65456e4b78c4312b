//! Making volumes.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{MkfsOptions, mkfs};
use offshoot_device::{BlockDevice, FileDevice};
use offshoot_vfs::{Error, Result};
use uuid::Uuid;

use super::Volume;
use crate::CreateOptions;

impl Volume {
    /// Makes a volume of `size_bytes` in the image file at `path`, and opens it for writing. A file
    /// that exists is kept if nothing that is known is in it, and made longer where needed.
    ///
    /// # Errors
    /// `EEXIST` when something is in the file, `ENOSPC` when it is too small, and those of the
    /// host. A file that this call made is removed then.
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

    /// Makes a volume over all of `devices`, and opens it for writing.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_on(devices: Vec<Arc<dyn BlockDevice>>, options: &CreateOptions) -> Result<Self> {
        let mut opened = options.opened.clone().write(true);
        opened.subvolume = None;
        let id = options.id.map_or_else(Uuid::new_v4, Uuid::from_bytes);
        let time = opened.time.unwrap_or_else(offshoot_vfs::Timestamp::now);
        let made = MkfsOptions {
            label: options.label.clone(),
            is_forced: options.is_forced,
            root_owner: opened.owner,
            ..MkfsOptions::new(id, time)
        };
        mkfs(&devices, &made)?;
        Self::over(devices, &opened)
    }
}
