//! Many snapshots of one tree that changes between them. Half of them are deleted, and at last all.
//!
//! A [`SnapshotStory`] says what changes between two snapshots. `kernel` has the kernel do the same
//! story, to compare the cost of a snapshot. `cost` shows that this cost does not grow with the
//! tree.

mod cost;
mod kernel;

use std::time::{Duration, Instant};

use offshoot_btrfs::Filesystem;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::Compare;
use offshoot_testkit::model::Model;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, NEW, at, open, open_read_only, place, subvolume_at, top};

/// How many changes are between two snapshots.
const CHANGES: u64 = 30;

/// The test compares so many snapshots with the source as it was then. It keeps that in memory.
const KEPT: u64 = 5;

/// Snapshots of a tree of files that change between them.
#[derive(Clone, Copy)]
struct SnapshotStory {
    snapshots: u64,
    files: u64,
    seed: u64,
}

/// How long snapshots took.
#[derive(Default)]
struct SnapshotTimes {
    /// Snapshots after changes, which include a commit of these.
    with_commit: Vec<Duration>,
    /// Snapshots without changes: the cost of a snapshot alone.
    alone: Vec<Duration>,
}

impl SnapshotStory {
    /// Calls `write` with a file, an offset and bytes, and `snapshot` with its number. `snapshot`
    /// returns how long it took.
    fn tell(
        self,
        mut write: impl FnMut(u64, u64, &[u8]),
        mut snapshot: impl FnMut(u64) -> Duration,
    ) -> SnapshotTimes {
        let (mut random, mut times) = (Random::new(self.seed), SnapshotTimes::default());
        for number in 0..self.snapshots {
            // Sometimes nothing changes, so that one commit is enough for several snapshots.
            let is_changed = number % 10 < 8;
            for _ in 0..if is_changed { CHANGES } else { 0 } {
                let file = random.below(self.files);
                let len = usize::try_from(random.below(6000)).expect("small");
                write(file, random.below(20_000), &random.bytes(len));
            }
            let kind = if is_changed { &mut times.with_commit } else { &mut times.alone };
            kind.push(snapshot(number));
        }
        times
    }

    /// Whether the snapshot with this number stays when half of them are deleted.
    fn is_left(number: u64) -> bool {
        number % 4 < 2
    }
}

impl SnapshotTimes {
    fn print(&self, side: &str) {
        for (what, times) in
            [("changes and a snapshot", &self.with_commit), ("a snapshot alone", &self.alone)]
        {
            let first = &times[..times.len().min(100)];
            let last = &times[times.len().saturating_sub(100)..];
            let total = times.iter().sum::<Duration>();
            println!(
                "{side}: {what}: of the first {}, of the last {}, {total:.1?} in all",
                middle(first),
                middle(last)
            );
        }
    }
}

/// The median and the longest of some durations.
fn middle(times: &[Duration]) -> String {
    let mut times = times.to_vec();
    times.sort();
    format!("{:.1?}, at most {:.1?}", times[times.len() / 2], times[times.len() - 1])
}

fn many(disks: &Disks, story: SnapshotStory) {
    let SnapshotStory { snapshots, files, .. } = story;
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
    let times = story.tell(
        |file, offset, bytes| {
            let file = all[usize::try_from(file).expect("an index")];
            fs.write(file, offset, bytes, AT).expect("there is room");
        },
        |number| {
            let name = number.to_string();
            let asked = Instant::now();
            let id = fs.snapshot(live, place(fs.root(), &name), number % 2 == 0, AT);
            let took = asked.elapsed();
            let snapshot = volume.filesystem(id.expect("a snapshot")).expect("it is there");
            if number % (snapshots / KEPT).max(1) == 7 {
                let source = volume.filesystem(live).expect("it is there");
                kept.push((number, Model::copy(&source).expect("it reads")));
                assert_same(&snapshot, &kept[kept.len() - 1].1);
            }
            took
        },
    );
    let stats = volume.stats();
    println!(
        "ours: {snapshots} snapshots of {files} files in {:.1?}, with {} commits",
        began.elapsed(),
        stats.commits_for_snapshots
    );
    times.print("ours");
    assert!(stats.commits_for_snapshots <= snapshots * 9 / 10, "{stats:?}");
    let full = fs.statfs().expect("sizes").used_bytes;
    let began = Instant::now();
    let is_left =
        |number: u64| SnapshotStory::is_left(number) || kept.iter().any(|(one, _)| *one == number);
    for number in (0..snapshots).filter(|&number| !is_left(number)) {
        let name = number.to_string();
        fs.delete_subvolume(place(fs.root(), &name), AT).expect("it is there");
    }
    volume.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    println!("ours: half of them deleted in {:.1?}", began.elapsed());
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
    println!(
        "ours: {full} bytes in use, {half} with half of them, {used} with none, {empty} before"
    );
    assert!(half < full && used < empty + (2 << 20));
    drop((fs, volume));
    disks.assert_checks();
}

fn assert_same(snapshot: &Filesystem, model: &Model) {
    Compare::of_copies().run_filesystems(snapshot, model).assert_same(10);
}

#[test]
fn many_snapshots() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(&["-n", "4k"]);
    many(&disks, SnapshotStory { snapshots: 200, files: 300, seed: seed_of_run() });
}

#[test]
#[ignore = "takes minutes; cargo xtask campaign snapshots runs it"]
fn campaign() {
    let Some(judges) = judges::require() else { return };
    let number = |name: &str, default: u64| {
        let given = std::env::var(name).ok();
        given.map_or(default, |given| given.parse().unwrap_or_else(|_| panic!("{name}={given}")))
    };
    let snapshots = number("OFFSHOOT_SNAPSHOTS", 10_000);
    let files = number("OFFSHOOT_FILES", 10_000);
    let story = SnapshotStory { snapshots, files, seed: seed_of_run() };
    let volume = || {
        let disks = Disks::create(&judges, 1, 64 << 10);
        disks.mkfs(&[]);
        disks
    };
    many(&volume(), story);
    kernel::many(&volume(), story);
}
