//! Joining the running transaction, with space reserved for the changes.

use offshoot_vfs::Result;

use super::reclaim::Maker;
use crate::engine::{Engine, Handle};
use crate::space::{
    Claim, OPERATION_ITEMS, Promise, Purpose, REMOVAL_ITEMS, Reservation, Reserved,
};
use crate::transaction::{Cause, Live};

impl Engine {
    /// Joins the running transaction, with space for one operation that changes names.
    ///
    /// The caller must hold no handle.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or when an earlier failure has ended all
    /// writing. `ENOSPC` when there is no room and none can be made.
    pub(crate) fn join(&self) -> Result<Handle<'_>> {
        self.join_for(OPERATION_ITEMS, Claim::Work)
    }

    /// Joins the running transaction to remove something. This works on a full volume too.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn join_to_remove(&self) -> Result<Handle<'_>> {
        self.join_for(REMOVAL_ITEMS, Claim::MakesRoom)
    }

    /// Joins the running transaction, with space to change `items` items.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn join_for(&self, items: u64, claim: Claim) -> Result<Handle<'_>> {
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
        let reservation =
            live.space.reserve(Purpose::Metadata, claim, bytes, &Maker { volume: self, live })?;
        Ok(Reserved(reservation, items))
    }

    /// Commits when more than `dirty_bytes` of tree blocks are dirty. From half of that on it asks
    /// the thread of the volume to commit. The caller must hold no handle.
    pub(crate) fn limit_dirty_blocks(&self) -> Result<()> {
        let live = self.live()?;
        let dirty_bytes = self.dirty_tree_bytes()?;
        if dirty_bytes > self.options.dirty_bytes {
            return self.commit_over(self.options.dirty_bytes, Cause::DirtyBlocks);
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
        live.space.reserve(Purpose::Data, Claim::Work, bytes, &Maker { volume: self, live })
    }

    /// Promises `bytes` of metadata, by which trees will grow when the data is written back. The
    /// caller must hold no handle.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn promise(&self, bytes: u64) -> Result<Promise<'_>> {
        let live = self.live()?;
        live.space.promise(bytes, &Maker { volume: self, live })
    }

    /// Joins if space for `items` is free and no other thread waits for it; otherwise returns
    /// `None`. Work that makes room or writes back may use its reserve even while other threads
    /// wait in line.
    pub(crate) fn try_join<'v>(
        &'v self,
        live: &'v Live,
        items: u64,
        claim: Claim,
    ) -> Result<Option<Handle<'v>>> {
        let core = self.base.try_join(live, items, claim)?;
        Ok(core.map(|core| Handle::new(self, core)))
    }
}
