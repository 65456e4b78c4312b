//! How requests come and answers go.
//!
//! Each thread that serves a mount has a [`Channel`] of its own. [`crate::device`] is the one over `/dev/fuse`, which every kernel has.

use std::io;

use crate::dispatch::{Answer, Dispatcher};

/// One thread's way to the kernel.
pub(crate) trait Channel: Send {
    /// Waits for the next request and takes it; `false` when the filesystem is mounted no longer.
    fn receive(&mut self) -> io::Result<bool>;

    /// Has the request answered that was taken, and sends the answer.
    fn answer(&mut self, dispatcher: &Dispatcher) -> io::Result<Answer>;
}
