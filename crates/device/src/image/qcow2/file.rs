//! The file that holds an image, and its barriers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::BlockDevice;

/// The file of an image.
#[derive(Debug)]
pub(super) struct File {
    device: Arc<dyn BlockDevice>,
    /// A write returned since the last barrier began.
    is_unflushed: AtomicBool,
}

impl File {
    pub(super) fn new(device: Arc<dyn BlockDevice>) -> Self {
        Self { device, is_unflushed: AtomicBool::new(false) }
    }

    pub(super) fn name(&self) -> &str {
        self.device.name()
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// Reads what is there; behind the end there are zeros.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        read_or_zeros(&*self.device, offset, buf)
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let result = self.device.write_at(offset, bytes);
        // Not before: a barrier that began meanwhile is not about this write. What failed may have
        // been written in part.
        self.is_unflushed.store(true, Ordering::Release);
        result
    }

    /// What was written before is durable when it returns. One thread at a time calls it.
    pub(super) fn barrier(&self) -> io::Result<()> {
        if self.is_unflushed.swap(false, Ordering::AcqRel) { self.device.flush() } else { Ok(()) }
    }

    /// Gives room back to the host, where it can take it.
    pub(super) fn discard(&self, start: u64, end: u64) -> io::Result<()> {
        let end = end.min(self.size_bytes());
        if start >= end {
            return Ok(());
        }
        match self.device.discard(start, end - start) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            result => result,
        }
    }
}

/// Reads what is there; behind the end there are zeros.
pub(super) fn read_or_zeros(
    device: &dyn BlockDevice,
    offset: u64,
    buf: &mut [u8],
) -> io::Result<()> {
    let left = device.size_bytes().saturating_sub(offset);
    let there = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
    if there > 0 {
        device.read_at(offset, &mut buf[..there])?;
    }
    buf[there..].fill(0);
    Ok(())
}
