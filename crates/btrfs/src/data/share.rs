//! Adding references to existing extents, as clones of ranges do.

use std::ops::Range;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{FileId, Result};

use super::drop::{OverlappingItem, part};
use crate::storage::malformed;
use crate::transaction::{ExtentKind, Obstacle, RefOwner, TransactionHandle};

/// The result of sharing extents.
#[derive(Debug, Default)]
pub(crate) struct SharedExtents {
    /// The bytes of data that the file got.
    pub(crate) bytes: u64,
    /// Whether some of it is preallocated.
    pub(crate) is_preallocated: bool,
}

/// Adds references to the extents of `items` to `file`, from `at` on. `items` may belong to any
/// file, and `range` is the part of that file to share. The target range must be empty, and the
/// caller holds [`Buffers::changing`](crate::data::Buffers::changing). Inline data and holes are
/// left out.
pub(crate) fn share(
    handle: &TransactionHandle<'_>,
    items: &[OverlappingItem],
    range: &Range<u64>,
    file: FileId,
    at: u64,
) -> Result<SharedExtents> {
    let root = TreeId(file.dev);
    handle.log().note_moved_extents();
    let mut shared = SharedExtents::default();
    let mut new = Vec::new();
    for OverlappingItem { key, data, end } in items {
        let extent = FileExtent::parse(data).map_err(malformed)?;
        let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, is_preallocated, .. } =
            extent.body
        else {
            continue;
        };
        if !is_preallocated && extent.generation == handle.generation() {
            handle.obstruct(Obstacle::Clones);
        }
        let from = key.offset.max(range.start);
        let Some(len) = range.end.min(*end).checked_sub(from).filter(|&len| len > 0) else {
            continue;
        };
        let (skip, to) = (from - key.offset, at + (from - range.start));
        let begin = to.wrapping_sub(offset).wrapping_sub(skip);
        let owner = RefOwner::File { root, ino: file.ino, offset: begin };
        handle.refer(disk_bytenr, disk_num_bytes, ExtentKind::Data, owner, 1);
        handle.log().note_extents(file, to..to + len);
        new.push((Key::new(file.ino, ItemType::EXTENT_DATA, to), part(data, skip, len)?));
        shared.bytes += len;
        shared.is_preallocated |= is_preallocated;
    }
    let new: Vec<_> = new.iter().map(|(key, data)| (*key, &data[..])).collect();
    handle.change(root, |tree| tree.insert_batch(&new))?;
    Ok(shared)
}
