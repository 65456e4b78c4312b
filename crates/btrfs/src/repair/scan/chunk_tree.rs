//! A chunk tree that is made anew from its items, and its blocks on staged devices.
//!
//! Its blocks go to places of system chunks where no block was found and where none was to be. If
//! there are too few, they take places of the oldest blocks, which belong to states before the ones
//! from which the items come.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevItem};
use offshoot_btrfs_format::encode::{BlockIdentity, chunk_key};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::SuperblockItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Result};
use zerocopy::IntoBytes;

use super::ScanPurpose;
use super::found::missing;
use super::search::ScannedVolume;
use crate::repair::plan::no_room;
use crate::repair::shape::{ShapeBuilder, TreeLoader};
use crate::repair::staged::StagedDevice;
use crate::rescue::DescribedChunk;
use crate::tree::TreeRoot;

/// What a chunk tree says.
#[derive(Clone, Debug)]
pub(super) struct ChunkTreeItems {
    /// By number.
    pub(super) devices: Vec<DevItem>,
    /// By address.
    pub(super) chunks: Vec<Chunk>,
    /// The item of each chunk.
    items: Vec<Vec<u8>>,
    pub(super) sector_size: u32,
}

impl ChunkTreeItems {
    /// A chunk tree with these chunks, which ascend.
    pub(super) fn new(
        devices: Vec<DevItem>,
        chunks: Vec<DescribedChunk>,
        sector_size: u32,
    ) -> Self {
        let (chunks, items) = chunks.into_iter().map(|one| (one.chunk, one.item)).unzip();
        Self { devices, chunks, items, sector_size }
    }

    /// Leaves out the chunks that have nothing on these devices.
    pub(super) fn keep_chunks_on(&mut self, devices: &[DevItem]) {
        let ids: BTreeSet<_> = devices.iter().map(|item| item.devid.get()).collect();
        let all = std::mem::take(&mut self.chunks).into_iter().zip(std::mem::take(&mut self.items));
        let kept =
            all.filter(|(chunk, _)| chunk.stripes.iter().any(|one| ids.contains(&one.device.0)));
        (self.chunks, self.items) = kept.unzip();
    }

    /// The chunks with their items.
    fn with_items(&self) -> impl Iterator<Item = (&Chunk, &[u8])> {
        self.chunks.iter().zip(self.items.iter().map(Vec::as_slice))
    }

    /// The system chunks with their items.
    pub(super) fn system_items(&self) -> Vec<(&Chunk, &[u8])> {
        self.with_items().filter(|(chunk, _)| is_system(chunk)).collect()
    }

    /// The system chunks.
    pub(super) fn system(&self) -> Vec<&Chunk> {
        self.chunks.iter().filter(|chunk| is_system(chunk)).collect()
    }

    /// The items in the order of their keys.
    fn each(&self, visit: &mut dyn FnMut(Key, &[u8]) -> Result<()>) -> Result<()> {
        for item in &self.devices {
            let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, item.devid.get());
            visit(key, item.as_bytes())?;
        }
        self.with_items().try_for_each(|(chunk, item)| visit(chunk_key(chunk), item))
    }
}

fn is_system(chunk: &Chunk) -> bool {
    chunk.flags.0 & BlockGroupFlags::SYSTEM != 0
}

/// Writes the tree to staged devices, as one of the transaction `generation`. `order` are the items
/// of the devices, in their order. Blocks that are newer than `oldest_kept`, or that `lead_to`
/// leads to, stay. To repair a volume, all devices of the system chunks must be there. Returns the
/// root.
///
/// # Errors
/// `ENOSPC` when there are too few places; [`Error::Unsupported`] when the only system chunks have
/// parity.
pub(super) fn stage(
    items: &ChunkTreeItems,
    volume: &ScannedVolume,
    (staged, order): (&[Arc<StagedDevice>], &[DevItem]),
    (generation, oldest_kept): (Generation, Generation),
    lead_to: Option<&SuperblockItem>,
    purpose: ScanPurpose,
) -> Result<TreeRoot> {
    let mut builder = ShapeBuilder::new(volume.node_size, 0);
    items.each(&mut |key, data| builder.push(key, data.len()))?;
    let shape = builder.finish();
    let needed = shape.blocks.len();
    let free = free_places(items, (volume, needed), oldest_kept, lead_to)?;
    let Some(places) = free.get(..needed) else {
        let lacking = (needed - free.len()) as u64;
        return Err(no_room(lacking * u64::from(volume.node_size)));
    };
    let identity = BlockIdentity {
        metadata_uuid: volume.fsid,
        chunk_tree_uuid: volume.chunk_tree_uuid(),
        logical: Logical(0),
        generation,
        owner: TreeId::CHUNK,
        level: 0,
    };
    let mut write =
        |logical, bytes: &[u8]| write_block(items, (staged, order), (logical, bytes), purpose);
    let blocks = (volume.node_size, volume.checksum);
    let mut loader = TreeLoader::new(blocks, identity, (&shape, places), &mut write);
    items.each(&mut |key, data| loader.push(key, data))?;
    loader.finish()?;
    Ok(TreeRoot {
        id: TreeId::CHUNK,
        logical: Logical(places.last().copied().unwrap_or_default()),
        level: shape.root_level(),
        generation,
    })
}

/// Places for `needed` blocks, the best first, or fewer. A damaged chunk may claim any length, so
/// the search ends when there are enough places without a block.
fn free_places(
    items: &ChunkTreeItems,
    (volume, needed): (&ScannedVolume, usize),
    oldest_kept: Generation,
    lead_to: Option<&SuperblockItem>,
) -> Result<Vec<u64>> {
    let node_size = u64::from(volume.node_size);
    let mut found: BTreeMap<Logical, Generation> = BTreeMap::new();
    for block in volume.of_tree(TreeId::CHUNK) {
        let newest = found.entry(block.logical).or_default();
        *newest = block.generation.max(*newest);
    }
    let mut kept: BTreeSet<Logical> = volume.described.pointed.clone();
    if let Some(item) = lead_to {
        kept.insert(Logical(item.chunk_root.get()));
        kept.extend(item.super_roots.iter().map(|root| Logical(root.chunk_root.get())));
    }
    let (mut places, mut empty) = (Vec::new(), 0);
    for chunk in home(items, &found)? {
        let left_out = chunk.left_out_ranges();
        let first = chunk.start.0.next_multiple_of(node_size);
        let is_left_out = |at: u64| {
            left_out.iter().any(|range| at < range.end.0 && range.start.0 < at + node_size)
        };
        let all = (first..chunk.end().0).step_by(usize::try_from(node_size).unwrap_or(1 << 16));
        for at in all.take_while(|at| at + node_size <= chunk.end().0) {
            let generation = found.get(&Logical(at)).copied().unwrap_or_default();
            if !is_left_out(at) && !kept.contains(&Logical(at)) && generation < oldest_kept {
                places.push((generation, at));
                empty += usize::from(generation == Generation::default());
            }
            if empty >= needed {
                break;
            }
        }
    }
    places.sort_unstable();
    Ok(places.into_iter().map(|(_, at)| at).collect())
}

/// The system chunk that has the newest block of the chunk tree, or else all. A chunk that was
/// removed may be among the others, and its place may belong to another chunk now.
fn home<'i>(
    items: &'i ChunkTreeItems,
    found: &BTreeMap<Logical, Generation>,
) -> Result<Vec<&'i Chunk>> {
    let mut system = items.system();
    let newest = |chunk: &&Chunk| {
        let blocks = found.range(chunk.start..chunk.end());
        blocks.map(|(_, generation)| *generation).max()
    };
    let best = system.iter().max_by_key(|chunk| newest(chunk)).copied();
    if let Some(best) = best.filter(|best| newest(best).is_some()) {
        system = vec![best];
    }
    system.retain(|chunk| chunk.run(chunk.start, 1).is_some());
    if system.is_empty() {
        let what = "repairing the chunk tree: no system chunk is known to which blocks can be \
                    written; get the files out with recover";
        return Err(Error::unsupported(Code::Parity, what));
    }
    Ok(system)
}

/// Writes a block to all its places; to be read, to those that are on given devices.
fn write_block(
    items: &ChunkTreeItems,
    (staged, order): (&[Arc<StagedDevice>], &[DevItem]),
    (logical, bytes): (Logical, &[u8]),
    purpose: ScanPurpose,
) -> Result<()> {
    let chunk = items.chunks.iter().find(|chunk| (chunk.start..chunk.end()).contains(&logical));
    let no_chunk = || Error::corrupt_at(offshoot_vfs::Structure::Chunk, logical.0, "no chunk");
    let chunk = chunk.ok_or_else(no_chunk)?;
    let (mut at, mut rest) = (logical, bytes);
    while !rest.is_empty() {
        let run = chunk.run(at, rest.len() as u64).ok_or_else(no_chunk)?;
        let len = usize::try_from(run.len).unwrap_or(usize::MAX);
        let (part, behind) = rest.split_at_checked(len).ok_or_else(no_chunk)?;
        let (mut is_written, mut absent) = (false, None);
        for (stripe, physical) in run.copies {
            let id = chunk.stripes.get(stripe).map(|stripe| stripe.device.0);
            let device = order.iter().position(|item| Some(item.devid.get()) == id);
            if let Some(device) = device.and_then(|index| staged.get(index)) {
                BlockDevice::write_at(&**device, physical.0, part)
                    .map_err(|e| Error::io("a block of the chunk tree", e))?;
                is_written = true;
            } else {
                absent = id;
            }
        }
        if let Some(id) = absent.filter(|_| !is_written || purpose == ScanPurpose::Repair) {
            return Err(missing(id));
        }
        at.0 += run.len;
        rest = behind;
    }
    Ok(())
}
