//! The blocks of a group that no file gets. Its trees of free inodes, of reference counts and of
//! reverse mappings grow when files are removed or written over, and must not fail then. Each may
//! grow to the tree with the most records, in blocks that are half full.
//!
//! In a new group of 65,536 blocks of 4 KiB these are 67, 394 and 800 blocks: 1,261, of which 3 are
//! used (`xfs_db -c agresv`).

use offshoot_vfs::Result;
use offshoot_xfs_format::btree::XfsTree;
use offshoot_xfs_format::features::XfsRoCompat;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::record::CHUNK_INODES;
use offshoot_xfs_format::superblock::XfsSuperblockFields;
use offshoot_xfs_format::{AgNumber, XfsGeometry};

use super::{in_agf, in_agi};
use crate::buffer::XfsBuffers;

/// What a group keeps for its trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldBack {
    /// The most blocks of the trees.
    pub(crate) reserved: u64,
    /// Those that they have.
    pub(crate) used: u64,
}

/// What group `ag` keeps for its trees.
pub(crate) fn held_back(
    buffers: &XfsBuffers,
    fields: &XfsSuperblockFields,
    ag: AgNumber,
) -> Result<HeldBack> {
    let geometry = buffers.geometry();
    let has = |layout| geometry.layout.contains(layout);
    let blocks = usable_blocks(geometry, ag);
    let mut all = HeldBack::default();
    if has(XfsLayout::FREE_INODES) {
        let chunks = (blocks << geometry.inodes_per_block_log()) / u64::from(CHUNK_INODES);
        all.reserved += most_blocks(geometry, XfsTree::FreeInodes, chunks);
        let is_counted = fields.ro_compat().contains(XfsRoCompat::INOBTCNT);
        // Uncounted, at least one block of each level is there.
        all.used += in_agi(buffers, ag, |agi| {
            u64::from(if is_counted { agi.fblocks.get() } else { agi.free_level.get() })
        })?;
    }
    if has(XfsLayout::SHARED_BLOCKS) {
        all.reserved += most_blocks(geometry, XfsTree::ReferenceCounts, blocks);
        all.used += in_agf(buffers, ag, |agf| u64::from(agf.refcount_blocks.get()))?;
    }
    if has(XfsLayout::REVERSE_MAP) {
        all.reserved += most_blocks(geometry, XfsTree::ReverseMap, blocks);
        all.used += in_agf(buffers, ag, |agf| u64::from(agf.rmap_blocks.get()))?;
    }
    Ok(all)
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
