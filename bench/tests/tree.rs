//! A short `offshoot-bench tree`: measures every order with every number of threads and every way
//! of latching.

mod common;

use std::collections::BTreeSet;
use std::fs;

use offshoot_testkit::scratch_dir;
use serde_json::Value;

use common::{assert_refuses, bench};

#[test]
fn every_way_of_latching_is_measured() {
    const RUNS: usize = 3 * 3 * 6;
    let dir = scratch_dir();
    let output = bench(&format!("tree --dir {} --rounds 1 --items 1500", dir.path().display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let table = String::from_utf8(output.stdout).expect("text");
    assert_eq!(table.lines().count(), 1 + RUNS, "{table}");
    let json = fs::read(dir.path().join("tree.json")).expect("all runs");
    let runs: Vec<Value> = serde_json::from_slice(&json).expect("JSON");
    let kinds = ["order", "threads", "latching"];
    let kind = |run: &Value| kinds.map(|name| run[name].to_string());
    assert_eq!(runs.iter().map(kind).collect::<BTreeSet<_>>().len(), RUNS);
    for run in &runs {
        assert!(run["inserts_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{run}");
        assert!(run["locks_taken"].as_u64().is_some_and(|taken| taken >= 1500), "{run}");
    }
}

#[test]
fn wrong_options_are_refused() {
    assert_refuses(&["tree --items 0", "tree --rounds 0", "tree --threads 1", "tree run series 1"]);
}
