//! The way to a leaf, and the latches that are held on it.

use offshoot_btrfs_format::edit::{leaf_free, node_capacity, pointer_mut};
use offshoot_btrfs_format::{Generation, Key, Logical};
use offshoot_vfs::Result;

use super::TreeWriter;
use crate::block::{ReadLatch, TreeBlock, WriteLatch};
use crate::sync::RwLockWriteGuard;
use crate::tree::descent::Descent;
use crate::tree::{TreeRoot, UnlockTime};

/// A block on the way that a change below may still reach.
pub(super) struct LatchedStep {
    pub(super) node: WriteLatch,
    /// The slot through which the way leads.
    pub(super) slot: usize,
    /// The key that all keys in the node stay below.
    pub(super) upper: Option<Key>,
}

/// The latches that are held on the way to a leaf.
#[derive(Default)]
pub(super) struct LatchedPath<'t> {
    /// The root lock, while the root block may still be replaced.
    pub(super) top: Option<RwLockWriteGuard<'t, TreeRoot>>,
    /// Downwards, the blocks whose latches are still held exclusively.
    pub(super) above: Vec<LatchedStep>,
    /// The block above the leaf, on a way down with shared latches.
    pub(super) parent: Option<ReadLatch>,
    /// The keys of the current block stay below this key; `None` at the right edge.
    pub(super) upper: Option<Key>,
}

impl LatchedPath<'_> {
    /// Releases everything above the current block.
    pub(super) fn release(&mut self) {
        self.top = None;
        self.above.clear();
        self.parent = None;
    }

    /// Notes that the first key of the current block became `key`: changes the pointers to it, as
    /// far up as they have the old key.
    pub(super) fn set_first_key(&mut self, key: Key) {
        for step in self.above.iter_mut().rev() {
            pointer_mut(bytes(&mut step.node), step.slot).key = key.into();
            if step.slot != 0 {
                break;
            }
        }
    }
}

/// How many pointers two nodes may have together to be merged. A quarter stays free for insertions
/// that follow soon.
pub(super) fn merged_capacity(capacity: usize) -> usize {
    capacity * 3 / 4
}

/// The bytes of a latched block, mutable.
pub(super) fn bytes(latch: &mut WriteLatch) -> &mut [u8] {
    latch.block_mut().bytes_mut()
}

/// The address of a latched block.
pub(super) fn address(block: &TreeBlock) -> Logical {
    Logical(block.header().bytenr.get())
}

/// A leaf, and where in it a key is or belongs.
pub(super) struct FoundSlot<'t> {
    pub(super) path: LatchedPath<'t>,
    pub(super) leaf: WriteLatch,
    pub(super) slot: usize,
    /// Whether the item at `slot` has the key.
    pub(super) exists: bool,
}

impl<'a> TreeWriter<'a> {
    /// Takes the root lock and the latch of the root block. Copies the block if the transaction
    /// does not own it.
    pub(super) fn lock_root(&self) -> Result<(RwLockWriteGuard<'a, TreeRoot>, WriteLatch)> {
        let mut top = self.take_root();
        if self.owner.owns(top.generation, top.logical) {
            let block = self.owner.latch(top.logical)?;
            return Ok((top, block));
        }
        let old = self.owner.blocks().block(&top.expected())?;
        let block = self.owner.copy_block(&old)?;
        top.logical = address(&block);
        top.generation = self.owner.generation();
        self.owner.root_changed(&top);
        Ok((top, block))
    }

    /// Finds the leaf where `key` is or belongs, for any change of one leaf.
    pub(super) fn locate_to_change(&self, key: Key) -> Result<(LatchedPath<'a>, WriteLatch)> {
        match self.locate_with_parent(key)? {
            Some(found) => Ok(found),
            None => self.locate_exclusive(key),
        }
    }

    /// As [`locate_to_change`](Self::locate_to_change), with exclusive latches all the way. Splits
    /// full nodes on it and merges sparse ones.
    fn locate_exclusive(&self, key: Key) -> Result<(LatchedPath<'a>, WriteLatch)> {
        let capacity = node_capacity(self.node_size());
        let (top, mut block) = self.lock_root()?;
        let mut path = LatchedPath { top: Some(top), ..LatchedPath::default() };
        let mut descent = Descent::to(key);
        while !block.is_leaf() {
            if path.above.is_empty() && block.len() == 1 {
                block = self.replace_root(&mut path, block)?;
                continue;
            }
            // After a merge or a split, the block may begin with another key, so the search
            // compares anew.
            if block.len() < capacity / 4 {
                block = self.merge_node(&mut path, block)?;
                descent = Descent::to(key);
            } else if block.len() + 2 > capacity {
                block = self.split_node(&mut path, block, key)?;
                descent = Descent::to(key);
            }
            let slot = descent.floor(&block).unwrap_or(0);
            // A change below may add one pointer here, or remove one: when two children are merged
            // and the way leads through the left one. Even then the block has pointers left, and
            // the first one is the same.
            if slot >= 2 && block.len() >= 4 {
                path.release();
            }
            block = self.go_down(&mut path, block, slot)?;
        }
        Ok((path, block))
    }

    /// Looks at the child at `slot` of `node` without copying it for the transaction, because the
    /// look may decide against a change. The child may change until it is latched.
    pub(super) fn peek<T>(
        &self,
        node: &TreeBlock,
        slot: usize,
        look: impl FnOnce(&TreeBlock) -> T,
    ) -> Result<T> {
        let child = self.owner.blocks().block(&node.child_expected(slot, self.id()))?;
        Ok(look(&child))
    }

    /// Latches the child at `slot` of `node`, and adds `node` to the path. Copies the child if the
    /// transaction does not own it.
    pub(super) fn go_down(
        &self,
        path: &mut LatchedPath<'a>,
        mut node: WriteLatch,
        slot: usize,
    ) -> Result<WriteLatch> {
        let child = self.lock_child(&mut node, slot)?;
        let upper = path.upper;
        if slot + 1 < node.len() {
            path.upper = Some(node.key(slot + 1));
        }
        path.above.push(LatchedStep { node, slot, upper });
        Ok(child)
    }

    /// Latches the child at `slot` of `node`. Copies the child if the transaction does not own it.
    pub(super) fn lock_child(&self, node: &mut WriteLatch, slot: usize) -> Result<WriteLatch> {
        let pointer = node.pointers()[slot];
        let generation = Generation(pointer.generation.get());
        if self.owner.owns(generation, pointer.logical()) {
            return self.owner.latch(pointer.logical());
        }
        let old = self.owner.blocks().child(node, slot, self.id())?;
        let block = self.owner.copy_block(&old)?;
        let pointer = pointer_mut(bytes(node), slot);
        pointer.blockptr = address(&block).0.into();
        pointer.generation = self.owner.generation().0.into();
        Ok(block)
    }

    /// Finds the slot of `key` in the leaf, and releases the latches above it as early as possible.
    pub(super) fn find_in_leaf(
        &self,
        mut path: LatchedPath<'a>,
        leaf: WriteLatch,
        key: Key,
        need: usize,
    ) -> FoundSlot<'a> {
        let has_room = leaf_free(leaf.bytes()) >= need;
        if leaf.is_empty() {
            return FoundSlot { path, leaf, slot: 0, exists: false };
        }
        let first = leaf.key(0);
        let may_unlock = has_room && key >= first;
        if may_unlock && self.owner.latching().unlock == UnlockTime::BeforeSearch {
            path.release();
            self.owner.stats().unlocked_early();
        }
        let (slot, exists) = match key.cmp(&first) {
            std::cmp::Ordering::Less => (0, false),
            std::cmp::Ordering::Equal => (0, true),
            std::cmp::Ordering::Greater => leaf.search_from(1, key),
        };
        if may_unlock && self.owner.latching().unlock == UnlockTime::AfterSearch {
            path.release();
        }
        FoundSlot { path, leaf, slot, exists }
    }
}
