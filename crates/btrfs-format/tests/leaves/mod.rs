//! Tree blocks that the kernel wrote.
//!
//! The blocks in `tests/data/blocks.zst` come from volumes that Linux 6.18 wrote. They have nodes
//! of 4 KiB, and every feature that adds items of its own.

use offshoot_btrfs_format::Generation;
use offshoot_btrfs_format::block::BlockHeader;
use offshoot_btrfs_format::check::Geometry;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::superblock::Incompat;
use uuid::Uuid;

pub(crate) const NODE: usize = 4096;

pub(crate) fn blocks() -> Vec<Vec<u8>> {
    let packed = include_bytes!("../data/blocks.zst");
    let raw = zstd::bulk::decompress(packed, 1 << 20).expect("the fixture is a zstd frame");
    raw.chunks(NODE).map(<[u8]>::to_vec).collect()
}

/// The geometry of the volume that `block` comes from.
pub(crate) fn geometry(block: &[u8]) -> Geometry {
    let header = BlockHeader::view(block).expect("a block");
    Geometry {
        node_size: u32::try_from(NODE).expect("small"),
        sector_size: 4096,
        checksum: ChecksumType::Crc32c,
        metadata_uuid: Uuid::from_bytes(header.fsid),
        seeds: Vec::new(),
        incompat: Incompat::MIXED_BACKREF
            .union(Incompat::SKINNY_METADATA)
            .union(Incompat::MIXED_GROUPS),
        generation: Generation(200),
        is_written: false,
        is_strict: false,
    }
}
