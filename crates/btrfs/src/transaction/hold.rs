//! The space that a tree holds for its queued items.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::space::{Kept, KeptAs, Purpose, Space};

/// The reservation for the queued items of a tree.
#[derive(Debug)]
pub(crate) struct TreeReservation {
    account: Mutex<QueueAccount>,
    /// The bytes of the blocks that the running transaction has not copied.
    pub(crate) uncopied: AtomicU64,
}

/// The account of the queued items of a tree.
#[derive(Debug)]
pub(crate) struct QueueAccount {
    /// While an operation or a flush counts, the value may be wrong, and even negative.
    pub(crate) units: i64,
    pub(crate) blocks: i64,
    pub(crate) growth: i64,
    /// The reserved metadata.
    pub(crate) held: Kept,
    /// The part that is counted in the sum of the volume.
    pub(crate) dirties: i64,
    /// Bytes of memory that are not counted in the sum of the volume yet.
    pub(crate) uncounted: i64,
}

impl TreeReservation {
    /// The account of a tree whose blocks take this many bytes.
    pub(crate) fn new(used: u64, space: &Arc<Space>) -> Self {
        let held = Kept::none(space, KeptAs::Reserved(Purpose::Metadata));
        let account =
            QueueAccount { units: 0, blocks: 0, growth: 0, held, dirties: 0, uncounted: 0 };
        Self { account: Mutex::new(account), uncopied: AtomicU64::new(used) }
    }

    /// The account of the items.
    pub(crate) fn account(&self) -> MutexGuard<'_, QueueAccount> {
        self.account.lock()
    }

    /// Notes that the running transaction has copied a block.
    pub(crate) fn copied(&self, node_size: u64) {
        // The stored size may have been too small: the format does not depend on it.
        let less = |bytes: u64| Some(bytes.saturating_sub(node_size));
        let _ = self.uncopied.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Begins a transaction, which owns no block of the tree yet. No item is queued.
    pub(crate) fn begin(&self, used: u64) {
        if cfg!(debug_assertions) {
            let QueueAccount { units, blocks, growth, held, dirties, uncounted } =
                &*self.account.lock();
            let all = (units, blocks, growth, &held.bytes(), dirties, uncounted);
            assert_eq!(all, (&0, &0, &0, &0, &0, &0), "something is kept for nothing");
        }
        self.uncopied.store(used, Ordering::Relaxed);
    }

    /// The reserved bytes of metadata.
    #[cfg(test)]
    pub(crate) fn held(&self) -> u64 {
        self.account.lock().held.bytes()
    }

    /// How many units the items hold.
    #[cfg(test)]
    pub(crate) fn units(&self) -> i64 {
        self.account.lock().units
    }
}
