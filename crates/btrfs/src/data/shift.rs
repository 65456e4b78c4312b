//! Moving extents to another offset of their file.
//!
//! The data stays at its address. A reference names the offset in the file at which the whole
//! extent would begin, so each reference is replaced.

use std::collections::BTreeMap;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{FileId, Result};

use super::drop::OverlappingItem;
use crate::storage::malformed;
use crate::transaction::{ExtentKind, RefOwner, TransactionHandle};

/// Moves `items` of the file by `to - from` bytes, forwards or backwards. The target range must be
/// empty, and the caller holds [`Buffers::changing`](crate::data::Buffers::changing).
pub(crate) fn shift(
    handle: &TransactionHandle<'_>,
    file: FileId,
    items: &[OverlappingItem],
    from: u64,
    to: u64,
) -> Result<()> {
    let root = TreeId(file.dev);
    handle.log().note_moved_extents();
    let mut edits: BTreeMap<_, _> = items.iter().map(|item| (item.key.offset, None)).collect();
    for OverlappingItem { key, data, end } in items {
        let new = key.offset.wrapping_add(to.wrapping_sub(from));
        for start in [key.offset, new] {
            handle.log().note_extents(file, start..start.saturating_add(end - key.offset));
        }
        if let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, .. } =
            FileExtent::parse(data).map_err(malformed)?.body
        {
            for (at, delta) in [(key.offset, -1), (new, 1)] {
                let owner = RefOwner::File { root, ino: file.ino, offset: at.wrapping_sub(offset) };
                handle.refer(disk_bytenr, disk_num_bytes, ExtentKind::Data, owner, delta);
            }
        }
        edits.insert(new, Some(data));
    }
    let key = |offset| Key::new(file.ino, ItemType::EXTENT_DATA, offset);
    let edits: Vec<_> =
        edits.iter().map(|(&at, data)| (key(at), data.map(Vec::as_slice))).collect();
    handle.change(root, |tree| tree.apply_batch(&edits).map(drop))
}
