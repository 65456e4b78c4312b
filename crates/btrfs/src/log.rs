//! The tree log: what fsync wrote since the last commit, and how it comes into the trees.
//!
//! ```text
//!   superblock.log_root --> log root tree: (TREE_LOG ROOT_ITEM subvolume) --> the log tree of that subvolume
//! ```
//!
//! A log tree holds copies of items of its subvolume, as fsync found them, under their own keys.
//! All blocks of logs are of the tree TREE_LOG and of the transaction behind the one that the
//! superblock has. They stand in no extent tree, and neither do the extents of data that only they
//! refer to.
//!
//! | item | what it says |
//! |---|---|
//! | INODE_ITEM | the inode as it is; with generation 0 only that it exists, and maybe how long it is |
//! | XATTR_ITEM | its attributes: an inode that is in the log has these and no others |
//! | INODE_REF, INODE_EXTREF | names: those that an item of the same key in the subvolume has beside these are gone |
//! | DIR_LOG_INDEX | a range of indexes that the log covers: entries in it that the log does not have are gone |
//! | DIR_INDEX | an entry; the item by the hash of the name follows from it |
//! | EXTENT_DATA | what the range of the file holds |
//! | EXTENT_CSUM | checksums of the data that extents of the log refer to |
//! | DIR_ITEM, DIR_LOG_ITEM | old kernels wrote them beside the items by index, which say the same |
//!
//! # Opening
//!
//! A pending log is replayed by an engine of its own, in one transaction whose commit also says
//! that there is no log any more (`replay`). Then the volume is opened as if nothing had been. A
//! crash on the way finds the log pending, or done. Only primary superblocks tell of a log that the
//! kernel wrote, so before that commit their copies are made to tell of it too: a primary that is
//! torn then loses nothing.
//!
//! When the volume is opened for reading, that engine and the one behind it work on devices in
//! memory over the real ones, so there is one replay. It may make no more of them different than
//! [`OpenOptions::replay_bytes`]. There nothing has to be kept that only later writers need, such
//! as the numbers of quotas, and of a member that is missing other copies are enough; but what the
//! engine cannot write to at all, such as RAID5, can only be read without its log.
//!
//! # Writing
//!
//! Unless [`OpenOptions::tree_log`] is off: then fsync is a commit. `running` has the log trees of
//! the running transaction and says how they get to the devices, `fsync` leads the way, `record`,
//! `data` and `directory` say what is logged, `datasync` what need not be, and `transaction/notes`
//! has what changed.
//!
//! # Replaying
//!
//! `space` keeps what the log holds from being allocated, `replay` says in which order everything
//! is done, `inodes`, `names` and `extents` do it. `zero` throws a log away.

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

use std::sync::Arc;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Logical, TreeId};
use offshoot_device::{BlockDevice, MemoryBudget, MemoryDevice};
use offshoot_vfs::{Errno, Error, Result};

use crate::SubvolumeId;
use crate::engine::{Change, Engine, OpenOptions};
use crate::report::Report;
use crate::storage::malformed;
use crate::tree::{Cursor, TreeRoot};
pub use failure::LogFailure;
pub(crate) use fsync::{Wanted, committed_root, fsync};
pub(crate) use running::{RunningLog, Trees};
pub use zero::LostLog;

/// The log of one subvolume.
#[derive(Clone, Copy, Debug)]
pub struct LogTree {
    /// The subvolume that it is about.
    pub subvolume: SubvolumeId,
    /// The log tree.
    pub root: TreeRoot,
}

/// Opens the volume to read it.
pub(crate) fn open(devices: Vec<Arc<dyn BlockDevice>>, options: &OpenOptions) -> Result<Engine> {
    let engine = Engine::open_engine(devices.clone(), options)?;
    if options.ignore_log || !engine.superblock().log_is_pending() {
        return Ok(engine);
    }
    let is_dump = engine.superblock().is_metadata_only();
    drop(engine);
    let budget = MemoryBudget::new(options.replay_bytes);
    let in_memory = |below| Arc::new(MemoryDevice::over_within(below, &budget)) as Arc<_>;
    let changed: Vec<_> = devices.iter().cloned().map(in_memory).collect();
    let replayed =
        replay::replay(Engine::open_again(changed.clone(), options)?, options, Change::InMemory);
    match replayed {
        Ok(()) => {}
        // A dump need not hold all that a replay looks at, and it is there to be read.
        Err(error) if is_dump => {
            let options = OpenOptions { ignore_log: true, ..options.clone() };
            let engine = Engine::open_again(devices, &options)?;
            engine.report(&Report::LogNotReplayed { problem: error.to_string() });
            return Ok(engine);
        }
        Err(error) => return Err(error),
    }
    let devices = changed;
    let engine = Engine::open_again(devices, options)?;
    engine.report(&Report::LogReplayed { is_stored: false });
    Ok(engine)
}

/// Opens the volume to read and to write it.
pub(crate) fn open_writable(
    devices: Vec<Arc<dyn BlockDevice>>,
    options: &OpenOptions,
) -> Result<Engine> {
    let engine = Engine::open_engine(devices.clone(), options)?;
    if !engine.superblock().log_is_pending() {
        let engine = engine.into_writable(options, Change::Stored)?;
        engine.report_left_out();
        return Ok(engine);
    }
    if options.ignore_log {
        let what = "writing a volume while its pending tree log is ignored";
        return Err(Error::posix(Errno::INVAL, what));
    }
    replay::replay(engine, options, Change::Stored)?;
    let engine = Engine::open_again(devices, options)?.into_writable(options, Change::Stored)?;
    engine.report_left_out();
    engine.report(&Report::LogReplayed { is_stored: true });
    Ok(engine)
}

impl Engine {
    /// The generation that all blocks of a log have.
    fn log_generation(&self) -> Generation {
        Generation(self.superblock().generation.0.saturating_add(1))
    }

    /// The tree of log trees, if a log is pending.
    fn log_root_tree(&self) -> Option<TreeRoot> {
        let item = &self.superblock().item;
        self.superblock().log_is_pending().then(|| TreeRoot {
            id: TreeId::TREE_LOG,
            logical: Logical(item.log_root.get()),
            level: item.log_root_level,
            generation: self.log_generation(),
        })
    }

    /// The logs of a log that is pending, one for each subvolume that something was fsynced in.
    ///
    /// # Errors
    /// When the tree of them is damaged.
    pub fn log_trees(&self) -> Result<Vec<LogTree>> {
        let Some(root) = self.log_root_tree() else { return Ok(Vec::new()) };
        let mut logs = Vec::new();
        let mut cursor = Cursor::seek(self, root, offshoot_btrfs_format::Key::MIN)?;
        while let Some((key, data)) = cursor.item() {
            let subvolume = TreeId(key.offset);
            let is_log = key.item_type == ItemType::ROOT_ITEM
                && key.objectid == TreeId::TREE_LOG.0
                && subvolume.is_subvolume();
            if !is_log {
                let problem = format!("an item {key}, which is no log of a subvolume");
                return Err(Error::corrupt_at("tree of log trees", root.logical.0, problem));
            }
            let item = RootItem::parse(data).map_err(malformed)?;
            let (logical, generation) = (item.logical(), item.generation());
            if generation != self.log_generation() {
                let expected = self.log_generation();
                let problem = format!("generation {expected} expected, {generation} found");
                return Err(Error::corrupt_at("root of a log tree", logical.0, problem));
            }
            let root = TreeRoot { id: TreeId::TREE_LOG, logical, level: item.level, generation };
            logs.push(LogTree { subvolume, root });
            cursor.advance()?;
        }
        Ok(logs)
    }
}
