//! Blocks whose last change is committed, and not durable. A crash would bring back what they were
//! before, so for a while they must not be used as what they are now.
//!
//! | table | its blocks | until they are settled |
//! |---|---|---|
//! | busy | were freed | no file gets them |
//! | given up | a file has lost them, and another one has them | no data is written to them |
//!
//! Blocks 10..20 were freed in context 5. Two of them went to a tree and were freed again in
//! context 7: then 10..14 and 16..20 are busy until context 5 is durable, and 14..16 until 7 is.

use std::collections::BTreeMap;

use offshoot_kit::sync::Mutex;
use offshoot_xfs_format::{AgBlock, AgNumber};

use crate::log::LogSequence;

/// Blocks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AgExtent {
    pub(crate) start: AgBlock,
    pub(crate) count: u32,
}

impl AgExtent {
    pub(crate) fn new(start: u32, count: u32) -> Self {
        Self { start: AgBlock(start), count }
    }

    /// The block behind it.
    pub(crate) fn end(self) -> u32 {
        self.start.0.saturating_add(self.count)
    }
}

/// Extents of committed transactions that are not durable.
#[derive(Debug, Default)]
pub(super) struct UnsettledExtents(Mutex<UnsettledTable>);

/// What the table has of an extent: the block behind it, and the context of its change.
#[derive(Clone, Copy, Debug)]
struct UnsettledExtent {
    end: u32,
    sequence: LogSequence,
}

#[derive(Debug, Default)]
struct UnsettledTable {
    /// By group and first block. No two overlap.
    extents: BTreeMap<(AgNumber, u32), UnsettledExtent>,
    /// The keys of each context. What they lead to may have a later one by now.
    keys: BTreeMap<LogSequence, Vec<(AgNumber, u32)>>,
    /// The extents that calls have looked at.
    #[cfg(test)]
    looked_at: usize,
}

impl UnsettledExtents {
    /// Adds what a transaction has changed, which was committed to the context `sequence`, when all
    /// contexts up to `durable` are on the device.
    pub(super) fn add(
        &self,
        changed: &[(AgNumber, AgExtent)],
        sequence: LogSequence,
        durable: LogSequence,
    ) {
        if changed.is_empty() {
            return;
        }
        let mut table = self.0.lock();
        table.settle(durable);
        for (ag, extent) in changed {
            table.add(*ag, *extent, sequence);
        }
    }

    /// The extents with a block of `extent`, ascending.
    pub(super) fn overlapping(
        &self,
        ag: AgNumber,
        extent: AgExtent,
        durable: LogSequence,
    ) -> Vec<AgExtent> {
        let mut table = self.0.lock();
        table.settle(durable);
        let found = table.overlapping(ag, extent).into_iter();
        found.map(|(start, found)| AgExtent::new(start, found.end.saturating_sub(start))).collect()
    }

    /// The last context that changed a block of `extent`.
    pub(super) fn last_change(
        &self,
        ag: AgNumber,
        extent: AgExtent,
        durable: LogSequence,
    ) -> Option<LogSequence> {
        let mut table = self.0.lock();
        table.settle(durable);
        table.overlapping(ag, extent).into_iter().map(|(_, found)| found.sequence).max()
    }

    /// Whether a group has such an extent.
    pub(super) fn has_any(&self, ag: AgNumber, durable: LogSequence) -> bool {
        let mut table = self.0.lock();
        table.settle(durable);
        table.extents.range((ag, 0)..=(ag, u32::MAX)).next().is_some()
    }
}

impl UnsettledTable {
    /// Removes what is durable. Each extent is looked at once for that.
    fn settle(&mut self, durable: LogSequence) {
        while let Some(oldest) = self.keys.first_entry().filter(|entry| *entry.key() <= durable) {
            for key in oldest.remove() {
                #[cfg(test)]
                {
                    self.looked_at += 1;
                }
                if self.extents.get(&key).is_some_and(|found| found.sequence <= durable) {
                    self.extents.remove(&key);
                }
            }
        }
    }

    /// Adds an extent, in the place of what earlier contexts have changed of it.
    fn add(&mut self, ag: AgNumber, extent: AgExtent, sequence: LogSequence) {
        let (start, end) = (extent.start.0, extent.end());
        for (first, old) in self.overlapping(ag, extent) {
            self.extents.remove(&(ag, first));
            if first < start {
                self.put((ag, first), UnsettledExtent { end: start, ..old });
            }
            if old.end > end {
                self.put((ag, end), old);
            }
        }
        self.put((ag, start), UnsettledExtent { end, sequence });
    }

    fn put(&mut self, key: (AgNumber, u32), extent: UnsettledExtent) {
        self.keys.entry(extent.sequence).or_default().push(key);
        self.extents.insert(key, extent);
    }

    /// The extents with a block of `extent`, each with its first block.
    fn overlapping(&mut self, ag: AgNumber, extent: AgExtent) -> Vec<(u32, UnsettledExtent)> {
        let (start, end) = (extent.start.0, extent.end());
        let before = self.extents.range((ag, 0)..(ag, start)).next_back();
        let before = before.filter(|(_, found)| found.end > start);
        let first = before.map_or(start, |((_, first), _)| *first);
        let inside = self.extents.range((ag, first)..(ag, end));
        let found: Vec<_> = inside.map(|((_, first), found)| (*first, *found)).collect();
        #[cfg(test)]
        {
            self.looked_at += 1 + found.len();
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AG: AgNumber = AgNumber(1);

    fn starts(table: &UnsettledExtents, start: u32, count: u32) -> Vec<(u32, u32)> {
        let found = table.overlapping(AG, AgExtent::new(start, count), LogSequence(0));
        found.into_iter().map(|found| (found.start.0, found.count)).collect()
    }

    /// As in the example of the module.
    #[test]
    fn what_is_freed_again_is_busy_for_longer() {
        let table = UnsettledExtents::default();
        let (none, five, seven) = (LogSequence(0), LogSequence(5), LogSequence(7));
        table.add(&[(AG, AgExtent::new(10, 10))], five, none);
        table.add(&[(AG, AgExtent::new(14, 2))], seven, none);
        assert_eq!(starts(&table, 0, 100), [(10, 4), (14, 2), (16, 4)]);
        assert_eq!(starts(&table, 12, 1), [(10, 4)]);
        assert_eq!(starts(&table, 20, 5), []);
        assert_eq!(table.last_change(AG, AgExtent::new(10, 4), none), Some(five));
        assert_eq!(table.last_change(AG, AgExtent::new(13, 4), none), Some(seven));
        assert!(!table.has_any(AgNumber(0), none) && !table.has_any(AgNumber(2), none));
        assert_eq!(table.last_change(AG, AgExtent::new(0, 100), five), Some(seven));
        assert_eq!(starts(&table, 0, 100), [(14, 2)]);
        assert!(!table.has_any(AG, seven));
    }

    #[test]
    fn a_search_looks_at_what_it_finds_and_no_more() {
        let table = UnsettledExtents::default();
        let all: Vec<_> = (0..10_000).map(|at| (AG, AgExtent::new(at * 4, 2))).collect();
        table.add(&all, LogSequence(1), LogSequence(0));
        let before = table.0.lock().looked_at;
        assert_eq!(starts(&table, 20_001, 8), [(20_000, 2), (20_004, 2), (20_008, 2)]);
        assert!(table.has_any(AG, LogSequence(0)));
        let looked_at = table.0.lock().looked_at - before;
        assert!(looked_at <= 4, "{looked_at} extents");
        // What becomes durable is looked at once more in all.
        (0..100).for_each(|_| assert!(!table.has_any(AG, LogSequence(1))));
        let looked_at = table.0.lock().looked_at - before;
        assert!(looked_at <= 4 + all.len(), "{looked_at} extents");
    }
}
