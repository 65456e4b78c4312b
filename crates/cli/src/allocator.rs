//! The allocator of the program.
//!
//! Making a file queues items that live until they are flushed, by another thread perhaps, and
//! mimalloc takes a third less time for that than the allocator of the C library. What is free it
//! gives back to the host after a second, only for the next transaction to have the same memory
//! cleared again, page by page: that took a third of the time of making files. So it waits longer.
//! What the engine uses at most is bounded, and so is what waits.
//!
//! This module has unsafe code, because options of the allocator are set in C.

#![expect(unsafe_code, reason = "options of the allocator are set in C")]

use std::ffi::{c_int, c_long};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of `mimalloc.h`, to which the bindings give no name.
const PURGE_DELAY: c_int = 15;

/// How long free memory waits before the host gets it back, in milliseconds.
const PURGE_MILLISECONDS: c_long = 10_000;

/// Has free memory wait before the host gets it back.
pub(crate) fn keep_memory() {
    // SAFETY: it stores a number, in an array that is longer, and may be called at any time.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, PURGE_MILLISECONDS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of an option follows from the version of the allocator, and tells itself by what
    /// the option is without us.
    #[test]
    fn it_is_the_option_that_it_should_be() {
        const DEFAULT_MILLISECONDS: c_long = 1000;
        let value = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        assert_eq!(value(), DEFAULT_MILLISECONDS);
        keep_memory();
        assert_eq!(value(), PURGE_MILLISECONDS);
    }
}
