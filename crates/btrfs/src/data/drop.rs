//! Removing ranges from files, and dropping the references to their extents.
//!
//! ```text
//!            |------------- extent item ------------|
//!  whole     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^  removed, one reference less
//!  front     ^^^^^^^^^^^^^^^                           begins later, further into the extent
//!  end                               ^^^^^^^^^^^^^^^^  is shorter
//!  middle              ^^^^^^^^^^^^^                   two items, one reference more
//! ```
//!
//! A reference names the offset in the file at which the whole extent would begin. Cutting an item
//! does not change that.

use std::ops::Range;

use offshoot_btrfs_format::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, FileExtentTail,
};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Error, FileId, Result, Structure};
use zerocopy::FromBytes;

use crate::storage::malformed;
use crate::transaction::{Base, ExtentKind, RefOwner, TransactionHandle};
use crate::tree::{Cursor, TreeRoot};

/// The offset of the second part of an extent item, which all but inline items have.
const TAIL: usize = size_of::<FileExtentHead>();

/// Extent items that are read before any is changed. This bounds the memory that a drop takes.
const BATCH: usize = 256;

/// An extent item that overlaps a range.
pub(crate) struct OverlappingItem {
    pub(crate) key: Key,
    pub(crate) data: Vec<u8>,
    pub(crate) end: u64,
}

/// Removes `range`, which is whole sectors, from `file`. Returns how many bytes of data that
/// removed, by which `nbytes` of the inode must shrink. An empty range splits the item that
/// contains it.
///
/// # Errors
/// When an item cannot be read. This ends all writing, because half of the range may be removed.
pub(crate) fn drop_range(
    handle: &TransactionHandle<'_>,
    file: FileId,
    range: Range<u64>,
) -> Result<u64> {
    let mut dropped = 0;
    let mut from = range.start;
    handle.log().note_extents(file, range.clone());
    handle.all_or_stop(|| {
        loop {
            let overlaps = overlaps(handle.volume(), file, from..range.end, BATCH)?;
            let Some(last) = overlaps.last() else { return Ok(dropped) };
            from = last.end;
            for overlap in &overlaps {
                note_change(handle, file, overlap);
                dropped += drop_one(handle, file, overlap, &range)?;
            }
            if overlaps.len() < BATCH {
                return Ok(dropped);
            }
        }
    })
}

/// Notes for the log that an item is about to change.
pub(super) fn note_change(handle: &TransactionHandle<'_>, file: FileId, overlap: &OverlappingItem) {
    handle.log().note_extents(file, overlap.key.offset..overlap.end);
}

/// The first extent items that overlap `range`, at most `most`.
pub(crate) fn overlaps(
    volume: &Base,
    file: FileId,
    range: Range<u64>,
    most: usize,
) -> Result<Vec<OverlappingItem>> {
    overlaps_in(volume, volume.tree(TreeId(file.dev))?, file.ino, range, most)
}

/// As [`overlaps`], for the inode `ino` in any tree, for example a log.
pub(crate) fn overlaps_in(
    volume: &Base,
    root: TreeRoot,
    ino: u64,
    range: Range<u64>,
    most: usize,
) -> Result<Vec<OverlappingItem>> {
    let sector = u64::from(volume.superblock().sector_size);
    let key = Key::new(ino, ItemType::EXTENT_DATA, range.start);
    let mut cursor = Cursor::seek_floor(volume, root, key)?;
    let mut found = Vec::new();
    while let Some((key, data)) = cursor.item() {
        if key >= Key::new(ino, ItemType::EXTENT_DATA, range.end) || found.len() == most {
            break;
        }
        if key.objectid == ino && key.item_type == ItemType::EXTENT_DATA {
            let extent = FileExtent::parse(data).map_err(malformed)?;
            let len = super::extent_len(&extent).next_multiple_of(sector);
            let end = key.offset.saturating_add(len);
            if end > range.start {
                found.push(OverlappingItem { key, data: data.to_vec(), end });
            }
        }
        cursor.advance()?;
    }
    Ok(found)
}

fn drop_one(
    handle: &TransactionHandle<'_>,
    file: FileId,
    overlap: &OverlappingItem,
    range: &Range<u64>,
) -> Result<u64> {
    let OverlappingItem { key, data, end } = overlap;
    let (start, end) = (key.offset, *end);
    let extent = FileExtent::parse(data).map_err(malformed)?;
    let (keeps_front, keeps_end) = (start < range.start, end > range.end);
    let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, .. } = extent.body else {
        return drop_plain(handle, file, overlap, range, &extent);
    };
    let owner = RefOwner::File {
        root: TreeId(file.dev),
        ino: file.ino,
        offset: start.wrapping_sub(offset),
    };
    let delta = i64::from(keeps_front) + i64::from(keeps_end) - 1;
    if delta != 0 {
        handle.refer(disk_bytenr, disk_num_bytes, ExtentKind::Data, owner, delta);
    }
    cut_item(handle, file, overlap, range)?;
    Ok(end.min(range.end) - start.max(range.start))
}

/// Removes `range` from an item without a reference: inline data, or a hole.
fn drop_plain(
    handle: &TransactionHandle<'_>,
    file: FileId,
    overlap: &OverlappingItem,
    range: &Range<u64>,
    extent: &FileExtent<'_>,
) -> Result<u64> {
    if let FileExtentBody::Inline(_) = extent.body {
        if overlap.key.offset < range.start || overlap.end > range.end {
            let problem = "inline data that is longer than a sector";
            return Err(Error::corrupt(Structure::FileExtent, problem).in_file(file));
        }
        handle.change(TreeId(file.dev), |tree| tree.remove(overlap.key))?;
        return Ok(super::extent_len(extent));
    }
    cut_item(handle, file, overlap, range)?;
    Ok(0)
}

/// Removes an item, or the part of it in `range`.
fn cut_item(
    handle: &TransactionHandle<'_>,
    file: FileId,
    overlap: &OverlappingItem,
    range: &Range<u64>,
) -> Result<()> {
    let OverlappingItem { key, data, end } = overlap;
    let (start, end) = (key.offset, *end);
    let front = (start < range.start).then(|| part(data, 0, range.start - start)).transpose()?;
    let behind =
        (end > range.end).then(|| part(data, range.end - start, end - range.end)).transpose()?;
    handle.change(TreeId(file.dev), |tree| {
        match front {
            Some(front) => tree.modify(*key, 0, |_| Ok(front))?,
            None => drop(tree.remove(*key)?),
        }
        match behind {
            Some(behind) => tree.insert(Key { offset: range.end, ..*key }, &behind),
            None => Ok(()),
        }
    })
}

/// An item for `len` bytes that begin `skip` bytes behind the start of the item `data`, or before
/// it if `skip` wraps.
pub(super) fn part(data: &[u8], skip: u64, len: u64) -> Result<Vec<u8>> {
    let mut part = data.to_vec();
    let (tail, _) = FileExtentTail::mut_from_prefix(part.get_mut(TAIL..).unwrap_or_default())
        .map_err(|_| Error::corrupt(Structure::FileExtent, "it is cut"))?;
    // A hole has no extent, so its offset has no meaning.
    if tail.disk_bytenr.get() != 0 {
        tail.offset = tail.offset.get().wrapping_add(skip).into();
    }
    tail.num_bytes = len.into();
    Ok(part)
}
