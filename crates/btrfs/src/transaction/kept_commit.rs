//! Keeping a commit whole while other threads write.
//!
//! A commit frees what the one before it refers to. While a [`KeptCommit`] exists, these ranges
//! stay pinned instead, and become free when the last one is dropped. So a reader of the devices
//! finds every tree of the kept commit as it was.
//!
//! ```text
//! commit 7   kept     commit 8 frees a, commit 9 frees b     dropped
//! free:               nothing                                a and b
//! ```
//!
//! What is kept is missing to writers. Before the volume refuses anything for want of room, it
//! gives all kept commits up ([`LiveVolume::give_up_kept_commits`]), and the reader learns it from
//! [`KeptCommit::is_whole`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::superblock::SuperblockItem;
use offshoot_vfs::Result;

use super::LiveVolume;

/// The ranges that are kept, and for whom.
#[derive(Debug, Default)]
pub(super) struct KeptRanges {
    ranges: Vec<Range<u64>>,
    /// One for each kept commit: whether it is still whole.
    readers: Vec<Arc<AtomicBool>>,
}

/// A commit that stays whole while this exists.
pub(crate) struct KeptCommit<'v> {
    live: &'v LiveVolume,
    superblock: Arc<SuperblockItem>,
    is_whole: Arc<AtomicBool>,
}

impl KeptCommit<'_> {
    /// The superblock of the commit.
    pub(crate) fn superblock(&self) -> &SuperblockItem {
        &self.superblock
    }

    /// Whether nothing of the commit was freed.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_whole.load(Ordering::Acquire)
    }
}

impl Drop for KeptCommit<'_> {
    fn drop(&mut self) {
        let mut kept = self.live.kept.lock();
        kept.readers.retain(|reader| !Arc::ptr_eq(reader, &self.is_whole));
        if kept.readers.is_empty() {
            let ranges = std::mem::take(&mut kept.ranges);
            drop(kept);
            // An error ends all writing, and the next call that writes says so.
            let _ = self.live.all_or_stop(|| self.live.free_ranges(ranges));
        }
    }
}

impl LiveVolume {
    /// Keeps the last commit whole until the result is dropped. The caller makes sure that no
    /// block group is removed meanwhile.
    pub(crate) fn keep_commit(&self) -> KeptCommit<'_> {
        let is_whole = Arc::new(AtomicBool::new(true));
        // First the reader, then the superblock: what the next commit frees is kept already.
        self.kept.lock().readers.push(is_whole.clone());
        KeptCommit { live: self, superblock: self.last_superblock(), is_whole }
    }

    /// Frees what a commit has given up, or keeps it for the readers of a kept commit.
    pub(super) fn free_or_keep(&self, freed: Vec<Range<u64>>) -> Result<()> {
        let mut kept = self.kept.lock();
        if kept.readers.is_empty() {
            drop(kept);
            return self.free_ranges(freed);
        }
        kept.ranges.extend(freed);
        Ok(())
    }

    /// Frees all that is kept. Returns whether there was anything.
    ///
    /// # Errors
    /// As for a commit.
    pub(crate) fn give_up_kept_commits(&self) -> Result<bool> {
        let mut kept = self.kept.lock();
        if kept.ranges.is_empty() {
            return Ok(false);
        }
        // The readers learn it before anything is written to these ranges.
        kept.readers.drain(..).for_each(|reader| reader.store(false, Ordering::Release));
        let ranges = std::mem::take(&mut kept.ranges);
        drop(kept);
        self.all_or_stop(|| self.free_ranges(ranges))?;
        Ok(true)
    }

    fn free_ranges(&self, freed: Vec<Range<u64>>) -> Result<()> {
        for range in &freed {
            self.space.give_back(Logical(range.start), range.end - range.start)?;
        }
        self.space.note_freed(freed);
        Ok(())
    }
}
