//! Which blocks lead to an extent.

use std::sync::Arc;

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use offshoot_vfs::Result;

use super::Relocation;
use crate::block::TreeBlock;
use crate::storage::malformed;
use crate::transaction::RefOwner;
use crate::transaction::extent_tree::no_parent;
use crate::tree::{Blocks, Cursor};

impl Relocation<'_, '_> {
    /// The block at `at`, which `tree` or another subvolume owns.
    pub(super) fn read(
        &self,
        at: Logical,
        level: u8,
        generation: Generation,
        tree: TreeId,
    ) -> Result<Arc<TreeBlock>> {
        let expected =
            ExpectedBlock { logical: at, level, generation, owner: tree, first_key: None };
        self.handle.volume().block(&expected)
    }

    /// The block of the tree `root` that points to the block at `at`; `None` when that is the root.
    ///
    /// # Errors
    /// When no way from the root leads there.
    pub(super) fn parent_in(
        &self,
        root: TreeId,
        at: Logical,
        level: u8,
        generation: Generation,
    ) -> Result<Option<Logical>> {
        let volume = self.handle.volume();
        let tree = self.handle.tree(root)?;
        let top = *tree.root.read();
        if top.logical == at {
            return Ok(None);
        }
        let missing = || no_parent(at, RefOwner::Tree { root });
        let child = self.read(at, level, generation, root)?;
        if child.is_empty() || top.level <= level {
            return Err(missing());
        }
        let key = child.key(0);
        let mut block = volume.block(&top.expected())?;
        while block.header().level > level + 1 {
            let slot = block.floor(key).unwrap_or(0);
            block = volume.child(&block, slot, root)?;
        }
        let slot = block.floor(key).ok_or_else(missing)?;
        let pointer = block.pointers().get(slot).filter(|pointer| pointer.logical() == at);
        pointer.ok_or_else(missing)?;
        Ok(Some(Logical(block.header().bytenr.get())))
    }

    /// Adds all leaves through which the inode of the tree `root` refers to the data at `at`. The
    /// file has the beginning of that data at `offset`. Returns whether it has any of it as data,
    /// and not only as preallocated.
    ///
    /// # Errors
    /// When these are not as many references as `count`.
    pub(super) fn add_leaves(
        &mut self,
        root: TreeId,
        (ino, offset): (u64, u64),
        at: Logical,
        count: u32,
    ) -> Result<bool> {
        let volume = self.handle.volume();
        let tree = self.handle.tree(root)?;
        let top = *tree.root.read();
        // The beginning may lie before the file: the file has only a later part.
        let from = if offset > u64::MAX / 2 { 0 } else { offset };
        let mut cursor = Cursor::seek(volume, top, Key::new(ino, ItemType::EXTENT_DATA, from))?;
        let (mut found, mut is_written) = (0, false);
        while found < count
            && let Some((key, data)) = cursor.item_of(ino, ItemType::EXTENT_DATA)
        {
            let extent = FileExtent::parse(data).map_err(malformed)?;
            if let FileExtentBody::Extent { disk_bytenr, offset: into, is_preallocated, .. } =
                extent.body
                && disk_bytenr == at
            {
                is_written |= !is_preallocated;
                let leaf = cursor.leaf().unwrap_or_default();
                self.add_block(leaf, 0)?;
                let is_it = key.offset.wrapping_sub(into) == offset;
                if is_it && self.refers_for(leaf, root, cursor.leaf_owner()) {
                    found += 1;
                }
            }
            cursor.advance()?;
        }
        if found < count {
            return Err(no_parent(at, RefOwner::File { root, ino, offset }));
        }
        Ok(is_written)
    }

    /// Whether the leaf, which was added, refers to data for the tree `root`.
    fn refers_for(&self, leaf: Logical, root: TreeId, owner: Option<TreeId>) -> bool {
        let is_full = self.blocks.get(&leaf.0).is_some_and(|block| block.references.is_full());
        owner == Some(root) && !is_full
    }

    /// Adds a leaf that refers to the data at `at` by its own address. Returns whether it has any
    /// of it as data.
    pub(super) fn add_leaf(&mut self, leaf: Logical, at: Logical) -> Result<bool> {
        self.add_block(leaf, 0)?;
        let Some(moving) = self.blocks.get(&leaf.0) else {
            return Err(no_parent(at, RefOwner::Leaf { parent: leaf }));
        };
        let block = self.read(leaf, 0, moving.generation, TreeId::FS)?;
        for (slot, item) in block.items().iter().enumerate() {
            if item.key.get().item_type != ItemType::EXTENT_DATA {
                continue;
            }
            let extent = FileExtent::parse(block.data(slot)).map_err(malformed)?;
            if let FileExtentBody::Extent { disk_bytenr, is_preallocated, .. } = extent.body
                && disk_bytenr == at
                && !is_preallocated
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
