//! Active items: durable in the log, and not at home yet. They are ordered by LSN, and the least
//! one is the tail of the log.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use offshoot_xfs_format::Lsn;
use parking_lot::Mutex;

use super::item::{ActivePlace, LoggedItem};

#[derive(Debug)]
struct ActiveItem {
    item: Arc<dyn LoggedItem>,
    is_intent: bool,
}

#[derive(Debug)]
struct ActiveList {
    items: BTreeMap<ActivePlace, ActiveItem>,
    /// How many intents there are.
    intents: usize,
    /// The first records of checkpoints that are being written, by the sequence of their context.
    writing: BTreeMap<u64, Lsn>,
    /// The last record of the newest durable checkpoint.
    last: Lsn,
    next_order: u64,
}

/// The list of active items.
#[derive(Debug)]
pub(super) struct ActiveItems {
    list: Mutex<ActiveList>,
}

/// What is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ActiveCounts {
    pub(super) items: usize,
    pub(super) intents: usize,
    /// The checkpoints that are being written.
    pub(super) writing: usize,
}

impl ActiveItems {
    /// No items; the log begins behind `last`.
    pub(super) fn new(last: Lsn) -> Self {
        let empty = ActiveList {
            items: BTreeMap::new(),
            intents: 0,
            writing: BTreeMap::new(),
            last,
            next_order: 0,
        };
        Self { list: Mutex::new(empty) }
    }

    /// Where recovery has to begin: the first record with an item that is not at home, or of a
    /// checkpoint that is being written; with none of them the last record.
    pub(super) fn tail(&self) -> Lsn {
        let list = self.list.lock();
        let active = list.items.keys().next().map(|place| place.lsn);
        let writing = list.writing.values().min().copied();
        active.into_iter().chain(writing).min().unwrap_or(list.last)
    }

    pub(super) fn counts(&self) -> ActiveCounts {
        let list = self.list.lock();
        ActiveCounts { items: list.items.len(), intents: list.intents, writing: list.writing.len() }
    }

    /// A checkpoint begins in the record at `lsn`.
    pub(super) fn begin(&self, sequence: u64, lsn: Lsn) {
        self.list.lock().writing.entry(sequence).or_insert(lsn);
    }

    /// Items of a checkpoint of which `change` says what becomes of them are durable. Its first
    /// record is `start`, its last one `end`.
    pub(super) fn complete(
        &self,
        sequence: u64,
        (start, end): (Lsn, Lsn),
        mut change: impl FnMut(&mut dyn FnMut(ActiveChange<'_>)),
    ) {
        let mut list = self.list.lock();
        change(&mut |change| match change {
            ActiveChange::Insert { item, is_intent } => list.insert(item, start, is_intent),
            ActiveChange::Remove(item) => list.remove(item),
        });
        list.writing.remove(&sequence);
        list.last = end;
    }

    /// An intent of the log that was replayed, in the checkpoint at `lsn`.
    pub(super) fn hold(&self, intent: &Arc<dyn LoggedItem>, lsn: Lsn) {
        self.list.lock().insert(intent, lsn, true);
    }

    /// The items were written home as they were at these places. Returns which of them are clean:
    /// no newer checkpoint has them.
    pub(super) fn at_home(&self, written: &[(Arc<dyn LoggedItem>, ActivePlace)]) -> Vec<bool> {
        let mut list = self.list.lock();
        let mut remove = |(item, place): &(Arc<dyn LoggedItem>, ActivePlace)| {
            let is_same = *item.state().active.lock() == Some(*place);
            if is_same {
                list.remove(item);
            }
            is_same
        };
        written.iter().map(&mut remove).collect()
    }

    /// Up to `most` items that can be written home, behind `from` and not behind the record `to`.
    pub(super) fn batch(
        &self,
        from: Option<ActivePlace>,
        to: Lsn,
        most: usize,
    ) -> Vec<(ActivePlace, Arc<dyn LoggedItem>)> {
        let list = self.list.lock();
        let from = from.map_or(Bound::Unbounded, Bound::Excluded);
        let to = Bound::Included(ActivePlace { lsn: to, order: u64::MAX });
        let is_empty =
            matches!((from, to), (Bound::Excluded(from), Bound::Included(to)) if from >= to);
        if is_empty {
            return Vec::new();
        }
        let items = list.items.range((from, to)).filter(|(_, active)| !active.is_intent);
        items.take(most).map(|(place, active)| (*place, active.item.clone())).collect()
    }
}

/// What a checkpoint changes.
pub(super) enum ActiveChange<'a> {
    /// The item is active at the start of the checkpoint.
    Insert {
        /// The item.
        item: &'a Arc<dyn LoggedItem>,
        /// Whether it waits for its done item, and is not written home.
        is_intent: bool,
    },
    /// The item is not active any more.
    Remove(&'a Arc<dyn LoggedItem>),
}

impl ActiveList {
    fn insert(&mut self, item: &Arc<dyn LoggedItem>, lsn: Lsn, is_intent: bool) {
        self.remove(item);
        let place = ActivePlace { lsn, order: self.next_order };
        self.next_order += 1;
        *item.state().active.lock() = Some(place);
        self.intents += usize::from(is_intent);
        self.items.insert(place, ActiveItem { item: item.clone(), is_intent });
    }

    fn remove(&mut self, item: &Arc<dyn LoggedItem>) {
        let place = item.state().active.lock().take();
        if let Some(removed) = place.and_then(|place| self.items.remove(&place)) {
            self.intents -= usize::from(removed.is_intent);
        }
    }
}
