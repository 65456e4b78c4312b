//! The quota groups of subvolumes that come and go.
//!
//! A new subvolume gets a group that uses nothing and has no limits. With simple quotas the group
//! is in all groups that the group of the subvolume is in which holds the new one, as the kernel
//! has it.
//!
//! When a subvolume is dropped its group goes, and is in no other one any more. With simple quotas
//! it stays while something counts for it: extents that a snapshot of the subvolume keeps. The
//! kernel leaves such a group, too, and does not come back to it.

use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupLimitItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Error, Result};
use zerocopy::IntoBytes;

use super::Quotas;
use crate::storage::malformed;
use crate::transaction::Base;
use crate::transaction::Handle;
use crate::tree::{Cursor, with_item};

/// The groups that the group of a new subvolume is in.
#[derive(Debug, Default)]
pub(crate) struct NewGroup {
    parents: Vec<QgroupId>,
    is_kept: bool,
}

impl NewGroup {
    /// The group of a subvolume that is to be in the subvolume `holder`.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, and when the quota tree does not read.
    pub(crate) fn below(volume: &Base, holder: TreeId) -> Result<Self> {
        let parents = match volume.live()?.quotas {
            Quotas::Off => return Ok(Self::default()),
            Quotas::Full { .. } => Vec::new(),
            Quotas::Simple { .. } => parents_of(volume, QgroupId::of_subvolume(holder))?,
        };
        Ok(Self { parents, is_kept: true })
    }

    /// How many items of the quota tree it changes.
    pub(crate) fn items(&self) -> u64 {
        if self.is_kept { 2 + 2 * self.parents.len() as u64 } else { 0 }
    }
}

/// The groups that `group` is in.
pub(super) fn parents_of(volume: &Base, group: QgroupId) -> Result<Vec<QgroupId>> {
    // Those in the group are of lower levels, so they have lower numbers.
    let first = group.relation_key(QgroupId(group.0.saturating_add(1)));
    let mut parents = Vec::new();
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId::QUOTA)?, first)?;
    while let Some((key, _)) = cursor.item_of(group.0, ItemType::QGROUP_RELATION) {
        let parent = QgroupId(key.offset);
        if parent.level() <= group.level() {
            let problem = format!("{parent} holds {group}, which is of no lower level");
            return Err(Error::corrupt("quota group relation", problem));
        }
        parents.push(parent);
        cursor.advance()?;
    }
    Ok(parents)
}

/// What `group` refers to, and what only it refers to, in bytes; `None` when there is no such
/// group.
pub(super) fn used_by(volume: &Base, group: QgroupId) -> Result<Option<[u64; 2]>> {
    with_item(volume, volume.tree(TreeId::QUOTA)?, group.info_key(), |data| {
        let item = QgroupInfoItem::view(data).map_err(malformed)?;
        Ok([item.rfer.get(), item.excl.get()])
    })
}

impl Handle<'_> {
    /// Adds the group of the new subvolume `id`. One that is there already stays as it is: the user
    /// made it before, or it was left by a subvolume that had the same number.
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

    /// Removes the groups of the subvolumes that this transaction dropped, where what they use
    /// is as `is_removed` asks. How many went.
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

    /// The subvolume `id` is dropped to the end.
    pub(crate) fn drop_quota_group(&self, id: TreeId) {
        if self.live().quotas.are_on() {
            self.usage().add_dropped(id);
        }
    }
}
