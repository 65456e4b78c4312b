//! What all transactions of a volume share: the locks, and the tables of what the log carries.

use std::sync::Arc;

use offshoot_kit::counter::count;
use offshoot_kit::shards::{MapShard, ShardedMap};
use offshoot_kit::sync::MutexGuard;
use offshoot_vfs::Result;
use offshoot_xfs_format::record::CHUNK_INODES;
use offshoot_xfs_format::{AgIno, BasicBlock, Ino};

use super::buffer_item::{BufferChange, LoggedBuffer};
use super::inode_item::{InodeChange, InodePlace, XfsLoggedInode};
use super::locks::KeyLocks;
use super::made::MadeCluster;
use super::runs::BufferRuns;
use super::statistics::CommitCounters;
use crate::buffer::{BufferRole, DiskRun, XfsBuffer, XfsBuffers, malformed};
use crate::log::{HomeOutcome, HomeWrites, LoggedItem};

/// Empties the tables when the volume is not written any more. Each item in them has all of this,
/// so what never went home would keep the device open.
#[derive(Debug)]
pub(super) struct EmptiedTables(pub(super) Arc<TransactionShared>);

impl Drop for EmptiedTables {
    fn drop(&mut self) {
        let Self(shared) = self;
        shared.logged_buffers.clear();
        shared.logged_inodes.clear();
        shared.made_clusters.clear();
    }
}

/// What holds the lock of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufferHolder {
    /// A transaction, for which it is this.
    Transaction(BufferRole),
    /// The thread that writes it home.
    WriteHome,
}

/// What all transactions of a volume share.
#[derive(Debug)]
pub(crate) struct TransactionShared {
    pub(super) buffers: Arc<XfsBuffers>,
    pub(super) buffer_locks: KeyLocks<BasicBlock, BufferHolder>,
    pub(super) inode_locks: KeyLocks<Ino>,
    /// The buffers that are not home.
    logged_buffers: ShardedMap<BasicBlock, Arc<LoggedBuffer>>,
    /// The inodes that are not home. Those of a chunk are in one shard.
    logged_inodes: ShardedMap<Ino, Arc<XfsLoggedInode>>,
    /// Clusters that were made and are not home.
    made_clusters: ShardedMap<BasicBlock, Arc<MadeCluster>>,
    pub(super) counters: CommitCounters,
}

impl TransactionShared {
    pub(super) fn new(buffers: Arc<XfsBuffers>) -> Arc<Self> {
        Arc::new(Self {
            buffers,
            buffer_locks: KeyLocks::new(),
            inode_locks: KeyLocks::new(),
            logged_buffers: ShardedMap::default(),
            logged_inodes: ShardedMap::default(),
            made_clusters: ShardedMap::default(),
            counters: CommitCounters::default(),
        })
    }

    /// The part of the table of inodes that has an inode, and the others of its chunk.
    fn inode_shard(&self, ino: Ino) -> MutexGuard<'_, MapShard<Ino, Arc<XfsLoggedInode>>> {
        self.logged_inodes.shard_numbered(ino.0 / u64::from(CHUNK_INODES))
    }

    /// What the log carries of a buffer.
    pub(super) fn logged_buffer(&self, place: BasicBlock) -> Option<Arc<LoggedBuffer>> {
        self.logged_buffers.shard(&place).get(&place).cloned()
    }

    /// The item of a buffer that a commit changes, with the change. The caller has its lock.
    pub(super) fn commit_buffer(
        self: &Arc<Self>,
        runs: &BufferRuns,
        change: BufferChange,
    ) -> Arc<LoggedBuffer> {
        let mut table = self.logged_buffers.shard(&runs.at());
        let new = || Arc::new(LoggedBuffer::new(runs.clone(), self));
        let item = table.entry(runs.at()).or_insert_with(new).clone();
        // Under the lock of the table, so that nobody removes it as clean.
        item.commit(change);
        item
    }

    /// Removes a buffer from the table if nothing of it has to be written or logged.
    pub(super) fn drop_clean_buffer(&self, place: BasicBlock) {
        let mut table = self.logged_buffers.shard(&place);
        if table.get(&place).is_some_and(|item| item.is_home()) {
            table.remove(&place);
        }
    }

    /// What the log carries of an inode, unless its chunk was freed.
    pub(super) fn logged_inode(&self, ino: Ino) -> Option<Arc<XfsLoggedInode>> {
        self.inode_shard(ino).get(&ino).filter(|item| !item.lock().is_stale()).cloned()
    }

    /// The item of an inode that a commit changes, with the change. The caller has its lock.
    pub(super) fn commit_inode(
        self: &Arc<Self>,
        place: InodePlace,
        change: InodeChange,
    ) -> Arc<XfsLoggedInode> {
        let mut table = self.inode_shard(place.ino);
        let new = || Arc::new(XfsLoggedInode::new(place, self));
        let item = table.entry(place.ino).or_insert_with(new);
        if item.lock().is_stale() {
            // The item of the inode that was in this place before stays with the log.
            *item = new();
        }
        item.commit(change);
        item.clone()
    }

    /// Removes an inode from the table if nothing of it has to be written or logged.
    pub(super) fn drop_clean_inode(&self, ino: Ino) {
        let mut table = self.inode_shard(ino);
        if table.get(&ino).is_some_and(|item| item.is_home()) {
            table.remove(&ino);
            // Readers find it in its cluster.
            self.buffers.forget_inode(ino);
        }
    }

    /// The item of a cluster of new inodes.
    pub(super) fn commit_made(self: &Arc<Self>, run: DiskRun) -> Arc<MadeCluster> {
        let item = Arc::new(MadeCluster::new(run, self));
        self.made_clusters.shard(&run.at).insert(run.at, item.clone());
        item
    }

    /// Whether the cluster of `item` is still to be written, and was not freed.
    pub(super) fn is_made(&self, item: &MadeCluster) -> bool {
        let table = self.made_clusters.shard(&item.run.at);
        table.get(&item.run.at).is_some_and(|found| std::ptr::eq(Arc::as_ptr(found), item))
    }

    /// Removes a cluster from the table, if `item` is the one there.
    pub(super) fn drop_made(&self, item: &MadeCluster) {
        let mut table = self.made_clusters.shard(&item.run.at);
        if table.get(&item.run.at).is_some_and(|found| std::ptr::eq(Arc::as_ptr(found), item)) {
            table.remove(&item.run.at);
        }
    }

    /// Says that nothing in a cluster goes home any more, because its blocks were freed.
    pub(super) fn free_cluster(&self, run: DiskRun) {
        self.inodes_in(run).iter().for_each(|inode| inode.lock().make_stale());
        self.made_clusters.shard(&run.at).remove(&run.at);
    }

    /// Removes what readers find of the inodes of a freed cluster. The tree of inodes says by now
    /// that they are free: before, a reader would look for them in the cluster, which has older
    /// ones.
    pub(super) fn forget_freed_cluster(&self, run: DiskRun) {
        for inode in self.inodes_in(run) {
            self.buffers.forget_inode(inode.place.ino);
        }
    }

    /// Whether it is not durable yet that a cluster was freed.
    pub(super) fn is_being_freed(&self, run: DiskRun) -> bool {
        self.logged_buffer(run.at).is_some_and(|item| item.is_cancelled())
    }

    /// The logged inodes of a cluster, in their order.
    fn inodes_in(&self, run: DiskRun) -> Vec<Arc<XfsLoggedInode>> {
        let geometry = self.buffers.geometry();
        let Some((ag, block)) = geometry.at(run.at) else { return Vec::new() };
        let first = geometry.ino(ag, AgIno(block.0 << geometry.inodes_per_block_log())).0;
        let count = (run.bytes >> geometry.inode_log) as u64;
        // A cluster is in one chunk, or a block has several chunks.
        let (mut inodes, mut start, end) = (Vec::new(), first, first + count);
        let chunk = u64::from(CHUNK_INODES);
        while start < end {
            let next = (start / chunk + 1) * chunk;
            let table = self.inode_shard(Ino(start));
            inodes.extend((start..next.min(end)).filter_map(|ino| table.get(&Ino(ino)).cloned()));
            start = next;
        }
        inodes
    }

    /// Writes a cluster home, with all inodes of it that are logged and not pinned.
    pub(super) fn write_cluster(&self, run: DiskRun, home: &mut HomeWrites) -> Result<HomeOutcome> {
        if !self.buffer_locks.try_lock(run.at, BufferHolder::WriteHome) {
            return Ok(HomeOutcome::Busy);
        }
        let outcome = self.write_locked_cluster(run, home);
        self.buffer_locks.unlock(run.at);
        outcome
    }

    fn write_locked_cluster(&self, run: DiskRun, home: &mut HomeWrites) -> Result<HomeOutcome> {
        let geometry = self.buffers.geometry();
        let chain = self.logged_buffer(run.at);
        let mut chain_state = chain.as_ref().map(|item| item.lock());
        if chain_state.as_ref().is_some_and(|state| state.is_pinned()) {
            return Ok(HomeOutcome::Pinned);
        }
        let mut bytes: Box<[u8]> =
            self.buffers.read(&[run], BufferRole::InodeCluster)?.bytes().into();
        let inodes = self.inodes_in(run);
        let mut items: Vec<Arc<dyn LoggedItem>> = Vec::new();
        let mut states = Vec::new();
        for inode in &inodes {
            let state = inode.lock();
            let place = bytes.get_mut(inode.place.offset..).and_then(|rest| {
                rest.get_mut(..geometry.inode_size()).filter(|_| state.may_go_home())
            });
            let Some(place) = place else { continue };
            state.put(place, geometry, inode.place.ino).map_err(malformed)?;
            items.push(inode.clone());
            states.push(state);
        }
        count(&self.counters.seals, states.len() as u64);
        let cluster = XfsBuffer::changed(BufferRole::InodeCluster, run.at, bytes);
        let cluster = Arc::new(cluster);
        self.buffers.publish(cluster.clone());
        for state in &mut states {
            state.write_in(&cluster);
        }
        if let Some(state) = &mut chain_state {
            state.exchange(cluster.clone());
        }
        items.extend(chain.as_ref().map(|item| -> Arc<dyn LoggedItem> { item.clone() }));
        let made = self.made_clusters.shard(&run.at).get(&run.at).cloned();
        if let Some(made) = made.filter(|made| made.write_in(&cluster)) {
            items.push(made);
        }
        home.add(run.at, cluster, &items);
        Ok(HomeOutcome::Queued)
    }
}
