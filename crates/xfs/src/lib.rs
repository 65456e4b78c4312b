//! The XFS engine: real XFS volumes, without root and without the kernel.
//!
//! An [`XfsVolume`] is opened from its device and read through the
//! [`FileSystem`](offshoot_vfs::FileSystem) trait, by many threads at once. Opened by
//! [`XfsVolume::open_writable`], its files are changed through
//! [`FileSystemMut`](offshoot_vfs::FileSystemMut); otherwise those that
//! [`Volume::files`](offshoot_vfs::Volume::files) gives refuse every change.
//! [`XfsVolume::recover`] brings the log of a volume that was not unmounted to disk. [`mkfs_xfs`]
//! makes an empty one.
//!
//! The modules are the rooms of the engine, from the top down. A room calls only the rooms below
//! it.
//!
//! | module | what it does |
//! |---|---|
//! | `rescue` | throws logs away |
//! | `mkfs` | makes volumes |
//! | `check` | compares everything that structures say about each other |
//! | `filesystem` | an open volume behind the `vfs` traits |
//! | `live` | a volume that is written: what the calls that change it do |
//! | `volume` | opens: superblock, obstacles, the state of the log |
//! | `recover` | finds and replays the log |
//! | `names` | files are made, linked, moved and removed; inodes without names are freed |
//! | `buffered` | data of files that is only in memory, and its write-back |
//! | `dir`, `symlink`, `data` | names, and changes of them; targets of links, contents |
//! | `file` | changes of the contents and the sizes of files |
//! | `defer` | work that later transactions do, with intents in the log |
//! | `attr` | extended attributes, and changes of them |
//! | `da`, `remote` | trees of hashes, and changes to them; values in blocks of their own |
//! | `inode` | inodes and their forks |
//! | `group` | counters of groups, which inodes are in use, and changes of both |
//! | `trans` | transactions: changes that happen as a whole or not at all |
//! | `btree` | a cursor over the trees, and changes to them |
//! | `log` | the log: its ring, and delayed logging of what transactions change |
//! | `buffer` | verified blocks and the cache of them; all reads of the device |
//! | `options`, `report` | how a volume is opened; problems that did not fail a call |

mod attr;
mod btree;
mod buffer;
mod buffered;
mod check;
mod da;
mod data;
mod defer;
mod dir;
mod file;
mod filesystem;
mod group;
mod grow;
mod inode;
mod live;
mod log;
mod mkfs;
mod names;
mod options;
mod recover;
mod remote;
mod report;
mod rescue;
mod symlink;
#[cfg(test)]
mod test_volumes;
mod trans;
mod volume;

pub use check::{XfsCheckResult, XfsFinding, XfsFindingCode, XfsFindingPlace, check_xfs};
pub use filesystem::XfsVolume;
pub use grow::{XfsGrowth, grow_xfs};
pub use mkfs::{XfsMkfsFeatures, XfsMkfsOptions, XfsStripe, mkfs_xfs};
pub use offshoot_kit::counter::Counter;
pub use options::XfsOptions;
pub use recover::XfsRecovery;
pub use report::{XFS_EVENT_TARGETS, XfsPending, XfsReport, XfsReporter};
pub use rescue::{XfsLostLog, zero_xfs_log};
pub use volume::XfsLogState;
