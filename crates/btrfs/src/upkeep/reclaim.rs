//! Reclaim: making room for those who wait in line.
//!
//! One of them does it for all, the *leader* of the line. It goes through the flush states from
//! cheap to dear, and after each grants what fits from the front of the line:
//!
//! | state | what it does | what becomes free |
//! |---|---|---|
//! | look around | finds out what the next chunk would hold, and what is free in block groups that were not looked at | what was not known |
//! | delayed items | flushes them to the trees, those of the fullest nodes first | what was held for them |
//! | dirty data | writes back files whose inodes nobody has locked | what was promised and reserved for them |
//! | allocate chunk | makes a chunk; where no device has room, removes empty block groups first | the chunk |
//! | commit | commits | what the transaction has given up |
//!
//! Before each it waits until all reservations have ended, or as many as there were and a few more:
//! most took less than that, and others may be served. Those who have one need nothing of those who
//! wait.
//!
//! A *cycle* is two passes over the states, but the commit comes as often as
//! [`OpenOptions::commits_per_cycle`] says: once, or in both passes. Where most of the members
//! belongs to no chunk, a chunk is cheaper than anything that is flushed early, and comes right
//! after looking around. Elsewhere, when metadata is mostly free and only worst cases fill it, a
//! chunk is allocated in the second pass only; there it comes right after looking around too: what
//! it is allocated with, write-back takes as well, and is whole behind a commit. A ticket that is
//! granted, by the leader or because another thread let go of space, begins the cycle anew.
//!
//! A cycle that granted nothing may still have brought the oldest ticket nearer: more is free than
//! before, or less is promised. Then there is one more. What was free and promised at best is
//! remembered until a ticket comes to its end, so there are so many and no more. After a cycle that
//! made nothing better the oldest ticket is refused, and younger ones are served if they fit. But
//! when something was changed after the commit of the cycle, what that gave up is not free yet, and
//! there is one more cycle before.
//!
//! Chunks are allocated one after the other until the first in line has what it wants. Where it
//! wants more than all chunks would hold that there is place for, none is: it is refused, and the
//! members are there for other things.
//!
//! ```text
//! fallocate of 300 MiB on 1 GiB   chunks of 112 MiB: three, and it is granted
//! fallocate of 2 GiB on 1 GiB     no chunk, one commit, and it is refused
//! ```
//!
//! *Ahead* of all that the thread of the volume makes room, when half of what is left of metadata
//! is reserved: it allocates a chunk where most of the members belongs to none, and a GiB at least,
//! so that on a volume with much room nobody waits. An empty chunk stays when what was reserved at
//! the peak needs it. Elsewhere operations put items into trees that would otherwise wait
//! (`delayed`). And it writes files back when more is promised than is left for others. It commits
//! when a removal, or who else goes before others, finds no room, and what was given up is enough
//! for one and half as much as is free: the room of a full volume is enough for one removal at a
//! time, which lets go of it long before it is needed again, so nobody who leads would commit.
//!
//! Waiters hold locks of inodes, and neither a handle nor a reservation. So the leader waits for no
//! inode, and may commit. Who leads the line of data waits in that of metadata for what a chunk
//! takes, where all of it may be reserved for a moment; who leads that waits in no other. Running
//! delayed references early is no state: it gives nothing back that a commit does not, and takes
//! shutting the gate as a commit does.
//!
//! An error ends the leader's own ticket with that error, and so does a panic. The next in line
//! leads then and meets the same error, or finds that the volume can no longer be written.
//!
//! [`OpenOptions::commits_per_cycle`]: crate::OpenOptions::commits_per_cycle

use std::sync::atomic::Ordering;

use offshoot_vfs::Result;

use crate::engine::Engine;
use crate::inode::write_back;
use crate::space::{FlushState, HighWater, MakesRoom, Purpose, Waiter, When};
use crate::stats::Counters;
use crate::transaction::{Cause, Live};

/// The order of the states where most of the members belongs to no chunk, and behind a commit.
const CHUNK_FIRST: [FlushState; 5] = [
    FlushState::LookAround,
    FlushState::AllocateChunk,
    FlushState::DelayedItems,
    FlushState::DirtyData,
    FlushState::Commit,
];

/// Passes over the states in one cycle.
const PASSES: u32 = 2;

/// Has the thread of the volume commit, if that makes room.
pub(crate) fn ask_for_commit(live: &Live) {
    if live.given_up().1 >= live.space.worth_a_commit() {
        live.space.is_short.store(true, Ordering::Relaxed);
        live.pressure.press();
    }
}

/// Makes room in the volume.
pub(super) struct Maker<'v> {
    pub(super) volume: &'v Engine,
    pub(super) live: &'v Live,
}

impl MakesRoom for Maker<'_> {
    fn stats(&self) -> &Counters {
        &self.live.stats
    }

    fn require_whole(&self) -> Result<()> {
        self.live.require_whole()
    }

    fn ask_for_commit(&self) {
        ask_for_commit(self.live);
    }

    fn lead(&self, purpose: Purpose, own: &Waiter) -> Result<()> {
        self.volume.lead(self.live, purpose, own)
    }
}

impl Engine {
    /// Makes room until the ticket of `own` has come to its end.
    fn lead(&self, live: &Live, purpose: Purpose, own: &Waiter) -> Result<()> {
        let ledger = live.space.ledger(purpose);
        // A cycle that helped nobody is not the last while what was given up after its commit is
        // not free yet.
        let mut is_last = false;
        let mut most = HighWater::of(ledger);
        while own.outcome().is_none() {
            let before = ledger.line().begin_cycle();
            if self.cycle(live, purpose, own, before)? {
                most = HighWater::of(ledger);
                is_last = false;
            } else if most.rises(ledger) {
                // What was made was not enough for the first in line, and brought it nearer.
                is_last = false;
            } else if is_last || !self.frees_more(live)? {
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

    /// Whether a commit may free something, of this transaction or of the one that is being
    /// written.
    fn frees_more(&self, live: &Live) -> Result<bool> {
        Ok(live.is_committing() || self.dirty_tree_bytes()? > 0)
    }

    /// Goes through the states, until more than `before` tickets were granted, or `own` has come to
    /// its end; whether that was so.
    fn cycle(&self, live: &Live, purpose: Purpose, own: &Waiter, before: u64) -> Result<bool> {
        let (space, ledger) = (&live.space, live.space.ledger(purpose));
        let has_much_room = space.is_roomy();
        for pass in 0..PASSES {
            let is_chunk_first = has_much_room || pass > 0;
            let states = if is_chunk_first { CHUNK_FIRST } else { FlushState::ALL };
            for state in states {
                let is_due = match state {
                    FlushState::Commit => pass < self.options.commits_per_cycle,
                    FlushState::AllocateChunk => {
                        let wanted = ledger.line().front().map_or(0, |demand| demand.bytes);
                        is_chunk_first || wanted > ledger.free() || !space.is_mostly_free(purpose)
                    }
                    _ => true,
                };
                if !is_due {
                    continue;
                }
                // Cheapest of all: most have reserved far more than they take.
                if ledger.wait_for_those_under_way(own, before) {
                    return Ok(true);
                }
                live.require_whole()?;
                let make = || self.flush(live, purpose, state);
                space.flush(purpose, state, When::Awaited, make)?;
                space.serve(purpose);
            }
        }
        // Others may have had all there was for a moment.
        Ok(ledger.wait_for_those_under_way(own, before))
    }

    /// Makes room for metadata before anybody waits: the work of the thread of the volume.
    ///
    /// # Errors
    /// When a tree does not read or cannot be changed.
    pub(crate) fn make_room_ahead(&self) -> Result<()> {
        let live = self.live()?;
        let space = &live.space;
        // A good part, so that it is many files each time.
        let enough = space.promised() / 2;
        let is_wanted = || space.is_tight() || space.promised() > enough;
        let make = |state| match state {
            FlushState::AllocateChunk => self.try_grow(Purpose::Metadata, || space.needs_chunk()),
            _ => write_back::make_room(self, is_wanted).map(|()| false),
        };
        let ahead = |state| space.flush(Purpose::Metadata, state, When::Ahead, || make(state));
        while space.needs_chunk() && ahead(FlushState::AllocateChunk)? {}
        if space.is_tight() {
            ahead(FlushState::DirtyData)?;
        }
        let was_short = space.is_short.swap(false, Ordering::Relaxed);
        let (generation, given_up) = live.given_up();
        if was_short && given_up >= space.worth_a_commit() {
            // It may be under way already, and the next one would make nothing free.
            let commit = || self.commit_one(generation, Cause::Space).map(|()| false);
            space.flush(Purpose::Metadata, FlushState::Commit, When::Ahead, commit)?;
        }
        Ok(())
    }

    fn flush(&self, live: &Live, purpose: Purpose, state: FlushState) -> Result<()> {
        let is_awaited = || live.space.ledger(purpose).is_awaited();
        match state {
            FlushState::LookAround => self.look_around(purpose, is_awaited),
            // A good part, so that the next flush finds much again.
            FlushState::DelayedItems => {
                self.delayed.flush(&self.base, live.space.ledger(purpose).reserved() / 4).map(drop)
            }
            FlushState::DirtyData => write_back::make_room(self, is_awaited),
            FlushState::AllocateChunk => self.grow(purpose),
            FlushState::Commit => self.commit_over(0, Cause::Space),
        }
    }
}
