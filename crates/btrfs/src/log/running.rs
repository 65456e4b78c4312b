//! The log of the running transaction: its trees, their lock, and their way to the devices.
//!
//! ```text
//!   logged  ---- leader: roots stored, blocks taken off ---->  written  ---- barrier, superblock, barrier ---->  done
//!   (batch n)                 batch n + 1 begins                                                       all fsyncs of batch n return
//! ```
//!
//! A log belongs to the last commit: it says how the inodes in it differ between that commit and
//! the running transaction. So it is written with the superblock of the last commit, once that
//! commit is on the devices, and forgotten with the transaction. A thread that holds a handle keeps
//! the log valid, because the transaction does not end before the handle does.
//!
//! Invariants:
//!
//! 1. One thread at a time changes log trees, under the lock of [`LogTrees`]. While it holds that
//!    lock, it waits for no thread that may wait for it. Locks of inodes are the exception, and it
//!    waits for those only for a moment (`record`).
//! 2. A block that was taken off for writing never changes: a writer copies it. No block is freed
//!    before the commit, so the log that a superblock on the devices names stays intact.
//! 3. Every reason that makes a log invalid is an [`Obstacle`](crate::transaction::Obstacle), which
//!    stays for the whole transaction. It is set before any thread can log something that depends
//!    on it. The writer of a batch checks it when all blocks of the batch exist. So it writes a
//!    valid log, or it writes none and a commit follows.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{FileId, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use zerocopy::{FromZeros, IntoBytes};

use crate::block::TreeBlock;
use crate::inode::RoomsHandle;
use crate::ranges::Ranges;
use crate::transaction::{ChangingTree, StoredRoot, TreeAndHandle};
use crate::tree::{Cursor, ItemEdit, TreeRoot, TreeWriter};

/// The log trees of the running transaction.
#[derive(Default)]
pub(crate) struct RunningLog {
    trees: Mutex<LogTrees>,
    /// Files whose lock a thread holds while it waits for the trees. It does not change such a file
    /// before it has the trees.
    waiting: Mutex<HashSet<FileId>>,
    progress: Mutex<LogProgress>,
    /// Signalled when a write-out ends.
    turn: Condvar,
}

/// The progress of writing the log.
#[derive(Debug, Default)]
pub(super) struct LogProgress {
    /// A thread is writing the log.
    pub(super) is_written: bool,
    /// Batches before this one are on the devices.
    pub(super) done: u64,
}

/// The log trees.
#[derive(Default)]
pub(crate) struct LogTrees {
    /// The number of the batch that is being logged.
    pub(super) batch: u64,
    /// The tree of log trees.
    roots: Option<ChangingTree>,
    subvolumes: BTreeMap<u64, SubvolumeLog>,
}

/// The log of a subvolume.
pub(super) struct SubvolumeLog {
    pub(super) tree: ChangingTree,
    /// Its root in the tree of log trees.
    stored: Option<TreeRoot>,
    /// The root of the subvolume in the last commit.
    pub(super) committed: TreeRoot,
    /// One more than the highest inode number in the last commit.
    pub(super) first_new: u64,
    /// The inodes that are in the log.
    pub(super) logged: HashMap<u64, LoggedInode>,
    /// The names of inodes in the log, by directory and name, with the inode of each.
    pub(super) names: BTreeMap<(u64, Vec<u8>), NameHolder>,
    /// The addresses of data whose checksums are in the log.
    pub(super) sums: Ranges,
}

/// The inode that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameHolder {
    pub(super) ino: u64,
    /// The index of the entry.
    pub(super) index: u64,
    /// The name is in an INODE_EXTREF item, because it does not fit beside the other names in its
    /// directory.
    pub(super) is_extref: bool,
}

/// An inode in the log.
#[derive(Clone, Debug, Default)]
pub(super) struct LoggedInode {
    /// The whole inode is in the log, not only the part that names of other inodes need.
    pub(super) is_whole: bool,
    /// The last batch that it was logged in.
    pub(super) batch: u64,
    /// For a file: the end of its last sector when it was logged. A later truncation reaches the
    /// log through the length alone.
    pub(super) end: u64,
    /// For a directory that was fsynced: the first index whose entry is not in the log.
    pub(super) next_entry: u64,
    /// For such a directory: its change counter when it was logged.
    pub(super) sequence: u64,
    /// The new directories that its entries in the log lead to. They stay in place while the log is
    /// in use, because moving or removing one forces a commit.
    pub(super) below: Vec<u64>,
    /// Its names in the log.
    pub(super) names: Vec<(u64, Vec<u8>)>,
}

impl RunningLog {
    /// Ends the log of a finished transaction, of which no thread has a handle. Returns its trees,
    /// which the caller drops.
    pub(crate) fn end(&self) -> LogTrees {
        *self.progress.lock() = LogProgress::default();
        std::mem::take(&mut *self.trees.lock())
    }

    pub(super) fn trees(&self) -> MutexGuard<'_, LogTrees> {
        self.trees.lock()
    }

    /// As [`trees`](Self::trees), for a thread that holds the lock of `file`.
    pub(super) fn trees_for(&self, file: FileId) -> MutexGuard<'_, LogTrees> {
        if let Some(trees) = self.trees.try_lock() {
            return trees;
        }
        self.waiting.lock().insert(file);
        let trees = self.trees.lock();
        self.waiting.lock().remove(&file);
        trees
    }

    /// Whether the thread that holds the lock of `file` waits for the trees. This stays so while
    /// the caller holds the trees, and until then the file does not change.
    pub(super) fn is_waiting(&self, file: FileId) -> bool {
        self.waiting.lock().contains(&file)
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, LogProgress> {
        self.progress.lock()
    }

    pub(super) fn wait(&self, progress: &mut MutexGuard<'_, LogProgress>) {
        self.turn.wait(progress);
    }

    pub(super) fn tell(&self) {
        self.turn.notify_all();
    }
}

/// An empty log tree.
fn new_tree(handle: &RoomsHandle<'_>) -> Result<ChangingTree> {
    let (last_snapshot, used_bytes, is_read_only) = (Generation(0), 0, false);
    let root = handle.new_log_root()?;
    let stored = StoredRoot { root, last_snapshot, used_bytes, is_read_only };
    Ok(ChangingTree::new(&stored, handle.space()))
}

/// Applies edits to a log tree.
pub(super) fn apply(
    handle: &RoomsHandle<'_>,
    tree: &ChangingTree,
    edits: &[ItemEdit<'_>],
) -> Result<()> {
    handle.all_or_stop(|| {
        TreeWriter::new(&TreeAndHandle { handle, tree }).apply_batch(edits).map(drop)
    })
}

/// Copies adjacent items of a leaf of the subvolume into its log tree.
pub(super) fn put_run(
    handle: &RoomsHandle<'_>,
    tree: &ChangingTree,
    leaf: &TreeBlock,
    slots: Range<usize>,
) -> Result<()> {
    handle.all_or_stop(|| {
        TreeWriter::new(&TreeAndHandle { handle, tree }).put_run(leaf, slots).map(drop)
    })
}

/// The ROOT_ITEM of a log tree in the tree of log trees.
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

impl LogTrees {
    /// The log of the subvolume `id`, if it has one.
    pub(super) fn of(&mut self, id: TreeId) -> Option<&mut SubvolumeLog> {
        self.subvolumes.get_mut(&id.0)
    }

    /// Begins the log of the subvolume `id`, whose root in the last commit is `committed`.
    pub(super) fn begin(
        &mut self,
        handle: &RoomsHandle<'_>,
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

    /// Stores the current roots of all logs in the tree of log trees, and returns the root of that.
    /// This ends the batch.
    pub(super) fn end_batch(&mut self, handle: &RoomsHandle<'_>) -> Result<TreeRoot> {
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
