//! A tree that can change, and the handle of the running transaction that changes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offshoot_btrfs_format::{Generation, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result};

use super::TransactionHandle;
use super::hold::TreeReservation;
use super::roots::StoredRoot;
use crate::block::{ReadLatch, TreeBlock, WriteLatch};
use crate::shared::Shared;
use crate::space::Space;
use crate::stats::EngineCounters;
use crate::sync::RwLock;
use crate::tree::{Blocks, Latching, OwnedTree, TreeRoot};

/// A tree that can change. Its root is behind the lock that comes before all latches.
#[derive(Debug)]
pub(crate) struct ChangingTree {
    pub(crate) id: TreeId,
    /// The transaction that took the last snapshot of it. Only blocks of this transaction and older
    /// ones may be shared.
    last_snapshot: AtomicU64,
    /// Whether it is a read-only subvolume.
    is_read_only: AtomicBool,
    /// Whether it is a subvolume that was deleted, and has no name any more. Callers that have its
    /// files open can still use them.
    is_removed: AtomicBool,
    /// Whether it is a deleted subvolume of which no file is open.
    is_deleted: AtomicBool,
    /// How often its files are open. No other lock is taken under this one.
    opens: parking_lot::Mutex<u64>,
    pub(crate) root: Shared<RwLock<TreeRoot>>,
    /// The bytes of its blocks.
    pub(crate) used: AtomicU64,
    /// The reservation for items that are queued for it.
    pub(crate) hold: TreeReservation,
}

impl ChangingTree {
    /// The tree as its root item describes it.
    pub(crate) fn new(stored: &StoredRoot, space: &Arc<Space>) -> Self {
        Self {
            id: stored.root.id,
            last_snapshot: AtomicU64::new(stored.last_snapshot.0),
            is_read_only: AtomicBool::new(stored.is_read_only),
            is_removed: AtomicBool::new(false),
            is_deleted: AtomicBool::new(false),
            opens: parking_lot::Mutex::new(0),
            root: Shared::new("root", RwLock::new(stored.root)),
            used: AtomicU64::new(stored.used_bytes),
            hold: TreeReservation::new(stored.used_bytes, space),
        }
    }

    /// The transaction that took the last snapshot of it.
    pub(crate) fn last_snapshot(&self) -> Generation {
        Generation(self.last_snapshot.load(Ordering::Relaxed))
    }

    /// Notes that a snapshot is taken of it. The caller has shut the gate.
    pub(crate) fn set_last_snapshot(&self, generation: Generation) {
        self.last_snapshot.store(generation.0, Ordering::Relaxed);
    }

    /// Makes it read-only or writable. The caller has shut the gate.
    pub(crate) fn set_read_only(&self, is_read_only: bool) {
        self.is_read_only.store(is_read_only, Ordering::Release);
    }

    /// Notes that it has no name any more. The caller has shut the gate.
    pub(crate) fn set_removed(&self) {
        self.is_removed.store(true, Ordering::Release);
    }

    /// Whether it has no name any more.
    pub(crate) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    /// Counts that a file of it is opened.
    ///
    /// # Errors
    /// `ENOENT` when it was deleted.
    pub(crate) fn open_file(&self) -> Result<()> {
        let mut opens = self.opens.lock();
        self.require_alive()?;
        *opens += 1;
        Ok(())
    }

    /// Counts that a file of it is closed. Returns whether this was the last open file of a
    /// subvolume without a name, which ends then.
    pub(crate) fn close_file(&self) -> bool {
        let mut opens = self.opens.lock();
        *opens = opens.saturating_sub(1);
        *opens == 0 && self.is_removed()
    }

    /// Marks it as deleted, if it has no name and none of its files is open. From then on only the
    /// thread that drops its blocks reads it. Returns whether this call did it. The caller has shut
    /// the gate.
    pub(crate) fn end(&self) -> bool {
        let opens = self.opens.lock();
        *opens == 0 && self.is_removed() && !self.is_deleted.swap(true, Ordering::AcqRel)
    }

    /// Whether it was marked as deleted.
    pub(crate) fn is_deleted(&self) -> bool {
        self.is_deleted.load(Ordering::Acquire)
    }

    /// `ENOENT` when it was deleted.
    pub(crate) fn require_alive(&self) -> Result<()> {
        if self.is_deleted() {
            return Err(Error::posix(Errno::NOENT, format!("subvolume {}", self.id)));
        }
        Ok(())
    }

    /// `ENOENT` when it has no name any more.
    pub(crate) fn require_name(&self) -> Result<()> {
        if self.is_removed() {
            return Err(Error::posix(Errno::NOENT, format!("the name of subvolume {}", self.id)));
        }
        Ok(())
    }

    /// `EROFS` when it is a read-only subvolume, `ENOENT` when it was deleted. The answer holds
    /// until the caller drops its handle.
    pub(crate) fn require_writable(&self) -> Result<()> {
        self.require_alive()?;
        if self.is_read_only.load(Ordering::Acquire) {
            return Err(Error::posix(Errno::ROFS, format!("subvolume {}", self.id)));
        }
        Ok(())
    }
}

/// A tree, and the handle that changes it.
pub(crate) struct TreeAndHandle<'a> {
    pub(crate) handle: &'a TransactionHandle<'a>,
    pub(crate) tree: &'a ChangingTree,
}

impl OwnedTree for TreeAndHandle<'_> {
    fn root(&self) -> &RwLock<TreeRoot> {
        &self.tree.root
    }

    fn blocks(&self) -> &dyn Blocks {
        self.handle.volume()
    }

    fn id(&self) -> TreeId {
        self.tree.id
    }

    fn node_size(&self) -> u32 {
        self.handle.volume().superblock().node_size
    }

    fn generation(&self) -> Generation {
        self.handle.generation()
    }

    fn latching(&self) -> Latching {
        self.handle.live().latching
    }

    fn stats(&self) -> &EngineCounters {
        self.handle.stats()
    }

    fn owns(&self, generation: Generation, logical: Logical) -> bool {
        self.handle.owns(self.tree.id, generation, logical)
    }

    fn latch(&self, logical: Logical) -> Result<WriteLatch> {
        self.handle.latch(self.tree.id, logical)
    }

    fn latch_shared(&self, logical: Logical) -> Result<ReadLatch> {
        self.handle.latch_shared(self.tree.id, logical)
    }

    fn new_block(&self, level: u8) -> Result<WriteLatch> {
        self.handle.new_block(self.tree.id, level)
    }

    fn copy_block(&self, old: &TreeBlock) -> Result<WriteLatch> {
        self.handle.copy_block(self.tree, old)
    }

    fn free_block(&self, block: WriteLatch) -> Result<()> {
        self.handle.free_block(self.tree.id, block)
    }

    fn root_changed(&self, root: &TreeRoot) {
        self.handle.root_changed(root);
    }
}
