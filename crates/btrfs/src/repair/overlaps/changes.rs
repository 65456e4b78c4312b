//! What becomes of items that overlap or are damaged, for the outcome of a repair.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};

use crate::check::{CheckedVolume, path_of_inode};

/// The most changes that are listed.
const MOST_CHANGES: usize = 10_000;

/// What a repair has changed in items that overlap or are damaged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ItemChanges {
    /// The files and other objects with changes.
    pub files: Vec<FileWithChanges>,
    /// Whether there are more changes than the 10,000 that are listed.
    pub are_more: bool,
}

/// A file, or another object of a subvolume, whose items are changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileWithChanges {
    /// Its subvolume.
    pub subvolume: TreeId,
    /// Its inode number.
    pub ino: u64,
    /// Its path from the top level of the volume, if it has one.
    pub path: Option<Vec<u8>>,
    /// The changes.
    pub changes: Vec<ItemChange>,
}

/// A change of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemChange {
    /// An extent has lost a range to one that overlaps it.
    Cut {
        /// Where the range begins in the file, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The generation of the extent that has lost it.
        generation: Generation,
        /// The address of that extent; `None` for data in an item and for ranges without data.
        logical: Option<Logical>,
    },
    /// An item is dropped: what it said is lost.
    Dropped {
        /// Its key, as far as that is right.
        key: Key,
        /// What is wrong with it.
        problem: String,
    },
    /// An item stays with other values, which follow from something else.
    Corrected {
        /// Its key.
        key: Key,
        /// What was wrong with it.
        problem: String,
    },
}

/// Collects changes.
#[derive(Debug, Default)]
pub(in crate::repair) struct ChangeLog {
    changes: BTreeMap<(TreeId, u64), Vec<ItemChange>>,
    count: usize,
    /// The subvolumes that have lost something.
    lossy: BTreeSet<TreeId>,
}

impl ChangeLog {
    pub(in crate::repair) fn add(&mut self, subvolume: TreeId, ino: u64, change: ItemChange) {
        if !matches!(change, ItemChange::Corrected { .. }) {
            self.lossy.insert(subvolume);
        }
        self.count += 1;
        if self.count <= MOST_CHANGES {
            self.changes.entry((subvolume, ino)).or_default().push(change);
        }
    }

    /// Takes the subvolumes that have lost something since the last call.
    pub(in crate::repair) fn take_lossy(&mut self) -> BTreeSet<TreeId> {
        std::mem::take(&mut self.lossy)
    }

    /// What was changed, with paths as they are in `volume`.
    pub(in crate::repair) fn into_changes(self, volume: &CheckedVolume<'_>) -> ItemChanges {
        let file = |((subvolume, ino), changes)| FileWithChanges {
            subvolume,
            ino,
            path: path_of_inode(volume, subvolume, ino),
            changes,
        };
        let are_more = self.count > MOST_CHANGES;
        ItemChanges { files: self.changes.into_iter().map(file).collect(), are_more }
    }
}
