//! One change that is deferred, and how it is done.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::XfsInodeFlags2;
use offshoot_xfs_format::log::XfsLogItem;
use offshoot_xfs_format::log::items::{
    XfsCountExtent, XfsCountOp, XfsEfiExtent, XfsExchangeIntent, XfsMapExtent, XfsMapOp,
    XfsReverseOp,
};
use offshoot_xfs_format::record::{XfsExtent, XfsOwner, XfsReverseFlags, XfsReverseMap};
use offshoot_xfs_format::{AgNumber, FileBlock, FsBlock, Ino, XfsGeometry};

use crate::attr::change::XattrChange;
use crate::buffer::malformed;
use crate::group::{self, FreedFrom, ReverseOwner};
use crate::inode::change::{ForkStep, map_extent, unmap_extents};
use crate::inode::exchange::{end_exchange, exchange_extents, exchanged_fork};
use crate::trans::{AgExtent, ForkName, XfsTransaction};

/// The extents that a step takes from a fork.
pub(crate) const MOST_UNMAPPED: usize = 2;

/// What work changes. Pending work is done in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DeferredKind {
    Reverse,
    Count,
    Free,
    Map,
    Exchange,
    Attribute,
}

/// Blocks that are freed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreedBlocks {
    pub(crate) extent: (FsBlock, u32),
    /// Whose they are.
    pub(crate) from: FreedFrom,
}

/// Work for a later transaction.
#[derive(Clone, Debug)]
pub(crate) enum DeferredWork {
    /// A change of the reverse map.
    Reverse(XfsMapExtent),
    /// A change of reference counts.
    Count(XfsCountExtent),
    /// Blocks to be freed.
    Free(FreedBlocks),
    /// A change of a file's mappings.
    Map(XfsMapExtent),
    /// An exchange of the mappings of two files.
    Exchange(XfsExchangeIntent),
    /// A change of an attribute.
    Attribute(XattrChange),
}

/// The records of intents.
type IntentRecords = (Vec<XfsEfiExtent>, Vec<XfsCountExtent>, Vec<XfsMapExtent>);

/// The records for the log.
pub(super) fn records(work: &[DeferredWork]) -> IntentRecords {
    let (mut extents, mut counts, mut maps) = IntentRecords::default();
    for work in work {
        match work {
            DeferredWork::Free(free) => extents.push(XfsEfiExtent::new(free.extent)),
            DeferredWork::Count(count) => counts.push(*count),
            DeferredWork::Reverse(map) | DeferredWork::Map(map) => maps.push(*map),
            // Their intents have no list.
            DeferredWork::Exchange(_) | DeferredWork::Attribute(_) => {}
        }
    }
    (extents, counts, maps)
}

impl DeferredWork {
    /// The work of an intent that a log had; `None` for an item that is no such intent.
    pub(crate) fn of_intent(item: &XfsLogItem<'_>) -> Option<Vec<Self>> {
        Some(match item {
            XfsLogItem::Efi(intent) => {
                // The log does not say whose the blocks were.
                let freed = |extent| Self::Free(FreedBlocks { extent, from: FreedFrom::Anyone });
                intent.extents.iter().map(freed).collect()
            }
            XfsLogItem::Rui(intent) => intent.records.iter().copied().map(Self::Reverse).collect(),
            XfsLogItem::Cui(intent) => intent.records.iter().copied().map(Self::Count).collect(),
            XfsLogItem::Bui(intent) => intent.records.iter().copied().map(Self::Map).collect(),
            XfsLogItem::Xmi(intent) => vec![Self::Exchange(*intent)],
            XfsLogItem::Attri(intent) => vec![Self::Attribute(XattrChange::of_intent(intent))],
            _ => return None,
        })
    }

    pub(super) fn kind(&self) -> DeferredKind {
        match self {
            Self::Reverse(_) => DeferredKind::Reverse,
            Self::Count(_) => DeferredKind::Count,
            Self::Free(_) => DeferredKind::Free,
            Self::Map(_) => DeferredKind::Map,
            Self::Exchange(_) => DeferredKind::Exchange,
            Self::Attribute(_) => DeferredKind::Attribute,
        }
    }

    /// Its first block, if it is about one extent.
    pub(super) fn start(&self) -> Option<FsBlock> {
        Some(match self {
            Self::Reverse(map) | Self::Map(map) => map.extent().0,
            Self::Count(count) => count.extent().0,
            Self::Free(free) => free.extent.0,
            Self::Exchange(_) | Self::Attribute(_) => return None,
        })
    }

    /// Does it in the transaction. What follows from it is added to `next`.
    pub(super) fn perform(
        &self,
        transaction: &mut XfsTransaction<'_>,
        next: &mut Vec<Self>,
    ) -> Result<()> {
        match self {
            Self::Reverse(map) => change_reverse(transaction, map),
            Self::Count(count) => change_count(transaction, count, next),
            Self::Free(free) => {
                let (ag, extent) = in_group(transaction, free.extent)?;
                group::free_extent(transaction, ag, extent, free.from)
            }
            Self::Map(map) => change_mapping(transaction, map, next),
            Self::Exchange(intent) => exchange(transaction, intent, next),
            Self::Attribute(change) => {
                let mut change = change.clone();
                let step = change.step(transaction)?;
                next.extend(Self::unmapped(
                    transaction,
                    (change.ino(), ForkName::Attributes),
                    &step,
                )?);
                if !step.is_done {
                    next.push(Self::Attribute(change));
                }
                Ok(())
            }
        }
    }

    /// Does work in the transaction that makes it necessary, if that changes only attributes in an
    /// inode: then no intent is logged. Returns whether it did; nothing has changed if not.
    pub(crate) fn perform_at_once(&self, transaction: &mut XfsTransaction<'_>) -> Result<bool> {
        match self {
            Self::Attribute(change) => change.make_in_inode(transaction),
            _ => Ok(false),
        }
    }

    /// Gives up everything that a step has taken from a fork.
    pub(crate) fn unmapped(
        transaction: &mut XfsTransaction<'_>,
        of: (Ino, ForkName),
        step: &ForkStep,
    ) -> Result<Vec<Self>> {
        let mut work: Vec<_> = Self::of_tree_blocks(of.0, of.1, &step.tree_blocks).collect();
        for extent in &step.extents {
            work.extend(Self::reverse(transaction, XfsReverseOp::Unmap, of, *extent)?);
            work.push(Self::release(transaction, of, (extent.start, extent.count))?);
        }
        Ok(work)
    }

    /// Gives up blocks that are staged for copy on write: to the file that maps them now, or, if
    /// `is_freed`, to free space.
    pub(crate) fn unstaged(
        geometry: &XfsGeometry,
        blocks: (FsBlock, u32),
        is_freed: bool,
    ) -> Vec<Self> {
        let mut work = vec![Self::Count(XfsCountExtent::new(XfsCountOp::Unstage, blocks))];
        if geometry.layout.contains(XfsLayout::REVERSE_MAP) {
            let owner = XfsOwner::Staging.number();
            let map = XfsMapExtent::of_reverse(XfsReverseOp::Free, blocks, owner, 0);
            work.push(Self::Reverse(map));
        }
        if is_freed {
            let from = FreedFrom::Nobody;
            work.push(Self::Free(FreedBlocks { extent: blocks, from }));
        }
        work
    }

    /// Frees the blocks that a tree of extents has no longer.
    pub(crate) fn of_tree_blocks(
        ino: Ino,
        fork: ForkName,
        blocks: &[FsBlock],
    ) -> impl Iterator<Item = Self> {
        blocks.iter().map(move |&block| {
            let from = FreedFrom::Owner(ReverseOwner::tree_block(ino, fork));
            Self::Free(FreedBlocks { extent: (block, 1), from })
        })
    }

    /// A change of the reverse map for an extent of a file; none in a volume without one. `op` is
    /// that for blocks that are not shared.
    pub(crate) fn reverse(
        transaction: &mut XfsTransaction<'_>,
        op: XfsReverseOp,
        (ino, fork): (Ino, ForkName),
        extent: XfsExtent,
    ) -> Result<Option<Self>> {
        if !transaction.geometry().layout.contains(XfsLayout::REVERSE_MAP) {
            return Ok(None);
        }
        let may_share = is_sharing(transaction, ino, fork)?;
        let op = match op {
            XfsReverseOp::Map if may_share => XfsReverseOp::MapShared,
            XfsReverseOp::Unmap if may_share => XfsReverseOp::UnmapShared,
            XfsReverseOp::Convert if may_share => XfsReverseOp::ConvertShared,
            op => op,
        };
        let mut flags = XfsReverseFlags::empty();
        flags.set(XfsReverseFlags::ATTRIBUTES, fork == ForkName::Attributes);
        flags.set(XfsReverseFlags::UNWRITTEN, extent.is_unwritten);
        let offset = flags.bits() | extent.offset.0;
        let blocks = (extent.start, extent.count);
        Ok(Some(Self::Reverse(XfsMapExtent::of_reverse(op, blocks, ino.0, offset))))
    }

    /// Gives up blocks that a fork has no longer: one reference fewer, or none at all.
    pub(crate) fn release(
        transaction: &mut XfsTransaction<'_>,
        (ino, fork): (Ino, ForkName),
        extent: (FsBlock, u32),
    ) -> Result<Self> {
        Ok(if is_sharing(transaction, ino, fork)? {
            Self::Count(XfsCountExtent::new(XfsCountOp::Decrease, extent))
        } else {
            Self::Free(FreedBlocks { extent, from: FreedFrom::Nobody })
        })
    }
}

/// Whether the blocks of a fork may be shared.
fn is_sharing(transaction: &mut XfsTransaction<'_>, ino: Ino, fork: ForkName) -> Result<bool> {
    Ok(fork == ForkName::Data
        && transaction.inode(ino)?.core().flags2().contains(XfsInodeFlags2::REFLINK))
}

/// The group of an extent, and the extent in it.
fn in_group(
    transaction: &XfsTransaction<'_>,
    (start, count): (FsBlock, u32),
) -> Result<(AgNumber, AgExtent)> {
    let outside = || Error::corrupt(Structure::LogItem, format!("block {start} is in no group"));
    let (ag, start) = transaction.geometry().split(start).ok_or_else(outside)?;
    Ok((ag, AgExtent { start, count }))
}

fn change_reverse(transaction: &mut XfsTransaction<'_>, map: &XfsMapExtent) -> Result<()> {
    let (ag, AgExtent { start, count }) = in_group(transaction, map.extent())?;
    let record = XfsReverseMap {
        start: start.0.into(),
        count: count.into(),
        owner: map.owner.get().into(),
        offset: map.reverse_offset().into(),
    };
    group::change_reverse(transaction, ag, map.reverse_op().map_err(malformed)?, &record)
}

fn change_count(
    transaction: &mut XfsTransaction<'_>,
    record: &XfsCountExtent,
    next: &mut Vec<DeferredWork>,
) -> Result<()> {
    let op = record.op().map_err(malformed)?;
    let (first, count) = record.extent();
    let (ag, extent) = in_group(transaction, (first, count))?;
    let step = group::change_references(transaction, ag, extent, op)?;
    let geometry = transaction.geometry();
    next.extend(step.freed.into_iter().map(|AgExtent { start, count }| {
        let extent = (geometry.fs_block(ag, start), count);
        DeferredWork::Free(FreedBlocks { extent, from: FreedFrom::Nobody })
    }));
    if step.done < count {
        let rest = (FsBlock(first.0 + u64::from(step.done)), count - step.done);
        next.push(DeferredWork::Count(XfsCountExtent::new(op, rest)));
    }
    Ok(())
}

fn change_mapping(
    transaction: &mut XfsTransaction<'_>,
    map: &XfsMapExtent,
    next: &mut Vec<DeferredWork>,
) -> Result<()> {
    let (ino, op) = (Ino(map.owner.get()), map.map_op().map_err(malformed)?);
    let fork = if map.is_attributes() { ForkName::Attributes } else { ForkName::Data };
    let (start, count) = map.extent();
    let extent = XfsExtent {
        offset: FileBlock(map.offset.get()),
        start,
        count,
        is_unwritten: map.is_map_unwritten(),
    };
    let (step, changed) = match op {
        XfsMapOp::Map => (map_extent(transaction, ino, fork, &extent)?, vec![extent]),
        XfsMapOp::Unmap => {
            let range = extent.offset.0..extent.offset.0 + u64::from(count);
            let step = unmap_extents(transaction, ino, fork, range, MOST_UNMAPPED)?;
            let removed = step.extents.clone();
            (step, removed)
        }
    };
    next.extend(DeferredWork::of_tree_blocks(ino, fork, &step.tree_blocks));
    // Extents go from the last one to the first, so what is left is in front of the last removed.
    let rest = changed.last().map_or(0, |last| last.offset.0 - extent.offset.0);
    if let Some(rest) = u32::try_from(rest).ok().filter(|&rest| rest > 0 && !step.is_done) {
        next.push(DeferredWork::Map(XfsMapExtent { count: rest.into(), ..*map }));
    }
    for extent in changed {
        next.extend(DeferredWork::reverse(transaction, of_mapping(op), (ino, fork), extent)?);
    }
    Ok(())
}

/// What a change of a mapping changes in the reverse map.
fn of_mapping(op: XfsMapOp) -> XfsReverseOp {
    match op {
        XfsMapOp::Map => XfsReverseOp::Map,
        XfsMapOp::Unmap => XfsReverseOp::Unmap,
    }
}

fn exchange(
    transaction: &mut XfsTransaction<'_>,
    intent: &XfsExchangeIntent,
    next: &mut Vec<DeferredWork>,
) -> Result<()> {
    let (step, fork) = (exchange_extents(transaction, intent)?, exchanged_fork(intent));
    for (ino, block) in step.tree_blocks {
        next.extend(DeferredWork::of_tree_blocks(ino, fork, &[block]));
    }
    // While both files have their marks of shared blocks.
    for (op, ino, extent) in step.changes {
        if op == XfsMapOp::Map {
            // The other file had them.
            transaction.give_up((extent.start, extent.count));
        }
        next.extend(DeferredWork::reverse(transaction, of_mapping(op), (ino, fork), extent)?);
    }
    match step.rest {
        Some(rest) => next.push(DeferredWork::Exchange(rest)),
        None => end_exchange(transaction, intent)?,
    }
    Ok(())
}
