//! The full check of a tree block.
//!
//! [`verify`] proves what a block can show by itself. [`expect`] compares the block with the
//! pointer that leads to it. A block that passed both is safe to use: every typed view of every
//! item in it succeeds, and no number in it leads out of the structure that holds it.
//!
//! [`verify`] proves, in this order:
//!
//! 1. The block has the volume's node size, its checksum is right, and it names the
//!    volume, its own address, a level below [`LEVEL_COUNT`] and an owner that is a tree.
//! 2. It is not newer than the superblock. Only a block of a log tree may be newer, by one
//!    transaction.
//! 3. Keys ascend strictly.
//! 4. A node has at least one pointer. Each leads to the start of a sector other than 0, and to a
//!    block that is newer neither than the superblock nor than the node.
//! 5. The data of a leaf is packed against its end, without gaps or overlaps, and
//!    does not reach into the item headers.
//! 6. Every item has the contents that its type requires ([`item`] and the other modules of the
//!    check).
//!
//! The check accepts everything that kernels and `btrfs-progs` of the last ten years write, because
//! a false alarm takes away a user's data. It ignores what is odd but harmless to a reader: unknown
//! item types, reserved fields, flags without a meaning for us, counters. It refuses errors in what
//! a reader relies on: sizes, ranges, names, levels, addresses.
//!
//! Checking a correct block allocates no memory. Only an error builds a message.

mod chunk;
mod dir;
mod extent;
mod file_extent;
mod inode;
mod item;
mod root;
mod space;

use offshoot_vfs::Structure;
use uuid::Uuid;

use crate::block::{
    self, BlockHeader, HEADER_RELOC, HEADER_SIZE, LEVEL_COUNT, LeafItem, NodePointer,
};
use crate::csum::ChecksumType;
use crate::superblock::{Incompat, Superblock};
use crate::{Generation, Key, Logical, Malformed, TreeId};

/// The properties that all blocks of a volume share.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// The size of a tree block, in bytes.
    pub node_size: u32,
    /// The unit of data and of all addresses, in bytes.
    pub sector_size: u32,
    /// The algorithm of its checksums.
    pub checksum: ChecksumType,
    /// The filesystem id that blocks carry.
    pub metadata_uuid: Uuid,
    /// The filesystem ids of the seeds that the volume grew from. A block that was not rewritten
    /// since then still carries the id of its seed.
    pub seeds: Vec<Uuid>,
    /// The incompatible features of the volume. Some of them change what the check allows.
    pub incompat: Incompat,
    /// The generation of the superblock when the volume was opened. No block but one of a log may
    /// be newer, unless the volume is written.
    pub generation: Generation,
    /// Whether the volume is written. The pointer to a block alone says then how new the block is.
    pub is_written: bool,
    /// Whether the check also refuses blocks that a reader can use and the kernel refuses. A writer
    /// that put other items into such a block would take these from the kernel.
    pub is_strict: bool,
}

impl Geometry {
    /// The geometry of the volume that has this superblock, with no seeds yet.
    #[must_use]
    pub fn of(superblock: &Superblock) -> Self {
        Self {
            node_size: superblock.node_size,
            sector_size: superblock.sector_size,
            checksum: superblock.checksum,
            metadata_uuid: superblock.metadata_uuid,
            seeds: Vec::new(),
            incompat: superblock.incompat,
            generation: superblock.generation,
            is_written: false,
            is_strict: false,
        }
    }

    /// Whether `bytes` is a whole number of sectors.
    fn is_aligned(&self, bytes: u64) -> bool {
        bytes & (u64::from(self.sector_size) - 1) == 0
    }
}

/// What the pointer to a block says of it.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedBlock {
    /// The address of the block.
    pub logical: Logical,
    /// Its level.
    pub level: u8,
    /// The transaction that wrote the block.
    pub generation: Generation,
    /// The tree through which the reader reached the block.
    pub owner: TreeId,
    /// Its first key; `None` for a root, because a root item does not store it.
    pub first_key: Option<Key>,
}

const STRUCTURE: Structure = Structure::TreeBlock;

#[cold]
fn bad(problem: String) -> Malformed {
    Malformed::new(STRUCTURE, problem)
}

/// Checks everything that the block in `bytes`, read from `logical`, can show by itself.
///
/// # Errors
/// The first fault, with the expected and the found value.
pub fn verify(bytes: &[u8], geometry: &Geometry, logical: Logical) -> Result<(), Malformed> {
    let header = verify_identity(bytes, geometry, logical)?;
    if header.level == 0 {
        verify_leaf(bytes, header, geometry)
    } else {
        verify_node(bytes, header, geometry)
    }
}

/// Checks what [`verify`] checks first: the length of the block in `bytes`, its checksum and its
/// header. What it holds may be anything.
///
/// # Errors
/// The first fault, with the expected and the found value.
pub fn verify_identity<'b>(
    bytes: &'b [u8],
    geometry: &Geometry,
    logical: Logical,
) -> Result<&'b BlockHeader, Malformed> {
    if bytes.len() != geometry.node_size as usize {
        return Err(bad(format!(
            "{} bytes, not the {} of a node",
            bytes.len(),
            geometry.node_size
        )));
    }
    let header = BlockHeader::view(bytes)?;
    let computed = geometry.checksum.compute(&bytes[header.csum.len()..]);
    let stored = &header.csum[..geometry.checksum.len()];
    if computed.bytes() != stored {
        return Err(bad(format!("checksum {computed} expected, {} found", hex(stored))));
    }
    verify_header(header, geometry, logical)?;
    Ok(header)
}

/// Checks the contents of one item of a leaf against its key, without those beside it. `slot` is
/// its place in the leaf that `header` is of.
///
/// # Errors
/// The first fault, with slot and key.
pub fn verify_item(
    geometry: &Geometry,
    header: &BlockHeader,
    slot: usize,
    (key, data): (Key, &[u8]),
) -> Result<(), Malformed> {
    let (owner, generation) = (header.owner(), header.generation.get());
    item::ItemContext { geometry, owner, generation, slot, key, data, previous: None }.verify()
}

/// The highest generation that a block of the tree `owner` may have.
fn newest(geometry: &Geometry, owner: TreeId) -> u64 {
    if geometry.is_written {
        return u64::MAX;
    }
    let committed = geometry.generation.0;
    if owner == TreeId::TREE_LOG { committed.saturating_add(1) } else { committed }
}

fn verify_header(
    header: &BlockHeader,
    geometry: &Geometry,
    logical: Logical,
) -> Result<(), Malformed> {
    let fsid = Uuid::from_bytes(header.fsid);
    if fsid != geometry.metadata_uuid && !geometry.seeds.contains(&fsid) {
        return Err(bad(format!(
            "filesystem id {} expected, {fsid} found",
            geometry.metadata_uuid
        )));
    }
    if header.bytenr.get() != logical.0 {
        return Err(bad(format!("address {logical} expected, {} found", header.bytenr)));
    }
    if header.level >= LEVEL_COUNT {
        return Err(bad(format!("level {}, the highest is {}", header.level, LEVEL_COUNT - 1)));
    }
    let owner = header.owner();
    if !is_tree(owner) {
        return Err(bad(format!("owner {owner} is not a tree")));
    }
    let newest = newest(geometry, owner);
    if header.generation.get() > newest {
        return Err(bad(format!(
            "generation at most {newest} expected, {} found",
            header.generation
        )));
    }
    Ok(())
}

/// Whether a tree may have this id. Unused ids below 256 are allowed: a later feature may use them,
/// and a reader need not know it.
fn is_tree(id: TreeId) -> bool {
    let special =
        [TreeId::TREE_LOG, TreeId::TREE_LOG_FIXUP, TreeId::TREE_RELOC, TreeId::DATA_RELOC];
    id.0 != 0 && (id <= TreeId::LAST_FREE || special.contains(&id))
}

fn verify_node(bytes: &[u8], header: &BlockHeader, geometry: &Geometry) -> Result<(), Malformed> {
    let pointers = block::pointers(bytes)?;
    if pointers.is_empty() {
        return Err(bad(format!("a node of level {} without pointers", header.level)));
    }
    // A writer that changes a block also rewrites the node above it, so no pointer is newer than
    // its node.
    let newest = newest(geometry, header.owner()).min(header.generation.get());
    let mut previous: Option<Key> = None;
    for (slot, pointer) in pointers.iter().enumerate() {
        let key = pointer.key.get();
        if let Some(previous) = previous.filter(|&previous| previous >= key) {
            return Err(bad(format!("slot {slot}: key {key} does not follow {previous}")));
        }
        previous = Some(key);
        verify_pointer(pointer, geometry, newest)
            .map_err(|problem| bad(format!("slot {slot} {key}: {problem}")))?;
    }
    Ok(())
}

fn verify_pointer(pointer: &NodePointer, geometry: &Geometry, newest: u64) -> Result<(), String> {
    let below = pointer.blockptr.get();
    if below == 0 || !geometry.is_aligned(below) {
        return Err(format!(
            "the address of a block in sectors of {} expected, {below} found",
            geometry.sector_size
        ));
    }
    if pointer.generation.get() > newest {
        return Err(format!("generation at most {newest} expected, {} found", pointer.generation));
    }
    Ok(())
}

fn verify_leaf(bytes: &[u8], header: &BlockHeader, geometry: &Geometry) -> Result<(), Malformed> {
    let items = block::items(bytes)?;
    if items.is_empty() {
        return verify_empty(header, geometry);
    }
    let space = bytes.len() - HEADER_SIZE;
    let mut end = space;
    let mut previous: Option<(Key, &[u8])> = None;
    for (slot, item) in items.iter().enumerate() {
        let key = item.key.get();
        if let Some((previous, _)) = previous.filter(|&(previous, _)| previous >= key) {
            return Err(bad(format!("slot {slot}: key {key} does not follow {previous}")));
        }
        let (offset, size) = (item.offset.get() as usize, item.size.get() as usize);
        if offset.checked_add(size) != Some(end) {
            return Err(bad(format!(
                "slot {slot} {key}: its data at {offset} with {size} bytes does not end at {end}"
            )));
        }
        end = offset;
        let data = &bytes[HEADER_SIZE + offset..][..size];
        let (owner, generation) = (header.owner(), header.generation.get());
        item::ItemContext { geometry, owner, generation, slot, key, data, previous }.verify()?;
        previous = Some((key, data));
    }
    let headers = size_of_val(items);
    if end < headers {
        return Err(bad(format!(
            "item data begins at {end}, within {headers} bytes of item headers"
        )));
    }
    Ok(())
}

/// Checks a leaf without items. Some trees have items for as long as they exist, so they are never
/// an empty leaf. The blocks of a relocation tree carry the id of another tree and may be empty.
fn verify_empty(header: &BlockHeader, geometry: &Geometry) -> Result<(), Malformed> {
    let owner = header.owner();
    let never_empty = match owner {
        TreeId::ROOT | TreeId::CHUNK | TreeId::DEV => true,
        TreeId::EXTENT => !geometry.incompat.has(Incompat::EXTENT_TREE_V2),
        _ => false,
    };
    if never_empty && header.flags.get() & HEADER_RELOC == 0 {
        return Err(bad(format!("an empty leaf, which tree {owner} never has")));
    }
    Ok(())
}

/// Compares the block in `bytes`, which passed [`verify`], with what the pointer to it says.
///
/// The owner of a subvolume's block may be any subvolume, because snapshots share blocks. A log
/// tree or a relocation tree holds blocks of the subvolume that it works for.
///
/// # Errors
/// The first difference.
pub fn expect(bytes: &[u8], expected: &ExpectedBlock) -> Result<(), Malformed> {
    let header = BlockHeader::view(bytes)?;
    if header.bytenr.get() != expected.logical.0 {
        return Err(bad(format!("address {} expected, {} found", expected.logical, header.bytenr)));
    }
    if header.level != expected.level {
        return Err(bad(format!("level {} expected, {} found", expected.level, header.level)));
    }
    if header.generation() != expected.generation {
        return Err(bad(format!(
            "generation {} expected, {} found",
            expected.generation, header.generation
        )));
    }
    let owner = header.owner();
    if !may_own(expected.owner, owner) {
        // Two small ids are easy to tell apart as numbers; other special trees are shown by name.
        let shown = |id: TreeId| if id.0 < 256 { id.0.to_string() } else { id.to_string() };
        let (wanted, found) = (shown(expected.owner), shown(owner));
        return Err(bad(format!("owner {wanted} expected, {found} found")));
    }
    if let Some(first_key) = expected.first_key {
        let found = first_key_of(bytes, header)?;
        if found != Some(first_key) {
            let found = found.map_or("none".to_owned(), |key| key.to_string());
            return Err(bad(format!("first key {first_key} expected, {found} found")));
        }
    }
    Ok(())
}

/// Whether a block that a reader reaches through `tree` may name `owner` as its owner.
fn may_own(tree: TreeId, owner: TreeId) -> bool {
    match tree {
        TreeId::TREE_LOG | TreeId::TREE_RELOC => owner.is_fs_like(),
        _ if tree.is_subvolume() => owner.is_subvolume(),
        _ => owner == tree,
    }
}

fn first_key_of(bytes: &[u8], header: &BlockHeader) -> Result<Option<Key>, Malformed> {
    Ok(if header.level == 0 {
        block::items(bytes)?.first().map(|item: &LeafItem| item.key.get())
    } else {
        block::pointers(bytes)?.first().map(|pointer: &NodePointer| pointer.key.get())
    })
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold("0x".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
