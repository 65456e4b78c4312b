//! When a volume commits, and what goes with it.

use offshoot_btrfs_format::Generation;
use offshoot_vfs::Result;

use crate::engine::{Engine, Handle};
use crate::inode::write_back;
use crate::log::Trees;
use crate::space::Reserved;
use crate::transaction::{Above, Cause, Handle as CoreHandle, Live, Obstacle, Tree};

impl Engine {
    /// Makes everything that was changed before the call durable.
    ///
    /// # Errors
    /// When a device fails: the devices then hold the last commit, and nothing more is written.
    /// `EROFS` when that was so before.
    pub(crate) fn sync(&self) -> Result<()> {
        self.sync_because(Cause::Asked)
    }

    /// The same for another cause.
    pub(crate) fn sync_because(&self, cause: Cause) -> Result<()> {
        // What is buffered stays so once nothing can be written.
        self.live()?.require_whole()?;
        // The first error is the cause: after it the commit is only refused.
        write_back::sync_all(self).and(self.commit_over(0, cause))
    }

    /// Makes everything durable that was changed before the call, but for data that is buffered.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_over(0, Cause::Asked)
    }

    /// Commits if what an operation changed is to be durable when it returns.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit_if(&self, is_durable: bool) -> Result<()> {
        if is_durable { self.commit() } else { Ok(()) }
    }

    /// Commits if more than this is to be written, in bytes of tree blocks.
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
        // Who waited for another commit may find that it was enough.
        live.require_whole()?;
        // An error that is stored may be all that there is.
        let must_tell = dirty_bytes == 0
            && (self.storage.hides_failures() || self.storage.has_errors_of_writing());
        if self.dirty_tree_bytes()? <= dirty_bytes && !must_tell {
            return Ok(());
        }
        self.commit_and(live, cause, || true, |_| Ok(()))
    }

    /// Commits if a log that a crash would find may have extents where they are no more, for who
    /// can write nowhere but in place. Whether that was so. The caller must hold no handle.
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

    /// Commits the transaction `generation`, unless that is done.
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
        // Whoever had the lock before is done with its commit.
        if live.running() != generation && !self.storage.hides_failures() {
            return Ok(());
        }
        self.commit_and(live, cause, || true, |_| Ok(()))
    }

    /// Writes files back, where every commit does that. The caller may have locked inodes: what can
    /// only be written back by waiting is left out.
    fn write_back_first(&self) -> Result<()> {
        if self.options.flush_on_commit { write_back::make_room(self, || true) } else { Ok(()) }
    }

    /// Calls `work` alone, with a handle of a transaction in which `tree` was not changed yet: the
    /// tree is what all operations before have made of it, and no block of it is of that
    /// transaction. The caller must hold no handle.
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

    /// Flushes what is queued, and commits if `is_needed` then. `begin` is called alone, with a
    /// handle of the transaction that runs afterwards. The caller holds the commit lock.
    ///
    /// When members fail meanwhile, commits follow until the superblocks tell of it
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
        // One more stores the errors of this one, if there is room for that.
        let mut stores_errors = self.storage.has_errors_of_writing();
        while self.storage.hides_failures() || std::mem::take(&mut stores_errors) {
            // What was postponed waits for this one.
            let follow = || self.commit_once(live, Cause::Member, || true, |_| Ok(()));
            if let Err(error) = live.whole(follow) {
                return outcome.and(Err(error));
            }
        }
        outcome
    }

    /// The same without what follows.
    fn commit_once<'v, T>(
        &'v self,
        live: &'v Live,
        cause: Cause,
        is_needed: impl FnOnce() -> bool,
        begin: impl FnOnce(Handle<'v>) -> Result<T>,
    ) -> Result<T> {
        let begin = |core| begin(Handle::new(self, core));
        let (outcome, is_complete) = self.base.commit_running(live, self, is_needed, begin)?;
        if !is_complete {
            return outcome;
        }
        cause.count(&live.stats);
        if self.subvolumes.has_deleted() {
            live.pressure.press();
        }
        let cleared = if live.space.is_awaited() {
            // What became free is for those who wait; who makes room for them removes block groups
            // where that helps.
            live.space.serve_all();
            Ok(())
        } else {
            // What no chunk could be written down in may be free now.
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
