//! The blocks of a group that no file gets. Its trees of free inodes, of reference counts and of
//! reverse mappings grow when files are removed or written over, and must not fail then. Each may
//! grow to the tree with the most records, in blocks that are half full.
//!
//! In a new group of 65,536 blocks of 4 KiB these are 67, 394 and 800 blocks: 1,261, of which 3 are
//! used (`xfs_db -c agresv`).

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsTree};
use offshoot_xfs_format::features::XfsRoCompat;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::Agf;
use offshoot_xfs_format::record::CHUNK_INODES;
use offshoot_xfs_format::superblock::XfsSuperblockFields;
use offshoot_xfs_format::{AgBlock, AgNumber, XfsGeometry};

use super::allocate::KeptBlocks;
use super::{in_agf, in_agi};
use crate::btree::XfsTreeRoot;
use crate::buffer::XfsBuffers;
use crate::trans::XfsTransaction;

/// What a group keeps for its trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldBack {
    /// The most blocks of the trees.
    pub(crate) reserved: u64,
    /// Those that they have.
    pub(crate) used: u64,
}

impl HeldBack {
    /// The blocks that the trees may still need.
    pub(crate) fn rest(self) -> u64 {
        self.reserved.saturating_sub(self.used)
    }
}

impl std::ops::Add for HeldBack {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { reserved: self.reserved + other.reserved, used: self.used + other.used }
    }
}

/// What group `ag` keeps for its trees.
pub(crate) fn held_back(
    buffers: &XfsBuffers,
    fields: &XfsSuperblockFields,
    ag: AgNumber,
) -> Result<HeldBack> {
    let geometry = buffers.geometry();
    let agf = in_agf(buffers, ag, |agf| *agf)?;
    Ok(of_other_trees(buffers, fields, &agf, ag)? + of_reverse_map(geometry, &agf, ag))
}

/// What all groups keep, of the free blocks that the superblock counts. Those of a reverse map are
/// among these also when it has them.
pub(crate) fn held_back_of_all(buffers: &XfsBuffers, fields: &XfsSuperblockFields) -> Result<u64> {
    let geometry = buffers.geometry();
    (0..geometry.ag_count).map(AgNumber).try_fold(0, |sum, ag| {
        let agf = in_agf(buffers, ag, |agf| *agf)?;
        let others = of_other_trees(buffers, fields, &agf, ag)?;
        Ok(sum + others.rest() + of_reverse_map(geometry, &agf, ag).reserved)
    })
}

/// The blocks of group `ag`, whose AGF is `agf`, that an allocation has to leave.
pub(super) fn kept(
    t: &XfsTransaction<'_>,
    agf: &Agf,
    ag: AgNumber,
    which: KeptBlocks,
) -> Result<u64> {
    let engine = t.engine();
    let reverse = || of_reverse_map(engine.geometry(), agf, ag).rest();
    Ok(match which {
        KeptBlocks::None => 0,
        KeptBlocks::OfReverseMap => reverse(),
        KeptBlocks::All => {
            // The AGI comes before the AGF, so it is not locked here. What was committed last may
            // miss a block of this transaction.
            let others = of_other_trees(engine.buffers(), engine.superblock(), agf, ag)?;
            reverse() + others.rest()
        }
    })
}

/// What a group keeps for its trees of free inodes and of reference counts.
fn of_other_trees(
    buffers: &XfsBuffers,
    fields: &XfsSuperblockFields,
    agf: &Agf,
    ag: AgNumber,
) -> Result<HeldBack> {
    let geometry = buffers.geometry();
    let blocks = usable_blocks(geometry, ag);
    let mut all = HeldBack::default();
    if geometry.layout.contains(XfsLayout::FREE_INODES) {
        let chunks = (blocks << geometry.inodes_per_block_log()) / u64::from(CHUNK_INODES);
        all.reserved += most_blocks(geometry, XfsTree::FreeInodes, chunks);
        let is_counted = fields.ro_compat().contains(XfsRoCompat::INOBTCNT);
        let agi = in_agi(buffers, ag, |agi| *agi)?;
        all.used += if is_counted {
            agi.fblocks.get().into()
        } else {
            let (block, levels) = (AgBlock(agi.free_root.get()), agi.free_level.get());
            let tree = XfsTree::FreeInodes;
            tree_blocks(buffers, XfsTreeRoot::Group { tree, ag, block, levels })?
        };
    }
    if geometry.layout.contains(XfsLayout::SHARED_BLOCKS) {
        all.reserved += most_blocks(geometry, XfsTree::ReferenceCounts, blocks);
        all.used += u64::from(agf.refcount_blocks.get());
    }
    Ok(all)
}

/// What a group keeps for its reverse map.
fn of_reverse_map(geometry: &XfsGeometry, agf: &Agf, ag: AgNumber) -> HeldBack {
    if !geometry.layout.contains(XfsLayout::REVERSE_MAP) {
        return HeldBack::default();
    }
    let blocks = usable_blocks(geometry, ag);
    // The kernel keeps 1 % at least, which is more than the largest tree from blocks of 8 KiB on.
    let reserved = most_blocks(geometry, XfsTree::ReverseMap, blocks).max(blocks / 100);
    HeldBack { reserved, used: agf.rmap_blocks.get().into() }
}

/// The blocks of a group that are not those of the log.
fn usable_blocks(geometry: &XfsGeometry, ag: AgNumber) -> u64 {
    let all = u64::from(geometry.ag_len(ag));
    let has_log = geometry.log_start.0 != 0
        && geometry.split(geometry.log_start).is_some_and(|(log, _)| log == ag);
    if has_log { all.saturating_sub(geometry.log_blocks.into()) } else { all }
}

/// The blocks of a tree with this many records, in blocks that are half full.
fn most_blocks(geometry: &XfsGeometry, tree: XfsTree, records: u64) -> u64 {
    let half = |level| (tree.capacity(geometry, level) as u64 / 2).max(2);
    let mut width = records.div_ceil(half(0));
    let mut blocks = width;
    while width > 1 {
        width = width.div_ceil(half(1));
        blocks += width;
    }
    blocks
}

/// The blocks of a tree of a group that no header counts. Its leaves are counted from above, so a
/// tree of one or two levels costs one read, of a block that is in the cache mostly.
fn tree_blocks(buffers: &XfsBuffers, root: XfsTreeRoot<'_>) -> Result<u64> {
    let XfsTreeRoot::Group { ag, block, levels, .. } = root else { return Ok(0) };
    let geometry = buffers.geometry();
    let most = u64::from(geometry.ag_len(ag));
    let mut level = vec![geometry.fs_block(ag, block)];
    let mut count = 1;
    for height in (1..levels).rev() {
        let mut below = Vec::new();
        for at in level {
            let buffer = buffers.block(at, root.role(at))?;
            let block = XfsBtreeBlock::view(buffer.bytes(), geometry, root.tree());
            count += block.len() as u64;
            if u32::from(block.header.level) != height || count > most {
                let problem = format!("tree {:?} of group {ag}: block {at}", root.tree());
                return Err(Error::corrupt(Structure::BtreeBlock, problem));
            }
            let pointers = (0..block.len()).filter_map(|index| block.pointer(index));
            below.extend(pointers.map(|pointer| root.block_of(geometry, pointer)));
        }
        level = below;
    }
    Ok(count)
}
