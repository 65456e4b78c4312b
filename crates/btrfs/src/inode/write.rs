//! Writing into files, and changing their length.
//!
//! A write goes into the buffer of the file (`data::buffer`), and write-back turns the buffer into
//! extents. Before a write is accepted its data space is reserved, and the metadata by which
//! write-back will enlarge trees is promised.
//!
//! Inline data must not stand beside other data, so the inline data of a file is buffered whole
//! before the file changes.

use std::ops::Range;

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, FileExtentTail,
};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result, Structure, Timestamp};

use super::changes::{Changes, refuse_flags, timespec};
use super::subvolume::writable;
use super::write_back::{self, Patience};
use super::{inode_item, tree_of, type_of};
use crate::data::{
    FileBuffer, FileData, drop_range, extent_len, index, is_in_place, next_data, read_data,
};
use crate::inode::Rooms;
use crate::space::{Promise, Reservation};
use crate::storage::malformed;
use crate::tree::Cursor;

/// The most bytes that are buffered in one step.
const PIECE_BYTES: u64 = 1 << 20;

/// The most extents that one handle takes out of a file.
const MAX_DROPPED: usize = 64;

/// The largest file, in bytes, because offsets of system calls are signed.
pub(super) const MAX_SIZE: u64 = i64::MAX.cast_unsigned();

/// Writes `data` at `offset` of `file`.
pub(crate) fn write(
    volume: &Rooms,
    file: FileId,
    offset: u64,
    data: &[u8],
    at: Timestamp,
) -> Result<()> {
    let subvolume = writable(volume, file)?;
    write_back::limit(volume)?;
    let _buffering = subvolume.buffering()?;
    let _locks = volume.inodes.lock(&[file]);
    let item = regular(volume, file)?;
    refuse_flags(&item, inode_flags::IMMUTABLE, file)?;
    let size = length_of(volume, file, &item);
    if size != offset {
        refuse_flags(&item, inode_flags::APPEND, file)?;
    }
    if offset.checked_add(data.len() as u64).is_none_or(|end| end > MAX_SIZE) {
        return Err(Error::posix(Errno::FBIG, file.to_string()));
    }
    if data.is_empty() {
        return Ok(());
    }
    timespec(at)?;
    write_locked(volume, file, size, offset, data, at)?;
    keep_synchronous(volume, file, &item)
}

/// Makes the change of `file`, whose lock is held, durable if `item` has the flag SYNC. `item` may
/// be the inode item from before the change.
pub(super) fn keep_synchronous(volume: &Rooms, file: FileId, item: &InodeItem) -> Result<()> {
    if item.flags.get() & inode_flags::SYNC == 0 {
        return Ok(());
    }
    write_back::write_back(volume, file, Patience::Waits)?;
    volume.commit_if(true)
}

/// As [`write()`], and writes the file back.
pub(crate) fn write_direct(
    volume: &Rooms,
    file: FileId,
    offset: u64,
    data: &[u8],
    at: Timestamp,
) -> Result<()> {
    write(volume, file, offset, data, at)?;
    write_back::sync_file(volume, file)
}

/// Writes `data` at `offset` of `file`, whose lock is held and which has `size` bytes. The caller
/// has checked that this is allowed.
pub(super) fn write_locked(
    volume: &Rooms,
    file: FileId,
    size: u64,
    offset: u64,
    data: &[u8],
    at: Timestamp,
) -> Result<()> {
    if size < offset {
        clear_behind(volume, file, size, at)?;
    }
    let (mut from, end) = (offset, offset + data.len() as u64);
    while from < end {
        // Pieces end at multiples, so that no sector belongs to two of them.
        let to = end.min((from / PIECE_BYTES + 1) * PIECE_BYTES);
        let piece = &data[index(from - offset)..index(to - offset)];
        buffer_in(volume, file, size.max(from), from, piece, at)?;
        from = to;
        // The next call makes room before it locks the file.
        if from < end && write_back::is_over_limit(volume) {
            write_back::write_back(volume, file, Patience::Waits)?;
        } else {
            write_back::keep_room(volume, file)?;
        }
    }
    Ok(())
}

/// The inode item of a regular file.
pub(super) fn regular(volume: &Rooms, file: FileId) -> Result<InodeItem> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    match type_of(&item)? {
        FileType::Regular if item.size.get() > MAX_SIZE => {
            let problem = format!("a file of {} bytes", item.size);
            Err(Error::corrupt(Structure::InodeItem, problem).in_file(file))
        }
        FileType::Regular => Ok(item),
        FileType::Directory => Err(Error::posix(Errno::ISDIR, file.to_string())),
        _ => Err(Error::posix(Errno::INVAL, format!("{file} has no data"))),
    }
}

/// The length of `file`, including buffered data.
pub(super) fn length_of(volume: &Rooms, file: FileId, item: &InodeItem) -> u64 {
    volume.buffers.get(file).map_or(item.size.get(), |buffer| buffer.read().size)
}

/// The length of `file`, a regular one, including buffered data.
pub(super) fn current_length(volume: &Rooms, file: FileId) -> Result<u64> {
    match volume.buffers.get(file) {
        Some(buffer) => Ok(buffer.read().size),
        None => Ok(regular(volume, file)?.size.get()),
    }
}

/// Buffers `data` at `offset`. With empty `data` it buffers the sector that contains `offset`.
pub(super) fn buffer(
    volume: &Rooms,
    file: FileId,
    offset: u64,
    data: &[u8],
    at: Timestamp,
) -> Result<()> {
    let size = current_length(volume, file)?;
    buffer_in(volume, file, size, offset, data, at)
}

/// As [`buffer`], in a file of `size` bytes, buffered ones included.
fn buffer_in(
    volume: &Rooms,
    file: FileId,
    size: u64,
    offset: u64,
    data: &[u8],
    at: Timestamp,
) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let new = offset..offset + data.len() as u64;
    let range = new.start / sector * sector..new.end.max(new.start + 1).next_multiple_of(sector);
    let BufferRoom { gaps, taken, is_in_place } = BufferRoom::reserve(volume, file, &range)?;
    let contents = gaps.iter().map(|gap| contents(volume, file, gap, &new, data));
    let contents = contents.collect::<Result<Vec<_>>>()?;
    let buffers = &volume.buffers;
    let buffer = buffers.get_or_add(file, size, at);
    if let Some((data, promise)) = taken {
        let mut dirty = buffer.write();
        dirty.keep(data.as_ref(), promise);
        dirty.is_in_place = is_in_place;
        drop(dirty);
    }
    let mut from = new.start;
    for (gap, contents) in gaps.iter().zip(contents) {
        buffers.add(&buffer, gap.start, &[&contents.head, contents.new, &contents.tail]);
        // The part before the gap was buffered already.
        let covered = from..gap.start.clamp(from, new.end);
        buffer.write().overwrite(from, &data[within(&new, &covered)]);
        from = gap.end.clamp(from, new.end);
    }
    buffer.write().overwrite(from, &data[within(&new, &(from..new.end))]);
    if !data.is_empty() {
        buffer.write().written(new.end, at);
    }
    Ok(())
}

/// The space for buffering a range.
struct BufferRoom<'v> {
    /// The parts of the range that are not buffered yet.
    gaps: Vec<Range<u64>>,
    /// The reserved data space, and the promised metadata by which write-back will enlarge trees.
    taken: Option<(Option<Reservation<'v>>, Promise<'v>)>,
    /// Whether all buffered data of the file will be written in place, so that no data space is
    /// reserved.
    is_in_place: bool,
}

impl<'v> BufferRoom<'v> {
    fn reserve(volume: &'v Rooms, file: FileId, range: &Range<u64>) -> Result<Self> {
        let reserved = with_room(volume, file, |buffer| {
            if let Some(buffer) = buffer {
                write_back::ahead::settle_if_short(volume, file, buffer)?;
            }
            let gaps = gaps(volume, file, buffer, range)?;
            let is_in_place = buffer.is_some_and(|buffer| buffer.read().is_in_place);
            let bytes: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
            if bytes == 0 {
                return Ok(Self { gaps, taken: None, is_in_place });
            }
            if is_in_place {
                return Self::in_place(volume, file, buffer, gaps);
            }
            let promise = write_back::promise(volume, file, buffer, &gaps)?;
            let data = volume.reserve_data(bytes)?;
            Ok(Self { gaps, taken: Some((Some(data), promise)), is_in_place })
        });
        match reserved {
            // Preallocated space can be written without more data space. This is tried only if
            // nothing of the file is buffered, that is, if write-back itself did not fail for want
            // of room.
            Err(error) if error.errno() == Errno::NOSPC && volume.buffers.get(file).is_none() => {
                let gaps = gaps(volume, file, None, range)?;
                Self::in_place(volume, file, None, gaps)
                    .map_err(|other| if other.errno() == Errno::NOSPC { error } else { other })
            }
            reserved => reserved,
        }
    }

    /// Room for `gaps` if all of them may be written in place; `ENOSPC` otherwise.
    fn in_place(
        volume: &'v Rooms,
        file: FileId,
        buffer: Option<&FileBuffer>,
        gaps: Vec<Range<u64>>,
    ) -> Result<Self> {
        let item = regular(volume, file)?;
        let are_in_place = || -> Result<bool> {
            for gap in &gaps {
                if !is_in_place(&volume.base.enter()?, file, &item, gap)? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        if !(are_in_place()? || volume.forget_moved_extents()? && are_in_place()?) {
            return Err(Error::posix(Errno::NOSPC, format!("data of {file}")));
        }
        let promise = write_back::promise(volume, file, buffer, &gaps)?;
        Ok(Self { gaps, taken: Some((None, promise)), is_in_place: true })
    }
}

/// Calls `reserve` for `file`, whose lock is held. If that fails with `ENOSPC`, writes the file
/// back and tries again: write-back gives up what was promised and reserved for the buffered data,
/// and space that the data replaces.
fn with_room<T>(
    volume: &Rooms,
    file: FileId,
    reserve: impl Fn(Option<&FileBuffer>) -> Result<T>,
) -> Result<T> {
    loop {
        let buffer = volume.buffers.get(file);
        match reserve(buffer.as_ref()) {
            Err(error) if error.errno() == Errno::NOSPC && buffer.is_some() => {
                write_back::write_back(volume, file, Patience::Waits)?;
            }
            outcome => return outcome,
        }
    }
}

/// The parts of `range`, which is whole sectors, that are not buffered yet. If the file has inline
/// data, its sector comes first, because no extent may stand beside inline data.
fn gaps(
    volume: &Rooms,
    file: FileId,
    buffer: Option<&FileBuffer>,
    range: &Range<u64>,
) -> Result<Vec<Range<u64>>> {
    let gaps = |range: Range<u64>| match buffer {
        Some(buffer) => buffer.read().gaps(&range),
        None => vec![range],
    };
    let mut found = gaps(range.clone());
    // This check also refuses inline data that is too long, wherever the write goes.
    if !found.is_empty() && is_inline(volume, file)? && range.start > 0 {
        found.splice(..0, gaps(0..u64::from(volume.superblock().sector_size)));
    }
    Ok(found)
}

/// The bytes of a gap that is about to be buffered, which is whole sectors: new data, and what is
/// stored before and behind it in its first and last sector.
struct GapContents<'d> {
    head: Vec<u8>,
    new: &'d [u8],
    tail: Vec<u8>,
}

/// The bytes of `gap`: `data` in the range `new`, and stored data around it.
fn contents<'d>(
    volume: &Rooms,
    file: FileId,
    gap: &Range<u64>,
    new: &Range<u64>,
    data: &'d [u8],
) -> Result<GapContents<'d>> {
    let part = gap.start.max(new.start)..gap.end.min(new.end);
    let part = if part.is_empty() { gap.end..gap.end } else { part };
    let kept = [gap.start..part.start, part.end..gap.end];
    let mut around = [Vec::new(), Vec::new()];
    if kept.iter().any(|range| !range.is_empty()) {
        let stored = FileData::open(volume, file)?;
        for (range, bytes) in kept.into_iter().zip(&mut around) {
            if range.is_empty() {
                continue;
            }
            bytes.resize(index(range.end - range.start), 0);
            read_data(volume, &stored, range.clone(), &mut |at, piece| {
                bytes[index(at - range.start)..][..piece.len()].copy_from_slice(piece);
                Ok(())
            })?;
        }
    }
    let [head, tail] = around;
    let new = if part.is_empty() { &[] } else { &data[within(new, &part)] };
    Ok(GapContents { head, new, tail })
}

/// Whether the stored data of `file` is inline.
pub(super) fn is_inline(volume: &Rooms, file: FileId) -> Result<bool> {
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, 0);
    let cursor = Cursor::seek(volume, tree_of(volume, file)?, key)?;
    let Some((_, data)) = cursor.item_of(file.ino, ItemType::EXTENT_DATA) else {
        return Ok(false);
    };
    let extent = FileExtent::parse(data).map_err(malformed)?;
    let is_inline = matches!(extent.body, FileExtentBody::Inline(_));
    if is_inline && extent_len(&extent) > u64::from(volume.superblock().sector_size) {
        let problem = "inline data that is longer than a sector";
        return Err(Error::corrupt(Structure::FileExtent, problem).in_file(file));
    }
    Ok(is_inline)
}

/// Gives `file`, whose lock is held, the length `size`.
pub(super) fn truncate(volume: &Rooms, file: FileId, size: u64, at: Timestamp) -> Result<()> {
    let item = regular(volume, file)?;
    if size > MAX_SIZE {
        return Err(Error::posix(Errno::FBIG, file.to_string()));
    }
    let old = length_of(volume, file, &item);
    // A file may have preallocated space beyond its end.
    if size == old && item.flags.get() & inode_flags::PREALLOC == 0 {
        return Ok(());
    }
    timespec(at)?;
    if size > 0 && is_inline(volume, file)? {
        buffer(volume, file, 0, &[], at)?;
    }
    if old < size { grow(volume, file, old, size, at) } else { shrink(volume, file, size, at) }
}

/// Makes a file longer. The new part is a hole.
pub(super) fn grow(volume: &Rooms, file: FileId, old: u64, size: u64, at: Timestamp) -> Result<()> {
    clear_behind(volume, file, old, at)?;
    // The promise makes sure that the new length can be stored. If it fails, nothing has changed.
    let promise = with_room(volume, file, |b| write_back::promise(volume, file, b, &[]))?;
    if is_inline(volume, file)? {
        // Write-back for want of room may have made it inline.
        self::buffer(volume, file, 0, &[], at)?;
    }
    let buffer = volume.buffers.get_or_add(file, old, at);
    buffer.write().keep(None, promise);
    buffer.write().written(size, at);
    store_length(volume, file, &buffer)
}

/// Makes a file shorter. Stored data is cut first, because that may fail, and then buffered data.
fn shrink(volume: &Rooms, file: FileId, size: u64, at: Timestamp) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let item = regular(volume, file)?;
    let buffer = volume.buffers.get(file);
    if size < item.size.get() || item.flags.get() & inode_flags::PREALLOC != 0 {
        // A commit in between must not show zeros in the last sector of a file that is still
        // longer. If that sector is buffered, write-back stores it together with the length.
        let last = size / sector * sector..size.next_multiple_of(sector);
        let is_buffered = buffer.as_ref().is_some_and(|b| b.read().gaps(&last).is_empty());
        let to = if is_buffered && !last.is_empty() { last.end } else { size };
        cut(volume, file, to, at)?;
    }
    let Some(buffer) = buffer else { return Ok(()) };
    write_back::release(volume, &buffer, volume.buffers.resize(&buffer, size, sector));
    buffer.write().written(0, at);
    store_length(volume, file, &buffer)
}

/// Stores the length of a file at once if no data of it is buffered.
fn store_length(volume: &Rooms, file: FileId, buffer: &FileBuffer) -> Result<()> {
    if buffer.read().is_empty() {
        write_back::write_back(volume, file, Patience::Waits)?;
    }
    Ok(())
}

/// Buffers the last sector of a file that is about to grow. The rest of the sector must read as
/// zeros, but may still have data from before the kernel or this engine cut the file.
fn clear_behind(volume: &Rooms, file: FileId, end: u64, at: Timestamp) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    if end.is_multiple_of(sector) || !has_stored(volume, file, end)? {
        return Ok(());
    }
    buffer(volume, file, end, &[], at)
}

/// Whether the sector that contains `at` has stored data.
pub(super) fn has_stored(volume: &Rooms, file: FileId, at: u64) -> Result<bool> {
    let sector = u64::from(volume.superblock().sector_size);
    let stored = FileData::stored(volume, file)?;
    let begin = at / sector * sector;
    let next = next_data(volume, &stored, begin..begin + sector)?;
    Ok(next.is_some_and(|next| next.start <= at))
}

/// Removes all stored data behind `size` from the file, starting at its end. After a crash the
/// length is between the old and the new one.
pub(super) fn cut(volume: &Rooms, file: FileId, size: u64, at: Timestamp) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let end = size.next_multiple_of(sector);
    // At most a leaf of items at once changes few blocks, so the reservation of a removal is
    // enough.
    let item_bytes = size_of::<FileExtentHead>() + size_of::<FileExtentTail>() + ITEM_SIZE;
    let most = MAX_DROPPED.min(leaf_capacity(volume.superblock().node_size) / item_bytes);
    loop {
        let last = offsets_from_end(volume, file, end, most)?;
        let is_done = last.len() < most;
        let from = if is_done { end } else { last.last().map_or(end, |&at| at.max(end)) };
        let handle = volume.join_to_remove()?;
        let mut changes = Changes::new(&handle, file)?;
        changes.inode(file)?;
        handle.all_or_stop(|| {
            let dropped = {
                let _changing = volume.buffers.changing(file);
                drop_range(&handle, file, from..u64::MAX)?
            };
            changes.change_inode(file, at, |item| {
                item.size = item.size.get().min(if is_done { size } else { from }).into();
                item.nbytes = item.nbytes.get().saturating_sub(dropped).into();
            })?;
            changes.apply()
        })?;
        if is_done {
            return Ok(());
        }
    }
}

/// The offsets of extent items, from the last one down to the one that begins at or before `start`;
/// at most `most`.
fn offsets_from_end(volume: &Rooms, file: FileId, start: u64, most: usize) -> Result<Vec<u64>> {
    let root = volume.tree(TreeId(file.dev))?;
    let mut found = Vec::new();
    let mut below = u64::MAX;
    while found.len() < most
        && let Some(last) = below.checked_sub(1)
    {
        let key = Key::new(file.ino, ItemType::EXTENT_DATA, last);
        let cursor = Cursor::seek_floor(volume, root, key)?;
        let at = cursor.item_of(file.ino, ItemType::EXTENT_DATA).map(|(key, _)| key.offset);
        let Some(at) = at.filter(|&at| at <= last) else { break };
        found.push(at);
        if at <= start {
            break;
        }
        below = at;
    }
    Ok(found)
}

/// The indexes of `part` in a buffer that holds `whole`.
fn within(whole: &Range<u64>, part: &Range<u64>) -> Range<usize> {
    index(part.start - whole.start)..index(part.end - whole.start)
}
