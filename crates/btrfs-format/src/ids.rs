//! Typed numbers, so that the compiler tells addresses of different spaces apart.

use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);
    )*};
}

macro_rules! shown_as_numbers {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

ids! {
    /// A byte address in the logical space of a volume, which chunks map to devices.
    Logical;
    /// A byte offset on one device.
    Physical;
    /// The number of a transaction. Everything that the transaction wrote carries it.
    Generation;
    /// The number of a device in its volume, from 1 on. 0 is the target while a device is being
    /// replaced.
    DeviceId;
    /// An inode number in one subvolume. The root directory has 256.
    Ino;
    /// The object id of a tree: one of [`TreeId`]'s constants, or a subvolume.
    TreeId;
}

shown_as_numbers!(Logical, Physical, Generation, DeviceId, Ino);

impl fmt::Display for TreeId {
    /// A special tree shows its name as btrfs-progs spells it, and a subvolume its number:
    /// `EXTENT_TREE`, `DATA_RELOC_TREE`, `5`, `257`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.special_name() {
            Some(name) => f.pad(name),
            None => self.0.fmt(f),
        }
    }
}

impl TreeId {
    /// The tree of tree roots.
    pub const ROOT: Self = Self(1);
    /// References and sizes of all allocated extents.
    pub const EXTENT: Self = Self(2);
    /// The map from logical addresses to devices.
    pub const CHUNK: Self = Self(3);
    /// The ranges of the devices that are allocated to chunks.
    pub const DEV: Self = Self(4);
    /// The top-level subvolume.
    pub const FS: Self = Self(5);
    /// Checksums of data.
    pub const CSUM: Self = Self(7);
    /// Quota groups.
    pub const QUOTA: Self = Self(8);
    /// Subvolumes by UUID.
    pub const UUID: Self = Self(9);
    /// Free space of every block group (free-space cache v2).
    pub const FREE_SPACE: Self = Self(10);
    /// Block group items, in volumes that do not keep them in the extent tree.
    pub const BLOCK_GROUP: Self = Self(11);
    /// The places of striped data extents (RAID stripe tree).
    pub const RAID_STRIPE: Self = Self(12);
    /// Log trees of all subvolumes, written by fsync.
    pub const TREE_LOG: Self = Self(0u64.wrapping_sub(6));
    /// Roots of relocation trees, while a balance runs.
    pub const TREE_RELOC: Self = Self(0u64.wrapping_sub(8));
    /// The id of a log tree in memory during replay. No tree is stored under it.
    pub const TREE_LOG_FIXUP: Self = Self(0u64.wrapping_sub(7));
    /// The files that relocate data, while a balance runs.
    pub const DATA_RELOC: Self = Self(0u64.wrapping_sub(9));

    /// The lowest id of a subvolume other than the top-level one.
    pub const FIRST_FREE: Self = Self(256);
    /// The highest id of a subvolume.
    pub const LAST_FREE: Self = Self(0u64.wrapping_sub(256));

    /// The name of a tree that is no subvolume, as btrfs-progs spells it.
    #[must_use]
    pub fn special_name(self) -> Option<&'static str> {
        Some(match self {
            Self::ROOT => "ROOT_TREE",
            Self::EXTENT => "EXTENT_TREE",
            Self::CHUNK => "CHUNK_TREE",
            Self::DEV => "DEV_TREE",
            Self::CSUM => "CSUM_TREE",
            Self::QUOTA => "QUOTA_TREE",
            Self::UUID => "UUID_TREE",
            Self::FREE_SPACE => "FREE_SPACE_TREE",
            Self::BLOCK_GROUP => "BLOCK_GROUP_TREE",
            Self::RAID_STRIPE => "RAID_STRIPE_TREE",
            Self::TREE_LOG => "TREE_LOG",
            Self::TREE_LOG_FIXUP => "TREE_LOG_FIXUP",
            Self::TREE_RELOC => "TREE_RELOC",
            Self::DATA_RELOC => "DATA_RELOC_TREE",
            _ => return None,
        })
    }

    /// Whether this is the id of a subvolume; the top-level one counts.
    #[must_use]
    pub fn is_subvolume(self) -> bool {
        self == Self::FS || (Self::FIRST_FREE..=Self::LAST_FREE).contains(&self)
    }

    /// Whether blocks of this tree hold items of a subvolume: inodes and their data.
    #[must_use]
    pub fn is_fs_like(self) -> bool {
        self.is_subvolume() || matches!(self, Self::TREE_LOG | Self::TREE_RELOC | Self::DATA_RELOC)
    }
}

impl Ino {
    /// The root directory of a subvolume.
    pub const ROOT_DIR: Self = Self(256);
    /// An empty directory. A snapshot shows it in place of a subvolume that was nested in its
    /// source.
    pub const EMPTY_SUBVOLUME_DIR: Self = Self(2);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_trees_have_names_and_subvolumes_numbers() {
        let shown = |id: u64| TreeId(id).to_string();
        assert_eq!(shown(1), "ROOT_TREE");
        assert_eq!(shown(12), "RAID_STRIPE_TREE");
        assert_eq!(shown(18_446_744_073_709_551_607), "DATA_RELOC_TREE");
        assert_eq!(shown(18_446_744_073_709_551_610), "TREE_LOG");
        assert_eq!((shown(5), shown(257)), ("5".to_owned(), "257".to_owned()));
        assert_eq!(format!("{:>6}|{:>9}", TreeId::FS, TreeId::DEV), "     5| DEV_TREE");
        // An unused id shows as a number, and no name belongs to a subvolume.
        assert_eq!(shown(13), "13");
        for id in (1..300).chain((1..300).map(|id: u64| id.wrapping_neg())) {
            let id = TreeId(id);
            assert!(!(id.is_subvolume() && id.special_name().is_some()), "{id}");
        }
    }
}
