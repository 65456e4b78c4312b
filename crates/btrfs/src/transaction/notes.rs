//! What a transaction has changed, as far as fsync has to know: noted when it changes, because
//! comparing whole files and directories with the last commit would take longer than a commit.
//!
//! | note | who reads it |
//! |---|---|
//! | ranges of files whose extents changed | fsync of the file, which takes them: what changes after that is noted anew |
//! | indexes of entries that were removed | fsync of the directory, which takes them, and who looks for the next index: none is used twice in a transaction |
//!
//! There are at most [`MOST`] of each. Above that nothing is logged in the transaction any more.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use foldhash::fast::RandomState;
use offshoot_vfs::FileId;
use parking_lot::Mutex;

use super::ranges::Ranges;

/// The most files, or removed entries, that are noted in a transaction.
pub(crate) const MOST: usize = 65_536;

/// The most ranges of a file: what is between those that are next to each other counts as changed
/// when there are more.
const MOST_RANGES: usize = 64;

/// Entries that a directory lost.
#[derive(Debug, Default)]
struct Removed {
    /// Those that no fsync has taken.
    indexes: BTreeMap<u64, Option<u64>>,
    last: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Notes {
    extents: Mutex<HashMap<FileId, Ranges, RandomState>>,
    removed: Mutex<HashMap<FileId, Removed, RandomState>>,
    removals: AtomicUsize,
}

impl Notes {
    /// Forgets all notes.
    pub(crate) fn forget(&self) {
        *self.extents.lock() = HashMap::default();
        *self.removed.lock() = HashMap::default();
    }

    /// Extents of `file` changed in `range`; whether there is room for this note.
    pub(crate) fn extents_changed(&self, file: FileId, range: Range<u64>) -> bool {
        let mut extents = self.extents.lock();
        let ranges = extents.entry(file).or_default();
        ranges.insert(range);
        ranges.limit(MOST_RANGES);
        extents.len() <= MOST
    }

    /// The ranges of `file` in which extents changed since this was asked last.
    pub(crate) fn take_extents(&self, file: FileId) -> Ranges {
        self.extents.lock().remove(&file).unwrap_or_default()
    }

    /// Whether extents of `file` changed since they were taken.
    pub(crate) fn has_extents(&self, file: FileId) -> bool {
        self.extents.lock().contains_key(&file)
    }

    /// The directory lost the entry with this index, which led to this inode, or to a subvolume;
    /// whether there is room for this note.
    pub(crate) fn entry_removed(&self, dir: FileId, index: u64, ino: Option<u64>) -> bool {
        let mut removed = self.removed.lock();
        let Removed { indexes, last } = removed.entry(dir).or_default();
        indexes.insert(index, ino);
        *last = index.max(*last);
        self.removals.fetch_add(1, Ordering::Relaxed) < MOST
    }

    /// The indexes of entries that the directory lost since this was asked last, and the inodes
    /// that they led to.
    pub(crate) fn take_removed(&self, dir: FileId) -> BTreeMap<u64, Option<u64>> {
        let mut removed = self.removed.lock();
        removed
            .get_mut(&dir)
            .map(|removed| std::mem::take(&mut removed.indexes))
            .unwrap_or_default()
    }

    /// The highest index of an entry that the directory lost.
    pub(crate) fn last_removed(&self, dir: FileId) -> Option<u64> {
        self.removed.lock().get(&dir).map(|removed| removed.last)
    }
}
