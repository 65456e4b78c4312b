//! How a volume is opened.

use std::time::Duration;

use crate::report::XfsReporter;

/// How a volume is opened.
#[derive(Clone)]
pub struct XfsOptions {
    /// Whether the log is ignored. The volume is then read as its blocks are. If the volume was
    /// not unmounted, these may be older than what the log holds, and may contradict each other.
    pub is_log_ignored: bool,
    /// The size of the cache of metadata blocks, in bytes. The volume may take a quarter as much
    /// again for inodes, and a quarter for what it knows of the directories in directories.
    pub cache_bytes: u64,
    /// The most memory that the replay of a log may take for blocks that are changed in memory,
    /// when the volume is read, and as much again for what it knows of the log. A log that needs
    /// more is not replayed.
    pub replay_bytes: u64,
    /// The bytes of files that may be in memory and not on the device, when the volume is open for
    /// writing. When half of them are used, a thread writes them back, unless `sync_interval` is
    /// `None`; when all are used, the thread that writes does.
    pub dirty_bytes: u64,
    /// The sizes of the vectors into which commits format what changed are rounded up to multiples
    /// of this, so that a buffer that changes more with each commit gets few of them. 128, the size
    /// of a chunk, rounds nothing.
    pub shadow_round_bytes: usize,
    /// How often threads make changes durable, when the volume is open for writing: those of names
    /// and attributes so often, and data a sixth of that later at most. When there were none, they
    /// write everything in its place. `None` for no such threads: changes are durable when they are
    /// synced, and when the log or memory needs their room.
    pub sync_interval: Option<Duration>,
    /// Whether each commit proves all blocks of directories and attributes that it changes, and not
    /// only those whose changes follow what a volume says of itself. The log proves all of them
    /// before it writes them; an error that it finds ends all writing. Builds with debug assertions
    /// prove all by default.
    pub proves_commits: bool,
    /// Whether the log is written only at points that calls decide, and its transaction ids follow
    /// from where it begins. Then the calls of one thread, without a `sync_interval`, make the same
    /// bytes each time of a volume that has the same bytes before.
    pub is_reproducible: bool,
    /// The callback that gets an [`XfsReport`](crate::XfsReport) of each problem that did not fail
    /// a call.
    pub reporter: Option<XfsReporter>,
}

impl Default for XfsOptions {
    fn default() -> Self {
        Self {
            is_log_ignored: false,
            cache_bytes: 64 << 20,
            replay_bytes: 1 << 30,
            dirty_bytes: 64 << 20,
            shadow_round_bytes: 512,
            sync_interval: Some(Duration::from_secs(30)),
            proves_commits: cfg!(debug_assertions),
            is_reproducible: false,
            reporter: None,
        }
    }
}
