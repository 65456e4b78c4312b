//! Preallocated space: it belongs to a file and reads as zeros until data is written there in
//! place.
//!
//! ```text
//!               |------------- preallocated ------------|
//!  is written               ^^^^^^^^^^^
//!               |- prealloc.-|- data --|- preallocated -|     three items, two references more
//!  is written                          ^^^^^^^^^^^^^^^^^^
//!               |- prealloc.-|---------- data ----------|     data that goes on in the extent is one item
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, FileExtentTail, extent_type,
};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, FileId, Result, Structure};
use zerocopy::FromBytes;

use super::checksums::remove_stale_checksums;
use super::drop::{OverlappingItem, drop_range, note_change, overlaps, part};
use super::store::{encode, insert};
use crate::storage::malformed;
use crate::transaction::{Base, ExtentKind, RefOwner, TransactionHandle};

/// The number of extent items that are read at once.
const BATCH: usize = 64;

/// Makes the `len` bytes at `logical`, which were just allocated, the preallocated extent of the
/// file from `start` on. It replaces what is there, under
/// [`Buffers::changing`](crate::data::Buffers::changing). Returns the change of the bytes of data
/// that the inode counts.
pub(crate) fn preallocate(
    handle: &TransactionHandle<'_>,
    file: FileId,
    start: u64,
    logical: Logical,
    len: u64,
) -> Result<i64> {
    remove_stale_checksums(handle, logical, len)?;
    let dropped = drop_range(handle, file, start..start + len)?;
    let owner = RefOwner::File { root: TreeId(file.dev), ino: file.ino, offset: start };
    handle.refer_new(logical, len, ExtentKind::Data, owner);
    insert(handle, file, start, &encode(handle, len, logical, len, extent_type::PREALLOC))?;
    Ok(len.cast_signed() - dropped.cast_signed())
}

/// The first part of `range` that no extent item covers for which `has` holds.
pub(crate) fn first_gap(
    volume: &Base,
    file: FileId,
    range: Range<u64>,
    has: impl Fn(&FileExtent<'_>) -> bool,
) -> Result<Option<Range<u64>>> {
    let (mut from, mut at) = (range.start, range.start);
    while at < range.end {
        let found = overlaps(volume, file, at..range.end, BATCH)?;
        for OverlappingItem { key, data, end } in &found {
            if has(&FileExtent::parse(data).map_err(malformed)?) {
                if key.offset > from {
                    return Ok(Some(from..key.offset));
                }
                from = *end;
            }
        }
        match found.last() {
            Some(last) if found.len() == BATCH => at = last.end,
            _ => break,
        }
    }
    Ok((from < range.end).then_some(from..range.end))
}

/// The extent that an item refers to, and how.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ReferredExtent {
    extent: Logical,
    extent_len: u64,
    /// The offset in the file at which the whole extent would begin.
    file_start: u64,
    is_preallocated: bool,
}

fn place_of(overlap: &OverlappingItem) -> Result<Option<ReferredExtent>> {
    let extent = FileExtent::parse(&overlap.data).map_err(malformed)?;
    Ok(match extent.body {
        FileExtentBody::Extent {
            disk_bytenr: extent,
            disk_num_bytes: extent_len,
            offset,
            is_preallocated,
            ..
        } => {
            let file_start = overlap.key.offset.wrapping_sub(offset);
            Some(ReferredExtent { extent, extent_len, file_start, is_preallocated })
        }
        _ => None,
    })
}

/// Turns `range` of the file, which lies in one preallocated extent item and has been written, into
/// data.
pub(super) fn mark_written(
    handle: &TransactionHandle<'_>,
    file: FileId,
    range: &Range<u64>,
) -> Result<()> {
    let near = range.start.saturating_sub(1)..range.end.saturating_add(1);
    let around = overlaps(handle.volume(), file, near, 3)?;
    let is_it = |one: &&OverlappingItem| one.key.offset <= range.start && range.end <= one.end;
    let wrong = || Error::corrupt(Structure::FileExtent, "it is not preallocated").in_file(file);
    let item = around.iter().find(is_it).ok_or_else(wrong)?;
    let place = place_of(item)?.filter(|place| place.is_preallocated).ok_or_else(wrong)?;
    // Adjacent items that are data of the same extent become one item with this one.
    let data = ReferredExtent { is_preallocated: false, ..place };
    let mut joined = range.clone();
    let mut items_before = 1;
    let mut edits = BTreeMap::from([(item.key.offset, None)]);
    for other in &around {
        if (other.end == range.start || other.key.offset == range.end)
            && place_of(other)? == Some(data)
        {
            joined = joined.start.min(other.key.offset)..joined.end.max(other.end);
            items_before += 1;
            edits.insert(other.key.offset, None);
        }
    }
    let kept = [item.key.offset..range.start, range.end..item.end];
    let cut = |of: &Range<u64>| {
        let skip = of.start.wrapping_sub(item.key.offset);
        part(&item.data, skip, of.end - of.start)
    };
    for kept in kept.iter().filter(|kept| !kept.is_empty()) {
        edits.insert(kept.start, Some(cut(kept)?));
    }
    edits.insert(joined.start, Some(written(cut(&joined)?, handle.generation())?));
    let items = edits.values().flatten().count();
    let delta = i64::try_from(items).expect("three at the most") - items_before;
    if delta != 0 {
        let owner =
            RefOwner::File { root: TreeId(file.dev), ino: file.ino, offset: place.file_start };
        handle.refer(place.extent, place.extent_len, ExtentKind::Data, owner, delta);
    }
    for one in &around {
        note_change(handle, file, one);
    }
    let key = |offset| Key::new(file.ino, ItemType::EXTENT_DATA, offset);
    let edits: Vec<_> = edits.iter().map(|(&at, data)| (key(at), data.as_deref())).collect();
    handle.change(TreeId(file.dev), |tree| tree.apply_batch(&edits).map(drop))
}

/// The item as an item of data that was written in the transaction `generation`.
fn written(mut item: Vec<u8>, generation: Generation) -> Result<Vec<u8>> {
    debug_assert_eq!(item.len(), size_of::<FileExtentHead>() + size_of::<FileExtentTail>());
    let (head, _) = FileExtentHead::mut_from_prefix(&mut item)
        .map_err(|_| Error::corrupt(Structure::FileExtent, "it is cut"))?;
    head.extent_type = extent_type::REG;
    head.generation = generation.0.into();
    Ok(item)
}
