//! Exchange of the mappings of two files, or of two ranges of one, in steps.
//!
//! ```text
//! file 1   |  A  |  B  | hole |          file 1   |  X  |  B  | hole |
//! file 2   |  X  |    Y       |   step   file 2   |  A  |    Y       |   left: the blocks behind X
//! ```
//!
//! A step exchanges one extent or hole of each file, as long as the shorter of them. Its
//! transaction ends the intent before it, and logs one for the blocks behind it.
//!
//! Neither the reverse map nor the references are touched here: the caller defers the reverse
//! mappings. The references stay, because each block has as many owners as before.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::inode::XfsInodeFlags2;
use offshoot_xfs_format::log::items::{XfsExchangeFlags, XfsExchangeIntent, XfsMapOp};
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::{FileBlock, FsBlock, Ino};

use super::change::{ForkPiece, end, map_extent, piece_at, unmap_extents};
use crate::trans::{ForkName, XfsTransaction};

/// The mappings that a step passes over at most because they need no exchange.
const MOST_PASSED_OVER: usize = 1000;

/// What one step of an exchange has done.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExchangeStep {
    /// The mappings that were removed, and then those that were added.
    pub(crate) changes: Vec<(XfsMapOp, Ino, XfsExtent)>,
    /// Blocks that the trees have no longer, each with its owner. The caller frees them.
    pub(crate) tree_blocks: Vec<(Ino, FsBlock)>,
    /// What is left to exchange.
    pub(crate) rest: Option<XfsExchangeIntent>,
}

/// The fork whose mappings are exchanged.
pub(crate) fn exchanged_fork(intent: &XfsExchangeIntent) -> ForkName {
    if intent.flags.contains(XfsExchangeFlags::ATTRIBUTES) {
        ForkName::Attributes
    } else {
        ForkName::Data
    }
}

/// Does the next step of an exchange. Locks both inodes, and the AGF if a tree grows.
pub(crate) fn exchange_extents(
    t: &mut XfsTransaction<'_>,
    intent: &XfsExchangeIntent,
) -> Result<ExchangeStep> {
    lock_both(t, intent)?;
    let mut step = ExchangeStep::default();
    let mut left = *intent;
    for _ in 0..MOST_PASSED_OVER {
        let Some(pieces) = next_pieces(t, &left)? else { return Ok(step) };
        let blocks = pieces.map(|piece| piece.blocks).into_iter().min().unwrap_or(0);
        let pieces = pieces.map(|piece| piece.first(blocks));
        let [first, second] = &pieces;
        let is_wanted = first.is_written() || !intent.flags.contains(XfsExchangeFlags::WRITTEN);
        let is_exchanged = is_wanted && !first.is_same_as(second);
        if is_exchanged {
            exchange_pieces(t, &left, pieces, &mut step)?;
        }
        left.offsets = left.offsets.map(|offset| FileBlock(offset.0 + blocks));
        left.blocks = left.blocks.saturating_sub(blocks);
        if is_exchanged {
            break;
        }
    }
    step.rest = (left.blocks > 0).then_some(left);
    Ok(step)
}

/// Locks the inodes, and proves that they are those of the intent.
fn lock_both(t: &mut XfsTransaction<'_>, intent: &XfsExchangeIntent) -> Result<()> {
    let [first, second] = intent.inodes;
    t.inode(first.min(second))?;
    t.inode(first.max(second))?;
    for (ino, generation) in intent.inodes.into_iter().zip(intent.generations) {
        let inode = t.inode(ino)?;
        let core = inode.core();
        if core.is_free() || core.generation.get() != generation {
            let problem = format!("it is free or not of generation {generation}: an exchange");
            return Err(inode.damaged(problem));
        }
    }
    Ok(())
}

/// What both forks have at their places; `None` behind the end of the exchange.
fn next_pieces(
    t: &mut XfsTransaction<'_>,
    left: &XfsExchangeIntent,
) -> Result<Option<[ForkPiece; 2]>> {
    if left.blocks == 0 {
        return Ok(None);
    }
    let (fork, [first, second], [at, other]) = (exchanged_fork(left), left.inodes, left.offsets);
    let pieces = [
        piece_at(t, first, fork, at.0, left.blocks)?,
        piece_at(t, second, fork, other.0, left.blocks)?,
    ];
    Ok(Some(pieces))
}

/// Exchanges two pieces of the same length.
fn exchange_pieces(
    t: &mut XfsTransaction<'_>,
    left: &XfsExchangeIntent,
    pieces: [ForkPiece; 2],
    step: &mut ExchangeStep,
) -> Result<()> {
    let (fork, [first, second], [at, other]) = (exchanged_fork(left), left.inodes, left.offsets);
    let moves = [(pieces[0].extent, first, second, other), (pieces[1].extent, second, first, at)];
    let moves = moves.into_iter().filter_map(|(extent, from, to, offset)| {
        extent.map(|extent| (extent, from, to, XfsExtent { offset, ..extent }))
    });
    let moves: Vec<_> = moves.collect();
    for (old, from, _, _) in &moves {
        let range = old.offset.0..end(old);
        let removed = unmap_extents(t, *from, fork, range, 1)?;
        if removed.extents != [*old] {
            let problem = format!("inode {from}: {:?} in the place of {old:?}", removed.extents);
            return Err(Error::corrupt(Structure::ExtentRecord, problem));
        }
        step.tree_blocks.extend(removed.tree_blocks.into_iter().map(|block| (*from, block)));
        step.changes.push((XfsMapOp::Unmap, *from, *old));
    }
    for (_, _, to, new) in moves {
        let added = map_extent(t, to, fork, &new)?;
        step.tree_blocks.extend(added.tree_blocks.into_iter().map(|block| (to, block)));
        step.changes.push((XfsMapOp::Map, to, new));
    }
    Ok(())
}

/// Does what an exchange does besides, when nothing is left to exchange.
pub(crate) fn end_exchange(t: &mut XfsTransaction<'_>, intent: &XfsExchangeIntent) -> Result<()> {
    let marks = [XfsExchangeFlags::CLEAR_REFLINK_1, XfsExchangeFlags::CLEAR_REFLINK_2];
    for ((ino, size), mark) in intent.inodes.into_iter().zip(intent.sizes).zip(marks) {
        if intent.flags.contains(XfsExchangeFlags::SIZES) {
            t.inode(ino)?.core_mut().size = size.into();
        }
        if intent.flags.contains(mark) {
            let core = t.inode(ino)?.core_mut();
            core.flags2 = (core.flags2.get() & !XfsInodeFlags2::REFLINK.bits()).into();
        }
    }
    Ok(())
}
