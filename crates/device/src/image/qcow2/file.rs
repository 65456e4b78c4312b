//! The file that holds an image, and its barriers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::BlockDevice;

#[derive(Debug)]
pub(super) struct ImageFile {
    device: Arc<dyn BlockDevice>,
    /// A write returned since the last barrier began.
    is_unflushed: AtomicBool,
    /// The end of the highest write that was tried. A write that failed may have left bytes past
    /// the size that the device reports.
    tried_bytes: AtomicU64,
}

impl ImageFile {
    pub(super) fn new(device: Arc<dyn BlockDevice>) -> Self {
        Self { device, is_unflushed: AtomicBool::new(false), tried_bytes: AtomicU64::new(0) }
    }

    pub(super) fn name(&self) -> &str {
        self.device.name()
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// Whether the file has no bytes from `offset` on, not even those of a failed write.
    pub(super) fn is_untouched_from(&self, offset: u64) -> bool {
        offset >= self.size_bytes().max(self.tried_bytes.load(Ordering::Acquire))
    }

    /// Reads from the file; past its end it reads zeros.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        read_or_zeros(&*self.device, offset, buf)
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let end = offset.saturating_add(bytes.len() as u64);
        self.tried_bytes.fetch_max(end, Ordering::AcqRel);
        let result = self.device.write_at(offset, bytes);
        // Set after the write, because a barrier that began meanwhile does not cover it. Set after
        // a failed write too, because the device may have written a part.
        self.is_unflushed.store(true, Ordering::Release);
        match result {
            // A file would have grown, so this is a block device that is full.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(io::Error::new(
                io::ErrorKind::StorageFull,
                "the device that holds the image has no room for another cluster",
            )),
            result => result,
        }
    }

    /// Makes every write durable that returned before the call. Only the committer calls it.
    pub(super) fn barrier(&self) -> io::Result<()> {
        if self.is_unflushed.swap(false, Ordering::AcqRel) { self.device.flush() } else { Ok(()) }
    }

    /// Returns space to the host. Errors are ignored: they cost only space.
    pub(super) fn discard(&self, start: u64, end: u64) {
        let end = end.min(self.size_bytes());
        if start < end {
            let _ = self.device.discard(start, end - start);
        }
    }
}

/// Reads from `device`; past its end it reads zeros.
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
