//! Hostile volumes: every operation of the library on many damaged volumes.
//!
//! Each case damages a volume somewhere: in its metadata, with checksums that are wrong or right,
//! in the records of its log, in its superblocks, or at its end. Then it does everything with the
//! volume that the library can do. Nothing may panic, each error has a text, and no case takes more
//! than [`CASE_LIMIT`] or [`CASE_MEMORY_KIB`].
//!
//! | module | what it holds |
//! |---|---|
//! | `damage`, `units` | kinds of damage; where the metadata of a volume is |
//! | `image` | images that are damaged without a copy |
//! | `filled` | the volumes |
//! | `survey` | everything that a volume shows |
//! | `known` | damage whose outcome is known |
//! | `replayed`, `bodies` | logs that random bytes wrote |
//!
//! `OFFSHOOT_SWEEP` is the number of cases for each volume. `OFFSHOOT_SEED` repeats a run.

#[path = "../bodies/mod.rs"]
mod bodies;
mod damage;
mod filled;
#[path = "../../../btrfs/tests/hostile/image.rs"]
mod image;
mod known;
mod replayed;
mod survey;
mod units;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use damage::XfsDamageTarget;
use image::Patched;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{Error, FileSystem};
use offshoot_xfs::{XfsOptions, XfsVolume, check_xfs, zero_xfs_log};
use survey::survey;

/// How long one damaged volume may take, on a slow machine.
const CASE_LIMIT: Duration = Duration::from_secs(60);

/// How much memory one damaged volume may add, in KiB.
const CASE_MEMORY_KIB: u64 = 256 << 10;

/// How many cases each volume has in an ordinary run, and in a campaign.
const CASES: u64 = 30;
const CAMPAIGN_CASES: u64 = 5000;

/// Lets one sweep run at a time: the kernel counts memory for the whole process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line of `/proc/self/status`, in KiB.
fn memory_kib(line: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let value = status.lines().find_map(|found| found.strip_prefix(line)).unwrap();
    value.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap()
}

/// Time and memory of one damaged volume.
#[derive(Clone, Copy, Debug, Default)]
struct CaseCost {
    time: Duration,
    memory_kib: u64,
}

impl CaseCost {
    fn most(self, other: Self) -> Self {
        let memory_kib = self.memory_kib.max(other.memory_kib);
        Self { time: self.time.max(other.time), memory_kib }
    }
}

/// Runs `call` on a thread of its own, within the limits.
fn within_limits<T: Send + 'static>(
    case: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> (T, CaseCost) {
    // Resets the kernel's record of the highest use of memory.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory_kib("VmRSS");
    let (start, (done, result)) = (Instant::now(), mpsc::channel());
    std::thread::spawn(move || done.send(catch_unwind(AssertUnwindSafe(call))));
    let result = result.recv_timeout(CASE_LIMIT);
    let result = result.unwrap_or_else(|_| panic!("{case}: not done after {CASE_LIMIT:?}"));
    let memory_kib = memory_kib("VmHWM").saturating_sub(before);
    assert!(memory_kib < CASE_MEMORY_KIB, "{case}: {memory_kib} KiB of memory");
    let cost = CaseCost { time: start.elapsed(), memory_kib };
    (result.unwrap_or_else(|_| panic!("{case}: it panics")), cost)
}

/// How often operations ended with an error or with a finding, and how often not.
#[derive(Clone, Copy, Debug, Default)]
struct OutcomeCounts {
    errors: u64,
    sound: u64,
}

impl OutcomeCounts {
    fn note<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(done) => {
                self.sound += 1;
                Some(done)
            }
            Err(error) => {
                assert!(!error.to_string().is_empty() && !error.code().name().is_empty());
                self.errors += 1;
                None
            }
        }
    }

    /// What the volume shows.
    fn survey(&mut self, fs: &dyn FileSystem) {
        let _ = fs.statfs();
        for text in survey(fs).into_values() {
            match text {
                Ok(_) => self.sound += 1,
                Err(text) => {
                    assert!(!text.is_empty());
                    self.errors += 1;
                }
            }
        }
    }

    fn check(&mut self, device: &Arc<dyn BlockDevice>, options: &XfsOptions) {
        let Some(result) = self.note(check_xfs(device, options)) else { return };
        assert!(result.findings.iter().all(|finding| !finding.problem.is_empty()));
        self.errors += result.findings.len() as u64;
    }
}

/// Does everything with the volume in `image` that the library can do.
fn do_everything(image: Patched) -> OutcomeCounts {
    let mut counts = OutcomeCounts::default();
    let options = XfsOptions { replay_bytes: 64 << 20, cache_bytes: 8 << 20, ..Default::default() };
    // As in release builds.
    let options = XfsOptions { proves_commits: false, ..options };
    let ignoring = XfsOptions { is_log_ignored: true, ..options.clone() };
    let device: Arc<dyn BlockDevice> = Arc::new(image);
    if let Some(volume) = counts.note(XfsVolume::open(device.clone(), &options)) {
        counts.survey(&*volume);
    } else if let Some(volume) = counts.note(XfsVolume::open(device.clone(), &ignoring)) {
        counts.survey(&*volume);
    }
    counts.check(&device, &options);
    counts.check(&device, &ignoring);
    let written = || Arc::new(MemoryDevice::over(device.clone())) as Arc<dyn BlockDevice>;
    let recovered = written();
    if counts.note(XfsVolume::recover(&recovered, &options)).flatten().is_some() {
        counts.check(&recovered, &options);
        // What one recovery left, another one takes for an empty log.
        let again = XfsVolume::recover(&recovered, &options);
        assert_eq!(again.map_err(|error| error.to_string()), Ok(None));
    }
    let zeroed = written();
    if counts.note(zero_xfs_log(&zeroed, &options)).flatten().is_some() {
        counts.note(XfsVolume::open(zeroed, &options));
    }
    counts
}

fn sweep(name: &str, target: &XfsDamageTarget, cases: u64) {
    let seed = seed_of_run();
    let given = std::env::var("OFFSHOOT_SWEEP").ok();
    let cases = given.map_or(cases, |cases| cases.parse().unwrap());
    let mut random = Random::new(seed);
    let sound = target.sound();
    let (sound, mut most) = within_limits("the sound volume", || do_everything(sound));
    // Logs of version 4 are not written.
    let refused = u64::from(name.starts_with("v4"));
    assert!(sound.errors == refused && sound.sound > 100, "{name}: {sound:?}");
    let (mut total, mut unnoticed) = (OutcomeCounts::default(), 0);
    for number in 0..cases {
        let (image, kind) = target.damaged(&mut random);
        let case = format!("{name} OFFSHOOT_SEED={seed} case {number} ({kind})");
        let (counts, cost) = within_limits(&case, || do_everything(image));
        let OutcomeCounts { errors, sound } = counts;
        most = most.most(cost);
        total.errors += errors;
        total.sound += sound;
        unnoticed += u64::from(errors <= refused);
    }
    eprintln!("{name}: {cases} cases, {total:?}, {unnoticed} without an error, at most {most:?}");
    // Damage that is never noticed would prove nothing, nor would damage that stops everything.
    assert!(total.errors > cases / 2 && total.sound > cases, "{name}: {total:?}");
}

fn sweep_all(cases: u64) {
    let Some(judges) = judges::require() else { return };
    for volume in filled::VOLUMES {
        let disk = filled::make(&judges, volume);
        let target = XfsDamageTarget::of(disk.image());
        let _turn = turn();
        sweep(volume.name(), &target, cases);
    }
}

#[test]
fn every_operation_on_hostile_volumes() {
    sweep_all(CASES);
}

/// `cargo xtask campaign xfs-hostile`.
#[test]
#[ignore = "it takes an hour"]
fn campaign() {
    sweep_all(CAMPAIGN_CASES);
}
