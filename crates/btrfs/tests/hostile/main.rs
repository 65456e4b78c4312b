//! Hostile volumes: every operation of the library on thousands of damaged volumes.
//!
//! Each case damages a volume somewhere, mostly in its metadata. Then it does everything with the
//! volume that the library can do. Three things must hold:
//!
//! 1. Nothing panics, and no case takes more than [`CASE_LIMIT`] or [`CASE_MEMORY_KIB`].
//! 2. Data with checksums is never wrong. Where the damage leaves a checksum wrong, the library
//!    returns what the sound volume returns, or an error. With a second good copy there is not even
//!    an error.
//! 3. Where the checksums fit the damage, the checks behind the checksums come into play. The first
//!    point still holds.
//!
//! Volumes that are damaged by programs are also checked and repaired ([`bodies`]).
//!
//! `OFFSHOOT_SWEEP` is the number of cases for each volume. `OFFSHOOT_SEED` repeats a run.

#[path = "../bodies/mod.rs"]
mod bodies;
mod damage;
mod found;
mod image;
#[path = "../../../btrfs-format/tests/mutation/mod.rs"]
mod mutation;
mod repaired;
mod survey;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use damage::{AllowedView, DamageTarget};
use image::{Patched, SparseImage};
use mutation::{from_env, seed_of};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fixture, judges};
use offshoot_testkit::random::Random;
use survey::{Survey, survey};

/// How long one damaged volume may take, on a slow machine.
const CASE_LIMIT: Duration = Duration::from_secs(60);

/// How much memory one damaged volume may add, in KiB.
const CASE_MEMORY_KIB: u64 = 256 << 10;

/// How many cases an ordinary run has: for the small volume that the repository carries, and for
/// each volume that the kernel makes.
const CASES_CARRIED: u64 = 1000;
const CASES_MADE: u64 = 50;

fn devices(members: &[Patched]) -> Vec<Arc<dyn BlockDevice>> {
    members.iter().map(|member| Arc::new(member.clone()) as Arc<dyn BlockDevice>).collect()
}

/// A line of `/proc/self/status`, in KiB.
fn memory_kib(line: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("there is /proc");
    let value = status.lines().find_map(|l| l.strip_prefix(line)).expect("a line of memory");
    value.trim_matches([':', ' ', '\t', 'k', 'B']).parse().expect("a number")
}

/// Lets one sweep run at a time: the kernel counts memory for the whole process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on a thread of its own, within the limits.
fn within_limits<T: Send + 'static>(case: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    // Resets the kernel's record of the highest use of memory.
    std::fs::write("/proc/self/clear_refs", "5").expect("a process may reset its own mark");
    let before = memory_kib("VmRSS");
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
    });
    let result = result.recv_timeout(CASE_LIMIT);
    let seen = result.unwrap_or_else(|_| panic!("{case}: not done after {CASE_LIMIT:?}"));
    let seen = seen.unwrap_or_else(|_| panic!("{case}: it panics"));
    let used = memory_kib("VmHWM").saturating_sub(before);
    assert!(used < CASE_MEMORY_KIB, "{case}: {used} KiB of memory");
    seen
}

/// Runs one survey within the limits.
fn survey_within_limits(members: &[Patched], is_degraded: bool, case: &str) -> Survey {
    let devices = devices(members);
    within_limits(case, move || survey(devices, is_degraded))
}

/// Compares what was seen of a damaged volume with what the sound one shows.
fn judge(sound: &Survey, seen: &Survey, allowed: AllowedView, case: &str) {
    if allowed == AllowedView::Anything {
        return;
    }
    let mut failed = 0;
    for (what, found) in seen {
        match found {
            Ok(found) => {
                let expected = sound.get(what).and_then(|expected| expected.as_ref().ok());
                assert_eq!(Some(found), expected, "{case}: {what} is wrong");
            }
            Err(error) => {
                assert!(allowed == AllowedView::Errors, "{case}: {what}: {error}");
                failed += 1;
            }
        }
    }
    if failed == 0 {
        let missing = sound.keys().find(|what| !seen.contains_key(*what));
        assert_eq!(missing, None, "{case}: left out without an error");
    }
}

fn sweep(name: &str, target: &DamageTarget, cases: u64) {
    let seed = seed_of(name);
    let cases = from_env("OFFSHOOT_SWEEP").unwrap_or(cases);
    let mut random = Random::new(seed);
    let sound = survey_within_limits(&target.sound(), false, "the sound volume");
    let errors: Vec<_> = sound.iter().filter(|(_, found)| found.is_err()).collect();
    assert!(sound.len() > 100 && errors.is_empty(), "the sound volume: {errors:?}");
    let (mut refused, mut same) = (0, 0);
    for number in 0..cases {
        let (members, allowed) = target.damaged(&mut random);
        let case = format!("{name} OFFSHOOT_SEED={seed} case {number} ({allowed:?})");
        let found = survey_within_limits(&members, random.below(4) == 0, &case);
        judge(&sound, &found, allowed, &case);
        let complete = found.values().all(Result::is_ok);
        refused += u64::from(!complete);
        same += u64::from(complete && found.len() == sound.len());
    }
    println!("{name}: {cases} cases, {refused} with errors, {same} without and complete");
    // Damage that no survey notices would prove nothing; parity undoes most of it. Damage so gross
    // that no case gets past the first check would prove nothing either.
    if cases >= CASES_CARRIED {
        assert!(refused > cases / 30, "only {refused} of {cases} cases are damaged");
        assert!(same > cases / 50, "only {same} of {cases} cases survive");
    }
}

fn images(paths: &[impl AsRef<Path>]) -> Vec<Arc<SparseImage>> {
    paths.iter().map(|path| Arc::new(SparseImage::read(path.as_ref()).expect("an image"))).collect()
}

/// The volume that the repository carries. It needs no judge, so it runs on every machine.
#[test]
fn the_carried_volume() {
    let _turn = turn();
    sweep("the_carried_volume", &carried(), CASES_CARRIED);
}

fn carried() -> DamageTarget {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("kernel.btrfs");
    fixture::unpack(&path).expect("the fixture unpacks");
    DamageTarget::new(images(&[path]), true)
}

fn of(disks: &Disks) -> DamageTarget {
    DamageTarget::new(images(disks.images()), false)
}

#[test]
fn small_nodes_and_old_features() {
    let _turn = turn();
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mkfs("-n 4096 -O ^no-holes,^free-space-tree");
    sweep("small_nodes_and_old_features", &of(&recipe.make(&judges)), CASES_MADE);
}

#[test]
fn mixed_groups() {
    let _turn = turn();
    let Some(judges) = judges::require() else { return };
    sweep("mixed_groups", &of(&Recipe::new().mkfs("--mixed").make(&judges)), CASES_MADE);
}

#[test]
fn raid6() {
    let _turn = turn();
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().devices(4).mkfs("-d raid6 -m raid6");
    sweep("raid6", &of(&recipe.make(&judges)), CASES_MADE);
}

#[test]
fn raid10_with_another_checksum() {
    let _turn = turn();
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().devices(4).mkfs("-d raid0 -m raid10 --csum xxhash");
    sweep("raid10_with_another_checksum", &of(&recipe.make(&judges)), CASES_MADE);
}
