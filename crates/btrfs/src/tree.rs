//! Trees: search and iteration.
//!
//! A [`Cursor`] stands on an item of a leaf and holds the blocks on the way from the
//! root to it. It goes forward only, so walking a tree holds one block of each level.
//!
//! Invariants, which make every walk end, whatever an image says:
//!
//! 1. The level falls by one with every step down (`check::expect`), so a way down has at most
//!    eight blocks.
//! 2. All keys of a block lie below the next key in its parent. The ranges of
//!    siblings are disjoint, so a block is met once on a walk, and keys only ascend.

use std::sync::Arc;

use offshoot_btrfs_format::check::Expected;
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};

use crate::block::TreeBlock;
use crate::volume::Volume;

/// Where a tree begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeRoot {
    /// The tree.
    pub id: TreeId,
    /// The address of its root block.
    pub logical: Logical,
    /// The level of that block.
    pub level: u8,
    /// The generation of that block.
    pub generation: Generation,
}

/// A block on the way to an item.
struct Step {
    block: Arc<TreeBlock>,
    slot: usize,
    /// The key that all keys in the block are below; `None` at the right edge.
    upper: Option<Key>,
}

/// A place in a tree, on an item or behind the last one.
pub struct Cursor<'v> {
    volume: &'v Volume,
    id: TreeId,
    /// From the root to the leaf. Empty once the cursor has passed the last item.
    path: Vec<Step>,
}

impl<'v> Cursor<'v> {
    /// Stands on the first item whose key is `key` or greater.
    pub fn seek(volume: &'v Volume, root: TreeRoot, key: Key) -> Result<Self> {
        let mut cursor = Self::seek_floor(volume, root, key)?;
        if cursor.item().is_some_and(|(found, _)| found < key) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    /// Stands on the last item whose key is `key` or less, or else on the first item.
    pub fn seek_floor(volume: &'v Volume, root: TreeRoot, key: Key) -> Result<Self> {
        let mut cursor = Self { volume, id: root.id, path: Vec::with_capacity(4) };
        let block = volume.block(&Expected {
            logical: root.logical,
            level: root.level,
            generation: root.generation,
            owner: root.id,
            first_key: None,
        })?;
        if !block.is_empty() {
            cursor.push(block, None, |block| block.floor(key).unwrap_or(0))?;
        }
        Ok(cursor)
    }

    /// The item that the cursor stands on; `None` behind the last one.
    #[must_use]
    pub fn item(&self) -> Option<(Key, &[u8])> {
        let Step { block, slot, .. } = self.path.last()?;
        Some((block.key(*slot), block.data(*slot)))
    }

    /// The item, if its key has this object id and type.
    #[must_use]
    pub fn item_of(
        &self,
        objectid: u64,
        item_type: offshoot_btrfs_format::ItemType,
    ) -> Option<(Key, &[u8])> {
        self.item().filter(|(key, _)| key.objectid == objectid && key.item_type == item_type)
    }

    /// Goes on to the next item.
    pub fn advance(&mut self) -> Result<()> {
        while let Some(step) = self.path.last_mut() {
            step.slot += 1;
            if step.slot >= step.block.len() {
                self.path.pop();
                continue;
            }
            return if step.block.is_leaf() { Ok(()) } else { self.descend(|_| 0) };
        }
        Ok(())
    }

    /// Adds `block` to the path, and what is below it, down to the leaf.
    fn push(
        &mut self,
        block: Arc<TreeBlock>,
        upper: Option<Key>,
        choose: impl Fn(&TreeBlock) -> usize,
    ) -> Result<()> {
        let slot = choose(&block);
        let is_leaf = block.is_leaf();
        self.path.push(Step { block, slot, upper });
        if is_leaf { Ok(()) } else { self.descend(choose) }
    }

    /// Goes down from the last block of the path, at its slot, to a leaf.
    fn descend(&mut self, choose: impl Fn(&TreeBlock) -> usize) -> Result<()> {
        while let Some(Step { block, slot, upper }) = self.path.last()
            && !block.is_leaf()
        {
            let upper = if slot + 1 < block.len() { Some(block.key(slot + 1)) } else { *upper };
            let child = self.volume.child(block, *slot, self.id)?;
            let last = child.key(child.len() - 1);
            if let Some(upper) = upper.filter(|&upper| last >= upper) {
                return Err(Error::corrupt_at(
                    if child.is_leaf() { "leaf" } else { "node" },
                    child.header().bytenr.get(),
                    format!("its last key {last} is not below {upper}, the next one in its parent"),
                ));
            }
            let slot = choose(&child);
            self.path.push(Step { block: child, slot, upper });
        }
        Ok(())
    }
}

/// Calls `found` with the data of the item with exactly this key; `None` when there is none.
pub(crate) fn with_item<T>(
    volume: &Volume,
    root: TreeRoot,
    key: Key,
    found: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<Option<T>> {
    let cursor = Cursor::seek_floor(volume, root, key)?;
    match cursor.item() {
        Some((at, data)) if at == key => found(data).map(Some),
        _ => Ok(None),
    }
}
