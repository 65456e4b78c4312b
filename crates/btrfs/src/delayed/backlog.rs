//! The backlog: how much is queued in all, and the writers that wait until it is less.
//!
//! A waiting writer registers before it looks at the backlog. A thread that makes the backlog
//! smaller, or ends a flush, looks for registered writers after that. So no writer falls asleep
//! over a change that it has not seen.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// The bytes of memory of all queued items.
pub(super) struct Backlog {
    /// The most bytes that may be queued.
    most: u64,
    /// While an operation or a flush is counting, this may be wrong, even negative.
    bytes: AtomicI64,
    /// The highest value of `bytes`.
    peak: AtomicI64,
    waiting: AtomicUsize,
    /// The number of times that waiting writers were woken.
    told: Mutex<u64>,
    telling: Condvar,
}

impl Backlog {
    /// An empty backlog with the limit `most`.
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

    /// Adds `more` bytes, which may be negative.
    pub(super) fn note(&self, more: i64) {
        let now = self.bytes.fetch_add(more, Ordering::SeqCst) + more;
        if now > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
        if more < 0 {
            self.tell();
        }
    }

    /// Wakes the waiting writers.
    pub(super) fn tell(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            *self.told.lock() += 1;
            self.telling.notify_all();
        }
    }

    /// Registers a writer that waits until the backlog is within its limit.
    pub(super) fn watch(&self) -> BacklogWatch<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        BacklogWatch { backlog: self, told: 0 }
    }

    /// The number of registered writers.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

/// A registered writer.
pub(super) struct BacklogWatch<'b> {
    backlog: &'b Backlog,
    /// The value of `told` before it last looked.
    told: u64,
}

impl BacklogWatch<'_> {
    /// Whether the backlog exceeds its limit.
    pub(super) fn sees_too_much(&mut self) -> bool {
        self.told = *self.backlog.told.lock();
        self.backlog.is_too_large()
    }

    /// Waits until a wake-up since the last look.
    pub(super) fn wait(&self) {
        let mut told = self.backlog.told.lock();
        while *told == self.told && self.backlog.is_too_large() {
            self.backlog.telling.wait(&mut told);
        }
    }
}

impl Drop for BacklogWatch<'_> {
    fn drop(&mut self) {
        self.backlog.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
