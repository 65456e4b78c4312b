//! Delayed items as operations, readers and commits have them.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, Fault, FaultDevice, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{
    Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, Place, SetAttr, Timestamp,
};

use super::node::Items;
use super::*;
use crate::test_volumes::{in_memory, in_memory_of};
use crate::transaction::Live;
use crate::{Filesystem, Report, Stats, Volume};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, at: AT };

/// Nothing commits or flushes by itself.
fn quiet() -> OpenOptions {
    OpenOptions { commit_interval: None, ..OpenOptions::default() }
}

fn open(device: Arc<dyn BlockDevice>, options: &OpenOptions) -> Filesystem {
    let volume = Volume::open_writable(vec![device], options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("every volume has one")
}

fn place(dir: FileId, name: &str) -> Place<'_> {
    Place { dir, name: name.as_bytes() }
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

/// What `work` adds to the counters.
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

/// What is held for the items of the top level, in bytes of metadata.
fn held(fs: &Filesystem) -> u64 {
    let live = fs.volume().live().expect("it is writable");
    live.tree(fs.volume(), TreeId::FS).expect("it is there").hold.held()
}

fn index(offset: u64) -> Key {
    Key::new(257, ItemType::DIR_INDEX, offset)
}

#[test]
fn new_indexes_are_paid_by_the_leaf() {
    // Ten items of a hundred bytes, headers included, fill a leaf.
    let mut items = Items::default();
    let units = |items: &Items| items.load(false).units;
    for number in 0..30 {
        items.put(index(number), [0; 75], false, 1000);
        assert_eq!(units(&items), i64::try_from(number).unwrap() / 10 + 1, "{number}");
        assert_eq!(items.load(true).units, i64::try_from(number).unwrap() + 1);
    }
    // Which leaf they were counted to is not known any more.
    for number in 0..29 {
        assert!(items.remove(index(number)), "it never came to the tree");
        assert_eq!(units(&items), 3);
    }
    assert!(items.remove(index(29)));
    assert_eq!(items.load(false), Load::default());
    // With one leaf, what goes leaves room.
    for number in 0..100 {
        items.put(index(number), [0; 75], false, 1000);
        assert!(items.remove(index(number)));
        items.put(index(1000 + number % 5), [0; 75], false, 1000);
        assert_eq!(units(&items), 1, "{number}");
    }
}

#[test]
fn what_the_tree_has_is_paid_one_by_one() {
    let mut items = Items::default();
    for number in 0..10 {
        assert!(!items.remove(index(number)), "the tree has it");
    }
    assert_eq!(items.load(false).units, 10);
    let inode = Key::new(257, ItemType::INODE_ITEM, 0);
    for _ in 0..100 {
        items.put(inode, [0; 160], true, 1000);
    }
    assert_eq!(items.load(false).units, 11, "one inode, however often it changes");
    let new = Key::new(258, ItemType::INODE_ITEM, 0);
    items.put(new, [0; 160], false, 1000);
    assert_eq!(items.load(false).units, 12, "a leaf");
    items.put(new, [1; 160], false, 1000);
    assert_eq!(items.load(false).units, 13, "other items may be beside it");
    assert!(items.remove(new));
    assert_eq!(items.load(false).units, 11);
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

/// What is held for files in one new directory, at the peak, and what one item costs: in bytes.
fn held_for(files: u64, options: &OpenOptions) -> (u64, u64) {
    let fs = open(in_memory(16384), options);
    let dir = fs.mkdir(place(fs.root(), "dir"), &NEW).expect("a directory");
    let mut peak = 0;
    for number in 0..files {
        create(&fs, dir, &format!("file-{number:06}"));
        peak = peak.max(held(&fs));
    }
    assert_eq!(fs.volume().stats().commits, 0, "all of them waited");
    let unit = fs.volume().live().expect("it is writable").space.item_cost();
    fs.sync().expect("a commit");
    assert_eq!(held(&fs), 0);
    assert_eq!(names(&fs, dir).len() as u64, files);
    (peak, unit)
}

/// The peak of metadata held for creates in one directory grows by the leaf, not by the item.
#[test]
fn metadata_is_held_by_the_leaf() {
    let by_item = OpenOptions { reserve_by_item: true, ..quiet() };
    for files in [50, 200] {
        let (held, unit) = held_for(files, &by_item);
        assert!(held >= 4 * files * unit, "every item keeps its own unit");
    }
    for files in [1000, 4000, 16_000] {
        let (held, unit) = held_for(files, &quiet());
        // About 300 bytes of items a file, of which a leaf of 16 KiB has 50.
        let leaves = files * 300 / 16384 + 1;
        assert!(held < (leaves + 16) * unit, "{held} bytes for {files} files, {unit} for an item");
    }
}

/// Entries, inodes and names, moved and removed at random, with flushes and commits in between, are what a map says.
fn matches_a_map(options: &OpenOptions, node_size: u32) {
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
            94..98 => drop(fs.volume().flush_delayed(u64::MAX).expect("a flush")),
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
    assert_eq!(fs.volume().live().expect("it is writable").delayed.bytes(), 0);
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
    matches_a_map(&OpenOptions { reserve_by_item: true, ..quiet() }, 16384);
}

#[test]
fn names_are_what_a_map_says_without_delayed_items() {
    let options = OpenOptions { delayed_items: false, ..quiet() };
    matches_a_map(&options, 16384);
    let fs = open(in_memory(16384), &options);
    create(&fs, fs.root(), "file");
    assert_eq!(fs.volume().stats().delayed_queued, 0);
}

/// While names are made, flushed and committed, no reader misses one that was there when it began, or meets one twice.
#[test]
fn readers_miss_nothing_beside_flushes() {
    const FILES: u64 = 30_000;
    let options = OpenOptions { dirty_bytes: 4 << 20, ..quiet() };
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
                fs.volume().flush_delayed(1 << 20).expect("a flush");
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

/// However many threads there are, what is queued stays within the bound and an operation for each of them.
#[test]
fn the_backlog_is_bounded() {
    const THREADS: u64 = 64;
    /// What an operation of this test queues at most, with all that is counted beside the data.
    const OPERATION_BYTES: u64 = 2048;
    let options = OpenOptions { dirty_bytes: 1 << 20, ..quiet() };
    let fs = open(in_memory(16384), &options);
    let make = |thread: u64| {
        let dir = fs.mkdir(place(fs.root(), &format!("{thread}")), &NEW).expect("a directory");
        for number in 0..200 {
            create(&fs, dir, &format!("{number}"));
            let moved = format!("moved-{number}");
            fs.rename(place(dir, &number.to_string()), place(dir, &moved), AT).expect("a rename");
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| drop(scope.spawn(move || make(thread))));
    });
    let stats = fs.volume().stats();
    let bound = options.dirty_bytes / 2 + THREADS * OPERATION_BYTES + 4096;
    assert!(stats.delayed_peak_bytes <= bound, "{stats:?}");
    assert!(stats.flushes_by_writers > 0, "{stats:?}");
}

/// Makes files in a few directories of a small volume until there is no space, and removes them: how many there were, and how
/// many commits made room for them.
fn fill_and_empty(options: &OpenOptions) -> (u64, u64) {
    let fs = open(in_memory_of(16384, 128 << 20), options);
    let name = |number: u64| format!("directory-{number}");
    let make_dir = |number| fs.mkdir(place(fs.root(), &name(number)), &NEW).expect("a directory");
    let dirs: Vec<_> = (0..4).map(make_dir).collect();
    let mut files = 0;
    for (number, &dir) in (0..).zip(dirs.iter().cycle()) {
        match fs.create(place(dir, &format!("file-{number}")), &NEW) {
            Ok(_) => files += 1,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC);
                break;
            }
        }
    }
    for (number, &dir) in (0..files).zip(dirs.iter().cycle()) {
        fs.unlink(place(dir, &format!("file-{number}")), AT).expect("removing always works");
    }
    fs.sync().expect("a commit");
    let held = &fs.volume().live().expect("it is writable").delayed.held;
    assert_eq!(held.load(Ordering::Relaxed), 0, "all came to the tree");
    (files, fs.volume().stats().commits_for_space)
}

/// What a few dozen queued files held was all that was left of a full volume: each further file waited for a flush and a commit,
/// of which there were five times as many as without delayed items.
#[test]
fn a_full_volume_takes_few_more_commits_than_without_delayed_items() {
    let (files, commits) = fill_and_empty(&quiet());
    let without = OpenOptions { delayed_items: false, ..quiet() };
    let (files_without, commits_without) = fill_and_empty(&without);
    assert!(files >= files_without / 10 * 9, "{files} files, and {files_without}");
    assert!(commits <= 2 * commits_without, "{commits} commits, and {commits_without}");
}

/// Makes files until so much is held for them that a chunk should be allocated.
fn make_until_chunk_is_needed(fs: &Filesystem) {
    let space = &fs.volume().live().expect("it is writable").space;
    let first = fs.volume().stats().delayed_queued;
    let names = (first..).map(|number| format!("file-{number}"));
    for name in names.take_while(|_| !space.needs_chunk()) {
        create(fs, fs.root(), &name);
    }
}

/// Where most of the devices belongs to no chunk, one is allocated before anybody waits, nothing is flushed for want of room, and the commit
/// lets the chunk be. It was allocated by who waited, removed by the next commit and allocated again.
#[test]
fn a_chunk_comes_before_anybody_waits_and_stays() {
    let by_item = OpenOptions { reserve_by_item: true, ..quiet() };
    let fs = open(in_memory(16384), &by_item);
    let chunks = || fs.volume().chunks().count();
    create(&fs, fs.root(), "first");
    let waited = || fs.volume().space_stats().tickets_granted;
    let (before, waited_before) = (chunks(), waited());
    for round in 1..=2 {
        make_until_chunk_is_needed(&fs);
        fs.volume().make_room_ahead().expect("a chunk");
        assert_eq!(chunks(), before + round, "one more");
        let states = fs.volume().space_stats().flushes;
        let ahead: Vec<_> = states.iter().map(|flush| flush.entered_ahead).collect();
        assert_eq!(ahead, [0, 0, 0, round as u64, 0]);
    }
    fs.sync().expect("a commit");
    assert_eq!(chunks(), before + 2, "they are needed again");
    assert_eq!(waited(), waited_before);
    assert_eq!(fs.volume().stats().flushes_by_writers, 0);
}

/// A volume with this many files in its root, on the devices, and its device.
fn with_files(files: u64) -> Arc<MemoryDevice> {
    let device = in_memory(4096);
    let fs = open(device.clone(), &quiet());
    for number in 0..files {
        create(&fs, fs.root(), &format!("{number}"));
    }
    fs.sync().expect("a commit");
    device
}

/// What is on the devices is what was committed: nothing of what came later, and it can be changed.
fn assert_holds(device: Arc<MemoryDevice>, files: u64) {
    let fs = open(device, &quiet());
    let mut there: Vec<u64> =
        names(&fs, fs.root()).iter().map(|name| name.parse().expect("a number")).collect();
    there.sort_unstable();
    assert!(there.into_iter().eq(0..files));
    for number in 0..files {
        let file = fs.lookup(fs.root(), number.to_string().as_bytes()).expect("it is there");
        assert_eq!(fs.attr(file).expect("it is there").nlink, 1);
    }
    create(&fs, fs.root(), "later");
    fs.sync().expect("a commit");
}

/// A leaf that a flush needs does not read. Whoever flushes is told, nothing is written any more, and what is queued can still be
/// read.
#[test]
fn a_flush_that_fails_ends_all_writing() {
    const FILES: u64 = 3000;
    type Flush = fn(&Filesystem) -> Result<()>;
    let flushes: [Flush; 3] = [
        |fs| fs.volume().flush_delayed(u64::MAX).map(drop),
        |fs| fs.sync(),
        |fs| {
            // Until an operation finds too much queued. Some fail before that, because their name belongs to the leaf.
            let make = |number| fs.create(place(fs.root(), &format!("more-{number}")), &NEW);
            let is_broken = || fs.volume().live().and_then(Live::require_whole).is_err();
            let mut outcomes = (0..).map(make);
            outcomes.find(|outcome| outcome.is_err() && is_broken()).expect("no end").map(drop)
        },
    ];
    for flush in flushes {
        let memory = with_files(FILES);
        let device = Arc::new(FaultDevice::new(memory.clone()));
        let options = OpenOptions { cache_bytes: 0, dirty_bytes: 8 << 20, ..quiet() };
        let fs = open(device.clone(), &options);
        // Entries by hash go everywhere between those that are there.
        for number in 0..500 {
            create(&fs, fs.root(), &format!("new-{number}"));
        }
        for physical in places_of_hashes(fs.volume()) {
            device.add(physical..physical + 4096, Fault::Error);
        }
        let error = flush(&fs).expect_err("a leaf does not read");
        assert!(matches!(error, Error::Io { .. } | Error::Corrupt(_)), "{error}");
        let refused = fs.create(place(fs.root(), "late"), &NEW).expect_err("nothing is written");
        assert_eq!(refused.errno(), Errno::ROFS);
        assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
        for number in 0..500 {
            let name = format!("new-{number}");
            match fs.lookup(fs.root(), name.as_bytes()) {
                Ok(file) => assert_eq!(fs.attr(file).expect("it is queued").nlink, 1),
                Err(error) => assert_ne!(error.errno(), Errno::NOENT, "{name}"),
            }
        }
        drop(fs);
        assert_holds(memory, FILES);
    }
}

/// The device fails while a commit writes what was flushed.
#[test]
fn a_commit_that_fails_leaves_the_last_one() {
    const FILES: u64 = 300;
    let memory = with_files(FILES);
    let device = Arc::new(FaultDevice::new(memory.clone()));
    let fs = open(device.clone(), &quiet());
    for number in 0..200 {
        create(&fs, fs.root(), &format!("new-{number}"));
        fs.unlink(place(fs.root(), &number.to_string()), AT).expect("it is there");
    }
    device.add(0..memory.size_bytes(), Fault::Error);
    assert!(matches!(fs.sync(), Err(Error::Io { .. })));
    assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
    drop(fs);
    assert_holds(memory, FILES);
}

/// The copies of the first leaf below the root of the top level that has entries by hash, on the device.
fn places_of_hashes(volume: &Volume) -> Vec<u64> {
    let mut block = volume.block(&volume.tree(TreeId::FS).unwrap().expected()).unwrap();
    while block.header().level > 0 {
        let slot = block.floor(Key::new(256, ItemType::DIR_ITEM, 0x7000_0000)).unwrap();
        if block.header().level == 1 {
            let logical = block.pointers()[slot].logical();
            let places = volume.write_places(logical, 4096).unwrap();
            return places.iter().map(|(_, physical, _)| physical.0).collect();
        }
        block = volume.block(&block.child_expected(slot, TreeId::FS)).unwrap();
    }
    panic!("the tree has no leaves below its root");
}

/// A panic inside a flush left the items in their node for good, where no later flush took them: the next commit went
/// on without them.
#[test]
fn a_flush_that_panics_ends_all_writing() {
    const FILES: u64 = 3000;
    let memory = with_files(FILES);
    let device = Arc::new(FaultDevice::new(memory.clone()));
    let reporter = Arc::new(|report: &Report| panic!("whoever is told panics: {report}"));
    let options = OpenOptions { cache_bytes: 0, reporter: Some(reporter), ..quiet() };
    let fs = open(device.clone(), &options);
    for number in 0..500 {
        create(&fs, fs.root(), &format!("new-{number}"));
    }
    let first = places_of_hashes(fs.volume())[0];
    device.add(first..first + 4096, Fault::Error);
    let flush = || fs.volume().flush_delayed(u64::MAX);
    std::thread::scope(|scope| scope.spawn(flush).join()).expect_err("a panic");
    assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
    let refused = fs.create(place(fs.root(), "late"), &NEW).expect_err("nothing is written");
    assert_eq!(refused.errno(), Errno::ROFS);
    drop(fs);
    assert_holds(memory, FILES);
}

/// That everything is flushed when a commit finishes was only looked at in debug builds.
#[test]
fn no_commit_goes_on_without_what_is_queued() {
    let memory = with_files(10);
    let fs = open(memory.clone(), &quiet());
    create(&fs, fs.root(), "new");
    let delayed = &fs.volume().live().expect("it is writable").delayed;
    let id = NodeId { tree: TreeId::FS, first: 256, kind: Kind::Indexes };
    {
        // As if the thread that flushes them were gone.
        let mut shard = delayed.shard(id).write();
        let node = shard.get_mut(&id).expect("the directory has a new entry");
        node.flushing = Some(Arc::new(std::mem::take(&mut node.active)));
    }
    let error = fs.sync().expect_err("an item is not in the tree");
    assert!(matches!(error, Error::Corrupt(_)), "{error}");
    assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
    drop(fs);
    assert_holds(memory, 10);
}
