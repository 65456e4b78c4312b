//! Directories as mkfs and the kernel write them, and damage to them.

mod volume;

use std::collections::BTreeMap;
use std::fmt::Write;

use offshoot_xfs_format::da::{self, DaEdit, DaExpected, DaKind, DaNode, DaNodeEntry};
use offshoot_xfs_format::dir::block::{self, DirBlock};
use offshoot_xfs_format::dir::data::{self, DirData};
use offshoot_xfs_format::dir::free::{self, DirFree};
use offshoot_xfs_format::dir::leaf::{self, DirHash, DirLeaf};
use offshoot_xfs_format::dir::short::{ShortDir, ShortDirView};
use offshoot_xfs_format::dir::{DirCookie, XfsDirEntry, file_type, leaf_start};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino, Lsn, Malformed, U16, XfsGeometry};
use volume::{FileBytes, MadeVolume, SeededNumbers, numbers_only, told};

/// Options of volumes whose directories differ.
const SHAPES: &[&[&str]] = &[
    &["-m", "crc=1"],
    &["-b", "size=1024"],
    &["-n", "size=16384"],
    &["-n", "size=65536"],
    &["-m", "crc=0"],
    &["-m", "crc=0", "-n", "ftype=0"],
    &["-m", "crc=0", "-b", "size=1024", "-n", "size=4096,ftype=1"],
];

/// Directories by their names: how many entries, and the length of their names.
const DIRECTORIES: &[(&str, usize, usize)] =
    &[("empty", 0, 0), ("short", 3, 8), ("block", 25, 12), ("leaf", 150, 40), ("node", 5000, 30)];

fn names(count: usize, len: usize) -> Vec<String> {
    (0..count).map(|i| format!("{i:0len$}")).collect()
}

fn contents() -> String {
    let mut text = String::new();
    for &(name, count, len) in DIRECTORIES {
        writeln!(text, "{name} d--755 0 0").unwrap();
        for entry in names(count, len) {
            writeln!(text, "{entry} ---644 0 0 /dev/null").unwrap();
        }
        text.push_str("$\n");
    }
    text
}

/// The entries of a block, whatever its kind; proves it on the way.
fn walk(
    geometry: &XfsGeometry,
    bytes: &[u8],
    expected: &DaExpected,
) -> Result<Vec<(String, Ino)>, Malformed> {
    let Some(kind) = DaKind::of_directory(geometry, bytes) else {
        return DirData::parse(geometry, bytes, expected).map(|_| Vec::new());
    };
    let list = |data: &DirData<'_>| {
        let named = |entry: XfsDirEntry<'_>| {
            assert_eq!(data.entry(entry.offset).unwrap(), entry);
            (String::from_utf8_lossy(entry.name).into_owned(), entry.ino)
        };
        data.entries(0).map(named).collect()
    };
    Ok(match kind {
        DaKind::DirBlock => {
            let directory = DirBlock::parse(geometry, bytes, expected)?;
            for entry in directory.data.entries(0) {
                assert!(directory.find(entry.name).unwrap().is_some());
            }
            if let Ok(short) = block::to_short(geometry, &directory) {
                let _ = short.encode(geometry);
            }
            list(&directory.data)
        }
        DaKind::DirData => list(&DirData::parse(geometry, bytes, expected)?),
        DaKind::DirFree => {
            DirFree::parse(geometry, bytes, expected)?;
            Vec::new()
        }
        DaKind::DirLeaf | DaKind::DirNodeLeaf => {
            DirLeaf::parse(geometry, kind, bytes, expected)?;
            Vec::new()
        }
        _ => {
            DaNode::parse(geometry, kind, bytes, expected)?;
            Vec::new()
        }
    })
}

/// Encodes what `bytes` hold anew, where one call does so.
fn again(geometry: &XfsGeometry, bytes: &[u8], expected: &DaExpected) -> Option<Vec<u8>> {
    let kind = DaKind::of_directory(geometry, bytes).unwrap();
    let encoded = match kind {
        DaKind::DirFree => {
            let free = DirFree::parse(geometry, bytes, expected).unwrap();
            DirFree::encode(geometry, expected, free.first, free.bests)
        }
        DaKind::DirLeaf | DaKind::DirNodeLeaf => {
            let leaf = DirLeaf::parse(geometry, kind, bytes, expected).unwrap();
            let links = (leaf.info.forw.get(), leaf.info.back.get());
            DirLeaf::encode(geometry, kind, expected, links, leaf.hashes, leaf.bests)
        }
        DaKind::DirNode => {
            let node = DaNode::parse(geometry, kind, bytes, expected).unwrap();
            let links = (node.info.forw.get(), node.info.back.get(), node.level);
            DaNode::encode(geometry, kind, expected, links, node.entries)
        }
        _ => return None,
    };
    Some(encoded.unwrap())
}

/// The part of a block that an encoder promises: not what lies unused behind the entries.
fn assert_same(geometry: &XfsGeometry, mut ours: Vec<u8>, theirs: &[u8]) {
    let kind = DaKind::of_directory(geometry, theirs).unwrap();
    if kind.header_len(geometry) == 64 {
        let at = kind.stamp_at() + 12;
        let lsn = Lsn(u64::from_be_bytes(theirs[at..at + 8].try_into().unwrap()));
        kind.seal(geometry, &mut ours, lsn);
    }
    let crc = kind.stamp_at()..kind.stamp_at() + 4;
    let different = ours
        .iter()
        .zip(theirs)
        .enumerate()
        .filter(|&(at, (ours, theirs))| ours != theirs && *ours != 0 && !crc.contains(&at));
    let different: Vec<_> = different.map(|(at, _)| at).collect();
    assert!(different.is_empty(), "{kind:?} differs at {different:?}");
}

/// Finds a name as a reader does: by the node tree, a leaf, and the data block.
fn look_up(geometry: &XfsGeometry, blocks: &[(DaExpected, Vec<u8>)], name: &str) -> Option<Ino> {
    let block = |at: FileBlock| {
        let found = blocks.iter().find(|(expected, _)| expected.block == Some(at)).unwrap();
        (&found.0, &found.1[..])
    };
    let hash = name_hash(name.as_bytes());
    if blocks.len() == 1 {
        let directory = DirBlock::parse(geometry, &blocks[0].1, &blocks[0].0).unwrap();
        return directory.find(name.as_bytes()).unwrap().map(|entry| entry.ino);
    }
    let mut at = leaf_start(geometry);
    loop {
        let (expected, bytes) = block(at);
        let kind = DaKind::of_directory(geometry, bytes).unwrap();
        if kind == DaKind::DirNode {
            let node = DaNode::parse(geometry, kind, bytes, expected).unwrap();
            at = FileBlock(node.entries[node.find(hash)?].before.get().into());
            continue;
        }
        let leaf = DirLeaf::parse(geometry, kind, bytes, expected).unwrap();
        let found = leaf::find(leaf.hashes, hash).find_map(|cookie| {
            let (at, offset) = cookie.split(geometry);
            assert_eq!(DirCookie::new(geometry, at, offset), Some(cookie));
            let (expected, bytes) = block(at);
            let data = DirData::parse(geometry, bytes, expected).unwrap();
            let entry = data.entry(offset).unwrap();
            (entry.name == name.as_bytes()).then_some(entry.ino)
        });
        // Names with one hash go on in the next leaf.
        let is_last = leaf.hashes.last().is_none_or(|last| last.hash.get() != hash);
        if found.is_some() || is_last || leaf.info.forw.get() == 0 {
            return found;
        }
        at = FileBlock(leaf.info.forw.get().into());
    }
}

/// Reads a directory, and compares its names.
fn compare(volume: &MadeVolume, file: &FileBytes, expected_names: &[String]) {
    let geometry = &volume.geometry;
    if file.format == 1 {
        let short = ShortDir::parse(geometry, &file.data).unwrap();
        let found: Vec<_> = short.entries.iter().map(|entry| entry.name.to_vec()).collect();
        let wanted: Vec<_> = expected_names.iter().map(|name| name.as_bytes().to_vec()).collect();
        assert_eq!(found, wanted);
        assert_eq!(short.encode(geometry).unwrap(), file.data);
        return;
    }
    let blocks = volume.directory_blocks(file);
    let mut found = BTreeMap::new();
    for (expected, bytes) in &blocks {
        found.extend(walk(geometry, bytes, expected).unwrap());
        if let Some(ours) = again(geometry, bytes, expected) {
            assert_same(geometry, ours, bytes);
        }
    }
    assert_eq!(found.remove("."), Some(file.ino));
    assert!(found.remove("..").is_some());
    let all: Vec<_> = found.keys().cloned().collect();
    assert_eq!(all, expected_names);
    for (name, ino) in found.iter().step_by(found.len() / 100 + 1) {
        assert_eq!(look_up(geometry, &blocks, name), Some(*ino), "{name}");
    }
    assert_eq!(look_up(geometry, &blocks, "not there"), None);
}

/// The kinds of the blocks of a directory.
fn kinds(volume: &MadeVolume, file: &FileBytes) -> Vec<DaKind> {
    let blocks = volume.directory_blocks(file);
    let kind = |bytes: &[u8]| DaKind::of_directory(&volume.geometry, bytes).unwrap();
    blocks.iter().map(|(_, bytes)| kind(bytes)).collect()
}

#[test]
fn directories_of_mkfs_are_read_in_all_forms() {
    if !volume::has_tools() {
        return;
    }
    let contents = contents();
    let mut seen = Vec::new();
    for options in SHAPES {
        let volume = MadeVolume::make(options, &contents);
        for &(name, count, len) in DIRECTORIES {
            let file = volume.file(&format!("/{name}"));
            compare(&volume, &file, &names(count, len));
            seen.extend(kinds(&volume, &file));
        }
    }
    for kind in [
        DaKind::DirBlock,
        DaKind::DirData,
        DaKind::DirFree,
        DaKind::DirLeaf,
        DaKind::DirNodeLeaf,
        DaKind::DirNode,
    ] {
        assert!(seen.contains(&kind), "{kind:?}");
    }
}

#[test]
fn a_tree_of_two_levels_and_an_index_of_two_blocks_are_read() {
    if !volume::has_tools() {
        return;
    }
    let names = names(265_000, 16);
    let mut text = "deep d--755 0 0\n".to_owned();
    for name in &names {
        writeln!(text, "{name} ---644 0 0 /dev/null").unwrap();
    }
    let volume = MadeVolume::make(SHAPES[0], &format!("{text}$\n"));
    let file = volume.file("/deep");
    compare(&volume, &file, &names);
    let kinds = kinds(&volume, &file);
    for kind in [DaKind::DirNode, DaKind::DirFree] {
        assert!(kinds.iter().filter(|&&other| other == kind).count() > 1, "{kind:?}");
    }
}

#[test]
fn every_damage_to_a_block_is_found_or_harmless() {
    if !volume::has_tools() {
        return;
    }
    for options in [SHAPES[1], SHAPES[5], SHAPES[6]] {
        let volume = MadeVolume::make(options, &contents());
        let geometry = &volume.geometry;
        let mut blocks = Vec::new();
        for name in ["/block", "/leaf", "/node"] {
            let mut all = volume.directory_blocks(&volume.file(name));
            all.dedup_by_key(|(_, bytes)| DaKind::of_directory(geometry, bytes));
            blocks.extend(all);
        }
        for (expected, bytes) in &blocks {
            let kind = DaKind::of_directory(geometry, bytes).unwrap();
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << (at % 8);
                let found = walk(geometry, &damaged, expected);
                assert!(found.is_err() || kind.header_len(geometry) != 64, "{kind:?} at {at}");
                for byte in [0, 0xff, damaged[at]] {
                    damaged[at] = byte;
                    kind.seal(geometry, &mut damaged, Lsn(7));
                    let _ = walk(geometry, &damaged, expected);
                    change_blindly(geometry, kind, &mut damaged.clone());
                }
                assert!(walk(geometry, &bytes[..at], expected).is_err());
            }
        }
        let short = volume.file("/short").data;
        for at in 0..short.len() {
            for byte in 0..=255 {
                let mut damaged = short.clone();
                damaged[at] = byte;
                if let Ok(short) = ShortDir::parse(geometry, &damaged) {
                    assert_eq!(short.encode(geometry).unwrap(), damaged);
                }
            }
            assert!(ShortDir::parse(geometry, &short[..at]).is_err());
        }
    }
}

/// Changes a block that was not proved: it must not panic.
fn change_blindly(geometry: &XfsGeometry, kind: DaKind, bytes: &mut [u8]) {
    if let Ok(directory) = DirBlock::view(geometry, bytes) {
        let _ = (directory.find(b".."), directory.data.entries(0).count());
    }
    if let Ok(data) = DirData::view(geometry, bytes) {
        let _ = (data.entries(0).count(), data.entry(bytes.len() / 2));
    }
    let mut edit = DaEdit::fill(kind, bytes);
    let entry = entry(b"new", 128);
    let hash = DirHash::new(7, DirCookie(9));
    match kind {
        DaKind::DirBlock => {
            let at = kind.header_len(geometry);
            let _ = block::insert(geometry, &mut edit, &entry);
            let _ = block::remove(geometry, &mut edit, at, b".");
        }
        DaKind::DirData => {
            let _ = data::insert(geometry, &mut edit, &entry);
            let _ = data::remove(geometry, &mut edit, kind.header_len(geometry));
            let _ = data::set_file(geometry, &mut edit, 200, (entry.ino, 1));
            let _ = block::from_leaf(geometry, &mut edit, &[hash]);
        }
        DaKind::DirLeaf => {
            let _ = leaf::spare(geometry, kind, edit.block());
            let _ = leaf::insert(geometry, &mut edit, hash);
            let _ = leaf::remove(geometry, &mut edit, hash);
            let _ = leaf::set_best(geometry, &mut edit, 3, 8);
        }
        DaKind::DirFree => {
            let _ = free::set_best(geometry, &mut edit, 3, 8);
        }
        _ => {}
    }
}

fn entry(name: &[u8], ino: u64) -> XfsDirEntry<'_> {
    XfsDirEntry { offset: 0, ino: Ino(ino), name, file_type: file_type::REG_FILE }
}

#[test]
fn a_block_that_grows_is_byte_for_byte_that_of_mkfs() {
    if !volume::has_tools() {
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

/// The features of a plain V5 volume.
const V5: XfsLayout = XfsLayout::CHECKSUMS.union(XfsLayout::FILE_TYPES);

const EXPECTED: DaExpected =
    DaExpected { place: BasicBlock(800), owner: Some(Ino(128)), block: Some(FileBlock(0)) };

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
fn a_leaf_moves_to_the_place_of_the_root() {
    let geometry = numbers_only(10, 0, V5);
    let kind = DaKind::DirNodeLeaf;
    let hashes = [DirHash::new(7, DirCookie(8))];
    let mut bytes = DirLeaf::encode(&geometry, kind, &EXPECTED, (3, 4), &hashes, &[]).unwrap();
    let root = DaExpected { place: BasicBlock(4000), ..EXPECTED };
    da::move_block(&geometry, kind, &mut bytes, &root).unwrap();
    kind.seal(&geometry, &mut bytes, Lsn(0));
    let moved = DirLeaf::parse(&geometry, kind, &bytes, &root).unwrap();
    assert_eq!((moved.info.forw.get(), moved.info.back.get(), moved.hashes), (0, 0, &hashes[..]));
    assert!(DirLeaf::parse(&geometry, kind, &bytes, &EXPECTED).is_err());
    assert_eq!(DirLeaf::capacity(&geometry), 120);
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

#[test]
fn a_leaf_forgets_the_last_data_blocks() {
    let geometry = numbers_only(10, 0, V5);
    let kind = DaKind::DirLeaf;
    let expected = DaExpected { block: Some(leaf_start(&geometry)), ..EXPECTED };
    let hashes = [DirHash { hash: 7.into(), address: 8.into() }];
    let bests = [100, 200, leaf::NO_BLOCK, 300].map(U16::new);
    let mut bytes = DirLeaf::encode(&geometry, kind, &expected, (0, 0), &hashes, &bests).unwrap();
    for (blocks, left) in [(9, 4), (4, 4), (2, 2), (0, 0)] {
        told(kind, &mut bytes, |edit| leaf::truncate_bests(&geometry, edit, blocks).unwrap());
        kind.seal(&geometry, &mut bytes, Lsn(0));
        let found = DirLeaf::parse(&geometry, kind, &bytes, &expected).unwrap();
        assert_eq!(found.bests, &bests[..left]);
        assert_eq!(found.hashes.len(), 1);
    }
}

#[test]
fn a_short_directory_widens_and_narrows() {
    let mut geometry = numbers_only(10, 0, V5);
    (geometry.ag_block_log, geometry.ag_blocks) = (28, 1 << 28);
    (geometry.ag_count, geometry.blocks) = (64, 64 << 28);
    let wide = Ino(1 << 32 | 128);
    let mut short = ShortDir { parent: Ino(128), entries: Vec::new() };
    assert!(short.insert(&geometry, entry(b"near", 131)));
    let narrow = short.encode(&geometry).unwrap();
    assert_eq!(narrow[..6], [1, 0, 0, 0, 0, 128]);
    assert!(short.insert(&geometry, entry(b"far", wide.0)));
    let bytes = short.encode(&geometry).unwrap();
    assert_eq!(bytes[..10], [2, 1, 0, 0, 0, 0, 0, 0, 0, 128]);
    ShortDir::parse(&geometry, &bytes).unwrap();
    let view = ShortDirView::new(&geometry, &bytes).unwrap();
    assert_eq!(view.find(b"far").unwrap().ino, wide);
    assert_eq!(short.remove(b"far").unwrap().ino, wide);
    assert_eq!(short.encode(&geometry).unwrap(), narrow);
    short.parent = wide;
    let bytes = short.encode(&geometry).unwrap();
    assert_eq!(bytes[1], 1);
    assert_eq!(ShortDir::parse(&geometry, &bytes).unwrap().parent, wide);
    for (at, byte) in [(0, 0), (0, 2), (1, 0), (1, 2), (9, 0)] {
        let mut damaged = bytes.clone();
        damaged[at] = byte;
        assert!(ShortDir::parse(&geometry, &damaged).is_err() || at == 9);
    }
}

#[test]
fn a_short_directory_reuses_gaps_when_its_block_would_be_full() {
    let geometry = numbers_only(9, 0, V5);
    let names = names(40, 8);
    let mut short = ShortDir { parent: Ino(128), entries: Vec::new() };
    let mut all = names.iter().map(|name| entry(name.as_bytes(), 131));
    let refused = all.find(|entry| !short.insert(&geometry, *entry)).unwrap();
    let gone = short.remove(short.entries[2].name).unwrap();
    assert!(short.insert(&geometry, refused));
    let bytes = short.encode(&geometry).unwrap();
    let view = ShortDirView::new(&geometry, &bytes).unwrap();
    assert_eq!(view.find(refused.name).unwrap().offset, gone.offset);
    assert!(view.entries().eq(short.entries.iter().copied()));
    let again = ShortDir::parse(&geometry, &bytes).unwrap();
    let block = block::from_short(&geometry, &EXPECTED, &again).unwrap();
    let block = DirBlock::view(&geometry, &block).unwrap();
    assert_eq!(block::to_short(&geometry, &block).unwrap().encode(&geometry).unwrap(), bytes);
}

#[test]
fn hashes_and_free_space_come_and_go() {
    let seed = 0x5eed_0002;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    let geometry = numbers_only(10, 0, V5);
    for kind in [DaKind::DirLeaf, DaKind::DirNodeLeaf] {
        let mut bytes = DirLeaf::encode(&geometry, kind, &EXPECTED, (0, 0), &[], &[]).unwrap();
        let mut model: Vec<(u32, DirCookie)> = Vec::new();
        let mut bests: Vec<u16> = Vec::new();
        let mut refused = 0;
        for round in 0..3000 {
            if numbers.below(10) < if round / 300 % 2 == 0 { 7 } else { 3 } {
                let hash = u32::try_from(numbers.below(40)).unwrap();
                let pair = (hash, DirCookie(round + 1));
                let fits = told(kind, &mut bytes, |edit| {
                    leaf::insert(&geometry, edit, DirHash::new(pair.0, pair.1)).unwrap()
                });
                if fits { model.push(pair) } else { refused += 1 }
            } else if !model.is_empty() {
                let pair = model.swap_remove(numbers.below(model.len()));
                told(kind, &mut bytes, |edit| {
                    leaf::remove(&geometry, edit, DirHash::new(pair.0, pair.1)).unwrap();
                });
            }
            if kind == DaKind::DirLeaf && round % 50 == 0 {
                let index = numbers.below(bests.len() + 2);
                let best = u16::try_from(numbers.below(900)).unwrap();
                let fits = told(kind, &mut bytes, |edit| {
                    leaf::set_best(&geometry, edit, index, best).unwrap()
                });
                if fits {
                    bests.resize(bests.len().max(index + 1), leaf::NO_BLOCK);
                    bests[index] = best;
                }
            }
            kind.seal(&geometry, &mut bytes, Lsn(0));
            let found = DirLeaf::parse(&geometry, kind, &bytes, &EXPECTED).unwrap();
            assert_eq!(found.hashes.len() - found.stale, model.len());
            assert!(found.bests.iter().map(|best| best.get()).eq(bests.iter().copied()));
            for &(hash, cookie) in &model {
                assert!(leaf::find(found.hashes, hash).any(|other| other == cookie));
            }
        }
        assert!(refused > 0);
    }
    let expected = DaExpected { block: None, ..EXPECTED };
    let mut bytes = DirFree::encode(&geometry, &expected, 0, &[]).unwrap();
    let mut model = vec![leaf::NO_BLOCK; free::per_block(&geometry)];
    for _ in 0..2000 {
        let place = numbers.below(40);
        let best = u16::try_from(numbers.below(900)).unwrap();
        let best = if numbers.below(2) == 0 { best } else { leaf::NO_BLOCK };
        model[place] = best;
        told(DaKind::DirFree, &mut bytes, |edit| {
            free::set_best(&geometry, edit, place, best).unwrap();
        });
        DaKind::DirFree.seal(&geometry, &mut bytes, Lsn(0));
        let found = DirFree::parse(&geometry, &bytes, &expected).unwrap();
        let live = model.iter().rposition(|&best| best != leaf::NO_BLOCK).map_or(0, |i| i + 1);
        assert!(found.bests.iter().copied().map(U16::get).eq(model[..live].iter().copied()));
    }
}

#[test]
fn entries_of_a_node_come_and_go() {
    let seed = 0x5eed_0005;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    let geometry = numbers_only(10, 0, V5);
    let kind = DaKind::DirNode;
    let child = |before: u32| DaNodeEntry { hash: (before / 3).into(), before: before.into() };
    let mut model = vec![5_000_u32];
    let mut bytes = DaNode::encode(&geometry, kind, &EXPECTED, (0, 0, 1), &[child(5_000)]).unwrap();
    let mut refused = 0;
    for _ in 0..2000 {
        let before = u32::try_from(1 + numbers.below(9_000)).unwrap();
        let place = model.partition_point(|&other| other < before);
        let stop = (place + numbers.below(4) / 3).min(model.len());
        let fits = told(kind, &mut bytes, |edit| {
            da::splice_node(&geometry, edit, place..stop, &[child(before)]).unwrap()
        });
        if fits {
            model.splice(place..stop, [before]);
        } else {
            refused += 1;
            told(kind, &mut bytes, |edit| {
                assert!(da::splice_node(&geometry, edit, 20..90, &[]).unwrap());
            });
            model.drain(20..90);
        }
        kind.seal(&geometry, &mut bytes, Lsn(0));
        let node = DaNode::parse(&geometry, kind, &bytes, &EXPECTED).unwrap();
        assert!(node.entries.iter().map(|entry| entry.before.get()).eq(model.iter().copied()));
        let first = node.entries.iter().position(|entry| entry.hash.get() >= before / 3);
        assert_eq!(node.find(before / 3), first);
    }
    assert!(refused > 0);
}

#[test]
fn directories_that_the_kernel_thinned_out_are_read() {
    if !volume::has_tools() {
        return;
    }
    let volume = MadeVolume::make(SHAPES[1], &contents());
    let gone = |i: usize| !i.is_multiple_of(5);
    let changed = volume.mounted(|point| {
        for &(name, count, len) in &DIRECTORIES[2..] {
            for (i, entry) in names(count, len).iter().enumerate() {
                if gone(i) {
                    std::fs::remove_file(point.join(name).join(entry)).unwrap();
                }
            }
        }
    });
    if !changed {
        return;
    }
    let mut stale = 0;
    for &(name, count, len) in &DIRECTORIES[2..] {
        let file = volume.file(&format!("/{name}"));
        let kept = names(count, len).into_iter().enumerate().filter(|&(i, _)| !gone(i));
        compare(&volume, &file, &kept.map(|(_, name)| name).collect::<Vec<_>>());
        for (expected, bytes) in volume.directory_blocks(&file) {
            let kind = DaKind::of_directory(&volume.geometry, &bytes).unwrap();
            if matches!(kind, DaKind::DirLeaf | DaKind::DirNodeLeaf) {
                let leaf = DirLeaf::parse(&volume.geometry, kind, &bytes, &expected).unwrap();
                stale += leaf.stale;
            }
        }
    }
    assert!(stale > 0);
}

/// A directory whose entries are renamed in memory, as an engine does it.
struct RenamedDirectory<'v> {
    geometry: &'v XfsGeometry,
    blocks: Vec<(DaExpected, Vec<u8>)>,
}

impl RenamedDirectory<'_> {
    fn index(&self, block: FileBlock) -> usize {
        self.blocks.iter().position(|(expected, _)| expected.block == Some(block)).unwrap()
    }

    fn change<T>(&mut self, index: usize, change: impl FnOnce(&mut DaEdit<'_>) -> T) -> T {
        let bytes = &mut self.blocks[index].1;
        let kind = DaKind::of_directory(self.geometry, bytes).unwrap();
        let result = told(kind, bytes, change);
        kind.seal(self.geometry, bytes, Lsn(0));
        result
    }

    /// The block with the hashes of this one; `None` when a node has no room for it.
    fn leaf(&self, hash: u32) -> Option<usize> {
        let mut at = leaf_start(self.geometry);
        loop {
            let index = self.index(at);
            let (expected, bytes) = &self.blocks[index];
            let Ok(node) = DaNode::parse(self.geometry, DaKind::DirNode, bytes, expected) else {
                return Some(index);
            };
            at = FileBlock(node.entries[node.find(hash)?].before.get().into());
        }
    }

    fn set_best(&mut self, block: FileBlock) {
        let geometry = self.geometry;
        let (expected, bytes) = &self.blocks[self.index(block)];
        let longest = DirData::parse(geometry, bytes, expected).unwrap().longest();
        let longest = u16::try_from(longest).unwrap();
        let number = u32::try_from(block.0 >> geometry.dir_block_log).unwrap();
        let root = self.index(leaf_start(geometry));
        if DaKind::of_directory(geometry, &self.blocks[root].1) == Some(DaKind::DirLeaf) {
            let index = number as usize;
            self.change(root, |edit| leaf::set_best(geometry, edit, index, longest).unwrap());
        } else {
            let (block, inside) = free::locate(geometry, number);
            let index = self.index(block);
            self.change(index, |edit| free::set_best(geometry, edit, inside, longest).unwrap());
        }
    }

    /// Renames an entry, when the directory has room for it.
    fn rename(&mut self, old: &str, new: &str) -> bool {
        let geometry = self.geometry;
        let (old, new) = (old.as_bytes(), new.as_bytes());
        if self.blocks.len() == 1 {
            let (expected, bytes) = &self.blocks[0];
            let entry = DirBlock::parse(geometry, bytes, expected).unwrap().find(old).unwrap();
            let entry = entry.unwrap();
            let (offset, new) = (entry.offset, self::entry(new, entry.ino.0));
            return self.change(0, |edit| {
                block::remove(geometry, edit, offset, old).unwrap();
                block::insert(geometry, edit, &new).unwrap().is_some()
            });
        }
        let Some(new_leaf) = self.leaf(name_hash(new)) else { return false };
        let mut copy = self.blocks[new_leaf].1.clone();
        let kind = DaKind::of_directory(geometry, &copy).unwrap();
        let hash = DirHash::new(name_hash(new), DirCookie(1));
        if !leaf::insert(geometry, &mut DaEdit::fill(kind, &mut copy), hash).unwrap() {
            return false;
        }
        let mut old_leaf = self.leaf(name_hash(old)).unwrap();
        let (cookie, block, ino) = loop {
            let (expected, bytes) = &self.blocks[old_leaf];
            let kind = DaKind::of_directory(geometry, bytes).unwrap();
            let leaf = DirLeaf::parse(geometry, kind, bytes, expected).unwrap();
            let found = leaf::find(leaf.hashes, name_hash(old)).find_map(|cookie| {
                let (block, offset) = cookie.split(geometry);
                let (expected, bytes) = &self.blocks[self.index(block)];
                let data = DirData::parse(geometry, bytes, expected).unwrap();
                let entry = data.entry(offset).unwrap();
                (entry.name == old).then_some((cookie, block, entry.ino))
            });
            if let Some(found) = found {
                break found;
            }
            // Names with one hash go on in the next leaf.
            assert_eq!(leaf.hashes.last().unwrap().hash.get(), name_hash(old));
            old_leaf = self.index(FileBlock(leaf.info.forw.get().into()));
        };
        let offset = cookie.split(geometry).1;
        self.change(self.index(block), |edit| data::remove(geometry, edit, offset).unwrap());
        self.set_best(block);
        let hash = DirHash::new(name_hash(old), cookie);
        self.change(old_leaf, |edit| leaf::remove(geometry, edit, hash).unwrap());

        let added = entry(new, ino.0);
        // Spread them, so that no block becomes empty.
        let start = name_hash(new) as usize % self.blocks.len();
        let placed = (start..self.blocks.len()).chain(0..start).find_map(|index| {
            let block = self.blocks[index].0.block.unwrap();
            if block >= leaf_start(geometry) {
                return None;
            }
            let offset = self.change(index, |edit| data::insert(geometry, edit, &added).unwrap());
            Some((block, offset?))
        });
        let (block, offset) = placed.unwrap();
        self.set_best(block);
        let cookie = DirCookie::new(geometry, block, offset).unwrap();
        let hash = DirHash::new(name_hash(new), cookie);
        assert!(self.change(new_leaf, |edit| leaf::insert(geometry, edit, hash).unwrap()));
        self.tell_node(new_leaf);
        true
    }

    /// Tells the node above a leaf its last hash.
    fn tell_node(&mut self, leaf: usize) {
        let geometry = self.geometry;
        let root = self.index(leaf_start(geometry));
        let (expected, bytes) = &self.blocks[leaf];
        let before = u32::try_from(expected.block.unwrap().0).unwrap();
        let kind = DaKind::of_directory(geometry, bytes).unwrap();
        let last = DirLeaf::parse(geometry, kind, bytes, expected).unwrap().hashes.last().copied();
        let bytes = &self.blocks[root].1;
        if DaKind::of_directory(geometry, bytes) != Some(DaKind::DirNode) {
            return;
        }
        let node = DaNode::view(geometry, DaKind::DirNode, bytes).unwrap();
        let place = node.entries.iter().position(|entry| entry.before.get() == before).unwrap();
        let entry = DaNodeEntry { hash: last.unwrap().hash, before: before.into() };
        self.change(root, |edit| {
            assert!(da::splice_node(geometry, edit, place..place + 1, &[entry]).unwrap());
        });
    }
}

#[test]
fn repair_and_the_kernel_agree_with_what_we_changed() {
    if !volume::has_tools() {
        return;
    }
    let seed = 0x5eed_0004;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    for options in [SHAPES[0], SHAPES[4], SHAPES[5]] {
        let volume = MadeVolume::make(options, &contents());
        let mut all = Vec::new();
        for folder in ["block", "leaf", "node"] {
            let &(_, count, len) = DIRECTORIES.iter().find(|entry| entry.0 == folder).unwrap();
            let mut names = names(count, len);
            let file = volume.file(&format!("/{folder}"));
            let blocks = volume.directory_blocks(&file);
            let mut directory = RenamedDirectory { geometry: &volume.geometry, blocks };
            for round in 0..400 {
                let index = numbers.below(names.len());
                let new = format!("{round:0width$}x", width = len - 1 - numbers.below(4));
                if directory.rename(&names[index], &new) {
                    names[index] = new;
                }
            }
            volume.write_blocks(&directory.blocks);
            names.sort();
            compare(&volume, &volume.file(&format!("/{folder}")), &names);
            all.push((folder, names));
        }
        volume.assert_clean();
        if options == SHAPES[0] {
            volume.mounted(|point| {
                for (folder, names) in &all {
                    let list = std::fs::read_dir(point.join(folder)).unwrap();
                    let list = list.map(|entry| entry.unwrap().file_name().into_string().unwrap());
                    let mut list: Vec<_> = list.collect();
                    list.sort();
                    assert_eq!(list, *names);
                    for name in names {
                        assert!(point.join(folder).join(name).exists());
                    }
                }
            });
            volume.assert_clean();
        }
    }
}
