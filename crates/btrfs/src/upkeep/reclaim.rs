//! Reclaim: making room for the tickets that wait in line. Each kind of space has one line, its
//! wait queue.
//!
//! One waiting thread, the *leader* of the line, makes room for all of them. It goes through the
//! flush states from cheap to expensive. After each state it grants tickets from the front of the
//! line, as long as they fit:
//!
//! | state | what it does | what becomes free |
//! |---|---|---|
//! | look around | finds out what the next chunk would hold, and loads the free space of block groups that were not loaded yet | space that was not known |
//! | delayed items | flushes them to the trees, those of the fullest nodes first | the space that was held for them |
//! | dirty data | writes back files whose inodes no thread has locked | the space that was promised and reserved for them |
//! | allocate chunk | allocates a chunk; where no device has room, removes empty block groups first | the chunk |
//! | commit | commits | the space that the transaction has given up |
//!
//! Before each state the leader waits for the reservations that other threads hold: until all have
//! ended, or until as many have ended as there were, and a few more. Most operations reserve far
//! more than they take, so this alone may be enough. The wait ends, because a thread with a
//! reservation needs nothing from a thread in line.
//!
//! A *cycle* is two passes over the states. The commit is part of the first pass only, or of both,
//! as [`Mechanisms::commits_per_cycle`] says. When the leader allocates a chunk depends on the
//! volume and on the pass:
//!
//! - On a roomy volume a chunk is cheaper than any early flush. It comes right after looking
//!   around. A volume is *roomy* while one more chunk of metadata has a place, chunks take less
//!   than half of the space of the members, and at least 1 GiB is left.
//! - Elsewhere it comes fourth, as in the table. While metadata is mostly free and only worst cases
//!   fill it, the first pass allocates none.
//! - In the second pass it always comes right after looking around. Allocating a chunk and
//!   write-back take the same reserve, which is complete again only after a commit.
//!
//! When a ticket is granted, by the leader or because another thread released space, the cycle
//! begins anew.
//!
//! A cycle that granted nothing may still have brought the oldest ticket nearer: more is free than
//! before, or less is promised. Then the leader runs one more. It remembers the best values until a
//! ticket ends, so the number of such cycles is bounded. After a cycle that made nothing better the
//! leader refuses the oldest ticket, and grants younger ones if they fit. But when something was
//! changed after the commit of the cycle, the space that this change gave up is not free yet, and
//! the leader runs one more cycle first.
//!
//! Before the leader refuses a ticket, it gives up the commits that are kept whole for a check
//! (essay `transaction/kept_commit`).
//!
//! The leader allocates chunks one after the other until the first ticket in line is granted. If
//! that ticket wants more than all possible chunks together would hold, the leader allocates none
//! and refuses it, so that the members keep their room for other work.
//!
//! ```text
//! fallocate of 300 MiB on 1 GiB   chunks of 112 MiB: three, and it is granted
//! fallocate of 2 GiB on 1 GiB     no chunk, one commit, and it is refused
//! ```
//!
//! # Making room ahead
//!
//! The thread of the volume makes room before any thread waits:
//!
//! - It allocates a chunk when half of the metadata that is left is reserved and the volume is
//!   roomy, so on a roomy volume no thread waits. An empty chunk stays while the peak of
//!   reservations would need it again. On a volume that is not roomy, operations put items into
//!   trees at once instead of queueing them (`delayed`).
//! - It writes files back when more is promised than is left for others.
//! - It commits when a removal, or other work that may use the reserve, found no room, and a commit
//!   would free enough: at least the space of a removal, and at least half of what is free now. No
//!   leader would do that. The reserve of a full volume is enough for one removal at a time, and
//!   each removal releases it long before it needs it again, so each leader is granted before it
//!   reaches its own commit.
//!
//! # Why the leader makes progress
//!
//! Waiting threads hold locks of inodes, but no handle and no reservation. So the leader never
//! waits for an inode, and it may commit. The leader of the line of data may wait in the line of
//! metadata for the space that a chunk takes, because others may have reserved all of it for a
//! moment. The leader of the line of metadata waits in no other line. Running delayed references
//! early is no state: it frees nothing that a commit would not free, and it blocks writers as a
//! commit does.
//!
//! An error or a panic ends the leader's own ticket with that error. The next ticket in line then
//! leads, and meets the same error, or finds that the volume can no longer be written.
//!
//! [`Mechanisms::commits_per_cycle`]: crate::Mechanisms::commits_per_cycle

use std::sync::atomic::Ordering;

use offshoot_vfs::Result;
use tracing::{Level, debug, enabled, info};

use super::chunks::{grow, look_around, try_grow};
use crate::events::RECLAIM;
use crate::inode::Rooms;
use crate::inode::write_back;
use crate::space::{FlushState, FlushTime, HighWater, Purpose, Waiter};
use crate::transaction::{CommitCause, LiveVolume};

/// The order of the states on a roomy volume, and in the second pass.
const CHUNK_FIRST: [FlushState; 5] = [
    FlushState::LookAround,
    FlushState::AllocateChunk,
    FlushState::DelayedItems,
    FlushState::DirtyData,
    FlushState::Commit,
];

/// Passes over the states in one cycle.
const PASSES: u32 = 2;

/// Makes room until the ticket of `own` has ended.
pub(super) fn lead(volume: &Rooms, purpose: Purpose, own: &Waiter) -> Result<()> {
    let live = volume.live()?;
    let ledger = live.space.ledger(purpose);
    // After a cycle that granted nothing there is one more, while a later commit may still free
    // space.
    let mut is_last = false;
    let mut most = HighWater::of(ledger);
    while own.outcome().is_none() {
        let before = ledger.line().begin_cycle();
        if enabled!(target: RECLAIM, Level::DEBUG) {
            // The line is locked for each of these, so not within one event.
            let tickets = ledger.line().len();
            let first = ledger.line().front();
            debug!(
                target: RECLAIM,
                %purpose,
                tickets,
                ?first,
                free = ledger.free(),
                reserved = ledger.reserved(),
                promised = ledger.promised(),
                "making room",
            );
        }
        if cycle(volume, live, purpose, own, before)? {
            most = HighWater::of(ledger);
            is_last = false;
        } else if most.rises(ledger) {
            // This brought the first ticket nearer, though not far enough.
            is_last = false;
        } else if live.give_up_kept_commits()? {
            live.space.serve(purpose);
        } else if is_last || !frees_more(volume, live)? {
            info!(target: RECLAIM, %purpose, free = ledger.free(), "no room can be made");
            ledger.line().refuse_oldest(before);
            live.space.serve(purpose);
            most = HighWater::of(ledger);
            is_last = false;
        } else {
            is_last = true;
        }
    }
    Ok(())
}

/// Whether a commit may free space: the one that is being written, or the next one.
fn frees_more(volume: &Rooms, live: &LiveVolume) -> Result<bool> {
    Ok(live.is_committing() || volume.dirty_tree_bytes()? > 0)
}

/// Goes through the states until more than `before` tickets were granted or `own` has ended.
/// Returns whether one of these happened.
fn cycle(
    volume: &Rooms,
    live: &LiveVolume,
    purpose: Purpose,
    own: &Waiter,
    before: u64,
) -> Result<bool> {
    let (space, ledger) = (&live.space, live.space.ledger(purpose));
    let has_much_room = space.is_roomy();
    for pass in 0..PASSES {
        let is_chunk_first = has_much_room || pass > 0;
        let states = if is_chunk_first { CHUNK_FIRST } else { FlushState::ALL };
        for state in states {
            let is_due = match state {
                FlushState::Commit => pass < volume.options.mechanisms.commits_per_cycle,
                FlushState::AllocateChunk => {
                    let wanted = ledger.line().front().map_or(0, |demand| demand.bytes);
                    is_chunk_first || wanted > ledger.free() || !space.is_mostly_free(purpose)
                }
                _ => true,
            };
            if !is_due {
                continue;
            }
            // Waiting is cheapest: most operations have reserved far more than they take.
            if ledger.wait_for_those_under_way(own, before) {
                return Ok(true);
            }
            live.require_writing()?;
            let make = || flush(volume, live, purpose, state);
            space.flush(purpose, state, FlushTime::Awaited, make)?;
            space.serve(purpose);
        }
    }
    // Other threads may have reserved everything for a moment.
    Ok(ledger.wait_for_those_under_way(own, before))
}

/// Makes room for metadata before any thread waits. The thread of the volume calls this.
///
/// # Errors
/// When a tree cannot be read or changed.
pub(crate) fn make_room_ahead(volume: &Rooms) -> Result<()> {
    let live = volume.live()?;
    let space = &live.space;
    // Half of it, so that each call writes many files back.
    let enough = space.promised() / 2;
    let is_wanted = || space.is_tight() || space.promised() > enough;
    let make = |state| match state {
        FlushState::AllocateChunk => try_grow(volume, Purpose::Metadata, || space.needs_chunk()),
        _ => write_back::make_room(volume, is_wanted).map(|()| false),
    };
    let ahead = |state| space.flush(Purpose::Metadata, state, FlushTime::Ahead, || make(state));
    while space.needs_chunk() && ahead(FlushState::AllocateChunk)? {}
    if space.is_tight() {
        ahead(FlushState::DirtyData)?;
    }
    let was_short = space.is_short.swap(false, Ordering::Relaxed);
    let (generation, given_up) = live.given_up();
    if was_short && given_up >= space.worth_a_commit() {
        // That commit may be under way already, and the one after it would free nothing.
        let commit =
            || volume.upkeep.commit_one(volume, generation, CommitCause::Space).map(|()| false);
        space.flush(Purpose::Metadata, FlushState::Commit, FlushTime::Ahead, commit)?;
    }
    Ok(())
}

fn flush(volume: &Rooms, live: &LiveVolume, purpose: Purpose, state: FlushState) -> Result<()> {
    let is_awaited = || live.space.ledger(purpose).is_awaited();
    match state {
        FlushState::LookAround => look_around(volume, purpose, is_awaited),
        // A quarter, so that items gather again before the next flush.
        FlushState::DelayedItems => {
            volume.delayed.flush(&volume.base, live.space.ledger(purpose).reserved() / 4).map(drop)
        }
        FlushState::DirtyData => write_back::make_room(volume, is_awaited),
        FlushState::AllocateChunk => grow(volume, purpose),
        FlushState::Commit => volume.commit_over(0, CommitCause::Space),
    }
}
