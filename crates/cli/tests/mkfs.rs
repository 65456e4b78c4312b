//! `offshoot mkfs` as a user runs it: what it makes, what it refuses, and how it ends.

use std::path::Path;
use std::process::{Command, Output};

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

const UUID: &str = "0ff50007-0000-4000-8000-00000000bbbb";

fn mkfs(dir: &Path, words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot"))
        .arg("mkfs")
        .args(words.split_whitespace())
        .current_dir(dir)
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .output()
        .expect("the program starts")
}

#[track_caller]
fn makes(dir: &Path, words: &str) -> String {
    let output = mkfs(dir, words);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.is_empty(), "mkfs {words}: {}\n{text}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

/// Runs `mkfs`, which must fail with `code` and one line. Returns that line.
#[track_caller]
fn refuses(dir: &Path, words: &str, code: i32) -> String {
    let output = mkfs(dir, words);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "mkfs {words}: {text}");
    assert!(output.stdout.is_empty() && text.starts_with("offshoot: "), "mkfs {words}: {text}");
    text
}

#[test]
fn what_is_made_is_sound_and_as_asked_for() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let text = makes(dir.path(), &format!("disk.img --size 300M --uuid {UUID} -L name -n 4k"));
    assert_eq!(text, format!("made volume {UUID}, 300 MiB\n"));
    let image = dir.path().join("disk.img");
    run("btrfs", &["check".as_ref(), "--readonly".as_ref(), image.as_os_str()]);
    let words = ["inspect-internal".as_ref(), "dump-super".as_ref(), image.as_os_str()];
    let dump = run("btrfs", &words).replace('\t', " ");
    for sign in [UUID, "label   name", "nodesize  4096", "total_bytes  314572800"] {
        assert!(dump.contains(sign), "no {sign:?} in\n{dump}");
    }
}

#[test]
fn the_same_command_makes_the_same_bytes() {
    let dir = scratch_dir();
    for name in ["a.img", "b.img"] {
        makes(dir.path(), &format!("{name} --size 70M --uuid {UUID} --csum sha256"));
    }
    let read = |name| std::fs::read(dir.path().join(name)).expect("an image");
    assert!(read("a.img") == read("b.img"), "they differ");
    for name in ["c.img", "d.img"] {
        makes(dir.path(), &format!("{name} --size 70M"));
    }
    assert!(read("c.img") != read("d.img"), "two volumes with one id");
}

#[test]
fn machine_output() {
    let dir = scratch_dir();
    let text = makes(dir.path(), &format!("a.img b.img --size 200M --json -d raid0 -U {UUID}"));
    let expected = format!(
        "{{\"uuid\":\"{UUID}\",\"total_bytes\":419430400,\"devices\":[\"a.img\",\"b.img\"]}}\n"
    );
    assert_eq!(text, expected);
}

#[test]
fn refusals_say_why_and_leave_nothing_behind() {
    let dir = scratch_dir();
    let path = dir.path();
    assert!(refuses(path, "a.img", 2).contains("--size"));
    assert!(refuses(path, "a.img --size 10X", 2).contains("10X"));
    assert!(refuses(path, "a.img --size 200M -m raid1", 2).contains("RAID1"));
    assert!(refuses(path, "a.img --size 200M -O bad", 2).contains("bad"));
    assert!(refuses(path, "a.img --size 200M -O zoned", 4).contains("zoned"));
    assert!(refuses(path, "a.img b.img --size 200M -d raid5", 4).contains("RAID5"));
    assert!(refuses(path, "a.img --size 10M", 1).contains("MiB"));
    assert!(refuses(path, "a.img b.img a.img --size 200M", 1).contains("have bytes in common"));
    let left: Vec<_> = std::fs::read_dir(path).expect("the directory").collect();
    assert!(left.is_empty(), "{left:?}");

    makes(path, "a.img --size 200M");
    let before = std::fs::read(path.join("a.img")).expect("an image");
    assert!(refuses(path, "a.img", 1).contains("btrfs"));
    assert!(refuses(path, "a.img --force --size 100M", 1).contains("a.img"));
    assert!(refuses(path, "a.img --size 300M", 1).contains("btrfs"));
    assert!(refuses(path, "a.img --force --size 300M -d raid5", 4).contains("RAID5"));
    assert!(before == std::fs::read(path.join("a.img")).expect("it is still there"));
    makes(path, "a.img --force --size 300M");
    let len = std::fs::metadata(path.join("a.img")).expect("an image").len();
    assert_eq!(len, 300 << 20);
}
