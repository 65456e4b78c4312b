//! Buffers that are used again, so that a read neither allocates nor clears memory that it then
//! fills. A buffer never gets shorter: only memory that is new is cleared.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use offshoot_btrfs_format::file_extent::MAX_COMPRESSED_EXTENT;
use parking_lot::Mutex;

use super::{MOST_DECODED, index};

thread_local! {
    static FREE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// The buffers that a thread keeps: one for stored and one for decoded bytes.
const KEPT: usize = 2;

/// Calls `f` with `len` bytes of arbitrary contents in a buffer of this thread. Calls may be
/// nested.
pub(super) fn with_scratch<T>(len: usize, f: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut buf = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    let result = f(first(&mut buf, len));
    FREE.with_borrow_mut(|free| {
        if free.len() < KEPT {
            free.push(buf);
        }
    });
    result
}

/// The first `len` bytes of `buf`, which is made longer if it is shorter.
fn first(buf: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buf.len() < len {
        buf.resize(len, 0);
    }
    &mut buf[..len]
}

/// Buffers for extents on their way to worker threads and back, for all threads of the process.
static FOR_EXTENTS: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// The buffers of [`FOR_EXTENTS`]: stored and decoded bytes of all extents that one read decodes at
/// the same time.
const KEPT_FOR_EXTENTS: usize = 2 * MOST_DECODED;

/// Bytes of an extent, stored or decoded. Their memory is used again.
pub(super) struct ExtentBytes {
    buf: Vec<u8>,
    len: usize,
}

impl ExtentBytes {
    /// `len` bytes of arbitrary contents.
    pub(super) fn new(len: usize) -> Self {
        let mut buf = FOR_EXTENTS.lock().pop().unwrap_or_default();
        first(&mut buf, len);
        Self { buf, len }
    }
}

impl Deref for ExtentBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buf[..self.len]
    }
}

impl DerefMut for ExtentBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buf[..self.len]
    }
}

impl Drop for ExtentBytes {
    fn drop(&mut self) {
        let mut free = FOR_EXTENTS.lock();
        if free.len() < KEPT_FOR_EXTENTS && self.buf.len() <= index(MAX_COMPRESSED_EXTENT) {
            free.push(std::mem::take(&mut self.buf));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that was used once is given out as it is, long or short.
    #[test]
    fn used_memory_is_not_cleared() {
        let fill = |len: usize| with_scratch(len, |bytes| bytes.fill(7));
        let sevens = |len: usize| {
            with_scratch(len, |bytes| bytes.iter().take_while(|&&byte| byte == 7).count())
        };
        fill(100_000);
        assert_eq!(sevens(10), 10);
        assert_eq!(sevens(100_000), 100_000);
        assert_eq!(sevens(100_001), 100_000);
    }
}
