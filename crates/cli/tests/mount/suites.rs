//! Test suites of other projects, on a mount.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::random::seed_of_run;

use super::callers::MountLinks;
use super::format::{current, is_xfs, on};
use super::work::end;
use super::{ServedMount, on_both, require, volume};

/// The ways of storing data that the format has. The suites have to pass with each of them.
pub(super) fn ways() -> &'static [&'static str] {
    let all =
        &["rw", "compress-force=zlib", "compress-force=lzo", "compress-force=zstd", "nodatacow"];
    if is_xfs() { &all[..1] } else { all }
}

/// The program of a suite. `cargo xtask setup` installs it beside our build.
#[track_caller]
fn suite(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_BIN_EXE_offshoot")).ancestors().nth(2).expect("target");
    let program = built.join("tools/bin").join(name);
    assert!(program.exists(), "{name} is missing: `cargo xtask setup` installs it");
    program
}

/// The features that `pjdfstest` may use, and the users whose rights it may take.
const CONFIGURATION: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.01
allow_remount = true
expected_failures = EXPECTED

[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// Directories of btrfs have one link, whatever is in them; the kernel's fail it too.
const EXPECTED_OF_BTRFS: &str = r#"["rename::updates_link_parent"]"#;

/// Runs the tests of `pjdfstest` whose names contain one of these words, or all, on a volume that
/// is mounted in this way.
pub(super) fn run_pjdfstest(judges: &Judges, way: &str, words: &[&str], at_least: u32) {
    let program = suite("pjdfstest");
    // It runs `mount` to remount, and `mount` looks for our program by these links.
    let _links = MountLinks::new();
    let disks = volume(judges, 512);
    let mounted = ServedMount::new(&disks.images()[0], &format!("allow_other,suid,dev,{way}"));
    let configuration = disks.images()[0].with_extension("toml");
    // The tests that remount run by themselves later, because they keep others from writing.
    let remounts = !words.is_empty();
    let text =
        CONFIGURATION.replace("allow_remount = true", &format!("allow_remount = {remounts}"));
    let text = text.replace("EXPECTED", if is_xfs() { "[]" } else { EXPECTED_OF_BTRFS });
    std::fs::write(&configuration, text).expect("a file");
    let dir = mounted.path().join("dir");
    std::fs::create_dir(&dir).expect("a directory");
    let output = Command::new(program)
        .args(["-c".as_ref(), configuration.as_os_str(), "-p".as_ref(), dir.as_os_str()])
        .args(words)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{way}: {}\n{said}", output.status);
    let passed = said.lines().rfind(|line| line.starts_with("Summary:")).unwrap_or_default();
    let passed = passed.split(", ").find_map(|part| part.strip_suffix(" passed"));
    let passed: u32 = passed.and_then(|number| number.parse().ok()).unwrap_or(0);
    assert!(passed >= at_least, "{way}: only {passed} tests passed:\n{said}");
    mounted.unmount();
    disks.assert_checks();
}

/// How many of its tests pass at least, and how many of those that remount. The kernel's btrfs
/// passes no more.
pub(super) const PASSED: u32 = 381;
pub(super) const PASSED_READ_ONLY: u32 = 13;

fn pjdfstest() {
    let Some(judges) = require() else { return };
    run_pjdfstest(&judges, "rw", &[], PASSED);
}

/// The tests that remount the volume read-only. No other test could write to it meanwhile.
fn pjdfstest_read_only() {
    let Some(judges) = require() else { return };
    run_pjdfstest(&judges, "rw", &["erofs"], PASSED_READ_ONLY);
}

/// All operations of `fsx`; FUSE passes all of them on. None has a length of zero:
/// `posix_fallocate` must answer that with EINVAL, and `fsx` takes this answer for a filesystem
/// without the call.
const OPERATIONS: &str = "
[opsize]
min = 1

[weights]
close_open = 2
invalidate = 2
mapread = 10
mapwrite = 10
read = 10
write = 10
truncate = 5
fsync = 1
fdatasync = 1
posix_fallocate = 3
punch_hole = 5
sendfile = 3
posix_fadvise = 2
copy_file_range = 5
";

/// How many operations run with one seed.
const OPERATIONS_OF_A_SEED: &str = "2000";

/// Runs `fsx` with one seed after another for this time, on a volume that is mounted in this way.
/// Then the kernel's mount must show the same.
fn run_fsx(judges: &Judges, way: &str, time: Duration, first_seed: u64) {
    let program = suite("fsx");
    let disks = volume(judges, 512);
    let mounted = ServedMount::new(&disks.images()[0], way);
    let configuration = disks.images()[0].with_extension("toml");
    std::fs::write(&configuration, OPERATIONS).expect("a file");
    let (started, mut seeds) = (Instant::now(), 0);
    while seeds == 0 || started.elapsed() < time {
        let seed = (first_seed + seeds).to_string();
        // Each file is used again, and the files of other seeds stay.
        let file = mounted.path().join(format!("file{}", seeds % 4));
        let artifacts = disks.images()[0].parent().expect("a directory");
        let output = Command::new(&program)
            .args(["-N", OPERATIONS_OF_A_SEED, "-S", &seed, "-f"])
            .args([configuration.as_os_str(), "-P".as_ref(), artifacts.as_os_str()])
            .arg(file)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "-o {way}, -S {seed}: {}\n{said}", output.status);
        seeds += 1;
    }
    println!("fsx with {way}: {seeds} seeds from {first_seed}");
    end(mounted, &disks);
}

/// The same in every way of storing data, all at once.
pub(super) fn run_fsx_in_all_ways(judges: &Judges, time: Duration) {
    let (seed, format) = (seed_of_run(), current());
    std::thread::scope(|scope| {
        for (number, way) in (0..).zip(ways()) {
            let seed = seed + number * 1_000_000;
            scope.spawn(move || on(format, || run_fsx(judges, way, time, seed)));
        }
    });
}

fn fsx() {
    let Some(judges) = require() else { return };
    let seconds = if is_xfs() { 5 } else { 15 };
    run_fsx_in_all_ways(&judges, Duration::from_secs(seconds));
}

on_both! {
    pjdfstest,
    pjdfstest_read_only,
    fsx,
}
