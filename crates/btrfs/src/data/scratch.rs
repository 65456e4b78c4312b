//! Buffers that a thread reuses. Without them reading a file would allocate and clear two buffers
//! for every extent.

use std::cell::RefCell;

thread_local! {
    static FREE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// The buffers that a thread keeps: one for stored and one for decoded bytes.
const KEPT: usize = 2;

/// Calls `f` with a buffer of this thread, whose length and contents are arbitrary.
/// Calls may be nested.
pub(super) fn with_scratch<T>(f: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    let mut buf = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    let result = f(&mut buf);
    FREE.with_borrow_mut(|free| {
        if free.len() < KEPT {
            free.push(buf);
        }
    });
    result
}
