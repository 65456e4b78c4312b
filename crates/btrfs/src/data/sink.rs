//! The destination of data that is read: a visitor that gets it piece by piece, or a buffer. Plain
//! data is read into the buffer without another copy.

use offshoot_vfs::Result;

use super::index;

/// Takes the data of a file in ascending order of offsets. Ranges that are left out are holes.
pub(super) trait Sink {
    /// Takes the bytes of the file from `at` on.
    fn take(&mut self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Memory into which `len` bytes from `at` on may be read. They count once [`Sink::took`] is
    /// called.
    fn room(&mut self, at: u64, len: usize) -> Option<&mut [u8]>;

    /// Accepts the `len` bytes that were read into the memory of [`Sink::room`].
    fn took(&mut self, len: usize);
}

/// A visitor that gets the data.
pub(super) struct DataVisitor<'v>(pub(super) &'v mut dyn FnMut(u64, &[u8]) -> Result<()>);

impl Sink for DataVisitor<'_> {
    fn take(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        (self.0)(at, bytes)
    }

    fn room(&mut self, _: u64, _: usize) -> Option<&mut [u8]> {
        None
    }

    fn took(&mut self, _: usize) {}
}

/// A buffer that is filled from its beginning. Holes become zeros.
pub(super) struct FilledBuffer<'b> {
    buf: &'b mut [u8],
    /// The offset in the file of the first byte.
    offset: u64,
    filled: usize,
}

impl<'b> FilledBuffer<'b> {
    pub(super) fn new(buf: &'b mut [u8], offset: u64) -> Self {
        Self { buf, offset, filled: 0 }
    }

    /// Fills the rest with zeros.
    pub(super) fn finish(self) {
        self.buf[self.filled..].fill(0);
    }

    /// Fills up to `at` with zeros, and returns its index in the buffer.
    fn fill_to(&mut self, at: u64) -> usize {
        let start = index(at - self.offset);
        self.buf[self.filled..start].fill(0);
        self.filled = start;
        start
    }
}

impl Sink for FilledBuffer<'_> {
    fn take(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let start = self.fill_to(at);
        self.filled += bytes.len();
        self.buf[start..self.filled].copy_from_slice(bytes);
        Ok(())
    }

    fn room(&mut self, at: u64, len: usize) -> Option<&mut [u8]> {
        let start = self.fill_to(at);
        Some(&mut self.buf[start..start + len])
    }

    fn took(&mut self, len: usize) {
        self.filled += len;
    }
}
