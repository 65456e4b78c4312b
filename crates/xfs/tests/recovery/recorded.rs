//! The kernel's XFS as a recorded writer: it works on a device that remembers every write and every
//! flush. Each state that a power cut can leave of them, reordered and with torn records of the
//! log, is recovered by the kernel on one copy and by us on another.
//!
//! Four threads work on the volume: one adds and removes files of every form, one clones and frees
//! files of many extents, one syncs all the time, so that the log is cut between an intent and its
//! end, and one syncs files that every state has to have afterwards.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_device::{BlockDevice, CrashDevice, CrashLog, CrashPlan, CrashState};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::threads::SetOnDrop;
use offshoot_testkit::xfs::churn::churn;
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_vfs::FileSystem;
use offshoot_xfs::{XfsOptions, XfsRecovery, XfsVolume, check_xfs};

use crate::crashed::{REMOVING, assert_checks_but_for, compare_with_kernel};
use crate::log_on_disk::LogOnDisk;
use crate::served::ServedDevices;

/// What the kernel says of a log whose last record is torn.
const TORN: &str = "Torn write";

/// How much the threads do.
#[derive(Clone, Copy)]
struct RecordedWork {
    /// Random changes.
    steps: u64,
    /// Extents of the file that is cloned.
    extents: u64,
    clones: u64,
}

/// What the kernel wrote to a volume, from the mount to the end of the unmount.
struct RecordedWriter {
    log: CrashLog,
    /// The bytes of the log of the volume on the device.
    log_bytes: Range<u64>,
}

/// What a state held, and what was done with it.
#[derive(Clone, Copy, Debug, Default)]
struct JudgedStates {
    by_kernel: u64,
    recovered: u64,
    with_intents: u64,
    torn: u64,
}

fn record(
    judges: &XfsJudges,
    served: &ServedDevices,
    work: RecordedWork,
    seed: u64,
) -> RecordedWriter {
    let kind = XfsVolumeKind::named("today");
    let base = XfsDisk::create(judges, kind.mib);
    base.mkfs(kind.mkfs);
    let geometry = LogOnDisk::of(&base).geometry;
    let start = geometry.place_of(geometry.log_start).unwrap().bytes();
    let log_bytes = start..start + (u64::from(geometry.log_blocks) << geometry.block_log);
    let device = Arc::new(CrashDevice::new(base.device()));
    let shown = served.show(device.clone());
    let disk = XfsDisk::served(judges, shown.path());
    let mount = disk.mount("rw,noatime", &[]);
    let root = mount.path();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = SetOnDrop(&is_done);
        scope.spawn(|| keep_files(&root.join("kept"), &device, &is_done));
        scope.spawn(|| sync_often(&root.join("synced"), &is_done));
        let chains = scope.spawn(|| cut_chains(&root.join("chains"), work));
        let changed = root.join("changed");
        fs::create_dir(&changed).unwrap();
        churn(&changed, REMOVING, work.steps, &mut Random::new(seed));
        chains.join().unwrap();
    });
    drop(mount);
    drop(shown);
    // The device that reads `base` has its image open, so it may be removed.
    RecordedWriter { log: device.log(), log_bytes }
}

/// The contents of the kept file with a number.
fn kept(number: u64) -> Vec<u8> {
    let mut random = Random::new(number);
    let len = [40, 5000, 100_000][usize::try_from(random.below(3)).unwrap()];
    random.bytes(len)
}

/// Makes files and syncs each until the other threads are done. A mark in the log of the device
/// says that the file has to stay.
fn keep_files(dir: &Path, device: &CrashDevice, is_done: &AtomicBool) {
    /// So many that the marks of a long work are few.
    const MOST: u64 = 60;
    fs::create_dir(dir).unwrap();
    for number in (0..MOST).take_while(|_| !is_done.load(Ordering::Relaxed)) {
        let path = dir.join(number.to_string());
        fs::write(&path, kept(number)).unwrap();
        File::open(&path).and_then(|file| file.sync_all()).unwrap();
        device.mark(&number.to_string());
    }
}

/// Makes the kernel write its log again and again, so that it cuts what others do.
fn sync_often(path: &Path, is_done: &AtomicBool) {
    let file = File::create(path).unwrap();
    for len in (1..2000).take_while(|_| !is_done.load(Ordering::Relaxed)) {
        file.set_len(len).unwrap();
        file.sync_all().unwrap();
    }
}

/// Clones, shortens and removes files of many extents.
fn cut_chains(dir: &Path, work: RecordedWork) {
    fs::create_dir(dir).unwrap();
    let original = dir.join("original");
    let file = File::create(&original).unwrap();
    for number in 0..work.extents {
        file.write_all_at(&[7; 4096], number * 8192).unwrap();
    }
    file.sync_all().unwrap();
    let file = File::open(&original).unwrap();
    for number in 0..work.clones {
        let path = dir.join(format!("clone {number}"));
        let clone = File::create(&path).unwrap();
        rustix::fs::ioctl_ficlone(&clone, &file).unwrap();
        if number % 2 == 0 {
            clone.set_len(4096 * number).unwrap();
        } else {
            fs::remove_file(&path).unwrap();
        }
    }
}

impl RecordedWriter {
    fn states(&self, seed: u64) -> impl Iterator<Item = CrashState> {
        let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 3, seed, tears: true };
        self.log.states(&plan).map(Result::unwrap)
    }

    /// Neither the kernel nor we mend a block that is torn in its place: with sectors of 512 bytes
    /// XFS relies on blocks that are written whole.
    fn is_mendable(&self, state: &CrashState) -> bool {
        let log = &self.log_bytes;
        state.torn.iter().all(|torn| log.start <= torn.start && torn.end <= log.end)
    }
}

/// A state as we recovered it.
struct RecoveredState {
    in_memory: Arc<XfsVolume>,
    by_us: Arc<dyn BlockDevice>,
    /// What the recovery to disk did; `None` when the log was empty.
    recovered: Option<XfsRecovery>,
}

/// Holds our recovery of a state in memory against that to disk, and both against promises.
fn recover(state: &CrashState) -> RecoveredState {
    let described = &state.description;
    let options = XfsOptions::default();
    let cut: Arc<dyn BlockDevice> = Arc::new(state.devices[0].snapshot());
    let by_us: Arc<dyn BlockDevice> = Arc::new(state.devices[0].snapshot());
    let recovered = XfsVolume::recover(&by_us, &options);
    let recovered = recovered.unwrap_or_else(|error| panic!("{described}: {error}"));
    let found = check_xfs(&by_us, &options).unwrap().findings;
    assert!(found.is_empty(), "{described}: {}", found[0]);
    let in_memory = XfsVolume::open(cut, &options).unwrap();
    let on_disk = XfsVolume::open(by_us.clone(), &options).unwrap();
    let outcome = Compare::default().run_filesystems(&*in_memory, &*on_disk);
    assert!(outcome.differences.is_empty(), "{described}: {outcome}");
    for mark in state.marks() {
        let expected = kept(mark.parse().unwrap());
        let dir = in_memory.lookup(in_memory.root(), b"kept").unwrap();
        let file = in_memory.lookup(dir, mark.as_bytes());
        let file = file.unwrap_or_else(|error| panic!("{described}: kept file {mark}: {error}"));
        let mut bytes = vec![0; expected.len() + 1];
        let len = in_memory.read(file, 0, &mut bytes).unwrap();
        assert!(bytes[..len] == expected, "{described}: kept file {mark} has other bytes");
    }
    RecoveredState { in_memory, by_us, recovered }
}

/// Holds our recovery of a state against the kernel's.
fn judge(judges: &XfsJudges, served: &ServedDevices, state: &CrashState, ours: RecoveredState) {
    let described = &state.description;
    let RecoveredState { in_memory, by_us, recovered } = ours;
    let compare = match &recovered {
        // Intents of parent pointers may be among them: the kernel gives such a file the time of
        // its recovery.
        Some(recovered) if recovered.finished_intents > 0 => {
            compare_with_kernel(recovered).without(Aspect::TimesOfNames)
        }
        Some(recovered) => compare_with_kernel(recovered),
        None => Compare::default().without(Aspect::StoredAcls),
    };
    // A writable mount gives back preallocated space of the files that the comparison opens.
    let same = |disk: &XfsDisk| {
        let mount = disk.mount("ro,noatime", &[]);
        let outcome = compare.run(&*in_memory, mount.path());
        assert!(outcome.differences.is_empty(), "{described}: {outcome}");
    };
    let shown = served.show(Arc::new(state.devices[0].snapshot()));
    let by_kernel = XfsDisk::served(judges, shown.path());
    drop(by_kernel.mount("rw,noatime", &[RECOVERY, TORN]));
    same(&by_kernel);
    let allowed = assert_checks_but_for(&by_kernel, None);
    let shown = served.show(by_us);
    let by_us = XfsDisk::served(judges, shown.path());
    assert_checks_but_for(&by_us, Some(&allowed));
    // Nothing is left to recover: the kernel would do it for this mount too.
    same(&by_us);
}

/// Recovers about `wanted` of the states, evenly spread. The kernel judges one of `one_of` of them,
/// and those with intents until it has judged as many of these.
fn judge_states(
    judges: &XfsJudges,
    writer: &RecordedWriter,
    seed: u64,
    (wanted, one_of): (usize, u64),
) -> JudgedStates {
    let served = ServedDevices::start();
    let mut random = Random::new(seed);
    let count = writer.states(seed).count();
    let every = (count / wanted).max(1);
    let offset = usize::try_from(random.below(every as u64)).unwrap();
    let mut counts = JudgedStates::default();
    for state in writer.states(seed).skip(offset).step_by(every) {
        if !writer.is_mendable(&state) {
            continue;
        }
        let ours = recover(&state);
        let intents = ours.recovered.as_ref().map_or(0, |recovered| recovered.finished_intents);
        counts.torn += u64::from(!state.torn.is_empty());
        counts.recovered += u64::from(ours.recovered.is_some());
        counts.with_intents += u64::from(intents > 0);
        let is_rare = intents > 0 && counts.with_intents * one_of <= wanted as u64;
        if is_rare || random.below(one_of) == 0 {
            counts.by_kernel += 1;
            judge(judges, &served, &state, ours);
        }
    }
    eprintln!("{count} states: {counts:?}");
    counts
}

fn number_of(variable: &str, otherwise: u64) -> u64 {
    let given = std::env::var(variable).ok();
    given.map_or(otherwise, |number| number.parse().unwrap())
}

#[test]
fn every_cut_of_what_the_kernel_wrote_is_recovered_as_it_does() {
    let seed = seed_of_run();
    let Some(judges) = judges::require() else { return };
    let work = RecordedWork { steps: 40, extents: 1000, clones: 4 };
    let writer = record(&judges, &ServedDevices::start(), work, seed);
    let counts = judge_states(&judges, &writer, seed, (48, 12));
    assert!(counts.recovered > 10 && counts.by_kernel > 0, "{counts:?}");
}

/// `cargo xtask campaign xfs-recovery`: the kernel judges every state.
#[test]
#[ignore = "it takes an hour"]
fn campaign() {
    let mut random = Random::new(seed_of_run());
    let (workloads, cuts) = (number_of("OFFSHOOT_WORKLOADS", 4), number_of("OFFSHOOT_CUTS", 1000));
    let mut with_intents = 0;
    for _ in 0..workloads {
        let seed = random.number();
        eprintln!("workload {seed}");
        let Some(judges) = judges::require() else { return };
        let steps = 40 + random.below(200);
        let work = RecordedWork { steps, extents: 1500, clones: 8 };
        let writer = record(&judges, &ServedDevices::start(), work, seed);
        let wanted = (usize::try_from(cuts).unwrap(), 1);
        with_intents += judge_states(&judges, &writer, seed, wanted).with_intents;
    }
    assert!(with_intents > 0, "no state cut a chain of intents");
}
