//! Handles of the running transaction that also give access to the rooms that files need.

use std::ops::Deref;

use offshoot_vfs::Result;

use super::Rooms;
use crate::space::{Reservation, Reserved};
use crate::transaction::TransactionHandle;

/// A share in the running transaction, with the rooms that it changes.
pub(crate) struct RoomsHandle<'v> {
    volume: &'v Rooms,
    core: TransactionHandle<'v>,
}

impl<'v> Deref for RoomsHandle<'v> {
    type Target = TransactionHandle<'v>;

    fn deref(&self) -> &TransactionHandle<'v> {
        &self.core
    }
}

impl<'v> RoomsHandle<'v> {
    /// `core`, a handle of the running transaction of `volume`.
    pub(crate) fn new(volume: &'v Rooms, core: TransactionHandle<'v>) -> Self {
        Self { volume, core }
    }

    /// The handle with a reservation for `items` items, which it keeps until it is dropped.
    pub(crate) fn with_reservation(self, reservation: Reservation<'v>, items: u64) -> Self {
        Self { core: self.core.with_reservation(reservation, items), ..self }
    }

    pub(crate) fn volume(&self) -> &'v Rooms {
        self.volume
    }
}

impl Rooms {
    /// Joins the running transaction, without space to change anything.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or when an earlier failure has ended all
    /// writing.
    pub(crate) fn enter(&self) -> Result<RoomsHandle<'_>> {
        Ok(RoomsHandle::new(self, self.base.enter()?))
    }

    /// Waits until the previous transaction is on the devices, and joins the running one. Until the
    /// handle is dropped no later commit completes.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub(crate) fn enter_committed(&self) -> Result<RoomsHandle<'_>> {
        Ok(RoomsHandle::new(self, self.base.enter_committed()?))
    }

    /// Calls `work` while no other thread has a handle. The caller must hold none.
    ///
    /// # Errors
    /// `EROFS` when an earlier failure has ended all writing, and the errors of `work`.
    pub(crate) fn alone<'v, T>(
        &'v self,
        reserved: Reserved<'v>,
        work: impl FnOnce(&RoomsHandle<'v>) -> Result<T>,
    ) -> Result<T> {
        self.base.alone(reserved, |core| work(&RoomsHandle::new(self, core)))
    }

    /// The bytes of tree blocks that are not on the devices yet, with those that delayed items will
    /// dirty.
    pub(crate) fn dirty_tree_bytes(&self) -> Result<u64> {
        Ok(self.live()?.dirty_blocks() * u64::from(self.superblock().node_size)
            + self.delayed.dirties())
    }
}
