//! What a replay leaves to do.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::XfsShutdown;
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_xfs::{XfsReport, XfsVolume};

use crate::crashed::{CrashedVolume, collecting, rounds};
use crate::log_on_disk::LogOnDisk;

/// Chains of intents that the end of the log cuts: files of many extents are cloned, exchanged and
/// removed, while another thread syncs.
#[test]
fn intents_that_have_no_end_are_named() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("today");
    let crashed = CrashedVolume::make(&judges, kind, XfsShutdown::LogWritten, |root, _| {
        let original = root.join("original");
        let file = fs::File::create(&original).unwrap();
        for number in 0..1500 {
            file.write_all_at(&[7; 4096], number * 8192).unwrap();
        }
        file.sync_all().unwrap();
        let file = fs::File::open(&original).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = fs::File::create(root.join("synced")).unwrap();
                // A panic of the other thread does not stop this one.
                for number in 1..20_000 {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    other.set_len(number).unwrap();
                    other.sync_all().unwrap();
                }
            });
            for number in 0..3 {
                let clone = fs::File::create(root.join(format!("clone {number}"))).unwrap();
                rustix::fs::ioctl_ficlone(&clone, &file).unwrap();
                clone.set_len(4096 * number).unwrap();
            }
            let clone = fs::File::create(root.join("other")).unwrap();
            rustix::fs::ioctl_ficlone(&clone, &file).unwrap();
            done.store(true, Ordering::Relaxed);
        });
    });
    let log = LogOnDisk::of(&crashed.disk);
    let records = log.records();
    // We look for cuts that leave intents, and hold some of them against the kernel.
    let mut kinds = [0; 4];
    let (mut tried, mut held) = (0, 0);
    while held < rounds(1) && tried < 100 * rounds(1) {
        tried += 1;
        let index = usize::try_from(random.below(records.len() as u64 - 1)).unwrap();
        let (last, record) = (&records[index], &records[index + 1]);
        // Later records are written over the tail of an early one.
        if log.ring.distance(last.tail, log.ends.head).is_none() {
            continue;
        }
        let count = log.ring.distance(record.lsn, log.ends.head).unwrap();
        let device = Arc::new(MemoryDevice::over(crashed.disk.device()));
        for index in 0..count {
            // What the round before left there.
            let at = log.ring.advance(record.lsn, index);
            let mut block = [0; 512];
            block[..4].copy_from_slice(&(at.cycle() - 1).to_be_bytes());
            device.write_at(log.place(at), &block).unwrap();
        }
        let (options, reports) = collecting();
        XfsVolume::open(device, &options).unwrap();
        let is_cut = |report: &XfsReport| match report {
            XfsReport::LogReplayed { pending, .. } => {
                pending.frees + pending.reference_counts + pending.mappings > 0
            }
            _ => false,
        };
        if !reports.lock().unwrap().iter().any(is_cut) {
            continue;
        }
        held += 1;
        let copy = crashed.copy();
        LogOnDisk::of(&copy.disk).lose(record.lsn, count);
        let pending = copy.judge_pending();
        let found =
            [pending.frees, pending.reverse_mappings, pending.reference_counts, pending.mappings];
        kinds.iter_mut().zip(found).for_each(|(sum, count)| *sum += count);
    }
    eprintln!("{tried} cuts; frees, reverse mappings, counts, mappings: {kinds:?}");
    assert!(held > 0, "no cut left intents");
}
