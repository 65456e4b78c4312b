//! What all threads of an engine share: locks that are counted, and cache lines.
//!
//! Every core that takes a lock moves its cache line to itself, even when the lock is taken shared.
//! So an operation on many cores is as slow as the locks that it takes. With the feature `measure`
//! a [`Shared`] lock notes each taking, and a test requires how often an operation takes it.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// A lock that all threads share, with the name that it is counted by.
///
/// A caller reaches the lock only to take it, or to try to. So each dereference counts once.
pub struct Shared<L> {
    #[cfg(feature = "measure")]
    name: &'static str,
    lock: L,
}

impl<L> Shared<L> {
    /// The lock, which is counted as `name`.
    #[cfg_attr(not(feature = "measure"), expect(unused_variables, reason = "nothing is counted"))]
    pub const fn new(name: &'static str, lock: L) -> Self {
        Self {
            #[cfg(feature = "measure")]
            name,
            lock,
        }
    }
}

impl<L> Deref for Shared<L> {
    type Target = L;

    fn deref(&self) -> &L {
        #[cfg(feature = "measure")]
        counted::note(self.name);
        &self.lock
    }
}

impl<L: fmt::Debug> fmt::Debug for Shared<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// A value with cache lines of its own, so that threads that change its neighbours do not slow down
/// a thread that uses it. Two lines, because CPUs fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Padded<T>(pub T);

impl<T> Deref for Padded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Padded<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

#[cfg(feature = "measure")]
pub use counted::taken_by;

#[cfg(feature = "measure")]
mod counted {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    thread_local! {
        /// How often this thread has taken each lock, while it counts.
        static TAKEN: RefCell<Option<BTreeMap<&'static str, u64>>> = const { RefCell::new(None) };
    }

    /// Notes that this thread takes a lock.
    pub(super) fn note(name: &'static str) {
        TAKEN.with_borrow_mut(|taken| {
            if let Some(taken) = taken {
                *taken.entry(name).or_default() += 1;
            }
        });
    }

    /// How often this thread takes each [`Shared`](super::Shared) lock during `work`.
    pub fn taken_by<T>(work: impl FnOnce() -> T) -> (BTreeMap<&'static str, u64>, T) {
        TAKEN.set(Some(BTreeMap::new()));
        let result = work();
        (TAKEN.take().unwrap_or_default(), result)
    }
}

#[cfg(all(test, feature = "measure"))]
mod tests {
    use super::*;

    #[test]
    fn locks_are_counted_by_name_while_a_thread_counts() {
        let (one, two) = (Shared::new("one", parking_lot::Mutex::new(1)), Padded(2));
        *one.lock() += *two;
        let (taken, sum) = taken_by(|| {
            let first = *one.lock();
            first + *one.lock()
        });
        assert_eq!((taken.get("one"), taken.len(), sum), (Some(&2), 1, 6));
    }
}
