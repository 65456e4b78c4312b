//! What a tree keeps for items that are to go into it.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// What is reserved for the queued items of a tree.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    account: Mutex<Account>,
    /// What the blocks take that the running transaction has not copied, in bytes.
    pub(crate) uncopied: AtomicU64,
}

/// What items that are queued for a tree have kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// While an operation or a flush is counting, it may be off, below zero even.
    pub(crate) units: i64,
    pub(crate) blocks: i64,
    pub(crate) growth: i64,
    /// What is reserved, in bytes of metadata.
    pub(crate) held: u64,
    /// What of this is counted in the sum of the volume.
    pub(crate) dirties: i64,
    /// Memory that is not counted in that of the volume yet, in bytes.
    pub(crate) uncounted: i64,
}

impl Hold {
    /// The account of a tree whose blocks take this many bytes.
    pub(crate) fn new(used: u64) -> Self {
        Self { account: Mutex::default(), uncopied: AtomicU64::new(used) }
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
            let account = self.account.lock();
            assert_eq!(*account, Account::default(), "something is kept for nothing");
        }
        self.uncopied.store(used, Ordering::Relaxed);
    }

    /// What is reserved, in bytes of metadata.
    #[cfg(test)]
    pub(crate) fn held(&self) -> u64 {
        self.account.lock().held
    }

    /// How many units the items have kept.
    #[cfg(test)]
    pub(crate) fn units(&self) -> i64 {
        self.account.lock().units
    }
}
