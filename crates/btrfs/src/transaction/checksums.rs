//! Removing the checksums of ranges that hold no extent.

#[cfg(test)]
mod tests;

use std::ops::Range;

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};

use super::{Base, TransactionHandle};
use crate::ranges::joined;
use crate::tree::{Cursor, ItemEdit};

/// The edits of the checksum tree after which readers get a turn.
const EDITS: usize = 256;

/// Removes the checksums of `ranges`, which ascend and hold no extent any more. The committer calls
/// it while no handle is open, so no writer changes the checksum tree at the same time. It locks
/// readers out for about [`EDITS`] edits at a time.
///
/// # Errors
/// When the checksum tree cannot be read, or its items overlap.
pub(super) fn remove_checksums(
    handle: &TransactionHandle<'_>,
    ranges: &[Range<u64>],
) -> Result<()> {
    let ranges = joined(ranges.iter().cloned());
    let volume = handle.volume();
    let root = if ranges.is_empty() { return Ok(()) } else { volume.tree(TreeId::CSUM)? };
    let mut cut = CutItems { handle, edits: Vec::new(), expected: ExpectedEdits::default() };
    let (mut cursor, mut last) = (None::<Cursor<'_>>, None);
    for (index, range) in ranges.iter().enumerate() {
        let cursor = match &mut cursor {
            Some(cursor) if cursor.is_in_leaf(sums_key(range.start)) => cursor,
            other => other.insert(Cursor::seek_floor(volume, root, sums_key(range.start))?),
        };
        while let Some((found, data)) = cursor.item().filter(|(at, _)| *at < sums_key(range.end)) {
            // The item may be cut already, for the range before.
            if found >= sums_key(0) && last < Some(found) {
                let item = SumItem::new(volume, found, data);
                if item.covers.end > range.start {
                    cut.cut(&item, &ranges[index..]);
                    last = Some(found);
                    if cut.edits.len() >= EDITS {
                        cut.apply()?;
                    }
                }
            }
            cursor.advance()?;
        }
    }
    cut.apply()
}

fn sums_key(at: u64) -> Key {
    Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at)
}

/// An item of the checksum tree.
struct SumItem<'d> {
    key: Key,
    data: &'d [u8],
    covers: Range<u64>,
    sector: u64,
    sum_len: usize,
}

impl<'d> SumItem<'d> {
    fn new(volume: &Base, key: Key, data: &'d [u8]) -> Self {
        let superblock = volume.superblock();
        let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
        let sectors = (data.len() / sum_len) as u64;
        let end = key.offset.saturating_add(sectors.saturating_mul(sector));
        Self { key, data, covers: key.offset..end, sector, sum_len }
    }

    /// The checksums of a part of it.
    fn part(&self, part: &Range<u64>) -> (Key, Vec<u8>) {
        let at = |end: u64| {
            let sectors = (end - self.covers.start) / self.sector;
            usize::try_from(sectors).expect("within an item") * self.sum_len
        };
        (sums_key(part.start), self.data[at(part.start)..at(part.end)].to_vec())
    }
}

/// What edits of the checksum tree must do, if its items do not overlap.
#[derive(Debug, Default, PartialEq, Eq)]
struct ExpectedEdits {
    inserted: usize,
    replaced: usize,
    removed: usize,
}

/// Edits that remove checksums, in ascending order.
struct CutItems<'h> {
    handle: &'h TransactionHandle<'h>,
    edits: Vec<(Key, Option<Vec<u8>>)>,
    expected: ExpectedEdits,
}

impl CutItems<'_> {
    /// Keeps what is in none of `ranges` of an item. They ascend.
    fn cut(&mut self, item: &SumItem<'_>, ranges: &[Range<u64>]) {
        let (mut from, end) = (item.covers.start, item.covers.end);
        let mut kept = Vec::new();
        for range in ranges.iter().take_while(|range| range.start < end) {
            if from < range.start {
                kept.push(from..range.start);
            }
            from = from.max(range.end);
        }
        if from < end {
            kept.push(from..end);
        }
        if kept.first().is_some_and(|part| part.start == item.covers.start) {
            self.expected.replaced += 1;
            self.expected.inserted += kept.len() - 1;
        } else {
            self.edits.push((item.key, None));
            self.expected.removed += 1;
            self.expected.inserted += kept.len();
        }
        self.edits.extend(kept.iter().map(|part| {
            let (key, sums) = item.part(part);
            (key, Some(sums))
        }));
    }

    /// Makes the edits. All of an item are made together.
    fn apply(&mut self) -> Result<()> {
        if self.edits.is_empty() {
            return Ok(());
        }
        let edits: Vec<ItemEdit<'_>> =
            self.edits.iter().map(|(key, data)| (*key, data.as_deref())).collect();
        let overlap = || Error::corrupt(Structure::Tree, "items of the checksum tree overlap");
        if !edits.is_sorted_by(|one, other| one.0 < other.0) {
            return Err(overlap());
        }
        let _changing = self.handle.checksums_changing();
        let applied = self.handle.change(TreeId::CSUM, |tree| tree.apply_batch(&edits))?;
        let (inserted, replaced, removed) = (applied.inserted, applied.replaced, applied.removed);
        let done = ExpectedEdits { inserted, replaced, removed };
        self.edits.clear();
        if done == std::mem::take(&mut self.expected) { Ok(()) } else { Err(overlap()) }
    }
}

/// Removes the checksums of `len` bytes from `logical` on, which hold no extent any more, while
/// other writers change the checksum tree.
pub(crate) fn remove_checksums_beside_writers(
    handle: &TransactionHandle<'_>,
    logical: Logical,
    len: u64,
) -> Result<()> {
    // While we hold the lock, no other writer changes the items that we read.
    let _changing = handle.checksums_changing();
    ChecksumRemoval::new(handle.volume(), logical, len)?.apply(handle)
}

/// The changes of the checksum tree that remove the checksums of a range.
struct ChecksumRemoval {
    removed: Vec<Key>,
    /// The parts of removed items that belong to other sectors.
    kept: Vec<(Key, Vec<u8>)>,
}

impl ChecksumRemoval {
    fn new(volume: &Base, logical: Logical, len: u64) -> Result<Self> {
        let superblock = volume.superblock();
        let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
        let end = logical.0 + len;
        let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
        let mut without = Self { removed: Vec::new(), kept: Vec::new() };
        let root = volume.tree(TreeId::CSUM)?;
        let mut cursor = Cursor::seek_floor(volume, root, key(logical.0))?;
        while let Some((found, data)) = cursor.item().filter(|(found, _)| *found < key(end)) {
            let covers = found.offset..found.offset + (data.len() / sum_len) as u64 * sector;
            if found >= key(0) && covers.end > logical.0 {
                without.removed.push(found);
                let bytes = |sectors: u64| {
                    usize::try_from(sectors / sector).expect("within an item") * sum_len
                };
                if covers.start < logical.0 {
                    let before = data[..bytes(logical.0 - covers.start)].to_vec();
                    without.kept.push((found, before));
                }
                if covers.end > end {
                    let behind = data[bytes(end - covers.start)..].to_vec();
                    without.kept.push((key(end), behind));
                }
            }
            cursor.advance()?;
        }
        Ok(without)
    }

    /// Makes the changes. A removed item may hold the checksums of neighbouring sectors too, which
    /// are absent for a moment.
    fn apply(&self, handle: &TransactionHandle<'_>) -> Result<()> {
        handle.change(TreeId::CSUM, |tree| {
            for found in &self.removed {
                tree.remove(*found)?;
            }
            for (key, sums) in &self.kept {
                tree.insert(*key, sums)?;
            }
            Ok(())
        })
    }
}
