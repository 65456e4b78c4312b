//! Free blocks that are promised to data which is only in memory.
//!
//! The promise of a file is raised when data is buffered. The transactions of its write-back borrow
//! from it, and give back what they do not take:
//!
//! ```text
//! promise   40          40 - 30          40 - 8
//! transaction           borrows 30       takes 8, gives back 22
//! ```

use std::sync::Arc;

use offshoot_kit::sync::Mutex;
use offshoot_vfs::Result;

use super::counters::VolumeCounters;
use super::{SpaceClaim, XfsTransactions};

/// Free blocks that are promised, and that no transaction has borrowed. Dropping it ends the
/// promise.
#[derive(Debug)]
pub(crate) struct BlockPromise {
    counters: Arc<VolumeCounters>,
    blocks: Mutex<u64>,
}

impl BlockPromise {
    /// A promise of no block yet.
    pub(crate) fn none(transactions: &XfsTransactions) -> Arc<Self> {
        Arc::new(Self { counters: transactions.counters.clone(), blocks: Mutex::new(0) })
    }

    /// Promises more blocks.
    ///
    /// # Errors
    /// `ENOSPC` when too few are free that files may have.
    pub(crate) fn raise(&self, more: u64) -> Result<()> {
        self.counters.promise(more, SpaceClaim::Files)?;
        *self.blocks.lock() += more;
        Ok(())
    }

    /// Brings it back to `blocks` after a write-back that failed has lost some of it: as near as
    /// the free blocks allow, with those of the reserve.
    pub(crate) fn restore(&self, blocks: u64) {
        let mut now = self.blocks.lock();
        let missing = blocks.saturating_sub(*now);
        *now += self.counters.promise_most(missing, SpaceClaim::Reserve);
    }

    /// Gives back what it has above `most`.
    pub(crate) fn lower_to(&self, most: u64) {
        let mut now = self.blocks.lock();
        let above = now.saturating_sub(most);
        *now -= above;
        self.counters.release(above);
    }

    /// Takes up to `most` blocks out, for a transaction.
    pub(super) fn lend(&self, most: u64) -> u64 {
        let mut now = self.blocks.lock();
        let lent = most.min(*now);
        *now -= lent;
        lent
    }

    /// Takes back what a transaction has not used.
    pub(super) fn take_back(&self, blocks: u64) {
        *self.blocks.lock() += blocks;
    }
}

impl Drop for BlockPromise {
    fn drop(&mut self) {
        self.lower_to(0);
    }
}
