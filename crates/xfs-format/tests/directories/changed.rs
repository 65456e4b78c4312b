//! Directories that we changed, before the judges.

use offshoot_xfs_format::da::{self, DaEdit, DaExpected, DaKind, DaNode, DaNodeEntry};
use offshoot_xfs_format::dir::block::{self, DirBlock};
use offshoot_xfs_format::dir::data::{self, DirData};
use offshoot_xfs_format::dir::free;
use offshoot_xfs_format::dir::leaf::{self, DirHash, DirLeaf};
use offshoot_xfs_format::dir::{DirCookie, leaf_start};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::{FileBlock, Lsn, XfsGeometry};

use crate::volume;
use crate::volume::{MadeVolume, SeededNumbers, told};
use crate::{DIRECTORIES, SHAPES, compare, contents, entry, names};

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
    if !volume::has_judges() {
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
        volume.disk.assert_checks();
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
            volume.disk.assert_checks();
        }
    }
}
