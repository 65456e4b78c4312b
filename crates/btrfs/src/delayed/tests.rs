//! Delayed items as operations, readers and commits see them.

mod bounds;
mod faults;
mod room;
mod units;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, SetAttr, Timestamp,
};

use super::*;
use crate::test_volumes::in_memory;
use crate::{BtrfsVolume, EngineOptions, Filesystem, Mechanisms, Stats};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// Options with which no thread commits or flushes by itself.
fn quiet() -> EngineOptions {
    EngineOptions { commit_interval: None, ..EngineOptions::default() }
}

fn open(device: Arc<dyn BlockDevice>, options: &EngineOptions) -> Filesystem {
    let volume = BtrfsVolume::open_writable(vec![device], options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("every volume has one")
}

fn place(dir: FileId, name: &str) -> EntryPlace<'_> {
    EntryPlace { dir, name: name.as_bytes() }
}

fn create(fs: &Filesystem, dir: FileId, name: &str) -> FileId {
    fs.create(place(dir, name), &NEW).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn names(fs: &Filesystem, dir: FileId) -> Vec<String> {
    let mut names = Vec::new();
    fs.read_dir(dir, 0, &mut |entry| {
        names.push(String::from_utf8_lossy(entry.name).into_owned());
        ControlFlow::Continue(())
    })
    .expect("the directory reads");
    names
}

/// The change of the counters by `work`.
fn counted(fs: &Filesystem, work: impl FnOnce()) -> Stats {
    let before = fs.volume().stats();
    work();
    let mut after = fs.volume().stats();
    after.items_inserted_singly -= before.items_inserted_singly;
    after.items_inserted_in_batches -= before.items_inserted_in_batches;
    after.items_removed_in_batches -= before.items_removed_in_batches;
    after.items_replaced_in_batches -= before.items_replaced_in_batches;
    after.batches -= before.batches;
    after.delayed_annihilated -= before.delayed_annihilated;
    after
}

/// The metadata that is held for the items of the top level, in bytes.
fn held(fs: &Filesystem) -> u64 {
    let live = fs.volume().live().expect("it is writable");
    live.tree(fs.volume(), TreeId::FS).expect("it is there").hold.held()
}

#[test]
fn a_file_made_and_removed_leaves_nothing_to_write() {
    let fs = open(in_memory(16384), &quiet());
    create(&fs, fs.root(), "other");
    fs.sync().expect("a commit");
    let stats = counted(&fs, || {
        for number in 0..100 {
            let file = create(&fs, fs.root(), &format!("{number}"));
            let mode = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
            fs.set_attr(file, &mode, AT).expect("it is there");
            fs.unlink(place(fs.root(), &format!("{number}")), AT).expect("it is there");
        }
    });
    assert_eq!((stats.batches, stats.delayed_annihilated), (0, 400));
    let tree = fs.volume().tree(TreeId::FS).expect("it is there");
    let stats = counted(&fs, || fs.sync().expect("a commit"));
    assert_ne!(fs.volume().tree(TreeId::FS).expect("it is there"), tree, "the directory changed");
    let of_files = stats.items_removed_in_batches + stats.items_inserted_in_batches;
    assert!(of_files < 20, "only the trees of the commit: {stats:?}");
    assert_eq!(names(&fs, fs.root()), ["other"]);
    assert_eq!(held(&fs), 0);
}

/// Adjacent items go into a leaf and out of it together, with one search for each leaf and not for
/// each item.
#[test]
fn adjacent_items_go_by_the_leaf() {
    const FILES: u64 = 5000;
    let fs = open(in_memory(16384), &quiet());
    let flush =
        || fs.volume().delayed.flush(&fs.volume().base, u64::MAX).map(drop).expect("a flush");
    let name = |number| format!("file-{number:06}");
    let made = counted(&fs, || {
        for number in 0..FILES {
            create(&fs, fs.root(), &name(number));
        }
        flush();
    });
    // About 300 bytes of items a file, in leaves that may be half full.
    let leaves = FILES * 300 / 16384 * 2;
    assert_eq!((made.items_inserted_in_batches, made.items_inserted_singly), (4 * FILES, 0));
    assert!(made.batches <= leaves, "{} batches", made.batches);
    fs.sync().expect("a commit");
    let removed = counted(&fs, || {
        let remove = |number| fs.unlink(place(fs.root(), &name(number)), AT).expect("it is there");
        (0..FILES).for_each(remove);
        flush();
    });
    assert_eq!(removed.items_removed_in_batches, 4 * FILES);
    // A leaf that loses many items may merge with its neighbour, and be visited again there.
    assert!(removed.batches <= 2 * leaves, "{} batches", removed.batches);
}

#[test]
fn an_inode_that_changes_often_is_written_once() {
    let fs = open(in_memory(16384), &quiet());
    let file = create(&fs, fs.root(), "file");
    fs.sync().expect("a commit");
    let before = held(&fs);
    let stats = counted(&fs, || {
        for number in 0..1000 {
            let mode = SetAttr { permissions: Some(number % 0o1000), ..SetAttr::default() };
            fs.set_attr(file, &mode, AT).expect("it is there");
        }
    });
    assert_eq!(stats.batches, 0);
    let unit = fs.volume().live().expect("it is writable").space.item_cost();
    assert_eq!(held(&fs) - before, unit, "one reservation");
    let stats = counted(&fs, || fs.sync().expect("a commit"));
    assert!(stats.items_replaced_in_batches < 30, "{stats:?}");
    assert_eq!(fs.attr(file).expect("it is there").permissions, 999 % 0o1000);
}

/// Random creates, moves and removals, with flushes and commits in between, agree with a map.
fn matches_a_map(options: &EngineOptions, node_size: u32) {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let device = in_memory(node_size);
    let mut fs = open(device.clone(), options);
    let mut there = BTreeSet::new();
    for step in 0..6000 {
        let dir = fs.root();
        let name = format!("name-{}", random.below(400));
        let other = format!("name-{}", random.below(400));
        match random.below(100) {
            0..50 => match fs.create(place(dir, &name), &NEW) {
                Ok(_) => assert!(there.insert(name), "step {step}: it was there"),
                Err(error) => {
                    assert_eq!(error.errno(), Errno::EXIST);
                    assert!(there.contains(&name), "step {step}: {name} was not there");
                }
            },
            50..75 => {
                let removed = fs.unlink(place(dir, &name), AT);
                assert_eq!(removed.is_ok(), there.remove(&name), "step {step}: {name}");
            }
            75..94 => {
                let moved = fs.rename(place(dir, &name), place(dir, &other), AT);
                assert_eq!(moved.is_ok(), there.contains(&name), "step {step}: {name}");
                if moved.is_ok() {
                    there.remove(&name);
                    there.insert(other);
                }
            }
            94..98 => {
                fs.volume().delayed.flush(&fs.volume().base, u64::MAX).expect("a flush");
            }
            98 => fs.sync().expect("a commit"),
            _ => {
                if random.below(8) == 0 {
                    fs.sync().expect("a commit");
                    drop(fs);
                    fs = open(device.clone(), options);
                }
                let mut names = names(&fs, fs.root());
                names.sort_unstable();
                assert!(names.iter().eq(&there), "step {step}");
                for name in &there {
                    let file = fs.lookup(fs.root(), name.as_bytes()).expect("it is there");
                    assert_eq!(fs.attr(file).expect("it is there").nlink, 1);
                }
            }
        }
    }
    fs.sync().expect("a commit");
    assert_eq!(held(&fs), 0);
    assert_eq!(fs.volume().delayed.bytes(), 0);
}

#[test]
fn names_are_what_a_map_says() {
    matches_a_map(&quiet(), 16384);
}

#[test]
fn names_are_what_a_map_says_in_small_nodes() {
    matches_a_map(&quiet(), 4096);
}

#[test]
fn names_are_what_a_map_says_by_item() {
    matches_a_map(
        &EngineOptions { mechanisms: Mechanisms::default().reserve_by_item(true), ..quiet() },
        16384,
    );
}

#[test]
fn names_are_what_a_map_says_without_delayed_items() {
    let options =
        EngineOptions { mechanisms: Mechanisms::default().delayed_items(false), ..quiet() };
    matches_a_map(&options, 16384);
    let fs = open(in_memory(16384), &options);
    create(&fs, fs.root(), "file");
    assert_eq!(fs.volume().stats().delayed_queued, 0);
}

/// While names are made, flushed and committed, a reader sees each name that existed when it began
/// exactly once.
#[test]
fn readers_miss_nothing_beside_flushes() {
    const FILES: u64 = 30_000;
    let options = EngineOptions { dirty_bytes: 4 << 20, ..quiet() };
    let fs = open(in_memory(4096), &options);
    let (made, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (fs, made, done) = (&fs, &made, &done);
        scope.spawn(move || {
            for number in 0..FILES {
                create(fs, fs.root(), &format!("{number}"));
                made.store(number + 1, Ordering::Release);
            }
            done.store(true, Ordering::Release);
        });
        scope.spawn(move || {
            let mut round = 0;
            while !done.load(Ordering::Acquire) {
                round += 1;
                if round % 16 == 0 {
                    fs.sync().expect("a commit");
                }
                fs.volume().delayed.flush(&fs.volume().base, 1 << 20).expect("a flush");
            }
        });
        scope.spawn(move || {
            while !done.load(Ordering::Acquire) {
                let least = made.load(Ordering::Acquire);
                let names = names(fs, fs.root());
                let unique: BTreeSet<_> = names.iter().collect();
                assert_eq!(unique.len(), names.len(), "a name was shown twice");
                let missing = (0..least).find(|number| !unique.contains(&number.to_string()));
                assert_eq!(missing, None, "{least} had been made");
            }
        });
        scope.spawn(move || {
            let mut random = Random::new(seed_of_run());
            while !done.load(Ordering::Acquire) {
                let Some(last) = made.load(Ordering::Acquire).checked_sub(1) else { continue };
                let name = format!("{}", random.below(last + 1));
                let file = fs.lookup(fs.root(), name.as_bytes()).expect("it was made");
                assert_eq!(fs.attr(file).expect("it was made").nlink, 1);
            }
        });
    });
    assert_eq!(names(&fs, fs.root()).len() as u64, FILES);
}
