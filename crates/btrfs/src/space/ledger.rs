//! The ledger: how much of a kind of space is free, and how much of that is spoken for.
//!
//! Whoever is about to take space reserves its worst case first. A [`Reservation`] is a claim, not
//! a place: it is held while its owner takes what it needs, and ends when it is dropped. What was
//! taken meanwhile is not free any more, so it needs no claim. While both count, the
//! ledger errs towards less.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::Mutex;

use super::{Purpose, Space};
use crate::volume::Engine;

/// What is free of one kind, in block groups whose free ranges are known.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    free: AtomicU64,
    reserved: Mutex<u64>,
    /// The most that was ever spoken for.
    reserved_peak: AtomicU64,
}

impl Ledger {
    /// What is free, whether or not it is spoken for.
    pub(super) fn free(&self) -> u64 {
        self.free.load(Ordering::Acquire)
    }

    /// Takes `known` bytes out of what is free, if `keep` more than what is spoken for are left and
    /// `withdraw` agrees, which says how many they were.
    pub(super) fn withdraw(
        &self,
        known: u64,
        keep: u64,
        withdraw: impl FnOnce() -> Option<u64>,
    ) -> bool {
        let reserved = self.reserved.lock();
        if self.free().saturating_sub(known) < reserved.saturating_add(keep) {
            return false;
        }
        let withdrawn = withdraw();
        self.remove_free(withdrawn.unwrap_or(0));
        withdrawn.is_some()
    }

    /// What is spoken for.
    pub(super) fn reserved(&self) -> u64 {
        *self.reserved.lock()
    }

    /// The most that was ever spoken for.
    pub(super) fn reserved_peak(&self) -> u64 {
        self.reserved_peak.load(Ordering::Relaxed)
    }

    pub(super) fn add_free(&self, bytes: u64) {
        self.free.fetch_add(bytes, Ordering::AcqRel);
    }

    pub(super) fn remove_free(&self, bytes: u64) {
        self.free.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Reserves `bytes`, when `keep` more are left beside them and all that is spoken for.
    fn reserve(&self, bytes: u64, keep: u64) -> bool {
        let mut reserved = self.reserved.lock();
        let wanted = reserved.saturating_add(bytes).saturating_add(keep);
        let fits = wanted <= self.free();
        if fits {
            *reserved += bytes;
            self.reserved_peak.fetch_max(*reserved, Ordering::Relaxed);
        }
        fits
    }
}

/// A claim to space, until it is dropped.
pub(crate) struct Reservation<'v> {
    space: &'v Space,
    purpose: Purpose,
    bytes: Cell<u64>,
}

impl<'v> Reservation<'v> {
    /// Reserves `bytes`, when `keep` more are left beside them and all that is spoken for.
    pub(super) fn of(space: &'v Space, purpose: Purpose, bytes: u64, keep: u64) -> Option<Self> {
        let fits = space.ledger(purpose).reserve(bytes, keep);
        fits.then(|| Self { space, purpose, bytes: Cell::new(bytes) })
    }

    /// The claim that was kept as a number of bytes.
    pub(crate) fn resume(space: &'v Space, purpose: Purpose, bytes: u64) -> Self {
        Self { space, purpose, bytes: Cell::new(bytes) }
    }

    /// What is reserved, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Keeps a part of the claim as a number of bytes, until somebody resumes it: `wanted`, or as much as there is.
    pub(crate) fn keep_part(&self, wanted: u64) -> u64 {
        let part = wanted.min(self.bytes.get());
        self.bytes.set(self.bytes.get() - part);
        part
    }

    /// Keeps the claim as a number of bytes, until somebody resumes it.
    pub(crate) fn keep(self) -> u64 {
        self.bytes.take()
    }

    /// Takes space on this claim: `wanted` bytes, or less when free space is in smaller pieces, in
    /// whole sectors. The claim stays as it is.
    ///
    /// # Errors
    /// `ENOSPC` when more is wanted than was reserved.
    pub(crate) fn take(&self, volume: &Engine, wanted: u64) -> Result<(Logical, u64)> {
        let sector = u64::from(volume.superblock().sector_size);
        let is_no_space =
            |e: &Error| matches!(e, Error::Posix { errno, .. } if *errno == Errno::NOSPC);
        debug_assert!(wanted.is_multiple_of(sector), "space is taken in whole sectors");
        let mut len = wanted.min(self.bytes.get());
        loop {
            match self.space.take(volume, self.purpose, len) {
                Ok(logical) => return Ok((logical, len)),
                Err(e) if !is_no_space(&e) || len <= sector => return Err(e),
                Err(_) => len = (len / 2).next_multiple_of(sector),
            }
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        *self.space.ledger(self.purpose).reserved.lock() -= self.bytes.get();
    }
}
