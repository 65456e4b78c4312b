//! Threads that work beside a test.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when it is dropped, also by a panic. The threads beside the test end then.
#[derive(Debug)]
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
