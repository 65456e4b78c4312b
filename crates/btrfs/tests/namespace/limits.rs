//! As far as the kernel goes, and no further.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use offshoot_testkit::disks::Disks;
use offshoot_testkit::{judges, names};
use offshoot_vfs::{Errno, FileSystem, FileSystemMut, Node, XattrMode};
use rustix::fs::{XattrFlags, setxattr};

use crate::common::{AT, NEW, check, judge, open_top, place};

const REGULAR: Node = Node { file_type: offshoot_vfs::FileType::Regular, rdev: (0, 0) };

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
