//! Cuts volumes, and judges what they hold.

use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::kernel_log::KernelLog;
use offshoot_testkit::run::run;
use offshoot_vfs::FileSystemMut;

/// How a volume is made and mounted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogShape {
    pub(crate) members: usize,
    /// Options of `mkfs.btrfs`.
    pub(crate) mkfs: &'static str,
    /// Options of the mount.
    pub(crate) mount: &'static str,
}

/// A volume with default options.
pub(crate) const PLAIN: LogShape = LogShape { members: 1, mkfs: "", mount: "" };

/// Small and large nodes, hole items, compressed data, several devices, mixed block groups, and no
/// free-space tree.
pub(crate) const SHAPES: [LogShape; 7] = [
    PLAIN,
    LogShape { mkfs: "-n 4k", ..PLAIN },
    LogShape { mkfs: "-n 4k -O ^no-holes", ..PLAIN },
    LogShape {
        mkfs: "-n 16k -O ^no-holes --csum xxhash",
        mount: ",compress-force=zstd",
        members: 1,
    },
    LogShape { members: 2, mkfs: "-d raid0 -m raid1", mount: ",compress=lzo" },
    LogShape { mkfs: "--mixed -n 4k", ..PLAIN },
    LogShape { mkfs: "-O ^free-space-tree,^block-group-tree", mount: ",nospace_cache", members: 1 },
];

/// Runs a script in a directory.
pub(crate) fn shell(dir: &Path, script: &str) {
    let script = format!("set -e; cd '{}'; {script}", dir.display());
    run("sh", &["-c", &script]);
}

/// Mount options with which the kernel commits only on request.
pub(crate) fn mount_options(shape: LogShape) -> String {
    format!("rw,noatime,commit=300{}", shape.mount)
}

/// An empty volume.
pub(crate) fn make(judges: &Judges, shape: LogShape) -> Disks {
    let disks = Disks::create(judges, shape.members, 256);
    disks.mkfs(&shape.mkfs.split_whitespace().collect::<Vec<_>>());
    disks
}

/// A volume that a power cut leaves after the kernel did `before`, committed, and then did `after`.
pub(crate) fn cut(
    judges: &Judges,
    shape: LogShape,
    before: impl FnOnce(&Path),
    after: impl FnOnce(&Path),
) -> Disks {
    let disks = make(judges, shape);
    let mount = disks.mount(&mount_options(shape));
    before(mount.path());
    mount.sync();
    after(mount.path());
    disks.copy(judges)
}

/// The same, with exactly one log. After many changes the kernel sometimes commits before the fsync
/// and leaves no log; then this tries again.
#[track_caller]
pub(crate) fn cut_with_log(
    judges: &Judges,
    shape: LogShape,
    before: impl Fn(&Path),
    after: impl Fn(&Path),
) -> Disks {
    let mut tries = (0..5).map(|_| cut(judges, shape, &before, &after));
    tries.find(|cut| logs(cut) == 1).expect("the kernel logs it in one of five tries")
}

/// The volume at its last commit.
pub(crate) fn at_commit(devices: Vec<Arc<dyn BlockDevice>>) -> Arc<BtrfsVolume> {
    let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
    BtrfsVolume::open(devices, &options).expect("the last commit is in order")
}

/// How many subvolumes have a log that is pending.
pub(crate) fn logs(disks: &Disks) -> usize {
    at_commit(disks.devices()).log_trees().expect("the logs are in order").len()
}

pub(crate) fn top(volume: &Arc<BtrfsVolume>) -> Filesystem {
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

pub(crate) fn read_only(devices: Vec<Arc<dyn BlockDevice>>) -> Filesystem {
    top(&BtrfsVolume::open(devices, &EngineOptions::default()).expect("the volume opens"))
}

/// Opens the volume for writing, which replays the log, and removes orphans in every subvolume.
pub(crate) fn replay(devices: Vec<Arc<dyn BlockDevice>>) {
    let volume = BtrfsVolume::open_writable(devices, &EngineOptions::default()).expect("it opens");
    for info in volume.subvolumes() {
        let id = info.expect("a subvolume").id;
        volume.filesystem(id).expect("it can be changed").sync().expect("a commit");
    }
}

/// Requires that no two checksum items of a log overlap: the kernel refuses a tree block in which
/// they do.
#[track_caller]
fn assert_sums_apart(volume: &BtrfsVolume, what: &str) {
    let (sector, sum_len) = {
        let superblock = volume.superblock();
        (u64::from(superblock.sector_size), superblock.checksum.len())
    };
    let (objectid, item_type) = (objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM);
    for log in volume.log_trees().expect("the logs are in order") {
        let first = Key::new(objectid, item_type, 0);
        let mut cursor = volume.cursor(log.root, first).expect("it can be read");
        let mut end = 0;
        while let Some((key, data)) = cursor.item_of(objectid, item_type) {
            assert!(key.offset >= end, "{what}: checksums at {key} and up to {end}");
            end = key.offset + (data.len() / sum_len) as u64 * sector;
            cursor.advance().expect("it can be read");
        }
    }
}

/// Compares everything, except the times of files that lost a name and of directories in which a
/// name was removed: the kernel sets these to the time of its replay.
pub(crate) fn compare() -> Compare {
    Compare::default().without(Aspect::TimesOfNames)
}

/// Judges a cut volume.
#[track_caller]
pub(crate) fn judge(judges: &Judges, cut: &Disks, what: &str, at_least: u64) {
    judge_by(judges, cut, &compare(), what, at_least);
}

/// The same with the given comparison.
#[track_caller]
pub(crate) fn judge_by(judges: &Judges, cut: &Disks, compare: &Compare, what: &str, at_least: u64) {
    let [theirs, ours] = [(); 2].map(|()| cut.copy(judges));
    let pending = logs(cut);
    assert_sums_apart(&at_commit(cut.devices()), what);
    let in_memory = read_only(cut.devices());
    replay(ours.writable_devices());
    assert_eq!(logs(&ours), 0, "{what}: the log is done");
    ours.assert_checks();
    let log = KernelLog::start();
    {
        let mount = theirs.mount("rw,noatime");
        for (fs, which) in [(&in_memory, "in memory"), (&read_only(ours.devices()), "stored")] {
            let outcome = compare.run(fs, mount.path());
            assert!(outcome.differences.is_empty(), "{what}, {which}: {outcome}");
            outcome.assert_same(at_least);
        }
    }
    log.assert_no_warning("btrfs_recover_log_trees");
    let mount = ours.mount("rw,noatime");
    let outcome = compare.run(&in_memory, mount.path());
    assert!(outcome.differences.is_empty(), "{what}, the kernel shows: {outcome}");
    assert_eq!(logs(cut), pending, "{what}: reading writes nothing");
}
