//! Numbers with types, so that an address of one space is never taken for another.

use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

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
    /// The number of a transaction. Everything a transaction wrote carries it.
    Generation;
    /// The number of a device in its volume, from 1 (0 only while one is replaced).
    DeviceId;
    /// An inode number in one subvolume, from 256 for the root directory.
    Ino;
    /// The object id of a tree: one of [`TreeId`]'s constants, or a subvolume.
    TreeId;
}

impl TreeId {
    /// The tree of tree roots.
    pub const ROOT: Self = Self(1);
    /// References and sizes of all allocated extents.
    pub const EXTENT: Self = Self(2);
    /// The map from logical addresses to devices.
    pub const CHUNK: Self = Self(3);
    /// Which parts of the devices are allocated to which chunk.
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
    /// Block group items, when they are not in the extent tree.
    pub const BLOCK_GROUP: Self = Self(11);
    /// Where the parts of striped data extents are (RAID stripe tree).
    pub const RAID_STRIPE: Self = Self(12);
    /// Log trees of all subvolumes, written by fsync.
    pub const TREE_LOG: Self = Self(0u64.wrapping_sub(6));
    /// Roots of relocation trees, while a balance runs.
    pub const TREE_RELOC: Self = Self(0u64.wrapping_sub(8));
    /// Relocation of data, while a balance runs.
    pub const DATA_RELOC: Self = Self(0u64.wrapping_sub(9));

    /// The lowest id of a subvolume other than the top level.
    pub const FIRST_FREE: Self = Self(256);
    /// The highest id of a subvolume.
    pub const LAST_FREE: Self = Self(0u64.wrapping_sub(256));

    /// Whether this is the id of a subvolume (the top level included).
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
    /// The empty directory that stands where a snapshot holds an entry of a
    /// subvolume that was nested in its source.
    pub const EMPTY_SUBVOLUME_DIR: Self = Self(2);
}
