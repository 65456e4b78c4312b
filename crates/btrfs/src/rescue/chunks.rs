//! The chunks that leaves on the devices describe, when the chunk tree cannot be read.
//!
//! First the system chunks are searched, which the superblock describes itself. They have the chunk
//! tree and older states of it. The superblock says how much of its device belongs to chunks. If
//! the found ones are less, all of each device is searched. Chunks that no leaf of the chunk tree
//! describes any more follow then from the extents of devices and from block groups, but for
//! profiles that spread data over stripes, whose order these do not say.
//!
//! Of several descriptions the one in the newest leaf counts. At most [`MOST_KEPT`] of a kind are
//! kept.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::block::{BlockHeader, HEADER_SIZE};
use offshoot_btrfs_format::check;
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevExtent, DevItem, Profile, Stripe};
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::{DeviceId, Generation, ItemType, Key, Logical, Physical, TreeId};
use uuid::Uuid;
use zerocopy::FromBytes;

use super::places::each_place;
use crate::block::TreeBlock;
use crate::storage::{GivenDevice, Storage};

/// The most entries of a kind that are kept.
const MOST_KEPT: usize = 1 << 18;

/// A description with the generation of the leaf that it is in.
type Newest<K, V> = BTreeMap<K, (Generation, V)>;

/// What leaves describe.
#[derive(Default)]
struct Descriptions {
    devices: Newest<u64, DevItem>,
    chunks: Newest<Logical, Chunk>,
    /// By device and offset: the chunk and the length.
    extents: Newest<(u64, u64), (Logical, u64)>,
    /// By address: length and flags.
    groups: Newest<Logical, (u64, BlockGroupFlags)>,
}

/// Devices and chunks, the chunks of the newest leaves first.
pub(crate) struct FoundChunks {
    pub(crate) devices: Vec<DevItem>,
    pub(crate) chunks: Vec<Chunk>,
}

fn note<K: Ord, V>(found: &mut Newest<K, V>, key: K, generation: Generation, value: V) {
    if found.get(&key).is_some_and(|(known, _)| *known >= generation)
        || found.len() >= MOST_KEPT && !found.contains_key(&key)
    {
        return;
    }
    found.insert(key, (generation, value));
}

impl Descriptions {
    /// Takes what a leaf describes.
    fn take(&mut self, leaf: &TreeBlock, sector_size: u32) {
        let generation = leaf.header().generation();
        for slot in 0..leaf.len() {
            self.take_item(leaf.key(slot), leaf.data(slot), generation, sector_size);
        }
    }

    /// Items of other kinds are passed over, and malformed ones too.
    fn take_item(&mut self, key: Key, data: &[u8], generation: Generation, sector_size: u32) {
        match key.item_type {
            ItemType::DEV_ITEM => {
                if let Ok(item) = DevItem::view(data) {
                    note(&mut self.devices, item.devid.get(), generation, *item);
                }
            }
            ItemType::CHUNK_ITEM => {
                if let Ok((chunk, _)) = Chunk::parse_prefix(key, data, sector_size) {
                    note(&mut self.chunks, chunk.start, generation, chunk);
                }
            }
            ItemType::DEV_EXTENT => {
                if let Ok((extent, _)) = DevExtent::ref_from_prefix(data) {
                    let chunk = Logical(extent.chunk_offset.get());
                    let place = (key.objectid, key.offset);
                    note(&mut self.extents, place, generation, (chunk, extent.length.get()));
                }
            }
            ItemType::BLOCK_GROUP_ITEM => {
                if let Ok(item) = BlockGroupItem::view(data) {
                    let flags = BlockGroupFlags(item.flags.get());
                    let group = (key.offset, flags);
                    note(&mut self.groups, Logical(key.objectid), generation, group);
                }
            }
            _ => {}
        }
    }

    /// Whether the chunks are all that the superblocks of the devices count.
    fn is_complete(&self, found: &[GivenDevice]) -> bool {
        found.iter().all(|one| {
            let own = one.device_item();
            let on_device = |chunk: &Chunk| {
                let is_own = |stripe: &&Stripe| stripe.device.0 == own.devid.get();
                let stripes = chunk.stripes.iter().filter(is_own).count() as u64;
                stripes.saturating_mul(chunk.length / chunk.data_stripes().max(1))
            };
            let sum = self.chunks.values().map(|(_, chunk)| on_device(chunk));
            sum.fold(0, u64::saturating_add) == own.bytes_used.get()
        })
    }

    /// Adds chunks that only extents of devices and block groups describe.
    fn infer_chunks(&mut self) {
        let mut by_chunk: BTreeMap<Logical, Vec<(u64, u64, Generation)>> = BTreeMap::new();
        for (&(device, physical), &(generation, (chunk, _))) in &self.extents {
            by_chunk.entry(chunk).or_default().push((device, physical, generation));
        }
        for (start, places) in by_chunk {
            let Some(&(generation, (length, flags))) = self.groups.get(&start) else { continue };
            let Ok(profile) = flags.profile() else { continue };
            let is_copied = matches!(
                profile,
                Profile::Single
                    | Profile::Dup
                    | Profile::Raid1
                    | Profile::Raid1c3
                    | Profile::Raid1c4
            );
            let copies = usize::from(profile.shape().copies);
            if !is_copied || places.len() != copies || self.chunks.contains_key(&start) {
                continue;
            }
            let stripes = places.iter().filter_map(|&(device, physical, _)| {
                let (_, item) = self.devices.get(&device)?;
                Some(Stripe {
                    device: DeviceId(device),
                    physical: Physical(physical),
                    device_uuid: Uuid::from_bytes(item.uuid),
                })
            });
            let stripes: Vec<_> = stripes.collect();
            if stripes.len() == copies {
                // What leaves of the chunk tree describe comes first.
                let chunk = Chunk { start, length, flags, profile, stripes };
                note(&mut self.chunks, start, Generation(generation.0.min(1)), chunk);
            }
        }
    }
}

/// Searches the devices for the chunks of the volume.
pub(crate) fn find_chunks(storage: &Storage, found: &[GivenDevice]) -> FoundChunks {
    let mut all = Descriptions::default();
    for one in found {
        let own = one.device_item().devid.get();
        for range in system_ranges(storage, own) {
            search(storage, one, range, &mut all);
        }
    }
    if !all.is_complete(found) {
        for one in found {
            search(storage, one, 0..one.device().size_bytes(), &mut all);
        }
    }
    for one in found {
        let item = one.device_item();
        note(&mut all.devices, item.devid.get(), Generation(0), item);
    }
    all.infer_chunks();
    let mut chunks: Vec<_> = all.chunks.into_values().collect();
    chunks.sort_by_key(|(generation, _)| Reverse(*generation));
    FoundChunks {
        devices: all.devices.into_values().map(|(_, item)| item).collect(),
        chunks: chunks.into_iter().map(|(_, chunk)| chunk).collect(),
    }
}

/// Where the system chunks are on the device `id`.
fn system_ranges(storage: &Storage, id: u64) -> Vec<Range<u64>> {
    let chunks = storage.system_chunks();
    let stripes = chunks.iter().flat_map(|chunk| {
        let len = chunk.length / chunk.data_stripes().max(1);
        chunk.stripes.iter().filter(|stripe| stripe.device.0 == id).map(move |stripe| {
            let from = stripe.physical.0;
            from..from.saturating_add(len)
        })
    });
    stripes.collect()
}

/// Searches a range of a device for leaves that describe chunks.
fn search(storage: &Storage, one: &GivenDevice, range: Range<u64>, all: &mut Descriptions) {
    let superblock = storage.superblock();
    let places = (superblock.sector_size, superblock.node_size);
    let _ = each_place(one.device(), range, places, &mut |_, block| {
        if let Some(leaf) = leaf_in(storage, block) {
            all.take(&leaf, superblock.sector_size);
        }
        ControlFlow::Continue(())
    });
}

/// The leaf in `bytes`, if it is one that may describe chunks. The cheap comparisons come first.
fn leaf_in(storage: &Storage, bytes: &[u8]) -> Option<TreeBlock> {
    let trees = [TreeId::CHUNK, TreeId::DEV, TreeId::EXTENT, TreeId::BLOCK_GROUP];
    let header = BlockHeader::view(bytes.get(..HEADER_SIZE)?).ok()?;
    let is_own = header.fsid == *storage.superblock().metadata_uuid.as_bytes();
    if !is_own || header.level != 0 || !trees.contains(&header.owner()) {
        return None;
    }
    let logical = Logical(header.bytenr.get());
    check::verify(bytes, storage.geometry(), logical).ok()?;
    Some(TreeBlock::verified(bytes.into()))
}
