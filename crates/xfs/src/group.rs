//! Allocation groups: their counters, which of their inodes are in use, and all changes of them.
//!
//! What changes a group is a function of a transaction, which locks the AGI before the AGF, and
//! groups in ascending order. It waits for none that comes before one that it has: it takes that
//! only if no other transaction has it.
//!
//! | file | what it holds |
//! |---|---|
//! | `allocate`, `spread` | extents of a group, and of any group |
//! | `free`, `free_list` | free space, and the blocks that its own trees take |
//! | `reverse`, `references` | the owners of blocks, and how many of them there are |
//! | `chunks`, `inodes` | chunks of inodes; inodes that are taken, freed, and unlinked |
//! | `lengthen` | the last group, when the volume grows |
//! | `held_back` | the blocks that no file gets, because trees may need them |
//! | `headers`, `tree` | headers and trees as a transaction sees them |

mod allocate;
mod chunks;
mod free;
mod free_list;
mod headers;
mod held_back;
mod inodes;
mod lengthen;
mod references;
mod reverse;
mod spread;
mod tree;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use offshoot_kit::counter::WriteStop;
use offshoot_vfs::Result;
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agi};
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::record::{CHUNK_INODES, STAGED, XfsInodeChunk, XfsSharedExtent};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, BasicBlock};

pub(crate) use allocate::ExtentWish;
#[cfg(test)]
pub(crate) use allocate::{KeptBlocks, allocate};
#[cfg(test)]
pub(crate) use chunks::make_chunk;
#[cfg(test)]
pub(crate) use held_back::{HeldBack, held_back};
pub(crate) use lengthen::lengthen;
pub(crate) use reverse::ReverseOwner;
pub(crate) use spread::{allocate_anywhere, allocate_first, hold_room_anywhere};
pub(crate) use {
    chunks::{ChunkOutcome, make_chunk_now},
    free::{FreedFrom, free_extent, free_extents},
    held_back::{free_inode_trees, held_back_of_all, require_room_to_share, require_tree_room},
    inodes::{
        clear_unlinked, enter_unlinked, first_unlinked, free_inode, leave_unlinked, take_inode,
    },
    references::{change_references, shared_part, staged},
    reverse::change_reverse,
};

use crate::btree::{XfsTreeCursor, XfsTreeRoot};
use crate::buffer::{BufferRole, DiskRun, XfsBuffer, XfsBuffers};
use crate::log::XfsLog;
use crate::trans::{SpaceAtStart, VolumeCounts, XfsTransactions};

/// Begins to write the volume in `buffers`, whose log is `log`: with the counters of its groups,
/// and with what these hold back for their trees.
pub(crate) fn begin_transactions(
    buffers: Arc<XfsBuffers>,
    log: XfsLog,
    superblock: &XfsSuperblock,
    stop: &Arc<WriteStop>,
) -> Result<XfsTransactions> {
    let space = SpaceAtStart {
        counts: volume_counts(&buffers)?,
        held_back: held_back_of_all(&buffers, &superblock.fields)?,
        free_inode_trees: free_inode_trees(&buffers, &superblock.fields)?,
    };
    Ok(XfsTransactions::new(buffers, log, superblock, space, stop))
}

/// The sums of the counters of all groups, as the superblock has them.
fn volume_counts(buffers: &XfsBuffers) -> Result<VolumeCounts> {
    let mut counts = VolumeCounts::default();
    for ag in (0..buffers.geometry().ag_count).map(AgNumber) {
        let (inodes, free_inodes) = inode_counts(buffers, ag)?;
        counts.inodes += inodes;
        counts.free_inodes += free_inodes;
        counts.free_blocks += free_blocks(buffers, ag)?;
    }
    Ok(counts)
}

/// The free blocks of a group, with those that its trees of free space and its free list hold. The
/// superblock counts free blocks in this way.
pub(crate) fn free_blocks(buffers: &XfsBuffers, ag: AgNumber) -> Result<u64> {
    in_agf(buffers, ag, |agf| {
        [agf.freeblks, agf.flcount, agf.btreeblks].map(|count| u64::from(count.get())).iter().sum()
    })
}

/// The inodes of a group, and those of them that are free.
pub(crate) fn inode_counts(buffers: &XfsBuffers, ag: AgNumber) -> Result<(u64, u64)> {
    in_agi(buffers, ag, |agi| (agi.count.get().into(), agi.freecount.get().into()))
}

/// The lists of unlinked inodes of a group that are not empty.
pub(crate) fn unlinked_lists(buffers: &XfsBuffers, ag: AgNumber) -> Result<Vec<usize>> {
    in_agi(buffers, ag, |agi| {
        let lists = agi.unlinked.iter().enumerate();
        lists.filter(|(_, first)| first.get() != AgIno::NULL.0).map(|(list, _)| list).collect()
    })
}

/// The extents of a group that are staged for copy on write.
pub(crate) fn staged_extents(buffers: &XfsBuffers, ag: AgNumber) -> Result<u64> {
    if !buffers.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
        return Ok(0);
    }
    let (block, levels) =
        in_agf(buffers, ag, |agf| (AgBlock(agf.refcount_root.get()), agf.refcount_level.get()))?;
    let root = XfsTreeRoot::Group { tree: XfsTree::ReferenceCounts, ag, block, levels };
    let mut cursor = XfsTreeCursor::new(buffers, root);
    // They are behind all others. The cursor may begin with the record in front of them.
    cursor.seek(XfsSearchKey([STAGED.into(), 0, 0]))?;
    let mut count = 0;
    while let Some(extent) = cursor.record::<XfsSharedExtent>() {
        count += u64::from(extent.is_staged());
        cursor.advance()?;
    }
    Ok(count)
}

/// What `read` takes of the AGF of a group.
fn in_agf<T>(buffers: &XfsBuffers, ag: AgNumber, read: impl FnOnce(&Agf) -> T) -> Result<T> {
    let buffer = header(buffers, BufferRole::FreeSpace(ag), Agf::offset(buffers.geometry(), ag))?;
    Agf::view(buffer.bytes()).map(read).map_err(|problem| buffer.damaged(problem))
}

/// What `read` takes of the AGI of a group.
fn in_agi<T>(buffers: &XfsBuffers, ag: AgNumber, read: impl FnOnce(&Agi) -> T) -> Result<T> {
    let buffer = header(buffers, BufferRole::Inodes(ag), Agi::offset(buffers.geometry(), ag))?;
    Agi::view(buffer.bytes()).map(read).map_err(|problem| buffer.damaged(problem))
}

/// The header sector of a group at `offset`.
pub(crate) fn header(
    buffers: &XfsBuffers,
    role: BufferRole,
    offset: u64,
) -> Result<Arc<XfsBuffer>> {
    let bytes = buffers.geometry().sector_size();
    buffers.read(&[DiskRun { at: BasicBlock(offset / BASIC_BLOCK), bytes }], role)
}

/// The chunk with an inode that is in use; `None` when the inode is free or not allocated.
pub(crate) fn chunk_in_use(
    buffers: &XfsBuffers,
    ag: AgNumber,
    inode: AgIno,
) -> Result<Option<XfsInodeChunk>> {
    let geometry = buffers.geometry();
    let (block, levels) = in_agi(buffers, ag, |agi| (AgBlock(agi.root.get()), agi.level.get()))?;
    let root = XfsTreeRoot::Group { tree: XfsTree::Inodes, ag, block, levels };
    let mut cursor = XfsTreeCursor::new(buffers, root);
    cursor.seek(XfsSearchKey([inode.0.into(), 0, 0]))?;
    let chunk = cursor.record::<XfsInodeChunk>();
    Ok(chunk.filter(|chunk| {
        let index = inode.0.checked_sub(chunk.start().0).filter(|&index| index < CHUNK_INODES);
        let is_used = |index: u32| chunk.in_use() & chunk.allocated(geometry) & 1 << index != 0;
        index.is_some_and(is_used)
    }))
}
