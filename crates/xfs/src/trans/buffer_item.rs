//! A buffer that the log carries: its committed bytes, and what of them has changed since they were
//! last in their place.

use std::sync::Arc;

use offshoot_kit::counter::count;
use offshoot_kit::sync::Mutex;
use offshoot_vfs::Result;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::log::XfsLogVector;
use offshoot_xfs_format::log::items::{
    XfsBufferFlags, XfsBufferType, buffer_size, encode_buffer, patch_buffer,
};
use offshoot_xfs_format::{BasicBlock, Lsn, XfsGeometry};
use zerocopy::little_endian as le;

use super::chunks::DirtyChunks;
use super::runs::BufferRuns;
use super::shared::TransactionShared;
use crate::buffer::{BufferRole, XfsBuffer};
use crate::log::{HomeOutcome, HomeWrites, LoggedItem, LoggedKind, LoggedSize, LoggedState};

/// A buffer that the log carries. There is at most one for a place.
#[derive(Debug)]
pub(super) struct LoggedBuffer {
    runs: BufferRuns,
    shared: Arc<TransactionShared>,
    log: LoggedState,
    state: Mutex<BufferState>,
}

#[derive(Debug)]
pub(super) struct BufferState {
    /// The committed bytes; none of a buffer that was never committed, or whose blocks were freed.
    buffer: Option<Arc<XfsBuffer>>,
    /// What of them has changed since they were last home.
    dirty: DirtyChunks,
    /// Whether the blocks were freed, and the log is to say so.
    is_cancelled: bool,
    /// The contexts of the log that hold the buffer. None of its bytes goes home before each of
    /// these is on the device.
    pins: u32,
    /// The commits that have changed the buffer, and have not pinned it yet.
    committing: u32,
    /// The start of the newest durable checkpoint that has the buffer.
    lsn: Lsn,
    /// The committed bytes that are on their way home.
    writing: Option<Arc<XfsBuffer>>,
    /// The same as the device gets them, where those differ.
    sealed: Option<Arc<XfsBuffer>>,
    /// What the log says that the buffer was when it was formatted last, if that can be patched;
    /// and the chunks of that, which lie in the vector one behind the other.
    formatted: Option<XfsBufferFlags>,
    formatted_dirty: DirtyChunks,
    /// What of the bytes differs from that.
    unformatted: DirtyChunks,
    /// What the newest context has, and what the one before has, until they are proved.
    unproved: Option<Arc<XfsBuffer>>,
    unproved_before: Option<Arc<XfsBuffer>>,
}

/// What a commit makes of a buffer.
pub(super) enum BufferChange {
    /// New bytes, of which these chunks have changed.
    Bytes(Arc<XfsBuffer>, DirtyChunks),
    /// Its blocks are freed.
    Cancelled,
}

impl BufferState {
    /// Whether the log has changes that are not durable, or is about to get some.
    pub(super) fn is_pinned(&self) -> bool {
        self.pins > 0 || self.committing > 0
    }

    /// Says that the newest context has the bytes as they are now.
    fn await_proof(&mut self) {
        let is_unproved = |buffer: &&Arc<XfsBuffer>| buffer.role().is_proved_whole();
        self.unproved = self.buffer.as_ref().filter(is_unproved).cloned();
    }

    /// Takes other bytes, which differ from the ones before in nothing that the log has to carry.
    pub(super) fn exchange(&mut self, buffer: Arc<XfsBuffer>) {
        if self.buffer.is_some() {
            self.buffer = Some(buffer.clone());
            self.writing = Some(buffer);
            self.sealed = None;
        }
    }
}

impl LoggedBuffer {
    pub(super) fn new(runs: BufferRuns, shared: &Arc<TransactionShared>) -> Self {
        let state = BufferState {
            buffer: None,
            dirty: DirtyChunks::new(runs.bytes()),
            is_cancelled: false,
            pins: 0,
            committing: 0,
            lsn: Lsn(0),
            writing: None,
            sealed: None,
            formatted: None,
            formatted_dirty: DirtyChunks::new(runs.bytes()),
            unformatted: DirtyChunks::new(runs.bytes()),
            unproved: None,
            unproved_before: None,
        };
        let (shared, log) = (shared.clone(), LoggedState::default());
        Self { runs, shared, log, state: Mutex::new(state) }
    }

    pub(super) fn lock(&self) -> offshoot_kit::sync::MutexGuard<'_, BufferState> {
        self.state.lock()
    }

    /// Takes what a transaction has changed. The buffer is not written home before
    /// [`Self::committed`] was called as often.
    pub(super) fn commit(&self, change: BufferChange) {
        let mut state = self.state.lock();
        state.committing += 1;
        match change {
            BufferChange::Bytes(buffer, dirty) => {
                state.dirty.merge(&dirty);
                state.unformatted.merge(&dirty);
                state.buffer = Some(buffer);
                state.is_cancelled = false;
            }
            BufferChange::Cancelled => {
                state.dirty.clear();
                state.buffer = None;
                state.is_cancelled = true;
            }
        }
    }

    /// Says that the log has the commit.
    pub(super) fn committed(&self) {
        self.change_pins(|state| state.committing = state.committing.saturating_sub(1));
    }

    /// Changes what pins the buffer. It is no longer being freed when it is durable that it was,
    /// and the commit that freed it has ended: in either order.
    fn change_pins(&self, change: impl FnOnce(&mut BufferState)) {
        let is_freed = {
            let mut state = self.state.lock();
            change(&mut state);
            let is_freed = state.is_cancelled && !state.is_pinned();
            state.is_cancelled &= !is_freed;
            is_freed
        };
        if is_freed {
            self.shared.drop_clean_buffer(self.runs.at());
        }
    }

    /// Whether the log does not say durably yet that the blocks were freed.
    pub(super) fn is_cancelled(&self) -> bool {
        self.state.lock().is_cancelled
    }

    /// Whether nothing of it has to be written or logged.
    pub(super) fn is_home(&self) -> bool {
        let state = self.state.lock();
        !state.is_pinned() && state.dirty.is_empty() && !state.is_cancelled
    }

    fn geometry(&self) -> &XfsGeometry {
        self.shared.buffers.geometry()
    }

    /// Calls `visit` with the place, the bytes and the map of each run that the log has to carry:
    /// it has an item for each of them. Of a buffer that was freed it carries the first run: the
    /// others have buffers of their own then, which are freed too.
    fn each_run(&self, state: &BufferState, mut visit: impl FnMut(BasicBlock, &[u8], &[le::U32])) {
        let Some(buffer) = &state.buffer else {
            let no_bytes = |len| NO_BYTES.get(..len).unwrap_or(&NO_BYTES);
            return self
                .runs
                .iter()
                .take(1)
                .for_each(|run| visit(run.at, no_bytes(run.bytes), &[]));
        };
        if let [run] = self.runs[..] {
            return visit(run.at, buffer.bytes(), state.dirty.words());
        }
        let (mut start, mut rest) = (0, buffer.bytes());
        for run in self.runs.iter() {
            let dirty = state.dirty.part(start..start + run.bytes);
            let (bytes, behind) = rest.split_at(run.bytes.min(rest.len()));
            if !dirty.is_empty() {
                visit(run.at, bytes, dirty.words());
            }
            (start, rest) = (start + run.bytes, behind);
        }
    }
}

/// The bytes of a cancelled buffer, of which only their number counts. The largest buffers are
/// directory blocks and clusters of inodes of 64 KiB.
static NO_BYTES: [u8; 64 << 10] = [0; 64 << 10];

impl LoggedItem for LoggedBuffer {
    fn state(&self) -> &LoggedState {
        &self.log
    }

    fn kind(&self) -> LoggedKind {
        if self.is_cancelled() { LoggedKind::Cancelled } else { LoggedKind::Home }
    }

    fn size(&self) -> LoggedSize {
        let state = self.state.lock();
        let mut sum = LoggedSize::default();
        self.each_run(&state, |_, bytes, dirty| {
            let (bytes, regions) = buffer_size(bytes, dirty);
            sum.bytes += bytes;
            sum.regions += regions;
        });
        sum
    }

    fn format(&self, to: &mut XfsLogVector) {
        let mut state = self.state.lock();
        let flags = state.buffer.as_ref().map(|buffer| flags_of(buffer, self.geometry()));
        let written = flags.unwrap_or(XfsBufferFlags::CANCEL);
        self.each_run(&state, |at, bytes, dirty| encode_buffer(written, at, bytes, dirty, to));
        let state = &mut *state;
        // Of several runs, each has a place of its own in the vector.
        state.formatted = flags.filter(|_| self.runs.len() == 1);
        state.formatted_dirty.copy_from(&state.dirty);
        state.unformatted.clear();
        state.await_proof();
    }

    fn patch(&self, vector: &mut XfsLogVector) -> bool {
        let mut state = self.state.lock();
        let (Some(buffer), Some(formatted)) = (&state.buffer, state.formatted) else {
            return false;
        };
        let is_same =
            state.formatted_dirty == state.dirty && formatted == flags_of(buffer, self.geometry());
        let (dirty, changed) = (state.dirty.words(), state.unformatted.words());
        if !is_same || !patch_buffer(buffer.bytes(), dirty, changed, vector) {
            return false;
        }
        state.unformatted.clear();
        state.await_proof();
        true
    }

    fn pin(&self) {
        let mut state = self.state.lock();
        state.pins += 1;
        // The context before is being pushed, and all before that are proved.
        state.unproved_before = state.unproved.take();
    }

    fn prove(&self) -> Result<()> {
        let unproved = {
            let mut state = self.state.lock();
            let before = state.unproved_before.take();
            before.or_else(|| state.unproved.take())
        };
        let Some(buffer) = unproved else { return Ok(()) };
        count(&self.shared.counters.proofs, 1);
        buffer.role().verify_changed(self.geometry(), buffer.place(), buffer.bytes())
    }

    fn unpin(&self, lsn: Option<Lsn>) {
        self.change_pins(|state| {
            state.pins = state.pins.saturating_sub(1);
            state.lsn = lsn.unwrap_or(state.lsn);
        });
    }

    fn write_home(self: Arc<Self>, home: &mut HomeWrites) -> Result<HomeOutcome> {
        if self.is_inode_cluster() {
            // With an inode of the cluster.
            if home.has_item(self.runs.at(), self.state.lock().writing.is_some()) {
                return Ok(HomeOutcome::Queued);
            }
            if let [run] = self.runs[..] {
                return self.shared.write_cluster(run, home);
            }
        }
        let mut state = self.state.lock();
        if state.is_pinned() {
            return Ok(HomeOutcome::Pinned);
        }
        // No commit takes it before its place among the active items is noted.
        let item: [Arc<dyn LoggedItem>; 1] = [self.clone()];
        let Some(buffer) = state.buffer.clone() else {
            home.add(self.runs.at(), Vec::new(), &item);
            return Ok(HomeOutcome::Queued);
        };
        let sealed = Arc::new(buffer.sealed(&self.shared.buffers, state.lsn)?);
        count(&self.shared.counters.seals, 1);
        state.writing = Some(buffer);
        state.sealed = Some(sealed.clone());
        if let [run] = self.runs[..] {
            home.add(run.at, sealed, &item);
            return Ok(HomeOutcome::Queued);
        }
        let (mut items, mut rest) = (&item[..], sealed.bytes());
        for run in self.runs.iter() {
            let (bytes, behind) = rest.split_at(run.bytes.min(rest.len()));
            home.add(run.at, bytes.to_vec(), std::mem::take(&mut items));
            rest = behind;
        }
        Ok(HomeOutcome::Queued)
    }

    fn written(&self, _is_clean: bool) {
        let mut state = self.state.lock();
        let sealed = state.sealed.take();
        if let Some(written) = state.writing.take() {
            self.shared.buffers.settle(&written, sealed.as_ref().unwrap_or(&written));
            if state.buffer.as_ref().is_some_and(|newest| Arc::ptr_eq(newest, &written)) {
                state.dirty.clear();
                state.formatted = None;
            }
        }
        drop(state);
        self.shared.drop_clean_buffer(self.runs.at());
    }
}

impl LoggedBuffer {
    fn is_inode_cluster(&self) -> bool {
        let state = self.state.lock();
        state.buffer.as_ref().is_some_and(|buffer| buffer.role() == BufferRole::InodeCluster)
    }
}

/// What the log says that a buffer is.
fn flags_of(buffer: &XfsBuffer, geometry: &XfsGeometry) -> XfsBufferFlags {
    use XfsBufferType as Type;
    let block_type = match buffer.role() {
        BufferRole::Superblock => Type::Superblock,
        BufferRole::FreeSpace(_) => Type::Agf,
        BufferRole::Inodes(_) => Type::Agi,
        BufferRole::FreeList(_) => Type::Agfl,
        BufferRole::TreeBlock(..) => Type::Btree,
        BufferRole::InodeCluster => {
            return XfsBufferFlags::of(Type::Inodes) | XfsBufferFlags::INODES;
        }
        BufferRole::Directory(..) => match DaKind::of_directory(geometry, buffer.bytes()) {
            Some(DaKind::DirBlock) => Type::DirectoryBlock,
            Some(DaKind::DirData) => Type::DirectoryData,
            Some(DaKind::DirFree) => Type::DirectoryFree,
            Some(DaKind::DirLeaf) => Type::DirectoryLeaf,
            Some(DaKind::DirNodeLeaf) => Type::DirectoryLeafOfNode,
            _ => Type::Node,
        },
        BufferRole::Attributes(..) => match DaKind::of_attributes(geometry, buffer.bytes()) {
            Some(DaKind::AttrLeaf) => Type::AttributeLeaf,
            _ => Type::Node,
        },
        BufferRole::SymlinkTarget(_) => Type::Symlink,
    };
    XfsBufferFlags::of(block_type)
}
