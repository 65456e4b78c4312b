//! Finding out what is free in a block group.

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
    // What is left out is no extent: both trees show it as free.
    let left_out = volume.left_out_ranges(group.start);
    let node_size = u64::from(volume.superblock().node_size);
    let mut free = if group.flags.has_data() {
        FreeSpace::of_bytes(group.start.0, left_out)
    } else {
        FreeSpace::of_blocks(group.start.0, node_size, left_out)
    };
    if volume.superblock().compat_ro.has(valid) {
        for_each_free_range(volume, group, |range| free.add(range.start, range.end))?;
        return Ok(free);
    }
    let mut at = group.start.0;
    for (start, end) in extents(volume, group)? {
        free.add(at, start.max(at));
        at = at.max(end);
    }
    free.add(at, group.end());
    Ok(free)
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
