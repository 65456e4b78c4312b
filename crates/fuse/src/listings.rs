//! Where the listings of open directories end.
//!
//! A name that is made or moved while a program reads its directory comes behind all others. A
//! program that moves each name it reads would read without end. So a listing ends at the entry
//! that was the last one when the listing began.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Open directories that programs have read from.
#[derive(Default)]
pub(crate) struct OpenListings {
    opened: AtomicU64,
    /// The last cookie that each of them shows.
    ends: Mutex<HashMap<u64, u64>>,
}

impl OpenListings {
    /// Gives a handle to a directory that is being opened.
    pub(crate) fn open(&self) -> u64 {
        self.opened.fetch_add(1, Ordering::Relaxed)
    }

    /// The cookie of the last entry of the listing, if it is decided.
    pub(crate) fn end(&self, handle: u64) -> Option<u64> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).copied()
    }

    /// Lets the listing end with the entry of this cookie. `None` forgets the end, because the
    /// listing begins anew or the directory is closed.
    pub(crate) fn set_end(&self, handle: u64, end: Option<u64>) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        match end {
            Some(end) => ends.insert(handle, end),
            None => ends.remove(&handle),
        };
    }
}
