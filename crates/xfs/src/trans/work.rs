//! What transactions count of the work on blocks that a change of names costs.

use std::sync::atomic::Ordering::Relaxed;

use offshoot_kit::statistics;

statistics! {
    /// What transactions did with blocks since the volume was opened.
    BlockWorkStatistics, BlockWorkCounters, "work_":
    /// Bytes of blocks that were copied, to be changed or to be read while others change.
    copied_bytes,
    /// Searches in the trees of hashes of directories and of attributes.
    searches,
    /// Blocks and extents of directories and of attributes that were compared with one that was
    /// looked for.
    compared,
}

/// What one transaction adds to them when it ends.
#[derive(Debug, Default)]
pub(super) struct BlockWork {
    pub(super) copied_bytes: u64,
    pub(super) searches: u64,
    pub(super) compared: u64,
}

impl BlockWorkCounters {
    pub(super) fn add(&self, work: &BlockWork) {
        self.copied_bytes.fetch_add(work.copied_bytes, Relaxed);
        self.searches.fetch_add(work.searches, Relaxed);
        self.compared.fetch_add(work.compared, Relaxed);
    }
}
