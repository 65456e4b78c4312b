//! Pieces: a range of a file, cut into parts of one extent that are each read in one request.
//!
//! 1. Pieces ascend and do not overlap, even if the items of a damaged tree do.
//! 2. A piece needs at most [`PIECE_BYTES`] of memory, a batch at most
//!    [`BATCH_BYTES`] of requests and [`BATCH_PIECES`] pieces, whatever the size of the file.

use std::ops::Range;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody, MAX_COMPRESSED_EXTENT};
use offshoot_btrfs_format::{ItemType, Key, Logical};
use offshoot_vfs::{Error, FileId, Result, Structure};

use super::{FileVolume, index, tree_of};
use crate::storage::malformed;
use crate::tree::Cursor;

/// The most bytes that one piece reads from the devices.
const PIECE_BYTES: u64 = 1 << 20;
/// The most bytes that a batch reads from the devices.
const BATCH_BYTES: u64 = 4 << 20;
/// The most pieces in a batch.
const BATCH_PIECES: usize = 64;

/// The part `start..end` of a file, all of it in one extent.
#[derive(Debug)]
pub(super) struct ReadPiece {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) source: PieceSource,
}

/// Where the bytes of a piece are.
#[derive(Debug)]
pub(super) enum PieceSource {
    /// Plain on disk. `logical` is the address of the byte at `start`.
    Plain { logical: Logical },
    /// In a compressed extent, `decode.skip` bytes into its decoded data. `is_cut` says that the
    /// file has more of the extent beside the piece, in the same item.
    Compressed { extent: Logical, disk_bytes: u64, decode: Decode, is_cut: bool },
    /// In the extent item.
    Inline { stored: Vec<u8>, decode: Decode },
}

/// How to decode stored bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decode {
    pub(super) compression: Compression,
    pub(super) ram_bytes: u64,
    pub(super) skip: u64,
}

impl Decode {
    /// The place of `piece` in the decoded data.
    pub(super) fn part(&self, piece: &ReadPiece) -> Result<Range<usize>> {
        let end = self.skip.saturating_add(piece.end - piece.start);
        let most = self.ram_bytes.min(MAX_COMPRESSED_EXTENT);
        if self.compression != Compression::None && end > most {
            return Err(self.beyond(piece));
        }
        Ok(index(self.skip)..index(end))
    }

    /// The error of a piece that reaches behind the decoded data.
    pub(super) fn beyond(&self, piece: &ReadPiece) -> Error {
        let end = self.skip.saturating_add(piece.end - piece.start);
        let problem = format!("bytes up to {end} of an extent of {}", self.ram_bytes);
        Error::corrupt(Structure::FileExtent, problem)
    }
}

impl ReadPiece {
    /// The address and the length of the sectors that are read for it; `None` for inline data.
    pub(super) fn disk_range(&self, sector: u64) -> Option<(Logical, u64)> {
        match &self.source {
            PieceSource::Plain { logical } => {
                let (from, to) = (logical.0, logical.0 + (self.end - self.start));
                let from = from - from % sector;
                Some((Logical(from), to.next_multiple_of(sector) - from))
            }
            PieceSource::Compressed { extent, disk_bytes, .. } => Some((*extent, *disk_bytes)),
            PieceSource::Inline { .. } => None,
        }
    }

    /// The stored bytes of the piece, from its first byte or from that of its compressed extent on.
    /// `read` is its [`disk_range`](Self::disk_range), which begins at `from`.
    pub(super) fn stored<'s>(&'s self, from: Logical, read: &'s [u8]) -> &'s [u8] {
        match &self.source {
            PieceSource::Plain { logical } => &read[index(logical.0 - from.0)..],
            PieceSource::Compressed { .. } => read,
            PieceSource::Inline { stored, .. } => stored,
        }
    }
}

/// Walks the extent items of a file and cuts them into pieces.
pub(super) struct Pieces<'v, V> {
    volume: &'v V,
    /// The position of the walk, once it has begun.
    cursor: Option<Cursor<'v>>,
    file: FileId,
    /// The range that is still to be covered.
    range: Range<u64>,
    /// The rest of an extent that is longer than one piece.
    pending: Option<(Range<u64>, Logical)>,
}

impl<'v, V: FileVolume> Pieces<'v, V> {
    /// The pieces of `range` of `file`.
    pub(super) fn new(volume: &'v V, file: FileId, range: Range<u64>) -> Self {
        Self { volume, cursor: None, file, range, pending: None }
    }

    /// Fills `batch`; it stays empty at the end of the range.
    pub(super) fn fill(&mut self, batch: &mut Vec<ReadPiece>) -> Result<()> {
        if self.pending.is_none() && self.range.is_empty() {
            return Ok(());
        }
        let _looking = self.volume.buffers().looking(self.file);
        // In a volume that is written, extents may be replaced between two batches. Then the next
        // item may begin before the end of the last batch.
        let mut cursor = match self.cursor.take() {
            Some(cursor) if self.volume.base().live_part().is_none() => cursor,
            _ => self.seek()?,
        };
        let known = batch.len();
        let mut bytes = 0;
        while bytes < BATCH_BYTES && batch.len() < BATCH_PIECES {
            let Some(piece) = self.next(&mut cursor)? else { break };
            bytes += match &piece.source {
                PieceSource::Plain { .. } => piece.end - piece.start,
                PieceSource::Compressed { disk_bytes, .. } => *disk_bytes,
                PieceSource::Inline { stored, .. } => stored.len() as u64,
            };
            batch.push(piece);
        }
        self.cursor = Some(cursor);
        if let Some(live) = self.volume.base().live_part() {
            live.stats.looked_up_pieces(batch.len() - known);
        }
        Ok(())
    }

    /// A cursor on the first item that may reach into the range.
    fn seek(&self) -> Result<Cursor<'v>> {
        let key = Key::new(self.file.ino, ItemType::EXTENT_DATA, self.range.start);
        // The current root. Extents under an older one may no longer belong to the file.
        let mut cursor =
            Cursor::seek_floor(self.volume.base(), tree_of(self.volume.base(), self.file)?, key)?;
        let first = Key { offset: 0, ..key };
        if cursor.item().is_some_and(|(at, _)| at < first) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    fn next(&mut self, cursor: &mut Cursor<'v>) -> Result<Option<ReadPiece>> {
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
            let sector = u64::from(self.volume.base().superblock().sector_size);
            let piece =
                if wanted.is_empty() { None } else { piece(&extent, &covered, &wanted, sector)? };
            cursor.advance()?;
            self.range.start = self.range.start.max(wanted.end);
            match piece {
                Some(ReadPiece { start, end, source: PieceSource::Plain { logical } }) => {
                    self.pending = Some((start..end, logical));
                }
                Some(piece) => return Ok(Some(piece)),
                None => {}
            }
        }
    }

    /// Takes one piece off the front of a plain run and keeps the rest pending.
    fn cut(&mut self, run: Range<u64>, logical: Logical) -> ReadPiece {
        let end = run.end.min(run.start + PIECE_BYTES);
        if end < run.end {
            self.pending = Some((end..run.end, Logical(logical.0 + (end - run.start))));
        }
        ReadPiece { start: run.start, end, source: PieceSource::Plain { logical } }
    }
}

/// The bytes of the file that an extent item covers.
pub(crate) fn extent_len(extent: &FileExtent<'_>) -> u64 {
    match extent.body {
        // Old kernels truncated inline data without changing `ram_bytes`.
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
    sector: u64,
) -> Result<Option<ReadPiece>> {
    let into = wanted.start - covered.start;
    let decode =
        |skip| Decode { compression: extent.compression, ram_bytes: extent.ram_bytes, skip };
    if extent.compression != Compression::None && extent.ram_bytes > MAX_COMPRESSED_EXTENT {
        return Err(Error::corrupt(
            Structure::FileExtent,
            format!("compressed, and {} bytes long before that", extent.ram_bytes),
        ));
    }
    let source = match extent.body {
        FileExtentBody::Hole { .. } | FileExtentBody::Extent { is_preallocated: true, .. } => {
            return Ok(None);
        }
        FileExtentBody::Inline(stored) => {
            PieceSource::Inline { stored: stored.to_vec(), decode: decode(into) }
        }
        FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, .. } => {
            let skip = offset.saturating_add(into);
            let end = disk_bytenr.0.saturating_add(disk_num_bytes);
            if end > i64::MAX.cast_unsigned() {
                return Err(Error::corrupt(
                    Structure::FileExtent,
                    format!("its extent ends at {end}"),
                ));
            }
            if extent.compression == Compression::None {
                if skip.saturating_add(wanted.end - wanted.start) > disk_num_bytes {
                    return Err(Error::corrupt(
                        Structure::FileExtent,
                        format!("reaches past the {disk_num_bytes} bytes of its extent"),
                    ));
                }
                PieceSource::Plain { logical: Logical(disk_bytenr.0 + skip) }
            } else if disk_num_bytes > MAX_COMPRESSED_EXTENT {
                return Err(Error::corrupt(
                    Structure::FileExtent,
                    format!("compressed, and {disk_num_bytes} bytes long on disk"),
                ));
            } else {
                // The last sector of a file is not wanted as a whole.
                let is_whole = wanted.start == covered.start
                    && wanted.end.next_multiple_of(sector) >= covered.end;
                PieceSource::Compressed {
                    extent: disk_bytenr,
                    disk_bytes: disk_num_bytes,
                    decode: decode(skip),
                    is_cut: !is_whole,
                }
            }
        }
    };
    Ok(Some(ReadPiece { start: wanted.start, end: wanted.end, source }))
}
