//! How much of a volume is used, by kind and profile.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::BtrfsVolume;
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk};
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs as vfs;
use serde::Serialize;

use crate::output::Console;

/// All block groups of one kind and profile.
#[derive(Serialize)]
pub(in crate::verbs) struct Allocation {
    pub(in crate::verbs) holds: &'static str,
    pub(in crate::verbs) profile: String,
    pub(in crate::verbs) block_groups: u64,
    pub(in crate::verbs) size: u64,
    /// Absent if the block group items cannot be read.
    pub(in crate::verbs) used: Option<u64>,
}

/// The block groups by kind and profile. Prints a warning for each one that cannot be read.
pub(in crate::verbs) fn allocations(
    volume: &Arc<BtrfsVolume>,
    console: &Console,
) -> Vec<Allocation> {
    let mut by_flags: BTreeMap<BlockGroupFlags, Allocation> = BTreeMap::new();
    for chunk in volume.chunks() {
        let profile = by_flags.entry(chunk.flags).or_insert_with(|| Allocation {
            holds: chunk.flags.kind(),
            profile: chunk.profile.to_string(),
            block_groups: 0,
            size: 0,
            used: Some(0),
        });
        profile.block_groups += 1;
        profile.size = profile.size.saturating_add(chunk.length);
        profile.used = profile.used.and_then(|used| match used_of(volume, &chunk) {
            Ok(more) => Some(used.saturating_add(more)),
            Err(error) => {
                console.warning(&error);
                None
            }
        });
    }
    by_flags.into_values().collect()
}

/// How many bytes of a chunk are used. This needs one search, and no walk through the extent tree.
fn used_of(volume: &Arc<BtrfsVolume>, chunk: &Chunk) -> vfs::Result<u64> {
    let id = if volume.superblock().compat_ro.has(CompatRo::BLOCK_GROUP_TREE) {
        TreeId::BLOCK_GROUP
    } else {
        TreeId::EXTENT
    };
    let key = Key::new(chunk.start.0, ItemType::BLOCK_GROUP_ITEM, chunk.length);
    let mut used = None;
    volume.for_each_item(volume.tree(id)?, key, |found, data| {
        if found == key {
            used = Some(BlockGroupItem::view(data).map(|item| item.used.get()));
        }
        ControlFlow::Break(())
    })?;
    let missing = || {
        vfs::Error::corrupt_at(
            vfs::Structure::BlockGroup,
            chunk.start.0,
            "the chunk here has no block group item",
        )
    };
    used.ok_or_else(missing)?
        .map_err(|error| vfs::Error::corrupt_at(error.structure, chunk.start.0, error.problem))
}
