//! What a tree keeps for items that are to go into it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::space::{Kept, KeptAs, Purpose, Space};

/// What is reserved for the queued items of a tree.
#[derive(Debug)]
pub(crate) struct Hold {
    account: Mutex<Account>,
    /// What the blocks take that the running transaction has not copied, in bytes.
    pub(crate) uncopied: AtomicU64,
}

/// What items that are queued for a tree have kept.
#[derive(Debug)]
pub(crate) struct Account {
    /// While an operation or a flush is counting, it may be off, below zero even.
    pub(crate) units: i64,
    pub(crate) blocks: i64,
    pub(crate) growth: i64,
    /// What is reserved, of metadata.
    pub(crate) held: Kept,
    /// What of this is counted in the sum of the volume.
    pub(crate) dirties: i64,
    /// Memory that is not counted in that of the volume yet, in bytes.
    pub(crate) uncounted: i64,
}

impl Hold {
    /// The account of a tree whose blocks take this many bytes.
    pub(crate) fn new(used: u64, space: &Arc<Space>) -> Self {
        let held = Kept::none(space, KeptAs::Reserved(Purpose::Metadata));
        let account = Account { units: 0, blocks: 0, growth: 0, held, dirties: 0, uncounted: 0 };
        Self { account: Mutex::new(account), uncopied: AtomicU64::new(used) }
    }

    /// What the items have kept.
    pub(crate) fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock()
    }

    /// The running transaction has copied a block.
    pub(crate) fn copied(&self, node_size: u64) {
        // What was stored may have been too little: the format does not depend on it.
        let less = |bytes: u64| Some(bytes.saturating_sub(node_size));
        let _ = self.uncopied.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// A transaction begins, to which no block of the tree belongs. Nothing is queued.
    pub(crate) fn begin(&self, used: u64) {
        if cfg!(debug_assertions) {
            let Account { units, blocks, growth, held, dirties, uncounted } = &*self.account.lock();
            let all = (units, blocks, growth, &held.bytes(), dirties, uncounted);
            assert_eq!(all, (&0, &0, &0, &0, &0, &0), "something is kept for nothing");
        }
        self.uncopied.store(used, Ordering::Relaxed);
    }

    /// What is reserved, in bytes of metadata.
    #[cfg(test)]
    pub(crate) fn held(&self) -> u64 {
        self.account.lock().held.bytes()
    }

    /// How many units the items have kept.
    #[cfg(test)]
    pub(crate) fn units(&self) -> i64 {
        self.account.lock().units
    }
}
