//! A short `offshoot-bench mount`: measures every load on every side, and leaves nothing behind.

mod common;

use std::fs;
use std::path::Path;

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::io_uring;
use offshoot_testkit::scratch_dir;
use serde_json::Value;

use common::{assert_refuses, bench};

#[test]
fn every_load_is_measured_on_every_side() {
    let Some(_judges) = judges::require() else { return };
    // `cargo test --workspace` builds all programs into one directory before it runs tests.
    let program = Path::new(env!("CARGO_BIN_EXE_offshoot-bench")).with_file_name("offshoot");
    assert!(program.exists(), "{} is not there: build the workspace", program.display());
    let dir = scratch_dir();
    let source = dir.path().join("source");
    fs::create_dir_all(source.join("below")).expect("a directory");
    fs::write(source.join("below/file"), "contents").expect("a file");
    let (over_ring, has_ring) = (["ours", "ours-xfs", "null"], io_uring::can_be_had().is_ok());
    let mut sides =
        vec!["ours", "ours-dev", "ours-xfs", "ours-xfs-dev", "btrfs", "xfs", "null", "null-dev"];
    sides.push("fuser");
    sides.retain(|side| has_ring || !over_ring.contains(side));
    let (place, source) = (dir.path().display(), source.display());
    let what = format!("--sides {} --offshoot {}", sides.join(","), program.display());
    let output = bench(&format!(
        "mount --dir {place} {what} --source {source} --files 20 --rounds 2 --mib 3 --random-mib 1 --turns 2"
    ));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let table = String::from_utf8(output.stdout).expect("text");
    assert_eq!(table.lines().count(), 2 + 11 * sides.len(), "{table}");
    let json = fs::read(dir.path().join("mount.json")).expect("all runs");
    let figures: Vec<Value> = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(figures.len(), 2 * 11 * sides.len());
    for figure in &figures {
        let positive = |name: &str| figure[name].as_f64().is_some_and(|number| number > 0.0);
        assert!(positive("amount") && positive("seconds"), "{figure}");
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    assert!(!mounts.contains(&place.to_string()), "{mounts}");
    assert!(!dir.path().join("mount.img").exists());
}

#[test]
fn wrong_options_are_refused() {
    assert_refuses(&[
        "mount --dir x",
        "mount --dir x --offshoot y --sides ext4",
        "mount --dir x --offshoot y --loads all",
        "mount --dir x --offshoot y --turns 0",
        "mount --dir x --offshoot y --mib 1 --random-mib 2",
        "serve-null x",
        "serve-null x quic",
    ]);
}
