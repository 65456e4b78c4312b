//! Data of regular files.
//!
//! Data has no checksums, so it goes from the device straight into the buffer of the caller. Holes
//! and unwritten extents read as zeros.

use std::collections::VecDeque;
use std::ops::Range;

use offshoot_kit::read_ahead::{ReadAhead, near_runs};
use offshoot_vfs::{Code, Errno, Error, FileType, Result};
use offshoot_xfs_format::inode::XfsInodeFlags;
use offshoot_xfs_format::{AgBlock, FileBlock, Ino};

use crate::buffer::{DiskRun, XfsBuffers};
use crate::inode::LoadedInode;
use crate::inode::fork::{ForkExtents, end_of, place_of};

/// The bytes that [`FileContent::visit`] reads at once.
const PART_BYTES: u64 = 1 << 20;

/// The pieces that [`FileContent::visit`] tells the device of before it reads them.
const PIECES_AHEAD: usize = 16;

/// The bytes of one extent that the device is told of at once.
const MOST_HINT_BYTES: u64 = 8 << 20;

/// The extents of one file that the device is told of at once.
const MOST_HINTS: usize = 64;

/// The extents of one directory that the device is told of at once.
const MOST_DIRECTORY_HINTS: usize = 4;

/// Data that is stored: where in the file, and where on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DataPiece {
    range: Range<u64>,
    place: u64,
}

/// The stored data in a range, in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredPieces(Vec<DataPiece>);

impl StoredPieces {
    /// Fills `buf`, which begins at `offset` in the file. What is not stored is zeros.
    pub(crate) fn read(&self, buffers: &XfsBuffers, offset: u64, buf: &mut [u8]) -> Result<()> {
        let (mut rest, mut at) = (buf, offset);
        for piece in &self.0 {
            let (hole, behind) = rest.split_at_mut(length(at..piece.range.start));
            hole.fill(0);
            let (data, behind) = behind.split_at_mut(length(piece.range.clone()));
            buffers.read_into(piece.place, data)?;
            (rest, at) = (behind, piece.range.end);
        }
        rest.fill(0);
        Ok(())
    }
}

/// The data of a regular file.
pub(crate) struct FileContent<'a> {
    buffers: &'a XfsBuffers,
    inode: &'a LoadedInode,
}

impl<'a> FileContent<'a> {
    /// The data of this inode; `EISDIR` for a directory, `EINVAL` for other files without data.
    pub(crate) fn new(buffers: &'a XfsBuffers, inode: &'a LoadedInode) -> Result<Self> {
        let file = inode.file();
        match inode.file_type()? {
            FileType::Regular => {}
            FileType::Directory => return Err(Error::posix(Errno::ISDIR, file.to_string())),
            _ => return Err(Error::posix(Errno::INVAL, format!("{file} has no data"))),
        }
        if inode.core.flags().contains(XfsInodeFlags::REALTIME) {
            let what = format!(
                "the data of {file}, which is on a realtime device: copy it from a mount of the \
                 kernel"
            );
            return Err(Error::unsupported(Code::UnknownFeature, what));
        }
        Ok(Self { buffers, inode })
    }

    pub(crate) fn size(&self) -> u64 {
        self.inode.core.size.get()
    }

    /// The stored data in `range`, cut at the end of the file.
    fn pieces(&self, range: Range<u64>) -> Result<DataPieces<'a>> {
        let log = self.buffers.geometry().block_log;
        let range = range.start..range.end.min(self.size());
        let at = FileBlock(range.start >> log);
        let extents = self.inode.data.extents(self.buffers, at)?;
        Ok(DataPieces { buffers: self.buffers, extents, range })
    }

    /// Fills `buf` from `offset` on, and returns the number of bytes.
    pub(crate) fn read(&self, ahead: &ReadAhead, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let available = self.size().saturating_sub(offset);
        let len = buf.len().min(usize::try_from(available).unwrap_or(usize::MAX));
        if len == 0 {
            return Ok(0);
        }
        let range = offset..offset + len as u64;
        if let Some(next) = ahead.next(self.inode.file(), &range) {
            self.prefetch(next);
        }
        self.stored_pieces(range.clone())?.read(self.buffers, range.start, &mut buf[..len])?;
        Ok(len)
    }

    /// Where the data in `range` lies, cut at the end of the file.
    pub(crate) fn stored_pieces(&self, range: Range<u64>) -> Result<StoredPieces> {
        let (mut pieces, mut found) = (self.pieces(range)?, Vec::new());
        while let Some(piece) = pieces.next()? {
            found.push(piece);
        }
        Ok(StoredPieces(found))
    }

    /// Gives the data in `range` to `visit` in parts. Holes are left out.
    pub(crate) fn visit(
        &self,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut pieces = self.pieces(range)?;
        let mut part = Vec::new();
        let mut ahead = VecDeque::new();
        loop {
            while ahead.len() < PIECES_AHEAD
                && let Some(piece) = pieces.next()?
            {
                // The first piece is read at once.
                if !ahead.is_empty() {
                    self.hint(&piece);
                }
                ahead.push_back(piece);
            }
            let Some(piece) = ahead.pop_front() else { return Ok(()) };
            let mut at = piece.range.start;
            while at < piece.range.end {
                let len = (piece.range.end - at).min(PART_BYTES);
                part.resize(length(at..at + len), 0);
                self.buffers.read_into(piece.place + (at - piece.range.start), &mut part)?;
                visit(at, &part)?;
                at += len;
            }
        }
    }

    /// The first range of data from `offset` on.
    pub(crate) fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.first_data(offset..u64::MAX, u64::MAX)
    }

    /// The first data in a range. What follows it without a gap belongs to it, until it has `most`
    /// bytes.
    pub(crate) fn first_data(&self, range: Range<u64>, most: u64) -> Result<Option<Range<u64>>> {
        if range.start >= self.size() {
            return Ok(None);
        }
        let mut pieces = self.pieces(range)?;
        let Some(first) = pieces.next()? else { return Ok(None) };
        let mut found = first.range;
        while found.end - found.start < most
            && let Some(next) = pieces.next()?.filter(|next| next.range.start == found.end)
        {
            found.end = next.range.end;
        }
        Ok(Some(found))
    }

    /// Tells the device of the data in `range`. An error is ignored: the read meets it again.
    pub(crate) fn prefetch(&self, range: Range<u64>) {
        let mut hints = ReadHints::default();
        hints.add(self, range);
        hints.tell(self.buffers);
    }

    fn hint(&self, piece: &DataPiece) {
        prefetch(self.buffers, &piece.first_bytes());
    }
}

/// Places that are about to be read.
#[derive(Default)]
pub(crate) struct ReadHints(Vec<((), Range<u64>)>);

impl ReadHints {
    /// Adds the cluster of an inode.
    pub(crate) fn add_inode(&mut self, buffers: &XfsBuffers, ino: Ino) {
        let geometry = buffers.geometry();
        let Some((ag, inode)) = geometry.split_ino(ino) else { return };
        let block = AgBlock(inode.0 >> geometry.inodes_per_block_log());
        let DiskRun { at, bytes } = DiskRun::cluster(geometry, ag, block);
        self.0.push(((), at.bytes()..at.bytes().saturating_add(bytes as u64)));
    }

    /// Adds the first extents of a directory with blocks of its own. An error is ignored: the
    /// read meets it again.
    pub(crate) fn add_directory(&mut self, buffers: &XfsBuffers, inode: &LoadedInode) {
        let Ok(mut extents) = inode.data.extents(buffers, FileBlock(0)) else { return };
        for _ in 0..MOST_DIRECTORY_HINTS {
            let Ok(Some(extent)) = extents.next() else { return };
            let Ok(place) = place_of(buffers, &extent) else { return };
            let len = u64::from(extent.count) << buffers.geometry().block_log;
            self.0.push(((), place.bytes()..place.bytes() + len.min(MOST_HINT_BYTES)));
        }
    }

    /// Adds the first extents of a range of a file. An error is ignored: the read meets it again.
    pub(crate) fn add(&mut self, content: &FileContent<'_>, range: Range<u64>) {
        let Ok(mut pieces) = content.pieces(range) else { return };
        for _ in 0..MOST_HINTS {
            let Ok(Some(piece)) = pieces.next() else { return };
            self.0.push(((), piece.first_bytes()));
        }
    }

    /// Tells the device of all of them, in its order and with small gaps closed.
    pub(crate) fn tell(self, buffers: &XfsBuffers) {
        for ((), run) in near_runs(self.0) {
            prefetch(buffers, &run);
        }
    }
}

fn prefetch(buffers: &XfsBuffers, range: &Range<u64>) {
    buffers.prefetch(range.start, range.end - range.start);
}

impl DataPiece {
    /// The bytes of the device that it is told of.
    fn first_bytes(&self) -> Range<u64> {
        let len = (self.range.end - self.range.start).min(MOST_HINT_BYTES);
        self.place..self.place.saturating_add(len)
    }
}

/// The bytes of a range that lies in a buffer.
fn length(range: Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
}

/// The stored data in a range, in order.
struct DataPieces<'a> {
    buffers: &'a XfsBuffers,
    extents: ForkExtents<'a>,
    range: Range<u64>,
}

impl DataPieces<'_> {
    fn next(&mut self) -> Result<Option<DataPiece>> {
        let log = self.buffers.geometry().block_log;
        // Offsets of hostile extents may be above 64 bits as bytes; the end of a file is not.
        let end_block = self.range.end.div_ceil(1 << log);
        while let Some(extent) = self.extents.next()? {
            if extent.offset.0 >= end_block || self.range.is_empty() {
                return Ok(None);
            }
            let start = extent.offset.0 << log;
            let end = end_of(&extent).min(end_block) << log;
            let range = start.max(self.range.start)..end.min(self.range.end);
            if extent.is_unwritten || range.is_empty() {
                continue;
            }
            let place = place_of(self.buffers, &extent)?.bytes() + (range.start - start);
            return Ok(Some(DataPiece { range, place }));
        }
        Ok(None)
    }
}
