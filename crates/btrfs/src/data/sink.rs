//! Where data that is read goes to: to somebody who looks at it piece by piece, or into a buffer,
//! and then without a copy on the way where it is stored as it is.

use offshoot_vfs::Result;

use super::index;

/// Takes the data of a file in the order of its offsets. What is left out is a hole.
pub(super) trait Sink {
    /// Takes what the file has from `at` on.
    fn take(&mut self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Memory that `len` bytes from `at` on may be read to. What is put there counts when
    /// [`Sink::took`] is called next.
    fn room(&mut self, at: u64, len: usize) -> Option<&mut [u8]>;

    /// Takes the `len` bytes that were put where [`Sink::room`] said.
    fn took(&mut self, len: usize);
}

/// Somebody who looks at the data.
pub(super) struct Visitor<'v>(pub(super) &'v mut dyn FnMut(u64, &[u8]) -> Result<()>);

impl Sink for Visitor<'_> {
    fn take(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        (self.0)(at, bytes)
    }

    fn room(&mut self, _: u64, _: usize) -> Option<&mut [u8]> {
        None
    }

    fn took(&mut self, _: usize) {}
}

/// A buffer that is filled from its beginning, holes with zeros.
pub(super) struct Filling<'b> {
    buf: &'b mut [u8],
    /// The offset in the file of the first byte.
    offset: u64,
    filled: usize,
}

impl<'b> Filling<'b> {
    pub(super) fn new(buf: &'b mut [u8], offset: u64) -> Self {
        Self { buf, offset, filled: 0 }
    }

    /// Fills what is left.
    pub(super) fn finish(self) {
        self.buf[self.filled..].fill(0);
    }

    /// Fills up to `at`, and gives the place of it.
    fn fill_to(&mut self, at: u64) -> usize {
        let start = index(at - self.offset);
        self.buf[self.filled..start].fill(0);
        self.filled = start;
        start
    }
}

impl Sink for Filling<'_> {
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
