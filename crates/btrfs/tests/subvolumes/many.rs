//! Many snapshots of one tree that changes between them, half of them deleted, and at last all.

use std::time::{Duration, Instant};

use offshoot_btrfs::Filesystem;
use offshoot_testkit::compare::Compare;
use offshoot_testkit::disks::Disks;
use offshoot_testkit::judges;
use offshoot_testkit::model::Model;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, NEW, at, open, open_read_only, place, subvolume_at, top};

/// Changes between two snapshots.
const CHANGES: u64 = 30;

/// So many snapshots are compared with what the source was, which is in memory for that.
const KEPT: u64 = 5;

fn many(disks: &Disks, snapshots: u64, files: u64, seed: u64) {
    let mut random = Random::new(seed);
    let empty = open_read_only(disks).statfs().expect("sizes").used_bytes;
    let volume = open(disks);
    let fs = top(&volume);
    let live = fs.create_subvolume(place(fs.root(), "live"), &NEW).expect("a subvolume");
    let dir = at(&fs, "live");
    let all: Vec<_> = (0..files)
        .map(|number| fs.create(place(dir, &number.to_string()), &NEW).expect("a file"))
        .collect();
    let began = Instant::now();
    let mut kept = Vec::new();
    // What a snapshot costs itself is what one costs whose source did not change since the one before.
    let (mut with_commit, mut alone) = (Vec::new(), Vec::new());
    for number in 0..snapshots {
        // Now and then nothing changes: then one commit does for several.
        for _ in 0..if number % 10 < 8 { CHANGES } else { 0 } {
            let file = all[usize::try_from(random.below(files)).expect("an index")];
            let len = usize::try_from(random.below(6000)).expect("small");
            fs.write(file, random.below(20_000), &random.bytes(len), AT).expect("there is room");
        }
        let name = number.to_string();
        let asked = Instant::now();
        let id = fs.snapshot(live, place(fs.root(), &name), number % 2 == 0, AT);
        let times = if number % 10 < 8 { &mut with_commit } else { &mut alone };
        times.push(asked.elapsed());
        let snapshot = volume.filesystem(id.expect("a snapshot")).expect("it is there");
        if number % (snapshots / KEPT).max(1) == 7 {
            let source = volume.filesystem(live).expect("it is there");
            kept.push((number, Model::copy(&source).expect("it reads")));
            assert_same(&snapshot, &kept[kept.len() - 1].1);
        }
    }
    let stats = volume.stats();
    println!(
        "{snapshots} snapshots of {files} files in {} ms, with {} commits",
        began.elapsed().as_millis(),
        stats.commits_for_snapshots
    );
    for (what, times) in
        [("a commit of changes and a snapshot", &with_commit), ("a snapshot alone", &alone)]
    {
        let first = &times[..times.len().min(100)];
        let last = &times[times.len().saturating_sub(100)..];
        println!("{what}: of the first {}, of the last {}", middle(first), middle(last));
    }
    assert!(stats.commits_for_snapshots <= snapshots * 9 / 10, "{stats:?}");
    let full = fs.statfs().expect("sizes").used_bytes;
    let began = Instant::now();
    let is_left = |number: u64| number % 4 < 2 || kept.iter().any(|(one, _)| *one == number);
    for number in (0..snapshots).filter(|&number| !is_left(number)) {
        let name = number.to_string();
        fs.delete_subvolume(place(fs.root(), &name), AT).expect("it is there");
    }
    volume.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    println!("half of them deleted in {} ms", began.elapsed().as_millis());
    let half = fs.statfs().expect("sizes").used_bytes;
    drop((fs, volume));
    disks.assert_checks();
    let volume = open(disks);
    let fs = top(&volume);
    for (number, model) in &kept {
        let id = subvolume_at(&fs, &number.to_string());
        assert_same(&volume.filesystem(id).expect("it is there"), model);
    }
    for number in (0..snapshots).filter(|&number| is_left(number)) {
        let name = number.to_string();
        fs.delete_subvolume(place(fs.root(), &name), AT).expect("it is there");
    }
    fs.delete_subvolume(place(fs.root(), "live"), AT).expect("it is there");
    volume.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    let used = fs.statfs().expect("sizes").used_bytes;
    println!("{full} bytes in use, {half} with half of them, {used} with none, {empty} before");
    assert!(half < full && used < empty + (2 << 20));
    drop((fs, volume));
    disks.assert_checks();
}

/// The median and the longest of some times.
fn middle(times: &[Duration]) -> String {
    let mut times = times.to_vec();
    times.sort();
    format!("{:.1?}, at most {:.1?}", times[times.len() / 2], times[times.len() - 1])
}

fn assert_same(snapshot: &Filesystem, model: &Model) {
    Compare::of_copies().run_filesystems(snapshot, model).assert_same(10);
}

#[test]
fn many_snapshots() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(&["-n", "4k"]);
    many(&disks, 200, 300, seed_of_run());
}

#[test]
#[ignore = "takes minutes; cargo xtask campaign snapshots runs it"]
fn campaign() {
    let Some(judges) = judges::require() else { return };
    let number = |name: &str, default: u64| {
        let given = std::env::var(name).ok();
        given.map_or(default, |given| given.parse().unwrap_or_else(|_| panic!("{name}={given}")))
    };
    let disks = Disks::create(&judges, 1, 64 << 10);
    disks.mkfs(&[]);
    let (snapshots, files) =
        (number("OFFSHOOT_SNAPSHOTS", 10_000), number("OFFSHOOT_FILES", 10_000));
    many(&disks, snapshots, files, seed_of_run());
}
