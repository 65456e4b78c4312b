//! Allocation of extents in one group.

use offshoot_vfs::Result;
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::group::Agf;
use offshoot_xfs_format::record::XfsFreeExtent;
use offshoot_xfs_format::{AgBlock, AgNumber};

use super::free::{change_free_blocks, free_key, size_key};
use super::headers::agf;
use super::reverse::{self, ReverseOwner};
use super::{free_list, held_back, tree};
use crate::btree::edit::XfsTreeEdit;
use crate::trans::{AgExtent, BusyBlocks, CountChanges, XfsTransaction};

/// How many free extents on each side of a place are looked at before the tree by size is.
const NEAR_EXTENTS: usize = 32;

/// What extent a caller wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtentWish {
    /// The block that it should be near to; a block of no group for anywhere.
    pub(crate) near: Option<AgBlock>,
    /// Whether it has to begin there.
    pub(crate) is_exact: bool,
    /// The least and the most blocks.
    pub(crate) least: u32,
    pub(crate) most: u32,
    /// The first block is a multiple of this.
    pub(crate) alignment: u32,
    /// The first block that it may have, and the first that it may not have any more.
    pub(crate) bounds: (u32, u32),
    /// What the reverse map says about it; nothing when a later step says it.
    pub(crate) owner: Option<ReverseOwner>,
    /// Whether blocks will do whose freeing is not durable: never for the data of files.
    pub(crate) may_be_busy: bool,
    /// The free blocks that the group has to have left behind it, for trees that then grow.
    pub(crate) left: u64,
    /// What it leaves besides.
    pub(crate) kept: KeptBlocks,
}

/// Which of the blocks that a group holds back for its trees an allocation leaves there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptBlocks {
    /// All of them.
    All,
    /// Those for the reverse map: it is for one of the other trees that they are held back for.
    OfReverseMap,
    /// Those that other chains may still need: the transaction ends with more free blocks than it
    /// began with, and no group has others; or a tree grows for which they are held back.
    OfChains,
    /// None: a tree grows in the middle of a chain, and would end all writing otherwise. Claims are
    /// worst cases, so others hardly miss the block.
    None,
}

impl ExtentWish {
    /// Any `count` blocks in a row.
    pub(crate) fn blocks(count: u32) -> Self {
        Self {
            near: None,
            is_exact: false,
            least: count,
            most: count,
            alignment: 1,
            bounds: (0, u32::MAX),
            owner: None,
            may_be_busy: false,
            left: 0,
            kept: KeptBlocks::All,
        }
    }

    /// The part of `piece` that the caller wants, if it is large enough.
    fn of(&self, piece: AgExtent) -> Option<AgExtent> {
        let alignment = self.alignment.max(1);
        let (start, end) = (piece.start.0.max(self.bounds.0), piece.end().min(self.bounds.1));
        let piece = AgExtent::new(start, end.checked_sub(start)?);
        let near = self.near.map_or(piece.start.0, |near| near.0);
        let fitting = |start: u32| {
            let start = start.checked_next_multiple_of(alignment)?;
            let count = end.checked_sub(start)?.min(self.most);
            (count >= self.least.max(1)).then(|| AgExtent::new(start, count))
        };
        if self.is_exact {
            return fitting(near).filter(|found| found.start.0 == near && near >= piece.start.0);
        }
        // Behind the place, or, when the piece ends too early, as near to it as all of it fits.
        let latest = end.saturating_sub(self.most);
        let start = near.min(latest / alignment * alignment).max(piece.start.0);
        fitting(start).or_else(|| fitting(piece.start.0))
    }

    /// How far an extent is from the place.
    fn distance(&self, found: AgExtent) -> u32 {
        self.near.map_or(0, |near| near.0.abs_diff(found.start.0))
    }
}

/// What a search has found.
struct BestExtent<'a> {
    wish: &'a ExtentWish,
    /// What may not be taken yet.
    busy: &'a BusyBlocks<'a>,
    /// The free extent, and the part of it that is taken.
    found: Option<(AgExtent, AgExtent)>,
}

impl BestExtent<'_> {
    /// Looks at a free extent.
    fn look(&mut self, record: XfsFreeExtent) {
        let free = AgExtent::new(record.start.get(), record.count.get());
        for piece in without(free, &self.busy.in_extent(free)) {
            let Some(part) = self.wish.of(piece) else { continue };
            let rank = |part: AgExtent| (std::cmp::Reverse(part.count), self.wish.distance(part));
            if self.found.is_none_or(|(_, best)| rank(part) < rank(best)) {
                self.found = Some((free, part));
            }
        }
    }

    /// Whether nothing larger is wanted.
    fn is_enough(&self) -> bool {
        self.found.is_some_and(|(_, part)| part.count == self.wish.most)
    }
}

/// The parts of `free` that are not in `busy`, which is ascending.
fn without(free: AgExtent, busy: &[AgExtent]) -> Vec<AgExtent> {
    let (mut parts, mut start) = (Vec::new(), free.start.0);
    for extent in busy {
        if extent.end() <= start || extent.start.0 >= free.end() {
            continue;
        }
        if extent.start.0 > start {
            parts.push(AgExtent::new(start, extent.start.0 - start));
        }
        start = extent.end().min(free.end());
    }
    if start < free.end() {
        parts.push(AgExtent::new(start, free.end() - start));
    }
    parts
}

/// What a group has for a wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupAnswer {
    Extent(AgExtent),
    /// None that suits.
    Nothing,
    /// None, but blocks become usable when the log is on the device.
    Busy,
    /// Another transaction has the group, and this one must not wait for it.
    Locked,
}

/// Allocates an extent; `None` when the group has none that suits. Nothing of the group is changed
/// then, so that the transaction can release it, unless the free list took the last piece that
/// suited. Locks the AGF.
pub(crate) fn allocate(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    wish: &ExtentWish,
) -> Result<Option<AgExtent>> {
    let mut answer = allocate_now(t, ag, wish)?;
    if answer == GroupAnswer::Busy {
        t.engine().log().force_all()?;
        answer = allocate_now(t, ag, wish)?;
    }
    let GroupAnswer::Extent(found) = answer else { return Ok(None) };
    Ok(Some(found))
}

/// The same, of what may be used without waiting for the log.
pub(super) fn allocate_now(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    wish: &ExtentWish,
) -> Result<GroupAnswer> {
    // Before anything is changed: a group without room is left as it is.
    let header = agf(t, ag)?;
    if !may_serve(t, &header, ag, wish) {
        return Ok(GroupAnswer::Nothing);
    }
    let room = u32::try_from(room_in(t, &header, ag, wish)).unwrap_or(u32::MAX);
    let wish = &ExtentWish { most: wish.most.min(room), ..*wish };
    let Some(extent) = prepare_and_take(t, ag, wish)? else {
        let waits = !wish.may_be_busy && t.waits_for_log(ag);
        return Ok(if waits { GroupAnswer::Busy } else { GroupAnswer::Nothing });
    };
    if let Some(owner) = &wish.owner {
        reverse::map(t, ag, &owner.over(extent))?;
    }
    t.count(CountChanges { free_blocks: -i64::from(extent.count), ..CountChanges::default() });
    Ok(GroupAnswer::Extent(extent))
}

/// Takes an extent, and prepares the free list for that if one is there.
fn prepare_and_take(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    wish: &ExtentWish,
) -> Result<Option<AgExtent>> {
    let agf = agf(t, ag)?;
    if agf.flcount.get() != free_list::needed(t, &agf) {
        if !has_piece(t, ag, wish)? {
            return Ok(None);
        }
        free_list::prepare(t, ag)?;
    }
    take_free(t, ag, wish)
}

/// Whether a free extent suits a wish, also when the free list is filled from the same extent
/// first. A group of 10,000 free blocks in pieces of 4 has none for a chunk of inodes, of 8 blocks.
fn has_piece(t: &mut XfsTransaction<'_>, ag: AgNumber, wish: &ExtentWish) -> Result<bool> {
    let agf = agf(t, ag)?;
    if agf.longest.get() < wish.least {
        return Ok(false);
    }
    // Of a single block another piece may be left.
    let to_fill = if wish.least <= 1 { 0 } else { to_fill(t, &agf) };
    let least = wish.least.saturating_add(to_fill);
    let wish = ExtentWish { least, most: wish.most.max(least), ..*wish };
    Ok(find(t, ag, &wish)?.is_some())
}

/// The blocks that the free list needs before a change of the trees.
fn to_fill(t: &XfsTransaction<'_>, agf: &Agf) -> u32 {
    free_list::needed(t, agf).saturating_sub(agf.flcount.get())
}

/// The blocks that an allocation may take from a group: the free ones, less what the free list
/// needs, what the trees of the group may need, and what is to be left.
pub(super) fn room(t: &mut XfsTransaction<'_>, ag: AgNumber, wish: &ExtentWish) -> Result<u64> {
    let agf = agf(t, ag)?;
    Ok(room_in(t, &agf, ag, wish))
}

fn room_in(t: &XfsTransaction<'_>, agf: &Agf, ag: AgNumber, wish: &ExtentWish) -> u64 {
    let kept = held_back::kept(t, agf, ag, wish.kept);
    free_beside_list(t, agf).saturating_sub(kept + wish.left)
}

/// The free blocks of a group, less what its free list needs.
pub(super) fn free_beside_list(t: &XfsTransaction<'_>, agf: &Agf) -> u64 {
    u64::from(agf.freeblks.get()).saturating_sub(to_fill(t, agf).into())
}

/// Whether a group whose AGF is this may have an extent for a wish.
pub(super) fn may_serve(
    t: &XfsTransaction<'_>,
    agf: &Agf,
    ag: AgNumber,
    wish: &ExtentWish,
) -> bool {
    agf.longest.get() >= wish.least && room_in(t, agf, ag, wish) >= wish.least.max(1).into()
}

/// Takes an extent out of the trees of free space. The free list has to be prepared.
pub(super) fn take_free(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    wish: &ExtentWish,
) -> Result<Option<AgExtent>> {
    let Some((free, part)) = find(t, ag, wish)? else { return Ok(None) };
    let left = AgExtent::new(free.start.0, part.start.0 - free.start.0);
    let right = AgExtent::new(part.end(), free.end() - part.end());
    let rests: Vec<_> = [left, right].into_iter().filter(|rest| rest.count > 0).collect();
    tree::edit(t, ag, XfsTree::FreeBySize, |tree| {
        tree::must_find::<XfsFreeExtent>(tree, size_key(free))?;
        tree.remove()?;
        rests.iter().try_for_each(|rest| tree.insert(&record(*rest)))
    })?;
    tree::edit(t, ag, XfsTree::FreeByBlock, |tree| {
        tree::must_find::<XfsFreeExtent>(tree, free_key(free))?;
        let Some((first, more)) = rests.split_first() else { return tree.remove() };
        tree.replace(&record(*first))?;
        more.iter().try_for_each(|rest| tree.insert(&record(*rest)))
    })?;
    change_free_blocks(t, ag, -i64::from(part.count))?;
    Ok(Some(part))
}

/// The record of a free extent.
pub(super) fn record(extent: AgExtent) -> XfsFreeExtent {
    XfsFreeExtent { start: extent.start.0.into(), count: extent.count.into() }
}

/// The free extent to take from, and the part of it to take. Waits for discards, if only these are
/// in the way: a search that would find nothing behind them either does not wait with the AGF.
fn find<'e>(
    t: &mut XfsTransaction<'e>,
    ag: AgNumber,
    wish: &ExtentWish,
) -> Result<Option<(AgExtent, AgExtent)>> {
    let busy_for = |t: &XfsTransaction<'e>| {
        if wish.may_be_busy { t.being_discarded(ag) } else { t.busy(ag) }
    };
    let busy = busy_for(t);
    if let Some(found) = find_beside(t, ag, wish, &busy)? {
        return Ok(Some(found));
    }
    let behind = busy_for(t).without_discards();
    if !t.has_discards(ag) || find_beside(t, ag, wish, &behind)?.is_none() {
        return Ok(None);
    }
    t.wait_for_discards(ag);
    let busy = busy_for(t);
    find_beside(t, ag, wish, &busy)
}

/// The same beside busy blocks.
fn find_beside(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    wish: &ExtentWish,
    busy: &BusyBlocks<'_>,
) -> Result<Option<(AgExtent, AgExtent)>> {
    let mut best = BestExtent { wish, busy, found: None };
    if let Some(near) = wish.near {
        tree::edit(t, ag, XfsTree::FreeByBlock, |tree| look_near(tree, near, &mut best))?;
        if wish.is_exact || best.is_enough() {
            return Ok(best.found);
        }
    }
    tree::edit(t, ag, XfsTree::FreeBySize, |tree| {
        let key = XfsSearchKey([wish.most.into(), 0, 0]);
        let mut larger = tree.at_least::<XfsFreeExtent>(key)?;
        while let Some(free) = larger {
            best.look(free);
            if best.is_enough() {
                return Ok(());
            }
            larger = tree.next()?;
        }
        let mut smaller = tree.at_most::<XfsFreeExtent>(key)?;
        while let Some(free) = smaller {
            let is_large_enough = |(_, part): (AgExtent, AgExtent)| part.count >= free.count.get();
            if free.count.get() < wish.least || best.found.is_some_and(is_large_enough) {
                break;
            }
            best.look(free);
            smaller = tree.previous()?;
        }
        Ok(())
    })?;
    Ok(best.found)
}

/// Looks at the free extents around a place.
fn look_near(tree: &mut XfsTreeEdit<'_>, near: AgBlock, best: &mut BestExtent<'_>) -> Result<()> {
    let key = XfsSearchKey([near.0.into(), u64::MAX, 0]);
    let mut left = tree.at_most::<XfsFreeExtent>(key)?;
    for _ in 0..NEAR_EXTENTS {
        let Some(free) = left else { break };
        best.look(free);
        if best.wish.is_exact || best.is_enough() {
            break;
        }
        left = tree.previous()?;
    }
    if best.wish.is_exact {
        return Ok(());
    }
    let mut right = tree.at_least::<XfsFreeExtent>(key)?;
    for _ in 0..NEAR_EXTENTS {
        let Some(free) = right else { break };
        let is_farther = |(_, part): (AgExtent, AgExtent)| {
            best.wish.distance(part) <= free.start.get().saturating_sub(near.0)
        };
        if best.is_enough() && best.found.is_some_and(is_farther) {
            break;
        }
        best.look(free);
        right = tree.next()?;
    }
    Ok(())
}
