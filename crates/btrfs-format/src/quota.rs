//! Quota groups, and the items of the quota tree.
//!
//! | key | what the item says |
//! |---|---|
//! | `(0, QGROUP_STATUS, 0)` | whether quotas are on, and whether their numbers are right |
//! | `(0, QGROUP_INFO, group)` | how much a group uses |
//! | `(0, QGROUP_LIMIT, group)` | how much it may use |
//! | `(group, QGROUP_RELATION, group)` | one group contains the other; one item a direction |

use offshoot_vfs::Structure;
use std::fmt;

use crate::space::{QgroupInfoItem, QgroupLimitItem, QgroupStatusItem};
use crate::view::take;
use crate::{Generation, ItemType, Key, Malformed, TreeId, U64};

/// The only known version of quotas.
pub const STATUS_VERSION: u64 = 1;
/// Quotas are on.
pub const STATUS_ON: u64 = 1;
/// The kernel is recounting all groups. It continues when it mounts the volume again.
pub const STATUS_RESCAN: u64 = 1 << 1;
/// The numbers may be wrong until all groups are recounted.
pub const STATUS_INCONSISTENT: u64 = 1 << 2;
/// The quotas are simple ones: an extent counts for the subvolume that allocated it.
pub const STATUS_SIMPLE: u64 = 1 << 3;

/// There is a limit for all that the group refers to.
pub const LIMIT_MAX_RFER: u64 = 1;
/// There is a limit for what no other group refers to.
pub const LIMIT_MAX_EXCL: u64 = 1 << 1;

/// The key of the status item.
pub const STATUS_KEY: Key = Key::new(0, ItemType::QGROUP_STATUS, 0);

/// A quota group: a level in the upper 16 bits, and a number. At level 0 the number is that of a
/// subvolume. Only groups of higher levels contain a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QgroupId(pub u64);

impl QgroupId {
    const LEVEL_SHIFT: u32 = 48;

    /// The group of a subvolume.
    #[must_use]
    pub fn of_subvolume(id: TreeId) -> Self {
        Self(id.0)
    }

    /// The level of the group: 0 for the group of a subvolume.
    #[must_use]
    pub fn level(self) -> u64 {
        self.0 >> Self::LEVEL_SHIFT
    }

    /// The key of the item with the usage of the group.
    #[must_use]
    pub fn info_key(self) -> Key {
        Key::new(0, ItemType::QGROUP_INFO, self.0)
    }

    /// The key of the item with the limits of the group.
    #[must_use]
    pub fn limit_key(self) -> Key {
        Key::new(0, ItemType::QGROUP_LIMIT, self.0)
    }

    /// The key of the relation item from this group to `parent`: one of the two contains the other.
    /// There is one item for each direction.
    #[must_use]
    pub fn relation_key(self, parent: Self) -> Key {
        Key::new(self.0, ItemType::QGROUP_RELATION, parent.0)
    }
}

impl fmt::Display for QgroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.0 & ((1 << Self::LEVEL_SHIFT) - 1);
        write!(f, "{}/{number}", self.level())
    }
}

impl QgroupStatusItem {
    /// Whether all bits of `flags` are set.
    #[must_use]
    pub fn has(&self, flags: u64) -> bool {
        self.flags.get() & flags == flags
    }

    /// The transaction that enabled simple quotas: older extents count for no group. `data` is the
    /// whole item.
    ///
    /// # Errors
    /// When the item ends before that field.
    pub fn enabled_in(data: &[u8]) -> Result<Generation, Malformed> {
        const NAME: Structure = Structure::QuotaStatus;
        let (_, rest) = take(NAME, "fixed part", data, size_of::<Self>())?;
        let (field, _) = crate::view::view::<U64>(NAME, rest)?;
        Ok(Generation(field.get()))
    }
}

impl QgroupInfoItem {
    /// A group that uses nothing.
    #[must_use]
    pub fn nothing_used(generation: Generation) -> Self {
        let none = U64::new(0);
        let generation = generation.0.into();
        Self { generation, rfer: none, rfer_cmpr: none, excl: none, excl_cmpr: none }
    }
}

impl QgroupLimitItem {
    /// A group without limits.
    #[must_use]
    pub fn no_limits() -> Self {
        let none = U64::new(0);
        Self { flags: none, max_rfer: none, max_excl: none, rsv_rfer: none, rsv_excl: none }
    }

    /// Whether the kernel enforces a limit of this group. It enforces neither reservations nor
    /// unknown flags. A limit of `u64::MAX` is no limit: some tools remove a limit in this way.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        let flags = self.flags.get();
        [(LIMIT_MAX_RFER, self.max_rfer), (LIMIT_MAX_EXCL, self.max_excl)]
            .iter()
            .any(|(flag, most)| flags & flag != 0 && most.get() != u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn groups_are_written_as_tools_write_them() {
        let level_2 = QgroupId((2 << 48) + 77);
        assert_eq!(level_2.to_string(), "2/77");
        assert_eq!(level_2.level(), 2);
        assert_eq!(QgroupId::of_subvolume(TreeId(256)).to_string(), "0/256");
    }

    #[test]
    fn only_what_the_kernel_enforces_is_a_limit() {
        let limits = |flags: u64, max_rfer: u64, max_excl: u64| QgroupLimitItem {
            flags: flags.into(),
            max_rfer: max_rfer.into(),
            max_excl: max_excl.into(),
            ..QgroupLimitItem::no_limits()
        };
        assert!(limits(LIMIT_MAX_RFER, 0, 0).is_limited());
        assert!(limits(LIMIT_MAX_EXCL, u64::MAX, 1 << 30).is_limited());
        assert!(!limits(LIMIT_MAX_RFER | LIMIT_MAX_EXCL, u64::MAX, u64::MAX).is_limited());
        // The values that `mkfs.btrfs` leaves in the item of the top-level subvolume.
        assert!(!limits(0x50_0000, 8 << 20, 7_009_060_803_195_070_307).is_limited());
        assert!(!limits(12, 1, 1).is_limited());
    }

    #[test]
    fn the_field_of_simple_quotas() {
        let item = QgroupStatusItem {
            version: STATUS_VERSION.into(),
            generation: 9.into(),
            flags: (STATUS_ON | STATUS_SIMPLE).into(),
            rescan: 0.into(),
        };
        let mut data = item.as_bytes().to_vec();
        assert!(item.has(STATUS_ON) && !item.has(STATUS_ON | STATUS_RESCAN));
        assert!(QgroupStatusItem::enabled_in(&data).is_err());
        data.extend_from_slice(&25u64.to_le_bytes());
        assert_eq!(QgroupStatusItem::enabled_in(&data).unwrap(), Generation(25));
    }
}
