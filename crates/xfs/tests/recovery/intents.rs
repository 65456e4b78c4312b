//! Chains of intents that the end of a log cuts.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::XfsShutdown;
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;

use crate::crashed::{CrashedVolume, make_until, rounds};
use crate::log_ends::LogEnd;
use crate::log_on_disk::LogOnDisk;

/// Cuts chains of intents: clones, shortens and removes files of many extents, while other threads
/// sync. How many chains a sync cuts depends on the machine.
fn cut_chains(root: &Path, files: u64) {
    let original = root.join("original");
    let file = fs::File::create(&original).unwrap();
    for number in 0..1500 {
        file.write_all_at(&[7; 4096], number * 8192).unwrap();
    }
    file.sync_all().unwrap();
    let file = fs::File::open(&original).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for name in ["synced", "synced too"] {
            let (root, done) = (&root, &done);
            scope.spawn(move || {
                let other = fs::File::create(root.join(name)).unwrap();
                // A panic of the other thread does not stop this one.
                for number in 1..20_000 {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    other.set_len(number).unwrap();
                    other.sync_all().unwrap();
                }
            });
        }
        for number in 0..files {
            let clone = fs::File::create(root.join(format!("clone {number}"))).unwrap();
            rustix::fs::ioctl_ficlone(&clone, &file).unwrap();
            clone.set_len(4096 * number).unwrap();
        }
        let clone = fs::File::create(root.join("other")).unwrap();
        rustix::fs::ioctl_ficlone(&clone, &file).unwrap();
        done.store(true, Ordering::Relaxed);
    });
}

/// A volume whose log cuts chains of intents, and the ends at which it does.
pub(crate) fn with_cut_chains(judges: &XfsJudges) -> (CrashedVolume, Vec<LogEnd>) {
    let kind = XfsVolumeKind::named("today");
    let mut files = 0;
    make_until(|| {
        files += 3;
        let crashed = CrashedVolume::make(judges, kind, XfsShutdown::LogWritten, |root, _| {
            cut_chains(root, files);
        });
        let mut ends = LogOnDisk::of(&crashed.disk).possible_ends();
        ends.retain(|end| !end.intents.is_empty());
        if ends.is_empty() { Err("no end leaves intents".into()) } else { Ok((crashed, ends)) }
    })
}

/// The kernel ends the intents of a copy, and so do we: an end with each type that the log has.
#[test]
fn intents_that_have_no_end_are_done() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let (crashed, ends) = with_cut_chains(&judges);
    let kinds: BTreeSet<_> = ends.iter().flat_map(|end| end.intents.keys()).collect();
    for kind in kinds.iter().cycle().take(kinds.len().max(usize::try_from(rounds(1)).unwrap())) {
        let with_kind: Vec<_> = ends.iter().filter(|end| end.intents.contains_key(kind)).collect();
        let index = usize::try_from(random.below(with_kind.len() as u64)).unwrap();
        let LogEnd { lost, intents } = with_kind[index];
        let copy = crashed.copy();
        LogOnDisk::of(&copy.disk).lose_from(lost.lsn);
        let recovered = copy.judge(3);
        eprintln!("{intents:x?} of {} ends: {recovered:?}", ends.len());
        let count = intents.values().sum::<usize>() as u64;
        assert!(recovered.finished_intents >= count, "{recovered:?}");
    }
}
