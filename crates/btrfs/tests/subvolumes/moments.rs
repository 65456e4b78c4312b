//! A snapshot among many writers shows one moment.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use offshoot_btrfs::Filesystem;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, NEW, at, judge, open, place, top};

const THREADS: usize = 4;

/// The length of a file after it was written.
const LEN: usize = 5000;

/// The beginning and the end of an action, by a clock that counts every event.
#[derive(Clone, Copy, Debug)]
struct ActionMoments {
    begin: u64,
    end: u64,
}

#[derive(Default)]
struct Clock(AtomicU64);

impl Clock {
    fn during<T>(&self, work: impl FnOnce() -> T) -> (T, ActionMoments) {
        let begin = self.0.fetch_add(1, SeqCst);
        let made = work();
        (made, ActionMoments { begin, end: self.0.fetch_add(1, SeqCst) })
    }
}

/// The most files that a thread makes.
const MOST: usize = 300;

/// Makes files and writes each of them, until `is_over` is set. Each file is two actions: it is
/// made, and it is written.
fn write(
    fs: &Filesystem,
    thread: usize,
    clock: &Clock,
    is_over: &AtomicBool,
) -> Vec<ActionMoments> {
    let dir = at(fs, "live");
    let mut done = Vec::new();
    while !is_over.load(SeqCst) && done.len() < 2 * MOST {
        let name = format!("{thread}-{}", done.len() / 2);
        let (file, made) = clock.during(|| fs.create(place(dir, &name), &NEW).expect("a file"));
        let ((), written) =
            clock.during(|| fs.write(file, 0, &[7; LEN], AT).expect("there is room"));
        done.extend([made, written]);
    }
    done
}

/// How many actions of each thread are in the snapshot `name`. Requires that none is missing in
/// between.
fn found(fs: &Filesystem, name: &str) -> [usize; THREADS] {
    let dir = at(fs, name);
    let mut files = vec![Vec::new(); THREADS];
    fs.read_dir(dir, 0, &mut |entry| {
        let name = std::str::from_utf8(entry.name).expect("a plain name");
        let (thread, number) = name.split_once('-').expect("two numbers");
        let parsed = |text: &str| text.parse::<usize>().expect("a number");
        files[parsed(thread)].push((parsed(number), entry.file));
        ControlFlow::Continue(())
    })
    .expect("the snapshot reads");
    let mut things = [0; THREADS];
    for (thread, mut files) in files.into_iter().enumerate() {
        files.sort();
        for (index, &(number, file)) in files.iter().enumerate() {
            assert_eq!(number, index, "{name} has a gap in the files of thread {thread}");
            let size = fs.attr(file).expect("it is there").size;
            let is_last = index + 1 == files.len();
            assert!(
                size == LEN as u64 || (size == 0 && is_last),
                "{name}: {thread}-{number}: {size}"
            );
            let mut data = vec![0; LEN];
            let read = fs.read(file, 0, &mut data).expect("it reads");
            assert!(data[..read].iter().all(|&byte| byte == 7), "{name}: {thread}-{number}");
            things[thread] += if size == 0 { 1 } else { 2 };
        }
    }
    things
}

/// Requires one moment: if an action ended before another began, no snapshot has only the later
/// one.
fn require_moment(
    name: &str,
    taken: ActionMoments,
    done: &[Vec<ActionMoments>],
    found: [usize; THREADS],
) {
    let parts = || done.iter().zip(found).map(|(all, count)| all.split_at(count));
    let (last_begin, first_end) = (
        parts().filter_map(|(present, _)| present.last()).map(|one| one.begin).max(),
        parts().filter_map(|(_, missing)| missing.first()).map(|one| one.end).min(),
    );
    let (last_begin, first_end) = (last_begin.unwrap_or(0), first_end.unwrap_or(u64::MAX));
    assert!(last_begin < first_end, "{name} has {last_begin} and not {first_end}");
    assert!(first_end > taken.begin, "{name}, taken in {taken:?}, has not {first_end}");
    assert!(last_begin < taken.end, "{name}, taken in {taken:?}, has {last_begin}");
}

/// Takes snapshots while threads write, and checks all of them.
pub(crate) fn among_writers(disks: &Disks, snapshots: usize) {
    let volume = open(disks);
    let fs = top(&volume);
    let live = fs.create_subvolume(place(fs.root(), "live"), &NEW).expect("a subvolume");
    let (clock, is_over) = (Clock::default(), AtomicBool::new(false));
    let name = |number: usize| format!("snapshot-{number}");
    let (taken, done) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (fs, clock, is_over) = (&fs, &clock, &is_over);
                scope.spawn(move || write(fs, thread, clock, is_over))
            })
            .collect();
        let taken: Vec<ActionMoments> = (0..snapshots)
            .map(|number| {
                // Between any two snapshots, the threads that still run do something.
                let goal = clock.0.load(SeqCst) + 20;
                while clock.0.load(SeqCst) < goal && threads.iter().any(|one| !one.is_finished()) {
                    std::thread::yield_now();
                }
                let (to, is_read_only) = (name(number), number % 2 == 0);
                let take = || fs.snapshot(live, place(fs.root(), &to), is_read_only, AT);
                let (taken, during) = clock.during(take);
                taken.expect("a snapshot");
                during
            })
            .collect();
        is_over.store(true, SeqCst);
        let done: Vec<_> = threads.into_iter().map(|one| one.join().expect("it wrote")).collect();
        (taken, done)
    });
    let most = done.iter().map(Vec::len).sum::<usize>();
    assert!(most > snapshots, "the threads did {most} things beside {snapshots} snapshots");
    for (number, &taken) in taken.iter().enumerate() {
        require_moment(&name(number), taken, &done, found(&fs, &name(number)));
    }
    fs.sync().expect("a commit");
    for (number, &taken) in taken.iter().enumerate() {
        require_moment(&name(number), taken, &done, found(&fs, &name(number)));
    }
}

#[test]
fn snapshots_among_writers() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 2048);
    disks.mkfs(&["-n", "4k"]);
    among_writers(&disks, 16);
    judge(&disks, 100);
}
