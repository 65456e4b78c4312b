//! Extents of a file that overlap: which of them keeps a range, and what is left of the others.
//!
//! ```text
//! generation 9            [=======]              stays as it is
//! generation 7      [===================]        becomes [=====]       [=====]
//! generation 5                      [=========]  becomes                     [===]
//! ```
//!
//! Each byte of a file belongs to the first of the extents that have it, in this order:
//!
//! 1. The newer generation. One that is newer than the volume is damaged, and counts as the oldest.
//! 2. Data that fits its checksums, before what has no checksums, before data that does not fit.
//! 3. The higher address. Data in an item and ranges without data have none.
//! 4. The lower offset in the file, and then the first item in the leaf.
//!
//! An extent that is cut keeps its extent on disk and its generation: `offset` and `num_bytes` say
//! what of it the item uses, of compressed extents before compression. Data in an item cannot be
//! cut: it stays as a whole or goes.

mod changes;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, FileExtentTail,
};
use offshoot_btrfs_format::{Generation, Logical, TreeId};
use zerocopy::FromBytes;

use super::accept::StoredChecksums;
use super::leaves::MovedExtents;
use crate::check::{CheckedVolume, bad_data_in, used_range};

pub(super) use changes::ChangeLog;
pub use changes::{FileWithChanges, ItemChange, ItemChanges};

/// An extent item of a file: its offset in the file in bytes, and its data.
pub(super) type FileExtentItem = (u64, Vec<u8>);

/// The part of a repair that mends extents and malformed leaves.
#[derive(Debug, Default)]
pub(super) struct OverlapStep {
    /// Whether the user has chosen it.
    pub(super) is_chosen: bool,
    pub(super) log: ChangeLog,
    /// What is still to be put into files.
    pub(super) moved: MovedExtents,
}

/// Cuts extents that overlap.
pub(super) struct ExtentCutter<'o, 'c> {
    volume: &'o CheckedVolume<'c>,
}

/// Whether data fits its checksums. The later ones come first where extents overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DataStanding {
    Differs,
    WithoutChecksums,
    Fits,
}

/// An extent of a file that overlaps others.
struct RivalExtent {
    /// Where it is in the file, in bytes.
    range: Range<u64>,
    data: Vec<u8>,
    generation: Generation,
    standing: DataStanding,
    /// The address of its extent on disk; 0 without one.
    address: u64,
    is_inline: bool,
}

impl<'o, 'c> ExtentCutter<'o, 'c> {
    pub(super) fn new(volume: &'o CheckedVolume<'c>) -> Self {
        Self { volume }
    }

    /// The extents of a file, without overlaps and by their offsets. Those that cannot be parsed
    /// are left out. Calls `give_up` with each range that an extent loses, and with that extent.
    pub(super) fn without_overlaps(
        &self,
        extents: Vec<FileExtentItem>,
        give_up: &mut dyn FnMut(Range<u64>, &FileExtent<'_>),
    ) -> Vec<FileExtentItem> {
        let mut rivals: Vec<_> = extents.into_iter().filter_map(|one| self.rival(one)).collect();
        // The sort is stable: what the leaf has first stays first.
        rivals.sort_by_key(|one| one.range.start);
        let (mut kept, mut overlapping, mut end) = (Vec::with_capacity(rivals.len()), vec![], 0);
        for rival in rivals {
            if rival.range.start >= end {
                self.cut(std::mem::take(&mut overlapping), &mut kept, give_up);
            }
            end = end.max(rival.range.end);
            overlapping.push(rival);
        }
        self.cut(overlapping, &mut kept, give_up);
        kept.sort_unstable_by_key(|(offset, _)| *offset);
        kept
    }

    fn rival(&self, (offset, data): FileExtentItem) -> Option<RivalExtent> {
        let extent = FileExtent::parse(&data).ok()?;
        let end = offset.saturating_add(len_in_file(&extent, self.volume.sector_size()));
        let newest = newest_generation(self.volume);
        let generation = Some(extent.generation).filter(|&one| one <= newest);
        let address = address_of(&extent).map_or(0, |address| address.0);
        Some(RivalExtent {
            range: offset..end,
            generation: generation.unwrap_or(Generation(0)),
            standing: DataStanding::WithoutChecksums,
            address,
            is_inline: matches!(extent.body, FileExtentBody::Inline(_)),
            data,
        })
    }

    /// Cuts extents that overlap each other, and adds what is left to `kept`.
    fn cut(
        &self,
        mut rivals: Vec<RivalExtent>,
        kept: &mut Vec<FileExtentItem>,
        give_up: &mut dyn FnMut(Range<u64>, &FileExtent<'_>),
    ) {
        if rivals.len() < 2 {
            kept.extend(rivals.into_iter().map(|one| (one.range.start, one.data)));
            return;
        }
        self.compare_data(&mut rivals);
        rivals.sort_by_key(|one| Reverse((one.generation, one.standing, one.address)));
        let mut taken = BTreeMap::new();
        for rival in rivals {
            let mut parts = free_parts(&taken, &rival.range);
            if rival.is_inline && parts.first() != Some(&rival.range) {
                parts.clear();
            }
            let Ok(extent) = FileExtent::parse(&rival.data) else { continue };
            let mut behind = rival.range.start;
            for part in &parts {
                if behind < part.start {
                    give_up(behind..part.start, &extent);
                }
                behind = part.end;
                taken.insert(part.start, part.end);
            }
            if behind < rival.range.end {
                give_up(behind..rival.range.end, &extent);
            }
            kept.extend(
                parts.into_iter().filter_map(|part| Some((part.start, rival.part(&part)?))),
            );
        }
    }

    /// Compares the data of extents with its checksums, where nothing else says which comes first.
    /// They are in the order of their offsets.
    fn compare_data(&self, rivals: &mut [RivalExtent]) {
        // The extent of each generation that reaches farthest, of those before the current one.
        let mut farthest = BTreeMap::<Generation, (usize, u64)>::new();
        let mut are_compared = vec![false; rivals.len()];
        for (index, rival) in rivals.iter().enumerate() {
            let end = rival.range.end;
            let last = farthest.entry(rival.generation).or_insert((index, end));
            if last.0 != index && rival.range.start < last.1 {
                for one in [index, last.0] {
                    if let Some(is_compared) = are_compared.get_mut(one) {
                        *is_compared = true;
                    }
                }
            }
            if end > last.1 {
                *last = (index, end);
            }
        }
        for (rival, is_compared) in rivals.iter_mut().zip(are_compared) {
            if is_compared {
                rival.standing = self.standing(&rival.data);
            }
        }
    }

    fn standing(&self, data: &[u8]) -> DataStanding {
        let range = FileExtent::parse(data).ok().and_then(|extent| used_range(&extent));
        let tree = self.volume.tree(TreeId::CSUM);
        let (Some(range), Some(tree)) = (range, tree) else {
            return DataStanding::WithoutChecksums;
        };
        let missing = StoredChecksums::new(self.volume, tree).missing(&range);
        if missing.map_or(true, |missing| !missing.is_empty()) {
            return DataStanding::WithoutChecksums;
        }
        let bad = bad_data_in(self.volume, tree, &range).all_ranges();
        if bad.is_some_and(|bad| bad.is_empty()) {
            DataStanding::Fits
        } else {
            DataStanding::Differs
        }
    }
}

impl RivalExtent {
    /// The data of an item that uses a part of the extent.
    fn part(&self, part: &Range<u64>) -> Option<Vec<u8>> {
        let mut data = self.data.clone();
        if *part == self.range {
            return Some(data);
        }
        let len = part.end.checked_sub(part.start)?;
        let (head, rest) = FileExtentHead::mut_from_prefix(&mut data).ok()?;
        let (tail, _) = FileExtentTail::mut_from_prefix(rest).ok()?;
        tail.num_bytes = len.into();
        if tail.disk_bytenr.get() == 0 {
            head.ram_bytes = len.into();
        } else {
            let skipped = part.start.checked_sub(self.range.start)?;
            tail.offset = tail.offset.get().checked_add(skipped)?.into();
        }
        Some(data)
    }
}

/// The parts of `range` that are not taken. `taken` has the beginnings and ends of ranges that are
/// apart.
fn free_parts(taken: &BTreeMap<u64, u64>, range: &Range<u64>) -> Vec<Range<u64>> {
    let before = taken.range(..=range.start).next_back().map(|(_, &end)| end);
    let mut at = before.map_or(range.start, |end| end.max(range.start));
    let mut parts = Vec::new();
    if at >= range.end {
        return parts;
    }
    for (&start, &end) in taken.range(at..range.end) {
        if at < start {
            parts.push(at..start);
        }
        at = at.max(end);
    }
    if at < range.end {
        parts.push(at..range.end);
    }
    parts
}

/// What is wrong with the place of an extent on disk: it lies in no chunk for data.
pub(super) fn problem_with_place(
    volume: &CheckedVolume<'_>,
    extent: &FileExtent<'_>,
) -> Option<String> {
    let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, .. } = extent.body else {
        return None;
    };
    let end = disk_bytenr.0.saturating_add(disk_num_bytes);
    let has_it = |chunk: &Chunk| chunk.start <= disk_bytenr && end <= chunk.end().0;
    let mut chunks = volume.storage.chunks().filter(|chunk| chunk.flags.has_data());
    let is_outside = !chunks.any(|chunk| has_it(&chunk));
    is_outside.then(|| format!("{disk_num_bytes} bytes at {disk_bytenr} lie in no chunk for data"))
}

/// The newest generation that an extent may have: the kernel may write one in the transaction that
/// follows the commit.
pub(super) fn newest_generation(volume: &CheckedVolume<'_>) -> Generation {
    Generation(volume.superblock().generation.0.saturating_add(1))
}

/// The length of the range of a file that an extent has, in bytes.
pub(super) fn len_in_file(extent: &FileExtent<'_>, sector: u64) -> u64 {
    match extent.body {
        FileExtentBody::Inline(bytes) => {
            let is_plain = extent.compression == Compression::None;
            let len = if is_plain { bytes.len() as u64 } else { extent.ram_bytes };
            len.checked_next_multiple_of(sector).unwrap_or(len)
        }
        FileExtentBody::Hole { num_bytes } | FileExtentBody::Extent { num_bytes, .. } => num_bytes,
    }
}

/// The address of an extent on disk; `None` without one.
pub(super) fn address_of(extent: &FileExtent<'_>) -> Option<Logical> {
    match extent.body {
        FileExtentBody::Extent { disk_bytenr, .. } => Some(disk_bytenr),
        FileExtentBody::Inline(_) | FileExtentBody::Hole { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_are_not_taken() {
        let taken = BTreeMap::from([(10, 20), (30, 40)]);
        for (range, free) in [
            (0..50, vec![(0, 10), (20, 30), (40, 50)]),
            (10..20, vec![]),
            (12..35, vec![(20, 30)]),
            (0..10, vec![(0, 10)]),
            (20..30, vec![(20, 30)]),
            (35..36, vec![]),
        ] {
            let found = free_parts(&taken, &range).into_iter();
            let found: Vec<_> = found.map(|part| (part.start, part.end)).collect();
            assert_eq!(found, free, "{range:?}");
        }
    }
}
