//! Finding out what is free in a block group.

use std::ops::Range;

use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::Result;

use super::BlockGroup;
use super::free_space::FreeSpace;
use super::free_space_tree::for_each_free_range;
use crate::tree::Cursor;
use crate::volume::Engine;

/// Loads the free ranges of `group`.
pub(super) fn load_free_space(volume: &Engine, group: &BlockGroup) -> Result<FreeSpace> {
    let valid = CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID);
    // Superblocks are no extents: both trees show the place that they occupy as free.
    let superblocks = volume.superblock_ranges(group.start);
    let mut free = FreeSpace::default();
    if volume.superblock().compat_ro.has(valid) {
        for_each_free_range(volume, group, |range| add_without(&mut free, range, &superblocks))?;
        return Ok(free);
    }
    let mut at = group.start.0;
    for (start, end) in extents(volume, group)? {
        add_without(&mut free, at..start.max(at), &superblocks);
        at = at.max(end);
    }
    add_without(&mut free, at..group.end(), &superblocks);
    Ok(free)
}

/// Adds `range` but for what of it is in `without`, which ascends.
fn add_without(free: &mut FreeSpace, range: Range<u64>, without: &[Range<u64>]) {
    let mut at = range.start;
    for hole in without.iter().filter(|hole| hole.start < range.end && hole.end > range.start) {
        free.add(at, hole.start.max(at));
        at = at.max(hole.end);
    }
    free.add(at, range.end.max(at));
}

/// The extents of a block group, from the extent tree.
fn extents(volume: &Engine, group: &BlockGroup) -> Result<Vec<(u64, u64)>> {
    let node_size = u64::from(volume.superblock().node_size);
    let mut all = Vec::new();
    let first = Key::new(group.start.0, ItemType::EXTENT_ITEM, 0);
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId::EXTENT)?, first)?;
    while let Some((key, _)) = cursor.item().filter(|(key, _)| key.objectid < group.end()) {
        match key.item_type {
            ItemType::EXTENT_ITEM => all.push((key.objectid, key.objectid + key.offset)),
            ItemType::METADATA_ITEM => all.push((key.objectid, key.objectid + node_size)),
            _ => {}
        }
        cursor.advance()?;
    }
    Ok(all)
}
