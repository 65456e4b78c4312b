//! Logs that end anywhere, and recoveries to disk that are cut anywhere.

use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::RECOVERY;
use offshoot_testkit::xfs::judges;
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::log::XfsLogRecord;

use crate::crashed::{ADDING, REMOVING, many_records, rounds};
use crate::log_on_disk::LogOnDisk;

/// The log ends anywhere, or lacks a record that was in flight.
#[test]
fn logs_that_are_cut_are_recovered_as_the_kernel_does() {
    let mut random = Random::new(seed_of_run());
    for plan in [ADDING, REMOVING] {
        let Some(judges) = judges::require() else { return };
        let crashed = many_records(&judges, plan, &mut random);
        let records = LogOnDisk::of(&crashed.disk).records();
        for cut in 0..rounds(if plan.has_removals { 2 } else { 3 }) {
            let copy = crashed.copy();
            cut_log(&LogOnDisk::of(&copy.disk), &records, cut, &mut random);
            copy.judge(1);
        }
    }
}

/// Loses blocks of the log: all from a record on, all from the middle of a record on, or those of
/// a record that was in flight with others.
fn cut_log(log: &LogOnDisk, records: &[XfsLogRecord], cut: u64, random: &mut Random) {
    let mut back = |most: u64| {
        let back = 1 + usize::try_from(random.below(most)).unwrap();
        let record = &records[records.len() - back];
        (record.lsn, record.block_count())
    };
    if cut % 3 == 2 {
        // Eight can be in flight.
        let (at, count) = back(6);
        return log.lose(at, count);
    }
    let (at, count) = back(28);
    let inside = if cut.is_multiple_of(3) { 0 } else { random.below(count.into()) };
    let at = log.ring.advance(at, u32::try_from(inside).unwrap());
    log.lose_from(at);
}

/// A recovery to disk is cut at any of its writes, with any of the pending ones missing. It begins
/// again, and gives the same volume.
#[test]
fn a_recovery_that_is_cut_can_be_done_again() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let Some(judges) = judges::require() else { return };
    let crashed = many_records(&judges, ADDING, &mut random);
    let whole = crashed.disk.copy();
    let options = XfsOptions::default();
    XfsVolume::recover(&whole.writable_device(), &options).unwrap().unwrap();
    let device = Arc::new(CrashDevice::new(crashed.disk.device()));
    let cut: Arc<dyn BlockDevice> = device.clone();
    XfsVolume::recover(&cut, &options).unwrap().unwrap();
    let (log, writes) = (device.log(), device.log().entries().len());
    let judge = XfsVolume::open(whole.device(), &options).unwrap();
    let compare = Compare::default();
    let (mut again, mut done) = (0, 0);
    let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 10, seed, tears: true };
    let states: Vec<_> = log.states(&plan).map(Result::unwrap).collect();
    // The prefixes of all writes are many. The last states are those of an emptied log.
    let (offset, last) = (usize::try_from(random.below(97)).unwrap(), states.len() - 12);
    let chosen = states.into_iter().enumerate();
    let chosen = chosen.filter(|(number, _)| number % 97 == offset || *number >= last);
    for (_, state) in chosen {
        let described = state.description.clone();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let recovered = XfsVolume::recover(&device, &options)
            .unwrap_or_else(|error| panic!("{described}: {error}"));
        if recovered.is_some() {
            again += 1;
        } else {
            done += 1;
        }
        let ours = XfsVolume::open(device.clone(), &options).unwrap();
        let outcome = compare.run_filesystems(&*ours, &*judge);
        assert!(outcome.differences.is_empty(), "{described}: {outcome}");
    }
    eprintln!("{writes} writes; {again} recovered again, {done} were done");
    assert!(again > 5 && done > 0);
    // The kernel does not mend torn blocks.
    let plan = CrashPlan { tears: false, ..plan };
    let states: Vec<_> = log.states(&plan).map(Result::unwrap).collect();
    for _ in 0..2 {
        let state = &states[usize::try_from(random.below(states.len() as u64)).unwrap()];
        let disk = crashed.disk.copy();
        let device = disk.writable_device();
        state.devices[0].visit_changes(&mut |at, bytes| device.write_at(at, bytes)).unwrap();
        drop(device);
        drop(disk.mount("rw,noatime", &[RECOVERY]));
        disk.assert_checks();
        let mount = disk.mount("ro,noatime", &[]);
        let outcome = compare.clone().without(Aspect::StoredAcls).run(&*judge, mount.path());
        assert!(outcome.differences.is_empty(), "{}: {outcome}", state.description);
    }
}
