//! When a volume commits, and which work goes with a commit.

use offshoot_btrfs_format::Generation;
use offshoot_vfs::Result;
use tracing::{debug, info};

use super::{Keeper, chunks, discard, reclaim};
use crate::delayed::Delayed;
use crate::events::{COMMIT, clock, micros};
use crate::inode::{AtRest, Rooms, RoomsHandle, Upkeep, write_back};
use crate::log::{LogTrees, RunningLog};
use crate::space::{Purpose, Waiter};
use crate::transaction::{
    ChangingTree, CommitCause, LastChange, LiveVolume, RoomsAbove, TransactionHandle,
};

impl Upkeep for Keeper {
    fn lead(&self, volume: &Rooms, purpose: Purpose, own: &Waiter) -> Result<()> {
        reclaim::lead(volume, purpose, own)
    }

    fn look_for_room(&self, volume: &Rooms, bytes: u64) -> Result<()> {
        chunks::look_for_room(volume, bytes)
    }

    fn commit_over(&self, volume: &Rooms, dirty_bytes: u64, cause: CommitCause) -> Result<()> {
        let live = volume.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        if volume.dirty_tree_bytes()? > dirty_bytes {
            write_back_first(volume)?;
        }
        let _commit = live.lock_commits();
        // While we waited for the lock, another commit may have written everything we need.
        live.require_writing()?;
        // With no dirty block left, failures of members may still have to be stored.
        let must_tell = dirty_bytes == 0
            && (volume.storage.hides_failures() || volume.storage.has_errors_of_writing());
        if volume.dirty_tree_bytes()? <= dirty_bytes && !must_tell {
            return Ok(());
        }
        self.commit_and(volume, live, cause, || true, None, |_| Ok(()))
    }

    fn commit_one(&self, volume: &Rooms, generation: Generation, cause: CommitCause) -> Result<()> {
        let live = volume.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        write_back_first(volume)?;
        let _commit = live.lock_commits();
        live.require_writing()?;
        // The thread that held the lock before us has committed this transaction.
        if live.running() != generation && !volume.storage.hides_failures() {
            return Ok(());
        }
        self.commit_and(volume, live, cause, || true, None, |_| Ok(()))
    }

    fn at_rest<'v>(
        &self,
        volume: &'v Rooms,
        tree: &ChangingTree,
        work: AtRest<'_, 'v>,
    ) -> Result<()> {
        let live = volume.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        write_back_first(volume)?;
        let _commit = live.lock_commits();
        let is_changed = || tree.root.read().generation == live.running();
        self.commit_and(volume, live, CommitCause::Snapshot, is_changed, None, work)
    }
}

impl Keeper {
    /// Commits the running transaction, and lets `last` make its last changes.
    pub(super) fn commit_with<'v>(
        &self,
        volume: &'v Rooms,
        cause: CommitCause,
        last: LastChange<'_, 'v>,
    ) -> Result<()> {
        let live = volume.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let _commit = live.lock_commits();
        live.require_writing()?;
        self.commit_and(volume, live, cause, || true, Some(last), |_| Ok(()))
    }

    /// Flushes the delayed items, and then commits if `is_needed`. Calls `begin` while no other
    /// thread has a handle, with a handle of the transaction that runs afterwards. `last` makes the
    /// last changes of the committed transaction. The caller holds the commit lock.
    ///
    /// When members fail meanwhile, more commits follow until the superblocks record the failures
    /// (`storage/failing`).
    fn commit_and<'v>(
        &self,
        volume: &'v Rooms,
        live: &'v LiveVolume,
        cause: CommitCause,
        is_needed: impl Fn() -> bool,
        last: Option<LastChange<'_, 'v>>,
        begin: impl FnOnce(RoomsHandle<'v>) -> Result<()>,
    ) -> Result<()> {
        let hidden = || volume.storage.hides_failures() || volume.storage.has_errors_of_writing();
        let outcome =
            self.commit_once(volume, live, cause, || hidden() || is_needed(), last, begin);
        // One more commit stores the errors of this one, if there is room for them.
        let mut stores_errors = volume.storage.has_errors_of_writing();
        while volume.storage.hides_failures() || std::mem::take(&mut stores_errors) {
            // Postponed work waits for this commit.
            let follow =
                || self.commit_once(volume, live, CommitCause::Member, || true, None, |_| Ok(()));
            if let Err(error) = live.all_or_stop(follow) {
                return outcome.and(Err(error));
            }
        }
        outcome
    }

    /// As [`commit_and`](Self::commit_and), without the commits that may follow.
    fn commit_once<'v>(
        &self,
        volume: &'v Rooms,
        live: &'v LiveVolume,
        cause: CommitCause,
        is_needed: impl Fn() -> bool,
        last: Option<LastChange<'_, 'v>>,
        begin: impl FnOnce(RoomsHandle<'v>) -> Result<()>,
    ) -> Result<()> {
        let (generation, clock) = (live.running().0, clock!(COMMIT, INFO));
        debug!(target: COMMIT, generation, ?cause, "a commit begins");
        let above = KeptAbove { delayed: &volume.delayed, log: &self.log };
        let begin = |core| begin(RoomsHandle::new(volume, core));
        let (outcome, is_complete) =
            volume.base.commit_running(live, &above, is_needed, last, begin)?;
        if !is_complete {
            debug!(target: COMMIT, generation, "nothing is committed");
            return outcome;
        }
        info!(target: COMMIT, generation, ?cause, us = micros(clock), "committed");
        cause.count(&live.stats);
        if self.subvolumes.has_deleted() {
            live.pressure.press();
        }
        let cleared = if live.space.is_awaited() {
            // The space that became free goes to the waiting tickets. Their leader removes empty
            // block groups where that helps.
            live.space.serve_all();
            Ok(())
        } else {
            // The chunk tree may have room for another chunk now.
            chunks::note_next_chunk(volume).and_then(|()| chunks::remove_empty_groups(volume))
        };
        if volume.options.commit_interval.is_none() {
            while discard::discard_step(volume) {}
        } else if live.space.notes_freed() {
            live.pressure.press();
        }
        cleared.and(outcome)
    }
}

/// What the rooms above `transaction` keep for the running transaction.
struct KeptAbove<'r> {
    delayed: &'r Delayed,
    log: &'r RunningLog,
}

impl RoomsAbove for KeptAbove<'_> {
    type Known = LogTrees;

    fn flush_all<'v>(&self, join: impl Fn() -> Result<TransactionHandle<'v>> + Sync) -> Result<()> {
        self.delayed.flush_all(join)
    }

    fn require_flushed(&self) -> Result<()> {
        self.delayed.require_empty()
    }

    fn end(&self) -> LogTrees {
        self.log.end()
    }
}

/// Writes files back, if the options ask for that at every commit. The caller may hold locks of
/// inodes, so this leaves out files that it would have to wait for.
fn write_back_first(volume: &Rooms) -> Result<()> {
    if volume.options.flushes_on_commit { write_back::make_room(volume, || true) } else { Ok(()) }
}
