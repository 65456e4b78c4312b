//! Replaying: in which order a log comes into the trees.
//!
//! For each subvolume, one pass over its log after the other:
//!
//! 1. *Inodes.* Attributes and entries go that the log covers and does not have; then the inode
//!    becomes what the log says, and what a file has behind its end goes. Now all inodes are there
//!    that names in the log lead to.
//! 2. *Entries* of directories.
//! 3. *The rest:* attributes, names with the entries that belong to them, extents with their
//!    checksums.
//! 4. *Links.* Every inode that the log has, or that lost a name, counts its names anew. One that
//!    has none left is an orphan, and a directory loses its entries before.
//!
//! Who is in the way of a name gives it up: the log is newer. A log of a subvolume that is no more
//! is nobody's.
//!
//! Nothing here tells when: the times of inodes are those of the log, and of the subvolume where
//! the log has none. So the same log gives the same volume however often it is replayed in memory.
//!
//! All is one transaction, whose blocks stay in memory up to its commit:
//! [`OpenOptions::replay_bytes`] bounds them. What it takes was not reserved: room for the most
//! that it may take is made at the beginning. Where there is not enough of one or the other, it
//! ends with an error and the devices are as they were.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering;

use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};

use super::LogTree;
use super::failure::{in_log, in_volume};
use super::space::Taken;
use crate::engine::{Change, Engine, Handle, OpenOptions};
use crate::storage::malformed;
use crate::transaction::{Cause, root_item_key};
use crate::tree::{Cursor, TreeRoot};

/// Replays the pending log of the volume, and commits. [`LogFailure`](super::LogFailure) tells what
/// errors are about.
pub(super) fn replay(engine: Engine, options: &OpenOptions, change: Change) -> Result<()> {
    // Who opens the volume is told by an error when this one is not written any more.
    let options = OpenOptions {
        delayed_items: false,
        commit_interval: None,
        reporter: None,
        ..options.clone()
    };
    let volume = engine.into_writable(&options, change).map_err(in_volume)?;
    replay_into(&volume, options.replay_bytes).map_err(in_log)
}

fn replay_into(volume: &Engine, replay_bytes: u64) -> Result<()> {
    let logs = volume.log_trees()?;
    let mut taken = Taken::take(volume, &logs)?;
    make_room(volume, &logs, &taken, replay_bytes)?;
    let handle = volume.enter()?;
    for log in &logs {
        match handle.tree(log.subvolume) {
            Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
            found => {
                let tree = found?.id;
                let replay = Replay::new(&handle, log, tree, &mut taken, replay_bytes);
                replay.run()?;
            }
        }
    }
    taken.give_up(&handle);
    // The superblock says that there is no log any more, so there is a commit, whatever was in the
    // log.
    let some_root = root_item_key(volume, TreeId::FS)?;
    let touch = |data: Option<&[u8]>| Ok(data.unwrap_or_default().to_vec());
    handle.change(TreeId::ROOT, |tree| tree.modify(some_root, 0, touch))?;
    drop(handle);
    volume.refresh_superblock_copies()?;
    volume.commit_over(0, Cause::Asked)
}

/// Has as much metadata free as replaying may take at most, if the volume has that. How much of it
/// a log takes does not show in its size: one item can remove all names of a directory, or all
/// extents of a file.
fn make_room(volume: &Engine, logs: &[LogTree], taken: &Taken<'_>, most_bytes: u64) -> Result<()> {
    let live = volume.live()?;
    let mut trees = live.space.pending.tree_bytes.load(Ordering::Relaxed);
    for log in logs {
        match live.tree(volume, log.subvolume) {
            Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
            tree => trees = trees.saturating_add(tree?.used.load(Ordering::Relaxed)),
        }
    }
    // Each block is copied once. An orphan item, in a leaf that is a third full, is less than a
    // quarter of what the tree has of its inode.
    let changed = trees.saturating_add(trees / 4).saturating_add(taken.growth_bytes());
    volume.look_for_room(live.space.cost_of_a_batch(changed.min(most_bytes)))
}

/// The replay of the log of one subvolume.
pub(super) struct Replay<'a, 'v> {
    pub(super) handle: &'a Handle<'v>,
    pub(super) volume: &'v Engine,
    pub(super) log: TreeRoot,
    pub(super) tree: TreeId,
    pub(super) taken: &'a mut Taken<'v>,
    /// What may be changed of trees, in bytes.
    most_bytes: u64,
    /// Inodes that have no name in the log: they were deleted while they were open.
    nameless: HashSet<u64>,
    /// Inodes whose names have to be counted.
    pub(super) uncounted: BTreeSet<u64>,
}

impl<'a, 'v> Replay<'a, 'v> {
    fn new(
        handle: &'a Handle<'v>,
        log: &LogTree,
        tree: TreeId,
        taken: &'a mut Taken<'v>,
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

    /// What cannot be right about an item of the log.
    pub(super) fn wrong(&self, key: Key, problem: &str) -> Error {
        let problem = format!("{key}: {problem}");
        Error::corrupt_at("tree log", self.log.logical.0, problem)
    }

    /// # Errors
    /// When more blocks were changed than may be.
    pub(super) fn require_little(&self) -> Result<()> {
        if self.volume.dirty_tree_bytes()? <= self.most_bytes {
            return Ok(());
        }
        let most = self.most_bytes;
        let what = format!(
            "replaying a tree log that changes more than {most} bytes of trees (OpenOptions::replay_bytes)"
        );
        Err(Error::Unsupported(what))
    }

    /// Calls `visit` with all items of inodes that are not nameless.
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
                Err(Error::Unsupported(what))
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

    /// The item of the subvolume becomes this.
    pub(super) fn put(&self, key: Key, data: &[u8]) -> Result<()> {
        self.handle.change(self.tree, |tree| tree.modify(key, data.len(), |_| Ok(data.to_vec())))
    }
}
