//! Power cuts at any write, and recovery by us.

use std::sync::Arc;
use std::thread;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, Fault, FaultDevice, RequestKind};
use offshoot_kit::counter::WriteStop;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::Errno;

use super::blocks::{TestBlock, TestVolume, assert_whole, change};
use crate::log::XfsLogOptions;
use crate::{XfsOptions, XfsVolume};

/// What is tried: logs of `log_blocks` blocks of 4 KiB.
struct CutLog {
    log_blocks: u32,
    record_bytes: u32,
    sector: u32,
    changes: u64,
    /// The least number of times that the log is written around.
    rounds: u32,
    states: u64,
}

fn explore(case: &CutLog) {
    let seed = seed_of_run();
    let made = TestVolume::new(case.log_blocks, |mkfs| mkfs.sector_size = Some(case.sector));
    let blocks = made.blocks(400);
    let device = Arc::new(CrashDevice::new(made.device.clone()));
    let volume = made.moved_to(device.clone());
    let options = XfsLogOptions {
        record_bytes: Some(case.record_bytes),
        context_bytes: Some(100 << 10),
        ..XfsLogOptions::default()
    };
    let log = volume.start(&options);
    thread::scope(|scope| {
        for number in 0..3 {
            let (log, blocks, device) = (&log, &blocks, &device);
            scope.spawn(move || {
                let mut random = Random::new(seed.wrapping_add(number));
                for _ in 0..case.changes {
                    let sequence = change(log, blocks, &mut random).unwrap();
                    if random.below(25) == 0 {
                        log.force(sequence).unwrap();
                        device.mark(&sequence.0.to_string());
                    }
                }
            });
        }
    });
    let statistics = log.statistics();
    eprintln!("{statistics:?}");
    drop(log);
    let head = volume.ends().head;
    assert!(head.cycle() > case.rounds, "it ends at {head}");
    assert!(statistics.written_home > 0 && statistics.checkpoints > 10);
    let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 4, seed, tears: true };
    judge(&volume, &device, &blocks, &plan, case.states);
}

/// Recovers about `most` of the states that a cut can leave.
fn judge(
    volume: &TestVolume,
    device: &CrashDevice,
    blocks: &[Arc<TestBlock>],
    plan: &CrashPlan,
    most: u64,
) {
    let log = device.log();
    let all = log.states(plan).count() as u64;
    let stride = usize::try_from(all / most).unwrap().max(1);
    let mut random = Random::new(plan.seed);
    let skip = usize::try_from(random.below(stride as u64)).unwrap();
    let (mut recovered, mut forced_states) = (0, 0);
    for state in log.states(plan).skip(skip).step_by(stride) {
        let state = state.unwrap();
        let description = state.description.clone();
        let forced = state.marks().iter().map(|mark| mark.parse::<u64>().unwrap()).max();
        forced_states += u64::from(forced.is_some());
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let memory: Arc<dyn BlockDevice> = Arc::new(memory);
        let outcome = XfsVolume::recover(&memory, &XfsOptions::default());
        let outcome = outcome.unwrap_or_else(|error| panic!("{description}: {error}"));
        recovered += u64::from(outcome.is_some());
        eprintln!("{description}: {forced:?}");
        assert_whole(blocks, &*memory, forced.unwrap_or(0));
        // It goes on where it ended.
        let again = volume.moved_to(memory);
        assert!(again.ends().is_clean, "{description}");
    }
    eprintln!("{all} states; {recovered} recovered, {forced_states} behind a force");
    assert!(recovered > 10 && forced_states > 10);
}

#[test]
fn contexts_are_whole_in_order_and_forced_ones_are_there_with_small_records() {
    explore(&CutLog {
        log_blocks: 600,
        record_bytes: 32 << 10,
        sector: 512,
        changes: 1500,
        rounds: 3,
        states: 150,
    });
}

#[test]
fn contexts_are_whole_in_order_and_forced_ones_are_there_with_large_records() {
    explore(&CutLog {
        log_blocks: 1500,
        record_bytes: 256 << 10,
        sector: 512,
        changes: 2000,
        rounds: 2,
        states: 80,
    });
}

#[test]
fn contexts_are_whole_in_order_and_forced_ones_are_there_with_large_sectors() {
    explore(&CutLog {
        log_blocks: 800,
        record_bytes: 32 << 10,
        sector: 4096,
        changes: 1500,
        rounds: 2,
        states: 80,
    });
}

/// A device that fails ends all writing, and every call says why.
#[test]
fn an_error_of_the_device_ends_all_writing() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    for round in 0..30 {
        let made = TestVolume::new(600, |_| ());
        let blocks = made.blocks(20);
        let crash = Arc::new(CrashDevice::new(made.device.clone()));
        let faulty = Arc::new(FaultDevice::new(crash.clone()));
        let volume = made.moved_to(faulty.clone());
        let stop = WriteStop::new(None);
        let options = XfsLogOptions { context_bytes: Some(60 << 10), ..XfsLogOptions::default() };
        let log = volume.start_with(&options, &stop);
        let kind = if round % 2 == 0 { RequestKind::Writes } else { RequestKind::Flushes };
        faulty.strike(kind, faulty.count(kind) + random.below(30), Fault::Error);
        let mut forced = 0;
        let error = loop {
            let changed = change(&log, &blocks, &mut random);
            let force = random.below(4) == 0;
            match changed.and_then(|sequence| {
                if force {
                    log.force(sequence)?;
                    forced = forced.max(sequence.0);
                }
                Ok(())
            }) {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert!(stop.cause().is_some(), "{error}");
        for outcome in [log.force_all(), log.push_tail(), log.reserve(1, 1).map(drop)] {
            assert_eq!(outcome.unwrap_err().errno(), Errno::ROFS);
        }
        assert!(log.unmount().is_err());
        XfsVolume::recover(&(crash.clone() as Arc<dyn BlockDevice>), &XfsOptions::default())
            .unwrap();
        assert_whole(&blocks, &*crash, forced);
    }
}
