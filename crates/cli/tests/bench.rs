//! `offshoot bench` and `offshoot stats`: the volume holds what the benchmarks report, and nothing
//! else. The kernel and `btrfs check` accept it.

#[expect(dead_code, reason = "the tests need the names, and not what gives them")]
#[path = "../src/workload.rs"]
mod workload;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs;
use offshoot_testkit::xfs::disk::XfsDisk;
use serde_json::Value;
use workload::{DirFsync, Enospc, WorkloadContent, WorkloadNames, dir_name};

fn offshoot(dir: &Path, line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot"))
        .args(line.split_whitespace())
        .current_dir(dir)
        .output()
        .expect("the program starts")
}

#[track_caller]
fn does(dir: &Path, line: &str) -> String {
    let output = offshoot(dir, line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.is_empty(),
        "offshoot {line}: {}\n{said}",
        output.status
    );
    String::from_utf8(output.stdout).expect("text")
}

/// Runs a benchmark, and returns its report.
#[track_caller]
fn measures(dir: &Path, line: &str) -> Value {
    let text = does(dir, &format!("bench {line} --json"));
    assert_eq!(text.lines().count(), 1, "{text}");
    let said: Value = serde_json::from_str(&text).expect("JSON");
    for figure in ["sync_seconds", "total_seconds", "peak_memory_bytes", "cpu_seconds"] {
        assert!(said[figure].as_f64().is_some_and(|value| value > 0.0), "{figure} in {text}");
    }
    let counters = said["statistics"].as_object().expect("an object");
    assert!(counters.values().filter(|value| value.is_u64()).count() > 5, "{text}");
    assert_statistics(counters);
    for round in said["rounds"].as_array().expect("an array") {
        let speed = round["files_per_second"].as_f64().expect("a number");
        let product = speed * round["seconds"].as_f64().expect("a number");
        let files = round["files"].as_f64().expect("a number");
        assert!((product - files).abs() <= files / 1000.0, "{round}");
    }
    said
}

#[track_caller]
fn assert_statistics(counters: &serde_json::Map<String, Value>) {
    let reservations = &counters["reservations"];
    let buckets = reservations["latency"].as_array().expect("an array");
    let counts = buckets.iter().map(|bucket| number(&bucket["count"])).sum::<u64>();
    let outcomes =
        ["granted_at_once", "granted_soon", "tickets_granted", "tickets_refused", "tickets_failed"];
    let sum = outcomes.map(|outcome| number(&reservations[outcome])).iter().sum::<u64>();
    assert_eq!(counts, sum, "{reservations}");
    assert!(buckets.iter().all(|bucket| number(&bucket["below_us"]).is_power_of_two()));
    let kinds = counters["space"].as_array().expect("an array");
    let names: Vec<_> = kinds.iter().filter_map(|kind| kind["kind"].as_str()).collect();
    assert_eq!(names, ["data", "metadata", "system"]);
    for kind in kinds {
        let known = ["used_bytes", "pinned_bytes", "free_bytes", "unknown_bytes"];
        let sum = known.map(|figure| number(&kind[figure])).iter().sum::<u64>();
        // The rest are the places of superblocks, which are never free.
        let rest = number(&kind["total_bytes"]).checked_sub(sum).expect("parts of the whole");
        assert!(rest <= 4 << 16, "{kind}");
    }
    let states = counters["flush_states"].as_array().expect("an array");
    assert!(states.iter().all(|state| state["entered"].is_u64() && state["state"].is_string()));
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

/// A file of a volume by its directory and name, and what it holds.
type BenchFiles = BTreeMap<String, Vec<u8>>;

/// Requires that the volume holds these files, and `others` at its root, and nothing else.
#[track_caller]
fn assert_holds(image: &Path, dirs: u64, expected: &BenchFiles, others: &[&str]) {
    run("btrfs", &["check".as_ref(), "--check-data-csum".as_ref(), image.as_os_str()]);
    let mount =
        MountedMembers::try_new(&[image.to_path_buf()], "ro").unwrap_or_else(|why| panic!("{why}"));
    assert_shows(mount.path(), dirs, expected, others);
}

/// The same of a volume of XFS, with `xfs_repair`.
#[track_caller]
fn assert_xfs_holds(image: &Path, dirs: u64, expected: &BenchFiles, others: &[&str]) {
    let judges = xfs::judges::require().expect("they are there");
    let disk = XfsDisk::served(&judges, image);
    disk.assert_checks();
    assert_shows(disk.mount("ro", &[]).path(), dirs, expected, others);
}

/// Requires that a mount shows these files.
#[track_caller]
fn assert_shows(mount: &Path, dirs: u64, expected: &BenchFiles, others: &[&str]) {
    let listed = |path: &Path| -> Vec<String> {
        let entries = fs::read_dir(path).expect("a directory");
        let name = |entry: fs::DirEntry| entry.file_name().into_string().expect("text");
        let mut names: Vec<_> = entries.map(|entry| name(entry.expect("an entry"))).collect();
        names.sort();
        names
    };
    let mut dirs: Vec<_> = (0..dirs).map(dir_name).collect();
    let mut top = dirs.clone();
    top.extend(others.iter().map(|&name| name.to_owned()));
    top.sort();
    assert_eq!(listed(mount), top);
    dirs.sort();
    let mut found = BenchFiles::new();
    for dir in dirs {
        for name in listed(&mount.join(&dir)) {
            let data = fs::read(mount.join(&dir).join(&name)).expect("a file");
            found.insert(format!("{dir}/{name}"), data);
        }
    }
    let names = |files: &BenchFiles| files.keys().cloned().collect::<Vec<_>>();
    assert!(names(&found) == names(expected), "{} files, not {}", found.len(), expected.len());
    for (name, data) in expected {
        assert!(found[name] == *data, "{name} holds something else");
    }
}

/// The files that a run of fs-mark reports.
fn made_by_fs_mark(said: &Value, size: usize) -> BenchFiles {
    let (seed, began) = (number(&said["seed"]), number(&said["began_seconds"]));
    let threads = number(&said["threads"]);
    let rounds = said["rounds"].as_array().expect("an array");
    let each = rounds.iter().map(|round| number(&round["files"])).sum::<u64>() / threads;
    let mut files = BenchFiles::new();
    for thread in 0..threads {
        let mut names = WorkloadNames::new(seed, began, thread);
        for _ in 0..each {
            let name = names.next();
            let data = WorkloadContent::new(size).of(name).to_vec();
            let name = str::from_utf8(name).expect("a plain name");
            files.insert(format!("{}/{name}", dir_name(thread)), data);
        }
    }
    files
}

#[test]
fn fs_mark_makes_what_it_says() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let image = dir.path().join("disk.img");
    for (threads, size) in [(1, 0), (3, 0), (2, 1024), (3, 4096), (2, 50_000)] {
        let line = format!(
            "fs-mark disk.img -f --threads {threads} --files 200 --rounds 3 --size {size} --image-size 2G"
        );
        let said = measures(dir.path(), &line);
        assert_eq!(said["size"], size);
        let rounds = said["rounds"].as_array().expect("an array");
        assert_eq!(rounds.len(), 3);
        assert!(rounds.iter().all(|round| round["files"] == threads * 200), "{said}");
        let files = made_by_fs_mark(&said, size);
        assert_eq!(files.len() as u64, threads * 600, "no two names are the same");
        assert_holds(&image, threads, &files, &[]);
    }
}

/// Each option switches off its mechanism, and changes nothing else.
#[cfg(feature = "measure")]
#[test]
fn every_mechanism_can_be_switched_off() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let queued = |options: &str| {
        let line = format!("fs-mark disk.img -f --threads 2 --files 2000 --rounds 2 {options}");
        let said = measures(dir.path(), &line);
        assert_holds(&dir.path().join("disk.img"), 2, &made_by_fs_mark(&said, 0), &[]);
        number(&said["statistics"]["delayed_queued"])
    };
    assert!(queued("") > 8000);
    assert!(queued("--reserve-by-item") > 8000);
    assert_eq!(queued("--no-delayed-items"), 0);
    assert!(queued("--latching before-search") > 8000);
    let line = "bench fs-mark disk.img --no-delayed-items --reserve-by-item";
    refuses(dir.path(), line, 2, "cannot be used");
}

/// The program that people install offers none of them.
#[cfg(not(feature = "measure"))]
#[test]
fn no_mechanism_is_offered() {
    let dir = scratch_dir();
    for option in ["--no-delayed-items", "--latching before-search", "--commits-per-cycle 2"] {
        let line = format!("bench fs-mark disk.img {option}");
        refuses(dir.path(), &line, 2, "unexpected argument");
    }
}

/// Commits in the middle of a run, and background writing, do not change what a run makes.
#[test]
fn fs_mark_with_little_memory_makes_what_it_says() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let line = "fs-mark disk.img --threads 4 --files 5000 --rounds 2 --size 100 --dirty-bytes 1M";
    let said = measures(dir.path(), line);
    assert!(number(&said["statistics"]["commits"]) > 2, "{said}");
    assert_holds(&dir.path().join("disk.img"), 4, &made_by_fs_mark(&said, 100), &[]);
}

#[test]
fn the_names_are_those_of_the_seed() {
    let dir = scratch_dir();
    let seed = ["--seed 7", "--seed 7", "--seed 8"];
    let listed = seed.map(|seed| {
        let line = format!("fs-mark disk.img -f --files 20 --rounds 1 {seed}");
        let output = Command::new(env!("CARGO_BIN_EXE_offshoot"))
            .arg("bench")
            .args(line.split_whitespace())
            .current_dir(dir.path())
            .env("SOURCE_DATE_EPOCH", "1700000000")
            .output()
            .expect("the program starts");
        assert!(output.status.success(), "{output:?}");
        let mut names: Vec<_> =
            does(dir.path(), "ls disk.img:/d1").lines().map(str::to_owned).collect();
        names.sort();
        names
    });
    assert!(listed[0] == listed[1] && listed[0] != listed[2]);
    for name in &listed[0] {
        let random = name.strip_prefix("6553f100~~~~~~~~").expect("the time in front");
        let is_plain = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit();
        assert!(random.len() == 24 && random.chars().all(is_plain), "{name}");
    }
}

/// Every benchmark on XFS: no file is lost that was acknowledged, and the log has been counted.
#[test]
fn benchmarks_of_xfs_make_what_they_say() {
    let Some(_judges) = xfs::judges::require() else { return };
    let dir = scratch_dir();
    let image = dir.path().join("disk.img");
    let measured = |line: &str| -> Value {
        let text = does(dir.path(), &format!("bench {line} --format xfs --json"));
        let said: Value = serde_json::from_str(&text).expect("JSON");
        assert!(number(&said["statistics"]["log_checkpoints"]) > 0, "{text}");
        said
    };
    for (threads, size) in [(1, 0), (3, 5000)] {
        let said = measured(&format!(
            "fs-mark disk.img -f --threads {threads} --files 200 --rounds 3 --size {size} --image-size 1G"
        ));
        assert_xfs_holds(&image, threads, &made_by_fs_mark(&said, size), &[]);
    }
    fs::remove_file(&image).expect("an image");
    let said = measured("enospc disk.img --size 300M --workers 4 --file-size 3000 --half-direct");
    assert_eq!(said["rounds"][0]["files"], said["rounds"][1]["files"], "{said}");
    assert_xfs_holds(&image, 4, &BenchFiles::new(), &["filler"]);
    let said = measured("enospc disk.img -f --size 300M --workers 4 --file-size 3000 --keep");
    assert_xfs_holds(&image, 4, &made_by_enospc(&said, 3000), &["filler"]);
    let work = DirFsync { files: 3000, deletes: 70 };
    fs::remove_file(&image).expect("an image");
    measured("dir-fsync disk.img --files 3000 --deletes 70 --image-size 1G --log-size 100M");
    let left = (1..=work.files).filter(|&number| !work.removes(number));
    let left = left.map(|number| (format!("d1/{}", DirFsync::name(number)), Vec::new())).collect();
    assert_xfs_holds(&image, 1, &left, &[]);
}

/// The files that a run of enospc reports.
fn made_by_enospc(said: &Value, size: usize) -> BenchFiles {
    let mut files = BenchFiles::new();
    let workers = said["files_of_workers"].as_array().expect("an array");
    for (worker, count) in (0..).zip(workers) {
        for file in 0..number(count) {
            let name = Enospc::name(file);
            let data = WorkloadContent::new(size).of(name.as_bytes()).to_vec();
            files.insert(format!("{}/{name}", dir_name(worker)), data);
        }
    }
    assert_eq!(files.len() as u64, number(&said["rounds"][0]["files"]));
    files
}

#[test]
fn enospc_loses_nothing_that_was_acknowledged() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let image = dir.path().join("disk.img");
    for (mib, workers, size, other) in [
        (128, 8, 1024, ""),
        (256, 8, 1024, ""),
        (128, 4, 3000, ""),
        (192, 2, 10_000, ""),
        (128, 8, 2048, "--half-direct"),
    ] {
        let line = format!(
            "enospc disk.img -f --size {mib}M --workers {workers} --file-size {size} {other}"
        );
        let _ = fs::remove_file(&image);
        let said = measures(dir.path(), &format!("{line} --keep"));
        assert_eq!(said["rounds"].as_array().map(Vec::len), Some(1));
        assert_eq!(said["rounds"][0]["phase"], "fill");
        let files = made_by_enospc(&said, size);
        assert!(files.len() > 100, "{} files on {mib} MiB", files.len());
        assert_holds(&image, workers, &files, &["filler"]);

        let said = measures(dir.path(), &line);
        let rounds = said["rounds"].as_array().expect("an array");
        assert_eq!(rounds.len(), 2);
        assert_eq!(rounds[1]["phase"], "remove");
        assert_eq!(rounds[0]["files"], rounds[1]["files"]);
        assert_holds(&image, workers, &BenchFiles::new(), &["filler"]);
    }
}

#[test]
fn dir_fsync_makes_and_removes_what_it_says() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let image = dir.path().join("disk.img");
    for (files, deletes, node_size) in [(1, 1, 4096), (3000, 70, 4096), (5000, 50, 65536)] {
        let line = format!(
            "dir-fsync disk.img -f --files {files} --deletes {deletes} --nodesize {node_size} --image-size 1G"
        );
        let said = measures(dir.path(), &line);
        assert_eq!(said["node_size"], node_size);
        let rounds = said["rounds"].as_array().expect("an array");
        let phases: Vec<_> = rounds.iter().filter_map(|round| round["phase"].as_str()).collect();
        assert_eq!(phases, DirFsync::PHASES);
        let work = DirFsync { files, deletes };
        let left = (1..=files).filter(|&number| !work.removes(number));
        let left: BenchFiles =
            left.map(|n| (format!("d1/{}", DirFsync::name(n)), Vec::new())).collect();
        assert_eq!(rounds[0]["files"], files);
        assert_eq!(rounds[3]["files"], files - left.len() as u64);
        let removed = number(&rounds[3]["files"]);
        assert!((deletes..2 * deletes).contains(&removed), "{said}");
        assert_holds(&image, 1, &left, &[]);
        let text = does(dir.path(), "info disk.img --json");
        assert!(text.contains(&node_size.to_string()), "{text}");
    }
}

#[test]
fn text_is_for_people() {
    let dir = scratch_dir();
    let text = does(dir.path(), "bench fs-mark disk.img --threads 2 --files 30 --rounds 2");
    let first = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
    let begins: Vec<_> = text.lines().take(8).map(first).collect();
    assert_eq!(begins, ["fs-mark:", "round", "1", "2", "sync", "total", "CPU", "peak"], "{text}");
    assert!(text.contains("Commits completed."), "{text}");
    let text = does(dir.path(), "bench enospc full.img --size 128M --workers 2");
    let begins: Vec<_> = text.lines().take(6).map(first).collect();
    assert_eq!(begins, ["enospc:", "round", "fill", "remove", "sync", "total"], "{text}");
    let line = "bench dir-fsync dirs.img --files 500 --deletes 5 --image-size 1G";
    let text = does(dir.path(), line);
    let begins: Vec<_> = text.lines().take(9).map(first).collect();
    let expected =
        ["dir-fsync:", "round", "add", "fsync", "sync", "remove", "fsync", "sync", "total"];
    assert_eq!(begins, expected, "{text}");
}

#[track_caller]
fn refuses(dir: &Path, line: &str, code: i32, why: &str) {
    let output = offshoot(dir, line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "offshoot {line}: {said}");
    assert!(output.stdout.is_empty() && said.contains(why), "offshoot {line}: {said}");
}

#[test]
fn refusals_say_why() {
    let dir = scratch_dir();
    let path = dir.path();
    refuses(path, "bench", 2, "incomplete");
    refuses(path, "bench fs-mark", 2, "IMAGE");
    for (option, why) in [
        ("--threads 0", "a number from 1"),
        ("--threads 100000", "at most 4096"),
        ("--threads -1", "-1"),
        ("--files many", "many"),
        ("--rounds 0", "a number from 1"),
        ("--size 2G", "at most 1G"),
        ("--size 1X", "1X"),
        ("--files 4000000000 --rounds 4000000000 --threads 4096", "1 PiB"),
        ("--image-size 10M", "MiB"),
    ] {
        let code = if option == "--image-size 10M" { 1 } else { 2 };
        refuses(path, &format!("bench fs-mark disk.img {option}"), code, why);
    }
    refuses(path, "bench enospc disk.img --workers 0", 2, "a number from 1");
    refuses(path, "bench dir-fsync disk.img --files 2 --deletes 3", 2, "3 files");
    refuses(path, "bench dir-fsync disk.img --nodesize 5K", 2, "5120");
    refuses(path, "bench enospc disk.img --size 1M", 1, "MiB");
    refuses(path, "bench enospc no/such/disk.img", 1, "no/such");
    let left: Vec<_> = fs::read_dir(path).expect("the directory").collect();
    assert!(left.is_empty(), "{left:?}");

    does(path, "mkfs disk.img --size 1G");
    let before = does(path, "info disk.img");
    refuses(path, "bench fs-mark disk.img", 1, "btrfs");
    refuses(path, "bench enospc disk.img --size 1G", 1, "btrfs");
    refuses(path, "bench enospc disk.img --force", 1, "cut off");
    assert_eq!(does(path, "info disk.img"), before);
}

#[test]
fn stats_of_a_volume() {
    let dir = scratch_dir();
    does(dir.path(), "bench fs-mark disk.img --files 1000 --rounds 1 --size 5000 --image-size 2G");
    let text = does(dir.path(), "stats disk.img --json");
    let said: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(said["size"], 2u64 << 30);
    let space = said["space"].as_array().expect("an array");
    let sum = |figure: &str| space.iter().map(|kind| number(&kind[figure])).sum::<u64>();
    assert_eq!(sum("used"), number(&said["used"]), "{text}");
    assert_eq!(sum("size"), sum("used") + sum("free"), "{text}");
    assert!(number(&said["unallocated"]) > 0 && number(&said["available"]) > 0, "{text}");
    assert!(said["statistics"].is_object(), "{text}");
    let kinds: Vec<_> = space.iter().filter_map(|kind| kind["holds"].as_str()).collect();
    assert_eq!(kinds, ["data", "system", "metadata"]);
    let text = does(dir.path(), "stats disk.img");
    assert!(text.starts_with("size") && text.contains("metadata     DUP"), "{text}");
}

#[test]
fn what_the_engine_did_to_a_volume_that_was_changed() {
    let dir = scratch_dir();
    let path = dir.path();
    does(path, "mkfs disk.img --size 1G");
    fs::write(path.join("file"), "text").expect("a file");
    for line in [
        "cp file disk.img:/file",
        "mkdir disk.img:/dir disk.img:/other",
        "mv disk.img:/file disk.img:/dir",
        "ln -s target disk.img:/link",
        "rm -r disk.img:/dir",
    ] {
        let output = offshoot(path, &format!("{line} --stats"));
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(output.status.success() && output.stdout.is_empty(), "offshoot {line}: {said}");
        assert!(said.starts_with("offshoot: what the engine did to disk.img\n"), "{said}");
        assert!(said.contains("Commits completed."), "{said}");
    }
    let output = offshoot(path, "cp -r disk.img:/link out --stats");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
