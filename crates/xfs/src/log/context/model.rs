//! Contexts under the model checker: `cargo test --features shuttle --lib model`.
//!
//! Two threads commit transactions while a third one pushes. All of them have one item in common,
//! which grows, and each committing thread begins and ends an intent. Each push takes what
//! checkpoints take. Every context must have each item once, with the bytes that were counted for
//! it, and what was spent for it is what a checkpoint of these bytes takes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use offshoot_kit::sync::Mutex;
use offshoot_vfs::Result;
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::{XfsLogRing, XfsLogVector};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, Runner, thread};

use super::{ContextList, LogContexts, log_bytes};
use crate::log::sizes::RecordSizes;
use crate::log::statistics::LogCounters;
use crate::log::{HomeOutcome, HomeWrites, LoggedItem, LoggedKind, LoggedSize, LoggedState};

/// Schedules of each kind.
const SCHEDULES: usize = 2000;

/// The transactions of each thread.
const COMMITS: usize = 3;

/// An item whose bytes are the number of its commits.
#[derive(Debug)]
struct ModelItem {
    state: LoggedState,
    /// Held by a transaction.
    gate: Mutex<()>,
    len: AtomicUsize,
    pins: AtomicUsize,
    kind: LoggedKind,
}

impl ModelItem {
    fn new(kind: LoggedKind) -> Arc<Self> {
        Arc::new(Self {
            state: LoggedState::default(),
            gate: Mutex::default(),
            len: AtomicUsize::new(4),
            pins: AtomicUsize::new(0),
            kind,
        })
    }
}

impl LoggedItem for ModelItem {
    fn state(&self) -> &LoggedState {
        &self.state
    }

    fn kind(&self) -> LoggedKind {
        self.kind.clone()
    }

    fn size(&self) -> LoggedSize {
        LoggedSize { bytes: self.len.load(SeqCst), regions: 1 }
    }

    fn format(&self, to: &mut XfsLogVector) {
        to.push(&[&vec![7; self.len.load(SeqCst)]]);
    }

    fn pin(&self) {
        self.pins.fetch_add(1, SeqCst);
    }

    fn unpin(&self, _lsn: Option<Lsn>) {
        self.pins.fetch_sub(1, SeqCst);
    }

    fn write_home(self: Arc<Self>, _home: &mut HomeWrites) -> Result<HomeOutcome> {
        Ok(HomeOutcome::Busy)
    }

    fn written(&self, _is_clean: bool) {}
}

/// What a schedule shares.
struct ModelLog {
    contexts: LogContexts,
    sizes: RecordSizes,
    counters: LogCounters,
    shared: Arc<ModelItem>,
    /// What was spent for each context.
    spent: Mutex<BTreeMap<u64, u64>>,
}

impl ModelLog {
    fn commit(&self, items: &[Arc<dyn LoggedItem>]) {
        let mut spent = 0;
        let outcome = self.contexts.commit(items, &self.sizes, &self.counters, |bytes| {
            spent = bytes;
            Ok(())
        });
        *self.spent.lock().entry(outcome.unwrap().sequence).or_default() += spent;
    }

    fn transactions(&self) {
        for _ in 0..COMMITS {
            let intent: Arc<dyn LoggedItem> = ModelItem::new(LoggedKind::Intent);
            let end: Arc<dyn LoggedItem> = ModelItem::new(LoggedKind::Done(intent.clone()));
            {
                let _gate = self.shared.gate.lock();
                self.shared.len.fetch_add(400, SeqCst);
                self.commit(&[self.shared.clone(), intent]);
            }
            self.commit(&[end]);
        }
    }

    /// Takes the current context, as a push does. The caller has the turn.
    fn push(&self) {
        let Some((sequence, list)) = self.contexts.switch(false) else { return };
        let ContextList { entries, bytes, regions, charged } = list;
        let (mut found, mut found_regions, mut common) = (0, 0, 0);
        for entry in &entries {
            common +=
                usize::from(std::ptr::addr_eq(Arc::as_ptr(&entry.item), Arc::as_ptr(&self.shared)));
            let taken = entry.item.state().vectors.lock().take(sequence);
            assert_eq!(taken.is_some(), entry.kind.is_some(), "{entry:?}");
            if let Some(vector) = taken {
                let regions = vector.regions().len();
                found += log_bytes(LoggedSize { bytes: vector.byte_count(), regions });
                found_regions += regions;
                entry.item.state().vectors.lock().give_back(vector);
            }
            entry.item.unpin(None);
        }
        assert!(common <= 1, "an item is in context {sequence} twice");
        assert_eq!((bytes, regions), (found, found_regions));
        assert!(charged >= self.sizes.checkpoint(bytes));
        // What was committed last is noted behind the commit.
        while self.spent.lock().get(&sequence).copied().unwrap_or(0) < charged {
            thread::yield_now();
        }
        assert_eq!(self.spent.lock().get(&sequence).copied(), Some(charged));
    }
}

fn schedule() {
    let ring = XfsLogRing::new(1000).unwrap();
    let log = Arc::new(ModelLog {
        contexts: LogContexts::new(512),
        sizes: RecordSizes::new(ring, 512, None),
        counters: LogCounters::default(),
        shared: ModelItem::new(LoggedKind::Home),
        spent: Mutex::default(),
    });
    let committers: Vec<_> = (0..2)
        .map(|_| {
            let log = log.clone();
            thread::spawn(move || log.transactions())
        })
        .collect();
    let pusher = {
        let log = log.clone();
        thread::spawn(move || (0..3).for_each(|_| log.push()))
    };
    committers.into_iter().chain([pusher]).for_each(|thread| thread.join().unwrap());
    log.push();
    assert!(log.contexts.switch(false).is_none());
    assert_eq!(log.shared.pins.load(SeqCst), 0);
}

#[test]
fn two_commit_and_one_pushes() {
    let mut config = Config::default();
    config.failure_persistence = FailurePersistence::Print;
    let schedulers: [Box<dyn Scheduler + Send>; 2] =
        [Box::new(RandomScheduler::new(SCHEDULES)), Box::new(PctScheduler::new(3, SCHEDULES))];
    for scheduler in schedulers {
        Runner::new(scheduler, config.clone()).run(schedule);
    }
}
