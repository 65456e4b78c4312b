//! Bodies of tests with hostile bytes.
//!
//! Each parses what it is given and touches everything that the parser returns. It must return for
//! every input, without a panic, an endless loop or an allocation as large as the input claims. The
//! stable tests pass in damaged real structures, and the fuzz targets any bytes.

#![allow(dead_code, reason = "each of the programs that share this calls a part of it")]

pub(crate) mod names;

use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsForkRoot, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agfl, Agi};
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::inode::{XfsFork, XfsInode};
use offshoot_xfs_format::log::op;
use offshoot_xfs_format::log::{
    XfsCheckpoint, XfsCheckpoints, XfsLogItem, XfsLogRecord, XfsLogRing, XfsLogVector,
};
use offshoot_xfs_format::record::{XfsExtentItem, XfsInodeChunk, XfsReverseMap};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{
    AgBlock, AgIno, AgNumber, FsBlock, Ino, Lsn, Malformed, XfsGeometry, csum,
};

pub(crate) const BLOCKS: &[u8] = include_bytes!("../vectors/blocks.bin");

pub(crate) const HEADER_AG: AgNumber = AgNumber(0);

#[derive(Clone, Copy, Debug)]
pub(crate) enum VectorKind {
    Superblock,
    Agf,
    Agi,
    Agfl,
    Tree(XfsTree, u64),
    Inode(u64),
}

/// What [`BLOCKS`] holds, in order.
pub(crate) const VECTORS: [(VectorKind, usize); 14] = [
    (VectorKind::Superblock, 512),
    (VectorKind::Agf, 512),
    (VectorKind::Agi, 512),
    (VectorKind::Agfl, 512),
    (VectorKind::Tree(XfsTree::FreeByBlock, 2), 1024),
    (VectorKind::Tree(XfsTree::Inodes, 4), 1024),
    (VectorKind::Tree(XfsTree::ReverseMap, 6), 1024),
    (VectorKind::Tree(XfsTree::ReverseMap, 9), 1024),
    (VectorKind::Tree(XfsTree::Extents, 15), 1024),
    (VectorKind::Tree(XfsTree::ReferenceCounts, 131_079), 1024),
    (VectorKind::Tree(XfsTree::FreeBySize, 132_079), 1024),
    (VectorKind::Inode(68), 512),
    (VectorKind::Inode(77), 512),
    (VectorKind::Inode(83), 512),
];

pub(crate) fn vectors() -> impl Iterator<Item = (VectorKind, &'static [u8])> {
    VECTORS.into_iter().scan(0, |start, (kind, len)| {
        let bytes = &BLOCKS[*start..*start + len];
        *start += len;
        Some((kind, bytes))
    })
}

pub(crate) fn geometry() -> XfsGeometry {
    XfsSuperblock::parse(BLOCKS).expect("a right superblock").geometry
}

impl VectorKind {
    /// Where it says what it is.
    pub(crate) fn identity(self) -> XfsIdentity {
        match self {
            Self::Superblock => XfsIdentity::SUPERBLOCK,
            Self::Agf => XfsIdentity::AGF,
            Self::Agi => XfsIdentity::AGI,
            Self::Agfl => XfsIdentity::AGFL,
            Self::Tree(XfsTree::Extents, _) => XfsIdentity::LONG_BLOCK,
            Self::Tree(..) => XfsIdentity::SHORT_BLOCK,
            Self::Inode(_) => XfsIdentity::INODE,
        }
    }

    /// Gives `bytes` the magic or the version that they have in a V4 volume.
    pub(crate) fn make_v4(self, bytes: &mut [u8], v4: &XfsGeometry) {
        match self {
            Self::Tree(tree, _) => {
                if let Some(magic) = tree.magic(v4) {
                    bytes[..4].copy_from_slice(&magic);
                }
            }
            Self::Inode(_) => bytes[4] = 2,
            _ => {}
        }
    }

    /// Checks `bytes`, and uses everything that the check has made safe.
    pub(crate) fn exercise(self, bytes: &[u8], geometry: &XfsGeometry) -> Result<(), Malformed> {
        match self {
            Self::Superblock => exercise_superblock(&XfsSuperblock::parse(bytes)?),
            Self::Agf => {
                let agf = Agf::parse(bytes, geometry, HEADER_AG)?;
                let _ = agf.is_free_list_consistent(geometry);
                let agfl = &BLOCKS[1536..2048];
                let _ = Agfl::parse(agfl, geometry, HEADER_AG)?.ring(agf, geometry, HEADER_AG);
            }
            Self::Agi => {
                Agi::parse(bytes, geometry, HEADER_AG)?;
            }
            Self::Agfl => {
                let agf = Agf::parse(&BLOCKS[512..1024], geometry, HEADER_AG)?;
                let agfl = Agfl::parse(bytes, geometry, HEADER_AG)?;
                let _ = agfl.ring(agf, geometry, HEADER_AG);
            }
            Self::Tree(tree, at) => {
                let block = XfsBtreeBlock::verify(bytes, geometry, tree, FsBlock(at), None)?;
                exercise_block(&block, geometry);
            }
            Self::Inode(ino) => {
                let inode = XfsInode::verify(bytes, geometry, Ino(ino))?;
                exercise_inode(&inode, geometry);
            }
        }
        Ok(())
    }
}

fn exercise_superblock(superblock: &XfsSuperblock) {
    let geometry = &superblock.geometry;
    let _ = superblock.verify_counters();
    let _ = superblock.fields.feature_names().count();
    assert!(superblock.fields.obstacles().iter().all(|o| !o.to_string().is_empty()));
    for ag in [0, geometry.ag_count - 1, u32::MAX].map(AgNumber) {
        assert!(ag.0 == u32::MAX || geometry.ag_len(ag) >= 64);
        for block in [0, 1, geometry.ag_blocks - 1] {
            let at = geometry.fs_block(ag, AgBlock(block));
            let place = geometry.place_of(at);
            assert!(ag.0 > 0 || place.is_some());
        }
    }
    for number in [0, 1, u64::MAX, 1 << 63, 1 << 32] {
        let _ = geometry.locate(Ino(number));
        let _ = geometry.is_usable_extent(FsBlock(number), u32::MAX);
    }
    let _ = geometry.has_inode(AgNumber(0), AgIno(u32::MAX));
}

fn exercise_block(block: &XfsBtreeBlock<'_>, geometry: &XfsGeometry) {
    for index in 0..block.len() {
        assert!(block.key(index).is_some());
        assert_eq!(block.record(index).is_some(), block.header.level == 0);
        assert_eq!(block.pointer(index).is_some(), block.header.level > 0);
        let _ = block.high_key(index);
    }
    assert!(block.key(block.len()).is_none());
    for chunk in block.records::<XfsInodeChunk>() {
        assert!(chunk.free(geometry).count_ones() <= 64);
    }
    for record in block.records::<XfsReverseMap>() {
        assert!(record.owner().is_some());
    }
    for item in block.records::<XfsExtentItem>() {
        assert!(geometry.place_of(item.get().start).is_some());
    }
}

fn exercise_inode(inode: &XfsInode<'_>, geometry: &XfsGeometry) {
    let core = inode.core;
    for field in [core.atime, core.mtime, core.ctime, core.crtime] {
        let time = core.time(field);
        assert!(time.nanoseconds < 1_000_000_000);
    }
    let _ = core.next_unlinked(geometry, HEADER_AG);
    for fork in [Some(&inode.data), inode.attributes.as_ref()].into_iter().flatten() {
        if let XfsFork::Btree(root) = fork {
            let region = root.to_log(geometry, Ino(1));
            assert_eq!(XfsForkRoot::from_log(&region, geometry).as_ref(), Ok(root));
            for len in 0..region.len() {
                let _ = XfsForkRoot::from_log(&region[..len], geometry);
                assert_eq!(root.write(&mut vec![0; len]), len >= 4 + 16 * root.children.len());
            }
        }
    }
}

/// The first byte chooses a structure and the version of the volume. The others are the structure,
/// which says that it is what the volume expects there, with a right checksum.
pub(crate) fn unit(data: &[u8]) {
    let Some((&choice, data)) = data.split_first() else { return };
    let geometry = geometry();
    let Some((kind, real)) = vectors().nth(usize::from(choice & 0x7f) % VECTORS.len()) else {
        return;
    };
    let _ = kind.exercise(data, &geometry);
    let mut bytes = data.to_vec();
    bytes.resize(real.len(), 0);
    let identity = kind.identity();
    let magic = if matches!(kind, VectorKind::Inode(_)) { 2 } else { 4 };
    let fields = [(0, magic), (identity.uuid, 16)].into_iter();
    let fields = fields.chain(identity.blkno.map(|at| (at, 8))).chain(identity.owner);
    for (at, len) in fields {
        bytes[at..at + len].copy_from_slice(&real[at..at + len]);
    }
    if choice & 0x80 != 0 {
        let v4 = XfsGeometry { layout: geometry.layout - XfsLayout::CHECKSUMS, ..geometry };
        kind.make_v4(&mut bytes, &v4);
        let _ = kind.exercise(&bytes, &v4);
        return;
    }
    csum::store(&mut bytes, identity.crc);
    let _ = kind.exercise(&bytes, &geometry);
    if let Ok(superblock) = XfsSuperblock::parse(&bytes) {
        for (kind, bytes) in vectors().skip(1) {
            let _ = kind.exercise(bytes, &superblock.geometry);
        }
    }
}

/// A record of the log: as it is, and with the magic of one. Its body, and the whole input as a
/// body.
pub(crate) fn log_record(data: &[u8]) {
    let ring = XfsLogRing::new(1024).expect("a ring");
    let mut bytes = data.to_vec();
    for _ in 0..2 {
        if let Ok(record) = XfsLogRecord::parse(&bytes) {
            let _ = record.check_place(ring, record.lsn.block());
            let _ = record.check_readable(record.uuid);
            let _ = record.checksum(&bytes);
            let mut blocks = bytes.clone();
            if let Ok(body) = record.unpack(&mut blocks) {
                log_body(body, record.ops, &geometry());
            }
        }
        let magic = bytes.first_chunk_mut();
        let Some(magic) = magic else { return };
        *magic = 0xfeed_babe_u32.to_be_bytes();
    }
    log_body(data, u32::MAX, &geometry());
}

/// The unpacked body of a record with this number of ops. Returns how much was read.
pub(crate) fn log_body(body: &[u8], ops: u32, geometry: &XfsGeometry) -> usize {
    let ring = XfsLogRing::new(1024).expect("a ring");
    let mut open = XfsCheckpoints::new(ring);
    let mut parsed = 0;
    for op in op::ops(body, ops) {
        let Ok(whole) = op.and_then(|op| open.add(Lsn::new(1, 2), &op)) else { break };
        let items = whole.iter().flat_map(XfsCheckpoint::items);
        for item in items.flat_map(XfsLogItem::parse) {
            let mut again = XfsLogVector::default();
            let _ = (item.check(geometry), item.turn(), item.encode(&mut again));
            if let XfsLogItem::Buffer(buffer) = &item {
                parsed += buffer.runs().count() + buffer.unlinked(512).count();
            }
            if let XfsLogItem::Inode(inode) = &item {
                let _ = inode.put_core(&mut [0; 512]);
            }
            parsed += 1;
        }
    }
    parsed
}
