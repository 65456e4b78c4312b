//! Impossible calls on subvolumes fail as they do in the kernel, and change nothing.

use offshoot_btrfs::SubvolumeId;
use offshoot_vfs::{
    Errno, FileFlags, FileId, FileSystem, FileSystemMut, NewFile, Rename, Result, XattrMode,
};

use crate::common::{AT, NEW, at, fresh, judge, place};

#[track_caller]
fn refused<T>(result: Result<T>, errno: Errno) {
    let error = result.err().expect("it is refused");
    assert_eq!(error.errno(), errno, "{error}");
}

#[test]
fn what_cannot_be_done() {
    let Some((disks, volume, fs)) = fresh(&[]) else { return };
    let root = fs.root();
    fs.create(place(root, "file"), &NEW).expect("a file");
    let outer = fs.create_subvolume(place(root, "outer"), &NEW).expect("a subvolume");
    let outer_root = at(&fs, "outer");
    let inner = fs.create_subvolume(place(outer_root, "inner"), &NEW).expect("a subvolume");
    fs.create(place(outer_root, "in it"), &NEW).expect("a file");
    let fixed = fs.snapshot(outer, place(root, "fixed"), true, AT).expect("a snapshot");
    let fixed_root = at(&fs, "fixed");

    let create = |dir, name: &str| fs.create_subvolume(place(dir, name), &NEW).map(drop);
    let snapshot = |of, dir, name: &str| fs.snapshot(of, place(dir, name), false, AT).map(drop);
    let delete = |dir, name: &str| fs.delete_subvolume(place(dir, name), AT);
    for make in [&create as &dyn Fn(_, &str) -> Result<()>, &|dir, name| snapshot(outer, dir, name)]
    {
        refused(make(root, "file"), Errno::EXIST);
        refused(make(root, "outer"), Errno::EXIST);
        refused(make(root, "."), Errno::EXIST);
        refused(make(root, "a/b"), Errno::INVAL);
        refused(make(root, &"n".repeat(256)), Errno::NAMETOOLONG);
        refused(make(at(&fs, "file"), "x"), Errno::NOTDIR);
        refused(make(fixed_root, "x"), Errno::ROFS);
        refused(make(at(&fs, "fixed/inner"), "x"), Errno::PERM);
    }
    for none in [2, 9, 255, 99_999] {
        refused(snapshot(SubvolumeId { 0: none }, root, "x"), Errno::NOENT);
        refused(volume.set_default_subvolume(SubvolumeId { 0: none }), Errno::NOENT);
        refused(volume.set_read_only(SubvolumeId { 0: none }, true, AT), Errno::NOENT);
    }
    refused(delete(root, "file"), Errno::INVAL);
    refused(delete(root, "nothing"), Errno::NOENT);
    refused(delete(root, "outer"), Errno::NOTEMPTY);
    refused(delete(fixed_root, "inner"), Errno::ROFS);
    refused(fs.rmdir(place(root, "outer"), AT), Errno::NOTEMPTY);
    refused(fs.unlink(place(root, "outer"), AT), Errno::ISDIR);
    volume.set_default_subvolume(fixed).expect("it is there");
    refused(delete(root, "fixed"), Errno::PERM);
    volume.set_default_subvolume(SubvolumeId::FS).expect("it is there");

    let rename = |from, old: &str, to, new: &str| fs.rename(place(from, old), place(to, new), AT);
    refused(rename(root, "outer", at(&fs, "outer/inner"), "x"), Errno::INVAL);
    refused(rename(root, "outer", outer_root, "x"), Errno::INVAL);
    refused(rename(root, "file", outer_root, "x"), Errno::XDEV);
    refused(rename(root, "outer", fixed_root, "x"), Errno::ROFS);
    refused(rename(root, "outer", root, "file"), Errno::NOTDIR);
    let full = fs.mkdir(place(root, "full"), &NEW).expect("a directory");
    fs.mkdir(place(full, "deep"), &NEW).expect("a directory");
    refused(rename(root, "outer", root, "full"), Errno::NOTEMPTY);
    refused(rename(root, "outer", root, "fixed"), Errno::NOTEMPTY);
    refused(rename(root, "full", root, "fixed"), Errno::NOTEMPTY);
    refused(rename(root, "file", root, "fixed"), Errno::ISDIR);
    let exchange = |from, old: &str, to, new: &str| {
        fs.rename_with(place(from, old), place(to, new), Rename::Exchange, AT)
    };
    for [one, other] in [[0, 1], [1, 0]] {
        let refused = |places: [(FileId, &str); 2], errno| {
            let [(from, old), (to, new)] = [places[one], places[other]];
            refused(exchange(from, old, to, new), errno);
        };
        refused([(root, "file"), (outer_root, "in it")], Errno::XDEV);
        refused([(root, "file"), (outer_root, "inner")], Errno::XDEV);
        refused([(root, "outer"), (outer_root, "inner")], Errno::INVAL);
        refused([(root, "full"), (full, "deep")], Errno::INVAL);
        refused([(full, "deep"), (root, "fixed")], Errno::ROFS);
        refused([(root, "outer"), (root, "nothing")], Errno::NOENT);
    }
    rename(root, "outer", root, "outer").expect("it is where it was");
    fs.sync().expect("a commit");
    assert_eq!(volume.subvolume(inner).expect("it is there").parent, Some(outer));
    drop((fs, volume));
    judge(&disks, 6);
}

/// Files of a deleted subvolume that no caller has open are gone at once, with what was buffered of
/// them.
#[test]
fn nobody_finds_a_deleted_one() {
    let Some((disks, volume, fs)) = fresh(&[]) else { return };
    let root = fs.root();
    let id = fs.create_subvolume(place(root, "gone"), &NEW).expect("a subvolume");
    let within = volume.filesystem(id).expect("it is there");
    let dir = within.root();
    let file = fs.create(place(dir, "file"), &NEW).expect("a file");
    fs.write(file, 0, &vec![1; 100_000], AT).expect("there is room");
    fs.delete_subvolume(place(root, "gone"), AT).expect("it is there");
    refused(fs.lookup(root, b"gone"), Errno::NOENT);
    for dropped in [false, true] {
        refused(fs.attr(file), Errno::NOENT);
        refused(fs.open(file), Errno::NOENT);
        refused(fs.read(file, 0, &mut [0; 10]), Errno::NOENT);
        refused(fs.write(file, 0, &[1; 10], AT), Errno::NOENT);
        refused(fs.create(place(dir, "late"), &NEW), Errno::NOENT);
        refused(fs.unlink(place(dir, "file"), AT), Errno::NOENT);
        refused(fs.lookup(dir, b"file"), Errno::NOENT);
        refused(fs.create_subvolume(place(dir, "late"), &NEW), Errno::NOENT);
        refused(fs.snapshot(id, place(root, "late"), true, AT), Errno::NOENT);
        refused(volume.filesystem(id), Errno::NOENT);
        fs.sync().expect("nothing of it is left to be written");
        if !dropped {
            volume.drop_deleted().expect("everything reads");
        }
    }
    let next = fs.create_subvolume(place(root, "next"), &NEW).expect("a subvolume");
    assert!(next > id, "the number {id} is used again while the kernel may remember it");
    fs.sync().expect("a commit");
    drop((fs, within, volume));
    judge(&disks, 2);
}

/// A subvolume cannot move if flags of its root directory forbid it. A read-only one cannot leave
/// its directory.
#[test]
fn some_stay_where_they_are() {
    let Some((disks, volume, fs)) = fresh(&[]) else { return };
    let root = fs.root();
    let dir = fs.mkdir(place(root, "dir"), &NEW).expect("a directory");
    let id = fs.create_subvolume(place(root, "one"), &NEW).expect("a subvolume");
    let rename = |from, old: &str, to, new: &str| fs.rename(place(from, old), place(to, new), AT);
    for flags in [FileFlags::IMMUTABLE, FileFlags::APPEND] {
        fs.set_flags(at(&fs, "one"), flags, AT).expect("it is a directory");
        refused(fs.delete_subvolume(place(root, "one"), AT), Errno::PERM);
        refused(fs.rmdir(place(root, "one"), AT), Errno::PERM);
        refused(rename(root, "one", root, "two"), Errno::PERM);
    }
    fs.set_flags(at(&fs, "one"), FileFlags::empty(), AT).expect("it is a directory");
    volume.set_read_only(id, true, AT).expect("it is there");
    refused(rename(root, "one", dir, "one"), Errno::ROFS);
    rename(root, "one", root, "two").expect("it stays in its directory");
    fs.delete_subvolume(place(root, "two"), AT).expect("it is there");
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 2);
}

/// Regression: the inherited access control lists of a new subvolume had to fit into its first
/// leaf, all together.
#[test]
fn a_new_subvolume_inherits_long_lists() {
    let Some((disks, volume, fs)) = fresh(&["-n", "4k"]) else { return };
    let entry = |tag: u16, id: u32| {
        [&tag.to_le_bytes()[..], &7u16.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let none = u32::MAX;
    let users = (1000..1400).map(|id| entry(2, id));
    let list = [2u32.to_le_bytes().to_vec(), entry(1, none)]
        .into_iter()
        .chain(users)
        .chain([entry(4, none), entry(16, none), entry(32, none)])
        .collect::<Vec<_>>()
        .concat();
    let name = b"system.posix_acl_default";
    fs.set_xattr(fs.root(), name, &list, XattrMode::Set, AT).expect("it fits");
    let new = NewFile { umask: Some(0o22), ..NEW };
    fs.create_subvolume(place(fs.root(), "with lists"), &new).expect("a subvolume");
    let root = at(&fs, "with lists");
    assert_eq!(fs.xattr(root, name).expect("it is inherited"), list);
    fs.create(place(root, "file"), &NEW).expect("a file");
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 3);
}
