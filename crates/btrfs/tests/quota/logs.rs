//! Tree logs on volumes with quotas: the changes in a log count when a replay brings them into the
//! trees.

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{Groups, assert_counted_anew, at, by_kernel, cut, made, open, shell, write};

const BEGINNING: &str = "btrfs -q subvolume create a; head -c 200000 /dev/zero > a/old; sync";

fn logs(disks: &Disks) -> usize {
    let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
    let volume = BtrfsVolume::open(disks.devices(), &options).expect("the last commit is in order");
    volume.log_trees().expect("the logs are in order").len()
}

/// A volume with a log of the kernel, as a power cut leaves it.
fn logged_by_kernel(judges: &Judges, mkfs: &str) -> Disks {
    let disks = made(judges, mkfs, BEGINNING);
    let mount = disks.mount("rw,noatime,commit=300,max_inline=0");
    shell(
        mount.path(),
        "head -c 500000 /dev/zero > a/new; sync a/new; truncate -s 50000 a/old; sync a/old",
    );
    let cut = disks.copy(judges);
    assert_eq!(logs(&cut), 1);
    cut
}

/// The same with a log of ours.
fn logged_by_us(judges: &Judges, mkfs: &str) -> Disks {
    let disks = made(judges, mkfs, BEGINNING);
    let (fs, told) = open(&disks);
    let new = write(&fs, at(&fs, "a"), "new", 500_000);
    fs.fsync(new).expect("it is logged");
    let old = at(&fs, "a/old");
    cut(&fs, old, 50_000);
    fs.fsync(old).expect("it is logged");
    // A log does not change the numbers of the last commit.
    assert_eq!(told.not_kept(), 0);
    drop(fs);
    assert_eq!(logs(&disks), 1);
    disks
}

fn assert_has_all(disks: &Disks) {
    let (fs, _) = open(disks);
    let size = |path: &str| fs.attr(at(&fs, path)).expect("its attributes").size;
    assert_eq!([size("a/new"), size("a/old")], [500_000, 50_000]);
}

#[test]
fn full_quotas() {
    let Some(judges) = judges::require() else { return };
    for make in [logged_by_kernel, logged_by_us] {
        let disks = make(&judges, "-O quota");
        // The kernel counts what it replays, whether the kernel or we wrote the log.
        let theirs = disks.copy(&judges);
        by_kernel(&theirs, "sync", &[]);
        assert!(!Groups::of(&theirs).is_inconsistent());
        theirs.assert_checks();
        // We mark the numbers in the commit of the replay.
        let (fs, told) = open(&disks);
        assert_eq!(told.not_kept(), 1);
        drop(fs);
        assert_eq!(logs(&disks), 0);
        assert!(Groups::of(&disks).is_inconsistent());
        assert_has_all(&disks);
        let counted = assert_counted_anew(&disks);
        assert!(counted.used["0/256"][0] >= 500_000, "{counted:?}");
    }
}

#[test]
fn simple_quotas() {
    let Some(judges) = judges::require() else { return };
    for make in [logged_by_kernel, logged_by_us] {
        let disks = make(&judges, "-O squota");
        let theirs = disks.copy(&judges);
        by_kernel(&theirs, "sync", &[]);
        assert_has_all(&disks);
        disks.assert_checks();
        theirs.assert_checks();
        assert_eq!(Groups::of(&disks).used, Groups::of(&theirs).used);
    }
}
