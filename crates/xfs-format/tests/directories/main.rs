//! Directories as mkfs and the kernel write them, and damage to them.
//!
//! | module | what it holds |
//! |---|---|
//! | `inodes`, `blocks`, `leaves` | the forms of a directory, and the ways from one to the next |
//! | `read`, `changed` | directories of mkfs and the kernel that we read; ours, which they read |
//! | `damaged` | damage to all kinds of blocks |

mod blocks;
#[path = "../bodies/mod.rs"]
mod bodies;
mod changed;
mod damaged;
mod inodes;
mod leaves;
mod read;
#[path = "../volume/mod.rs"]
mod volume;

use std::collections::BTreeMap;
use std::fmt::Write;

use offshoot_xfs_format::da::{DaExpected, DaKind, DaNode};
use offshoot_xfs_format::dir::block::DirBlock;
use offshoot_xfs_format::dir::data::DirData;
use offshoot_xfs_format::dir::free::DirFree;
use offshoot_xfs_format::dir::leaf::{self, DirLeaf};
use offshoot_xfs_format::dir::short::ShortDir;
use offshoot_xfs_format::dir::{DirCookie, XfsDirEntry, file_type, leaf_start};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino, Lsn, XfsGeometry};

use bodies::names::walk;
use volume::{FileBytes, MadeVolume};

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

fn entry(name: &[u8], ino: u64) -> XfsDirEntry<'_> {
    XfsDirEntry { offset: 0, ino: Ino(ino), name, file_type: file_type::REG_FILE }
}

/// The features of a plain V5 volume.
const V5: XfsLayout = XfsLayout::CHECKSUMS.union(XfsLayout::FILE_TYPES);

const EXPECTED: DaExpected = DaExpected {
    place: BasicBlock(800),
    owner: Some(Ino(128)),
    block: Some(FileBlock(0)),
    is_sealed: true,
};
