//! Counts new and removed extents for simple quotas, by their owner.
//!
//! The extent item of data names its owner; a tree block has its owner in its header. An extent
//! counts from the commit that adds its item until the commit that removes it, no matter which
//! subvolumes refer to it meanwhile. It counts once for the group of the owner, and once for every
//! group above that one. Extents that are older than the quotas, and blocks of trees that are not
//! subvolumes, count for no group.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::space::QgroupInfoItem;
use offshoot_btrfs_format::{Generation, Logical, TreeId};
use offshoot_vfs::Result;
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::Quotas;
use super::groups::{parents_of, used_by};
use crate::report::VolumeReport;
use crate::storage::malformed;
use crate::transaction::TransactionHandle;
use crate::tree::Blocks;

/// Changes of a transaction that are not in the quota tree yet.
#[derive(Debug, Default)]
pub(crate) struct QuotaUsage {
    /// The change of the bytes that count for each subvolume.
    changed: Mutex<BTreeMap<TreeId, i128>>,
    /// Subvolumes that were dropped completely.
    dropped: Mutex<BTreeSet<TreeId>>,
}

impl QuotaUsage {
    fn add(&self, owner: TreeId, bytes: i128) {
        *self.changed.lock().entry(owner).or_default() += bytes;
    }

    pub(super) fn add_dropped(&self, id: TreeId) {
        self.dropped.lock().insert(id);
    }

    pub(super) fn take_dropped(&self) -> BTreeSet<TreeId> {
        std::mem::take(&mut self.dropped.lock())
    }
}

impl TransactionHandle<'_> {
    /// Whether extents of the transaction `generation` count for `owner`.
    fn counts(&self, owner: TreeId, generation: Generation) -> bool {
        match self.live().quotas {
            Quotas::Simple { enabled_in } => owner.is_subvolume() && generation >= enabled_in,
            Quotas::Off | Quotas::Full { .. } => false,
        }
    }

    /// Counts a new extent for `owner`. Returns whether the extent item of data has to name its
    /// owner.
    pub(crate) fn count_new_extent(&self, owner: TreeId, bytes: u64) -> bool {
        if self.counts(owner, self.generation()) {
            self.usage().add(owner, bytes.into());
        }
        matches!(self.live().quotas, Quotas::Simple { .. })
    }

    /// Stops counting an extent of data of the transaction `generation`.
    pub(crate) fn uncount_data(&self, owner: Option<TreeId>, generation: Generation, bytes: u64) {
        if let Some(owner) = owner.filter(|&owner| self.counts(owner, generation)) {
            self.usage().add(owner, -i128::from(bytes));
        }
    }

    /// Stops counting a tree block of a subvolume, of the transaction `generation`.
    ///
    /// # Errors
    /// When the block cannot be read: its header names its owner.
    pub(crate) fn uncount_block(
        &self,
        logical: Logical,
        level: u8,
        generation: Generation,
    ) -> Result<()> {
        if !self.counts(TreeId::FS, generation) {
            return Ok(());
        }
        // The check accepts blocks of any subvolume where it expects one of FS_TREE.
        let owner = TreeId::FS;
        let expected = ExpectedBlock { logical, level, generation, owner, first_key: None };
        let owner = self.volume().block(&expected)?.header().owner();
        let bytes = i128::from(self.volume().superblock().node_size);
        self.usage().add(owner, -bytes);
        Ok(())
    }

    /// Adds the counted changes to the groups. Returns how many groups changed.
    pub(super) fn store_usage(&self) -> Result<usize> {
        let changed = std::mem::take(&mut *self.usage().changed.lock());
        let mut groups = BTreeMap::<QgroupId, i128>::new();
        for (id, bytes) in changed.into_iter().filter(|(_, bytes)| *bytes != 0) {
            for group in self.groups_with(QgroupId::of_subvolume(id))? {
                *groups.entry(group).or_default() += bytes;
            }
        }
        groups.retain(|_, bytes| *bytes != 0);
        for (&group, &bytes) in &groups {
            self.change_used(group, bytes)?;
        }
        Ok(groups.len())
    }

    /// The group and all groups above it that exist. Empty if the group itself does not exist: then
    /// its extents count for none.
    fn groups_with(&self, group: QgroupId) -> Result<BTreeSet<QgroupId>> {
        let (mut found, mut next) = (BTreeSet::new(), vec![group]);
        while let Some(group) = next.pop() {
            if found.contains(&group) || used_by(self.volume(), group)?.is_none() {
                continue;
            }
            found.insert(group);
            next.extend(parents_of(self.volume(), group)?);
        }
        Ok(found)
    }

    /// Adds `bytes` to the numbers of the group. If a number would fall below 0, it was wrong
    /// before: it becomes 0, and the volume reports it.
    fn change_used(&self, group: QgroupId, bytes: i128) -> Result<()> {
        let mut is_wrong = false;
        let mut changed = |used: u64| {
            let sum = i128::from(used) + bytes;
            u64::try_from(sum).unwrap_or_else(|_| {
                is_wrong = true;
                if sum < 0 { 0 } else { u64::MAX }
            })
        };
        self.change(TreeId::QUOTA, |tree| {
            tree.modify(group.info_key(), 0, |data| {
                let old = data.unwrap_or_default();
                let mut item = *QgroupInfoItem::view(old).map_err(malformed)?;
                item.generation = self.generation().0.into();
                item.rfer = changed(item.rfer.get()).into();
                item.excl = changed(item.excl.get()).into();
                let rest = &old[size_of::<QgroupInfoItem>()..];
                Ok([item.as_bytes(), rest].concat())
            })
        })?;
        if is_wrong {
            self.volume().report(&VolumeReport::WrongQuota { group });
        }
        Ok(())
    }
}
