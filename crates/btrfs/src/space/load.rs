//! Loading the free ranges of a block group.

use std::ops::Range;

use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::Result;

use super::free_space::FreeSpace;
use super::free_space_tree::for_each_free_range;
use super::{BlockGroup, Roots};
use crate::tree::Cursor;

/// Loads the free ranges of `group`. Also returns what is wrong with the trees that they come from,
/// if anything is.
///
/// The `used` value of the block group item shows whether the tree can be believed. If not, the
/// volume is damaged, and ranges that may be in use do not count as free.
///
/// | from | how much of the group is used | what is free |
/// |---|---|---|
/// | the free-space tree | as the item says | what the tree says |
/// | the free-space tree | less or more than that | what neither that tree nor the extent tree has in use |
/// | the extent tree | as the item says, or more | what is in no extent |
/// | the extent tree | less: an extent may be missing | nothing |
pub(super) fn load_free_space(
    volume: &dyn Roots,
    group: &BlockGroup,
) -> Result<(FreeSpace, Option<String>)> {
    let valid = CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID);
    let used = group.used_bytes();
    if !volume.superblock().compat_ro.has(valid) {
        let extents = extents(volume, group)?;
        let found: u64 = extents.iter().fold(0, |all, one| all.saturating_add(one.end - one.start));
        let mut free = nothing_free(volume, group);
        if found >= used {
            let whole = group.start.0..group.end();
            add_without(&mut free, std::slice::from_ref(&whole), &joined(extents));
        }
        let what = format!("its item counts {used} bytes as used, its extents have {found}");
        return Ok((free, (found != used).then_some(what)));
    }
    let (mut free, mut shown) = (nothing_free(volume, group), 0u64);
    for_each_free_range(volume, group, |range| {
        shown = shown.saturating_add(range.end - range.start);
        free.add(range.start, range.end);
    })?;
    let len = group.len;
    if shown.checked_add(used) == Some(len) {
        return Ok((free, None));
    }
    let what = format!(
        "its item counts {used} bytes of {len} as used, the free-space tree has {shown} bytes as free"
    );
    let mut ranges = Vec::new();
    for_each_free_range(volume, group, |range| ranges.push(range))?;
    let mut free = nothing_free(volume, group);
    add_without(&mut free, &ranges, &joined(extents(volume, group)?));
    Ok((free, Some(what)))
}

/// The free space of `group`, with no free range yet. Both trees show the left-out ranges as free,
/// although they can never be allocated.
fn nothing_free(volume: &dyn Roots, group: &BlockGroup) -> FreeSpace {
    let left_out = volume.storage().left_out_ranges(group.start);
    if group.flags.has_data() {
        FreeSpace::of_bytes(group.start.0, left_out)
    } else {
        let node_size = u64::from(volume.superblock().node_size);
        FreeSpace::of_blocks(group.start.0, node_size, left_out)
    }
}

/// These ranges in ascending order. Ranges that touch or overlap are joined.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    crate::ranges::joined(ranges)
}

/// Adds the parts of `ranges` that are not in `without`. Both ascend.
fn add_without(free: &mut FreeSpace, ranges: &[Range<u64>], without: &[Range<u64>]) {
    let mut holes = without;
    for range in ranges {
        holes = &holes[holes.partition_point(|hole| hole.end <= range.start)..];
        let mut at = range.start;
        for hole in holes.iter().take_while(|hole| hole.start < range.end) {
            free.add(at, hole.start.max(at));
            at = at.max(hole.end);
        }
        free.add(at, range.end.max(at));
    }
}

/// The extents of a block group, from the extent tree, in the order of their addresses.
fn extents(volume: &dyn Roots, group: &BlockGroup) -> Result<Vec<Range<u64>>> {
    let node_size = u64::from(volume.superblock().node_size);
    let mut all = Vec::new();
    let first = Key::new(group.start.0, ItemType::EXTENT_ITEM, 0);
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId::EXTENT)?, first)?;
    while let Some((key, _)) = cursor.item().filter(|(key, _)| key.objectid < group.end()) {
        let len = match key.item_type {
            ItemType::EXTENT_ITEM => Some(key.offset),
            ItemType::METADATA_ITEM => Some(node_size),
            _ => None,
        };
        all.extend(len.map(|len| key.objectid..key.objectid.saturating_add(len)));
        cursor.advance()?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use offshoot_testkit::random::Random;

    use super::*;

    /// The parts that remain are those that a map of bytes has left.
    #[test]
    fn what_is_left_of_ranges_is_what_is_in_no_hole() {
        const LEN: u64 = 300;
        let seed = 19;
        println!("seed {seed}");
        let mut random = Random::new(seed);
        for _ in 0..500 {
            let mut ranges = Vec::new();
            let mut at = random.below(20);
            while at < LEN {
                let end = (at + 1 + random.below(40)).min(LEN);
                ranges.push(at..end);
                at = end + 1 + random.below(30);
            }
            let holes = |random: &mut Random| {
                let hole = |random: &mut Random| {
                    let at = random.below(LEN);
                    at..at + random.below(25)
                };
                (0..random.below(8)).map(|_| hole(random)).collect::<Vec<_>>()
            };
            let (some, others) = (holes(&mut random), holes(&mut random));
            let is_left = |byte: u64| {
                ranges.iter().any(|range| range.contains(&byte))
                    && !some.iter().chain(&others).any(|hole| hole.contains(&byte))
            };
            let mut free = FreeSpace::of_bytes(0, Vec::new());
            add_without(&mut free, &ranges, &joined([some.clone(), others.clone()].concat()));
            for byte in 0..LEN + 30 {
                let is_free = free.take_range(byte, byte + 1);
                assert_eq!(is_free, is_left(byte), "byte {byte} of {ranges:?}");
            }
        }
    }
}
