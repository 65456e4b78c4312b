//! The btrfs engine: real btrfs volumes, without root and without the kernel.
//!
//! A [`BtrfsVolume`] is opened from its devices, and gives access to an [`Engine`]. A
//! [`Filesystem`] is one of its subvolumes, as a mount would show it. It has the
//! [`FileSystem`](offshoot_vfs::FileSystem) trait for reading and, in a volume that was opened for
//! writing, the [`FileSystemMut`](offshoot_vfs::FileSystemMut) trait. Many threads may use both at
//! once. [`mkfs`] makes new volumes.
//!
//! Changes are on the devices when `sync` or `fsync` has returned. A volume that is dropped before
//! that keeps its last commit, as after a crash.
//!
//! The modules are the rooms of the engine, from the top down. A room calls only the rooms below
//! it, which the test command checks.
//!
//! | module | what it does |
//! |---|---|
//! | `filesystem` | an open volume, as its user holds it; the `vfs` traits over a subvolume and those nested in it |
//! | `mkfs` | new volumes |
//! | `check` | compares all that structures say about each other, also in what does not open |
//! | `repair` | makes damaged structures anew that follow from others, and undoes that |
//! | `scrub` | reads and verifies every copy of a volume, and repairs the bad ones |
//! | `engine` | opens a volume; holds the state of each room between calls |
//! | `upkeep` | decides when to commit; makes room for waiting threads, allocates and removes chunks, discards |
//! | `log` | what fsync has written since the last commit, and its replay when a volume is opened |
//! | `subvolume` | subvolumes and how they are nested |
//! | `inode`, `data` | attributes, names, xattrs, write-back; buffered data, file extents, checksums, decompression |
//! | `delayed` | items of names and inodes, gathered until they go to a tree a leaf at a time |
//! | `transaction` | transactions, delayed references, commits; the numbers of quota groups |
//! | `space` | block groups, free space, reservations |
//! | `rescue` | older roots, and what is read of damaged trees |
//! | `options` | how a volume is opened |
//! | `tree` | search in a tree, and changes of a tree by many threads |
//! | `block` | verified tree blocks and the cache of them |
//! | `storage` | members, superblocks, chunk map; reads around bad copies, writes all copies |
//! | `events` | the targets of `tracing` events |
//! | `report`, `stats` | problems that did not fail a call; counters |

// Code that unit and integration tests share names the crate by its name.
#[cfg(test)]
extern crate self as offshoot_btrfs;

#[cfg(feature = "measure")]
pub mod bench;
mod block;
mod check;
mod data;
mod delayed;
mod engine;
mod events;
mod filesystem;
mod inode;
mod log;
mod mkfs;
mod options;
mod repair;
mod report;
mod rescue;
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
mod upkeep;

pub use block::TreeBlock;
pub use check::{
    BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, CheckCounts, CheckEvent, CheckOptions,
    CheckOutcome, CheckWatch, DataUser, FindingSeverity, check_btrfs,
};
pub use engine::Engine;
pub use events::EVENT_TARGETS;
pub use filesystem::sharing::{ExtentUse, SharingCache};
pub use filesystem::{BtrfsVolume, DeletedFiles, DeletedSearch, Filesystem, RecoveredFiles};
pub use inode::Rooms;
pub use log::{LogTree, LostLog};
pub use mkfs::{MkfsFeatures, MkfsOptions, check_mkfs, mkfs};
// Programs have no use for this: only the feature `measure` has methods that change it.
pub use offshoot_kit::counter::Counter;
#[doc(hidden)]
pub use options::Mechanisms;
pub use options::{Compress, EngineOptions, NewFiles, Rescue, RootChoice};
pub use repair::{
    AcceptedData, AcceptedRange, CutOff, CutOffBlock, CutOffFile, FileOfAcceptedData,
    FileWithChanges, FoundVolume, ItemChange, ItemChanges, RepairClass, RepairOptions,
    RepairOutcome, ScanOptions, ScanOutcome, SubvolumeName, confirm_repair, find_volume,
    repair_btrfs, undo_repair,
};
pub use report::{LostItems, Reporter, VolumeReport};
pub use rescue::{FoundRoot, RootSource};
pub use scrub::{
    ScrubCounts, ScrubEvent, ScrubFinding, ScrubOptions, ScrubOutcome, ScrubOwner, ScrubWatch,
};
pub use space::{BUCKETS, FlushCount, FlushState, Histogram, KindStats, SpaceKind, SpaceStats};
pub use stats::Stats;
pub use storage::Member;
pub use subvolume::{SubvolumeInfo, Subvolumes};
pub use transaction::Base;
pub use tree::{Cursor, TreeRoot};
#[doc(hidden)]
pub use tree::{Latching, UnlockTime};
pub use upkeep::Resized;

// The rooms name these by `crate::`, like the lowest rooms.
use offshoot_kit::{cores, counter, ranges, shared, spread, sync};

/// The id of a subvolume: the id of its tree.
pub type SubvolumeId = offshoot_btrfs_format::TreeId;
