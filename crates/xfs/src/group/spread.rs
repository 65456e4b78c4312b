//! Allocation of an extent in any group.
//!
//! Transactions lock groups in ascending order, or two of them would wait for each other. So a
//! transaction that has changed group 2 waits for the groups from 3 on, and takes 0 and 1 only if
//! no other transaction has them. A group that has no room is released again, unchanged, so it does
//! not count.

use std::cmp::Reverse;
use std::slice;

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::{AgBlock, AgNumber};

use super::allocate::{ExtentWish, GroupAnswer, KeptBlocks, allocate_now, may_serve, room};
use super::headers::agf_run;
use super::in_agf;
use crate::buffer::BufferRole;
use crate::trans::{AgExtent, XfsTransaction};

/// Allocates an extent near to a block, or else in the next group that has one, around the end of
/// the volume: as [`allocate_first`] for one wish.
pub(crate) fn allocate_anywhere(
    t: &mut XfsTransaction<'_>,
    near: Option<(AgNumber, AgBlock)>,
    wish: &ExtentWish,
) -> Result<Option<(AgNumber, AgExtent)>> {
    allocate_first(t, near, slice::from_ref(wish))
}

/// Allocates an extent for the first of these wishes that any group has one for. A group with the
/// blocks that the wish wants left comes before one without them. What groups hold back for their
/// trees is taken last, by a transaction that frees more than it takes, from the group with the
/// most free blocks. `None` when no group has such an extent. Locks the AGF.
///
/// Blocks that were freed a moment ago are the last resort: the log is forced for them, once.
///
/// # Errors
/// `EAGAIN` when only groups may have one that other transactions have locked. The caller drops the
/// transaction and begins again.
pub(crate) fn allocate_first(
    t: &mut XfsTransaction<'_>,
    near: Option<(AgNumber, AgBlock)>,
    wishes: &[ExtentWish],
) -> Result<Option<(AgNumber, AgExtent)>> {
    let mut search = GroupSearch::default();
    search.look(t, near, wishes)?;
    if search.found.is_none() && search.has_busy {
        // Also when groups are locked: this may be the only thread that wants the busy blocks.
        t.engine().log().force_all()?;
        search = GroupSearch::default();
        search.look(t, near, wishes)?;
    }
    if search.found.is_none() && search.has_passed_over {
        let looks_at = SearchedHeaders::Locked;
        search = GroupSearch { looks_at, ..GroupSearch::default() };
        search.look(t, near, wishes)?;
    }
    if search.found.is_none() && search.has_locked {
        let what = "the groups with free blocks are locked, and waiting for them may never end";
        return Err(Error::posix(Errno::AGAIN, what));
    }
    Ok(search.found)
}

/// A search in all groups.
#[derive(Default)]
struct GroupSearch {
    found: Option<(AgNumber, AgExtent)>,
    /// Whether it has passed over a group that another transaction has locked.
    has_locked: bool,
    /// Whether a group has blocks whose freeing is not durable.
    has_busy: bool,
    /// Whether it has passed over a group by what the last commit has left of its header. Another
    /// transaction may have freed blocks and not committed yet: it was there first.
    has_passed_over: bool,
    looks_at: SearchedHeaders,
}

/// By which headers a search passes over groups.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum SearchedHeaders {
    /// Those that the last commits have left.
    #[default]
    Committed,
    /// Those that the transaction has locked.
    Locked,
}

impl GroupSearch {
    fn look(
        &mut self,
        t: &mut XfsTransaction<'_>,
        near: Option<(AgNumber, AgBlock)>,
        wishes: &[ExtentWish],
    ) -> Result<()> {
        let (count, first) = (t.geometry().ag_count, near.map_or(0, |(ag, _)| ag.0));
        let groups: Vec<_> = (first..count).chain(0..first.min(count)).map(AgNumber).collect();
        for wish in wishes {
            for wish in [*wish, ExtentWish { left: 0, ..*wish }] {
                if self.look_in(t, &groups, near, &wish)? {
                    return Ok(());
                }
            }
        }
        if t.may_take_held_back() {
            let groups = by_free_blocks(t, groups)?;
            for wish in wishes {
                let wish = ExtentWish { left: 0, kept: KeptBlocks::OfChains, ..*wish };
                if self.look_in(t, &groups, near, &wish)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Looks in these groups. Returns whether one has an extent.
    fn look_in(
        &mut self,
        t: &mut XfsTransaction<'_>,
        groups: &[AgNumber],
        near: Option<(AgNumber, AgBlock)>,
        wish: &ExtentWish,
    ) -> Result<bool> {
        for &ag in groups {
            if self.looks_at == SearchedHeaders::Committed && !may_have(t, ag, wish)? {
                self.has_passed_over = true;
                continue;
            }
            let near = near.filter(|(group, _)| *group == ag).map(|(_, block)| block);
            match allocate_if_free(t, ag, &ExtentWish { near, ..*wish })? {
                GroupAnswer::Extent(found) => {
                    self.found = Some((ag, found));
                    return Ok(true);
                }
                GroupAnswer::Nothing => {}
                GroupAnswer::Busy => self.has_busy = true,
                GroupAnswer::Locked => self.has_locked = true,
            }
        }
        Ok(false)
    }
}

/// Groups, those with the most free blocks first: so that none loses all that it holds back.
fn by_free_blocks(t: &XfsTransaction<'_>, groups: Vec<AgNumber>) -> Result<Vec<AgNumber>> {
    let buffers = t.engine().buffers();
    let with_free =
        groups.into_iter().map(|ag| Ok((in_agf(buffers, ag, |agf| agf.freeblks.get())?, ag)));
    let mut with_free = with_free.collect::<Result<Vec<_>>>()?;
    with_free.sort_by_key(|(free, _)| Reverse(*free));
    Ok(with_free.into_iter().map(|(_, ag)| ag).collect())
}

/// Whether a group has this many free blocks beside those that it holds back. The transaction has
/// its AGF then, so they stay. Groups are passed over whose AGF it would have to wait for in the
/// wrong order.
pub(crate) fn hold_room_anywhere(
    t: &mut XfsTransaction<'_>,
    near: Option<AgNumber>,
    blocks: u64,
) -> Result<bool> {
    let groups = t.geometry().ag_count;
    let first = near.map_or(0, |ag| ag.0.min(groups));
    for ag in (first..groups).chain(0..first).map(AgNumber) {
        let (before, role) = (t.held_buffers(), BufferRole::FreeSpace(ag));
        if !t.may_wait_for(role) && !t.try_hold(agf_run(t, ag), role)? {
            continue;
        }
        if room(t, ag, &ExtentWish::blocks(1))? >= blocks {
            return Ok(true);
        }
        t.release_unchanged(&before);
    }
    Ok(false)
}

/// Whether a group may have an extent for a wish, by its header as the last commit has left it:
/// near to a full volume, most groups need not be locked. What a transaction on its way frees is
/// not there yet, and nothing that a promise counts as free is missing.
fn may_have(t: &XfsTransaction<'_>, ag: AgNumber, wish: &ExtentWish) -> Result<bool> {
    if t.holds(agf_run(t, ag).at) {
        return Ok(true);
    }
    in_agf(t.engine().buffers(), ag, |agf| may_serve(t, agf, ag, wish))
}

/// Allocates an extent in a group, if the transaction has its AGF or may lock it.
fn allocate_if_free(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    wish: &ExtentWish,
) -> Result<GroupAnswer> {
    let (before, role) = (t.held_buffers(), BufferRole::FreeSpace(ag));
    if !t.may_wait_for(role) && !t.try_hold(agf_run(t, ag), role)? {
        return Ok(GroupAnswer::Locked);
    }
    let answer = allocate_now(t, ag, wish)?;
    if !matches!(answer, GroupAnswer::Extent(_)) {
        t.release_unchanged(&before);
    }
    Ok(answer)
}
