//! Buffers that a thread uses again: reading a file would otherwise allocate and clear
//! two of them for every extent.

use std::cell::RefCell;

thread_local! {
    static FREE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Buffers that a thread keeps: one for what is read and one for what is decoded.
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
