//! A short `offshoot-bench members`.

mod common;

use std::fs;

use offshoot_testkit::scratch_dir;
use serde_json::Value;

use common::{assert_refuses, bench};

#[test]
fn every_volume_is_synced_and_read() {
    let dir = scratch_dir();
    let line = "members --latency-us 100 --rate-mib 2000 --fsyncs 3 --mib 2 --turns 2 --dir";
    let output = bench(&format!("{line} {}", dir.path().display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let table = String::from_utf8(output.stdout).expect("text");
    assert_eq!(table.lines().count(), 2 + 5 + 2 + 5, "{table}");
    let json = fs::read(dir.path().join("members.json")).expect("all runs");
    let runs: Vec<Value> = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(runs.len(), 2 * (5 + 5));
    for run in &runs {
        let figure = ["fsync ms", "MiB/s"].map(|what| run[what].as_f64());
        assert!(figure.into_iter().flatten().all(|figure| figure > 0.0), "{run}");
        assert!(figure[0].is_some() != figure[1].is_some(), "{run}");
    }
}

#[test]
fn wrong_options_are_refused() {
    assert_refuses(&[
        "members --turns 0",
        "members --mib 0",
        "members --mib 5000",
        "members --rate-mib 0",
        "members --fsyncs none",
        "members two",
    ]);
}
