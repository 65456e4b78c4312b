//! The engine as the explorer sees it, and the volumes it is explored on.

use std::sync::Arc;

use offshoot_btrfs::{MkfsOptions, OpenOptions, SubvolumeId, Volume, mkfs};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::crash::{Devices, Engine, FsyncIs};
use offshoot_vfs::{FileSystem, FileSystemMut, Result, Timestamp};
use uuid::Uuid;

use crate::accounts;

/// How large a member is, in bytes.
pub(crate) const MEMBER_BYTES: u64 = 160 << 20;

/// The engine under test. It commits when it is asked to, or when too much was changed, but not by the
/// clock: the same each time.
pub(crate) struct Ours {
    /// What may be changed before it commits by itself, in bytes.
    pub(crate) dirty_bytes: u64,
}

/// The engine as it is by default.
pub(crate) const OURS: Ours = Ours { dirty_bytes: 64 << 20 };

/// The engine that commits by itself after almost every change.
pub(crate) const EAGER: Ours = Ours { dirty_bytes: 32 << 10 };

impl Engine for Ours {
    fn open(&self, devices: Devices) -> Result<Box<dyn FileSystem>> {
        let volume = Volume::open(devices, &OpenOptions::default())?;
        Ok(Box::new(volume.filesystem(SubvolumeId::FS)?))
    }

    fn open_writable(&self, devices: Devices) -> Result<Box<dyn FileSystemMut>> {
        let dirty_bytes = self.dirty_bytes;
        let options = OpenOptions { commit_interval: None, dirty_bytes, ..OpenOptions::default() };
        let volume = Volume::open_writable(devices, &options)?;
        Ok(Box::new(volume.filesystem(SubvolumeId::FS)?))
    }

    fn check(&self, devices: Devices) -> Result<()> {
        accounts::check(&Volume::open(devices, &OpenOptions::default())?)
    }

    fn fsync_is(&self) -> FsyncIs {
        FsyncIs::Commit
    }
}

/// What a volume is made of.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) members: usize,
    /// The profiles of metadata and data.
    pub(crate) profiles: [Profile; 2],
}

/// One member, as it is by default.
pub(crate) const ONE: Shape = Shape { members: 1, profiles: [Profile::Dup, Profile::Single] };

/// Several members.
pub(crate) const SETS: [Shape; 4] = [
    Shape { members: 2, profiles: [Profile::Raid1, Profile::Raid1] },
    Shape { members: 2, profiles: [Profile::Raid1, Profile::Raid0] },
    Shape { members: 4, profiles: [Profile::Raid10, Profile::Raid10] },
    Shape { members: 3, profiles: [Profile::Raid1c3, Profile::Single] },
];

/// An empty volume over new members. No two runs give it the same id, because the kernel mounts no two
/// volumes with one.
pub(crate) fn volume(seed: u64, Shape { members, profiles }: Shape) -> Devices {
    let new = || Arc::new(MemoryDevice::sparse(MEMBER_BYTES)) as Arc<dyn BlockDevice>;
    let devices: Devices = (0..members).map(|_| new()).collect();
    let process = u128::from(std::process::id());
    let id = u128::from(seed) << 64 | process << 8 | members as u128;
    let mut options = MkfsOptions::new(Uuid::from_u128(id), Timestamp::default());
    [options.metadata, options.data] = profiles.map(Some);
    mkfs(&devices, &options).expect("a volume");
    devices
}
