//! Full logs: callers wait in line, and no call fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use offshoot_kit::counter::WriteStop;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::XfsLogRing;
use parking_lot::Mutex;

use super::blocks::{TestVolume, assert_whole, change};
use crate::log::sizes::RecordSizes;
use crate::log::space::LogSpace;
use crate::log::{LoggedItem, XfsLogOptions};

#[test]
fn a_full_log_makes_callers_wait_and_fails_none() {
    let seed = seed_of_run();
    let volume = TestVolume::new(100, |_| ());
    let blocks = volume.blocks(60);
    let log = volume.start(&XfsLogOptions::default());
    thread::scope(|scope| {
        for number in 0..4 {
            let (log, blocks) = (&log, &blocks);
            scope.spawn(move || {
                let mut random = Random::new(seed.wrapping_add(number));
                for _ in 0..3000 {
                    let sequence = change(log, blocks, &mut random).unwrap();
                    if random.below(500) == 0 {
                        log.force(sequence).unwrap();
                    }
                }
            });
        }
    });
    let statistics = log.statistics();
    eprintln!("{statistics:?}");
    assert!(statistics.waits > 0, "{statistics:?}");
    log.force_all().unwrap();
    let durable = log.durable().0;
    log.unmount().unwrap();
    let ends = volume.ends();
    assert!(ends.is_clean && ends.head.cycle() > 3, "{ends:?}");
    assert_whole(&blocks, &*volume.device, durable);
}

/// A transaction that rolls again and again, with other ones that want all of the log.
#[test]
fn a_rolling_transaction_comes_before_those_that_have_not_begun() {
    let seed = seed_of_run();
    let volume = TestVolume::new(150, |_| ());
    let (blocks, others) = (volume.blocks(20), volume.blocks(60).split_off(20));
    let log = volume.start(&XfsLogOptions::default());
    thread::scope(|scope| {
        let (log, blocks, others) = (&log, &blocks, &others);
        for number in 0..2 {
            scope.spawn(move || {
                let mut random = Random::new(seed.wrapping_add(number));
                for _ in 0..2000 {
                    change(log, others, &mut random).unwrap();
                }
            });
        }
        scope.spawn(move || {
            let mut random = Random::new(seed);
            for _ in 0..10 {
                let mut ticket = log.reserve(30_000, 2).unwrap();
                for step in 0..40 {
                    let items: Vec<_> = (0..5)
                        .map(|index| {
                            let block = &blocks[(step + index) % blocks.len()];
                            block.fill(index, &random.bytes(128));
                            block.clone() as Arc<dyn LoggedItem>
                        })
                        .collect();
                    log.commit(&mut ticket, &items).unwrap();
                    ticket.roll().unwrap();
                }
            }
        });
    });
    log.unmount().unwrap();
}

/// What a rolling transaction gives back and wants again does not go to a new one meanwhile.
#[test]
fn a_rolling_transaction_keeps_its_rest_from_new_ones() {
    let ring = XfsLogRing::new(1000).unwrap();
    let stop = WriteStop::new(None);
    let head = Lsn::new(1, 0);
    let space = LogSpace::new(ring, 1000, &stop, (head, head));
    let waiting = AtomicU64::new(0);
    space.reserve(900, || ()).unwrap();
    thread::scope(|scope| {
        let (space, waiting) = (&space, &waiting);
        scope.spawn(move || {
            space.reserve(200, || _ = waiting.fetch_add(1, SeqCst)).unwrap();
            space.release(200);
        });
        while waiting.load(SeqCst) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        // 200 of 1000 would be free between the two halves of this, and are not behind it.
        space.roll(200, 200, || panic!("the next step waits")).unwrap();
        space.release(900);
    });
    assert_eq!(space.usage().wanted, 0);
    assert!(stop.cause().is_none());
}

/// With less, all would wait: the record that tells the tail takes what it frees.
#[test]
fn the_tail_moves_by_more_than_the_record_that_tells_it() {
    let sizes = RecordSizes::new(XfsLogRing::new(1000).unwrap(), 512, None);
    let record = sizes.empty_checkpoint();
    assert_eq!(sizes.tail_move(0, 0), 0);
    for (wanted, untold) in [(1, 0), (1, 1), (100, 400), (record, record), (5000, 17)] {
        let untold_then = untold + sizes.tail_move(wanted, untold);
        assert!(untold_then > record && untold_then - record >= wanted, "{wanted}, {untold}");
    }
    assert_eq!(sizes.tail_move(100, 100 + record), 0);
}

#[test]
fn what_never_fits_is_refused() {
    let volume = TestVolume::new(100, |_| ());
    let log = volume.start(&XfsLogOptions::default());
    assert!(log.reserve(390 << 10, 1).is_err());
    assert!(log.reserve(100 << 10, 4).is_err());
    assert!(log.reserve(u64::MAX / 4, 8).is_err());
    drop(log.reserve(100 << 10, 3).unwrap());
    // What a ticket does not use is free again.
    for _ in 0..100 {
        drop(log.reserve(100 << 10, 3).unwrap());
    }
    log.unmount().unwrap();
}

#[test]
fn a_ticket_that_is_too_small_ends_writing() {
    let volume = TestVolume::new(100, |_| ());
    let blocks = volume.blocks(1);
    let stop = WriteStop::new(None);
    let log = volume.start_with(&XfsLogOptions::default(), &stop);
    let mut ticket = log.reserve(100, 1).unwrap();
    for chunk in 0..31 {
        blocks[0].fill(chunk, &[7; 128]);
    }
    let item: Arc<dyn LoggedItem> = blocks[0].clone();
    let error = log.commit(&mut ticket, &[item]).unwrap_err();
    assert!(error.to_string().contains("reserved"), "{error}");
    assert!(stop.cause().is_some() && log.force_all().is_err());
}

/// Small demands do not overtake a large one that came before.
#[test]
fn a_line_is_first_come_first_served() {
    let ring = XfsLogRing::new(1000).unwrap();
    let stop = WriteStop::new(None);
    let head = Lsn::new(1, 0);
    let space = LogSpace::new(ring, 1000, &stop, (head, head));
    let (order, waiting) = (Mutex::new(Vec::new()), AtomicU64::new(0));
    space.reserve(900, || ()).unwrap();
    thread::scope(|scope| {
        for (number, bytes) in [(1, 500), (2, 50), (3, 400)] {
            let (space, order, waiting) = (&space, &order, &waiting);
            scope.spawn(move || {
                let count = || {
                    waiting.fetch_add(1, SeqCst);
                };
                space.reserve(bytes, count).unwrap();
                order.lock().push(number);
            });
            while waiting.load(SeqCst) < number {
                thread::sleep(Duration::from_millis(1));
            }
        }
        space.release(300);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(*order.lock(), [], "50 would fit");
        space.release(150);
        while order.lock().len() < 2 {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!order.lock().contains(&3));
        space.release(400);
    });
    assert_eq!(space.usage().wanted, 0);
    assert!(stop.cause().is_none());
    space.release(10_000);
    assert!(stop.cause().is_some(), "more than was promised");
}
