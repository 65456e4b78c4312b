//! Making room: sharing with siblings, and splitting.
//!
//! The items of a leaf together with the new ones are a *sequence*, which does not fit one leaf. It
//! is cut so that every part fits:
//!
//! 1. A sibling with enough free space takes some: the sequence and all items of the sibling are
//!    cut in two, and no block is added. The writer tries the left sibling first and fills it. So
//!    items that arrive in the order of their keys, between others, leave full leaves behind, as
//!    the data of files does when the inodes are in the tree already. The right sibling gets about
//!    half.
//! 2. Otherwise the sequence goes into as few leaves as can hold it, about equally full. When items
//!    are appended as a series, all leaves are filled but the last.
//! 3. A single new item makes at most three leaves, when it is so large that it needs a leaf for
//!    itself.
//! 4. A *dense* batch puts many items into one leaf. It first fills the left sibling, and then each
//!    leaf but the last. That last leaf is the left sibling of the leaf where the batch continues,
//!    or the next batch begins. So the data of small files and their inodes fill leaves, whichever
//!    arrive second.
//!
//! The writer holds the parent, in which the way down made room for at least two pointers. A batch
//! that would need more leaves than the parent has room for is cut short, and the rest goes down
//! once more.

use offshoot_btrfs_format::Key;
use offshoot_btrfs_format::block::NodePointer;
use offshoot_btrfs_format::edit::{
    copy_pointers, insert_pointers, items_bytes, leaf_capacity, leaf_free, node_capacity,
    pointer_mut, remove_pointers,
};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::batch::AppliedEdits;
use super::edits::ItemEdits;
use super::merge::{ItemSequence, LeafCopy, MergedLeaf, RunSources};
use super::path::{LatchedPath, LatchedStep, address, bytes};
use crate::block::{TreeBlock, WriteLatch};

/// The most leaves that one way down adds. It bounds how long other threads wait for the latches
/// above them.
const MOST_LEAVES: usize = 32;

/// A batch that puts at least this many items into one leaf is dense.
const DENSE_EDITS: usize = 8;

const HAS_PARENT: &str = "a leaf that is full has a parent, or got one";

/// Whether the edits continue a series behind the last item of a leaf: at the right edge of the
/// tree, or after an item of the same object and type. More such items are likely to follow.
fn is_appended(path: &LatchedPath<'_>, sequence: &ItemSequence, sources: RunSources<'_>) -> bool {
    let Some(key) = sequence.last_edit(sources) else { return false };
    let Some(before) = sources.leaf.len().checked_sub(1) else { return true };
    let before = sources.leaf.key(before);
    let follows = (before.objectid, before.item_type) == (key.objectid, key.item_type);
    key > before && (path.upper.is_none() || follows)
}

impl<'a> TreeWriter<'a> {
    /// The most bytes of new items that may go below the last node of the path in one way down.
    pub(super) fn most_at_once(&self, path: &LatchedPath<'a>) -> usize {
        let capacity = node_capacity(self.node_size());
        let room = path.above.last().map_or(capacity, |step| capacity - step.node.len());
        room.min(MOST_LEAVES) / 2 * leaf_capacity(self.node_size())
    }

    /// Writes a leaf with the edits that were merged with it, which is more than a leaf holds, into
    /// several leaves. Returns what the merged edits did.
    pub(super) fn spread(
        &self,
        mut path: LatchedPath<'a>,
        mut leaf: WriteLatch,
        edits: ItemEdits<'_>,
        mut merged: MergedLeaf,
    ) -> Result<AppliedEdits> {
        let old = LeafCopy::of(&leaf);
        let sources = RunSources { leaf: &old, sibling: None, edits };
        let first = merged.sequence.first_key(sources).expect("more than fits a leaf is something");
        if path.above.is_empty() {
            self.add_level(&mut path, &leaf, first)?;
        }
        let capacity = leaf_capacity(self.node_size());
        let appended = is_appended(&path, &merged.sequence, sources);
        let is_dense = merged.edits >= DENSE_EDITS;
        let mut left = None;
        if is_dense && !appended {
            left = self.lock_left(&mut path)?;
        } else if !appended
            && self.share_with_sibling(&mut path, &mut leaf, sources, &merged.sequence)?
        {
            return Ok(merged.applied);
        }
        let old_left = left.as_ref().map(|left| LeafCopy::of(left));
        let sources = RunSources { sibling: old_left.as_deref(), ..sources };
        let parent = &path.above.last().expect(HAS_PARENT).node;
        let room = node_capacity(self.node_size()) - parent.len();
        let parts = loop {
            let sequence = match sources.sibling {
                Some(left) => merged.sequence.with_sibling(left, true),
                None => std::mem::take(&mut merged.sequence),
            };
            let parts = sequence.cut(sources, capacity, appended || is_dense);
            if parts.len() <= usize::from(left.is_some()) + 1 + room {
                break parts;
            }
            assert!(merged.edits > 1, "one item adds two leaves at most, for which there is room");
            merged = MergedLeaf::new(&old, edits.part(0..merged.edits / 2), usize::MAX);
            if merged.sequence.bytes <= capacity {
                return self.settle(path, leaf, edits.part(0..merged.edits), &merged);
            }
        };
        let parts = match &mut left {
            Some(left) => {
                parts[0].replace(left, sources);
                &parts[1..]
            }
            None => &parts[..],
        };
        self.write_parts(&mut path, &mut leaf, sources, parts)?;
        Ok(merged.applied)
    }

    /// Latches the left sibling below the same parent, if at least a sixteenth of it is free.
    fn lock_left(&self, path: &mut LatchedPath<'a>) -> Result<Option<WriteLatch>> {
        let LatchedStep { node: parent, slot, .. } = path.above.last_mut().expect(HAS_PARENT);
        let Some(at) = slot.checked_sub(1) else { return Ok(None) };
        let capacity = leaf_capacity(self.node_size());
        let has_room = |left: &TreeBlock| leaf_free(left.bytes()) >= capacity / 16;
        if !self.peek(parent, at, has_room)? {
            return Ok(None);
        }
        let left = self.lock_child(parent, at)?;
        Ok(has_room(&left).then_some(left))
    }

    /// Writes the first of `parts` into the leaf, and the others into new leaves behind it.
    fn write_parts(
        &self,
        path: &mut LatchedPath<'a>,
        leaf: &mut WriteLatch,
        sources: RunSources<'_>,
        parts: &[ItemSequence],
    ) -> Result<()> {
        let mut pointers = Vec::with_capacity(parts.len() - 1);
        for part in &parts[1..] {
            let mut right = self.owner.new_block(0)?;
            part.fill(bytes(&mut right), sources);
            pointers.push(self.pointer_to(&right, right.key(0)));
            self.owner.stats().split();
        }
        parts[0].replace(leaf, sources);
        path.set_first_key(leaf.key(0));
        let parent = path.above.last_mut().expect(HAS_PARENT);
        insert_pointers(bytes(&mut parent.node), parent.slot + 1, &pointers);
        Ok(())
    }

    /// Moves items to the left or the right sibling, if at least a sixteenth of a leaf stays free
    /// in the two leaves together. Fills the left sibling, or shares equally with the right one.
    /// Returns false, without a change, when neither has room.
    fn share_with_sibling(
        &self,
        path: &mut LatchedPath<'a>,
        leaf: &mut WriteLatch,
        sources: RunSources<'_>,
        sequence: &ItemSequence,
    ) -> Result<bool> {
        let capacity = leaf_capacity(self.node_size());
        let fits = |sibling: &TreeBlock| {
            let used = items_bytes(sibling.bytes(), 0, sibling.len());
            sequence.bytes + used + capacity / 16 <= 2 * capacity
        };
        for is_left in [true, false] {
            let LatchedStep { node: parent, slot, .. } = path.above.last_mut().expect(HAS_PARENT);
            let at = if is_left { slot.wrapping_sub(1) } else { *slot + 1 };
            if at >= parent.len() || !self.peek(parent, at, fits)? {
                continue;
            }
            let mut sibling = self.lock_child(parent, at)?;
            let old = LeafCopy::of(&sibling);
            let sources = RunSources { sibling: Some(&old), ..sources };
            let parts = sequence.with_sibling(&old, is_left).cut(sources, capacity, is_left);
            let ([one, other], true) = (&parts[..], fits(&old)) else { continue };
            let second = other.first_key(sources).expect("no part is empty");
            pointer_mut(bytes(parent), at.max(*slot)).key = second.into();
            if is_left {
                one.replace(&mut sibling, sources);
                other.replace(leaf, sources);
            } else {
                one.replace(leaf, sources);
                other.replace(&mut sibling, sources);
                path.set_first_key(leaf.key(0));
            }
            self.owner.stats().pushed();
            return Ok(true);
        }
        Ok(false)
    }

    /// Adds a new root above `block`, the old root, whose first key is `first`.
    fn add_level(&self, path: &mut LatchedPath<'a>, block: &WriteLatch, first: Key) -> Result<()> {
        let mut root = self.owner.new_block(block.header().level + 1)?;
        insert_pointers(bytes(&mut root), 0, &[self.pointer_to(block, first)]);
        let top = path.top.as_mut().expect("the root lock is held where the root may change");
        top.logical = address(&root);
        top.level = root.header().level;
        self.owner.root_changed(top);
        path.above.push(LatchedStep { node: root, slot: 0, upper: None });
        Ok(())
    }

    fn pointer_to(&self, block: &WriteLatch, key: Key) -> NodePointer {
        NodePointer {
            key: key.into(),
            blockptr: address(block).0.into(),
            generation: self.owner.generation().0.into(),
        }
    }

    /// Splits a node that has no room for two more pointers. Returns the half that `key` belongs
    /// to.
    pub(super) fn split_node(
        &self,
        path: &mut LatchedPath<'a>,
        mut node: WriteLatch,
        key: Key,
    ) -> Result<WriteLatch> {
        if path.above.is_empty() {
            self.add_level(path, &node, node.key(0))?;
        }
        let count = node.len();
        let at_right_edge = path.upper.is_none() && key > node.key(count - 1);
        let cut = if at_right_edge { count - 1 } else { count / 2 };
        let mut right = self.owner.new_block(node.header().level)?;
        copy_pointers(bytes(&mut right), 0, node.bytes(), cut, count);
        remove_pointers(bytes(&mut node), cut, count);
        let middle = right.key(0);
        let pointer = self.pointer_to(&right, middle);
        let parent = path.above.last_mut().expect("the root has one now, the others had");
        insert_pointers(bytes(&mut parent.node), parent.slot + 1, &[pointer]);
        self.owner.stats().split();
        if key < middle {
            path.upper = Some(middle);
            return Ok(node);
        }
        parent.slot += 1;
        Ok(right)
    }
}
