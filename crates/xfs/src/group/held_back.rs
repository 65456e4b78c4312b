//! The blocks of a group that no file gets. Its trees of free inodes, of reference counts and of
//! reverse mappings grow when files are removed or written over, and must not fail then. Each may
//! grow to the tree with the most records, in blocks that are half full.
//!
//! In a new group of 65,536 blocks of 4 KiB these are 67, 394 and 800 blocks: 1,261, of which 3 are
//! used (`xfs_db -c agresv`).
//!
//! Only chains take them, for those trees. What makes written data visible, or removes some, takes
//! blocks of the reserve of the volume instead, which lie in any group beside these.

use std::collections::BTreeSet;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsTree};
use offshoot_xfs_format::features::XfsRoCompat;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::Agf;
use offshoot_xfs_format::record::CHUNK_INODES;
use offshoot_xfs_format::superblock::XfsSuperblockFields;
use offshoot_xfs_format::{AgBlock, AgNumber, U32, XfsGeometry};

use super::allocate::{KeptBlocks, free_beside_list};
use super::headers::{agf, lock_in_order};
use super::{in_agf, in_agi};
use crate::btree::XfsTreeRoot;
use crate::buffer::{BufferRole, XfsBuffers};
use crate::trans::XfsTransaction;

/// The blocks of each group that count as free and lie in its free list, about: as many as the
/// kernel sets aside.
const SET_ASIDE: u64 = 8;

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
#[cfg(test)]
pub(crate) fn held_back(
    buffers: &XfsBuffers,
    fields: &XfsSuperblockFields,
    ag: AgNumber,
) -> Result<HeldBack> {
    let geometry = buffers.geometry();
    let agf = in_agf(buffers, ag, |agf| *agf)?;
    let free_inodes = free_inode_tree(buffers, fields, ag)?;
    Ok(of_other_trees(geometry, &agf, ag, free_inodes) + of_reverse_map(geometry, &agf, ag))
}

/// What no file gets of the free blocks that the superblock counts, in all groups. Those of a
/// reverse map are among these also when it has them; and so are the blocks of the trees of free
/// space, and of free lists.
pub(crate) fn held_back_of_all(buffers: &XfsBuffers, fields: &XfsSuperblockFields) -> Result<u64> {
    let geometry = buffers.geometry();
    (0..geometry.ag_count).map(AgNumber).try_fold(0, |sum, ag| {
        let agf = in_agf(buffers, ag, |agf| *agf)?;
        let others = of_other_trees(geometry, &agf, ag, free_inode_tree(buffers, fields, ag)?);
        // All blocks of these trees but the roots, and all of the reverse map.
        let mapping = u64::from(agf.rmap_blocks.get().saturating_sub(1));
        let of_free_space = u64::from(agf.btreeblks.get()).saturating_sub(mapping);
        let reverse = of_reverse_map(geometry, &agf, ag);
        Ok(sum + others.rest() + reverse.reserved.max(reverse.used) + of_free_space + SET_ASIDE)
    })
}

/// How many blocks more no file gets when the reverse map of a group grows by `change`: those above
/// what is held back for it, which count as free as well.
///
/// ```text
/// held back 233     232 -> 233: 0     233 -> 234: 1     234 -> 233: -1
/// ```
pub(super) fn above_reservation(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    change: i64,
) -> Result<i64> {
    let agf = agf(t, ag)?;
    let reverse = of_reverse_map(t.geometry(), &agf, ag);
    let above = |used: u64| used.saturating_sub(reverse.reserved).cast_signed();
    Ok(above(reverse.used.saturating_add_signed(change)) - above(reverse.used))
}

/// The blocks of the tree of free inodes of each group.
pub(crate) fn free_inode_trees(
    buffers: &XfsBuffers,
    fields: &XfsSuperblockFields,
) -> Result<Vec<u64>> {
    let groups = (0..buffers.geometry().ag_count).map(AgNumber);
    groups.map(|ag| free_inode_tree(buffers, fields, ag)).collect()
}

/// The blocks of the tree of free inodes of a group. On some volumes no header counts them, so the
/// tree is read: nothing may change it meanwhile.
fn free_inode_tree(
    buffers: &XfsBuffers,
    fields: &XfsSuperblockFields,
    ag: AgNumber,
) -> Result<u64> {
    if !buffers.geometry().layout.contains(XfsLayout::FREE_INODES) {
        return Ok(0);
    }
    let agi = in_agi(buffers, ag, |agi| *agi)?;
    if fields.ro_compat().contains(XfsRoCompat::INOBTCNT) {
        return Ok(agi.fblocks.get().into());
    }
    let (block, levels) = (AgBlock(agi.free_root.get()), agi.free_level.get());
    tree_blocks(buffers, XfsTreeRoot::Group { tree: XfsTree::FreeInodes, ag, block, levels })
}

/// The blocks of group `ag`, whose AGF is `agf`, that an allocation has to leave.
pub(super) fn kept(t: &XfsTransaction<'_>, agf: &Agf, ag: AgNumber, which: KeptBlocks) -> u64 {
    let geometry = t.geometry();
    let reverse = of_reverse_map(geometry, agf, ag);
    match which {
        KeptBlocks::None => 0,
        KeptBlocks::OfChains => t.room_of_others(ag),
        KeptBlocks::OfReverseMap => reverse.rest().max(t.room_of_others(ag)),
        KeptBlocks::All => {
            // A reverse map may be larger than what is held back for it, when many blocks are
            // shared. A chain has a few even then.
            let least = reverse.reserved.min(tree_room(t, agf));
            let others = of_other_trees(geometry, agf, ag, t.free_inode_tree(ag));
            let kept = reverse.rest().max(least) + others.rest();
            // Those that chains are on their way to.
            kept.max(t.engine().counters().tree_rooms().claimed(ag))
        }
    }
}

/// The blocks that a step of a chain may need for the trees of a group: two blocks may be split in
/// each level, and in one more. In a group with a reverse map of two levels and one level of
/// reference counts these are 10.
pub(super) fn tree_room(t: &XfsTransaction<'_>, agf: &Agf) -> u64 {
    let most = t.engine().most_levels();
    let grown = |levels: u32, most: u64| (u64::from(levels) + 1).min(most);
    let [_, _, reverse] = agf.levels.map(U32::get);
    2 * (grown(reverse, most.reverse) + grown(agf.refcount_level.get(), most.counts))
}

/// Proves that the trees of groups can grow in the later steps of a chain, for which their blocks
/// cannot be promised. These blocks are held back for that, so it fails only when most of them are
/// used: a reverse map has more records than its group has blocks when many of these are shared.
/// Locks the AGFs, and releases them again: what was proved is the transaction's until it ends.
///
/// # Errors
/// `ENOSPC` when they cannot, and `EAGAIN` when another transaction has the last blocks for that,
/// or has a group, and this one has one behind it.
pub(crate) fn require_tree_room(
    t: &mut XfsTransaction<'_>,
    groups: &BTreeSet<AgNumber>,
) -> Result<()> {
    groups.iter().try_for_each(|ag| require_room(t, *ag, 0))
}

/// The same for a group some of whose blocks get one more owner. As in the kernel, a tenth of what
/// it holds back has to be left: its trees may grow again when the sharing ends.
pub(crate) fn require_room_to_share(t: &mut XfsTransaction<'_>, ag: AgNumber) -> Result<()> {
    require_room(t, ag, 10)
}

/// Proves that a group has free blocks for one step of a chain, with those that it holds back; and
/// one of so many parts of what it held back when it was new.
fn require_room(t: &mut XfsTransaction<'_>, ag: AgNumber, parts: u64) -> Result<()> {
    let before = t.held_buffers();
    lock_in_order(t, BufferRole::FreeSpace(ag))?;
    let (agf, geometry) = (agf(t, ag)?, t.geometry());
    let all = of_other_trees(geometry, &agf, ag, 0) + of_reverse_map(geometry, &agf, ag);
    let needed = tree_room(t, &agf).max(all.reserved.checked_div(parts).unwrap_or(0));
    let free = free_beside_list(t, &agf);
    let errno = match t.claim_tree_room(ag, tree_room(t, &agf), free) {
        _ if free < needed => Some(Errno::NOSPC),
        true => None,
        false => Some(Errno::AGAIN),
    };
    t.release_unchanged(&before);
    let Some(errno) = errno else { return Ok(()) };
    let what = format!("{needed} blocks for the trees of allocation group {ag}, which has {free}");
    Err(Error::posix(errno, what))
}

/// What a group keeps for its trees of free inodes, which has this many blocks, and of reference
/// counts.
fn of_other_trees(
    geometry: &XfsGeometry,
    agf: &Agf,
    ag: AgNumber,
    free_inode_tree: u64,
) -> HeldBack {
    let blocks = usable_blocks(geometry, ag);
    let mut all = HeldBack::default();
    if geometry.layout.contains(XfsLayout::FREE_INODES) {
        let chunks = (blocks << geometry.inodes_per_block_log()) / u64::from(CHUNK_INODES);
        all.reserved += most_blocks(geometry, XfsTree::FreeInodes, chunks);
        all.used += free_inode_tree;
    }
    if geometry.layout.contains(XfsLayout::SHARED_BLOCKS) {
        all.reserved += most_blocks(geometry, XfsTree::ReferenceCounts, blocks);
        all.used += u64::from(agf.refcount_blocks.get());
    }
    all
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
