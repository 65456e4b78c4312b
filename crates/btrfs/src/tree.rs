//! Trees: search and iteration.
//!
//! A [`Cursor`] stands on an item of a leaf and holds the blocks on the way from the root to it. It
//! goes forward only, so a walk over a tree holds one block of each level.
//!
//! These invariants make every walk end, even on a damaged image:
//!
//! 1. The level falls by one with every step down (`check::expect`), so a way down has at most
//!    eight blocks.
//! 2. All keys of a block lie below the next key in its parent. So the ranges of siblings are
//!    disjoint: a walk meets each block once, and its keys only ascend.

mod descent;
mod stripe_tree;
mod write;

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::superblock::{RootBackup, SuperblockItem};
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::FromZeros as _;

use crate::block::{HeldBlock, TreeBlock};
use descent::Descent;
pub(crate) use stripe_tree::recorded_segment;
pub(crate) use write::{ItemEdit, OwnedTree, TreeWriter, share_root};
pub use write::{Latching, UnlockTime};

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
    /// The root tree that a superblock points to.
    pub(crate) fn of_root_tree(superblock: &SuperblockItem) -> Self {
        Self {
            id: TreeId::ROOT,
            logical: Logical(superblock.root.get()),
            level: superblock.root_level,
            generation: Generation(superblock.generation.get()),
        }
    }

    /// What the header of its root block must say.
    pub(crate) fn expected(&self) -> ExpectedBlock {
        ExpectedBlock {
            logical: self.logical,
            level: self.level,
            generation: self.generation,
            owner: self.id,
            first_key: None,
        }
    }
}

/// A block of a tree that cannot be read, with everything behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostSubtree {
    /// What its header should say.
    pub(crate) block: ExpectedBlock,
    /// Its first key.
    pub(crate) from: Key,
    /// The key behind its last one; `None` at the right edge of the tree.
    pub(crate) to: Option<Key>,
}

/// The backup of the roots of the commit with the superblock `item`. `roots` are those of the
/// extent tree, the top level, the device tree and the checksum tree.
pub(crate) fn root_backup(item: &SuperblockItem, roots: [TreeRoot; 4]) -> RootBackup {
    let [extent, fs, dev, csum] = roots;
    RootBackup {
        tree_root: item.root,
        tree_root_gen: item.generation,
        tree_root_level: item.root_level,
        chunk_root: item.chunk_root,
        chunk_root_gen: item.chunk_root_generation,
        chunk_root_level: item.chunk_root_level,
        extent_root: extent.logical.0.into(),
        extent_root_gen: extent.generation.0.into(),
        extent_root_level: extent.level,
        fs_root: fs.logical.0.into(),
        fs_root_gen: fs.generation.0.into(),
        fs_root_level: fs.level,
        dev_root: dev.logical.0.into(),
        dev_root_gen: dev.generation.0.into(),
        dev_root_level: dev.level,
        csum_root: csum.logical.0.into(),
        csum_root_gen: csum.generation.0.into(),
        csum_root_level: csum.level,
        total_bytes: item.total_bytes,
        bytes_used: item.bytes_used,
        num_devices: item.num_devices,
        ..RootBackup::new_zeroed()
    }
}

/// The source of a tree's blocks.
pub(crate) trait Blocks {
    /// Whether trees may change while they are read.
    fn is_changing(&self) -> bool;

    /// A counter of how often space became free. A reader compares it before and after a search: if
    /// it has changed, a block that the search read may have been freed and its address used again.
    fn epoch(&self) -> u64;

    /// The block that `expected` describes, as it is now.
    fn block(&self, expected: &ExpectedBlock) -> Result<Arc<TreeBlock>>;

    /// The child at `slot` of `node`, in the tree `owner`. May read the leaves behind it ahead.
    fn child(&self, node: &TreeBlock, slot: usize, owner: TreeId) -> Result<Arc<TreeBlock>>;

    /// What a reader uses instead of `lost`, which could not be read because of `error`: another
    /// block, or `None` to go on behind it.
    ///
    /// # Errors
    /// `error`, unless the volume is read around damage.
    fn instead(&self, lost: &LostSubtree, error: Error) -> Result<Option<Arc<TreeBlock>>> {
        let _ = lost;
        Err(error)
    }

    /// Whether an item of `tree` with this key may be in a subtree that could not be read.
    fn may_have_lost(&self, tree: TreeId, key: Key) -> bool {
        let _ = (tree, key);
        false
    }

    /// The root block of the tree `id`. No thread changes or replaces it while it is held.
    ///
    /// # Errors
    /// `ENOENT` when the tree was deleted.
    fn hold_root(&self, id: TreeId) -> Result<HeldBlock>;

    /// The block that `expected` describes. No thread changes it while it is held.
    fn hold(&self, expected: &ExpectedBlock) -> Result<HeldBlock>;
}

/// A block on the way to an item.
struct CursorStep {
    block: Arc<TreeBlock>,
    slot: usize,
    /// The keys in the block are below this key; `None` at the right edge.
    upper: Option<Key>,
}

/// A position in a tree: on an item, or behind the last one.
pub struct Cursor<'v> {
    blocks: &'v dyn Blocks,
    id: TreeId,
    /// Whether other threads may change the tree meanwhile.
    is_changing: bool,
    /// From the root to the leaf. Empty once the cursor has passed the last item.
    path: Vec<CursorStep>,
}

impl<'v> Cursor<'v> {
    /// Stands on the first item whose key is `key` or greater.
    pub(crate) fn seek(blocks: &'v dyn Blocks, root: TreeRoot, key: Key) -> Result<Self> {
        let mut cursor = Self::seek_floor(blocks, root, key)?;
        if cursor.item().is_some_and(|(found, _)| found < key) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    /// Stands on the last item whose key is `key` or less, or else on the first item.
    pub(crate) fn seek_floor(blocks: &'v dyn Blocks, root: TreeRoot, key: Key) -> Result<Self> {
        // No thread changes a log that is pending. A log that is being written has a lock of its
        // own, and readers do not find it by its id.
        let is_changing = blocks.is_changing() && root.id != TreeId::TREE_LOG;
        let mut cursor = Self { blocks, id: root.id, is_changing, path: Vec::with_capacity(4) };
        if is_changing {
            cursor.seek_changing(key)?;
        } else {
            cursor.seek_still(root, key)?;
        }
        Ok(cursor)
    }

    /// As [`seek`](Self::seek), in a tree as the last commit left it. The caller has a handle, and
    /// that commit is on the devices, so none of its blocks is free.
    pub(crate) fn seek_committed(blocks: &'v dyn Blocks, root: TreeRoot, key: Key) -> Result<Self> {
        let mut cursor = Self::seek_committed_floor(blocks, root, key)?;
        if cursor.item().is_some_and(|(found, _)| found < key) {
            cursor.advance()?;
        }
        Ok(cursor)
    }

    /// As [`seek_floor`](Self::seek_floor), in a tree as the last commit left it.
    pub(crate) fn seek_committed_floor(
        blocks: &'v dyn Blocks,
        root: TreeRoot,
        key: Key,
    ) -> Result<Self> {
        let path = Vec::with_capacity(4);
        let mut cursor = Self { blocks, id: root.id, is_changing: false, path };
        cursor.seek_still(root, key)?;
        Ok(cursor)
    }

    fn seek_still(&mut self, root: TreeRoot, key: Key) -> Result<()> {
        let expected = root.expected();
        let lost = LostSubtree { block: expected, from: Key::MIN, to: None };
        let block = match self.blocks.block(&expected) {
            Ok(block) => Some(block),
            Err(error) => self.blocks.instead(&lost, error)?,
        };
        if let Some(block) = block.filter(|block| !block.is_empty()) {
            let mut descent = Descent::to(key);
            self.push(block, None, |block| descent.floor(block).unwrap_or(0))?;
        }
        Ok(())
    }

    /// Searches a tree that other threads change meanwhile.
    ///
    /// A search that began before a commit may follow a pointer to an address that the commit freed
    /// and that holds another block now. That block does not match the pointer. Then the search
    /// begins again.
    fn seek_changing(&mut self, key: Key) -> Result<()> {
        loop {
            let epoch = self.blocks.epoch();
            match self.try_seek_changing(key) {
                Err(Error::Corrupt(_)) if self.blocks.epoch() != epoch => {}
                other => return other,
            }
        }
    }

    /// Goes down with lock coupling, and keeps the leaf as it was when the search reached it.
    fn try_seek_changing(&mut self, key: Key) -> Result<()> {
        self.path.clear();
        let mut held = self.blocks.hold_root(self.id)?;
        let (mut descent, mut upper) = (Descent::to(key), None);
        while !held.is_leaf() {
            let slot = descent.floor(&held).unwrap_or(0);
            if slot + 1 < held.len() {
                upper = Some(held.key(slot + 1));
            }
            let child = self.blocks.hold(&held.child_expected(slot, self.id))?;
            held = child;
        }
        if !held.is_empty() {
            let slot = descent.floor(&held).unwrap_or(0);
            self.path.push(CursorStep { block: held.share(), slot, upper });
        }
        Ok(())
    }

    /// The item that the cursor stands on; `None` behind the last one.
    #[must_use]
    pub fn item(&self) -> Option<(Key, &[u8])> {
        let CursorStep { block, slot, .. } = self.path.last()?;
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

    /// Whether `key` belongs to the leaf that the cursor stands in.
    pub(crate) fn is_in_leaf(&self, key: Key) -> bool {
        self.path.last().is_some_and(|CursorStep { block, upper, .. }| {
            block.key(0) <= key && upper.is_none_or(|upper| key < upper)
        })
    }

    /// The address of the leaf that the cursor stands in.
    pub(crate) fn leaf(&self) -> Option<Logical> {
        Some(Logical(self.path.last()?.block.header().bytenr.get()))
    }

    /// The tree that the leaf was made for that the cursor stands in.
    pub(crate) fn leaf_owner(&self) -> Option<TreeId> {
        Some(self.path.last()?.block.header().owner())
    }

    /// The key before the item that the cursor stands on, if it is in the same leaf.
    pub(crate) fn key_before(&self) -> Option<Key> {
        let CursorStep { block, slot, .. } = self.path.last()?;
        Some(block.key(slot.checked_sub(1)?))
    }

    /// Takes the items from that at the cursor to `last`, as far as they are in the cursor's leaf.
    /// The cursor then stands behind them.
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
        if self.is_changing {
            return self.advance_changing();
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

    /// At the end of a leaf, the cursor searches the next leaf by its first key. If that leaf is
    /// gone meanwhile, the search ends on an item before it, and the loop continues from there.
    fn advance_changing(&mut self) -> Result<()> {
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
            self.seek_changing(upper)?;
            if self.item().is_some_and(|(key, _)| key > left) {
                break;
            }
        }
        Ok(())
    }

    /// Adds `block` to the path, and then the blocks below it down to the leaf.
    fn push(
        &mut self,
        block: Arc<TreeBlock>,
        upper: Option<Key>,
        mut choose: impl FnMut(&TreeBlock) -> usize,
    ) -> Result<()> {
        let slot = choose(&block);
        let is_leaf = block.is_leaf();
        self.path.push(CursorStep { block, slot, upper });
        if is_leaf { Ok(()) } else { self.descend(choose) }
    }

    /// Goes down from the last block of the path, at its slot, to a leaf. Behind a subtree that
    /// cannot be read it goes on at the next one, if the volume is read around damage.
    fn descend(&mut self, mut choose: impl FnMut(&TreeBlock) -> usize) -> Result<()> {
        let mut has_passed = false;
        while let Some(CursorStep { block, slot, upper }) = self.path.last_mut() {
            if *slot >= block.len() {
                self.path.pop();
                if let Some(above) = self.path.last_mut() {
                    above.slot += 1;
                }
                continue;
            }
            if block.is_leaf() {
                break;
            }
            let upper = if *slot + 1 < block.len() { Some(block.key(*slot + 1)) } else { *upper };
            let child = match child_below(self.blocks, block, *slot, self.id, upper) {
                Ok(child) => Some(child),
                Err(error) => {
                    let expected = block.child_expected(*slot, self.id);
                    let lost = LostSubtree { block: expected, from: block.key(*slot), to: upper };
                    self.blocks.instead(&lost, error)?
                }
            };
            let Some(child) = child else {
                has_passed = true;
                *slot += 1;
                continue;
            };
            let slot = if has_passed { 0 } else { choose(&child) };
            self.path.push(CursorStep { block: child, slot, upper });
        }
        Ok(())
    }
}

/// The child at `slot` of `node`, whose keys must be below `upper`.
fn child_below(
    blocks: &dyn Blocks,
    node: &TreeBlock,
    slot: usize,
    tree: TreeId,
    upper: Option<Key>,
) -> Result<Arc<TreeBlock>> {
    let child = blocks.child(node, slot, tree)?;
    let last = child.key(child.len() - 1);
    match upper {
        Some(upper) if last >= upper => Err(Error::corrupt_at(
            if child.is_leaf() { Structure::Leaf } else { Structure::Node },
            child.header().bytenr.get(),
            format!("its last key {last} is not below {upper}, the next one in its parent"),
        )),
        _ => Ok(child),
    }
}

/// Calls `found` with the data of the item with exactly this key; `None` when there is none.
pub(crate) fn with_item<T>(
    blocks: &dyn Blocks,
    root: TreeRoot,
    key: Key,
    found: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<Option<T>> {
    let cursor = Cursor::seek_floor(blocks, root, key)?;
    match cursor.item() {
        Some((at, data)) if at == key => found(data).map(Some),
        _ => Ok(None),
    }
}
