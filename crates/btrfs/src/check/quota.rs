//! Quotas: the numbers of groups, computed anew, and the items of the quota tree.
//!
//! | quotas | what a group counts |
//! |---|---|
//! | simple | extents that were made for its subvolumes since quotas are on ([`simple`]) |
//! | full | extents that its subvolumes reach, and those that only they reach ([`full`]) |
//!
//! Groups are not compared when their numbers may be wrong: quotas are off, the status says that
//! they are *inconsistent* or that a *rescan* runs, full ones have a status of an earlier commit,
//! a subvolume is dropped half-way, or a block could not be read.
//!
//! # What is sound
//!
//! A group without a subvolume stays when its subvolume was deleted, and a subvolume without a
//! group counts for none. The kernel does not compare the compressed numbers, and neither does
//! `btrfs check`.

mod full;
mod groups;
mod sets;
mod simple;

use std::collections::BTreeMap;

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::quota::{QgroupId, STATUS_INCONSISTENT, STATUS_RESCAN};
use offshoot_vfs::Result;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::volume::CheckedVolume;
use super::walk::{Walk, WalkedVolume};
pub(crate) use groups::QuotaGroups;
pub(super) use simple::OwnedBlocks;
pub(crate) use simple::OwnedBytes;

/// The bytes of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupBytes {
    /// That it refers to.
    pub(crate) referenced: u64,
    /// That no other group refers to.
    pub(crate) exclusive: u64,
}

/// Checks the quotas. The walk has seen all blocks.
///
/// # Errors
/// When a file of records cannot be written or read, or the caller has ended the check.
pub(super) fn check(walk: &Walk<'_, '_>, walked: &WalkedVolume) -> Result<()> {
    let volume = walk.volume;
    let Some(groups) = QuotaGroups::read(volume) else { return Ok(()) };
    let status = &groups.status;
    if !groups.are_on() {
        return Ok(());
    }
    groups.check_items(volume);
    let is_rescanned = status.has(STATUS_INCONSISTENT) || status.has(STATUS_RESCAN);
    let computed = if groups.is_simple {
        let are_all_seen = walked.damaged.is_empty();
        are_all_seen.then(|| simple::computed(volume, &walk.owned, &groups)).flatten()
    } else if is_rescanned || status.generation.get() != volume.superblock().generation.0 {
        None
    } else {
        full::computed(volume, walked, &groups)?
    };
    if let Some(computed) = computed {
        compare(volume, &groups, &computed);
    }
    volume.require_going_on()
}

/// The numbers of all groups of full quotas, whatever the status says; `None` when a subvolume is
/// dropped half-way.
///
/// # Errors
/// When a file of records cannot be written or read, or the caller has ended the check.
pub(super) fn full_numbers(
    volume: &CheckedVolume<'_>,
    walked: &WalkedVolume,
    groups: &QuotaGroups,
) -> Result<Option<BTreeMap<QgroupId, GroupBytes>>> {
    full::computed(volume, walked, groups)
}

/// Compares the numbers of each group with those that were computed.
fn compare(
    volume: &CheckedVolume<'_>,
    groups: &QuotaGroups,
    computed: &BTreeMap<QgroupId, GroupBytes>,
) {
    for (&group, found) in &groups.stored {
        let expected = computed.get(&group).copied().unwrap_or_default();
        let place = BtrfsFindingPlace::Item { tree: TreeId::QUOTA, key: group.info_key() };
        for (what, expected, found) in [
            ("referenced", expected.referenced, found.referenced),
            ("exclusive", expected.exclusive, found.exclusive),
        ] {
            if expected != found {
                let what = format!("{what} bytes of group {group}");
                volume.findings.differs(BtrfsFindingCode::QuotaGroup, place, what, expected, found);
            }
        }
    }
}
