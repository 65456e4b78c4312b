//! The tree log: the changes that fsync wrote since the last commit, and their replay.
//!
//! ```text
//!   superblock.log_root --> log root tree: (TREE_LOG ROOT_ITEM subvolume) --> the log tree of that subvolume
//! ```
//!
//! A log tree holds copies of items of its subvolume, as fsync found them, under their own keys.
//! All blocks of logs belong to the tree TREE_LOG, and have the generation after that of the
//! superblock: 8 if the superblock has 7. The extent tree has neither these blocks nor the data
//! extents that only they refer to.
//!
//! | item | meaning |
//! |---|---|
//! | INODE_ITEM | the inode; with generation 0 it says only that the inode exists, and perhaps its length |
//! | XATTR_ITEM | attributes: an inode in the log has these and no others |
//! | INODE_REF, INODE_EXTREF | names: other names in the item with the same key in the subvolume are removed |
//! | DIR_LOG_INDEX | a range of indexes that the log covers: entries in it that the log lacks are removed |
//! | DIR_INDEX | an entry; the item by the hash of the name follows from it |
//! | EXTENT_DATA | the contents of the range of the file |
//! | EXTENT_CSUM | checksums of the data that extents of the log refer to |
//! | DIR_ITEM, DIR_LOG_ITEM | written by old kernels, and ignored: the items by index say the same |
//!
//! # Opening
//!
//! An engine of its own replays a pending log, in one transaction whose commit also removes the log
//! from the superblock (`replay`). Then the volume is opened as usual. After a crash on the way,
//! the log is either still pending or completely replayed. The kernel writes a log into primary
//! superblocks only. So before that commit, replay makes the copies of the superblocks name the log
//! too: then a torn write of a primary loses nothing.
//!
//! When the volume is opened for reading, that engine and the next one work on devices in memory
//! that lie over the real ones. So there is one replay for both ways of opening. It may change at
//! most [`EngineOptions::replay_bytes`] of these devices. In memory it need not maintain what only
//! later writers use, such as the numbers of quotas. If a member is missing, it is enough that
//! other copies exist. A volume that the engine cannot write at all, such as one with RAID5, can
//! only be read without its log.
//!
//! # Writing
//!
//! With [`EngineOptions::has_tree_log`] off, fsync is a commit. Otherwise `running` holds the log
//! trees of the running transaction and says how they get to the devices. `fsync` is the entry;
//! `record`, `data` and `directory` decide what is logged, `datasync` what need not be.
//! `transaction/notes` remembers what changed.
//!
//! # Replaying
//!
//! `space` keeps the allocator away from the blocks and extents of the log. `replay` has the order
//! of the passes, which `inodes`, `names` and `extents` carry out. `zero` throws a log away.
//!
//! [`EngineOptions::replay_bytes`]: crate::EngineOptions::replay_bytes
//! [`EngineOptions::has_tree_log`]: crate::EngineOptions::has_tree_log

mod data;
mod datasync;
mod directory;
mod extents;
mod failure;
mod fsync;
mod heads;
mod inodes;
mod names;
mod record;
mod replay;
mod running;
mod space;
#[cfg(test)]
mod tests;
mod zero;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};

use crate::SubvolumeId;
use crate::inode::Rooms;
use crate::storage::malformed;
use crate::tree::{Cursor, TreeRoot};
pub(crate) use failure::in_volume;
pub(crate) use fsync::{FsyncScope, committed_root, fsync};
pub(crate) use replay::replay;
pub(crate) use running::{LogTrees, RunningLog};
pub use zero::LostLog;
pub(crate) use zero::zero_log;

/// The log of one subvolume.
#[derive(Clone, Copy, Debug)]
pub struct LogTree {
    /// The subvolume whose changes it holds.
    pub subvolume: SubvolumeId,
    /// The log tree.
    pub root: TreeRoot,
}

/// The generation that all blocks of a log have.
fn log_generation(volume: &Rooms) -> Generation {
    Generation(volume.superblock().generation.0.saturating_add(1))
}

/// The tree of log trees, if a log is pending.
fn log_root_tree(volume: &Rooms) -> Option<TreeRoot> {
    let item = &volume.superblock().item;
    volume.superblock().has_pending_log().then(|| TreeRoot {
        id: TreeId::TREE_LOG,
        logical: Logical(item.log_root.get()),
        level: item.log_root_level,
        generation: log_generation(volume),
    })
}

/// As [`Engine::log_trees`](crate::Engine::log_trees).
pub(crate) fn log_trees(volume: &Rooms) -> Result<Vec<LogTree>> {
    let Some(root) = log_root_tree(volume) else { return Ok(Vec::new()) };
    let mut logs = Vec::new();
    let mut cursor = Cursor::seek(volume, root, offshoot_btrfs_format::Key::MIN)?;
    while let Some((key, data)) = cursor.item() {
        let subvolume = TreeId(key.offset);
        let is_log = key.item_type == ItemType::ROOT_ITEM
            && key.objectid == TreeId::TREE_LOG.0
            && subvolume.is_subvolume();
        if !is_log {
            let problem = format!("an item {key}, which is no log of a subvolume");
            return Err(Error::corrupt_at(Structure::TreeOfLogTrees, root.logical.0, problem));
        }
        let item = RootItem::parse(data).map_err(malformed)?;
        let (logical, generation) = (item.logical(), item.generation());
        if generation != log_generation(volume) {
            let expected = log_generation(volume);
            let problem = format!("generation {expected} expected, {generation} found");
            return Err(Error::corrupt_at(Structure::RootOfALogTree, logical.0, problem));
        }
        let root = TreeRoot { id: TreeId::TREE_LOG, logical, level: item.level, generation };
        logs.push(LogTree { subvolume, root });
        cursor.advance()?;
    }
    Ok(logs)
}
