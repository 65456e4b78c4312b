//! Busy extents: blocks that were freed, and whose freeing is not durable. A crash would bring
//! their old owner back, so no file may get them before.

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

/// What committed transactions have freed, by group and start.
#[derive(Debug, Default)]
pub(super) struct BusyExtents {
    extents: Mutex<BTreeMap<(AgNumber, AgExtent), LogSequence>>,
}

impl BusyExtents {
    /// Adds what a transaction has freed, which was committed to this context of the log.
    pub(super) fn add(&self, freed: &[(AgNumber, AgExtent)], sequence: LogSequence) {
        let mut extents = self.extents.lock();
        extents.extend(freed.iter().map(|extent| (*extent, sequence)));
    }

    /// The busy extents of a group, when all contexts up to `durable` are on the device.
    pub(super) fn of(&self, ag: AgNumber, durable: LogSequence) -> Vec<AgExtent> {
        let mut extents = self.extents.lock();
        extents.retain(|_, sequence| *sequence > durable);
        let first = (ag, AgExtent::new(0, 0));
        let last = (ag, AgExtent::new(u32::MAX, u32::MAX));
        extents.range(first..=last).map(|((_, extent), _)| *extent).collect()
    }
}
