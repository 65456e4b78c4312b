//! Our calls beside the kernel's: the same calls on two volumes, and the kernel shows the same of
//! both.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::ItemType;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::{judges, progs, sharing};
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_vfs::{self as vfs, FileSystem, FileSystemMut, NewFile};
use rustix::fs::CWD;

use crate::common::{
    AT, NEW, at, items, judge, open, open_read_only, place, split, subvolume_at, top,
};

/// A call on both volumes. Paths start at the top level.
#[derive(Clone, Copy, Debug)]
enum SubvolumeCall {
    Create(&'static str),
    Snapshot(&'static str, &'static str),
    ReadOnlySnapshot(&'static str, &'static str),
    Delete(&'static str),
    SetDefault(&'static str),
    SetReadOnly(&'static str, bool),
    Mkdir(&'static str),
    Rmdir(&'static str),
    Write(&'static str, usize),
    Unlink(&'static str),
    Rename(&'static str, &'static str),
    Exchange(&'static str, &'static str),
}

use SubvolumeCall::{
    Create, Delete, Exchange, Mkdir, ReadOnlySnapshot, Rename, Rmdir, SetDefault, SetReadOnly,
    Snapshot, Unlink, Write,
};

const STEPS: &[SubvolumeCall] = &[
    Create("outer"),
    Write("outer/file", 10_000),
    Mkdir("outer/between"),
    Create("outer/between/inner"),
    Write("outer/between/inner/file", 200_000),
    Create("outer/between/inner/innermost"),
    Snapshot("outer", "snapshot"),
    ReadOnlySnapshot("outer", "outer/itself"),
    Write("outer/file", 70_000),
    Write("snapshot/other", 5),
    ReadOnlySnapshot("snapshot", "snapshot-of-snapshot"),
    Snapshot("", "all"),
    Snapshot("", "all-once-more"),
    Snapshot("snapshot-of-snapshot", "all/writable"),
    SetReadOnly("snapshot", true),
    SetReadOnly("snapshot-of-snapshot", false),
    Write("snapshot-of-snapshot/after", 5000),
    Rmdir("snapshot-of-snapshot/between/inner"),
    Delete("outer/between/inner/innermost"),
    Delete("outer/between/inner"),
    SetDefault("snapshot"),
    Unlink("outer/file"),
    Delete("outer/itself"),
    Create("gone"),
    // The subvolume with the highest number stays. Otherwise the next number would depend on how
    // soon deleted subvolumes are dropped.
    Create("kept"),
    Rmdir("gone"),
    Rename("all/writable", "outer/moved"),
    Rename("all-once-more", "again"),
    Delete("outer/moved"),
    Delete("outer"),
    SetDefault(""),
    Create("last"),
    // Onto empty directories: beside it, in another subvolume, and in a snapshot at the place of a
    // subvolume that the snapshot did not take.
    Mkdir("bare"),
    Rename("last", "bare"),
    Mkdir("all/bare"),
    Rename("bare", "all/bare"),
    Create("one"),
    Create("one/nested"),
    Snapshot("one", "again/of-one"),
    Rename("all/bare", "again/of-one/nested"),
    // Exchanges of two subvolumes, in one directory and across subvolumes. Exchanges of a subvolume
    // with a directory that is not empty, and with a file.
    Exchange("kept", "one"),
    Exchange("again/of-one", "kept"),
    Mkdir("full"),
    Mkdir("full/inner"),
    Write("full/inner/file", 3000),
    Exchange("full/inner", "one"),
    Write("file", 6000),
    Exchange("file", "kept"),
    Exchange("full/inner", "again"),
];

fn bytes(len: usize) -> Vec<u8> {
    Random::new(len as u64).bytes(len)
}

fn by_kernel(mount: &Path, step: SubvolumeCall) {
    let path = |path: &str| mount.join(path);
    let btrfs = |words: &[&str], paths: &[&str]| {
        let paths: Vec<_> = paths.iter().map(|one| path(one).into_os_string()).collect();
        let words = words.iter().map(std::ffi::OsString::from).chain(paths);
        run("btrfs", &words.collect::<Vec<_>>());
    };
    match step {
        Create(at) => btrfs(&["subvolume", "create"], &[at]),
        Snapshot(from, to) => btrfs(&["subvolume", "snapshot"], &[from, to]),
        ReadOnlySnapshot(from, to) => btrfs(&["subvolume", "snapshot", "-r"], &[from, to]),
        Delete(at) => btrfs(&["subvolume", "delete"], &[at]),
        SetDefault(at) => btrfs(&["subvolume", "set-default"], &[at]),
        SetReadOnly(at, is_read_only) => {
            let mut words: Vec<std::ffi::OsString> = vec!["property".into(), "set".into()];
            words.extend([path(at).into(), "ro".into(), is_read_only.to_string().into()]);
            run("btrfs", &words);
        }
        Mkdir(at) => std::fs::create_dir(path(at)).expect("a directory"),
        Rmdir(at) => std::fs::remove_dir(path(at)).expect("it is empty"),
        Write(at, len) => std::fs::write(path(at), bytes(len)).expect("a file"),
        Unlink(at) => std::fs::remove_file(path(at)).expect("it is there"),
        Rename(from, to) => std::fs::rename(path(from), path(to)).expect("it moves"),
        Exchange(one, other) => {
            let how = rustix::fs::RenameFlags::EXCHANGE;
            let (one, other) = (path(one), path(other));
            rustix::fs::renameat_with(CWD, one, CWD, other, how).expect("they move");
        }
    }
}

fn by_ours(fs: &Filesystem, step: SubvolumeCall) {
    let volume = fs.volume();
    let snapshot = |from, to, is_read_only| {
        let (dir, name) = split(fs, to);
        let source = subvolume_at(fs, from);
        fs.snapshot(source, place(dir, name), is_read_only, AT).map(drop)
    };
    let done = match step {
        Create(at) => {
            let (dir, name) = split(fs, at);
            fs.create_subvolume(place(dir, name), &NEW).map(drop)
        }
        Snapshot(from, to) => snapshot(from, to, false),
        ReadOnlySnapshot(from, to) => snapshot(from, to, true),
        Delete(at) => {
            let (dir, name) = split(fs, at);
            fs.delete_subvolume(place(dir, name), AT)
        }
        SetDefault(at) => volume.set_default_subvolume(subvolume_at(fs, at)),
        SetReadOnly(at, is_read_only) => {
            volume.set_read_only(subvolume_at(fs, at), is_read_only, AT)
        }
        Mkdir(at) => {
            let (dir, name) = split(fs, at);
            fs.mkdir(place(dir, name), &NEW).map(drop)
        }
        Rmdir(at) => {
            let (dir, name) = split(fs, at);
            fs.rmdir(place(dir, name), AT)
        }
        Write(path, len) => {
            let (dir, name) = split(fs, path);
            if fs.lookup(dir, name.as_bytes()).is_err() {
                fs.create(place(dir, name), &NewFile { permissions: 0o644, ..NEW })
                    .expect("a file");
            }
            fs.write(at(fs, path), 0, &bytes(len), AT)
        }
        Unlink(at) => {
            let (dir, name) = split(fs, at);
            fs.unlink(place(dir, name), AT)
        }
        Rename(from, to) => {
            let ((from_dir, from), (to_dir, to)) = (split(fs, from), split(fs, to));
            fs.rename(place(from_dir, from), place(to_dir, to), AT)
        }
        Exchange(one, other) => {
            let ((dir, one), (other_dir, other)) = (split(fs, one), split(fs, other));
            let (one, other) = (place(dir, one), place(other_dir, other));
            fs.rename_with(one, other, vfs::Rename::Exchange, AT)
        }
    };
    done.unwrap_or_else(|error| panic!("{step:?}: {error}"));
}

/// What `btrfs subvolume list` shows, with ids instead of UUIDs, and without times.
fn listed(mount: &Path) -> Vec<(u64, u64, Option<u64>, String, bool)> {
    let all = progs::subvolumes(mount);
    let id_of = |uuid: &str| match uuid {
        "-" => None,
        _ => Some(all.iter().find(|one| one.uuid == uuid).map_or(0, |one| one.id)),
    };
    assert!(all.iter().all(|one| one.uuid.len() == 36 && one.received_uuid == "-"), "{all:?}");
    let row = |one: &progs::ListedSubvolume| {
        (one.id, one.parent, id_of(&one.parent_uuid), one.path.clone(), one.is_read_only)
    };
    all.iter().map(row).collect()
}

/// Every path with its type, size, links and mode, and the contents of every file.
fn files(mount: &Path) -> Vec<String> {
    let words = ["-printf", "%P %y %s %n %m\\n", "-type", "f", "-exec", "md5sum", "{}", ";"];
    let words = [mount.as_os_str()].into_iter().chain(words.iter().map(AsRef::as_ref));
    let found = run("find", &words.collect::<Vec<_>>());
    let prefix = mount.to_str().expect("a plain path");
    let mut lines: Vec<_> = found.lines().map(|line| line.replace(prefix, "")).collect();
    lines.sort();
    lines
}

/// With the mount options `look`, the kernel looks at our volume. If it may write, it drops what we
/// deleted.
fn play(mkfs: &[&str], look: &str) {
    let Some(judges) = judges::require() else { return };
    let (ours, theirs) = (Disks::create(&judges, 1, 512), Disks::create(&judges, 1, 512));
    for disks in [&ours, &theirs] {
        disks.mkfs(mkfs);
    }
    let look = format!("{look},noatime,subvolid=5");
    for (number, steps) in STEPS.chunks(6).enumerate() {
        let volume = open(&ours);
        let fs = top(&volume);
        let kernel = theirs.mount("rw,noatime,subvolid=5");
        for &step in steps {
            by_ours(&fs, step);
            by_kernel(kernel.path(), step);
        }
        fs.sync().expect("a commit");
        drop((fs, volume, kernel));
        ours.assert_checks();
        let (ours, theirs) = (ours.mount(&look), theirs.mount(&look));
        assert_eq!(listed(ours.path()), listed(theirs.path()), "after {steps:?}");
        let default = |path: &Path| {
            run("btrfs", &["subvolume".as_ref(), "get-default".as_ref(), path.as_os_str()])
        };
        let id = |text: String| text.split_whitespace().nth(1).map(str::to_owned);
        assert_eq!(id(default(ours.path())), id(default(theirs.path())), "after {steps:?}");
        assert_eq!(files(ours.path()), files(theirs.path()), "after {steps:?}");
        // The first steps make no snapshot, so they share nothing.
        sharing::assert_alike(ours.path(), theirs.path(), number.min(1));
    }
    // Everything that was deleted is dropped, and what stays is sound.
    let volume = open(&ours);
    volume.drop_deleted().expect("everything reads");
    top(&volume).sync().expect("a commit");
    drop(volume);
    judge(&ours, 10);
}

#[test]
fn defaults() {
    play(&[], "rw");
}

#[test]
fn small_nodes_old_references() {
    play(&["-n", "4k", "-O", "^skinny-metadata,^no-holes,^free-space-tree"], "ro");
}

/// Requires so many orphan items in each subvolume: the source has those of its open files, and its
/// snapshots have none.
fn assert_snapshots_without_orphans(disks: &Disks, in_source: u64) {
    disks.assert_checks();
    let fs = open_read_only(disks);
    for (name, expected) in [("source", in_source), ("ro", 0), ("rw", 0), ("of-ro", 0)] {
        let tree = subvolume_at(&fs, name);
        let orphans = items(&fs, tree, |key| key.item_type == ItemType::ORPHAN_ITEM);
        assert_eq!(orphans, expected, "orphan items of `{name}`");
        let inodes = items(&fs, tree, |key| key.item_type == ItemType::INODE_ITEM);
        assert_eq!(inodes, 1 + FILES - OPENED + expected, "inodes of `{name}`");
    }
}

/// The files of the source, and how many of them lose their names while they are open.
const FILES: u64 = 300;
const OPENED: u64 = 100;

/// The first file has more items than the engine removes in one batch.
fn pieces(number: u64) -> impl Iterator<Item = u64> {
    (0..if number == 0 { 200 } else { 1 }).map(|piece| piece * 20_000)
}

/// Regression: snapshots kept the open, unlinked files of their source, and `btrfs check`
/// complained about the volume.
#[test]
fn snapshots_hold_nothing_without_a_name() {
    let Some(judges) = judges::require() else { return };
    let [kernel, disks] = [(); 2].map(|()| Disks::create(&judges, 1, 256));
    kernel.mkfs(&["-n", "4k"]);
    disks.mkfs(&["-n", "4k"]);

    let mount = kernel.mount("rw,noatime");
    by_kernel(mount.path(), Create("source"));
    let mut opened = Vec::new();
    for number in 0..FILES {
        let path = mount.path().join(format!("source/{number}"));
        let file = File::create(&path).expect("a file");
        for offset in pieces(number) {
            file.write_all_at(&bytes(9000), offset).expect("there is room");
        }
        if number < OPENED {
            std::fs::remove_file(&path).expect("it is there");
            opened.push(file);
        }
    }
    for step in SNAPSHOTS {
        by_kernel(mount.path(), step);
    }
    mount.sync();
    assert_snapshots_without_orphans(&kernel.copy(&judges), OPENED);
    drop((opened, mount));

    let volume = open(&disks);
    let fs = top(&volume);
    by_ours(&fs, Create("source"));
    let dir = at(&fs, "source");
    for number in 0..FILES {
        let name = number.to_string();
        let file = fs.create(place(dir, &name), &NEW).expect("a file");
        for offset in pieces(number) {
            fs.write(file, offset, &bytes(9000), AT).expect("there is room");
        }
        if number < OPENED {
            fs.open(file).expect("it is there");
            fs.unlink(place(dir, &name), AT).expect("it is there");
        }
    }
    for step in SNAPSHOTS {
        by_ours(&fs, step);
    }
    fs.sync().expect("a commit");
    drop((fs, volume));
    assert_snapshots_without_orphans(&disks, OPENED);
    judge(&disks, FILES);
}

const SNAPSHOTS: [SubvolumeCall; 3] =
    [ReadOnlySnapshot("source", "ro"), Snapshot("source", "rw"), Snapshot("ro", "of-ro")];
