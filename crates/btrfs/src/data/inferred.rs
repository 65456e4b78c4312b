//! The inode of a file whose inode item is lost, inferred from its other items.
//!
//! A directory has entries, a regular file has extents, and its data ends with the last one. The
//! owner, the permissions and the times are not known: such a file belongs to root, and nobody else
//! may use it.

use offshoot_btrfs_format::file_extent::FileExtent;
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{Ino, ItemType, Key};
use offshoot_vfs::{FileId, Result};
use zerocopy::FromZeros;

use super::pieces::extent_len;
use crate::delayed::Queues;
use crate::storage::malformed;
use crate::tree::{Cursor, TreeRoot};

const DIRECTORY: u32 = 0o040_700;
const REGULAR: u32 = 0o100_600;

/// The inode of `file` as its other items show it; `None` when it has none, or its inode item is
/// absent although it could be read.
pub(super) fn inferred(
    volume: &impl Queues,
    root: TreeRoot,
    file: FileId,
) -> Result<Option<InodeItem>> {
    let key = |kind, offset| Key::new(file.ino, kind, offset);
    if !volume.may_have_lost(root.id, key(ItemType::INODE_ITEM, 0)) {
        return Ok(None);
    }
    let mut item = InodeItem::new_zeroed();
    item.nlink = 1.into();
    let entries = Cursor::seek(volume, root, key(ItemType::DIR_ITEM, 0))?;
    let is_entry = |(at, _): &(Key, &[u8])| {
        at.objectid == file.ino && [ItemType::DIR_ITEM, ItemType::DIR_INDEX].contains(&at.item_type)
    };
    if file.ino == Ino::ROOT_DIR.0 || entries.item().as_ref().is_some_and(is_entry) {
        item.mode = DIRECTORY.into();
        return Ok(Some(item));
    }
    let last = Cursor::seek_floor(volume, root, key(ItemType::EXTENT_DATA, u64::MAX))?;
    if let Some((at, data)) = last.item_of(file.ino, ItemType::EXTENT_DATA) {
        let extent = FileExtent::parse(data).map_err(malformed)?;
        let len = extent_len(&extent);
        item.mode = REGULAR.into();
        item.size = at.offset.saturating_add(len).min(i64::MAX.cast_unsigned()).into();
        item.nbytes = len.into();
        return Ok(Some(item));
    }
    Ok(None)
}
