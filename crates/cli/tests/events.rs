//! What the engine does, on standard error: `-v` and `OFFSHOOT_LOG`.

use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A volume in a folder of its own.
struct EventVolume {
    _dir: TempDir,
    image: PathBuf,
}

impl EventVolume {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let image = dir.path().join("disk.img");
        let volume = Self { _dir: dir, image };
        let image = volume.image.to_str().expect("text").to_owned();
        assert!(run(&["mkfs", &image, "--size", "256M"], None).status.success());
        volume
    }

    fn place(&self, path: &str) -> String {
        format!("{}:{path}", self.image.display())
    }
}

fn run(words: &[&str], filter: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
    command.env_remove("OFFSHOOT_LOG").args(words);
    command.envs(filter.map(|filter| ("OFFSHOOT_LOG", filter)));
    command.output().expect("it runs")
}

/// Standard error of a run that must succeed, and write nothing to standard output.
#[track_caller]
fn told(words: &[&str], filter: Option<&str>) -> String {
    let output = run(words, filter);
    assert!(output.status.success() && output.stdout.is_empty(), "{words:?}: {output:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn nothing_is_told_unasked() {
    let volume = EventVolume::new();
    assert_eq!(told(&["mkdir", &volume.place("/a")], None), "");
    assert_eq!(told(&["mkdir", &volume.place("/b")], Some("")), "");
    assert_eq!(told(&["mkdir", &volume.place("/c")], Some("off")), "");
}

#[test]
fn the_variable_chooses_levels_and_targets() {
    let volume = EventVolume::new();
    let lines = told(&["mkdir", &volume.place("/a")], Some("btrfs::commit=info"));
    assert!(lines.contains(" INFO ") && lines.contains("btrfs::commit: committed gen"), "{lines}");
    assert!(lines.lines().all(|line| line.contains(" btrfs::commit: ")), "{lines}");
    let lines = told(&["mkdir", &volume.place("/b")], Some("debug,btrfs::commit=off"));
    assert!(lines.contains("DEBUG") && lines.contains(" btrfs::reclaim: "), "{lines}");
    assert!(!lines.contains(" btrfs::commit: ") && !lines.contains("TRACE"), "{lines}");
}

#[test]
fn the_option_before_the_verb_counts_levels() {
    let volume = EventVolume::new();
    for (option, levels) in [
        ("-v", [true, false, false]),
        ("--verbose", [true, false, false]),
        ("-vv", [true, true, false]),
        ("-vvv", [true, true, true]),
    ] {
        let source = volume.image.with_extension("txt");
        std::fs::write(&source, "contents").expect("a file");
        let (source, place) = (source.to_str().expect("text"), volume.place("/file"));
        let lines = told(&[option, "cp", source, &place], None);
        let shown = [" INFO ", "DEBUG", "TRACE"].map(|level| lines.contains(level));
        assert_eq!(shown, levels, "{option}: {lines}");
    }
    // The variable says more precisely what is wanted.
    let lines = told(&["-vvv", "mkdir", &volume.place("/a")], Some("btrfs=off"));
    assert_eq!(lines, "");
}

/// As with `2>&1 | head`.
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let volume = EventVolume::new();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
    let status = command.args(["-vvv", "mkdir", &volume.place("/a")]).stderr(writer).status();
    assert!(status.expect("it runs").success());
    assert!(run(&["stat", &volume.place("/a")], None).status.success());
}

#[test]
fn behind_a_verb_the_option_is_that_of_the_verb() {
    let volume = EventVolume::new();
    let output = run(&["mkdir", "-v", &volume.place("/a")], None);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("/a"), "{output:?}");
}

#[test]
fn a_wrong_filter_is_refused() {
    let volume = EventVolume::new();
    for (filter, words) in [
        ("debugg", "is not off, error, warn, info, debug or trace"),
        ("btrfs::commit=loud", "is not off, error, warn, info, debug or trace"),
        ("btrfs::comit=trace", "no events of \"btrfs::comit\"; there are btrfs::open, "),
    ] {
        let output = run(&["ls", &volume.place("/")], Some(filter));
        assert_eq!(output.status.code(), Some(2), "{filter}: {output:?}");
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(said.starts_with("offshoot: OFFSHOOT_LOG: ") && said.contains(words), "{said}");
    }
}
