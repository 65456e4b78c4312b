//! One step of write-back: a run of sectors, put in its place under one handle.

use std::ops::Range;

use offshoot_btrfs_format::file_extent::FileExtent;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{FileId, Result};

use super::super::changes::Changes;
use super::super::{inode_item, tree_of};
use super::{MAX_INLINE, OTHER_ITEMS, Patience, change_inode, join, leaves_of, release};
use crate::data::{
    FileBuffer, Sectors, Target, bytes_with_checksums, checksum_items, extent_len, insert_hole,
    store, store_inline, target, write_data,
};
use crate::space::{Claim, Purpose, REMOVAL_ITEMS, Reservation};
use crate::subvolume::malformed;
use crate::transaction::Handle;
use crate::tree::Cursor;
use crate::volume::Engine;

/// Extents that one step replaces, at the most.
const MOST_REPLACED: u64 = 256;

/// The same, and the most data in bytes, where there is no more room than what is kept for removals.
const LEAST_REPLACED: u64 = 4;
const LEAST_BYTES: u64 = 1 << 20;

/// One run of sectors on its way, under a handle.
pub(super) struct Step<'v, 'b> {
    handle: Handle<'v>,
    file: FileId,
    buffer: &'b FileBuffer,
    data: Sectors<'b>,
}

impl<'v, 'b> Step<'v, 'b> {
    /// Joins with room for as much of `data` as can be stored in one step. `None` when there is no room for any.
    pub(super) fn begin(
        volume: &'v Engine,
        file: FileId,
        buffer: &'b FileBuffer,
        data: Sectors<'b>,
        patience: Patience,
    ) -> Result<Option<Self>> {
        volume.limit_delayed()?;
        let others = OTHER_ITEMS + leaves_of(volume, hole_items(volume, file, data.start)?);
        let (replaced, len) = until_replaced(volume, file, &data.range(), MOST_REPLACED)?;
        let most = data.first(len);
        let least = LEAST_BYTES.min(bytes_with_checksums(volume, REMOVAL_ITEMS - OTHER_ITEMS));
        if most.len > least || replaced > LEAST_REPLACED {
            let items = others + leaves_of(volume, replaced) + checksum_items(volume, most.len);
            if let Some(handle) = volume.try_join(volume.live()?, items, Claim::Work)? {
                return Ok(Some(Self { handle, file, buffer, data: most }));
            }
        }
        let data = data.first(least);
        let data = data.first(until_replaced(volume, file, &data.range(), LEAST_REPLACED)?.1);
        let handle = join(volume, others + checksum_items(volume, data.len), patience)?;
        Ok(handle.map(|handle| Self { handle, file, buffer, data }))
    }

    /// Stores what goes to one place, from the beginning on.
    pub(super) fn store(self) -> Result<()> {
        let Self { handle, file, buffer, data } = self;
        let volume = handle.volume();
        let mut changes = Changes::accepted(&handle, file)?;
        let item = changes.inode(file)?;
        changes.before_data(file)?;
        let size = buffer.read().size;
        if is_for_inline(volume, file, &item, buffer, data)? {
            handle.whole(|| {
                let change = store_inline(&handle, file, data, size)?;
                change_inode(&mut changes, file, buffer, size, change)?;
                changes.apply()
            })?;
            release(volume, buffer, volume.buffers.remove(buffer, &data.range()));
            return Ok(());
        }
        let (data, logical, is_new) = match target(&handle, file, &item, &data.range())? {
            Target::InPlace(logical, len) => (data.first(len), logical, false),
            Target::New(len) => {
                let room = Reservation::resume(handle.space(), Purpose::Data, data.len);
                let taken = room.take(volume, len.min(data.len));
                room.keep();
                let (logical, len) = taken?;
                (data.first(len), logical, true)
            }
        };
        handle.whole(|| {
            let change = if is_new {
                store(&handle, file, &item, data, logical)?
            } else {
                write_data(&handle, logical, data)?;
                0
            };
            let sector = u64::from(volume.superblock().sector_size);
            insert_hole(&handle, file, item.size.get().next_multiple_of(sector)..data.start)?;
            // What becomes shorter was cut before, up to the sector in which it ends.
            let is_end = item.size.get() <= data.range().end;
            let stored = if is_end { item.size.get().min(size) } else { item.size.get() };
            let stored = stored.max(data.range().end.min(size));
            change_inode(&mut changes, file, buffer, stored, change)?;
            changes.apply()
        })?;
        release(volume, buffer, volume.buffers.remove(buffer, &data.range()));
        Ok(())
    }
}

/// Whether `data` is all of a file that is small enough to be kept in its extent item.
fn is_for_inline(
    volume: &Engine,
    file: FileId,
    item: &InodeItem,
    buffer: &FileBuffer,
    data: Sectors<'_>,
) -> Result<bool> {
    let sector = u64::from(volume.superblock().sector_size);
    let size = buffer.read().size;
    if data.range() != (0..sector)
        || !(1..=MAX_INLINE.min(sector - 1)).contains(&size)
        || item.flags.get() & inode_flags::NODATACOW != 0
    {
        return Ok(false);
    }
    // Nothing of the file may be stored behind its first sector.
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, 0);
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId(file.dev))?, key)?;
    while let Some((found, data)) = cursor.item_of(file.ino, ItemType::EXTENT_DATA) {
        let extent = FileExtent::parse(data).map_err(malformed)?;
        if found.offset.saturating_add(extent_len(&extent)) > sector {
            return Ok(false);
        }
        cursor.advance()?;
    }
    Ok(true)
}

/// Items that making what lies between the end of the file and `end` a hole takes, where holes have items: one between
/// any two extents that were preallocated there.
pub(super) fn hole_items(volume: &Engine, file: FileId, end: u64) -> Result<u64> {
    if volume.superblock().incompat.has(Incompat::NO_HOLES) {
        return Ok(0);
    }
    let sector = u64::from(volume.superblock().sector_size);
    let size = inode_item(volume, tree_of(volume, file)?, file)?.size.get();
    let range = size.next_multiple_of(sector)..end;
    if range.is_empty() {
        return Ok(0);
    }
    Ok(until_replaced(volume, file, &range, u64::MAX)?.0)
}

/// How many extents are in `range`, and how much of it has no more than `most`.
fn until_replaced(
    volume: &Engine,
    file: FileId,
    range: &Range<u64>,
    most: u64,
) -> Result<(u64, u64)> {
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, range.start);
    let mut cursor = Cursor::seek_floor(volume, volume.tree(TreeId(file.dev))?, key)?;
    let mut count = 0;
    while let Some((found, _)) = cursor.item() {
        if found >= (Key { offset: range.end, ..key }) {
            break;
        }
        if found.objectid == file.ino && found.item_type == ItemType::EXTENT_DATA {
            if count == most {
                // The first may be an extent that ends before the range.
                return Ok((count, found.offset.saturating_sub(range.start)));
            }
            count += 1;
        }
        cursor.advance()?;
    }
    Ok((count, range.end - range.start))
}
