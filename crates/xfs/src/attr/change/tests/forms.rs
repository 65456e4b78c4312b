//! Forms of attribute forks that a random test seldom meets.

use std::fs::File;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::Errno;
use offshoot_xfs_format::attr::XattrFlags;
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::log::items::XfsReverseOp;
use offshoot_xfs_format::record::{XfsExtent, XfsExtentItem};
use offshoot_xfs_format::{AgNumber, FileBlock, Ino};
use rustix::fs::{FallocateFlags, fallocate};

use super::super::fork::ChangedXattrs;
use super::super::tree::ROOT;
use super::{AttributedVolume, BLOCKS, FILES};
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::{IntentIds, change_xattr};
use crate::group::{self, ExtentWish, FreedFrom, ReverseOwner};
use crate::inode::change::map_extent;
use crate::test_volumes::engine;
use crate::trans::{AgExtent, ChangedFork, ForkName, XfsTransactionKind as Kind, XfsTransactions};

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
        let block = fork.blocks.copy(ROOT).unwrap();
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

/// Maps a block at `at` of a file. Returns how many children the root of the tree has then.
fn map_block(engine: &XfsTransactions, ino: Ino, at: u64) -> usize {
    let (ag, offset) = (AgNumber(0), FileBlock(at));
    let mut t = engine.begin(Kind::Write, 64).unwrap();
    let found = group::allocate(&mut t, ag, &ExtentWish::blocks(1)).unwrap().unwrap();
    let record = ReverseOwner::file(ino, ForkName::Data, offset, false).over(found);
    group::change_reverse(&mut t, ag, XfsReverseOp::Map, &record).unwrap();
    let start = engine.geometry().fs_block(ag, found.start);
    let extent = XfsExtent { offset, start, count: 1, is_unwritten: false };
    map_extent(&mut t, ino, ForkName::Data, &extent).unwrap();
    let children = match t.inode(ino).unwrap().fork(ForkName::Data) {
        Some(ChangedFork::Btree(root)) => root.children.len(),
        _ => 0,
    };
    t.commit().unwrap();
    children
}

/// A file without an attribute fork has a root of a tree that fills its inode: 20 children take 324
/// of 336 bytes, and beside attributes there is room for 18.
#[test]
fn a_file_whose_root_fills_its_inode_gets_attributes() {
    let Some(mut volume) = AttributedVolume::make("-b size=1024", 1) else { return };
    let engine = engine(&volume.disk);
    let (full, ino) = (index("many"), volume.files[index("many")].ino);
    volume.set(&engine, full, b"name", b"value");
    volume.remove(&engine, full, b"name");
    assert_eq!(volume.fork_offset(&engine, full), 0);
    assert!((0..1200).any(|number| map_block(&engine, ino, number * 2) == 20));
    volume.set(&engine, full, b"name", &[5; 100]);
    assert_eq!(volume.fork_offset(&engine, full), 24);
    volume.assert_cut_recovers(&engine);
    map_block(&engine, ino, 1 << 20);
    volume.remove(&engine, full, b"name");
    volume.set(&engine, full, b"another", &[6; 3000]);
    volume.assert_unmounts(engine);
}

/// The volume fills up when some blocks of a value are there.
#[test]
fn a_change_that_finds_no_space_in_the_middle_leaves_nothing() {
    let options = "-b size=1024 -m rmapbt=0";
    let Some(mut volume) = AttributedVolume::make(options, 1) else { return };
    let engine = engine(&volume.disk);
    let plain = index("plain");
    for old in [None, Some([7; 2000])] {
        if let Some(old) = old {
            volume.set(&engine, plain, b"name", &old);
        }
        let t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
        let mut taken = take_all(&engine);
        let mut filling = engine.begin(Kind::Write, 0).unwrap();
        let (ag, last) = taken.last_mut().unwrap();
        last.count -= 20;
        let rest = AgExtent::new(last.end(), 20);
        group::free_extent(&mut filling, *ag, rest, FreedFrom::Nobody).unwrap();
        filling.commit().unwrap();
        let ino = volume.files[plain].ino;
        let change = XattrChange::set(ino, trusted(b"name", &vec![8; 60_000]));
        let error = change_xattr(t, &volume.ids, change).unwrap_err();
        assert_eq!(error.errno(), Errno::NOSPC, "{error}");
        let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
        for (ag, extent) in taken {
            group::free_extent(&mut t, ag, extent, FreedFrom::Nobody).unwrap();
        }
        t.commit().unwrap();
        volume.assert_cut_recovers(&engine);
    }
    volume.assert_unmounts(engine);
}

/// Takes all blocks that files may have.
fn take_all(engine: &XfsTransactions) -> Vec<(AgNumber, AgExtent)> {
    let (mut t, mut taken) = (engine.begin(Kind::Write, 0).unwrap(), Vec::new());
    for ag in (0..engine.geometry().ag_count).map(AgNumber) {
        let wish = ExtentWish { least: 1, ..ExtentWish::blocks(1 << 20) };
        while let Some(extent) = group::allocate(&mut t, ag, &wish).unwrap() {
            taken.push((ag, extent));
        }
    }
    t.commit().unwrap();
    taken
}

/// The fork has nine extents, for which the inode has room, and the last is that of three values.
/// The middle one is replaced by one beside its name: then its block goes, and the tree of ten
/// extents would need one that no group has.
#[test]
fn a_value_that_readers_find_is_a_success_on_a_full_volume() {
    let options = "-b size=1024 -m rmapbt=0";
    let Some(mut volume) = AttributedVolume::make(options, 1) else { return };
    let engine = engine(&volume.disk);
    let [plain, other] = ["plain", "directory"].map(index);
    let ino = volume.files[plain].ino;
    let extents = |engine: &XfsTransactions| {
        let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
        let inode = t.inode(ino).unwrap();
        let fork = inode.fork(ForkName::Attributes).cloned();
        let room = inode.room(ForkName::Attributes, engine.geometry()).unwrap();
        let Some(ChangedFork::Extents(items)) = fork else { panic!("{fork:?}") };
        (items, room / size_of::<XfsExtentItem>())
    };
    let mut number = 0;
    let mut value = |volume: &mut AttributedVolume, file| {
        number += 1;
        volume.set(&engine, file, format!("value {number}").as_bytes(), &[7; 900]);
        number
    };
    value(&mut volume, plain);
    loop {
        value(&mut volume, other);
        let (items, most) = extents(&engine);
        if items.len() + 1 == most {
            break;
        }
        value(&mut volume, plain);
    }
    let numbers = [0; 3].map(|_| value(&mut volume, plain));
    let (items, most) = extents(&engine);
    let last = items.last().unwrap().get();
    assert!(items.len() == most && last.count == 3, "{last:?} of {}", items.len());
    let name = format!("value {}", numbers[1]);
    let t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
    let taken = take_all(&engine);
    let change = XattrChange::set(ino, trusted(name.as_bytes(), b"short"));
    change_xattr(t, &volume.ids, change).unwrap();
    volume.files[plain].xattrs.insert(format!("trusted.{name}").into(), b"short".to_vec());
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    for (ag, extent) in taken {
        group::free_extent(&mut t, ag, extent, FreedFrom::Nobody).unwrap();
    }
    t.commit().unwrap();
    engine.log().force_all().unwrap();
    volume.assert_kernel_finds(volume.disk.copy().mount("nouuid", &[RECOVERY]).path());
    // The old entry is there still, incomplete. It goes now.
    volume.set(&engine, plain, name.as_bytes(), &[8; 900]);
    volume.assert_unmounts(engine);
}

/// The kernel sets the bit of attributes in the superblock with the first attribute.
#[test]
fn the_superblock_says_that_there_are_attributes() {
    let Some(judges) = judges::require() else { return };
    let version = |disk: &XfsDisk| disk.xfs_db(&["version"]);
    let root = |disk: &XfsDisk| Ino(disk.field(&["sb 0"], "rootino"));
    let disk = XfsDisk::create(&judges, 512);
    disk.mkfs("");
    let theirs = disk.copy();
    assert!(!version(&disk).contains("ATTR,"), "{}", version(&disk));
    let engine = engine(&disk);
    let set = XattrChange::set(root(&disk), trusted(b"name", b"value"));
    let t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
    change_xattr(t, &IntentIds::default(), set).unwrap();
    engine.log().force_all().unwrap();
    let cut = disk.copy();
    drop(cut.mount("nouuid", &[RECOVERY]));
    engine.unmount().unwrap();
    let mount = theirs.mount("nouuid", &[]);
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(mount.path(), "trusted.name", b"value", flags).unwrap();
    drop(mount);
    for ours in [disk, cut] {
        assert_eq!(version(&ours), version(&theirs));
        assert!(version(&ours).contains("ATTR,"), "{}", version(&ours));
        ours.assert_checks();
    }
}
