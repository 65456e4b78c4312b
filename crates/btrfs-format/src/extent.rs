//! Extents and their back references.
//!
//! An EXTENT_ITEM or METADATA_ITEM counts the references to an extent. It holds as many of them
//! inline as fit; each of the others has its own item behind it.

use std::fmt;

use offshoot_vfs::Structure;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::dir::{data_ref_hash, sequence};
use crate::edit::leaf_capacity;
use crate::key::DiskKey;
use crate::view::{take, view};
use crate::{ItemType, Logical, Malformed, TreeId};

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

impl ExtentDataRef {
    /// The file, and how many of its file extents refer to the extent.
    #[must_use]
    pub fn owner(&self) -> (RefOwner, u32) {
        let (root, ino) = (TreeId(self.root.get()), self.objectid.get());
        (RefOwner::File { root, ino, offset: self.offset.get() }, self.count.get())
    }
}

/// The owner of a reference to an extent. The order is that of the item types in the format, which
/// is also the order of inline references.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefOwner {
    /// A tree owns the block.
    Tree {
        /// The tree.
        root: TreeId,
    },
    /// A file owns the data.
    File {
        /// The subvolume that the leaf with the file extent was made for.
        root: TreeId,
        /// The inode.
        ino: u64,
        /// The position in the file where the extent would begin, in bytes. It may have wrapped
        /// around.
        offset: u64,
    },
    /// The block at this address points to the block.
    Block {
        /// The address.
        parent: Logical,
    },
    /// The leaf at this address points to the data.
    Leaf {
        /// The address.
        parent: Logical,
    },
}

impl RefOwner {
    /// The tree that owns the extent; `None` when a block owns it.
    #[must_use]
    pub fn root(self) -> Option<TreeId> {
        match self {
            Self::Tree { root } | Self::File { root, .. } => Some(root),
            Self::Block { .. } | Self::Leaf { .. } => None,
        }
    }

    /// The type of its reference, inline or as an item.
    #[must_use]
    pub fn item_type(self) -> ItemType {
        match self {
            Self::Tree { .. } => ItemType::TREE_BLOCK_REF,
            Self::File { .. } => ItemType::EXTENT_DATA_REF,
            Self::Block { .. } => ItemType::SHARED_BLOCK_REF,
            Self::Leaf { .. } => ItemType::SHARED_DATA_REF,
        }
    }

    /// The order of references of one type, which is also the key offset of a keyed one.
    #[must_use]
    pub fn sequence(self) -> u64 {
        match self {
            Self::Tree { root } => root.0,
            Self::Block { parent } | Self::Leaf { parent } => parent.0,
            Self::File { root, ino, offset } => data_ref_hash(root, ino, offset),
        }
    }

    /// The bytes that its reference takes inline.
    #[must_use]
    pub fn inline_size(self) -> usize {
        1 + match self {
            Self::Tree { .. } | Self::Block { .. } => size_of::<U64>(),
            Self::File { .. } => size_of::<ExtentDataRef>(),
            Self::Leaf { .. } => size_of::<U64>() + size_of::<U32>(),
        }
    }

    /// Adds the data of its reference to `to`, inline behind its type or in an item of its own. An
    /// inline reference includes the value that is the key offset of a keyed one.
    pub fn encode(self, count: u32, is_inline: bool, to: &mut Vec<u8>) {
        match self {
            Self::File { root, ino, offset } => to.extend_from_slice(
                ExtentDataRef {
                    root: root.0.into(),
                    objectid: ino.into(),
                    offset: offset.into(),
                    count: count.into(),
                }
                .as_bytes(),
            ),
            _ if is_inline => to.extend_from_slice(&self.sequence().to_le_bytes()),
            _ => {}
        }
        if let Self::Leaf { .. } = self {
            to.extend_from_slice(&count.to_le_bytes());
        }
    }
}

impl fmt::Display for RefOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tree { root } => write!(f, "tree {root}"),
            Self::File { root, ino, offset } => {
                write!(f, "inode {ino} of tree {root} at {}", offset.cast_signed())
            }
            Self::Block { parent } => write!(f, "the block at {parent}"),
            Self::Leaf { parent } => write!(f, "the leaf at {parent}"),
        }
    }
}

/// The most bytes of an extent item, its inline references included, in a volume with nodes of this
/// size. Further references are items of their own.
#[must_use]
pub fn most_extent_item(node_size: u32) -> usize {
    leaf_capacity(node_size) / 16 - 25
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

impl InlineRef<'_> {
    /// The owner of the reference, and how often it refers to the extent; `None` for what is no
    /// reference.
    #[must_use]
    pub fn owner(&self) -> Option<(RefOwner, u32)> {
        Some(match *self {
            Self::TreeBlock(root) => (RefOwner::Tree { root: TreeId(root) }, 1),
            Self::SharedBlock(parent) => (RefOwner::Block { parent: Logical(parent) }, 1),
            Self::ExtentData(data_ref) => data_ref.owner(),
            Self::SharedData { parent, count } => {
                (RefOwner::Leaf { parent: Logical(parent) }, count)
            }
            Self::Owner(_) => return None,
        })
    }
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
