//! Many edits with one way down for each leaf that they go into.
//!
//! The separators on the way down say which keys the leaf may have. All edits with these keys
//! belong to it. They are merged with its items, and the leaf is written once, however many edits
//! there are. Usually the result fits the leaf and keeps its first key. Then shared latches on the
//! way down are enough. If the sizes of the edits alone prove this, the writer releases the latches
//! above before it looks at the edits. Otherwise the writer goes down once more, with exclusive
//! latches on the blocks that may change, and `room` or `remove` mends the blocks above the leaf.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::ops::Range;

use offshoot_btrfs_format::edit::{leaf_capacity, leaf_free};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::edits::{ItemEdit, ItemEdits};
use super::merge::{MergedLeaf, RunSources};
use super::path::LatchedPath;
use super::remove::is_sparse;
use crate::block::{TreeBlock, WriteLatch};
use crate::tree::UnlockTime;

/// What edits did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AppliedEdits {
    /// Items that were not there before.
    pub(crate) inserted: usize,
    /// Items that were there and have new data.
    pub(crate) replaced: usize,
    /// Items that were there and were removed.
    pub(crate) removed: usize,
    /// The number of ways down, each to one leaf.
    pub(crate) leaves: usize,
    /// Removals of items that were not there.
    pub(super) absent: usize,
}

impl AppliedEdits {
    /// The counter for edits that put or remove an item, which existed before or did not.
    pub(super) fn count(&mut self, puts: bool, exists: bool) -> &mut usize {
        match (puts, exists) {
            (true, false) => &mut self.inserted,
            (true, true) => &mut self.replaced,
            (false, true) => &mut self.removed,
            (false, false) => &mut self.absent,
        }
    }

    /// How many edits there were.
    fn edits(&self) -> usize {
        self.inserted + self.replaced + self.removed + self.absent
    }
}

impl std::ops::AddAssign for AppliedEdits {
    fn add_assign(&mut self, other: Self) {
        self.inserted += other.inserted;
        self.replaced += other.replaced;
        self.removed += other.removed;
        self.leaves += other.leaves;
        self.absent += other.absent;
    }
}

/// Whether `leaf`, which has items, still fits after the merge, and keeps its first key and its
/// place in the tree.
fn stays(leaf: &TreeBlock, edits: ItemEdits<'_>, merged: &MergedLeaf) -> bool {
    let keeps_first = match edits.key(0).cmp(&leaf.key(0)) {
        Ordering::Less => false,
        Ordering::Equal => edits.puts(0),
        Ordering::Greater => true,
    };
    let used = merged.sequence.bytes;
    let runs_low = merged.applied.removed > 0 && is_sparse(leaf, used);
    keeps_first && !runs_low && used <= capacity(leaf)
}

/// How many bytes the items of a leaf may take with their headers.
pub(super) fn capacity(leaf: &TreeBlock) -> usize {
    leaf_capacity(u32::try_from(leaf.bytes().len()).expect("a block is small"))
}

impl<'a> TreeWriter<'a> {
    /// Applies edits with ascending keys, a leaf at a time.
    ///
    /// # Errors
    /// When a block cannot be read. Edits that were applied before remain.
    pub(crate) fn apply_batch(&self, edits: &[ItemEdit<'_>]) -> Result<AppliedEdits> {
        debug_assert!(edits.is_sorted_by(|one, other| one.0 < other.0), "keys ascend");
        self.apply(ItemEdits::Each(edits))
    }

    /// Puts the items in `slots` of a leaf of another tree, with one copy for all that go to one
    /// place.
    ///
    /// # Errors
    /// As [`apply_batch`](Self::apply_batch).
    pub(crate) fn put_run(&self, leaf: &TreeBlock, slots: Range<usize>) -> Result<AppliedEdits> {
        self.apply(ItemEdits::Run(leaf, slots.start, slots.end))
    }

    fn apply(&self, mut edits: ItemEdits<'_>) -> Result<AppliedEdits> {
        let mut all = AppliedEdits::default();
        while !edits.is_empty() {
            let applied = match self.apply_shared(edits)? {
                Some(applied) => applied,
                None => self.apply_exclusive(edits)?,
            };
            self.count(&applied);
            edits = edits.rest(applied.edits());
            all += applied;
        }
        Ok(all)
    }

    fn count(&self, applied: &AppliedEdits) {
        let stats = self.owner.stats();
        stats.batched();
        stats.inserted_in_batch(applied.inserted);
        stats.replaced_in_batch(applied.replaced);
        stats.removed_in_batch(applied.removed);
    }

    /// Edits a leaf; `None`, without a change, when something above the leaf would have to change.
    fn apply_shared(&self, edits: ItemEdits<'_>) -> Result<Option<AppliedEdits>> {
        let Some((mut path, mut leaf)) = self.locate_shared(edits.key(0))? else { return Ok(None) };
        if leaf.is_empty() || edits.key(0) < leaf.key(0) {
            return Ok(None);
        }
        let unlock = self.owner.latching().unlock;
        let edits = edits.below(path.upper);
        // The sizes prove that the edits fit, and that the leaf keeps its first key and its place
        // in the tree.
        let is_sure = edits.fits_surely(leaf_free(leaf.bytes()));
        if is_sure && unlock == UnlockTime::BeforeSearch {
            path.release();
            self.owner.stats().unlocked_early();
        }
        let merged = MergedLeaf::new(&leaf, edits, capacity(&leaf));
        if !is_sure && (merged.edits < edits.len() || !stays(&leaf, edits, &merged)) {
            return Ok(None);
        }
        if unlock == UnlockTime::AfterSearch {
            path.release();
        }
        merged.write(&mut leaf, edits);
        Ok(Some(merged.applied))
    }

    /// Edits a leaf, and the blocks above it as far as necessary.
    fn apply_exclusive(&self, edits: ItemEdits<'_>) -> Result<AppliedEdits> {
        let (path, leaf) = self.locate_to_change(edits.key(0))?;
        let edits = edits.below(path.upper);
        let merged = MergedLeaf::new(&leaf, edits, self.most_at_once(&path));
        if merged.sequence.bytes > capacity(&leaf) {
            self.spread(path, leaf, edits, merged)
        } else {
            self.settle(path, leaf, edits, &merged)
        }
    }

    /// Writes a leaf with the edits that were merged with it, which fit, and mends the blocks above
    /// it.
    pub(super) fn settle(
        &self,
        mut path: LatchedPath<'a>,
        mut leaf: WriteLatch,
        edits: ItemEdits<'_>,
        merged: &MergedLeaf,
    ) -> Result<AppliedEdits> {
        let runs_low = merged.applied.removed > 0 && is_sparse(&leaf, merged.sequence.bytes);
        let sources = RunSources { leaf: &leaf, sibling: None, edits };
        let first = merged.sequence.first_key(sources).filter(|_| !leaf.is_empty());
        if let Some(first) = first.filter(|&first| first != leaf.key(0)) {
            path.set_first_key(first);
        }
        if !runs_low {
            // The blocks above know nothing else of the leaf, so other threads may get past while
            // it is written.
            path.release();
        }
        merged.write(&mut leaf, edits);
        if runs_low {
            self.after_removal(&mut path, leaf)?;
        }
        Ok(merged.applied)
    }
}
