//! Deleted subvolumes are dropped with everything that only they hold, even if one side starts and
//! the other goes on.

use offshoot_btrfs::{Filesystem, SubvolumeId};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::compare::Compare;
use offshoot_testkit::model::Model;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_vfs::{Errno, FileSystem, FileSystemMut};

use crate::common::{AT, NEW, at, items, judge, open, open_read_only, place, subvolume_at, top};

/// How many deleted subvolumes are still to be dropped.
fn orphans(fs: &Filesystem) -> u64 {
    items(fs, TreeId::ROOT, |key| key.item_type == ItemType::ORPHAN_ITEM)
}

/// Changes some files of a subvolume, so that it still shares a part of everything with its earlier
/// snapshots.
fn change(fs: &Filesystem, random: &mut Random, round: u64) {
    let dir = fs.root();
    for number in 0..200 {
        let name = format!("round-{round}-of-{}-{number}", dir.dev);
        let file = fs.create(place(dir, &name), &NEW).expect("a file");
        let len = usize::try_from(random.below(20_000)).expect("small");
        fs.write(file, 0, &random.bytes(len), AT).expect("there is room");
    }
    for number in (0..200).filter(|_| round > 0) {
        if random.below(3) == 0 {
            let name = format!("round-{}-of-{}-{number}", round - 1, dir.dev);
            fs.unlink(place(dir, &name), AT).expect("the round before made it");
        }
    }
    let file = at(fs, "data");
    for _ in 0..20 {
        let offset = random.below(4 << 20);
        fs.write(file, offset, &random.bytes(6000), AT).expect("there is room");
    }
}

/// Takes snapshots of a subvolume that changes between them, in all ways, and deletes them in
/// random order. The others stay as they were. When all are deleted, nothing is left of them.
fn all_goes(mkfs: &[&str]) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(mkfs);
    let empty = open_read_only(&disks).statfs().expect("sizes").used_bytes;
    let mount = disks.mount("rw,noatime");
    fill::subvolumes::create(&mount.path().join("source"));
    fill::data::fill(&mount.path().join("source"));
    std::fs::write(mount.path().join("source/data"), random.bytes(4 << 20)).expect("a file");
    mount.sync();
    drop(mount);
    let volume = open(&disks);
    let fs = top(&volume);
    let source = volume.filesystem(subvolume_at(&fs, "source")).expect("it is there");
    let mut kept: Vec<(String, Model)> = Vec::new();
    for round in 0..6 {
        change(&source, &mut random, round);
        let name = format!("snapshot-{round}");
        // Every second snapshot is of a snapshot, so that there are several generations of sharing.
        let of = if round % 2 == 1 { subvolume_at(&fs, &kept[0].0) } else { source_id(&source) };
        let id = fs.snapshot(of, place(fs.root(), &name), false, AT).expect("a snapshot");
        let snapshot = volume.filesystem(id).expect("it is there");
        if round % 3 == 2 {
            change(&snapshot, &mut random, 0);
        }
        kept.push((name, Model::copy(&snapshot).expect("it reads")));
    }
    fs.sync().expect("a commit");
    disks.assert_checks();
    drop((source, fs, volume));
    kept.push(("source".into(), Model::copy(&sub(&disks, "source")).expect("it reads")));
    while !kept.is_empty() {
        let (volume, fs) = opened(&disks);
        let index = usize::try_from(random.below(kept.len() as u64)).expect("small");
        let (gone, _) = kept.swap_remove(index);
        fs.delete_subvolume(place(fs.root(), &gone), AT).expect("it is there");
        if random.below(3) > 0 {
            volume.drop_deleted().expect("everything reads");
        }
        fs.sync().expect("a commit");
        drop((fs, volume));
        disks.assert_checks();
        for (name, model) in &kept {
            let here = sub(&disks, name);
            Compare::of_copies().run_filesystems(&here, model).assert_same(100);
        }
    }
    let (volume, fs) = opened(&disks);
    volume.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    drop((fs, volume));
    let left = open_read_only(&disks);
    assert_eq!(orphans(&left), 0);
    let uuids = items(&left, TreeId::UUID, |_| true);
    assert_eq!(uuids, 1, "the UUID tree has more than the top level");
    let is_data =
        |key: Key| matches!(key.item_type, ItemType::EXTENT_CSUM | ItemType::EXTENT_DATA_REF);
    assert_eq!(items(&left, TreeId::CSUM, is_data), 0, "checksums of data that is gone");
    let used = left.statfs().expect("sizes").used_bytes;
    assert!(used < empty + (1 << 20), "{used} bytes are used, {empty} were");
    drop(left);
    judge(&disks, 1);
}

fn source_id(fs: &Filesystem) -> SubvolumeId {
    TreeId(fs.root().dev)
}

fn opened(disks: &Disks) -> (std::sync::Arc<offshoot_btrfs::BtrfsVolume>, Filesystem) {
    let volume = open(disks);
    let fs = top(&volume);
    (volume, fs)
}

/// A subvolume of the top level, opened for reading.
fn sub(disks: &Disks, name: &str) -> Filesystem {
    let fs = open_read_only(disks);
    let id = subvolume_at(&fs, name);
    fs.volume().filesystem(id).expect("it is there")
}

#[test]
fn all_that_is_theirs_goes() {
    all_goes(&[]);
}

#[test]
fn all_that_is_theirs_goes_in_small_nodes() {
    all_goes(&["-n", "4k", "-O", "^skinny-metadata,^no-holes"]);
}

/// The kernel stops dropping when the volume is unmounted, and we go on.
#[test]
fn ours_goes_on_after_the_kernel() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(&["-n", "4k"]);
    let empty = open_read_only(&disks).statfs().expect("sizes").used_bytes;
    let volume = open(&disks);
    let fs = top(&volume);
    fs.create_subvolume(place(fs.root(), "large"), &NEW).expect("a subvolume");
    let dir = at(&fs, "large");
    for number in 0..50_000 {
        let file = fs.create(place(dir, &format!("{number}")), &NEW).expect("a file");
        if number % 16 == 0 {
            fs.write(file, 0, &[1; 4096], AT).expect("there is room");
        }
    }
    fs.delete_subvolume(place(fs.root(), "large"), AT).expect("it is there");
    fs.sync().expect("a commit");
    drop((fs, volume));
    // The kernel decides how far it gets: it may be done before it is stopped.
    let is_half = (0..40).any(|round| {
        let copy = disks.copy(&judges);
        let mount = copy.mount("rw,noatime");
        // The sync wakes the kernel's cleaner.
        run("btrfs", &["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
        std::thread::sleep(std::time::Duration::from_millis(round));
        drop(mount);
        let progs = offshoot_testkit::btrfs::progs::Progs::of(&copy);
        let is_half = progs.dump_tree("root").lines().any(|line| {
            let line = line.trim();
            line.starts_with("drop_progress key (") && !line.contains("key (0 ")
        });
        drop(progs);
        if is_half {
            let (volume, fs) = opened(&copy);
            assert_eq!(orphans(&fs), 1);
            volume.drop_deleted().expect("everything reads");
            fs.sync().expect("a commit");
            assert_eq!(orphans(&fs), 0);
            let used = fs.statfs().expect("sizes").used_bytes;
            assert!(used < empty + (1 << 20), "{used} bytes are used, {empty} were");
            drop((fs, volume));
            judge(&copy, 1);
        }
        is_half
    });
    assert!(is_half, "the kernel was never stopped half-way");
}

/// A subvolume fills the volume and is deleted: then there is room again.
#[test]
fn a_full_volume_is_emptied() {
    let Some(judges) = judges::require() else { return };
    for mkfs in [&["-n", "16k"], &["-n", "4k"]] {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(mkfs);
        let (volume, fs) = opened(&disks);
        let id = fs.create_subvolume(place(fs.root(), "full"), &NEW).expect("a subvolume");
        let dir = at(&fs, "full");
        let data = vec![1; 1 << 20];
        let write = |number: u64, len: usize| {
            let file = fs.create(place(dir, &number.to_string()), &NEW)?;
            fs.write(file, 0, &data[..len], AT)
        };
        let mut number = 0;
        for len in [1 << 20, 64 << 10, 4096, 100] {
            loop {
                number += 1;
                match write(number, len) {
                    Ok(()) => {}
                    Err(error) if error.errno() == Errno::NOSPC => break,
                    Err(error) => panic!("{number}: {error}"),
                }
            }
            // Some snapshots fit and others are refused. Neither may cause a failure later.
            let name = format!("snapshot-{len}");
            if let Err(error) = fs.snapshot(id, place(fs.root(), &name), true, AT) {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
            }
        }
        let all: Vec<_> = volume.subvolumes().map(|one| one.expect("it reads")).collect();
        for one in all.iter().filter(|one| one.id != SubvolumeId::FS) {
            let path = String::from_utf8(one.path.as_ref().expect("it reads").clone());
            let path = path.expect("a plain name");
            fs.delete_subvolume(place(fs.root(), &path), AT).expect("removals find room");
        }
        volume.drop_deleted().expect("so do drops");
        fs.sync().expect("a commit");
        let file = fs.create(place(fs.root(), "again"), &NEW).expect("there is room");
        for part in 0..32 {
            fs.write(file, part << 20, &data, AT).expect("there is room");
        }
        fs.sync().expect("a commit");
        drop((fs, volume));
        judge(&disks, 1);
    }
}

/// Regression: a snapshot keeps the blocks that removals copy. Removing names with scattered items
/// used up all space that is kept for removals, and then not even the snapshot could be deleted.
#[test]
fn removals_beside_a_snapshot_leave_room_to_delete_it() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 128);
    disks.mkfs(&["-m", "single"]);
    let (volume, fs) = opened(&disks);
    let id = fs.create_subvolume(place(fs.root(), "full"), &NEW).expect("a subvolume");
    let [dir, other] = ["dir", "other"]
        .map(|name| fs.mkdir(place(at(&fs, "full"), name), &NEW).expect("a directory"));
    let name = |number: u64| format!("{}-{number}", "a-long-name".repeat(20));
    let create = |dir, number| fs.create(place(dir, &name(number)), &NEW);
    let all = 60_000;
    for number in 0..all {
        create(dir, number).expect("there is room");
    }
    fs.snapshot(id, place(fs.root(), "snapshot"), true, AT).expect("there is room");
    let mut filled = 0;
    while create(other, filled).is_ok() {
        filled += 1;
    }
    assert_eq!(create(other, filled).expect_err("it is full").errno(), Errno::NOSPC);
    let unlink = |number: u64| fs.unlink(place(dir, &name(number)), AT);
    let mut removed = 0;
    while removed < all {
        match unlink(removed) {
            Ok(()) => removed += 1,
            Err(error) if error.errno() == Errno::NOSPC => break,
            Err(error) => panic!("{removed}: {error}"),
        }
    }
    eprintln!("{removed} of {all} files removed beside {filled} others");
    fs.delete_subvolume(place(fs.root(), "snapshot"), AT).expect("deleting is not refused");
    volume.drop_deleted().expect("nor is dropping");
    for number in removed..all {
        unlink(number).unwrap_or_else(|error| panic!("{number}: {error}"));
    }
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 1);
}
