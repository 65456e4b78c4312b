//! The backlog: how much is queued in all, and who waits until that is less.
//!
//! Who waits is counted before it looks at anything, and who makes the backlog smaller, or ends a
//! flush, looks after that whether anybody is counted. So nobody falls asleep over a change that it
//! has not seen.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// What is queued, in bytes of memory.
pub(super) struct Backlog {
    /// What may be queued.
    most: u64,
    /// While an operation or a flush is counting it may be off, below zero even.
    bytes: AtomicI64,
    /// The most that it was.
    peak: AtomicI64,
    waiting: AtomicUsize,
    /// How often those who wait were told that something has changed.
    told: Mutex<u64>,
    telling: Condvar,
}

impl Backlog {
    /// Nothing is queued, and no more than `most` may be.
    pub(super) fn new(most: u64) -> Self {
        Self {
            most,
            bytes: AtomicI64::new(0),
            peak: AtomicI64::new(0),
            waiting: AtomicUsize::new(0),
            told: Mutex::new(0),
            telling: Condvar::new(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::try_from(self.bytes.load(Ordering::SeqCst)).unwrap_or(0)
    }

    pub(super) fn peak(&self) -> u64 {
        u64::try_from(self.peak.load(Ordering::Relaxed)).unwrap_or(0)
    }

    pub(super) fn most(&self) -> u64 {
        self.most
    }

    fn is_too_large(&self) -> bool {
        self.bytes() > self.most
    }

    /// There is more, or less.
    pub(super) fn note(&self, more: i64) {
        let now = self.bytes.fetch_add(more, Ordering::SeqCst) + more;
        if now > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
        if more < 0 {
            self.tell();
        }
    }

    /// Something has changed for those who wait.
    pub(super) fn tell(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            *self.told.lock() += 1;
            self.telling.notify_all();
        }
    }

    /// Begins to wait until no more is queued than may be.
    pub(super) fn watch(&self) -> Watch<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Watch { backlog: self, told: 0 }
    }

    /// How many wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

/// One who waits.
pub(super) struct Watch<'b> {
    backlog: &'b Backlog,
    /// What it was told before it looked.
    told: u64,
}

impl Watch<'_> {
    /// Whether more is queued than may be.
    pub(super) fn sees_too_much(&mut self) -> bool {
        self.told = *self.backlog.told.lock();
        self.backlog.is_too_large()
    }

    /// Waits until something has changed since it looked.
    pub(super) fn wait(&self) {
        let mut told = self.backlog.told.lock();
        while *told == self.told && self.backlog.is_too_large() {
            self.backlog.telling.wait(&mut told);
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.backlog.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
