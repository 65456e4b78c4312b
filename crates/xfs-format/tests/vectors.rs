//! Real blocks, and what becomes of them when they are damaged.
//!
//! `blocks.bin` holds parts of a volume that `volumes/make.sh` made with blocks of 1 KiB. A changed
//! byte is found by the checksum. With a new checksum on the damage, nothing panics: neither the
//! check, nor the views of what it lets pass. `OFFSHOOT_SEED` repeats a run.

use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsForkRoot, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agfl, Agi};
use offshoot_xfs_format::inode::{INODE_CRC, XfsFork, XfsInode};
use offshoot_xfs_format::record::{XfsExtentItem, XfsInodeChunk, XfsReverseMap};
use offshoot_xfs_format::superblock::{CRC, XfsSuperblock};
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, FsBlock, Ino, Malformed, XfsGeometry, csum};

const BLOCKS: &[u8] = include_bytes!("vectors/blocks.bin");

const HEADER_AG: AgNumber = AgNumber(0);

#[derive(Clone, Copy, Debug)]
enum VectorKind {
    Superblock,
    Agf,
    Agi,
    Agfl,
    Tree(XfsTree, u64),
    Inode(u64),
}

/// What [`BLOCKS`] holds, in order.
const VECTORS: [(VectorKind, usize); 14] = [
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

fn vectors() -> impl Iterator<Item = (VectorKind, &'static [u8])> {
    VECTORS.into_iter().scan(0, |start, (kind, len)| {
        let bytes = &BLOCKS[*start..*start + len];
        *start += len;
        Some((kind, bytes))
    })
}

fn geometry() -> XfsGeometry {
    XfsSuperblock::parse(BLOCKS).expect("a right superblock").geometry
}

impl VectorKind {
    /// The place of the checksum.
    fn crc(self) -> usize {
        match self {
            Self::Superblock => CRC,
            Self::Agf => 216,
            Self::Agi => 312,
            Self::Agfl => 32,
            Self::Tree(XfsTree::Extents, _) => 64,
            Self::Tree(..) => 52,
            Self::Inode(_) => INODE_CRC,
        }
    }

    /// Gives `bytes` the magic or the version that they have in a V4 volume.
    fn make_v4(self, bytes: &mut [u8], v4: &XfsGeometry) {
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
    fn exercise(self, bytes: &[u8], geometry: &XfsGeometry) -> Result<(), Malformed> {
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
    let names = superblock.fields.feature_names().count();
    assert!(names > 0 && superblock.fields.obstacles().iter().all(|o| !o.to_string().is_empty()));
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

#[test]
fn real_blocks_are_right() {
    let geometry = geometry();
    assert_eq!(vectors().map(|(_, bytes)| bytes.len()).sum::<usize>(), BLOCKS.len());
    for (kind, bytes) in vectors() {
        kind.exercise(bytes, &geometry).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    }
    let inode = |index: usize| {
        let (kind, bytes) = vectors().nth(index).expect("a vector");
        let VectorKind::Inode(ino) = kind else { panic!("{kind:?} is no inode") };
        XfsInode::verify(bytes, &geometry, Ino(ino)).expect("a right inode").data
    };
    let forks = [11, 12, 13].map(inode);
    assert!(forks.iter().any(|fork| matches!(fork, XfsFork::Btree(_))));
    assert!(forks.contains(&XfsFork::Local(b"target")));
}

#[test]
fn each_changed_bit_and_each_missing_end_is_found() {
    let geometry = geometry();
    for (kind, bytes) in vectors() {
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1 << (at % 8);
            assert!(kind.exercise(&changed, &geometry).is_err(), "{kind:?}: byte {at}");
            assert!(kind.exercise(&bytes[..at], &geometry).is_err(), "{kind:?}: {at} bytes");
        }
    }
}

#[test]
fn damage_with_a_right_checksum_never_panics() {
    let geometry = geometry();
    let mut refused = 0;
    let mut tried = 0;
    let v4 = XfsGeometry { layout: geometry.layout - XfsLayout::CHECKSUMS, ..geometry.clone() };
    let mut damaged = |kind: VectorKind, bytes: &mut Vec<u8>| {
        csum::store(bytes, kind.crc());
        tried += 1;
        let verdict = kind.exercise(bytes, &geometry);
        refused += u32::from(verdict.is_err());
        if let Ok(superblock) = XfsSuperblock::parse(bytes) {
            for (kind, bytes) in vectors().skip(1) {
                let _ = kind.exercise(bytes, &superblock.geometry);
            }
        }
        kind.make_v4(bytes, &v4);
        let _ = kind.exercise(bytes, &v4);
    };
    for (kind, bytes) in vectors() {
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.to_vec();
                changed[at] = value;
                damaged(kind, &mut changed);
            }
        }
    }
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut state: u64 = seed.unwrap_or_else(|| now.map_or(1, |now| u64::from(now.subsec_nanos())));
    println!("OFFSHOOT_SEED={state}");
    let mut random = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).expect("31 bits") % below
    };
    for (kind, bytes) in vectors() {
        for _ in 0..2000 {
            let mut changed = bytes.to_vec();
            for _ in 0..=random(3) {
                // Most of what is read lies in the first quarter.
                let end = if random(2) == 0 { bytes.len() / 4 } else { bytes.len() };
                let width = [1, 2, 4, 8][random(4)];
                let at = random(end - width);
                let special = [0, 1, 64, u64::MAX, u64::MAX - 1, 1 << 31, 1 << 63, 1 << 53];
                let value = special[random(special.len())].to_be_bytes();
                changed[at..at + width].copy_from_slice(&value[8 - width..]);
            }
            damaged(kind, &mut changed);
        }
    }
    println!("{refused} of {tried} refused");
    assert!(refused > tried / 20 && refused < tried);
}
