//! The knowledge that a transaction and its log share.
//!
//! The contents of the log are known to the room above (`log`). The transaction has the blocks of
//! the log, which stay in memory until they are written; the notes of what changed; and the reason
//! why nothing more may be logged, if there is one.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use offshoot_btrfs_format::Logical;
use offshoot_vfs::FileId;

use super::Obstacle;
use super::notes::LogNotes;
use crate::block::{DirtyBlocks, Latch};
use crate::shared::Shared;
use crate::sync::{RwLock, RwLockReadGuard};

/// The knowledge that a transaction and its log share.
pub(crate) struct LogState {
    obstacle: OnceLock<Obstacle>,
    /// A thread has logged something, or is about to.
    is_used: AtomicBool,
    /// An extent may have lost an owner, or its place in a file, in this transaction.
    has_moved_extents: AtomicBool,
    /// The number of blocks that were allocated for the log.
    taken: AtomicU64,
    /// Blocks that may still change.
    changing: Shared<RwLock<DirtyBlocks>>,
    /// Blocks that are being written.
    writing: Shared<RwLock<Arc<DirtyBlocks>>>,
    notes: LogNotes,
}

impl LogState {
    /// An empty log. With `is_on` false it takes nothing.
    pub(crate) fn new(is_on: bool) -> Self {
        let log = Self {
            obstacle: OnceLock::new(),
            is_used: AtomicBool::new(false),
            has_moved_extents: AtomicBool::new(false),
            taken: AtomicU64::new(0),
            changing: Shared::new("log changing", RwLock::default()),
            writing: Shared::new("log writing", RwLock::default()),
            notes: LogNotes::default(),
        };
        if !is_on {
            log.obstruct(Obstacle::Off);
        }
        log
    }

    /// Makes every fsync commit until a commit ends the transaction.
    pub(crate) fn obstruct(&self, obstacle: Obstacle) {
        let _ = self.obstacle.set(obstacle);
    }

    /// Why nothing more may be logged, if there is a reason.
    pub(crate) fn obstacle(&self) -> Option<Obstacle> {
        self.obstacle.get().copied()
    }

    /// Whether the log is in use. Then a crash may bring back data of this transaction that it has
    /// changed again since.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    pub(crate) fn use_it(&self) {
        self.is_used.store(true, Ordering::Release);
    }

    /// Notes that an extent got another owner, or another place in its file, in this transaction.
    pub(crate) fn note_moved_extents(&self) {
        self.has_moved_extents.store(true, Ordering::Release);
    }

    /// Whether the log may have an extent at a place that it has left.
    pub(crate) fn may_show_moved_extents(&self) -> bool {
        self.is_used() && self.has_moved_extents.load(Ordering::Acquire)
    }

    /// Takes over from the transaction of `before`, which is committed together with this one.
    /// Until then a crash finds the log of `before`.
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

    /// Notes that `dir` loses the entry with this index, which led to the inode `ino`; `None` for a
    /// subvolume.
    pub(crate) fn note_removal(&self, dir: FileId, index: u64, ino: Option<u64>) {
        if self.obstacle().is_none() && !self.notes.entry_removed(dir, index, ino) {
            self.obstruct(Obstacle::TooMuch);
        }
    }

    /// One more than the highest index of an entry that `dir` lost.
    pub(crate) fn index_after_removed(&self, dir: FileId) -> u64 {
        if self.obstacle().is_some() {
            return 0;
        }
        self.notes.last_removed(dir).map_or(0, |index| index.saturating_add(1))
    }

    pub(crate) fn notes(&self) -> &LogNotes {
        &self.notes
    }

    /// Counts a block that is allocated for the log.
    pub(crate) fn count_block(&self) {
        self.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// How many blocks were allocated for the log.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Forgets everything. The transaction has ended, and no thread holds a handle of it.
    pub(crate) fn forget(&self) {
        *self.changing.write() = DirtyBlocks::default();
        *self.writing.write() = Arc::default();
        self.notes.forget();
    }

    /// The blocks that may still change.
    pub(crate) fn changing(&self) -> RwLockReadGuard<'_, DirtyBlocks> {
        self.changing.read()
    }

    /// Whether the block at `logical` may still change.
    pub(crate) fn owns(&self, logical: Logical) -> bool {
        self.changing().get(logical).is_some()
    }

    /// The block of the log at `logical`, if it is not yet on the devices.
    pub(crate) fn block(&self, logical: Logical) -> Option<Arc<Latch>> {
        let changing = self.changing().get(logical);
        changing.or_else(|| self.writing.read().get(logical))
    }

    /// Takes off the changed blocks for writing. They do not change any more.
    pub(crate) fn take_off(&self) -> Arc<DirtyBlocks> {
        let mut writing = self.writing.write();
        *writing = Arc::new(std::mem::take(&mut *self.changing.write()));
        writing.clone()
    }
}
