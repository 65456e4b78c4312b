//! Exchanges of the contents of files that the end of a log cuts.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::log::items::XfsItemType;

use crate::crashed::{CrashedVolume, make_until, rounds};
use crate::finished::judge_cuts;
use crate::log_ends::LogEnd;
use crate::log_on_disk::LogOnDisk;

/// The extents of each file.
const EXTENTS: u64 = 1500;

/// A file of many extents, with holes and unwritten blocks between them.
fn make(path: &Path, extents: Range<u64>, random: &mut Random) {
    let file = fs::File::create(path).unwrap();
    let byte = u8::try_from(random.below(256)).unwrap();
    for number in extents {
        file.write_all_at(&[byte; 4096], number * 8192).unwrap();
        if random.below(10) == 0 {
            let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, number * 8192 + 4096, 4096).unwrap();
        }
    }
    file.sync_all().unwrap();
}

/// Exchanges contents of files, each with a donor and options, while another thread syncs.
fn cut_exchanges(disk: &XfsDisk, root: &Path, exchanges: &[(&str, &str, &str)]) {
    let (synced, done) = (root.join("synced"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let other = fs::File::create(&synced).unwrap();
            for number in 1..40_000 {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                other.set_len(number).unwrap();
                other.sync_all().unwrap();
            }
        });
        for (other, donor, options) in exchanges {
            let command = format!("exchangerange {options} {}", root.join(donor).display());
            disk.xfs_io(&root.join(other), &[&command]);
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// A volume whose log cuts exchanges, and the ends at which it does.
fn with_cut_exchanges(
    judges: &XfsJudges,
    mut make_files: impl FnMut(&Path),
    exchanges: &[(&str, &str, &str)],
) -> (CrashedVolume, Vec<LogEnd>) {
    let kind = XfsVolumeKind::named("today");
    make_until(|| {
        let disk = XfsDisk::create(judges, kind.mib);
        disk.mkfs(kind.mkfs);
        let mut mount = disk.mount("rw,noatime", kind.kernel_says);
        make_files(mount.path());
        cut_exchanges(&disk, mount.path(), exchanges);
        disk.shut_down(&mut mount, XfsShutdown::LogWritten);
        drop(mount);
        let crashed = CrashedVolume { disk, kernel_says: kind.kernel_says.to_vec() };
        let mut ends = LogOnDisk::of(&crashed.disk).possible_ends();
        ends.retain(|end| end.intents.contains_key(&(XfsItemType::Xmi as u16)));
        if ends.is_empty() { Err("no end leaves an exchange".into()) } else { Ok((crashed, ends)) }
    })
}

/// Exchanges of ranges: of other places in the files, of what is written alone, of files that share
/// blocks with a third one, and within a file.
fn with_cut_ranges(judges: &XfsJudges, random: &mut Random) -> (CrashedVolume, Vec<LogEnd>) {
    let make_files = |root: &Path| {
        let path = |name: &str| root.join(name);
        for (name, extents) in [("first", 0..EXTENTS), ("second", 3..EXTENTS)] {
            make(&path(name), extents, random);
        }
        let clone = fs::File::create(path("clone")).unwrap();
        rustix::fs::ioctl_ficlone(&clone, fs::File::open(path("second")).unwrap()).unwrap();
        clone.sync_all().unwrap();
    };
    let exchanges = [
        ("first", "clone", "-d 0 -s 0 -l 12283904"),
        ("second", "first", "-w -d 0 -s 4096 -l 5996544"),
        ("clone", "second", "-d 8192 -s 0 -l 3997696"),
        ("first", "first", "-d 0 -s 4997120 -l 2998272"),
    ];
    with_cut_exchanges(judges, make_files, &exchanges)
}

fn one_of(ends: &[LogEnd], random: &mut Random) -> LogEnd {
    ends[usize::try_from(random.below(ends.len() as u64)).unwrap()].clone()
}

/// The kernel goes on with the exchange in a copy, and so do we.
#[test]
fn exchanges_that_have_no_end_are_finished() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let (crashed, ends) = with_cut_ranges(&judges, &mut random);
    for _ in 0..rounds(4) {
        let LogEnd { lost, intents } = one_of(&ends, &mut random);
        let copy = crashed.copy();
        LogOnDisk::of(&copy.disk).lose_from(lost.lsn);
        let recovered = copy.judge(3);
        eprintln!("{intents:x?} of {} ends: {recovered:?}", ends.len());
        assert!(recovered.finished_intents >= 1, "{recovered:?}");
    }
}

/// What is exchanged is in the log, and the next recovery goes on from there.
#[test]
fn exchanges_that_are_cut_again_go_on() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let Some(judges) = judges::require() else { return };
    let (crashed, ends) = with_cut_ranges(&judges, &mut random);
    let most = ends.len().min(8);
    let end = one_of(&ends[..most], &mut random);
    let copy = crashed.copy();
    LogOnDisk::of(&copy.disk).lose_from(end.lost.lsn);
    judge_cuts(&copy, seed, 37);
}

/// The kernel (6.18) forgets the sizes that such an exchange has in the log: one file gets a size
/// of the middle of the exchange, and the other one loses its blocks behind it.
#[test]
fn exchanges_of_whole_files_exchange_their_sizes() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let mut contents = Vec::new();
    let make_files = |root: &Path| {
        let names = [("long", 0..EXTENTS), ("short", 2..9)];
        contents = names
            .map(|(name, extents)| {
                make(&root.join(name), extents, &mut random);
                fs::read(root.join(name)).unwrap()
            })
            .to_vec();
    };
    let (crashed, ends) = with_cut_exchanges(&judges, make_files, &[("long", "short", "")]);
    for _ in 0..rounds(2) {
        let copy = crashed.copy();
        LogOnDisk::of(&copy.disk).lose_from(one_of(&ends, &mut random).lost.lsn);
        let options = XfsOptions::default();
        let in_memory = XfsVolume::open(copy.disk.device(), &options).unwrap();
        XfsVolume::recover(&copy.disk.writable_device(), &options).unwrap().unwrap();
        copy.disk.assert_checks();
        let mount = copy.disk.mount("ro,noatime", &[]);
        // First: what the kernel has read of unwritten blocks it shows as data.
        let compare = Compare::default().without(Aspect::Allocation);
        compare.run(&*in_memory, mount.path()).assert_same(3);
        for (name, expected) in ["short", "long"].iter().zip(&contents) {
            let found = fs::read(mount.path().join(name)).unwrap();
            assert!(found == *expected, "{name}: {} bytes, {}", found.len(), expected.len());
        }
    }
}
