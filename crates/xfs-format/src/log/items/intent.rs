//! Intents: changes that a later transaction makes, and that recovery makes when that transaction
//! is not in the log. The *end* of an intent names its id.

use zerocopy::little_endian as le;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ItemHead, XfsItemType, check_range, view};
use crate::log::{XfsLogVector, bad_item};
use crate::record::XfsReverseFlags;
use crate::{FileBlock, FsBlock, Ino, Malformed, Structure, XfsGeometry};

/// What intents with a list begin with.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ListFormat {
    head: ItemHead,
    count: le::U32,
    id: le::U64,
}

/// An extent to be freed.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct XfsEfiExtent {
    /// Its first block.
    pub start: le::U64,
    /// Its blocks.
    pub count: le::U32,
    /// Zeros.
    pub pad: le::U32,
}

impl XfsEfiExtent {
    /// These blocks.
    #[must_use]
    pub fn new((start, count): (FsBlock, u32)) -> Self {
        Self { start: le::U64::new(start.0), count: le::U32::new(count), pad: le::U32::ZERO }
    }
}

/// An extent to be freed, as 32-bit machines wrote it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct XfsPackedEfiExtent {
    start: le::U64,
    count: le::U32,
}

/// The extents of an [`XfsFreeIntent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XfsEfiExtents<'a> {
    /// As 64-bit machines write them.
    Wide(&'a [XfsEfiExtent]),
    /// As 32-bit machines wrote them.
    Packed(&'a [XfsPackedEfiExtent]),
}

/// Extents to be freed (`EFI`), or those that are (`EFD`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsFreeIntent<'a> {
    /// The id of the intent.
    pub id: u64,
    /// The extents.
    pub extents: XfsEfiExtents<'a>,
}

/// An intent with records (`RUI`, `CUI`, `BUI`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsIntent<'a, R> {
    /// The id of the intent.
    pub id: u64,
    /// What is to be changed.
    pub records: &'a [R],
}

/// A mapping to be changed, of a reverse map or of a file.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct XfsMapExtent {
    /// The inode; for a reverse mapping also another owner.
    pub owner: le::U64,
    /// The first block.
    pub start: le::U64,
    /// The first block of the file.
    pub offset: le::U64,
    /// The blocks.
    pub count: le::U32,
    /// The change in the low 8 bits, and what is mapped.
    pub flags: le::U32,
}

/// An extent whose reference count is to be changed.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct XfsCountExtent {
    /// The first block.
    pub start: le::U64,
    /// The blocks.
    pub count: le::U32,
    /// The change.
    pub flags: le::U32,
}

/// The region of an [`XfsExchangeIntent`].
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ExchangeFormat {
    head: ItemHead,
    pad: le::U32,
    id: le::U64,
    inodes: [le::U64; 2],
    generations: [le::U32; 2],
    offsets: [le::U64; 2],
    blocks: le::U64,
    flags: le::U64,
    sizes: [le::U64; 2],
}

const _: () = {
    assert!(size_of::<ListFormat>() == 16 && align_of::<ListFormat>() == 1);
    assert!(size_of::<XfsEfiExtent>() == 16 && align_of::<XfsEfiExtent>() == 1);
    assert!(size_of::<XfsPackedEfiExtent>() == 12 && align_of::<XfsPackedEfiExtent>() == 1);
    assert!(size_of::<XfsMapExtent>() == 32 && align_of::<XfsMapExtent>() == 1);
    assert!(size_of::<XfsCountExtent>() == 16 && align_of::<XfsCountExtent>() == 1);
    assert!(size_of::<ExchangeFormat>() == 88 && align_of::<ExchangeFormat>() == 1);
};

macro_rules! operations {
    ($(#[doc = $doc:literal] $name:ident {
        $(#[doc = $text:literal] $variant:ident = $number:literal,)+
    })+) => {$(
        #[doc = $doc]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $name {
            $(#[doc = $text] $variant = $number,)+
        }

        impl $name {
            /// The change that `flags` name, of which `known` may be set besides.
            fn of(flags: u32, known: u32) -> Result<Self, Malformed> {
                match flags & !known {
                    $($number => Ok(Self::$variant),)+
                    _ => Err(bad_item(format!("the flags {flags:#x} of an intent"))),
                }
            }
        }
    )+};
}

operations! {
    /// A change of a reverse map.
    XfsReverseOp {
        /// Add a mapping.
        Map = 1,
        /// Add a mapping of shared blocks.
        MapShared = 2,
        /// Remove a mapping.
        Unmap = 3,
        /// Remove a mapping of shared blocks.
        UnmapShared = 4,
        /// Change whether blocks are unwritten.
        Convert = 5,
        /// Change whether shared blocks are unwritten.
        ConvertShared = 6,
        /// Blocks become those of an owner that is no inode.
        Alloc = 7,
        /// They are no longer.
        Free = 8,
    }
    /// A change of a reference count.
    XfsCountOp {
        /// One reference more.
        Increase = 1,
        /// One reference fewer.
        Decrease = 2,
        /// Blocks are staged for copy on write.
        Stage = 3,
        /// They are no longer.
        Unstage = 4,
    }
    /// A change of a file's mappings.
    XfsMapOp {
        /// Add a mapping.
        Map = 1,
        /// Remove a mapping.
        Unmap = 2,
    }
}

impl XfsMapExtent {
    const ATTRIBUTES: u32 = 1 << 31;
    const TREE_BLOCK: u32 = 1 << 30;
    const UNWRITTEN: u32 = 1 << 29;
    const FILE_UNWRITTEN: u32 = 1 << 30;
    const REALTIME: u32 = 1 << 29;

    /// The change `op` of a reverse mapping. `offset` has the flags of records in the tree, and the
    /// place in the file below them.
    #[must_use]
    pub fn of_reverse(
        op: XfsReverseOp,
        (start, count): (FsBlock, u32),
        owner: u64,
        offset: u64,
    ) -> Self {
        let place = XfsReverseFlags::from_bits_truncate(offset);
        let mut flags = u32::from(op as u8);
        for (flag, bit) in [
            (XfsReverseFlags::ATTRIBUTES, Self::ATTRIBUTES),
            (XfsReverseFlags::TREE_BLOCK, Self::TREE_BLOCK),
            (XfsReverseFlags::UNWRITTEN, Self::UNWRITTEN),
        ] {
            flags |= if place.contains(flag) { bit } else { 0 };
        }
        Self {
            owner: le::U64::new(owner),
            start: le::U64::new(start.0),
            offset: le::U64::new(offset & !place.bits()),
            count: le::U32::new(count),
            flags: le::U32::new(flags),
        }
    }

    /// The offset of a reverse mapping, with the flags of records in the tree.
    #[must_use]
    pub fn reverse_offset(&self) -> u64 {
        let mut flags = XfsReverseFlags::empty();
        flags.set(XfsReverseFlags::ATTRIBUTES, self.is_attributes());
        flags.set(XfsReverseFlags::TREE_BLOCK, self.is_tree_block());
        flags.set(XfsReverseFlags::UNWRITTEN, self.is_reverse_unwritten());
        flags.bits() | self.offset.get()
    }

    /// Its blocks.
    #[must_use]
    pub fn extent(&self) -> (FsBlock, u32) {
        (FsBlock(self.start.get()), self.count.get())
    }

    /// Whether it is of the attribute fork.
    #[must_use]
    pub fn is_attributes(&self) -> bool {
        self.flags.get() & Self::ATTRIBUTES != 0
    }

    /// The change of a reverse map.
    ///
    /// # Errors
    /// When the flags have no meaning.
    pub fn reverse_op(&self) -> Result<XfsReverseOp, Malformed> {
        let known = Self::ATTRIBUTES | Self::TREE_BLOCK | Self::UNWRITTEN;
        XfsReverseOp::of(self.flags.get(), known)
    }

    /// Whether a reverse mapping is of a block of the file's tree of extents.
    #[must_use]
    pub fn is_tree_block(&self) -> bool {
        self.flags.get() & Self::TREE_BLOCK != 0
    }

    /// Whether a reverse mapping is of unwritten blocks.
    #[must_use]
    pub fn is_reverse_unwritten(&self) -> bool {
        self.flags.get() & Self::UNWRITTEN != 0
    }

    /// The change of a file's mapping.
    ///
    /// # Errors
    /// When the flags have no meaning, or mean a realtime device.
    pub fn map_op(&self) -> Result<XfsMapOp, Malformed> {
        if self.flags.get() & Self::REALTIME != 0 {
            return Err(bad_item("a mapping on a realtime device"));
        }
        XfsMapOp::of(self.flags.get(), Self::ATTRIBUTES | Self::FILE_UNWRITTEN)
    }

    /// Whether a file's mapping is of unwritten blocks.
    #[must_use]
    pub fn is_map_unwritten(&self) -> bool {
        self.flags.get() & Self::FILE_UNWRITTEN != 0
    }
}

impl XfsCountExtent {
    /// The change `op` of the references to blocks.
    #[must_use]
    pub fn new(op: XfsCountOp, (start, count): (FsBlock, u32)) -> Self {
        Self {
            start: le::U64::new(start.0),
            count: le::U32::new(count),
            flags: le::U32::new(u32::from(op as u8)),
        }
    }

    /// Its blocks.
    #[must_use]
    pub fn extent(&self) -> (FsBlock, u32) {
        (FsBlock(self.start.get()), self.count.get())
    }

    /// What happens to the count of references.
    ///
    /// # Errors
    /// When the flags have no meaning.
    pub fn op(&self) -> Result<XfsCountOp, Malformed> {
        XfsCountOp::of(self.flags.get(), 0)
    }
}

/// The list of `count` records that fills `rest` exactly; `None` for another length.
fn list<R: FromBytes + KnownLayout + Immutable>(rest: &[u8], count: u32) -> Option<&[R]> {
    <[R]>::ref_from_bytes(rest).ok().filter(|list| list.len() == count as usize)
}

impl ListFormat {
    /// The start of an intent, and its list.
    fn split(first: &[u8]) -> Result<(&Self, &[u8]), Malformed> {
        let format = view::<Self>(first)?;
        Ok((format, first.get(size_of::<Self>()..).unwrap_or_default()))
    }

    fn new(item: XfsItemType, id: u64, count: usize) -> Self {
        let count = u32::try_from(count).expect("a region is below 4 GiB");
        let head = ItemHead::new(item, 1);
        Self { head, count: le::U32::new(count), id: le::U64::new(id) }
    }

    #[cold]
    fn problem(&self, rest: &[u8]) -> Malformed {
        bad_item(format!("{} records in {} bytes", self.count, rest.len()))
    }
}

impl XfsEfiExtents<'_> {
    /// The first block and the number of blocks of each.
    pub fn iter(&self) -> impl Iterator<Item = (FsBlock, u32)> {
        let (wide, packed) = match *self {
            Self::Wide(wide) => (wide, [].as_slice()),
            Self::Packed(packed) => ([].as_slice(), packed),
        };
        let wide = wide.iter().map(|extent| (extent.start, extent.count));
        let all = wide.chain(packed.iter().map(|extent| (extent.start, extent.count)));
        all.map(|(start, count)| (FsBlock(start.get()), count.get()))
    }
}

impl<'a> XfsFreeIntent<'a> {
    pub(super) fn parse(first: &'a [u8]) -> Result<Self, Malformed> {
        let (format, rest) = ListFormat::split(first)?;
        let count = format.count.get();
        let wide = list(rest, count).map(XfsEfiExtents::Wide);
        let extents = wide.or_else(|| list(rest, count).map(XfsEfiExtents::Packed));
        let extents = extents.ok_or_else(|| format.problem(rest))?;
        Ok(Self { id: format.id.get(), extents })
    }

    pub(super) fn encode(&self, item: XfsItemType, to: &mut XfsLogVector) {
        let (count, bytes) = match self.extents {
            XfsEfiExtents::Wide(wide) => (wide.len(), wide.as_bytes()),
            XfsEfiExtents::Packed(packed) => (packed.len(), packed.as_bytes()),
        };
        to.push(&[ListFormat::new(item, self.id, count).as_bytes(), bytes]);
    }
}

impl<'a, R: FromBytes + IntoBytes + KnownLayout + Immutable> XfsIntent<'a, R> {
    pub(super) fn parse(first: &'a [u8]) -> Result<Self, Malformed> {
        let (format, rest) = ListFormat::split(first)?;
        let records = list(rest, format.count.get()).ok_or_else(|| format.problem(rest))?;
        Ok(Self { id: format.id.get(), records })
    }

    pub(super) fn encode(&self, item: XfsItemType, to: &mut XfsLogVector) {
        let format = ListFormat::new(item, self.id, self.records.len());
        to.push(&[format.as_bytes(), self.records.as_bytes()]);
    }
}

bitflags::bitflags! {
    /// How mappings are exchanged.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsExchangeFlags: u64 {
        /// Those of the attribute forks.
        const ATTRIBUTES = 1;
        /// The sizes of the files too.
        const SIZES = 2;
        /// Only where the first file has written blocks.
        const WRITTEN = 4;
        /// The first file may lose its mark of shared blocks.
        const CLEAR_REFLINK_1 = 8;
        /// The second file may.
        const CLEAR_REFLINK_2 = 16;
        /// Bits without a meaning are kept, so that the check can refuse them.
        const _ = !0;
    }
}

/// Mappings of two files to be exchanged (`XMI`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsExchangeIntent {
    /// The id of the intent.
    pub id: u64,
    /// The two files.
    pub inodes: [Ino; 2],
    /// Their generations.
    pub generations: [u32; 2],
    /// Where the ranges begin.
    pub offsets: [FileBlock; 2],
    /// The blocks that are still to be exchanged.
    pub blocks: u64,
    /// Which mappings are exchanged, and what else of the files.
    pub flags: XfsExchangeFlags,
    /// The sizes of the files afterwards.
    pub sizes: [u64; 2],
}

impl XfsExchangeIntent {
    pub(super) fn parse(first: &[u8]) -> Result<Self, Malformed> {
        let format = view::<ExchangeFormat>(first)?;
        Ok(Self {
            id: format.id.get(),
            inodes: format.inodes.map(|ino| Ino(ino.get())),
            generations: format.generations.map(le::U32::get),
            offsets: format.offsets.map(|offset| FileBlock(offset.get())),
            blocks: format.blocks.get(),
            flags: XfsExchangeFlags::from_bits_retain(format.flags.get()),
            sizes: format.sizes.map(le::U64::get),
        })
    }

    pub(super) fn check(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        let in_volume = |ino| geometry.check_ino(Structure::LogItem, ino);
        self.inodes.into_iter().try_for_each(in_volume)?;
        self.offsets.into_iter().try_for_each(|offset| check_range(offset.0, self.blocks))?;
        let known = XfsExchangeFlags::from_bits_truncate(0x1f);
        if !known.contains(self.flags) {
            return Err(bad_item(format!("flags {:#x}", self.flags)));
        }
        Ok(())
    }

    pub(super) fn encode(&self, to: &mut XfsLogVector) {
        let format = ExchangeFormat {
            head: ItemHead::new(XfsItemType::Xmi, 1),
            pad: le::U32::ZERO,
            id: le::U64::new(self.id),
            inodes: self.inodes.map(|ino| le::U64::new(ino.0)),
            generations: self.generations.map(le::U32::new),
            offsets: self.offsets.map(|offset| le::U64::new(offset.0)),
            blocks: le::U64::new(self.blocks),
            flags: le::U64::new(self.flags.bits()),
            sizes: self.sizes.map(le::U64::new),
        };
        to.push(&[format.as_bytes()]);
    }
}
