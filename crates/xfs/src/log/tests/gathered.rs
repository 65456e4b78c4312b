//! Contexts: vectors, relogging, whiteouts.

use std::sync::Arc;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::items::{CHUNK, XfsCountExtent, XfsIntent, XfsItemType};
use offshoot_xfs_format::log::{XfsLogItem, XfsLogVector};
use parking_lot::Mutex;

use super::blocks::{TestVolume, change};
use crate::log::{
    HomeOutcome, HomeWrites, LogSequence, LoggedItem, LoggedKind, LoggedSize, LoggedState, XfsLog,
    XfsLogOptions,
};

/// An intent, or the end of one.
#[derive(Debug)]
struct TestIntent {
    state: LoggedState,
    id: u64,
    ends: Option<Arc<TestIntent>>,
    is_once: bool,
    is_unsound: bool,
    unpinned: Mutex<Vec<Option<Lsn>>>,
}

impl TestIntent {
    fn made(id: u64, ends: Option<Arc<Self>>, is_once: bool) -> Arc<Self> {
        let (state, unpinned) = (LoggedState::default(), Mutex::default());
        Arc::new(Self { state, id, ends, is_once, is_unsound: false, unpinned })
    }

    /// One that no push lets through.
    fn unsound(id: u64) -> Arc<Self> {
        let (state, unpinned) = (LoggedState::default(), Mutex::default());
        Arc::new(Self { state, id, ends: None, is_once: true, is_unsound: true, unpinned })
    }

    fn new(id: u64) -> Arc<Self> {
        Self::made(id, None, false)
    }

    fn end(self: &Arc<Self>) -> Arc<Self> {
        Self::made(self.id, Some(self.clone()), false)
    }

    fn with_item<T>(&self, work: impl FnOnce(&XfsLogItem<'_>) -> T) -> T {
        if self.ends.is_some() {
            return work(&XfsLogItem::Done { item: XfsItemType::Cud, id: self.id });
        }
        let records: &[XfsCountExtent] = &[];
        work(&XfsLogItem::Cui(XfsIntent { id: self.id, records }))
    }
}

impl LoggedItem for TestIntent {
    fn state(&self) -> &LoggedState {
        &self.state
    }

    fn kind(&self) -> LoggedKind {
        match &self.ends {
            Some(intent) => LoggedKind::Done(intent.clone()),
            None if self.is_once => LoggedKind::Once,
            None => LoggedKind::Intent,
        }
    }

    fn size(&self) -> LoggedSize {
        LoggedSize { bytes: 16, regions: 1 }
    }

    fn format(&self, to: &mut XfsLogVector) {
        assert!(self.with_item(|item| item.encode(to)));
    }

    fn prove(&self) -> Result<()> {
        if self.is_unsound {
            return Err(Error::corrupt(Structure::DirectoryBlock, "it is not sound"));
        }
        Ok(())
    }

    fn pin(&self) {}

    fn unpin(&self, lsn: Option<Lsn>) {
        self.unpinned.lock().push(lsn);
    }

    fn write_home(self: Arc<Self>, _home: &mut HomeWrites) -> Result<HomeOutcome> {
        panic!("an intent has no home")
    }

    fn written(&self, _is_clean: bool) {}
}

fn commit(log: &XfsLog, items: &[Arc<TestIntent>]) -> LogSequence {
    let mut ticket = log.reserve(1000, 1).unwrap();
    let items: Vec<_> = items.iter().map(|item| item.clone() as Arc<dyn LoggedItem>).collect();
    log.commit(&mut ticket, &items).unwrap()
}

/// How many items each checkpoint in the log has.
fn items_in(volume: &TestVolume) -> Vec<usize> {
    let mut counts = Vec::new();
    volume
        .log()
        .each_checkpoint(u64::MAX, &mut |checkpoint| {
            counts.push(checkpoint.items().count());
            Ok(())
        })
        .unwrap();
    counts
}

#[test]
fn an_intent_and_its_end_in_one_context_are_not_logged() {
    let volume = TestVolume::new(600, |_| ());
    let blocks = volume.blocks(1);
    let log = volume.start(&XfsLogOptions::default());
    let [first, second] = [1, 2].map(TestIntent::new);
    let mut random = Random::new(1);
    change(&log, &blocks, &mut random).unwrap();
    commit(&log, &[first.clone(), second.clone()]);
    commit(&log, &[first.end()]);
    log.force_all().unwrap();
    assert_eq!(items_in(&volume), [2], "a block and the second intent");
    assert_eq!(*first.unpinned.lock(), [None]);
    let start = second.state.active_lsn().expect("it waits for its end");
    assert_eq!(*second.unpinned.lock(), [Some(start)]);
    assert_eq!(first.state.active_lsn(), None);
    assert_eq!(log.statistics().whiteouts, 1);
    let end = second.end();
    commit(&log, std::slice::from_ref(&end));
    log.force_all().unwrap();
    assert_eq!(items_in(&volume), [2, 1]);
    assert_eq!(second.state.active_lsn(), None, "its end is durable");
    assert_eq!(end.state.active_lsn(), None);
    log.unmount().unwrap();
    assert!(volume.ends().is_clean);
}

#[test]
fn an_intent_without_an_end_holds_the_tail_and_the_unmount() {
    let volume = TestVolume::new(600, |_| ());
    let blocks = volume.blocks(10);
    let log = volume.start(&XfsLogOptions::default());
    let intent = TestIntent::new(7);
    let sequence = commit(&log, std::slice::from_ref(&intent));
    log.force(sequence).unwrap();
    let held = intent.state.active_lsn().unwrap();
    let mut random = Random::new(2);
    for _ in 0..50 {
        let sequence = change(&log, &blocks, &mut random).unwrap();
        log.force(sequence).unwrap();
    }
    log.push_tail().unwrap();
    assert!(blocks.iter().all(|block| block.state().active_lsn().is_none()));
    log.quiesce().unwrap();
    log.unmount().unwrap_err();
    let ends = volume.ends();
    assert!(!ends.is_clean);
    assert_eq!(ends.tail, held);
    // The log of the next opening goes on behind it, with records of the same size.
    let options = XfsLogOptions { record_bytes: Some(256 << 10), ..XfsLogOptions::default() };
    let (old, stop) = (TestIntent::new(7), offshoot_kit::counter::WriteStop::new(None));
    let disk = crate::log::LogDisk::new(&volume.device, &volume.superblock).unwrap();
    let item: Arc<dyn LoggedItem> = old.clone();
    let log = XfsLog::start(disk, &ends, &[(item, held)], &stop, &options).unwrap();
    for _ in 0..50 {
        let sequence = change(&log, &blocks, &mut random).unwrap();
        log.force(sequence).unwrap();
    }
    log.push_tail().unwrap();
    assert_eq!(volume.ends().tail, held);
    assert_eq!(volume.ends().last.unwrap().buffer, ends.last.unwrap().buffer);
    commit(&log, &[old.end()]);
    log.quiesce().unwrap();
    assert!(volume.ends().tail > held);
    log.unmount().unwrap();
    assert!(volume.ends().is_clean);
}

/// A checkpoint with one small item is as short as one without any.
#[test]
fn a_quiet_log_leaves_a_recovery_no_item() {
    let volume = TestVolume::new(600, |_| ());
    let log = volume.start(&XfsLogOptions::default());
    let intent = TestIntent::new(1);
    let sequence = commit(&log, std::slice::from_ref(&intent));
    log.force(sequence).unwrap();
    log.quiesce().unwrap();
    commit(&log, &[intent.end()]);
    log.quiesce().unwrap();
    let empty = log.statistics().empty_checkpoints;
    log.quiesce().unwrap();
    assert_eq!(log.statistics().empty_checkpoints, empty, "it was quiet");
    assert_eq!(items_in(&volume), [0, 0]);
    log.unmount().unwrap();
}

/// The device has the contexts before it, and each later call says that writing has ended.
#[test]
fn nothing_of_a_context_with_an_unsound_item_is_written() {
    let volume = TestVolume::new(600, |_| ());
    let blocks = volume.blocks(1);
    let log = volume.start(&XfsLogOptions::default());
    let mut random = Random::new(5);
    let sequence = change(&log, &blocks, &mut random).unwrap();
    log.force(sequence).unwrap();
    let (head, records) = (volume.ends().head, log.statistics().records);
    change(&log, &blocks, &mut random).unwrap();
    let sequence = commit(&log, &[TestIntent::unsound(1)]);
    let error = log.force(sequence).unwrap_err();
    assert!(error.to_string().contains("it is not sound"), "{error}");
    assert_eq!((volume.ends().head, log.statistics().records), (head, records));
    assert_eq!(items_in(&volume), [1]);
    assert!(log.durable() < sequence);
    assert_eq!(log.reserve(1000, 1).unwrap_err().errno(), Errno::ROFS);
    assert_eq!(log.force_all().unwrap_err().errno(), Errno::ROFS);
}

/// xfs.md 5.3: the vectors of a block grow in at most 8 steps, and then commits allocate nothing.
#[test]
fn vectors_grow_in_few_steps_and_then_commits_allocate_none() {
    let seed = seed_of_run();
    let volume = TestVolume::new(2000, |_| ());
    let blocks = volume.blocks(30);
    let log = volume.start(&XfsLogOptions::default());
    let mut random = Random::new(seed);
    // One context: each block gets one more chunk at each commit.
    for chunk in 0..31 {
        let mut ticket = log.reserve(30 * 6000, 1).unwrap();
        for block in &blocks {
            block.fill(chunk, &random.bytes(CHUNK));
        }
        let items: Vec<_> =
            blocks.iter().map(|block| block.clone() as Arc<dyn LoggedItem>).collect();
        log.commit(&mut ticket, &items).unwrap();
    }
    let growing = log.statistics();
    assert!(growing.shadow_allocations <= 8 * 30, "{growing:?}");
    assert!(growing.formats_in_place > growing.formats / 2, "{growing:?}");
    // Many contexts, of which one is written while the next gathers.
    for round in 0..20_000 {
        let sequence = change(&log, &blocks, &mut random).unwrap();
        if round % 100 == 0 {
            log.force(sequence).unwrap();
        }
    }
    let all = log.statistics();
    let second = all.shadow_allocations - growing.shadow_allocations;
    assert!(second <= 8 * 30, "a second vector for each block: {all:?}");
    log.unmount().unwrap();
}

/// A block is in a context once, and a relogged one carries all changes since it was at home.
#[test]
fn a_block_is_logged_once_with_all_changes_since_it_was_home() {
    let volume = TestVolume::new(600, |_| ());
    let blocks = volume.blocks(1);
    let log = volume.start(&XfsLogOptions::default());
    let mut random = Random::new(3);
    for _ in 0..5 {
        for _ in 0..10 {
            change(&log, &blocks, &mut random).unwrap();
        }
        assert!(blocks[0].is_pinned());
        log.force_all().unwrap();
        assert!(!blocks[0].is_pinned());
    }
    // The newest record tells the tail of the checkpoint before.
    assert_eq!(items_in(&volume), [1; 2]);
    let newest = blocks[0].state().active_lsn().unwrap();
    assert_eq!(blocks[0].lsn(), newest);
    log.push_tail().unwrap();
    assert_eq!(blocks[0].state().active_lsn(), None);
    assert_eq!(blocks[0].found_on(&*volume.device).unwrap().0, log.durable().0);
    log.unmount().unwrap();
}

#[test]
fn what_is_cancelled_or_logged_once_is_not_active() {
    let volume = TestVolume::new(600, |_| ());
    let blocks = volume.blocks(1);
    let log = volume.start(&XfsLogOptions::default());
    let mut random = Random::new(4);
    let first = change(&log, &blocks, &mut random).unwrap();
    log.force(first).unwrap();
    let active = blocks[0].state().active_lsn().unwrap();
    blocks[0].cancel();
    let sequence = change(&log, &blocks, &mut random).unwrap();
    let once = TestIntent::made(1, None, true);
    assert_eq!(commit(&log, std::slice::from_ref(&once)), sequence);
    assert_eq!(blocks[0].state().active_lsn(), Some(active), "until the cancel is durable");
    log.push_in_background();
    while log.durable() < sequence {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(blocks[0].state().active_lsn(), None);
    assert_eq!(once.state.active_lsn(), None);
    assert_eq!(once.unpinned.lock().len(), 1);
    log.unmount().unwrap();
    assert_eq!(blocks[0].found_on(&*volume.device), Some((0, first.0 - 1)), "never at home");
}
