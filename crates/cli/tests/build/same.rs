//! The same sources and options make the same bytes.

use std::fs;
use std::path::Path;
use std::process::Command;

use offshoot_testkit::fill;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::{program, words};

/// How often each image is built.
const TIMES: usize = 5;

/// Some thousand files, more data than is kept in memory, and files that are worth compressing.
fn tree(root: &Path) {
    let mut random = offshoot_testkit::random::Random::new(7);
    for number in 0..3000 {
        let dir = root.join(format!("d{}", number % 40));
        fs::create_dir_all(&dir).expect("a directory");
        let len = usize::try_from(random.below(20_000)).expect("a small number");
        let data = if number % 3 == 0 { random.bytes(len) } else { random.text(len) };
        fs::write(dir.join(format!("f{number}")), data).expect("a file");
    }
    fs::write(root.join("large"), random.bytes(80 << 20)).expect("a file");
    let links = fill::directory(root, "links");
    fs::write(links.join("a"), "linked").expect("a file");
    fs::hard_link(links.join("a"), links.join("b")).expect("a link");
}

fn build(dir: &Path, line: &str, processors: &str) -> Vec<u8> {
    let mut command = Command::new("taskset");
    command.args(["-c", processors]).arg(env!("CARGO_BIN_EXE_offshoot"));
    command.args(words(line)).current_dir(dir).env("SOURCE_DATE_EPOCH", "1700000000");
    let output = command.output().expect("taskset starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
    fs::read(dir.join("v.img")).expect("an image")
}

#[track_caller]
fn assert_same(first: &[u8], other: &[u8], what: &str) {
    if first != other {
        let at = first.iter().zip(other).position(|(one, other)| one != other);
        panic!("{what}: they differ from byte {at:?} on");
    }
}

#[track_caller]
fn always_the_same(options: &str) {
    let dir = scratch_dir();
    let source = dir.path().join("source");
    fs::create_dir(&source).expect("a directory");
    tree(&source);
    run(
        "tar",
        &[
            "-C".as_ref(),
            source.as_os_str(),
            "--sort=name".as_ref(),
            "--format=pax".as_ref(),
            "-cf".as_ref(),
            dir.path().join("a.tar").as_os_str(),
            ".".as_ref(),
        ],
    );
    for from in ["source", "a.tar"] {
        let line = format!(
            "build v.img --force --from {from} --uuid 0ff50007-0000-4000-8000-00000000bbbb {options}"
        );
        let first = build(dir.path(), &line, "0");
        for time in 1..TIMES {
            let processors = if time % 2 == 0 { "0" } else { "0-1" };
            let other = build(dir.path(), &line, processors);
            assert_same(&first, &other, &format!("{line}, time {time}"));
        }
    }
}

#[test]
fn plain() {
    always_the_same("");
}

#[test]
fn compressed() {
    always_the_same("--compress zstd:3 --csum xxhash");
}

#[test]
fn with_small_blocks() {
    always_the_same("--nodesize 4096 --metadata single");
}

#[test]
fn with_subvolumes() {
    always_the_same("--subvolume default:/d1 --subvolume ro:/links --subvolume /new/way");
}

#[test]
fn xfs() {
    always_the_same("--format xfs");
}

/// Without a UUID they differ, and so do the times without SOURCE_DATE_EPOCH.
#[test]
fn what_is_not_given_differs() {
    let dir = scratch_dir();
    fs::create_dir(dir.path().join("d")).expect("a directory");
    let build = |line: &str| {
        let output = program(dir.path()).args(words(line)).output().expect("it starts");
        assert!(output.status.success(), "{line}");
        fs::read(dir.path().join("v.img")).expect("an image")
    };
    let line = "build v.img --from d --force";
    assert!(build(line) != build(line));
}
