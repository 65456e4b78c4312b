//! One step of write-back: a run of sectors, stored under one handle.

use std::ops::Range;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::FileExtent;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};
use tracing::trace;

use super::super::changes::Changes;
use super::super::compression::ChosenCompression;
use super::super::{inode_item, tree_of};
use super::ahead::UnreferencedSpace;
use super::{OTHER_ITEMS, Patience, change_inode, forget_data, join, leaves_of};
use crate::data::{
    CompressionChunk, CompressionChunks, DataChecksums, FileBuffer, InlineData, MOST_AT_ONCE,
    Sectors, WriteTarget, bytes_with_checksums, checksum_items, extent_len, insert_hole, lend,
    pack_inline, refer_to, store_inline, store_packed, store_preallocated, take_until_next_leaf,
    target, write_data,
};
use crate::events::WRITEBACK;
use crate::inode::{Rooms, RoomsHandle};
use crate::space::{Claim, Kept, REMOVAL_ITEMS};
use crate::storage::malformed;
use crate::tree::Cursor;

/// The most extents that one step replaces.
pub(in crate::inode) const MOST_REPLACED: u64 = 256;

/// The most extents that one step replaces, and the most bytes that it stores, when only the
/// reserve for removals is left.
const LEAST_REPLACED: u64 = 4;
const LEAST_BYTES: u64 = 1 << 20;

/// Data that is about to be written back.
#[derive(Clone, Copy)]
pub(super) struct OutgoingData<'b> {
    pub(super) data: Sectors<'b>,
    /// The compressed chunks of its beginning, if `chosen` asks for compression.
    pub(super) chunks: &'b CompressionChunks,
    pub(super) chosen: Option<ChosenCompression>,
}

/// One run of sectors that is stored under a handle.
pub(super) struct WriteBackStep<'v, 'b> {
    handle: RoomsHandle<'v>,
    file: FileId,
    buffer: &'b FileBuffer,
    data: Sectors<'b>,
    /// The compressed chunks of `data`, if any.
    packed: &'b [CompressionChunk],
    chosen: Option<ChosenCompression>,
    /// Whether the file gets the flag NOCOMPRESS, because compression did not make it smaller.
    is_useless: bool,
}

/// Where data is stored.
enum WriteBackDestination {
    InPlace {
        logical: Logical,
        is_preallocated: bool,
    },
    New(Logical),
    /// A new place to which the data was written ahead.
    Written(Logical),
    /// One place for each chunk.
    Packed(Vec<Logical>),
}

impl<'v, 'b> WriteBackStep<'v, 'b> {
    /// Joins with room for as much as one step can store. `None` when there is no room even for the
    /// smallest step.
    pub(super) fn begin(
        volume: &'v Rooms,
        file: FileId,
        buffer: &'b FileBuffer,
        OutgoingData { data, chunks, chosen }: OutgoingData<'b>,
        patience: Patience,
    ) -> Result<Option<Self>> {
        volume.delayed.limit(&volume.base)?;
        let others = OTHER_ITEMS + leaves_of(volume, hole_items(volume, file, data.start)?);
        let is_useless = chosen.is_some_and(|ChosenCompression { packing, is_tried }| {
            is_tried && chunks.are_useless(packing)
        });
        let first = |data: Sectors<'b>, most| match chosen {
            Some(_) => chunks.first(data, most),
            None => (data, &[][..]),
        };
        let begun = |handle, (data, packed)| Self {
            handle,
            file,
            buffer,
            data,
            packed,
            chosen,
            is_useless,
        };
        let (replaced, len) = until_replaced(volume, file, &data.range(), MOST_REPLACED)?;
        let (most, packed) = first(data.first(len), MOST_AT_ONCE);
        let least = LEAST_BYTES.min(bytes_with_checksums(volume, REMOVAL_ITEMS - OTHER_ITEMS));
        if most.len > least || replaced > LEAST_REPLACED || packed.len() > 1 {
            // Compressed chunks may get distant addresses, so each may change a leaf of its own in
            // the checksum tree.
            let extents = packed.len() as u64;
            let items = others
                + leaves_of(volume, replaced + extents)
                + checksum_items(volume, most.len)
                + extents.saturating_sub(1);
            if let Some(handle) = volume.try_join(volume.live()?, items, Claim::Work)? {
                return Ok(Some(begun(handle, (most, packed))));
            }
        }
        let data = data.first(least);
        let len = until_replaced(volume, file, &data.range(), LEAST_REPLACED)?.1;
        let (data, packed) = first(data.first(len), 1);
        let handle = join(volume, others + checksum_items(volume, data.len), patience)?;
        Ok(handle.map(|handle| begun(handle, (data, packed))))
    }

    /// Stores the beginning of the data, as much as goes to one place. If the data was written
    /// ahead and needs a new place, that is `written`.
    pub(super) fn store(self, written: Option<&mut UnreferencedSpace>) -> Result<()> {
        let Self { handle, file, buffer, data, is_useless, .. } = &self;
        let volume = handle.volume();
        let mut changes = Changes::accepted(handle, *file)?;
        let item = changes.inode(*file)?;
        changes.before_data(*file)?;
        let size = buffer.read().size;
        trace!(target: WRITEBACK, inode = file.ino, range = ?data.range(), "storing a run");
        if let Some(inline) = self.inline(&item)? {
            handle.all_or_stop(|| {
                let change = store_inline(handle, &volume.buffers, *file, data.range(), &inline)?;
                change_inode(&mut changes, *file, buffer, size, change)?;
                changes.apply()
            })?;
            forget_data(volume, buffer, &data.range());
            return Ok(());
        }
        let (place, data) = self.place(&item, written)?;
        let sector = u64::from(volume.superblock().sector_size);
        handle.all_or_stop(|| {
            let change = self.put(&item, place, data)?;
            insert_hole(handle, *file, item.size.get().next_multiple_of(sector)..data.start)?;
            // If the file has become shorter, its stored data was cut before, up to its last
            // sector.
            let is_end = item.size.get() <= data.range().end;
            let stored = if is_end { item.size.get().min(size) } else { item.size.get() };
            let stored = stored.max(data.range().end.min(size));
            change_inode(&mut changes, *file, buffer, stored, change)?;
            if *is_useless {
                changes.adjust_inode(*file, |item| item.flags |= inode_flags::NOCOMPRESS)?;
            }
            changes.apply()
        })?;
        forget_data(volume, buffer, &data.range());
        Ok(())
    }

    /// Where the beginning of the data goes, and how much goes there.
    fn place(
        &self,
        item: &InodeItem,
        written: Option<&mut UnreferencedSpace>,
    ) -> Result<(WriteBackDestination, Sectors<'b>)> {
        let Self { handle, file, buffer, data, .. } = self;
        let len = match target(handle, *file, item, &data.range())? {
            WriteTarget::InPlace { logical, len, is_preallocated } => {
                return Ok((
                    WriteBackDestination::InPlace { logical, is_preallocated },
                    data.first(len),
                ));
            }
            WriteTarget::New(_) if buffer.read().is_in_place => {
                return Err(Error::posix(Errno::NOSPC, format!("data that {file} shares")));
            }
            WriteTarget::New(len) => len.min(data.len),
        };
        if let Some(written) = written {
            let len = written.until_next_leaf(handle.volume(), len)?;
            return Ok((WriteBackDestination::Written(written.take(len)), data.first(len)));
        }
        lend(handle.space(), &[(self.buffer, self.data.len)], |claim| self.take(claim, len))
    }

    /// Allocates space for the first `len` bytes, or for fewer.
    fn take(&self, claim: &Kept, len: u64) -> Result<(WriteBackDestination, Sectors<'b>)> {
        let Self { handle, data, packed, .. } = self;
        let take = |wanted| take_until_next_leaf(handle, claim, wanted);
        let mut places = Vec::new();
        for chunk in packed.iter().filter_map(|chunk| chunk.packed.as_ref()) {
            let wanted = chunk.len() as u64;
            let (logical, found) = match take(wanted) {
                Ok(taken) => taken,
                // The chunks with a place are written. The next step tries the rest.
                Err(_) if !places.is_empty() => break,
                Err(error) => return Err(error),
            };
            if found < wanted {
                // A compressed chunk must be in one piece.
                handle.space().give_back(logical, found)?;
                break;
            }
            places.push(logical);
        }
        if let Some(last) = places.len().checked_sub(1) {
            let len = packed[last].range.end - data.start;
            return Ok((WriteBackDestination::Packed(places), data.first(len)));
        }
        let (logical, len) = take(len)?;
        Ok((WriteBackDestination::New(logical), data.first(len)))
    }

    /// Writes `data` and stores its items. Returns the change of the bytes of data that the inode
    /// counts.
    fn put(&self, item: &InodeItem, place: WriteBackDestination, data: Sectors<'b>) -> Result<i64> {
        let Self { handle, file, packed, chosen, .. } = self;
        let buffers = &handle.volume().buffers;
        match place {
            WriteBackDestination::New(logical) => {
                write_data(handle, logical, data, DataChecksums::of(item))?;
                refer_to(handle, buffers, *file, item, data, logical)
            }
            WriteBackDestination::Written(logical) => {
                refer_to(handle, buffers, *file, item, data, logical)
            }
            WriteBackDestination::InPlace { logical, is_preallocated: true } => {
                store_preallocated(handle, buffers, *file, item, data, logical).map(|()| 0)
            }
            WriteBackDestination::InPlace { logical, is_preallocated: false } => {
                write_data(handle, logical, data, DataChecksums::of(item)).map(|()| 0)
            }
            WriteBackDestination::Packed(places) => {
                let method = chosen.map(|chosen| chosen.packing.method.compression());
                let compression = method.unwrap_or(Compression::None);
                store_packed(handle, buffers, *file, item, packed, compression, &places)
            }
        }
    }

    /// The inline data, if `data` is a whole file that is small enough.
    fn inline(&self, item: &InodeItem) -> Result<Option<InlineData<'b>>> {
        let Self { handle, file, buffer, data, chosen, .. } = self;
        let volume = handle.volume();
        let sector = u64::from(volume.superblock().sector_size);
        let len = buffer.read().size;
        let max_inline = volume.options.max_inline;
        let most = if chosen.is_some() { sector } else { max_inline };
        if len > most || !is_for_inline(volume, *file, item, buffer, *data)? {
            return Ok(None);
        }
        let bytes = data.contents(&(0..len));
        if let Some(ChosenCompression { packing, .. }) = chosen
            && let Some(packed) = pack_inline(*packing, &bytes)
            && packed.len() as u64 <= max_inline
        {
            let compression = packing.method.compression();
            return Ok(Some(InlineData { len, compression, bytes: packed.into() }));
        }
        let is_small = len <= max_inline.min(sector - 1);
        Ok(is_small.then_some(InlineData { len, compression: Compression::None, bytes }))
    }
}

/// Whether `data` is a whole file that may be inline.
fn is_for_inline(
    volume: &Rooms,
    file: FileId,
    item: &InodeItem,
    buffer: &FileBuffer,
    data: Sectors<'_>,
) -> Result<bool> {
    let sector = u64::from(volume.superblock().sector_size);
    if data.range() != (0..sector)
        || !(1..=sector).contains(&buffer.read().size)
        || buffer.read().is_beside
        || item.flags.get() & (inode_flags::NODATACOW | inode_flags::PREALLOC) != 0
    {
        return Ok(false);
    }
    // No extent of the file may reach behind its first sector.
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

/// The hole items that a file needs between its stored end and `end`, on volumes without NO_HOLES.
/// There is one between any two extents that were preallocated there.
pub(in crate::inode) fn hole_items(volume: &Rooms, file: FileId, end: u64) -> Result<u64> {
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

/// The number of extents in `range`, at most `most`, and the length of the beginning of `range`
/// that has no more than that.
pub(in crate::inode) fn until_replaced(
    volume: &Rooms,
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
                // The first extent counted may end before the range.
                return Ok((count, found.offset.saturating_sub(range.start)));
            }
            count += 1;
        }
        cursor.advance()?;
    }
    Ok((count, range.end - range.start))
}
