//! The records of the trees: free space, inode chunks, owners, reference counts, extents.

use offshoot_vfs::Structure;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::btree::XfsTree;
use crate::geometry::XfsLayout;
use crate::layout::ensure;
use crate::{AgBlock, AgIno, AgNumber, FileBlock, FsBlock, Ino, Malformed, U32, U64, XfsGeometry};

/// The inodes that a record of the inode trees is about.
pub const CHUNK_INODES: u32 = 64;

/// The inodes that one bit of a hole mask stands for.
const INODES_PER_HOLE_BIT: u32 = 4;

/// File offsets in blocks are below this.
pub const MOST_FILE_BLOCKS: u64 = 1 << 54;

/// The bit of [`XfsSharedExtent::start`] that says that the extent is staged for copy-on-write.
pub const STAGED: u32 = 1 << 31;

/// A record as it lies in the leaves of a tree.
pub trait XfsTreeRecord:
    FromBytes + IntoBytes + KnownLayout + Immutable + Unaligned + Copy + 'static
{
    /// The trees that hold such records.
    const TREES: &'static [XfsTree];

    /// Checks the ranges of a record of group `ag`.
    ///
    /// # Errors
    /// The first fault in it.
    fn verify(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed>;
}

/// Free blocks.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct XfsFreeExtent {
    /// The first block.
    pub start: U32,
    /// The number of blocks.
    pub count: U32,
}

impl XfsTreeRecord for XfsFreeExtent {
    const TREES: &'static [XfsTree] = &[XfsTree::FreeByBlock, XfsTree::FreeBySize];

    fn verify(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        let is_usable = geometry.is_usable_run(ag, AgBlock(self.start.get()), self.count.get());
        ensure!(Structure::FreeRecord, is_usable, "{} blocks from {}", self.count, self.start);
        Ok(())
    }
}

/// A chunk of 64 inodes, of which some may not be allocated.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct XfsInodeChunk {
    /// The first inode.
    pub start: U32,
    /// With sparse chunks: the hole mask (2 bytes), the allocated and the free inodes (1 byte
    /// each). Otherwise: the free inodes.
    pub counts: [u8; 4],
    /// One bit for each inode that is free or not allocated.
    pub free: U64,
}

impl XfsInodeChunk {
    /// The record of a chunk. Bit i of `holes` says that the inodes from 4 i on are not allocated.
    #[must_use]
    pub fn new(geometry: &XfsGeometry, start: AgIno, holes: u16, free: u64) -> Self {
        let allocated = spread(!holes);
        let free = free | !allocated;
        // At most 64.
        let count = |mask: u64| u8::try_from(mask.count_ones()).unwrap_or(u8::MAX);
        let free_count = count(free & allocated);
        let counts = if geometry.layout.contains(XfsLayout::SPARSE_INODES) {
            let [high, low] = holes.to_be_bytes();
            [high, low, count(allocated), free_count]
        } else {
            [0, 0, 0, free_count]
        };
        Self { start: start.0.into(), counts, free: free.into() }
    }

    /// The first inode.
    #[must_use]
    pub fn start(&self) -> AgIno {
        AgIno(self.start.get())
    }

    /// One bit for each 4 inodes that are not allocated.
    #[must_use]
    pub fn holes(&self, geometry: &XfsGeometry) -> u16 {
        let [high, low, ..] = self.counts;
        let is_sparse = geometry.layout.contains(XfsLayout::SPARSE_INODES);
        if is_sparse { u16::from_be_bytes([high, low]) } else { 0 }
    }

    /// One bit for each inode that is allocated, in use or not.
    #[must_use]
    pub fn allocated(&self, geometry: &XfsGeometry) -> u64 {
        spread(!self.holes(geometry))
    }

    /// One bit for each inode that is allocated and free.
    #[must_use]
    pub fn free(&self, geometry: &XfsGeometry) -> u64 {
        self.free.get() & self.allocated(geometry)
    }

    /// One bit for each inode that is in use.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        !self.free.get()
    }
}

/// A mask of inodes from one of groups of four.
fn spread(groups: u16) -> u64 {
    (0..u16::BITS)
        .filter(|bit| groups & 1 << bit != 0)
        .fold(0, |mask, bit| mask | 0xf << (bit * INODES_PER_HOLE_BIT))
}

impl XfsTreeRecord for XfsInodeChunk {
    const TREES: &'static [XfsTree] = &[XfsTree::Inodes, XfsTree::FreeInodes];

    fn verify(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        const STRUCTURE: Structure = Structure::InodeRecord;
        let (start, allocated) = (self.start.get(), self.allocated(geometry));
        let unit = (1 << geometry.inodes_per_block_log()).min(CHUNK_INODES);
        let last = 63_u32.checked_sub(allocated.leading_zeros());
        let first = start.checked_add(allocated.trailing_zeros());
        let end = last.and_then(|last| start.checked_add(last));
        let is_inside = [first, end]
            .iter()
            .all(|inode| inode.is_some_and(|inode| geometry.has_inode(ag, AgIno(inode))));
        ensure!(
            STRUCTURE,
            start.is_multiple_of(unit) && is_inside,
            "a chunk from inode {start} with allocated inodes {allocated:#x}"
        );
        let holes_in_use = self.in_use() & !allocated;
        ensure!(STRUCTURE, holes_in_use == 0, "chunk {start}: a hole is in use");
        let expected = Self::new(geometry, self.start(), self.holes(geometry), self.free.get());
        ensure!(
            STRUCTURE,
            self.counts == expected.counts,
            "chunk {start}: counts {:?} expected, {:?} found",
            expected.counts,
            self.counts
        );
        Ok(())
    }
}

/// What a range of blocks is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XfsOwner {
    /// A file, by its inode.
    File(Ino),
    /// The headers of the group.
    Headers,
    /// The log.
    Log,
    /// The trees of free space, the reverse map, and the blocks of the free list.
    FreeTrees,
    /// The trees of inodes.
    InodeTrees,
    /// Inodes.
    Inodes,
    /// The tree of reference counts.
    CountTree,
    /// Copies that are staged for copy-on-write.
    Staging,
}

/// The owners that are no file, with their numbers (seen).
const SPECIAL_OWNERS: [(XfsOwner, i64); 7] = [
    (XfsOwner::Headers, -3),
    (XfsOwner::Log, -4),
    (XfsOwner::FreeTrees, -5),
    (XfsOwner::InodeTrees, -6),
    (XfsOwner::Inodes, -7),
    (XfsOwner::CountTree, -8),
    (XfsOwner::Staging, -9),
];

impl XfsOwner {
    /// The owner with this number; `None` for a negative number without a meaning.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        let signed = number.cast_signed();
        if signed >= 0 {
            return Some(Self::File(Ino(number)));
        }
        SPECIAL_OWNERS.iter().find(|(_, special)| *special == signed).map(|(owner, _)| *owner)
    }

    /// The number that stands for the owner in a record: the inode, or one below zero.
    #[must_use]
    pub fn number(self) -> u64 {
        let special = SPECIAL_OWNERS.iter().find(|(owner, _)| *owner == self);
        match (self, special) {
            (Self::File(ino), _) => ino.0,
            (_, Some((_, number))) => number.cast_unsigned(),
            (_, None) => u64::MAX,
        }
    }
}

bitflags::bitflags! {
    /// What the offset of a reverse mapping says besides the offset.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsReverseFlags: u64 {
        /// The blocks belong to the attribute fork.
        const ATTRIBUTES = 1 << 63;
        /// They are blocks of the tree of extents.
        const TREE_BLOCK = 1 << 62;
        /// They are unwritten.
        const UNWRITTEN = 1 << 61;
    }
}

/// A reverse mapping: which owner has a range of blocks.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct XfsReverseMap {
    /// The first block.
    pub start: U32,
    /// The number of blocks.
    pub count: U32,
    /// The number of the owner.
    pub owner: U64,
    /// The flags, and the offset in the fork of the owner.
    pub offset: U64,
}

/// A key of the reverse map. A node has two for each child: of its lowest and of its highest block.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct XfsReverseKey {
    /// A block.
    pub start: U32,
    /// The number of the owner.
    pub owner: U64,
    /// The flags, and the offset in the fork of the owner.
    pub offset: U64,
}

impl XfsReverseMap {
    /// What owns the blocks. A record that was verified has one.
    #[must_use]
    pub fn owner(&self) -> Option<XfsOwner> {
        XfsOwner::from_number(self.owner.get())
    }

    /// The flags.
    #[must_use]
    pub fn flags(&self) -> XfsReverseFlags {
        XfsReverseFlags::from_bits_truncate(self.offset.get())
    }

    /// The offset in the fork of the owner.
    #[must_use]
    pub fn offset(&self) -> FileBlock {
        FileBlock(self.offset.get() & (MOST_FILE_BLOCKS - 1))
    }

    /// Whether each block has its own offset in a file.
    pub(crate) fn has_offsets(&self) -> bool {
        self.owner.get().cast_signed() >= 0 && !self.flags().contains(XfsReverseFlags::TREE_BLOCK)
    }
}

impl XfsTreeRecord for XfsReverseMap {
    const TREES: &'static [XfsTree] = &[XfsTree::ReverseMap];

    fn verify(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        const STRUCTURE: Structure = Structure::ReverseRecord;
        let (start, count, owner) = (self.start.get(), self.count.get(), self.owner());
        let is_place_right = if owner == Some(XfsOwner::Headers) {
            start == 0 && count == geometry.header_blocks()
        } else {
            geometry.is_usable_run(ag, AgBlock(start), count)
        };
        ensure!(STRUCTURE, is_place_right, "{count} blocks from {start}");
        let is_owner_right = match owner {
            Some(XfsOwner::File(ino)) => geometry.locate(ino).is_some(),
            Some(_) => self.offset.get() == 0,
            None => false,
        };
        ensure!(
            STRUCTURE,
            is_owner_right,
            "owner {} with offset {:#x}",
            self.owner.get().cast_signed(),
            self.offset
        );
        if self.flags().contains(XfsReverseFlags::TREE_BLOCK) {
            let known = XfsReverseFlags::ATTRIBUTES | XfsReverseFlags::TREE_BLOCK;
            let is_plain = self.offset.get() & !known.bits() == 0;
            ensure!(STRUCTURE, is_plain, "a block of a tree with offset {:#x}", self.offset);
        }
        if self.has_offsets() {
            let flags = XfsReverseFlags::ATTRIBUTES | XfsReverseFlags::UNWRITTEN;
            let is_offset_right = self.flags() != flags
                && self.flags().bits() | self.offset().0 == self.offset.get()
                && self.offset().0 + u64::from(count) <= MOST_FILE_BLOCKS;
            ensure!(STRUCTURE, is_offset_right, "offset {:#x}", self.offset);
        }
        Ok(())
    }
}

/// The references to blocks that several files share, or that are staged for copy-on-write.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct XfsSharedExtent {
    /// The first block, and [`STAGED`].
    pub start: U32,
    /// The number of blocks.
    pub count: U32,
    /// The references: at least 2, and 1 when the blocks are staged.
    pub references: U32,
}

impl XfsSharedExtent {
    /// Whether the blocks are staged for copy-on-write.
    #[must_use]
    pub fn is_staged(&self) -> bool {
        self.start.get() & STAGED != 0
    }

    /// The first block.
    #[must_use]
    pub fn block(&self) -> AgBlock {
        AgBlock(self.start.get() & !STAGED)
    }
}

impl XfsTreeRecord for XfsSharedExtent {
    const TREES: &'static [XfsTree] = &[XfsTree::ReferenceCounts];

    fn verify(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        let references = self.references.get();
        let are_right = if self.is_staged() { references == 1 } else { references >= 2 };
        ensure!(
            Structure::CountRecord,
            are_right && geometry.is_usable_run(ag, self.block(), self.count.get()),
            "{} blocks from {:#x} with {references} references",
            self.count,
            self.start
        );
        Ok(())
    }
}

/// An extent of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsExtent {
    /// The offset in the file.
    pub offset: FileBlock,
    /// The first block.
    pub start: FsBlock,
    /// The number of blocks.
    pub count: u32,
    /// Whether a reader has to see zeros instead of the blocks.
    pub is_unwritten: bool,
}

/// An extent of a file as it is stored, in 128 bits: unwritten 1, offset 54, start 52, count 21.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct XfsExtentItem(pub [u8; 16]);

const COUNT_BITS: u32 = 21;
const START_BITS: u32 = 52;

/// The blocks of an extent are at most these.
pub const MOST_EXTENT_BLOCKS: u32 = (1 << COUNT_BITS) - 1;

impl XfsExtentItem {
    /// The extent.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "masked to the width of the field")]
    pub fn get(self) -> XfsExtent {
        let bits = u128::from_be_bytes(self.0);
        XfsExtent {
            offset: FileBlock((bits >> (COUNT_BITS + START_BITS)) as u64 & (MOST_FILE_BLOCKS - 1)),
            start: FsBlock((bits >> COUNT_BITS) as u64 & ((1 << START_BITS) - 1)),
            count: bits as u32 & MOST_EXTENT_BLOCKS,
            is_unwritten: bits >> 127 != 0,
        }
    }
}

impl From<XfsExtent> for XfsExtentItem {
    fn from(extent: XfsExtent) -> Self {
        let offset = u128::from(extent.offset.0 & (MOST_FILE_BLOCKS - 1));
        let start = u128::from(extent.start.0 & ((1 << START_BITS) - 1));
        let bits = u128::from(extent.is_unwritten) << 127
            | offset << (COUNT_BITS + START_BITS)
            | start << COUNT_BITS
            | u128::from(extent.count & MOST_EXTENT_BLOCKS);
        Self(bits.to_be_bytes())
    }
}

impl XfsTreeRecord for XfsExtentItem {
    const TREES: &'static [XfsTree] = &[XfsTree::Extents];

    /// The blocks are not checked on a volume with a realtime device, where they may be blocks of
    /// that: [`XfsGeometry::split`] says it.
    fn verify(&self, geometry: &XfsGeometry, _: AgNumber) -> Result<(), Malformed> {
        let extent = self.get();
        let is_inside = geometry.layout.contains(XfsLayout::REALTIME)
            || geometry.is_usable_extent(extent.start, extent.count);
        let end = extent.offset.0 + u64::from(extent.count);
        ensure!(
            Structure::ExtentRecord,
            extent.count > 0 && is_inside && end <= MOST_FILE_BLOCKS,
            "{} blocks from {} at offset {}",
            extent.count,
            extent.start,
            extent.offset
        );
        Ok(())
    }
}
