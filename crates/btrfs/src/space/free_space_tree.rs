//! The free-space tree: the free ranges of every block group, on disk.
//!
//! A block group has a FREE_SPACE_INFO item, which counts its free ranges and says in which form
//! they are stored. With few ranges, each is a FREE_SPACE_EXTENT item. With many, they are bits of
//! FREE_SPACE_BITMAP items, one bit for every sector.
//!
//! All changes of a run of delayed references to a block group are recorded at once. The number of
//! ranges that are stored as items has a low limit, so the stored free space of a group is small
//! and cheap to read whole. The writer makes all items of the group anew from the ranges, and puts
//! those that differ into the tree, for all block groups as one batch.

use std::collections::BTreeMap;
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
type Items = BTreeMap<Key, Vec<u8>>;

/// New data of items of the tree, or `None` to remove an item.
pub(super) type Edits = Vec<(Key, Option<Vec<u8>>)>;

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
            Some(last) if range.start < last.end => {
                let problem = format!("{:#x} is free twice", range.start);
                Err(Error::corrupt_at(Structure::FreeSpaceTree, range.start, problem))
            }
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
            Some(cut) => Err(Error::corrupt_at(
                Structure::FreeSpaceTree,
                cut.start,
                "an extent is made where it is not free",
            )),
        }
    }
}

/// Sets the bits `range` of a bitmap.
fn set_bits(bitmap: &mut [u8], range: Range<u64>) {
    let place = |bit: u64| (usize::try_from(bit / 8).expect("within a bitmap"), bit % 8);
    let ((first, from), (last, to)) = (place(range.start), place(range.end));
    let (head, tail) = (u8::MAX << from, !(u8::MAX << to));
    if first == last {
        bitmap[first] |= head & tail;
        return;
    }
    bitmap[first] |= head;
    bitmap[first + 1..last].fill(u8::MAX);
    if tail != 0 {
        bitmap[last] |= tail;
    }
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

/// Adds the edits of one block group for `changed`.
fn edit_group(
    volume: &dyn Roots,
    group: &BlockGroup,
    changed: &Changed,
    edits: &mut Edits,
) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let before = info(volume, group)?;
    let (mut old, mut ranges, mut all) = (Items::new(), AscendingRanges::default(), Ok(()));
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
    let uses_bitmaps = before.flags.get() & FREE_SPACE_USING_BITMAPS != 0
        || ranges.0.len() as u64 > most_ranges(volume, group);
    let mut new = if uses_bitmaps {
        bitmaps(volume, group, &ranges)
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
    new.insert(info_key(group), after.as_bytes().to_vec());
    edits.extend(difference(&old, new));
    Ok(())
}

/// Beyond this many ranges, bitmaps take less space than items.
fn most_ranges(volume: &dyn Roots, group: &BlockGroup) -> u64 {
    let bitmap_range = bitmap_range(volume);
    let bitmap_item = u64::from(FREE_SPACE_BITMAP_SIZE) + 25;
    let bitmaps = group.len.div_ceil(bitmap_range);
    (bitmaps * bitmap_item / 25).saturating_add(100)
}

/// The bytes of the logical space that one bitmap covers.
fn bitmap_range(volume: &dyn Roots) -> u64 {
    u64::from(FREE_SPACE_BITMAP_SIZE) * 8 * u64::from(volume.superblock().sector_size)
}

/// The bitmaps of a block group in which `ranges` are free.
fn bitmaps(volume: &dyn Roots, group: &BlockGroup, ranges: &AscendingRanges) -> Items {
    let sector = u64::from(volume.superblock().sector_size);
    let span = bitmap_range(volume);
    let step = usize::try_from(span).expect("a bitmap covers little");
    let mut rest = ranges.0.iter().cloned().peekable();
    let bitmap = |start: u64| {
        let end = group.end().min(start + span);
        let bits = (end - start) / sector;
        let mut bitmap = vec![0; usize::try_from(bits.div_ceil(8)).expect("within a bitmap")];
        while let Some(range) = rest.peek_mut().filter(|range| range.start < end) {
            let cut = range.start - start..range.end.min(end) - start;
            set_bits(&mut bitmap, cut.start / sector..cut.end / sector);
            range.start = range.end.min(end);
            if range.is_empty() {
                rest.next();
            }
        }
        (Key::new(start, ItemType::FREE_SPACE_BITMAP, end - start), bitmap)
    };
    (group.start.0..group.end()).step_by(step).map(bitmap).collect()
}

/// The edits that turn the old items into the new ones.
fn difference(old: &Items, new: Items) -> Edits {
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
            for bit in changed.used.iter().cloned().flatten() {
                model[usize::try_from(bit / 8).expect("small")] &= !(1 << (bit % 8));
            }
            for range in &changed.free {
                set_bits(&mut model, range.clone());
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
}
