//! Lays out the first chunks of a new volume on its devices.
//!
//! There is one chunk of each kind: system, metadata, data. With mixed groups, data and metadata
//! share one. The chunks lie one behind the other in the logical space, and so do their stripes on
//! every device. The first MiB of a device holds the superblock, and is otherwise left to boot
//! loaders. The engine allocates more chunks when these are full, so the first ones are small:
//!
//! | kind | length |
//! |---|---|
//! | system | 8 MiB; 4 MiB in a volume with mixed groups, because such volumes are small |
//! | metadata | a tenth of the volume, divided by the number of copies; at least 32 MiB and [`MIN_METADATA_NODES`] tree blocks, at most 256 MiB, or 1 GiB on volumes above 50 GiB |
//! | data | 8 MiB a stripe |
//! | mixed | as metadata, but with 8 MiB in place of 32 MiB |
//!
//! If that does not fit, the length of metadata is halved until it does, down to
//! [`MIN_METADATA_NODES`] tree blocks: 16 MiB with blocks of 16 KiB. A volume that is too small for
//! that is refused with a message that says the smallest possible size.

use std::cmp::Reverse;

use offshoot_btrfs_format::chunk::{
    BlockGroupFlags, Chunk, ChunkItem, Profile, STRIPE_LEN, Stripe, StripeItem,
};
use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::superblock::SYSTEM_CHUNK_ARRAY_SIZE;
use offshoot_btrfs_format::{DeviceId, Logical, Physical};
use offshoot_vfs::{Errno, Error, Result};

use super::options::VolumeSpec;
use crate::space::RESERVED_BYTES;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The smallest metadata chunk of a new volume, in tree blocks. The kernel keeps about 350 of them
/// for emergencies, and an operation reserves dozens before it knows how many it needs.
const MIN_METADATA_NODES: u64 = 1024;

const DATA: u64 = BlockGroupFlags::DATA;
const METADATA: u64 = BlockGroupFlags::METADATA;
const SYSTEM: u64 = BlockGroupFlags::SYSTEM;

/// The wanted length of a chunk, in bytes.
#[derive(Clone, Copy)]
enum ChunkLength {
    /// The length in the logical space.
    Chunk(u64),
    /// The length of each stripe.
    Stripe(u64),
}

/// The plan of a device.
#[derive(Clone, Debug)]
pub(super) struct DevicePlan {
    pub(super) id: DeviceId,
    /// Its size, rounded down to whole sectors.
    pub(super) total_bytes: u64,
    /// The end of the allocated space.
    pub(super) next: u64,
}

impl DevicePlan {
    fn free_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.next)
    }

    /// The bytes that stripes of chunks occupy.
    pub(super) fn bytes_used(&self) -> u64 {
        self.next - RESERVED_BYTES
    }
}

/// The chunks of a new volume, and its devices.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) devices: Vec<DevicePlan>,
    /// In the order of their addresses: system, metadata, data.
    pub(super) chunks: Vec<Chunk>,
}

impl Layout {
    /// Lays out the volume `spec` over devices of these sizes, in bytes.
    ///
    /// # Errors
    /// `ENOSPC` when it does not fit, with the smallest possible size.
    pub(super) fn of(spec: &VolumeSpec, sizes: &[u64]) -> Result<Self> {
        if let Some(layout) = Self::try_of(spec, sizes) {
            return Ok(layout);
        }
        // The search assumes equal devices, because then the message needs only one number.
        let fits = |mib: &u64| Self::try_of(spec, &vec![mib * MIB; sizes.len()]).is_some();
        let least = (1..=1024).find(fits).expect("every profile that resolves fits into 1 GiB");
        let each = if sizes.len() == 1 { "" } else { " on each device" };
        Err(Error::posix(
            Errno::NOSPC,
            format!(
                "too small for a volume with data as {} and metadata as {}: {} bytes ({least} \
                 MiB) are needed{each}",
                spec.data,
                spec.metadata,
                least * MIB
            ),
        ))
    }

    fn try_of(spec: &VolumeSpec, sizes: &[u64]) -> Option<Self> {
        let wanted = WantedLengths::of(spec, sizes);
        let mut metadata_bytes = wanted.metadata_bytes;
        loop {
            let layout = Self::with(spec, sizes, &wanted, metadata_bytes);
            if layout.is_some() || metadata_bytes <= wanted.least_metadata_bytes {
                return layout;
            }
            metadata_bytes = (metadata_bytes / 2).max(wanted.least_metadata_bytes);
        }
    }

    fn with(
        spec: &VolumeSpec,
        sizes: &[u64],
        wanted: &WantedLengths,
        metadata_bytes: u64,
    ) -> Option<Self> {
        let unit = u64::from(spec.sector_size);
        let devices = (1..).zip(sizes).map(|(id, size)| DevicePlan {
            id: DeviceId(id),
            total_bytes: size / unit * unit,
            next: RESERVED_BYTES,
        });
        let mut layout = Self { devices: devices.collect(), chunks: Vec::new() };
        if layout.devices.iter().any(|device| device.total_bytes < RESERVED_BYTES) {
            return None;
        }
        let metadata = ChunkLength::Chunk(metadata_bytes);
        layout.add(spec, SYSTEM, spec.metadata, ChunkLength::Chunk(wanted.system_bytes))?;
        if spec.is_mixed {
            layout.add(spec, DATA | METADATA, spec.metadata, metadata)?;
        } else {
            layout.add(spec, METADATA, spec.metadata, metadata)?;
            layout.add(spec, DATA, spec.data, ChunkLength::Stripe(wanted.data_stripe_bytes))?;
        }
        Some(layout)
    }

    /// Adds a chunk of about this length, over as many devices as the profile takes and as have the
    /// space. `None` if too few have it.
    fn add(
        &mut self,
        spec: &VolumeSpec,
        kind: u64,
        profile: Profile,
        length: ChunkLength,
    ) -> Option<()> {
        let per_device = if profile == Profile::Dup { 2 } else { 1 };
        let (chosen, stripe_bytes) = self.choose(max_stripes(spec, kind), profile, length)?;
        let mut stripes = Vec::with_capacity(chosen.len() * per_device);
        for index in chosen.into_iter().flat_map(|index| std::iter::repeat_n(index, per_device)) {
            let device = &mut self.devices[index];
            stripes.push(Stripe {
                device: device.id,
                physical: Physical(device.next),
                device_uuid: spec.device_uuids[index],
            });
            device.next += stripe_bytes;
        }
        let start = self.chunks.last().map_or(Logical(RESERVED_BYTES), Chunk::end);
        let flags = BlockGroupFlags(kind | profile.bits());
        let mut chunk = Chunk { start, length: stripe_bytes, flags, profile, stripes };
        chunk.length *= chunk.data_stripes();
        self.chunks.push(chunk);
        Some(())
    }

    /// Chooses the devices for a chunk of at most `most` stripes. Returns their indexes, and the
    /// length of each stripe. The devices with the most free space are taken first, equal ones in
    /// their order.
    fn choose(
        &self,
        most: usize,
        profile: Profile,
        length: ChunkLength,
    ) -> Option<(Vec<usize>, u64)> {
        let shape = profile.shape();
        // Both stripes of DUP are on one device, and stripes of RAID10 come in pairs.
        let (least, most, per_device) = if profile == Profile::Dup {
            (1, 1, 2)
        } else {
            let most = shape.max_stripes.map_or(most, |max| most.min(max.into()));
            (usize::from(shape.min_stripes), most, 1)
        };
        let step = if profile == Profile::Raid10 { 2 } else { 1 };
        let mut order: Vec<usize> = (0..self.devices.len()).collect();
        order.sort_by_key(|&index| Reverse(self.devices[index].free_bytes()));
        let widest = order.len().min(most) / step * step;
        (least..=widest).rev().step_by(step).find_map(|count| {
            let data_stripes = count * per_device / usize::from(shape.copies);
            let stripe_bytes = match length {
                ChunkLength::Chunk(bytes) => bytes / data_stripes as u64,
                ChunkLength::Stripe(bytes) => bytes,
            }
            .next_multiple_of(STRIPE_LEN);
            let tightest = self.devices[order[count - 1]].free_bytes();
            let mut chosen = order[..count].to_vec();
            chosen.sort_unstable();
            (stripe_bytes * per_device as u64 <= tightest).then_some((chosen, stripe_bytes))
        })
    }

    /// The chunk that holds the chunk tree.
    pub(super) fn system(&self) -> &Chunk {
        &self.chunks[0]
    }

    /// The chunk that holds all other trees.
    pub(super) fn metadata(&self) -> &Chunk {
        &self.chunks[1]
    }

    /// The sizes of all devices together.
    pub(super) fn total_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.total_bytes).sum()
    }
}

/// The most stripes that a chunk can have. Its item must fit into a leaf, and that of a system
/// chunk also into the array in the superblock.
fn max_stripes(spec: &VolumeSpec, kind: u64) -> usize {
    let leaf = leaf_capacity(spec.node_size) - ITEM_SIZE;
    let room = if kind == SYSTEM {
        leaf.min(SYSTEM_CHUNK_ARRAY_SIZE - size_of::<DiskKey>())
    } else {
        leaf
    };
    (room - size_of::<ChunkItem>()) / size_of::<StripeItem>()
}

/// The lengths of the chunks on a volume with enough space.
#[expect(clippy::struct_field_names, reason = "the unit ends the name of a plain number")]
struct WantedLengths {
    system_bytes: u64,
    metadata_bytes: u64,
    least_metadata_bytes: u64,
    /// The length of every stripe of data.
    data_stripe_bytes: u64,
}

impl WantedLengths {
    fn of(spec: &VolumeSpec, sizes: &[u64]) -> Self {
        let total = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
        let most = if total > 50 * GIB { GIB } else { 256 * MIB };
        let tenth = total / 10 / u64::from(spec.metadata.shape().copies);
        let least = MIN_METADATA_NODES * u64::from(spec.node_size);
        let usual = if spec.is_mixed { 8 * MIB } else { 32 * MIB };
        Self {
            system_bytes: if spec.is_mixed { 4 * MIB } else { 8 * MIB },
            metadata_bytes: tenth.clamp(usual.max(least), most) / STRIPE_LEN * STRIPE_LEN,
            least_metadata_bytes: least,
            data_stripe_bytes: 8 * MIB,
        }
    }
}
