//! Many edits with one way down for each leaf that they go into.
//!
//! Where the way ends, the separators passed say which keys the leaf may have: all edits below that bound belong
//! to it. They are merged with its items and the leaf is written once, however many there are. Mostly what comes out
//! fits the leaf and leaves its first key alone; then the way down had shared latches, and what is above was let
//! go before the edits were looked at when their sizes alone say so. Otherwise the leaf is reached
//! with exclusive latches, and `room` or `remove` puts in order what is above it.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;

use offshoot_btrfs_format::Key;
use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity, leaf_free};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::merge::Merged;
use super::path::Path;
use super::remove::is_sparse;
use crate::block::TreeBlock;
use crate::transaction::WriteLatch;
use crate::volume::Unlock;

/// What becomes of the item with a key: it holds this data, or there is none.
pub(crate) type ItemEdit<'e> = (Key, Option<&'e [u8]>);

/// What came of edits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Applied {
    /// Items that were not there before.
    pub(crate) inserted: usize,
    /// Items that were there, and hold something else now.
    pub(crate) replaced: usize,
    /// Items that are gone. What was not there before is not counted.
    pub(crate) removed: usize,
    /// Ways down that were gone, each to a leaf.
    pub(crate) leaves: usize,
    /// Items that were to be removed and were not there.
    pub(super) absent: usize,
}

impl Applied {
    /// The count of edits of one kind.
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

impl std::ops::AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.inserted += other.inserted;
        self.replaced += other.replaced;
        self.removed += other.removed;
        self.leaves += other.leaves;
        self.absent += other.absent;
    }
}

/// The edits with keys below `upper`.
fn below<'e, 'd>(edits: &'e [ItemEdit<'d>], upper: Option<Key>) -> &'e [ItemEdit<'d>] {
    match upper {
        Some(upper) => &edits[..edits.partition_point(|(key, _)| *key < upper)],
        None => edits,
    }
}

/// Whether the sizes of `edits` say that they fit into `leaf` and leave its first key and its place in the tree alone.
fn surely_stay(leaf: &TreeBlock, edits: &[ItemEdit<'_>]) -> bool {
    let mut room = leaf_free(leaf.bytes());
    edits.iter().all(|(_, data)| {
        let need = data.map(|data| data.len() + ITEM_SIZE);
        let left = need.and_then(|need| room.checked_sub(need));
        room = left.unwrap_or(0);
        left.is_some()
    })
}

/// Whether `leaf`, which has items, fits and has its first key and its place in the tree after it was merged.
fn stays(leaf: &TreeBlock, edits: &[ItemEdit<'_>], merged: &Merged) -> bool {
    let keeps_first = match edits[0].0.cmp(&leaf.key(0)) {
        Ordering::Less => false,
        Ordering::Equal => edits[0].1.is_some(),
        Ordering::Greater => true,
    };
    let used = merged.sequence.bytes;
    let runs_low = merged.applied.removed > 0 && is_sparse(leaf, used);
    keeps_first && !runs_low && used <= capacity(leaf)
}

/// What the items of a leaf may take with their headers.
pub(super) fn capacity(leaf: &TreeBlock) -> usize {
    leaf_capacity(u32::try_from(leaf.bytes().len()).expect("a block is small"))
}

impl<'a> TreeWriter<'a> {
    /// Applies edits with ascending keys, all that belong into a leaf at a time.
    ///
    /// # Errors
    /// When a block does not read; what was edited until then stays.
    pub(crate) fn apply_batch(&self, mut edits: &[ItemEdit<'_>]) -> Result<Applied> {
        debug_assert!(edits.is_sorted_by(|one, other| one.0 < other.0), "keys ascend");
        let mut all = Applied::default();
        while !edits.is_empty() {
            let applied = match self.apply_shared(edits)? {
                Some(applied) => applied,
                None => self.apply_exclusive(edits)?,
            };
            self.count(&applied);
            edits = &edits[applied.edits()..];
            all += applied;
        }
        Ok(all)
    }

    fn count(&self, applied: &Applied) {
        let stats = self.handle.stats();
        stats.batched();
        stats.inserted_in_batch(applied.inserted);
        stats.replaced_in_batch(applied.replaced);
        stats.removed_in_batch(applied.removed);
    }

    /// Edits a leaf when nothing above it has to change for that.
    fn apply_shared(&self, edits: &[ItemEdit<'_>]) -> Result<Option<Applied>> {
        let Some((mut path, mut leaf)) = self.locate_shared(edits[0].0)? else { return Ok(None) };
        if leaf.is_empty() || edits[0].0 < leaf.key(0) {
            return Ok(None);
        }
        let unlock = self.handle.latching().unlock;
        let edits = below(edits, path.upper);
        let is_sure = surely_stay(&leaf, edits);
        if is_sure && unlock == Unlock::BeforeSearch {
            path.release();
            self.handle.stats().unlocked_early();
        }
        let merged = Merged::new(&leaf, edits, capacity(&leaf));
        if !is_sure && (merged.edits < edits.len() || !stays(&leaf, edits, &merged)) {
            return Ok(None);
        }
        if unlock == Unlock::AfterSearch {
            path.release();
        }
        merged.write(&mut leaf, edits);
        Ok(Some(merged.applied))
    }

    /// Edits a leaf, and what is above it as far as it takes that.
    fn apply_exclusive(&self, edits: &[ItemEdit<'_>]) -> Result<Applied> {
        let (path, leaf) = self.locate_exclusive(edits[0].0)?;
        let edits = below(edits, path.upper);
        let merged = Merged::new(&leaf, edits, self.most_at_once(&path));
        if merged.sequence.bytes > capacity(&leaf) {
            self.spread(path, leaf, edits, merged)
        } else {
            self.settle(path, leaf, edits, &merged)
        }
    }

    /// Writes a leaf with the edits that were merged with it, which fit, and puts in order what is above it.
    pub(super) fn settle(
        &self,
        mut path: Path<'a>,
        mut leaf: WriteLatch,
        edits: &[ItemEdit<'_>],
        merged: &Merged,
    ) -> Result<Applied> {
        let first = (!leaf.is_empty()).then(|| leaf.key(0));
        if first.is_some() && stays(&leaf, edits, merged) {
            path.release();
        }
        merged.write(&mut leaf, edits);
        if !leaf.is_empty() && first.is_some_and(|first| first != leaf.key(0)) {
            path.set_first_key(leaf.key(0));
        }
        if merged.applied.removed > 0 {
            self.after_removal(&mut path, leaf)?;
        }
        Ok(merged.applied)
    }
}
