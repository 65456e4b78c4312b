//! Trimming and discarding: the engine discards free space, and nothing else.
//!
//! | test | judge |
//! |---|---|
//! | volumes of the kernel of every profile, trimmed | the kernel's own `fstrim` on a copy, `btrfs check`, the kernel's mount |
//! | files that are written, read and removed while other threads trim and commits discard | their bytes, `btrfs check`; the device leaves garbage where it discards |
//! | devices that fail to discard, or cannot | errors and reports by name |
//! | `discard`, `flush_on_commit` | the blocks of an image; what a volume shows that was dropped without a sync |
//!
//! `tests/crash` has power cuts among discards.

use std::fmt::Debug;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use offshoot_btrfs::{
    BtrfsVolume, EngineOptions, Filesystem, MkfsOptions, SubvolumeId, VolumeReport, mkfs,
};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_device::{BlockDevice, Fault, FaultDevice, MemoryDevice, RequestKind};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::compare::compare;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::threads::SetOnDrop;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, Timestamp,
};
use uuid::Uuid;

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
const MIB: u64 = 1 << 20;

type TrimMembers = Vec<Arc<dyn BlockDevice>>;

/// How much more we may leave than the kernel, which writes while it mounts.
const SLACK_BYTES: u64 = 4 * MIB;

/// Files of all kinds, with gaps between them where removed files were.
fn with_holes(root: &Path) {
    fill::everything(root);
    let all: Vec<_> = (0..24).map(|number| root.join(format!("large-{number}"))).collect();
    for (number, path) in (1..).zip(&all) {
        fill::write(path, &Random::new(number).bytes(2 << 20));
    }
    fill::sync(root);
    for path in all.iter().step_by(2) {
        std::fs::remove_file(path).expect("it is there");
    }
    fill::sync(root);
}

/// How many bytes the images take on the host.
fn allocated(disks: &Disks) -> u64 {
    let blocks = |image| std::fs::metadata(image).expect("an image").blocks();
    disks.images().iter().map(|image| blocks(image) * 512).sum()
}

fn open(devices: TrimMembers, options: &EngineOptions) -> Filesystem {
    let volume = BtrfsVolume::open_writable(devices, options).expect("it opens");
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

#[track_caller]
fn leaves_what_the_kernel_leaves(devices: usize, mkfs: &'static str) {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().devices(devices).mkfs(mkfs).fill(with_holes).make(&judges);
    let [ours, theirs] = [(); 2].map(|()| disks.copy(&judges));
    {
        let mount = theirs.mount("rw,noatime");
        run("fstrim", &[mount.path()]);
    }
    let before = allocated(&ours);
    let trimmed =
        open(ours.writable_devices(), &EngineOptions::default()).volume().trim(0..u64::MAX);
    let trimmed = trimmed.expect("images can be trimmed");
    let (left, theirs) = (allocated(&ours), allocated(&theirs));
    println!("{mkfs}: {before} bytes of the host, then {left}; with fstrim {theirs}; {trimmed:?}");
    assert!(trimmed.bytes > 0 && trimmed.unable.is_empty(), "{trimmed:?}");
    assert!(left + 20 * MIB < before, "{before} bytes of the host, then {left}");
    // `fstrim` asks for a range that does not contain all free space.
    assert!(left < theirs + SLACK_BYTES, "{left} bytes of the host, with fstrim {theirs}");
    ours.assert_checks();
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    compare(&fs, ours.mount("ro,noatime").path()).assert_same(100);
    // Opening reads every superblock, the copies too.
    let (options, said) = recording(&EngineOptions::default());
    BtrfsVolume::open(ours.devices(), &options).expect("it opens");
    assert_eq!(*said.lock().expect("no thread panicked"), [""; 0]);
}

#[test]
fn one_member_leaves_what_the_kernel_leaves() {
    leaves_what_the_kernel_leaves(1, "-m dup -d single");
    leaves_what_the_kernel_leaves(1, "-m dup -d dup");
    leaves_what_the_kernel_leaves(1, "--mixed");
    leaves_what_the_kernel_leaves(1, "-m single -d single -O ^free-space-tree");
}

#[test]
fn several_members_leave_what_the_kernel_leaves() {
    leaves_what_the_kernel_leaves(2, "-m raid1 -d raid0");
    leaves_what_the_kernel_leaves(3, "-m raid1c3 -d raid1");
    leaves_what_the_kernel_leaves(4, "-m raid10 -d raid10");
}

/// A device that writes garbage where it discards.
#[derive(Debug)]
struct SpoilingDevice(MemoryDevice);

impl offshoot_device::Delegate for SpoilingDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &self.0
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        // This gives other threads time to write to space that they must not touch yet.
        std::thread::sleep(Duration::from_micros(500 + len / MIB * 3000));
        self.0.spoil(offset, len)
    }
}

/// A new volume on such devices.
fn spoiling(members: usize, mib: u64, profiles: [Profile; 2]) -> Vec<Arc<SpoilingDevice>> {
    let new = || Arc::new(SpoilingDevice(MemoryDevice::sparse(mib * MIB)));
    let devices: Vec<_> = (0..members).map(|_| new()).collect();
    make(&as_devices(&devices), profiles);
    devices
}

fn as_devices<D: BlockDevice + 'static>(devices: &[Arc<D>]) -> TrimMembers {
    devices.iter().map(|device| device.clone() as Arc<dyn BlockDevice>).collect()
}

fn make(devices: &[Arc<dyn BlockDevice>], profiles: [Profile; 2]) {
    let mut options = MkfsOptions::new(Uuid::new_v4(), AT);
    [options.metadata, options.data] = profiles.map(Some);
    mkfs(devices, &options).expect("a volume");
}

/// The files of one thread by number: the seed of the contents, and the length in bytes.
#[derive(Default)]
struct ThreadFiles(Vec<Option<(u64, usize)>>);

const FILES_OF_A_THREAD: u64 = 12;

/// Makes, writes, reads and removes files in `dir`. Fails when a file does not hold what it should.
fn work(fs: &Filesystem, dir: FileId, random: &mut Random, steps: u64) -> ThreadFiles {
    let mut known = ThreadFiles(vec![None; usize::try_from(FILES_OF_A_THREAD).expect("few")]);
    for _ in 0..steps {
        let number = usize::try_from(random.below(FILES_OF_A_THREAD)).expect("few");
        let name = number.to_string();
        let place = EntryPlace { dir, name: name.as_bytes() };
        match (random.below(10), known.0[number]) {
            (0..=4, None) => {
                let file = fs.create(place, &NEW).expect("there is room for names");
                let len = usize::try_from(1 + random.below(400_000)).expect("small");
                let seed = random.number();
                match fs.write(file, 0, &Random::new(seed).bytes(len), AT) {
                    Ok(()) => known.0[number] = Some((seed, len)),
                    Err(error) if error.errno() == Errno::NOSPC => {
                        fs.unlink(place, AT).expect("what makes room is not refused");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            (5, Some(_)) => {
                let file = fs.lookup(dir, name.as_bytes()).expect("it was made");
                fs.fsync(file).expect("an fsync");
            }
            (6, _) => fs.sync().expect("a sync"),
            (7..=8, Some(_)) => {
                fs.unlink(place, AT).expect("what makes room is not refused");
                known.0[number] = None;
            }
            (_, Some(_)) => known.judge_one(fs, dir, number),
            _ => {}
        }
    }
    known
}

impl ThreadFiles {
    fn judge_one(&self, fs: &Filesystem, dir: FileId, number: usize) {
        let Some((seed, len)) = self.0[number] else { return };
        let file = fs.lookup(dir, number.to_string().as_bytes()).expect("it was made");
        let mut bytes = vec![0; len];
        assert_eq!(fs.read(file, 0, &mut bytes).expect("a read"), len);
        assert!(bytes == Random::new(seed).bytes(len), "file {number} is something else");
    }

    fn judge(&self, fs: &Filesystem, dir: FileId) {
        (0..self.0.len()).for_each(|number| self.judge_one(fs, dir, number));
    }
}

/// Threads work while one thread trims again and again, and commits discard.
fn beside_writers(devices: &[Arc<SpoilingDevice>], threads: u64, steps: u64) {
    let seed = seed_of_run();
    println!("seed {seed}");
    let options = EngineOptions {
        is_discarding: true,
        commit_interval: Some(Duration::from_millis(7)),
        dirty_bytes: 2 * MIB,
        ..EngineOptions::default()
    };
    let fs = open(as_devices(devices), &options);
    let dirs: Vec<_> = (0..threads)
        .map(|number| {
            let name = format!("of-{number}");
            fs.mkdir(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW)
                .expect("a directory")
        })
        .collect();
    let is_over = AtomicBool::new(false);
    let known: Vec<ThreadFiles> = std::thread::scope(|scope| {
        let trimmer = scope.spawn(|| {
            let (mut rounds, mut random) = (0, Random::new(!seed));
            while !is_over.load(Ordering::Relaxed) {
                let from = random.below(devices[0].size_bytes()) | 1;
                for range in [0..u64::MAX, from..from + 50_000_001] {
                    fs.volume().trim(range).expect("memory can be trimmed");
                }
                rounds += 1;
            }
            rounds
        });
        let workers: Vec<_> = (seed..)
            .zip(&dirs)
            .map(|(seed, &dir)| {
                let fs = &fs;
                scope.spawn(move || work(fs, dir, &mut Random::new(seed), steps))
            })
            .collect();
        let ends = workers.into_iter().map(std::thread::ScopedJoinHandle::join);
        let known: Vec<_> = ends.collect();
        is_over.store(true, Ordering::Relaxed);
        println!("trimmed {} times", trimmer.join().expect("it ends"));
        known.into_iter().map(|known| known.expect("nothing is wrong")).collect()
    });
    fs.sync().expect("a sync");
    let stats = fs.volume().stats();
    println!("{} bytes discarded, {} commits", stats.discarded_bytes, stats.commits);
    let judge =
        |fs: &Filesystem| known.iter().zip(&dirs).for_each(|(known, &dir)| known.judge(fs, dir));
    judge(&fs);
    drop(fs);
    judge(&open(as_devices(devices), &EngineOptions::default()));
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, devices.len(), devices[0].size_bytes() / MIB);
    let devices: Vec<_> = devices.iter().map(|device| &**device as &dyn BlockDevice).collect();
    disks.fill(&devices).expect("a copy");
    disks.assert_checks();
}

#[test]
fn beside_writers_on_one_member() {
    beside_writers(&spoiling(1, 192, [Profile::Dup, Profile::Single]), 4, 300);
}

#[test]
fn beside_writers_on_several_members() {
    beside_writers(&spoiling(2, 160, [Profile::Raid1, Profile::Raid0]), 4, 200);
}

/// Hardly anything is free, so space that is being discarded is needed at once. No operation is
/// refused because of that.
#[test]
fn beside_writers_on_a_full_volume() {
    beside_writers(&spoiling(1, 40, [Profile::Single, Profile::Single]), 6, 200);
}

/// A device that takes its time to discard, and then records it.
#[derive(Debug)]
struct TrimRecorder(MemoryDevice, Mutex<Vec<[u64; 2]>>);

impl offshoot_device::Delegate for TrimRecorder {
    fn inner(&self) -> &dyn BlockDevice {
        &self.0
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        std::thread::sleep(Duration::from_millis(3));
        self.1.lock().expect("no thread panicked").push([offset, len]);
        self.0.discard(offset, len)
    }
}

/// While a piece of free space is being discarded, other threads allocate what is left. So its ends
/// are aligned, also when the range of the caller is not.
#[test]
fn pieces_are_aligned_when_the_range_is_not() {
    let memory = MemoryDevice::sparse(192 * MIB);
    let device = [Arc::new(TrimRecorder(memory, Mutex::default()))];
    make(&as_devices(&device), [Profile::Dup, Profile::Single]);
    let fs = open(as_devices(&device), &EngineOptions::default());
    let trimmed = |range: std::ops::Range<u64>| {
        device[0].1.lock().expect("no thread panicked").clear();
        let bytes = fs.volume().trim(range.clone()).expect("memory can be trimmed").bytes;
        let pieces = device[0].1.lock().expect("no thread panicked").clone();
        for piece in &pieces {
            assert!(piece.iter().all(|number| number % 4096 == 0), "{range:?}: {piece:?}");
        }
        bytes
    };
    let (all, none) = (trimmed(0..u64::MAX), trimmed(0..0));
    for group in fs.volume().chunks() {
        let (start, end) = (group.start.0, group.start.0 + group.length);
        let within = trimmed(start + 1..end - 1);
        println!("{start}..{end}: {none} <= {within} <= {all}");
        assert!(within <= all, "{within} of {all} bytes");
        assert_eq!(trimmed(start + 1..start + 0x1_ffff), none, "no whole unit");
    }
}

/// When a shutdown is over, no discard is under way, and none begins.
#[test]
fn a_shutdown_ends_trims() {
    let memory = MemoryDevice::sparse(192 * MIB);
    let device = [Arc::new(TrimRecorder(memory, Mutex::default()))];
    make(&as_devices(&device), [Profile::Dup, Profile::Single]);
    let options = EngineOptions { is_discarding: true, ..EngineOptions::default() };
    let (options, said) = recording(&options);
    let fs = open(as_devices(&device), &options);
    let discards = || device[0].1.lock().expect("no thread panicked").len();
    std::thread::scope(|scope| {
        let trimmer = scope.spawn(|| {
            loop {
                if let Err(error) = fs.volume().trim(0..u64::MAX) {
                    return error.errno();
                }
            }
        });
        while discards() < 20 {
            std::thread::yield_now();
        }
        write_file(&fs, "file", 3 << 20);
        fs.sync().expect("a sync");
        remove_file(&fs, "file");
        fs.volume().shut_down().expect("memory stores everything");
        let before = discards();
        assert_eq!(trimmer.join().expect("no panic"), Errno::ROFS);
        assert_eq!(discards(), before);
    });
    let before = discards();
    drop(fs);
    assert_eq!(discards(), before, "closing the volume discards nothing");
    assert_eq!(*said.lock().expect("no thread panicked"), [""; 0]);
}

/// Chunks are allocated while other threads trim, and block groups are removed while their space is
/// being discarded.
#[test]
fn beside_chunks_that_come_and_go() {
    const LEN: usize = 50 << 20;
    let devices = spoiling(1, 160, [Profile::Dup, Profile::Single]);
    let options = EngineOptions { is_discarding: true, ..EngineOptions::default() };
    let fs = open(as_devices(&devices), &options);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fs.volume().trim(0..u64::MAX).expect("memory can be trimmed");
            }
        });
        let _end = SetOnDrop(&is_over);
        let chunks: Vec<_> = (0..12)
            .map(|round| {
                let expected = vec![round + 1; LEN];
                let file = fs.create(EntryPlace { dir: fs.root(), name: b"file" }, &NEW);
                let file = file.expect("there is room");
                fs.write(file, 0, &expected, AT).expect("there is room");
                fs.sync().expect("a sync");
                let at_flood = fs.volume().chunks().len();
                let mut bytes = vec![0; LEN];
                let read = fs.read(file, 0, &mut bytes);
                read.expect("a read");
                assert!(bytes == expected, "round {round}: it is something else");
                remove_file(&fs, "file");
                fs.sync().expect("a sync");
                (at_flood, fs.volume().chunks().len())
            })
            .collect();
        assert!(chunks.iter().any(|(flood, ebb)| flood > ebb), "none goes: {chunks:?}");
    });
}

fn write_file(fs: &Filesystem, name: &str, len: usize) -> FileId {
    let file = fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW).expect("room");
    fs.write(file, 0, &Random::new(1).bytes(len), AT).expect("room");
    file
}

fn remove_file(fs: &Filesystem, name: &str) {
    fs.unlink(EntryPlace { dir: fs.root(), name: name.as_bytes() }, AT).expect("it is there");
}

/// With the option `discard`, what commits free is discarded before the volume is closed at the
/// latest. Without the option it is not.
#[test]
fn what_is_freed_is_discarded() {
    let Some(judges) = judges::require() else { return };
    for commit_interval in [None, EngineOptions::default().commit_interval] {
        let left = [false, true].map(|discard| {
            let disks = Disks::create(&judges, 1, 512);
            make(&disks.writable_devices(), [Profile::Dup, Profile::Single]);
            let options = EngineOptions {
                is_discarding: discard,
                commit_interval,
                ..EngineOptions::default()
            };
            let fs = open(disks.writable_devices(), &options);
            write_file(&fs, "kept", 3 << 20);
            write_file(&fs, "large", 60 << 20);
            fs.sync().expect("a sync");
            remove_file(&fs, "large");
            fs.sync().expect("a sync");
            drop(fs);
            disks.assert_checks();
            allocated(&disks)
        });
        assert!(left[0] > 60 * MIB && left[1] < 16 * MIB, "{left:?} bytes of the host");
    }
}

/// Records what is reported.
fn recording(options: &EngineOptions) -> (EngineOptions, Arc<Mutex<Vec<String>>>) {
    let said = Arc::new(Mutex::new(Vec::new()));
    let record = said.clone();
    let reporter = Arc::new(move |report: &VolumeReport| {
        record.lock().expect("no thread panicked").push(report.to_string());
    });
    (EngineOptions { reporter: Some(reporter), ..options.clone() }, said)
}

/// A device that fails to discard harms nothing else. Trimming fails. What commits free is not
/// discarded, and the engine reports that once.
#[test]
fn discards_that_fail() {
    let memory = Arc::new(MemoryDevice::sparse(256 * MIB));
    make(&as_devices(std::slice::from_ref(&memory)), [Profile::Dup, Profile::Single]);
    let device = Arc::new(FaultDevice::new(memory));
    let options =
        EngineOptions { is_discarding: true, commit_interval: None, ..EngineOptions::default() };
    let (options, said) = recording(&options);
    let fs = open(as_devices(std::slice::from_ref(&device)), &options);
    for number in 0..10 {
        device.strike(RequestKind::Discards, number, Fault::Error);
    }
    for round in 0..3 {
        write_file(&fs, &round.to_string(), 5 << 20);
        fs.sync().expect("discards do not matter");
        remove_file(&fs, &round.to_string());
        fs.sync().expect("discards do not matter");
    }
    let error = fs.volume().trim(0..u64::MAX).expect_err("the device fails");
    assert!(matches!(error, Error::Io { .. }), "{error}");
    write_file(&fs, "afterwards", 5 << 20);
    fs.sync().expect("the volume goes on");
    let said = said.lock().expect("no thread panicked").clone();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("memory: discarding at"), "{said:?}");
    assert_eq!(device.count(RequestKind::Discards), 2, "one for each");
}

/// A device on a host that cannot discard.
#[derive(Debug)]
struct NoDiscardDevice(MemoryDevice);

impl offshoot_device::Delegate for NoDiscardDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &self.0
    }

    fn name(&self) -> &'static str {
        "old-disk"
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn hosts_that_cannot_discard() {
    let unable =
        || Arc::new(NoDiscardDevice(MemoryDevice::sparse(256 * MIB))) as Arc<dyn BlockDevice>;
    let able = || Arc::new(MemoryDevice::sparse(256 * MIB)) as Arc<dyn BlockDevice>;
    let trim = |devices: TrimMembers| {
        make(&devices, [Profile::Raid1, Profile::Raid1]);
        open(devices, &EngineOptions::default()).volume().trim(0..u64::MAX)
    };
    let error = trim(vec![unable(), unable()]).expect_err("none of them can");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("discarding on old-disk"), "{error}");
    let trimmed = trim(vec![unable(), able()]).expect("one of them can");
    assert!(trimmed.bytes > 200 * MIB && trimmed.bytes < 256 * MIB, "{trimmed:?}");
    assert_eq!(trimmed.unable.into_iter().collect::<Vec<_>>(), ["old-disk"]);
}

#[test]
fn a_volume_opened_for_reading_is_not_trimmed() {
    let devices = spoiling(1, 256, [Profile::Dup, Profile::Single]);
    let volume =
        BtrfsVolume::open(as_devices(&devices), &EngineOptions::default()).expect("it opens");
    let refused = volume.trim(0..u64::MAX).map_err(|error| error.errno());
    assert_eq!(refused, Err(Errno::ROFS));
}

/// Regression: a commit for want of room first writes files back, which changes more. That asked
/// for another commit, and so on until the stack was full.
#[test]
fn files_are_written_back_before_commits_for_want_of_room() {
    let devices = spoiling(1, 256, [Profile::Dup, Profile::Single]);
    let options = EngineOptions {
        flushes_on_commit: true,
        dirty_bytes: 64 << 10,
        commit_interval: None,
        ..EngineOptions::default()
    };
    let fs = open(as_devices(&devices), &options);
    for number in 0..600 {
        write_file(&fs, &format!("{number}"), 4000);
    }
    fs.sync().expect("a commit");
    let stats = fs.volume().stats();
    assert!(stats.commits > 3, "{}", stats.commits);
    drop(fs);
    let fs = open(as_devices(&devices), &EngineOptions::default());
    for number in 0..600 {
        let file = fs.lookup(fs.root(), number.to_string().as_bytes()).expect("it was stored");
        assert_eq!(fs.attr(file).expect("attributes").size, 4000, "{number}");
    }
}

/// With the option, a commit first stores what was written before. Without it, the file is empty
/// after a crash.
#[test]
fn files_are_written_back_before_commits() {
    let sizes = [false, true].map(|flush_on_commit| {
        [false, true].map(|is_snapshot| {
            let devices = spoiling(1, 256, [Profile::Dup, Profile::Single]);
            let options = EngineOptions {
                flushes_on_commit: flush_on_commit,
                commit_interval: None,
                has_tree_log: false,
                ..EngineOptions::default()
            };
            let fs = open(as_devices(&devices), &options);
            write_file(&fs, "first", 100_000);
            if is_snapshot {
                let other =
                    fs.create_subvolume(EntryPlace { dir: fs.root(), name: b"other" }, &NEW);
                let other = other.expect("room");
                let place = EntryPlace { dir: fs.root(), name: b"snapshot" };
                fs.snapshot(other, place, true, AT).expect("room");
            } else {
                fs.fsync(write_file(&fs, "second", 10)).expect("a commit");
            }
            drop(fs);
            let fs = open(as_devices(&devices), &EngineOptions::default());
            let first = fs.lookup(fs.root(), b"first").expect("its name was committed");
            fs.attr(first).expect("attributes").size
        })
    });
    assert_eq!(sizes, [[0, 0], [100_000, 100_000]]);
}
