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

mod descent;
mod write;

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offshoot_btrfs_format::check::Expected;
use offshoot_btrfs_format::superblock::SuperblockItem;
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};

use crate::block::TreeBlock;
use crate::engine::Engine;
use crate::transaction::{Live, ReadLatch, latch_shared};
use descent::Descent;
pub(crate) use write::{ItemEdit, Tree, TreeWriter};

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

impl TreeRoot {
    /// The root tree that a superblock tells of.
    pub(crate) fn of_root_tree(superblock: &SuperblockItem) -> Self {
        Self {
            id: TreeId::ROOT,
            logical: Logical(superblock.root.get()),
            level: superblock.root_level,
            generation: Generation(superblock.generation.get()),
        }
    }

    /// What its root block must be.
    pub(crate) fn expected(&self) -> Expected {
        Expected {
            logical: self.logical,
            level: self.level,
            generation: self.generation,
            owner: self.id,
            first_key: None,
        }
    }
}

/// A block on the way to an item.
struct Step {
    block: Arc<TreeBlock>,
    slot: usize,
    /// The key that all keys in the block are below; `None` at the right edge.
    upper: Option<Key>,
}

/// A block on the way of a reader: committed blocks never change, others are held by their latch.
enum Held {
    Committed(Arc<TreeBlock>),
    Latched(ReadLatch),
}

impl Deref for Held {
    type Target = TreeBlock;

    fn deref(&self) -> &TreeBlock {
        match self {
            Self::Committed(block) => block,
            Self::Latched(latch) => latch,
        }
    }
}

impl Held {
    fn share(&self) -> Arc<TreeBlock> {
        match self {
            Self::Committed(block) => block.clone(),
            Self::Latched(latch) => Arc::clone(latch),
        }
    }
}

impl TreeBlock {
    /// What the block that the pointer at `slot` leads to must be, in the tree `owner`.
    pub(crate) fn child_expected(&self, slot: usize, owner: TreeId) -> Expected {
        let pointer = &self.pointers()[slot];
        Expected {
            logical: pointer.logical(),
            level: self.header().level - 1,
            generation: Generation(pointer.generation.get()),
            owner,
            first_key: Some(pointer.key.get()),
        }
    }
}

impl Engine {
    fn hold(&self, live: &Live, expected: &Expected) -> Result<Held> {
        match live.recent_block(expected.generation, expected.logical) {
            Some(latch) => Ok(Held::Latched(latch_shared(&latch, &live.stats))),
            None => self.committed_block(expected).map(Held::Committed),
        }
    }
}

/// A place in a tree, on an item or behind the last one.
pub struct Cursor<'v> {
    volume: &'v Engine,
    id: TreeId,
    /// What can change, unless the tree is one that nobody changes.
    live: Option<&'v Live>,
    /// From the root to the leaf. Empty once the cursor has passed the last item.
    path: Vec<Step>,
}

impl<'v> Cursor<'v> {
    /// Stands on the first item whose key is `key` or greater.
    pub fn seek(volume: &'v Engine, root: TreeRoot, key: Key) -> Result<Self> {
        let mut cursor = Self::seek_floor(volume, root, key)?;
        if cursor.item().is_some_and(|(found, _)| found < key) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    /// Stands on the last item whose key is `key` or less, or else on the first item.
    pub fn seek_floor(volume: &'v Engine, root: TreeRoot, key: Key) -> Result<Self> {
        // Nobody changes a log that is pending, or knows it by its id; one that is being written has a lock of its own.
        let live = volume.live_part().filter(|_| root.id != TreeId::TREE_LOG);
        let mut cursor = Self { volume, id: root.id, live, path: Vec::with_capacity(4) };
        match live {
            Some(live) => cursor.seek_live(live, key)?,
            None => cursor.seek_still(root, key)?,
        }
        Ok(cursor)
    }

    /// As [`seek`](Self::seek) in a tree as the last commit left it. The caller has a handle, and that commit is on the devices: so nothing
    /// that it has is free.
    pub(crate) fn seek_committed(volume: &'v Engine, root: TreeRoot, key: Key) -> Result<Self> {
        let mut cursor = Self::seek_committed_floor(volume, root, key)?;
        if cursor.item().is_some_and(|(found, _)| found < key) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    /// As [`seek_floor`](Self::seek_floor), in the same.
    pub(crate) fn seek_committed_floor(
        volume: &'v Engine,
        root: TreeRoot,
        key: Key,
    ) -> Result<Self> {
        let mut cursor = Self { volume, id: root.id, live: None, path: Vec::with_capacity(4) };
        cursor.seek_still(root, key)?;
        Ok(cursor)
    }

    fn seek_still(&mut self, root: TreeRoot, key: Key) -> Result<()> {
        let block = self.volume.block(&root.expected())?;
        if !block.is_empty() {
            let mut descent = Descent::to(key);
            self.push(block, None, |block| descent.floor(block).unwrap_or(0))?;
        }
        Ok(())
    }

    /// The same in a tree that others change meanwhile.
    ///
    /// A way down that began before a commit may meet an address that the commit freed and that was used
    /// again. What it finds there is not what the pointer says, and the search begins anew.
    fn seek_live(&mut self, live: &Live, key: Key) -> Result<()> {
        let tree = live.tree(self.volume, self.id)?;
        loop {
            tree.require_alive()?;
            let epoch = live.epoch.load(Ordering::Acquire);
            match self.try_seek_live(live, &tree, key) {
                Err(Error::Corrupt(_)) if live.epoch.load(Ordering::Acquire) != epoch => {}
                other => return other,
            }
        }
    }

    /// Goes down with lock coupling, and keeps the leaf as it was when it was reached.
    fn try_seek_live(&mut self, live: &Live, tree: &Tree, key: Key) -> Result<()> {
        self.path.clear();
        let root = tree.share_root(&live.stats);
        let mut held = self.volume.hold(live, &root.expected())?;
        drop(root);
        let (mut descent, mut upper) = (Descent::to(key), None);
        while !held.is_leaf() {
            let slot = descent.floor(&held).unwrap_or(0);
            if slot + 1 < held.len() {
                upper = Some(held.key(slot + 1));
            }
            let child = self.volume.hold(live, &held.child_expected(slot, self.id))?;
            held = child;
        }
        if !held.is_empty() {
            let slot = descent.floor(&held).unwrap_or(0);
            self.path.push(Step { block: held.share(), slot, upper });
        }
        Ok(())
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

    /// The address of the leaf that the cursor stands in.
    pub(crate) fn leaf(&self) -> Option<Logical> {
        Some(Logical(self.path.last()?.block.header().bytenr.get()))
    }

    /// The key before the item that the cursor stands on, if that is in the same leaf.
    pub(crate) fn key_before(&self) -> Option<Key> {
        let Step { block, slot, .. } = self.path.last()?;
        Some(block.key(slot.checked_sub(1)?))
    }

    /// The items from the one that the cursor stands on to `last`, as far as they are in its leaf. It goes on behind them.
    pub(crate) fn take_run(&mut self, last: Key) -> Result<Option<(Arc<TreeBlock>, Range<usize>)>> {
        let Some(step) = self.path.last_mut() else { return Ok(None) };
        let (from, len) = (step.slot, step.block.len());
        let end = last.successor().map_or(len, |after| step.block.search_near(from, after).0);
        if end == from {
            return Ok(None);
        }
        let leaf = step.block.clone();
        step.slot = end - 1;
        self.advance()?;
        Ok(Some((leaf, from..end)))
    }

    /// Goes on to the next item.
    pub fn advance(&mut self) -> Result<()> {
        if let Some(live) = self.live {
            return self.advance_live(live);
        }
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

    /// Behind the last item of a leaf, the next leaf is searched for by its first key. When that one is gone
    /// meanwhile, the search ends on an item before it, and goes on from there.
    fn advance_live(&mut self, live: &Live) -> Result<()> {
        let Some(left) = self.item().map(|(key, _)| key) else { return Ok(()) };
        while let Some(step) = self.path.last_mut() {
            if step.slot + 1 < step.block.len() {
                step.slot += 1;
                return Ok(());
            }
            let Some(upper) = step.upper else {
                self.path.clear();
                break;
            };
            self.seek_live(live, upper)?;
            if self.item().is_some_and(|(key, _)| key > left) {
                break;
            }
        }
        Ok(())
    }

    /// Adds `block` to the path, and what is below it, down to the leaf.
    fn push(
        &mut self,
        block: Arc<TreeBlock>,
        upper: Option<Key>,
        mut choose: impl FnMut(&TreeBlock) -> usize,
    ) -> Result<()> {
        let slot = choose(&block);
        let is_leaf = block.is_leaf();
        self.path.push(Step { block, slot, upper });
        if is_leaf { Ok(()) } else { self.descend(choose) }
    }

    /// Goes down from the last block of the path, at its slot, to a leaf.
    fn descend(&mut self, mut choose: impl FnMut(&TreeBlock) -> usize) -> Result<()> {
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
    volume: &Engine,
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
