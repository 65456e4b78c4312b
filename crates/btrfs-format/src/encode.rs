//! Encodes blocks, superblocks and items.
//!
//! This is the inverse of the parsers in the modules of the structures. A structure without
//! variable parts needs no function here: its `as_bytes` is its encoding.
//!
//! A caller makes a tree block with [`new_block`], fills it through [`edit`](crate::edit), and
//! seals it with [`seal_block`]. It seals a superblock with [`sealed_superblock`]. Sealing is the
//! last step: any later change makes the checksum wrong.

use uuid::Uuid;
use zerocopy::IntoBytes;

use crate::block::{BlockHeader, HEADER_MIXED_BACKREF, HEADER_WRITTEN};
use crate::chunk::{Chunk, ChunkItem, Profile, STRIPE_LEN, StripeItem};
use crate::csum::ChecksumType;
use crate::dir::{DirEntryItem, DirItemEntry};
use crate::edit::header_mut;
use crate::extent::{EXTENT_FLAG_TREE_BLOCK, ExtentItem, TreeBlockInfo};
use crate::inode::{InodeExtrefItem, InodeRefItem};
use crate::key::{DiskKey, objectid};
use crate::root::{RootRef, RootRefItem};
use crate::superblock::{SUPERBLOCK_SIZE, SuperblockItem};
use crate::{Generation, ItemType, Key, Logical, Physical, TreeId, U64};

/// The size of the checksum field at the beginning of blocks and superblocks, in bytes.
const CSUM_FIELD: usize = 32;

/// The fields of the header that identify a tree block.
#[derive(Clone, Copy, Debug)]
pub struct BlockIdentity {
    /// The filesystem id that the blocks of the volume carry.
    pub metadata_uuid: Uuid,
    /// The UUID of the chunk tree.
    pub chunk_tree_uuid: Uuid,
    /// The address of the block.
    pub logical: Logical,
    /// The transaction that writes the block.
    pub generation: Generation,
    /// The tree that the block is made for.
    pub owner: TreeId,
    /// Its level, 0 for a leaf.
    pub level: u8,
}

/// A tree block of `node_size` bytes without items or pointers.
#[must_use]
pub fn new_block(node_size: u32, identity: &BlockIdentity) -> Box<[u8]> {
    let mut block = vec![0; node_size as usize].into_boxed_slice();
    *header_mut(&mut block) = BlockHeader {
        csum: [0; 32],
        fsid: identity.metadata_uuid.into_bytes(),
        bytenr: identity.logical.0.into(),
        flags: HEADER_MIXED_BACKREF.into(),
        chunk_tree_uuid: identity.chunk_tree_uuid.into_bytes(),
        generation: identity.generation.0.into(),
        owner: identity.owner.0.into(),
        nritems: 0.into(),
        level: identity.level,
    };
    block
}

/// Marks the block as written in its header, and stores its checksum there.
pub fn seal_block(block: &mut [u8], checksum: ChecksumType) {
    header_mut(block).flags |= HEADER_WRITTEN;
    seal(block, checksum);
}

fn seal(bytes: &mut [u8], checksum: ChecksumType) {
    let (stored, rest) = bytes.split_at_mut(CSUM_FIELD);
    let computed = checksum.compute(rest);
    stored.fill(0);
    stored[..computed.bytes().len()].copy_from_slice(computed.bytes());
}

/// The bytes of a superblock for byte `place` of its device, with their checksum.
#[must_use]
pub fn sealed_superblock(
    item: &SuperblockItem,
    place: Physical,
    checksum: ChecksumType,
) -> Box<[u8; SUPERBLOCK_SIZE]> {
    let mut item = Box::new(*item);
    item.bytenr = place.0.into();
    let mut bytes = Box::new([0; SUPERBLOCK_SIZE]);
    bytes.copy_from_slice(item.as_bytes());
    seal(&mut bytes[..], checksum);
    bytes
}

/// The key of a chunk's item.
#[must_use]
pub fn chunk_key(chunk: &Chunk) -> Key {
    Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, chunk.start.0)
}

/// The item of a chunk, with its stripes.
#[must_use]
pub fn chunk_item(chunk: &Chunk, sector_size: u32) -> Vec<u8> {
    let unit = u32::try_from(STRIPE_LEN).expect("64 KiB");
    let count = u16::try_from(chunk.stripes.len()).expect("a chunk has a 16-bit count of stripes");
    let item = ChunkItem {
        length: chunk.length.into(),
        owner: TreeId::EXTENT.0.into(),
        stripe_len: STRIPE_LEN.into(),
        chunk_type: chunk.flags.0.into(),
        io_align: unit.into(),
        io_width: unit.into(),
        sector_size: sector_size.into(),
        num_stripes: count.into(),
        sub_stripes: if chunk.profile == Profile::Raid10 { 2 } else { 1 }.into(),
    };
    let mut bytes = item.as_bytes().to_vec();
    for stripe in &chunk.stripes {
        let item = StripeItem {
            devid: stripe.device.0.into(),
            offset: stripe.physical.0.into(),
            dev_uuid: stripe.device_uuid.into_bytes(),
        };
        bytes.extend_from_slice(item.as_bytes());
    }
    bytes
}

/// Encodes `chunks` for the superblock's array of system chunks.
#[must_use]
pub fn system_chunk_array<'a>(
    chunks: impl IntoIterator<Item = &'a Chunk>,
    sector_size: u32,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for chunk in chunks {
        bytes.extend_from_slice(DiskKey::from(chunk_key(chunk)).as_bytes());
        bytes.extend_from_slice(&chunk_item(chunk, sector_size));
    }
    bytes
}

/// One entry of a DIR_ITEM, DIR_INDEX or XATTR_ITEM. Name and data must have at most 65535 bytes
/// each, because the format stores their lengths in 16 bits.
#[must_use]
pub fn dir_entry(entry: &DirItemEntry<'_>) -> Vec<u8> {
    let item = DirEntryItem {
        location: entry.location.into(),
        transid: entry.transid.into(),
        data_len: length(entry.data).into(),
        name_len: length(entry.name).into(),
        file_type: entry.file_type,
    };
    [item.as_bytes(), entry.name, entry.data].concat()
}

/// One name of an INODE_REF.
#[must_use]
pub fn inode_ref(index: u64, name: &[u8]) -> Vec<u8> {
    let item = InodeRefItem { index: index.into(), name_len: length(name).into() };
    [item.as_bytes(), name].concat()
}

/// One name of an INODE_EXTREF.
#[must_use]
pub fn inode_extref(parent: u64, index: u64, name: &[u8]) -> Vec<u8> {
    let name_len = length(name).into();
    let item = InodeExtrefItem { parent: parent.into(), index: index.into(), name_len };
    [item.as_bytes(), name].concat()
}

/// A ROOT_REF or ROOT_BACKREF.
#[must_use]
pub fn root_ref(root_ref: &RootRef<'_>) -> Vec<u8> {
    let item = RootRefItem {
        dirid: root_ref.dirid.into(),
        sequence: root_ref.sequence.into(),
        name_len: length(root_ref.name).into(),
    };
    [item.as_bytes(), root_ref.name].concat()
}

fn length(bytes: &[u8]) -> u16 {
    u16::try_from(bytes.len()).expect("names and values have 16-bit lengths")
}

/// Key and item of the extent of a tree block with one reference, that of its owner. `first_key` is
/// the first key of the block; only the form without skinny metadata stores it.
#[must_use]
pub fn tree_block_extent(
    identity: &BlockIdentity,
    first_key: Key,
    node_size: u32,
    is_skinny: bool,
) -> (Key, Vec<u8>) {
    let item = ExtentItem {
        refs: 1.into(),
        generation: identity.generation.0.into(),
        flags: EXTENT_FLAG_TREE_BLOCK.into(),
    };
    let mut bytes = item.as_bytes().to_vec();
    let logical = identity.logical.0;
    let key = if is_skinny {
        Key::new(logical, ItemType::METADATA_ITEM, u64::from(identity.level))
    } else {
        let info = TreeBlockInfo { key: first_key.into(), level: identity.level };
        bytes.extend_from_slice(info.as_bytes());
        Key::new(logical, ItemType::EXTENT_ITEM, u64::from(node_size))
    };
    bytes.push(ItemType::TREE_BLOCK_REF.0);
    bytes.extend_from_slice(U64::new(identity.owner.0).as_bytes());
    (key, bytes)
}

/// The key of the subvolume with this UUID in the UUID tree. `item_type` is `UUID_KEY_SUBVOL` or
/// `UUID_KEY_RECEIVED_SUBVOL`.
#[must_use]
pub fn uuid_key(uuid: Uuid, item_type: ItemType) -> Key {
    let (low, high) = uuid.as_bytes().split_at(8);
    let number = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("half of 16 bytes"));
    Key::new(number(low), item_type, number(high))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceId;
    use crate::block::items;
    use crate::check::{Geometry, verify};
    use crate::chunk::{BlockGroupFlags, DevItem, Stripe, parse_system_chunks};
    use crate::dir::{dir_entries, file_type, name_hash};
    use crate::edit::insert_items;
    use crate::extent::{InlineRef, ParsedExtent};
    use crate::inode::inode_refs;
    use crate::superblock::{Incompat, MAGIC, Superblock};

    const ID: Uuid = Uuid::from_u128(0x0ff5_0007);

    fn identity(level: u8) -> BlockIdentity {
        BlockIdentity {
            metadata_uuid: ID,
            chunk_tree_uuid: Uuid::from_u128(2),
            logical: Logical(1 << 20),
            generation: Generation(7),
            owner: TreeId::ROOT,
            level,
        }
    }

    fn chunk(profile: Profile, stripes: u64) -> Chunk {
        let stripe = |number| Stripe {
            device: DeviceId(number),
            physical: Physical(number << 20),
            device_uuid: Uuid::from_u128(number.into()),
        };
        let mut chunk = Chunk {
            start: Logical(1 << 20),
            length: 8 << 20,
            flags: BlockGroupFlags(BlockGroupFlags::SYSTEM | profile.bits()),
            profile,
            stripes: (1..=stripes).map(stripe).collect(),
        };
        chunk.length *= chunk.data_stripes();
        chunk
    }

    #[test]
    fn chunks_are_read_as_they_were_written() {
        let chunks = [
            chunk(Profile::Single, 1),
            chunk(Profile::Dup, 2),
            chunk(Profile::Raid0, 3),
            chunk(Profile::Raid1c4, 4),
            chunk(Profile::Raid10, 6),
        ];
        let array = system_chunk_array(&chunks, 4096);
        assert_eq!(parse_system_chunks(&array, 4096).unwrap(), chunks);
    }

    /// With every algorithm, the full check accepts a sealed block, and refuses it after a change.
    #[test]
    fn blocks_are_sealed() {
        for checksum in [
            ChecksumType::Crc32c,
            ChecksumType::Xxhash64,
            ChecksumType::Sha256,
            ChecksumType::Blake2b,
        ] {
            assert_eq!(ChecksumType::from_disk(checksum.to_disk()), Some(checksum));
            let geometry = Geometry {
                node_size: 4096,
                sector_size: 4096,
                checksum,
                metadata_uuid: ID,
                seeds: Vec::new(),
                incompat: Incompat::SKINNY_METADATA,
                generation: Generation(7),
                is_written: false,
                is_strict: false,
            };
            let mut block = new_block(4096, &identity(0));
            let (key, data) = (Key::new(5, ItemType::INODE_REF, 6), inode_ref(3, b"name"));
            insert_items(&mut block, 0, [(key, &data[..])].into_iter());
            seal_block(&mut block, checksum);
            verify(&block, &geometry, Logical(1 << 20)).unwrap();
            assert_eq!(items(&block).unwrap()[0].key.get(), key);
            block[4000] ^= 1;
            verify(&block, &geometry, Logical(1 << 20)).unwrap_err();
        }
    }

    #[test]
    fn superblocks_are_sealed_for_their_place() {
        let mut item = SuperblockItem {
            fsid: ID.into_bytes(),
            magic: MAGIC,
            generation: 7.into(),
            num_devices: 1.into(),
            sectorsize: 4096.into(),
            nodesize: 16384.into(),
            csum_type: ChecksumType::Xxhash64.to_disk().into(),
            ..SuperblockItem::default()
        };
        item.dev_item = DevItem { fsid: ID.into_bytes(), ..zerocopy::FromZeros::new_zeroed() };
        let array = system_chunk_array([&chunk(Profile::Dup, 2)], 4096);
        item.sys_chunk_array[..array.len()].copy_from_slice(&array);
        item.sys_chunk_array_size = u32::try_from(array.len()).unwrap().into();
        for place in crate::superblock::SUPERBLOCK_OFFSETS {
            let bytes = sealed_superblock(&item, Physical(place), ChecksumType::Xxhash64);
            let parsed = Superblock::parse(&bytes[..], place).unwrap();
            assert_eq!(parsed.fsid, ID);
            Superblock::parse(&bytes[..], place + 4096).unwrap_err();
        }
    }

    #[test]
    fn items_are_read_as_they_were_written() {
        let entry = DirItemEntry {
            location: Key::new(257, ItemType::INODE_ITEM, 0),
            transid: 9,
            file_type: file_type::REG_FILE,
            name: b"name",
            data: b"",
        };
        let two =
            [dir_entry(&entry), dir_entry(&DirItemEntry { data: b"value", ..entry })].concat();
        let read: Vec<_> = dir_entries(&two).map(Result::unwrap).collect();
        assert_eq!(read, [entry, DirItemEntry { data: b"value", ..entry }]);
        assert_eq!(name_hash(b"default"), 2_378_154_706, "as `dump-tree` shows it");

        let reference = RootRef { dirid: 256, sequence: 4, name: b"subvolume" };
        assert_eq!(RootRef::parse(&root_ref(&reference)).unwrap(), reference);
        let bytes = inode_ref(4, b"x");
        let names: Vec<_> = inode_refs(256, &bytes).map(Result::unwrap).collect();
        assert_eq!((names[0].index, names[0].name), (4, &b"x"[..]));

        let first_key = Key::new(1, ItemType::DEV_ITEM, 1);
        for is_skinny in [true, false] {
            let (key, bytes) = tree_block_extent(&identity(2), first_key, 16384, is_skinny);
            let extent = ParsedExtent::parse(key.item_type, &bytes).unwrap();
            assert_eq!(key.offset, if is_skinny { 2 } else { 16384 });
            assert_eq!((extent.item.refs.get(), extent.item.generation.get()), (1, 7));
            assert_eq!(
                extent.block.map(|b| (b.key.get(), b.level)),
                (!is_skinny).then_some((first_key, 2))
            );
            let refs: Vec<_> = extent.inline_refs().map(Result::unwrap).collect();
            assert!(matches!(refs[..], [InlineRef::TreeBlock(1)]), "{refs:?}");
        }
    }

    /// The UUID and its key come from a volume that `mkfs.btrfs` made.
    #[test]
    fn uuids_are_found_by_their_halves() {
        let uuid = Uuid::try_parse("7ead1312-d2f7-4099-ac04-d3fd4cea9bea").unwrap();
        let key = uuid_key(uuid, ItemType::UUID_KEY_SUBVOL);
        assert_eq!((key.objectid, key.offset), (0x9940_f7d2_1213_ad7e, 0xea9b_ea4c_fdd3_04ac));
    }
}
