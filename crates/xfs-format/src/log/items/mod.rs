//! Items: what a transaction changes.
//!
//! The first region of an item says its type and how many regions it has; the others hold the data.
//! [`XfsLogItem::parse`] proves that the regions hold all that the first one says.
//! [`XfsLogItem::check`] proves that the item leads only to places of the volume that it may
//! change. An item of an unknown type is an error, because the volume is wrong without its change.

mod attribute;
mod buffer;
mod inode;
mod intent;

pub use attribute::{XfsAttributeIntent, XfsAttributeOp};
pub use buffer::{
    CHUNK, XfsBufferFlags, XfsBufferItem, XfsBufferRun, XfsBufferType, buffer_size, encode_buffer,
    parts_in_chunks, patch_buffer,
};
pub use inode::{CORE_SIZE, XfsInodeFields, XfsInodeItem, core_for_log};
pub use intent::{
    XfsCountExtent, XfsCountOp, XfsEfiExtent, XfsEfiExtents, XfsExchangeFlags, XfsExchangeIntent,
    XfsFreeIntent, XfsIntent, XfsMapExtent, XfsMapOp, XfsPackedEfiExtent, XfsReverseOp,
};

use zerocopy::little_endian as le;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{XfsLogVector, XfsRegions, bad_item};
use crate::record::{MOST_FILE_BLOCKS, XfsOwner};
use crate::{AgBlock, AgNumber, FsBlock, Ino, Malformed, Structure, U32, XfsGeometry, layout};

macro_rules! item_types {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal $words:literal;)+) => {
        /// The type of an item.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum XfsItemType {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        impl XfsItemType {
            /// The type with this number.
            #[must_use]
            pub fn of(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)+
                    _ => None,
                }
            }

            /// What messages call it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $words,)+
                }
            }
        }
    };
}

item_types! {
    /// Extents to be freed.
    Efi = 0x1236 "intent to free extents";
    /// They are freed.
    Efd = 0x1237 "end of freeing extents";
    /// An inode.
    Inode = 0x123b "inode";
    /// Parts of a block.
    Buffer = 0x123c "buffer";
    /// A record of quotas.
    Dquot = 0x123d "quota record";
    /// Quotas are switched off.
    QuotaOff = 0x123e "end of quotas";
    /// A chunk of new inodes.
    Icreate = 0x123f "new inodes";
    /// Reverse mappings to be changed.
    Rui = 0x1240 "intent to change reverse mappings";
    /// They are changed.
    Rud = 0x1241 "end of changing reverse mappings";
    /// Reference counts to be changed.
    Cui = 0x1242 "intent to change reference counts";
    /// They are changed.
    Cud = 0x1243 "end of changing reference counts";
    /// A mapping of a file to be changed.
    Bui = 0x1244 "intent to change a mapping";
    /// It is changed.
    Bud = 0x1245 "end of changing a mapping";
    /// An attribute to be changed.
    Attri = 0x1246 "intent to change an attribute";
    /// It is changed.
    Attrd = 0x1247 "end of changing an attribute";
    /// Mappings of two files to be exchanged.
    Xmi = 0x1248 "intent to exchange mappings";
    /// They are exchanged.
    Xmd = 0x1249 "end of exchanging mappings";
    /// Realtime extents to be freed.
    EfiRt = 0x124a "intent to free realtime extents";
    /// They are freed.
    EfdRt = 0x124b "end of freeing realtime extents";
    /// Realtime reverse mappings to be changed.
    RuiRt = 0x124c "intent to change realtime reverse mappings";
    /// They are changed.
    RudRt = 0x124d "end of changing realtime reverse mappings";
    /// Realtime reference counts to be changed.
    CuiRt = 0x124e "intent to change realtime reference counts";
    /// They are changed.
    CudRt = 0x124f "end of changing realtime reference counts";
}

/// When recovery replays an item, among those of its transaction. Items with the same turn are
/// replayed in the order of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum XfsReplayTurn {
    /// Buffers and new inodes.
    Buffers,
    /// Inodes, intents and their ends.
    Others,
    /// Buffers of inodes, for their chains of unlinked inodes: the inodes are there by now.
    InodeBuffers,
    /// Cancelled buffers.
    Cancels,
}

/// A chunk of new inodes (`ICREATE`). Nothing else of them is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsIcreateItem {
    /// The group.
    pub ag: AgNumber,
    /// The first block of the chunk.
    pub block: AgBlock,
    /// The inodes.
    pub count: u32,
    /// The bytes of an inode.
    pub inode_size: u32,
    /// The blocks of the chunk.
    pub blocks: u32,
    /// The generation of the new inodes.
    pub generation: u32,
}

/// The region of an [`XfsIcreateItem`]. Its numbers are big-endian on all machines.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct IcreateFormat {
    head: ItemHead,
    ag: U32,
    agbno: U32,
    count: U32,
    isize: U32,
    length: U32,
    generation: U32,
}

/// What every first region begins with.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ItemHead {
    kind: le::U16,
    size: le::U16,
}

/// The first region of the end of an intent.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DoneFormat {
    head: ItemHead,
    pad: le::U32,
    id: le::U64,
}

const _: () = {
    assert!(size_of::<IcreateFormat>() == 28 && align_of::<IcreateFormat>() == 1);
    assert!(size_of::<DoneFormat>() == 16 && align_of::<DoneFormat>() == 1);
};

/// An item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XfsLogItem<'a> {
    /// Parts of a block.
    Buffer(XfsBufferItem<'a>),
    /// An inode.
    Inode(XfsInodeItem<'a>),
    /// A chunk of new inodes.
    Icreate(XfsIcreateItem),
    /// Extents to be freed.
    Efi(XfsFreeIntent<'a>),
    /// They are freed. Recovery needs only the id.
    Efd(XfsFreeIntent<'a>),
    /// Reverse mappings to be changed.
    Rui(XfsIntent<'a, XfsMapExtent>),
    /// Reference counts to be changed.
    Cui(XfsIntent<'a, XfsCountExtent>),
    /// A mapping of a file to be changed.
    Bui(XfsIntent<'a, XfsMapExtent>),
    /// An attribute to be changed.
    Attri(XfsAttributeIntent<'a>),
    /// Mappings of two files to be exchanged.
    Xmi(XfsExchangeIntent),
    /// The end of another intent than [`Self::Efi`].
    Done {
        /// Its type, that of the end.
        item: XfsItemType,
        /// The id of the intent.
        id: u64,
    },
    /// An item of quotas or of a realtime device, which recovery refuses by this name.
    Unsupported(XfsItemType),
}

impl<'a> XfsLogItem<'a> {
    /// The item that `regions` hold.
    ///
    /// # Errors
    /// When its type is unknown, or the regions do not hold what the first one says.
    pub fn parse(regions: XfsRegions<'a>) -> Result<Self, Malformed> {
        let first = regions.get(0).unwrap_or_default();
        let Ok((head, _)) = ItemHead::ref_from_prefix(first) else {
            return Err(bad_item(format!("a first region of {} bytes", first.len())));
        };
        let number = head.kind.get();
        let Some(item) = XfsItemType::of(number) else {
            return Err(bad_item(format!("type {number:#x} is unknown")));
        };
        if usize::from(head.size.get()) != regions.len() {
            let (says, has) = (head.size, regions.len());
            return Err(bad_item(format!("{}: {says} regions expected, {has} found", item.name())));
        }
        Self::parse_as(item, first, regions)
            .map_err(|problem| bad_item(format!("{}: {}", item.name(), problem.problem)))
    }

    fn parse_as(
        item: XfsItemType,
        first: &'a [u8],
        regions: XfsRegions<'a>,
    ) -> Result<Self, Malformed> {
        use XfsItemType as Type;
        Ok(match item {
            Type::Buffer => Self::Buffer(XfsBufferItem::parse(first, regions)?),
            Type::Inode => Self::Inode(XfsInodeItem::parse(first, regions)?),
            Type::Icreate => Self::Icreate(XfsIcreateItem::parse(first)?),
            Type::Efi => Self::Efi(XfsFreeIntent::parse(first)?),
            Type::Efd => Self::Efd(XfsFreeIntent::parse(first)?),
            Type::Rui => Self::Rui(XfsIntent::parse(first)?),
            Type::Cui => Self::Cui(XfsIntent::parse(first)?),
            Type::Bui => Self::Bui(XfsIntent::parse(first)?),
            Type::Attri => Self::Attri(XfsAttributeIntent::parse(first, regions)?),
            Type::Xmi => Self::Xmi(XfsExchangeIntent::parse(first)?),
            Type::Rud | Type::Cud | Type::Bud | Type::Attrd | Type::Xmd => {
                let id = view::<DoneFormat>(first)?.id.get();
                Self::Done { item, id }
            }
            Type::Dquot
            | Type::QuotaOff
            | Type::EfiRt
            | Type::EfdRt
            | Type::RuiRt
            | Type::RudRt
            | Type::CuiRt
            | Type::CudRt => Self::Unsupported(item),
        })
    }

    /// Proves that the item leads only to places of the volume that such an item may change: inside
    /// the device, and neither in the log nor, for extents, in the headers of groups. When a
    /// replayed superblock makes the volume larger, the geometry has to follow before the next
    /// item is checked.
    ///
    /// # Errors
    /// The first number that leads elsewhere.
    pub fn check(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        match self {
            Self::Buffer(buffer) => buffer.check(geometry),
            Self::Inode(inode) => inode.check(geometry),
            Self::Icreate(create) => create.check(geometry),
            Self::Efi(free) => {
                free.extents.iter().try_for_each(|extent| check_extent(geometry, extent))
            }
            Self::Rui(intent) => intent.records.iter().try_for_each(|record| {
                record.reverse_op()?;
                match XfsOwner::from_number(record.owner.get()) {
                    Some(XfsOwner::File(ino)) => geometry.check_ino(Structure::LogItem, ino)?,
                    Some(_) => {}
                    None => return Err(bad_item(format!("owner {:#x}", record.owner))),
                }
                check_range(record.offset.get(), record.count.get().into())?;
                check_extent(geometry, record.extent())
            }),
            Self::Cui(intent) => intent.records.iter().try_for_each(|record| {
                record.op()?;
                check_extent(geometry, record.extent())
            }),
            Self::Bui(intent) => {
                let [record] = intent.records else {
                    let count = intent.records.len();
                    return Err(bad_item(format!("{count} mappings of a file, not one")));
                };
                record.map_op()?;
                geometry.check_ino(Structure::LogItem, Ino(record.owner.get()))?;
                check_range(record.offset.get(), record.count.get().into())?;
                check_extent(geometry, record.extent())
            }
            Self::Attri(intent) => geometry.check_ino(Structure::LogItem, intent.ino),
            Self::Xmi(intent) => intent.check(geometry),
            Self::Efd(_) | Self::Done { .. } | Self::Unsupported(_) => Ok(()),
        }
    }

    /// When recovery replays the item.
    #[must_use]
    pub fn turn(&self) -> XfsReplayTurn {
        match self {
            Self::Buffer(buffer) if buffer.flags.contains(XfsBufferFlags::CANCEL) => {
                XfsReplayTurn::Cancels
            }
            Self::Buffer(buffer) if buffer.flags.contains(XfsBufferFlags::INODES) => {
                XfsReplayTurn::InodeBuffers
            }
            Self::Buffer(_) | Self::Icreate(_) => XfsReplayTurn::Buffers,
            _ => XfsReplayTurn::Others,
        }
    }

    /// Adds the regions of the item to `to`. Returns false for [`Self::Unsupported`], whose
    /// regions it does not keep.
    #[must_use]
    pub fn encode(&self, to: &mut XfsLogVector) -> bool {
        match self {
            Self::Buffer(item) => item.encode(to),
            Self::Inode(item) => item.encode(to),
            Self::Icreate(item) => item.encode(to),
            Self::Efi(item) => item.encode(XfsItemType::Efi, to),
            Self::Efd(item) => item.encode(XfsItemType::Efd, to),
            Self::Rui(item) => item.encode(XfsItemType::Rui, to),
            Self::Cui(item) => item.encode(XfsItemType::Cui, to),
            Self::Bui(item) => item.encode(XfsItemType::Bui, to),
            Self::Attri(item) => item.encode(to),
            Self::Xmi(item) => item.encode(to),
            &Self::Done { item, id } => encode_done(item, id, to),
            Self::Unsupported(_) => return false,
        }
        true
    }
}

impl XfsIcreateItem {
    fn parse(first: &[u8]) -> Result<Self, Malformed> {
        let format = view::<IcreateFormat>(first)?;
        Ok(Self {
            ag: AgNumber(format.ag.get()),
            block: AgBlock(format.agbno.get()),
            count: format.count.get(),
            inode_size: format.isize.get(),
            blocks: format.length.get(),
            generation: format.generation.get(),
        })
    }

    fn check(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        let size = u64::from(self.inode_size);
        let bytes = u64::from(self.blocks) << geometry.block_log;
        let per_chunk = 64.max(1 << geometry.inodes_per_block_log());
        if size != geometry.inode_size() as u64
            || self.count == 0
            || self.count > per_chunk
            || u64::from(self.count) * size != bytes
        {
            return Err(bad_item(format!(
                "{} new inodes of {size} bytes in {} blocks",
                self.count, self.blocks
            )));
        }
        check_run(geometry, (self.ag, self.block), self.blocks)
    }

    fn encode(&self, to: &mut XfsLogVector) {
        let format = IcreateFormat {
            head: ItemHead::new(XfsItemType::Icreate, 1),
            ag: U32::new(self.ag.0),
            agbno: U32::new(self.block.0),
            count: U32::new(self.count),
            isize: U32::new(self.inode_size),
            length: U32::new(self.blocks),
            generation: U32::new(self.generation),
        };
        to.push(&[format.as_bytes()]);
    }
}

impl ItemHead {
    fn new(item: XfsItemType, regions: u16) -> Self {
        Self { kind: le::U16::new(item as u16), size: le::U16::new(regions) }
    }
}

/// Adds the region of the end of an intent.
fn encode_done(item: XfsItemType, id: u64, to: &mut XfsLogVector) {
    let (head, pad) = (ItemHead::new(item, 1), le::U32::ZERO);
    to.push(&[DoneFormat { head, pad, id: le::U64::new(id) }.as_bytes()]);
}

/// Views the start of a region.
fn view<T: FromBytes + KnownLayout + Immutable>(region: &[u8]) -> Result<&T, Malformed> {
    layout::view(Structure::LogItem, region)
}

/// Whether two ranges, each a start and a length, have something in common.
fn overlaps((a, a_len): (u64, u64), (b, b_len): (u64, u64)) -> bool {
    a < b.saturating_add(b_len) && b < a.saturating_add(a_len)
}

/// Proves that an extent lies in one group, behind its headers and outside of the log.
///
/// # Errors
/// When it does not.
pub fn check_extent(geometry: &XfsGeometry, extent: (FsBlock, u32)) -> Result<(), Malformed> {
    let (start, count) = extent;
    let problem = || bad_item(format!("an extent of {count} blocks at {start}"));
    check_run(geometry, geometry.split(start).ok_or_else(problem)?, count)
}

/// Proves that blocks of a group lie behind its headers and outside of the log.
fn check_run(
    geometry: &XfsGeometry,
    (ag, block): (AgNumber, AgBlock),
    count: u32,
) -> Result<(), Malformed> {
    let start = geometry.fs_block(ag, block);
    let is_in_log = geometry.log_start.0 != 0
        && overlaps((start.0, count.into()), (geometry.log_start.0, geometry.log_blocks.into()));
    if !geometry.is_usable_run(ag, block, count) || is_in_log {
        return Err(bad_item(format!("{count} blocks from {block} of group {ag}")));
    }
    Ok(())
}

/// Proves that a range of a file has numbers that the format can hold.
fn check_range(offset: u64, blocks: u64) -> Result<(), Malformed> {
    if offset > MOST_FILE_BLOCKS || blocks > MOST_FILE_BLOCKS - offset {
        return Err(bad_item(format!("{blocks} blocks at {offset} of a file")));
    }
    Ok(())
}
