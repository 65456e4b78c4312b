//! Data of files: extents, checksums, decompression.
//!
//! A range of a file is cut into *pieces*: runs of one extent that are read in one go.
//! Pieces are gathered in batches from the extent items, so that the devices learn
//! of a batch while the one before it is read, verified and decoded.
//!
//! 1. Pieces ascend and do not overlap, whatever the items of a damaged tree say.
//! 2. A piece needs at most [`PIECE_BYTES`] of memory, a batch at most
//!    [`BATCH_BYTES`] of requests and [`BATCH_PIECES`] pieces, whatever the size of the file.
//! 3. Bytes reach the caller only after their checksums matched, unless the inode has
//!    NODATASUM, which means that there are none.

mod buffer;
mod checksums;
mod drop;
mod in_place;
mod scratch;
mod store;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;

use offshoot_btrfs_format::compress::{Compression, decompress};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody, MAX_COMPRESSED_EXTENT};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, Logical};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result};

use crate::inode::{inode_item, placeholder_in, tree_of, type_of};
use crate::subvolume::malformed;
use crate::tree::Cursor;
use crate::volume::Volume;
pub(crate) use buffer::{Buffers, FileBuffer};
use checksums::checksums;
pub(crate) use checksums::{checksum_items, insert_checksums, remove_checksums};
pub(crate) use drop::drop_range;
pub(crate) use in_place::{Target, target};
use scratch::with_scratch;
pub(crate) use store::{Sectors, insert_hole, store, store_inline, write_data};

/// The most that one piece reads from the devices, in bytes.
const PIECE_BYTES: u64 = 1 << 20;
/// The most that a batch asks of the devices, in bytes.
const BATCH_BYTES: u64 = 4 << 20;
/// The most pieces in a batch.
const BATCH_PIECES: usize = 64;
/// A first batch that is smaller than this is read at once: telling the devices of it
/// first would not be ahead of anything.
const WORTH_A_HINT: u64 = 256 << 10;

/// The part `start..end` of a file, all of it in one extent.
#[derive(Debug)]
struct Piece {
    start: u64,
    end: u64,
    source: Source,
}

/// Where the bytes of a piece are.
#[derive(Debug)]
enum Source {
    /// On disk as they are, `logical` being where `start` is.
    Plain { logical: Logical },
    /// In a compressed extent, `skip` bytes into what it decodes to.
    Compressed { extent: Logical, disk_bytes: u64, decode: Decode },
    /// In the extent item.
    Inline { stored: Vec<u8>, decode: Decode },
}

/// What to make of stored bytes.
#[derive(Clone, Copy, Debug)]
struct Decode {
    compression: Compression,
    ram_bytes: u64,
    skip: u64,
}

impl Piece {
    /// The range of the logical space that is read for it; nothing for inline data.
    fn disk_range(&self, sector: u64) -> Option<(Logical, u64)> {
        match &self.source {
            Source::Plain { logical } => {
                let (from, to) = (logical.0, logical.0 + (self.end - self.start));
                let from = from - from % sector;
                Some((Logical(from), to.next_multiple_of(sector) - from))
            }
            Source::Compressed { extent, disk_bytes, .. } => Some((*extent, *disk_bytes)),
            Source::Inline { .. } => None,
        }
    }
}

/// An open file: what all reads of it need.
pub(crate) struct FileData {
    file: FileId,
    inode: InodeItem,
    buffer: Option<FileBuffer>,
}

impl FileData {
    /// The file whose data is to be read: a regular one or a symbolic link.
    pub(crate) fn open(volume: &Volume, file: FileId) -> Result<Self> {
        // What is written back meanwhile leaves the buffer after it came into the tree.
        let buffer = volume.buffers.get(file);
        Ok(Self { buffer, ..Self::stored(volume, file)? })
    }

    /// The file as it is stored, without what is buffered.
    pub(crate) fn stored(volume: &Volume, file: FileId) -> Result<Self> {
        if let Some(dir) = placeholder_in(file) {
            return Err(Error::posix(Errno::ISDIR, dir.to_string()));
        }
        let inode = inode_item(volume, tree_of(volume, file)?, file)?;
        match type_of(&inode)? {
            FileType::Regular | FileType::Symlink => Ok(Self { file, inode, buffer: None }),
            FileType::Directory => Err(Error::posix(Errno::ISDIR, file.to_string())),
            _ => Err(Error::posix(Errno::INVAL, format!("{file} has no data"))),
        }
    }

    /// The inode item.
    pub(crate) fn inode(&self) -> &InodeItem {
        &self.inode
    }

    /// The size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.buffer.as_ref().map_or(self.inode.size.get(), |buffer| buffer.read().size)
    }

    /// The pieces of `range`, cut at the end of what is stored. Whoever looks into the buffer has done so.
    fn pieces<'v>(&self, volume: &'v Volume, range: Range<u64>) -> Result<Pieces<'v>> {
        // What was buffered when the file was opened may be stored meanwhile.
        let size = match self.buffer {
            Some(_) => inode_item(volume, tree_of(volume, self.file)?, self.file)?.size,
            None => self.inode.size,
        };
        let range = range.start..range.end.min(size.get());
        Ok(Pieces { volume, cursor: None, file: self.file, range, pending: None })
    }
}

/// Walks the extent items of a file and cuts them into pieces.
struct Pieces<'v> {
    volume: &'v Volume,
    /// Where the walk is, once it has begun.
    cursor: Option<Cursor<'v>>,
    file: FileId,
    /// What is still to be covered.
    range: Range<u64>,
    /// The rest of an extent that is longer than one piece.
    pending: Option<(Range<u64>, Logical)>,
}

impl<'v> Pieces<'v> {
    /// Fills `batch`; it stays empty at the end of the range.
    fn fill(&mut self, batch: &mut Vec<Piece>) -> Result<()> {
        let _looking = self.volume.buffers.looking(self.file);
        // Where extents may be replaced between two batches, the item that comes next may begin before what
        // the last batch ended with.
        let mut cursor = match self.cursor.take() {
            Some(cursor) if self.volume.live_part().is_none() => cursor,
            _ => self.seek()?,
        };
        let mut bytes = 0;
        while bytes < BATCH_BYTES && batch.len() < BATCH_PIECES {
            let Some(piece) = self.next(&mut cursor)? else { break };
            bytes += match &piece.source {
                Source::Plain { .. } => piece.end - piece.start,
                Source::Compressed { disk_bytes, .. } => *disk_bytes,
                Source::Inline { stored, .. } => stored.len() as u64,
            };
            batch.push(piece);
        }
        self.cursor = Some(cursor);
        Ok(())
    }

    /// A cursor on the first item that may reach into the range.
    fn seek(&self) -> Result<Cursor<'v>> {
        let key = Key::new(self.file.ino, ItemType::EXTENT_DATA, self.range.start);
        // The root as it is now: what an older one leads to may not be the file's any more.
        let mut cursor = Cursor::seek_floor(self.volume, tree_of(self.volume, self.file)?, key)?;
        let first = Key { offset: 0, ..key };
        if cursor.item().is_some_and(|(at, _)| at < first) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    fn next(&mut self, cursor: &mut Cursor<'v>) -> Result<Option<Piece>> {
        loop {
            if let Some((rest, logical)) = self.pending.take() {
                return Ok(Some(self.cut(rest, logical)));
            }
            if self.range.is_empty() {
                return Ok(None);
            }
            let Some((key, data)) = cursor.item_of(self.file.ino, ItemType::EXTENT_DATA) else {
                return Ok(None);
            };
            let extent = FileExtent::parse(data).map_err(malformed)?;
            let covered = key.offset..key.offset.saturating_add(extent_len(&extent));
            let wanted = self.range.start.max(covered.start)..self.range.end.min(covered.end);
            if key.offset >= self.range.end {
                return Ok(None);
            }
            let piece = if wanted.is_empty() { None } else { piece(&extent, &covered, &wanted)? };
            cursor.advance()?;
            self.range.start = self.range.start.max(wanted.end);
            match piece {
                Some(Piece { start, end, source: Source::Plain { logical } }) => {
                    self.pending = Some((start..end, logical));
                }
                Some(piece) => return Ok(Some(piece)),
                None => {}
            }
        }
    }

    /// Takes one piece off the front of a plain run and keeps the rest pending.
    fn cut(&mut self, run: Range<u64>, logical: Logical) -> Piece {
        let end = run.end.min(run.start + PIECE_BYTES);
        if end < run.end {
            self.pending = Some((end..run.end, Logical(logical.0 + (end - run.start))));
        }
        Piece { start: run.start, end, source: Source::Plain { logical } }
    }
}

/// How much of the file an extent item covers, in bytes.
pub(crate) fn extent_len(extent: &FileExtent<'_>) -> u64 {
    match extent.body {
        // Old kernels truncated inline data and left `ram_bytes` as it was.
        FileExtentBody::Inline(data) if extent.compression == Compression::None => {
            data.len() as u64
        }
        FileExtentBody::Inline(_) => extent.ram_bytes,
        FileExtentBody::Hole { num_bytes } | FileExtentBody::Extent { num_bytes, .. } => num_bytes,
    }
}

/// The piece `wanted` of an extent item that covers `covered`; `None` when it reads as zeros.
fn piece(
    extent: &FileExtent<'_>,
    covered: &Range<u64>,
    wanted: &Range<u64>,
) -> Result<Option<Piece>> {
    let into = wanted.start - covered.start;
    let decode =
        |skip| Decode { compression: extent.compression, ram_bytes: extent.ram_bytes, skip };
    if extent.compression != Compression::None && extent.ram_bytes > MAX_COMPRESSED_EXTENT {
        return Err(Error::corrupt(
            "file extent",
            format!("compressed, and {} bytes long before that", extent.ram_bytes),
        ));
    }
    let source = match extent.body {
        FileExtentBody::Hole { .. } | FileExtentBody::Extent { preallocated: true, .. } => {
            return Ok(None);
        }
        FileExtentBody::Inline(stored) => {
            Source::Inline { stored: stored.to_vec(), decode: decode(into) }
        }
        FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, .. } => {
            let skip = offset.saturating_add(into);
            let end = disk_bytenr.0.saturating_add(disk_num_bytes);
            if end > i64::MAX.cast_unsigned() {
                return Err(Error::corrupt("file extent", format!("its extent ends at {end}")));
            }
            if extent.compression == Compression::None {
                if skip.saturating_add(wanted.end - wanted.start) > disk_num_bytes {
                    return Err(Error::corrupt(
                        "file extent",
                        format!("reaches past the {disk_num_bytes} bytes of its extent"),
                    ));
                }
                Source::Plain { logical: Logical(disk_bytenr.0 + skip) }
            } else if disk_num_bytes > MAX_COMPRESSED_EXTENT {
                return Err(Error::corrupt(
                    "file extent",
                    format!("compressed, and {disk_num_bytes} bytes long on disk"),
                ));
            } else {
                Source::Compressed {
                    extent: disk_bytenr,
                    disk_bytes: disk_num_bytes,
                    decode: decode(skip),
                }
            }
        }
    };
    Ok(Some(Piece { start: wanted.start, end: wanted.end, source }))
}

/// Gives the data in `range` to `visit`, piece by piece. Holes are left out.
pub(crate) fn read_data(
    volume: &Volume,
    data: &FileData,
    range: Range<u64>,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let range = range.start..range.end.min(data.size());
    let runs = data.buffer.as_ref().map(|buffer| buffer.read().runs(&range));
    let mut at = range.start;
    for (start, run) in runs.unwrap_or_default() {
        read_stored(volume, data, at..start, visit)?;
        let part = at.max(start)..range.end.min(start + run.len() as u64);
        visit(part.start, &run[index(part.start - start)..index(part.end - start)])?;
        at = part.end;
    }
    read_stored(volume, data, at..range.end, visit)
}

/// As [`read_data`], of what is in extents.
///
/// While a piece is read a commit may let its extent, which the file has no more, be used again. Then the piece
/// is looked up anew, and what was read is not looked at.
fn read_stored(
    volume: &Volume,
    data: &FileData,
    range: Range<u64>,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        let epoch = volume.epoch();
        let still = || volume.epoch() == epoch;
        at = match read_batches(volume, data, at..range.end, &still, visit)? {
            Some(at) => at,
            None => break,
        };
    }
    Ok(())
}

/// Gives where it stopped, if `still` did not hold any more.
fn read_batches(
    volume: &Volume,
    data: &FileData,
    range: Range<u64>,
    still: &dyn Fn() -> bool,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<Option<u64>> {
    let mut pieces = data.pieces(volume, range)?;
    let mut batch = Vec::new();
    pieces.fill(&mut batch)?;
    let sector = u64::from(volume.superblock().sector_size);
    let hint = |batch: &[Piece]| {
        let ranges = batch.iter().filter_map(|piece| piece.disk_range(sector));
        if batch.len() > 1 || ranges.clone().any(|(_, len)| len >= WORTH_A_HINT) {
            volume.prefetch(ranges);
        }
    };
    hint(&batch);
    let mut next = Vec::new();
    while !batch.is_empty() {
        pieces.fill(&mut next)?;
        hint(&next);
        for piece in batch.drain(..) {
            if !read_piece(volume, data, &piece, still, visit)? {
                return Ok(Some(piece.start));
            }
        }
        std::mem::swap(&mut batch, &mut next);
    }
    Ok(None)
}

/// Tells the devices of the first batch of each of `files`.
pub(crate) fn prefetch(volume: &Volume, files: &[FileId]) {
    let sector = u64::from(volume.superblock().sector_size);
    let mut batch = Vec::new();
    let mut ranges = Vec::new();
    for &file in files {
        // What fails here fails again, with an error, when the file is read.
        let Ok(data) = FileData::open(volume, file) else { continue };
        let pieces = data.pieces(volume, 0..data.size());
        if pieces.and_then(|mut pieces| pieces.fill(&mut batch)).is_ok() {
            ranges.extend(batch.iter().filter_map(|piece| piece.disk_range(sector)));
        }
        batch.clear();
    }
    volume.prefetch(ranges);
}

/// Reads, verifies and decodes one piece and gives it to `visit`, if `still` holds after it was read.
fn read_piece(
    volume: &Volume,
    data: &FileData,
    piece: &Piece,
    still: &dyn Fn() -> bool,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<bool> {
    let wanted = index(piece.end - piece.start);
    let sector = u64::from(volume.superblock().sector_size);
    // Whatever is wrong with what was read does not matter when it is not the file's any more.
    let read = |from, buf: &mut [u8]| {
        let result = read_verified(volume, data, from, buf);
        if still() { result.map(|()| true) } else { Ok(false) }
    };
    match &piece.source {
        Source::Plain { logical } => with_scratch(|buf| {
            let lead = logical.0 % sector;
            let from = Logical(logical.0 - lead);
            buf.resize(index((lead + wanted as u64).next_multiple_of(sector)), 0);
            if !read(from, buf)? {
                return Ok(false);
            }
            visit(piece.start, &buf[index(lead)..][..wanted])?;
            Ok(true)
        }),
        Source::Compressed { extent, disk_bytes, decode } => with_scratch(|stored| {
            stored.resize(index(*disk_bytes), 0);
            if !read(*extent, stored)? {
                return Ok(false);
            }
            decoded(volume, stored, *decode, wanted, |bytes| visit(piece.start, bytes))
                .map_err(|e| at(e, *extent))?;
            Ok(true)
        }),
        Source::Inline { stored, decode } => {
            decoded(volume, stored, *decode, wanted, |bytes| visit(piece.start, bytes))?;
            Ok(true)
        }
    }
}

/// Gives the `wanted` bytes that `stored` decodes to, after those to skip, to `visit`. What the
/// stream does not reach is zeros, as in the kernel.
fn decoded(
    volume: &Volume,
    stored: &[u8],
    decode: Decode,
    wanted: usize,
    visit: impl FnOnce(&[u8]) -> Result<()>,
) -> Result<()> {
    let Decode { compression, ram_bytes, skip } = decode;
    let end = skip.saturating_add(wanted as u64);
    let beyond = || {
        let problem = format!("bytes up to {end} of an extent of {ram_bytes}");
        Error::corrupt("file extent", problem)
    };
    if compression == Compression::None {
        return visit(stored.get(index(skip)..index(end)).ok_or_else(beyond)?);
    }
    if end > ram_bytes || end > MAX_COMPRESSED_EXTENT {
        return Err(beyond());
    }
    with_scratch(|buf| {
        buf.resize(index(end), 0);
        let made = decompress(compression, stored, volume.superblock().sector_size, buf)
            .map_err(malformed)?;
        buf[made..].fill(0);
        visit(&buf[index(skip)..])
    })
}

fn read_verified(volume: &Volume, data: &FileData, from: Logical, buf: &mut [u8]) -> Result<()> {
    if data.inode.flags.get() & inode_flags::NODATASUM != 0 {
        return volume.read_data(from, buf, None);
    }
    let sums = checksums(volume, from, buf.len() as u64)?;
    volume.read_data(from, buf, Some(&sums))
}

/// The error of an extent's contents, with the address of the extent.
fn at(mut error: Error, extent: Logical) -> Error {
    if let Error::Corrupt(corrupt) = &mut error {
        corrupt.logical.get_or_insert(extent.0);
    }
    error
}

/// The first range of data at or after `offset`.
pub(crate) fn next_data(
    volume: &Volume,
    data: &FileData,
    offset: u64,
) -> Result<Option<Range<u64>>> {
    let (size, sector) = (data.size(), u64::from(volume.superblock().sector_size));
    if offset >= size {
        return Ok(None);
    }
    let runs = data.buffer.as_ref().map(|buffer| buffer.read().runs(&(offset..size)));
    let runs = runs.unwrap_or_default().into_iter();
    let mut buffered =
        runs.map(|(at, run)| at.max(offset)..size.min(at + run.len() as u64)).peekable();
    let mut pieces = data.pieces(volume, offset - offset % sector..size)?;
    let mut batch = VecDeque::new();
    let mut found: Option<Range<u64>> = None;
    loop {
        if batch.is_empty() {
            let mut next = Vec::new();
            pieces.fill(&mut next)?;
            // Inline data counts as a whole sector, also where the file goes on behind it.
            let whole = |piece: Piece| {
                piece.start.max(offset)..piece.end.next_multiple_of(sector).min(size)
            };
            batch.extend(next.into_iter().map(whole).filter(|part| !part.is_empty()));
        }
        let is_buffered_first = match (batch.front(), buffered.peek()) {
            (Some(piece), Some(run)) => run.start < piece.start,
            (piece, run) => piece.is_none() && run.is_some(),
        };
        let next = if is_buffered_first { buffered.next() } else { batch.pop_front() };
        let Some(next) = next else { return Ok(found) };
        match &mut found {
            Some(range) if next.start > range.end => return Ok(found),
            Some(range) => range.end = range.end.max(next.end),
            None => found = Some(next),
        }
    }
}

/// A length that the bounds of a piece keep within memory.
fn index(len: u64) -> usize {
    usize::try_from(len).expect("the lengths of a piece are bounded")
}
