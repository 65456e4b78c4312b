//! Joining the running transaction, with space reserved for the changes; and commits.

use offshoot_vfs::Result;

use super::{Rooms, RoomsHandle, write_back};
use crate::space::{
    Claim, MakesRoom, OPERATION_ITEMS, Promise, Purpose, REMOVAL_ITEMS, Reservation, Reserved,
    Waiter,
};
use crate::stats::EngineCounters;
use crate::transaction::{ChangingTree, CommitCause, LiveVolume, Obstacle};

/// What leads a line: the volume that it makes room in.
struct RoomMaker<'v> {
    volume: &'v Rooms,
    live: &'v LiveVolume,
}

impl MakesRoom for RoomMaker<'_> {
    fn stats(&self) -> &EngineCounters {
        &self.live.stats
    }

    fn require_writing(&self) -> Result<()> {
        self.live.require_writing()
    }

    fn ask_for_commit(&self) {
        self.live.ask_for_commit();
    }

    fn lead(&self, purpose: Purpose, own: &Waiter) -> Result<()> {
        self.volume.upkeep.lead(self.volume, purpose, own)
    }
}

impl Rooms {
    /// Joins the running transaction, with space for one operation that changes names.
    ///
    /// The caller must hold no handle.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or when an earlier failure has ended all
    /// writing. `ENOSPC` when there is no room and none can be made.
    pub(crate) fn join(&self) -> Result<RoomsHandle<'_>> {
        self.join_for(OPERATION_ITEMS, Claim::Work)
    }

    /// Joins the running transaction to remove something. This works on a full volume too.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn join_to_remove(&self) -> Result<RoomsHandle<'_>> {
        self.join_for(REMOVAL_ITEMS, Claim::MakesRoom)
    }

    /// Joins the running transaction, with space to change `items` items.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn join_for(&self, items: u64, claim: Claim) -> Result<RoomsHandle<'_>> {
        let Reserved(reservation, items) = self.reserve_for(items, claim)?;
        Ok(self.enter()?.with_reservation(reservation, items))
    }

    /// Reserves space to change `items` items, for a caller that quiesces the transaction
    /// afterwards. The caller must hold no handle.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn reserve_for(&self, items: u64, claim: Claim) -> Result<Reserved<'_>> {
        let live = self.live()?;
        self.delayed.limit(&self.base)?;
        self.limit_dirty_blocks()?;
        let bytes = live.space.cost(items);
        let reservation = live.space.reserve(
            Purpose::Metadata,
            claim,
            bytes,
            &RoomMaker { volume: self, live },
        )?;
        Ok(Reserved(reservation, items))
    }

    /// Commits when more than `dirty_bytes` of tree blocks are dirty. From half of that on it asks
    /// the thread of the volume to commit. The caller must hold no handle.
    pub(crate) fn limit_dirty_blocks(&self) -> Result<()> {
        let live = self.live()?;
        let dirty_bytes = self.dirty_tree_bytes()?;
        if dirty_bytes > self.options.dirty_bytes {
            return self.commit_over(self.options.dirty_bytes, CommitCause::DirtyBlocks);
        }
        if dirty_bytes > self.options.dirty_bytes / 2 {
            live.pressure.press();
        }
        Ok(())
    }

    /// Reserves space for `bytes` of data, rounded up to sectors, before a write is accepted. The
    /// caller must hold no handle.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn reserve_data(&self, bytes: u64) -> Result<Reservation<'_>> {
        let live = self.live()?;
        let bytes = bytes.next_multiple_of(u64::from(self.superblock().sector_size));
        live.space.reserve(Purpose::Data, Claim::Work, bytes, &RoomMaker { volume: self, live })
    }

    /// Promises `bytes` of metadata, by which trees will grow when the data is written back. The
    /// caller must hold no handle.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn promise(&self, bytes: u64) -> Result<Promise<'_>> {
        let live = self.live()?;
        live.space.promise(bytes, &RoomMaker { volume: self, live })
    }

    /// Joins if space for `items` is free and no other thread waits for it; otherwise returns
    /// `None`. Work that makes room or writes back may use its reserve even while other threads
    /// wait in line.
    pub(crate) fn try_join<'v>(
        &'v self,
        live: &'v LiveVolume,
        items: u64,
        claim: Claim,
    ) -> Result<Option<RoomsHandle<'v>>> {
        let core = self.base.try_join(live, items, claim)?;
        Ok(core.map(|core| RoomsHandle::new(self, core)))
    }

    /// Makes everything that was changed before the call durable.
    ///
    /// # Errors
    /// When a device fails: the devices then hold the last commit, and nothing more is written.
    /// `EROFS` when that happened before the call.
    pub(crate) fn sync(&self) -> Result<()> {
        self.sync_because(CommitCause::Asked)
    }

    /// As [`sync`](Self::sync), counted under `cause`.
    pub(crate) fn sync_because(&self, cause: CommitCause) -> Result<()> {
        // Buffered data stays buffered once writing has ended.
        self.live()?.require_writing()?;
        // The first error is the cause. After it the commit only returns `EROFS`.
        write_back::sync_all(self).and(self.commit_over(0, cause))
    }

    /// Makes everything that was changed before the call durable, except buffered data.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_over(0, CommitCause::Asked)
    }

    /// Commits if the changes of an operation must be durable when it returns.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit_if(&self, is_durable: bool) -> Result<()> {
        if is_durable { self.commit() } else { Ok(()) }
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
            self.commit_over(0, CommitCause::Space)?;
        }
        Ok(is_so)
    }

    /// Commits if more than `dirty_bytes` of tree blocks are dirty. The caller must hold no handle.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub(crate) fn commit_over(&self, dirty_bytes: u64, cause: CommitCause) -> Result<()> {
        self.upkeep.commit_over(self, dirty_bytes, cause)
    }

    /// Calls `work` while no other thread has a handle, with a handle of a transaction in which
    /// `tree` is not changed yet. The tree then holds the changes of all earlier operations, and no
    /// block of it belongs to that transaction. The caller must hold no handle.
    ///
    /// # Errors
    /// As [`sync`](Self::sync), and what `work` fails with.
    pub(crate) fn at_rest<'v, T>(
        &'v self,
        tree: &ChangingTree,
        reserved: Reserved<'v>,
        work: impl FnOnce(&RoomsHandle<'v>) -> Result<T>,
    ) -> Result<T> {
        let mut outcome = None;
        let alone = |handle: RoomsHandle<'v>| {
            handle.obstruct(Obstacle::Subvolumes);
            outcome = Some(work(&handle.with_reservation(reserved.0, reserved.1))?);
            Ok(())
        };
        self.upkeep.at_rest(self, tree, Box::new(alone))?;
        Ok(outcome.expect("upkeep calls the work, or fails"))
    }
}
