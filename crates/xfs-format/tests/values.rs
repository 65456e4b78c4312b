//! Values at the limits of their fields, features that stop us, and structures that we make.

use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsBtreeBuilder, XfsForkRoot, XfsTree};
use offshoot_xfs_format::features::{XfsHindrance, XfsObstacleKind};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agfl, Agi, new_agf, new_agi};
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::inode::{
    XfsInode, XfsInodeCore, XfsInodeFlags2, XfsTime, device_field, device_number, file_type,
};
use offshoot_xfs_format::record::{
    XfsExtent, XfsExtentItem, XfsInodeChunk, XfsOwner, XfsReverseMap, XfsTreeRecord,
};
use offshoot_xfs_format::superblock::{XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{
    AgBlock, AgIno, AgNumber, BasicBlock, FileBlock, FsBlock, Ino, Lsn, XfsGeometry, csum,
};
use zerocopy::IntoBytes;

const BLOCKS: &[u8] = include_bytes!("vectors/blocks.bin");

const FIRST: AgNumber = AgNumber(0);

fn superblock() -> XfsSuperblock {
    XfsSuperblock::parse(BLOCKS).expect("a right superblock")
}

fn geometry() -> XfsGeometry {
    superblock().geometry
}

fn v4(geometry: &XfsGeometry) -> XfsGeometry {
    XfsGeometry { layout: XfsLayout::FILE_TYPES, ..geometry.clone() }
}

#[test]
fn each_feature_that_stops_us_is_named() {
    use XfsObstacleKind as Kind;
    type Change = fn(&mut XfsSuperblockFields);
    let changes: &[(&[Kind], Change)] = &[
        (&[], |_| {}),
        (&[Kind::Unfinished], |fields| fields.inprogress = 1),
        (&[Kind::NoRoot], |fields| fields.rootino = u64::MAX.into()),
        (&[Kind::AsciiCase], |fields| fields.versionnum |= 0x4000),
        (&[Kind::OldDirectories], |fields| fields.versionnum &= !0x2000),
        (&[Kind::UnknownVersionBits], |fields| fields.versionnum |= 0x200),
        (&[Kind::UnknownIncompat], |fields| fields.incompat |= 0x4000_0000),
        (&[Kind::Zoned, Kind::Metadir], |fields| fields.incompat |= 0x300),
        (&[Kind::RealtimeGroups, Kind::Realtime, Kind::Metadir], |fields| {
            fields.incompat |= 0x100;
            fields.rblocks = 1.into();
        }),
        (&[Kind::ExternalLog], |fields| fields.logstart = 0.into()),
        (&[Kind::UnknownLogIncompat], |fields| fields.log_incompat |= 3),
        (&[Kind::NeedsRepair], |fields| fields.incompat |= 0x10),
        (&[Kind::UnknownRoCompat], |fields| fields.ro_compat |= 0x10),
        (&[Kind::Realtime], |fields| fields.rextents = 1.into()),
        (&[Kind::Quotas], |fields| fields.qflags = 1.into()),
        (&[Kind::OldBasics], |fields| {
            fields.features2 &= !2;
            fields.bad_features2 &= !2;
        }),
        (&[Kind::V4], |fields| fields.versionnum ^= 1),
        (&[Kind::V4, Kind::UnknownFeatures2], |fields| {
            fields.versionnum ^= 1;
            fields.features2 |= 0x1000;
        }),
    ];
    for (expected, change) in changes {
        let mut fields = superblock().fields;
        change(&mut fields);
        let parsed = XfsSuperblock::parse(&fields.encode()).expect("consistent sizes");
        let found: Vec<_> =
            parsed.fields.obstacles().iter().map(|obstacle| obstacle.kind).collect();
        assert_eq!(found, *expected);
    }
    assert!(Kind::Quotas.hindrance() < Kind::ExternalLog.hindrance());
    assert_eq!(Kind::UnknownIncompat.hindrance(), XfsHindrance::Reading);
    let mut fields = superblock().fields;
    fields.ro_compat |= 0x30;
    let text = fields.obstacles()[0].to_string();
    assert_eq!(text, "unknown features that a writer must know (0x30)");
}

#[test]
fn sizes_that_contradict_each_other_are_refused() {
    type Change = fn(&mut XfsSuperblockFields);
    let changes: &[Change] = &[
        |fields| fields.blocksize = 4096.into(),
        |fields| fields.blocklog = 17,
        |fields| fields.sectsize = 1024.into(),
        |fields| fields.inopblog = 3,
        |fields| fields.inodesize = 256.into(),
        |fields| fields.dirblklog = 7,
        |fields| fields.dirblklog = 250,
        |fields| fields.agblocks = 63.into(),
        |fields| fields.agblklog += 1,
        |fields| fields.agcount = 0.into(),
        |fields| fields.agcount += 1,
        |fields| fields.agcount = u32::MAX.into(),
        |fields| fields.dblocks += 1,
        |fields| fields.dblocks = u64::MAX.into(),
        |fields| fields.logstart = 1.into(),
        |fields| fields.logstart = (u64::MAX - 1).into(),
        |fields| fields.logblocks = 0.into(),
        |fields| fields.logblocks = u32::MAX.into(),
        |fields| fields.logsectlog = 10,
        |fields| fields.logsunit = 513.into(),
        |fields| fields.rootino = (1 << 40).into(),
        |fields| fields.imax_pct = 101,
        |fields| fields.versionnum = 0xb4a3.into(),
        |fields| fields.inoalignmt = 16.into(),
        |fields| fields.spino_align = 3.into(),
        |fields| fields.spino_align = 64.into(),
        |fields| fields.incompat &= !2,
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut fields = superblock().fields;
        // A log at block 1 only leaves its group when it is as long as the group.
        fields.logblocks = fields.agblocks;
        fields.logstart = 0.into();
        assert!(XfsSuperblock::parse(&fields.encode()).is_ok());
        change(&mut fields);
        assert!(XfsSuperblock::parse(&fields.encode()).is_err(), "change {index}");
    }
    let mut fields = superblock().fields;
    fields.ifree = fields.icount + 1;
    let superblock = XfsSuperblock::parse(&fields.encode()).expect("counters do not count yet");
    assert!(superblock.verify_counters().is_err());
}

#[test]
fn a_label_has_up_to_12_bytes() {
    let mut fields = superblock().fields;
    assert_eq!(fields.label(), b"");
    for (label, fits) in [("twelve bytes", true), ("x", true), ("thirteen byte", false), ("", true)]
    {
        assert_eq!(fields.set_label(label.as_bytes()), fits);
        assert_eq!(fields.label() == label.as_bytes(), fits, "{label}");
    }
    assert!(!fields.set_label(b"a\0b"));
}

#[test]
fn a_log_lies_behind_the_headers_of_its_group() {
    let mut fields = superblock().fields;
    fields.logblocks = 256.into();
    for (start, is_right) in [(0, true), (1, false), (2, true)] {
        fields.logstart = start.into();
        assert_eq!(XfsSuperblock::parse(&fields.encode()).is_ok(), is_right, "{start}");
    }
}

#[test]
fn sparse_chunks_are_aligned_to_parts_of_chunks() {
    let mut fields = superblock().fields;
    assert_eq!((fields.blocksize.get(), fields.inodesize.get()), (1024, 512));
    for (is_sparse, chunk, part, is_right) in [
        (true, 32, 0, true),
        (true, 32, 8, true),
        (true, 32, 32, true),
        (true, 32, 12, false),
        (true, 8, 8, false),
        (false, 8, 0, true),
        (false, 32, 8, false),
    ] {
        fields.incompat = ((fields.incompat.get() & !2) | (u32::from(is_sparse) << 1)).into();
        (fields.inoalignmt, fields.spino_align) = (chunk.into(), part.into());
        assert_eq!(XfsSuperblock::parse(&fields.encode()).is_ok(), is_right, "{chunk} {part}");
    }
}

#[test]
fn records_of_the_log_fill_its_stripe_or_its_sector() {
    let mut fields = superblock().fields;
    for (stripe, sector, unit) in
        [(0, 0, 512), (1, 0, 512), (1, 4096, 4096), (4096, 512, 4096), (32_768, 4096, 32_768)]
    {
        (fields.logsunit, fields.logsectsize) = (stripe.into(), sector.into());
        assert_eq!(fields.log_unit(), unit);
    }
}

#[test]
fn inodes_and_blocks_have_places_behind_the_headers() {
    let geometry = geometry();
    let per_block = 1_u64 << geometry.inodes_per_block_log();
    let headers = u64::from(geometry.header_blocks());
    assert_eq!(geometry.locate(Ino(0)), None);
    assert_eq!(geometry.locate(Ino(headers * per_block - 1)), None, "in the headers");
    let bits = geometry.ag_block_log + geometry.inodes_per_block_log();
    let ino = Ino((1 << bits) | (headers * per_block + 1));
    let (ag, inside) = geometry.split_ino(ino).expect("a place");
    assert_eq!(geometry.ino(ag, inside), ino);
    let place = geometry.place(ag, AgBlock(geometry.header_blocks()));
    assert_eq!(geometry.inode_offset(ino), Some(place.bytes() + 512));
    assert_eq!(geometry.at(place), Some((ag, AgBlock(geometry.header_blocks()))));
    let sector = BasicBlock(place.0 + 1);
    assert_eq!(geometry.at(sector), geometry.at(place), "the second sector of the block");
    let end = BasicBlock(geometry.blocks << geometry.block_log >> 9);
    assert_eq!(geometry.at(end), None);
    assert_eq!(geometry.at(BasicBlock(u64::MAX)), None);
    assert!(geometry.at(BasicBlock(end.0 - 1)).is_some());
    assert_eq!(Agi::unlinked_list(AgIno(131)), 3);
    assert_eq!(Agi::unlinked_list(AgIno(64)), 0);
}

#[test]
fn times_are_clamped_to_what_their_field_holds() {
    let time = |seconds, nanoseconds| XfsTime { seconds, nanoseconds };
    for (is_wide, first, last) in [
        (false, time(-(1 << 31), 0), time((1 << 31) - 1, 999_999_999)),
        (true, time(-(1 << 31), 0), time(16_299_260_425, 709_551_615)),
    ] {
        for same in [first, last, time(0, 0), time(-1, 1)] {
            assert_eq!(XfsTime::from_disk(same.to_disk(is_wide), is_wide), same);
        }
        let before = time(i64::MIN, 0).to_disk(is_wide);
        assert_eq!(XfsTime::from_disk(before, is_wide), first);
        let after = XfsTime::from_disk(time(i64::MAX, 999_999_999).to_disk(is_wide), is_wide);
        assert_eq!(after, last);
    }
    assert_eq!(time(-(1 << 31), 0).to_disk(true), 0);
    assert_eq!(XfsTime::from_disk(0xffff_ffff, false), time(0, 999_999_999));
}

#[test]
fn as_much_fits_in_a_block_as_in_the_kernel() {
    let geometry = XfsGeometry { block_log: 12, ..geometry() };
    let expected =
        [(505, 336), (505, 336), (252, 505), (252, 505), (168, 91), (336, 505), (251, 251)];
    for (tree, (leaf, node)) in XfsTree::ALL.into_iter().zip(expected) {
        let found = (tree.capacity(&geometry, 0), tree.capacity(&geometry, 1));
        assert_eq!(found, (leaf, node), "{tree:?}");
    }
}

#[test]
fn extents_have_their_bits_where_the_book_has_them() {
    let extent = XfsExtent {
        offset: FileBlock((1 << 54) - 1),
        start: FsBlock(1),
        count: 2,
        is_unwritten: false,
    };
    let stored = XfsExtentItem::from(extent);
    assert_eq!(u128::from_be_bytes(stored.0), ((1 << 54) - 1) << 73 | 1 << 21 | 2);
    let largest = XfsExtent {
        offset: FileBlock((1 << 54) - 1),
        start: FsBlock((1 << 52) - 1),
        count: (1 << 21) - 1,
        is_unwritten: true,
    };
    assert_eq!(XfsExtentItem::from(largest).0, [0xff; 16]);
    assert_eq!(XfsExtentItem([0xff; 16]).get(), largest);
    let geometry = geometry();
    let verdict = |extent: XfsExtent| XfsExtentItem::from(extent).verify(&geometry, FIRST).is_ok();
    let inside = XfsExtent { offset: FileBlock(0), start: FsBlock(100), ..extent };
    assert!(verdict(inside));
    assert!(!verdict(XfsExtent { count: 0, ..inside }));
    assert!(!verdict(XfsExtent { start: FsBlock(0), ..inside }));
    assert!(!verdict(XfsExtent { offset: FileBlock((1 << 54) - 1), ..inside }));
    let last = FsBlock(u64::from(geometry.ag_blocks) - 1);
    assert!(verdict(XfsExtent { start: last, count: 1, ..inside }));
    assert!(!verdict(XfsExtent { start: last, count: 2, ..inside }), "it leaves its group");
}

/// The kernel's own bytes, but for the checksum field, which holds anything.
#[test]
fn a_root_in_the_log_is_as_the_kernel_writes_it() {
    let uuid = uuid::uuid!("97bddf11-0397-4828-8866-688c28839fd7");
    let geometry = XfsGeometry { uuid, ..geometry() };
    let root = XfsForkRoot { level: 1, children: vec![(FileBlock(4), FsBlock(0x1f))] };
    let mut expected = b"BMA3\0\x01\0\x01".to_vec();
    expected.extend([0xff; 24]);
    expected.extend([0; 8]);
    expected.extend(uuid.as_bytes());
    for number in [0x43_u64, 0, 4, 0x1f] {
        expected.extend(number.to_be_bytes());
    }
    assert_eq!(root.to_log(&geometry, Ino(0x43)), expected);
    assert_eq!(XfsForkRoot::from_log(&expected, &geometry), Ok(root));
}

#[test]
fn owners_have_numbers() {
    for number in (-9_i64..=-3).map(i64::cast_unsigned) {
        let owner = XfsOwner::from_number(number).expect("an owner");
        assert_eq!(owner.number(), number);
    }
    assert_eq!(XfsOwner::from_number((-2_i64).cast_unsigned()), None);
    assert_eq!(XfsOwner::from_number(128), Some(XfsOwner::File(Ino(128))));
    let geometry = geometry();
    let map = |owner: XfsOwner, start: u32, count: u32, offset: u64| {
        let record = XfsReverseMap {
            start: start.into(),
            count: count.into(),
            owner: owner.number().into(),
            offset: offset.into(),
        };
        record.verify(&geometry, FIRST).is_ok()
    };
    assert!(map(XfsOwner::Headers, 0, 2, 0), "4 sectors in 2 blocks of 1 KiB");
    assert!(!map(XfsOwner::Log, 0, 2, 0));
    assert!(!map(XfsOwner::Log, 10, 2, 1));
    assert!(map(XfsOwner::File(Ino(128)), 10, 2, 1 << 61 | 7));
    assert!(!map(XfsOwner::File(Ino(128)), 10, 2, 1 << 61 | 1 << 63));
    assert!(!map(XfsOwner::File(Ino(128)), 10, 2, 1 << 60));
    assert!(!map(XfsOwner::File(Ino(1 << 50)), 10, 2, 0));
    let tree_block = |offset: u64| map(XfsOwner::File(Ino(128)), 10, 2, 1 << 62 | offset);
    assert!(tree_block(0) && tree_block(1 << 63));
    assert!(!tree_block(1 << 61) && !tree_block(1 << 60) && !tree_block(7));
}

#[test]
fn records_of_the_reverse_map_overlap_but_have_keys_of_their_own() {
    let geometry = geometry();
    let geometry = XfsGeometry { layout: geometry.layout | XfsLayout::REVERSE_MAP, ..geometry };
    let at = geometry.fs_block(FIRST, AgBlock(50));
    let is_right = |places: [(u32, u64); 2]| {
        let records = places.map(|(start, offset)| XfsReverseMap {
            start: start.into(),
            count: 4.into(),
            owner: 128.into(),
            offset: offset.into(),
        });
        let builder = XfsBtreeBuilder::new(&geometry, XfsTree::ReverseMap, at, Ino(0), 0);
        let mut builder = builder.expect("a block");
        assert!(builder.set_records(records.as_bytes()));
        let bytes = builder.into_bytes();
        XfsBtreeBlock::verify(&bytes, &geometry, XfsTree::ReverseMap, at, None).is_ok()
    };
    assert!(is_right([(60, 0), (60, 8)]));
    assert!(is_right([(60, 8), (62, 0)]));
    assert!(!is_right([(60, 8), (60, 8)]));
}

#[test]
fn a_chunk_counts_only_what_is_allocated() {
    let geometry = geometry();
    let chunk = XfsInodeChunk::new(&geometry, AgIno(128), 0xff00, 0b11);
    assert_eq!((chunk.holes(&geometry), chunk.free(&geometry)), (0xff00, 0b11));
    assert_eq!(chunk.counts, [0xff, 0, 32, 2]);
    assert_eq!(chunk.free.get(), 0xffff_ffff_0000_0003);
    assert!(chunk.verify(&geometry, FIRST).is_ok());
    let wrong = [
        XfsInodeChunk { counts: [0xff, 0, 64, 2], ..chunk },
        XfsInodeChunk { free: 0b11.into(), ..chunk },
        XfsInodeChunk { start: 129.into(), ..chunk },
        XfsInodeChunk::new(&geometry, AgIno(128), 0xffff, 0),
        XfsInodeChunk::new(&geometry, AgIno(u32::MAX - 1), 0, 0),
    ];
    for chunk in wrong {
        assert!(chunk.verify(&geometry, FIRST).is_err(), "{chunk:?}");
    }
    let geometry = v4(&geometry);
    let chunk = XfsInodeChunk::new(&geometry, AgIno(128), 0, u64::MAX);
    assert_eq!(chunk.counts, [0, 0, 0, 64]);
    assert!(chunk.verify(&geometry, FIRST).is_ok());
}

#[test]
fn new_headers_are_right_and_the_free_list_is_a_ring() {
    for geometry in [geometry(), v4(&geometry())] {
        let size = Agfl::size(&geometry);
        let is_v5 = geometry.has_checksums();
        assert_eq!(size, if is_v5 { 119 } else { 128 });
        let mut agf = new_agf(&geometry, FIRST);
        assert!(agf.is_free_list_consistent(&geometry));
        (agf.roots, agf.levels) = ([5.into(); 3], [1.into(); 3]);
        (agf.refcount_root, agf.refcount_level) = (6.into(), 1.into());
        let last = u32::try_from(size).expect("small") - 1;
        (agf.flfirst, agf.fllast, agf.flcount) = (last.into(), 1.into(), 3.into());
        let mut sector = vec![0; 512];
        agf.write(&mut sector, &geometry);
        assert!(Agf::parse(&sector, &geometry, FIRST).is_ok());
        assert!(agf.is_free_list_consistent(&geometry));
        let mut blocks = vec![AgBlock::NULL; size];
        (blocks[size - 1], blocks[0], blocks[1]) = (AgBlock(7), AgBlock(8), AgBlock(9));
        let lsn = is_v5.then_some(Lsn(1));
        let free_list = Agfl { lsn, blocks };
        let again = Agfl::parse(&free_list.encode(&geometry, FIRST), &geometry, FIRST);
        assert_eq!(again.as_ref(), Ok(&free_list));
        let ring = free_list.ring(&agf, &geometry, FIRST);
        assert_eq!(ring, Ok(vec![AgBlock(7), AgBlock(8), AgBlock(9)]));
        agf.flcount = 4.into();
        assert!(!agf.is_free_list_consistent(&geometry));
        assert!(free_list.ring(&agf, &geometry, FIRST).is_err(), "a place that is not in use");

        let mut agi = new_agi(&geometry, FIRST);
        (agi.root, agi.level) = (3.into(), 1.into());
        (agi.free_root, agi.free_level) = (4.into(), 1.into());
        agi.write(&mut sector, &geometry);
        assert!(Agi::parse(&sector, &geometry, FIRST).is_ok());
        assert!(Agi::parse(&sector, &geometry, AgNumber(1)).is_err());
    }
}

/// The table of all units agrees with the trees and the kinds of blocks, and recovery finds the
/// LSN by the magic number alone.
#[test]
fn units_are_known_by_their_magic_number() {
    let geometry = geometry();
    let mut units: Vec<(Vec<u8>, XfsIdentity)> = vec![
        (superblock().fields.encode(), XfsIdentity::SUPERBLOCK),
        (b"XAGF".to_vec(), XfsIdentity::AGF),
        (b"XAGI".to_vec(), XfsIdentity::AGI),
        (b"XAFL".to_vec(), XfsIdentity::AGFL),
        (b"XSLM".to_vec(), XfsIdentity::REMOTE),
        (b"XDD3".to_vec(), XfsIdentity::DIRECTORY),
        (vec![0, 0, 0, 5, 0, 0, 0, 0, 0x3e, 0xbe], XfsIdentity::NODE),
        // The owner of this inode looks like a node's magic number.
        (b"IN\x81\xa4\x03\x02\0\0\x3e\xbe\0\0".to_vec(), XfsIdentity::INODE),
    ];
    for tree in XfsTree::ALL {
        let magic = tree.magic(&geometry).expect("a magic number").to_vec();
        let of_tree =
            if tree.is_long() { XfsIdentity::LONG_BLOCK } else { XfsIdentity::SHORT_BLOCK };
        units.push((magic, of_tree));
    }
    for (mut unit, identity) in units {
        unit.resize(512, 0);
        assert_eq!(XfsIdentity::of_magic(&geometry, &unit), Some(identity));
        assert_eq!(XfsIdentity::of_magic(&v4(&geometry), &unit), None);
        assert!(identity.seal(&mut unit, Lsn::new(3, 7)));
        assert_eq!(identity.lsn_of(&unit), Some(Lsn::new(3, 7)));
        assert!(csum::is_right(&unit, identity.crc));
        unit[identity.uuid..][..16].copy_from_slice(geometry.uuid.as_bytes());
        assert_eq!(identity.uuid_of(&unit), Some(geometry.uuid));
        let mut short = unit[..identity.crc + 3].to_vec();
        assert!(!identity.seal(&mut short, Lsn(0)) && short == unit[..short.len()]);
    }
    let mut value = b"XARM".to_vec();
    value.resize(1024, 0);
    let remote = XfsIdentity::of_magic(&geometry, &value).expect("a value");
    assert!(remote.seal(&mut value, Lsn::new(3, 7)));
    assert_eq!(remote.lsn_of(&value), Some(Lsn::NONE), "values are not logged");
    assert_eq!(XfsIdentity::of_magic(&geometry, b"user data"), None);
    let mut fields = superblock().fields;
    (fields.incompat, fields.meta_uuid) = ((fields.incompat.get() | 4).into(), [9; 16]);
    let renamed = XfsIdentity::SUPERBLOCK.uuid_of(&fields.encode());
    assert_eq!(renamed, Some(uuid::Uuid::from_bytes([9; 16])));
    assert_eq!(Lsn::new(3, 1024).to_string(), "3:1024");
}

#[test]
fn a_fresh_inode_is_free_and_becomes_a_file() {
    for geometry in [geometry(), v4(&geometry())] {
        let ino = Ino(200);
        let mut core = XfsInodeCore::fresh(&geometry, ino, 5);
        let mut bytes = vec![0; geometry.inode_size()];
        core.write(&mut bytes, &geometry);
        assert!(XfsInode::verify(&bytes, &geometry, ino).expect("a fresh inode").core.is_free());
        core.mode = (file_type::REGULAR | 0o644).into();
        (core.nlink, core.format, core.aformat) = (1.into(), 2, 2);
        core.write(&mut bytes, &geometry);
        let inode = XfsInode::verify(&bytes, &geometry, ino).expect("an empty file");
        assert_eq!((inode.core.links(), inode.core.next_unlinked(&geometry, FIRST)), (1, Ok(None)));
        let wrong: &[fn(&mut XfsInodeCore)] = &[
            |core| core.format = 0,
            |core| core.format = 1,
            |core| core.format = 4,
            |core| core.mode = 0o644.into(),
            |core| core.mode = file_type::DIRECTORY.into(),
            |core| core.mode = file_type::FIFO.into(),
            |core| core.size = u64::MAX.into(),
            |core| core.forkoff = 255,
            |core| core.nextents = 1.into(),
            |core| core.anextents = 1.into(),
            |core| core.aformat = 1,
            |core| core.version = 7,
        ];
        for (index, change) in wrong.iter().enumerate() {
            let mut core = core;
            change(&mut core);
            core.write(&mut bytes, &geometry);
            assert!(XfsInode::verify(&bytes, &geometry, ino).is_err(), "change {index}");
        }
    }
}

#[test]
fn extents_are_counted_in_the_fields_of_the_inode() {
    let mut core = XfsInodeCore::fresh(&geometry(), Ino(200), 0);
    assert!(core.set_extent_counts(i32::MAX as u64, 32_767));
    assert!(!core.set_extent_counts(1 << 31, 0) && !core.set_extent_counts(0, 1 << 15));
    assert_eq!(core.extent_counts(), (i32::MAX as u64, 32_767));
    core.flags2 = XfsInodeFlags2::NREXT64.bits().into();
    assert!(core.set_extent_counts((1 << 48) - 1, u32::MAX));
    assert!(!core.set_extent_counts(1 << 48, 0));
    assert_eq!(core.extent_counts(), ((1 << 48) - 1, u32::MAX));
}

/// The kernel refuses an inode whose unused count of extents is not zero.
#[test]
fn the_unused_count_of_extents_is_zero() {
    let geometry = XfsGeometry { layout: XfsLayout::all(), ..geometry() };
    let ino = Ino(200);
    let mut core = XfsInodeCore::fresh(&geometry, ino, 0);
    core.mode = (file_type::REGULAR | 0o644).into();
    (core.nlink, core.format, core.aformat) = (1.into(), 2, 2);
    let is_right = |core: &XfsInodeCore| {
        let mut bytes = vec![0; geometry.inode_size()];
        core.write(&mut bytes, &geometry);
        XfsInode::verify(&bytes, &geometry, ino).is_ok()
    };
    let wide = XfsInodeCore { flags2: XfsInodeFlags2::NREXT64.bits().into(), ..core };
    for (core, right) in [
        (core, true),
        (XfsInodeCore { big_nextents: 1.into(), ..core }, false),
        (wide, true),
        (XfsInodeCore { anextents: 1.into(), ..wide }, false),
    ] {
        assert_eq!(is_right(&core), right);
    }
    // An inode that becomes one with wide counts, and back.
    assert!(core.set_extent_counts(5, 7));
    core.flags2 = XfsInodeFlags2::NREXT64.bits().into();
    assert!(core.set_extent_counts(0, 0) && is_right(&core));
    assert!(core.set_extent_counts(5, 7));
    core.flags2 = 0.into();
    assert!(core.set_extent_counts(0, 0) && is_right(&core));
    // Version 2 counts its flushes there.
    (core.version, core.big_nextents) = (2, 9.into());
    assert!(core.set_extent_counts(1, 0));
    assert_eq!(core.big_nextents.get(), 9);
}

#[test]
fn flags_of_an_inode_need_their_feature() {
    let all = XfsGeometry { layout: XfsLayout::all(), ..geometry() };
    let is_right = |geometry: &XfsGeometry, mode: u16, flags: XfsInodeFlags2| {
        let mut core = XfsInodeCore::fresh(geometry, Ino(200), 0);
        (core.mode, core.size) = ((mode | 0o755).into(), 6.into());
        (core.nlink, core.format, core.aformat) = (2.into(), 2, 2);
        core.flags2 = flags.bits().into();
        let mut bytes = vec![0; geometry.inode_size()];
        core.write(&mut bytes, geometry);
        XfsInode::verify(&bytes, geometry, Ino(200)).is_ok()
    };
    for (flag, feature) in [
        (XfsInodeFlags2::REFLINK, XfsLayout::SHARED_BLOCKS),
        (XfsInodeFlags2::COWEXTSIZE, XfsLayout::SHARED_BLOCKS),
        (XfsInodeFlags2::BIGTIME, XfsLayout::BIG_TIMES),
        (XfsInodeFlags2::NREXT64, XfsLayout::WIDE_COUNTS),
        (XfsInodeFlags2::METADATA, XfsLayout::METADATA_TREE),
    ] {
        assert!(is_right(&all, file_type::REGULAR, flag), "{flag:?}");
        let without = XfsGeometry { layout: all.layout - feature, ..all.clone() };
        assert!(!is_right(&without, file_type::REGULAR, flag), "{flag:?}");
    }
    assert!(is_right(&all, file_type::DIRECTORY, XfsInodeFlags2::COWEXTSIZE));
    assert!(!is_right(&all, file_type::DIRECTORY, XfsInodeFlags2::REFLINK));
}

#[test]
fn a_device_has_14_and_18_bits() {
    assert_eq!(device_field(1, 3), Some(1 << 18 | 3));
    assert_eq!(device_number(u32::MAX), (0x3fff, 0x3_ffff));
    assert_eq!(device_field(0x3fff, 0x3_ffff), Some(u32::MAX));
    assert_eq!(device_field(0x4000, 0), None);
    assert_eq!(device_field(0, 0x4_0000), None);
}
