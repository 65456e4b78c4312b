//! What transactions count.

use offshoot_kit::counter::count;
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

/// What one transaction adds to [`BlockWorkCounters`] when it ends.
#[derive(Debug, Default)]
pub(super) struct BlockWork {
    pub(super) copied_bytes: u64,
    pub(super) searches: u64,
    pub(super) compared: u64,
}

impl BlockWorkCounters {
    pub(super) fn add(&self, work: &BlockWork) {
        count(&self.copied_bytes, work.copied_bytes);
        count(&self.searches, work.searches);
        count(&self.compared, work.compared);
    }
}
