//! Changing a tree, by many threads inside one transaction.
//!
//! # The way down
//!
//! A writer takes the lock of the tree's root, then latches downwards, each block while it holds
//! the one above (lock coupling). What the search found in one block tells where that in the next
//! begins (`descent`). It goes down with shared latches first, and latches the leaf alone
//! exclusively: that is enough for nearly every change (`shared`). Otherwise it goes down once
//! more, and latches the block above the leaf exclusively too; and where that is not enough either,
//! all the way. A block that the transaction does not own yet is copied on that way, which changes
//! its pointer in the block above. Full nodes are split on the way and sparse ones merged, whatever
//! is going to happen to the leaf. What is above a node is let go when it keeps room for two more
//! pointers and has some left when one goes, and the way does not lead through its first.
//!
//! # The leaf, on insertion
//!
//! Its free space and its first key are read before it is searched. With room, and a key above the
//! first, nothing above it can change: the parents are let go, and the search begins at slot 1. A
//! key that equals the first one is at slot 0 without a search. A key below it goes to slot 0
//! without a search too, and the parents are kept, because their separators become this key.
//! Without room, items go to the siblings first, and the leaf is split only when they have none
//! either. A leaf at the right edge that is appended to is not halved: it stays full, and the new
//! item begins the next one.
//!
//! # Batches
//!
//! Edits that come sorted are applied a leaf at a time (`batch`): the way down says which keys the
//! leaf may have, and all edits of these keys are merged with its items (`merge`), which are then
//! written once, or cut into as many leaves as it takes (`room`). Items that stand in a leaf of
//! another tree already go there as runs, with one copy for all of one place (`edits`).
//!
//! # Lock order
//!
//! 1. The root lock of a tree, then its blocks from the root to the leaf.
//! 2. On one level, only under the exclusive latch of their parent. This holds for a look at a
//!    sibling too, which takes its latch for a moment.
//! 3. A thread that holds a leaf and not its parent takes no further latch of the tree, so those
//!    that wait for it under the parent wait for its work on the leaf alone.
//! 4. Trees: subvolumes, then the checksum tree, the root tree, the extent tree, the block-group
//!    tree, the free-space tree. Work on one may read or queue for a later one, never the
//!    other way round.

mod batch;
mod edits;
mod merge;
#[cfg(all(test, feature = "shuttle"))]
mod model;
mod path;
mod remove;
mod room;
mod shared;
#[cfg(test)]
mod tests;

use offshoot_btrfs_format::edit::{ITEM_SIZE, data_mut, insert_items, leaf_free, resize_item};
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};

use super::{Blocks, TreeRoot};
use crate::block::{ReadLatch, TreeBlock, WriteLatch};
use crate::stats::Counters;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use edits::Edits;
pub(crate) use edits::ItemEdit;
use merge::Merged;
use path::{Found, bytes};

/// How writers of a tree latch what is above a leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latching {
    /// All writers take exclusive latches all the way down. Else those do whose change reaches
    /// further than the block above the leaf.
    pub exclusive: bool,
    /// When an insertion lets go of what is above.
    pub unlock: Unlock,
}

/// When an insertion lets go of what is above its leaf, so that others get past. Only a leaf with
/// room whose first key stays what it is lets go of anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unlock {
    /// Before the leaf is searched: its first key and its free space say enough.
    #[default]
    BeforeSearch,
    /// When the search has told where the item goes.
    AfterSearch,
    /// When the item is in its place.
    AfterChange,
}

/// The tree that a [`TreeWriter`] changes, and the blocks of it that may be changed.
pub(crate) trait Owns {
    /// The place of its root, behind the lock above all latches.
    fn root(&self) -> &RwLock<TreeRoot>;

    /// Where its blocks are found that may not be changed yet.
    fn blocks(&self) -> &dyn Blocks;

    /// Which tree it is.
    fn id(&self) -> TreeId;

    /// The size of its blocks, in bytes.
    fn node_size(&self) -> u32;

    /// The transaction that new blocks belong to.
    fn generation(&self) -> Generation;

    /// How writers latch what is above a leaf.
    fn latching(&self) -> Latching;

    /// What is counted.
    fn stats(&self) -> &Counters;

    /// Whether the block that a pointer leads to may be changed.
    fn owns(&self, generation: Generation, logical: Logical) -> bool;

    /// Takes the latch of a block that may be changed.
    fn latch(&self, logical: Logical) -> Result<WriteLatch>;

    /// Takes the latch of a block that may be changed, to read it.
    fn latch_shared(&self, logical: Logical) -> Result<ReadLatch>;

    /// Makes an empty block.
    fn new_block(&self, level: u8) -> Result<WriteLatch>;

    /// Copies a committed block to a new address, where it may be changed.
    fn copy_block(&self, old: &TreeBlock) -> Result<WriteLatch>;

    /// Frees a block that may be changed.
    fn free_block(&self, block: WriteLatch) -> Result<()>;

    /// Notes that the root moved.
    fn root_changed(&self, root: &TreeRoot);
}

/// Changes to one tree.
pub(crate) struct TreeWriter<'a> {
    owner: &'a dyn Owns,
}

impl<'a> TreeWriter<'a> {
    pub(crate) fn new(owner: &'a dyn Owns) -> Self {
        Self { owner }
    }

    fn id(&self) -> TreeId {
        self.owner.id()
    }

    fn node_size(&self) -> u32 {
        self.owner.node_size()
    }

    /// The root, which nobody replaces meanwhile.
    fn share_root(&self) -> RwLockReadGuard<'a, TreeRoot> {
        let root = self.owner.root();
        self.owner.stats().lock_shared(root.try_read(), || root.read())
    }

    /// The root, to be replaced.
    fn take_root(&self) -> RwLockWriteGuard<'a, TreeRoot> {
        let root = self.owner.root();
        self.owner.stats().lock(root.try_write(), || root.write())
    }

    /// Inserts an item.
    ///
    /// # Errors
    /// When there is one with this key already: whoever inserts knows that there is none, so
    /// this is damage.
    pub(crate) fn insert(&self, key: Key, data: &[u8]) -> Result<()> {
        let found = self.locate(key, data.len() + ITEM_SIZE)?;
        if found.exists {
            return Err(Error::corrupt_at(
                "leaf",
                found.leaf.header().bytenr.get(),
                format!("an item with the key {key} exists already"),
            ));
        }
        self.put(found, key, data)
    }

    /// Inserts items with ascending keys.
    ///
    /// # Errors
    /// As [`insert`](Self::insert).
    pub(crate) fn insert_batch(&self, batch: &[(Key, &[u8])]) -> Result<()> {
        let edits: Vec<ItemEdit<'_>> = batch.iter().map(|&(key, data)| (key, Some(data))).collect();
        match self.apply_batch(&edits)?.replaced {
            0 => Ok(()),
            count => Err(Error::corrupt(
                "tree",
                format!("{} has {count} of the items that are new", self.id()),
            )),
        }
    }

    /// Lets `edit` see the data of the item with this key, if there is one, and say what it
    /// becomes: at most `room` bytes more than before.
    pub(crate) fn modify(
        &self,
        key: Key,
        room: usize,
        edit: impl FnOnce(Option<&[u8]>) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let found = self.locate(key, room + ITEM_SIZE)?;
        let old = found.exists.then(|| found.leaf.data(found.slot));
        let before = old.map_or(0, |data| data.len() + ITEM_SIZE);
        let data = edit(old)?;
        let growth = (data.len() + ITEM_SIZE).saturating_sub(before);
        debug_assert!(growth <= room + ITEM_SIZE, "an item grew by more than was said");
        self.put(found, key, &data)
    }

    /// Makes the item at the place that was found this.
    fn put(&self, mut found: Found<'a>, key: Key, data: &[u8]) -> Result<()> {
        let free = leaf_free(found.leaf.bytes());
        if !found.exists {
            self.owner.stats().inserted();
        }
        if found.exists && data.len() <= free + found.leaf.data(found.slot).len() {
            let block = bytes(&mut found.leaf);
            resize_item(block, found.slot, data.len());
            data_mut(block, found.slot).copy_from_slice(data);
        } else if !found.exists && data.len() + ITEM_SIZE <= free {
            insert_items(bytes(&mut found.leaf), found.slot, [(key, data)].into_iter());
            if found.slot == 0 {
                found.path.set_first_key(key);
            }
        } else {
            let edit = [(key, Some(data))];
            let edits = Edits::Each(&edit);
            let merged = Merged::new(&found.leaf, edits, 0);
            self.spread(found.path, found.leaf, edits, merged)?;
        }
        Ok(())
    }

    /// Goes down to where `key` is or belongs, for a change that adds at most `need` bytes
    /// to the leaf.
    fn locate(&self, key: Key, need: usize) -> Result<Found<'a>> {
        let is_safe = |leaf: &TreeBlock| {
            leaf_free(leaf.bytes()) >= need && !leaf.is_empty() && leaf.key(0) <= key
        };
        let (path, leaf) = match self.locate_shared(key)?.filter(|(_, leaf)| is_safe(leaf)) {
            Some(shared) => shared,
            None => self.locate_to_change(key)?,
        };
        Ok(self.find_in_leaf(path, leaf, key, need))
    }
}
