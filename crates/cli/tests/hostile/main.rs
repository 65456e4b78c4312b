//! Hostile volumes: every verb of the program on damaged volumes.
//!
//! The damage is that of the engine's own sweep. Here the whole program must hold:
//!
//! - It ends by itself within [`LIMIT`] and within limits of memory.
//! - It ends with a documented exit code, and never by a panic or a signal.
//! - When something is wrong, it says so.
//! - Its JSON is valid, however it ends.
//! - `extract` and `cp` change nothing outside of their destination.
//!
//! Verbs that change a volume work on a copy. [`xfs`] has the same for volumes of XFS.
//!
//! `OFFSHOOT_SWEEP` is the number of damages to each volume. `OFFSHOOT_SEED` repeats a run.

#[path = "../../../btrfs/tests/hostile/damage.rs"]
mod damage;
#[path = "../../../btrfs/tests/hostile/image.rs"]
mod image;
#[path = "../../../btrfs-format/tests/mutation/mod.rs"]
mod mutation;
#[path = "../../../xfs/tests/hostile/units.rs"]
mod units;
mod volume;
mod xfs;
#[path = "../../../xfs/tests/hostile/damage.rs"]
mod xfs_damage;
#[path = "../../../xfs/tests/hostile/filled.rs"]
mod xfs_filled;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use damage::AllowedView;
use mutation::{from_env, seed_of};
use nix::sys::resource::{UsageWho, getrusage};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::try_run;
use offshoot_testkit::scratch_dir;
use serde_json::Value;
use volume::HostileVolume;

/// How long a verb may take on a volume of this size, on a slow machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The address space that a verb may use, in KiB: far less than an image may claim. This limit ends
/// a run that asks for too much, before the machine suffers.
const ADDRESS_KIB: u64 = 2 << 20;

/// The resident memory that a verb may use, in KiB.
const RESIDENT_KIB: i64 = 256 << 10;

/// How much a verb may write before its reader closes the pipe: a file may claim any size.
const OUTPUT_BYTES: u64 = 64 << 20;

/// How many damages to each volume an ordinary run tries.
const CASES: u64 = 80;

/// The result of one run of the program.
struct RunOutcome {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: String,
}

/// Runs the program in `dir` within the limits.
fn offshoot(dir: &Path, args: &[String], case: &str) -> RunOutcome {
    // The shell sets the limit and then becomes the program.
    let mut child = Command::new("sh")
        .args(["-c", &format!("ulimit -v {ADDRESS_KIB} && exec \"$0\" \"$@\"")])
        .arg(env!("CARGO_BIN_EXE_offshoot"))
        .args(args)
        .env("MALLOC_ARENA_MAX", "2")
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let stdout = collect(child.stdout.take().expect("piped"));
    let stderr = collect(child.stderr.take().expect("piped"));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status;
        }
        if start.elapsed() > LIMIT {
            child.kill().expect("a child can be killed");
            child.wait().expect("a child can be waited for");
            panic!("{case}: `offshoot {}` is not done after {LIMIT:?}", args.join(" "));
        }
        thread::sleep(Duration::from_micros(500));
    };
    let stderr = stderr.join().expect("the reader ends");
    let stdout = stdout.join().expect("the reader ends");
    RunOutcome { status, stdout, stderr: String::from_utf8_lossy(&stderr).into_owned() }
}

/// Reads a pipe on a thread of its own, up to a limit, and then closes it.
fn collect(pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.take(OUTPUT_BYTES).read_to_end(&mut bytes).expect("a pipe is read");
        bytes
    })
}

/// Runs the program and checks how it ends.
fn run(dir: &Path, args: &[String], case: &str) -> RunOutcome {
    let outcome = offshoot(dir, args, case);
    let what = format!("{case}: `offshoot {}`: {}", args.join(" "), outcome.stderr);
    let code = outcome.status.code().unwrap_or_else(|| panic!("{} {what}", outcome.status));
    // `ls` ends with 2 when a place does not exist. All other verbs end with 2 only for a wrong
    // command line.
    let is_not_there = code == 2 && args[0] == "ls" && !outcome.stderr.contains("Usage:");
    assert!([0, 1, 3, 4].contains(&code) || is_not_there, "exit code {code} {what}");
    assert!(!outcome.stderr.contains("panicked"), "{what}");
    assert!(code == 0 || !outcome.stderr.is_empty(), "exit code {code} without a word {what}");
    // The most memory that any child has used so far. This run is the first over the limit, if
    // there is one.
    let resident_kib = getrusage(UsageWho::RUSAGE_CHILDREN).expect("it is known").max_rss();
    assert!(resident_kib <= RESIDENT_KIB, "{resident_kib} KiB of memory {what}");
    if args.iter().any(|arg| arg == "--json") && (outcome.stdout.len() as u64) < OUTPUT_BYTES {
        // One value, or one on each line.
        let values = serde_json::Deserializer::from_slice(&outcome.stdout).into_iter::<Value>();
        for value in values {
            assert!(value.is_ok(), "{value:?} {what}");
        }
    }
    outcome
}

/// Where the program runs: its working directory, and a place to extract to, beside files that must
/// not change.
struct RunPlace {
    dir: tempfile::TempDir,
}

impl RunPlace {
    fn new() -> Self {
        let dir = scratch_dir();
        fs::create_dir(dir.path().join("here")).expect("a directory");
        fs::create_dir(dir.path().join("outer")).expect("a directory");
        fs::write(dir.path().join("outer/sentinel"), "untouched").expect("a file");
        Self { dir }
    }

    fn here(&self) -> PathBuf {
        self.dir.path().join("here")
    }

    /// Extracts to a fresh place, and checks that nothing else changed.
    fn extract(&self, mut args: Vec<String>, case: &str) -> RunOutcome {
        let outer = self.dir.path().join("outer");
        let out = outer.join("out");
        args.push(out.to_str().expect("a temporary path is text").to_owned());
        let outcome = run(&self.here(), &args, case);
        let mut left: Vec<_> = names(&outer);
        left.retain(|name| name != "out");
        assert_eq!(left, ["sentinel"], "{case}");
        let sentinel = fs::read_to_string(outer.join("sentinel")).expect("it is still there");
        assert_eq!(sentinel, "untouched", "{case}");
        assert!(names(&self.here()).is_empty(), "{case}: {:?}", names(&self.here()));
        // If the damage turned the directory into another file, `cp` copies that under the name
        // itself.
        let removed = match out.symlink_metadata() {
            Ok(stat) if stat.is_dir() => fs::remove_dir_all(&out),
            Ok(_) => fs::remove_file(&out),
            Err(_) => Ok(()),
        };
        removed.expect("what was extracted can be removed");
        outcome
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory is listed");
    entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

/// Runs every verb, and returns the exit codes and outputs, to compare with those of the sound
/// volume.
fn every_verb(volume: &HostileVolume, place: &RunPlace, case: &str) -> Vec<(i32, Vec<u8>)> {
    let verbs = volume.verbs();
    let mut seen: Vec<_> = verbs
        .iter()
        .map(|args| run(&place.here(), args, case))
        .chain(volume.extractions().into_iter().map(|args| place.extract(args, case)))
        .map(|outcome| (outcome.status.code().expect("checked"), outcome.stdout))
        .collect();
    for ((code, stdout), args) in seen.iter_mut().zip(&verbs) {
        // These verbs show the damage, or which superblock they used. A verb that ends with an
        // error has written only a part.
        let shows_damage = ["info", "stats"].contains(&args[0].as_str())
            || args[..2] == ["dump", "super"]
            || args.iter().any(|word| word == "--list-roots");
        if shows_damage || *code != 0 {
            stdout.clear();
        }
    }
    for (code, stdout) in &mut seen[verbs.len()..] {
        let mut outcome: Value = serde_json::from_slice(stdout).unwrap_or_default();
        // The threads decide which of several files comes first.
        outcome.as_object_mut().map(|outcome| outcome.remove("not_applied"));
        *stdout = if *code == 0 { outcome.to_string().into_bytes() } else { Vec::new() };
    }
    seen
}

/// Runs every verb that changes a volume, one after the other on a copy.
fn every_change(volume: &HostileVolume, place: &RunPlace, case: &str, is_sound: bool) {
    let dir = scratch_dir();
    let copy = volume.copy(dir.path());
    for args in copy.changes() {
        let outcome = run(&place.here(), &args, case);
        let is_done = outcome.status.success();
        let what = format!("{case}: `offshoot {}`: {}", args.join(" "), outcome.stderr);
        assert!(is_done || !is_sound || !volume.is_writable(), "{what}");
    }
    if is_sound && volume.images().len() == 1 && try_run("btrfs", &["--version"]).is_ok() {
        let words = ["check".as_ref(), "--readonly".as_ref(), copy.images()[0].as_os_str()];
        offshoot_testkit::run::run("btrfs", &words);
    }
    assert!(names(&place.here()).is_empty(), "{case}: {:?}", names(&place.here()));
}

/// The verbs that change run on one damage of so many, because each run needs a copy.
const CHANGES_EVERY: u64 = 4;

fn sweep(name: &str, volume: &HostileVolume) {
    let seed = seed_of(name);
    let cases = from_env("OFFSHOOT_SWEEP").unwrap_or(CASES);
    let place = RunPlace::new();
    let target = volume.target();
    let sound = every_verb(volume, &place, "the sound volume");
    let codes: Vec<_> = sound.iter().map(|(code, _)| *code).collect();
    assert!(codes.iter().all(|&code| code == 0), "the sound volume: {codes:?}");

    every_change(volume, &place, "the sound volume", true);

    let mut random = Random::new(seed);
    let mut codes = [0; 5];
    for number in 0..cases {
        let (members, allowed) = target.damaged(&mut random);
        let case = format!("{name}: OFFSHOOT_SEED={seed} case {number} ({allowed:?})");
        let outcomes = volume.with(&members, || {
            if number % CHANGES_EVERY == 0 {
                every_change(volume, &place, &case, false);
            }
            every_verb(volume, &place, &case)
        });
        for (i, (found, expected)) in outcomes.iter().zip(&sound).enumerate() {
            codes[usize::try_from(found.0).expect("checked")] += 1;
            let same = found == expected;
            let failed = found.0 != 0 && allowed == AllowedView::Errors;
            let shown = |(code, stdout): &(i32, Vec<u8>)| {
                let stdout = String::from_utf8_lossy(&stdout[..stdout.len().min(500)]);
                format!("exit code {code}, {stdout}")
            };
            assert!(
                same || failed || allowed == AllowedView::Anything,
                "{case}: verb {i} is wrong: {} instead of {}",
                shown(found),
                shown(expected)
            );
        }
    }
    println!("exit codes 0 to 4: {codes:?}");
}

#[test]
fn every_verb_on_hostile_volumes() {
    sweep("every_verb_on_hostile_volumes", &HostileVolume::fixture());
}

#[test]
fn every_verb_on_hostile_volumes_of_small_nodes() {
    let Some(judges) = judges::require() else { return };
    let volume = HostileVolume::made(&judges, Recipe::new().mkfs("-n 4k"));
    sweep("every_verb_on_hostile_volumes_of_small_nodes", &volume);
}

#[test]
fn every_verb_on_hostile_volumes_of_several_devices() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().devices(3).mkfs("-d raid1 -m raid1c3");
    let volume = HostileVolume::made(&judges, recipe);
    sweep("every_verb_on_hostile_volumes_of_several_devices", &volume);
}

/// `cargo xtask campaign xfs-hostile`.
#[test]
#[ignore = "it takes an hour"]
fn campaign() {
    xfs::campaign();
}
