//! What the judges say before and after a repair.

use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;

use offshoot_btrfs::{
    BtrfsVolume, EngineOptions, RepairClass, RepairOptions, RepairOutcome, SubvolumeId,
    repair_btrfs, undo_repair,
};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::manifest;

use crate::common::{progs_complaints, show};

/// Repairs the volume.
pub(crate) fn repair(
    disks: &Disks,
    classes: &[RepairClass],
) -> offshoot_vfs::Result<RepairOutcome> {
    let options = RepairOptions { classes: classes.to_vec(), ..RepairOptions::default() };
    repair_with(disks, &options)
}

/// As [`repair`], with all options.
pub(crate) fn repair_with(
    disks: &Disks,
    options: &RepairOptions,
) -> offshoot_vfs::Result<RepairOutcome> {
    repair_btrfs(&disks.writable_devices(), options, &|_| ControlFlow::Continue(()))
}

/// Undoes the repair of the volume.
pub(crate) fn undo(disks: &Disks) -> offshoot_vfs::Result<()> {
    let options = RepairOptions::default();
    undo_repair(&disks.writable_devices(), &options, &|_| ControlFlow::Continue(())).map(drop)
}

/// Everything that the kernel shows, read-only, before the volume is damaged.
pub(crate) fn shown_by_kernel(disks: &Disks) -> String {
    let mount = disks.mount("ro,noatime");
    manifest::manifest(&HostFilesystem::new(mount.path()).expect("a mount")).expect("it is read")
}

/// Everything that our engine shows.
pub(crate) fn shown(disks: &Disks) -> String {
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    manifest::manifest(&fs).expect("it is read")
}

/// The bytes of all members.
pub(crate) fn bytes(disks: &Disks) -> Vec<Vec<u8>> {
    disks.images().iter().map(|path| std::fs::read(path).expect("an image reads")).collect()
}

/// Puts bytes back that [`bytes`] returned.
pub(crate) fn put_back(disks: &Disks, all: &[Vec<u8>]) {
    for (path, bytes) in disks.images().iter().zip(all) {
        let file = File::options().write(true).open(path).expect("an image opens");
        file.write_all_at(bytes, 0).expect("it is written");
    }
}

/// The ranges of 4 KiB in which two members differ.
pub(crate) fn differences(one: &[u8], other: &[u8]) -> Vec<Range<usize>> {
    let pages = one.chunks(4096).zip(other.chunks(4096)).enumerate();
    pages.filter(|(_, (a, b))| a != b).map(|(page, _)| page * 4096..(page + 1) * 4096).collect()
}

/// Repairs the volume, requires that both checks are clean and that the kernel can write to it and
/// shows `before`, and that undoing the repair gives back the bytes that were there.
#[track_caller]
pub(crate) fn require_repaired(disks: &Disks, classes: &[RepairClass], before: &str) {
    let options = RepairOptions { classes: classes.to_vec(), ..RepairOptions::default() };
    require_repaired_with(disks, &options, before);
}

/// The same with these options. Returns what was done.
#[track_caller]
pub(crate) fn require_repaired_with(
    disks: &Disks,
    options: &RepairOptions,
    before: &str,
) -> RepairOutcome {
    let old = bytes(disks);
    let outcome = repair_with(disks, options).expect("it is repaired");
    let after = outcome.after.as_ref().expect("there was something to repair");
    assert!(outcome.is_written && after.findings.is_empty(), "{}", show(after));
    assert_eq!(progs_complaints(disks), None, "after the repair");
    assert_eq!(manifest::differences(&shown(disks), before), Vec::<String>::new());
    let repaired = bytes(disks);
    undo(disks).expect("it is undone");
    for ((old, new), repaired) in old.iter().zip(bytes(disks)).zip(&repaired) {
        // What differs is what the repair wrote to free places.
        for range in differences(old, &new) {
            assert!(new[range.clone()] == repaired[range.clone()], "{range:?} was not written");
            assert!(!SUPERBLOCKS.contains(&range.start), "the superblock at {}", range.start);
        }
    }
    put_back(disks, &repaired);
    let mount = disks.mount("rw,noatime");
    std::fs::write(mount.path().join("after the repair"), vec![7; 3 << 20]).expect("it is written");
    mount.sync();
    std::fs::remove_file(mount.path().join("after the repair")).expect("it is removed");
    drop(mount);
    assert_eq!(progs_complaints(disks), None, "after the kernel wrote");
    let kernel = shown_by_kernel(disks);
    assert_eq!(without_times(&kernel), without_times(before));
    undo(disks).expect_err("the kernel has written");
    outcome
}

/// The places of superblocks.
const SUPERBLOCKS: [usize; 2] = [64 << 10, 64 << 20];

/// The lines but that of the root directory, whose times have changed.
fn without_times(manifest: &str) -> Vec<&str> {
    manifest.lines().skip(1).collect()
}
