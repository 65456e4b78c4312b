//! Regression tests for names, on volumes in memory.

use std::sync::Arc;

use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_vfs::{
    EntryPlace, Errno, FileId, FileSystem, FileSystemMut, NewFile, SetAttr, Timestamp,
};
use zerocopy::IntoBytes;

use crate::test_volumes::in_memory;
use crate::{BtrfsVolume, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

fn open() -> Filesystem {
    open_on(in_memory(16384))
}

fn open_on(device: Arc<CheckedDevice>) -> Filesystem {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("every volume has one")
}

fn place(dir: FileId, name: &str) -> EntryPlace<'_> {
    EntryPlace { dir, name: name.as_bytes() }
}

/// While a directory moved, a reader once saw it in both places or in none, and called that
/// corrupt.
#[test]
fn a_directory_that_moves_stands_somewhere() {
    let fs = open();
    let mkdir = |dir, name| fs.mkdir(place(dir, name), &NEW).expect("a directory");
    let ends = [mkdir(fs.root(), "first"), mkdir(fs.root(), "second")];
    let moved = mkdir(ends[0], "moved");
    std::thread::scope(|scope| {
        let fs = &fs;
        let renamer = scope.spawn(move || {
            for round in 0..4000 {
                let (from, to) = (ends[round % 2], ends[(round + 1) % 2]);
                fs.rename(place(from, "moved"), place(to, "moved"), AT).expect("nothing is there");
                if round % 100 == 0 {
                    fs.sync().expect("a commit");
                }
            }
        });
        while !renamer.is_finished() {
            let parent = fs.parent(moved).expect("it stands somewhere").expect("no root");
            assert!(ends.contains(&parent.dir) && parent.name == b"moved");
        }
    });
    let at = fs.parent(moved).expect("it stands somewhere").expect("no root").dir;
    fs.open(moved).expect("it is there");
    fs.rmdir(place(at, "moved"), AT).expect("it is empty");
    assert_eq!(fs.parent(moved).expect_err("it was removed").errno(), Errno::NOENT);
}

/// An inode that counted one name but had many was removed with the first of them, and its queued
/// names needed more than was reserved.
#[test]
fn a_file_that_counts_too_few_names_is_removed() {
    const NAMES: usize = 20;
    let device = in_memory(16384);
    device.leave_unchecked("the count of names is wrong, and some stay behind the file");
    let fs = open_on(device);
    let mkdir = |name: String| fs.mkdir(place(fs.root(), &name), &NEW).expect("a directory");
    let dirs: Vec<_> = (0..2 * NAMES).map(|number| mkdir(format!("{number}"))).collect();
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("there is room");
    for &dir in &dirs[..NAMES] {
        fs.link(file, place(dir, "file"), AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    let key = Key::new(file.ino, ItemType::INODE_ITEM, 0);
    let count_one = |data: Option<&[u8]>| {
        let mut item = *InodeItem::view(data.expect("it is there")).expect("an inode item");
        item.nlink = 1.into();
        Ok(item.as_bytes().to_vec())
    };
    let handle = fs.volume().join().expect("there is room");
    handle.change(TreeId::FS, |tree| tree.modify(key, 0, count_one)).expect("it is there");
    drop(handle);
    for (&from, &to) in dirs.iter().zip(&dirs[NAMES..]) {
        fs.rename(place(from, "file"), place(to, "file"), AT).expect("nothing is there");
    }
    fs.unlink(place(fs.root(), "file"), AT).expect("it is there");
    assert_eq!(fs.attr(file).expect_err("it is gone").errno(), Errno::NOENT);
    fs.sync().expect("a commit");
    fs.create(place(fs.root(), "later"), &NEW).expect("there is room");
}

/// A commit without write-back once stored the new owner of a file whose new length was only
/// buffered.
#[test]
fn a_length_is_not_behind_the_owner_that_is_set_with_it() {
    let memory = in_memory(16384);
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![memory.clone()], &options).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("every volume has one");
    for (name, size) in [("grown", 200_000), ("cut", 50_000)] {
        let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
        fs.sync().expect("a commit");
        fs.write(file, 0, &vec![7; 100_000], AT).expect("buffered");
        let set = SetAttr { size: Some(size), uid: Some(77), ..SetAttr::default() };
        fs.set_attr(file, &set, AT).expect("set");
        fs.volume().commit().expect("a commit");
        let stored = BtrfsVolume::open(vec![memory.clone()], &options).expect("it opens");
        let attr = stored.filesystem(TreeId::FS).expect("one").attr(file).expect("it is there");
        assert_eq!((attr.size, attr.uid), (size, 77), "{name}");
    }
}
