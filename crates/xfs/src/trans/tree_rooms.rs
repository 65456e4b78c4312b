//! Free blocks of groups that chains may still need, for trees of the group that grow. A chain that
//! found none in the middle would end all writing, so it claims them before it begins.
//!
//! ```text
//! group with 20 free blocks     chain 1 claims 12     8 are left: chain 2, which needs 12, waits
//! ```

use std::collections::HashMap;
use std::time::Duration;

use offshoot_xfs_format::AgNumber;
use parking_lot::{Condvar, Mutex};

/// The blocks that chains have claimed, by group.
#[derive(Debug, Default)]
pub(crate) struct TreeRooms {
    claimed: Mutex<HashMap<AgNumber, u64>>,
    released: Condvar,
}

impl TreeRooms {
    /// The blocks of a group that chains have claimed.
    pub(crate) fn claimed(&self, ag: AgNumber) -> u64 {
        self.claimed.lock().get(&ag).copied().unwrap_or(0)
    }

    /// Claims so many blocks of a group with `free` ones, if other chains leave it so many. Returns
    /// whether they do.
    pub(super) fn claim(&self, ag: AgNumber, blocks: u64, free: u64) -> bool {
        let mut all = self.claimed.lock();
        let claimed = all.entry(ag).or_default();
        let is_there = claimed.saturating_add(blocks) <= free;
        if is_there {
            *claimed += blocks;
        }
        is_there
    }

    /// Ends a claim.
    pub(super) fn release(&self, ag: AgNumber, blocks: u64) {
        let mut all = self.claimed.lock();
        if let Some(claimed) = all.get_mut(&ag) {
            *claimed = claimed.saturating_sub(blocks);
        }
        drop(all);
        self.released.notify_all();
    }

    /// Waits until a chain ends its claim on a group, for so long at most.
    pub(super) fn wait(&self, ag: AgNumber, longest: Duration) {
        let mut all = self.claimed.lock();
        if all.get(&ag).is_some_and(|claimed| *claimed > 0) {
            self.released.wait_for(&mut all, longest);
        }
    }
}
