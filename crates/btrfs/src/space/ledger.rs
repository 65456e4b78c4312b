//! The ledger: how much space of one kind is free, and how much of that is claimed.
//!
//! A caller that is about to take space first claims its worst case. There are two kinds of claims:
//!
//! | | what it is for | what backs it |
//! |---|---|---|
//! | [`Reservation`] | the caller takes the space now, inside a change of a tree | free space of block groups |
//! | [`Promise`] | trees will grow by this much when buffered data is written back | free space, and the next chunk of metadata |
//!
//! A claim for buffered or queued data outlives the call. It becomes a [`Kept`]: a reservation or a
//! promise that its owner can split, add to, and drop. Dropping any claim gives it back. A `Kept`
//! counts a reference to its ledger, because it outlives the borrows of the call that made it.
//!
//! A caller that takes space for data shows the claim that covers it ([`Space::take_data`]). The
//! claim bounds each taking, and stays until the data is stored or the space is given back. The
//! claim of buffered data is in the buffer of its file. The buffer lends it while space is taken
//! (`data/buffer`), so that no block group is loaded under the lock of the buffer. That costs each
//! taking two moments of this lock.
//!
//! A claim is an amount, not an address. Space that was taken under a reservation counts twice, as
//! taken and as reserved, until the reservation ends: during one step of write-back, or while an
//! ordered extent is being written. So the ledger errs towards too little free space.
//!
//! # Overcommit
//!
//! Promises may exceed the free space. While more than half of the members belongs to no chunk, the
//! bytes of the next chunk of metadata count as well, once, with the length that it would have now.
//! For example, with 10 MiB free and a next chunk of 256 MiB, callers may get promises of up to 266
//! MiB, less the amounts below. A chunk of another kind is not allocated if that would make the
//! next chunk too short for the promises. When less of the members is unallocated, the next chunk
//! counts as 0, and the last chunks go to the callers that need one first.
//!
//! # Invariants
//!
//! `C` is the amount that the next commit needs. `K` is the reserve for operations that make room
//! (`reserve`). When a claim is granted, both of these hold:
//!
//! 1. `reserved + C + K <= free`. `K` is left out for a removal, except for its last part while a
//!    snapshot exists, and for write-back when the next chunk counts as 0.
//! 2. `reserved + promised + C + K <= free + next chunk`, with the same `K` for a removal.
//!    Write-back skips this test, because it was promised its growth.
//!
//! A thread adds to `reserved` or `promised` only under the lock of the line (`tickets`), so its
//! test is still true when it adds. Any thread may subtract without that lock, but only after the
//! space that it took is subtracted from `free`. So a test reads `reserved` before `free`.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::debug;

use super::tickets::{Claim, Demand, TicketLine, Waiter};
use super::{Purpose, Roots, Space};
use crate::counter::{NonNegativeCounter, WriteStop, below_zero};
use crate::events::RECLAIM;
use crate::shared::Shared;

/// The free and claimed space of one kind, in block groups whose free ranges are loaded, and the
/// line of waiting callers.
#[derive(Debug)]
pub(crate) struct Ledger {
    free: NonNegativeCounter,
    reserved: NonNegativeCounter,
    promised: NonNegativeCounter,
    /// The bytes that the next chunk of this kind would hold; 0 where it does not count.
    next_chunk: AtomicU64,
    /// The most that was ever claimed.
    peak: AtomicU64,
    /// The most that was ever reserved.
    reserved_peak: AtomicU64,
    line: Shared<Mutex<TicketLine>>,
    /// The length of the line, for reading without its lock.
    waiting: AtomicUsize,
    /// How many [`Reservation`]s have begun.
    begun: AtomicU64,
    /// How many of them have ended.
    ended: AtomicU64,
    /// The leader stops waiting for reservations when `ended` reaches this value.
    patience: AtomicU64,
    /// Wakes the leader, which makes room.
    wake: Condvar,
}

/// The leader waits for all reservations that exist. When this many more have ended than existed,
/// new ones arrive all the time, and the leader stops waiting.
const MORE_ENDS: u64 = 64;

/// The bytes that must remain free beside all claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Floor {
    /// The need of the commit of the running transaction.
    pub(super) commit: u64,
    /// The reserve for removals and for chunk allocation.
    pub(super) kept: u64,
    /// The part of that reserve that removals leave.
    pub(super) last: u64,
}

/// The most room that there was for a kind of space since the last ticket was granted. A cycle of
/// making room helped only if it sets a new mark. So a cycle that takes room and gives the same
/// amount back does not count, and making room always ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HighWater {
    free: u64,
    promised: u64,
}

impl HighWater {
    /// The current values.
    pub(crate) fn of(ledger: &Ledger) -> Self {
        Self { free: ledger.free(), promised: ledger.promised() }
    }

    /// Whether more is free than ever, or less is promised. If so, this sets the new mark.
    pub(crate) fn rises(&mut self, ledger: &Ledger) -> bool {
        let now = Self::of(ledger);
        let rises = now.free > self.free || now.promised < self.promised;
        self.free = self.free.max(now.free);
        self.promised = self.promised.min(now.promised);
        rises
    }
}

impl Ledger {
    /// An empty ledger of this kind of space.
    pub(super) fn new(purpose: Purpose, stop: &Arc<WriteStop>) -> Self {
        let [free, reserved, promised] = match purpose {
            Purpose::Data => ["free data", "reserved data", "promised data"],
            Purpose::Metadata => ["free metadata", "reserved metadata", "promised metadata"],
            Purpose::System => {
                ["free system space", "reserved system space", "promised system space"]
            }
        };
        Self {
            free: NonNegativeCounter::new(free, stop),
            reserved: NonNegativeCounter::new(reserved, stop),
            promised: NonNegativeCounter::new(promised, stop),
            next_chunk: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            reserved_peak: AtomicU64::new(0),
            line: Shared::new("line", Mutex::default()),
            waiting: AtomicUsize::new(0),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            patience: AtomicU64::new(0),
            wake: Condvar::new(),
        }
    }

    /// The free bytes, claimed or not.
    pub(crate) fn free(&self) -> u64 {
        self.free.get()
    }

    /// The reserved bytes.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.get()
    }

    /// The promised bytes.
    pub(crate) fn promised(&self) -> u64 {
        self.promised.get()
    }

    /// The bytes that the next chunk would hold; 0 where it does not count.
    pub(super) fn next_chunk(&self) -> u64 {
        self.next_chunk.load(SeqCst)
    }

    /// The most that was claimed at one time, in bytes.
    pub(super) fn peak(&self) -> u64 {
        self.peak.load(SeqCst)
    }

    /// The most that was reserved at one time, in bytes.
    pub(super) fn reserved_peak(&self) -> u64 {
        self.reserved_peak.load(SeqCst)
    }

    /// The line of waiting callers, locked.
    pub(crate) fn line(&self) -> MutexGuard<'_, TicketLine> {
        self.line.lock()
    }

    /// Lets the leader wait until all reservations have ended, or [`MORE_ENDS`] more than exist
    /// now. The wait also ends when more than `granted` tickets were granted, or the ticket of
    /// `own` ended; then this returns true. The wait is finite, because a thread that has a
    /// reservation never waits in a line.
    pub(crate) fn wait_for_those_under_way(&self, own: &Waiter, granted: u64) -> bool {
        let mut line = self.line();
        self.patience.store(self.begun.load(SeqCst) + MORE_ENDS, SeqCst);
        loop {
            if own.outcome().is_some() || line.granted() != granted {
                return true;
            }
            if self.have_ended() {
                return false;
            }
            debug!(
                target: RECLAIM,
                reserved = self.reserved(),
                "the leader waits for reservations of operations under way",
            );
            self.wake.wait(&mut line);
        }
    }

    /// Whether all reservations have ended, or as many as the leader waits for.
    fn have_ended(&self) -> bool {
        let ended = self.ended.load(SeqCst);
        ended >= self.patience.load(SeqCst) || ended >= self.begun.load(SeqCst)
    }

    /// Stores the length of the line, whose lock the caller holds.
    pub(super) fn note_waiting(&self, line: &TicketLine) {
        self.waiting.store(line.len(), SeqCst);
    }

    /// Grants waiting tickets that fit. Wakes the leader when a ticket was granted, or when the
    /// reservations ended that it waits for.
    pub(super) fn serve(&self, floor: &impl Fn() -> Floor) {
        if self.is_awaited() {
            let mut line = self.line();
            let granted = line.granted();
            line.serve(|line, demand| self.grant(line, demand, floor));
            self.note_waiting(&line);
            if line.granted() != granted || self.have_ended() {
                self.wake.notify_one();
            }
        }
    }

    /// Whether a ticket waits.
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    pub(super) fn add_free(&self, bytes: u64) {
        self.free.add(bytes);
    }

    pub(super) fn remove_free(&self, bytes: u64) {
        self.free.sub(bytes);
    }

    /// Grants `demand` when it fits. The caller holds the line.
    pub(super) fn grant(
        &self,
        _line: &TicketLine,
        demand: Demand,
        floor: &impl Fn() -> Floor,
    ) -> bool {
        let Demand { is_promise, bytes, .. } = demand;
        if !self.fits(demand, 0, floor) {
            return false;
        }
        if is_promise {
            self.promised.add(bytes);
        } else {
            self.reserved.add(bytes);
            self.begun.fetch_add(1, SeqCst);
        }
        let reserved = self.reserved();
        let all = reserved.saturating_add(self.promised());
        for (now, peak) in [(all, &self.peak), (reserved, &self.reserved_peak)] {
            if now > peak.load(SeqCst) {
                peak.fetch_max(now, SeqCst);
            }
        }
        true
    }

    /// Takes back a claim that was granted.
    pub(super) fn take_back(&self, demand: Demand) {
        let Demand { is_promise, bytes, .. } = demand;
        if is_promise {
            self.promised.sub(bytes);
        } else {
            self.reserved.sub(bytes);
            self.ended.fetch_add(1, SeqCst);
            self.wake.notify_one();
        }
    }

    /// Whether the invariants would hold with `demand` granted, if `more` bytes were free.
    pub(super) fn fits(&self, demand: Demand, more: u64, floor: &impl Fn() -> Floor) -> bool {
        let Demand { claim, is_promise, bytes } = demand;
        let (reserved, promised) = (self.reserved(), self.promised());
        let Floor { commit, kept, last } = floor();
        let (free, next_chunk) = (self.free().saturating_add(more), self.next_chunk());
        let kept = match claim {
            Claim::Work => kept,
            // The allocation of the chunk uses the reserve.
            Claim::WritesBack if next_chunk > 0 => kept,
            Claim::MakesRoom => last,
            Claim::WritesBack | Claim::LastResort => 0,
        };
        let now = if is_promise { 0 } else { bytes };
        let floor = reserved.saturating_add(commit).saturating_add(kept);
        let is_backed = floor.saturating_add(now) <= free;
        // Write-back was promised the growth of trees.
        let is_kept = claim == Claim::WritesBack
            || floor.saturating_add(promised).saturating_add(bytes)
                <= free.saturating_add(next_chunk);
        is_backed && is_kept
    }

    /// Whether more is promised than remains for new claims, so that some promises should be
    /// redeemed.
    pub(super) fn is_tight(&self, floor: Floor) -> bool {
        let promised = self.promised();
        let spoken = self.reserved().saturating_add(promised);
        let floor = spoken.saturating_add(floor.commit).saturating_add(floor.kept);
        let room = self.free().saturating_add(self.next_chunk()).saturating_sub(floor);
        promised > room
    }

    /// Sets the bytes that the next chunk would hold. They may decrease only because a chunk of
    /// this kind becomes free space.
    pub(crate) fn note_next_chunk(&self, bytes: u64) {
        self.next_chunk.store(bytes, SeqCst);
    }

    /// Sets the bytes that the next chunk would hold. Returns false, without a change, when that is
    /// less than before and too little for the promises.
    pub(super) fn set_next_chunk(&self, bytes: u64, floor: Floor) -> bool {
        let _line = self.line();
        let spoken = self.reserved().saturating_add(self.promised());
        let wanted = spoken.saturating_add(floor.commit).saturating_add(floor.kept);
        let fits = bytes >= self.next_chunk()
            || self.promised() == 0
            || wanted <= self.free().saturating_add(bytes);
        if fits {
            self.next_chunk.store(bytes, SeqCst);
        }
        fits
    }

    /// Subtracts free space that is withdrawn. Of the free space, `known` bytes are to be
    /// withdrawn, and all claims and `keep` bytes more must remain. If they do, `withdraw` decides,
    /// and returns how many bytes it withdrew.
    pub(super) fn withdraw(
        &self,
        known: u64,
        keep: u64,
        withdraw: impl FnOnce() -> Option<u64>,
    ) -> bool {
        let _line = self.line();
        let spoken = self.reserved().saturating_add(self.promised());
        if self.free().saturating_sub(known) < spoken.saturating_add(keep) {
            return false;
        }
        let withdrawn = withdraw();
        self.remove_free(withdrawn.unwrap_or(0));
        withdrawn.is_some()
    }
}

/// A claim to free space, for an operation under way, until it is dropped.
pub(crate) struct Reservation<'v> {
    space: &'v Arc<Space>,
    purpose: Purpose,
    bytes: Cell<u64>,
}

impl<'v> Reservation<'v> {
    /// Wraps a claim that was granted.
    pub(super) fn granted(space: &'v Arc<Space>, purpose: Purpose, bytes: u64) -> Self {
        // The ledger counted it when it was granted, because the owner may wake much later.
        Self { space, purpose, bytes: Cell::new(bytes) }
    }

    /// The reserved bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Moves all of it to a [`Kept`].
    pub(crate) fn keep(&self) -> Kept {
        let mut kept = Kept::none(self.space, KeptAs::Reserved(self.purpose));
        kept.take_over(self, u64::MAX);
        kept
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let ledger = self.space.ledger(self.purpose);
        ledger.reserved.sub(self.bytes.get());
        ledger.ended.fetch_add(1, SeqCst);
        self.space.serve(self.purpose);
    }
}

/// A claim to metadata that will exist, until it is dropped.
pub(crate) struct Promise<'v> {
    space: &'v Arc<Space>,
    bytes: u64,
}

impl<'v> Promise<'v> {
    /// Wraps a claim that was granted.
    pub(super) fn granted(space: &'v Arc<Space>, bytes: u64) -> Self {
        Self { space, bytes }
    }

    /// Moves it to a [`Kept`].
    pub(crate) fn keep(self) -> Kept {
        let mut kept = Kept::none(self.space, KeptAs::Promised);
        kept.add(self);
        kept
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.space.give_up(KeptAs::Promised, self.bytes);
    }
}

/// The kind of a claim that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptAs {
    /// Free space of this kind.
    Reserved(Purpose),
    /// Metadata that will exist.
    Promised,
}

/// A claim for buffered or queued data, until it is dropped. Its owner is not under way, so the
/// leader does not wait for it.
pub(crate) struct Kept {
    space: Arc<Space>,
    what: KeptAs,
    bytes: u64,
}

impl Kept {
    /// An empty claim.
    pub(crate) fn none(space: &Arc<Space>, what: KeptAs) -> Self {
        Self { space: space.clone(), what, bytes: 0 }
    }

    /// The bytes of the claim.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes over at most `most` bytes of a reservation. Returns how many these were.
    pub(crate) fn take_over(&mut self, reservation: &Reservation<'_>, most: u64) -> u64 {
        debug_assert_eq!(self.what, KeptAs::Reserved(reservation.purpose));
        let part = most.min(reservation.bytes());
        reservation.bytes.set(reservation.bytes() - part);
        self.bytes += part;
        part
    }

    /// Takes over a promise.
    pub(crate) fn add(&mut self, mut promise: Promise<'_>) {
        debug_assert_eq!(self.what, KeptAs::Promised);
        self.bytes += std::mem::take(&mut promise.bytes);
    }

    /// Splits off `bytes`, as [`pass`](Self::pass) does.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let mut part = Self::none(&self.space, self.what);
        self.pass(&mut part, bytes);
        part
    }

    /// Passes `bytes` to another claim. If this one has less, the caller has counted wrong: it
    /// passes the rest, and all writing ends.
    pub(crate) fn pass(&mut self, to: &mut Self, bytes: u64) {
        debug_assert_eq!(self.what, to.what);
        let part = bytes.min(self.bytes);
        if part < bytes {
            self.space.stop.set(&self.lacks(bytes).to_string());
        }
        self.bytes -= part;
        to.bytes += part;
    }

    /// The error that the claim has less than `bytes`.
    fn lacks(&self, bytes: u64) -> Error {
        below_zero("kept", self.bytes, bytes)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, {:?}", self.bytes, self.what)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.space.give_up(self.what, self.bytes);
    }
}

impl Space {
    /// Subtracts `bytes` from the claims of this kind.
    fn give_up(&self, what: KeptAs, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let purpose = match what {
            KeptAs::Reserved(purpose) => {
                self.ledger(purpose).reserved.sub(bytes);
                purpose
            }
            KeptAs::Promised => {
                self.ledger(Purpose::Metadata).promised.sub(bytes);
                Purpose::Metadata
            }
        };
        self.serve(purpose);
    }

    /// Takes space for data under `claim`: `wanted` bytes, or the longest piece when free space is
    /// in smaller pieces, in whole sectors. The claim stays.
    ///
    /// # Errors
    /// `ENOSPC` when less is free than was reserved. When the claim has less than `wanted`, the
    /// caller has counted wrong, and all writing ends.
    pub(crate) fn take_data(
        &self,
        volume: &dyn Roots,
        claim: &Kept,
        wanted: u64,
    ) -> Result<(Logical, u64)> {
        debug_assert_eq!(claim.what, KeptAs::Reserved(Purpose::Data));
        if claim.bytes < wanted {
            let error = claim.lacks(wanted);
            self.stop.set(&error.to_string());
            return Err(error);
        }
        let sector = u64::from(volume.superblock().sector_size);
        let is_no_space =
            |e: &Error| matches!(e, Error::Posix { errno, .. } if *errno == Errno::NOSPC);
        debug_assert!(wanted.is_multiple_of(sector), "space is taken in whole sectors");
        match self.take(volume, Purpose::Data, wanted) {
            Err(error) if is_no_space(&error) => {}
            taken => return taken.map(|logical| (logical, wanted)),
        }
        if let Some(piece) = self.take_longest(wanted, sector) {
            return Ok((Logical(piece.start), piece.end - piece.start));
        }
        // A piece that is being discarded may come back.
        Ok((self.take(volume, Purpose::Data, sector)?, sector))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before the mend, a create was refused at the end of a cycle in which other callers had given
    /// up promises.
    #[test]
    fn the_mark_rises_with_what_is_free_and_falls_with_what_is_promised() {
        let ledger = Ledger::new(Purpose::Metadata, &Arc::default());
        ledger.add_free(100);
        ledger.promised.add(50);
        let mut most = HighWater::of(&ledger);
        assert!(!most.rises(&ledger), "nothing changed");
        ledger.add_free(20);
        assert!(most.rises(&ledger) && !most.rises(&ledger));
        // Taking and giving back the same amount is no progress.
        ledger.remove_free(60);
        assert!(!most.rises(&ledger));
        ledger.add_free(60);
        assert!(!most.rises(&ledger));
        ledger.promised.sub(10);
        assert!(most.rises(&ledger) && !most.rises(&ledger));
        ledger.promised.add(5);
        assert!(!most.rises(&ledger));
    }
}
