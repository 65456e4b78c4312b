//! An inode that the log carries: its committed bytes, and what of them has changed since they were
//! last in their place.

use std::ops::Range;
use std::sync::Arc;

use offshoot_kit::sync::{Mutex, MutexGuard};
use offshoot_vfs::{Malformed, Result};
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::inode::{XfsFork, XfsInode, XfsInodeCore};
use offshoot_xfs_format::log::items::{
    CORE_SIZE, XfsInodeFields as Fields, XfsInodeItem, core_for_log,
};
use offshoot_xfs_format::log::{BLOCK, XfsLogItem, XfsLogVector};
use offshoot_xfs_format::{Ino, Lsn, XfsGeometry};
use zerocopy::IntoBytes;

use super::shared::TransactionShared;
use crate::buffer::{DiskRun, XfsBuffer};
use crate::log::{
    HomeOutcome, HomeWrites, LogSequence, LoggedItem, LoggedKind, LoggedSize, LoggedState,
};

/// The bytes of the first region of an inode.
const FORMAT_SIZE: usize = 56;

/// Where a core has the chain of unlinked inodes. The items of inodes never carry it: it changes in
/// the cluster alone.
pub(super) const NEXT_UNLINKED: usize = std::mem::offset_of!(XfsInodeCore, next_unlinked);

/// Where an inode lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InodePlace {
    pub(super) ino: Ino,
    /// The cluster that the inode is read and written with.
    pub(super) cluster: DiskRun,
    /// Where it lies in the cluster, in bytes.
    pub(super) offset: usize,
}

/// An inode that the log carries. There is at most one for a number.
#[derive(Debug)]
pub(super) struct XfsLoggedInode {
    pub(super) place: InodePlace,
    shared: Arc<TransactionShared>,
    log: LoggedState,
    state: Mutex<InodeState>,
}

#[derive(Debug)]
pub(super) struct InodeState {
    /// The committed inode, as it is stored, but for its LSN, its chain of unlinked inodes, and its
    /// checksum.
    bytes: Arc<[u8]>,
    regions: InodeRegions,
    /// What of it has changed since it was last home.
    fields: Fields,
    pins: u32,
    committing: u32,
    /// The context of its last commit.
    sequence: Option<LogSequence>,
    lsn: Lsn,
    /// Whether the chunk of the inode was freed: then it never goes home.
    is_stale: bool,
    /// How often it was committed.
    version: u64,
    /// The version that is on its way home, in these bytes of its cluster.
    writing: Option<(u64, Arc<XfsBuffer>)>,
}

/// A commit of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XfsInodeCommit {
    /// The context, which may have several commits of one inode.
    pub(crate) sequence: LogSequence,
    /// Which of them.
    version: u64,
}

/// What a commit makes of an inode.
pub(super) struct InodeChange {
    /// The inode as it is stored. It gets its checksum on its way home.
    bytes: Arc<[u8]>,
    fields: Fields,
    regions: InodeRegions,
}

/// What the log carries of the forks of an inode, found before the commit so that formatting
/// allocates nothing.
#[derive(Debug, Default)]
struct InodeRegions {
    data: Option<ForkRegion>,
    attributes: Option<ForkRegion>,
    device: u32,
}

/// What the log carries of a fork that is not empty.
#[derive(Debug)]
struct ForkRegion {
    field: Fields,
    bytes: RegionBytes,
}

/// The bytes that the log carries of a fork.
#[derive(Debug)]
enum RegionBytes {
    /// Those here in the inode.
    Inode(Range<usize>),
    /// The root of a tree, which the log has in another form.
    Root(Vec<u8>),
}

impl InodeChange {
    /// The change to these bytes, which are proved here. They have no checksum.
    pub(super) fn new(
        bytes: Arc<[u8]>,
        fields: Fields,
        geometry: &XfsGeometry,
        ino: Ino,
    ) -> Result<Self, Malformed> {
        let regions = InodeRegions::of(&bytes, geometry, ino)?;
        Ok(Self { bytes, fields, regions })
    }
}

impl InodeRegions {
    fn of(bytes: &[u8], geometry: &XfsGeometry, ino: Ino) -> Result<Self, Malformed> {
        let inode = XfsInode::verify_unsealed(bytes, geometry, ino)?;
        if inode.core.is_free() {
            return Ok(Self::default());
        }
        let room = inode.core.fork_room(geometry)?;
        let fields = [Fields::DATA_LOCAL, Fields::DATA_EXTENTS, Fields::DATA_ROOT];
        let data = ForkRegion::of(&inode.data, room.data.start, fields, geometry, ino);
        let fields =
            [Fields::ATTRIBUTES_LOCAL, Fields::ATTRIBUTES_EXTENTS, Fields::ATTRIBUTES_ROOT];
        let attributes = match inode.attributes {
            // Its own header says how much of the room it uses.
            Some(XfsFork::Local(bytes)) => {
                let used = bytes.first_chunk().map_or(0, |len| u16::from_be_bytes(*len));
                let used = bytes.get(..used.into()).unwrap_or(bytes);
                ForkRegion::of(&XfsFork::Local(used), room.attributes.start, fields, geometry, ino)
            }
            Some(fork) => ForkRegion::of(&fork, room.attributes.start, fields, geometry, ino),
            None => None,
        };
        let device = if let XfsFork::Device(field) = inode.data { field } else { 0 };
        Ok(Self { data, attributes, device })
    }
}

impl ForkRegion {
    /// That of a fork that begins at `start`; none when there is nothing in it.
    fn of(
        fork: &XfsFork<'_>,
        start: usize,
        [local, extents, root]: [Fields; 3],
        geometry: &XfsGeometry,
        ino: Ino,
    ) -> Option<Self> {
        let here = |len| RegionBytes::Inode(start..start + len);
        let (field, bytes) = match fork {
            XfsFork::Local(bytes) => (local, here(bytes.len())),
            XfsFork::Extents(items) => (extents, here(items.as_bytes().len())),
            XfsFork::Btree(tree) => (root, RegionBytes::Root(tree.to_log(geometry, ino))),
            XfsFork::Device(_) | XfsFork::MetaBtree(_) => return None,
        };
        let region = Self { field, bytes };
        (region.len() > 0).then_some(region)
    }

    fn len(&self) -> usize {
        match &self.bytes {
            RegionBytes::Inode(range) => range.len(),
            RegionBytes::Root(bytes) => bytes.len(),
        }
    }

    fn bytes<'a>(&'a self, inode: &'a [u8]) -> &'a [u8] {
        match &self.bytes {
            RegionBytes::Inode(range) => inode.get(range.clone()).unwrap_or_default(),
            RegionBytes::Root(bytes) => bytes,
        }
    }
}

impl InodeState {
    pub(super) fn is_pinned(&self) -> bool {
        self.pins > 0 || self.committing > 0
    }

    pub(super) fn is_stale(&self) -> bool {
        self.is_stale
    }

    pub(super) fn make_stale(&mut self) {
        self.is_stale = true;
    }

    /// Whether it has to be written home, and may be.
    pub(super) fn may_go_home(&self) -> bool {
        !self.is_pinned() && !self.is_stale && !self.fields.is_empty()
    }

    /// Writes the inode over `place`, its bytes in the cluster, proved and complete with LSN and
    /// checksum. The chain of unlinked inodes there stays.
    pub(super) fn put(
        &self,
        place: &mut [u8],
        geometry: &XfsGeometry,
        ino: Ino,
    ) -> Result<(), Malformed> {
        let chain = place.get(NEXT_UNLINKED..).and_then(<[u8]>::first_chunk::<4>).copied();
        place.copy_from_slice(&self.bytes);
        if let Some(to) = place.get_mut(NEXT_UNLINKED..).and_then(<[u8]>::first_chunk_mut) {
            *to = chain.unwrap_or_default();
        }
        XfsInode::verify_unsealed(place, geometry, ino)?;
        XfsIdentity::INODE.seal(place, self.lsn);
        Ok(())
    }

    /// Says in which bytes of the cluster this version goes home.
    pub(super) fn write_in(&mut self, cluster: &Arc<XfsBuffer>) {
        self.writing = Some((self.version, cluster.clone()));
    }

    /// The region of a fork, if a field of `any` is to be logged.
    fn logged<'a>(&self, any: Fields, region: Option<&'a ForkRegion>) -> Option<&'a ForkRegion> {
        region.filter(|_| self.fields.intersects(any))
    }

    fn size(&self) -> LoggedSize {
        let data = self.logged(Fields::DATA, self.regions.data.as_ref());
        let attributes = self.logged(Fields::ATTRIBUTES, self.regions.attributes.as_ref());
        let forks = [data, attributes].into_iter().flatten();
        let fixed = LoggedSize { bytes: FORMAT_SIZE + CORE_SIZE, regions: 2 };
        forks.fold(fixed, |size, fork| LoggedSize {
            bytes: size.bytes + fork.len().next_multiple_of(4),
            regions: size.regions + 1,
        })
    }

    fn format(&self, inode: &XfsLoggedInode, to: &mut XfsLogVector) {
        let data = self.logged(Fields::DATA, self.regions.data.as_ref());
        let attributes = self.logged(Fields::ATTRIBUTES, self.regions.attributes.as_ref());
        let forks = [data, attributes].into_iter().flatten();
        let others = self.fields & (Fields::CORE | Fields::DEVICE);
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let core = self.bytes.first_chunk().map_or([0; CORE_SIZE], core_for_log);
        let item = XfsInodeItem {
            fields: forks.fold(others, |fields, fork| fields | fork.field),
            ino: inode.place.ino,
            device: self.regions.device,
            place: inode.place.cluster.at,
            blocks: number(inode.place.cluster.bytes / BLOCK),
            offset: number(inode.place.offset),
            core: &core,
            data: data.map(|fork| fork.bytes(&self.bytes)),
            attributes: attributes.map(|fork| fork.bytes(&self.bytes)),
        };
        // Only items of unknown types are not encoded.
        let _is_encoded = XfsLogItem::Inode(item).encode(to);
    }
}

impl XfsLoggedInode {
    pub(super) fn new(place: InodePlace, shared: &Arc<TransactionShared>) -> Self {
        let state = InodeState {
            bytes: Arc::default(),
            regions: InodeRegions::default(),
            fields: Fields::empty(),
            pins: 0,
            committing: 0,
            sequence: None,
            lsn: Lsn(0),
            is_stale: false,
            version: 0,
            writing: None,
        };
        let (shared, log) = (shared.clone(), LoggedState::default());
        Self { place, shared, log, state: Mutex::new(state) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, InodeState> {
        self.state.lock()
    }

    /// Takes what a transaction has changed. The inode is not written home before
    /// [`Self::committed`] was called as often.
    pub(super) fn commit(&self, change: InodeChange) {
        let InodeChange { bytes, fields, regions } = change;
        let mut state = self.state.lock();
        state.committing += 1;
        state.version += 1;
        state.fields |= fields | Fields::CORE;
        (state.bytes, state.regions) = (bytes, regions);
    }

    /// Says that the log has the commit, in this context.
    pub(super) fn committed(&self, sequence: Option<LogSequence>) {
        let mut state = self.state.lock();
        state.sequence = sequence.or(state.sequence);
        state.committing = state.committing.saturating_sub(1);
    }

    /// The committed bytes; none of an inode that was not committed yet.
    pub(super) fn bytes(&self) -> Option<Arc<[u8]>> {
        Some(self.state.lock().bytes.clone()).filter(|bytes| !bytes.is_empty())
    }

    /// Its last commit.
    pub(super) fn last_commit(&self) -> Option<XfsInodeCommit> {
        let state = self.state.lock();
        state.sequence.map(|sequence| XfsInodeCommit { sequence, version: state.version })
    }

    /// Whether nothing of it has to be written or logged.
    pub(super) fn is_home(&self) -> bool {
        let state = self.state.lock();
        !state.is_pinned() && state.fields.is_empty()
    }
}

impl LoggedItem for XfsLoggedInode {
    fn state(&self) -> &LoggedState {
        &self.log
    }

    fn kind(&self) -> LoggedKind {
        LoggedKind::Home
    }

    fn size(&self) -> LoggedSize {
        self.state.lock().size()
    }

    fn format(&self, to: &mut XfsLogVector) {
        self.state.lock().format(self, to);
    }

    fn keeps_vectors(&self) -> bool {
        false
    }

    fn pin(&self) {
        self.state.lock().pins += 1;
    }

    fn unpin(&self, lsn: Option<Lsn>) {
        let mut state = self.state.lock();
        state.pins = state.pins.saturating_sub(1);
        state.lsn = lsn.unwrap_or(state.lsn);
    }

    fn write_home(self: Arc<Self>, home: &mut HomeWrites) -> Result<HomeOutcome> {
        let cluster = self.place.cluster;
        let is_stale = {
            let state = self.state.lock();
            if state.is_pinned() {
                return Ok(HomeOutcome::Pinned);
            }
            // With another inode of the cluster.
            if home.has_item(cluster.at, state.writing.is_some()) {
                return Ok(HomeOutcome::Queued);
            }
            state.is_stale
        };
        if is_stale {
            return Ok(leave_freed(&self.shared.clone(), cluster, &[self], home));
        }
        let outcome = self.shared.write_cluster(cluster, home)?;
        let is_in = self.state.lock().writing.is_some();
        let is_missing = outcome == HomeOutcome::Queued && !is_in;
        Ok(if is_missing { HomeOutcome::Pinned } else { outcome })
    }

    fn written(&self, _is_clean: bool) {
        let mut state = self.state.lock();
        if let Some((version, cluster)) = state.writing.take() {
            self.shared.buffers.settle(&cluster, &cluster);
            if version == state.version {
                state.fields = Fields::empty();
            }
        }
        // A commit that is on its way to the log formats the fields that its size was taken for.
        // Its context is written home later, and they go then.
        if state.is_stale && !state.is_pinned() {
            state.fields = Fields::empty();
        }
        drop(state);
        self.shared.drop_clean_inode(self.place.ino);
    }
}

/// Ends the wait of items in a freed cluster, which have nothing to write: once it is durable that
/// the cluster is free. Until then they hold the tail of the log.
pub(super) fn leave_freed(
    shared: &TransactionShared,
    cluster: DiskRun,
    items: &[Arc<dyn LoggedItem>],
    home: &mut HomeWrites,
) -> HomeOutcome {
    if shared.is_being_freed(cluster) {
        return HomeOutcome::Pinned;
    }
    home.add(cluster.at, Vec::<u8>::new(), items);
    HomeOutcome::Queued
}
