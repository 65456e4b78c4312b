//! The free list of a group (AGFL): blocks that the trees of free space and the reverse map take
//! from and give back to, because an allocation in the middle of a change of these trees would
//! change them again. It is filled before each change, as far as the trees can grow by it.

use std::cmp::Ordering;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agfl};
use offshoot_xfs_format::record::XfsOwner;
use offshoot_xfs_format::{AgBlock, AgNumber, U32};

use super::allocate::{ExtentWish, take_free};
use super::free::release;
use super::headers::{add, agf, change_agf, listed, miscounted, set_listed};
use super::reverse::{self, ReverseOwner};
use crate::trans::{AgExtent, XfsTransaction};

/// The blocks that the list must have before a change of the trees: each tree may grow by one
/// level, and each level but the root of the new height may be split, twice in all. Six in a new
/// group with a reverse map: two for each of three trees of one level.
pub(super) fn needed(t: &XfsTransaction<'_>, agf: &Agf) -> u32 {
    let levels = t.engine().most_levels();
    let of = |index: usize, most: u64| {
        let level = agf.levels.get(index).map_or(1, |levels| levels.get());
        let grown = level.saturating_add(1).min(u32::try_from(most).unwrap_or(u32::MAX));
        grown.saturating_mul(2).saturating_sub(2)
    };
    let has_reverse_map = t.geometry().layout.contains(XfsLayout::REVERSE_MAP);
    let reverse = if has_reverse_map { of(2, levels.reverse) } else { 0 };
    of(0, levels.free) + of(1, levels.free) + reverse
}

/// The blocks that one change gives back at most. Each may change three trees, and a list may be
/// longer than it needs to be.
const MOST_GIVEN_BACK: u32 = 4;

/// Fills the list, or gives back what it has too much. Locks the AGF.
pub(super) fn prepare(t: &mut XfsTransaction<'_>, ag: AgNumber) -> Result<()> {
    let start = agf(t, ag)?;
    if !start.is_free_list_consistent(t.geometry()) {
        let problem = format!("group {ag}: its ends do not agree with its length");
        return Err(Error::corrupt(Structure::GroupFreeList, problem));
    }
    // Each step may itself take from the list and give to it, so the steps are bounded.
    let most_steps = u32::try_from(Agfl::size(t.geometry())).unwrap_or(u32::MAX);
    let mut given_back = 0;
    for _ in 0..most_steps {
        let now = agf(t, ag)?;
        let (have, need) = (now.flcount.get(), needed(t, &now));
        match have.cmp(&need) {
            Ordering::Equal => break,
            // Without any free block: a change may do with fewer, and an allocation finds none.
            Ordering::Less if !fill(t, ag, need - have)? => break,
            Ordering::Less => {}
            Ordering::Greater if given_back == MOST_GIVEN_BACK => break,
            Ordering::Greater => {
                given_back += 1;
                let extent = AgExtent { start: take(t, ag)?, count: 1 };
                let owner = ReverseOwner::special(XfsOwner::FreeTrees);
                reverse::unmap(t, ag, &owner.over(extent))?;
                release(t, ag, extent)?;
                t.add_busy(ag, extent);
            }
        }
    }
    Ok(())
}

/// Adds up to `count` blocks, in one extent. Returns false when the group has no free block.
fn fill(t: &mut XfsTransaction<'_>, ag: AgNumber, count: u32) -> Result<bool> {
    let wish = ExtentWish { most: count, may_be_busy: true, ..ExtentWish::blocks(1) };
    let Some(extent) = take_free(t, ag, &wish)? else { return Ok(false) };
    reverse::map(t, ag, &ReverseOwner::special(XfsOwner::FreeTrees).over(extent))?;
    for block in extent.start.0..extent.end() {
        give(t, ag, AgBlock(block))?;
    }
    t.use_tree_room(ag, extent.count.into());
    Ok(true)
}

/// Takes a block from the list.
pub(super) fn take(t: &mut XfsTransaction<'_>, ag: AgNumber) -> Result<AgBlock> {
    let now = agf(t, ag)?;
    if now.flcount.get() == 0 {
        return Err(no_space(ag));
    }
    let block = AgBlock(listed(t, ag, now.flfirst.get())?);
    if !t.geometry().is_usable(ag, block) {
        let problem = format!("group {ag}: block {block}");
        return Err(Error::corrupt(Structure::GroupFreeList, problem));
    }
    let size = size(t);
    change_agf(t, ag, |agf| {
        agf.flfirst = next(agf.flfirst, size);
        add(&mut agf.flcount, -1)
    })?;
    Ok(block)
}

/// Puts a block behind the others.
pub(super) fn give(t: &mut XfsTransaction<'_>, ag: AgNumber, block: AgBlock) -> Result<()> {
    let (now, size) = (agf(t, ag)?, size(t));
    if now.flcount.get() >= size {
        return Err(miscounted(Structure::GroupFreeList, ag));
    }
    let last = next(now.fllast, size);
    set_listed(t, ag, last.get(), block.0)?;
    change_agf(t, ag, |agf| {
        agf.fllast = last;
        add(&mut agf.flcount, 1)
    })
}

fn size(t: &XfsTransaction<'_>) -> u32 {
    u32::try_from(Agfl::size(t.geometry())).unwrap_or(0)
}

fn next(index: U32, size: u32) -> U32 {
    let next = index.get().saturating_add(1);
    if next >= size { 0.into() } else { next.into() }
}

/// The error that a group has no block that a tree needs.
#[cold]
pub(super) fn no_space(ag: AgNumber) -> Error {
    Error::posix(Errno::NOSPC, format!("no free block in allocation group {ag}"))
}
