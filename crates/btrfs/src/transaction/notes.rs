//! Notes for fsync about the changes of a transaction. Writers note each change as it happens: for
//! fsync, comparing a whole file or directory with the last commit would take longer than a commit.
//!
//! | note | reader |
//! |---|---|
//! | ranges of files whose extents changed | fsync of the file, which takes them; later changes are noted again |
//! | indexes of entries that were removed | fsync of the directory, which takes them; and the search for the next index, because no index is used twice in a transaction |
//!
//! There are at most [`MOST`] files with noted ranges, and at most [`MOST`] noted entries, and one
//! more for each thread that notes at the same time. Beyond that, nothing more is logged in the
//! transaction.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use foldhash::fast::RandomState;
use offshoot_kit::shards::{SHARDS, shard_of};
use offshoot_vfs::FileId;
use parking_lot::{Mutex, MutexGuard};

use crate::ranges::Ranges;
use crate::shared::Padded;

/// The most files, and the most removed entries, that are noted in a transaction.
pub(crate) const MOST: usize = 65_536;

/// The most ranges of a file. If there are more, the two ranges with the smallest gap are joined,
/// with the gap: of `0..5`, `10..15` and `90..95`, the first two become `0..15`.
const MOST_RANGES: usize = 64;

/// Entries that were removed from a directory.
#[derive(Debug, Default)]
struct RemovedEntries {
    /// The entries that no fsync has taken, by index, with the inode that each led to.
    indexes: BTreeMap<u64, Option<u64>>,
    last: u64,
}

/// The notes of some files.
#[derive(Debug, Default)]
struct NotesShard {
    extents: HashMap<FileId, Ranges, RandomState>,
    removed: HashMap<FileId, RemovedEntries, RandomState>,
}

#[derive(Debug, Default)]
pub(crate) struct LogNotes {
    shards: [Padded<Mutex<NotesShard>>; SHARDS],
    /// The number of files with noted ranges.
    files: Padded<AtomicUsize>,
    removals: AtomicUsize,
}

impl LogNotes {
    /// The notes of the shard of `file`.
    fn shard(&self, file: FileId) -> MutexGuard<'_, NotesShard> {
        self.shards[shard_of(file)].lock()
    }

    /// Forgets all notes. The transaction has ended, so no thread adds any.
    pub(crate) fn forget(&self) {
        for shard in &self.shards {
            *shard.lock() = NotesShard::default();
        }
        self.files.store(0, Ordering::Relaxed);
    }

    /// Notes that extents of `file` changed in `range`. Returns whether the notes are within their
    /// limit.
    pub(crate) fn extents_changed(&self, file: FileId, range: Range<u64>) -> bool {
        let mut shard = self.shard(file);
        let ranges = shard.extents.entry(file).or_insert_with(|| {
            self.files.fetch_add(1, Ordering::Relaxed);
            Ranges::default()
        });
        ranges.insert(range);
        ranges.limit(MOST_RANGES);
        self.files.load(Ordering::Relaxed) <= MOST
    }

    /// Takes the ranges of `file` in which extents changed since the last call.
    pub(crate) fn take_extents(&self, file: FileId) -> Ranges {
        let taken = self.shard(file).extents.remove(&file);
        if taken.is_some() {
            self.files.fetch_sub(1, Ordering::Relaxed);
        }
        taken.unwrap_or_default()
    }

    /// Whether extents of `file` changed since they were taken.
    pub(crate) fn has_extents(&self, file: FileId) -> bool {
        self.shard(file).extents.contains_key(&file)
    }

    /// Notes that the directory lost the entry with this index, which led to the inode `ino`;
    /// `None` for a subvolume. Returns whether the notes are within their limit.
    pub(crate) fn entry_removed(&self, dir: FileId, index: u64, ino: Option<u64>) -> bool {
        let mut shard = self.shard(dir);
        let RemovedEntries { indexes, last } = shard.removed.entry(dir).or_default();
        indexes.insert(index, ino);
        *last = index.max(*last);
        self.removals.fetch_add(1, Ordering::Relaxed) < MOST
    }

    /// Takes the indexes of entries that the directory lost since the last call, and the inodes
    /// that they led to.
    pub(crate) fn take_removed(&self, dir: FileId) -> BTreeMap<u64, Option<u64>> {
        let mut shard = self.shard(dir);
        shard
            .removed
            .get_mut(&dir)
            .map(|removed| std::mem::take(&mut removed.indexes))
            .unwrap_or_default()
    }

    /// The highest index of an entry that the directory lost.
    pub(crate) fn last_removed(&self, dir: FileId) -> Option<u64> {
        self.shard(dir).removed.get(&dir).map(|removed| removed.last)
    }
}
