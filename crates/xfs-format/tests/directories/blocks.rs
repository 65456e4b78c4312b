//! Blocks of entries, and the only block of a directory.

use std::collections::BTreeMap;

use offshoot_xfs_format::da::{DaEdit, DaExpected, DaKind};
use offshoot_xfs_format::dir::block::{self, DirBlock};
use offshoot_xfs_format::dir::data::{self, DirData};
use offshoot_xfs_format::dir::leaf::{self, DirHash, DirLeaf};
use offshoot_xfs_format::dir::short::ShortDir;
use offshoot_xfs_format::dir::{DirCookie, file_type, leaf_start};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::{Ino, Lsn, XfsGeometry};

use crate::volume;
use crate::volume::{MadeVolume, SeededNumbers, numbers_only, told};
use crate::{EXPECTED, SHAPES, V5, assert_same, contents, entry};

#[test]
fn a_block_that_grows_is_byte_for_byte_that_of_mkfs() {
    if !volume::has_judges() {
        return;
    }
    for options in SHAPES {
        let volume = MadeVolume::make(options, &contents());
        let geometry = &volume.geometry;
        let file = volume.file("/block");
        let (expected, theirs) = volume.directory_blocks(&file).remove(0);
        let directory = DirBlock::parse(geometry, &theirs, &expected).unwrap();
        let entries: Vec<_> = directory.data.entries(0).filter(|entry| !entry.is_dot()).collect();
        let root = directory.find(b"..").unwrap().unwrap().ino;
        let mut short = ShortDir { parent: root, entries: Vec::new() };
        let split = entries.len() / 2;
        for entry in &entries[..split] {
            assert!(short.insert(geometry, *entry));
        }
        let mut ours = block::from_short(geometry, &expected, &short).unwrap();
        let mut edit = DaEdit::fill(DaKind::DirBlock, &mut ours);
        for entry in &entries[split..] {
            let offset = block::insert(geometry, &mut edit, entry).unwrap();
            assert_eq!(offset, Some(entry.offset));
        }
        assert_same(geometry, ours, &theirs);
    }
}

#[test]
fn entries_come_and_go_in_a_block() {
    let seed = 0x5eed_0001;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    for dir_block_log in [0, 2] {
        let geometry = numbers_only(10, dir_block_log, V5);
        let short = ShortDir { parent: Ino(131), entries: Vec::new() };
        let mut bytes = block::from_short(&geometry, &EXPECTED, &short).unwrap();
        let mut model: BTreeMap<String, usize> = BTreeMap::new();
        let mut refused = 0;
        for round in 0..4000 {
            let len = 1 + numbers.below(60);
            let name = format!("{:0len$}", numbers.below(90));
            let is_filling = round / 500 % 2 == 0;
            if let Some(&offset) = model.get(&name) {
                if !is_filling || numbers.below(4) == 0 {
                    told(DaKind::DirBlock, &mut bytes, |edit| {
                        block::remove(&geometry, edit, offset, name.as_bytes()).unwrap();
                    });
                    model.remove(&name);
                }
            } else if is_filling || numbers.below(4) == 0 {
                let offset = told(DaKind::DirBlock, &mut bytes, |edit| {
                    block::insert(&geometry, edit, &entry(name.as_bytes(), 999)).unwrap()
                });
                match offset {
                    Some(offset) => assert!(model.insert(name, offset).is_none()),
                    None => refused += 1,
                }
            } else if let Some((name, offset)) = model.pop_first() {
                told(DaKind::DirBlock, &mut bytes, |edit| {
                    block::remove(&geometry, edit, offset, name.as_bytes()).unwrap();
                });
            }
            let before = DirBlock::view(&geometry, &bytes).unwrap().data.entries(0).count();
            assert_eq!(before, model.len() + 2);
            DaKind::DirBlock.seal(&geometry, &mut bytes, Lsn::new(1, 2));
            let directory = DirBlock::parse(&geometry, &bytes, &EXPECTED).unwrap();
            assert_eq!(directory.data.entries(0).count(), model.len() + 2);
            for (name, &offset) in &model {
                let found = directory.find(name.as_bytes()).unwrap().unwrap();
                assert_eq!(found.offset, offset);
            }
            let half = geometry.dir_block_size() / 2;
            let late = directory.data.entries(0).filter(|entry| entry.offset >= half).count();
            assert_eq!(directory.data.entries(half).count(), late);
            let short = block::to_short(&geometry, &directory).unwrap();
            if short.entries.len() < 8 {
                let bytes = short.encode(&geometry).unwrap();
                let again = ShortDir::parse(&geometry, &bytes).unwrap();
                assert_eq!(again.entries, short.entries);
                let block = block::from_short(&geometry, &EXPECTED, &again).unwrap();
                let mut block = block;
                DaKind::DirBlock.seal(&geometry, &mut block, Lsn(0));
                DirBlock::parse(&geometry, &block, &EXPECTED).unwrap();
            }
        }
        assert!(refused > 0);
        to_leaf(&geometry, bytes, &model);
    }
}

/// Makes the directory one with a leaf, proves both blocks, and brings the hashes back.
fn to_leaf(geometry: &XfsGeometry, mut bytes: Vec<u8>, model: &BTreeMap<String, usize>) {
    let expected = DaExpected { block: Some(leaf_start(geometry)), ..EXPECTED };
    let leaf = told(DaKind::DirBlock, &mut bytes, |edit| {
        block::to_leaf(geometry, edit, &expected).unwrap()
    });
    let mut leaf = leaf;
    DaKind::DirLeaf.seal(geometry, &mut leaf, Lsn(0));
    DaKind::DirData.seal(geometry, &mut bytes, Lsn(0));
    let room = leaf::spare(geometry, DaKind::DirLeaf, &leaf).unwrap();
    let leaf = DirLeaf::parse(geometry, DaKind::DirLeaf, &leaf, &expected).unwrap();
    assert_eq!(room, geometry.dir_block_size() - 64 - leaf.hashes.len() * 8 - 2 - leaf::TAIL);
    let data = DirData::parse(geometry, &bytes, &EXPECTED).unwrap();
    assert_eq!(usize::from(leaf.bests[0].get()), data.longest());
    for (name, &offset) in model {
        let hash = name_hash(name.as_bytes());
        assert!(leaf::find(leaf.hashes, hash).any(|cookie| cookie.split(geometry).1 == offset));
    }
    let mut hashes = leaf.hashes.to_vec();
    let stale = hashes.len();
    hashes.resize(2 * stale, DirHash::new(u32::MAX, DirCookie::STALE));
    assert_eq!(DirLeaf { hashes: &hashes, ..leaf }.live().count(), stale);
    let has_room = told(DaKind::DirData, &mut bytes, |edit| {
        block::from_leaf(geometry, edit, &hashes).unwrap()
    });
    assert!(has_room);
    for (&offset, number) in model.values().zip(500..) {
        told(DaKind::DirBlock, &mut bytes, |edit| {
            data::set_file(geometry, edit, offset, (Ino(number), file_type::FIFO)).unwrap();
        });
    }
    DaKind::DirBlock.seal(geometry, &mut bytes, Lsn(0));
    let block = DirBlock::parse(geometry, &bytes, &EXPECTED).unwrap();
    assert!(block.hashes.iter().eq(leaf.hashes));
    for (name, number) in model.keys().zip(500..) {
        let found = block.find(name.as_bytes()).unwrap().unwrap();
        assert_eq!((found.ino, found.file_type), (Ino(number), file_type::FIFO));
    }
}

#[test]
fn entries_without_types_lead_to_other_files() {
    let geometry = numbers_only(10, 0, XfsLayout::CHECKSUMS);
    let mut bytes = data::encode_empty(&geometry, &EXPECTED).unwrap();
    let kind = DaKind::DirData;
    let mut places = Vec::new();
    for name in [&b"a"[..], b"name", b"longer name"] {
        let added = told(kind, &mut bytes, |edit| data::insert(&geometry, edit, &entry(name, 150)));
        places.push((name, added.unwrap().unwrap()));
    }
    for &(_, offset) in &places {
        told(kind, &mut bytes, |edit| {
            data::set_file(&geometry, edit, offset, (Ino(151), file_type::FIFO)).unwrap();
        });
    }
    kind.seal(&geometry, &mut bytes, Lsn(0));
    let data = DirData::parse(&geometry, &bytes, &EXPECTED).unwrap();
    for (name, offset) in places {
        let found = data.entry(offset).unwrap();
        assert_eq!((found.name, found.ino, found.file_type), (name, Ino(151), 0));
    }
    let mut edit = DaEdit::fill(kind, &mut bytes);
    let behind = data::set_file(&geometry, &mut edit, 200, (Ino(151), file_type::FIFO));
    assert!(behind.is_err());
}

#[test]
fn data_without_room_at_its_end_gets_no_hashes() {
    let geometry = numbers_only(10, 0, V5);
    let mut bytes = data::encode_empty(&geometry, &EXPECTED).unwrap();
    while told(DaKind::DirData, &mut bytes, |edit| {
        data::insert(&geometry, edit, &entry(b"some name", 150)).unwrap().is_some()
    }) {}
    let before = bytes.clone();
    let has_room = told(DaKind::DirData, &mut bytes, |edit| {
        block::from_leaf(&geometry, edit, &[DirHash::new(7, DirCookie(9))]).unwrap()
    });
    assert!(!has_room);
    assert_eq!(bytes, before);
}

#[test]
fn an_empty_data_block_is_one_unused_piece() {
    for (block_log, dir_block_log, layout) in
        [(10, 0, V5), (12, 1, V5), (16, 0, V5), (9, 0, XfsLayout::empty())]
    {
        let geometry = numbers_only(block_log, dir_block_log, layout);
        let mut bytes = data::encode_empty(&geometry, &EXPECTED).unwrap();
        DaKind::DirData.seal(&geometry, &mut bytes, Lsn(3));
        let empty = DirData::parse(&geometry, &bytes, &EXPECTED).unwrap();
        let header = DaKind::DirData.header_len(&geometry);
        assert_eq!(empty.longest(), geometry.dir_block_size() - header);
        assert_eq!(empty.entries(header).count(), 0);
    }
    let nameless = DaExpected { owner: None, ..EXPECTED };
    assert!(data::encode_empty(&numbers_only(10, 0, V5), &nameless).is_err());
}
