//! A short `offshoot-bench fsync` and `dir-fsync`: measures both sides, and checks the volume of
//! ours.

mod common;

use std::fs;
use std::path::Path;

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::scratch_dir;
use serde_json::Value;

use common::{assert_refuses, bench};

/// Runs a benchmark. Returns the number of lines of its table, and its JSON.
#[track_caller]
fn measured(dir: &Path, line: &str) -> (usize, Vec<Value>) {
    let what = line.split_whitespace().next().expect("the name of a benchmark");
    let output = bench(&format!("{line} --dir {}", dir.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let table = String::from_utf8(output.stdout).expect("text");
    let json = fs::read(dir.join(format!("{what}.json"))).expect("all runs");
    (table.lines().count(), serde_json::from_slice(&json).expect("JSON"))
}

fn figure(run: &Value, name: &str) -> f64 {
    run[name].as_f64().unwrap_or_else(|| panic!("no {name} in {run}"))
}

#[test]
fn appends_are_measured_on_both_sides_and_proved() {
    let Some(_judges) = judges::require() else { return };
    assert_appends("btrfs");
}

#[test]
fn appends_on_xfs_are_measured_on_both_sides_and_proved() {
    let Some(_judges) = offshoot_testkit::xfs::judges::require() else { return };
    assert_appends("xfs");
}

fn assert_appends(format: &str) {
    let dir = scratch_dir();
    let line = format!("fsync --threads 1,3 --fsyncs 40 --turns 2 --format {format}");
    let (lines, runs) = measured(dir.path(), &line);
    assert_eq!(lines, 2 + 4);
    assert_eq!(runs.len(), 8);
    for side in ["ours", "kernel"] {
        let of_side = || runs.iter().filter(|run| run["side"] == side);
        let counts: Vec<_> = of_side().map(|run| figure(run, "fsyncs")).collect();
        assert_eq!(counts, [40.0, 40.0, 39.0, 39.0], "{side}");
        for run in of_side() {
            let product = figure(run, "fsyncs_per_second") * figure(run, "seconds");
            assert!((product - figure(run, "fsyncs")).abs() < 0.01, "{run}");
            let parts = ["p50_ms", "p99_ms", "p999_ms", "max_ms"].map(|name| figure(run, name));
            assert!(parts[0] > 0.0 && parts.is_sorted(), "{run}");
            assert!(parts[3] <= figure(run, "seconds") * 1e3, "{run}");
            assert_eq!(run["commits"].is_u64(), side == "ours" && format == "btrfs", "{run}");
        }
    }
}

#[cfg(feature = "measure")]
#[test]
fn a_large_directory_is_measured_on_both_sides_and_proved() {
    let Some(_judges) = judges::require() else { return };
    // `cargo test --workspace` builds all programs into one directory before it runs tests.
    let program = Path::new(env!("CARGO_BIN_EXE_offshoot-bench")).with_file_name("offshoot");
    assert!(program.exists(), "{} is not there: build the workspace", program.display());
    let dir = scratch_dir();
    let line = format!(
        "dir-fsync --offshoot {} --files 2000 --deletes 20 --node-sizes 4096,65536 --turns 1",
        program.display()
    );
    let (lines, runs) = measured(dir.path(), &line);
    assert_eq!(lines, 2 + 6);
    let turns: Vec<_> = runs.iter().map(|run| (&run["side"], &run["node_size"])).collect();
    let sides = ["ours", "log-by-item", "kernel"].map(Value::from);
    let all_nodes = [4096, 65536].map(Value::from);
    let expected = all_nodes.iter().flat_map(|nodes| sides.iter().map(move |side| (side, nodes)));
    assert_eq!(turns, expected.collect::<Vec<_>>());
    for run in &runs {
        let rounds = run["rounds"].as_array().expect("an array");
        let files: Vec<_> = rounds.iter().map(|round| figure(round, "files")).collect();
        assert_eq!(files, [2000.0, 0.0, 0.0, 20.0, 0.0], "{run}");
        assert!(rounds.iter().all(|round| figure(round, "seconds") > 0.0), "{run}");
    }
}

#[test]
fn wrong_options_are_refused() {
    assert_refuses(&[
        "fsync",
        "fsync --dir x --threads 0",
        "fsync --dir x --threads 1,50 --fsyncs 40",
        "fsync --dir x --turns 0",
        "dir-fsync --dir x",
        "dir-fsync --dir x --offshoot y --files 2 --deletes 3",
        "dir-fsync --dir x --offshoot y --node-sizes many",
    ]);
}
