//! The contents of one file. The caller has the lock of the inode: exclusively to change them,
//! shared to read.
//!
//! Data is written through: a write takes places (`file`), writes whole blocks there, and makes
//! them visible. A part of a block is filled from the file, or with zeros:
//!
//! ```text
//! write        |    .ddd|dddd|dd..    |     d: the bytes of the caller
//! blocks       |rrrrrddd|dddd|ddrrrrrr|     r: read from the file, zeros behind its end
//! ```

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use offshoot_vfs::{FileId, Result, Timestamp};
use offshoot_xfs_format::inode::XfsInodeFlags;

use super::{XfsLive, ino_of, refuse_flags};
use crate::data::FileContent;
use crate::file::{XfsWriteKind, XfsWritePlace, index, require_bytes};
use crate::inode::LoadedInode;

/// The most bytes that a step of a write has, and that are shown at once.
const PIECE_BYTES: u64 = 1 << 20;

/// The contents of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveContents<'l> {
    live: &'l XfsLive,
    file: FileId,
}

impl LiveContents<'_> {
    fn inode(&self) -> Result<Arc<LoadedInode>> {
        self.live.inode(self.file)
    }

    /// Calls `read` with what the last commit has left.
    fn committed<T>(&self, read: impl FnOnce(&FileContent<'_>) -> Result<T>) -> Result<T> {
        let inode = self.inode()?;
        FileContent::new(self.live.buffers(), &inode).and_then(|content| read(&content))
    }

    /// The size; `EISDIR` and `EINVAL` for what has no contents.
    pub(super) fn size(&self) -> Result<u64> {
        self.committed(|content| Ok(content.size()))
    }

    /// Fills `buf` from `offset` on, and returns the number of bytes.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.committed(|content| content.read(&self.live.read_ahead, offset, buf))
    }

    /// The first range of data from `offset` on.
    pub(super) fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.committed(|content| content.next_data(offset))
    }

    /// The first data in a range, as much as is shown or copied at once.
    pub(super) fn first_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>> {
        self.committed(|content| content.first_data(range, PIECE_BYTES))
    }

    /// Tells the device of the data.
    pub(super) fn prefetch(&self) -> Result<()> {
        self.committed(|content| {
            content.prefetch(0..content.size());
            Ok(())
        })
    }

    /// Writes bytes, and makes the file longer if it ends before them. Says in `is_changed` when a
    /// part of them may show, also if the rest fails.
    pub(super) fn write(&self, offset: u64, data: &[u8], is_changed: &mut bool) -> Result<()> {
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            // Pieces end at multiples, so that no block belongs to two of them.
            let room = PIECE_BYTES - at % PIECE_BYTES;
            let (piece, behind) = rest.split_at(rest.len().min(index(room)));
            self.write_piece(at, piece, is_changed)?;
            at += piece.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    fn write_piece(&self, offset: u64, data: &[u8], is_changed: &mut bool) -> Result<()> {
        let (ino, changes) = (ino_of(self.file), self.live.file_changes());
        let end = offset + data.len() as u64;
        let block = self.live.block_bytes();
        let blocks = offset / block..end.div_ceil(block);
        let size = self.size()?;
        let [head, tail] = self.edges(&(offset..end))?;
        let places = changes.prepare_write(ino, blocks.clone())?;
        *is_changed |= places.iter().any(|place| place.kind == XfsWriteKind::InPlace);
        let pieces = [&head[..], data, &tail[..]];
        let stored =
            places.iter().try_for_each(|place| self.store(place, blocks.start * block, &pieces));
        if let Err(error) = stored {
            return changes.abandon_write(ino, &places).and(Err(error));
        }
        *is_changed = true;
        changes.commit_write(ino, &places, (end > size).then_some(end))
    }

    /// What blocks hold in front of a range and behind it, as far as it has only a part of them.
    fn edges(&self, range: &Range<u64>) -> Result<[Vec<u8>; 2]> {
        let block = self.live.block_bytes();
        let edges = [
            range.start / block * block..range.start,
            range.end..range.end.next_multiple_of(block),
        ];
        let mut found = [Vec::new(), Vec::new()];
        for (edge, bytes) in edges.iter().zip(&mut found) {
            bytes.resize(index(edge.end - edge.start), 0);
            // What is behind the end stays zeros.
            if !bytes.is_empty() {
                self.read(edge.start, bytes)?;
            }
        }
        Ok(found)
    }

    /// Writes what a place gets of `pieces`, which follow each other from byte `start` of the file.
    fn store(&self, place: &XfsWritePlace, start: u64, pieces: &[&[u8]]) -> Result<()> {
        let geometry = self.live.transactions.geometry();
        let at = self.live.file_changes().device_place(place.start)?;
        let from = (place.at.0 << geometry.block_log) - start;
        let wanted = from..from + (u64::from(place.count) << geometry.block_log);
        let (mut parts, mut begin) = (Vec::with_capacity(pieces.len()), 0);
        for piece in pieces {
            let end = begin + piece.len() as u64;
            let part = wanted.start.max(begin)..wanted.end.min(end);
            if part.start < part.end {
                let bytes = piece.get(index(part.start - begin)..index(part.end - begin));
                parts.push(IoSlice::new(bytes.unwrap_or_default()));
            }
            begin = end;
        }
        self.live.buffers().write_pieces(at, &parts)
    }

    /// Sets the size.
    pub(super) fn truncate(&self, size: u64) -> Result<()> {
        self.size()?;
        self.live.file_changes().truncate(ino_of(self.file), size)
    }
}

impl XfsLive {
    /// The contents of a file whose lock the caller has.
    pub(super) fn contents(&self, file: FileId) -> LiveContents<'_> {
        LiveContents { live: self, file }
    }

    /// Writes bytes to a file.
    pub(crate) fn write(
        &self,
        file: FileId,
        offset: u64,
        data: &[u8],
        at: Timestamp,
    ) -> Result<()> {
        let _call = self.enter()?;
        let ino = ino_of(file);
        let _locked = self.inodes.write([ino]);
        let (inode, contents) = (self.inode(file)?, self.contents(file));
        let size = contents.size()?;
        refuse_flags(&inode, XfsInodeFlags::IMMUTABLE)?;
        if offset != size {
            refuse_flags(&inode, XfsInodeFlags::APPEND)?;
        }
        require_bytes(file, offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(());
        }
        let mut is_changed = false;
        let outcome = contents.write(offset, data, &mut is_changed);
        self.touch_changed(ino, at, outcome, is_changed)?;
        self.keep_synchronous(&inode)
    }

    pub(crate) fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let _locked = self.inodes.read(ino_of(file));
        self.contents(file).read(offset, buf)
    }

    pub(crate) fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let _locked = self.inodes.read(ino_of(file));
        self.contents(file).next_data(offset)
    }

    pub(crate) fn prefetch(&self, file: FileId) -> Result<()> {
        let _locked = self.inodes.read(ino_of(file));
        self.contents(file).prefetch()
    }

    /// Shows the data in a range, part by part. The file is not locked while a part is shown.
    pub(crate) fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (mut at, mut part) = (range.start, Vec::new());
        while at < range.end {
            let found = self.read_part(file, at..range.end, &mut part)?;
            let Some(start) = found else { return Ok(()) };
            visit(start, &part)?;
            at = start + part.len() as u64;
        }
        Ok(())
    }

    /// Reads the first data of a range. Returns where it begins.
    fn read_part(
        &self,
        file: FileId,
        range: Range<u64>,
        part: &mut Vec<u8>,
    ) -> Result<Option<u64>> {
        let _locked = self.inodes.read(ino_of(file));
        let contents = self.contents(file);
        let Some(data) = contents.first_data(range)? else { return Ok(None) };
        let len = (data.end - data.start).min(PIECE_BYTES);
        part.clear();
        part.resize(index(len), 0);
        let count = contents.read(data.start, part)?;
        part.truncate(count);
        Ok((count > 0).then_some(data.start))
    }
}
