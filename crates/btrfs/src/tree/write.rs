//! Changing a tree, by many threads inside one transaction.
//!
//! # The way down
//!
//! A writer takes the lock of the tree's root and then latches downwards, each block while it holds
//! the one above (lock coupling). The search in one block says where the search in the next begins
//! (`descent`). There are three ways down, each tried when the one before is not enough:
//!
//! 1. Shared latches, and an exclusive one on the leaf alone. This is enough for nearly every
//!    change (`shared`).
//! 2. As the first, but also with an exclusive latch on the block above the leaf.
//! 3. Exclusive latches all the way.
//!
//! Where a way has exclusive latches, the writer copies each block that the transaction does not
//! own yet, which changes the pointer in the block above. On the third way it also splits full
//! nodes and merges sparse ones, whatever is going to happen to the leaf. There it releases the
//! latches above a node when a change below the node cannot reach them: the node has room for two
//! more pointers, has pointers left when one is removed, and the way does not lead through its
//! first pointer.
//!
//! # The leaf, on insertion
//!
//! The writer reads the free space and the first key of the leaf before it searches the leaf.
//!
//! | the new item | what the writer does |
//! |---|---|
//! | fits, and its key is above the first | releases the parents, because nothing above can change; searches from slot 1 |
//! | its key equals the first | takes slot 0 without a search |
//! | its key is below the first | takes slot 0 without a search; keeps the parents, because their separators become this key |
//! | does not fit | moves items to a sibling; splits the leaf only when the siblings have no room either |
//!
//! A leaf at the right edge of the tree to which items are appended is not halved: it stays full,
//! and the new item begins the next leaf.
//!
//! # Batches
//!
//! Sorted edits are applied a leaf at a time (`batch`). The way down says which keys the leaf may
//! have. All edits of these keys are merged with its items (`merge`), and the result is written
//! once, into one leaf or into as many as it needs (`room`). Items that come from a leaf of another
//! tree are copied as runs: one copy for all that go to one place (`edits`).
//!
//! # Lock order
//!
//! 1. The root lock of a tree, then its blocks from the root to the leaf.
//! 2. Two blocks of one level only under the exclusive latch of their parent. A look at a sibling
//!    takes its latch for a moment, so this holds for it too.
//! 3. A thread that holds a leaf and not its parent takes no further latch of the tree. So a thread
//!    that holds the parent and waits for the leaf waits only for work on the leaf.
//! 4. Trees: subvolumes, then the checksum tree, the root tree, the extent tree, the block-group
//!    tree, the free-space tree. Work on one tree may read a later one or queue changes for it, but
//!    never for an earlier one.

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
use offshoot_vfs::{Error, Result, Structure};

use super::{Blocks, TreeRoot};
use crate::block::{ReadLatch, TreeBlock, WriteLatch};
use crate::stats::EngineCounters;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
pub(crate) use edits::ItemEdit;
use edits::ItemEdits;
use merge::MergedLeaf;
use path::{FoundSlot, bytes};

/// How writers of a tree latch the blocks above a leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latching {
    /// If true, all writers take exclusive latches all the way down. If false, only those do whose
    /// change reaches further up than the block above the leaf.
    pub is_exclusive: bool,
    /// When an insertion releases the latches above its leaf.
    pub unlock: UnlockTime,
}

/// When an insertion releases the latches above its leaf, so that other threads get past. It
/// releases them early only if the item fits and the first key of the leaf stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnlockTime {
    /// Before the search in the leaf, after a look at its first key and its free space.
    #[default]
    BeforeSearch,
    /// After the search in the leaf.
    AfterSearch,
    /// After the item is in its place.
    AfterChange,
}

/// A tree that a [`TreeWriter`] changes, and the blocks of it that the transaction owns.
pub(crate) trait OwnedTree {
    /// Its root, behind the lock that comes before all latches.
    fn root(&self) -> &RwLock<TreeRoot>;

    /// The source of the blocks that the transaction does not own yet.
    fn blocks(&self) -> &dyn Blocks;

    /// Which tree it is.
    fn id(&self) -> TreeId;

    /// The size of its blocks, in bytes.
    fn node_size(&self) -> u32;

    /// The transaction that new blocks belong to.
    fn generation(&self) -> Generation;

    /// How writers latch the blocks above a leaf.
    fn latching(&self) -> Latching;

    /// The counters of the volume.
    fn stats(&self) -> &EngineCounters;

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
    owner: &'a dyn OwnedTree,
}

/// The root of a tree, under a shared lock: no thread replaces it meanwhile.
pub(crate) fn share_root<'r>(
    root: &'r RwLock<TreeRoot>,
    stats: &EngineCounters,
) -> RwLockReadGuard<'r, TreeRoot> {
    stats.lock_shared(root.try_read(), || root.read())
}

impl<'a> TreeWriter<'a> {
    pub(crate) fn new(owner: &'a dyn OwnedTree) -> Self {
        Self { owner }
    }

    fn id(&self) -> TreeId {
        self.owner.id()
    }

    fn node_size(&self) -> u32 {
        self.owner.node_size()
    }

    fn share_root(&self) -> RwLockReadGuard<'a, TreeRoot> {
        share_root(self.owner.root(), self.owner.stats())
    }

    /// The root, under an exclusive lock.
    fn take_root(&self) -> RwLockWriteGuard<'a, TreeRoot> {
        let root = self.owner.root();
        self.owner.stats().lock(root.try_write(), || root.write())
    }

    /// Inserts an item.
    ///
    /// # Errors
    /// When the tree has an item with this key already. The caller knows that there should be none,
    /// so this is damage.
    pub(crate) fn insert(&self, key: Key, data: &[u8]) -> Result<()> {
        let found = self.locate(key, data.len() + ITEM_SIZE)?;
        if found.exists {
            return Err(Error::corrupt_at(
                Structure::Leaf,
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
                Structure::Tree,
                format!("{} has {count} of the items that are new", self.id()),
            )),
        }
    }

    /// Passes the data of the item with this key to `edit`, or `None`, and stores what `edit`
    /// returns: at most `room` bytes more than before.
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

    /// Stores `data` as the item with `key`, at the place that was found.
    fn put(&self, mut found: FoundSlot<'a>, key: Key, data: &[u8]) -> Result<()> {
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
            let edits = ItemEdits::Each(&edit);
            let merged = MergedLeaf::new(&found.leaf, edits, 0);
            self.spread(found.path, found.leaf, edits, merged)?;
        }
        Ok(())
    }

    /// Finds the leaf and slot where `key` is or belongs, for a change that adds at most `need`
    /// bytes to the leaf.
    fn locate(&self, key: Key, need: usize) -> Result<FoundSlot<'a>> {
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
