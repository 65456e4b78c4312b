//! Devices that keep what is written to them apart, until it is checked.
//!
//! A repair writes to staged devices. What was written goes to a file without a name, and readers
//! of the device find it there. So the result can be checked before the first byte of it is on a
//! real device, in memory that does not grow with it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result};
use parking_lot::RwLock;

/// What was written to a device, by its offset there: the length, and the offset in the file.
type StagedPieces = BTreeMap<u64, (u64, u64)>;

/// A device with writes that are not on it yet. A piece is written once, and no other piece
/// overlaps it.
#[derive(Debug)]
pub(super) struct StagedDevice {
    below: Arc<dyn BlockDevice>,
    file: File,
    pieces: RwLock<(StagedPieces, u64)>,
}

impl StagedDevice {
    /// `below` without any changes. The file for writes is in `scratch`.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub(super) fn over(below: Arc<dyn BlockDevice>, scratch: &Path) -> Result<Self> {
        let file = tempfile::tempfile_in(scratch)
            .map_err(|e| Error::io("a file for blocks that are not written yet", e))?;
        Ok(Self { below, file, pieces: RwLock::default() })
    }

    /// Writes the pieces that `is_wanted` takes, by their offset, to the real device.
    ///
    /// # Errors
    /// Those of the device and of the file.
    pub(super) fn write_through(&self, is_wanted: &dyn Fn(u64) -> bool) -> Result<()> {
        let pieces = self.pieces.read();
        let mut bytes = Vec::new();
        for (&offset, &(len, at)) in pieces.0.iter().filter(|(offset, _)| is_wanted(**offset)) {
            bytes.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            self.file
                .read_exact_at(&mut bytes, at)
                .and_then(|()| self.below.write_at(offset, &bytes))
                .map_err(|e| Error::io(format!("{}: writing at {offset}", self.below.name()), e))?;
        }
        Ok(())
    }

    /// Makes what was written through durable.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn flush_through(&self) -> Result<()> {
        self.below.flush().map_err(|e| Error::io(format!("{}: flushing", self.below.name()), e))
    }
}

impl offshoot_device::Delegate for StagedDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.saturating_add(buf.len() as u64);
        let pieces = self.pieces.read();
        let before = pieces.0.range(..=offset).next_back();
        let before = before.filter(|(start, (len, _))| **start + len > offset);
        let inside = pieces.0.range(offset.saturating_add(1)..end.max(offset.saturating_add(1)));
        let mut staged = before.into_iter().chain(inside).peekable();
        let is_whole = staged.peek().is_some_and(|(start, (len, _))| {
            **start <= offset && start.saturating_add(*len) >= end
        });
        if !is_whole {
            self.below.read_at(offset, buf)?;
        }
        for (&start, &(len, at)) in staged {
            let (from, to) = (start.max(offset), (start + len).min(end));
            let range = small(from - offset)..small(to - offset);
            if let Some(part) = buf.get_mut(range) {
                self.file.read_exact_at(part, at + (from - start))?;
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let len = buf.len() as u64;
        if offset.saturating_add(len) > self.below.size_bytes() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut pieces = self.pieces.write();
        let at = pieces.1;
        self.file.write_all_at(buf, at)?;
        pieces.0.insert(offset, (len, at));
        pieces.1 = at + len;
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// An offset in a buffer in memory.
fn small(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use offshoot_device::MemoryDevice;
    use offshoot_testkit::random::Random;

    use super::*;

    /// Reads find what was staged, wherever it lies, and the device below has it only after it was
    /// written through.
    #[test]
    fn reads_find_what_was_staged() {
        let below = Arc::new(MemoryDevice::sparse(1 << 20));
        below.write_at(0, &vec![7; 1 << 20]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let staged = StagedDevice::over(below.clone(), dir.path()).unwrap();
        let mut model = vec![7; 1 << 20];
        let mut random = Random::new(3);
        for slot in 0..100usize {
            let (at, len) = (slot * 10_000, 1 + small(random.below(9_999)));
            let fill = u8::try_from(slot).unwrap();
            BlockDevice::write_at(&staged, at as u64, &vec![fill; len]).unwrap();
            model[at..at + len].fill(fill);
        }
        for _ in 0..2000 {
            let at = small(random.below(1 << 20));
            let len = small(random.below((1 << 20) - at as u64 + 1).min(30_000));
            let mut buf = vec![0; len];
            BlockDevice::read_at(&staged, at as u64, &mut buf).unwrap();
            assert!(buf == model[at..at + len], "{len} bytes at {at}");
        }
        let mut all = vec![0; 1 << 20];
        below.read_at(0, &mut all).unwrap();
        assert!(all.iter().all(|&byte| byte == 7));
        staged.write_through(&|offset| offset >= 500_000).unwrap();
        below.read_at(0, &mut all).unwrap();
        assert!(all[500_000..] == model[500_000..] && all[..500_000].iter().all(|&b| b == 7));
    }
}
