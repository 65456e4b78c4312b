//! The trees of a volume of `mkfs.xfs`: the blocks of a file move about its group, which splits and
//! joins blocks of both trees of free space, of the reverse map and of the extents of the file.

mod group;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::AgBlock;

use self::group::JudgedGroup;

/// The blocks of the file, every other of which is a hole at first.
const FILE_BLOCKS: u64 = 20_000;

/// Fills the file `f`, so that every extent is one block. Returns its inode.
fn make_file(disk: &XfsDisk) -> u64 {
    let mount = disk.mount("", &[]);
    let path = mount.path().join("f");
    let file = File::create(&path).unwrap();
    file.set_len(FILE_BLOCKS * 1024).unwrap();
    for block in (0..FILE_BLOCKS).step_by(2) {
        file.write_all_at(&[b'f'; 1024], block * 1024).unwrap();
    }
    file.sync_all().unwrap();
    XfsDisk::ino(&path)
}

/// Moves, adds and removes blocks of the file.
fn change(group: &mut JudgedGroup, random: &mut Random, steps: u64) {
    for _ in 0..steps {
        let at = random.below(FILE_BLOCKS);
        let old = group.file.get(&at).copied();
        match old {
            Some(_) if random.below(2) == 0 => group.unmap(at),
            Some(old) => {
                let new = group.take_any(at, random);
                group.remap(at, old, new);
            }
            None => {
                let new = group.take_any(at, random);
                group.map(at, new);
            }
        }
    }
}

#[test]
fn xfs_repair_and_the_kernel_find_changed_trees_clean() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let disk = XfsDisk::create(&judges, 320);
    disk.mkfs("-b size=1024");
    let ino = make_file(&disk);
    let mut group = JudgedGroup::open(disk.writable_device(), ino);
    assert!(group.file.len() > 9_900, "{} extents of one block", group.file.len());
    change(&mut group, &mut random, 20_000);
    group.write_back();
    disk.assert_checks();
    eprintln!("{:?}, {:?}", group.levels(), group.counted);
    assert!(group.levels().into_iter().all(|levels| levels >= 3), "{:?}", group.levels());

    let model: BTreeMap<u64, AgBlock> = group.file.clone();
    for at in model.keys().rev().skip(100) {
        group.unmap(*at);
    }
    group.write_back();
    disk.assert_checks();
    eprintln!("{:?}, {:?}", group.levels(), group.counted);
    for (tree, (allocated, freed)) in &group.counted {
        assert!(*allocated > 10 && *freed > 10, "{tree:?}: {allocated}, {freed}");
    }

    // The kernel takes the records out again, one by one.
    let mount = disk.mount("", &[]);
    let path = mount.path().join("f");
    assert_eq!(std::fs::read(&path).unwrap().len() as u64, FILE_BLOCKS * 1024);
    std::fs::remove_file(path).unwrap();
    drop(mount);
    disk.assert_checks();
}
