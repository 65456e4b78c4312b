//! Reads: what is in memory, over what is on the device.

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::Ino;

use super::XfsBufferedData;
use super::memory::BufferedFile;
use crate::buffer::MOST_TRIES;
use crate::data::FileContent;
use crate::file::index;
use crate::inode::{LoadedInode, file_id};

impl XfsBufferedData<'_> {
    /// Calls `read` with what the device has of a file, as one commit has left it. It may be called
    /// again, whatever it found.
    fn stored<T>(
        &self,
        ino: Ino,
        mut read: impl FnMut(&FileContent<'_>) -> Result<T>,
    ) -> Result<T> {
        let buffers = self.buffers();
        let read = |inode: &LoadedInode| read(&FileContent::new(buffers, inode)?);
        self.inodes.at_one_moment(buffers, file_id(ino), read)
    }

    /// The size on the device.
    pub(super) fn stored_size(&self, ino: Ino) -> Result<u64> {
        self.stored(ino, |content| Ok(content.size()))
    }

    /// Reads what the device has. Behind its end there, and in holes, it is zeros. The caller has
    /// the lock of the inode, and has seen that nothing of it is in memory.
    ///
    /// A write-back changes where other bytes lie, and with these the blocks of the tree. So the
    /// data is read behind the moment of the lookup, and most often once. A write-back moves only
    /// the block at the old end, if files share it: then another file may give up the old place.
    pub(super) fn read_stored(&self, ino: Ino, offset: u64, buf: &mut [u8]) -> Result<()> {
        let range = offset..offset + buf.len() as u64;
        let (buffers, mut ahead) = (self.buffers(), self.read_ahead.next(file_id(ino), &range));
        let mut look_up = || {
            self.stored(ino, |content| {
                if let Some(next) = ahead.take() {
                    content.prefetch(next);
                }
                content.stored_pieces(range.clone())
            })
        };
        let moment = buffers.moment(ino);
        let mut pieces = look_up()?;
        for _ in 0..MOST_TRIES {
            pieces.read(buffers, offset, buf)?;
            if moment.is_some_and(|moment| buffers.is_moment(ino, moment)) {
                return Ok(());
            }
            let now = look_up()?;
            if now == pieces {
                return Ok(());
            }
            pieces = now;
        }
        let what = format!("the extents of inode {ino} never stay the same");
        Err(Error::posix(Errno::AGAIN, what))
    }

    /// Fills `buf` from `offset` on, and returns the number of bytes.
    pub(crate) fn read(&self, file: &BufferedFile, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let (range, runs) = {
            let state = file.state.read();
            let end = offset.saturating_add(buf.len() as u64).min(state.size).max(offset);
            (offset..end, state.runs.overlapping(&(offset..end)))
        };
        let len = index(range.end - range.start);
        let (mut at, mut rest) = (range.start, buf.get_mut(..len).unwrap_or_default());
        for (start, run) in runs {
            let covered = start.max(range.start)..(start + run.len() as u64).min(range.end);
            let (hole, behind) = rest.split_at_mut(index(covered.start - at));
            if !hole.is_empty() {
                self.read_stored(file.ino, at, hole)?;
            }
            let bytes = &run[index(covered.start - start)..index(covered.end - start)];
            let (here, behind) = behind.split_at_mut(bytes.len());
            here.copy_from_slice(bytes);
            (at, rest) = (covered.end, behind);
        }
        if !rest.is_empty() {
            self.read_stored(file.ino, at, rest)?;
        }
        Ok(len)
    }

    /// The first range of data from `offset` on.
    pub(crate) fn next_data(&self, file: &BufferedFile, offset: u64) -> Result<Option<Range<u64>>> {
        let size = file.size();
        let mut found: Option<Range<u64>> = None;
        loop {
            let at = found.as_ref().map_or(offset, |found| found.end);
            if at >= size {
                return Ok(found);
            }
            // In this order: what leaves memory is on the device before.
            let in_memory = file.state.read().runs.first_row(&(at..size));
            let stored = self.stored(file.ino, |content| {
                // The block of the end there is data as a whole when the file ends behind it.
                let stored = content.size();
                let whole = self.covered(&(0..stored)).end;
                let from = if (stored..whole).contains(&at) { stored - 1 } else { at };
                let found = content.next_data(from)?;
                let end = |data: &Range<u64>| if data.end == stored { whole } else { data.end };
                Ok(found.map(|data| data.start.max(at)..end(&data)))
            })?;
            let first = [in_memory, stored].into_iter().flatten().min_by_key(|range| range.start);
            let first = first.map(|range| range.start..range.end.min(size));
            match (&mut found, first) {
                (None, Some(first)) if first.start < size => found = Some(first),
                (Some(found), Some(first)) if first.start == found.end => found.end = first.end,
                _ => return Ok(found),
            }
        }
    }
}
