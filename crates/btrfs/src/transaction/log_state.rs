//! What a transaction and its log must know of each other.
//!
//! What is in the log the room above knows. The transaction has its blocks, which are in memory
//! until they are written; the notes of what changed; and why nothing may be logged any more.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use offshoot_btrfs_format::Logical;
use offshoot_vfs::FileId;

use super::Obstacle;
use super::notes::Notes;
use crate::block::{DirtyBlocks, Latch};
use crate::sync::{RwLock, RwLockReadGuard};

/// What a transaction and its log must know of each other.
#[derive(Default)]
pub(crate) struct LogState {
    obstacle: OnceLock<Obstacle>,
    /// Something was logged.
    is_used: AtomicBool,
    /// An extent had an owner, or a place in a file, that it may not have any more.
    has_moved_extents: AtomicBool,
    /// Blocks that were taken for it.
    taken: AtomicU64,
    /// Blocks that may be changed.
    changing: RwLock<DirtyBlocks>,
    /// Blocks that are being written.
    writing: RwLock<Arc<DirtyBlocks>>,
    notes: Notes,
}

impl LogState {
    /// An empty log, or one that nothing gets into.
    pub(crate) fn new(is_on: bool) -> Self {
        let log = Self::default();
        if !is_on {
            log.obstruct(Obstacle::Off);
        }
        log
    }

    /// Has all fsyncs make a commit, until there is one.
    pub(crate) fn obstruct(&self, obstacle: Obstacle) {
        let _ = self.obstacle.set(obstacle);
    }

    /// Why nothing may be logged any more, if that is so.
    pub(crate) fn obstacle(&self) -> Option<Obstacle> {
        self.obstacle.get().copied()
    }

    /// Whether something was logged, or is about to be: a crash may find what the transaction had
    /// before it changed again.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    pub(crate) fn use_it(&self) {
        self.is_used.store(true, Ordering::Release);
    }

    /// Notes that an extent has got another owner in this transaction, or another place in its
    /// file.
    pub(crate) fn note_moved_extents(&self) {
        self.has_moved_extents.store(true, Ordering::Release);
    }

    /// Whether a log may have an extent where it is no more.
    pub(crate) fn may_show_moved_extents(&self) -> bool {
        self.is_used() && self.has_moved_extents.load(Ordering::Acquire)
    }

    /// The transaction of `before` is committed with this one: a crash finds its log until then.
    pub(crate) fn go_on_from(&self, before: &Self) {
        if before.is_used() {
            self.use_it();
        }
        if before.has_moved_extents.load(Ordering::Acquire) {
            self.note_moved_extents();
        }
        self.obstruct(Obstacle::MemberFailed);
    }

    /// Notes that extents of `file` change in `range`.
    pub(crate) fn note_extents(&self, file: FileId, range: Range<u64>) {
        if self.obstacle().is_none() && !self.notes.extents_changed(file, range) {
            self.obstruct(Obstacle::TooMuch);
        }
    }

    /// Notes that `dir` loses the entry with this index, which led to this inode, or to a
    /// subvolume.
    pub(crate) fn note_removal(&self, dir: FileId, index: u64, ino: Option<u64>) {
        if self.obstacle().is_none() && !self.notes.entry_removed(dir, index, ino) {
            self.obstruct(Obstacle::TooMuch);
        }
    }

    /// The first index that is behind those of all entries that `dir` lost.
    pub(crate) fn index_after_removed(&self, dir: FileId) -> u64 {
        if self.obstacle().is_some() {
            return 0;
        }
        self.notes.last_removed(dir).map_or(0, |index| index.saturating_add(1))
    }

    pub(crate) fn notes(&self) -> &Notes {
        &self.notes
    }

    /// Counts a block that is taken for the log.
    pub(crate) fn count_block(&self) {
        self.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// How many blocks were taken for the log.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Forgets everything: the transaction is finished, and nobody has a handle of it.
    pub(crate) fn forget(&self) {
        *self.changing.write() = DirtyBlocks::default();
        *self.writing.write() = Arc::default();
        self.notes.forget();
    }

    /// The blocks that may be changed.
    pub(crate) fn changing(&self) -> RwLockReadGuard<'_, DirtyBlocks> {
        self.changing.read()
    }

    /// Whether the block at `logical` may be changed.
    pub(crate) fn owns(&self, logical: Logical) -> bool {
        self.changing().get(logical).is_some()
    }

    /// The block of the log at `logical`, unless it is on the devices.
    pub(crate) fn block(&self, logical: Logical) -> Option<Arc<Latch>> {
        let changing = self.changing().get(logical);
        changing.or_else(|| self.writing.read().get(logical))
    }

    /// Takes off the blocks that were changed, to be written: nobody changes them any more.
    pub(crate) fn take_off(&self) -> Arc<DirtyBlocks> {
        let mut writing = self.writing.write();
        *writing = Arc::new(std::mem::take(&mut *self.changing.write()));
        writing.clone()
    }
}
