//! Makes volumes.
//!
//! A new volume is the smallest complete one, laid out as `mkfs.xfs` lays it out. Everything is
//! known before the first byte is written, so each structure is written once, in its final form:
//!
//! ```text
//! options, size of the device
//!    -> layout    sizes of groups and log, the superblock      (least_log)
//!    -> group     what owns the blocks of each group, and its headers and trees
//!    -> write     wipe, log, groups, superblocks, with barriers between them
//! ```
//!
//! ```text
//! group    | headers | roots of trees | free list | free ...
//! group 0  | headers | roots of trees | free list | root chunk | free ...
//! middle   | headers | roots of trees | log | free list | free ...
//! ```
//!
//! A *derived* value, the generation of an inode, follows from the id and the seed alone, so the
//! same options make the same bytes.
//!
//! Invariants:
//!
//! 1. No structure has an LSN, and the log holds one record: that of an unmount.
//! 2. The first superblock is written only after everything that it leads to is durable, and after
//!    the old contents of the device are no longer recognisable. A crash leaves the old contents,
//!    nothing, or the new volume.

mod features;
mod group;
mod layout;
mod least_log;
mod options;
mod write;

use offshoot_device::BlockDevice;
use offshoot_kit::new_volume;
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::AgNumber;
use offshoot_xfs_format::superblock::XfsSuperblock;
use uuid::Uuid;

pub use features::XfsMkfsFeatures;
use group::NewXfsGroup;
use layout::NewXfsLayout;
pub use options::{XfsMkfsOptions, XfsStripe};

/// Makes a volume on `device`, and returns its id. The old contents of the device are lost.
///
/// # Errors
/// [`Error::Posix`] when the options contradict each other (`EINVAL`), when the device is too small
/// for them (`ENOSPC`), or when it is in use and `is_forced` is not set (`EEXIST`).
/// [`Error::Unsupported`] for a feature that this engine cannot make.
pub fn mkfs_xfs(device: &dyn BlockDevice, options: &XfsMkfsOptions) -> Result<Uuid> {
    let layout = NewXfsLayout::of(options, device)?;
    if !options.is_forced {
        new_volume::refuse_used(device)?;
    }
    write::volume(device, options, &layout)?;
    Ok(options.uuid)
}

/// Writes the empty groups that `superblock` has from group `first` on, without their copies of the
/// superblock, and makes them durable.
///
/// # Errors
/// Those of the device.
pub(crate) fn write_empty_groups(
    device: &dyn BlockDevice,
    superblock: &XfsSuperblock,
    first: u32,
) -> Result<()> {
    let layout = NewXfsLayout::of_volume(superblock)?;
    for ag in (first..layout.geometry.ag_count).map(AgNumber) {
        for (place, bytes) in NewXfsGroup::of(&layout, ag).pieces(&layout)? {
            new_volume::write(device, place, &bytes)?;
        }
    }
    new_volume::flush(device)
}

fn invalid(what: impl Into<String>) -> Error {
    Error::posix(Errno::INVAL, what)
}
