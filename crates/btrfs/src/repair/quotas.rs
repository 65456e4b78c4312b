//! The items of quotas, mended from each other, and the numbers of groups, counted anew.
//!
//! | | what is made of it |
//! |---|---|
//! | a subvolume, or an owner with simple quotas, without a group | both items of its group |
//! | a group with one of its two items | the other one; limits are none |
//! | half a relation | the other half |
//! | a relation of groups that are not there, or of one level | it is removed |
//! | the numbers of a group | they are counted anew |
//!
//! The group of a deleted subvolume stays, as the kernel keeps it: with simple quotas it counts
//! what the subvolume has left to others.
//!
//! Full quotas are counted anew when that was asked for, and when files were edited, because the
//! new leaves count for their subvolumes. Simple ones always are: their owners stand in the extent
//! tree, which each repair makes anew. Numbers that cannot be counted, because a deleted subvolume
//! is dropped half-way, are marked as inconsistent. The kernel counts them when it is asked to.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::quota::{QgroupId, STATUS_INCONSISTENT, STATUS_KEY, STATUS_RESCAN};
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupLimitItem, QgroupStatusItem};
use offshoot_btrfs_format::{Generation, Key, TreeId};
use offshoot_vfs::Result;
use zerocopy::{FromBytes, IntoBytes};

use super::plan::ItemMap;
use super::survey::SpaceSurvey;
use crate::check::{CheckedVolume, GroupBytes, QuotaGroups, ReachedVolume};

/// What becomes of the quota tree.
#[derive(Clone, Debug, Default)]
pub(super) struct QuotaChanges {
    /// New items, and new data of old ones.
    pub(super) items: ItemMap,
    /// Items that go.
    pub(super) removed: BTreeSet<Key>,
}

/// Whether the numbers of full quotas are counted anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recount {
    Yes,
    No,
}

impl Recount {
    /// They are counted anew if `is_needed`.
    pub(super) fn when(is_needed: bool) -> Self {
        if is_needed { Self::Yes } else { Self::No }
    }
}

/// The numbers of the groups as they must be.
type GroupNumbers = BTreeMap<QgroupId, GroupBytes>;

/// What the transaction `generation` makes of the quota tree.
///
/// # Errors
/// When a file of records cannot be written or read, or the caller has ended the repair.
pub(super) fn changes(
    reached: &ReachedVolume<'_, '_>,
    survey: &SpaceSurvey,
    (old, generation): (Generation, Generation),
    recount: Recount,
) -> Result<QuotaChanges> {
    let volume = reached.volume();
    let Some(mut groups) = QuotaGroups::read(volume) else { return Ok(QuotaChanges::default()) };
    let mut changes = QuotaChanges::default();
    let status = groups.status;
    let is_counted = groups.are_on() && (recount == Recount::Yes || groups.is_simple);
    if !is_counted {
        // Numbers of an earlier transaction stay what they are.
        if status.generation.get() == old.0 {
            changes.set_status(volume, |status| status.generation = generation.0.into());
        }
        return Ok(changes);
    }
    let numbers = count(reached, survey, &mut groups, &mut changes, generation)?;
    let is_known = numbers.is_some();
    for (&group, stored) in &groups.stored {
        let Some(numbers) = &numbers else { break };
        let right = numbers.get(&group).copied().unwrap_or_default();
        if right != *stored || changes.items.contains_key(&group.info_key()) {
            changes.items.insert(group.info_key(), info(right, generation));
        }
    }
    changes.set_status(volume, |status| {
        let old = status.flags.get();
        let flags = match (is_known, groups.is_simple) {
            (true, _) => old & !(STATUS_INCONSISTENT | STATUS_RESCAN),
            // Simple quotas have no such state.
            (false, true) => old,
            (false, false) => old | STATUS_INCONSISTENT,
        };
        status.flags = flags.into();
        if flags & STATUS_RESCAN == 0 {
            status.rescan = 0.into();
        }
        status.generation = generation.0.into();
    });
    Ok(changes)
}

/// Mends the items, and counts the numbers of all groups.
fn count(
    reached: &ReachedVolume<'_, '_>,
    survey: &SpaceSurvey,
    groups: &mut QuotaGroups,
    changes: &mut QuotaChanges,
    generation: Generation,
) -> Result<Option<GroupNumbers>> {
    let mut needed: BTreeSet<_> = reached.subvolumes().map(QgroupId::of_subvolume).collect();
    if !groups.is_simple {
        changes.mend_items(groups, needed, generation);
        return reached.full_quotas(groups);
    }
    let Some(mut bytes) = reached.owned_blocks() else {
        changes.mend_items(groups, needed, generation);
        return Ok(None);
    };
    let mut spooled = survey.items.read()?;
    while let Some((key, data)) = spooled.item() {
        bytes.add_item(key, data);
        spooled.advance()?;
    }
    needed.extend(bytes.owners().map(QgroupId::of_subvolume));
    changes.mend_items(groups, needed, generation);
    Ok(Some(bytes.numbers(groups)))
}

impl QuotaChanges {
    /// Gives each group both items, and each relation both halves. `needed` are groups that must be
    /// there.
    fn mend_items(
        &mut self,
        groups: &mut QuotaGroups,
        needed: BTreeSet<QgroupId>,
        generation: Generation,
    ) {
        let all: BTreeSet<_> = needed.into_iter().chain(groups.limits.iter().copied()).collect();
        for group in all {
            groups.stored.entry(group).or_insert_with(|| {
                let none = GroupBytes::default();
                self.items.insert(group.info_key(), info(none, generation));
                none
            });
        }
        for &group in groups.stored.keys() {
            if groups.limits.insert(group) {
                let limits = QgroupLimitItem::no_limits().as_bytes().to_vec();
                self.items.insert(group.limit_key(), limits);
            }
        }
        for (one, other) in std::mem::take(&mut groups.relations) {
            let are_there = [one, other].iter().all(|group| groups.stored.contains_key(group));
            if are_there && one.level() != other.level() {
                groups.relations.extend([(one, other), (other, one)]);
            } else {
                self.removed.insert(one.relation_key(other));
            }
        }
        for &(one, other) in &groups.relations {
            // An item that is there already has no data either.
            self.items.insert(one.relation_key(other), Vec::new());
        }
    }

    /// Changes the status.
    fn set_status(
        &mut self,
        volume: &CheckedVolume<'_>,
        change: impl FnOnce(&mut QgroupStatusItem),
    ) {
        let data = volume
            .tree(TreeId::QUOTA)
            .and_then(|tree| volume.with_item(tree, STATUS_KEY, |data| Some(data.to_vec())));
        let Some(mut data) = data else { return };
        if let Ok((status, _)) = QgroupStatusItem::mut_from_prefix(&mut data) {
            change(status);
            self.items.insert(STATUS_KEY, data);
        }
    }
}

/// The item with the numbers of a group. The compressed numbers are those of the bytes on the
/// devices, too, as the kernel has it.
fn info(bytes: GroupBytes, generation: Generation) -> Vec<u8> {
    let item = QgroupInfoItem {
        generation: generation.0.into(),
        rfer: bytes.referenced.into(),
        rfer_cmpr: bytes.referenced.into(),
        excl: bytes.exclusive.into(),
        excl_cmpr: bytes.exclusive.into(),
    };
    item.as_bytes().to_vec()
}
