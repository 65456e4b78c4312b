//! Freeing of extents, and the counters of free space.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::AgNumber;
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::log::items::check_extent;
use offshoot_xfs_format::record::XfsFreeExtent;

use super::allocate::record;
use super::headers::{add, change_agf};
use super::reverse::{self, ReverseOwner};
use super::{free_list, tree};
use crate::buffer::malformed;
use crate::trans::{AgExtent, CountChanges, XfsTransaction};

/// What the reverse map says about blocks that are freed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FreedFrom {
    /// Nothing any more: an earlier step has removed it.
    Nobody,
    /// That they belong to this owner.
    Owner(ReverseOwner),
    /// The caller does not know. What the reverse map has of one owner is removed.
    Anyone,
}

/// Frees an extent. No file gets it before that is durable. Locks the AGF.
pub(crate) fn free_extent(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    extent: AgExtent,
    from: FreedFrom,
) -> Result<()> {
    let geometry = t.geometry();
    let at = geometry.fs_block(ag, extent.start);
    check_extent(geometry, (at, extent.count)).map_err(malformed)?;
    free_list::prepare(t, ag)?;
    match from {
        FreedFrom::Nobody => {}
        FreedFrom::Owner(owner) => reverse::unmap(t, ag, &owner.over(extent))?,
        FreedFrom::Anyone => reverse::unmap_anyone(t, ag, extent)?,
    }
    release(t, ag, extent)?;
    t.add_busy(ag, extent);
    t.count(CountChanges { free_blocks: extent.count.into(), ..CountChanges::default() });
    Ok(())
}

/// The free extents of a group from block `from` on, at most so many. The first one may begin in
/// front of it. Locks the AGF.
pub(crate) fn free_extents(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    from: u32,
    most: usize,
) -> Result<Vec<AgExtent>> {
    tree::edit(t, ag, XfsTree::FreeByBlock, |tree| {
        let (mut found, mut at) = (Vec::new(), from);
        let around = tree.at_most::<XfsFreeExtent>(XfsSearchKey([from.into(), u64::MAX, 0]))?;
        let around = around.map(|record| AgExtent::new(record.start.get(), record.count.get()));
        if let Some(around) = around.filter(|around| around.start.0 < from && around.end() > from) {
            at = around.end();
            found.push(around);
        }
        while found.len() < most {
            let key = XfsSearchKey([at.into(), 0, 0]);
            let Some(record) = tree.at_least::<XfsFreeExtent>(key)? else { break };
            let extent = AgExtent::new(record.start.get(), record.count.get());
            if extent.start.0 < at || extent.end() <= at {
                let problem = format!("group {ag}: {extent:?} does not lie behind block {at}");
                return Err(Error::corrupt(Structure::FreeRecord, problem));
            }
            at = extent.end();
            found.push(extent);
        }
        Ok(found)
    })
}

/// Puts an extent into the trees of free space. The free list has to be prepared.
pub(super) fn release(t: &mut XfsTransaction<'_>, ag: AgNumber, extent: AgExtent) -> Result<()> {
    let free = |record: XfsFreeExtent| AgExtent::new(record.start.get(), record.count.get());
    let (left, right) = tree::edit(t, ag, XfsTree::FreeByBlock, |tree| {
        let key = XfsSearchKey([extent.start.0.into(), u64::MAX, 0]);
        let left = tree.at_most::<XfsFreeExtent>(key)?.map(free);
        let right = tree.at_least::<XfsFreeExtent>(key)?.map(free);
        let is_free = left.is_some_and(|left| left.end() > extent.start.0)
            || right.is_some_and(|right| right.start.0 < extent.end());
        if is_free {
            let problem = format!("group {ag}: {extent:?} is freed, and a part of it is free");
            return Err(Error::corrupt(Structure::FreeRecord, problem));
        }
        let left = left.filter(|left| left.end() == extent.start.0);
        let right = right.filter(|right| right.start.0 == extent.end());
        let whole = joined(left, extent, right);
        // The right one first: else it would overlap the longer left one.
        if let Some(right) = right {
            tree::must_find::<XfsFreeExtent>(tree, free_key(right))?;
            if left.is_some() {
                tree.remove()?;
            } else {
                tree.replace(&record(whole))?;
            }
        }
        if let Some(left) = left {
            tree::must_find::<XfsFreeExtent>(tree, free_key(left))?;
            tree.replace(&record(whole))?;
        }
        if left.is_none() && right.is_none() {
            tree.insert(&record(whole))?;
        }
        Ok((left, right))
    })?;
    tree::edit(t, ag, XfsTree::FreeBySize, |tree| {
        for old in [left, right].into_iter().flatten() {
            tree::must_find::<XfsFreeExtent>(tree, size_key(old))?;
            tree.remove()?;
        }
        tree.insert(&record(joined(left, extent, right)))
    })?;
    change_free_blocks(t, ag, extent.count.into())
}

/// An extent with its neighbours.
fn joined(left: Option<AgExtent>, extent: AgExtent, right: Option<AgExtent>) -> AgExtent {
    let start = left.map_or(extent.start.0, |left| left.start.0);
    let end = right.map_or(extent.end(), AgExtent::end);
    AgExtent::new(start, end.saturating_sub(start))
}

/// The key of a free extent in the tree by block.
pub(super) fn free_key(extent: AgExtent) -> XfsSearchKey {
    XfsSearchKey([extent.start.0.into(), extent.count.into(), 0])
}

/// The key of a free extent in the tree by size.
pub(super) fn size_key(extent: AgExtent) -> XfsSearchKey {
    XfsSearchKey([extent.count.into(), extent.start.0.into(), 0])
}

/// Adds to the counter of free blocks in the trees, and notes the longest extent.
pub(super) fn change_free_blocks(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    change: i64,
) -> Result<()> {
    let longest = tree::edit(t, ag, XfsTree::FreeBySize, |tree| {
        let last = tree.at_most::<XfsFreeExtent>(XfsSearchKey([u64::MAX, u64::MAX, 0]))?;
        Ok(last.map_or(0, |last| last.count.get()))
    })?;
    change_agf(t, ag, |agf| {
        agf.longest = longest.into();
        add(&mut agf.freeblks, change)
    })
}
