//! Removing items, and merging or freeing blocks that become sparse or empty.
//!
//! A run of adjacent items is removed with one shift. A leaf that is less than a third full after
//! that is merged with a sibling, if both fit into one block. A node that is less than a quarter
//! full is merged when a way leads through it. An empty block is freed and its pointer removed.
//! When the root has a single pointer, its child becomes the root.

use offshoot_btrfs_format::Key;
use offshoot_btrfs_format::block::HEADER_SIZE;
use offshoot_btrfs_format::edit::{
    copy_items, copy_pointers, items_bytes, leaf_free, node_capacity, remove_items, remove_pointers,
};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::path::{LatchedPath, LatchedStep, address, bytes, merged_capacity};
use crate::block::{TreeBlock, WriteLatch};

/// The slots of a leaf with keys from `from` to `to`, both included.
fn slots(leaf: &TreeBlock, from: Key, to: Key) -> (usize, usize) {
    let end = to.successor().map_or(leaf.len(), |after| leaf.first_at_least(after));
    (leaf.first_at_least(from), end)
}

/// Whether a leaf whose items take `used` bytes is less than a third full.
pub(super) fn is_sparse(leaf: &TreeBlock, used: usize) -> bool {
    used < (leaf.bytes().len() - HEADER_SIZE) / 3
}

/// The bytes of the items of a leaf with their headers.
fn used(leaf: &TreeBlock) -> usize {
    items_bytes(leaf.bytes(), 0, leaf.len())
}

/// Whether a leaf keeps its first key and its place in the tree when the items from `from` to `to`
/// are removed.
fn stays_as_it_is(leaf: &TreeBlock, from: Key, to: Key) -> bool {
    let (begin, end) = slots(leaf, from, to);
    let left = used(leaf) - items_bytes(leaf.bytes(), begin, end);
    begin == end || begin > 0 && !is_sparse(leaf, left)
}

impl<'a> TreeWriter<'a> {
    /// Removes the item with this key. Returns whether there was one.
    pub(crate) fn remove(&self, key: Key) -> Result<bool> {
        Ok(self.remove_range(key, key)? == 1)
    }

    /// Removes all items from `from` to `to`, both included. Returns how many there were.
    pub(crate) fn remove_range(&self, mut from: Key, to: Key) -> Result<u64> {
        let mut removed = 0;
        loop {
            let (mut path, mut leaf) = match self
                .locate_shared(from)?
                .filter(|(_, leaf)| stays_as_it_is(leaf, from, to))
            {
                Some((mut path, leaf)) => {
                    path.release();
                    (path, leaf)
                }
                None => self.locate_to_change(from)?,
            };
            let (begin, end) = slots(&leaf, from, to);
            // The next leaf may have more items of the range, unless its first key is above `to`.
            let next = path.upper.filter(|&upper| end == leaf.len() && upper <= to);
            if begin < end {
                removed += (end - begin) as u64;
                remove_items(bytes(&mut leaf), begin, end);
                if begin == 0 && !leaf.is_empty() {
                    path.set_first_key(leaf.key(0));
                }
                self.after_removal(&mut path, leaf)?;
            }
            match next {
                Some(upper) => from = upper,
                None => return Ok(removed),
            }
        }
    }

    /// Makes the only child of the root the new root.
    pub(super) fn replace_root(
        &self,
        path: &mut LatchedPath<'a>,
        mut root: WriteLatch,
    ) -> Result<WriteLatch> {
        let child = self.lock_child(&mut root, 0)?;
        let top = path.top.as_mut().expect("a root with one pointer is not safe");
        top.logical = address(&child);
        top.level = child.header().level;
        self.owner.root_changed(top);
        self.owner.free_block(root)?;
        Ok(child)
    }

    /// Merges a node with few pointers and a sibling, if both fit into one block.
    pub(super) fn merge_node(
        &self,
        path: &mut LatchedPath<'a>,
        mut node: WriteLatch,
    ) -> Result<WriteLatch> {
        let Some(LatchedStep { node: parent, slot: at, upper }) = path.above.last_mut() else {
            return Ok(node);
        };
        let capacity = merged_capacity(node_capacity(self.node_size()));
        let fits = |other: &TreeBlock| node.len() + other.len() <= capacity;
        if *at + 1 < parent.len() && self.peek(parent, *at + 1, fits)? {
            let right = self.lock_child(parent, *at + 1)?;
            if node.len() + right.len() <= capacity {
                let end = node.len();
                copy_pointers(bytes(&mut node), end, right.bytes(), 0, right.len());
                remove_pointers(bytes(parent), *at + 1, *at + 2);
                path.upper =
                    if *at + 1 < parent.len() { Some(parent.key(*at + 1)) } else { *upper };
                self.owner.stats().merged();
                self.owner.free_block(right)?;
                return Ok(node);
            }
        }
        let fits = |other: &TreeBlock| node.len() + other.len() <= capacity;
        if *at > 0 && self.peek(parent, *at - 1, fits)? {
            let mut left = self.lock_child(parent, *at - 1)?;
            if node.len() + left.len() <= capacity {
                let end = left.len();
                copy_pointers(bytes(&mut left), end, node.bytes(), 0, node.len());
                remove_pointers(bytes(parent), *at, *at + 1);
                *at -= 1;
                self.owner.stats().merged();
                self.owner.free_block(node)?;
                return Ok(left);
            }
        }
        Ok(node)
    }

    /// Frees the leaf if it is empty, or merges it with a sibling if it is sparse. The caller has
    /// updated its first key.
    pub(super) fn after_removal(&self, path: &mut LatchedPath<'a>, leaf: WriteLatch) -> Result<()> {
        if leaf.is_empty() {
            if path.above.is_empty() {
                return Ok(());
            }
            self.owner.free_block(leaf)?;
            return self.remove_pointer(path);
        }
        if is_sparse(&leaf, used(&leaf)) {
            self.merge_leaf(path, leaf)?;
        }
        Ok(())
    }

    /// Merges a leaf with few items and a sibling, if both fit into one block.
    fn merge_leaf(&self, path: &mut LatchedPath<'a>, mut leaf: WriteLatch) -> Result<()> {
        let Some(LatchedStep { node: parent, slot: at, .. }) = path.above.last_mut() else {
            return Ok(());
        };
        let has_room = |left: &TreeBlock| used(&leaf) <= leaf_free(left.bytes());
        if *at > 0 && self.peek(parent, *at - 1, has_room)? {
            let mut left = self.lock_child(parent, *at - 1)?;
            if has_room(&left) {
                let end = left.len();
                copy_items(bytes(&mut left), end, leaf.bytes(), 0, leaf.len());
                self.owner.stats().merged();
                self.owner.free_block(leaf)?;
                return self.remove_pointer(path);
            }
        }
        let room = leaf_free(leaf.bytes());
        let fits = |right: &TreeBlock| used(right) <= room;
        if *at + 1 < parent.len() && self.peek(parent, *at + 1, fits)? {
            let right = self.lock_child(parent, *at + 1)?;
            if fits(&right) {
                let end = leaf.len();
                copy_items(bytes(&mut leaf), end, right.bytes(), 0, right.len());
                *at += 1;
                self.owner.stats().merged();
                self.owner.free_block(right)?;
                return self.remove_pointer(path);
            }
        }
        Ok(())
    }

    /// Removes the last pointer on the way, and every block that is empty after that.
    fn remove_pointer(&self, path: &mut LatchedPath<'a>) -> Result<()> {
        while let Some(LatchedStep { mut node, slot, .. }) = path.above.pop() {
            remove_pointers(bytes(&mut node), slot, slot + 1);
            if !node.is_empty() {
                if slot == 0 {
                    path.set_first_key(node.key(0));
                }
                return Ok(());
            }
            if path.above.is_empty() {
                let leaf = self.owner.new_block(0)?;
                let top = path.top.as_mut().expect("a root that runs empty was not safe");
                top.logical = address(&leaf);
                top.level = 0;
                self.owner.root_changed(top);
            }
            self.owner.free_block(node)?;
        }
        Ok(())
    }
}
