//! Locks that the model checker knows.
//!
//! They are those of `parking_lot`. With the feature `shuttle` they are the same locks behind
//! permits, and the model checker decides which thread gets a permit. So the checker runs the code
//! itself, not a copy of it, under every order of its threads that it tries. A lock that a thread
//! holds while it takes one of these must be one of these too. A lock under which no other is taken
//! can be any lock.

#[cfg(feature = "shuttle")]
#[expect(missing_docs, reason = "each item is that of the same name of `parking_lot`")]
mod checked;

#[cfg(feature = "shuttle")]
pub use checked::{
    ArcReadGuard, ArcWriteGuard, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
#[cfg(not(feature = "shuttle"))]
pub use plain::{
    ArcReadGuard, ArcWriteGuard, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
#[cfg(feature = "shuttle")]
pub use shuttle::{
    sync::{atomic, mpsc},
    thread,
};
#[cfg(not(feature = "shuttle"))]
pub use std::{
    sync::{atomic, mpsc},
    thread,
};

#[cfg(not(feature = "shuttle"))]
mod plain {
    use parking_lot::RawRwLock;
    use parking_lot::lock_api::{ArcRwLockReadGuard, ArcRwLockWriteGuard};
    pub use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

    /// A lock that is held shared. The guard keeps the lock alive.
    pub type ArcReadGuard<T> = ArcRwLockReadGuard<RawRwLock, T>;
    /// A lock that is held exclusively. The guard keeps the lock alive.
    pub type ArcWriteGuard<T> = ArcRwLockWriteGuard<RawRwLock, T>;
}
