//! The blocks of the seven trees.
//!
//! All trees of a group have *short* blocks, with pointers of 32 bits inside the group. The extents
//! of files have *long* ones. Those of V4 volumes end their headers in front of `blkno`.
//!
//! ```text
//! leaf   header | record | record | ...
//! node   header | key | key | ... room for all that fit | pointer | pointer | ...
//! ```

use offshoot_vfs::Structure;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::geometry::XfsLayout;
use crate::group::MOST_LEVELS;
use crate::layout::{ensure, view};
use crate::record::{
    CHUNK_INODES, XfsExtentItem, XfsFreeExtent, XfsInodeChunk, XfsReverseFlags, XfsReverseKey,
    XfsReverseMap, XfsSharedExtent, XfsTreeRecord,
};
use crate::{
    AgBlock, AgNumber, BasicBlock, FileBlock, FsBlock, Ino, Lsn, Malformed, U16, U32, U64,
    XfsGeometry, csum,
};

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

/// The big-endian number in `len` bytes at `at`; 0 outside of `bytes`.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let field = bytes.get(at..at + len).unwrap_or_default();
    field.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
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
        if has_checksums(geometry) { Some(*v5) } else { v4.copied() }
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
        match (self.is_long(), has_checksums(geometry)) {
            (false, true) => size_of::<ShortBlockHeader>(),
            (true, true) => size_of::<LongBlockHeader>(),
            (false, false) => 16,
            (true, false) => 24,
        }
    }

    fn crc(self) -> usize {
        if self.is_long() { 64 } else { 52 }
    }

    /// The records of a full leaf (`level` 0), or the children of a full node.
    #[must_use]
    pub fn capacity(self, geometry: &XfsGeometry, level: u16) -> usize {
        let room = geometry.block_size() - self.header_len(geometry);
        room / if level == 0 { self.record_len() } else { self.key_len() + self.pointer_len() }
    }

    /// The key of a record as it is stored: that of its first block, inode or offset.
    #[must_use]
    pub fn low_key(self, record: &[u8]) -> XfsSearchKey {
        let (first, second) = (number(record, 0, 4), number(record, 4, 4));
        XfsSearchKey(match self {
            Self::FreeByBlock => [first, second, 0],
            Self::FreeBySize => [second, first, 0],
            Self::ReverseMap => [first, number(record, 8, 8), without_state(number(record, 16, 8))],
            Self::Extents => [extent(record).0, 0, 0],
            _ => [first, 0, 0],
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
    pub fn child_key(self, stored: &[u8]) -> XfsSearchKey {
        let (first, second) = (number(stored, 0, 4), number(stored, 4, 4));
        XfsSearchKey(match self {
            Self::FreeByBlock => [first, second, 0],
            Self::FreeBySize => [second, first, 0],
            Self::ReverseMap => [first, number(stored, 4, 8), without_state(number(stored, 12, 8))],
            Self::Extents => [number(stored, 0, 8), 0, 0],
            _ => [first, 0, 0],
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

    /// Whether a record or a child may follow another one. The records of the reverse map may
    /// overlap, those of the other trees may not.
    fn may_follow(self, before: XfsSearchKey, key: XfsSearchKey) -> bool {
        before < key || self == Self::ReverseMap && before == key
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

fn has_checksums(geometry: &XfsGeometry) -> bool {
    geometry.layout.contains(XfsLayout::CHECKSUMS)
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

/// What the header of a block says, for short and long ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsBtreeHeader {
    /// The level, 0 for a leaf.
    pub level: u16,
    /// The number of records or children.
    pub count: u16,
    /// The block to the left on the same level: of the group, or of the volume in a long block.
    pub left: Option<u64>,
    /// The block to the right on the same level.
    pub right: Option<u64>,
    /// The LSN of the last change; none in a V4 volume.
    pub lsn: Option<Lsn>,
    /// The number of the group or of the inode that owns the tree; none in a V4 volume.
    pub owner: Option<u64>,
}

/// A verified block of a tree.
#[derive(Clone, Copy, Debug)]
pub struct XfsBtreeBlock<'a> {
    /// The tree.
    pub tree: XfsTree,
    /// Its header.
    pub header: XfsBtreeHeader,
    /// The records, or the keys.
    entries: &'a [u8],
    /// The pointers; none in a leaf.
    pointers: &'a [u8],
}

impl<'a> XfsBtreeBlock<'a> {
    /// Checks everything that the block in `bytes`, read from block `at`, can show by itself, and
    /// that it belongs to file `owner` if the caller knows that.
    ///
    /// # Errors
    /// The first fault, with the expected and the found value.
    pub fn verify(
        bytes: &'a [u8],
        geometry: &XfsGeometry,
        tree: XfsTree,
        at: FsBlock,
        owner: Option<Ino>,
    ) -> Result<Self, Malformed> {
        let (len, size) = (bytes.len(), geometry.block_size());
        ensure!(STRUCTURE, len == size, "{len} bytes, not the {size} of a block");
        let magic = tree.magic(geometry);
        ensure!(
            STRUCTURE,
            magic.is_some_and(|magic| bytes.starts_with(&magic)),
            "not a block of the tree {tree:?}"
        );
        let Some((ag, block)) = geometry.split(at) else {
            return Err(Malformed::new(STRUCTURE, format!("block {at} is not in the volume")));
        };
        let header = XfsBtreeHeader::read(bytes, geometry, tree);
        if has_checksums(geometry) {
            verify_identity(bytes, geometry, tree, geometry.place(ag, block))?;
            let expected = if tree.is_long() { owner.map(|ino| ino.0) } else { Some(ag.0.into()) };
            ensure!(
                STRUCTURE,
                expected.is_none_or(|expected| header.owner == Some(expected)),
                "owner {} expected, {} found",
                expected.unwrap_or_default(),
                header.owner.unwrap_or_default()
            );
        }
        let (level, count) = (header.level, usize::from(header.count));
        let capacity = tree.capacity(geometry, level);
        ensure!(STRUCTURE, level < MOST_LEVELS, "level {level}");
        ensure!(
            STRUCTURE,
            count <= capacity && (level == 0 || count > 0),
            "{count} entries at level {level}, where {capacity} fit"
        );
        let own = if tree.is_long() { at.0 } else { block.0.into() };
        for sibling in [header.left, header.right].into_iter().flatten() {
            ensure!(
                STRUCTURE,
                sibling != own && is_block(geometry, tree, ag, sibling),
                "sibling {sibling} of block {own}"
            );
        }
        let block = Self::view(bytes, geometry, tree);
        if level == 0 {
            block.verify_records(geometry, ag)?;
        } else {
            block.verify_children(geometry, ag)?;
        }
        Ok(block)
    }

    /// Views a block that [`Self::verify`] has accepted before. One that it has not may give wrong
    /// entries, or none.
    #[must_use]
    pub fn view(bytes: &'a [u8], geometry: &XfsGeometry, tree: XfsTree) -> Self {
        let header = XfsBtreeHeader::read(bytes, geometry, tree);
        let (level, count) = (header.level, usize::from(header.count));
        let content = bytes.get(tree.header_len(geometry)..).unwrap_or_default();
        let (entry, pointers) = if level == 0 {
            (tree.record_len(), &[][..])
        } else {
            let pointers = content.get(tree.capacity(geometry, level) * tree.key_len()..);
            let pointers = pointers.and_then(|rest| rest.get(..count * tree.pointer_len()));
            (tree.key_len(), pointers.unwrap_or_default())
        };
        let entries = content.get(..count * entry).unwrap_or_default();
        Self { tree, header, entries, pointers }
    }

    fn verify_records(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        let mut before: Option<XfsSearchKey> = None;
        for (index, record) in self.entries.chunks_exact(self.tree.record_len()).enumerate() {
            self.tree.verify_record(record, geometry, ag).map_err(|error| {
                Malformed::new(error.structure, format!("record {index}: {}", error.problem))
            })?;
            let key = self.tree.low_key(record);
            ensure!(
                STRUCTURE,
                before.is_none_or(|before| self.tree.may_follow(before, key)),
                "record {index} does not follow the one before it"
            );
            let is_overlapping = self.tree == XfsTree::ReverseMap;
            before = Some(if is_overlapping { key } else { self.tree.high_key(record) });
        }
        Ok(())
    }

    fn verify_children(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        let mut before: Option<XfsSearchKey> = None;
        for (index, stored) in self.entries.chunks_exact(self.tree.key_len()).enumerate() {
            let key = self.tree.child_key(stored);
            ensure!(
                STRUCTURE,
                before.is_none_or(|before| self.tree.may_follow(before, key))
                    && self.tree.child_high_key(stored).is_none_or(|high| high >= key),
                "the keys of child {index} are out of order"
            );
            before = Some(key);
            let pointer = self.pointer(index).unwrap_or_default();
            ensure!(
                STRUCTURE,
                is_block(geometry, self.tree, ag, pointer),
                "child {index} at block {pointer}"
            );
        }
        Ok(())
    }

    /// The number of records or children.
    #[must_use]
    pub fn len(&self) -> usize {
        self.header.count.into()
    }

    /// Whether it is a leaf without records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.header.count == 0
    }

    /// Record `index` of a leaf as it is stored.
    #[must_use]
    pub fn record(&self, index: usize) -> Option<&'a [u8]> {
        (self.header.level == 0).then(|| nth(self.entries, self.tree.record_len(), index))?
    }

    /// The records of a leaf; none of a node or of a tree that has no such records.
    #[must_use]
    pub fn records<R: XfsTreeRecord>(&self) -> &'a [R] {
        if self.header.level > 0 || !R::TREES.contains(&self.tree) {
            return &[];
        }
        <[R]>::ref_from_bytes(self.entries).unwrap_or_default()
    }

    /// The lowest key of record or child `index`.
    #[must_use]
    pub fn key(&self, index: usize) -> Option<XfsSearchKey> {
        match self.record(index) {
            Some(record) => Some(self.tree.low_key(record)),
            None => self.stored_key(index).map(|stored| self.tree.child_key(stored)),
        }
    }

    /// The highest key of record `index`, or of child `index` in the reverse map.
    #[must_use]
    pub fn high_key(&self, index: usize) -> Option<XfsSearchKey> {
        match self.record(index) {
            Some(record) => Some(self.tree.high_key(record)),
            None => self.tree.child_high_key(self.stored_key(index)?),
        }
    }

    /// What a node stores about child `index` besides the pointer.
    #[must_use]
    pub fn stored_key(&self, index: usize) -> Option<&'a [u8]> {
        (self.header.level > 0).then(|| nth(self.entries, self.tree.key_len(), index))?
    }

    /// The block of child `index`: of the group, or of the volume in a long block.
    #[must_use]
    pub fn pointer(&self, index: usize) -> Option<u64> {
        let len = self.tree.pointer_len();
        nth(self.pointers, len, index).map(|pointer| number(pointer, 0, len))
    }
}

/// Piece `index` of those of `len` bytes.
fn nth(bytes: &[u8], len: usize, index: usize) -> Option<&[u8]> {
    bytes.get(index.checked_mul(len)?..)?.get(..len)
}

/// Whether a tree of group `ag` may have a block there.
fn is_block(geometry: &XfsGeometry, tree: XfsTree, ag: AgNumber, block: u64) -> bool {
    if tree.is_long() {
        return geometry.is_usable_extent(FsBlock(block), 1);
    }
    u32::try_from(block).is_ok_and(|block| geometry.is_usable(ag, AgBlock(block)))
}

/// Checks the checksum, the place and the uuid of a block of a V5 volume.
fn verify_identity(
    bytes: &[u8],
    geometry: &XfsGeometry,
    tree: XfsTree,
    place: BasicBlock,
) -> Result<(), Malformed> {
    ensure!(STRUCTURE, csum::is_right(bytes, tree.crc()), "its checksum is wrong");
    let (blkno, uuid) = if tree.is_long() {
        let header: &LongBlockHeader = view(STRUCTURE, bytes)?;
        (header.blkno, header.uuid)
    } else {
        let header: &ShortBlockHeader = view(STRUCTURE, bytes)?;
        (header.blkno, header.uuid)
    };
    ensure!(STRUCTURE, blkno.get() == place.0, "place {place} expected, {blkno} found");
    ensure!(
        STRUCTURE,
        uuid == *geometry.uuid.as_bytes(),
        "filesystem id {} expected, {} found",
        geometry.uuid,
        uuid::Uuid::from_bytes(uuid)
    );
    Ok(())
}

impl XfsBtreeHeader {
    /// Reads the header of a block, whose bytes may be those of any block.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "numbers of two bytes")]
    pub fn read(bytes: &[u8], geometry: &XfsGeometry, tree: XfsTree) -> Self {
        let len = tree.pointer_len();
        let sibling = |at: usize| {
            let block = number(bytes, at, len);
            let null = if tree.is_long() { FsBlock::NULL.0 } else { AgBlock::NULL.0.into() };
            (block != null).then_some(block)
        };
        let (lsn, owner) = if tree.is_long() { (32, 56) } else { (24, 48) };
        let v5 = has_checksums(geometry);
        Self {
            level: number(bytes, 4, 2) as u16,
            count: number(bytes, 6, 2) as u16,
            left: sibling(8),
            right: sibling(8 + len),
            lsn: v5.then(|| Lsn(number(bytes, lsn, 8))),
            owner: v5.then(|| number(bytes, owner, len)),
        }
    }
}

/// A block of a tree that is being built or changed.
///
/// A caller makes one, sets its content and its neighbours, and takes its bytes, which then have
/// their checksum.
#[derive(Clone, Debug)]
pub struct XfsBtreeBuilder<'g> {
    geometry: &'g XfsGeometry,
    tree: XfsTree,
    bytes: Vec<u8>,
}

impl<'g> XfsBtreeBuilder<'g> {
    /// A block at `at` without entries and neighbours. `owner` is the file of a long block; short
    /// ones belong to their group. `None` when the volume has no such block or no such tree.
    #[must_use]
    pub fn new(
        geometry: &'g XfsGeometry,
        tree: XfsTree,
        at: FsBlock,
        owner: Ino,
        level: u16,
    ) -> Option<Self> {
        let (ag, block) = geometry.split(at)?;
        let magic = tree.magic(geometry)?;
        let mut bytes = vec![0; geometry.block_size()];
        let (blkno, uuid) = (geometry.place(ag, block).0.into(), geometry.uuid.into_bytes());
        if tree.is_long() {
            let header = long_header(magic, level, blkno, uuid, owner);
            copy(&mut bytes, 0, &header.as_bytes()[..tree.header_len(geometry)]);
        } else {
            let header = ShortBlockHeader {
                magic,
                level: level.into(),
                numrecs: 0.into(),
                left: AgBlock::NULL.0.into(),
                right: AgBlock::NULL.0.into(),
                blkno,
                lsn: 0.into(),
                uuid,
                owner: ag.0.into(),
                crc: [0; 4],
            };
            copy(&mut bytes, 0, &header.as_bytes()[..tree.header_len(geometry)]);
        }
        Some(Self { geometry, tree, bytes })
    }

    /// Sets the neighbours on the same level.
    pub fn set_siblings(&mut self, left: Option<u64>, right: Option<u64>) {
        let len = self.tree.pointer_len();
        for (index, block) in [left, right].into_iter().enumerate() {
            let block = block.unwrap_or(u64::MAX).to_be_bytes();
            copy(&mut self.bytes, 8 + index * len, &block[8 - len..]);
        }
    }

    /// Sets the LSN of the last change, which V4 volumes do not have.
    pub fn set_lsn(&mut self, lsn: Lsn) {
        if has_checksums(self.geometry) {
            let at = if self.tree.is_long() { 32 } else { 24 };
            copy(&mut self.bytes, at, &lsn.0.to_be_bytes());
        }
    }

    /// Replaces the records of a leaf by those in `records`, as they are stored. Returns whether
    /// they fit; nothing is changed if not.
    pub fn set_records(&mut self, records: &[u8]) -> bool {
        let count = records.len() / self.tree.record_len();
        if !records.len().is_multiple_of(self.tree.record_len()) || !self.set_count(count, true) {
            return false;
        }
        let header = self.tree.header_len(self.geometry);
        copy(&mut self.bytes, header, records);
        true
    }

    /// Replaces the children of a node. `keys` is what the node stores about them, made by
    /// [`XfsTree::push_key`]. Returns whether they fit; nothing is changed if not.
    pub fn set_children(&mut self, keys: &[u8], pointers: &[u64]) -> bool {
        let (len, count) = (self.tree.pointer_len(), pointers.len());
        if keys.len() != count * self.tree.key_len() || !self.set_count(count, false) {
            return false;
        }
        let header = self.tree.header_len(self.geometry);
        copy(&mut self.bytes, header, keys);
        let first = header + self.tree.capacity(self.geometry, 1) * self.tree.key_len();
        for (index, pointer) in pointers.iter().enumerate() {
            copy(&mut self.bytes, first + index * len, &pointer.to_be_bytes()[8 - len..]);
        }
        true
    }

    /// Sets the number of entries of a leaf or a node, if it is one and they fit, and clears the
    /// old ones.
    fn set_count(&mut self, count: usize, is_leaf: bool) -> bool {
        let level = XfsBtreeHeader::read(&self.bytes, self.geometry, self.tree).level;
        let fits = count <= self.tree.capacity(self.geometry, level) && (level == 0) == is_leaf;
        if let Some(count) = u16::try_from(count).ok().filter(|_| fits) {
            copy(&mut self.bytes, 6, &count.to_be_bytes());
            self.bytes[self.tree.header_len(self.geometry)..].fill(0);
        }
        fits
    }

    /// The bytes, with their checksum.
    #[must_use]
    pub fn into_bytes(mut self) -> Vec<u8> {
        seal(&mut self.bytes, self.geometry, self.tree);
        self.bytes
    }
}

/// Stores the checksum of a block of a tree.
///
/// # Panics
///
/// When `bytes` is shorter than the header of a block.
pub fn seal(bytes: &mut [u8], geometry: &XfsGeometry, tree: XfsTree) {
    if has_checksums(geometry) {
        csum::store(bytes, tree.crc());
    }
}

/// Copies `from` to `at`; the callers have proved that it fits.
fn copy(bytes: &mut [u8], at: usize, from: &[u8]) {
    bytes[at..at + from.len()].copy_from_slice(from);
}

fn long_header(
    magic: [u8; 4],
    level: u16,
    blkno: U64,
    uuid: [u8; 16],
    owner: Ino,
) -> LongBlockHeader {
    LongBlockHeader {
        magic,
        level: level.into(),
        numrecs: 0.into(),
        left: FsBlock::NULL.0.into(),
        right: FsBlock::NULL.0.into(),
        blkno,
        lsn: 0.into(),
        uuid,
        owner: owner.0.into(),
        crc: [0; 4],
        pad: 0.into(),
    }
}

/// The root of a tree of extents, as it lies in a fork of an inode.
///
/// ```text
/// inode  level 2, count 2, keys with room for all that fit in the fork, pointers
/// log    a long header as of a block, keys, pointers close up                             (seen)
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsForkRoot {
    /// The level, at least 1.
    pub level: u16,
    /// The first offset and the block of each child.
    pub children: Vec<(FileBlock, FsBlock)>,
}

/// The bytes of the header of a root in an inode.
const ROOT_HEADER: usize = 4;

/// The bytes of a key, and of a pointer.
const ROOT_FIELD: usize = 8;

impl XfsForkRoot {
    /// The children that fit in a fork of `len` bytes.
    #[must_use]
    pub fn capacity(len: usize) -> usize {
        len.saturating_sub(ROOT_HEADER) / (2 * ROOT_FIELD)
    }

    /// Checks the root in `fork`, which is the whole room of the fork.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn parse(fork: &[u8], geometry: &XfsGeometry) -> Result<Self, Malformed> {
        let count = number(fork, 2, 2);
        let room = Self::capacity(fork.len());
        let keys = fork.get(ROOT_HEADER..).unwrap_or_default();
        Self::of(number(fork, 0, 2), count, room, keys, geometry)
    }

    /// Checks the root in a region of the log.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn from_log(region: &[u8], geometry: &XfsGeometry) -> Result<Self, Malformed> {
        let magic = XfsTree::Extents.magic(geometry);
        ensure!(
            STRUCTURE,
            magic.is_some_and(|magic| region.starts_with(&magic)),
            "not the root of a tree of extents"
        );
        let keys = region.get(XfsTree::Extents.header_len(geometry)..).unwrap_or_default();
        let room = keys.len() / (2 * ROOT_FIELD);
        Self::of(number(region, 4, 2), number(region, 6, 2), room, keys, geometry)
    }

    /// Checks the root with these keys, behind which there is room for `room` of them.
    #[expect(clippy::cast_possible_truncation, reason = "numbers of two bytes")]
    fn of(
        level: u64,
        count: u64,
        room: usize,
        keys: &[u8],
        geometry: &XfsGeometry,
    ) -> Result<Self, Malformed> {
        ensure!(
            STRUCTURE,
            (1..MOST_LEVELS.into()).contains(&level) && (1..=room as u64).contains(&count),
            "a root at level {level} with {count} children, where {room} fit"
        );
        let mut children: Vec<(FileBlock, FsBlock)> = Vec::with_capacity(count as usize);
        for index in 0..count as usize {
            let key = FileBlock(number(keys, index * ROOT_FIELD, ROOT_FIELD));
            let block = FsBlock(number(keys, (room + index) * ROOT_FIELD, ROOT_FIELD));
            ensure!(
                STRUCTURE,
                children.last().is_none_or(|&(before, _)| before < key)
                    && geometry.is_usable_extent(block, 1),
                "child {index} at offset {key} in block {block}"
            );
            children.push((key, block));
        }
        Ok(Self { level: level as u16, children })
    }

    /// Writes the root to `fork`, the whole room of the fork, and returns whether it fits. Nothing
    /// is written if not.
    pub fn write(&self, fork: &mut [u8]) -> bool {
        let room = Self::capacity(fork.len());
        let Some(count) =
            u16::try_from(self.children.len()).ok().filter(|_| self.children.len() <= room)
        else {
            return false;
        };
        fork.fill(0);
        if room == 0 {
            return self.children.is_empty();
        }
        copy(fork, 0, &self.level.to_be_bytes());
        copy(fork, 2, &count.to_be_bytes());
        for (index, (key, block)) in self.children.iter().enumerate() {
            copy(fork, ROOT_HEADER + index * ROOT_FIELD, &key.0.to_be_bytes());
            copy(fork, ROOT_HEADER + (room + index) * ROOT_FIELD, &block.0.to_be_bytes());
        }
        true
    }

    /// The region of the log that carries the root of file `owner`.
    #[must_use]
    pub fn to_log(&self, geometry: &XfsGeometry, owner: Ino) -> Vec<u8> {
        let magic = XfsTree::Extents.magic(geometry).unwrap_or_default();
        // The kernel leaves no place in a root, which has none of its own.
        let uuid = geometry.uuid.into_bytes();
        let mut header = long_header(magic, self.level, u64::MAX.into(), uuid, owner);
        header.numrecs = u16::try_from(self.children.len()).unwrap_or(u16::MAX).into();
        let mut region = header.as_bytes()[..XfsTree::Extents.header_len(geometry)].to_vec();
        region.extend(self.children.iter().flat_map(|(key, _)| key.0.to_be_bytes()));
        region.extend(self.children.iter().flat_map(|(_, block)| block.0.to_be_bytes()));
        region
    }
}
