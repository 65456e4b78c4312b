//! Ordered extents: data that is written to its place before anything refers to that.
//!
//! ```text
//! under the lock of the inode   take space ─┐                     ┌─ extent and checksums
//! under no lock                             └─ write the data ────┘
//! ```
//!
//! So a file can be written while what was written before is on its way to the devices. The data
//! stays buffered meanwhile, with its space reserved, and readers find it there. It does not
//! change: who writes over it gets a copy of the run. So whoever has the lock of the inode
//! afterwards sees by the runs how much of it is still what the file holds; space that was taken
//! for the rest is given back.
//!
//! Whoever has the lock may wait for the data, because writing it takes no other lock.

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::buffer::Run;
use super::store::{Sectors, Sums, write_places};
use crate::transaction::Base;

/// Data on its way to a place that was taken for it.
#[derive(Debug)]
pub(crate) struct OrderedExtent {
    runs: Vec<Run>,
    /// Where it goes.
    pub(crate) logical: Logical,
    sums: Sums,
    state: Mutex<State>,
    is_done: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How it went, once it is done.
    written: Option<Result<()>>,
    /// Nobody wants it any more.
    is_forgotten: bool,
}

impl OrderedExtent {
    /// `runs`, which lie one behind the other, are to be written at `logical`.
    pub(crate) fn new(runs: Vec<Run>, logical: Logical, sums: Sums) -> Self {
        Self { runs, logical, sums, state: Mutex::default(), is_done: Condvar::new() }
    }

    /// What is written.
    pub(crate) fn data(&self) -> Sectors<'_> {
        Sectors::new(&self.runs)
    }

    /// The data in memory.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Writes it, which one does; whether nobody wants it any more, and its place is to be given
    /// back.
    pub(crate) fn write(&self, volume: &Base) -> bool {
        let mut end = End { extent: self, written: None };
        end.written = Some(write_places(volume, self.logical, self.data(), self.sums));
        drop(end);
        self.state.lock().is_forgotten
    }

    /// Nobody wants it any more; whether it is written, and its place is to be given back. If not,
    /// who writes it does that.
    pub(crate) fn forget(&self) -> bool {
        let mut state = self.state.lock();
        state.is_forgotten = state.written.is_none();
        !state.is_forgotten
    }

    /// Waits until it is written; how that went, for the first who asks.
    pub(crate) fn finish(&self) -> Result<()> {
        self.wait();
        self.state.lock().written.replace(Ok(())).unwrap_or(Ok(()))
    }

    /// Waits until it is written.
    pub(crate) fn wait(&self) {
        let mut state = self.state.lock();
        while state.written.is_none() {
            self.is_done.wait(&mut state);
        }
    }
}

/// Tells those who wait when it is dropped, after a panic too.
struct End<'e> {
    extent: &'e OrderedExtent,
    written: Option<Result<()>>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let panicked =
            || Err(Error::io("writing data", std::io::Error::other("its thread panicked")));
        let written = self.written.take().unwrap_or_else(panicked);
        self.extent.state.lock().written = Some(written);
        self.extent.is_done.notify_all();
    }
}
