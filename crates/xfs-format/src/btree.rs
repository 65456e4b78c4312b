//! The blocks of the seven trees.
//!
//! All trees of a group have *short* blocks, with pointers of 32 bits inside the group. The extents
//! of files have *long* ones. Those of V4 volumes end their headers in front of `blkno`.
//!
//! ```text
//! leaf   header | record | record | ...
//! node   header | key | key | ... room for all that fit | pointer | pointer | ...
//! ```

mod block;
mod build;
mod root;

use offshoot_vfs::Structure;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use block::{XfsBtreeBlock, XfsBtreeHeader};
pub use build::{XfsBtreeBuilder, seal};
pub use root::XfsForkRoot;

use crate::identity::XfsIdentity;
use crate::layout::{number, view};
use crate::record::{
    CHUNK_INODES, XfsExtentItem, XfsFreeExtent, XfsInodeChunk, XfsReverseFlags, XfsReverseKey,
    XfsReverseMap, XfsSharedExtent, XfsTreeRecord,
};
use crate::{AgNumber, Malformed, U16, U32, U64, XfsGeometry};

const STRUCTURE: Structure = Structure::BtreeBlock;

/// The trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum XfsTree {
    /// Free space, by its place (bnobt).
    FreeByBlock,
    /// Free space, by its size (cntbt).
    FreeBySize,
    /// Inode chunks (inobt).
    Inodes,
    /// Inode chunks that have a free inode (finobt).
    FreeInodes,
    /// The owners of blocks (rmapbt).
    ReverseMap,
    /// The references to shared blocks (refcountbt).
    ReferenceCounts,
    /// The extents of a fork of a file (bmbt).
    Extents,
}

/// A key of any of the trees, for comparisons. Unused numbers are 0. The tree by block stores the
/// length behind the place; as no two extents begin at one place, it decides nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct XfsSearchKey(pub [u64; 3]);

/// The header of a block of a tree of a group.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the book")]
pub struct ShortBlockHeader {
    pub magic: [u8; 4],
    pub level: U16,
    pub numrecs: U16,
    pub left: U32,
    pub right: U32,
    pub blkno: U64,
    pub lsn: U64,
    pub uuid: [u8; 16],
    pub owner: U32,
    pub crc: [u8; 4],
}

/// The header of a block of the extents of a file.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the book")]
pub struct LongBlockHeader {
    pub magic: [u8; 4],
    pub level: U16,
    pub numrecs: U16,
    pub left: U64,
    pub right: U64,
    pub blkno: U64,
    pub lsn: U64,
    pub uuid: [u8; 16],
    pub owner: U64,
    pub crc: [u8; 4],
    pub pad: U32,
}

impl XfsTree {
    /// All trees.
    pub const ALL: [Self; 7] = [
        Self::FreeByBlock,
        Self::FreeBySize,
        Self::Inodes,
        Self::FreeInodes,
        Self::ReverseMap,
        Self::ReferenceCounts,
        Self::Extents,
    ];

    /// The magic of its blocks; `None` when V4 volumes do not have the tree.
    #[must_use]
    pub fn magic(self, geometry: &XfsGeometry) -> Option<[u8; 4]> {
        let (v5, v4) = match self {
            Self::FreeByBlock => (b"AB3B", Some(b"ABTB")),
            Self::FreeBySize => (b"AB3C", Some(b"ABTC")),
            Self::Inodes => (b"IAB3", Some(b"IABT")),
            Self::FreeInodes => (b"FIB3", None),
            Self::ReverseMap => (b"RMB3", None),
            Self::ReferenceCounts => (b"R3FC", None),
            Self::Extents => (b"BMA3", Some(b"BMAP")),
        };
        if geometry.has_checksums() { Some(*v5) } else { v4.copied() }
    }

    /// The tree that the block in `bytes` says that it belongs to.
    #[must_use]
    pub fn of_block(bytes: &[u8], geometry: &XfsGeometry) -> Option<Self> {
        let magic: [u8; 4] = *bytes.first_chunk()?;
        Self::ALL.into_iter().find(|tree| tree.magic(geometry) == Some(magic))
    }

    /// Whether its blocks have long headers and pointers.
    #[must_use]
    pub fn is_long(self) -> bool {
        self == Self::Extents
    }

    /// The bytes of a record.
    #[must_use]
    pub fn record_len(self) -> usize {
        match self {
            Self::FreeByBlock | Self::FreeBySize => size_of::<XfsFreeExtent>(),
            Self::Inodes | Self::FreeInodes => size_of::<XfsInodeChunk>(),
            Self::ReverseMap => size_of::<XfsReverseMap>(),
            Self::ReferenceCounts => size_of::<XfsSharedExtent>(),
            Self::Extents => size_of::<XfsExtentItem>(),
        }
    }

    /// The bytes of what a node stores about a child besides the pointer: a key, or two of them in
    /// the reverse map.
    #[must_use]
    pub fn key_len(self) -> usize {
        match self {
            Self::FreeByBlock | Self::FreeBySize | Self::Extents => 8,
            Self::Inodes | Self::FreeInodes | Self::ReferenceCounts => 4,
            Self::ReverseMap => 2 * size_of::<XfsReverseKey>(),
        }
    }

    /// The bytes of a pointer.
    #[must_use]
    pub fn pointer_len(self) -> usize {
        if self.is_long() { 8 } else { 4 }
    }

    /// The bytes of the header.
    #[must_use]
    pub fn header_len(self, geometry: &XfsGeometry) -> usize {
        match (self.is_long(), geometry.has_checksums()) {
            (false, true) => size_of::<ShortBlockHeader>(),
            (true, true) => size_of::<LongBlockHeader>(),
            (false, false) => 16,
            (true, false) => 24,
        }
    }

    pub(crate) fn identity(self) -> XfsIdentity {
        if self.is_long() { XfsIdentity::LONG_BLOCK } else { XfsIdentity::SHORT_BLOCK }
    }

    /// The records of a full leaf (`level` 0), or the children of a full node.
    #[must_use]
    pub fn capacity(self, geometry: &XfsGeometry, level: u16) -> usize {
        let room = geometry.block_size() - self.header_len(geometry);
        room / if level == 0 { self.record_len() } else { self.key_len() + self.pointer_len() }
    }

    /// The key of a record as it is stored: that of its first block, inode or offset.
    #[must_use]
    #[inline]
    pub fn low_key(self, record: &[u8]) -> XfsSearchKey {
        let field = |at| number(record, at, 4);
        XfsSearchKey(match self {
            Self::FreeByBlock => [field(0), field(4), 0],
            Self::FreeBySize => [field(4), field(0), 0],
            Self::ReverseMap => {
                [field(0), number(record, 8, 8), without_state(number(record, 16, 8))]
            }
            Self::Extents => [extent(record).0, 0, 0],
            _ => [field(0), 0, 0],
        })
    }

    /// The key of the last block, inode or offset of a record as it is stored. The tree by size has
    /// the same as its low key.
    #[must_use]
    pub fn high_key(self, record: &[u8]) -> XfsSearchKey {
        let XfsSearchKey([first, second, third]) = self.low_key(record);
        let more = match self {
            Self::FreeBySize => 0,
            Self::Inodes | Self::FreeInodes => u64::from(CHUNK_INODES) - 1,
            Self::Extents => extent(record).1.saturating_sub(1),
            _ => number(record, 4, 4).saturating_sub(1),
        };
        let has_offsets = self == Self::ReverseMap
            && XfsReverseMap::ref_from_bytes(record).is_ok_and(XfsReverseMap::has_offsets);
        let third = if has_offsets { third.saturating_add(more) } else { third };
        let second = if self == Self::FreeByBlock { u64::MAX } else { second };
        XfsSearchKey([first + more, second, third])
    }

    /// The lowest key of a child, from what a node stores about it.
    #[must_use]
    #[inline]
    pub fn child_key(self, stored: &[u8]) -> XfsSearchKey {
        let field = |at| number(stored, at, 4);
        XfsSearchKey(match self {
            Self::FreeByBlock => [field(0), field(4), 0],
            Self::FreeBySize => [field(4), field(0), 0],
            Self::ReverseMap => {
                [field(0), number(stored, 4, 8), without_state(number(stored, 12, 8))]
            }
            Self::Extents => [number(stored, 0, 8), 0, 0],
            _ => [field(0), 0, 0],
        })
    }

    /// The highest key of a child, from what a node stores about it; `None` in trees other than the
    /// reverse map.
    #[must_use]
    pub fn child_high_key(self, stored: &[u8]) -> Option<XfsSearchKey> {
        let high = stored.get(size_of::<XfsReverseKey>()..)?;
        (self == Self::ReverseMap).then(|| self.child_key(high))
    }

    /// Appends to `keys` what a node stores about a child that has records from `low` to `high`.
    #[expect(clippy::cast_possible_truncation, reason = "the numbers are those of records")]
    pub fn push_key(self, keys: &mut Vec<u8>, low: XfsSearchKey, high: XfsSearchKey) {
        let XfsSearchKey([first, second, _]) = low;
        match self {
            Self::FreeByBlock => keys.extend((first << 32 | second).to_be_bytes()),
            Self::FreeBySize => keys.extend((second << 32 | first).to_be_bytes()),
            Self::Extents => keys.extend(first.to_be_bytes()),
            Self::ReverseMap => {
                for XfsSearchKey([start, owner, offset]) in [low, high] {
                    let start = U32::new(start as u32);
                    let key = XfsReverseKey { start, owner: owner.into(), offset: offset.into() };
                    keys.extend_from_slice(key.as_bytes());
                }
            }
            _ => keys.extend((first as u32).to_be_bytes()),
        }
    }

    /// Checks the ranges of a record of the tree.
    fn verify_record(
        self,
        record: &[u8],
        geometry: &XfsGeometry,
        ag: AgNumber,
    ) -> Result<(), Malformed> {
        match self {
            Self::FreeByBlock | Self::FreeBySize => {
                view::<XfsFreeExtent>(STRUCTURE, record)?.verify(geometry, ag)
            }
            Self::Inodes | Self::FreeInodes => {
                view::<XfsInodeChunk>(STRUCTURE, record)?.verify(geometry, ag)
            }
            Self::ReverseMap => view::<XfsReverseMap>(STRUCTURE, record)?.verify(geometry, ag),
            Self::ReferenceCounts => {
                view::<XfsSharedExtent>(STRUCTURE, record)?.verify(geometry, ag)
            }
            Self::Extents => view::<XfsExtentItem>(STRUCTURE, record)?.verify(geometry, ag),
        }
    }
}

/// The offset of a reverse mapping without the bit that says whether the blocks are unwritten. It
/// takes no part in comparisons; kernels before 6.4 stored it in keys.
fn without_state(offset: u64) -> u64 {
    offset & !XfsReverseFlags::UNWRITTEN.bits()
}

/// The offset and the length of an extent as it is stored.
fn extent(record: &[u8]) -> (u64, u64) {
    XfsExtentItem::ref_from_bytes(record).map_or((0, 0), |item| {
        let extent = item.get();
        (extent.offset.0, u64::from(extent.count))
    })
}
