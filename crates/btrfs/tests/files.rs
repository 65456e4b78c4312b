//! Many files, made and removed by many threads: in a directory of each thread, or all in one.
//!
//! The threads make all files and commit. The volume is opened again, and the threads remove half
//! of the files in random order. Then `btrfs check` must find nothing, and our own reader must find
//! the other half and nothing else.
//!
//! `cargo xtask campaign files` does this with a million files in release mode. It prints how fast
//! that was and how much memory it took.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use offshoot_btrfs::{
    BtrfsVolume, EngineOptions, Filesystem, MkfsOptions, Stats, SubvolumeId, mkfs,
};
use offshoot_device::{BlockDevice, FileDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut, NewFile, Timestamp};
use uuid::Uuid;

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// How many files the threads make, and where.
#[derive(Clone, Copy, Debug)]
struct FilesJob {
    files: u64,
    threads: u64,
    /// Whether all files are in one directory; otherwise each thread has its own.
    is_in_one: bool,
}

impl FilesJob {
    fn dir_of(self, thread: u64) -> String {
        if self.is_in_one { "all".to_owned() } else { format!("of-{thread}") }
    }

    /// The numbers of a thread's files.
    fn numbers(self, thread: u64) -> std::ops::Range<u64> {
        thread * self.files / self.threads..(thread + 1) * self.files / self.threads
    }

    /// Runs `work` on every thread, with the directory and the numbers of its files.
    fn run(self, filesystem: &Filesystem, work: impl Fn(FileId, u64) + Sync) {
        let work = &work;
        std::thread::scope(|scope| {
            for thread in 0..self.threads {
                scope.spawn(move || work(directory(filesystem, &self.dir_of(thread)), thread));
            }
        });
        filesystem.sync().expect("a commit");
    }
}

fn device(image: &Path) -> Arc<dyn BlockDevice> {
    Arc::new(FileDevice::open_writable(image).expect("no other program uses the image"))
}

fn open(image: &Path) -> Filesystem {
    let volume = BtrfsVolume::open_writable(vec![device(image)], &EngineOptions::default());
    volume.expect("it opens").filesystem(SubvolumeId::FS).expect("every volume has one")
}

fn directory(filesystem: &Filesystem, name: &str) -> FileId {
    filesystem.lookup(filesystem.root(), name.as_bytes()).expect("it was made")
}

fn name(number: u64) -> String {
    format!("file-{number:07}")
}

/// The numbers of the files that a thread removes, in random order.
fn removed(job: FilesJob, thread: u64, seed: u64) -> Vec<u64> {
    let mut random = Random::new(seed.wrapping_add(thread));
    let mut numbers: Vec<_> = job.numbers(thread).collect();
    for last in (1..numbers.len()).rev() {
        let other = usize::try_from(random.below(last as u64 + 1)).expect("below a usize");
        numbers.swap(last, other);
    }
    numbers.truncate(numbers.len() / 2);
    numbers
}

fn check(image: &Path) {
    let said = run("btrfs", &["check", "--readonly", image.to_str().expect("a plain path")]);
    assert!(!said.contains("mismatch"), "{said}");
}

/// The numbers of the files in a directory.
fn listed(filesystem: &Filesystem, dir: &str) -> BTreeSet<u64> {
    let mut numbers = BTreeSet::new();
    let mut visit = |entry: offshoot_vfs::DirEntry<'_>| {
        let name = str::from_utf8(entry.name).expect("a plain name");
        let number = name.strip_prefix("file-").and_then(|number| number.parse().ok());
        assert!(numbers.insert(number.expect("one of the files")), "{name} is there twice");
        ControlFlow::Continue(())
    };
    let dir = directory(filesystem, dir);
    filesystem.read_dir(dir, 0, &mut visit).expect("it can be read");
    numbers
}

fn make_and_remove(job: FilesJob) {
    let Some(judges) = judges::require() else { return };
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let disks = Disks::create(&judges, 1, 16 << 10);
    let image = &disks.images()[0];
    let options = MkfsOptions::new(Uuid::from_u128(7), AT);
    mkfs(&[device(image)], &options).expect("a volume");
    println!("{job:?}, OFFSHOOT_SEED={seed}");

    forget_peak();
    let filesystem = open(image);
    for thread in 0..if job.is_in_one { 1 } else { job.threads } {
        let name = job.dir_of(thread);
        filesystem
            .mkdir(EntryPlace { dir: filesystem.root(), name: name.as_bytes() }, &NEW)
            .expect("a directory");
    }
    let started = Instant::now();
    job.run(&filesystem, |dir, thread| {
        for number in job.numbers(thread) {
            let name = name(number);
            filesystem.create(EntryPlace { dir, name: name.as_bytes() }, &NEW).expect("a file");
        }
    });
    report("made", job.files, started, &filesystem);
    drop(filesystem);

    forget_peak();
    let filesystem = open(image);
    let started = Instant::now();
    let gone: Vec<_> = (0..job.threads).map(|thread| removed(job, thread, seed)).collect();
    job.run(&filesystem, |dir, thread| {
        for &number in &gone[usize::try_from(thread).expect("few")] {
            let name = name(number);
            filesystem.unlink(EntryPlace { dir, name: name.as_bytes() }, AT).expect("it was made");
        }
    });
    report("removed", gone.iter().map(|gone| gone.len() as u64).sum(), started, &filesystem);
    drop(filesystem);

    check(image);
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
    let filesystem = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    let mut left = vec![BTreeSet::new(); if job.is_in_one { 1 } else { gone.len() }];
    for (thread, gone) in (0..).zip(&gone) {
        let left = &mut left[if job.is_in_one { 0 } else { usize::try_from(thread).expect("few") }];
        left.extend(job.numbers(thread));
        for number in gone {
            assert!(left.remove(number));
        }
    }
    for (thread, left) in (0..).zip(left) {
        assert_eq!(listed(&filesystem, &job.dir_of(thread)), left);
    }
}

/// Prints the work that was done, its speed, and the memory that it took.
fn report(what: &str, files: u64, started: Instant, filesystem: &Filesystem) {
    let seconds = started.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "a speed is not exact")]
    let speed = files as f64 / seconds;
    let Stats { lock_waits, splits, pushes, merges, copies, commits, .. } =
        filesystem.volume().stats();
    println!(
        "  {what:<7} {files:>8} files {speed:>9.0} a second, {:>4} MiB at most; \
         {commits} commits, {lock_waits} waits, {splits} splits, {pushes} pushes, {merges} merges, {copies} copies",
        peak_kib().map_or_else(|| "?".to_owned(), |kib| (kib / 1024).to_string())
    );
}

/// Resets the peak of memory, if the kernel allows it.
fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The largest resident set of this process, in KiB.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[test]
fn in_directories_of_their_own() {
    make_and_remove(FilesJob { files: 20_000, threads: 4, is_in_one: false });
}

#[test]
fn in_one_directory() {
    make_and_remove(FilesJob { files: 20_000, threads: 4, is_in_one: true });
}

/// Runs every job in a process of its own, so that each has its own peak of memory.
#[test]
#[ignore = "takes minutes; `cargo xtask campaign files` runs it"]
fn campaign() {
    let files = std::env::var("OFFSHOOT_FILES").unwrap_or_else(|_| "1000000".to_owned());
    for is_in_one in [false, true] {
        for threads in [1, 2, 12] {
            let mut job = Command::new(std::env::current_exe().expect("this program"));
            job.args(["--ignored", "--nocapture", "--exact", "one_of_the_campaign"]);
            job.env("OFFSHOOT_JOB", format!("{files} {threads} {is_in_one}"));
            assert!(job.status().expect("it starts").success());
        }
    }
}

#[test]
#[ignore = "`campaign` runs it"]
fn one_of_the_campaign() {
    let job = std::env::var("OFFSHOOT_JOB").expect("FILES THREADS true|false");
    let [files, threads, is_in_one] = job.split(' ').collect::<Vec<_>>()[..] else {
        panic!("not a job: {job}");
    };
    let number = |text: &str| text.parse().expect("a number");
    let is_in_one = is_in_one.parse().expect("true or false");
    make_and_remove(FilesJob { files: number(files), threads: number(threads), is_in_one });
}
