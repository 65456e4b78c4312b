//! Opening volumes of tests, and judging them.

use std::path::Path;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::fill::subvolumes::snapshot;
use offshoot_testkit::compare::compare;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;

pub(crate) const MIB: u64 = 1 << 20;

/// Files of all kinds, snapshots that share old and new leaves, clones across subvolumes, and gaps
/// where removed files were.
pub(crate) fn with_snapshots(root: &Path) {
    fill::everything(root);
    fill::crowd(root, 3000);
    snapshot(root, &root.join("first"), true);
    for number in 0..16 {
        fill::write(&root.join(format!("large-{number}")), &Random::new(number).bytes(2 << 20));
    }
    fill::sync(root);
    snapshot(root, &root.join("second"), false);
    for number in (0..16).step_by(3) {
        std::fs::remove_file(root.join(format!("large-{number}"))).expect("it is there");
        let path = root.join(format!("second/large-{}", (number + 1) % 16));
        let script = r#"cp --reflink=always "$1" "$1-clone" && truncate -s 5000 "$1""#;
        run("sh", &["-ec".as_ref(), script.as_ref(), "sh".as_ref(), path.as_os_str()]);
    }
    for number in (0..3000).step_by(7) {
        let path = root.join(format!("crowd/entry-{number:06}"));
        fill::write(&path, format!("changed {number}").as_bytes());
    }
    fill::sync(root);
    snapshot(&root.join("second"), &root.join("third"), true);
    let script = r#"mkdir "$1/received" && btrfs send -q "$1/volumes/snapshot-read-only" |
        btrfs receive -q "$1/received""#;
    run("sh", &["-ec".as_ref(), script.as_ref(), "sh".as_ref(), root.as_os_str()]);
    fill::write(&root.join("second/only here"), &Random::new(77).bytes(300_000));
    fill::sync(root);
}

/// The top level for writing.
pub(crate) fn open(disks: &Disks) -> Filesystem {
    let devices = disks.writable_devices();
    let volume = BtrfsVolume::open_writable(devices, &EngineOptions::default()).expect("it opens");
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// The length of an image, in bytes.
pub(crate) fn len_of(image: &Path) -> u64 {
    std::fs::metadata(image).expect("an image").len()
}

/// Judges a volume that was resized against a copy from before.
#[track_caller]
pub(crate) fn assert_same(before: &Disks, after: &Disks) {
    after.assert_checks();
    let volume = BtrfsVolume::open(before.devices(), &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    compare(&fs, after.mount("ro,noatime").path()).assert_same(fill::EVERYTHING_AT_LEAST);
}

/// Has the kernel write to a volume, and judges it.
#[track_caller]
pub(crate) fn assert_kernel_writes(disks: &Disks, mib: u64) {
    {
        let mount = disks.mount("rw,noatime");
        let dir = fill::directory(mount.path(), "of the kernel");
        for number in 0..mib {
            let bytes = Random::new(1000 + number).bytes(1 << 20);
            fill::write(&dir.join(format!("{number}")), &bytes);
        }
        fill::subvolumes::snapshot(mount.path(), &mount.path().join("of-the-kernel"), false);
        mount.sync();
    }
    disks.assert_checks();
}
