//! Contexts: what transactions have committed since the last push, each item once.
//!
//! All commits share the context lock; a push takes it alone, for as long as it takes to put a new
//! context in the place of the old one.

#[cfg(all(test, feature = "shuttle"))]
mod model;

use std::sync::Arc;

use offshoot_kit::counter::count;
use offshoot_kit::sync::{Mutex, RwLock, RwLockReadGuard};
use offshoot_vfs::Result;

use super::item::{LoggedItem, LoggedKind, LoggedSize};
use super::sizes::RecordSizes;
use super::statistics::LogCounters;
use super::vectors::FormatOutcome;
use offshoot_xfs_format::log::op::OP_HEADER;

/// An item in a context.
#[derive(Debug)]
pub(super) struct ContextEntry {
    pub(super) item: Arc<dyn LoggedItem>,
    /// `None` when it left the context again.
    pub(super) kind: Option<LoggedKind>,
}

/// What a context holds.
#[derive(Debug, Default)]
pub(super) struct ContextList {
    pub(super) entries: Vec<ContextEntry>,
    /// The bytes that the items and their op headers take in the log.
    pub(super) bytes: u64,
    /// The regions of all items.
    pub(super) regions: usize,
    /// The bytes that tickets gave for it.
    pub(super) charged: u64,
}

/// A context.
#[derive(Debug)]
pub(super) struct LogContext {
    pub(super) sequence: u64,
    pub(super) list: Mutex<ContextList>,
}

/// The context that commits go to.
#[derive(Debug)]
pub(super) struct LogContexts {
    current: RwLock<LogContext>,
    shadow_rounding: usize,
}

/// What a commit did to its context.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommitOutcome {
    pub(super) sequence: u64,
    /// The bytes of the context now.
    pub(super) bytes: u64,
}

fn log_bytes(size: LoggedSize) -> u64 {
    (size.bytes + size.regions * OP_HEADER) as u64
}

impl LogContexts {
    pub(super) fn new(shadow_rounding: usize) -> Self {
        let first = LogContext { sequence: 1, list: Mutex::default() };
        Self { current: RwLock::new(first), shadow_rounding }
    }

    /// The sequence of the current context, and its bytes.
    pub(super) fn current(&self) -> CommitOutcome {
        let context = self.current.read();
        CommitOutcome { sequence: context.sequence, bytes: context.list.lock().bytes }
    }

    /// The newest context that has items, if it is not pushed; else the one before.
    pub(super) fn newest(&self) -> u64 {
        let context = self.current.read();
        context.sequence - u64::from(context.list.lock().entries.is_empty())
    }

    /// Puts a new context in the place of the current one. `None` when that is empty, unless an
    /// empty one is wanted.
    pub(super) fn switch(&self, is_empty_wanted: bool) -> Option<(u64, ContextList)> {
        let mut context = self.current.write();
        let list = {
            let mut list = context.list.lock();
            if list.entries.is_empty() && !is_empty_wanted {
                return None;
            }
            std::mem::take(&mut *list)
        };
        let sequence = context.sequence;
        context.sequence += 1;
        Some((sequence, list))
    }

    /// Adds the items of a transaction, and takes what they need by `spend`, from its ticket.
    pub(super) fn commit(
        &self,
        items: &[Arc<dyn LoggedItem>],
        sizes: &RecordSizes,
        counters: &LogCounters,
        spend: impl FnOnce(u64) -> Result<()>,
    ) -> Result<CommitOutcome> {
        // The caller has the items locked, so both stay as they are until the commit is over.
        let kinds: Vec<_> = items.iter().map(|item| (item.kind(), item.size())).collect();
        let context = self.with_room(items, &kinds, counters);
        let sequence = context.sequence;
        let mut change = ContextChange::default();
        for (item, (kind, size)) in items.iter().zip(kinds) {
            if let LoggedKind::Done(intent) = &kind
                && context.leave(intent, &mut change)
            {
                count(&counters.whiteouts, 1);
                continue;
            }
            let outcome = context.add(item, kind, size, counters);
            change.minus += outcome.before.map_or(0, log_bytes);
            change.plus += log_bytes(outcome.now);
            change.regions_minus += outcome.before.map_or(0, |size| size.regions);
            change.regions_plus += outcome.now.regions;
        }
        let mut list = context.list.lock();
        list.bytes = (list.bytes + change.plus).saturating_sub(change.minus);
        list.regions = (list.regions + change.regions_plus).saturating_sub(change.regions_minus);
        let more = sizes.checkpoint(list.bytes).saturating_sub(list.charged);
        spend(more)?;
        list.charged += more;
        Ok(CommitOutcome { sequence, bytes: list.bytes })
    }

    /// The context lock, shared, when all items, of these kinds and sizes, have memory to be
    /// formatted.
    fn with_room(
        &self,
        items: &[Arc<dyn LoggedItem>],
        kinds: &[(LoggedKind, LoggedSize)],
        counters: &LogCounters,
    ) -> RwLockReadGuard<'_, LogContext> {
        let mut sequence = self.current.read().sequence;
        loop {
            for (item, (kind, size)) in items.iter().zip(kinds) {
                if !leaves(kind, sequence) {
                    let mut vectors = item.state().vectors.lock();
                    vectors.make_room(sequence, *size, self.shadow_rounding, counters);
                }
            }
            let context = self.current.read();
            if context.sequence == sequence {
                return context;
            }
            // A push took vectors away meanwhile, so more may be needed.
            sequence = context.sequence;
        }
    }
}

/// Whether an item is the end of an intent that the context with this sequence has: both leave it,
/// and the end is not formatted.
fn leaves(kind: &LoggedKind, sequence: u64) -> bool {
    let is_in = |intent: &Arc<dyn LoggedItem>| intent.state().vectors.lock().sequence == sequence;
    matches!(kind, LoggedKind::Done(intent) if is_in(intent))
}

/// By how much a commit changes its context.
#[derive(Debug, Default)]
struct ContextChange {
    plus: u64,
    minus: u64,
    regions_plus: usize,
    regions_minus: usize,
}

impl LogContext {
    fn add(
        &self,
        item: &Arc<dyn LoggedItem>,
        kind: LoggedKind,
        size: LoggedSize,
        counters: &LogCounters,
    ) -> FormatOutcome {
        let mut vectors = item.state().vectors.lock();
        let is_new = vectors.sequence != self.sequence;
        if is_new {
            item.pin();
        }
        let outcome = vectors.format(self.sequence, &**item, size, counters);
        let goes_home = matches!(kind, LoggedKind::Home);
        if is_new {
            let mut list = self.list.lock();
            vectors.sequence = self.sequence;
            vectors.slot = list.entries.len();
            list.entries.push(ContextEntry { item: item.clone(), kind: Some(kind) });
        } else if !(goes_home && vectors.goes_home)
            && let Some(entry) = self.list.lock().entries.get_mut(vectors.slot)
        {
            entry.kind = Some(kind);
        }
        vectors.goes_home = goes_home;
        outcome
    }

    /// Takes an intent whose done item is committed out of the context again. Returns false when
    /// an earlier context has it.
    fn leave(&self, intent: &Arc<dyn LoggedItem>, change: &mut ContextChange) -> bool {
        let mut vectors = intent.state().vectors.lock();
        if vectors.sequence != self.sequence {
            return false;
        }
        if let Some(vector) = vectors.take(self.sequence) {
            let regions = vector.regions().len();
            let size = LoggedSize { bytes: vector.byte_count(), regions };
            change.minus += log_bytes(size);
            change.regions_minus += regions;
        }
        if let Some(entry) = self.list.lock().entries.get_mut(vectors.slot) {
            entry.kind = None;
        }
        true
    }
}
