//! Extents of a file in the log.
//!
//! ```text
//!   changed since it was logged            |-----|
//!   items now                        |--------|   (hole)   |---|
//!   items of the log               |-------------------|
//!   logged anew                    |---------------------------|     to where items begin and end, now and in the log
//! ```
//!
//! So no two items of the log ever overlap. A range without extents is logged as a hole, also in
//! volumes without hole items: otherwise replay would leave the contents of the last commit there.
//! Preallocated extents behind the end of the file are logged each time, because replay truncates
//! the file at its end.

use std::ops::Range;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::Result;

use super::record::{LogRecording, LoggingStop};
use crate::data::{OverlappingItem, hole_item, overlaps_in, stored_sums};
use crate::ranges::Ranges;
use crate::storage::malformed;
use crate::transaction::Obstacle;
use crate::tree::TreeRoot;

/// How many extent items one search reads.
const BATCH: usize = 256;

/// How many extent items one fsync may add to the log or remove from it. For more it commits.
const MOST_EXTENTS: usize = 65_536;

impl LogRecording<'_, '_> {
    /// Logs the extents of a file in the ranges that changed: all of them if the last commit does
    /// not have the file.
    pub(super) fn extents(
        &mut self,
        ino: u64,
        item: &InodeItem,
        is_committed: bool,
    ) -> Result<(), LoggingStop> {
        let mut changed = self.log.notes().take_extents(self.file(ino));
        let sector = u64::from(self.volume.superblock().sector_size);
        let end = item.size.get().next_multiple_of(sector);
        let logged = self.own.logged.entry(ino).or_default();
        if logged.is_whole {
            changed.insert(logged.end..end.max(logged.end));
        } else if !is_committed {
            changed.insert(0..u64::MAX);
        }
        logged.end = end;
        let root = self.volume.tree(self.subvolume)?;
        if !overlaps_in(self.volume, root, ino, end..u64::MAX, 1)?.is_empty() {
            changed.insert(end..u64::MAX);
        }
        for range in self.widened(root, ino, changed)?.iter() {
            self.put_extents(root, ino, &range, end)?;
        }
        Ok(())
    }

    /// Widens the ranges so that none starts or ends inside an item, neither in the subvolume nor
    /// in the log.
    fn widened(&self, root: TreeRoot, ino: u64, mut ranges: Ranges) -> Result<Ranges> {
        loop {
            let mut wide = Ranges::default();
            for range in ranges.iter() {
                let mut wider = range.clone();
                for root in [root, self.log_root()] {
                    for at in [range.start, range.end - 1] {
                        let over = overlaps_in(self.volume, root, ino, at..at + 1, 1)?;
                        if let Some(OverlappingItem { key, end, .. }) = over.first() {
                            wider = wider.start.min(key.offset)..wider.end.max(*end);
                        }
                    }
                }
                wide.insert(wider);
            }
            if wide == ranges {
                return Ok(ranges);
            }
            ranges = wide;
        }
    }

    /// Replaces `range` in the log by the extents of the file. No item reaches over an end of
    /// `range`. Behind `end` it logs no holes.
    fn put_extents(
        &mut self,
        root: TreeRoot,
        ino: u64,
        range: &Range<u64>,
        end: u64,
    ) -> Result<(), LoggingStop> {
        let key = |at| Key::new(ino, ItemType::EXTENT_DATA, at);
        self.remove_extents(ino, range)?;
        let mut at = range.start;
        loop {
            let found = overlaps_in(self.volume, root, ino, at..range.end, BATCH)?;
            let is_last = found.len() < BATCH;
            self.count_extents(found.len())?;
            for OverlappingItem { key: found, data, end: behind } in found {
                self.put_hole(key(at), found.offset.min(end));
                self.sums_of(&data)?;
                self.edits.insert(found, Some(data));
                at = behind;
            }
            self.spill_much()?;
            if is_last {
                self.put_hole(key(at), range.end.min(end));
                return Ok(());
            }
        }
    }

    /// Removes the extents in `range` from the log.
    fn remove_extents(&mut self, ino: u64, range: &Range<u64>) -> Result<(), LoggingStop> {
        let mut at = range.start;
        loop {
            let root = self.log_root();
            let logged = overlaps_in(self.volume, root, ino, at..range.end, BATCH)?;
            let is_last = logged.len() < BATCH;
            self.count_extents(logged.len())?;
            at = logged.last().map_or(at, |last| last.end);
            self.edits.extend(logged.into_iter().map(|old| (old.key, None)));
            self.spill_much()?;
            if is_last {
                return Ok(());
            }
        }
    }

    fn count_extents(&mut self, count: usize) -> Result<(), LoggingStop> {
        self.extents += count;
        if self.extents > MOST_EXTENTS { Err(Obstacle::TooMuch.into()) } else { Ok(()) }
    }

    /// Logs a hole from `key` to `end`.
    fn put_hole(&mut self, key: Key, end: u64) {
        if key.offset < end {
            self.edits.insert(key, Some(hole_item(self.handle, end - key.offset)));
        }
    }

    /// Logs the checksums of the extent that an item names, if this transaction wrote the data.
    fn sums_of(&mut self, data: &[u8]) -> Result<(), LoggingStop> {
        let extent = FileExtent::parse(data).map_err(malformed)?;
        let FileExtentBody::Extent {
            disk_bytenr,
            disk_num_bytes,
            offset,
            num_bytes,
            is_preallocated,
        } = extent.body
        else {
            return Ok(());
        };
        if is_preallocated || extent.generation != self.handle.generation() {
            return Ok(());
        }
        let range = if extent.compression == Compression::None {
            disk_bytenr.0 + offset..disk_bytenr.0 + offset + num_bytes
        } else {
            disk_bytenr.0..disk_bytenr.0 + disk_num_bytes
        };
        // While the log of a transaction is in use, data that the transaction wrote keeps its place
        // and its checksums until the commit.
        for part in self.own.sums.missing(&range) {
            for (at, sums) in stored_sums(self.volume, &part)? {
                let key = Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
                self.edits.insert(key, Some(sums));
            }
            self.own.sums.insert(part);
        }
        Ok(())
    }
}
