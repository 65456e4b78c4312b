//! The log of the running transaction: its trees, who may change them, and how they get to the
//! devices.
//!
//! ```text
//!   logged  ---- leader: roots stored, blocks taken off ---->  written  ---- barrier, superblock, barrier ---->  done
//!   (batch n)                 batch n + 1 begins                                                       all fsyncs of batch n return
//! ```
//!
//! A log goes with the last commit: it says how the running transaction differs from that one, for
//! the inodes that it has. So it is written with the superblock of the last commit, when that is on
//! the devices, and forgotten with the transaction. Who has a handle keeps the log valid: the
//! transaction does not end.
//!
//! Invariants:
//!
//! 1. One thread at a time changes log trees, under the lock of [`Trees`]. While it has that it
//!    waits for nobody who may wait for it, but for the locks of inodes, and for those a moment
//!    only (`record`).
//! 2. A block that was taken off to be written is not changed any more: it is copied. No block is
//!    freed before the commit, so what the superblocks on the devices name stays whole.
//! 3. Whatever makes a log invalid is an [`Obstacle`](crate::transaction::Obstacle), which stays for the whole transaction. It is
//!    set before anybody can log something that depends on it, and looked at when all blocks of a
//!    batch are there: then a log is written that is valid, or none, and a commit is made.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{FileId, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use zerocopy::{FromZeros, IntoBytes};

use crate::block::TreeBlock;
use crate::engine::Handle;
use crate::transaction::{Changing, Ranges, StoredRoot, Tree};
use crate::tree::{Cursor, ItemEdit, TreeRoot, TreeWriter};

/// The log trees of the running transaction.
#[derive(Default)]
pub(crate) struct RunningLog {
    trees: Mutex<Trees>,
    /// Files that somebody has locked who waits for the trees, and does nothing to them until he
    /// has those.
    waiting: Mutex<HashSet<FileId>>,
    progress: Mutex<Progress>,
    /// Told when a write-out ends.
    turn: Condvar,
}

/// How far the log is written.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Somebody writes.
    pub(super) is_written: bool,
    /// Batches before this one are on the devices.
    pub(super) done: u64,
}

/// The log trees.
#[derive(Default)]
pub(crate) struct Trees {
    /// The number of the batch that is being logged.
    pub(super) batch: u64,
    /// The tree of log trees.
    roots: Option<Tree>,
    subvolumes: BTreeMap<u64, SubvolumeLog>,
}

/// The log of a subvolume.
pub(super) struct SubvolumeLog {
    pub(super) tree: Tree,
    /// The root of it that the tree of log trees has.
    stored: Option<TreeRoot>,
    /// The subvolume as the last commit left it.
    pub(super) committed: TreeRoot,
    /// The first inode number that is behind those of all inodes that it had then.
    pub(super) first_new: u64,
    /// The inodes that are in the log.
    pub(super) logged: HashMap<u64, Logged>,
    /// The names that inodes have in the log, by directory and name, and who has them.
    pub(super) names: BTreeMap<(u64, Vec<u8>), Holder>,
    /// Where data lies whose checksums are in the log.
    pub(super) sums: Ranges,
}

/// Who has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) ino: u64,
    /// That of the entry.
    pub(super) index: u64,
    /// The name has no room beside the others of its directory, and is in an item of its own.
    pub(super) is_extref: bool,
}

/// What is known of an inode that is in the log.
#[derive(Clone, Debug, Default)]
pub(super) struct Logged {
    /// All of it is, and not only what a name in it needs.
    pub(super) is_whole: bool,
    /// The batch in which it was logged last.
    pub(super) batch: u64,
    /// Where it ended then, as a file: what was cut off behind that is in the log by its length
    /// alone.
    pub(super) end: u64,
    /// The first index of an entry that is not in the log, as a directory that was fsynced.
    pub(super) next_entry: u64,
    /// How often it had changed by then, as such a directory.
    pub(super) sequence: u64,
    /// The new directories that its entries in the log lead to. As long as something is logged they
    /// stay there: who moves or removes one has a commit made.
    pub(super) below: Vec<u64>,
    /// The names that it has there.
    pub(super) names: Vec<(u64, Vec<u8>)>,
}

impl RunningLog {
    /// The transaction is finished, and nobody has a handle of it. Gives its trees, which nobody
    /// needs any more.
    pub(crate) fn end(&self) -> Trees {
        *self.progress.lock() = Progress::default();
        std::mem::take(&mut *self.trees.lock())
    }

    pub(super) fn trees(&self) -> MutexGuard<'_, Trees> {
        self.trees.lock()
    }

    /// As [`trees`](Self::trees), for who has `file` locked.
    pub(super) fn trees_for(&self, file: FileId) -> MutexGuard<'_, Trees> {
        if let Some(trees) = self.trees.try_lock() {
            return trees;
        }
        self.waiting.lock().insert(file);
        let trees = self.trees.lock();
        self.waiting.lock().remove(&file);
        trees
    }

    /// Whether who has `file` locked waits for the trees. As long as the caller has those, this
    /// stays so, and nobody changes the file.
    pub(super) fn is_waiting(&self, file: FileId) -> bool {
        self.waiting.lock().contains(&file)
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }

    pub(super) fn wait(&self, progress: &mut MutexGuard<'_, Progress>) {
        self.turn.wait(progress);
    }

    pub(super) fn tell(&self) {
        self.turn.notify_all();
    }
}

/// An empty log tree.
fn new_tree(handle: &Handle<'_>) -> Result<Tree> {
    let (last_snapshot, used_bytes, is_read_only) = (Generation(0), 0, false);
    let root = handle.new_log_root()?;
    let stored = StoredRoot { root, last_snapshot, used_bytes, is_read_only };
    Ok(Tree::new(&stored, handle.space()))
}

/// Applies edits to a log tree.
pub(super) fn apply(handle: &Handle<'_>, tree: &Tree, edits: &[ItemEdit<'_>]) -> Result<()> {
    handle.whole(|| TreeWriter::new(&Changing { handle, tree }).apply_batch(edits).map(drop))
}

/// Puts items that are side by side in a leaf of the subvolume into its log tree.
pub(super) fn put_run(
    handle: &Handle<'_>,
    tree: &Tree,
    leaf: &TreeBlock,
    slots: Range<usize>,
) -> Result<()> {
    handle.whole(|| TreeWriter::new(&Changing { handle, tree }).put_run(leaf, slots).map(drop))
}

/// A log tree as the tree of log trees has it.
fn root_item(root: &TreeRoot) -> RootItem {
    let mut item = RootItem::new_zeroed();
    item.inode.generation = 1.into();
    item.inode.size = 3.into();
    item.inode.nlink = 1.into();
    item.inode.mode = 0o040_755.into();
    item.generation = root.generation.0.into();
    item.generation_v2 = item.generation;
    item.bytenr = root.logical.0.into();
    item.level = root.level;
    item
}

impl Trees {
    /// The log of the subvolume `id`, if it has one.
    pub(super) fn of(&mut self, id: TreeId) -> Option<&mut SubvolumeLog> {
        self.subvolumes.get_mut(&id.0)
    }

    /// Begins the log of the subvolume `id`, which is this in the last commit.
    pub(super) fn begin(
        &mut self,
        handle: &Handle<'_>,
        id: TreeId,
        committed: TreeRoot,
    ) -> Result<()> {
        let last = Key::new(TreeId::LAST_FREE.0, ItemType::INODE_ITEM, 0);
        let cursor = Cursor::seek_committed_floor(handle.volume(), committed, last)?;
        let first_new = cursor.item().map_or(0, |(key, _)| key.objectid.saturating_add(1));
        let log = SubvolumeLog {
            tree: new_tree(handle)?,
            stored: None,
            committed,
            first_new,
            logged: HashMap::new(),
            names: BTreeMap::new(),
            sums: Ranges::default(),
        };
        self.subvolumes.insert(id.0, log);
        Ok(())
    }

    /// How many subvolumes have a log.
    pub(super) fn number(&self) -> usize {
        self.subvolumes.len()
    }

    /// Has the tree of log trees name all of them as they are now, and gives its root. The batch
    /// ends.
    pub(super) fn end_batch(&mut self, handle: &Handle<'_>) -> Result<TreeRoot> {
        let mut items = Vec::new();
        for (&id, log) in &mut self.subvolumes {
            let root = *log.tree.root.read();
            if log.stored.replace(root) != Some(root) {
                let key = Key::new(TreeId::TREE_LOG.0, ItemType::ROOT_ITEM, id);
                items.push((key, root_item(&root)));
            }
        }
        let roots = match &self.roots {
            Some(roots) => roots,
            None => self.roots.insert(new_tree(handle)?),
        };
        let edits: Vec<_> = items.iter().map(|(key, item)| (*key, Some(item.as_bytes()))).collect();
        apply(handle, roots, &edits)?;
        self.batch += 1;
        Ok(*roots.root.read())
    }
}
