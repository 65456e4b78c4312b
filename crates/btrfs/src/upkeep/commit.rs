//! When a volume commits, and which work goes with a commit.

use offshoot_btrfs_format::Generation;
use offshoot_vfs::Result;
use tracing::{debug, info};

use crate::engine::{Engine, Handle};
use crate::events::{COMMIT, clock, micros};
use crate::inode::write_back;
use crate::log::Trees;
use crate::space::Reserved;
use crate::transaction::{Above, Cause, Handle as CoreHandle, Live, Obstacle, Tree};

impl Engine {
    /// Makes everything that was changed before the call durable.
    ///
    /// # Errors
    /// When a device fails: the devices then hold the last commit, and nothing more is written.
    /// `EROFS` when that happened before the call.
    pub(crate) fn sync(&self) -> Result<()> {
        self.sync_because(Cause::Asked)
    }

    /// As [`sync`](Self::sync), counted under `cause`.
    pub(crate) fn sync_because(&self, cause: Cause) -> Result<()> {
        // Buffered data stays buffered once writing has ended.
        self.live()?.require_whole()?;
        // The first error is the cause. After it the commit only returns `EROFS`.
        write_back::sync_all(self).and(self.commit_over(0, cause))
    }

    /// Makes everything that was changed before the call durable, except buffered data.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_over(0, Cause::Asked)
    }

    /// Commits if the changes of an operation must be durable when it returns.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit_if(&self, is_durable: bool) -> Result<()> {
        if is_durable { self.commit() } else { Ok(()) }
    }

    /// Commits if more than `dirty_bytes` of tree blocks are dirty.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit_over(&self, dirty_bytes: u64, cause: Cause) -> Result<()> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        if self.dirty_tree_bytes()? > dirty_bytes {
            self.write_back_first()?;
        }
        let _commit = live.lock_commits();
        // While we waited for the lock, another commit may have written everything we need.
        live.require_whole()?;
        // With no dirty block left, failures of members may still have to be stored.
        let must_tell = dirty_bytes == 0
            && (self.storage.hides_failures() || self.storage.has_errors_of_writing());
        if self.dirty_tree_bytes()? <= dirty_bytes && !must_tell {
            return Ok(());
        }
        self.commit_and(live, cause, || true, |_| Ok(()))
    }

    /// Commits if the log that a crash would find may name extents at places from which they have
    /// moved. A writer calls this when it can only write in place. Returns whether a commit was
    /// needed. The caller must hold no handle.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn forget_moved_extents(&self) -> Result<bool> {
        let is_so = self.live()?.logs_moved_extents();
        if is_so {
            self.commit_over(0, Cause::Space)?;
        }
        Ok(is_so)
    }

    /// Commits the transaction `generation`, unless it was committed already.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit_one(&self, generation: Generation, cause: Cause) -> Result<()> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        self.write_back_first()?;
        let _commit = live.lock_commits();
        live.require_whole()?;
        // The thread that held the lock before us has committed this transaction.
        if live.running() != generation && !self.storage.hides_failures() {
            return Ok(());
        }
        self.commit_and(live, cause, || true, |_| Ok(()))
    }

    /// Writes files back, if the options ask for that at every commit. The caller may hold locks of
    /// inodes, so this leaves out files that it would have to wait for.
    fn write_back_first(&self) -> Result<()> {
        if self.options.flush_on_commit { write_back::make_room(self, || true) } else { Ok(()) }
    }

    /// Calls `work` while no other thread has a handle, with a handle of a transaction in which
    /// `tree` is not changed yet. The tree then holds the changes of all earlier operations, and no
    /// block of it belongs to that transaction. The caller must hold no handle.
    ///
    /// # Errors
    /// As [`sync`](Self::sync), and what `work` fails with.
    pub(crate) fn at_rest<'v, T>(
        &'v self,
        tree: &Tree,
        reserved: Reserved<'v>,
        work: impl FnOnce(&Handle<'v>) -> Result<T>,
    ) -> Result<T> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        self.write_back_first()?;
        let _commit = live.lock_commits();
        let is_changed = || tree.root.read().generation == live.running();
        let alone = |handle: Handle<'v>| {
            handle.obstruct(Obstacle::Subvolumes);
            work(&handle.with_reservation(reserved.0, reserved.1))
        };
        self.commit_and(live, Cause::Snapshot, is_changed, alone)
    }

    /// Flushes the delayed items, and then commits if `is_needed`. Calls `begin` while no other
    /// thread has a handle, with a handle of the transaction that runs afterwards. The caller holds
    /// the commit lock.
    ///
    /// When members fail meanwhile, more commits follow until the superblocks record the failures
    /// (`storage/failing`).
    pub(crate) fn commit_and<'v, T>(
        &'v self,
        live: &'v Live,
        cause: Cause,
        is_needed: impl FnOnce() -> bool,
        begin: impl FnOnce(Handle<'v>) -> Result<T>,
    ) -> Result<T> {
        let hidden = || self.storage.hides_failures() || self.storage.has_errors_of_writing();
        let outcome = self.commit_once(live, cause, || hidden() || is_needed(), begin);
        // One more commit stores the errors of this one, if there is room for them.
        let mut stores_errors = self.storage.has_errors_of_writing();
        while self.storage.hides_failures() || std::mem::take(&mut stores_errors) {
            // Postponed work waits for this commit.
            let follow = || self.commit_once(live, Cause::Member, || true, |_| Ok(()));
            if let Err(error) = live.whole(follow) {
                return outcome.and(Err(error));
            }
        }
        outcome
    }

    /// As [`commit_and`](Self::commit_and), without the commits that may follow.
    fn commit_once<'v, T>(
        &'v self,
        live: &'v Live,
        cause: Cause,
        is_needed: impl FnOnce() -> bool,
        begin: impl FnOnce(Handle<'v>) -> Result<T>,
    ) -> Result<T> {
        let (generation, clock) = (live.running().0, clock!(COMMIT, INFO));
        debug!(target: COMMIT, generation, ?cause, "a commit begins");
        let begin = |core| begin(Handle::new(self, core));
        let (outcome, is_complete) = self.base.commit_running(live, self, is_needed, begin)?;
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
            self.note_next_chunk().and_then(|()| self.remove_empty_groups())
        };
        if self.options.commit_interval.is_none() {
            while self.discard_step() {}
        } else if live.space.notes_freed() {
            live.pressure.press();
        }
        cleared.and(outcome)
    }
}

impl Above for Engine {
    type Known = Trees;

    fn flush_all<'v>(&'v self, join: impl Fn() -> Result<CoreHandle<'v>> + Sync) -> Result<()> {
        self.delayed.flush_all(join)
    }

    fn require_flushed(&self) -> Result<()> {
        self.delayed.require_empty()
    }

    fn end(&self) -> Trees {
        self.log.end()
    }
}
