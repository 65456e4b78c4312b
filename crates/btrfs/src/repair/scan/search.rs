//! The search of all devices for tree blocks, without a superblock.
//!
//! A block says itself to which volume and tree it belongs. How large it is, and by which algorithm
//! its checksum was computed, is tried: the checksum fits one of them. So the first block of a
//! volume tells that of all its blocks. Old volumes and images in files have blocks as well, so
//! the search may find several volumes.
//!
//! Memory is bounded: the blocks of the root tree and of the chunk tree are kept, some others of
//! each device, and what leaves describe, each up to a limit.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::block::{
    self, BlockHeader, HEADER_MIXED_BACKREF, HEADER_RELOC, HEADER_SIZE, HEADER_WRITTEN,
    LEVEL_COUNT, MAX_NODESIZE,
};
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::{Generation, Logical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, Result};
use uuid::Uuid;

use super::features::SeenFeatures;
use crate::check::{CheckEvent, CheckWatch};
use crate::rescue::{DescribedVersions, each_place};

/// The smallest unit in which blocks are placed, in bytes.
const STEP: u32 = 4096;

/// The sizes that a tree block may have.
const NODE_SIZES: [u32; 5] = [16_384, 4096, 8192, 32_768, MAX_NODESIZE];

/// The most volumes that are told apart.
const MOST_VOLUMES: usize = 64;

/// The most blocks of the root tree and of the chunk tree that are kept.
const MOST_BLOCKS: usize = 1 << 20;

/// The most other blocks of a device that are kept: they tell which member it is.
const MOST_SAMPLES: usize = 4096;

/// A tree block that the search has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FoundBlock {
    /// The number of the device, as they were given.
    pub(super) device: usize,
    /// Where it is on the device.
    pub(super) physical: u64,
    pub(super) logical: Logical,
    pub(super) generation: Generation,
    pub(super) owner: TreeId,
    pub(super) level: u8,
}

/// A volume of which blocks were found.
#[derive(Debug)]
pub(super) struct ScannedVolume {
    /// The filesystem id that its blocks carry.
    pub(super) fsid: Uuid,
    pub(super) node_size: u32,
    pub(super) checksum: ChecksumType,
    /// The UUID of the chunk tree, with the generation of the block that says so.
    chunk_tree_uuid: (Generation, Uuid),
    /// The generation of its newest block, but for logs.
    pub(super) newest: Generation,
    /// The blocks of the root tree and of the chunk tree.
    pub(super) blocks: Vec<FoundBlock>,
    /// Some other blocks.
    pub(super) samples: Vec<FoundBlock>,
    /// What its leaves describe.
    pub(super) described: DescribedVersions,
    pub(super) features: SeenFeatures,
}

impl ScannedVolume {
    fn new(fsid: Uuid, (node_size, checksum): (u32, ChecksumType)) -> Self {
        Self {
            fsid,
            node_size,
            checksum,
            chunk_tree_uuid: (Generation(0), Uuid::nil()),
            newest: Generation(0),
            blocks: Vec::new(),
            samples: Vec::new(),
            described: DescribedVersions::default(),
            features: SeenFeatures::default(),
        }
    }

    /// The UUID of the chunk tree, which all blocks carry.
    pub(super) fn chunk_tree_uuid(&self) -> Uuid {
        self.chunk_tree_uuid.1
    }

    /// The found blocks of a tree, which is the root tree or the chunk tree.
    pub(super) fn of_tree(&self, tree: TreeId) -> impl Iterator<Item = &FoundBlock> {
        self.blocks.iter().filter(move |block| block.owner == tree)
    }

    /// The highest blocks of a tree, those of the newest transactions first. Copies of a block
    /// count once.
    pub(super) fn highest(&self, tree: TreeId) -> Vec<FoundBlock> {
        let mut newest: BTreeMap<Generation, u8> = BTreeMap::new();
        for block in self.of_tree(tree) {
            let level = newest.entry(block.generation).or_default();
            *level = (*level).max(block.level);
        }
        let is_highest = |block: &&FoundBlock| newest.get(&block.generation) == Some(&block.level);
        let mut found: Vec<_> = self.of_tree(tree).filter(is_highest).copied().collect();
        // A transaction mostly allocates in ascending order: what it wrote last comes first.
        found.sort_by_key(|block| std::cmp::Reverse((block.generation, block.logical)));
        found.dedup_by_key(|block| (block.generation, block.logical));
        found
    }

    /// Takes a block whose checksum is right.
    fn take(&mut self, device: usize, physical: u64, header: &BlockHeader, bytes: &[u8]) {
        let found = FoundBlock {
            device,
            physical,
            logical: Logical(header.bytenr.get()),
            generation: header.generation(),
            owner: header.owner(),
            level: header.level,
        };
        // A log is of the transaction behind the last commit.
        if found.owner != TreeId::TREE_LOG {
            self.newest = self.newest.max(found.generation);
        }
        if self.chunk_tree_uuid.0 <= found.generation {
            self.chunk_tree_uuid = (found.generation, Uuid::from_bytes(header.chunk_tree_uuid));
        }
        let is_root_or_chunk = matches!(found.owner, TreeId::ROOT | TreeId::CHUNK);
        let is_relocated = header.flags.get() & HEADER_RELOC != 0;
        if is_root_or_chunk && !is_relocated {
            if self.blocks.len() < MOST_BLOCKS {
                self.blocks.push(found);
            }
        } else if self.samples.len() < MOST_SAMPLES.saturating_mul(device + 1) {
            self.samples.push(found);
        }
        if found.level > 0 {
            if let (TreeId::CHUNK, Ok(pointers)) = (found.owner, block::pointers(bytes)) {
                self.described.take_node(pointers);
            }
            return;
        }
        let Ok(items) = block::items(bytes) else { return };
        for item in items {
            let Ok(data) = block::item_data(bytes, item) else { return };
            let key = item.key.get();
            self.described.take(found.owner, key, data, found.generation);
            self.features.take(found.owner, key, data);
        }
    }
}

/// Searches the devices for blocks of all volumes, or of the one whose blocks carry `fsid`.
///
/// # Errors
/// `EINTR` when the caller has ended the search.
pub(super) fn search(
    devices: &[Arc<dyn BlockDevice>],
    fsid: Option<Uuid>,
    watch: &CheckWatch<'_>,
) -> Result<Vec<ScannedVolume>> {
    let mut volumes: BTreeMap<Uuid, ScannedVolume> = BTreeMap::new();
    let total = devices.iter().map(|device| device.size_bytes()).sum();
    let mut before = 0;
    for (index, device) in devices.iter().enumerate() {
        let mut told = 0;
        let flow = each_place(
            &**device,
            0..device.size_bytes(),
            (STEP, MAX_NODESIZE),
            &mut |physical, bytes| {
                look_at(&mut volumes, fsid, (index, physical), bytes);
                if physical >= told {
                    told = physical + (16 << 20);
                    return watch(&CheckEvent::Progress { done: before + physical, total });
                }
                ControlFlow::Continue(())
            },
        );
        if flow.is_break() {
            return Err(Error::posix(Errno::INTR, "the search of the devices"));
        }
        before += device.size_bytes();
    }
    Ok(volumes.into_values().collect())
}

/// Takes the block at a place of a device, if there is one. The cheap comparisons come first.
fn look_at(
    volumes: &mut BTreeMap<Uuid, ScannedVolume>,
    only: Option<Uuid>,
    (device, physical): (usize, u64),
    bytes: &[u8],
) {
    let Some(Ok(header)) = bytes.get(..HEADER_SIZE).map(BlockHeader::view) else { return };
    let is_block = header.flags.get() & !HEADER_RELOC == HEADER_MIXED_BACKREF | HEADER_WRITTEN
        && header.level < LEVEL_COUNT
        && header.bytenr.get() % u64::from(STEP) == 0
        && header.generation.get() > 0;
    let fsid = Uuid::from_bytes(header.fsid);
    if !is_block || only.is_some_and(|only| only != fsid) {
        return;
    }
    if let Some(volume) = volumes.get_mut(&fsid) {
        let block = bytes.get(..volume.node_size as usize);
        if let Some(block) = block.filter(|block| has_checksum(block, header, volume.checksum)) {
            volume.take(device, physical, header, block);
        }
    } else if volumes.len() < MOST_VOLUMES
        && let Some((geometry, block)) = geometry_of(header, bytes)
    {
        let mut volume = ScannedVolume::new(fsid, geometry);
        volume.take(device, physical, header, block);
        volumes.insert(fsid, volume);
    }
}

/// The size of the block and the algorithm of its checksum, and its bytes.
fn geometry_of<'b>(
    header: &BlockHeader,
    bytes: &'b [u8],
) -> Option<((u32, ChecksumType), &'b [u8])> {
    // What a checksum does not take of its field is zero.
    let is_zero =
        |from: usize| header.csum.get(from..).is_some_and(|rest| rest == [0; 32].split_at(from).1);
    let checksums: &[ChecksumType] = if is_zero(ChecksumType::Crc32c.len()) {
        &[ChecksumType::Crc32c]
    } else if is_zero(ChecksumType::Xxhash64.len()) {
        &[ChecksumType::Xxhash64]
    } else {
        &[ChecksumType::Sha256, ChecksumType::Blake2b]
    };
    let all = NODE_SIZES.iter().flat_map(|size| checksums.iter().map(move |csum| (*size, *csum)));
    all.filter_map(|geometry| Some((geometry, bytes.get(..geometry.0 as usize)?)))
        .find(|((_, checksum), block)| has_checksum(block, header, *checksum))
}

fn has_checksum(block: &[u8], header: &BlockHeader, checksum: ChecksumType) -> bool {
    let behind = block.get(header.csum.len()..).unwrap_or_default();
    header.csum.get(..checksum.len()) == Some(checksum.compute(behind).bytes())
}
