//! Locks that the model checker hands out.
//!
//! A thread that has the permits of a lock finds the `parking_lot` lock behind them free, so that
//! lock never blocks. Writers get in as with `parking_lot`: a writer that waits for readers to
//! leave keeps new readers out. So a thread that takes one lock shared twice can wait for ever, and
//! the checker finds that.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use parking_lot::RawRwLock;
use parking_lot::lock_api::{ArcRwLockReadGuard, ArcRwLockWriteGuard};
use shuttle::future::batch_semaphore::{BatchSemaphore, Fairness};
use shuttle::future::block_on;

/// The permits of a lock; a reader takes one, a writer all.
const PERMITS: usize = 1 << 16;

const FREE: &str = "a thread with the permits finds the lock free";

/// A reader-writer lock.
pub struct RwLock<T> {
    permits: Arc<BatchSemaphore>,
    value: Arc<parking_lot::RwLock<T>>,
}

/// A lock that is held.
pub struct Guard<'a, G> {
    // Dropped first, so that the next thread with the permits finds the lock free.
    held: G,
    _permits: Permits,
    lock: PhantomData<&'a ()>,
}

pub type RwLockReadGuard<'a, T> = Guard<'a, ArcRwLockReadGuard<RawRwLock, T>>;
pub type RwLockWriteGuard<'a, T> = Guard<'a, ArcRwLockWriteGuard<RawRwLock, T>>;
pub type MutexGuard<'a, T> = RwLockWriteGuard<'a, T>;
pub type ArcReadGuard<T> = RwLockReadGuard<'static, T>;
pub type ArcWriteGuard<T> = RwLockWriteGuard<'static, T>;

struct Permits {
    of: Arc<BatchSemaphore>,
    count: usize,
}

impl Drop for Permits {
    fn drop(&mut self) {
        self.of.release(self.count);
    }
}

impl<T> RwLock<T> {
    pub fn new(value: T) -> Self {
        Self {
            permits: Arc::new(BatchSemaphore::const_new(PERMITS, Fairness::Unfair)),
            value: Arc::new(parking_lot::RwLock::new(value)),
        }
    }

    fn guard<'a, G>(&self, count: usize, take: impl FnOnce() -> Option<G>) -> Guard<'a, G> {
        let permits = Permits { of: self.permits.clone(), count };
        Guard { held: take().expect(FREE), _permits: permits, lock: PhantomData }
    }

    fn shared<'a>(&self) -> RwLockReadGuard<'a, T> {
        self.permits.acquire_blocking(1).expect("it is never closed");
        self.guard(1, || self.value.try_read_arc())
    }

    fn exclusive<'a>(&self) -> RwLockWriteGuard<'a, T> {
        block_on(self.permits.acquire_reserving(1, PERMITS)).expect("it is never closed");
        self.guard(PERMITS, || self.value.try_write_arc())
    }

    #[must_use]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.shared()
    }

    #[must_use]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.exclusive()
    }

    #[must_use]
    pub fn read_arc(this: &Arc<Self>) -> ArcReadGuard<T> {
        this.shared()
    }

    #[must_use]
    pub fn write_arc(this: &Arc<Self>) -> ArcWriteGuard<T> {
        this.exclusive()
    }

    #[must_use]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        self.permits.try_acquire(1).ok()?;
        Some(self.guard(1, || self.value.try_read_arc()))
    }

    #[must_use]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.permits.try_acquire(PERMITS).ok()?;
        Some(self.guard(PERMITS, || self.value.try_write_arc()))
    }

    #[must_use]
    pub fn try_read_arc(this: &Arc<Self>) -> Option<ArcReadGuard<T>> {
        this.permits.try_acquire(1).ok()?;
        Some(this.guard(1, || this.value.try_read_arc()))
    }

    #[must_use]
    pub fn try_write_arc(this: &Arc<Self>) -> Option<ArcWriteGuard<T>> {
        this.permits.try_acquire(PERMITS).ok()?;
        Some(this.guard(PERMITS, || this.value.try_write_arc()))
    }
}

impl<T: Default> Default for RwLock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> std::fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RwLock")
    }
}

impl<G> std::fmt::Debug for Guard<'_, G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Guard")
    }
}

impl<G: Deref> Deref for Guard<'_, G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.held
    }
}

impl<G: DerefMut> DerefMut for Guard<'_, G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.held
    }
}

/// A lock that one thread holds at a time.
#[derive(Debug, Default)]
pub struct Mutex<T>(RwLock<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(RwLock::new(value))
    }

    #[must_use]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.write()
    }

    #[must_use]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_write()
    }

    #[must_use]
    pub fn into_inner(self) -> T {
        // A guard, which has the value too, borrows the lock.
        Arc::into_inner(self.0.value).expect(FREE).into_inner()
    }
}
