//! The free-space tree: the free ranges of every block group, on disk.
//!
//! A block group has a FREE_SPACE_INFO item, which counts its free ranges and says in which form
//! they are stored. With few ranges, each is a FREE_SPACE_EXTENT item. With many, they are bits of
//! FREE_SPACE_BITMAP items, one bit for every sector.
//!
//! All changes of a run of delayed references to a block group are recorded at once, and those of
//! all block groups are put into the tree as one batch.
//!
//! Bitmaps are changed only where ranges fall ([`edit_bitmaps`]). The number of ranges that are
//! stored as items has a low limit, so these are cheap to read whole. The writer makes all of them
//! anew, and keeps those that differ. It does the same for bitmaps of another length than ours.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use offshoot_btrfs_format::space::{
    FREE_SPACE_BITMAP_SIZE, FREE_SPACE_USING_BITMAPS, FreeSpaceInfo,
};
use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::IntoBytes;

use super::{BlockGroup, Roots, Space};
use crate::storage::malformed;
use crate::tree::{Cursor, with_item};

const TREE: TreeId = TreeId::FREE_SPACE;

/// The items of a block group, by their keys.
type FreeSpaceItems = BTreeMap<Key, Vec<u8>>;

/// New data of items of the tree, or `None` to remove an item.
pub(crate) type Edits = Vec<(Key, Option<Vec<u8>>)>;

/// The key of the info of a block group.
fn info_key(group: &BlockGroup) -> Key {
    Key::new(group.start.0, ItemType::FREE_SPACE_INFO, group.len)
}

/// The info of a block group: the number of free ranges, and their form.
fn info(volume: &dyn Roots, group: &BlockGroup) -> Result<FreeSpaceInfo> {
    with_item(volume, volume.tree(TREE)?, info_key(group), |data| {
        FreeSpaceInfo::view(data).copied().map_err(malformed)
    })?
    .ok_or_else(|| {
        Error::corrupt_at(Structure::FreeSpaceInfo, group.start.0, "the block group has none")
    })
}

/// Calls `visit` with every item of free ranges of `group`, in order.
///
/// # Errors
/// When items overlap, leave the block group, have another form than the info says, or are bitmaps
/// with gaps between them.
fn for_each_item(
    volume: &dyn Roots,
    group: &BlockGroup,
    info: FreeSpaceInfo,
    mut visit: impl FnMut(Key, &[u8]),
) -> Result<()> {
    let uses_bitmaps = info.flags.get() & FREE_SPACE_USING_BITMAPS != 0;
    let mut cursor = Cursor::seek(volume, volume.tree(TREE)?, info_key(group))?;
    cursor.advance()?;
    let mut behind = group.start.0;
    while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid < group.end()) {
        let end = key.objectid.saturating_add(key.offset);
        if key.objectid < behind || end > group.end() {
            let what =
                format!("{:#x} to {end:#x} is free twice, or in no block group", key.objectid);
            return Err(Error::corrupt_at(Structure::FreeSpaceTree, key.objectid, what));
        }
        if uses_bitmaps && key.objectid != behind {
            return Err(no_bitmap(behind));
        }
        behind = end;
        match key.item_type {
            ItemType::FREE_SPACE_EXTENT if !uses_bitmaps => visit(key, data),
            ItemType::FREE_SPACE_BITMAP if uses_bitmaps => visit(key, data),
            other => {
                let what = format!("an item of type {other} among the free space of a block group");
                return Err(Error::corrupt_at(Structure::FreeSpaceTree, key.objectid, what));
            }
        }
        cursor.advance()?;
    }
    if uses_bitmaps && behind != group.end() { Err(no_bitmap(behind)) } else { Ok(()) }
}

/// Bitmaps lie side by side from the beginning of a block group to its end.
fn no_bitmap(at: u64) -> Error {
    let what = "the bitmaps of its block group leave this address out";
    Error::corrupt_at(Structure::FreeSpaceTree, at, what)
}

/// Calls `visit` with the free ranges of an item, in order.
fn ranges_of(key: Key, data: &[u8], sector: u64, mut visit: impl FnMut(Range<u64>)) {
    if key.item_type == ItemType::FREE_SPACE_EXTENT {
        return visit(key.objectid..key.objectid.saturating_add(key.offset));
    }
    for run in runs(data, key.offset / sector) {
        visit(key.objectid + run.start * sector..key.objectid + run.end * sector);
    }
}

/// Calls `visit` with every free range of `group`, in order.
pub(super) fn for_each_free_range(
    volume: &dyn Roots,
    group: &BlockGroup,
    mut visit: impl FnMut(Range<u64>),
) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let info = info(volume, group)?;
    for_each_item(volume, group, info, |key, data| ranges_of(key, data, sector, &mut visit))
}

fn bit(bitmap: &[u8], at: u64) -> bool {
    let byte = usize::try_from(at / 8).unwrap_or(usize::MAX);
    bitmap.get(byte).is_some_and(|byte| byte & (1 << (at % 8)) != 0)
}

/// The runs of ones among the first `bits` of a bitmap.
fn runs(bitmap: &[u8], bits: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bits && !bit(bitmap, at) {
            at += 1;
        }
        let start = at;
        while at < bits && bit(bitmap, at) {
            at += 1;
        }
        (start < at).then_some(start..at)
    })
}

/// Ranges that ascend and do not touch each other.
#[derive(Debug, Default)]
struct AscendingRanges(Vec<Range<u64>>);

impl AscendingRanges {
    /// Adds a range that begins where the last one ends, or behind that.
    ///
    /// # Errors
    /// When the range begins before the end of the last one.
    fn push(&mut self, range: Range<u64>) -> Result<()> {
        match self.0.last_mut() {
            Some(last) if range.start < last.end => Err(free_twice(range.start)),
            Some(last) if range.start == last.end => {
                last.end = range.end;
                Ok(())
            }
            _ => {
                self.0.push(range);
                Ok(())
            }
        }
    }

    /// These ranges with `more` added. The new ones ascend and overlap none of these.
    fn with(&self, more: &[Range<u64>]) -> Result<Self> {
        let mut all = Self(Vec::with_capacity(self.0.len() + more.len()));
        let (mut own, mut more) = (self.0.iter().peekable(), more.iter().peekable());
        while let Some(next) = match (own.peek(), more.peek()) {
            (Some(one), Some(other)) if other.start < one.start => more.next(),
            (None, _) => more.next(),
            _ => own.next(),
        } {
            all.push(next.clone())?;
        }
        Ok(all)
    }

    /// These ranges without `less`, which ascend and must lie in these.
    fn without(&self, less: &[Range<u64>]) -> Result<Self> {
        let mut rest = Self(Vec::with_capacity(self.0.len()));
        let mut less = less.iter().peekable();
        for Range { start, end } in self.0.iter().cloned() {
            let mut at = start;
            while let Some(cut) = less.next_if(|cut| at <= cut.start && cut.end <= end) {
                if at < cut.start {
                    rest.push(at..cut.start)?;
                }
                at = cut.end;
            }
            if at < end {
                rest.push(at..end)?;
            }
        }
        match less.next() {
            None => Ok(rest),
            Some(cut) => Err(used_twice(cut.start)),
        }
    }
}

/// Flips the bits `range` of a bitmap, and makes them ones if `to_ones`, or else zeros. Returns
/// false when some were so before; then the bitmap is of no use any more.
fn flip_bits(bitmap: &mut [u8], range: Range<u64>, to_ones: bool) -> bool {
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min((at / 8 + 1) * 8);
        let mask = u8::MAX << (at % 8) & u8::MAX >> (7 - (end - 1) % 8);
        let byte = &mut bitmap[usize::try_from(at / 8).expect("within a bitmap")];
        if *byte & mask != if to_ones { 0 } else { mask } {
            return false;
        }
        *byte ^= mask;
        at = end;
    }
    true
}

/// A bitmap, and the addresses of its bits.
struct LoadedBitmap {
    covered: Range<u64>,
    bits: Vec<u8>,
    is_changed: bool,
}

/// The bitmaps of a block group that are looked at.
struct BitmapEdits<'l> {
    /// The addresses of the block group.
    group: Range<u64>,
    sector: u64,
    load: &'l mut dyn FnMut(Key) -> Result<Option<Vec<u8>>>,
    loaded: BTreeMap<Key, LoadedBitmap>,
}

impl BitmapEdits<'_> {
    /// The bitmap that covers `at`; `None` when it is missing or has another length than ours.
    fn at(&mut self, at: u64) -> Result<Option<&mut LoadedBitmap>> {
        let span = bitmap_range(self.sector);
        let start = at - (at - self.group.start) % span;
        let covered = start..self.group.end.min(start + span);
        let key = Key::new(start, ItemType::FREE_SPACE_BITMAP, covered.end - start);
        Ok(Some(match self.loaded.entry(key) {
            Entry::Occupied(loaded) => loaded.into_mut(),
            Entry::Vacant(place) => {
                let len = (key.offset / self.sector).div_ceil(8);
                let Some(bits) = (self.load)(key)?.filter(|bits| bits.len() as u64 == len) else {
                    return Ok(None);
                };
                place.insert(LoadedBitmap { covered, bits, is_changed: false })
            }
        }))
    }

    /// Whether the sector at `at` is free. None outside of the block group is.
    fn is_free(&mut self, at: u64) -> Result<Option<bool>> {
        if !self.group.contains(&at) {
            return Ok(Some(false));
        }
        let sector = self.sector;
        let found = self.at(at)?;
        Ok(found.map(|bitmap| bit(&bitmap.bits, (at - bitmap.covered.start) / sector)))
    }

    /// Marks `range` as free, or as used, and returns how many more free ranges there are then.
    fn change(&mut self, range: &Range<u64>, becomes_free: bool) -> Result<Option<i64>> {
        if range.end > self.group.end {
            let what = format!("{range:x?} is not in one block group");
            return Err(Error::corrupt_at(Structure::ExtentTree, range.start, what));
        }
        let (mut neighbors, sector) = (0, self.sector);
        for at in [range.start.wrapping_sub(sector), range.end] {
            let Some(is_free) = self.is_free(at)? else { return Ok(None) };
            neighbors += i64::from(is_free);
        }
        let mut at = range.start;
        while at < range.end {
            let Some(bitmap) = self.at(at)? else { return Ok(None) };
            let (start, end) = (bitmap.covered.start, range.end.min(bitmap.covered.end));
            let bits = (at - start) / sector..(end - start) / sector;
            if !flip_bits(&mut bitmap.bits, bits, becomes_free) {
                return Err(if becomes_free { free_twice(at) } else { used_twice(at) });
            }
            bitmap.is_changed = true;
            at = end;
        }
        Ok(Some(if becomes_free { 1 - neighbors } else { neighbors - 1 }))
    }
}

/// The edits of the bitmaps of `group`, and how many free ranges it has then, when it had `count`;
/// `None` when a bitmap is missing or has another length than ours. `load` finds an item.
fn edit_bitmaps(
    group: Range<u64>,
    sector: u64,
    count: u32,
    changed: &Changed,
    load: &mut dyn FnMut(Key) -> Result<Option<Vec<u8>>>,
) -> Result<Option<(Edits, u32)>> {
    let mut bitmaps = BitmapEdits { group, sector, load, loaded: BTreeMap::new() };
    let mut count = i64::from(count);
    for (ranges, becomes_free) in [(&changed.free, true), (&changed.used, false)] {
        for range in ranges {
            let Some(more) = bitmaps.change(range, becomes_free)? else { return Ok(None) };
            count += more;
        }
    }
    // A damaged count may fall below 0. Then all ranges are counted.
    let Ok(count) = u32::try_from(count) else { return Ok(None) };
    let changed = bitmaps.loaded.into_iter().filter(|(_, bitmap)| bitmap.is_changed);
    Ok(Some((changed.map(|(key, bitmap)| (key, Some(bitmap.bits))).collect(), count)))
}

fn free_twice(at: u64) -> Error {
    Error::corrupt_at(Structure::FreeSpaceTree, at, format!("{at:#x} is free twice"))
}

fn used_twice(at: u64) -> Error {
    Error::corrupt_at(Structure::FreeSpaceTree, at, "an extent is made where it is not free")
}

/// The ranges that become free and those that become used in one block group. Both ascend.
#[derive(Debug, Default)]
struct Changed {
    free: Vec<Range<u64>>,
    used: Vec<Range<u64>>,
}

impl Space {
    /// The edits of the free-space tree for ranges that become `free`, and ranges that become
    /// `used`. Both ascend. In a volume without such a tree there are none.
    pub(crate) fn edits_of_free_space(
        &self,
        volume: &dyn Roots,
        free: &[Range<u64>],
        used: &[Range<u64>],
    ) -> Result<Edits> {
        let mut edits = Vec::new();
        if !volume.superblock().compat_ro.has(CompatRo::FREE_SPACE_TREE) {
            return Ok(edits);
        }
        let mut groups: BTreeMap<u64, (_, Changed)> = BTreeMap::new();
        for (ranges, becomes_free) in [(free, true), (used, false)] {
            let mut rest = ranges;
            while let Some(first) = rest.first() {
                let group = self.group_of(Logical(first.start))?;
                let (here, behind) = rest.split_at(rest.partition_point(|r| r.start < group.end()));
                let entry = groups.entry(group.start.0).or_insert((group, Changed::default()));
                let changed = &mut entry.1;
                *(if becomes_free { &mut changed.free } else { &mut changed.used }) = here.to_vec();
                rest = behind;
            }
        }
        for (group, changed) in groups.values() {
            edit_group(volume, group, changed, &mut edits)?;
        }
        Ok(edits)
    }
}

/// The edits of the free-space tree that make `group` end after `len` bytes. All behind that is
/// free.
pub(crate) fn edits_of_shortened(
    volume: &dyn Roots,
    group: &BlockGroup,
    len: u64,
) -> Result<Edits> {
    if !volume.superblock().compat_ro.has(CompatRo::FREE_SPACE_TREE) {
        return Ok(Edits::new());
    }
    let sector = u64::from(volume.superblock().sector_size);
    let before = info(volume, group)?;
    let end = group.start.0 + len;
    let (mut old, mut ranges, mut all) =
        (FreeSpaceItems::new(), AscendingRanges::default(), Ok(()));
    for_each_item(volume, group, before, |key, data| {
        ranges_of(key, data, sector, |range| {
            let kept = range.start..range.end.min(end);
            if all.is_ok() && !kept.is_empty() {
                all = ranges.push(kept);
            }
        });
        old.insert(key, data.to_vec());
    })?;
    all?;
    old.insert(info_key(group), before.as_bytes().to_vec());
    let has_bitmaps = before.flags.get() & FREE_SPACE_USING_BITMAPS != 0;
    let new = group_items(group.start.0..end, sector, &ranges, has_bitmaps);
    Ok(difference(&old, new))
}

/// The items of a block group in which `ranges` are free.
fn group_items(
    group: Range<u64>,
    sector: u64,
    ranges: &AscendingRanges,
    uses_bitmaps: bool,
) -> FreeSpaceItems {
    let info_key = Key::new(group.start, ItemType::FREE_SPACE_INFO, group.end - group.start);
    let mut new = if uses_bitmaps {
        bitmaps(group, sector, ranges)
    } else {
        let item = |range: &Range<u64>| {
            let len = range.end - range.start;
            (Key::new(range.start, ItemType::FREE_SPACE_EXTENT, len), Vec::new())
        };
        ranges.0.iter().map(item).collect()
    };
    let count = u32::try_from(ranges.0.len()).expect("a block group has fewer sectors");
    let flags = if uses_bitmaps { FREE_SPACE_USING_BITMAPS } else { 0 };
    let after = FreeSpaceInfo { extent_count: count.into(), flags: flags.into() };
    new.insert(info_key, after.as_bytes().to_vec());
    new
}

/// Adds the edits of one block group for `changed`.
fn edit_group(
    volume: &dyn Roots,
    group: &BlockGroup,
    changed: &Changed,
    edits: &mut Edits,
) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let before = info(volume, group)?;
    let had_bitmaps = before.flags.get() & FREE_SPACE_USING_BITMAPS != 0;
    let addresses = group.start.0..group.end();
    if had_bitmaps {
        let count = before.extent_count.get();
        let root = volume.tree(TREE)?;
        let mut load = |key| with_item(volume, root, key, |data| Ok(data.to_vec()));
        if let Some((bitmaps, now)) =
            edit_bitmaps(addresses.clone(), sector, count, changed, &mut load)?
        {
            // The key of the info comes before those of the bitmaps.
            if now != count {
                let after = FreeSpaceInfo { extent_count: now.into(), flags: before.flags };
                edits.push((info_key(group), Some(after.as_bytes().to_vec())));
            }
            edits.extend(bitmaps);
            return Ok(());
        }
    }
    let (mut old, mut ranges, mut all) =
        (FreeSpaceItems::new(), AscendingRanges::default(), Ok(()));
    for_each_item(volume, group, before, |key, data| {
        ranges_of(key, data, sector, |range| {
            if all.is_ok() {
                all = ranges.push(range);
            }
        });
        old.insert(key, data.to_vec());
    })?;
    all?;
    old.insert(info_key(group), before.as_bytes().to_vec());
    let ranges = ranges.with(&changed.free)?.without(&changed.used)?;
    let uses_bitmaps = had_bitmaps || ranges.0.len() as u64 > most_ranges(sector, group);
    edits.extend(difference(&old, group_items(addresses, sector, &ranges, uses_bitmaps)));
    Ok(())
}

/// Beyond this many ranges, bitmaps take less space than items.
fn most_ranges(sector: u64, group: &BlockGroup) -> u64 {
    let bitmap_range = bitmap_range(sector);
    let bitmap_item = u64::from(FREE_SPACE_BITMAP_SIZE) + 25;
    let bitmaps = group.len.div_ceil(bitmap_range);
    (bitmaps * bitmap_item / 25).saturating_add(100)
}

/// The bytes of the logical space that one bitmap covers.
fn bitmap_range(sector: u64) -> u64 {
    u64::from(FREE_SPACE_BITMAP_SIZE) * 8 * sector
}

/// The bitmaps of a block group in which `ranges` are free.
fn bitmaps(group: Range<u64>, sector: u64, ranges: &AscendingRanges) -> FreeSpaceItems {
    let span = bitmap_range(sector);
    let step = usize::try_from(span).expect("a bitmap covers little");
    let mut rest = ranges.0.iter().cloned().peekable();
    let bitmap = |start: u64| {
        let end = group.end.min(start + span);
        let bits = (end - start) / sector;
        let mut bitmap = vec![0; usize::try_from(bits.div_ceil(8)).expect("within a bitmap")];
        while let Some(range) = rest.peek_mut().filter(|range| range.start < end) {
            let cut = range.start - start..range.end.min(end) - start;
            flip_bits(&mut bitmap, cut.start / sector..cut.end / sector, true);
            range.start = range.end.min(end);
            if range.is_empty() {
                rest.next();
            }
        }
        (Key::new(start, ItemType::FREE_SPACE_BITMAP, end - start), bitmap)
    };
    group.clone().step_by(step).map(bitmap).collect()
}

/// The edits that turn the old items into the new ones.
fn difference(old: &FreeSpaceItems, new: FreeSpaceItems) -> Edits {
    let gone = old.keys().filter(|key| !new.contains_key(key)).map(|key| (*key, None));
    let mut edits: Vec<_> = gone.collect();
    let is_new = |(key, data): &(Key, Vec<u8>)| old.get(key) != Some(data);
    edits.extend(new.into_iter().filter(is_new).map(|(key, data)| (key, Some(data))));
    edits.sort_unstable_by_key(|(key, _)| *key);
    edits
}

#[cfg(test)]
mod tests {
    use offshoot_testkit::random::Random;

    use super::*;

    /// Ranges under changes are the runs of a bitmap under the same changes.
    #[test]
    fn ranges_are_the_runs_of_a_bitmap() {
        const BITS: u64 = 200;
        let mut random = Random::new(11);
        let mut model = vec![0; 25];
        let mut ranges = AscendingRanges::default();
        for _ in 0..2000 {
            let mut changed = Changed::default();
            let mut at = random.below(30);
            while at < BITS {
                let end = (at + 1 + random.below(20)).min(BITS);
                let is_free = |bit: u64| super::bit(&model, bit);
                if (at..end).all(is_free) {
                    changed.used.push(at..end);
                } else if !(at..end).any(is_free) {
                    changed.free.push(at..end);
                }
                at = end + random.below(30);
            }
            for (ranges, becomes_free) in [(&changed.used, false), (&changed.free, true)] {
                for range in ranges {
                    assert!(flip_bits(&mut model, range.clone(), becomes_free));
                    let again = flip_bits(&mut model.clone(), range.clone(), becomes_free);
                    assert!(!again, "they are so already");
                }
            }
            ranges = ranges.with(&changed.free).unwrap().without(&changed.used).unwrap();
            assert_eq!(ranges.0, runs(&model, BITS).collect::<Vec<_>>());
            for free in &changed.free {
                ranges.with(std::slice::from_ref(free)).unwrap_err();
            }
            for used in &changed.used {
                ranges.without(std::slice::from_ref(used)).unwrap_err();
            }
        }
    }

    /// Bitmaps that are changed where ranges fall are those that are made anew from all ranges.
    #[test]
    fn changed_bitmaps_are_those_of_all_ranges() {
        const SECTOR: u64 = 4096;
        let seed = 23;
        println!("seed {seed}");
        let mut random = Random::new(seed);
        // Two bitmaps and a part of a third one.
        let sectors = 2 * 2048 + 99;
        let group = 5 * SECTOR..(5 + sectors) * SECTOR;
        let mut ranges = AscendingRanges::default();
        let mut items = bitmaps(group.clone(), SECTOR, &ranges);
        let mut most_loaded = 0;
        for step in 0..3000 {
            let (mut changed, mut at) = (Changed::default(), random.below(sectors));
            let is_free = |sector: u64| {
                let at = group.start + sector * SECTOR;
                ranges
                    .0
                    .get(ranges.0.partition_point(|range| range.end <= at))
                    .is_some_and(|range| range.contains(&at))
            };
            while at < sectors {
                let end = (at + 1 + random.below(60)).min(sectors);
                let range = group.start + at * SECTOR..group.start + end * SECTOR;
                if (at..end).all(is_free) {
                    changed.used.push(range);
                } else if !(at..end).any(is_free) {
                    changed.free.push(range);
                }
                at = end + random.below(if step % 2 == 0 { 2000 } else { 30 });
            }
            let count = u32::try_from(ranges.0.len()).expect("few");
            let (before, mut loaded) = (items.clone(), 0);
            let mut load = |key| {
                loaded += 1;
                Ok(before.get(&key).cloned())
            };
            let edited = edit_bitmaps(group.clone(), SECTOR, count, &changed, &mut load);
            let (edits, count) = edited.expect("they fit").expect("they are ours");
            most_loaded = most_loaded.max(loaded);
            items.extend(edits.into_iter().map(|(key, data)| (key, data.expect("it stays"))));
            ranges = ranges.with(&changed.free).unwrap().without(&changed.used).unwrap();
            assert_eq!(count as usize, ranges.0.len(), "step {step}");
            assert_eq!(items, bitmaps(group.clone(), SECTOR, &ranges), "step {step}");
            let mut load = |key| Ok(items.get(&key).cloned());
            if !changed.free.is_empty() || !changed.used.is_empty() {
                let again = edit_bitmaps(group.clone(), SECTOR, count, &changed, &mut load);
                assert!(again.is_err(), "step {step}: they are so already");
            }
        }
        assert_eq!(most_loaded, 3, "each is loaded once");
        // Bitmaps of another length are left to the writer that makes all anew.
        let mut one = Changed::default();
        one.free.push(group.start..group.start + SECTOR);
        let found = edit_bitmaps(group, SECTOR, 0, &one, &mut |_| Ok(Some(vec![0; 7])));
        assert!(found.expect("no error").is_none());
    }
}
