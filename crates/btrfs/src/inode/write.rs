//! Writing data into files, and changing their length.
//!
//! Data goes to the devices at once, in whole sectors: what a write does not cover of its first and last
//! sector is read before. The extents, their checksums and the inode change under one handle, so a
//! crash finds a piece written or not.
//!
//! Data that is in the extent item itself becomes an extent of its own before the file changes: it may
//! not stand beside others.

use std::ops::Range;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result, Timestamp};

use super::changes::{Changes, refuse_flags, timespec};
use super::subvolume::writable;
use super::{inode_item, tree_of, type_of};
use crate::data::{FileData, drop_range, insert_hole, read_data, store};
use crate::space::Claim;
use crate::subvolume::malformed;
use crate::tree::Cursor;
use crate::volume::Volume;

/// The most that one handle writes, in bytes.
const PIECE_BYTES: u64 = 1 << 20;

/// Extents that one handle takes out of a file, at the most.
const MAX_DROPPED: usize = 256;

/// Items that change beside the extents that are dropped: the new extent, the hole before it, the ends of
/// what it cuts, its checksums and the inode.
const OTHER_ITEMS: u64 = 12;

/// The largest file, in bytes: the offsets of system calls are signed.
const MAX_SIZE: u64 = i64::MAX.cast_unsigned();

/// Writes `data` at `offset` of `file`.
pub(crate) fn write(
    volume: &Volume,
    file: FileId,
    offset: u64,
    data: &[u8],
    at: Timestamp,
) -> Result<()> {
    writable(volume, file)?;
    let _locks = volume.inodes.lock(&[file]);
    let item = regular(volume, file)?;
    refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::VERITY, file)?;
    if item.size.get() != offset {
        refuse_flags(&item, inode_flags::APPEND, file)?;
    }
    let end = offset.checked_add(data.len() as u64).filter(|&end| end <= MAX_SIZE);
    let end = end.ok_or_else(|| Error::posix(Errno::FBIG, file.to_string()))?;
    if data.is_empty() {
        return Ok(());
    }
    timespec(at)?;
    uninline(volume, file, at)?;
    let mut from = offset;
    while from < end {
        // Cut at multiples, so that no sector is written twice.
        let to = end.min((from / PIECE_BYTES + 1) * PIECE_BYTES);
        let part = index(from - offset)..index(to - offset);
        write_piece(volume, file, from, &data[part], at)?;
        from = to;
    }
    Ok(())
}

/// The inode item of a regular file.
fn regular(volume: &Volume, file: FileId) -> Result<InodeItem> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    match type_of(&item)? {
        FileType::Regular => Ok(item),
        FileType::Directory => Err(Error::posix(Errno::ISDIR, file.to_string())),
        _ => Err(Error::posix(Errno::INVAL, format!("{file} has no data"))),
    }
}

/// Writes one piece, and makes the file end no earlier than it does.
fn write_piece(
    volume: &Volume,
    file: FileId,
    offset: u64,
    data: &[u8],
    at: Timestamp,
) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let end = offset + data.len() as u64;
    let range = offset / sector * sector..end.next_multiple_of(sector);
    let mut bytes = around(volume, file, &range, offset..end)?;
    bytes[index(offset - range.start)..][..data.len()].copy_from_slice(data);
    put(volume, file, range.start, &bytes, |size| size.max(end), at)
}

/// A buffer for the sectors of `range`, with what the file has in them outside of `new`.
fn around(volume: &Volume, file: FileId, range: &Range<u64>, new: Range<u64>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; index(range.end - range.start)];
    let data = FileData::open(volume, file)?;
    for kept in [range.start..new.start, new.end..range.end] {
        if !kept.is_empty() {
            read_data(volume, &data, kept, &mut |at, part| {
                bytes[index(at - range.start)..][..part.len()].copy_from_slice(part);
                Ok(())
            })?;
        }
    }
    Ok(bytes)
}

/// Stores whole sectors, and gives the file the size that `resize` makes of the one it has.
fn put(
    volume: &Volume,
    file: FileId,
    start: u64,
    bytes: &[u8],
    resize: impl Fn(u64) -> u64,
    at: Timestamp,
) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let end = start + bytes.len() as u64;
    let overlapped = offsets_from_end(volume, file, start, end, usize::MAX)?.len() as u64;
    let mut room = volume.reserve_data(bytes.len() as u64)?;
    let handle = volume.join_for(overlapped + OTHER_ITEMS, Claim::Work)?;
    let mut changes = Changes::new(&handle, file);
    let item = changes.inode(file)?;
    let covered = item.size.get().next_multiple_of(sector);
    let change = store(&handle, &mut room, file, &item, start, bytes)?;
    insert_hole(&handle, file, covered..start)?;
    resized(&mut changes, file, resize(item.size.get()), change, at)?;
    changes.apply()
}

/// Stores size, allocated bytes and times in the inode.
fn resized(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    size: u64,
    change: i64,
    at: Timestamp,
) -> Result<()> {
    let mtime = timespec(at)?;
    changes.change_inode(file, at, |item| {
        item.size = size.into();
        item.nbytes = item.nbytes.get().saturating_add_signed(change).into();
        item.mtime = mtime;
    })
}

/// Moves data that is in its extent item to an extent of its own.
fn uninline(volume: &Volume, file: FileId, at: Timestamp) -> Result<()> {
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, 0);
    let is_inline = {
        let cursor = Cursor::seek(volume, tree_of(volume, file)?, key)?;
        match cursor.item_of(file.ino, ItemType::EXTENT_DATA) {
            Some((_, data)) => {
                let extent = FileExtent::parse(data).map_err(malformed)?;
                matches!(extent.body, FileExtentBody::Inline(_))
            }
            None => false,
        }
    };
    if !is_inline {
        return Ok(());
    }
    let sector = u64::from(volume.superblock().sector_size);
    let size = FileData::open(volume, file)?.size();
    let range = 0..size.next_multiple_of(sector).max(sector);
    let bytes = around(volume, file, &range, range.end..range.end)?;
    put(volume, file, 0, &bytes, |size| size, at)
}

/// Gives `file`, whose lock is held, the length `size`.
pub(super) fn truncate(volume: &Volume, file: FileId, size: u64, at: Timestamp) -> Result<()> {
    let item = regular(volume, file)?;
    if size > MAX_SIZE {
        return Err(Error::posix(Errno::FBIG, file.to_string()));
    }
    let old = item.size.get();
    if size == old {
        return Ok(());
    }
    timespec(at)?;
    let sector = u64::from(volume.superblock().sector_size);
    if size > 0 {
        uninline(volume, file, at)?;
    }
    if size > old {
        let handle = volume.join_for(OTHER_ITEMS, Claim::Work)?;
        let mut changes = Changes::new(&handle, file);
        let range = old.next_multiple_of(sector)..size.next_multiple_of(sector);
        insert_hole(&handle, file, range)?;
        resized(&mut changes, file, size, 0, at)?;
        return changes.apply();
    }
    // What lies behind the end in its sector reads as zeros when the file grows again.
    if !size.is_multiple_of(sector) && has_data(volume, file, size)? {
        let range = size / sector * sector..size.next_multiple_of(sector);
        let bytes = around(volume, file, &range, size..range.end)?;
        put(volume, file, range.start, &bytes, |size| size, at)?;
    }
    cut(volume, file, size, at)
}

/// Whether the sector in which `at` lies holds data.
fn has_data(volume: &Volume, file: FileId, at: u64) -> Result<bool> {
    let sector = u64::from(volume.superblock().sector_size);
    let data = FileData::open(volume, file)?;
    let next = crate::data::next_data(volume, &data, at / sector * sector)?;
    Ok(next.is_some_and(|next| next.start <= at))
}

/// Takes everything behind `size` out of the file, from its end on: a crash leaves a file that is
/// shorter than it was and not yet as short as it becomes.
fn cut(volume: &Volume, file: FileId, size: u64, at: Timestamp) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let end = size.next_multiple_of(sector);
    loop {
        let last = offsets_from_end(volume, file, end, u64::MAX, MAX_DROPPED)?;
        let is_done = last.len() < MAX_DROPPED;
        let from = if is_done { end } else { last.last().map_or(end, |&at| at.max(end)) };
        let handle = volume.join_for(last.len() as u64 + OTHER_ITEMS, Claim::MakesRoom)?;
        let mut changes = Changes::new(&handle, file);
        let dropped = drop_range(&handle, file, from..u64::MAX)?;
        let now = if is_done { size } else { changes.inode(file)?.size.get().min(from) };
        resized(&mut changes, file, now, -dropped.cast_signed(), at)?;
        changes.apply()?;
        if is_done {
            return Ok(());
        }
    }
}

/// Where the extent items that overlap `start..end` begin, from the last on, `most` at the most.
fn offsets_from_end(
    volume: &Volume,
    file: FileId,
    start: u64,
    end: u64,
    most: usize,
) -> Result<Vec<u64>> {
    let root = volume.tree(TreeId(file.dev))?;
    let mut found = Vec::new();
    let mut below = end;
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

/// A length that fits in memory, because a buffer of it exists or is about to.
fn index(len: u64) -> usize {
    usize::try_from(len).expect("a piece is small")
}
