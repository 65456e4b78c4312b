//! A tree that is deeper than any path. The memory of verbs grows with its depth, and not with the
//! sum of its paths. This test is alone in its program, because it measures its child processes.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::resource::{UsageWho, getrusage};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::scratch_dir;
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};

const LEVELS: usize = 6000;
/// With this length, all paths together have 4.5 GB.
const NAME_LEN: usize = 250;
/// The most memory that a verb may use, in KiB. On an idle machine a verb uses 40 MiB.
const MEMORY_MAX: i64 = 160 << 10;

fn dig(top: &Path) {
    let name = "d".repeat(NAME_LEN);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = openat(CWD, top, flags, Mode::empty()).expect("the top opens");
    for _ in 0..LEVELS {
        mkdirat(&at, &name, Mode::RWXU).expect("a directory");
        at = openat(&at, &name, flags, Mode::empty()).expect("it opens");
    }
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = openat(&at, "last", flags, Mode::RUSR | Mode::WUSR).expect("a file");
    File::from(file).write_all(&[7; 8192]).expect("it is written");
}

#[test]
fn memory_does_not_grow_with_the_sum_of_paths() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&[]);
    let theirs = {
        let mount = disks.mount("noatime");
        dig(mount.path());
        mount.sync();
        let mut du = Command::new("du");
        du.args(["-s"]).arg(mount.path());
        du_kib(&du.output().expect("du is there").stdout)
    };
    let dir = scratch_dir();
    let image = disks.images()[0].to_str().expect("text").to_owned();
    let place = format!("{image}:/");
    let runs = |words: &[&str]| {
        let out = dir.path().join("out");
        let output = Command::new(env!("CARGO_BIN_EXE_offshoot"))
            .args(words)
            .stdin(Stdio::null())
            .stdout(File::create(&out).expect("a file"))
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        let said: String = said.chars().take(400).collect();
        assert!(output.status.success(), "{words:?}: {said}");
        let used = getrusage(UsageWho::RUSAGE_CHILDREN).expect("we may ask").max_rss();
        assert!(used < MEMORY_MAX, "{words:?}: {used} KiB");
        std::fs::read(out).expect("it is there")
    };
    let kib = du_kib(&runs(&["du", "-s", &place]));
    assert_eq!(kib, theirs);
    let path_len = LEVELS * (NAME_LEN + 1);
    for words in
        [&["find", &place, "-name", "last"][..], &["find", &place, "-depth", "-name", "last"]]
    {
        let found = runs(words);
        assert_eq!(found.len(), image.len() + ":".len() + path_len + "/last\n".len());
    }
    let tree = runs(&["tree", &place]);
    assert!(tree.ends_with(format!("\n{LEVELS} directories, 1 file\n").as_bytes()));
    runs(&["chmod", "-R", "g+w", &place]);
    runs(&["find", &place, "-depth", "-type", "f", "-delete"]);
    runs(&["rm", "-r", &format!("{place}{}", "d".repeat(NAME_LEN))]);
    assert_eq!(runs(&["ls", "-a", "-1", &place]), b".\n..\n");
    disks.assert_checks();
}

fn du_kib(line: &[u8]) -> u64 {
    let line = String::from_utf8_lossy(line);
    let kib = line.split('\t').next().expect("a number");
    kib.parse().expect("a number")
}
