//! Bodies of tests with hostile bytes.
//!
//! There is one function for each kind of input. It parses the bytes and touches everything that
//! the parser returns. It must return normally for every input. It finds panics, endless loops, and
//! allocations as large as the input claims. The stable tests pass in mutations of real structures,
//! and the fuzz targets any bytes.

#![allow(dead_code, reason = "each of the programs that share this calls a part of it")]

use std::hint::black_box;

use offshoot_btrfs_format::block::{self, BlockHeader, NodePointer};
use offshoot_btrfs_format::check::{ExpectedBlock, Geometry, expect, verify};
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevItem, parse_system_chunks};
use offshoot_btrfs_format::compress::{Compression, decompress};
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::extent::ParsedExtent;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_extrefs, inode_flags, inode_refs};
use offshoot_btrfs_format::key::{DiskKey, objectid};
use offshoot_btrfs_format::quota::STATUS_SIMPLE;
use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::space::{
    BlockGroupItem, DevReplaceItem, DevStatsItem, DirLogItem, FreeSpaceHeader, FreeSpaceInfo,
    QgroupInfoItem, QgroupLimitItem, QgroupStatusItem,
};
use offshoot_btrfs_format::superblock::{
    Incompat, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, SuperblockItem,
};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use uuid::Uuid;
use zerocopy::FromBytes;

const CHECKSUMS: [ChecksumType; 4] =
    [ChecksumType::Crc32c, ChecksumType::Xxhash64, ChecksumType::Sha256, ChecksumType::Blake2b];

/// Stores the right checksum at the beginning of a superblock or tree block.
pub(crate) fn fix_checksum(block: &mut [u8], checksum: ChecksumType) {
    let computed = checksum.compute(&block[32..]);
    block[..checksum.len()].copy_from_slice(computed.bytes());
}

/// Parses a superblock as it is, and again with the right magic, place and checksum. Returns
/// whether the parser accepts the second one.
pub(crate) fn superblock(data: &[u8]) -> bool {
    let offset = SUPERBLOCK_OFFSETS[0];
    let _ = black_box(Superblock::parse(data, offset));
    let mut bytes = vec![0; SUPERBLOCK_SIZE];
    let len = data.len().min(SUPERBLOCK_SIZE);
    bytes[..len].copy_from_slice(&data[..len]);
    bytes[48..56].copy_from_slice(&offset.to_le_bytes());
    bytes[64..72].copy_from_slice(b"_BHRfS_M");
    let kind = u16::from_le_bytes([bytes[196], bytes[197]]);
    if let Some(checksum) = ChecksumType::from_disk(kind) {
        fix_checksum(&mut bytes, checksum);
    }
    black_box(SuperblockItem::view(&bytes).expect("4096 bytes are a superblock").label().len());
    let Ok(superblock) = Superblock::parse(&bytes, offset) else { return false };
    black_box((superblock.incompat.names(), superblock.compat_ro.names()));
    black_box((superblock.root(), superblock.chunk_root(), superblock.has_pending_log()));
    black_box(Geometry::of(&superblock));
    superblock.system_chunks.iter().for_each(touch_chunk);
    true
}

/// Checks a tree block. The first two bytes choose the properties of its volume. The block is
/// checked as it is, and again with the right checksum. Returns whether the second check accepts
/// it.
pub(crate) fn tree_block(data: &[u8]) -> bool {
    let [size, features, data @ ..] = data else { return false };
    let node_size = 4096usize << (size & 7).min(4);
    let mut bytes = vec![0; node_size];
    let len = data.len().min(node_size);
    bytes[..len].copy_from_slice(&data[..len]);
    let mut incompat = Incompat::MIXED_BACKREF;
    for (bit, feature) in [Incompat::SKINNY_METADATA, Incompat::MIXED_GROUPS, Incompat::NO_HOLES]
        .into_iter()
        .enumerate()
    {
        if features >> bit & 1 != 0 {
            incompat = incompat.union(feature);
        }
    }
    let geometry = Geometry {
        node_size: u32::try_from(node_size).expect("at most 64 KiB"),
        sector_size: 4096,
        checksum: CHECKSUMS[usize::from(features >> 6)],
        metadata_uuid: Uuid::from_bytes(bytes[32..48].try_into().expect("16 bytes")),
        seeds: Vec::new(),
        incompat,
        generation: Generation(1 << 32),
        is_written: false,
        is_strict: false,
    };
    checked_block(&mut bytes, &geometry)
}

/// Checks a block of the volume with this geometry, as it is and with the right checksum. Returns
/// whether the second check accepts it.
pub(crate) fn checked_block(bytes: &mut [u8], geometry: &Geometry) -> bool {
    let logical =
        BlockHeader::view(bytes).map_or(Logical(0), |header| Logical(header.bytenr.get()));
    touch_raw(bytes);
    black_box(verify(bytes, geometry, logical).err().map(|error| error.to_string()));
    fix_checksum(bytes, geometry.checksum);
    touch_expect(bytes);
    if verify(bytes, geometry, logical).is_err() {
        return false;
    }
    touch_verified(bytes, geometry);
    true
}

/// Calls the accessors that accept any bytes.
fn touch_raw(bytes: &[u8]) {
    if let Ok(items) = block::items(bytes) {
        for item in items {
            black_box(block::item_data(bytes, item).map(<[u8]>::len).ok());
        }
    }
    if let Ok(pointers) = block::pointers(bytes) {
        black_box(pointers.iter().map(NodePointer::logical).max());
    }
}

fn touch_expect(bytes: &[u8]) {
    let header = BlockHeader::view(bytes).expect("a whole block");
    for owner in [header.owner(), TreeId::FS, TreeId::TREE_LOG] {
        let expected = ExpectedBlock {
            logical: Logical(header.bytenr.get()),
            level: header.level,
            generation: header.generation(),
            owner,
            first_key: Some(Key::MIN),
        };
        black_box(expect(bytes, &expected).is_ok());
    }
}

/// Reads a block that passed the check as a reader does. Nothing may fail.
fn touch_verified(bytes: &[u8], geometry: &Geometry) {
    let header = BlockHeader::view(bytes).expect("verified");
    if header.level > 0 {
        assert!(!block::pointers(bytes).expect("verified").is_empty());
        return;
    }
    for item in block::items(bytes).expect("verified") {
        let data = block::item_data(bytes, item).expect("verified");
        touch_item(item.key.get(), data, geometry);
    }
}

fn touch_item(key: Key, data: &[u8], geometry: &Geometry) {
    match key.item_type {
        ItemType::INODE_ITEM => {
            let inode = InodeItem::view(data).expect("verified");
            black_box((inode.device_number(), inode.atime.seconds()));
            black_box(inode_flags::names(inode.flags.get()));
        }
        ItemType::INODE_REF => {
            inode_refs(key.offset, data).for_each(|name| assert_name(name.expect("verified").name));
        }
        ItemType::INODE_EXTREF => {
            inode_extrefs(data).for_each(|name| assert_name(name.expect("verified").name));
        }
        ItemType::DIR_ITEM | ItemType::DIR_INDEX | ItemType::XATTR_ITEM => {
            dir_entries(data).for_each(|entry| assert_name(entry.expect("verified").name));
        }
        ItemType::DIR_LOG_ITEM | ItemType::DIR_LOG_INDEX => {
            black_box(DirLogItem::view(data).expect("verified"));
        }
        ItemType::EXTENT_DATA => touch_file_extent(key, data, geometry),
        ItemType::ROOT_ITEM => {
            let root = RootItem::parse(data).expect("verified");
            black_box((root.logical(), root.generation(), root.is_dead(), root.is_read_only()));
        }
        ItemType::ROOT_REF | ItemType::ROOT_BACKREF => {
            assert_name(RootRef::parse(data).expect("verified").name);
        }
        ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM => {
            let extent = ParsedExtent::parse(key.item_type, data).expect("verified");
            assert!(extent.inline_refs().all(|inline| inline.is_ok()));
        }
        ItemType::CHUNK_ITEM => {
            let (chunk, rest) =
                Chunk::parse_prefix(key, data, geometry.sector_size).expect("verified");
            assert!(rest.is_empty());
            touch_chunk(&chunk);
        }
        ItemType::DEV_ITEM => {
            black_box(DevItem::view(data).expect("verified").id());
        }
        _ => touch_small_item(key, data),
    }
}

fn touch_small_item(key: Key, data: &[u8]) {
    match key.item_type {
        ItemType::BLOCK_GROUP_ITEM => {
            let flags = BlockGroupItem::view(data).expect("verified").flags.get();
            black_box(BlockGroupFlags(flags).profile().expect("verified"));
        }
        ItemType::UNTYPED if key.objectid == objectid::FREE_SPACE => {
            black_box(FreeSpaceHeader::view(data).expect("verified"));
        }
        ItemType::FREE_SPACE_INFO => {
            black_box(FreeSpaceInfo::view(data).expect("verified"));
        }
        ItemType::PERSISTENT_ITEM if key.objectid == objectid::DEV_STATS => {
            black_box(DevStatsItem::view(data).expect("verified"));
        }
        ItemType::DEV_REPLACE => {
            black_box(DevReplaceItem::view(data).expect("verified"));
        }
        ItemType::QGROUP_STATUS => {
            let status = black_box(QgroupStatusItem::view(data).expect("verified"));
            if status.has(STATUS_SIMPLE) {
                black_box(QgroupStatusItem::enabled_in(data).expect("verified"));
            }
        }
        ItemType::QGROUP_INFO => {
            black_box(QgroupInfoItem::view(data).expect("verified"));
        }
        ItemType::QGROUP_LIMIT => {
            black_box(QgroupLimitItem::view(data).expect("verified"));
        }
        _ => {}
    }
}

fn assert_name(name: &[u8]) {
    assert!((1..=255).contains(&name.len()), "a name of {} bytes was accepted", name.len());
}

/// The sums of the numbers in a verified file extent do not overflow.
fn touch_file_extent(key: Key, data: &[u8], geometry: &Geometry) {
    let extent = FileExtent::parse(data).expect("verified");
    match extent.body {
        FileExtentBody::Inline(data) => {
            let mut output = vec![0; usize::try_from(extent.ram_bytes).expect("bounded")];
            black_box(
                decompress(extent.compression, data, geometry.sector_size, &mut output).is_ok(),
            );
        }
        FileExtentBody::Hole { num_bytes } => {
            key.offset.checked_add(num_bytes).expect("verified");
        }
        FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, num_bytes, .. } => {
            key.offset.checked_add(num_bytes).expect("verified");
            disk_bytenr.0.checked_add(disk_num_bytes).expect("verified");
            offset.checked_add(num_bytes).expect("verified");
        }
    }
}

fn touch_chunk(chunk: &Chunk) {
    assert!(chunk.end() > chunk.start);
    assert_eq!(chunk.stripe_bytes() * chunk.data_stripes(), chunk.length);
    for stripe in &chunk.stripes {
        stripe.physical.0.checked_add(chunk.stripe_bytes()).expect("a stripe ends in its device");
    }
    black_box((chunk.flags.kind(), chunk.profile.to_string()));
}

/// Parses `data` as a key with a chunk item, and as a system chunk array. Returns whether the
/// parser accepts the item.
pub(crate) fn chunk_item(data: &[u8]) -> bool {
    if let Ok(chunks) = parse_system_chunks(data, 4096) {
        chunks.iter().for_each(touch_chunk);
    }
    let Ok((key, rest)) = DiskKey::ref_from_prefix(data) else { return false };
    let Ok((chunk, _)) = Chunk::parse_prefix(key.get(), rest, 4096) else { return false };
    touch_chunk(&chunk);
    true
}

/// Decompresses an extent. The first three bytes choose the compression and the size of the output.
/// Returns whether it can be decompressed.
pub(crate) fn compressed_extent(data: &[u8]) -> bool {
    let [kind, low, high, data @ ..] = data else { return false };
    let compression = Compression::from_disk(kind & 3).expect("there are four");
    let mut output = vec![0; usize::from(u16::from_le_bytes([*low, *high])) * 2];
    match decompress(compression, data, 4096, &mut output) {
        Ok(made) => {
            assert!(made <= output.len());
            true
        }
        Err(error) => {
            black_box(error.to_string());
            false
        }
    }
}
