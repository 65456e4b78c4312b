//! Tree blocks: header, leaf items, node pointers.
//!
//! ```text
//! leaf   | header 101 | item 0 | item 1 | ...  free space  ... | data 1 | data 0 |
//! node   | header 101 | pointer 0 | pointer 1 | ...                              |
//! ```
//!
//! An item is 25 bytes: its key, the offset of its data from the end of the header, and the size of
//! its data. Data is packed against the end of the block in the order of the items, without gaps. A
//! pointer is 33 bytes: the lowest key in the block below, the address of that block, and its
//! generation.

use offshoot_vfs::Structure;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::key::DiskKey;
use crate::view::view;
use crate::{Generation, Key, Logical, Malformed, TreeId};

/// How many levels a tree may have: a root has at most level 7, and leaves have level 0.
pub const LEVEL_COUNT: u8 = 8;

/// The largest size of a tree block, in bytes.
pub const MAX_NODESIZE: u32 = 65536;

/// The header of a tree block.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BlockHeader {
    /// Checksum of everything after this field.
    pub csum: [u8; 32],
    /// The filesystem id (the metadata UUID, where a volume has one).
    pub fsid: [u8; 16],
    /// The logical address of this block.
    pub bytenr: U64,
    /// [`HEADER_WRITTEN`], [`HEADER_RELOC`]; the top byte is the revision of back references.
    pub flags: U64,
    /// The UUID of the chunk tree.
    pub chunk_tree_uuid: [u8; 16],
    /// The transaction that wrote the block.
    pub generation: U64,
    /// The tree that the block was made for.
    pub owner: U64,
    /// How many items a leaf has, or how many pointers a node has.
    pub nritems: U32,
    /// 0 for a leaf.
    pub level: u8,
}

/// The block has reached the disk since its last change.
pub const HEADER_WRITTEN: u64 = 1;
/// The block belongs to a relocation tree.
pub const HEADER_RELOC: u64 = 2;
/// The revision of back references that every block since 2009 has, in the top byte of its flags.
pub const HEADER_MIXED_BACKREF: u64 = 1 << 56;

/// The size of a [`BlockHeader`] in bytes. The offsets of items count from its end.
pub const HEADER_SIZE: usize = size_of::<BlockHeader>();

/// An item of a leaf, without its data.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LeafItem {
    /// Its key.
    pub key: DiskKey,
    /// Where its data begins, in bytes after the header.
    pub offset: U32,
    /// How many bytes of data it has.
    pub size: U32,
}

/// A pointer of a node.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NodePointer {
    /// The lowest key in the block it points to.
    pub key: DiskKey,
    /// The address of that block.
    pub blockptr: U64,
    /// The generation of that block.
    pub generation: U64,
}

impl NodePointer {
    /// The address of the block below.
    #[must_use]
    pub fn logical(&self) -> Logical {
        Logical(self.blockptr.get())
    }
}

impl BlockHeader {
    /// Views the header of the tree block in `bytes`.
    pub fn view(bytes: &[u8]) -> Result<&Self, Malformed> {
        Ok(view(Structure::TreeBlock, bytes)?.0)
    }

    /// The tree that the block was made for.
    #[must_use]
    pub fn owner(&self) -> TreeId {
        TreeId(self.owner.get())
    }

    /// The transaction that wrote the block.
    #[must_use]
    pub fn generation(&self) -> Generation {
        Generation(self.generation.get())
    }
}

/// The items of the leaf in `bytes`, as the header counts them.
pub fn items(bytes: &[u8]) -> Result<&[LeafItem], Malformed> {
    entries(Structure::Leaf, bytes)
}

/// The pointers of the node in `bytes`, as the header counts them.
pub fn pointers(bytes: &[u8]) -> Result<&[NodePointer], Malformed> {
    entries(Structure::Node, bytes)
}

fn entries<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    structure: Structure,
    bytes: &[u8],
) -> Result<&[T], Malformed> {
    let (header, rest) = view::<BlockHeader>(structure, bytes)?;
    let count = header.nritems.get() as usize;
    let (entries, _) = <[T]>::ref_from_prefix_with_elems(rest, count).map_err(|_| {
        Malformed::new(structure, format!("{count} entries do not fit in {} bytes", bytes.len()))
    })?;
    Ok(entries)
}

/// The data of `item` in the leaf `bytes`.
pub fn item_data<'a>(bytes: &'a [u8], item: &LeafItem) -> Result<&'a [u8], Malformed> {
    let (offset, size) = (item.offset.get() as usize, item.size.get() as usize);
    let behind_header = bytes.get(HEADER_SIZE..).unwrap_or_default();
    let data = behind_header.get(offset..).and_then(|from| from.get(..size));
    data.ok_or_else(|| {
        let key: Key = item.key.get();
        Malformed::new(Structure::Leaf, format!("the data of item {key} lies outside of the leaf"))
    })
}
