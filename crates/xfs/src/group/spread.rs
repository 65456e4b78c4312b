//! Allocation of an extent in any group.
//!
//! Transactions lock groups in ascending order, or two of them would wait for each other. So a
//! transaction that has changed group 2 waits for the groups from 3 on, and takes 0 and 1 only if
//! no other transaction has them. A group that has no room is released again, unchanged, so it does
//! not count.

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::{AgBlock, AgNumber};

use super::allocate::{ExtentWish, KeptBlocks, allocate};
use super::headers::agf_run;
use crate::trans::{AgExtent, XfsTransaction};

/// Allocates an extent near to a block, or else in the next group that has one, around the end of
/// the volume. A group with the blocks that the wish wants left comes before one without them, and
/// what groups hold back for their trees is taken last, by a transaction that frees more than it
/// takes. `None` when no group has such an extent. Locks the AGF.
///
/// # Errors
/// `EAGAIN` when only groups may have one that other transactions have locked. The caller drops the
/// transaction and begins again.
pub(crate) fn allocate_anywhere(
    t: &mut XfsTransaction<'_>,
    near: Option<(AgNumber, AgBlock)>,
    wish: &ExtentWish,
) -> Result<Option<(AgNumber, AgExtent)>> {
    let mut wishes = vec![*wish, ExtentWish { left: 0, ..*wish }];
    if t.may_take_held_back() {
        wishes.push(ExtentWish { left: 0, kept: KeptBlocks::None, ..*wish });
    }
    let groups = t.geometry().ag_count;
    let first = near.map_or(0, |(ag, _)| ag.0);
    let mut is_passed_over = false;
    for wish in wishes {
        for ag in (first..groups).chain(0..first.min(groups)).map(AgNumber) {
            let near = near.filter(|(group, _)| *group == ag).map(|(_, block)| block);
            match allocate_if_free(t, ag, &ExtentWish { near, ..wish })? {
                GroupAnswer::Extent(found) => return Ok(Some((ag, found))),
                GroupAnswer::Nothing => {}
                GroupAnswer::Locked => is_passed_over = true,
            }
        }
    }
    if is_passed_over {
        let what = "the groups with free blocks are locked, and waiting for them may never end";
        return Err(Error::posix(Errno::AGAIN, what));
    }
    Ok(None)
}

/// What a group has for a wish.
enum GroupAnswer {
    Extent(AgExtent),
    Nothing,
    /// Another transaction has the group, and this one must not wait for it.
    Locked,
}

/// Allocates an extent in a group, if the transaction has its AGF or may lock it.
fn allocate_if_free(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    wish: &ExtentWish,
) -> Result<GroupAnswer> {
    let may_wait = t.highest_group().is_none_or(|highest| highest <= ag);
    let before = t.held_buffers();
    if !may_wait && !t.try_hold(agf_run(t, ag), ag)? {
        return Ok(GroupAnswer::Locked);
    }
    if let Some(found) = allocate(t, ag, wish)? {
        return Ok(GroupAnswer::Extent(found));
    }
    t.release_unchanged(&before);
    Ok(GroupAnswer::Nothing)
}
