//! Intents to change attributes that have no end in the log: those of parent pointers, which the
//! kernel logs when names change, and those of other attributes, which it logs only when it is
//! built for debugging.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::attr::XattrFlags as StoredFlags;
use offshoot_xfs_format::log::items::{XfsAttributeIntent, XfsAttributeOp, XfsItemType};
use offshoot_xfs_format::log::{XfsLogItem, XfsLogVector};
use rustix::fs::{CWD, RenameFlags, XattrFlags};

use crate::crashed::{CrashedVolume, make_until, rounds, settle};
use crate::finished::judge_cuts;
use crate::log_ends::LogEnd;
use crate::log_on_disk::LogOnDisk;

const ATTRI: u16 = XfsItemType::Attri as u16;

/// Makes, links, moves, exchanges and removes names of files with few and with many attributes,
/// while other threads sync.
fn change_names(root: &Path, turns: u64, random: &mut Random) {
    let dirs = ["one", "two"].map(|name| root.join(name));
    for dir in &dirs {
        fs::create_dir(dir).unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for name in ["synced", "synced too"] {
            let (root, done) = (&root, &done);
            scope.spawn(move || {
                let other = File::create(root.join(name)).unwrap();
                for number in 1..20_000 {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    other.set_len(number).unwrap();
                    other.sync_all().unwrap();
                }
            });
        }
        let mut change = |number: u64| {
            let long = "-".repeat(usize::try_from(random.below(230)).unwrap());
            let mut path =
                || dirs[usize::try_from(random.below(2)).unwrap()].join(format!("{number}{long}"));
            let (first, second) = (path(), root.join(format!("{number} moved{long}")));
            File::create(&first).unwrap();
            let many = [0, 1, 12, 200][usize::try_from(number % 4).unwrap()];
            for attribute in 0..many {
                let (name, value) = (format!("trusted.{attribute}"), [7; 60]);
                rustix::fs::setxattr(&first, &*name, &value, XattrFlags::empty()).unwrap();
            }
            fs::hard_link(&first, &second).unwrap();
            fs::rename(&second, root.join(format!("{number} again{long}"))).unwrap();
            let other = dirs[1].join(format!("{number} other"));
            File::create(&other).unwrap();
            rustix::fs::renameat_with(CWD, &first, CWD, &other, RenameFlags::EXCHANGE).unwrap();
            fs::remove_file(if number.is_multiple_of(3) { first } else { other }).unwrap();
        };
        (0..turns).for_each(&mut change);
        done.store(true, Ordering::Relaxed);
    });
}

/// A volume whose log cuts changes of parent pointers, and the ends at which it does.
fn with_cut_parents(judges: &XfsJudges, random: &mut Random) -> (CrashedVolume, Vec<LogEnd>) {
    let names = ["today", "today-1k"];
    let mut turns = 20;
    make_until(|| {
        turns += 20;
        let kind = XfsVolumeKind::named(names[usize::try_from(random.below(2)).unwrap()]);
        let crashed = CrashedVolume::make(judges, kind, XfsShutdown::LogWritten, |root, _| {
            change_names(root, turns, random);
            settle(root);
        });
        let mut ends = LogOnDisk::of(&crashed.disk).possible_ends();
        let all = ends.len();
        ends.retain(|end| end.intents.contains_key(&ATTRI));
        eprintln!("{}: {} of {all} ends cut changes of attributes", kind.name, ends.len());
        if ends.is_empty() { Err("no end leaves them".into()) } else { Ok((crashed, ends)) }
    })
}

/// The kernel finishes the changes on a copy, and so do we: the same names, attributes and parents.
#[test]
fn changes_of_parent_pointers_without_an_end_are_done() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let (crashed, ends) = with_cut_parents(&judges, &mut random);
    let mut tried = BTreeSet::new();
    for _ in 0..rounds(4) {
        let index = usize::try_from(random.below(ends.len() as u64)).unwrap();
        if !tried.insert(index) {
            continue;
        }
        let LogEnd { lost, intents } = &ends[index];
        let copy = crashed.copy();
        LogOnDisk::of(&copy.disk).lose_from(lost.lsn);
        let recovered = copy.judge(3);
        eprintln!("{intents:x?}: {recovered:?}");
        let count = intents.values().sum::<usize>() as u64;
        assert!(recovered.finished_intents >= count, "{recovered:?}");
    }
}

#[test]
fn changes_of_parent_pointers_that_are_cut_go_on() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let Some(judges) = judges::require() else { return };
    let (crashed, ends) = with_cut_parents(&judges, &mut random);
    // The first ones have few transactions, which are replayed for each cut.
    let most = ends.len().min(8) as u64;
    let end = &ends[usize::try_from(random.below(most)).unwrap()];
    let copy = crashed.copy();
    LogOnDisk::of(&copy.disk).lose_from(end.lost.lsn);
    judge_cuts(&copy, seed, 37);
}

/// A clean volume with a file whose attributes are a tree, with values in blocks.
fn with_values(judges: &XfsJudges, mkfs: &str) -> (XfsDisk, u64) {
    let disk = XfsDisk::create(judges, 512);
    disk.mkfs(mkfs);
    let mount = disk.mount("", &[]);
    let path = mount.path().join("file");
    File::create(&path).unwrap();
    let set = |name: &str, value: &[u8]| {
        rustix::fs::setxattr(&path, name, value, XattrFlags::empty()).unwrap();
    };
    set("trusted.replaced", &[1; 9000]);
    set("trusted.removed", &[2; 5000]);
    (0..100).for_each(|number| set(&format!("user.{number}"), &[3; 100]));
    let ino = XfsDisk::ino(&path);
    drop(mount);
    // Kernels set the bit while the log has such intents.
    disk.change_with_xfs_db(&["sb 0", "write features_log_incompat 1"]);
    (disk, ino)
}

/// Adds one intent of each kind to a clean log.
fn add_intents(disk: &XfsDisk, ino: u64, random: &mut Random) {
    let (first, second) = (random.bytes(12_000), random.bytes(12_000));
    let mut items = XfsLogVector::default();
    for (id, op, name, value) in [
        (1, XfsAttributeOp::Set, "set", Some(&first[..])),
        (2, XfsAttributeOp::Replace, "replaced", Some(&second[..])),
        (3, XfsAttributeOp::Remove, "removed", None),
    ] {
        let intent = XfsAttributeIntent {
            id,
            ino: Ino(ino),
            generation: 0,
            op,
            filter: StoredFlags::TRUSTED.bits().into(),
            name: name.as_bytes(),
            new_name: None,
            value,
            new_value: None,
        };
        assert!(XfsLogItem::Attri(intent).encode(&mut items));
    }
    LogOnDisk::of(disk).add(&items);
}

/// The kernel does what the intents say on a copy, and so do we.
#[test]
fn changes_of_attributes_without_an_end_are_done() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    for mkfs in ["-m rmapbt=1", "-b size=1024 -m rmapbt=0"] {
        let (disk, ino) = with_values(&judges, mkfs);
        add_intents(&disk, ino, &mut random);
        let crashed = CrashedVolume { disk, kernel_says: vec![] };
        let recovered = crashed.judge(1);
        assert_eq!(recovered.finished_intents, 3, "{recovered:?}");
        assert_eq!(crashed.disk.field(&["sb 0"], "features_log_incompat"), 1);
        let by_us = crashed.copy();
        XfsVolume::recover(&by_us.disk.writable_device(), &XfsOptions::default()).unwrap();
        assert_eq!(by_us.disk.field(&["sb 0"], "features_log_incompat"), 0);
    }
}

#[test]
fn changes_of_attributes_that_are_cut_go_on() {
    let seed = seed_of_run();
    let Some(judges) = judges::require() else { return };
    let (disk, ino) = with_values(&judges, "-b size=1024 -m rmapbt=1");
    add_intents(&disk, ino, &mut Random::new(seed));
    judge_cuts(&CrashedVolume { disk, kernel_says: vec![] }, seed, 2);
}
