//! What a replay leaves to do.

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
        ends.retain(|end| end.intents > 0);
        if ends.is_empty() { Err("no end leaves intents".into()) } else { Ok((crashed, ends)) }
    })
}

/// Chains of intents that the end of the log cuts.
#[test]
fn intents_that_have_no_end_are_named() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let (crashed, ends) = with_cut_chains(&judges);
    let mut kinds = [0; 4];
    for _ in 0..rounds(1) {
        let index = usize::try_from(random.below(ends.len() as u64)).unwrap();
        let LogEnd { lost, intents } = &ends[index];
        let copy = crashed.copy();
        LogOnDisk::of(&copy.disk).lose_from(lost.lsn);
        let pending = copy.judge_pending();
        let found =
            [pending.frees, pending.reverse_mappings, pending.reference_counts, pending.mappings];
        assert!(found.iter().sum::<u64>() >= *intents as u64, "{intents} intents, {pending}");
        kinds.iter_mut().zip(found).for_each(|(sum, count)| *sum += count);
    }
    let count = ends.len();
    eprintln!("{count} ends; frees, reverse mappings, counts, mappings: {kinds:?}");
}
