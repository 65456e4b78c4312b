//! The limit of the queue, and the writers that wait until less is queued.

use std::time::Duration;

use offshoot_vfs::{SetTime, XattrMode};

use super::units::index;
use super::*;
use crate::space::Claim;

/// The most memory that an operation of these tests queues, with all overhead.
const OPERATION_BYTES: u64 = 3072;

/// The most that may be queued with so many threads.
fn backlog_bound(options: &EngineOptions, threads: u64) -> u64 {
    options.dirty_bytes / 8 + threads * OPERATION_BYTES + 4096
}

/// One operation of any kind on the files of a directory.
fn change_something(fs: &Filesystem, dir: FileId, random: &mut Random) -> Result<()> {
    let name = |number| format!("file-{number}");
    let (name, other) = (name(random.below(30)), name(random.below(30)));
    let (here, there) = (place(dir, &name), place(dir, &other));
    let file = fs.lookup(dir, name.as_bytes());
    match (random.below(9), file) {
        (0, _) | (_, Err(_)) => fs.create(here, &NEW).map(drop),
        (1, _) => fs.unlink(here, AT),
        (2 | 3, _) => fs.rename(here, there, AT),
        (4, Ok(file)) => fs.link(file, there, AT),
        (5, Ok(file)) => fs.write(file, random.below(8) << 12, &[7; 512], AT),
        (6, Ok(file)) => {
            let size = Some(random.below(1 << 15));
            fs.set_attr(file, &SetAttr { size, ..SetAttr::default() }, AT)
        }
        (7, Ok(file)) => fs.set_xattr(file, b"user.x", &[7; 20], XattrMode::Set, AT),
        (_, Ok(file)) => {
            let mtime = Some(SetTime::To(Timestamp { secs: 7, nanos: 0 }));
            fs.set_attr(file, &SetAttr { mtime, ..SetAttr::default() }, AT)
        }
    }
}

/// Whatever several threads do, the queue stays within the limit and one operation for each of
/// them. Returns the counters at the end.
fn bounded(options: &EngineOptions) -> Stats {
    const THREADS: u64 = 64;
    let fs = open(in_memory(16384), options);
    let seed = seed_of_run();
    let work = |thread: u64| {
        let mut random = Random::new(seed.wrapping_add(thread));
        let dir = fs.mkdir(place(fs.root(), &format!("{thread}")), &NEW).expect("a directory");
        for _ in 0..400 {
            match change_something(&fs, dir, &mut random) {
                Ok(()) | Err(Error::Posix { errno: Errno::EXIST | Errno::NOENT, .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| drop(scope.spawn(move || work(thread))));
    });
    let stats = fs.volume().stats();
    assert!(stats.delayed_peak_bytes <= backlog_bound(options, THREADS), "{stats:?}");
    fs.sync().expect("a commit");
    assert_eq!(held(&fs), 0);
    stats
}

/// Without a thread of the volume, writers flush everything above the limit.
#[test]
fn the_backlog_is_bounded_by_writers() {
    let stats = bounded(&EngineOptions { dirty_bytes: 1 << 20, ..quiet() });
    assert_eq!(stats.flushes_in_background, 0);
    assert!(stats.flushes_by_writers > 0, "{stats:?}");
}

/// The thread of the volume begins to flush before writers must.
#[test]
fn the_backlog_is_bounded_in_the_background() {
    let never = Some(Duration::from_secs(3600));
    let stats = bounded(&EngineOptions { dirty_bytes: 4 << 20, commit_interval: never, ..quiet() });
    assert!(stats.flushes_in_background > 0, "{stats:?}");
}

/// Write-back once queued the inode of every buffered file, however much was queued already.
#[test]
fn write_back_has_the_same_bound() {
    const FILES: u64 = 240;
    let options = EngineOptions { dirty_bytes: 1 << 20, ..quiet() };
    let fs = open(in_memory(16384), &options);
    let files: Vec<_> = (0..FILES).map(|n| create(&fs, fs.root(), &format!("{n}"))).collect();
    fs.sync().expect("a commit");
    for &file in &files {
        fs.write(file, 0, &[7; 3000], AT).expect("there is room");
    }
    let delayed = &fs.volume().delayed;
    for number in 0.. {
        if delayed.bytes() + OPERATION_BYTES > delayed.most_bytes() {
            break;
        }
        create(&fs, fs.root(), &format!("new-{number}"));
    }
    fs.sync().expect("a commit");
    let peak = fs.volume().stats().delayed_peak_bytes;
    assert!(peak <= backlog_bound(&options, 1), "{peak} bytes");
}

/// Gives another thread the time to fall asleep.
pub(super) fn fall_asleep() {
    std::thread::sleep(Duration::from_millis(50));
}

/// A writer that found too much queued once waited for a flush to end, although all items had been
/// taken back and were about to be counted.
#[test]
fn who_waits_is_told_that_items_are_gone() {
    let options = EngineOptions { dirty_bytes: 1 << 16, ..quiet() };
    let fs = open(in_memory(16384), &options);
    let volume = fs.volume();
    let delayed = &volume.delayed;
    std::thread::scope(|scope| {
        let handle = volume.join_for(100, Claim::Work).expect("there is room");
        let tree = handle.tree(TreeId::FS).expect("it is there");
        let mut queue = OperationQueue::begin(&handle, &volume.delayed, &tree, 100)
            .expect("enough is reserved");
        (0..100).for_each(|at| queue.put(index(at), [0; 75], false));
        queue.settle();
        assert!(delayed.bytes() > delayed.most_bytes());
        (0..100).for_each(|at| queue.remove(index(at)));
        let waiter = scope.spawn(|| volume.delayed.limit(&volume.base));
        while delayed.backlog.waiting() == 0 && !waiter.is_finished() {
            std::thread::yield_now();
        }
        fall_asleep();
        drop(queue);
        drop(handle);
        waiter.join().expect("no panic").expect("nothing is left to be flushed");
    });
    assert_eq!((delayed.bytes(), delayed.dirties()), (0, 0));
}

/// Tells the other threads to end, even after a panic.
struct EndThreads<'a>(&'a AtomicBool);

impl Drop for EndThreads<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// While other threads queued more all the time, the thread of the volume once flushed without end,
/// and made no timed commit.
#[test]
fn easing_leaves_what_comes_later() {
    const WRITERS: u64 = 4;
    let options = EngineOptions { dirty_bytes: 4 << 20, ..quiet() };
    let fs = open(in_memory(16384), &options);
    let done = AtomicBool::new(false);
    let most_bytes = fs.volume().delayed.most_bytes();
    std::thread::scope(|scope| {
        let (fs, done) = (&fs, &done);
        let _over = EndThreads(done);
        for thread in 0..WRITERS {
            let dir = fs.mkdir(place(fs.root(), &format!("{thread}")), &NEW).expect("a directory");
            scope.spawn(move || {
                let _over = EndThreads(done);
                for number in 0.. {
                    create(fs, dir, &format!("{number}"));
                    if done.load(Ordering::Acquire) {
                        break;
                    }
                }
            });
        }
        let delayed = &fs.volume().delayed;
        for _ in 0..20 {
            while delayed.bytes() <= most_bytes / 2 {
                assert!(!done.load(Ordering::Acquire), "a writer failed");
                std::thread::yield_now();
            }
            let before = fs.volume().stats().flushes_in_background;
            let nodes: usize = delayed.shards.iter().map(|shard| shard.read().len()).sum();
            fs.volume().delayed.ease(&fs.volume().base).expect("a flush");
            let flushed = fs.volume().stats().flushes_in_background - before;
            // Nodes that were added between the count and the flush. On a slow machine these may be
            // several.
            let most = nodes.max(32) as u64 + 4 * WRITERS;
            assert!(flushed <= most, "{flushed} nodes were flushed, and there were {nodes}");
        }
    });
}
