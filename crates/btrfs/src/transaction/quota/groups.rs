//! Adds and removes the quota groups of subvolumes.
//!
//! A new subvolume gets a group that uses nothing and has no limits. With simple quotas, the new
//! group joins all groups that the group of the containing subvolume is in, as in the kernel.
//!
//! When a subvolume has been dropped, its group is removed, and its membership in other groups.
//! With simple quotas the group stays if extents still count for it, because a snapshot of the
//! subvolume keeps them. The kernel, too, leaves such a group, and never removes it later.

use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupLimitItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::IntoBytes;

use super::Quotas;
use crate::storage::malformed;
use crate::transaction::Base;
use crate::transaction::TransactionHandle;
use crate::tree::{Cursor, with_item};

/// The membership of the group of a new subvolume.
#[derive(Debug, Default)]
pub(crate) struct NewGroup {
    parents: Vec<QgroupId>,
    is_kept: bool,
}

impl NewGroup {
    /// For a subvolume that will be inside the subvolume `holder`.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading; and when the quota tree cannot be read.
    pub(crate) fn below(volume: &Base, holder: TreeId) -> Result<Self> {
        let parents = match volume.live()?.quotas {
            Quotas::Off => return Ok(Self::default()),
            Quotas::Full { .. } => Vec::new(),
            Quotas::Simple { .. } => parents_of(volume, QgroupId::of_subvolume(holder))?,
        };
        Ok(Self { parents, is_kept: true })
    }

    /// How many items of the quota tree the new group changes.
    pub(crate) fn items(&self) -> u64 {
        if self.is_kept { 2 + 2 * self.parents.len() as u64 } else { 0 }
    }
}

/// The groups that `group` is in.
pub(super) fn parents_of(volume: &Base, group: QgroupId) -> Result<Vec<QgroupId>> {
    // Members of the group have lower levels, so lower numbers: the search skips them.
    let first = group.relation_key(QgroupId(group.0.saturating_add(1)));
    let mut parents = Vec::new();
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId::QUOTA)?, first)?;
    while let Some((key, _)) = cursor.item_of(group.0, ItemType::QGROUP_RELATION) {
        let parent = QgroupId(key.offset);
        if parent.level() <= group.level() {
            let problem = format!("{parent} holds {group}, which is of no lower level");
            return Err(Error::corrupt(Structure::QuotaGroupRelation, problem));
        }
        parents.push(parent);
        cursor.advance()?;
    }
    Ok(parents)
}

/// The bytes that `group` refers to, and those that only it refers to; `None` if the group does not
/// exist.
pub(super) fn used_by(volume: &Base, group: QgroupId) -> Result<Option<[u64; 2]>> {
    with_item(volume, volume.tree(TreeId::QUOTA)?, group.info_key(), |data| {
        let item = QgroupInfoItem::view(data).map_err(malformed)?;
        Ok([item.rfer.get(), item.excl.get()])
    })
}

impl TransactionHandle<'_> {
    /// Adds the group of the new subvolume `id`. A group that exists stays unchanged: the user made
    /// it before, or a subvolume with the same number left it.
    pub(crate) fn add_quota_group(&self, id: TreeId, new: &NewGroup) -> Result<()> {
        if !new.is_kept {
            return Ok(());
        }
        let group = QgroupId::of_subvolume(id);
        let info = QgroupInfoItem::nothing_used(self.generation());
        let limit = QgroupLimitItem::no_limits();
        self.put_unless_there(group.info_key(), info.as_bytes())?;
        self.put_unless_there(group.limit_key(), limit.as_bytes())?;
        for &parent in &new.parents {
            self.put_unless_there(group.relation_key(parent), &[])?;
            self.put_unless_there(parent.relation_key(group), &[])?;
        }
        Ok(())
    }

    fn put_unless_there(&self, key: Key, new: &[u8]) -> Result<()> {
        self.change(TreeId::QUOTA, |tree| {
            tree.modify(key, new.len(), |old| Ok(old.unwrap_or(new).to_vec()))
        })
    }

    /// Removes the groups of the subvolumes that this transaction dropped, if `is_removed` accepts
    /// the bytes that they use. Returns how many it removed.
    pub(super) fn remove_dropped_groups(
        &self,
        is_removed: impl Fn(&[u64; 2]) -> bool,
    ) -> Result<usize> {
        let mut removed = 0;
        for id in self.usage().take_dropped() {
            let group = QgroupId::of_subvolume(id);
            let used = used_by(self.volume(), group)?;
            if used.is_some_and(|used| is_removed(&used)) {
                self.remove_quota_group(group)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn remove_quota_group(&self, group: QgroupId) -> Result<()> {
        let parents = parents_of(self.volume(), group)?;
        self.change(TreeId::QUOTA, |tree| {
            tree.remove(group.info_key())?;
            tree.remove(group.limit_key())?;
            for parent in parents {
                tree.remove(group.relation_key(parent))?;
                tree.remove(parent.relation_key(group))?;
            }
            Ok(())
        })
    }

    /// Notes that the subvolume `id` has been dropped completely.
    pub(crate) fn drop_quota_group(&self, id: TreeId) {
        if self.live().quotas.are_on() {
            self.usage().add_dropped(id);
        }
    }
}
