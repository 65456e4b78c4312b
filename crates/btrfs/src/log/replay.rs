//! Replays a log: the order in which its items come into the trees.
//!
//! For each subvolume, these passes over its log follow each other:
//!
//! 1. *Inodes.* Attributes and entries that the log covers and lacks are removed. Then the inode
//!    becomes that of the log, and extents behind the end of a file are dropped. Now all inodes
//!    exist that names in the log lead to.
//! 2. *Entries* of directories.
//! 3. *The rest:* attributes, names with the entries that belong to them, extents with their
//!    checksums.
//! 4. *Links.* The names of every inode that the log has, or that lost a name, are counted anew. An
//!    inode without names becomes an orphan; if it is a directory, its entries are removed first.
//!
//! If a name is taken by another inode, that inode loses it, because the log is newer. A log of a
//! deleted subvolume is skipped.
//!
//! Replay uses no clock: times of inodes come from the log, or from the subvolume where the log has
//! none. So every replay of a log in memory gives the same volume.
//!
//! Everything is one transaction, whose blocks stay in memory until its commit.
//! [`EngineOptions::replay_bytes`] limits them. Single changes do not reserve space, so replay
//! makes room for the most that it may take at the start. If the limit or the space does not
//! suffice, replay ends with an error and the devices are unchanged.
//!
//! [`EngineOptions::replay_bytes`]: crate::EngineOptions::replay_bytes

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering;

use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId};
use offshoot_vfs::{Code, Errno, Error, FileId, Result, Structure};
use tracing::info;

use super::failure::{in_log, in_volume};
use super::space::LogReservation;
use super::{LogTree, log_trees};
use crate::events::LOG;
use crate::inode::{Rooms, RoomsHandle};
use crate::storage::malformed;
use crate::transaction::{CommitCause, root_item_key};
use crate::tree::{Cursor, TreeRoot};

/// Replays the pending log of the volume, and commits. The codes of its errors are
/// [`Code::Log`](offshoot_vfs::Code::Log) and
/// [`Code::LogNotReplayed`](offshoot_vfs::Code::LogNotReplayed).
pub(crate) fn replay(volume: &Rooms, replay_bytes: u64) -> Result<()> {
    replay_into(volume, replay_bytes).map_err(in_log)
}

fn replay_into(volume: &Rooms, replay_bytes: u64) -> Result<()> {
    let logs = log_trees(volume)?;
    info!(target: LOG, subvolumes = logs.len(), "replaying the log");
    let mut taken = LogReservation::take(volume, &logs)?;
    make_room(volume, &logs, &taken, replay_bytes)?;
    let handle = volume.enter()?;
    let of_logs: HashSet<_> = taken.blocks().iter().map(|block| block.0).collect();
    let is_of_volume = |error: &Error| match error {
        Error::Corrupt(corrupt) if corrupt.structure == Structure::TreeBlock.name() => {
            corrupt.logical.is_some_and(|at| !of_logs.contains(&at))
        }
        _ => false,
    };
    for log in &logs {
        match handle.tree(log.subvolume) {
            Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
            found => {
                let tree = found?.id;
                let replay = SubvolumeReplay::new(&handle, log, tree, &mut taken, replay_bytes);
                // A damaged block of the volume says nothing against the log.
                replay
                    .run()
                    .map_err(|error| if is_of_volume(&error) { in_volume(error) } else { error })?;
            }
        }
    }
    taken.give_up(&handle);
    // The commit removes the log from the superblock, so it must happen even if the log changed
    // nothing.
    let some_root = root_item_key(volume, TreeId::FS)?;
    let touch = |data: Option<&[u8]>| Ok(data.unwrap_or_default().to_vec());
    handle.change(TreeId::ROOT, |tree| tree.modify(some_root, 0, touch))?;
    drop(handle);
    volume.commit_over(0, CommitCause::Asked)
}

/// Makes as much space for metadata free as replaying may take at most, if the volume has it. The
/// size of a log does not show how much that is: one item can remove all names of a directory, or
/// all extents of a file.
fn make_room(
    volume: &Rooms,
    logs: &[LogTree],
    taken: &LogReservation<'_>,
    most_bytes: u64,
) -> Result<()> {
    let live = volume.live()?;
    let mut trees = live.space.pending.tree_bytes.load(Ordering::Relaxed);
    for log in logs {
        match live.tree(volume, log.subvolume) {
            Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
            tree => trees = trees.saturating_add(tree?.used.load(Ordering::Relaxed)),
        }
    }
    // Each block is copied at most once. An orphan item, in a leaf that is a third full, takes less
    // than a quarter of the space that its inode has in the tree.
    let changed = trees.saturating_add(trees / 4).saturating_add(taken.growth_bytes());
    volume.upkeep.look_for_room(volume, live.space.cost_of_a_batch(changed.min(most_bytes)))
}

/// The replay of the log of one subvolume.
pub(super) struct SubvolumeReplay<'a, 'v> {
    pub(super) handle: &'a RoomsHandle<'v>,
    pub(super) volume: &'v Rooms,
    pub(super) log: TreeRoot,
    pub(super) tree: TreeId,
    pub(super) taken: &'a mut LogReservation<'v>,
    /// How many bytes of tree blocks replay may change.
    most_bytes: u64,
    /// Inodes with a link count of 0 in the log: they were deleted while they were open.
    nameless: HashSet<u64>,
    /// Inodes whose names have to be counted.
    pub(super) uncounted: BTreeSet<u64>,
}

impl<'a, 'v> SubvolumeReplay<'a, 'v> {
    fn new(
        handle: &'a RoomsHandle<'v>,
        log: &LogTree,
        tree: TreeId,
        taken: &'a mut LogReservation<'v>,
        most_bytes: u64,
    ) -> Self {
        let (volume, log) = (handle.volume(), log.root);
        let (nameless, uncounted) = (HashSet::new(), BTreeSet::new());
        Self { handle, volume, log, tree, taken, most_bytes, nameless, uncounted }
    }

    fn run(mut self) -> Result<()> {
        self.pass(Self::inode_pass)?;
        self.pass(Self::entry_pass)?;
        self.pass(Self::last_pass)?;
        self.count_links()
    }

    /// The file of the subvolume with this inode number.
    pub(super) fn file(&self, ino: u64) -> FileId {
        FileId { dev: self.tree.0, ino }
    }

    /// The tree of the subvolume as it is now.
    pub(super) fn root(&self) -> Result<TreeRoot> {
        self.volume.tree(self.tree)
    }

    /// The error for a wrong item of the log.
    pub(super) fn wrong(&self, key: Key, problem: &str) -> Error {
        let problem = format!("{key}: {problem}");
        Error::corrupt_at(Structure::TreeLog, self.log.logical.0, problem)
    }

    /// # Errors
    /// When replay has changed more than `most_bytes` of blocks.
    pub(super) fn require_little(&self) -> Result<()> {
        if self.volume.dirty_tree_bytes()? <= self.most_bytes {
            return Ok(());
        }
        let most = self.most_bytes;
        let what = format!(
            "replaying a tree log that changes more than {most} bytes of trees \
             (EngineOptions::replay_bytes)"
        );
        Err(Error::unsupported(Code::Unsupported, what))
    }

    /// Calls `visit` with all items of the log, except those of nameless inodes.
    fn pass(&mut self, visit: fn(&mut Self, Key, &[u8]) -> Result<()>) -> Result<()> {
        let volume = self.volume;
        let mut cursor = Cursor::seek(volume, self.log, Key::MIN)?;
        while let Some((key, data)) = cursor.item() {
            if !self.nameless.contains(&key.objectid) {
                visit(self, key, data)?;
                self.require_little()?;
            }
            cursor.advance()?;
        }
        Ok(())
    }

    fn inode_pass(&mut self, key: Key, data: &[u8]) -> Result<()> {
        match key.item_type {
            ItemType::INODE_ITEM => {
                let item = *InodeItem::view(data).map_err(malformed)?;
                if !(Ino::ROOT_DIR.0..=TreeId::LAST_FREE.0).contains(&key.objectid) {
                    return Err(self.wrong(key, "not the number of a file"));
                }
                if item.nlink.get() == 0 {
                    self.nameless.insert(key.objectid);
                    return Ok(());
                }
                self.replay_inode(key, item)
            }
            ItemType::INODE_REF
            | ItemType::INODE_EXTREF
            | ItemType::XATTR_ITEM
            | ItemType::DIR_LOG_ITEM
            | ItemType::DIR_LOG_INDEX
            | ItemType::DIR_ITEM
            | ItemType::DIR_INDEX
            | ItemType::EXTENT_DATA
            | ItemType::EXTENT_CSUM => Ok(()),
            other => {
                let what = format!("replaying a tree log with an item of the type {other}");
                Err(Error::unsupported(Code::Unsupported, what))
            }
        }
    }

    fn entry_pass(&mut self, key: Key, data: &[u8]) -> Result<()> {
        if key.item_type == ItemType::DIR_INDEX { self.replay_entry(key, data) } else { Ok(()) }
    }

    fn last_pass(&mut self, key: Key, data: &[u8]) -> Result<()> {
        match key.item_type {
            ItemType::XATTR_ITEM => self.replay_attribute(key, data),
            ItemType::INODE_REF | ItemType::INODE_EXTREF => self.replay_names(key, data),
            ItemType::EXTENT_DATA => self.replay_extent(key, data),
            _ => Ok(()),
        }
    }

    /// Puts an item into the subvolume, or replaces it there.
    pub(super) fn put(&self, key: Key, data: &[u8]) -> Result<()> {
        self.handle.change(self.tree, |tree| tree.modify(key, data.len(), |_| Ok(data.to_vec())))
    }
}
