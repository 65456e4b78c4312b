//! Many threads on a full volume.
//!
//! Each thread has a directory of its own, and all threads share one more. A model keeps what the
//! volume acknowledged. The threads work in rounds, while the volume is full. After each round they
//! stop, and the test looks at everything:
//!
//! | what must hold | where |
//! |---|---|
//! | no thread hangs | `watch` |
//! | nothing is refused without need | `quiet` |
//! | what was acknowledged is there | the model: now, after the volume was opened again, and at the end as the kernel sees it |
//! | what was synced is there after a power cut in the middle of the work | [`RoundVolume::cut`], and `btrfs check` of that |
//! | removals are never refused | `worker`; at last all threads remove everything, and the volume is as empty as before |
//!
//! `faults` has devices fail while room is made. `fits` fills volumes of all sizes beside the
//! kernel. `moves` moves subvolumes. `shapes` fills volumes in simple ways, again and again.
//! `promises` makes small writes that need many tree blocks.
//!
//! `cargo xtask campaign enospc` does this for as long as one likes, on volumes of several kinds.

mod faults;
mod fits;
mod moves;
mod promises;
mod quiet;
mod shapes;
mod watch;
mod worker;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::model::Model;
use offshoot_testkit::model::actor::names_of;
use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut};

use watch::{ThreadNotice, watched};
use worker::{ALL, EnospcWorker, NEW, VolumeAndModel, WorkerCounts, actors_dir, own_dir, prefix};

/// The size of the volume, in MiB.
const MIB: u64 = 128;

/// The directory where `quiet` tries what is refused.
const PROBES: &str = "probes";

/// One test of many rounds.
struct RoundsJob<'a> {
    mkfs: &'a [&'a str],
    threads: usize,
    rounds: u64,
    /// How much a thread does in a round.
    enough: EnoughWork,
    seed: u64,
}

/// When a thread has done enough: after this many steps on a full volume, or after this time.
#[derive(Clone, Copy)]
enum EnoughWork {
    Steps(u64),
    Time(Duration),
}

impl EnoughWork {
    fn half(self) -> Self {
        match self {
            Self::Steps(steps) => Self::Steps(steps / 2),
            Self::Time(time) => Self::Time(time / 2),
        }
    }

    /// Whether it is enough, after `steps` steps since `began`.
    fn is(self, began: Instant, steps: u64) -> bool {
        match self {
            Self::Steps(enough) => steps >= enough,
            Self::Time(enough) => began.elapsed() >= enough,
        }
    }
}

/// A volume in one round.
struct RoundVolume<'a> {
    job: &'a RoundsJob<'a>,
    judges: &'a Judges,
    device: Arc<MemoryDevice>,
    fs: Filesystem,
    number: u64,
}

/// The options of a round. Even rounds have the default; odd ones have so little memory that
/// commits and flushes happen all the time.
fn options(round: u64) -> EngineOptions {
    let options = EngineOptions::default();
    let dirty_bytes = if round.is_multiple_of(2) { options.dirty_bytes } else { 2 << 20 };
    EngineOptions { dirty_bytes, commit_interval: Some(Duration::from_secs(1)), ..options }
}

fn open(device: &Arc<impl BlockDevice + 'static>, options: &EngineOptions) -> Filesystem {
    let volume = BtrfsVolume::open_writable(vec![device.clone()], options).expect("it opens");
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// Requires that both filesystems show the same, byte by byte.
fn assert_same(one: &dyn FileSystem, other: &dyn FileSystem) {
    let compare = Compare::default().without(Aspect::Ids).without(Aspect::Order);
    compare.without(Aspect::Allocation).run_filesystems(one, other).assert_same(64);
}

/// Images with the contents of the device.
fn disks_of(judges: &Judges, device: &MemoryDevice) -> Disks {
    let disks = Disks::create(judges, 1, MIB);
    disks.fill(&[device]).expect("a copy of the volume");
    disks
}

impl RoundVolume<'_> {
    fn seed(&self, number: usize) -> u64 {
        self.job.seed ^ self.number << 48 ^ (number as u64) << 40
    }

    /// All threads work, most of the time on a full volume.
    fn work(&self, model: &Model) {
        let (both, tally) = (VolumeAndModel { fs: &self.fs, model }, WorkerCounts::default());
        let posts: Vec<ThreadNotice> =
            (0..self.job.threads).map(|_| ThreadNotice::default()).collect();
        let began = Instant::now();
        watched(&self.fs, &posts, |number| {
            let post = &posts[number];
            let mut worker =
                EnospcWorker::new(&both, number as u64, self.seed(number), post, &tally);
            worker.work(|steps| self.job.enough.is(began, steps));
        });
        println!("round {}: {tally:?}", self.number);
        let refused = tally.refused.load(Ordering::Relaxed);
        assert!(refused > self.job.threads as u64, "the volume was hardly full");
    }

    /// Stores everything. Requires that it is as the model says, and that nothing is refused
    /// without need.
    fn look(&self, model: &Model) {
        self.fs.sync().expect("what was acknowledged can be stored");
        quiet::assert_at_rest(&self.fs);
        assert_same(&self.fs, model);
        let probes = self.fs.lookup(self.fs.root(), PROBES.as_bytes()).expect("it was made");
        quiet::assert_refused_rightly(&self.fs, probes);
    }

    /// Cuts the power while all threads add to what was synced, and change none of it.
    fn cut(&self, model: &Model) {
        self.fs.sync().expect("what was acknowledged can be stored");
        let synced = Model::copy(model).expect("the model reads");
        let (both, tally) = (VolumeAndModel { fs: &self.fs, model }, WorkerCounts::default());
        let posts: Vec<ThreadNotice> =
            (0..self.job.threads).map(|_| ThreadNotice::default()).collect();
        let (began, cut) = (Instant::now(), Mutex::new(None));
        watched(&self.fs, &posts, |number| {
            let post = &posts[number];
            let seed = !self.seed(number);
            let mut worker = EnospcWorker::new(&both, number as u64, seed, post, &tally);
            worker.add(|steps| {
                if number == 0 && self.job.enough.half().is(began, steps) {
                    let mut cut = cut.lock().expect("no thread panicked");
                    cut.get_or_insert_with(|| self.device.snapshot());
                }
                self.job.enough.is(began, steps)
            });
        });
        let cut = cut.into_inner().expect("no thread panicked").expect("the power was cut");
        disks_of(self.judges, &cut).assert_checks();
        let left = open(&Arc::new(cut), &EngineOptions::default());
        let dirs = (0..self.job.threads as u64).map(own_dir);
        dirs.chain([ALL.to_owned()]).for_each(|dir| assert_holds(&left, &synced, &dir));
    }
}

/// Requires that `left` has every file of this directory of `synced`, with the same contents.
fn assert_holds(left: &Filesystem, synced: &Model, dir: &str) {
    let in_dir = |fs: &dyn FileSystem| fs.lookup(fs.root(), dir.as_bytes()).expect("it was synced");
    let bytes = |fs: &dyn FileSystem, file: FileId| {
        let size = fs.attr(file).expect("it has attributes").size;
        let mut bytes = vec![0; usize::try_from(size).expect("small")];
        let count = fs.read(file, 0, &mut bytes).expect("it reads");
        assert_eq!(count, bytes.len());
        bytes
    };
    let mut names = Vec::new();
    synced
        .read_dir(in_dir(synced), 0, &mut |entry| {
            names.push((entry.name.to_vec(), entry.file));
            ControlFlow::Continue(())
        })
        .expect("the model reads");
    for (name, file) in names {
        let found = left.lookup(in_dir(left), &name);
        let found = found.unwrap_or_else(|e| panic!("{dir}/{}: {e}", name.escape_ascii()));
        assert!(bytes(left, found) == bytes(synced, file), "{dir}/{}", name.escape_ascii());
    }
}

/// All threads remove their files, and no removal is refused.
fn empty(fs: &Filesystem, model: &Model, threads: usize) {
    let both = VolumeAndModel { fs, model };
    let posts: Vec<ThreadNotice> = (0..threads).map(|_| ThreadNotice::default()).collect();
    watched(fs, &posts, |number| {
        let (post, number) = (&posts[number], number as u64);
        let (prefix, actors) = (prefix(number), names_of(number));
        both.remove_all(both.dir(&own_dir(number)), post, &|_| true);
        both.remove_all(both.dir(ALL), post, &|name| name.starts_with(prefix.as_bytes()));
        let is_actors = |name: &[u8]| actors.iter().any(|own| own == name);
        both.remove_all(both.dir(&actors_dir(number)), post, &is_actors);
    });
}

/// Requires that the kernel sees what the model has.
fn assert_kernel_sees(disks: &Disks, model: &Model) {
    let mount = disks.mount("ro,noatime");
    let path: &Path = mount.path();
    assert_same(&HostFilesystem::new(path).expect("the mounted directory opens"), model);
}

/// A volume with the directories of all threads, and the model of it.
fn prepare(job: &RoundsJob<'_>, disks: &Disks) -> (Arc<MemoryDevice>, Model) {
    disks.mkfs(job.mkfs);
    let device = Arc::new(MemoryDevice::over(disks.devices().remove(0)));
    let fs = open(&device, &options(0));
    let model = Model::new(&fs.attr(fs.root()).expect("the root has attributes"));
    let dirs = (0..job.threads as u64).flat_map(|number| [own_dir(number), actors_dir(number)]);
    for name in dirs.chain([ALL.into(), PROBES.into()]).collect::<BTreeSet<_>>() {
        VolumeAndModel { fs: &fs, model: &model }.must(
            "mkdir",
            [fs.root(), model.root()],
            |fs, dir| fs.mkdir(EntryPlace { dir, name: name.as_bytes() }, &NEW),
        );
    }
    fs.sync().expect("a commit");
    (device, model)
}

fn used(fs: &Filesystem) -> u64 {
    fs.statfs().expect("sizes").used_bytes
}

fn run(job: &RoundsJob<'_>) {
    let Some(judges) = judges::require() else { return };
    println!("{:?}, {} threads, OFFSHOOT_SEED={}", job.mkfs, job.threads, job.seed);
    let disks = Disks::create(&judges, 1, MIB);
    let (device, mut model) = prepare(job, &disks);
    let before = used(&open(&device, &options(0)));
    for number in 0..job.rounds {
        let fs = open(&device, &options(number));
        let round = RoundVolume { job, judges: &judges, device: device.clone(), fs, number };
        round.work(&model);
        round.look(&model);
        round.cut(&model);
        // The round is dropped without a sync, so the model starts again from what the volume
        // holds.
        drop(round);
        model = Model::copy(&open(&device, &options(number))).expect("it reads");
    }
    let left = disks_of(&judges, &device);
    left.assert_checks();
    assert_kernel_sees(&left, &model);
    let fs = open(&device, &options(0));
    empty(&fs, &model, job.threads);
    fs.sync().expect("a commit");
    quiet::assert_at_rest(&fs);
    assert_same(&fs, &model);
    let after = used(&fs);
    assert!(after < before + (1 << 20), "{after} bytes are used, {before} were");
    drop(fs);
    disks_of(&judges, &device).assert_checks();
}

#[test]
fn threads_meet_the_end_of_space() {
    let (seed, enough) = (seed_of_run(), EnoughWork::Steps(100));
    run(&RoundsJob { mkfs: &[], threads: 64, rounds: 2, enough, seed });
}

#[test]
fn threads_meet_the_end_of_space_in_mixed_groups_of_small_nodes() {
    let (seed, enough) = (seed_of_run(), EnoughWork::Steps(100));
    run(&RoundsJob { mkfs: &["--mixed"], threads: 64, rounds: 1, enough, seed });
}

/// The number in a variable, or `usual` without one.
fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |text| text.parse().expect("a number"))
}

/// Works on volumes of every kind, for `OFFSHOOT_SECONDS` on each.
#[test]
#[ignore = "takes as long as one likes; cargo xtask campaign enospc runs it"]
fn campaign() {
    const ROUNDS: u32 = 4;
    let seed = seed_of_run();
    let threads = usize::try_from(number("OFFSHOOT_THREADS", 64)).expect("a number of threads");
    let time = Duration::from_secs(number("OFFSHOOT_SECONDS", 60));
    let kinds: [&[&str]; 4] = [&[], &["-m", "single"], &["-m", "single", "-n", "4k"], &["--mixed"]];
    for mkfs in kinds {
        let enough = EnoughWork::Time(time / ROUNDS / 2);
        run(&RoundsJob { mkfs, threads, rounds: ROUNDS.into(), enough, seed });
    }
}
