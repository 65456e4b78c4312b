//! Opening a volume removes the unlinked files that a crash left, from all subvolumes, used or not.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::progs::Progs;
use offshoot_testkit::run::run;
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, NEW, at, items, judge, open_read_only, place, subvolume_at, top};

/// The subvolumes with unlinked files: the top level, and three below it, one of which is read-only
/// now.
const PLACES: [&str; 4] = ["", "first", "nested/second", "read-only"];

/// How many files each of them has. The first one has more extents than the engine removes at once.
const FILES: u64 = 20;

/// What a power cut leaves while the kernel has unlinked files open.
fn cut(judges: &Judges, mkfs: &[&str]) -> Disks {
    let disks = Disks::create(judges, 1, 512);
    disks.mkfs(mkfs);
    let mount = disks.mount("rw,noatime,commit=300");
    let mut opened = Vec::new();
    for name in PLACES.into_iter().chain(["untouched"]) {
        let dir = mount.path().join(name);
        if let ("nested/second", Some(above)) = (name, dir.parent()) {
            fill::subvolumes::create(above);
        }
        if !name.is_empty() {
            fill::subvolumes::create(&dir);
        }
        fill::write(&dir.join("kept"), b"it has a name");
        for number in (0..FILES).filter(|_| name != "untouched") {
            let path = dir.join(format!("{number}"));
            let file = File::create(&path).expect("a file");
            let pieces = if number == 0 { 300 } else { 1 };
            for piece in 0..pieces {
                file.write_all_at(&[7; 5000], piece * 20_000).expect("there is room");
            }
            opened.push((path, file));
        }
    }
    mount.sync();
    for (path, _) in &opened {
        std::fs::remove_file(path).expect("it is there");
    }
    let read_only = mount.path().join("read-only");
    run("btrfs", &["property", "set", read_only.to_str().expect("a plain path"), "ro", "true"]);
    mount.sync();
    disks.copy(judges)
}

/// How many orphan items and inodes the subvolumes have.
fn left(disks: &Disks) -> (u64, u64) {
    let fs = open_read_only(disks);
    PLACES.iter().fold((0, 0), |(orphans, inodes), name| {
        let tree = if name.is_empty() { TreeId::FS } else { subvolume_at(&fs, name) };
        let orphan = |key: Key| key.item_type == ItemType::ORPHAN_ITEM;
        let inode = |key: Key| key.item_type == ItemType::INODE_ITEM;
        (orphans + items(&fs, tree, orphan), inodes + items(&fs, tree, inode))
    })
}

/// Opens the volume for writing as the program does: with the volume's thread.
fn opened(disks: &Disks) -> Arc<BtrfsVolume> {
    BtrfsVolume::open_writable(disks.writable_devices(), &EngineOptions::default())
        .expect("it opens")
}

/// Waits until the engine has removed this many orphan items.
fn wait_for(volume: &BtrfsVolume, count: u64) {
    let end = Instant::now() + Duration::from_secs(120);
    while volume.stats().orphans_removed < count {
        assert!(Instant::now() < end, "{} of {count} went", volume.stats().orphans_removed);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Regression: only the subvolume that was opened lost its orphans. All others kept theirs until
/// something changed them.
#[test]
fn they_go_from_subvolumes_that_nobody_uses() {
    let Some(judges) = judges::require() else { return };
    for mkfs in [&["-n", "4k"], &["-n", "16k"]] {
        let disks = cut(&judges, mkfs);
        let all = FILES * PLACES.len() as u64;
        let (orphans, inodes) = left(&disks);
        assert_eq!(orphans, all, "what the kernel left");
        let untouched = subvolume_at(&open_read_only(&disks), "untouched").0.to_string();
        // Behind the tree, the dump has the sizes of the volume.
        let blocks = || {
            let dump = Progs::of(&disks).dump_tree(&untouched);
            dump.split_once("total bytes").expect("it ends so").0.to_owned()
        };
        let before = blocks();
        let volume = opened(&disks);
        wait_for(&volume, all);
        top(&volume).sync().expect("a commit");
        drop(volume);
        assert_eq!(left(&disks), (0, inodes - all));
        judge(&disks, 5);
        assert_eq!(blocks(), before, "it had nothing to remove");
    }
}

/// Closing a volume waits for one step at most. The next opening removes the rest.
#[test]
fn they_go_by_and_by_when_the_volume_is_closed_early() {
    let Some(judges) = judges::require() else { return };
    let disks = cut(&judges, &["-n", "4k"]);
    let mut counts = vec![left(&disks).0];
    for round in 0..200 {
        let volume = opened(&disks);
        std::thread::sleep(Duration::from_micros(200 * round));
        let fs = top(&volume);
        fs.create(place(fs.root(), &format!("round-{round}")), &NEW).expect("there is room");
        fs.sync().expect("a commit");
        drop((fs, volume));
        counts.push(left(&disks).0);
        if counts.len().is_multiple_of(10) {
            disks.assert_checks();
        }
        if counts.ends_with(&[0]) {
            break;
        }
    }
    println!("orphan items after each opening: {counts:?}");
    assert_eq!(counts.last(), Some(&0));
    judge(&disks, 5);
}

/// Files that are unlinked and open now are not orphans of a crash.
#[test]
fn open_files_stay_until_they_are_closed() {
    let Some(judges) = judges::require() else { return };
    let disks = cut(&judges, &["-n", "4k"]);
    let volume = opened(&disks);
    let fs = top(&volume);
    let dir = at(&fs, "first");
    let file = fs.create(place(dir, "open"), &NEW).expect("a file");
    fs.write(file, 0, &[5; 9000], AT).expect("there is room");
    fs.open(file).expect("it is there");
    fs.unlink(place(dir, "open"), AT).expect("it is there");
    fs.sync().expect("a commit");
    wait_for(&volume, FILES * PLACES.len() as u64);
    let mut bytes = [0; 9000];
    assert_eq!(fs.read(file, 0, &mut bytes).expect("it is open"), 9000);
    assert!(bytes.iter().all(|&byte| byte == 5));
    fs.release(file).expect("it was open");
    fs.sync().expect("a commit");
    drop((fs, volume));
    assert_eq!(left(&disks).0, 0);
    judge(&disks, 5);
}
