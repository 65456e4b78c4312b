//! The engine as the explorer sees it, and the volumes that it works on.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offshoot_btrfs::{
    BtrfsVolume, Compress, EngineOptions, MkfsOptions, Reporter, SubvolumeId, VolumeReport, mkfs,
};
use offshoot_btrfs_format::DeviceId;
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::superblock::SUPERBLOCK_OFFSETS;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::crash::{MemberDevices, OpenedVolume, TestedEngine};
use offshoot_vfs::{Result, Timestamp};
use uuid::Uuid;

use crate::accounts;
use crate::subvolume_calls::OurSubvolumes as Calls;

/// The size of a member, in bytes.
const MEMBER_BYTES: u64 = 160 << 20;

/// The engine under test. It commits when the caller asks for it, or when too much has changed. It
/// does not commit by the clock, so that every run is the same.
pub(crate) struct OurEngine {
    /// How many changed bytes make it commit by itself.
    pub(crate) dirty_bytes: u64,
    /// How data is compressed.
    pub(crate) compress: Option<&'static str>,
    /// Whether fsync writes logs.
    pub(crate) has_tree_log: bool,
    /// Whether it trims the volume after it has opened it, and discards what commits free.
    pub(crate) discards: bool,
    /// Whether it moves everything in the volume to another place when it has opened it, and when
    /// it is to drop deleted subvolumes; and gives the first member other sizes meanwhile.
    pub(crate) moves: bool,
}

/// The engine as it is by default.
pub(crate) const OURS: OurEngine = OurEngine {
    dirty_bytes: 64 << 20,
    compress: None,
    has_tree_log: true,
    discards: false,
    moves: false,
};

/// The engine that commits by itself after almost every change: one changed tree block is too much.
pub(crate) const EAGER: OurEngine = OurEngine { dirty_bytes: 8 << 10, ..OURS };

/// The engine whose fsync commits.
pub(crate) const WITHOUT_LOGS: OurEngine = OurEngine { has_tree_log: false, ..OURS };

/// The engine that compresses everything.
pub(crate) const PACKING: OurEngine = OurEngine { compress: Some("zstd:1"), ..OURS };

/// The engine that moves everything.
pub(crate) const MOVING: OurEngine = OurEngine { moves: true, ..OURS };

/// The engine that discards.
pub(crate) const DISCARDING: OurEngine = OurEngine { discards: true, ..OURS };

impl TestedEngine for OurEngine {
    fn open(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        opened(&BtrfsVolume::open(devices, &EngineOptions::default())?)
    }

    fn open_writable(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        let Self { dirty_bytes, has_tree_log, discards, .. } = *self;
        let compress = self
            .compress
            .map(|method| Compress { method: method.parse().expect("a method"), is_forced: true });
        let survived = Arc::<AtomicUsize>::default();
        let count = survived.clone();
        let reporter: Reporter = Arc::new(move |report| {
            if matches!(report, VolumeReport::MemberFailed { .. } | VolumeReport::BadWrite { .. }) {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let options = EngineOptions {
            commit_interval: None,
            dirty_bytes,
            compress,
            has_tree_log,
            is_discarding: discards,
            reporter: Some(reporter),
            ..EngineOptions::default()
        };
        let volume = BtrfsVolume::open_writable(devices, &options)?;
        if discards {
            volume.trim(0..u64::MAX)?;
        }
        let opened = opened(&volume)?;
        if !self.moves {
            return Ok(OpenedVolume { survived, ..opened });
        }
        move_all(&volume)?;
        let calls = Box::new(Calls::calling(volume.filesystem(SubvolumeId::FS)?, move_all));
        Ok(OpenedVolume { survived, subvolumes: calls, ..opened })
    }

    fn check(&self, devices: MemberDevices) -> Result<()> {
        accounts::check(&BtrfsVolume::open(devices, &EngineOptions::default())?)
    }
}

/// Moves everything: out of each block group, and from the end of the first member to its beginning
/// and back.
fn move_all(volume: &BtrfsVolume) -> Result<()> {
    let id = DeviceId(1);
    // After a cut the volume may still have the smallest size.
    let device = volume.members()[0].device.as_ref().expect("no member is missing");
    let bytes = device.size_bytes();
    if volume.members().len() == 1 {
        // A member without a copy of its superblock would not survive a torn one.
        volume.resize_to_minimum(id, SUPERBLOCK_OFFSETS[1] + (1 << 20))?;
    } else {
        volume.resize(id, bytes / 4 * 3)?;
    }
    volume.resize(id, bytes)?;
    let starts: Vec<_> = volume.chunks().map(|chunk| chunk.start).collect();
    starts.into_iter().try_for_each(|start| volume.relocate(start))
}

fn opened(volume: &Arc<BtrfsVolume>) -> Result<OpenedVolume> {
    let fs = volume.filesystem(SubvolumeId::FS)?;
    let survived = Arc::default();
    Ok(OpenedVolume { files: Box::new(fs.clone()), subvolumes: Box::new(Calls::new(fs)), survived })
}

/// The members and the layout of a volume.
#[derive(Clone, Copy)]
pub(crate) struct VolumeShape {
    pub(crate) members: usize,
    /// The profiles of metadata and data.
    pub(crate) profiles: [Profile; 2],
    /// The size of a tree block in bytes. With small blocks, a few files already make a tree of two
    /// levels.
    pub(crate) node_size: u32,
    /// The size of a member, in bytes.
    pub(crate) bytes: u64,
    /// Whether block groups are mixed: each holds data and metadata.
    pub(crate) is_mixed: bool,
}

/// One member, as it is by default.
pub(crate) const ONE: VolumeShape = shape(1, [Profile::Dup, Profile::Single]);

/// One member with small tree blocks.
pub(crate) const SMALL_NODES: VolumeShape = VolumeShape { node_size: 4096, ..ONE };

/// One member of a few MiB, which is soon full.
pub(crate) const TINY: VolumeShape = VolumeShape {
    node_size: 4096,
    bytes: 18 << 20,
    is_mixed: true,
    ..shape(1, [Profile::Single, Profile::Single])
};

/// The same with separate block groups for data and metadata.
pub(crate) const SMALL: VolumeShape = VolumeShape { bytes: 40 << 20, is_mixed: false, ..TINY };

/// One member with two copies of everything.
pub(crate) const ALL_TWICE: VolumeShape = shape(1, [Profile::Dup, Profile::Dup]);

/// Several members.
pub(crate) const SETS: [VolumeShape; 4] = [
    shape(2, [Profile::Raid1, Profile::Raid1]),
    shape(2, [Profile::Raid1, Profile::Raid0]),
    shape(4, [Profile::Raid10, Profile::Raid10]),
    shape(3, [Profile::Raid1c3, Profile::Single]),
];

impl VolumeShape {
    /// Whether the explorer may tear a superblock. A member that is too small for a copy would have
    /// no superblock afterwards.
    pub(crate) fn has_copies_of_superblock(self) -> bool {
        self.bytes > SUPERBLOCK_OFFSETS[1]
    }
}

const fn shape(members: usize, profiles: [Profile; 2]) -> VolumeShape {
    VolumeShape { members, profiles, node_size: 16 << 10, bytes: MEMBER_BYTES, is_mixed: false }
}

impl fmt::Display for VolumeShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { members, profiles: [metadata, data], node_size, bytes, .. } = self;
        let mib = bytes >> 20;
        write!(
            f,
            "{members} members of {mib} MiB, {metadata} and {data}, blocks of {node_size} bytes"
        )
    }
}

/// An empty volume over new members. Each run gives it another id, because the kernel does not
/// mount two volumes with the same id.
pub(crate) fn volume(seed: u64, shape: VolumeShape) -> MemberDevices {
    let VolumeShape { members, profiles, node_size, bytes, is_mixed } = shape;
    let new = || Arc::new(MemoryDevice::sparse(bytes)) as Arc<dyn BlockDevice>;
    let devices: MemberDevices = (0..members).map(|_| new()).collect();
    let process = u128::from(std::process::id());
    let number = members as u128 | u128::from(node_size) << 4 | u128::from(is_mixed) << 31;
    let id = u128::from(seed) << 64 | process << 32 | number;
    let mut options = MkfsOptions::new(Uuid::from_u128(id), Timestamp::default());
    [options.metadata, options.data] = profiles.map(Some);
    options.node_size = Some(node_size);
    if is_mixed {
        options.features.apply("mixed-bg").expect("it can be written");
    }
    mkfs(&devices, &options).expect("a volume");
    devices
}

/// A volume of one member that `mkfs.btrfs` makes with these options. It is for features that our
/// `mkfs` does not offer.
pub(crate) fn made_by_progs(judges: &Judges, options: &str) -> MemberDevices {
    let disks = Disks::create(judges, 1, MEMBER_BYTES >> 20);
    disks.mkfs_and_settle(&options.split_whitespace().collect::<Vec<_>>());
    let device = MemoryDevice::sparse(MEMBER_BYTES);
    let contents = std::fs::read(&disks.images()[0]).expect("an image");
    for (chunk, at) in contents.chunks(1 << 16).zip((0..).step_by(1 << 16)) {
        if chunk.iter().any(|&byte| byte != 0) {
            device.write_at(at, chunk).expect("memory");
        }
    }
    vec![Arc::new(device)]
}
