//! Locks that the model checker knows.
//!
//! They are those of `parking_lot`. With the feature `shuttle` they are the same locks behind
//! permits of the model checker, which decides who gets one: then the code as it is, not a copy of
//! it, runs under every order of its threads that the checker tries. What is held while another of
//! these locks is taken has to be one of them too; locks under which nothing is locked may stay
//! outside.

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
pub use shuttle::{sync::mpsc, thread};
#[cfg(not(feature = "shuttle"))]
pub use std::{sync::mpsc, thread};

#[cfg(not(feature = "shuttle"))]
mod plain {
    use parking_lot::RawRwLock;
    use parking_lot::lock_api::{ArcRwLockReadGuard, ArcRwLockWriteGuard};
    pub use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

    /// A lock that is held shared, and kept alive.
    pub type ArcReadGuard<T> = ArcRwLockReadGuard<RawRwLock, T>;
    /// A lock that is held exclusively, and kept alive.
    pub type ArcWriteGuard<T> = ArcRwLockWriteGuard<RawRwLock, T>;
}
