//! The engine as the explorer sees it, and the volumes it is explored on.

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{MkfsOptions, OpenOptions, SubvolumeId, Volume, mkfs};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::crash::{Devices, Engine, FsyncIs};
use offshoot_vfs::{FileSystem, FileSystemMut, Result, Timestamp};
use uuid::Uuid;

/// How large a member is, in bytes.
pub(crate) const MEMBER_BYTES: u64 = 160 << 20;

/// The engine under test.
pub(crate) struct Ours;

impl Engine for Ours {
    fn open(&self, devices: Devices) -> Result<Box<dyn FileSystem>> {
        let volume = Volume::open(devices, &OpenOptions::default())?;
        Ok(Box::new(volume.filesystem(SubvolumeId::FS)?))
    }

    fn open_writable(&self, devices: Devices) -> Result<Box<dyn FileSystemMut>> {
        let volume = Volume::open_writable(devices, &OpenOptions::default())?;
        Ok(Box::new(volume.filesystem(SubvolumeId::FS)?))
    }

    fn check(&self, devices: Devices) -> Result<()> {
        let volume = Volume::open(devices, &OpenOptions::default())?;
        let mut trees = Vec::new();
        volume.for_each_item(volume.root_tree(), Key::MIN, |key, _| {
            if key.item_type == ItemType::ROOT_ITEM {
                trees.push(TreeId(key.objectid));
            }
            ControlFlow::Continue(())
        })?;
        for id in trees.into_iter().chain([TreeId::CHUNK]) {
            let visit = |_: Key, _: &[u8]| ControlFlow::Continue(());
            volume.for_each_item(volume.tree(id)?, Key::MIN, visit)?;
        }
        Ok(())
    }

    fn fsync_is(&self) -> FsyncIs {
        FsyncIs::Commit
    }
}

/// An empty volume over new members, with these profiles of metadata and data. No two runs give it the
/// same id, because the kernel mounts no two volumes with one.
pub(crate) fn volume(seed: u64, members: usize, profiles: Option<[Profile; 2]>) -> Devices {
    let new = || Arc::new(MemoryDevice::sparse(MEMBER_BYTES)) as Arc<dyn BlockDevice>;
    let devices: Devices = (0..members).map(|_| new()).collect();
    let id = u128::from(seed) << 64 | u128::from(std::process::id()) << 8 | members as u128;
    let mut options = MkfsOptions::new(Uuid::from_u128(id), Timestamp::default());
    if let Some([metadata, data]) = profiles {
        (options.metadata, options.data) = (Some(metadata), Some(data));
    }
    mkfs(&devices, &options).expect("a volume");
    devices
}
