//! The ledger: how much of a kind of space is free, and how much of that is spoken for.
//!
//! A caller that is about to take space claims its worst case first. There are two ways:
//!
//! | | what it is | what backs it |
//! |---|---|---|
//! | [`Reservation`] | a caller takes the space now, inside a change of a tree | free space of block groups |
//! | [`Promise`] | trees will become larger by it when what is buffered is written back | the same, and the next chunk of metadata |
//!
//! A claim that outlives the call, for what is buffered or queued, is a [`Kept`]: a reservation or a
//! promise that its owner splits, takes over from others, and drops.
//!
//! Promises may go beyond what is free: where most of the members belongs to no chunk, the space of
//! one that is not allocated yet counts for them (*overcommit*). It counts once, with the length
//! that this chunk would have if it were allocated now, and no chunk of another kind is allocated
//! that would make it shorter than what is promised. Elsewhere it counts for nothing, and the last
//! chunks go to who needs one first.
//!
//! Neither is a place. What was taken on a reservation is not free any more and needs none; while
//! both count, the ledger errs towards less: for one step of write-back, or while an ordered extent
//! is on its way. With what a commit needs (`C`) and what is kept for making room (`K`, see
//! `reserve`), these hold whenever something is granted:
//!
//! 1. `reserved + C + K <= free`; without `K` for a removal, and for write-back where no chunk
//!    counts.
//! 2. `reserved + promised + C + K <= free + next chunk`; without `K` for a removal. Write-back was
//!    promised what it adds.
//!
//! Only who holds the line (`tickets`) adds to what is spoken for, so what is granted was there.
//! Anybody takes away from it without that lock, after what was taken has been counted: so
//! `reserved` is read before `free`.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::tickets::{Demand, Kind, Line, Waiter};
use super::{Purpose, Roots, Space};
use crate::counter::{Counter, Stop, below_zero};

/// What is free of one kind, in block groups whose free ranges are known, and who waits for it.
#[derive(Debug)]
pub(crate) struct Ledger {
    free: Counter,
    reserved: Counter,
    promised: Counter,
    /// What the next chunk of this kind would hold, where that counts, in bytes.
    next_chunk: AtomicU64,
    /// The most that was ever spoken for.
    peak: AtomicU64,
    /// The most of that which was reserved.
    reserved_peak: AtomicU64,
    line: Mutex<Line>,
    /// How many are in the line, to be looked at without its lock.
    waiting: AtomicUsize,
    /// How many [`Reservation`]s have begun.
    begun: AtomicU64,
    /// How many of them have ended.
    ended: AtomicU64,
    /// How many are to have ended when who makes room waits no longer for those that are left.
    patience: AtomicU64,
    /// Told when who makes room can go on.
    wake: Condvar,
}

/// Who makes room waits for all who have something reserved. When so many more have ended than
/// there were, others come again and again.
const MORE_ENDS: u64 = 64;

/// What must be left beside everything that is spoken for, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Floor {
    /// What the commit of the running transaction needs.
    pub(crate) commit: u64,
    /// What is kept for removals and for chunk allocation.
    pub(crate) kept: u64,
    /// What removals leave of that.
    pub(crate) last: u64,
}

/// The most room that there was for a kind of space since a ticket was granted last. Work that
/// makes room without end sets no new mark, so a cycle that takes room and gives as much back does
/// not count as one that helped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HighWater {
    free: u64,
    promised: u64,
}

impl HighWater {
    /// What there is now.
    pub(crate) fn of(ledger: &Ledger) -> Self {
        Self { free: ledger.free(), promised: ledger.promised() }
    }

    /// Whether more is free now than ever, or less is promised, which makes it the new mark.
    pub(crate) fn rises(&mut self, ledger: &Ledger) -> bool {
        let now = Self::of(ledger);
        let rises = now.free > self.free || now.promised < self.promised;
        self.free = self.free.max(now.free);
        self.promised = self.promised.min(now.promised);
        rises
    }
}

impl Ledger {
    /// The ledger of this kind of space, in which nothing is free yet.
    pub(crate) fn new(purpose: Purpose, stop: &Arc<Stop>) -> Self {
        let [free, reserved, promised] = match purpose {
            Purpose::Data => ["free data", "reserved data", "promised data"],
            Purpose::Metadata => ["free metadata", "reserved metadata", "promised metadata"],
            Purpose::System => {
                ["free system space", "reserved system space", "promised system space"]
            }
        };
        Self {
            free: Counter::new(free, stop),
            reserved: Counter::new(reserved, stop),
            promised: Counter::new(promised, stop),
            next_chunk: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            reserved_peak: AtomicU64::new(0),
            line: Mutex::default(),
            waiting: AtomicUsize::new(0),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            patience: AtomicU64::new(0),
            wake: Condvar::new(),
        }
    }

    /// What is free, whether or not it is spoken for.
    pub(crate) fn free(&self) -> u64 {
        self.free.get()
    }

    /// What somebody takes now.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.get()
    }

    /// What somebody will take.
    pub(crate) fn promised(&self) -> u64 {
        self.promised.get()
    }

    /// What the next chunk would hold, where that counts.
    pub(crate) fn next_chunk(&self) -> u64 {
        self.next_chunk.load(SeqCst)
    }

    /// The most that was spoken for at a time.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(SeqCst)
    }

    /// The most that was reserved at a time.
    pub(crate) fn reserved_peak(&self) -> u64 {
        self.reserved_peak.load(SeqCst)
    }

    /// The line of who waits, locked.
    pub(crate) fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock()
    }

    /// Waits until all reservations have ended, and no longer than until as many have as there were
    /// and [`MORE_ENDS`] more, or until more than `granted` tickets were granted or that of `own`
    /// has come to its end; whether that was so. Nobody waits in a line who has a reservation, so
    /// this ends.
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
            self.wake.wait(&mut line);
        }
    }

    /// Whether all reservations have ended, or as many as who makes room waits for.
    fn have_ended(&self) -> bool {
        let ended = self.ended.load(SeqCst);
        ended >= self.patience.load(SeqCst) || ended >= self.begun.load(SeqCst)
    }

    /// Notes how many wait in the line, whose lock is held.
    pub(crate) fn note_waiting(&self, line: &Line) {
        self.waiting.store(line.len(), SeqCst);
    }

    /// Grants what fits to those who wait, and wakes who makes room when somebody was served, or
    /// when those have ended who were under way.
    pub(crate) fn serve(&self, floor: &impl Fn() -> Floor) {
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

    /// Whether somebody waits.
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    pub(crate) fn add_free(&self, bytes: u64) {
        self.free.add(bytes);
    }

    pub(crate) fn remove_free(&self, bytes: u64) {
        self.free.sub(bytes);
    }

    /// Grants `demand` when it fits. The caller holds the line.
    pub(crate) fn grant(&self, _line: &Line, demand: Demand, floor: &impl Fn() -> Floor) -> bool {
        let Demand { kind, bytes } = demand;
        if !self.fits(demand, 0, floor) {
            return false;
        }
        if kind == Kind::Promise {
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

    /// Takes back what was granted.
    pub(crate) fn take_back(&self, demand: Demand) {
        let Demand { kind, bytes } = demand;
        if kind == Kind::Promise {
            self.promised.sub(bytes);
        } else {
            self.reserved.sub(bytes);
            self.ended.fetch_add(1, SeqCst);
            self.wake.notify_one();
        }
    }

    /// Whether the invariants would hold with `demand` granted, if `more` bytes were free.
    pub(crate) fn fits(&self, demand: Demand, more: u64, floor: &impl Fn() -> Floor) -> bool {
        let Demand { kind, bytes } = demand;
        let (reserved, promised) = (self.reserved(), self.promised());
        let Floor { commit, kept, last } = floor();
        let (free, next_chunk) = (self.free().saturating_add(more), self.next_chunk());
        let kept = match kind {
            Kind::Work | Kind::Promise => kept,
            // A chunk is allocated with what is kept.
            Kind::WritesBack if next_chunk > 0 => kept,
            Kind::MakesRoom => last,
            Kind::WritesBack | Kind::LastResort => 0,
        };
        let now = if kind == Kind::Promise { 0 } else { bytes };
        let floor = reserved.saturating_add(commit).saturating_add(kept);
        let is_backed = floor.saturating_add(now) <= free;
        // What this makes trees larger by was promised.
        let is_kept = kind == Kind::WritesBack
            || floor.saturating_add(promised).saturating_add(bytes)
                <= free.saturating_add(next_chunk);
        is_backed && is_kept
    }

    /// Whether more is promised than is left for others: time to redeem some.
    pub(crate) fn is_tight(&self, floor: Floor) -> bool {
        let promised = self.promised();
        let spoken = self.reserved().saturating_add(promised);
        let floor = spoken.saturating_add(floor.commit).saturating_add(floor.kept);
        let room = self.free().saturating_add(self.next_chunk()).saturating_sub(floor);
        promised > room
    }

    /// The next chunk would hold `bytes` now. Less than before it does only where nothing was taken
    /// from it: while a chunk of this kind becomes free space.
    pub(crate) fn note_next_chunk(&self, bytes: u64) {
        self.next_chunk.store(bytes, SeqCst);
    }

    /// The next chunk would hold `bytes` now; `false`, and nothing has changed, when that is less
    /// than before and too little for what is promised.
    pub(crate) fn set_next_chunk(&self, bytes: u64, floor: Floor) -> bool {
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

    /// Takes `known` bytes out of what is free, if `keep` more than what is spoken for are left and
    /// `withdraw` agrees, which says how many they were.
    pub(crate) fn withdraw(
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

/// A claim to space that is there, for an operation that is under way, until it is dropped.
pub(crate) struct Reservation<'v> {
    space: &'v Arc<Space>,
    purpose: Purpose,
    bytes: Cell<u64>,
}

impl<'v> Reservation<'v> {
    /// What was granted.
    pub(super) fn granted(space: &'v Arc<Space>, purpose: Purpose, bytes: u64) -> Self {
        // It was counted when it was granted: its owner may be asleep for long.
        Self { space, purpose, bytes: Cell::new(bytes) }
    }

    /// What is reserved, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Keeps all of it for later.
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

/// A claim to metadata that will be there, until it is dropped.
pub(crate) struct Promise<'v> {
    space: &'v Arc<Space>,
    bytes: u64,
}

impl<'v> Promise<'v> {
    /// What was granted.
    pub(super) fn granted(space: &'v Arc<Space>, bytes: u64) -> Self {
        Self { space, bytes }
    }

    /// Keeps it for later.
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

/// What a claim that is kept is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptAs {
    /// Space of this kind that is there.
    Reserved(Purpose),
    /// Metadata that will be there.
    Promised,
}

/// A claim that is kept for what is buffered or queued, until it is dropped. Its owner is not under
/// way, so who makes room does not wait for it.
pub(crate) struct Kept {
    space: Arc<Space>,
    what: KeptAs,
    bytes: u64,
}

impl Kept {
    /// A claim to nothing yet.
    pub(crate) fn none(space: &Arc<Space>, what: KeptAs) -> Self {
        Self { space: space.clone(), what, bytes: 0 }
    }

    /// What is kept, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes over a part of a reservation, `most` bytes of it or all, and gives how many that were.
    pub(crate) fn take_over(&mut self, reservation: &Reservation<'_>, most: u64) -> u64 {
        debug_assert_eq!(self.what, KeptAs::Reserved(reservation.purpose));
        let part = most.min(reservation.bytes());
        reservation.bytes.set(reservation.bytes() - part);
        self.bytes += part;
        part
    }

    /// Adds what was promised.
    pub(crate) fn add(&mut self, mut promise: Promise<'_>) {
        debug_assert_eq!(self.what, KeptAs::Promised);
        self.bytes += std::mem::take(&mut promise.bytes);
    }

    /// Splits off so many bytes. A caller that wants more than there is has counted wrong: it gets
    /// what there is, and all writing ends.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let part = bytes.min(self.bytes);
        if part < bytes {
            self.space.stop.set(&below_zero("kept", self.bytes, bytes).to_string());
        }
        self.bytes -= part;
        Self { space: self.space.clone(), what: self.what, bytes: part }
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
    /// Counts so much less that is spoken for.
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

    /// Takes space of data that the caller has reserved, and that stays reserved: `wanted` bytes, or
    /// less when free space is in smaller pieces, in whole sectors.
    ///
    /// # Errors
    /// `ENOSPC` when there is less than was reserved.
    pub(crate) fn take_data(&self, volume: &dyn Roots, wanted: u64) -> Result<(Logical, u64)> {
        let sector = u64::from(volume.superblock().sector_size);
        let is_no_space =
            |e: &Error| matches!(e, Error::Posix { errno, .. } if *errno == Errno::NOSPC);
        debug_assert!(wanted.is_multiple_of(sector), "space is taken in whole sectors");
        let mut len = wanted;
        loop {
            match self.take(volume, Purpose::Data, len) {
                Ok(logical) => return Ok((logical, len)),
                Err(e) if !is_no_space(&e) || len <= sector => return Err(e),
                Err(_) => len = (len / 2).next_multiple_of(sector),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A create was refused at the end of a cycle in which others had given up what was promised to
    /// them.
    #[test]
    fn the_mark_rises_with_what_is_free_and_falls_with_what_is_promised() {
        let ledger = Ledger::new(Purpose::Metadata, &Arc::default());
        ledger.add_free(100);
        ledger.promised.add(50);
        let mut most = HighWater::of(&ledger);
        assert!(!most.rises(&ledger), "nothing changed");
        ledger.add_free(20);
        assert!(most.rises(&ledger) && !most.rises(&ledger));
        // What is taken and given back is no progress.
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
