//! The superblock: 4096 bytes at fixed places of every device.
//!
//! ```text
//! byte 65536             the primary
//! byte 67108864          copy 1, on devices that are large enough
//! byte 274877906944      copy 2, likewise
//! ```
//!
//! All copies of one commit are equal, except for `bytenr`, which holds the place, and the
//! checksum. [`SuperblockItem`] is the structure as the disk stores it. [`Superblock`] is a checked
//! one, parsed into typed values.

use offshoot_vfs::Structure;
use std::fmt;

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::block::{LEVEL_COUNT, MAX_NODESIZE};
use crate::chunk::{Chunk, DevItem, parse_system_chunks};
use crate::csum::ChecksumType;
use crate::view::view;
use crate::{Generation, Logical, Malformed};

/// The size of a superblock in bytes.
pub const SUPERBLOCK_SIZE: usize = 4096;

/// The bytes of a device at which the primary and its copies begin.
pub const SUPERBLOCK_OFFSETS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];

/// Whether every writer of a volume keeps the superblock at `offset` up to date on a device of
/// which the volume has `total_bytes`. The kernel passes over one that ends right at the end, and
/// `mkfs.btrfs` makes that one too.
#[must_use]
pub const fn is_kept_superblock(offset: u64, total_bytes: u64) -> bool {
    offset + (SUPERBLOCK_SIZE as u64) < total_bytes
}

/// The value of the `magic` field.
pub const MAGIC: [u8; 8] = *b"_BHRfS_M";

/// The size of the array for system chunks, in bytes.
pub const SYSTEM_CHUNK_ARRAY_SIZE: usize = 2048;

/// A superblock as it is stored.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct SuperblockItem {
    pub csum: [u8; 32],
    pub fsid: [u8; 16],
    pub bytenr: U64,
    pub flags: U64,
    pub magic: [u8; 8],
    pub generation: U64,
    pub root: U64,
    pub chunk_root: U64,
    pub log_root: U64,
    pub log_root_transid: U64,
    pub total_bytes: U64,
    pub bytes_used: U64,
    pub root_dir_objectid: U64,
    pub num_devices: U64,
    pub sectorsize: U32,
    pub nodesize: U32,
    pub leafsize: U32,
    pub stripesize: U32,
    pub sys_chunk_array_size: U32,
    pub chunk_root_generation: U64,
    pub compat_flags: U64,
    pub compat_ro_flags: U64,
    pub incompat_flags: U64,
    pub csum_type: U16,
    pub root_level: u8,
    pub chunk_root_level: u8,
    pub log_root_level: u8,
    pub dev_item: DevItem,
    pub label: [u8; 256],
    pub cache_generation: U64,
    pub uuid_tree_generation: U64,
    pub metadata_uuid: [u8; 16],
    pub nr_global_roots: U64,
    pub reserved: [U64; 27],
    pub sys_chunk_array: [u8; SYSTEM_CHUNK_ARRAY_SIZE],
    pub super_roots: [RootBackup; 4],
    pub padding: [u8; 565],
}

/// The roots of an earlier commit. 168 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct RootBackup {
    pub tree_root: U64,
    pub tree_root_gen: U64,
    pub chunk_root: U64,
    pub chunk_root_gen: U64,
    pub extent_root: U64,
    pub extent_root_gen: U64,
    pub fs_root: U64,
    pub fs_root_gen: U64,
    pub dev_root: U64,
    pub dev_root_gen: U64,
    pub csum_root: U64,
    pub csum_root_gen: U64,
    pub total_bytes: U64,
    pub bytes_used: U64,
    pub num_devices: U64,
    pub unused_64: [U64; 4],
    pub tree_root_level: u8,
    pub chunk_root_level: u8,
    pub extent_root_level: u8,
    pub fs_root_level: u8,
    pub dev_root_level: u8,
    pub csum_root_level: u8,
    pub unused_8: [u8; 10],
}

/// The volume is a seed: it is never written, and other devices are added to it.
pub const SUPER_FLAG_SEEDING: u64 = 1 << 32;
/// The volume is a dump of metadata without data, made by `btrfs-image`.
pub const SUPER_FLAG_METADUMP: u64 = 1 << 33;
/// The same, in version 2 of the dump format.
pub const SUPER_FLAG_METADUMP_V2: u64 = 1 << 34;
/// A tool is rewriting the fsid in all blocks of the volume.
pub const SUPER_FLAG_CHANGING_FSID: u64 = 1 << 35;
/// A tool is changing the fsid by adding a metadata UUID.
pub const SUPER_FLAG_CHANGING_FSID_V2: u64 = 1 << 36;
/// A tool is converting the volume to a block group tree.
pub const SUPER_FLAG_CHANGING_BG_TREE: u64 = 1 << 38;
/// A tool is converting the checksums of data.
pub const SUPER_FLAG_CHANGING_DATA_CSUM: u64 = 1 << 39;
/// A tool is converting the checksums of metadata.
pub const SUPER_FLAG_CHANGING_META_CSUM: u64 = 1 << 40;

macro_rules! features {
    ($(#[$doc:meta])* $set:ident { $($(#[$fdoc:meta])* $name:ident = $bit:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $set(pub u64);

        impl $set {
            $($(#[$fdoc])* pub const $name: Self = Self(1 << $bit);)*

            /// The name of every bit that is set, as the format's documentation spells it; `bit N`
            /// for an unknown bit.
            #[must_use]
            pub fn names(self) -> Vec<String> {
                (0..64).filter(|bit| self.0 & (1 << bit) != 0).map(|bit| match bit {
                    $($bit => $text.to_owned(),)*
                    _ => format!("bit {bit}"),
                }).collect()
            }

            /// Whether all bits of `other` are set.
            #[must_use]
            pub fn has(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// The bits that are set here but not in `other`.
            #[must_use]
            pub fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }

            /// The bits that are set here or in `other`.
            #[must_use]
            pub const fn union(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }

        impl fmt::Debug for $set {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:#x})", stringify!($set), self.0)
            }
        }
    };
}

features! {
    /// Features that a reader must know.
    Incompat {
        /// Back references of both kinds; every volume has this bit.
        MIXED_BACKREF = 0, "MIXED_BACKREF";
        /// The default subvolume was set.
        DEFAULT_SUBVOL = 1, "DEFAULT_SUBVOL";
        /// Data and metadata share block groups.
        MIXED_GROUPS = 2, "MIXED_GROUPS";
        /// The volume has had extents that are compressed with LZO.
        COMPRESS_LZO = 3, "COMPRESS_LZO";
        /// The volume has had extents that are compressed with Zstandard.
        COMPRESS_ZSTD = 4, "COMPRESS_ZSTD";
        /// Tree blocks are larger than a page.
        BIG_METADATA = 5, "BIG_METADATA";
        /// Names overflow into INODE_EXTREF items.
        EXTENDED_IREF = 6, "EXTENDED_IREF";
        /// The volume has had chunks of RAID5 or RAID6.
        RAID56 = 7, "RAID56";
        /// Extent items of tree blocks are METADATA_ITEMs.
        SKINNY_METADATA = 8, "SKINNY_METADATA";
        /// Holes of files have no items.
        NO_HOLES = 9, "NO_HOLES";
        /// Tree blocks carry another UUID than the one that the volume shows.
        METADATA_UUID = 10, "METADATA_UUID";
        /// The volume has had chunks of RAID1C3 or RAID1C4.
        RAID1C34 = 11, "RAID1C34";
        /// The volume follows the rules of zoned devices.
        ZONED = 12, "ZONED";
        /// The volume has several extent trees.
        EXTENT_TREE_V2 = 13, "EXTENT_TREE_V2";
        /// The RAID stripe tree stores the places of striped data.
        RAID_STRIPE_TREE = 14, "RAID_STRIPE_TREE";
        /// Extents store the subvolume that allocated them.
        SIMPLE_QUOTA = 16, "SIMPLE_QUOTA";
        /// Balance moves block groups by remapping them.
        REMAP_TREE = 17, "REMAP_TREE";
    }
}

features! {
    /// Features that a writer must know; a reader need not.
    CompatRo {
        /// The volume has a tree of free space.
        FREE_SPACE_TREE = 0, "FREE_SPACE_TREE";
        /// The tree of free space agrees with the extents.
        FREE_SPACE_TREE_VALID = 1, "FREE_SPACE_TREE_VALID";
        /// The volume has fs-verity items.
        VERITY = 2, "VERITY";
        /// Block groups have their own tree.
        BLOCK_GROUP_TREE = 3, "BLOCK_GROUP_TREE";
    }
}

impl SuperblockItem {
    /// Views a superblock.
    pub fn view(bytes: &[u8]) -> Result<&Self, Malformed> {
        Ok(view(Structure::Superblock, bytes)?.0)
    }

    /// The label up to its first NUL.
    #[must_use]
    pub fn label(&self) -> &[u8] {
        self.label.split(|&b| b == 0).next().unwrap_or_default()
    }
}

/// A checked superblock: its checksum is right, and its fields are consistent.
#[derive(Clone, Debug)]
pub struct Superblock {
    /// All fields as the disk stores them, for those that are not parsed below.
    pub item: Box<SuperblockItem>,
    /// The UUID that the volume shows.
    pub fsid: Uuid,
    /// The UUID that its tree blocks carry.
    pub metadata_uuid: Uuid,
    /// The last committed transaction.
    pub generation: Generation,
    /// The unit of data, in bytes.
    pub sector_size: u32,
    /// The size of a tree block, in bytes.
    pub node_size: u32,
    /// The algorithm of its checksums.
    pub checksum: ChecksumType,
    /// Features that a reader must know.
    pub incompat: Incompat,
    /// Features that a writer must know.
    pub compat_ro: CompatRo,
    /// The chunks that hold the chunk tree.
    pub system_chunks: Vec<Chunk>,
}

impl Superblock {
    /// Checks the superblock in `bytes` ([`SUPERBLOCK_SIZE`] of them), which was read from byte
    /// `offset` of a device. It does not decide whether we support the features of the volume.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn parse(bytes: &[u8], offset: u64) -> Result<Self, Malformed> {
        let bad = |problem: String| Malformed::new(Structure::Superblock, problem);
        let item = SuperblockItem::view(bytes)?;
        if item.magic != MAGIC {
            return Err(bad("no btrfs magic".into()));
        }
        let checksum = ChecksumType::from_disk(item.csum_type.get())
            .ok_or_else(|| bad(format!("unknown checksum type {}", item.csum_type)))?;
        let found = &item.csum[..checksum.len()];
        let computed = checksum.compute(&bytes[32..SUPERBLOCK_SIZE]);
        if found != computed.bytes() {
            return Err(bad(format!("checksum {computed} expected, the one stored differs")));
        }
        if item.bytenr.get() != offset {
            return Err(bad(format!("names {} as its place, but is at {offset}", item.bytenr)));
        }
        item.verify_fields()?;
        let incompat = Incompat(item.incompat_flags.get());
        let array = item
            .sys_chunk_array
            .get(..item.sys_chunk_array_size.get() as usize)
            .ok_or_else(|| bad(format!("a chunk array of {} bytes", item.sys_chunk_array_size)))?;
        let fsid = Uuid::from_bytes(item.fsid);
        let superblock = Self {
            fsid,
            metadata_uuid: if incompat.has(Incompat::METADATA_UUID) {
                Uuid::from_bytes(item.metadata_uuid)
            } else {
                fsid
            },
            generation: Generation(item.generation.get()),
            sector_size: item.sectorsize.get(),
            node_size: item.nodesize.get(),
            checksum,
            incompat,
            compat_ro: CompatRo(item.compat_ro_flags.get()),
            system_chunks: parse_system_chunks(array, item.sectorsize.get())?,
            item: Box::new(*item),
        };
        if superblock.system_chunks.is_empty() {
            return Err(bad("no system chunk".into()));
        }
        if Uuid::from_bytes(item.dev_item.fsid) != superblock.metadata_uuid {
            return Err(bad("its device item is of another filesystem".into()));
        }
        Ok(superblock)
    }

    /// The address of the root of the root tree.
    #[must_use]
    pub fn root(&self) -> Logical {
        Logical(self.item.root.get())
    }

    /// The address of the root of the chunk tree.
    #[must_use]
    pub fn chunk_root(&self) -> Logical {
        Logical(self.item.chunk_root.get())
    }

    /// Whether the volume is a dump of metadata without the data of files, made by `btrfs-image`.
    #[must_use]
    pub fn is_metadata_only(&self) -> bool {
        self.item.flags.get() & (SUPER_FLAG_METADUMP | SUPER_FLAG_METADUMP_V2) != 0
    }

    /// Whether there is a log tree: an fsync that no commit has included yet.
    #[must_use]
    pub fn has_pending_log(&self) -> bool {
        self.item.log_root.get() != 0
    }
}

impl SuperblockItem {
    fn verify_fields(&self) -> Result<(), Malformed> {
        let bad = |problem: String| Err(Malformed::new(Structure::Superblock, problem));
        let (sector, node) = (self.sectorsize.get(), self.nodesize.get());
        if !sector.is_power_of_two() || !(512..=MAX_NODESIZE).contains(&sector) {
            return bad(format!("sector size {sector}"));
        }
        if !node.is_power_of_two() || !(sector.max(4096)..=MAX_NODESIZE).contains(&node) {
            return bad(format!("node size {node} with sectors of {sector}"));
        }
        if [self.root_level, self.chunk_root_level, self.log_root_level]
            .iter()
            .any(|&level| level >= LEVEL_COUNT)
        {
            return bad("a root at a level that no tree reaches".into());
        }
        let unit = u64::from(sector);
        for (name, place) in
            [("root", self.root), ("chunk_root", self.chunk_root), ("log_root", self.log_root)]
        {
            if place.get() % unit != 0 {
                return bad(format!("{name} {place} is not at the start of a sector"));
            }
        }
        let generation = self.generation.get();
        if self.chunk_root_generation.get() > generation {
            return bad("the chunk root is newer than the last commit".into());
        }
        if self.num_devices.get() == 0 {
            return bad("no devices".into());
        }
        Ok(())
    }
}

impl Default for SuperblockItem {
    fn default() -> Self {
        Self::new_zeroed()
    }
}
