//! Write-back: from what is buffered of a file to its extents.
//!
//! Whoever writes back a file holds its lock, so nobody writes it meanwhile. It is done when the volume is synced,
//! when more than [`OpenOptions::dirty_bytes`](crate::OpenOptions::dirty_bytes) are buffered, and when somebody needs room.
//!
//! Each step puts one run of sectors in its place under one handle: a crash finds it there with its
//! checksums and the length that goes with it, or not at all.
//!
//! # Reservations
//!
//! What is buffered has its data reserved byte for byte, and each file that has something buffered a *claim*: the
//! metadata for one step. So write-back goes on when nothing else can, as long as a step is enough. Where more
//! is needed, it reserves that as everybody does; [`Patience`] says whether it may wait for it.

use offshoot_btrfs_format::file_extent::FileExtent;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{FileId, Result, Timestamp};

use super::changes::{Changes, timespec};
use super::{inode_item, tree_of};
use crate::data::{
    FileBuffer, Sectors, Target, checksum_items, extent_len, insert_hole, store, store_inline,
    target, write_data,
};
use crate::space::{Claim, Purpose, Reservation};
use crate::subvolume::{malformed, timestamp};
use crate::transaction::Handle;
use crate::tree::Cursor;
use crate::volume::Volume;

/// Items that a step changes beside checksums and the extents that it replaces: the new extent, the hole before it,
/// the ends of what it cuts, the checksums that it continues, and the inode.
pub(super) const OTHER_ITEMS: u64 = 8;

/// Items of replaced extents that a claim covers.
const CLAIMED_REPLACED: u64 = 4;

/// The data of a step that a claim covers, in bytes.
const CLAIMED_BYTES: u64 = 1 << 20;

/// The most that one step writes, in bytes.
const STEP_BYTES: u64 = 32 << 20;

/// Extents that one step replaces, at the most.
const MOST_REPLACED: u64 = 256;

/// The largest file that is kept in its extent item, in bytes, as the kernel has it by default.
const MAX_INLINE: u64 = 2048;

/// Whether write-back may wait for metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// It waits until there is room. Nobody who makes room may do that.
    Waits,
    /// It leaves the rest buffered.
    Tries,
}

/// Reserves the metadata that the write-back of a file begins with.
pub(super) fn claim(volume: &Volume) -> Result<Option<Reservation<'_>>> {
    let items = OTHER_ITEMS + CLAIMED_REPLACED + checksum_items(volume, CLAIMED_BYTES);
    Ok(volume.join_for(items, Claim::Work)?.into_reservation())
}

/// Gives up what was reserved for data that is not buffered any more.
pub(super) fn release_data(volume: &Volume, bytes: u64) {
    release(volume, Purpose::Data, bytes);
}

fn release(volume: &Volume, purpose: Purpose, bytes: u64) {
    if let Some(live) = volume.live_part() {
        drop(Reservation::resume(&live.space, purpose, bytes));
    }
}

/// Forgets what is buffered of a file that is removed.
pub(super) fn discard(volume: &Volume, file: FileId) {
    if let Some(buffer) = volume.buffers.take(file) {
        let dirty = buffer.read();
        release(volume, Purpose::Data, dirty.bytes());
        release(volume, Purpose::Metadata, dirty.claim);
    }
}

/// Whether more is buffered than may be.
pub(super) fn is_over_limit(volume: &Volume) -> Result<bool> {
    Ok(volume.buffers.bytes() > volume.live()?.dirty_bytes)
}

/// Writes back until half of what may be buffered is, when there is too much.
pub(super) fn limit(volume: &Volume) -> Result<()> {
    let live = volume.live()?;
    if volume.buffers.bytes() > live.dirty_bytes / 2 {
        live.pressure.press();
    }
    if is_over_limit(volume)? { relieve(volume) } else { Ok(()) }
}

/// Writes back until half of what may be buffered is.
fn relieve(volume: &Volume) -> Result<()> {
    let half = volume.live()?.dirty_bytes / 2;
    for file in volume.buffers.files() {
        if volume.buffers.bytes() <= half {
            break;
        }
        sync_file(volume, file)?;
    }
    Ok(())
}

/// Writes back what is buffered of `file`.
pub(crate) fn sync_file(volume: &Volume, file: FileId) -> Result<()> {
    let _locks = volume.inodes.lock(&[file]);
    write_back(volume, file, Patience::Waits)
}

/// Writes back everything that is buffered now.
///
/// # Errors
/// The first, when the others have been tried too.
pub(crate) fn sync_all(volume: &Volume) -> Result<()> {
    let files = volume.buffers.files();
    files.into_iter().map(|file| sync_file(volume, file)).fold(Ok(()), Result::and)
}

/// Writes back what can be without waiting for anybody, for who makes room and may hold locks of inodes. Whether
/// there was anything.
pub(crate) fn make_room(volume: &Volume) -> Result<bool> {
    let mut is_any = false;
    for file in volume.buffers.files() {
        if let Some(_locks) = volume.inodes.try_lock(file) {
            write_back(volume, file, Patience::Tries)?;
            is_any = true;
        }
    }
    Ok(is_any)
}

/// Writes back what is buffered of `file`, whose lock is held.
pub(crate) fn write_back(volume: &Volume, file: FileId, patience: Patience) -> Result<()> {
    let Some(buffer) = volume.buffers.get(file) else { return Ok(()) };
    if store_all(volume, file, &buffer, patience)? && finish(volume, file, &buffer, patience)? {
        discard(volume, file);
    }
    Ok(())
}

/// Puts everything that is buffered in its place; whether there was room for all of it.
pub(super) fn store_all(
    volume: &Volume,
    file: FileId,
    buffer: &FileBuffer,
    patience: Patience,
) -> Result<bool> {
    loop {
        let runs = buffer.read().first_runs(STEP_BYTES);
        if runs.is_empty() {
            return Ok(true);
        }
        let Some(step) = Step::begin(volume, file, buffer, Sectors::new(&runs), patience)? else {
            return Ok(false);
        };
        step.store()?;
    }
}

/// Gives the inode the length and the times of the file; whether there was room for that.
fn finish(volume: &Volume, file: FileId, buffer: &FileBuffer, patience: Patience) -> Result<bool> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let size = buffer.read().size;
    if item.size.get() == size && Times::of(buffer).are_in(&item) {
        return Ok(true);
    }
    let Some(handle) = join(volume, buffer, OTHER_ITEMS, patience)? else { return Ok(false) };
    let sector = u64::from(volume.superblock().sector_size);
    let range = item.size.get().next_multiple_of(sector)..size.next_multiple_of(sector);
    insert_hole(&handle, file, range)?;
    let mut changes = Changes::new(&handle, file);
    change_inode(&mut changes, file, buffer, size, 0)?;
    changes.apply()?;
    Ok(true)
}

/// When a file was written.
struct Times {
    mtime: Option<Timestamp>,
    ctime: Timestamp,
}

impl Times {
    fn of(buffer: &FileBuffer) -> Self {
        let dirty = buffer.read();
        Self { mtime: dirty.mtime, ctime: dirty.ctime }
    }

    fn are_in(&self, item: &InodeItem) -> bool {
        let has_mtime = self.mtime.is_none_or(|mtime| mtime == timestamp(&item.mtime));
        has_mtime && self.ctime <= timestamp(&item.ctime)
    }
}

/// Stores length, times, and by how much the data became more or less.
fn change_inode(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    buffer: &FileBuffer,
    size: u64,
    change: i64,
) -> Result<()> {
    let times = Times::of(buffer);
    let ctime = times.ctime.max(timestamp(&changes.inode(file)?.ctime));
    let mtime = times.mtime.map(timespec).transpose()?;
    changes.change_inode(file, ctime, |item| {
        item.size = size.into();
        item.nbytes = item.nbytes.get().saturating_add_signed(change).into();
        item.mtime = mtime.unwrap_or(item.mtime);
    })
}

/// Joins with room for `items`: on the claim of the file when that is enough.
fn join<'v>(
    volume: &'v Volume,
    buffer: &FileBuffer,
    items: u64,
    patience: Patience,
) -> Result<Option<Handle<'v>>> {
    let live = volume.live()?;
    let claim = buffer.read().claim;
    if claim >= items * live.space.item_cost() {
        let handle = volume.enter()?;
        buffer.write().claim = 0;
        let claim = Reservation::resume(&live.space, Purpose::Metadata, claim);
        return Ok(Some(handle.with_reservation(claim)));
    }
    match volume.try_join(live, items, Claim::Work)? {
        Some(handle) => Ok(Some(handle)),
        None if patience == Patience::Waits => volume.join_for(items, Claim::Work).map(Some),
        None => Ok(None),
    }
}

/// One run of sectors on its way, under a handle.
struct Step<'v, 'b> {
    handle: Handle<'v>,
    file: FileId,
    buffer: &'b FileBuffer,
    data: Sectors<'b>,
}

impl<'v, 'b> Step<'v, 'b> {
    /// Joins with room for as much of `data` as can be stored in one step. `None` when there is no room for any.
    fn begin(
        volume: &'v Volume,
        file: FileId,
        buffer: &'b FileBuffer,
        data: Sectors<'b>,
        patience: Patience,
    ) -> Result<Option<Self>> {
        let data = data.first(until_replaced(volume, file, data, MOST_REPLACED)?.1);
        let replaced = until_replaced(volume, file, data, MOST_REPLACED)?.0;
        let items = OTHER_ITEMS + replaced + checksum_items(volume, data.len);
        if let Some(handle) = join(volume, buffer, items, Patience::Tries)? {
            return Ok(Some(Self { handle, file, buffer, data }));
        }
        // Less of it may do with the claim.
        let data = data.first(CLAIMED_BYTES);
        let data = data.first(until_replaced(volume, file, data, CLAIMED_REPLACED)?.1);
        let items = OTHER_ITEMS + CLAIMED_REPLACED + checksum_items(volume, data.len);
        let handle = join(volume, buffer, items, patience)?;
        Ok(handle.map(|handle| Self { handle, file, buffer, data }))
    }

    /// Stores what goes to one place, from the beginning on.
    fn store(self) -> Result<()> {
        let Self { handle, file, buffer, data } = self;
        let volume = handle.volume();
        let mut changes = Changes::new(&handle, file);
        let item = changes.inode(file)?;
        let size = buffer.read().size;
        if is_for_inline(volume, file, &item, buffer, data)? {
            let change = store_inline(&handle, file, data, size)?;
            change_inode(&mut changes, file, buffer, size, change)?;
            changes.apply()?;
            release_data(volume, volume.buffers.remove(buffer, &data.range()));
            return Ok(());
        }
        let (data, change) = match target(&handle, file, &item, &data.range())? {
            Target::InPlace(logical, len) => {
                let data = data.first(len);
                write_data(&handle, logical, data)?;
                release_data(volume, data.len);
                (data, 0)
            }
            Target::New(len) => {
                let mut room = Reservation::resume(handle.space(), Purpose::Data, data.len);
                let taken = room.take(volume, len.min(data.len));
                room.keep();
                let (logical, len) = taken?;
                let data = data.first(len);
                (data, store(&handle, file, &item, data, logical)?)
            }
        };
        let sector = u64::from(volume.superblock().sector_size);
        insert_hole(&handle, file, item.size.get().next_multiple_of(sector)..data.start)?;
        // What becomes shorter was cut before, up to the sector in which it ends.
        let is_end = item.size.get() <= data.range().end;
        let stored = if is_end { item.size.get().min(size) } else { item.size.get() };
        change_inode(&mut changes, file, buffer, stored.max(data.range().end.min(size)), change)?;
        changes.apply()?;
        volume.buffers.remove(buffer, &data.range());
        Ok(())
    }
}

/// Whether `data` is all of a file that is small enough to be kept in its extent item.
fn is_for_inline(
    volume: &Volume,
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

/// How many extents `data` replaces, and how much of it replaces no more than `most`.
fn until_replaced(
    volume: &Volume,
    file: FileId,
    data: Sectors<'_>,
    most: u64,
) -> Result<(u64, u64)> {
    let range = data.range();
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
    Ok((count, data.len))
}
