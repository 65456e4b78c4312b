//! Handles of the running transaction, with the rooms above it.

use std::ops::Deref;

use offshoot_vfs::Result;

use super::Engine;
use crate::space::{Reservation, Reserved};
use crate::transaction::Handle as CoreHandle;

/// A share in the running transaction, with the rooms above it.
pub(crate) struct Handle<'v> {
    volume: &'v Engine,
    core: CoreHandle<'v>,
}

impl<'v> Deref for Handle<'v> {
    type Target = CoreHandle<'v>;

    fn deref(&self) -> &CoreHandle<'v> {
        &self.core
    }
}

impl<'v> Handle<'v> {
    /// `core`, a handle of the running transaction of `volume`.
    pub(crate) fn new(volume: &'v Engine, core: CoreHandle<'v>) -> Self {
        Self { volume, core }
    }

    /// The handle, with space for so many items that is kept for it until it is dropped.
    pub(crate) fn with_reservation(self, reservation: Reservation<'v>, items: u64) -> Self {
        Self { core: self.core.with_reservation(reservation, items), ..self }
    }

    pub(crate) fn volume(&self) -> &'v Engine {
        self.volume
    }
}

impl Engine {
    /// Joins the running transaction, without space to change anything.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or something failed before.
    pub(crate) fn enter(&self) -> Result<Handle<'_>> {
        Ok(Handle::new(self, self.base.enter()?))
    }

    /// Joins the running transaction when the one before it is on the devices: until the handle is
    /// dropped the last commit stays that one.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub(crate) fn enter_committed(&self) -> Result<Handle<'_>> {
        Ok(Handle::new(self, self.base.enter_committed()?))
    }

    /// Calls `work` while nobody else has a handle. The caller must hold none.
    ///
    /// # Errors
    /// `EROFS` when something failed before, and what `work` fails with.
    pub(crate) fn alone<'v, T>(
        &'v self,
        reserved: Reserved<'v>,
        work: impl FnOnce(&Handle<'v>) -> Result<T>,
    ) -> Result<T> {
        self.base.alone(reserved, |core| work(&Handle::new(self, core)))
    }

    /// What the tree blocks take that are not on the devices yet, in bytes, with those that delayed
    /// items go to.
    pub(crate) fn dirty_tree_bytes(&self) -> Result<u64> {
        Ok(self.live()?.dirty_blocks() * u64::from(self.superblock().node_size)
            + self.delayed.dirties())
    }
}
