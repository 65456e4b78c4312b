//! What simple quotas count: extents that came, and extents that went, by their owner.
//!
//! Data names its owner in the extent item; a tree block has it in its own header. An extent counts
//! from the commit on that adds its item until the commit that removes it, whoever refers to it
//! meanwhile. It counts for the group of the owner, and for every group that this one is in, once.
//! What is older than the quotas, and what trees that are no subvolumes have, counts for no group.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::check::Expected;
use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::space::QgroupInfoItem;
use offshoot_btrfs_format::{Generation, Logical, TreeId};
use offshoot_vfs::Result;
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::Quotas;
use super::groups::{parents_of, used_by};
use crate::report::Report;
use crate::storage::malformed;
use crate::transaction::Handle;
use crate::tree::Blocks;

/// What a transaction did that the quota tree does not say yet.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// By how many bytes what counts for a subvolume changed.
    changed: Mutex<BTreeMap<TreeId, i128>>,
    /// Subvolumes that were dropped to the end.
    dropped: Mutex<BTreeSet<TreeId>>,
}

impl Usage {
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

impl Handle<'_> {
    /// Whether extents of the transaction `generation` count for `owner`.
    fn counts(&self, owner: TreeId, generation: Generation) -> bool {
        match self.live().quotas {
            Quotas::Simple { enabled_in } => owner.is_subvolume() && generation >= enabled_in,
            Quotas::Off | Quotas::Full { .. } => false,
        }
    }

    /// Counts a new extent for `owner`, and says whether its item is to name the owner, if it is
    /// data.
    pub(crate) fn count_new_extent(&self, owner: TreeId, bytes: u64) -> bool {
        if self.counts(owner, self.generation()) {
            self.usage().add(owner, bytes.into());
        }
        matches!(self.live().quotas, Quotas::Simple { .. })
    }

    /// Counts data no more that was made in the transaction `generation`.
    pub(crate) fn uncount_data(&self, owner: Option<TreeId>, generation: Generation, bytes: u64) {
        if let Some(owner) = owner.filter(|&owner| self.counts(owner, generation)) {
            self.usage().add(owner, -i128::from(bytes));
        }
    }

    /// Counts a tree block no more that a subvolume had, and that was made in the transaction
    /// `generation`.
    ///
    /// # Errors
    /// When the block does not read: it says whose it is.
    pub(crate) fn uncount_block(
        &self,
        logical: Logical,
        level: u8,
        generation: Generation,
    ) -> Result<()> {
        if !self.counts(TreeId::FS, generation) {
            return Ok(());
        }
        // The blocks of all subvolumes pass as those of any.
        let owner = TreeId::FS;
        let expected = Expected { logical, level, generation, owner, first_key: None };
        let owner = self.volume().block(&expected)?.header().owner();
        let bytes = i128::from(self.volume().superblock().node_size);
        self.usage().add(owner, -bytes);
        Ok(())
    }

    /// Brings what came and went to the groups. How many changed.
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

    /// The group, and all groups that it is in, as far as they are there. None when it is not there
    /// itself: then it counts nothing.
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

    /// Adds `bytes` to what the group uses. Where more went than was counted, the numbers were
    /// wrong before: they are 0 then, and the volume says so.
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
            self.volume().report(&Report::WrongQuota { group });
        }
        Ok(())
    }
}
