//! Limits: as far as the kernel goes, and no further.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::names;
use offshoot_testkit::random::Random;
use offshoot_vfs::{Errno, FileSystem, FileSystemMut, NewNode, SetAttr, XattrMode};
use rustix::fs::{XattrFlags, setxattr};

use crate::common::{AT, NEW, at, check, judge, open_read_only, open_top, place};

const REGULAR: NewNode = NewNode { file_type: offshoot_vfs::FileType::Regular, rdev: (0, 0) };

#[test]
fn colliding_names_fill_an_item() {
    let Some(judges) = judges::require() else { return };
    for node_size in ["4k", "16k"] {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(&["-n", node_size]);
        let fs = open_top(&disks);
        let names = names::colliding(b"same-", 200, 80);
        let made = names
            .iter()
            .take_while(|name| fs.mknod(place(fs.root(), name), REGULAR, &NEW).is_ok())
            .count();
        assert!(made < names.len(), "an item has no end");
        let one_more = fs.mknod(place(fs.root(), &names[made]), REGULAR, &NEW);
        assert_eq!(one_more.expect_err("it is full").errno(), Errno::OVERFLOW);
        fs.sync().expect("a commit");
        drop(fs);
        judge(&disks, made as u64);
        let mount = disks.mount("rw,noatime");
        let path = |i: usize| mount.path().join(OsStr::from_bytes(&names[i]));
        let error = std::fs::File::create(path(made)).expect_err("it is full for the kernel too");
        assert_eq!(error.raw_os_error(), Some(Errno::OVERFLOW.raw_os_error()));
        std::fs::remove_file(path(0)).expect("it is there");
        std::fs::File::create(path(made)).expect("there is room again");
        drop(mount);
        let fs = open_top(&disks);
        for name in &names[1..=made] {
            fs.unlink(place(fs.root(), name), AT).expect("it is there");
        }
        fs.sync().expect("a commit");
        drop(fs);
        judge(&disks, 1);
    }
}

/// A directory that was made since the volume was opened can answer from memory that a name is not
/// there. It must never say that of a name that is there, by whichever call it came. After a
/// removal, the name can be made again.
#[test]
fn a_new_directory_knows_its_names() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let dir = fs.mkdir(place(fs.root(), "new"), &NEW).expect("a directory");
    let is_there = |name: &[u8]| {
        let again = fs.create(place(dir, name), &NEW);
        assert_eq!(again.expect_err("it is there").errno(), Errno::EXIST);
    };
    let names = names::colliding(b"same-", 20, 12);
    for name in &names {
        fs.create(place(dir, name), &NEW).expect("a new name");
        is_there(name);
    }
    fs.unlink(place(dir, &names[3]), AT).expect("it is there");
    fs.create(place(dir, &names[3]), &NEW).expect("it is not there any more");
    is_there(&names[3]);
    fs.rename(place(dir, &names[5]), place(dir, "moved"), AT).expect("a new name");
    let file = fs.create(place(dir, &names[5]), &NEW).expect("it is not there any more");
    fs.link(file, place(dir, "linked"), AT).expect("a new name");
    fs.mkdir(place(dir, "below"), &NEW).expect("a directory");
    fs.symlink(place(dir, "link"), b"target", &NEW).expect("a link");
    for name in [&names[5][..], b"moved", b"linked", b"below", b"link"] {
        is_there(name);
    }
    fs.sync().expect("a commit");
    drop(fs);
    let fs = open_top(&disks);
    assert_eq!(fs.create(place(dir, "moved"), &NEW).expect_err("there").errno(), Errno::EXIST);
    drop(fs);
    check(&disks);
}

/// Files that are made in two directories by turns: each directory has its own groups of inode
/// numbers.
#[test]
fn files_of_a_directory_have_adjacent_numbers() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let dirs = ["one", "other"].map(|name| fs.mkdir(place(fs.root(), name), &NEW).expect("one"));
    let mut groups = [BTreeSet::new(), BTreeSet::new()];
    for number in 0..640 {
        for (dir, groups) in dirs.iter().zip(&mut groups) {
            let file = fs.create(place(*dir, &number.to_string()), &NEW).expect("a file");
            groups.insert(file.ino / 64);
        }
    }
    let [one, other] = groups;
    assert!(one.is_disjoint(&other), "{one:?} and {other:?}");
    assert!(one.len() <= 11 && other.len() <= 11, "{one:?} and {other:?}");
}

#[test]
fn a_file_has_65535_names() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let root = fs.root();
    let file = fs.create(place(root, "0"), &NEW).expect("a file");
    for number in 1..65_535 {
        fs.link(file, place(root, &number.to_string()), AT).expect("one more name");
    }
    let refused = fs.link(file, place(root, "more"), AT).expect_err("it has all names it can have");
    assert_eq!(refused.errno(), Errno::MLINK);
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 65_535);
    let fs = open_top(&disks);
    for number in (0..65_535).rev() {
        fs.unlink(place(root, &number.to_string()), AT).expect("it is there");
    }
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 1);
}

#[test]
fn names_without_extended_references() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&["-O", "^extref"]);
    let fs = open_top(&disks);
    let root = fs.root();
    let name = |i: usize| format!("{i:0200}");
    let file = fs.create(place(root, "file"), &NEW).expect("a file");
    let made = (0..1000).take_while(|&i| fs.link(file, place(root, &name(i)), AT).is_ok()).count();
    let refused = fs.link(file, place(root, &name(made)), AT).expect_err("the item is full");
    assert_eq!(refused.errno(), Errno::MLINK);
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, made as u64);
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    let error = std::fs::hard_link(path("file"), path(&name(made))).expect_err("it is full");
    assert_eq!(error.raw_os_error(), Some(Errno::MLINK.raw_os_error()));
}

#[test]
fn the_longest_attribute_and_target() {
    let Some(judges) = judges::require() else { return };
    for node_size in ["4k", "16k"] {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(&["-n", node_size]);
        let fs = open_top(&disks);
        let root = fs.root();
        let file = fs.create(place(root, "file"), &NEW).expect("a file");
        let set =
            |len: usize| fs.set_xattr(file, b"user.long", &vec![b'x'; len], XattrMode::Set, AT);
        let longest = (1..20_000).rev().find(|&len| set(len).is_ok()).expect("some fits");
        assert_eq!(set(longest + 1).expect_err("too long").errno(), Errno::NOSPC);
        // This panicked: the longest attribute that a system call can set has a length of 17 bits.
        assert_eq!(set(65_536).expect_err("too long").errno(), Errno::NOSPC);
        let link = |len: usize| fs.symlink(place(root, "link"), &vec![b'x'; len], &NEW);
        let target = (1..5000).rev().find(|&len| link(len).is_ok()).expect("some fits");
        fs.sync().expect("a commit");
        drop(fs);
        judge(&disks, 3);
        let mount = disks.mount("rw,noatime");
        let path = mount.path().join("file");
        let kernel =
            |len: usize| setxattr(&path, "user.long", &vec![b'y'; len], XattrFlags::empty());
        kernel(longest).expect("as long as ours");
        kernel(longest + 1).expect_err("longer than ours");
        let kernel = |name: &str, len: usize| {
            std::os::unix::fs::symlink("x".repeat(len), mount.path().join(name))
        };
        kernel("link of the kernel", target).expect("as long as ours");
        kernel("longer", target + 1).expect_err("longer than ours");
        drop(mount);
        check(&disks);
    }
}

/// A file of the largest size, with data up to its last byte.
#[test]
fn the_largest_file_has_data_at_its_end() {
    const LARGEST: u64 = i64::MAX.cast_unsigned();
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let data = Random::new(4).bytes(9000);
    let begin = LARGEST - data.len() as u64;
    let fs = open_top(&disks);
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    fs.write(file, begin, &data, AT).expect("there is room");
    let refused = fs.write(file, LARGEST, b"x", AT).expect_err("no file is larger");
    assert_eq!(refused.errno(), Errno::FBIG);
    fs.sync().expect("a commit");
    fs.write(file, begin + 5000, &data[..1000], AT).expect("there is room");
    fs.sync().expect("a commit");
    drop(fs);
    let expected = [&data[..5000], &data[..1000], &data[6000..]].concat();
    check(&disks);
    let mount = disks.mount("ro,noatime");
    // The kernel reports the hole behind the last byte one byte later than we do.
    let compare = Compare::default().without(Aspect::Holes);
    compare.run(&open_read_only(&disks), mount.path()).assert_same(1);
    drop(mount);
    let mount = disks.mount("rw,noatime");
    let open = || File::options().read(true).write(true).open(mount.path().join("file"));
    let file = open().expect("it opens");
    assert_eq!(file.metadata().expect("it is there").len(), LARGEST);
    let mut found = vec![0; data.len()];
    file.read_exact_at(&mut found, begin).expect("it reads");
    assert!(found == expected, "the kernel reads other bytes");
    // The kernel writes there again, and then we do.
    file.write_all_at(&data[..100], LARGEST - 100).expect("it writes");
    drop((file, mount));
    check(&disks);
    let fs = open_top(&disks);
    let file = at(&fs, "file");
    let mut last = [0; 100];
    assert_eq!(fs.read(file, LARGEST - 100, &mut last).expect("it reads"), 100);
    assert_eq!(last, data[..100]);
    let set = SetAttr { size: Some(begin + 1), ..SetAttr::default() };
    fs.set_attr(file, &set, AT).expect("it is cut");
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 1);
}
