//! The btrfs engine: real btrfs volumes, without root and without the kernel.
//!
//! A [`Volume`] is opened from its devices, and is the user's share in an [`Engine`]; a
//! [`Filesystem`] is one of its subvolumes, seen as a mount would show it, through the
//! [`FileSystem`](offshoot_vfs::FileSystem) trait and, in a volume that was opened for writing,
//! through [`FileSystemMut`](offshoot_vfs::FileSystemMut). Both are used by many threads at once.
//! [`mkfs`] makes new volumes.
//!
//! What is changed is on the devices when `sync` or `fsync` returned. A volume that is
//! dropped before that holds its last commit, as after a crash.
//!
//! The modules are the rooms of the engine, from the top down. A room calls only the ones below it.
//! The test command checks that, but for the arrows that `xtask` lists: they still run up.
//!
//! | module | what it does |
//! |---|---|
//! | `handle` | what a user has of an open volume; the end of its thread |
//! | `mkfs` | new volumes |
//! | `scrub` | reads and verifies every copy of a volume, and repairs the bad ones |
//! | `filesystem` | the `vfs` trait over a subvolume and those nested in it |
//! | `engine` | opens a volume; holds what the rooms keep between calls |
//! | `log` | what fsync wrote since the last commit, and its replay when a volume is opened |
//! | `subvolume` | which subvolumes there are and how they hold each other |
//! | `inode`, `data` | attributes, names, xattrs, write-back; buffered data, file extents, checksums, decompression |
//! | `delayed` | items of the namespace, gathered until they go to a tree by the leaf |
//! | `quota` | what the groups of quotas use |
//! | `transaction` | what changes together, delayed references, commits |
//! | `space` | block groups, free space, reservations, chunks that come and go |
//! | `tree` | search in a tree, and changes of it by many threads |
//! | `block` | verified tree blocks and the cache of them |
//! | `storage` | members, superblocks, chunk map; reads around bad copies, writes all copies |
//! | `report` | what a caller is told beside results |

// What tests of both kinds share calls the crate by its name.
#[cfg(test)]
extern crate self as offshoot_btrfs;

#[cfg(feature = "bench")]
pub mod bench;
mod block;
mod data;
mod delayed;
mod engine;
mod filesystem;
mod handle;
mod inode;
mod log;
mod mkfs;
mod quota;
mod report;
mod scrub;
#[cfg(test)]
#[path = "../tests/shared/shown.rs"]
mod shown;
mod space;
mod stats;
mod storage;
mod subvolume;
#[cfg(test)]
mod test_volumes;
mod transaction;
mod tree;

pub use block::TreeBlock;
pub use engine::{Engine, OpenOptions};
pub use filesystem::Filesystem;
pub use filesystem::sharing::{ExtentUse, SharingCache};
pub use handle::Volume;
pub use inode::compression::Compress;
pub use inode::create::NewFiles;
pub use log::{LogFailure, LogTree, LostLog};
pub use mkfs::{MkfsFeatures, MkfsOptions, Occupant, mkfs, occupant};
pub use report::{Report, Reporter};
pub use scrub::{
    ScrubCounts, ScrubEvent, ScrubFinding, ScrubOptions, ScrubOutcome, ScrubOwner, ScrubWatch,
};
pub use space::{BUCKETS, FlushCount, FlushState, Histogram, KindStats, SpaceKind, SpaceStats};
pub use stats::{Counter, Stats};
pub use storage::Member;
pub use subvolume::{SubvolumeInfo, Subvolumes};
pub use tree::{Cursor, Latching, TreeRoot, Unlock};

// The rooms call these by `crate::`, as if they were the lowest ones.
use offshoot_kit::{cores, counter, sync};

/// The id of a subvolume: the id of its tree.
pub type SubvolumeId = offshoot_btrfs_format::TreeId;
