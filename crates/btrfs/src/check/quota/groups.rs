//! The quota tree.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use offshoot_btrfs_format::quota::{QgroupId, STATUS_ON, STATUS_SIMPLE, STATUS_VERSION};
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupStatusItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};

use super::GroupBytes;
use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::volume::{CheckedVolume, KeyRange};

/// The groups of a volume with quotas.
pub(crate) struct QuotaGroups {
    pub(crate) status: QgroupStatusItem,
    /// Whether an extent counts for the subvolume that it was made for.
    pub(crate) is_simple: bool,
    /// The numbers of each group, as the quota tree has them.
    pub(crate) stored: BTreeMap<QgroupId, GroupBytes>,
    /// The groups that have an item with limits.
    pub(crate) limits: BTreeSet<QgroupId>,
    /// Both groups of each relation item, in the order of its key.
    pub(crate) relations: BTreeSet<(QgroupId, QgroupId)>,
}

impl QuotaGroups {
    /// Reads the quota tree; `None` when there is none with a status, or not all of it can be read.
    pub(crate) fn read(volume: &CheckedVolume<'_>) -> Option<Self> {
        let tree = volume.tree(TreeId::QUOTA)?;
        let (mut status, mut stored) = (None, BTreeMap::new());
        let (mut limits, mut relations) = (BTreeSet::new(), BTreeSet::new());
        // An item that is too short is refused with its leaf.
        let walked = volume.each_item(tree, KeyRange::ALL, &mut |key, data| {
            let group = QgroupId(key.offset);
            match key.item_type {
                ItemType::QGROUP_STATUS => status = QgroupStatusItem::view(data).ok().copied(),
                ItemType::QGROUP_INFO => {
                    if let Ok(info) = QgroupInfoItem::view(data) {
                        let (referenced, exclusive) = (info.rfer.get(), info.excl.get());
                        stored.insert(group, GroupBytes { referenced, exclusive });
                    }
                }
                ItemType::QGROUP_LIMIT => drop(limits.insert(group)),
                ItemType::QGROUP_RELATION => {
                    relations.insert((QgroupId(key.objectid), group));
                }
                _ => {}
            }
            ControlFlow::Continue(())
        });
        let status = status.filter(|_| walked.is_whole())?;
        let is_simple = status.has(STATUS_ON | STATUS_SIMPLE);
        Some(Self { status, is_simple, stored, limits, relations })
    }

    /// Whether quotas are on, in the version that is known.
    pub(crate) fn are_on(&self) -> bool {
        self.status.has(STATUS_ON) && self.status.version.get() == STATUS_VERSION
    }

    /// The group and all groups that contain it. Empty when the group is not there.
    pub(super) fn with_containers(&self, group: QgroupId) -> BTreeSet<QgroupId> {
        let (mut found, mut next) = (BTreeSet::new(), vec![group]);
        while let Some(group) = next.pop() {
            if self.stored.contains_key(&group) && found.insert(group) {
                // The item of a relation that leads to a container has the lower number first.
                let first = (group, QgroupId(group.0.saturating_add(1)));
                let items = self.relations.range(first..=(group, QgroupId(u64::MAX)));
                next.extend(items.map(|(_, container)| *container));
            }
        }
        found
    }

    /// Checks that each item has the others that belong to it.
    pub(super) fn check_items(&self, volume: &CheckedVolume<'_>) {
        let add = |key: Key, problem: String| {
            let place = BtrfsFindingPlace::Item { tree: TreeId::QUOTA, key };
            volume.findings.add(BtrfsFindingCode::QuotaItem, place, problem);
        };
        for group in self.limits.iter().filter(|group| !self.stored.contains_key(group)) {
            add(group.limit_key(), format!("there is no group {group}"));
        }
        for group in self.stored.keys().filter(|group| !self.limits.contains(group)) {
            add(group.info_key(), format!("group {group} has no item with limits"));
        }
        for &(one, other) in &self.relations {
            let key = one.relation_key(other);
            if let Some(missing) = [one, other].iter().find(|one| !self.stored.contains_key(one)) {
                add(key, format!("there is no group {missing}"));
            } else if one.level() == other.level() {
                add(key, format!("groups {one} and {other} are of one level"));
            } else if !self.relations.contains(&(other, one)) {
                add(key, format!("there is no {}", other.relation_key(one)));
            }
        }
    }
}
