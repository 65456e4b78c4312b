//! We remove files that the kernel made: everything that belongs to them goes, and nothing else.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs::SubvolumeInfo;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::compare::compare;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_vfs::{Errno, FileId, FileSystem, FileSystemMut, FileType, XattrMode};

use crate::common::{AT, NEW, at, check, judge, open, open_read_only, open_top, place};

/// A file of many extents: every second block is written, each by itself.
fn fragmented(path: &Path, blocks: u64) {
    let file = File::create(path).expect("a file");
    for block in 0..blocks {
        file.write_all_at(&[1; 4096], block * 8192).expect("a block");
        if block % 64 == 63 {
            file.sync_data().expect("written");
        }
    }
}

fn items(fs: &Filesystem, tree: TreeId, is_wanted: impl Fn(Key) -> bool) -> u64 {
    let volume = fs.volume();
    let root = volume.tree(tree).expect("the tree is there");
    let mut count = 0;
    volume
        .for_each_item(root, Key::MIN, |key, _| {
            count += u64::from(is_wanted(key));
            ControlFlow::Continue(())
        })
        .expect("the tree is sound");
    count
}

fn checksum_items(fs: &Filesystem) -> u64 {
    items(fs, TreeId::CSUM, |key| key.item_type == ItemType::EXTENT_CSUM)
}

/// Removes everything below `dir`.
fn remove_below(fs: &Filesystem, dir: FileId) {
    let mut entries = Vec::new();
    fs.read_dir(dir, 0, &mut |entry| {
        entries.push((entry.name.to_vec(), entry.file, entry.file_type));
        ControlFlow::Continue(())
    })
    .expect("the directory reads");
    for (name, file, file_type) in entries {
        if file.dev != dir.dev {
            continue;
        }
        if file_type == FileType::Directory {
            remove_below(fs, file);
            match fs.rmdir(place(dir, &name), AT).map_err(|error| error.errno()) {
                // The directory holds a nested subvolume, or is the place of a subvolume that a
                // snapshot did not take.
                Ok(()) | Err(Errno::NOTEMPTY | Errno::OPNOTSUPP) => {}
                Err(errno) => panic!("{}: {errno}", name.escape_ascii()),
            }
        } else {
            fs.unlink(place(dir, &name), AT).expect("it is there");
        }
    }
}

#[test]
fn data_goes_with_its_last_name() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&["-n", "4k"]);
    let mount = disks.mount("rw,noatime,compress=zstd");
    let path = |name: &str| mount.path().join(name);
    let mut random = Random::new(2);
    std::fs::write(path("plain"), random.bytes(3 << 20)).expect("a file");
    std::fs::write(path("compressed"), random.text(1 << 20)).expect("a file");
    std::fs::write(path("inline"), b"a few bytes").expect("a file");
    std::fs::hard_link(path("plain"), path("second")).expect("a link");
    run("cp", &["--reflink=always".as_ref(), path("plain").as_os_str(), path("clone").as_os_str()]);
    run("fallocate", &["-l".as_ref(), "1M".as_ref(), path("allocated").as_os_str()]);
    fragmented(&path("fragmented"), 500);
    mount.sync();
    drop(mount);
    let fs = open_top(&disks);
    let root = fs.root();
    let before = open_read_only(&disks).statfs().expect("sizes").used_bytes;
    assert!(checksum_items(&fs) > 0, "the kernel made checksums");
    for name in ["plain", "compressed", "inline", "fragmented", "allocated"] {
        fs.unlink(place(root, name), AT).expect("it is there");
    }
    fs.sync().expect("a commit");
    check(&disks);
    judge(&disks, 2);
    for name in ["second", "clone"] {
        fs.unlink(place(root, name), AT).expect("it is there");
    }
    fs.sync().expect("a commit");
    assert_eq!(checksum_items(&fs), 0, "checksums of data that is gone");
    drop(fs);
    judge(&disks, 1);
    let after = open_read_only(&disks).statfs().expect("sizes").used_bytes;
    assert!(before - after > 5 << 20, "{before} bytes in use before, {after} after");
}

#[test]
fn everything_the_kernel_makes_can_be_removed() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime");
    fill::everything(mount.path());
    mount.sync();
    drop(mount);
    let fs = open_top(&disks);
    remove_below(&fs, fs.root());
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 1);
}

#[test]
fn an_open_file_outlives_its_name_and_an_orphan_does_not_outlive_a_crash() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&["-n", "4k"]);
    let mount = disks.mount("rw,noatime");
    fragmented(&mount.path().join("large"), 700);
    fragmented(&mount.path().join("released"), 300);
    std::fs::create_dir(mount.path().join("dir")).expect("a directory");
    mount.sync();
    drop(mount);
    let fs = open_top(&disks);
    let root = fs.root();
    let files = ["large", "released", "dir"].map(|name| at(&fs, name));
    for file in files {
        fs.open(file).expect("it is there");
    }
    fs.unlink(place(root, "large"), AT).expect("it is there");
    fs.unlink(place(root, "released"), AT).expect("it is there");
    fs.rmdir(place(root, "dir"), AT).expect("it is empty");
    for file in files {
        assert_eq!(fs.attr(file).expect("it is open").nlink, 0);
    }
    let inside = fs.create(place(files[2], "x"), &NEW).expect_err("the directory is gone");
    assert_eq!(inside.errno(), Errno::NOENT);
    fs.set_xattr(files[0], b"user.late", b"v", XattrMode::Set, AT).expect("it is open");
    fs.release(files[1]).expect("it was open");
    assert_eq!(fs.attr(files[1]).expect_err("it is gone").errno(), Errno::NOENT);
    fs.sync().expect("a commit");
    drop(fs);
    // A crash leaves two inodes without names.
    check(&disks);
    let orphan = |key: Key| key.item_type == ItemType::ORPHAN_ITEM;
    assert_eq!(items(&open_read_only(&disks), TreeId::FS, orphan), 2);
    let copy = disks.copy(&judges);
    drop(copy.mount("rw,noatime"));
    let fs = open_top(&disks);
    fs.sync().expect("a commit");
    assert_eq!(items(&fs, TreeId::FS, orphan), 0);
    assert_eq!(items(&fs, TreeId::FS, |key| key.objectid == files[0].ino), 0);
    assert_eq!(checksum_items(&fs), 0, "checksums of data that is gone");
    drop(fs);
    judge(&disks, 1);
}

/// Changes a subvolume that shares its blocks with its snapshots, and changes one of the snapshots.
fn snapshots(mkfs: &[&str]) {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 768);
    disks.mkfs(mkfs);
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    let snapshot = |options: &[&str], from: &str, to: &str| {
        let mut args: Vec<std::ffi::OsString> = vec!["subvolume".into(), "snapshot".into()];
        args.extend(options.iter().map(Into::into));
        args.extend([path(from).into(), path(to).into()]);
        run("btrfs", &args);
    };
    run("btrfs", &["subvolume".as_ref(), "create".as_ref(), path("source").as_os_str()]);
    fill::everything(&path("source"));
    fragmented(&path("source/fragmented"), 400);
    mount.sync();
    snapshot(&["-r"], "source", "first");
    std::fs::write(path("source/later"), vec![7; 200_000]).expect("a file");
    snapshot(&[], "source", "second");
    snapshot(&[], "second", "third");
    drop(mount);
    let reference = disks.copy(&judges);
    let volume = open(&disks);
    let subvolume = |path: &str| {
        let all = volume.subvolumes().collect::<Result<Vec<_>, _>>().expect("the list");
        let is_it = |one: &&SubvolumeInfo| one.path.as_ref().is_ok_and(|at| *at == path.as_bytes());
        let found = all.iter().find(is_it).expect("it was made");
        volume.filesystem(found.id).expect("it opens")
    };
    let (source, first, second, third) =
        (subvolume("source"), subvolume("first"), subvolume("second"), subvolume("third"));
    let refused = first.create(place(first.root(), "x"), &NEW).expect_err("it is read-only");
    assert_eq!(refused.errno(), Errno::ROFS);
    // First a few changes, so that most blocks stay shared; then everything.
    let change = |fs: &Filesystem| {
        fs.unlink(place(fs.root(), "later"), AT).expect("it is there");
        fs.unlink(place(fs.root(), "fragmented"), AT).expect("it is there");
        for number in 0..500 {
            fs.create(place(fs.root(), &format!("new-{number}")), &NEW).expect("a file");
        }
        fs.sync().expect("a commit");
        check(&disks);
    };
    change(&source);
    change(&third);
    let expect_unchanged = |names: &[&str]| {
        let (now, before) = (disks.mount("ro,noatime"), reference.mount("ro,noatime"));
        for name in names {
            let fs = if *name == "first" { &first } else { &second };
            compare(fs, &now.path().join(name)).assert_same(100);
            compare(fs, &before.path().join(name)).assert_same(100);
        }
    };
    expect_unchanged(&["first", "second"]);
    remove_below(&source, source.root());
    source.sync().expect("a commit");
    check(&disks);
    expect_unchanged(&["first", "second"]);
    remove_below(&second, second.root());
    remove_below(&third, third.root());
    second.sync().expect("a commit");
    check(&disks);
    expect_unchanged(&["first"]);
    drop((source, first, second, third, volume));
    judge(&disks, 100);
    // The kernel drops the rest of what is shared.
    let mount = disks.mount("rw,noatime");
    run(
        "btrfs",
        &["subvolume".as_ref(), "delete".as_ref(), mount.path().join("third").as_os_str()],
    );
    run("btrfs", &["subvolume".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
    drop(mount);
    judge(&disks, 100);
}

#[test]
fn snapshots_stay_as_they_are() {
    snapshots(&[]);
}

#[test]
fn snapshots_stay_as_they_are_in_small_nodes() {
    snapshots(&["-n", "4k", "-O", "^skinny-metadata,^no-holes"]);
}
