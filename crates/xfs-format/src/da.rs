//! Blocks of directories and attribute forks: what they have in common, and the nodes of their
//! trees (book, "Directories", "Extended Attributes").
//!
//! A V5 block stamps itself with its checksum, its place, the volume, and the inode that owns it.
//! A V4 block has a magic number only. Nodes and leaves begin with [`DaInfo`], which both versions
//! share; the other blocks of directories begin with their magic number.

use std::ops::Range;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::identity::XfsIdentity;
use crate::layout::view;
use crate::log::items::parts_in_chunks;
use crate::{BasicBlock, FileBlock, Ino, Lsn, Malformed, Structure, U16, U32, U64, XfsGeometry};

/// The links with which nodes and leaves begin. 12 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DaInfo {
    /// The next block of the level, or 0.
    pub forw: U32,
    /// The previous block of the level, or 0.
    pub back: U32,
    /// The magic number.
    pub magic: U16,
    /// Zero.
    pub pad: U16,
}

/// What a V5 block says about itself. 44 bytes, behind the magic number or [`DaInfo`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DaStamp {
    /// The checksum, little-endian.
    pub crc: [u8; 4],
    /// The place of the block on the device.
    pub blkno: U64,
    /// The place in the log of the last change.
    pub lsn: U64,
    /// The id of the volume.
    pub uuid: [u8; 16],
    /// The inode whose fork has the block.
    pub owner: U64,
}

/// The number of entries of a node, and its level. 4 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DaNodeCounts {
    /// The entries.
    pub count: U16,
    /// The level: 1 is right above the leaves.
    pub level: U16,
}

/// An entry of a node. 8 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DaNodeEntry {
    /// The largest hash below the child.
    pub hash: U32,
    /// The child, in blocks of the filesystem also where a directory block is larger.
    pub before: U32,
}

const _: () = {
    assert!(size_of::<DaInfo>() == 12 && std::mem::offset_of!(DaInfo, magic) == 8);
    assert!(size_of::<DaStamp>() == 44 && std::mem::offset_of!(DaStamp, owner) == 36);
    assert!(std::mem::offset_of!(DaStamp, lsn) == 12);
    assert!(size_of::<DaNodeCounts>() == 4 && size_of::<DaNodeEntry>() == 8);
};

/// The highest level of a node that the format allows.
pub const MAX_LEVEL: u16 = 5;

/// The kinds of blocks in a directory and in an attribute fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DaKind {
    /// The only block of a directory: entries and the array of their hashes.
    DirBlock,
    /// Entries of a directory with several blocks.
    DirData,
    /// The index of free space in data blocks.
    DirFree,
    /// The only leaf of a directory. It holds the free space of data blocks, too.
    DirLeaf,
    /// One of several leaves of a directory.
    DirNodeLeaf,
    /// A node above the leaves of a directory.
    DirNode,
    /// A leaf of an attribute fork.
    AttrLeaf,
    /// A node above the leaves of an attribute fork.
    AttrNode,
}

impl DaKind {
    const DIRECTORY: [Self; 6] = [
        Self::DirBlock,
        Self::DirData,
        Self::DirFree,
        Self::DirLeaf,
        Self::DirNodeLeaf,
        Self::DirNode,
    ];

    /// The kind of a directory's block by its magic number.
    #[must_use]
    pub fn of_directory(geometry: &XfsGeometry, block: &[u8]) -> Option<Self> {
        Self::DIRECTORY.into_iter().find(|kind| kind.has_magic(geometry, block))
    }

    /// The kind of an attribute fork's block by its magic number. Blocks of remote values have
    /// none of these, and on V4 no magic number at all.
    #[must_use]
    pub fn of_attributes(geometry: &XfsGeometry, block: &[u8]) -> Option<Self> {
        [Self::AttrLeaf, Self::AttrNode].into_iter().find(|kind| kind.has_magic(geometry, block))
    }

    /// The structure that errors name.
    #[must_use]
    pub fn structure(self) -> Structure {
        match self {
            Self::AttrLeaf | Self::AttrNode => Structure::AttributeBlock,
            _ => Structure::DirectoryBlock,
        }
    }

    /// The bytes of such a block.
    #[must_use]
    pub fn block_size(self, geometry: &XfsGeometry) -> usize {
        match self.structure() {
            Structure::AttributeBlock => geometry.block_size(),
            _ => geometry.dir_block_size(),
        }
    }

    /// The bytes in front of the contents.
    #[must_use]
    pub fn header_len(self, geometry: &XfsGeometry) -> usize {
        match (self, geometry.has_checksums()) {
            (Self::AttrLeaf, true) => 80,
            (Self::AttrLeaf, false) => 32,
            (_, true) => 64,
            (_, false) => 16,
        }
    }

    /// Where a V5 block says what it is.
    #[must_use]
    pub fn identity(self) -> XfsIdentity {
        match self {
            Self::DirBlock | Self::DirData | Self::DirFree => XfsIdentity::DIRECTORY,
            _ => XfsIdentity::NODE,
        }
    }

    /// Where the stamp of a V5 block begins, with its checksum.
    #[must_use]
    pub fn stamp_at(self) -> usize {
        self.identity().crc
    }

    /// Where the fields behind the links or the magic number, and behind the stamp, begin.
    pub(crate) fn fields_at(self, geometry: &XfsGeometry) -> usize {
        self.stamp_at() + if geometry.has_checksums() { size_of::<DaStamp>() } else { 0 }
    }

    /// The magic number, and where it lies.
    fn magic(self, geometry: &XfsGeometry) -> (usize, &'static [u8]) {
        let (v5, v4): (&[u8], &[u8]) = match self {
            Self::DirBlock => (b"XDB3", b"XD2B"),
            Self::DirData => (b"XDD3", b"XD2D"),
            Self::DirFree => (b"XDF3", b"XD2F"),
            Self::DirLeaf => (&[0x3d, 0xf1], &[0xd2, 0xf1]),
            Self::DirNodeLeaf => (&[0x3d, 0xff], &[0xd2, 0xff]),
            Self::DirNode | Self::AttrNode => (&[0x3e, 0xbe], &[0xfe, 0xbe]),
            Self::AttrLeaf => (&[0x3b, 0xee], &[0xfb, 0xee]),
        };
        let magic = if geometry.has_checksums() { v5 } else { v4 };
        (if magic.len() == 4 { 0 } else { 8 }, magic)
    }

    fn has_magic(self, geometry: &XfsGeometry, block: &[u8]) -> bool {
        let (at, magic) = self.magic(geometry);
        let rest = block.get(at..).unwrap_or_default();
        match *magic {
            [a, b] => rest.first_chunk() == Some(&[a, b]),
            [a, b, c, d] => rest.first_chunk() == Some(&[a, b, c, d]),
            _ => false,
        }
    }

    /// An error about a block of this kind.
    pub(crate) fn bad(self, problem: impl Into<std::borrow::Cow<'static, str>>) -> Malformed {
        Malformed::new(self.structure(), problem)
    }

    /// Proves what all blocks have: size, magic number, volume, owner and place; and the checksum
    /// of a block that is sealed.
    pub(crate) fn check(
        self,
        geometry: &XfsGeometry,
        block: &[u8],
        expected: &DaExpected,
    ) -> Result<(), Malformed> {
        let size = self.block_size(geometry);
        if block.len() != size {
            return Err(self.bad(format!("{} bytes, not {size}", block.len())));
        }
        if !self.has_magic(geometry, block) {
            return Err(self.bad(format!("it does not have the magic number of {self:?}")));
        }
        if !geometry.has_checksums() {
            return Ok(());
        }
        let (place, owner) = (Some(expected.place), expected.owner.map(|ino| ino.0));
        let (identity, structure) = (self.identity(), self.structure());
        if expected.is_sealed {
            return identity.verify(structure, block, geometry, place, owner);
        }
        identity.verify_unsealed(structure, block, geometry, place, owner)
    }

    /// An empty block of this kind: zeros, but for the magic number and the stamp.
    pub(crate) fn empty(
        self,
        geometry: &XfsGeometry,
        expected: &DaExpected,
    ) -> Result<Vec<u8>, Malformed> {
        let mut block = vec![0; self.block_size(geometry)];
        let (at, magic) = self.magic(geometry);
        let mut edit = DaEdit::fill(self, &mut block);
        edit.put(at, magic)?;
        if geometry.has_checksums() {
            let owner = expected.owner.ok_or_else(|| self.bad("its owner is missing"))?;
            let stamp = DaStamp {
                crc: [0; 4],
                blkno: expected.place.0.into(),
                lsn: 0.into(),
                uuid: geometry.uuid.into_bytes(),
                owner: owner.0.into(),
            };
            edit.put(self.stamp_at(), stamp.as_bytes())?;
        }
        Ok(block)
    }

    /// Writes the LSN of the last change, and then the checksum. Does nothing on V4.
    pub fn seal(self, geometry: &XfsGeometry, block: &mut [u8], lsn: Lsn) {
        if geometry.has_checksums() {
            self.identity().seal(block, lsn);
        }
    }
}

/// Makes the only block of a level, a node or a leaf, one at another place, without a checksum.
pub fn move_block(
    geometry: &XfsGeometry,
    kind: DaKind,
    block: &mut [u8],
    expected: &DaExpected,
) -> Result<(), Malformed> {
    let mut edit = DaEdit::fill(kind, block);
    edit.set_forw(0)?;
    edit.set_back(0)?;
    if geometry.has_checksums() {
        let at = kind.stamp_at() + std::mem::offset_of!(DaStamp, blkno);
        edit.put(at, U64::new(expected.place.0).as_bytes())?;
    }
    Ok(())
}

/// What a block has to say about itself. `None` where the caller does not know, as recovery does
/// not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DaExpected {
    /// Where the caller read it from the device.
    pub place: BasicBlock,
    /// The inode whose fork has the block.
    pub owner: Option<Ino>,
    /// The block in the fork.
    pub block: Option<FileBlock>,
    /// Whether its checksum counts: not in a block that a transaction has changed.
    pub is_sealed: bool,
}

/// Views the bytes from `at` on as a `T`.
pub(crate) fn view_at<T: FromBytes + KnownLayout + Immutable>(
    kind: DaKind,
    block: &[u8],
    at: usize,
) -> Result<&T, Malformed> {
    view(kind.structure(), block.get(at..).unwrap_or_default())
}

/// Views the bytes from `at` on as `count` times a `T`.
pub(crate) fn slice_at<T: FromBytes + Immutable>(
    kind: DaKind,
    block: &[u8],
    at: usize,
    count: usize,
) -> Result<&[T], Malformed> {
    let view = block.get(at..).and_then(|rest| <[T]>::ref_from_prefix_with_elems(rest, count).ok());
    view.map(|(view, _)| view).ok_or_else(|| kind.bad(format!("its {count} entries do not fit")))
}

/// The two bytes at `at`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..)?.first_chunk::<2>()?;
    Some(usize::from(u16::from_be_bytes(*bytes)))
}

/// A length or an offset as the 16 bits that the disk has for it.
pub(crate) fn to_u16(kind: DaKind, number: usize) -> Result<U16, Malformed> {
    let number = u16::try_from(number).map_err(|_| kind.bad(format!("{number} is too much")));
    number.map(U16::new)
}

/// A node above the leaves of a directory or of an attribute fork.
#[derive(Clone, Copy, Debug)]
pub struct DaNode<'a> {
    /// The links to the neighbours.
    pub info: &'a DaInfo,
    /// The level: 1 is right above the leaves.
    pub level: u16,
    /// The entries, ascending by hash.
    pub entries: &'a [DaNodeEntry],
}

impl<'a> DaNode<'a> {
    /// Proves that a block is the expected node of the kind [`DaKind::DirNode`] or
    /// [`DaKind::AttrNode`].
    pub fn parse(
        geometry: &XfsGeometry,
        kind: DaKind,
        block: &'a [u8],
        expected: &DaExpected,
    ) -> Result<Self, Malformed> {
        kind.check(geometry, block, expected)?;
        let node = Self::view(geometry, kind, block)?;
        let Self { level, entries, .. } = node;
        if entries.is_empty() || level == 0 || level > MAX_LEVEL {
            let count = entries.len();
            return Err(kind.bad(format!("a node of level {level} with {count} entries")));
        }
        if !entries.is_sorted_by_key(|entry| entry.hash.get()) {
            return Err(kind.bad("its hashes do not ascend"));
        }
        if entries.iter().any(|entry| entry.before.get() == 0) {
            return Err(kind.bad("a child is the first block of the fork"));
        }
        Ok(node)
    }

    /// Views a node that was proved before, and that only changes of this module touched since:
    /// its checksum may be out of date. Proves no more than that its parts do not lead out of it.
    pub fn view(geometry: &XfsGeometry, kind: DaKind, block: &'a [u8]) -> Result<Self, Malformed> {
        let counts: &DaNodeCounts = view_at(kind, block, kind.fields_at(geometry))?;
        let count = usize::from(counts.count.get());
        let entries = slice_at(kind, block, kind.header_len(geometry), count)?;
        Ok(Self { info: view_at(kind, block, 0)?, level: counts.level.get(), entries })
    }

    /// The place of the first child that may hold `hash`. The following children may hold it, too,
    /// as long as the entry in front of them has just this hash. `None` when all hashes are below.
    #[must_use]
    pub fn find(&self, hash: u32) -> Option<usize> {
        let place = self.entries.partition_point(|entry| entry.hash.get() < hash);
        (place < self.entries.len()).then_some(place)
    }

    /// The bytes of a node with these links, level and entries, without a checksum
    /// ([`DaKind::seal`]).
    pub fn encode(
        geometry: &XfsGeometry,
        kind: DaKind,
        expected: &DaExpected,
        (forw, back, level): (u32, u32, u16),
        entries: &[DaNodeEntry],
    ) -> Result<Vec<u8>, Malformed> {
        let mut block = kind.empty(geometry, expected)?;
        let mut edit = DaEdit::fill(kind, &mut block);
        edit.put(0, U32::new(forw).as_bytes())?;
        edit.put(4, U32::new(back).as_bytes())?;
        let counts = DaNodeCounts { count: to_u16(kind, entries.len())?, level: level.into() };
        edit.put(kind.fields_at(geometry), counts.as_bytes())?;
        edit.put(kind.header_len(geometry), entries.as_bytes())?;
        Ok(block)
    }
}

/// The entries that a node has room for.
#[must_use]
pub fn node_capacity(geometry: &XfsGeometry, kind: DaKind) -> usize {
    let room = kind.block_size(geometry).saturating_sub(kind.header_len(geometry));
    room / size_of::<DaNodeEntry>()
}

/// Replaces the entries `places` of a node by others, which may be none or more. `false` when the
/// node has no room for them. The hash of an entry is the last hash of its child, stale or not.
pub fn splice_node(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    places: Range<usize>,
    entries: &[DaNodeEntry],
) -> Result<bool, Malformed> {
    let kind = edit.kind();
    let counts: DaNodeCounts = *view_at(kind, edit.block(), kind.fields_at(geometry))?;
    let (count, start) = (usize::from(counts.count.get()), kind.header_len(geometry));
    if places.start > places.end || places.end > count {
        return Err(kind.bad(format!("it has {count} entries, not {places:?}")));
    }
    let at = |place: usize| start + place * size_of::<DaNodeEntry>();
    let new_count = count - places.len() + entries.len();
    if at(new_count) > edit.block().len() {
        return Ok(false);
    }
    if new_count != count {
        edit.shift(at(places.end)..at(count), at(places.start + entries.len()))?;
        let counts = DaNodeCounts { count: to_u16(kind, new_count)?, ..counts };
        edit.put(kind.fields_at(geometry), counts.as_bytes())?;
    }
    edit.put(at(places.start), entries.as_bytes())?;
    Ok(true)
}

/// Changes a block in memory, and tells the caller which chunks of it differ then: the log carries
/// only these.
pub struct DaEdit<'a> {
    kind: DaKind,
    block: &'a mut [u8],
    changed: Option<&'a mut dyn FnMut(Range<usize>)>,
}

impl<'a> DaEdit<'a> {
    /// Changes a verified block of this kind. `changed` hears of each range that changes, each
    /// inside of one chunk. Bytes that are overwritten by the same ones do not change.
    pub fn new(
        kind: DaKind,
        block: &'a mut [u8],
        changed: &'a mut dyn FnMut(Range<usize>),
    ) -> Self {
        Self { kind, block, changed: Some(changed) }
    }

    /// Fills a new block of this kind, which the log has to carry as a whole.
    pub fn fill(kind: DaKind, block: &'a mut [u8]) -> Self {
        Self { kind, block, changed: None }
    }

    /// The block as it is now.
    #[must_use]
    pub fn block(&self) -> &[u8] {
        self.block
    }

    /// The kind of the block.
    #[must_use]
    pub fn kind(&self) -> DaKind {
        self.kind
    }

    /// Links a node or a leaf to the next block of its level, or to none with 0.
    pub fn set_forw(&mut self, forw: u32) -> Result<(), Malformed> {
        self.put(0, U32::new(forw).as_bytes())
    }

    /// Links a node or a leaf to the previous block of its level, or to none with 0.
    pub fn set_back(&mut self, back: u32) -> Result<(), Malformed> {
        self.put(4, U32::new(back).as_bytes())
    }

    /// Writes `bytes` at `at`.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) -> Result<(), Malformed> {
        let place = self.block.get_mut(at..at.saturating_add(bytes.len()));
        let place = place.ok_or_else(|| self.kind.bad("a change leads out of it"))?;
        if let Some(changed) = self.changed.as_deref_mut() {
            tell_differing(at, place, bytes, changed);
        }
        place.copy_from_slice(bytes);
        Ok(())
    }

    /// Moves the bytes of `from` so that they begin at `to`.
    pub(crate) fn shift(&mut self, from: Range<usize>, to: usize) -> Result<(), Malformed> {
        let end = to.saturating_add(from.len());
        if from.start > from.end || from.end > self.block.len() || end > self.block.len() {
            return Err(self.kind.bad("a move leads out of it"));
        }
        if let Some(changed) = self.changed.as_deref_mut() {
            let (old, new) = (self.block.get(to..end), self.block.get(from.clone()));
            tell_differing(to, old.unwrap_or_default(), new.unwrap_or_default(), changed);
        }
        self.block.copy_within(from, to);
        Ok(())
    }

    /// Makes the block one of another kind, whose header is as long.
    pub(crate) fn become_kind(
        &mut self,
        geometry: &XfsGeometry,
        kind: DaKind,
    ) -> Result<(), Malformed> {
        let (at, magic) = kind.magic(geometry);
        self.kind = kind;
        self.put(at, magic)
    }
}

/// Tells `changed` of the parts of the bytes from `at` on that are others when `old` becomes `new`.
fn tell_differing(at: usize, old: &[u8], new: &[u8], changed: &mut dyn FnMut(Range<usize>)) {
    for part in parts_in_chunks(at..at + new.len()) {
        let bytes = part.start - at..part.end - at;
        if old.get(bytes.clone()) != new.get(bytes) {
            changed(part);
        }
    }
}
