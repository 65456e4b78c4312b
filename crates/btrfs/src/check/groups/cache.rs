//! The space cache (version 1): the free ranges of a block group in a file of the root tree.
//! A page has the size of a sector.
//!
//! ```text
//! page 0    | CRC-32C of each page, 4 bytes | generation 8 | entry 17 | entry 17 | ...       |
//! page 1    | entry 17 | entry 17 | ...                                                      |
//! page n    | a bitmap: a bit for each sector                                                |
//!
//! entry     | start 8 | bytes 8 | kind 1: 1 for a range, 2 for a bitmap in one of the last pages |
//! ```
//!
//! The kernel uses a cache only if the superblock says that it is as new as the volume, and makes
//! each one anew that does not verify. So the damage of a cache costs time and nothing else.

use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::space::FreeSpaceHeader;
use offshoot_btrfs_format::superblock::{CompatRo, Incompat};
use offshoot_btrfs_format::{ItemType, Key, Logical};

use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::super::volume::{CheckedVolume, KeyRange};
use super::free_space::next_run;

/// The largest cache that is read, in bytes. Those that the kernel writes are far smaller.
const MOST_BYTES: u64 = 16 << 20;

/// The size of an entry, in bytes.
const ENTRY_BYTES: usize = 17;

/// The kind of an entry that is a range.
const ENTRY_RANGE: u8 = 1;
/// The kind of an entry that is a bitmap.
const ENTRY_BITMAP: u8 = 2;

/// Compares the caches of block groups with the space between extents.
pub(super) struct SpaceCacheCheck<'v> {
    volume: &'v CheckedVolume<'v>,
    start: u64,
    left_out: Vec<Range<u64>>,
    /// The free ranges of the cache, which ascend and are apart. `None` for a block group without a
    /// cache that verifies.
    ranges: Option<std::vec::IntoIter<Range<u64>>>,
    /// The first address at which the cache differs.
    differs_at: Option<u64>,
}

/// Whether the caches of a volume are in use.
pub(super) fn are_in_use(volume: &CheckedVolume<'_>) -> bool {
    let superblock = volume.superblock();
    let generation = superblock.item.cache_generation.get();
    !superblock.compat_ro.has(CompatRo::FREE_SPACE_TREE)
        && !superblock.incompat.has(Incompat::ZONED)
        && generation == superblock.generation.0
}

impl<'v> SpaceCacheCheck<'v> {
    pub(super) fn new(volume: &'v CheckedVolume<'v>) -> Self {
        Self { volume, start: 0, left_out: Vec::new(), ranges: None, differs_at: None }
    }

    /// Begins a block group.
    pub(super) fn begin(&mut self, group: Range<u64>, left_out: Vec<Range<u64>>) {
        self.start = group.start;
        self.differs_at = None;
        self.ranges = match read_cache(self.volume, &group) {
            Ok(ranges) => {
                ranges.map(|ranges| without(&ranges, &left_out).collect::<Vec<_>>().into_iter())
            }
            Err(problem) => {
                self.report(problem);
                None
            }
        };
        self.left_out = left_out;
    }

    /// Compares a range that no extent of the group has. The ranges ascend and are apart.
    pub(super) fn expect(&mut self, range: Range<u64>) {
        let Some(ranges) = &mut self.ranges else { return };
        for expected in without(std::slice::from_ref(&range), &self.left_out) {
            let found = ranges.next();
            if found.as_ref() != Some(&expected) && self.differs_at.is_none() {
                let at = found.map_or(expected.start, |found| {
                    let is_same = found.start == expected.start;
                    if is_same {
                        found.end.min(expected.end)
                    } else {
                        found.start.min(expected.start)
                    }
                });
                self.differs_at = Some(at);
            }
        }
    }

    /// Passes over a range of which it is not known what is free.
    pub(super) fn skip(&mut self) {
        self.ranges = None;
    }

    /// Ends the group.
    pub(super) fn finish(&mut self) {
        let Some(mut ranges) = self.ranges.take() else { return };
        let at = self.differs_at.or_else(|| ranges.next().map(|range| range.start));
        if let Some(at) = at {
            self.report(format!("its free space differs from that between extents from {at} on"));
        }
    }

    fn report(&self, problem: String) {
        let place = BtrfsFindingPlace::Logical(Logical(self.start));
        self.volume.findings.add(BtrfsFindingCode::SpaceCache, place, problem);
    }
}

/// The parts of `ranges` that are not in `holes`. Both ascend.
fn without<'r>(
    ranges: &'r [Range<u64>],
    holes: &'r [Range<u64>],
) -> impl Iterator<Item = Range<u64>> + 'r {
    ranges.iter().flat_map(move |range| {
        let mut at = range.start;
        let ends = holes.iter().filter(|hole| hole.start < range.end && hole.end > range.start);
        let last = range.end..range.end;
        ends.cloned().chain([last]).filter_map(move |hole| {
            let part = at..hole.start.max(at);
            at = at.max(hole.end);
            (!part.is_empty()).then_some(part)
        })
    })
}

/// The free ranges in the cache of a block group; `None` if it has no cache, or an empty one.
fn read_cache(
    volume: &CheckedVolume<'_>,
    group: &Range<u64>,
) -> Result<Option<Vec<Range<u64>>>, String> {
    let root = volume.root_tree();
    let key = Key::new(objectid::FREE_SPACE, ItemType::UNTYPED, group.start);
    let header = volume.with_item(root, key, |data| FreeSpaceHeader::view(data).ok().copied());
    let Some(header) = header else { return Ok(None) };
    let ino = header.location.get().objectid;
    let key = Key::new(ino, ItemType::INODE_ITEM, 0);
    let inode = volume.with_item(root, key, |data| InodeItem::view(data).ok().copied());
    let inode = inode.ok_or_else(|| format!("its inode {ino} is not there"))?;
    let (size, generation) = (inode.size.get(), inode.generation.get());
    if size == 0 || generation == 0 || header.num_entries.get() == 0 {
        return Ok(None);
    }
    if generation != header.generation.get() {
        let of_header = header.generation;
        return Err(format!("its inode has generation {generation}, and its header {of_header}"));
    }
    let pages = read_pages(volume, ino, size)?;
    let page_size = volume.superblock().sector_size as usize;
    let mut ranges =
        CacheEntries::new(&pages, page_size, generation)?.ranges(volume, group, &header)?;
    ranges.sort_unstable_by_key(|range| range.start);
    if ranges.windows(2).any(|two| matches!(two, [one, next] if one.end > next.start)) {
        return Err("its entries overlap".to_owned());
    }
    Ok(Some(crate::ranges::joined(ranges)))
}

/// The contents of the inode `ino` of the root tree, in whole pages.
fn read_pages(volume: &CheckedVolume<'_>, ino: u64, size: u64) -> Result<Vec<u8>, String> {
    let too_large = || format!("its inode {ino} has {size} bytes");
    if size > MOST_BYTES || !size.is_multiple_of(volume.sector_size()) {
        return Err(too_large());
    }
    let mut pages = vec![0; usize::try_from(size).map_err(|_| too_large())?];
    let (mut end, mut problem) = (0, None);
    let range = KeyRange {
        first: Key::new(ino, ItemType::EXTENT_DATA, 0),
        last: Key::new(ino, ItemType::EXTENT_DATA, u64::MAX),
    };
    volume.each_item(volume.root_tree(), range, &mut |key, data| {
        let read = FileExtent::parse(data).map_err(|error| error.to_string());
        match read.and_then(|extent| read_extent(volume, key.offset, &extent, &mut pages)) {
            Ok(to) if key.offset <= end => end = end.max(to),
            Ok(_) => problem = Some(format!("its inode {ino} has a hole at {end}")),
            Err(error) => problem = Some(error),
        }
        if problem.is_some() || end >= size {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    match problem {
        Some(problem) => Err(problem),
        None if end < size => Err(format!("its inode {ino} has a hole at {end}")),
        None => Ok(pages),
    }
}

/// Reads an extent at `offset` of a file into its place. Returns where it ends in the file.
fn read_extent(
    volume: &CheckedVolume<'_>,
    offset: u64,
    extent: &FileExtent<'_>,
    pages: &mut [u8],
) -> Result<u64, String> {
    let FileExtentBody::Extent { disk_bytenr, offset: skip, num_bytes, .. } = extent.body else {
        return Err(format!("its inode has no extent at {offset}"));
    };
    let from = usize::try_from(offset).unwrap_or(usize::MAX).min(pages.len());
    let len = usize::try_from(num_bytes).unwrap_or(usize::MAX).min(pages.len() - from);
    let buf = pages.get_mut(from..from + len).unwrap_or_default();
    let at = Logical(disk_bytenr.0.saturating_add(skip));
    volume.storage.read_data(volume, at, buf, None).map_err(|error| error.to_string())?;
    Ok(offset.saturating_add(num_bytes))
}

/// The pages of a cache, whose checksums are right.
struct CacheEntries<'p> {
    pages: std::slice::ChunksExact<'p, u8>,
    /// What is left of the current page.
    page: &'p [u8],
}

impl<'p> CacheEntries<'p> {
    /// Checks the checksums and the generation of `pages`.
    fn new(pages: &'p [u8], page_size: usize, generation: u64) -> Result<Self, String> {
        let sums_len = pages.len() / page_size * size_of::<u32>();
        let sums = pages.get(..sums_len).unwrap_or_default();
        for (number, (page, sum)) in
            pages.chunks_exact(page_size).zip(sums.chunks_exact(size_of::<u32>())).enumerate()
        {
            let skipped = if number == 0 { sums_len } else { 0 };
            let summed = page.get(skipped..).ok_or("it has more pages than checksums")?;
            if ChecksumType::Crc32c.compute(summed).bytes() != sum {
                return Err(format!("the checksum of its page {number} is wrong"));
            }
        }
        let mut pages = pages.chunks_exact(page_size);
        let first = pages.next().unwrap_or_default();
        let mut entries = Self { pages, page: first.get(sums_len..).unwrap_or_default() };
        let stored = entries.take(size_of::<u64>()).and_then(number);
        if stored != Some(generation) {
            return Err(format!("its pages are not of generation {generation}"));
        }
        Ok(entries)
    }

    /// The next `len` bytes, in one page.
    fn take(&mut self, len: usize) -> Option<&'p [u8]> {
        if self.page.len() < len {
            self.page = self.pages.next()?;
        }
        let (taken, rest) = self.page.split_at_checked(len)?;
        self.page = rest;
        Some(taken)
    }

    /// All free ranges, in the order of the pages.
    fn ranges(
        mut self,
        volume: &CheckedVolume<'_>,
        group: &Range<u64>,
        header: &FreeSpaceHeader,
    ) -> Result<Vec<Range<u64>>, String> {
        let (mut ranges, mut bitmaps) = (Vec::new(), Vec::new());
        for _ in 0..header.num_entries.get() {
            let entry = self.take(ENTRY_BYTES).ok_or("it has fewer entries than it counts")?;
            let start = entry.get(..8).and_then(number).unwrap_or_default();
            let bytes = entry.get(8..16).and_then(number).unwrap_or_default();
            let range = start..start.saturating_add(bytes);
            let kind = entry.last().copied().unwrap_or_default();
            if bytes == 0 || start < group.start || start >= group.end {
                return Err(format!("an entry for {bytes} bytes at {start}"));
            }
            match kind {
                ENTRY_RANGE if range.end <= group.end => ranges.push(range),
                ENTRY_BITMAP => bitmaps.push(start),
                _ => return Err(format!("an entry of kind {kind} for {bytes} bytes at {start}")),
            }
        }
        if bitmaps.len() as u64 != header.num_bitmaps.get() {
            let counted = header.num_bitmaps;
            return Err(format!("it has {} bitmaps and counts {counted}", bitmaps.len()));
        }
        let sector = volume.sector_size();
        for start in bitmaps {
            let bitmap = self.pages.next().ok_or("it has fewer bitmaps than it counts")?;
            let mut bit = 0;
            while let Some(run) = next_run(bitmap, bit, bitmap.len() as u64 * 8) {
                bit = run.end;
                let at = |bit: u64| start.saturating_add(bit.saturating_mul(sector));
                if at(run.end) > group.end {
                    return Err(format!("a bitmap at {start} with space behind the block group"));
                }
                ranges.push(at(run.start)..at(run.end));
            }
        }
        Ok(ranges)
    }
}

/// A number of 8 bytes.
fn number(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_le_bytes)
}
