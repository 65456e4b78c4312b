//! Makes volumes.
//!
//! A new volume is the smallest complete one: one block group of each kind, and the trees that
//! describe them. Everything is known before the first byte is written, so the trees are written in
//! their final form, and nothing is edited:
//!
//! ```text
//! options, sizes of the devices
//!    -> layout    chunks: the stripes of each on the devices
//!    -> trees     the items of every tree, and the blocks that hold them
//!    -> write     wipe, blocks, barrier, superblocks, barrier
//! ```
//!
//! ```text
//! device   |reserved|  system  | metadata | data |  not allocated ...
//!          0       1 MiB
//!              ^ superblock at 64 KiB       copies at 64 MiB and 256 GiB, whatever lies there
//! ```
//!
//! A *derived* value follows from the filesystem id and the seed alone, so the same options make
//! the same bytes.
//!
//! Invariants:
//!
//! 1. There is one transaction, [`GENERATION`], and every structure has its number.
//! 2. A tree block never lies where a superblock is, on any of its stripes. The free-space tree
//!    counts those places as free all the same, as in the kernel.
//! 3. A superblock is written only after everything that it leads to is durable, and after the old
//!    contents of the devices are no longer recognisable. A crash leaves the devices empty, with
//!    the new volume, or with some members of it.
//!
//! This module writes only empty volumes. Files get into them through the engine.

mod features;
mod layout;
mod options;
mod trees;
mod write;

use std::sync::Arc;

use offshoot_btrfs_format::Generation;
use offshoot_device::BlockDevice;
use offshoot_kit::new_volume;
use offshoot_vfs::{Errno, Error, Result};
use uuid::Uuid;

pub use features::MkfsFeatures;
use layout::Layout;
pub use options::MkfsOptions;
use options::VolumeSpec;
use trees::NewTrees;

/// The transaction that makes a volume, its first.
const GENERATION: Generation = Generation(1);

/// Makes a volume over `devices`, and returns its filesystem id. The devices get the numbers 1, 2,
/// ... in their order. Their old contents are lost.
///
/// # Errors
/// [`Error::Posix`] when the options contradict each other (`EINVAL`), when the devices are too few
/// or too small (`EINVAL`, `ENOSPC`), or when a device is in use and `force` is not set (`EEXIST`).
/// [`Error::Unsupported`] for a profile or feature that this engine cannot write.
pub fn mkfs(devices: &[Arc<dyn BlockDevice>], options: &MkfsOptions) -> Result<Uuid> {
    let PlannedVolume { spec, layout, trees } = PlannedVolume::of(devices, options)?;
    write::volume(devices, &spec, &layout, &trees)?;
    Ok(spec.fsid)
}

/// Fails where [`mkfs`] fails before it writes, and writes nothing itself. It is for callers that
/// change the devices before they make the volume.
///
/// # Errors
/// As [`mkfs`].
pub fn check_mkfs(devices: &[Arc<dyn BlockDevice>], options: &MkfsOptions) -> Result<()> {
    PlannedVolume::of(devices, options).map(drop)
}

/// A volume before its first byte is written.
struct PlannedVolume {
    spec: VolumeSpec,
    layout: Layout,
    trees: NewTrees,
}

impl PlannedVolume {
    fn of(devices: &[Arc<dyn BlockDevice>], options: &MkfsOptions) -> Result<Self> {
        for (i, device) in devices.iter().enumerate() {
            if devices[..i].iter().any(|other| Arc::ptr_eq(other, device)) {
                return Err(invalid(format!("{} is given twice", device.name())));
            }
        }
        let sizes: Vec<u64> = devices.iter().map(|device| device.size_bytes()).collect();
        let spec = options.resolve(sizes.len())?;
        let layout = Layout::of(&spec, &sizes)?;
        let trees = NewTrees::of(&spec, &layout)?;
        if !options.is_forced {
            for device in devices {
                new_volume::refuse_used(&**device)?;
            }
        }
        Ok(Self { spec, layout, trees })
    }
}

fn invalid(what: impl Into<String>) -> Error {
    Error::posix(Errno::INVAL, what)
}
