//! The references that a leaf has to data, and which of this data has checksums.

use std::ops::Range;

use offshoot_btrfs_format::block::item_data;
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::extent::RefOwner;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};

use super::super::reference::{DataUse, ReferenceRecord, ReferenceTarget};
use super::super::walk::{GatheredRecords, Walk, WalkedTree};
use crate::block::TreeBlock;

/// A leaf with references to data.
struct DataLeaf<'l> {
    walk: &'l Walk<'l, 'l>,
    tree: &'l WalkedTree,
    /// The owner of all references, the leaf itself; `None` when each file owns its own.
    shared_owner: Option<RefOwner>,
    /// The tree that the leaf was made for.
    owner: TreeId,
    /// The inode whose extents come, and whether its data has checksums, if that is known.
    current: Option<(u64, Option<bool>)>,
}

/// Adds the references that a leaf has to data, and what they use of it.
pub(super) fn gather(
    walk: &Walk<'_, '_>,
    tree: &WalkedTree,
    leaf: &TreeBlock,
    records: &mut GatheredRecords,
) {
    let header = leaf.header();
    let address = Logical(header.bytenr.get());
    let is_full = walk.has_full_references(leaf);
    let mut state = DataLeaf {
        walk,
        tree,
        shared_owner: is_full.then_some(RefOwner::Leaf { parent: address }),
        owner: header.owner(),
        current: None,
    };
    for item in leaf.items() {
        let is_inode = item.key.item_type == ItemType::INODE_ITEM.0;
        if !is_inode && item.key.item_type != ItemType::EXTENT_DATA.0 {
            continue;
        }
        let key = item.key.get();
        let Ok(data) = item_data(leaf.bytes(), item) else { continue };
        if is_inode {
            state.current = Some((key.objectid, has_checksums(data)));
        } else if let Ok(extent) = FileExtent::parse(data) {
            state.add(key, &extent, records);
        }
    }
}

/// Whether the data of an inode has checksums.
fn has_checksums(item: &[u8]) -> Option<bool> {
    let item = InodeItem::view(item).ok()?;
    Some(item.flags.get() & inode_flags::NODATASUM == 0)
}

impl DataLeaf<'_> {
    fn add(&mut self, key: Key, extent: &FileExtent<'_>, records: &mut GatheredRecords) {
        let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, .. } = extent.body else {
            return;
        };
        let shared_owner = self.shared_owner.unwrap_or(RefOwner::File {
            root: self.owner,
            ino: key.objectid,
            offset: key.offset.wrapping_sub(offset),
        });
        let target = ReferenceTarget::Data { len: disk_num_bytes };
        records.references.push(ReferenceRecord::new(disk_bytenr, shared_owner, target));
        let Some((range, is_preallocated)) = used_range(extent) else { return };
        if let Some(has_checksums) = self.has_checksums(key.objectid) {
            let has_checksums = has_checksums && !is_preallocated;
            let inode = (self.tree.root.id, key.objectid);
            records.uses.push(DataUse::new(range, disk_bytenr, has_checksums, inode));
        }
    }

    /// Whether the data of the inode `ino` has checksums; `None` when that is not known.
    ///
    /// A file that relocates data takes the checksums of that data with it, whatever its own flags
    /// say.
    fn has_checksums(&mut self, ino: u64) -> Option<bool> {
        if self.owner == TreeId::DATA_RELOC {
            return None;
        }
        if let Some((_, known)) = self.current.filter(|&(current, _)| current == ino) {
            return known;
        }
        // The leaf begins with extents of an inode whose item is in a leaf before it. In a tree
        // that is being removed that leaf may be gone.
        let root = self.tree.root;
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let found =
            self.tree.is_complete().then(|| self.walk.volume.with_item(root, key, has_checksums));
        let known = found.flatten();
        self.current = Some((ino, known));
        known
    }
}

/// The range of the disk that an extent of a file uses, and whether that was never written.
/// Compressed data is always read as a whole.
fn used_range(extent: &FileExtent<'_>) -> Option<(Range<u64>, bool)> {
    let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, num_bytes, is_preallocated } =
        extent.body
    else {
        return None;
    };
    let range = if extent.compression == Compression::None {
        let start = disk_bytenr.0.saturating_add(offset);
        start..start.saturating_add(num_bytes)
    } else {
        disk_bytenr.0..disk_bytenr.0.saturating_add(disk_num_bytes)
    };
    Some((range, is_preallocated))
}
