//! A reader-writer lock for a value that all threads read and few threads change.
//!
//! A thread that takes a [`RwLock`](crate::sync::RwLock) shared still writes to its cache line, so
//! many cores that only read wait for each other. A [`SpreadRwLock`] has several copies of the
//! value, each with a lock. A thread that reads takes the lock of its own copy. A thread that
//! changes the value takes the locks of all copies and changes each of them.
//!
//! Without more, a writer would wait for one copy after the other while new readers take those
//! behind, and with 32 copies it could wait 32 times as long as for one lock. So a writer first
//! says that it is there, and readers that come then wait until it is done.

use std::ops::Deref;

use crate::cores;
use crate::shared::{Padded, Shared};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The number of copies. The model checker needs two to see a writer that has some of them.
const COPIES: usize = if cfg!(feature = "shuttle") { 2 } else { 32 };

/// The most copies of a lock with few.
const FEW: usize = if cfg!(feature = "shuttle") { 2 } else { 8 };

/// The number of this thread, below [`COPIES`].
#[cfg(not(feature = "shuttle"))]
fn own_number() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = THREADS.fetch_add(1, Ordering::Relaxed) % COPIES;
    }
    OWN.with(|own| *own)
}

/// The number of this thread, which is the same in each run of a schedule.
#[cfg(feature = "shuttle")]
fn own_number() -> usize {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    crate::sync::thread::current().id().hash(&mut hasher);
    usize::from(hasher.finish() % 2 == 1)
}

/// A reader-writer lock with several copies of the value.
pub struct SpreadRwLock<T> {
    copies: Box<[Padded<RwLock<T>>]>,
    /// Whether a thread takes or holds all copies. It only keeps readers from coming in between: a
    /// reader that sees an old value finds its copy locked, or makes the writer wait for it.
    is_closing: Padded<AtomicBool>,
    /// Held exclusively by that thread, before its copies. Counted as a lock that all threads
    /// share.
    queue: Shared<RwLock<()>>,
}

/// A [`SpreadRwLock`] that is held exclusively.
pub struct SpreadWriteGuard<'l, T> {
    // Dropped in this order: a reader that leaves the queue finds its copy free.
    copies: Vec<RwLockWriteGuard<'l, T>>,
    _closing: Closing<'l>,
    _queue: RwLockWriteGuard<'l, ()>,
}

/// Clears the flag of a lock when it is dropped.
struct Closing<'l>(&'l AtomicBool);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> SpreadRwLock<T> {
    /// The lock, whose exclusive takings are counted as `name`. `make` makes equal copies of the
    /// value.
    pub fn new(name: &'static str, make: impl Fn() -> T) -> Self {
        Self::with_copies(COPIES, name, make)
    }

    /// As [`new`](Self::new), for locks of which there are many and for large values: with a copy
    /// for each CPU, eight at most.
    pub fn with_few_copies(name: &'static str, make: impl Fn() -> T) -> Self {
        let few = if cfg!(feature = "shuttle") { FEW } else { cores::count().clamp(1, FEW) };
        Self::with_copies(few, name, make)
    }

    fn with_copies(copies: usize, name: &'static str, make: impl Fn() -> T) -> Self {
        let copies = (0..copies).map(|_| Padded(RwLock::new(make()))).collect();
        let queue = Shared::new(name, RwLock::new(()));
        Self { copies, is_closing: Padded(AtomicBool::new(false)), queue }
    }

    /// Takes the lock shared. The thread must not hold it already.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        if self.is_closing.load(Ordering::Acquire) {
            drop(self.queue.read());
        }
        self.own_copy().read()
    }

    /// Takes the lock shared, if no thread holds or awaits it exclusively.
    #[must_use]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        if self.is_closing.load(Ordering::Acquire) { None } else { self.own_copy().try_read() }
    }

    fn own_copy(&self) -> &RwLock<T> {
        &self.copies[own_number() % self.copies.len()]
    }

    /// Takes the lock exclusively.
    #[must_use]
    pub fn write(&self) -> SpreadWriteGuard<'_, T> {
        let queue = self.queue.write();
        self.is_closing.store(true, Ordering::Release);
        let closing = Closing(&self.is_closing);
        let copies = self.copies.iter().map(|copy| copy.write()).collect();
        SpreadWriteGuard { copies, _closing: closing, _queue: queue }
    }
}

impl<T> Deref for SpreadWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.copies[0]
    }
}

impl<T> SpreadWriteGuard<'_, T> {
    /// Makes the same change to every copy. `change` must not panic.
    pub fn change(&mut self, mut change: impl FnMut(&mut T)) {
        for copy in &mut self.copies {
            change(copy);
        }
    }
}

impl<T> std::fmt::Debug for SpreadRwLock<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SpreadRwLock")
    }
}

#[cfg(test)]
mod tests;
