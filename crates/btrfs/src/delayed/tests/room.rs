//! Delayed items where there is little room.

use super::*;
use crate::test_volumes::in_memory_of;

/// The cost of making and removing files.
struct ChangeCost {
    files: u64,
    /// Commits to make room.
    commits: u64,
    /// Sets of items that the removals flushed.
    flushed: u64,
}

/// Makes files in a few directories of a small volume until there is no space, and removes them.
fn fill_and_empty(options: &EngineOptions) -> ChangeCost {
    let fs = open(in_memory_of(16384, 64 << 20), options);
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
    let sets = || fs.volume().stats().flushes_by_writers;
    let before = sets();
    for (number, &dir) in (0..files).zip(dirs.iter().cycle()) {
        fs.unlink(place(dir, &format!("file-{number}")), AT).expect("removing always works");
    }
    let flushed = sets() - before;
    for (number, &dir) in (0..files).zip(dirs.iter().cycle()) {
        let found = fs.lookup(dir, format!("file-{number}").as_bytes());
        assert_eq!(found.expect_err("it was removed").errno(), Errno::NOENT);
    }
    (0..4).for_each(|number| fs.rmdir(place(fs.root(), &name(number)), AT).expect("it is empty"));
    fs.sync().expect("a commit");
    let held = &fs.volume().delayed.held;
    assert_eq!(held.get(), 0, "all came to the tree");
    ChangeCost { files, commits: fs.volume().stats().commits_for_space, flushed }
}

/// On a full volume a few dozen queued files once held all that was left. Each further file waited
/// for a flush and a commit, and there were five times as many commits as without delayed items.
/// Each removal queued items in four nodes and flushed them one by one at once.
#[test]
fn a_full_volume_is_no_dearer_than_without_delayed_items() {
    let took = fill_and_empty(&quiet());
    let without = fill_and_empty(&EngineOptions {
        mechanisms: Mechanisms::default().delayed_items(false),
        ..quiet()
    });
    assert!(took.files >= without.files / 10 * 9, "{} files, and {}", took.files, without.files);
    let (commits, most) = (took.commits, 2 * without.commits);
    assert!(commits <= most, "{commits} commits, and {most} at the most");
    assert!(took.flushed < took.files / 2, "{} flushes of {} files", took.flushed, took.files);
}

/// Makes files until there is no space for more.
fn fill(fs: &Filesystem) {
    let mut names = (0..).map(|number| format!("file-{number}"));
    let full = names.find_map(|name| fs.create(place(fs.root(), &name), &NEW).err());
    assert_eq!(full.expect("there is an end").errno(), Errno::NOSPC);
}

/// On a full volume an item that bypassed the queue would be hidden by an older queued one.
#[test]
fn nothing_goes_past_what_waits_in_its_node() {
    let fs = open(in_memory_of(16384, 64 << 20), &quiet());
    fill(&fs);
    let volume = fs.volume();
    let file = fs.lookup(fs.root(), b"file-0").expect("it was made");
    let key = Key::new(file.ino, ItemType::INODE_ITEM, 0);
    let stored = || {
        let root = volume.tree(TreeId::FS).expect("it is there");
        crate::tree::with_item(&volume.rooms, root, key, |data| Ok(data.to_vec()))
            .expect("it reads")
    };
    {
        let handle = volume.join_to_remove().expect("removing always works");
        let tree = handle.tree(TreeId::FS).expect("it is there");
        let queues = || volume.delayed.queues(&handle, &tree, [key].into_iter());
        assert!(!queues(), "nothing waits");
        let mut queue =
            OperationQueue::begin(&handle, &volume.delayed, &tree, 1).expect("enough is reserved");
        queue.put(key, stored().expect("the inode is in the tree"), true);
        drop(queue);
        assert!(queues(), "something waits");
    }
    fs.unlink(place(fs.root(), "file-0"), AT).expect("removing always works");
    volume.delayed.flush(&volume.base, u64::MAX).expect("a flush");
    assert_eq!(stored(), None, "it was put back");
}

/// Makes files until so much is held for them that a chunk is to be allocated ahead.
fn make_until_chunk_is_needed(fs: &Filesystem) {
    let space = &fs.volume().live().expect("it is writable").space;
    let first = fs.volume().stats().delayed_queued;
    let names = (first..).map(|number| format!("file-{number}"));
    for name in names.take_while(|_| !space.needs_chunk()) {
        create(fs, fs.root(), &name);
    }
}

/// On a roomy volume a chunk is allocated before any thread waits, no item is flushed for want of
/// room, and the commit keeps the chunk. Once a waiting thread allocated it, the next commit
/// removed it, and it was allocated again.
#[test]
fn a_chunk_comes_before_anybody_waits_and_stays() {
    let by_item =
        EngineOptions { mechanisms: Mechanisms::default().reserve_by_item(true), ..quiet() };
    let fs = open(in_memory(16384), &by_item);
    let chunks = || fs.volume().chunks().count();
    create(&fs, fs.root(), "first");
    let waited = || fs.volume().space_stats().tickets_granted;
    let (before, waited_before) = (chunks(), waited());
    for round in 1..=2 {
        make_until_chunk_is_needed(&fs);
        crate::upkeep::make_room_ahead(fs.volume()).expect("a chunk");
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
