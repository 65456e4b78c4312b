//! The program on volumes with a pending tree log that the kernel wrote.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output};

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::run;

fn offshoot(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot")).args(arguments).output().expect("it runs")
}

/// Runs the program, which must succeed, and returns its output.
#[track_caller]
fn done(arguments: &[&str]) -> String {
    let output = offshoot(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// A volume whose file `x` held `old` at the last commit, and was changed and synced since.
fn cut(judges: &Judges) -> Disks {
    let disks = Disks::create(judges, 1, 256);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime,commit=300");
    let path = mount.path().join("x");
    std::fs::write(&path, "old").expect("a file");
    mount.sync();
    std::fs::write(&path, "newer").expect("a file");
    File::open(&path).and_then(|file| file.sync_all()).expect("an fsync");
    disks.copy(judges)
}

#[test]
fn what_was_synced_is_read_and_kept() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges);
    let image = cut.images()[0].to_str().expect("a plain path");
    let place = format!("{image}:/x");
    let dump = done(&["dump", "log", image]);
    assert!(dump.starts_with("log of subvolume 5\n") && dump.contains("INODE_ITEM"), "{dump}");
    let lines = done(&["dump", "log", "--json", image]);
    assert!(lines.lines().all(|line| line.starts_with("{\"subvolume\":5,")), "{lines}");
    for _ in 0..2 {
        assert_eq!(done(&["cat", &place]), "newer");
        assert_eq!(done(&["cat", "--ignore-log", &place]), "old");
    }
    assert!(done(&["info", "--json", image]).contains("\"log_pending\":true"));
    let refused = offshoot(&["mkdir", "--ignore-log", &format!("{image}:/dir")]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(!String::from_utf8_lossy(&refused.stderr).contains("zero-log"), "{refused:?}");
    done(&["mkdir", &format!("{image}:/dir")]);
    assert_eq!(done(&["cat", "--ignore-log", &place]), "newer");
    assert_eq!(done(&["dump", "log", image]), "");
    cut.assert_checks();
}

#[test]
fn a_damaged_log_has_two_ways_on() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges);
    let image = cut.images()[0].to_str().expect("a plain path");
    let place = format!("{image}:/x");
    let bytes = std::fs::read(image).expect("an image");
    let file = File::options().write(true).open(image).expect("an image");
    for at in (0..bytes.len()).step_by(4096) {
        // The owner field of a tree block of a log.
        if bytes[at + 88..at + 96] == (-6i64).to_le_bytes() {
            file.write_all_at(b"damage", at as u64 + 300).expect("it is written");
        }
    }
    for arguments in [&["cat", &place][..], &["mkdir", &format!("{image}:/dir")]] {
        let output = offshoot(arguments);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        for words in ["pending tree log: ", "checksum", "--ignore-log", "rescue zero-log"] {
            assert!(said.contains(words), "{words:?} is not said: {said}");
        }
    }
    assert_eq!(done(&["cat", "--ignore-log", &place]), "old");
    let said = done(&["rescue", "zero-log", image]);
    assert!(said.contains("thrown away"), "{said}");
    assert_eq!(done(&["cat", &place]), "old");
    assert!(done(&["rescue", "zero-log", image]).contains("no log is pending"));
    cut.assert_checks();
}

/// A sound log that we cannot replay must not be thrown away.
#[test]
fn zero_log_is_offered_for_damaged_logs_only() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime,commit=300");
    let path = mount.path().join("x");
    let root = mount.path().to_str().expect("a plain path");
    run("btrfs", &["quota", "enable", root]);
    run("btrfs", &["qgroup", "limit", "1G", root]);
    std::fs::write(&path, "old").expect("a file");
    mount.sync();
    std::fs::write(&path, "newer").expect("a file");
    File::open(&path).and_then(|file| file.sync_all()).expect("an fsync");
    let cut = disks.copy(&judges);
    drop(mount);
    let image = cut.images()[0].to_str().expect("a plain path");
    let (place, dir) = (format!("{image}:/x"), format!("{image}:/dir"));
    let refused = offshoot(&["mkdir", &dir]);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    let said = String::from_utf8_lossy(&refused.stderr);
    for words in ["replaying the pending tree log: ", "quotas", "--ignore-log", "kernel"] {
        assert!(said.contains(words), "{words:?} is not said: {said}");
    }
    assert!(!said.contains("zero-log"), "{said}");
    let refused = offshoot(&["mkdir", "--ignore-log", &dir]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!said.contains("zero-log") && !said.contains("read what was"), "{said}");
    assert_eq!(done(&["cat", &place]), "newer");
}

/// The volume as `btrfs-image` restores it from a dump of its metadata.
fn dumped(judges: &Judges, volume: &Disks) -> Disks {
    let restored = Disks::create(judges, 1, 512);
    let (from, to) = (volume.images()[0].as_os_str(), restored.images()[0].as_os_str());
    let dump = restored.images()[0].with_extension("dump");
    run("btrfs-image", &[from, dump.as_os_str()]);
    run("btrfs-image", &["-r".as_ref(), dump.as_os_str(), to]);
    restored
}

/// A dump can be read: its log is replayed in memory. When that fails, the program shows the last
/// commit and says so.
#[test]
fn a_dump_with_a_pending_log_is_read() {
    let Some(judges) = judges::require() else { return };
    let restored = dumped(&judges, &cut(&judges));
    let image = restored.images()[0].to_str().expect("a plain path");
    let place = format!("{image}:/x");
    let before = std::fs::read(image).expect("an image");
    assert!(done(&["info", "--json", image]).contains("\"log_pending\":true"));
    assert!(done(&["dump", "log", image]).starts_with("log of subvolume 5\n"));
    let size = |words: &[&str]| {
        let json: serde_json::Value = serde_json::from_str(&done(words)).expect("JSON");
        json["size"].as_u64().expect("a size")
    };
    let (old, newer) = ("old".len() as u64, "newer".len() as u64);
    assert_eq!(size(&["stat", "--json", &place]), newer);
    assert_eq!(size(&["stat", "--json", "--ignore-log", &place]), old);
    let said = offshoot(&["ls", &place]).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("replayed in memory"), "{said}");
    // A dump cannot be written.
    let refused = offshoot(&["mkdir", &format!("{image}:/dir")]);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    assert!(std::fs::read(image).expect("an image") == before, "it was changed");
    let file = File::options().write(true).open(image).expect("an image");
    for at in (0..before.len() - 4096).step_by(4096) {
        // The owner field of a tree block of a log.
        if before[at + 88..at + 96] == (-6i64).to_le_bytes() {
            file.write_all_at(b"damage", at as u64 + 300).expect("it is written");
        }
    }
    assert_eq!(size(&["stat", "--json", &place]), old);
    let said = offshoot(&["ls", &place]).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("the last commit is shown"), "{said}");
}

/// In a dump the targets of symbolic links are zeros. The program says that once for all links.
#[test]
fn links_of_a_dump_are_told_once() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let mount = disks.mount("rw");
    for name in ["link-1", "link-2", "link-3"] {
        std::os::unix::fs::symlink("somewhere", mount.path().join(name)).expect("a link");
    }
    std::fs::create_dir(mount.path().join("dir")).expect("a directory");
    drop(mount);
    let restored = dumped(&judges, &disks);
    let image = restored.images()[0].to_str().expect("a plain path");
    let out = restored.images()[0].with_extension("out");
    let out = out.to_str().expect("a plain path");
    let archive = restored.images()[0].with_extension("tar");
    let archive = archive.to_str().expect("a plain path");
    for (words, place) in [
        (&["ls", "-l", image][..], "link-1"),
        (&["extract", image, out], "link-1"),
        (&["extract", "--tar", archive, image], "link-1"),
    ] {
        let output = offshoot(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        let lines: Vec<_> = said.lines().filter(|line| line.contains("link")).collect();
        let [line] = lines[..] else { panic!("{words:?}: {said}") };
        assert!(line.contains(place) && line.contains('3'), "{words:?}: {said}");
        assert!(!said.contains("corrupt file extent"), "{words:?}: {said}");
    }
    assert!(std::path::Path::new(out).join("dir").is_dir());
    assert_eq!(offshoot(&["stat", &format!("{image}:/link-1")]).status.code(), Some(1));
}
