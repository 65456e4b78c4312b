//! Making room: pushing items to siblings, and splitting.
//!
//! What is to be placed is a *sequence*: the items of the leaf with the new item, or the grown one,
//! among them. It is cut so that every part fits into a leaf:
//!
//! 1. items behind the new one go to the right sibling, or items before it to the left one, when
//!    that is enough: no block is added;
//! 2. otherwise two leaves share the sequence, cut in the middle of its bytes, or right before
//!    the new item when it is appended at the right edge of the tree;
//! 3. three leaves, when the item is so large that no cut leaves room for it on either side.
//!
//! The parent is held and has room for two pointers, which the way down saw to.

use offshoot_btrfs_format::Key;
use offshoot_btrfs_format::block::KeyPtr;
use offshoot_btrfs_format::edit::{
    copy_items, copy_pointers, insert_pointers, items_bytes, leaf_capacity, leaf_free, pointer_mut,
    remove_items, remove_pointers,
};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::path::{Found, Path, Step, address, bytes};
use crate::block::TreeBlock;
use crate::transaction::WriteLatch;

/// Whether an item is added behind the last one as one of a series: at the right edge of the tree, or
/// after an item that is about the same thing. More are likely to follow it there.
fn is_appended(found: &Found<'_>, key: Key) -> bool {
    let last = found.leaf.key(found.leaf.len() - 1);
    let follows = (last.objectid, last.item_type) == (key.objectid, key.item_type);
    found.slot == found.leaf.len() && (found.path.upper.is_none() || follows)
}

/// How much goes to a sibling with `free` bytes, at the most: half of them, so that neither leaf is full
/// again at once, or what is missing. `None` when the sibling is so full that it is not worth it.
fn share(free: usize, missing: usize, node_size: usize) -> Option<usize> {
    (free >= missing && free >= node_size / 8).then_some(missing.max(free / 2))
}

impl<'a> TreeWriter<'a> {
    /// Makes the leaf have `need` bytes free where `key` is or belongs.
    pub(super) fn make_room(&self, found: &mut Found<'a>, key: Key, need: usize) -> Result<()> {
        if found.path.above.is_empty() {
            self.add_level(&mut found.path, &found.leaf)?;
        }
        let appended = is_appended(found, key);
        if !appended && (self.push_right(found, need)? || self.push_left(found, need)?) {
            return Ok(());
        }
        self.split_leaf(found, key, need, appended)
    }

    /// Puts a new root above `block`, the root so far.
    fn add_level(&self, path: &mut Path<'a>, block: &WriteLatch) -> Result<()> {
        let mut root = self.handle.new_block(self.id(), block.header().level + 1)?;
        insert_pointers(bytes(&mut root), 0, &[self.pointer_to(block, block.key(0))]);
        let top = path.top.as_mut().expect("the root lock is held where the root may change");
        top.logical = address(&root);
        top.level = root.header().level;
        self.handle.root_changed(top);
        path.above.push(Step { node: root, slot: 0, upper: None });
        Ok(())
    }

    fn pointer_to(&self, block: &WriteLatch, key: Key) -> KeyPtr {
        KeyPtr {
            key: key.into(),
            blockptr: address(block).0.into(),
            generation: self.handle.generation().0.into(),
        }
    }

    /// Moves items that lie behind the place to the right sibling.
    fn push_right(&self, found: &mut Found<'a>, need: usize) -> Result<bool> {
        let Found { path, leaf, slot, exists } = found;
        let Step { node: parent, slot: at, .. } =
            path.above.last_mut().expect("a leaf that is full has a parent");
        let (count, first_movable) = (leaf.len(), *slot + usize::from(*exists));
        if *at + 1 >= parent.len() || first_movable >= count || first_movable == 0 {
            return Ok(false);
        }
        let missing = need - leaf_free(leaf.bytes());
        let choose = |right: &TreeBlock| {
            let from = |most| {
                (first_movable..count).find(|&i| items_bytes(leaf.bytes(), i, count) <= most)
            };
            share(leaf_free(right.bytes()), missing, leaf.bytes().len())
                .and_then(from)
                .filter(|&from| items_bytes(leaf.bytes(), from, count) >= missing)
        };
        if self.peek(parent, *at + 1, choose)?.is_none() {
            return Ok(false);
        }
        let mut right = self.lock_child(parent, *at + 1)?;
        let Some(from) = choose(&right) else { return Ok(false) };
        copy_items(bytes(&mut right), 0, leaf.bytes(), from, count);
        remove_items(bytes(leaf), from, count);
        pointer_mut(bytes(parent), *at + 1).key = right.key(0).into();
        path.upper = Some(right.key(0));
        self.handle.stats().pushed();
        Ok(true)
    }

    /// Moves items that lie before the place to the left sibling. One stays, so that the
    /// place is not the first of the leaf.
    fn push_left(&self, found: &mut Found<'a>, need: usize) -> Result<bool> {
        let Found { path, leaf, slot, .. } = found;
        let Step { node: parent, slot: at, .. } =
            path.above.last_mut().expect("a leaf that is full has a parent");
        let Some(movable) = slot.checked_sub(1).filter(|&movable| movable > 0 && *at > 0) else {
            return Ok(false);
        };
        let missing = need - leaf_free(leaf.bytes());
        let choose = |left: &TreeBlock| {
            let to = |most| (1..=movable).rev().find(|&i| items_bytes(leaf.bytes(), 0, i) <= most);
            share(leaf_free(left.bytes()), missing, leaf.bytes().len())
                .and_then(to)
                .filter(|&to| items_bytes(leaf.bytes(), 0, to) >= missing)
        };
        if self.peek(parent, *at - 1, choose)?.is_none() {
            return Ok(false);
        }
        let mut left = self.lock_child(parent, *at - 1)?;
        let Some(to) = choose(&left) else { return Ok(false) };
        let end = left.len();
        copy_items(bytes(&mut left), end, leaf.bytes(), 0, to);
        remove_items(bytes(leaf), 0, to);
        pointer_mut(bytes(parent), *at).key = leaf.key(0).into();
        *slot -= to;
        self.handle.stats().pushed();
        Ok(true)
    }

    /// Splits the leaf so that the part with the place has room.
    fn split_leaf(
        &self,
        found: &mut Found<'a>,
        key: Key,
        need: usize,
        appended: bool,
    ) -> Result<()> {
        let count = found.leaf.len();
        let (slot, exists) = (found.slot, found.exists);
        let capacity = leaf_capacity(self.node_size());
        let leaf = found.leaf.bytes();
        let all = items_bytes(leaf, 0, count);
        // A cut at `i`: items from `i` on go right. The place goes with the items it stands before,
        // except for a cut right there, where it can go either way: left when it exists not.
        let left_fits = |i: usize| items_bytes(leaf, 0, i) + need <= capacity;
        let right_fits = |i: usize| items_bytes(leaf, i, count) + need <= capacity;
        let cut = if appended {
            Some((count, true))
        } else {
            // (cut, whether the place is right of it), the most even first.
            let rights = (1..=slot).filter(|&i| right_fits(i)).map(|i| (i, true));
            let lefts =
                (slot + usize::from(exists)..count).filter(|&i| left_fits(i)).map(|i| (i, false));
            rights.chain(lefts).min_by_key(|&(i, right)| {
                let left = items_bytes(leaf, 0, i) + if right { 0 } else { need };
                (2 * left).abs_diff(all + need)
            })
        };
        let upper = found.path.upper;
        match cut {
            Some((cut, false)) => drop(self.split_off(found, cut, None)?),
            Some((cut, true)) => {
                let first = (cut == slot && !exists).then_some(key);
                let right = self.split_off(found, cut, first)?;
                found.enter_right(right, cut, upper);
            }
            None => {
                // The place alone between what is before and what is behind it.
                let behind = slot + usize::from(exists);
                if behind < count {
                    drop(self.split_off(found, behind, None)?);
                }
                let upper = found.path.upper;
                if slot > 0 {
                    let middle = self.split_off(found, slot, Some(key))?;
                    found.enter_right(middle, slot, upper);
                }
            }
        }
        Ok(())
    }

    /// Moves the items from `cut` on to a new leaf behind this one. `first` is the key that will be
    /// its first, when that is not the key of an item it has already.
    fn split_off(
        &self,
        found: &mut Found<'a>,
        cut: usize,
        first: Option<Key>,
    ) -> Result<WriteLatch> {
        let mut right = self.handle.new_block(self.id(), 0)?;
        let count = found.leaf.len();
        copy_items(bytes(&mut right), 0, found.leaf.bytes(), cut, count);
        remove_items(bytes(&mut found.leaf), cut, count);
        let first = first.unwrap_or_else(|| right.key(0));
        let pointer = self.pointer_to(&right, first);
        let parent = found.path.above.last_mut().expect("it was made before a split");
        insert_pointers(bytes(&mut parent.node), parent.slot + 1, &[pointer]);
        found.path.upper = Some(first);
        self.handle.stats().split();
        Ok(right)
    }

    /// Splits a node that has no room for two more pointers, and goes on with the half that
    /// `key` belongs to.
    pub(super) fn split_node(
        &self,
        path: &mut Path<'a>,
        mut node: WriteLatch,
        key: Key,
    ) -> Result<WriteLatch> {
        if path.above.is_empty() {
            self.add_level(path, &node)?;
        }
        let count = node.len();
        let at_right_edge = path.upper.is_none() && key > node.key(count - 1);
        let cut = if at_right_edge { count - 1 } else { count / 2 };
        let mut right = self.handle.new_block(self.id(), node.header().level)?;
        copy_pointers(bytes(&mut right), 0, node.bytes(), cut, count);
        remove_pointers(bytes(&mut node), cut, count);
        let middle = right.key(0);
        let pointer = self.pointer_to(&right, middle);
        let parent = path.above.last_mut().expect("the root has one now, the others had");
        insert_pointers(bytes(&mut parent.node), parent.slot + 1, &[pointer]);
        self.handle.stats().split();
        if key < middle {
            path.upper = Some(middle);
            return Ok(node);
        }
        parent.slot += 1;
        Ok(right)
    }
}

impl Found<'_> {
    /// Goes on in the leaf right of this one, which was cut off at `cut`.
    fn enter_right(&mut self, right: WriteLatch, cut: usize, upper: Option<Key>) {
        self.leaf = right;
        self.slot -= cut;
        self.path.upper = upper;
        self.path.above.last_mut().expect("a leaf that was split has a parent").slot += 1;
    }
}
