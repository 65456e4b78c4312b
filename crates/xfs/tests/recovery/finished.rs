//! What a log leaves to do, done by us: intents, unlinked inodes, staged extents.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::compare::Compare;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::XfsShutdown;
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_xfs::{XfsOptions, XfsVolume, check_xfs};
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags, XattrFlags};

use crate::crashed::{CrashedVolume, rounds};
use crate::intents::with_cut_chains;
use crate::log_on_disk::LogOnDisk;

/// Makes files of every form below `root`, removes them, and keeps them open. What is returned has
/// to live until the crash.
fn unlinked(root: &Path, can_share: bool, random: &mut Random) -> Vec<OwnedFd> {
    let kept = root.join("kept");
    fs::write(&kept, random.bytes(300_000)).unwrap();
    let mut held = Vec::new();
    for number in 0..50 {
        let path = root.join(format!("removed {number}"));
        make_any(&path, &kept, can_share, random);
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        held.push(rustix::fs::open(&path, flags, Mode::empty()).unwrap());
        let is_dir = path.symlink_metadata().unwrap().is_dir();
        if is_dir { fs::remove_dir(path) } else { fs::remove_file(path) }.unwrap();
    }
    File::open(root).and_then(|root| root.sync_all()).unwrap();
    held
}

fn make_any(path: &Path, kept: &Path, can_share: bool, random: &mut Random) {
    match random.below(8) {
        0 => fs::create_dir(path).unwrap(),
        1 => {
            fs::create_dir(path).unwrap();
            let names = (0..300).map(|number| path.join(format!("a name of some length {number}")));
            names.clone().for_each(|name| drop(File::create(name).unwrap()));
            names.for_each(|name| fs::remove_file(name).unwrap());
        }
        2 => symlink("target/".repeat(if random.below(2) == 0 { 2 } else { 140 }), path).unwrap(),
        3 => {
            let mode = Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, mode, 0).unwrap();
        }
        4 if can_share => {
            let clone = File::create(path).unwrap();
            rustix::fs::ioctl_ficlone(&clone, File::open(kept).unwrap()).unwrap();
            clone.write_all_at(&random.bytes(5000), 4096 * random.below(70)).unwrap();
            clone.sync_all().unwrap();
        }
        _ => {
            let file = File::create(path).unwrap();
            let count = [0, 1, 12, 40, 700][usize::try_from(random.below(5)).unwrap()];
            for number in 0..count {
                file.write_all_at(&[3; 4096], number * 8192).unwrap();
            }
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 1 << 24, 9000)
                .unwrap();
            file.sync_all().unwrap();
        }
    }
    if !path.is_symlink() && random.below(2) == 0 {
        let len = [20, 900, 20_000][usize::try_from(random.below(3)).unwrap()];
        for number in 0..=random.below(6) {
            let (name, value) = (format!("trusted.number.{number}"), random.bytes(len));
            rustix::fs::lsetxattr(path, &*name, &value, XattrFlags::empty()).unwrap();
        }
    }
}

fn with_unlinked(
    judges: &judges::XfsJudges,
    kind: &'static XfsVolumeKind,
    random: &mut Random,
) -> CrashedVolume {
    CrashedVolume::make(judges, kind, XfsShutdown::LogWritten, |root, shape| {
        unlinked(root, shape.has("REFLINK"), random)
    })
}

/// The kernel frees the inodes when it recovers a copy, and so do we.
#[test]
fn unlinked_inodes_are_freed() {
    let mut random = Random::new(seed_of_run());
    let names = ["today", "usual", "first-v5", "today-1k", "sparse-off"];
    for _ in 0..rounds(2) {
        let Some(judges) = judges::require() else { return };
        let name = names[usize::try_from(random.below(names.len() as u64)).unwrap()];
        let crashed = with_unlinked(&judges, XfsVolumeKind::named(name), &mut random);
        let recovered = crashed.judge(1);
        eprintln!("{name}: {recovered:?}");
        assert!(recovered.freed_inodes >= 50, "{recovered:?}");
        assert_eq!(recovered.lost_lists, 0, "{recovered:?}");
    }
}

/// A list that leads to no inode is emptied, and all else is done, as the kernel does.
#[test]
fn a_damaged_list_of_unlinked_inodes_is_emptied() {
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("today");
    let crashed = CrashedVolume::make(&judges, kind, XfsShutdown::LogWritten, |root, _| {
        let path = root.join("removed");
        let file = File::create(&path).unwrap();
        fs::remove_file(path).unwrap();
        File::open(root).and_then(|root| root.sync_all()).unwrap();
        file
    });
    // The log has nothing of this group, in which no inode is.
    crashed.disk.change_with_xfs_db(&["agi 3", "write -d unlinked[40] 168"]);
    let device = crashed.disk.writable_device();
    let recovered = XfsVolume::recover(&device, &XfsOptions::default()).unwrap().unwrap();
    assert_eq!((recovered.lost_lists, recovered.freed_inodes), (1, 1));
    crashed.disk.assert_checks();
    drop(crashed.disk.mount("rw,noatime", &[]));
}

/// How many cuts of one recovery are judged.
const MOST_JUDGED: usize = 40;

/// Our recovery is cut at any of its writes, and goes on from there: ours, and that of the kernel.
/// The kernel does not mend torn blocks. One state of `stride` is judged, and of a long recovery
/// [`MOST_JUDGED`].
#[track_caller]
pub(crate) fn judge_cuts(crashed: &CrashedVolume, seed: u64, stride: usize) {
    let mut random = Random::new(seed);
    let options = XfsOptions::default();
    let device = Arc::new(CrashDevice::new(crashed.disk.device()));
    let cut: Arc<dyn BlockDevice> = device.clone();
    let recovered = XfsVolume::recover(&cut, &options).unwrap().unwrap();
    let whole = XfsVolume::open(cut, &options).unwrap();
    let compare = Compare::default();
    let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 10, seed, tears: false };
    let states: Vec<_> = device.log().states(&plan).map(Result::unwrap).collect();
    eprintln!("{recovered:?}: {} states", states.len());
    let stride = stride.max(states.len() / MOST_JUDGED);
    let offset = usize::try_from(random.below(stride as u64)).unwrap();
    let (mut again, by_kernel) = (0, usize::try_from(random.below(6)).unwrap());
    for (number, state) in states.into_iter().skip(offset).step_by(stride).enumerate() {
        let described = state.description.clone();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        if number % 6 == by_kernel {
            let disk = crashed.disk.copy();
            let device = disk.writable_device();
            memory.visit_changes(&mut |at, bytes| device.write_at(at, bytes)).unwrap();
            drop(device);
            // It may be done: then there is nothing to recover.
            drop(disk.mount("rw,noatime", &[offshoot_testkit::xfs::disk::RECOVERY]));
            disk.assert_checks();
            let mount = disk.mount("ro,noatime", &[]);
            let outcome = crashed.compare_with_kernel(&recovered).run(&*whole, mount.path());
            assert!(outcome.differences.is_empty(), "{described}: {outcome}");
        }
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let next = XfsVolume::recover(&device, &options);
        again += u64::from(next.unwrap_or_else(|e| panic!("{described}: {e}")).is_some());
        let found = check_xfs(&device, &options).unwrap().findings;
        assert!(found.is_empty(), "{described}: {}", found[0]);
        let ours = XfsVolume::open(device, &options).unwrap();
        let outcome = compare.run_filesystems(&*ours, &*whole);
        assert!(outcome.differences.is_empty(), "{described}: {outcome}");
    }
    eprintln!("{again} recovered again");
    assert!(again > 0);
}

#[test]
fn freeing_of_unlinked_inodes_that_is_cut_goes_on() {
    let seed = seed_of_run();
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("today");
    let crashed = with_unlinked(&judges, kind, &mut Random::new(seed));
    judge_cuts(&crashed, seed, 37);
}

#[test]
fn ends_of_intents_that_are_cut_go_on() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let Some(judges) = judges::require() else { return };
    let (crashed, ends) = with_cut_chains(&judges);
    // The first ones have few transactions, which are replayed for each cut.
    let most = ends.len().min(8) as u64;
    let end = &ends[usize::try_from(random.below(most)).unwrap()];
    let copy = crashed.copy();
    LogOnDisk::of(&copy.disk).lose_from(end.lost.lsn);
    judge_cuts(&copy, seed, 37);
}
