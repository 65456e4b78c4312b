//! Quotas: keeps the numbers of quota groups right, or marks them as wrong.
//!
//! | quotas | work of a writer |
//! |---|---|
//! | off, or no quota tree | nothing |
//! | full: a group counts everything that its subvolumes refer to | the first commit that changes anything marks the numbers as *inconsistent*; the kernel's `quota rescan` counts everything anew |
//! | simple: an extent counts for the subvolume that it was made for, its *owner* | the extent item of new data names its owner; each commit adds new extents to the numbers and subtracts freed ones (`usage`) |
//!
//! In both kinds a new subvolume gets a group of its own, and the group is removed when the
//! subvolume has been dropped (`groups`).
//!
//! With full quotas, a commit that is newer than the status item already tells the kernel that the
//! numbers are wrong. But if the status item says that a rescan is running, the kernel would
//! continue it where it stopped, and mark the numbers as right at its end. So the first commit
//! clears the flag of the rescan.
//!
//! This engine does not enforce limits, so it refuses to write a volume that has any.

mod groups;
#[cfg(test)]
mod tests;
mod usage;

use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_btrfs_format::quota::{
    QgroupId, STATUS_INCONSISTENT, STATUS_KEY, STATUS_ON, STATUS_RESCAN, STATUS_SIMPLE,
    STATUS_VERSION,
};
use offshoot_btrfs_format::space::{QgroupLimitItem, QgroupStatusItem};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Code, Errno, Error, Result, Structure};
use zerocopy::IntoBytes;

use super::Base;
use crate::report::VolumeReport;
use crate::storage::malformed;
use crate::transaction::TransactionHandle;
use crate::tree::{Cursor, TreeRoot, with_item};
pub(crate) use groups::NewGroup;
pub(crate) use usage::QuotaUsage;

/// The kind of quotas that a writer has to maintain.
#[derive(Debug)]
pub(crate) enum Quotas {
    /// None.
    Off,
    /// Full ones.
    Full {
        /// The status item says that the numbers are wrong, and that no rescan is running.
        is_marked: AtomicBool,
    },
    /// Simple ones.
    Simple {
        /// The transaction that enabled them. Older extents count for no group.
        enabled_in: Generation,
    },
}

impl Quotas {
    /// Reads the quotas of a volume that will be written.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when they have limits, or an unknown version.
    pub(crate) fn of(volume: &Base) -> Result<Self> {
        let tree = match volume.tree(TreeId::QUOTA) {
            Ok(tree) => tree,
            Err(Error::Posix { errno: Errno::NOENT, .. }) => return Ok(Self::Off),
            Err(e) => return Err(e),
        };
        let found = with_item(volume, tree, STATUS_KEY, |data| {
            let item = *QgroupStatusItem::view(data).map_err(malformed)?;
            if !item.has(STATUS_ON | STATUS_SIMPLE) {
                return Ok((item, Generation(0)));
            }
            Ok((item, QgroupStatusItem::enabled_in(data).map_err(malformed)?))
        })?;
        let Some((status, enabled_in)) = found.filter(|(status, _)| status.has(STATUS_ON)) else {
            return Ok(Self::Off);
        };
        if status.version.get() != STATUS_VERSION {
            let what = format!("writing a volume with quotas of version {}", status.version);
            return Err(Error::unsupported(Code::QuotaVersion, what));
        }
        refuse_limits(volume, tree)?;
        if status.has(STATUS_SIMPLE) {
            return Ok(Self::Simple { enabled_in });
        }
        let is_marked = status.has(STATUS_INCONSISTENT) && !status.has(STATUS_RESCAN);
        Ok(Self::Full { is_marked: is_marked.into() })
    }

    /// Whether quotas are on.
    pub(crate) fn are_on(&self) -> bool {
        !matches!(self, Self::Off)
    }
}

/// Fails if any group has a limit.
fn refuse_limits(volume: &Base, tree: TreeRoot) -> Result<()> {
    let first = Key::new(0, ItemType::QGROUP_LIMIT, 0);
    let mut cursor = Cursor::seek(volume, tree, first)?;
    while let Some((key, data)) = cursor.item_of(0, ItemType::QGROUP_LIMIT) {
        if QgroupLimitItem::view(data).map_err(malformed)?.is_limited() {
            let group = QgroupId(key.offset);
            return Err(Error::unsupported(
                Code::QuotaLimits,
                format!(
                    "writing a volume with quotas that limit quota group {group}: limits \
                     are not enforced (to write it, take them away where the kernel mounts it, \
                     with `btrfs qgroup limit none {group} PATH` and the same with `-e`)"
                ),
            ));
        }
        cursor.advance()?;
    }
    Ok(())
}

impl TransactionHandle<'_> {
    /// Stores the changes of this transaction so far in the quota tree. Returns how many changes of
    /// the tree that took, 0 if there was nothing to store.
    ///
    /// The commit calls this after it has run the references of the trees of subvolumes.
    pub(crate) fn store_quotas(&self) -> Result<usize> {
        match &self.live().quotas {
            Quotas::Off => Ok(0),
            Quotas::Full { is_marked } => {
                let marked = if is_marked.load(Ordering::Relaxed) { 0 } else { self.mark()? };
                is_marked.store(true, Ordering::Relaxed);
                Ok(marked + self.remove_dropped_groups(|_| true)?)
            }
            Quotas::Simple { .. } => {
                let stored = self.store_usage()?;
                let is_unused = |used: &[u64; 2]| *used == [0, 0];
                Ok(stored + self.remove_dropped_groups(is_unused)?)
            }
        }
    }

    /// Marks the numbers as wrong in the status item, and clears the flag of a running rescan.
    fn mark(&self) -> Result<usize> {
        self.change(TreeId::QUOTA, |tree| {
            tree.modify(STATUS_KEY, 0, |data| {
                let old =
                    data.ok_or_else(|| Error::corrupt(Structure::QuotaTree, "its status is gone"))?;
                let mut item = *QgroupStatusItem::view(old).map_err(malformed)?;
                let flags = item.flags.get();
                item.flags = (flags & !STATUS_RESCAN | STATUS_INCONSISTENT).into();
                item.rescan = 0.into();
                let rest = &old[size_of::<QgroupStatusItem>()..];
                Ok([item.as_bytes(), rest].concat())
            })
        })?;
        self.volume().report(&VolumeReport::QuotasNotKept);
        Ok(1)
    }
}
