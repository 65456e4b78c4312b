//! Where the listings of open directories end.
//!
//! A name that is made or moved while its directory is read comes behind all others. So who moves
//! each name that is shown would read without end, if reading did not stop at the place that was
//! the last one when it began.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Open directories that were read from.
#[derive(Default)]
pub(crate) struct Listings {
    opened: AtomicU64,
    /// The last cookie that each of them shows.
    ends: Mutex<HashMap<u64, u64>>,
}

impl Listings {
    /// A handle for a directory that is opened.
    pub(crate) fn open(&self) -> u64 {
        self.opened.fetch_add(1, Ordering::Relaxed)
    }

    /// Where the listing ends, when that was decided.
    pub(crate) fn end(&self, handle: u64) -> Option<u64> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).copied()
    }

    /// The listing ends behind this cookie. Without one it begins anew, or is closed.
    pub(crate) fn set_end(&self, handle: u64, end: Option<u64>) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        match end {
            Some(end) => ends.insert(handle, end),
            None => ends.remove(&handle),
        };
    }
}
