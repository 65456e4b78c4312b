//! Forms of attribute forks that a random test seldom meets.

use std::fs::File;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_xfs_format::attr::XattrFlags;
use offshoot_xfs_format::hash::name_hash;
use rustix::fs::{FallocateFlags, fallocate};

use super::super::fork::ChangedXattrs;
use super::super::tree::ROOT;
use super::{AttributedVolume, BLOCKS, FILES};
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::test_volumes::engine;
use crate::trans::{XfsTransactionKind as Kind, XfsTransactions};

fn trusted(name: &[u8], value: &[u8]) -> OwnedXattr {
    OwnedXattr { namespace: XattrFlags::TRUSTED, name: name.to_vec(), value: value.to_vec() }
}

fn index(name: &str) -> usize {
    FILES.iter().position(|file| *file == name).unwrap()
}

impl AttributedVolume {
    fn set(&mut self, engine: &XfsTransactions, index: usize, name: &[u8], value: &[u8]) {
        let shown = [b"trusted.", name].concat();
        self.files[index].xattrs.insert(shown, value.to_vec());
        let ino = self.files[index].ino;
        self.change(engine, XattrChange::set(ino, trusted(name, value)));
    }

    fn remove(&mut self, engine: &XfsTransactions, index: usize, name: &[u8]) {
        let shown = [b"trusted.", name].concat();
        self.files[index].xattrs.remove(&shown);
        let ino = self.files[index].ino;
        self.change(engine, XattrChange::remove(ino, trusted(name, b"")));
    }

    /// The level of the root of a file's tree of attributes.
    fn level(&self, engine: &XfsTransactions, index: usize) -> u16 {
        let mut t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
        let mut fork = ChangedXattrs::new(&mut t, self.files[index].ino);
        let block = fork.blocks.read(ROOT).unwrap();
        fork.blocks.node(&block).unwrap().map_or(0, |node| node.level)
    }

    fn fork_offset(&self, engine: &XfsTransactions, index: usize) -> u8 {
        let mut t = engine.begin(Kind::ChangeAttribute, 0).unwrap();
        t.inode(self.files[index].ino).unwrap().core().forkoff
    }
}

/// Sets these attributes in random order, and removes them again.
fn grow_and_shrink(names: &[Vec<u8>], least_level: u16) {
    let mut random = Random::new(seed_of_run());
    let Some(mut volume) = AttributedVolume::make("-b size=1024", 1) else { return };
    let engine = engine(&volume.disk);
    let many = index("many");
    let mut order: Vec<_> = names.iter().collect();
    order.sort_by_cached_key(|_| random.number());
    for name in &order {
        let len = 150 + usize::try_from(random.below(100)).unwrap();
        volume.set(&engine, many, name, &random.bytes(len));
    }
    assert!(volume.level(&engine, many) >= least_level);
    volume.assert_cut_recovers(&engine);
    order.sort_by_cached_key(|_| random.number());
    let kept = order.split_off(order.len() - 10);
    for name in order {
        volume.remove(&engine, many, name);
    }
    assert!(volume.level(&engine, many) <= 1);
    volume.assert_cut_recovers(&engine);
    for name in kept {
        volume.remove(&engine, many, name);
    }
    assert_eq!(volume.fork_offset(&engine, many), 0);
    volume.assert_unmounts(engine);
}

#[test]
fn a_tree_gets_levels_and_loses_them() {
    let names: Vec<_> = (0..700).map(|number| format!("number {number}").into_bytes()).collect();
    grow_and_shrink(&names, 2);
}

/// Names with one hash fill many leaves.
#[test]
fn names_with_one_hash_are_told_apart() {
    let name = |number: u32| -> Vec<u8> {
        // One more in the third byte of a word is as much as the high bit of the fourth.
        let pair = |bit: u32| if number >> bit & 1 == 0 { *b"ab\x62\x41" } else { *b"ab\x63\xc1" };
        (0..8).flat_map(pair).collect()
    };
    let names: Vec<_> = (0..200).map(name).collect();
    assert!(names.iter().all(|name| name_hash(name) == name_hash(&names[0])));
    grow_and_shrink(&names, 1);
}

/// A file without an attribute fork has more extents than fit beside one.
#[test]
fn a_file_that_fills_its_inode_gets_attributes() {
    let Some(mut volume) = AttributedVolume::make("", 1) else { return };
    let (short, full) = (index("plain"), index("many"));
    let first = engine(&volume.disk);
    for file in [short, full] {
        volume.set(&first, file, b"name", b"value");
        volume.remove(&first, file, b"name");
        assert_eq!(volume.fork_offset(&first, file), 0);
    }
    first.unmount().unwrap();
    let mount = volume.disk.mount("", &[]);
    for (name, pieces) in [("plain", 15), ("many", 21)] {
        let file = File::options().write(true).open(mount.path().join(name)).unwrap();
        for piece in 0..pieces {
            fallocate(&file, FallocateFlags::KEEP_SIZE, piece << 18, 4096).unwrap();
        }
    }
    drop(mount);
    let second = engine(&volume.disk);
    for (file, len) in [(short, 20), (full, 2000)] {
        volume.set(&second, file, b"name", &vec![5; len]);
        assert!(volume.fork_offset(&second, file) >= 24);
    }
    // Fifteen extents take 240 bytes, and leave 88 for attributes of 81.
    volume.set(&second, short, b"another", &[6; 40]);
    assert_eq!(volume.fork_offset(&second, short), 31);
    volume.set(&second, short, b"one more", &[6; 40]);
    volume.assert_cut_recovers(&second);
    volume.assert_unmounts(second);
}
