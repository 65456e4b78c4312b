//! Changing a tree, by many threads inside one transaction.
//!
//! # The way down
//!
//! A writer takes the lock of the tree's root, then latches downwards, each block while
//! it holds the one above (lock coupling). It goes down with shared latches first, and latches
//! the leaf alone exclusively: that is enough for nearly every change (`shared`). Otherwise it goes down
//! once more with exclusive latches. A block that the transaction does not own yet
//! is copied on that way, which changes its pointer in the block above. What is above is let go as
//! soon as nothing below can change it:
//!
//! | going down to | a block is safe, and what is above it let go, when |
//! |---|---|
//! | insert | it has room for two more pointers (a full one is split on the way), and the key is not below its first |
//! | remove | it keeps a pointer when one goes, and the way does not lead through its first |
//!
//! # The leaf, on insertion
//!
//! Its free space and its first key are read before it is searched. With room, and a key
//! above the first, nothing above it can change: the parents are let go, and the search
//! begins at slot 1. A key that equals the first one is at slot 0 without a search. A key below it
//! goes to slot 0 without a search too, and the parents are kept, because their
//! separators become this key. Without room, items go to the siblings first, and the
//! leaf is split only when they have none either. A leaf at the right edge that is appended to is not
//! halved: it stays full, and the new item begins the next one.
//!
//! # Lock order
//!
//! 1. The root lock of a tree, then its blocks from the root to the leaf.
//! 2. On one level, only under the latch of their parent.
//! 3. A thread that holds a leaf and not its parent takes no further latch of the tree, so those
//!    that wait for it under the parent wait for its work on the leaf alone.
//! 4. Trees: subvolumes, then the checksum tree, the root tree, the extent tree, the block-group
//!    tree, the free-space tree. Work on one may read or queue for a later one, never the
//!    other way round.

#[cfg(all(test, feature = "shuttle"))]
mod model;
mod path;
mod remove;
mod room;
mod shared;
#[cfg(test)]
mod tests;

use offshoot_btrfs_format::edit::{ITEM_SIZE, data_mut, leaf_free, node_capacity, resize_item};
use std::sync::atomic::AtomicU64;

use offshoot_btrfs_format::{Generation, Key, TreeId};
use offshoot_vfs::{Error, Result};

use super::TreeRoot;
use crate::block::TreeBlock;
use crate::sync::RwLock;
use crate::transaction::Handle;
use path::{Found, Path, bytes};

/// A tree that can change: the place of its root, behind the lock above all latches.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) id: TreeId,
    /// The transaction that took the last snapshot of it: only blocks up to this one may be shared.
    pub(crate) last_snapshot: Generation,
    pub(crate) root: RwLock<TreeRoot>,
    /// What its blocks take, in bytes.
    pub(crate) used: AtomicU64,
}

/// What becomes of an item.
pub(crate) enum Edit {
    /// It stays as it is, or stays away.
    Keep,
    /// It becomes this.
    Put(Vec<u8>),
}

/// Changes to one tree, on behalf of a transaction handle.
pub(crate) struct TreeWriter<'a> {
    handle: &'a Handle<'a>,
    tree: &'a Tree,
}

impl<'a> TreeWriter<'a> {
    pub(crate) fn new(handle: &'a Handle<'a>, tree: &'a Tree) -> Self {
        Self { handle, tree }
    }

    fn id(&self) -> TreeId {
        self.tree.id
    }

    fn node_size(&self) -> u32 {
        self.handle.volume().superblock().node_size
    }

    /// Inserts an item.
    ///
    /// # Errors
    /// When there is one with this key already: whoever inserts knows that there is none, so
    /// this is damage.
    pub(crate) fn insert(&self, key: Key, data: &[u8]) -> Result<()> {
        self.insert_batch(&[(key, data)])
    }

    /// Inserts items with ascending keys, as many at a time as go side by side into a leaf: one
    /// search, one shift of the headers and one of the data.
    pub(crate) fn insert_batch(&self, mut batch: &[(Key, &[u8])]) -> Result<()> {
        while let Some(&(key, data)) = batch.first() {
            let need = data.len() + ITEM_SIZE;
            let mut found = self.locate(key, need)?;
            if found.exists {
                return Err(Error::corrupt_at(
                    "leaf",
                    found.leaf.header().bytenr.get(),
                    format!("an item with the key {key} exists already"),
                ));
            }
            if leaf_free(found.leaf.bytes()) < need {
                self.make_room(&mut found, key, need)?;
            }
            let run = found.run_that_fits(batch);
            found.put_run(&batch[..run]);
            self.handle.stats().inserted(run);
            batch = &batch[run..];
        }
        Ok(())
    }

    /// Lets `edit` see the item with this key, and say what becomes of it. What it makes of it has
    /// at most `room` bytes more than before.
    pub(crate) fn modify(
        &self,
        key: Key,
        room: usize,
        edit: impl FnOnce(Option<&[u8]>) -> Result<Edit>,
    ) -> Result<()> {
        let mut found = self.locate(key, room + ITEM_SIZE)?;
        let old = found.exists.then(|| found.leaf.data(found.slot));
        let before = old.map_or(0, |data| data.len() + ITEM_SIZE);
        let Edit::Put(data) = edit(old)? else { return Ok(()) };
        let growth = (data.len() + ITEM_SIZE).saturating_sub(before);
        debug_assert!(growth <= room + ITEM_SIZE, "an item grew by more than was said");
        if leaf_free(found.leaf.bytes()) < growth {
            self.make_room(&mut found, key, growth)?;
        }
        if found.exists {
            let block = bytes(&mut found.leaf);
            resize_item(block, found.slot, data.len());
            data_mut(block, found.slot).copy_from_slice(&data);
        } else {
            found.put_run(&[(key, &data[..])]);
            self.handle.stats().inserted(1);
        }
        Ok(())
    }

    /// Goes down to where `key` is or belongs, for a change that adds at most `need` bytes
    /// to the leaf.
    fn locate(&self, key: Key, need: usize) -> Result<Found<'a>> {
        let is_safe = |leaf: &TreeBlock| {
            leaf_free(leaf.bytes()) >= need && !leaf.is_empty() && leaf.key(0) <= key
        };
        if let Some((path, leaf)) = self.locate_shared(key, is_safe)? {
            return Ok(self.find_in_leaf(path, leaf, key, need));
        }
        let (top, mut block) = self.lock_root()?;
        let mut path = Path { top: Some(top), ..Path::default() };
        while !block.is_leaf() {
            if block.len() + 2 > node_capacity(self.node_size()) {
                block = self.split_node(&mut path, block, key)?;
            }
            if key >= block.key(0) {
                path.release();
            }
            let slot = block.floor(key).unwrap_or(0);
            block = self.go_down(&mut path, block, slot)?;
        }
        Ok(self.find_in_leaf(path, block, key, need))
    }
}
