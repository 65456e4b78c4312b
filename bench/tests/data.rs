//! A short `offshoot-bench data`: measures every row on both sides, and checks the volume of ours.

mod common;

use std::fs;

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::scratch_dir;
use serde_json::Value;

use common::{assert_refuses, bench};

const DATA: [&str; 6] =
    ["write", "read", "random read", "random write", "write, 2 threads", "read, 2 threads"];

const DIRECT: [(&str, &str); 2] = [("direct", "write direct"), ("direct", "clone")];

/// Runs the benchmark with volumes of a format, which has these rows.
fn assert_measures(format: &str, expected: &[(&str, &str)]) {
    let dir = scratch_dir();
    let line = format!(
        "data --dir {} --mib 9 --random-mib 1 --snapshots 5 --files 20 --turns 1 --format {format}",
        dir.path().display()
    );
    let output = bench(&line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let table = String::from_utf8(output.stdout).expect("text");
    assert_eq!(table.lines().count(), 2 + expected.len(), "{table}");
    let json = fs::read(dir.path().join("data.json")).expect("all runs");
    let rows: Vec<Value> = serde_json::from_slice(&json).expect("JSON");
    let found: Vec<_> = rows.iter().map(|row| (text(row, "group"), text(row, "row"))).collect();
    assert_eq!(found, expected);
    for row in &rows {
        for side in ["ours_s", "kernel_s"] {
            let times = row[side].as_array().expect("an array");
            assert_eq!(times.len(), 1, "{row}");
            assert!(times.iter().all(|time| time.as_f64().is_some_and(|time| time > 0.0)), "{row}");
        }
    }
}

#[test]
fn every_row_is_measured_on_both_sides_and_proved() {
    let Some(_judges) = judges::require() else { return };
    let mut expected = Vec::new();
    for group in ["plain", "zstd:3", "zstd:15"] {
        expected.extend(DATA.map(|row| (group, row)));
    }
    expected.extend(DIRECT);
    expected.push(("snapshots", "snapshots"));
    assert_measures("btrfs", &expected);
}

#[test]
fn every_row_of_xfs_is_measured_on_both_sides_and_proved() {
    let Some(_judges) = offshoot_testkit::xfs::judges::require() else { return };
    assert_measures("xfs", &[&DATA.map(|row| ("plain", row))[..], &DIRECT].concat());
}

fn text<'r>(row: &'r Value, name: &str) -> &'r str {
    row[name].as_str().expect("text")
}

#[test]
fn wrong_options_are_refused() {
    assert_refuses(&[
        "data",
        "data --dir x --groups lzo",
        "data --dir x --groups zstd:3 --format xfs",
        "data --dir x --format ext4",
        "data --dir x --mib 0",
        "data --dir x --turns 0",
    ]);
}
