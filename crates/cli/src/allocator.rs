//! The memory allocator of the program.
//!
//! Making a file queues items that live until they are flushed, often by another thread. For that,
//! mimalloc takes a third less time than the allocator of the C library. By default, mimalloc
//! returns free memory to the host after one second. The next transaction then gets the same memory
//! back, and the kernel clears it page by page: that took a third of the time of making files. So
//! this module lets free memory wait longer. The engine limits how much memory it uses, and that
//! also limits how much can wait. A verb that says how much memory it takes lets it wait for less
//! time ([`return_memory`]).
//!
//! This module has unsafe code, because the options of the allocator are set in C.

#![expect(unsafe_code, reason = "options of the allocator are set in C")]

use std::ffi::{c_int, c_long};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of `mimalloc.h`, to which the bindings give no name.
const PURGE_DELAY: c_int = 15;

/// How long free memory waits before the host gets it back, in milliseconds.
const PURGE_MILLISECONDS: c_long = 10_000;

/// The same after [`return_memory`]: long enough that work which allocates the same again gets it
/// back.
const SHORT_PURGE_MILLISECONDS: c_long = 2;

/// Makes free memory wait for [`PURGE_MILLISECONDS`] before the host gets it back.
pub(crate) fn keep_memory() {
    set_delay(PURGE_MILLISECONDS);
}

/// Makes the host get free memory back soon. To be called first: what waits already waits as long
/// as was said before.
pub(crate) fn return_memory() {
    set_delay(SHORT_PURGE_MILLISECONDS);
}

fn set_delay(milliseconds: c_long) {
    // SAFETY: the function stores a number in an array that has more than 15 elements. It may be
    // called at any time.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, milliseconds) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of an option depends on the version of the allocator. The default value of the
    /// option shows whether the number is still right.
    #[test]
    fn it_is_the_option_that_it_should_be() {
        const DEFAULT_MILLISECONDS: c_long = 1000;
        let value = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        assert_eq!(value(), DEFAULT_MILLISECONDS);
        keep_memory();
        assert_eq!(value(), PURGE_MILLISECONDS);
        return_memory();
        assert_eq!(value(), SHORT_PURGE_MILLISECONDS);
    }
}
