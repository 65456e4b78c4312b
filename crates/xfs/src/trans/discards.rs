//! Free extents that are being discarded. Nothing is written to them meanwhile, so no transaction
//! takes them: a discard that comes behind a write would take what was written.
//!
//! No lock of a group is held while the device discards, which may take long.

use std::collections::BTreeSet;

use offshoot_xfs_format::AgNumber;
use parking_lot::{Condvar, Mutex};

use super::AgExtent;

/// The extents that are being discarded. No two overlap.
#[derive(Debug, Default)]
pub(crate) struct DiscardedExtents {
    extents: Mutex<BTreeSet<(AgNumber, AgExtent)>>,
    ended: Condvar,
}

impl DiscardedExtents {
    /// Keeps free extents of a group from being taken until the result is dropped. The caller has
    /// the AGF, and has found them free.
    pub(super) fn begin(&self, ag: AgNumber, extents: Vec<AgExtent>) -> DiscardGuard<'_> {
        let mut all = self.extents.lock();
        let free = |extent: &AgExtent| all.insert((ag, *extent));
        // Another thread may discard the same ones.
        let extents = extents.into_iter().filter(free).collect();
        drop(all);
        DiscardGuard { table: self, ag, extents }
    }

    /// The extents with a block of `extent`.
    pub(super) fn overlapping(&self, ag: AgNumber, extent: AgExtent) -> Vec<AgExtent> {
        let all = self.extents.lock();
        let before = (ag, AgExtent::new(extent.end(), 0));
        let of_group = all.range(..before).rev().take_while(|(group, _)| *group == ag);
        let found = of_group.map(|(_, found)| *found);
        found.take_while(|found| found.end() > extent.start.0).collect()
    }

    /// Whether something of a group is being discarded.
    pub(super) fn has_any(&self, ag: AgNumber) -> bool {
        has_any(&self.extents.lock(), ag)
    }

    /// Waits until nothing of a group is being discarded.
    pub(super) fn wait(&self, ag: AgNumber) {
        let mut all = self.extents.lock();
        while has_any(&all, ag) {
            self.ended.wait(&mut all);
        }
    }
}

fn has_any(all: &BTreeSet<(AgNumber, AgExtent)>, ag: AgNumber) -> bool {
    let from = (ag, AgExtent::new(0, 0));
    all.range(from..).next().is_some_and(|(group, _)| *group == ag)
}

/// Extents that no transaction takes until this is dropped.
#[derive(Debug)]
pub(crate) struct DiscardGuard<'d> {
    table: &'d DiscardedExtents,
    ag: AgNumber,
    extents: Vec<AgExtent>,
}

impl DiscardGuard<'_> {
    pub(crate) fn extents(&self) -> &[AgExtent] {
        &self.extents
    }
}

impl Drop for DiscardGuard<'_> {
    fn drop(&mut self) {
        let mut all = self.table.extents.lock();
        for extent in &self.extents {
            all.remove(&(self.ag, *extent));
        }
        drop(all);
        self.table.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_that_are_discarded_are_found_by_their_blocks() {
        let (table, ag) = (DiscardedExtents::default(), AgNumber(1));
        let all = vec![AgExtent::new(10, 5), AgExtent::new(20, 5), AgExtent::new(30, 5)];
        let guard = table.begin(ag, all.clone());
        assert_eq!(guard.extents(), all);
        assert_eq!(table.begin(ag, vec![all[1]]).extents(), []);
        let starts = |start, count| {
            let found = table.overlapping(ag, AgExtent::new(start, count));
            found.into_iter().map(|found| found.start.0).collect::<Vec<_>>()
        };
        assert_eq!(starts(0, 100), [30, 20, 10]);
        assert_eq!(starts(14, 7), [20, 10]);
        assert_eq!(starts(15, 5), [0; 0]);
        assert_eq!(table.overlapping(AgNumber(0), all[0]), []);
        assert!(table.has_any(ag) && !table.has_any(AgNumber(2)));
        drop(guard);
        assert_eq!(starts(0, 100), [0; 0]);
        assert!(!table.has_any(ag));
    }
}
