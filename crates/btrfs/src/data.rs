//! Data of files: extents, checksums, decompression.
//!
//! Buffered data of a file hides stored data. Stored data is read in `pieces`, which are gathered
//! in batches from the extent items. The devices are told of the next batch while the current one
//! is read, verified and decoded. Bytes reach the caller only after their checksums matched. Files
//! with the flag NODATASUM have no checksums, and are not verified. A compressed extent of which a
//! reader wants a part is kept decoded (`decoded`).

mod buffer;
mod checksums;
mod decoded;
mod drop;
mod file;
mod in_place;
mod inferred;
mod ordered;
mod pack;
mod pieces;
mod prealloc;
mod relocate;
mod salvage;
mod scratch;
mod share;
mod shift;
mod sink;
mod store;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::compress::{Compression, decompress};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_kit::workers::WorkerTask;
use offshoot_vfs::{Errno, Error, FileId, FileType, Result};

use crate::delayed::Queues;
use crate::storage::malformed;
use crate::transaction::{Base, LiveVolume};
pub(crate) use buffer::{Buffers, DirtyFile, FileBuffer, index, lend};
use checksums::checksums;
pub(crate) use checksums::{
    bytes_with_checksums, checksum_items, committed_sums, insert_checksums, insert_sums,
    stored_sums, take_until_next_leaf, until_next_leaf_of_stale,
};
pub(crate) use decoded::DecodedExtents;
use decoded::DecodedKey;
pub(crate) use drop::{OverlappingItem, drop_range, overlaps, overlaps_in};
pub(crate) use file::{
    PLACEHOLDER, inode_item, no_such_file, placeholder_in, timestamp, tree_of, type_of,
};
pub(crate) use in_place::{WriteTarget, is_in_place, target};
pub(crate) use offshoot_kit::pages::AlignedBytes;
pub(crate) use ordered::OrderedExtent;
pub(crate) use pack::{
    CompressionChunk, CompressionChunks, MOST_AT_ONCE, Packing, chunks_of, pack_inline,
};
pub(crate) use pieces::extent_len;
use pieces::{Decode, PieceSource, Pieces, ReadPiece};
pub(crate) use prealloc::{first_gap, preallocate};
pub(crate) use relocate::{copy_extents, store_moved_sums};
use scratch::{ExtentBytes, with_scratch};
pub(crate) use share::share;
pub(crate) use shift::shift;
use sink::{DataVisitor, FilledBuffer, Sink};
pub(crate) use store::{
    DataChecksums, FirstData, InlineData, Sectors, hole_item, insert_hole, note_use, refer_to,
    store_first, store_inline, store_packed, store_preallocated, write_data,
};

/// A first batch of fewer bytes is read at once, because a hint just before the read would gain
/// nothing.
const WORTH_A_HINT: u64 = 256 << 10;

/// How often a commit may make a read look a piece up again. After that the read keeps commits from
/// freeing extents.
const MOST_PUT_OFF: u32 = 2;

/// The number of compressed pieces that are decoded at the same time.
const MOST_DECODED: usize = 16;

/// A volume with files.
pub(crate) trait FileVolume: Queues {
    /// The base of the volume.
    fn base(&self) -> &Base;

    /// Data that was written and waits for write-back.
    fn buffers(&self) -> &Buffers;

    /// The positions of the last reads.
    fn read_ahead(&self) -> &ReadAhead;

    /// Decoded extents of which readers want parts.
    fn decoded(&self) -> &DecodedExtents;
}

/// An open file: what all reads of it need.
pub(crate) struct FileData {
    file: FileId,
    inode: InodeItem,
    buffer: Option<FileBuffer>,
}

impl FileData {
    /// The file whose data is to be read: a regular one or a symbolic link.
    pub(crate) fn open(volume: &impl FileVolume, file: FileId) -> Result<Self> {
        // Write-back empties the buffer only after the extents are in the tree, so the buffer comes
        // first.
        let buffer = volume.buffers().get(file);
        Ok(Self { buffer, ..Self::stored(volume, file)? })
    }

    /// The file as it is stored, without buffered data.
    pub(crate) fn stored(volume: &impl FileVolume, file: FileId) -> Result<Self> {
        if let Some(dir) = placeholder_in(file) {
            return Err(Error::posix(Errno::ISDIR, dir.to_string()));
        }
        let inode = inode_item(volume, tree_of(volume.base(), file)?, file)?;
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

    /// Whether its data is compared with checksums.
    fn is_verified(&self, volume: &impl FileVolume) -> bool {
        !volume.base().ignores_checksums && self.inode.flags.get() & inode_flags::NODATASUM == 0
    }

    /// The size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.buffer.as_ref().map_or(self.inode.size.get(), |buffer| buffer.read().size)
    }

    /// The pieces of `range`, cut at the end of the stored data. A caller that needs buffered data
    /// has looked into the buffer before.
    fn pieces<'v, V: FileVolume>(&self, volume: &'v V, range: Range<u64>) -> Result<Pieces<'v, V>> {
        // Data that was buffered when the file was opened may be stored meanwhile.
        let size = match self.buffer {
            Some(_) => inode_item(volume, tree_of(volume.base(), self.file)?, self.file)?.size,
            None => self.inode.size,
        };
        let range = range.start..range.end.min(size.get());
        Ok(Pieces::new(volume, self.file, range))
    }
}

/// Gives the data in `range` to `visit`, piece by piece. Holes are left out.
pub(crate) fn read_data(
    volume: &impl FileVolume,
    data: &FileData,
    range: Range<u64>,
    visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let range = range.start..range.end.min(data.size());
    read_to(volume, data, range, &mut DataVisitor(visit))
}

/// Gives the data in `range` to `sink`. `range` must not reach behind the end of the file.
fn read_to(
    volume: &impl FileVolume,
    data: &FileData,
    range: Range<u64>,
    sink: &mut dyn Sink,
) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let runs = data.buffer.as_ref().map(|buffer| buffer.read().runs(&range));
    let mut at = range.start;
    for (start, run) in runs.unwrap_or_default() {
        read_stored(volume, data, at..start, sink)?;
        let part = at.max(start)..range.end.min(start + run.len() as u64);
        sink.take(part.start, &run[index(part.start - start)..index(part.end - start)])?;
        at = part.end;
    }
    read_stored(volume, data, at..range.end, sink)
}

/// Fills `buf` with the file from `offset` on, and returns the number of bytes.
pub(crate) fn read_at(
    volume: &impl FileVolume,
    data: &FileData,
    offset: u64,
    buf: &mut [u8],
) -> Result<usize> {
    let available = data.size().saturating_sub(offset);
    let len = buf.len().min(usize::try_from(available).unwrap_or(usize::MAX));
    let range = offset..offset + len as u64;
    if let Some(next) = volume.read_ahead().next(data.file, &range) {
        prefetch_range(volume, data, next);
    }
    let mut filling = FilledBuffer::new(&mut buf[..len], offset);
    read_to(volume, data, range, &mut filling)?;
    filling.finish();
    Ok(len)
}

/// As [`read_to`], for stored data.
///
/// While a piece is read, the file may drop its extent, and a commit may free it for other data.
/// Then the piece is looked up again, and the bytes are discarded. Commits in quick succession
/// could repeat that without end. So after [`MOST_PUT_OFF`] times the piece is read while commits
/// are kept from freeing space.
fn read_stored(
    volume: &impl FileVolume,
    data: &FileData,
    range: Range<u64>,
    sink: &mut dyn Sink,
) -> Result<()> {
    if volume.base().replaces_bad_data {
        return salvage::read_salvaged(volume, data, range, sink);
    }
    let (mut at, mut put_off) = (range.start, 0);
    while at < range.end {
        let epoch = volume.epoch();
        let next = match (put_off, volume.base().live_part()) {
            (MOST_PUT_OFF.., Some(live)) => read_held(volume, live, data, at..range.end, sink)?,
            _ => read_batches(volume, data, at..range.end, epoch, sink)?,
        };
        let Some(next) = next else { break };
        put_off = if next > at { 0 } else { put_off + 1 };
        at = next;
    }
    Ok(())
}

/// Reads the first piece in `range` while commits are kept from freeing space, and gives it to
/// `sink` after that. Returns where the piece ends; `None` when there is none.
///
/// A commit that waits here blocks all new handles. So under this lock the read waits neither for
/// space nor for a handle. `sink` may wait for them, so it is called after the lock is released.
fn read_held(
    volume: &impl FileVolume,
    live: &LiveVolume,
    data: &FileData,
    range: Range<u64>,
    sink: &mut dyn Sink,
) -> Result<Option<u64>> {
    let held = live.freeing.read();
    live.stats.read_held();
    let mut batch = Vec::new();
    data.pieces(volume, range)?.fill(&mut batch)?;
    let Some(piece) = batch.into_iter().next() else { return Ok(None) };
    let sector = u64::from(volume.base().superblock().sector_size);
    let (from, len) = piece.disk_range(sector).unwrap_or_default();
    with_scratch(index(len), |stored| {
        if len > 0 {
            read_verified(volume, data, from, stored)?;
        }
        drop(held);
        give(volume, &piece, piece.stored(from, stored), sink)
    })?;
    Ok(Some(piece.end))
}

/// Reads all pieces of `range` in batches. Returns where it stopped, if the volume is no longer in
/// `epoch`.
fn read_batches(
    volume: &impl FileVolume,
    data: &FileData,
    range: Range<u64>,
    epoch: u64,
    sink: &mut dyn Sink,
) -> Result<Option<u64>> {
    let mut pieces = data.pieces(volume, range)?;
    let mut batch = Vec::new();
    pieces.fill(&mut batch)?;
    let sector = u64::from(volume.base().superblock().sector_size);
    let hint = |batch: &[ReadPiece]| {
        let ranges = batch.iter().filter_map(|piece| piece.disk_range(sector));
        if batch.len() > 1 || ranges.clone().any(|(_, len)| len >= WORTH_A_HINT) {
            volume.base().storage.prefetch(volume.base(), ranges);
        }
    };
    hint(&batch);
    let mut next = Vec::new();
    while !batch.is_empty() {
        pieces.fill(&mut next)?;
        hint(&next);
        if let Some(at) = read_batch(volume, data, &mut batch, epoch, sink)? {
            return Ok(Some(at));
        }
        std::mem::swap(&mut batch, &mut next);
    }
    Ok(None)
}

/// Tells the devices of the extents in `range`.
fn prefetch_range(volume: &impl FileVolume, data: &FileData, range: Range<u64>) {
    let sector = u64::from(volume.base().superblock().sector_size);
    let mut batch = Vec::new();
    // An error is ignored here, because the read meets it again.
    let Ok(mut pieces) = data.pieces(volume, range) else { return };
    while pieces.fill(&mut batch).is_ok() && !batch.is_empty() {
        volume
            .base()
            .storage
            .prefetch(volume.base(), batch.drain(..).filter_map(|piece| piece.disk_range(sector)));
    }
}

/// Tells the devices of the first batch of each of `files`.
pub(crate) fn prefetch(volume: &impl FileVolume, files: &[FileId]) {
    let sector = u64::from(volume.base().superblock().sector_size);
    let mut batch = Vec::new();
    let mut ranges = Vec::new();
    for &file in files {
        // An error is ignored here, because the read of the file meets it again.
        let Ok(data) = FileData::open(volume, file) else { continue };
        let pieces = data.pieces(volume, 0..data.size());
        if pieces.and_then(|mut pieces| pieces.fill(&mut batch)).is_ok() {
            ranges.extend(batch.iter().filter_map(|piece| piece.disk_range(sector)));
        }
        batch.clear();
    }
    volume.base().storage.prefetch(volume.base(), ranges);
}

/// Reads and verifies the pieces of `batch`, and empties it. Several compressed pieces are decoded
/// at once (`workers`). Gives all to `sink` in order. Returns where it stopped, if the volume is no
/// longer in `epoch`.
fn read_batch(
    volume: &impl FileVolume,
    data: &FileData,
    batch: &mut Vec<ReadPiece>,
    epoch: u64,
    sink: &mut dyn Sink,
) -> Result<Option<u64>> {
    let is_alone = batch.len() == 1;
    let mut coming = VecDeque::new();
    for piece in batch.drain(..) {
        let is_packed = matches!(piece.source, PieceSource::Compressed { .. });
        while coming.len() == MOST_DECODED || !is_packed && !coming.is_empty() {
            coming.pop_front().map_or(Ok(()), |one: Decoding| one.finish(sink))?;
        }
        let mut take = |decoding: Option<Decoding>| decoding.map(|one| coming.push_back(one));
        let read = match piece.source {
            PieceSource::Compressed { is_cut: true, .. } => {
                Decoding::kept(volume, data, &piece, epoch).map(|one| take(one).is_some())
            }
            PieceSource::Compressed { .. } if !is_alone => {
                Decoding::start(volume, data, &piece, epoch).map(|one| take(one).is_some())
            }
            _ => read_piece(volume, data, &piece, epoch, sink),
        };
        if !matches!(read, Ok(true)) {
            if let (Ok(_), Some(live)) = (&read, volume.base().live_part()) {
                live.stats.read_put_off();
            }
            coming.into_iter().try_for_each(|one| one.finish(sink))?;
            return read.map(|_| Some(piece.start));
        }
    }
    coming.into_iter().try_for_each(|one| one.finish(sink))?;
    Ok(None)
}

/// A piece that was read and verified, and is being decoded or was.
struct Decoding {
    start: u64,
    /// The bytes of the piece in the decoded data.
    part: Range<usize>,
    extent: Logical,
    bytes: DecodedBytes,
}

enum DecodedBytes {
    Kept(Arc<[u8]>),
    Coming(WorkerTask<Result<ExtentBytes>>),
}

/// Why the decoded bytes of a whole extent are not kept.
enum NotKept {
    /// The volume is in another epoch.
    Moved,
    Unreadable(Error),
    Undecodable,
}

impl Decoding {
    /// Reads `piece`, which is compressed; `None` if the volume is no longer in `epoch` after that.
    fn start(
        volume: &impl FileVolume,
        data: &FileData,
        piece: &ReadPiece,
        epoch: u64,
    ) -> Result<Option<Self>> {
        let PieceSource::Compressed { extent, disk_bytes, decode, .. } = piece.source else {
            return Ok(None);
        };
        let part = decode.part(piece).map_err(|e| at(e, Some(extent)))?;
        let mut stored = ExtentBytes::new(index(disk_bytes));
        if !read_in_epoch(volume, data, extent, &mut stored, epoch)? {
            return Ok(None);
        }
        note_decoded(volume);
        let (sector, end) = (volume.base().superblock().sector_size, part.end);
        let task = WorkerTask::start(move || {
            let mut bytes = ExtentBytes::new(end);
            decode_into(sector, &stored, decode.compression, &mut bytes).map(|()| bytes)
        });
        Ok(Some(Self { start: piece.start, part, extent, bytes: DecodedBytes::Coming(task) }))
    }

    /// Takes the bytes of `piece`, which is compressed, from the extent that the volume keeps
    /// decoded. If it keeps none, reads, decodes and keeps it. `None` as for
    /// [`start`](Self::start).
    fn kept(
        volume: &impl FileVolume,
        data: &FileData,
        piece: &ReadPiece,
        epoch: u64,
    ) -> Result<Option<Self>> {
        let PieceSource::Compressed { extent, disk_bytes, decode, .. } = piece.source else {
            return Ok(None);
        };
        let Decode { compression, ram_bytes, .. } = decode;
        let part = decode.part(piece).map_err(|e| at(e, Some(extent)))?;
        let key = DecodedKey {
            extent,
            epoch,
            disk_bytes,
            ram_bytes,
            compression,
            is_verified: data.is_verified(volume),
        };
        let sector = volume.base().superblock().sector_size;
        let read = || {
            with_scratch(index(disk_bytes), |stored| {
                let is_read = read_in_epoch(volume, data, extent, stored, epoch);
                if !is_read.map_err(NotKept::Unreadable)? {
                    return Err(NotKept::Moved);
                }
                note_decoded(volume);
                with_scratch(index(ram_bytes), |bytes| {
                    let decoded = decode_into(sector, stored, compression, bytes);
                    decoded.map_or(Err(NotKept::Undecodable), |()| Ok(Arc::from(&*bytes)))
                })
            })
        };
        match volume.decoded().get_or_decode(key, read) {
            Ok(bytes) if volume.epoch() == epoch => {
                let bytes = DecodedBytes::Kept(bytes);
                Ok(Some(Self { start: piece.start, part, extent, bytes }))
            }
            Ok(_) | Err(NotKept::Moved) => Ok(None),
            Err(NotKept::Unreadable(error)) => Err(error),
            // It may be damaged only behind the piece.
            Err(NotKept::Undecodable) => Self::start(volume, data, piece, epoch),
        }
    }

    /// Waits for the decoded bytes, and gives them to `sink`.
    fn finish(self, sink: &mut dyn Sink) -> Result<()> {
        match self.bytes {
            DecodedBytes::Kept(bytes) => sink.take(self.start, &bytes[self.part]),
            DecodedBytes::Coming(task) => {
                let bytes = task.finish().map_err(|e| at(e, Some(self.extent)))?;
                sink.take(self.start, &bytes[self.part])
            }
        }
    }
}

/// Reads, verifies and decodes one piece, and gives it to `sink` if the volume is still in `epoch`
/// after the read. Returns whether it is.
fn read_piece(
    volume: &impl FileVolume,
    data: &FileData,
    piece: &ReadPiece,
    epoch: u64,
    sink: &mut dyn Sink,
) -> Result<bool> {
    let wanted = index(piece.end - piece.start);
    let sector = u64::from(volume.base().superblock().sector_size);
    let Some((from, len)) = piece.disk_range(sector) else {
        return give(volume, piece, piece.stored(Logical(0), &[]), sink).map(|()| true);
    };
    let is_plain = matches!(piece.source, PieceSource::Plain { .. });
    // `len` is `wanted` only if the piece begins and ends at sectors.
    if is_plain
        && len == wanted as u64
        && let Some(room) = sink.room(piece.start, wanted)
    {
        let is_read =
            read_in_epoch(volume, data, from, room, epoch).inspect_err(|_| room.fill(0))?;
        if is_read {
            sink.took(wanted);
        }
        return Ok(is_read);
    }
    with_scratch(index(len), |read| {
        if !read_in_epoch(volume, data, from, read, epoch)? {
            return Ok(false);
        }
        give(volume, piece, piece.stored(from, read), sink).map(|()| true)
    })
}

/// Gives `piece` to `sink`. `stored` are its bytes as the device has them: from its first byte on,
/// or all of its compressed extent.
fn give(
    volume: &impl FileVolume,
    piece: &ReadPiece,
    stored: &[u8],
    sink: &mut dyn Sink,
) -> Result<()> {
    let (decode, extent) = match piece.source {
        PieceSource::Plain { .. } => {
            return sink.take(piece.start, &stored[..index(piece.end - piece.start)]);
        }
        PieceSource::Compressed { extent, decode, .. } => (decode, Some(extent)),
        PieceSource::Inline { decode, .. } => (decode, None),
    };
    let part = decode.part(piece).map_err(|e| at(e, extent))?;
    if decode.compression == Compression::None {
        return sink.take(piece.start, stored.get(part).ok_or_else(|| decode.beyond(piece))?);
    }
    if extent.is_some() {
        note_decoded(volume);
    }
    let sector = volume.base().superblock().sector_size;
    with_scratch(part.end, |bytes| {
        decode_into(sector, stored, decode.compression, bytes).map_err(|e| at(e, extent))?;
        sink.take(piece.start, &bytes[part])
    })
}

/// Counts a compressed extent that is decoded.
fn note_decoded(volume: &impl FileVolume) {
    if let Some(live) = volume.base().live_part() {
        live.stats.extent_decoded();
    }
}

/// Fills `bytes` with the beginning of the data that `stored` holds. Bytes that the stream does not
/// reach are zeros, as in the kernel.
fn decode_into(
    sector_size: u32,
    stored: &[u8],
    compression: Compression,
    bytes: &mut [u8],
) -> Result<()> {
    decompress(compression, stored, sector_size, bytes).map(drop).map_err(malformed)
}

/// Reads as [`read_verified`]. Returns whether the volume is still in `epoch` after that. If it is
/// not, the extent may not belong to the file any more, and an error does not matter.
fn read_in_epoch(
    volume: &impl FileVolume,
    data: &FileData,
    from: Logical,
    buf: &mut [u8],
    epoch: u64,
) -> Result<bool> {
    let result = read_verified(volume, data, from, buf);
    if volume.epoch() == epoch { result.map(|()| true) } else { Ok(false) }
}

fn read_verified(
    volume: &impl FileVolume,
    data: &FileData,
    from: Logical,
    buf: &mut [u8],
) -> Result<()> {
    if !data.is_verified(volume) {
        return volume.base().read_data(from, buf, None);
    }
    let sums = checksums(volume.base(), from, buf.len() as u64)?;
    volume.base().read_data(from, buf, Some(&sums))
}

/// The error of an extent's contents, with the address of the extent. Inline data has none.
fn at(mut error: Error, extent: Option<Logical>) -> Error {
    if let (Error::Corrupt(corrupt), Some(extent)) = (&mut error, extent) {
        corrupt.logical.get_or_insert(extent.0);
    }
    error
}

/// The first run of data in `range`. What follows the range is not looked up.
pub(crate) fn next_data(
    volume: &impl FileVolume,
    data: &FileData,
    range: Range<u64>,
) -> Result<Option<Range<u64>>> {
    let sector = u64::from(volume.base().superblock().sector_size);
    let (offset, end) = (range.start, range.end.min(data.size()));
    if offset >= end {
        return Ok(None);
    }
    let runs = data.buffer.as_ref().map(|buffer| buffer.read().runs(&(offset..end)));
    let runs = runs.unwrap_or_default().into_iter();
    let mut buffered =
        runs.map(|(at, run)| at.max(offset)..end.min(at + run.len() as u64)).peekable();
    let mut pieces = data.pieces(volume, offset - offset % sector..end)?;
    let mut batch = VecDeque::new();
    let mut found: Option<Range<u64>> = None;
    loop {
        if batch.is_empty() {
            let mut next = Vec::new();
            pieces.fill(&mut next)?;
            // Inline data counts as a whole sector, even if the file continues behind it.
            let whole = |piece: ReadPiece| {
                piece.start.max(offset)..piece.end.next_multiple_of(sector).min(end)
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
