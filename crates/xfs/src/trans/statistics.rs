//! What commits cost.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use offshoot_kit::statistics;

statistics! {
    /// What commits of transactions did since the volume was opened.
    CommitStatistics, CommitCounters, "commit_":
    /// Commits that changed something.
    commits,
    /// Buffers that they changed.
    buffers,
    /// Inodes that they changed, each of which was encoded once.
    inodes,
    /// Blocks of directories and of attributes that were proved whole before the log got them.
    proofs,
    /// Those that commits proved before: their changes followed what the volume says of itself.
    early_proofs,
    /// Checksums that were computed: of buffers and inodes on their way home.
    seals,
}

/// Counts.
pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Relaxed);
}
