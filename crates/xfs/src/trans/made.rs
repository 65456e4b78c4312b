//! New inodes. The log has one short item for a chunk of them, and nothing of their buffers: each
//! cluster holds the tail of the log until it was written.

use std::sync::Arc;

use offshoot_kit::sync::Mutex;
use offshoot_vfs::Result;
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::items::XfsIcreateItem;
use offshoot_xfs_format::log::{XfsLogItem, XfsLogVector};

use super::inode_item::leave_freed;
use super::shared::TransactionShared;
use crate::buffer::{DiskRun, XfsBuffer};
use crate::log::{HomeOutcome, HomeWrites, LoggedItem, LoggedKind, LoggedSize, LoggedState};

/// The bytes of the item.
const ITEM_SIZE: usize = 28;

/// The item for a chunk of new inodes.
#[derive(Debug)]
pub(super) struct MadeChunk {
    item: XfsIcreateItem,
    log: LoggedState,
}

impl MadeChunk {
    pub(super) fn new(item: XfsIcreateItem) -> Self {
        Self { item, log: LoggedState::default() }
    }
}

impl LoggedItem for MadeChunk {
    fn state(&self) -> &LoggedState {
        &self.log
    }

    fn kind(&self) -> LoggedKind {
        LoggedKind::Once
    }

    fn size(&self) -> LoggedSize {
        LoggedSize { bytes: ITEM_SIZE, regions: 1 }
    }

    fn format(&self, to: &mut XfsLogVector) {
        // Only items of unknown types are not encoded.
        let _is_encoded = XfsLogItem::Icreate(self.item).encode(to);
    }

    fn pin(&self) {}

    fn unpin(&self, _lsn: Option<Lsn>) {}

    fn write_home(self: Arc<Self>, _home: &mut HomeWrites) -> Result<HomeOutcome> {
        Ok(HomeOutcome::Queued)
    }

    fn written(&self, _is_clean: bool) {}
}

/// A cluster of new inodes that was not written yet.
#[derive(Debug)]
pub(super) struct MadeCluster {
    pub(super) run: DiskRun,
    shared: Arc<TransactionShared>,
    log: LoggedState,
    state: Mutex<MadeState>,
}

#[derive(Debug)]
struct MadeState {
    /// The contexts of the log that hold it, and the commit before that.
    pins: u32,
    is_committing: bool,
    /// The bytes that are on their way home.
    writing: Option<Arc<XfsBuffer>>,
}

impl MadeCluster {
    /// A cluster that a commit makes. It stays where it is until [`Self::committed`].
    pub(super) fn new(run: DiskRun, shared: &Arc<TransactionShared>) -> Self {
        let state = MadeState { pins: 0, is_committing: true, writing: None };
        let (shared, log) = (shared.clone(), LoggedState::default());
        Self { run, shared, log, state: Mutex::new(state) }
    }

    /// Says that the log has the commit.
    pub(super) fn committed(&self) {
        self.state.lock().is_committing = false;
    }

    fn is_pinned(&self) -> bool {
        let state = self.state.lock();
        state.pins > 0 || state.is_committing
    }

    /// Says in which bytes the cluster goes home. Returns false when it must not yet.
    pub(super) fn write_in(&self, cluster: &Arc<XfsBuffer>) -> bool {
        let mut state = self.state.lock();
        let may_go = state.pins == 0 && !state.is_committing;
        if may_go {
            state.writing = Some(cluster.clone());
        }
        may_go
    }
}

impl LoggedItem for MadeCluster {
    fn state(&self) -> &LoggedState {
        &self.log
    }

    fn kind(&self) -> LoggedKind {
        LoggedKind::Home
    }

    /// Nothing of it is logged.
    fn size(&self) -> LoggedSize {
        LoggedSize::default()
    }

    fn format(&self, _to: &mut XfsLogVector) {}

    fn pin(&self) {
        self.state.lock().pins += 1;
    }

    fn unpin(&self, _lsn: Option<Lsn>) {
        let mut state = self.state.lock();
        state.pins = state.pins.saturating_sub(1);
    }

    fn write_home(self: Arc<Self>, home: &mut HomeWrites) -> Result<HomeOutcome> {
        if self.is_pinned() {
            return Ok(HomeOutcome::Pinned);
        }
        // With an inode of the cluster.
        if home.has_item(self.run.at, self.state.lock().writing.is_some()) {
            return Ok(HomeOutcome::Queued);
        }
        if self.shared.is_made(&self) {
            return self.shared.write_cluster(self.run, home);
        }
        Ok(leave_freed(&self.shared.clone(), self.run, &[self], home))
    }

    fn written(&self, _is_clean: bool) {
        if let Some(cluster) = self.state.lock().writing.take() {
            self.shared.buffers.settle(&cluster, &cluster);
        }
        self.shared.drop_made(self);
    }
}
