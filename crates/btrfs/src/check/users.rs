//! Which files use ranges of data.
//!
//! Snapshots share tree blocks, and each of them has the files of the blocks that it shares. A
//! subtree without any use of the ranges is remembered, so it is looked at once, however many
//! snapshots have it.

use std::collections::BTreeSet;
use std::ops::Range;

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, TreeId};
use offshoot_vfs::Result;

use super::addresses::AddressSet;
use super::paths;
use super::volume::{CheckedVolume, KeyRange, root_of};
use crate::block::TreeBlock;

/// The most files that are found.
const MOST_USERS: usize = 10_000;

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DataUser {
    /// Its subvolume.
    pub subvolume: TreeId,
    /// Its inode number.
    pub ino: u64,
    /// Its path from the top level of the volume, by one of its names; `None` if it has none, or if
    /// the way up cannot be read.
    pub path: Option<Vec<u8>>,
}

/// Files that use ranges of data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DataUsers {
    pub(crate) files: Vec<DataUser>,
    /// Whether there are more.
    pub(crate) are_more: bool,
}

/// The search for users.
struct UserSearch<'s, 'c> {
    volume: &'s CheckedVolume<'c>,
    ranges: &'s [Range<u64>],
    /// Blocks below which nothing uses the ranges.
    without: AddressSet,
    found: BTreeSet<(TreeId, u64)>,
    are_more: bool,
}

/// The files that use bytes of `ranges`, which ascend and are apart. A compressed extent is used as
/// a whole. Leaves out what is in blocks that cannot be used.
///
/// # Errors
/// When the caller has ended the check.
pub(crate) fn users_of(volume: &CheckedVolume<'_>, ranges: &[Range<u64>]) -> Result<DataUsers> {
    let mut trees = Vec::new();
    volume.each_item(volume.root_tree(), KeyRange::ALL, &mut |key, data| {
        let id = TreeId(key.objectid);
        if key.item_type == ItemType::ROOT_ITEM
            && id.is_subvolume()
            && let Ok(item) = RootItem::parse(data)
            && !item.is_dead()
        {
            trees.push(root_of(id, &item));
        }
        std::ops::ControlFlow::Continue(())
    });
    let mut search = UserSearch {
        volume,
        ranges,
        without: AddressSet::default(),
        found: BTreeSet::new(),
        are_more: false,
    };
    for root in trees {
        search.look_below(root.id, &volume.actual_root(root).expected())?;
    }
    let mut steps = paths::MOST_STEPS;
    let named = search.found.into_iter().map(|(subvolume, ino)| {
        let path = paths::path_of(volume, subvolume, ino, &mut steps);
        DataUser { subvolume, ino, path }
    });
    Ok(DataUsers { files: named.collect(), are_more: search.are_more })
}

impl UserSearch<'_, '_> {
    /// Looks at a block and all below it. Returns whether a user is there.
    fn look_below(&mut self, tree: TreeId, expected: &ExpectedBlock) -> Result<bool> {
        self.volume.require_going_on()?;
        if self.are_more || self.without.contains(expected.logical) {
            return Ok(false);
        }
        let Some(block) = self.volume.usable_block(expected) else { return Ok(false) };
        let mut has_user = false;
        if block.is_leaf() {
            has_user = self.look_at_leaf(tree, &block);
        } else {
            self.volume.read_ahead(&block, 0..block.len());
            for slot in 0..block.len() {
                has_user |= self.look_below(tree, &block.child_expected(slot, tree))?;
            }
        }
        if !has_user && !self.are_more {
            self.without.insert(expected.logical);
        }
        Ok(has_user)
    }

    fn look_at_leaf(&mut self, tree: TreeId, leaf: &TreeBlock) -> bool {
        let mut has_user = false;
        for slot in 0..leaf.len() {
            let key = leaf.key(slot);
            if key.item_type != ItemType::EXTENT_DATA || !self.uses(leaf.data(slot)) {
                continue;
            }
            has_user = true;
            if self.found.len() < MOST_USERS {
                self.found.insert((tree, key.objectid));
            } else if !self.found.contains(&(tree, key.objectid)) {
                self.are_more = true;
            }
        }
        has_user
    }

    /// Whether an item refers to bytes of the ranges.
    fn uses(&self, data: &[u8]) -> bool {
        let Ok(extent) = FileExtent::parse(data) else { return false };
        let Some(range) = used_range(&extent) else { return false };
        let first = self.ranges.partition_point(|one| one.end <= range.start);
        self.ranges.get(first).is_some_and(|one| one.start < range.end)
    }
}

/// The addresses of the data that an item of a file needs; `None` when that is none. A compressed
/// extent is needed as a whole.
pub(crate) fn used_range(extent: &FileExtent<'_>) -> Option<Range<u64>> {
    match extent.body {
        FileExtentBody::Extent {
            disk_bytenr,
            disk_num_bytes,
            offset,
            num_bytes,
            is_preallocated: false,
        } => {
            let (from, len) = match extent.compression {
                Compression::None => (disk_bytenr.0.saturating_add(offset), num_bytes),
                _ => (disk_bytenr.0, disk_num_bytes),
            };
            Some(from..from.saturating_add(len))
        }
        _ => None,
    }
}
