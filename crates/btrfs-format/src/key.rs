//! Keys and item types.
//!
//! Every item of every tree has a key of three numbers: the object that it describes, the type of
//! the item, and an offset that tells items of one type apart. Keys are ordered as a tuple.

use std::fmt;

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The key of an item, in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The object that the item describes: an inode, a tree, an address.
    pub objectid: u64,
    /// The type of the item.
    pub item_type: ItemType,
    /// Tells items of one type apart: a file offset, a hash, another object id, a length.
    pub offset: u64,
}

impl Key {
    /// The lowest key.
    pub const MIN: Self = Self::new(0, ItemType(0), 0);
    /// The highest key.
    pub const MAX: Self = Self::new(u64::MAX, ItemType(u8::MAX), u64::MAX);

    /// Makes a key from its three parts.
    #[must_use]
    pub const fn new(objectid: u64, item_type: ItemType, offset: u64) -> Self {
        Self { objectid, item_type, offset }
    }

    /// The next higher key; `None` after [`Key::MAX`].
    #[must_use]
    pub fn successor(self) -> Option<Self> {
        if let Some(offset) = self.offset.checked_add(1) {
            return Some(Self { offset, ..self });
        }
        if let Some(item_type) = self.item_type.0.checked_add(1) {
            return Some(Self::new(self.objectid, ItemType(item_type), 0));
        }
        self.objectid.checked_add(1).map(|objectid| Self::new(objectid, ItemType(0), 0))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} {} {})", self.objectid, self.item_type, self.offset)
    }
}

/// A key as it is stored, 17 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are those of `Key`, under the names of the format")]
pub struct DiskKey {
    pub objectid: U64,
    pub item_type: u8,
    pub offset: U64,
}

impl DiskKey {
    /// The key with typed fields.
    #[must_use]
    pub fn get(&self) -> Key {
        Key::new(self.objectid.get(), ItemType(self.item_type), self.offset.get())
    }
}

impl From<Key> for DiskKey {
    fn from(key: Key) -> Self {
        Self {
            objectid: key.objectid.into(),
            item_type: key.item_type.0,
            offset: key.offset.into(),
        }
    }
}

/// The type of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ItemType(pub u8);

macro_rules! item_types {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl ItemType {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// The name of this type in the format; `None` for an unknown type.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                Some(match self {
                    $(Self::$name => stringify!($name),)*
                    _ => return None,
                })
            }
        }
    };
}

item_types! {
    /// An inode.
    INODE_ITEM = 1;
    /// A name of an inode in one directory.
    INODE_REF = 12;
    /// A name of an inode, when its INODE_REF item has no more room.
    INODE_EXTREF = 13;
    /// Extended attributes whose names have the same hash.
    XATTR_ITEM = 24;
    /// fs-verity: the descriptor.
    VERITY_DESC_ITEM = 36;
    /// fs-verity: a part of the Merkle tree.
    VERITY_MERKLE_ITEM = 37;
    /// An inode without a name that must still be removed.
    ORPHAN_ITEM = 48;
    /// A range of names that a log tree covers (no longer written).
    DIR_LOG_ITEM = 60;
    /// A range of directory indexes that a log tree covers.
    DIR_LOG_INDEX = 72;
    /// Directory entries whose names have the same hash.
    DIR_ITEM = 84;
    /// A directory entry by its index.
    DIR_INDEX = 96;
    /// A file extent: where a range of a file is.
    EXTENT_DATA = 108;
    /// Checksums of consecutive sectors.
    EXTENT_CSUM = 128;
    /// The root of a tree.
    ROOT_ITEM = 132;
    /// A link from a subvolume to the subvolume that contains it.
    ROOT_BACKREF = 144;
    /// A link from a subvolume to one that it contains.
    ROOT_REF = 156;
    /// An allocated extent. The offset of the key is its length.
    EXTENT_ITEM = 168;
    /// An allocated tree block. The offset of the key is its level.
    METADATA_ITEM = 169;
    /// The subvolume that an extent was first made for (simple quotas).
    EXTENT_OWNER_REF = 172;
    /// A reference to a tree block by the tree that holds it.
    TREE_BLOCK_REF = 176;
    /// A reference to a data extent by the file that holds it.
    EXTENT_DATA_REF = 178;
    /// A reference to a tree block by the block that points to it.
    SHARED_BLOCK_REF = 182;
    /// A reference to a data extent by the leaf that points to it.
    SHARED_DATA_REF = 184;
    /// A block group.
    BLOCK_GROUP_ITEM = 192;
    /// Whether the free space of a block group is stored as extents or bitmaps.
    FREE_SPACE_INFO = 198;
    /// A free range.
    FREE_SPACE_EXTENT = 199;
    /// A bitmap of free sectors.
    FREE_SPACE_BITMAP = 200;
    /// A range of a device that belongs to a chunk.
    DEV_EXTENT = 204;
    /// A device.
    DEV_ITEM = 216;
    /// A chunk.
    CHUNK_ITEM = 228;
    /// The places of a data extent on the devices.
    RAID_STRIPE = 230;
    /// The state of quotas.
    QGROUP_STATUS = 240;
    /// What a quota group uses.
    QGROUP_INFO = 242;
    /// What a quota group may use.
    QGROUP_LIMIT = 244;
    /// A link between a quota group and one that contains it.
    QGROUP_RELATION = 246;
    /// State of an operation that ends: a running balance.
    TEMPORARY_ITEM = 248;
    /// State that is kept: error counts of a device.
    PERSISTENT_ITEM = 249;
    /// The replacement of a device.
    DEV_REPLACE = 250;
    /// A subvolume by its UUID.
    UUID_KEY_SUBVOL = 251;
    /// Subvolumes by the UUID of the subvolume that they were received from.
    UUID_KEY_RECEIVED_SUBVOL = 252;
    /// A string, for debugging.
    STRING_ITEM = 253;
}

impl ItemType {
    /// The type of version 1 free space items. Their type byte is 0, which no other item has; their
    /// object id identifies them.
    pub const UNTYPED: Self = Self(0);
}

impl fmt::Display for ItemType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => self.0.fmt(f),
        }
    }
}

/// Object ids with a special meaning, other than those of trees and inodes.
pub mod objectid {
    /// The items of devices in the chunk tree.
    pub const DEV_ITEMS: u64 = 1;
    /// Error counts of devices in the device tree.
    pub const DEV_STATS: u64 = 0;
    /// The directory in the root tree that names the default subvolume.
    pub const ROOT_TREE_DIR: u64 = 6;
    /// The object id of every chunk item.
    pub const FIRST_CHUNK_TREE: u64 = 256;
    /// The state of a running balance in the root tree.
    pub const BALANCE: u64 = 0u64.wrapping_sub(4);
    /// Orphans of a tree.
    pub const ORPHAN: u64 = 0u64.wrapping_sub(5);
    /// Checksums of data in the checksum tree.
    pub const EXTENT_CSUM: u64 = 0u64.wrapping_sub(10);
    /// Version 1 free space caches in the root tree.
    pub const FREE_SPACE: u64 = 0u64.wrapping_sub(11);
    /// The inode that keeps version 1 free inode numbers.
    pub const FREE_INO: u64 = 0u64.wrapping_sub(12);
    /// The owner that stands for several owners.
    pub const MULTIPLE: u64 = 0u64.wrapping_sub(255);
}
