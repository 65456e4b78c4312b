//! The free-space tree: what is free in every block group, on disk.
//!
//! A block group has a FREE_SPACE_INFO that counts its free ranges, and these either as
//! FREE_SPACE_EXTENT items, one for each, or, when there are many, as FREE_SPACE_BITMAP items, which
//! have a bit for every sector. Which form a block group has is said by its info.

use std::ops::Range;

use offshoot_btrfs_format::space::{
    FREE_SPACE_BITMAP_SIZE, FREE_SPACE_USING_BITMAPS, FreeSpaceInfo,
};
use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};
use zerocopy::IntoBytes;

use super::BlockGroup;
use crate::subvolume::malformed;
use crate::transaction::Handle;
use crate::tree::{Cursor, Edit, with_item};
use crate::volume::Engine;

const TREE: TreeId = TreeId::FREE_SPACE;

/// The key of the info of a block group.
fn info_key(group: &BlockGroup) -> Key {
    Key::new(group.start.0, ItemType::FREE_SPACE_INFO, group.len)
}

/// The info of a block group: how many free ranges, and in which form.
fn info(volume: &Engine, group: &BlockGroup) -> Result<FreeSpaceInfo> {
    with_item(volume, volume.tree(TREE)?, info_key(group), |data| {
        FreeSpaceInfo::view(data).copied().map_err(malformed)
    })?
    .ok_or_else(|| Error::corrupt_at("free space info", group.start.0, "the block group has none"))
}

/// Calls `visit` with every free range of `group`, in order.
pub(super) fn for_each_free_range(
    volume: &Engine,
    group: &BlockGroup,
    mut visit: impl FnMut(Range<u64>),
) -> Result<()> {
    let sector = u64::from(volume.superblock().sector_size);
    let uses_bitmaps = info(volume, group)?.flags.get() & FREE_SPACE_USING_BITMAPS != 0;
    let mut cursor = Cursor::seek(volume, volume.tree(TREE)?, info_key(group))?;
    cursor.advance()?;
    while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid < group.end()) {
        match key.item_type {
            ItemType::FREE_SPACE_EXTENT if !uses_bitmaps => {
                visit(key.objectid..key.objectid + key.offset);
            }
            ItemType::FREE_SPACE_BITMAP if uses_bitmaps => {
                let bits = key.offset / sector;
                for run in runs(data, bits) {
                    visit(key.objectid + run.start * sector..key.objectid + run.end * sector);
                }
            }
            other => {
                let what = format!("an item of type {other} among the free space of a block group");
                return Err(Error::corrupt_at("free space tree", key.objectid, what));
            }
        }
        cursor.advance()?;
    }
    Ok(())
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

impl Handle<'_> {
    fn has_free_space_tree(&self) -> bool {
        self.volume().superblock().compat_ro.has(CompatRo::FREE_SPACE_TREE)
    }

    /// Records that a range is an extent now.
    pub(crate) fn mark_used(&self, logical: Logical, len: u64) -> Result<()> {
        if !self.has_free_space_tree() {
            return Ok(());
        }
        let group = self.space().group_of(logical)?;
        self.change_free_space(&group, logical.0..logical.0 + len, false)
    }

    /// Records that a range is no extent any more.
    pub(crate) fn mark_free(&self, logical: Logical, len: u64) -> Result<()> {
        if !self.has_free_space_tree() {
            return Ok(());
        }
        let group = self.space().group_of(logical)?;
        self.change_free_space(&group, logical.0..logical.0 + len, true)
    }

    fn change_free_space(
        &self,
        group: &BlockGroup,
        range: Range<u64>,
        becomes_free: bool,
    ) -> Result<()> {
        let info = info(self.volume(), group)?;
        let uses_bitmaps = info.flags.get() & FREE_SPACE_USING_BITMAPS != 0;
        let delta = match (uses_bitmaps, becomes_free) {
            (true, _) => self.change_bits(group, &range, becomes_free)?,
            (false, true) => self.add_range(group, range)?,
            (false, false) => self.cut_range(&range)?,
        };
        let count = i64::from(info.extent_count.get()) + delta;
        let count = u32::try_from(count).map_err(|_| {
            Error::corrupt_at("free space info", group.start.0, "it counts too few ranges")
        })?;
        if delta != 0 {
            let flags = info.flags;
            let info = FreeSpaceInfo { extent_count: count.into(), flags };
            self.change(TREE, |tree| {
                tree.modify(info_key(group), 0, |_| Ok(Edit::Put(info.as_bytes().to_vec())))
            })?;
        }
        if !uses_bitmaps && u64::from(count) > self.most_ranges(group) {
            self.convert_to_bitmaps(group)?;
        }
        Ok(())
    }

    /// Beyond this many ranges, bitmaps take less space than items.
    fn most_ranges(&self, group: &BlockGroup) -> u64 {
        let bitmap_range = self.bitmap_range();
        let bitmap_item = u64::from(FREE_SPACE_BITMAP_SIZE) + 25;
        let bitmaps = group.len.div_ceil(bitmap_range);
        (bitmaps * bitmap_item / 25).saturating_add(100)
    }

    /// The bytes of the logical space that one bitmap covers.
    fn bitmap_range(&self) -> u64 {
        u64::from(FREE_SPACE_BITMAP_SIZE) * 8 * u64::from(self.volume().superblock().sector_size)
    }

    /// Takes `range` out of the free range that holds it.
    fn cut_range(&self, range: &Range<u64>) -> Result<i64> {
        let missing = || {
            Error::corrupt_at(
                "free space tree",
                range.start,
                "an extent is made where it is not free",
            )
        };
        let key = Key::new(range.start, ItemType::FREE_SPACE_EXTENT, u64::MAX);
        let found = {
            let cursor = Cursor::seek_floor(self.volume(), self.volume().tree(TREE)?, key)?;
            cursor.item().map(|(key, _)| key)
        };
        let found =
            found.filter(|k| k.item_type == ItemType::FREE_SPACE_EXTENT).ok_or_else(missing)?;
        let (start, end) = (found.objectid, found.objectid + found.offset);
        if range.end > end {
            return Err(missing());
        }
        self.change(TREE, |tree| {
            tree.remove(found)?;
            let mut delta = -1;
            for (start, end) in [(start, range.start), (range.end, end)] {
                if start < end {
                    let key = Key::new(start, ItemType::FREE_SPACE_EXTENT, end - start);
                    tree.insert(key, &[])?;
                    delta += 1;
                }
            }
            Ok(delta)
        })
    }

    /// Adds `range`, joined with the free ranges that it touches.
    fn add_range(&self, group: &BlockGroup, range: Range<u64>) -> Result<i64> {
        let (mut start, mut end) = (range.start, range.end);
        let mut joined = Vec::new();
        {
            let key = Key::new(range.start, ItemType::FREE_SPACE_EXTENT, 0);
            let mut cursor = Cursor::seek_floor(self.volume(), self.volume().tree(TREE)?, key)?;
            while let Some((key, _)) = cursor.item().filter(|(key, _)| key.objectid <= range.end) {
                let is_range = key.item_type == ItemType::FREE_SPACE_EXTENT
                    && (group.start.0..group.end()).contains(&key.objectid);
                if is_range && key.objectid + key.offset == start {
                    start = key.objectid;
                    joined.push(key);
                } else if is_range && key.objectid == end {
                    end += key.offset;
                    joined.push(key);
                }
                cursor.advance()?;
            }
        }
        self.change(TREE, |tree| {
            for key in &joined {
                tree.remove(*key)?;
            }
            tree.insert(Key::new(start, ItemType::FREE_SPACE_EXTENT, end - start), &[])
        })?;
        Ok(1 - i64::try_from(joined.len()).expect("at most two"))
    }

    /// Sets or clears the bits of `range`, and says by how much the number of free ranges changed.
    fn change_bits(&self, group: &BlockGroup, range: &Range<u64>, to: bool) -> Result<i64> {
        let sector = u64::from(self.volume().superblock().sector_size);
        let is_free = |at: u64| self.is_free_bit(group, at);
        let before = range.start > group.start.0 && is_free(range.start - sector)?;
        let behind = range.end < group.end() && is_free(range.end)?;
        let mut at = range.start;
        while at < range.end {
            let key = self.bitmap_of(group, at)?;
            let end = range.end.min(key.objectid + key.offset);
            self.change(TREE, |tree| {
                tree.modify(key, 0, |data| {
                    let mut bitmap = data.unwrap_or_default().to_vec();
                    for sector_at in (at..end).step_by(usize::try_from(sector).expect("small")) {
                        let bit = (sector_at - key.objectid) / sector;
                        let byte = &mut bitmap[usize::try_from(bit / 8).expect("within a bitmap")];
                        let mask = 1 << (bit % 8);
                        *byte = if to { *byte | mask } else { *byte & !mask };
                    }
                    Ok(Edit::Put(bitmap))
                })
            })?;
            at = end;
        }
        let neighbours = i64::from(before) + i64::from(behind);
        Ok(if to { 1 - neighbours } else { neighbours - 1 })
    }

    /// The key of the bitmap that covers `at`.
    fn bitmap_of(&self, group: &BlockGroup, at: u64) -> Result<Key> {
        let key = Key::new(at, ItemType::FREE_SPACE_BITMAP, u64::MAX);
        let cursor = Cursor::seek_floor(self.volume(), self.volume().tree(TREE)?, key)?;
        let found = cursor.item().map(|(key, _)| key).filter(|key| {
            key.item_type == ItemType::FREE_SPACE_BITMAP
                && key.objectid >= group.start.0
                && at < key.objectid + key.offset
        });
        found
            .ok_or_else(|| Error::corrupt_at("free space tree", at, "no bitmap covers the address"))
    }

    fn is_free_bit(&self, group: &BlockGroup, at: u64) -> Result<bool> {
        let key = self.bitmap_of(group, at)?;
        let sector = u64::from(self.volume().superblock().sector_size);
        with_item(self.volume(), self.volume().tree(TREE)?, key, |data| {
            Ok(bit(data, (at - key.objectid) / sector))
        })
        .map(|found| found.unwrap_or(false))
    }

    /// Replaces the ranges of a block group by bitmaps.
    fn convert_to_bitmaps(&self, group: &BlockGroup) -> Result<()> {
        let sector = u64::from(self.volume().superblock().sector_size);
        let span = self.bitmap_range();
        let count =
            usize::try_from(group.len.div_ceil(span)).expect("a block group has few bitmaps");
        let size = FREE_SPACE_BITMAP_SIZE as usize;
        let mut bitmaps = vec![vec![0u8; size]; count];
        let mut ranges = 0;
        for_each_free_range(self.volume(), group, |range| {
            ranges += 1;
            let step = usize::try_from(sector).expect("small");
            for at in range.step_by(step) {
                let at = at - group.start.0;
                let bit = at % span / sector;
                let (bitmap, byte) = (at / span, bit / 8);
                let place = |n: u64| usize::try_from(n).expect("within a block group");
                bitmaps[place(bitmap)][place(byte)] |= 1 << (bit % 8);
            }
        })?;
        let info =
            FreeSpaceInfo { extent_count: ranges.into(), flags: FREE_SPACE_USING_BITMAPS.into() };
        let first = Key::new(group.start.0, ItemType::FREE_SPACE_EXTENT, 0);
        let last = Key::new(group.end() - 1, ItemType::FREE_SPACE_EXTENT, u64::MAX);
        self.change(TREE, |tree| {
            // The info stands before the ranges: its type is lower.
            tree.remove_range(first, last)?;
            tree.modify(info_key(group), 0, |_| Ok(Edit::Put(info.as_bytes().to_vec())))?;
            for (i, bitmap) in bitmaps.iter().enumerate() {
                let start = group.start.0 + i as u64 * span;
                let len = span.min(group.end() - start);
                let bytes = usize::try_from((len / sector).div_ceil(8)).expect("within a bitmap");
                let key = Key::new(start, ItemType::FREE_SPACE_BITMAP, len);
                tree.insert(key, &bitmap[..bytes])?;
            }
            Ok(())
        })
    }
}
