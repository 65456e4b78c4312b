//! How a volume is opened.

mod mechanisms;
mod rescue;

use std::time::Duration;

use offshoot_btrfs_format::compress::CompressionMethod;
use offshoot_btrfs_format::inode::inode_flags;

pub use mechanisms::Mechanisms;
pub use rescue::{Rescue, RootChoice};

use crate::report::Reporter;

/// How a volume is opened.
#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct EngineOptions {
    /// Whether the volume opens although members are missing.
    pub is_degraded: bool,
    /// Whether a pending tree log is ignored. The volume is then read as of the last commit,
    /// without data that was fsynced after it, and cannot be written.
    pub is_log_ignored: bool,
    /// How a damaged volume is read.
    pub rescue: Rescue,
    /// The memory that replaying a pending log may take, in bytes. It holds the tree blocks that
    /// replay changes. A volume opened for reading may take as much again, because it keeps the
    /// result in memory instead of writing it.
    pub replay_bytes: u64,
    /// The size of the cache of tree blocks, in bytes. The volume may take half as much again for
    /// decoded extents of which readers want parts. If it is open for writing, it may take another
    /// half to remember the names in new directories.
    pub cache_bytes: u64,
    /// The callback that gets a [`VolumeReport`](crate::VolumeReport) of each problem that did not
    /// fail a call.
    pub reporter: Option<Reporter>,
    /// How much may be dirty, in bytes: so much of data, and as much of tree blocks. The volume
    /// starts to write at half of it. At all of it, a thread that wants to change more writes
    /// first.
    pub dirty_bytes: u64,
    /// How files without a compression setting of their own are compressed; `None` for not at all.
    pub compress: Option<Compress>,
    /// How the data of new files is stored.
    pub new_files: NewFiles,
    /// The largest file that is stored inline in its extent item, in bytes; 0 for none. A value
    /// larger than an item can hold counts as the largest possible.
    pub max_inline: u64,
    /// Whether fsync writes the tree log where that is possible, instead of committing. The mount
    /// option `notreelog` of the kernel is the opposite of it.
    pub has_tree_log: bool,
    /// Whether freed space is discarded, as with the mount option `discard` of the kernel. The
    /// thread of the volume does so soon after the commit. Without a `commit_interval` there is no
    /// thread, and the committing thread does it.
    pub is_discarding: bool,
    /// Whether files are written back before each commit, as with the mount option `flushoncommit`
    /// of the kernel. A commit for want of room, or because a thread has changed too many tree
    /// blocks, leaves out files that another thread is changing.
    pub flushes_on_commit: bool,
    /// How often a thread of the volume commits by itself; `None` for never, and without a thread.
    /// An interval below 1 ms counts as 1 ms.
    pub commit_interval: Option<Duration>,
    /// Whether the calls of one thread, without a `commit_interval`, make the same bytes each time
    /// of a volume that has the same bytes before. Then the UUIDs of new subvolumes and snapshots
    /// follow from that of the volume and from what is made, and a commit changes trees on one
    /// thread alone.
    pub is_reproducible: bool,
    /// What is switched off or done in another way, to be measured.
    #[doc(hidden)]
    pub mechanisms: Mechanisms,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            is_degraded: false,
            is_log_ignored: false,
            rescue: Rescue::default(),
            replay_bytes: 1 << 30,
            cache_bytes: 64 << 20,
            reporter: None,
            dirty_bytes: 64 << 20,
            compress: None,
            new_files: NewFiles::default(),
            max_inline: 2048,
            has_tree_log: true,
            is_discarding: false,
            flushes_on_commit: false,
            commit_interval: Some(Duration::from_secs(30)),
            is_reproducible: false,
            mechanisms: Mechanisms::default(),
        }
    }
}

/// How an open volume compresses new data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compress {
    /// The method for files without a compression setting of their own.
    pub method: CompressionMethod,
    /// Whether files with the flag NOCOMPRESS are compressed too. If so, no file gets that flag.
    pub is_forced: bool,
}

/// How the data of new files is stored. In a directory with the flag NODATACOW new files get that
/// flag whatever this option says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NewFiles {
    /// An overwrite goes to a new place (copy on write), and all data has checksums.
    #[default]
    Copied,
    /// As `Copied`, but without checksums, and without compression, which needs checksums.
    WithoutChecksums,
    /// Data is overwritten in place, if the extent is not shared. There are no checksums, because
    /// they could be wrong after a crash.
    InPlace,
}

impl NewFiles {
    /// The flags of a new regular file.
    pub(crate) fn flags(self) -> u64 {
        match self {
            Self::Copied => 0,
            Self::WithoutChecksums => inode_flags::NODATASUM,
            Self::InPlace => inode_flags::NODATACOW | inode_flags::NODATASUM,
        }
    }
}
