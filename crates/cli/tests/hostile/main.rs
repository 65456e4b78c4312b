//! Hostile volumes: every verb of the program on damaged volumes.
//!
//! The damage is that of the engine's own sweep. Here it is the whole program that must
//! hold: it ends by itself within [`LIMIT`], with one of the documented exit codes and
//! never by a panic or a signal, within a limit on its memory, says what is wrong
//! when something is, and `extract` leaves everything outside of its destination alone.
//!
//! `OFFSHOOT_SWEEP` is the number of damaged volumes, `OFFSHOOT_SEED` repeats a run.

#[path = "../../../btrfs/tests/hostile/damage.rs"]
mod damage;
#[path = "../../../btrfs/tests/hostile/image.rs"]
mod image;
#[path = "../../../btrfs-format/tests/mutation/mod.rs"]
mod mutation;

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use damage::{Allowed, Target};
use image::Image;
use mutation::{from_env, seed_of};
use offshoot_testkit::fixture;
use offshoot_testkit::random::Random;

/// How long a verb may take on a volume of this size, on a slow machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The address space that a verb may use, in KiB: far less than what an image may claim.
const MEMORY_KIB: u64 = 2 << 20;

/// How much a verb may write before its reader goes away: a file may claim any size.
const OUTPUT_BYTES: u64 = 64 << 20;

/// The damaged volumes in an ordinary run.
const CASES: u64 = 40;

/// What one run of the program did.
struct Outcome {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: String,
}

/// Runs the program in `dir` within the limits.
fn offshoot(dir: &Path, args: &[&str], case: &str) -> Outcome {
    // The shell sets the limit and becomes the program.
    let mut child = Command::new("sh")
        .args(["-c", &format!("ulimit -v {MEMORY_KIB} && exec \"$0\" \"$@\"")])
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
        thread::sleep(Duration::from_millis(2));
    };
    let stderr = stderr.join().expect("the reader ends");
    let stdout = stdout.join().expect("the reader ends");
    Outcome { status, stdout, stderr: String::from_utf8_lossy(&stderr).into_owned() }
}

/// Reads a pipe on a thread of its own, up to a limit, and closes it then.
fn collect(pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.take(OUTPUT_BYTES).read_to_end(&mut bytes).expect("a pipe is read");
        bytes
    })
}

/// Runs the program and checks how it ends.
fn run(dir: &Path, args: &[&str], case: &str) -> Outcome {
    let outcome = offshoot(dir, args, case);
    let what = format!("{case}: `offshoot {}`: {}", args.join(" "), outcome.stderr);
    let code = outcome.status.code().unwrap_or_else(|| panic!("{} {what}", outcome.status));
    assert!([0, 1, 3, 4].contains(&code), "exit code {code} {what}");
    assert!(!outcome.stderr.contains("panicked"), "{what}");
    assert!(code == 0 || !outcome.stderr.is_empty(), "exit code {code} without a word {what}");
    outcome
}

/// Where the program runs: the image, a directory to be in, and a place to extract to
/// beside something that must stay as it is.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir(dir.path().join("here")).expect("a directory");
        fs::create_dir(dir.path().join("outer")).expect("a directory");
        fs::write(dir.path().join("outer/sentinel"), "untouched").expect("a file");
        Self { dir }
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("volume.img")
    }

    fn here(&self) -> PathBuf {
        self.dir.path().join("here")
    }

    /// Extracts to a fresh place, and checks that nothing else changed.
    fn extract(&self, args: &[&str], case: &str) -> Outcome {
        let outer = self.dir.path().join("outer");
        let out = outer.join("out");
        let destination = out.to_str().expect("a temporary path is text");
        let outcome = run(&self.here(), &[args, &[destination]].concat(), case);
        let mut left: Vec<_> = names(&outer);
        left.retain(|name| name != "out");
        assert_eq!(left, ["sentinel"], "{case}");
        let sentinel = fs::read_to_string(outer.join("sentinel")).expect("it is still there");
        assert_eq!(sentinel, "untouched", "{case}");
        assert!(names(&self.here()).is_empty(), "{case}: {:?}", names(&self.here()));
        if out.exists() {
            fs::remove_dir_all(&out).expect("what was extracted can be removed");
        }
        outcome
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory is listed");
    entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

/// Every verb, with what it wrote: what the sound volume is compared by.
fn every_verb(place: &Place, case: &str) -> Vec<(i32, Vec<u8>)> {
    let image = place.image();
    let image = image.to_str().expect("a temporary path is text");
    let at = |path: &str| format!("{image}:{path}");
    let (etc, doc) = (at("/root/etc"), at("/snapshots/root-before-upgrade/usr/share/doc/"));
    let files: Vec<_> =
        ["zlib.txt", "lzo.txt", "zstd.txt", "plain.txt"].iter().map(|f| doc.clone() + f).collect();
    let mut verbs: Vec<Vec<&str>> = vec![
        vec!["info", image],
        vec!["info", "--json", image],
        vec!["ls", "-l", "-R", image],
        vec!["ls", "--json", &etc],
        vec!["stat", &etc],
        vec!["subvolume", "list", image],
        vec!["subvolume", "list", "--json", image],
        vec!["dump", "super", image],
        vec!["dump", "chunks", "--json", image],
        vec!["extract", image, "--tar", "-"],
    ];
    verbs.extend(files.iter().map(|file| vec!["cat", file]));
    for tree in ["root", "chunk", "fs", "extent", "csum", "256"] {
        verbs.push(vec!["dump", "tree", image, tree]);
    }
    let mut seen: Vec<_> = verbs
        .iter()
        .map(|args| run(&place.here(), args, case))
        .chain([place.extract(&["extract", image], case)])
        .map(|outcome| (outcome.status.code().expect("checked"), outcome.stdout))
        .collect();
    for ((code, stdout), args) in seen.iter_mut().zip(&verbs) {
        // These two tell of the damage, and which superblock it is that they show. What
        // ends with an error has written as much as was right.
        if args[0] == "info" || args[..2] == ["dump", "super"] || *code != 0 {
            stdout.clear();
        }
    }
    seen
}

#[test]
fn every_verb_on_hostile_volumes() {
    let seed = seed_of("every_verb_on_hostile_volumes");
    let cases = from_env("OFFSHOOT_SWEEP").unwrap_or(CASES);
    let place = Place::new();
    fixture::unpack(&place.image()).expect("the fixture unpacks");
    let image = Arc::new(Image::read(&place.image()).expect("an image"));
    let target = Target::new(vec![image], true);
    let file = File::options().write(true).open(place.image()).expect("the image opens");
    let sound = every_verb(&place, "the sound volume");
    let codes: Vec<_> = sound.iter().map(|(code, _)| *code).collect();
    assert!(codes.iter().all(|&code| code == 0), "the sound volume: {codes:?}");

    let mut random = Random::new(seed);
    let mut codes = [0; 5];
    for number in 0..cases {
        let (members, allowed) = target.damaged(&mut random);
        let case = format!("OFFSHOOT_SEED={seed} case {number} ({allowed:?})");
        members[0].apply(&file).expect("the image is written");
        let outcomes = every_verb(&place, &case);
        members[0].undo(&file).expect("the image is written");
        for (i, (found, expected)) in outcomes.iter().zip(&sound).enumerate() {
            codes[usize::try_from(found.0).expect("checked")] += 1;
            let same = found == expected;
            let failed = found.0 != 0 && allowed == Allowed::Errors;
            assert!(same || failed || allowed == Allowed::Anything, "{case}: verb {i} is wrong");
        }
    }
    println!("exit codes 0 to 4: {codes:?}");
}
