//! Quotas: quota groups, and what the items of the quota tree say.
//!
//! | key | item |
//! |---|---|
//! | `(0, QGROUP_STATUS, 0)` | whether quotas are on, and whether their numbers are right |
//! | `(0, QGROUP_INFO, group)` | what a group uses |
//! | `(0, QGROUP_LIMIT, group)` | what it may use |
//! | `(group, QGROUP_RELATION, group)` | one group is in another; there is an item from each side |

use std::fmt;

use crate::error::take;
use crate::space::{QgroupInfoItem, QgroupLimitItem, QgroupStatusItem};
use crate::{Generation, ItemType, Key, Malformed, TreeId, U64};

/// The version of quotas that is known.
pub const STATUS_VERSION: u64 = 1;
/// Quotas are on.
pub const STATUS_ON: u64 = 1;
/// The kernel is counting everything anew, and goes on with that when it mounts the volume.
pub const STATUS_RESCAN: u64 = 1 << 1;
/// The numbers may be wrong until everything is counted anew.
pub const STATUS_INCONSISTENT: u64 = 1 << 2;
/// The quotas are simple ones: an extent counts for the subvolume that it was made for.
pub const STATUS_SIMPLE: u64 = 1 << 3;

/// All that the group refers to is limited.
pub const LIMIT_MAX_RFER: u64 = 1;
/// What only the group refers to is limited.
pub const LIMIT_MAX_EXCL: u64 = 1 << 1;

/// The key of the status item.
pub const STATUS_KEY: Key = Key::new(0, ItemType::QGROUP_STATUS, 0);

/// A quota group: a level in the upper 16 bits, and a number. At level 0 the number is that of a
/// subvolume. A group is only in groups of higher levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QgroupId(pub u64);

impl QgroupId {
    const LEVEL_SHIFT: u32 = 48;

    /// The group of a subvolume.
    #[must_use]
    pub fn of_subvolume(id: TreeId) -> Self {
        Self(id.0)
    }

    /// Its level: 0 for the group of a subvolume.
    #[must_use]
    pub fn level(self) -> u64 {
        self.0 >> Self::LEVEL_SHIFT
    }

    /// The key of the item that says what the group uses.
    #[must_use]
    pub fn info_key(self) -> Key {
        Key::new(0, ItemType::QGROUP_INFO, self.0)
    }

    /// The key of the item that says what the group may use.
    #[must_use]
    pub fn limit_key(self) -> Key {
        Key::new(0, ItemType::QGROUP_LIMIT, self.0)
    }

    /// The key of the item by which this group is in `parent`, or has `parent` in it: there is
    /// one of each.
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
    /// Whether all these flags are set.
    #[must_use]
    pub fn has(&self, flags: u64) -> bool {
        self.flags.get() & flags == flags
    }

    /// The transaction in which simple quotas were enabled: older extents count for no group.
    /// `data` is the whole item.
    ///
    /// # Errors
    /// When the item has no such field.
    pub fn enabled_in(data: &[u8]) -> Result<Generation, Malformed> {
        const NAME: &str = "quota status";
        let (_, rest) = take(NAME, "fixed part", data, size_of::<Self>())?;
        let (field, _) = crate::error::view::<U64>(NAME, rest)?;
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

    /// Whether there is something that the group may not use. Reservations and flags that are not
    /// known keep the kernel from nothing. A limit of all 64 bits is none: so some tools take a
    /// limit away.
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
        // What `mkfs.btrfs` leaves in the item of the top level.
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
