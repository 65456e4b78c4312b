//! Ordered extents: data that is written to its place before any item refers to that place.
//!
//! ```text
//! under the lock of the inode   take space ─┐                     ┌─ extent and checksums
//! under no lock                             └─ write the data ────┘
//! ```
//!
//! So a file can be written while earlier data is on its way to the devices. That data stays
//! buffered meanwhile, with its space reserved, and readers find it in the buffer. Its runs do not
//! change: a thread that writes over one gets a copy. The next thread with the lock of the inode
//! compares the runs, sees how much of the data is still current, and gives the place of the rest
//! back.
//!
//! A thread with the lock may wait for the data, because writing the data takes no other lock.

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::buffer::BufferRun;
use super::store::{DataChecksums, Sectors, write_places};
use crate::transaction::Base;

/// Data on its way to a place that was allocated for it.
#[derive(Debug)]
pub(crate) struct OrderedExtent {
    runs: Vec<BufferRun>,
    /// The place.
    pub(crate) logical: Logical,
    sums: DataChecksums,
    state: Mutex<OrderedWriteState>,
    is_done: Condvar,
}

#[derive(Debug, Default)]
struct OrderedWriteState {
    /// The outcome of the write, once it has ended.
    written: Option<Result<()>>,
    /// Whether the file dropped the data before the write ended.
    is_forgotten: bool,
}

impl OrderedExtent {
    /// An extent of consecutive `runs` to write at `logical`.
    pub(crate) fn new(runs: Vec<BufferRun>, logical: Logical, sums: DataChecksums) -> Self {
        Self { runs, logical, sums, state: Mutex::default(), is_done: Condvar::new() }
    }

    /// The data to write.
    pub(crate) fn data(&self) -> Sectors<'_> {
        Sectors::new(&self.runs)
    }

    /// The data in memory.
    pub(crate) fn runs(&self) -> &[BufferRun] {
        &self.runs
    }

    /// Writes the data. Only one thread calls this. Returns whether the data was forgotten
    /// meanwhile, so that the caller must give the place back.
    pub(crate) fn write(&self, volume: &Base) -> bool {
        let mut end = OrderedWriteEnd { extent: self, written: None };
        end.written = Some(write_places(volume, self.logical, self.data(), self.sums));
        drop(end);
        self.state.lock().is_forgotten
    }

    /// Marks the data as forgotten. Returns whether the write has ended, so that the caller must
    /// give the place back. If it has not, the writing thread does that.
    pub(crate) fn forget(&self) -> bool {
        let mut state = self.state.lock();
        state.is_forgotten = state.written.is_none();
        !state.is_forgotten
    }

    /// Waits until the write has ended. The first call returns its outcome, later ones `Ok`.
    pub(crate) fn finish(&self) -> Result<()> {
        self.wait();
        self.state.lock().written.replace(Ok(())).unwrap_or(Ok(()))
    }

    /// Waits until the write has ended.
    pub(crate) fn wait(&self) {
        let mut state = self.state.lock();
        while state.written.is_none() {
            self.is_done.wait(&mut state);
        }
    }
}

/// Wakes the waiting threads when it is dropped, even after a panic.
struct OrderedWriteEnd<'e> {
    extent: &'e OrderedExtent,
    written: Option<Result<()>>,
}

impl Drop for OrderedWriteEnd<'_> {
    fn drop(&mut self) {
        let panicked =
            || Err(Error::io("writing data", std::io::Error::other("its thread panicked")));
        let written = self.written.take().unwrap_or_else(panicked);
        self.extent.state.lock().written = Some(written);
        self.extent.is_done.notify_all();
    }
}
