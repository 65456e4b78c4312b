//! Changing a tree, by many threads inside one transaction.
//!
//! # The way down
//!
//! A writer takes the lock of the tree's root, then latches downwards, each block while
//! it holds the one above (lock coupling). What the search found in one block tells where that in the
//! next begins (`descent`). It goes down with shared latches first, and latches the leaf alone exclusively:
//! that is enough for nearly every change (`shared`). Otherwise it goes down once more, and latches the block above the leaf exclusively too; and where that is not enough either, all the way. A block that the transaction does not own yet
//! is copied on that way, which changes its pointer in the block above. Full nodes are split on the way and sparse
//! ones merged, whatever is going to happen to the leaf. What is above a node is let go when it keeps room for two more
//! pointers and has some left when one goes, and the way does not lead through its first.
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
//! # Batches
//!
//! Edits that come sorted are applied a leaf at a time (`batch`): the way down says which keys
//! the leaf may have, and all edits of these keys are merged with its items (`merge`), which are then written once, or
//! cut into as many leaves as it takes (`room`). Items that stand in a leaf of another tree already go there as runs, with one copy for
//! all of one place (`edits`).
//!
//! # Lock order
//!
//! 1. The root lock of a tree, then its blocks from the root to the leaf.
//! 2. On one level, only under the exclusive latch of their parent. This holds for a look at a sibling too, which takes its latch for a moment.
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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offshoot_btrfs_format::{Generation, Key, TreeId};
use offshoot_vfs::{Errno, Error, Result};

use super::TreeRoot;
use crate::block::TreeBlock;
use crate::delayed::Hold;
use crate::subvolume::StoredRoot;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::transaction::{Counters, Handle};
use edits::Edits;
pub(crate) use edits::ItemEdit;
use merge::Merged;
use path::{Found, bytes};

/// A tree that can change: the place of its root, behind the lock above all latches.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) id: TreeId,
    /// The transaction that took the last snapshot of it: only blocks up to this one may be shared.
    last_snapshot: AtomicU64,
    /// Whether it is a subvolume that may not be changed.
    is_read_only: AtomicBool,
    /// Whether it is a subvolume without a name. Who has files of it open can go on with them.
    is_removed: AtomicBool,
    /// Whether it is a subvolume that was deleted, and nobody has files of it open.
    is_deleted: AtomicBool,
    /// How often its files are open. Nothing is locked under it.
    opens: parking_lot::Mutex<u64>,
    pub(crate) root: RwLock<TreeRoot>,
    /// What its blocks take, in bytes.
    pub(crate) used: AtomicU64,
    /// What is reserved for items that are queued for it.
    pub(crate) hold: Hold,
}

impl Tree {
    /// The tree as it is stored.
    pub(crate) fn new(stored: &StoredRoot) -> Self {
        Self {
            id: stored.root.id,
            last_snapshot: AtomicU64::new(stored.last_snapshot.0),
            is_read_only: AtomicBool::new(stored.is_read_only),
            is_removed: AtomicBool::new(false),
            is_deleted: AtomicBool::new(false),
            opens: parking_lot::Mutex::new(0),
            root: RwLock::new(stored.root),
            used: AtomicU64::new(stored.used_bytes),
            hold: Hold::new(stored.used_bytes),
        }
    }

    /// Its root, which nobody replaces meanwhile.
    pub(crate) fn share_root(&self, stats: &Counters) -> RwLockReadGuard<'_, TreeRoot> {
        stats.lock_shared(self.root.try_read(), || self.root.read())
    }

    /// Its root, to be replaced.
    fn take_root(&self, stats: &Counters) -> RwLockWriteGuard<'_, TreeRoot> {
        stats.lock(self.root.try_write(), || self.root.write())
    }

    /// The transaction that took the last snapshot of it.
    pub(crate) fn last_snapshot(&self) -> Generation {
        Generation(self.last_snapshot.load(Ordering::Relaxed))
    }

    /// A snapshot is taken of it, by whoever shut the gate.
    pub(crate) fn set_last_snapshot(&self, generation: Generation) {
        self.last_snapshot.store(generation.0, Ordering::Relaxed);
    }

    /// It may be changed from now on, or not any more. The caller shut the gate.
    pub(crate) fn set_read_only(&self, is_read_only: bool) {
        self.is_read_only.store(is_read_only, Ordering::Release);
    }

    /// It has no name any more, by whoever shut the gate.
    pub(crate) fn set_removed(&self) {
        self.is_removed.store(true, Ordering::Release);
    }

    /// Whether it has no name any more.
    pub(crate) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    /// A file of it is opened once more.
    ///
    /// # Errors
    /// `ENOENT` when it was deleted.
    pub(crate) fn open_file(&self) -> Result<()> {
        let mut opens = self.opens.lock();
        self.require_alive()?;
        *opens += 1;
        Ok(())
    }

    /// A file of it is open once less. Whether that was the last of a subvolume without a name, which ends then.
    pub(crate) fn close_file(&self) -> bool {
        let mut opens = self.opens.lock();
        *opens = opens.saturating_sub(1);
        *opens == 0 && self.is_removed()
    }

    /// If it has no name and none of its files is open, it is deleted, by whoever shut the gate: nobody but who drops its blocks looks at it any more.
    /// Whether that is so since now.
    pub(crate) fn end(&self) -> bool {
        let opens = self.opens.lock();
        *opens == 0 && self.is_removed() && !self.is_deleted.swap(true, Ordering::AcqRel)
    }

    /// Whether it was deleted.
    pub(crate) fn is_deleted(&self) -> bool {
        self.is_deleted.load(Ordering::Acquire)
    }

    /// `ENOENT` when it was deleted.
    pub(crate) fn require_alive(&self) -> Result<()> {
        if self.is_deleted() {
            return Err(Error::posix(Errno::NOENT, format!("subvolume {}", self.id)));
        }
        Ok(())
    }

    /// `ENOENT` when it has no name any more.
    pub(crate) fn require_name(&self) -> Result<()> {
        if self.is_removed() {
            return Err(Error::posix(Errno::NOENT, format!("the name of subvolume {}", self.id)));
        }
        Ok(())
    }

    /// `EROFS` when it is a subvolume that may not be changed, `ENOENT` when it was deleted. What is found under a handle holds
    /// until that is dropped.
    pub(crate) fn require_writable(&self) -> Result<()> {
        self.require_alive()?;
        if self.is_read_only.load(Ordering::Acquire) {
            return Err(Error::posix(Errno::ROFS, format!("subvolume {}", self.id)));
        }
        Ok(())
    }
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

    /// Lets `edit` see the data of the item with this key, if there is one, and say what it becomes: at most `room`
    /// bytes more than before.
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
            self.handle.stats().inserted();
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
