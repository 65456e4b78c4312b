//! A device that shows a part of another device: a partition, or a volume at an offset.
//!
//! ```text
//!   below   |------------|===================|-----------|
//!           0          start            start + size
//!   window               |===================|
//!                        0                  size
//! ```
//!
//! # Invariants
//!
//! 1. No request reaches a byte of the device below that is outside of the window: each request,
//!    and each hint, is first checked against the window.
//! 2. A barrier is one of the whole device below. So a flush of one window may also wait for the
//!    data of another window of the same device, and it never makes too little durable.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use crate::{BlockDevice, request_range, total_bytes};

/// A part of another device, as a device.
#[derive(Debug)]
pub struct WindowDevice {
    below: Arc<dyn BlockDevice>,
    name: String,
    start: u64,
    size_bytes: u64,
}

impl WindowDevice {
    /// The bytes `range` of `below`. Messages call the window `name`.
    ///
    /// # Errors
    /// Of kind `InvalidInput` when the range is empty, runs backwards, or begins at or past the end
    /// of `below`. A range that begins on the device and ends past it is no error: the device was
    /// cut off, and the window is as long as what is left.
    pub fn new(below: Arc<dyn BlockDevice>, range: Range<u64>, name: String) -> io::Result<Self> {
        let Range { start, end } = range;
        if start >= end || start >= below.size_bytes() {
            let what = format!(
                "bytes {start} to {end} are no part of it: it has {} bytes",
                below.size_bytes()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let size_bytes = end.min(below.size_bytes()) - start;
        Ok(Self { below, name, start, size_bytes })
    }

    /// The byte of the device below at which a request begins. Fails when it ends past the window.
    fn place(&self, offset: u64, len: u64) -> io::Result<u64> {
        let range = request_range(self.size_bytes, offset, len)?;
        Ok(self.start + range.start)
    }
}

impl BlockDevice for WindowDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.below.read_at(self.place(offset, buf.len() as u64)?, buf)
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        self.below.read_vectored_at(self.place(offset, total_bytes(bufs))?, bufs)
    }

    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.below.read_medium_at(self.place(offset, buf.len() as u64)?, buf)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size_bytes);
        if offset < end {
            self.below.prefetch(self.start + offset, end - offset);
        }
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.below.write_at(self.place(offset, buf.len() as u64)?, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.below.write_vectored_at(self.place(offset, total_bytes(bufs))?, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        self.below.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(self.place(offset, len)?, len)
    }
}
