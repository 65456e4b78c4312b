//! Simple quotas: an extent counts for the subvolume that it was made for, its *owner*.
//!
//! The extent item of data names the owner, and the header of a tree block does. Extents that are
//! older than the quotas count for no group, and neither do blocks of trees that are no
//! subvolumes. Both numbers of a group are the same.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::block::BlockHeader;
use offshoot_btrfs_format::extent::{EXTENT_FLAG_DATA, InlineRef, ParsedExtent};
use offshoot_btrfs_format::quota::{QgroupId, STATUS_KEY, STATUS_ON, STATUS_SIMPLE};
use offshoot_btrfs_format::space::QgroupStatusItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use parking_lot::Mutex;

use super::GroupBytes;
use super::groups::QuotaGroups;
use crate::check::volume::{CheckedVolume, KeyRange};

/// The bytes of tree blocks of each owner, which the walk through the trees counts.
pub(in crate::check) struct OwnedBlocks {
    /// The transaction that enabled simple quotas; `None` when the volume has none.
    enabled_in: Option<Generation>,
    bytes: Mutex<BTreeMap<TreeId, u64>>,
}

impl OwnedBlocks {
    /// Nothing is counted yet.
    pub(in crate::check) fn of(volume: &CheckedVolume<'_>) -> Self {
        let enabled_in = |data: &[u8]| {
            let status = QgroupStatusItem::view(data).ok()?;
            let is_simple = status.has(STATUS_ON | STATUS_SIMPLE);
            is_simple.then(|| QgroupStatusItem::enabled_in(data).ok()).flatten()
        };
        let tree = volume.tree(TreeId::QUOTA);
        let enabled_in = tree.and_then(|tree| volume.with_item(tree, STATUS_KEY, enabled_in));
        Self { enabled_in, bytes: Mutex::default() }
    }

    /// Counts a block that the walk comes to for the first time.
    pub(in crate::check) fn add(&self, header: &BlockHeader, node_size: u64) {
        let owner = header.owner();
        if self.enabled_in.is_some_and(|since| header.generation() >= since) && owner.is_subvolume()
        {
            *self.bytes.lock().entry(owner).or_default() += node_size;
        }
    }

    /// What each owner has so far; `None` when the volume has no simple quotas.
    pub(in crate::check) fn bytes(&self) -> Option<OwnedBytes> {
        Some(OwnedBytes { since: self.enabled_in?, bytes: self.bytes.lock().clone() })
    }
}

/// The bytes that each owner has.
pub(crate) struct OwnedBytes {
    /// The transaction that enabled simple quotas.
    since: Generation,
    bytes: BTreeMap<TreeId, u64>,
}

impl OwnedBytes {
    /// Adds the extent of data that an item of the extent tree is of, if it counts.
    pub(crate) fn add_item(&mut self, key: Key, data: &[u8]) {
        if key.item_type == ItemType::EXTENT_ITEM
            && let Ok(extent) = ParsedExtent::parse(key.item_type, data)
            && extent.item.flags.get() & EXTENT_FLAG_DATA != 0
            && extent.item.generation.get() >= self.since.0
        {
            let owner = extent.inline_refs().find_map(|reference| match reference {
                Ok(InlineRef::Owner(owner)) => Some(TreeId(owner)),
                _ => None,
            });
            if let Some(owner) = owner.filter(|owner| owner.is_subvolume()) {
                let sum = self.bytes.entry(owner).or_default();
                *sum = sum.saturating_add(key.offset);
            }
        }
    }

    /// The owners that have bytes.
    pub(crate) fn owners(&self) -> impl Iterator<Item = TreeId> {
        self.bytes.iter().filter(|(_, bytes)| **bytes > 0).map(|(owner, _)| *owner)
    }

    /// The numbers of all groups.
    pub(crate) fn numbers(&self, groups: &QuotaGroups) -> BTreeMap<QgroupId, GroupBytes> {
        let mut numbers = BTreeMap::<_, GroupBytes>::new();
        for (owner, bytes) in &self.bytes {
            for group in groups.with_containers(QgroupId::of_subvolume(*owner)) {
                let sum = numbers.entry(group).or_default();
                sum.referenced = sum.referenced.saturating_add(*bytes);
                sum.exclusive = sum.referenced;
            }
        }
        numbers
    }
}

/// The numbers of all groups; `None` when not all extent items can be read.
pub(super) fn computed(
    volume: &CheckedVolume<'_>,
    blocks: &OwnedBlocks,
    groups: &QuotaGroups,
) -> Option<BTreeMap<QgroupId, GroupBytes>> {
    let mut bytes = blocks.bytes()?;
    let extents = volume.tree(TreeId::EXTENT)?;
    let walked = volume.each_item(extents, KeyRange::ALL, &mut |key, data| {
        bytes.add_item(key, data);
        ControlFlow::Continue(())
    });
    walked.is_whole().then(|| bytes.numbers(groups))
}
