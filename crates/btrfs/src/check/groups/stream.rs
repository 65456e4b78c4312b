//! The items of a range of a tree, one at a time.
//!
//! A block group is compared with several trees at a time, so each of them is read as far as the
//! comparison needs it. A stream goes on behind a block that cannot be used, and says which keys
//! such a block may have had: the *gap* in front of the item that follows.

use std::sync::Arc;

use offshoot_btrfs_format::{Key, TreeId};

use super::super::volume::{CheckedVolume, KeyRange};
use crate::block::TreeBlock;
use crate::tree::TreeRoot;

/// The items of a range of a tree, in order.
pub(super) struct ItemStream<'v> {
    volume: &'v CheckedVolume<'v>,
    tree: TreeId,
    range: KeyRange,
    /// Whether the stream begins with the last item in front of the range, if there is no item at
    /// its first key.
    is_from_floor: bool,
    /// The nodes above the current leaf.
    path: Vec<StreamStep>,
    leaf: Option<(Arc<TreeBlock>, usize)>,
    gap: Option<StreamGap>,
}

/// A node on the way to the current leaf.
struct StreamStep {
    block: Arc<TreeBlock>,
    /// The slot of the next child.
    next: usize,
    /// The keys in the block are below this key.
    upper: Option<Key>,
}

/// The keys of blocks that cannot be used.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamGap {
    pub(super) first: Key,
    /// The first key behind the gap; `None` when it goes to the end of the tree.
    pub(super) end: Option<Key>,
}

impl<'v> ItemStream<'v> {
    /// The items in `range` of the tree `root`.
    pub(super) fn new(volume: &'v CheckedVolume<'v>, root: TreeRoot, range: KeyRange) -> Self {
        Self::begin(volume, root, range, false)
    }

    /// The items in `range`, and the last one in front of it if no item has its first key.
    pub(super) fn from_floor(
        volume: &'v CheckedVolume<'v>,
        root: TreeRoot,
        range: KeyRange,
    ) -> Self {
        Self::begin(volume, root, range, true)
    }

    fn begin(
        volume: &'v CheckedVolume<'v>,
        root: TreeRoot,
        range: KeyRange,
        is_from_floor: bool,
    ) -> Self {
        let tree = root.id;
        let (path, leaf, gap) = (Vec::new(), None, None);
        let mut stream = Self { volume, tree, range, is_from_floor, path, leaf, gap };
        match volume.usable_block(&root.expected()) {
            Some(block) => {
                if !stream.enter(block, None) {
                    stream.fill();
                }
            }
            None => stream.add_gap(Key::MIN, None),
        }
        stream
    }

    /// The current item; `None` behind the last one.
    pub(super) fn item(&self) -> Option<(Key, &[u8])> {
        let (leaf, slot) = self.leaf.as_ref()?;
        let key = leaf.key(*slot);
        (key <= self.range.last).then(|| (key, leaf.data(*slot)))
    }

    /// The keys between the item before the current one and the current one that may be in blocks
    /// that cannot be used.
    pub(super) fn gap(&self) -> Option<StreamGap> {
        self.gap
    }

    /// Goes to the next item.
    pub(super) fn advance(&mut self) {
        self.gap = None;
        if let Some((leaf, slot)) = &mut self.leaf {
            *slot += 1;
            if *slot < leaf.len() {
                return;
            }
            self.leaf = None;
            self.fill();
        }
    }

    /// Goes to the next leaf that has items of the range.
    fn fill(&mut self) {
        while let Some(step) = self.path.last_mut() {
            let (block, slot) = (step.block.clone(), step.next);
            let is_behind = slot >= block.len() || block.key(slot) > self.range.last;
            if is_behind || self.volume.is_over() {
                self.path.pop();
                continue;
            }
            step.next += 1;
            let upper = if slot + 1 < block.len() { Some(block.key(slot + 1)) } else { step.upper };
            match self.volume.usable_child(&block, slot, self.tree, upper) {
                Some(child) => {
                    if self.enter(child, upper) {
                        return;
                    }
                }
                None => self.add_gap(block.key(slot), upper),
            }
        }
    }

    /// Goes into a block. Returns whether it is a leaf with items of the range.
    fn enter(&mut self, block: Arc<TreeBlock>, upper: Option<Key>) -> bool {
        let first = self.range.first;
        if !block.is_leaf() {
            let next = block.floor(first).unwrap_or(0);
            self.path.push(StreamStep { block, next, upper });
            return false;
        }
        let floor = if self.is_from_floor { block.floor(first) } else { None };
        let slot = floor.unwrap_or_else(|| block.first_at_least(first));
        let has_items = slot < block.len();
        self.leaf = has_items.then_some((block, slot));
        has_items
    }

    fn add_gap(&mut self, first: Key, end: Option<Key>) {
        let first = self.gap.map_or(first, |gap| gap.first);
        self.gap = Some(StreamGap { first, end });
    }
}
