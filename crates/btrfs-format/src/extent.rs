//! Extents and their back references.
//!
//! An EXTENT_ITEM or METADATA_ITEM counts the references to an extent. It holds as many of them
//! inline as fit; each of the others has its own item behind it.

use offshoot_vfs::Structure;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::dir::sequence;
use crate::key::DiskKey;
use crate::view::{take, view};
use crate::{ItemType, Malformed};

/// The fixed part of an EXTENT_ITEM or METADATA_ITEM. 24 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtentItem {
    /// How many references there are, inline and as items.
    pub refs: U64,
    /// The transaction that allocated the extent.
    pub generation: U64,
    /// [`EXTENT_FLAG_DATA`], [`EXTENT_FLAG_TREE_BLOCK`], [`EXTENT_FLAG_FULL_BACKREF`].
    pub flags: U64,
}

/// The extent holds data.
pub const EXTENT_FLAG_DATA: u64 = 1;
/// The extent is a tree block.
pub const EXTENT_FLAG_TREE_BLOCK: u64 = 2;
/// The back references of what the tree block points to name the address of the block, not its
/// tree.
pub const EXTENT_FLAG_FULL_BACKREF: u64 = 1 << 8;

/// The part that follows in the EXTENT_ITEM of a tree block. 18 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TreeBlockInfo {
    /// The first key of the block.
    pub key: DiskKey,
    /// Its level.
    pub level: u8,
}

/// An EXTENT_DATA_REF: the file that refers to a data extent. 28 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtentDataRef {
    /// The subvolume.
    pub root: U64,
    /// The inode.
    pub objectid: U64,
    /// The file offset at which the beginning of the extent would be, in bytes.
    pub offset: U64,
    /// How many file extents of the inode refer to it.
    pub count: U32,
}

/// A reference inside of the extent item.
#[derive(Clone, Copy, Debug)]
pub enum InlineRef<'a> {
    /// To a tree block, from the tree with this id.
    TreeBlock(u64),
    /// To a tree block, from the block at this address.
    SharedBlock(u64),
    /// To a data extent, from a file.
    ExtentData(&'a ExtentDataRef),
    /// To a data extent, `count` times from the leaf at the address `parent`.
    SharedData {
        /// The address of the leaf.
        parent: u64,
        /// How many file extents of the leaf refer to it.
        count: u32,
    },
    /// The subvolume that the extent was first made for.
    Owner(u64),
}

/// A parsed EXTENT_ITEM or METADATA_ITEM.
#[derive(Clone, Copy, Debug)]
pub struct ParsedExtent<'a> {
    /// The fixed part.
    pub item: &'a ExtentItem,
    /// Key and level of a tree block, in volumes without skinny metadata.
    pub block: Option<&'a TreeBlockInfo>,
    refs: &'a [u8],
}

impl<'a> ParsedExtent<'a> {
    /// Parses `data`, an item of type `item_type`.
    pub fn parse(item_type: ItemType, data: &'a [u8]) -> Result<Self, Malformed> {
        let (item, rest) = view::<ExtentItem>(Structure::ExtentItem, data)?;
        let is_block = item.flags.get() & EXTENT_FLAG_TREE_BLOCK != 0;
        let (block, refs) = if is_block && item_type == ItemType::EXTENT_ITEM {
            let (block, rest) = view::<TreeBlockInfo>(Structure::ExtentItem, rest)?;
            (Some(block), rest)
        } else {
            (None, rest)
        };
        Ok(Self { item, block, refs })
    }

    /// The inline references. The iterator ends after the first malformed one.
    pub fn inline_refs(&self) -> impl Iterator<Item = Result<InlineRef<'a>, Malformed>> {
        sequence(self.refs, parse_inline_ref)
    }
}

fn parse_inline_ref(data: &[u8]) -> Result<(InlineRef<'_>, &[u8]), Malformed> {
    const NAME: Structure = Structure::InlineExtentRef;
    let (kind, rest) = take(NAME, "type", data, 1)?;
    let item_type = ItemType(kind[0]);
    if item_type == ItemType::EXTENT_DATA_REF {
        let (data_ref, rest) = view::<ExtentDataRef>(NAME, rest)?;
        return Ok((InlineRef::ExtentData(data_ref), rest));
    }
    let (offset, rest) = view::<U64>(NAME, rest)?;
    let offset = offset.get();
    Ok(match item_type {
        ItemType::TREE_BLOCK_REF => (InlineRef::TreeBlock(offset), rest),
        ItemType::SHARED_BLOCK_REF => (InlineRef::SharedBlock(offset), rest),
        ItemType::EXTENT_OWNER_REF => (InlineRef::Owner(offset), rest),
        ItemType::SHARED_DATA_REF => {
            let (count, rest) = view::<U32>(NAME, rest)?;
            (InlineRef::SharedData { parent: offset, count: count.get() }, rest)
        }
        other => {
            return Err(Malformed::new(NAME, format!("type {other} is none of an inline ref")));
        }
    })
}
