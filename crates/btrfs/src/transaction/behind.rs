//! Which blocks may have been behind a lost one, as other trees say.

use offshoot_btrfs_format::extent::{EXTENT_FLAG_TREE_BLOCK, ParsedExtent};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use uuid::Uuid;

use super::{Base, root_item};
use crate::rescue::{ScannedBlock, TreesAbove};
use crate::tree::{Blocks, Cursor};

/// How many subvolumes a snapshot may come from, one from the other.
const MOST_MAKERS: usize = 16;

/// The types of the items of blocks in the extent tree.
const EXTENTS: [ItemType; 2] = [ItemType::METADATA_ITEM, ItemType::EXTENT_ITEM];

impl TreesAbove for Base {
    fn is_allocated(&self, block: &ScannedBlock) -> Option<bool> {
        // The trees that say which blocks are in use must not ask that themselves.
        if [TreeId::ROOT, TreeId::CHUNK, TreeId::EXTENT].contains(&block.owner) {
            return None;
        }
        let at = block.logical.0;
        let root = self.tree(TreeId::EXTENT).ok()?;
        let mut cursor = Cursor::seek(self, root, Key::new(at, ItemType(0), 0)).ok()?;
        while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid == at) {
            if EXTENTS.contains(&key.item_type)
                && let Ok(extent) = ParsedExtent::parse(key.item_type, data)
            {
                let is_block = extent.item.flags.get() & EXTENT_FLAG_TREE_BLOCK != 0;
                return Some(is_block && extent.item.generation.get() == block.generation.0);
            }
            cursor.advance().ok()?;
        }
        let is_lost =
            EXTENTS.iter().any(|&kind| self.may_have_lost(TreeId::EXTENT, Key::new(at, kind, 0)));
        if is_lost { None } else { Some(false) }
    }

    fn makers(&self, tree: TreeId) -> Vec<TreeId> {
        let mut makers = vec![tree];
        while let Some(&last) = makers.last().filter(|last| last.is_subvolume())
            && makers.len() < MOST_MAKERS
            && let Ok(Some(item)) = root_item(self, last)
            && let Some(uuid) = RootItem::uuid(item.parent_uuid)
            && let Some(source) = subvolume_with(self, uuid)
            && !makers.contains(&source)
        {
            makers.push(source);
        }
        makers
    }
}

/// The subvolume with this UUID.
fn subvolume_with(base: &Base, uuid: Uuid) -> Option<TreeId> {
    let first = Key::new(TreeId::FS.0, ItemType::ROOT_ITEM, 0);
    let mut cursor = Cursor::seek(base, base.root_tree(), first).ok()?;
    while let Some((key, data)) = cursor.item() {
        if key.item_type == ItemType::ROOT_ITEM
            && RootItem::parse(data).is_ok_and(|item| RootItem::uuid(item.uuid) == Some(uuid))
        {
            return Some(TreeId(key.objectid));
        }
        cursor.advance().ok()?;
    }
    None
}
