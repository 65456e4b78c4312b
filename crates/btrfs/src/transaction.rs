//! Transactions: changes that reach the devices together, and how they get there.
//!
//! ```text
//!             handles join and leave         the gate is shut              the gate is open again
//!  running  |--------------------------->| finish: references, items, |   next transaction runs
//!                                        | roots, superblock in memory|
//!  committing                                                         |--> write blocks, flush,
//!                                                                     |    superblocks, flush
//! ```
//!
//! A [`TransactionHandle`] is a share in the running transaction, which cannot end while a thread
//! holds one. A commit shuts the gate, waits for all handles to be dropped, and then works alone.
//! It runs the delayed references. This changes the extent and free-space trees, which queues more
//! references, so the commit repeats this until none are left. Then it stores the roots. Now the
//! next transaction begins, and the blocks of the finished one are written: they never change
//! again.
//!
//! Invariants:
//!
//! 1. A block belongs to the transaction whose number is in its header's generation. Only blocks of
//!    the running transaction change.
//! 2. The blocks that the last commit points to are neither changed nor allocated again until the
//!    next commit is complete (`space`, pinned ranges).
//! 3. A superblock is written after a barrier that covers everything it points to. A second barrier
//!    follows it, and then its copies are written.
//! 4. When a member fails while a transaction is written, the transaction may be postponed
//!    (`storage/failing`): it becomes durable with the next one.
//! 5. An error or a panic may leave a tree half changed, an operation half applied, or a commit
//!    incomplete. After that, nothing is written any more until the volume is opened again. The
//!    devices hold the last commit ([`LiveVolume::all_or_stop`]).
//!
//! The order of all locks is in `ARCHITECTURE.md`.

mod base;
mod behind;
mod blocks;
mod changing;
mod checksums;
mod chunks;
mod commit;
mod device_stats;
mod extent_tree;
mod hold;
mod kept_commit;
mod log_state;
mod newest;
mod notes;
mod obstacle;
mod quota;
mod refs;
mod relocate;
mod roots;
mod signal;
#[cfg(test)]
mod tests;
mod writeout;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use foldhash::fast::RandomState;
use offshoot_btrfs_format::block::{
    HEADER_MIXED_BACKREF, HEADER_RELOC, HEADER_WRITTEN, LEVEL_COUNT,
};
use offshoot_btrfs_format::edit::{header_mut, insert_items};
use offshoot_btrfs_format::encode::{self, BlockIdentity};
use offshoot_btrfs_format::superblock::{CompatRo, Incompat, SuperblockItem};
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result, Structure};
use tracing::debug;

#[cfg(debug_assertions)]
use crate::block::lock_order;
use crate::block::{DirtyBlocks, Latch, ReadLatch, TreeBlock, WriteLatch, latch_shared};
use crate::counter::WriteStop;
use crate::events::COMMIT;
use crate::options::Mechanisms;
use crate::shared::{Padded, Shared};
use crate::space::{self, Claim, Kept, Purpose, Reservation, Space};
use crate::spread::{SpreadRwLock, SpreadWriteGuard};
use crate::stats::EngineCounters;
use crate::sync::atomic::AtomicU64 as CheckedAtomicU64;
use crate::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use crate::tree::{Blocks, Latching, TreeRoot, TreeWriter};
pub use base::Base;
pub(crate) use changing::{ChangingTree, TreeAndHandle};
pub(crate) use checksums::remove_checksums_beside_writers;
pub(crate) use chunks::system_chunks_of;
pub(crate) use commit::{CommitCause, LastChange, RoomsAbove};
pub(crate) use extent_tree::extents_in;
pub(crate) use hold::QueueAccount;
pub(crate) use log_state::LogState;
pub(crate) use notes::MOST as MOST_NOTES;
pub(crate) use obstacle::Obstacle;
pub(crate) use offshoot_btrfs_format::extent::RefOwner;
use quota::QuotaUsage;
pub(crate) use quota::{NewGroup, Quotas};
use refs::DelayedRefs;
pub(crate) use refs::ExtentKind;
pub(crate) use relocate::{DataMove, PlannedRelocation, Relocation, RelocationLimits};
pub(crate) use roots::{
    RootCache, StoredRoot, chunk_tree_root, require_one_root_item, require_own_root, root_item,
    root_item_key, root_of, stands_at, stored_root, tree_root,
};
pub(crate) use signal::CommitterSignal;

/// The number of locks for the reference counts of shared blocks.
const COUNTING: usize = 64;

/// The part of a volume that can change.
pub(crate) struct LiveVolume {
    phases: SpreadRwLock<Phases>,
    /// The number of the oldest transaction that may have blocks in memory. All blocks of older
    /// ones are on the devices, so a reader of them does without the phases. It only grows, when
    /// the phases change. A reader that sees an old value looks at the phases for nothing.
    oldest: Padded<CheckedAtomicU64>,
    /// Held shared by every handle, and exclusively while a commit finishes.
    gate: SpreadRwLock<()>,
    /// Held by the one commit that runs.
    commit: Mutex<()>,
    trees: SpreadRwLock<HashMap<TreeId, Arc<ChangingTree>, RandomState>>,
    pub(crate) space: Arc<Space>,
    /// The error that ended all writing, if any.
    stop: Arc<WriteStop>,
    /// The lock of the threads that wait for the end of a commit. Under it a thread may lock only
    /// the phases.
    commits: Shared<parking_lot::Mutex<()>>,
    committed: parking_lot::Condvar,
    /// A counter of how often freed space became free. A reader compares it before and after a
    /// search: if it has changed, blocks that the search read may be gone.
    pub(crate) epoch: Padded<CheckedAtomicU64>,
    /// Held shared by a reader that looks up an extent and reads it, after commits made it repeat a
    /// few times. A commit that has shut the gate takes it exclusively for a moment before it frees
    /// anything. So a reader that held the lock before is done by then, and a later one finds
    /// nothing that this commit frees.
    pub(crate) freeing: RwLock<()>,
    /// The superblock of the last commit.
    superblock: Shared<Mutex<Arc<SuperblockItem>>>,
    /// What commits freed and kept commits refer to.
    kept: parking_lot::Mutex<kept_commit::KeptRanges>,
    pub(crate) stats: EngineCounters,
    /// How writers latch the blocks above a leaf.
    latching: Latching,
    /// From how many changed extents on a commit looks them up before it stops writers.
    plans_from: usize,
    /// Held exclusively while checksums are removed, and shared while a thread looks for some or
    /// adds some.
    pub(crate) checksums: SpreadRwLock<()>,
    /// Held while a thread reads the reference count of a shared block, decides by it, and changes
    /// it. Each lock covers some of the blocks.
    counting: [Padded<Mutex<()>>; COUNTING],
    /// The quotas that this volume maintains.
    pub(crate) quotas: Quotas,
    /// Wakes the background thread when much is to be written.
    pub(crate) pressure: Arc<CommitterSignal>,
    /// Whether fsync writes logs.
    has_log: bool,
    /// The bits of features that the volume needs since it was opened.
    new_features: AtomicU64,
    /// The bytes of all members, as the superblock counts them.
    total_bytes: AtomicU64,
    /// The new label, if it was changed.
    pub(crate) new_label: Mutex<Option<Box<[u8; 256]>>>,
}

/// The transactions that have blocks in memory.
struct Phases {
    running: Arc<Transaction>,
    /// The transaction before. When it is on the devices, its blocks that may soon be changed again
    /// stay here.
    before: Option<Arc<Transaction>>,
    /// The transaction before is on the devices.
    is_complete: bool,
    /// The transaction before will be committed with the running one, because a member failed.
    is_postponed: bool,
}

/// The sizes of a member, as its superblock has them.
#[derive(Clone, Copy, Debug)]
struct MemberSizes {
    /// How many bytes of it the volume uses.
    total: u64,
    /// How many bytes of it belong to chunks.
    allocated: u64,
}

/// A transaction: changes that reach the devices together.
pub(crate) struct Transaction {
    pub(crate) id: Generation,
    dirty: DirtyBlocks,
    refs: DelayedRefs,
    /// Trees whose root moved since their root items were stored.
    moved_roots: Mutex<BTreeMap<TreeId, TreeRoot>>,
    /// Trees whose root moved without a change of what is in the tree.
    relocated_roots: Mutex<HashSet<TreeId>>,
    /// Data extents that had other owners before this transaction than after it.
    shared: Mutex<HashSet<u64>>,
    /// Ranges without references. They become free when this transaction is on disk.
    pinned: Mutex<Vec<Range<u64>>>,
    /// The sizes of every member when the transaction was finished.
    sizes: OnceLock<Vec<MemberSizes>>,
    /// Its changes that quotas count.
    usage: QuotaUsage,
    /// The knowledge that the transaction and its log share.
    log: LogState,
}

impl Transaction {
    fn new(id: Generation, pending: Arc<space::CommitWork>, log: LogState) -> Self {
        Self {
            id,
            dirty: DirtyBlocks::default(),
            refs: DelayedRefs::new(pending),
            moved_roots: Mutex::default(),
            relocated_roots: Mutex::default(),
            shared: Mutex::default(),
            pinned: Mutex::default(),
            sizes: OnceLock::new(),
            usage: QuotaUsage::default(),
            log,
        }
    }
}

/// A share in the running transaction.
pub(crate) struct TransactionHandle<'v> {
    volume: &'v Base,
    live: &'v LiveVolume,
    transaction: Arc<Transaction>,
    /// `None` for the commit itself, which holds the gate exclusively.
    gate: Option<GateShare<'v>>,
    /// The space that the operation may need.
    reservation: Option<Reservation<'v>>,
    /// The part of the reservation for one item, in bytes.
    item_cost: u64,
}

/// The gate, held shared. The thread has no other handle: otherwise a commit that waits between its
/// two handles would never end.
struct GateShare<'v> {
    _gate: RwLockReadGuard<'v, ()>,
    #[cfg(debug_assertions)]
    _joined: lock_order::NotedHandle,
}

impl LiveVolume {
    /// The state after the last commit, which has this superblock.
    pub(crate) fn new(
        space: Arc<Space>,
        superblock: Box<SuperblockItem>,
        quotas: Quotas,
        mechanisms: &Mechanisms,
        has_log: bool,
        stop: Arc<WriteStop>,
    ) -> Self {
        let first = Generation(superblock.generation.get() + 1);
        let running = Transaction::new(first, space.pending.clone(), LogState::new(has_log));
        let running = Arc::new(running);
        Self {
            phases: SpreadRwLock::new("phases", || Phases {
                running: running.clone(),
                before: None,
                is_complete: true,
                is_postponed: false,
            }),
            oldest: Padded(CheckedAtomicU64::new(first.0)),
            gate: SpreadRwLock::new("gate", || ()),
            commit: Mutex::new(()),
            trees: SpreadRwLock::with_few_copies("trees", HashMap::default),
            space,
            stop,
            commits: Shared::new("commits", parking_lot::Mutex::new(())),
            committed: parking_lot::Condvar::new(),
            epoch: Padded(CheckedAtomicU64::new(0)),
            freeing: RwLock::new(()),
            total_bytes: AtomicU64::new(superblock.total_bytes.get()),
            superblock: Shared::new("superblock", Mutex::new(superblock.into())),
            kept: parking_lot::Mutex::default(),
            stats: EngineCounters::default(),
            latching: mechanisms.latching,
            plans_from: mechanisms.plans_from,
            checksums: SpreadRwLock::new("checksums", || ()),
            counting: std::array::from_fn(|_| Padded::default()),
            quotas,
            pressure: Arc::default(),
            has_log,
            new_features: AtomicU64::new(0),
            new_label: Mutex::new(None),
        }
    }

    /// The block at `logical` that the transaction `generation` has made, if that transaction is
    /// not on the devices yet, or the block stayed in memory.
    pub(crate) fn recent_block(
        &self,
        generation: Generation,
        logical: Logical,
    ) -> Option<Arc<Latch>> {
        if generation.0 < self.oldest.load(Ordering::Acquire) {
            return None;
        }
        let phases = self.phases.read();
        if phases.running.id == generation {
            let running = &phases.running;
            return running.dirty.get(logical).or_else(|| running.log.block(logical));
        }
        let before = phases.before.as_ref().filter(|one| one.id == generation)?;
        before.dirty.get(logical)
    }

    /// Whether a log that a crash would find may have an extent at an address that the extent has
    /// left.
    pub(crate) fn logs_moved_extents(&self) -> bool {
        let phases = self.phases.read();
        let pending = phases.before.as_ref().filter(|_| !phases.is_complete);
        pending.into_iter().chain([&phases.running]).any(|one| one.log.may_show_moved_extents())
    }

    /// Locks the reference count of the shared block at `logical`. When two threads each find a
    /// count of two and each give up one reference, the second thread must find a count of one.
    fn counting(&self, logical: Logical) -> MutexGuard<'_, ()> {
        // Most blocks have 16 KiB.
        let index = (logical.0 >> 14) as usize % COUNTING;
        self.counting[index].lock()
    }

    /// Asks the thread of the volume for a commit, if that frees enough.
    pub(crate) fn ask_for_commit(&self) {
        if self.given_up().1 >= self.space.worth_a_commit() {
            self.space.is_short.store(true, Ordering::Relaxed);
            self.pressure.press();
        }
    }

    /// The superblock of the last commit.
    pub(crate) fn last_superblock(&self) -> Arc<SuperblockItem> {
        self.superblock.lock().clone()
    }

    /// Counts that a member has another size. The caller has a handle.
    fn count_resized(&self, before: u64, after: u64) {
        self.total_bytes.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }

    /// The bytes of all members, as the superblock counts them.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    /// Waits until the transaction before the running one is on the devices. The caller holds no
    /// handle: that transaction may have been postponed to be committed with the running one
    /// ([`Base::enter_committed`]).
    ///
    /// # Errors
    /// `EROFS` when the volume has stopped writing.
    pub(crate) fn wait_for_commit(&self) -> Result<()> {
        #[cfg(debug_assertions)]
        lock_order::require_no_handle();
        self.wait_until(|phases| phases.is_complete).map(drop)
    }

    /// Waits until `is_so` is true. Returns whether the transaction before the running one is on
    /// the devices then.
    fn wait_until(&self, is_so: impl Fn(&Phases) -> bool) -> Result<bool> {
        let look = || {
            self.require_writing()?;
            let phases = self.phases.read();
            Ok::<_, Error>(is_so(&phases).then_some(phases.is_complete))
        };
        // Usually there is nothing to wait for.
        if let Some(is_complete) = look()? {
            return Ok(is_complete);
        }
        let mut waiting = self.commits.lock();
        loop {
            if let Some(is_complete) = look()? {
                return Ok(is_complete);
            }
            debug!(target: COMMIT, "waiting until the transaction before is on the devices");
            self.committed.wait(&mut waiting);
        }
    }

    /// Wakes the threads that wait for a commit: it is done, or will never be.
    fn tell_of_commit(&self) {
        drop(self.commits.lock());
        self.committed.notify_all();
    }

    /// How many blocks of the transaction before the running one are in memory, and how many of the
    /// running one.
    #[cfg(test)]
    pub(crate) fn blocks_in_memory(&self) -> [usize; 2] {
        let phases = self.phases.read();
        let count = |one: &Arc<Transaction>| one.dirty.all().len();
        [phases.before.as_ref().map_or(0, count), count(&phases.running)]
    }

    /// Whether the transaction that is being written, if any, changed the set of owners of the data
    /// at `logical`.
    fn was_shared(&self, logical: Logical) -> bool {
        let phases = self.phases.read();
        let before = phases.before.as_ref().filter(|_| !phases.is_complete);
        before.is_some_and(|one| one.shared.lock().contains(&logical.0))
    }

    /// Whether a transaction is being written.
    pub(crate) fn is_committing(&self) -> bool {
        !self.phases.read().is_complete
    }

    /// The first transaction whose blocks are not all on the devices.
    pub(crate) fn first_incomplete(&self) -> Generation {
        let phases = self.phases.read();
        let committing = phases.before.as_ref().filter(|_| !phases.is_complete);
        committing.map_or(phases.running.id, |committing| committing.id)
    }

    /// The tree `id`. Its root is looked up at the first use.
    pub(crate) fn tree(&self, volume: &Base, id: TreeId) -> Result<Arc<ChangingTree>> {
        if let Some(tree) = self.trees.read().get(&id) {
            return Ok(tree.clone());
        }
        // Two threads may look up the root at once, and the first to store it wins. The tree has
        // not changed until then.
        let stored = roots::stored_root(volume, id)?;
        require_one_root_item(volume, id)?;
        require_own_root(volume, &stored.root)?;
        self.space.note_level(stored.root.level);
        if stored.last_snapshot.0 > 0 {
            self.space.note_sharing();
        }
        let new = || {
            let pending = &self.space.pending;
            if is_of_commits(id) {
                pending.tree_bytes.fetch_add(stored.used_bytes, Ordering::Relaxed);
            }
            Arc::new(ChangingTree::new(&stored, &self.space))
        };
        let mut trees = self.trees.write();
        if let Some(tree) = trees.get(&id) {
            return Ok(tree.clone());
        }
        let tree = new();
        trees.change(|trees| drop(trees.insert(id, tree.clone())));
        Ok(tree)
    }

    /// Removes the tree `id`, which was deleted.
    pub(crate) fn forget_tree(&self, id: TreeId) {
        self.trees.write().change(|trees| drop(trees.remove(&id)));
    }

    /// Looks up the trees that a commit changes, so that the cost of a commit is known.
    pub(crate) fn open_trees_of_commits(&self, volume: &Base) -> Result<()> {
        let has = |feature| volume.superblock().compat_ro.has(feature);
        let trees = [
            Some(TreeId::EXTENT),
            has(CompatRo::FREE_SPACE_TREE).then_some(TreeId::FREE_SPACE),
            has(CompatRo::BLOCK_GROUP_TREE).then_some(TreeId::BLOCK_GROUP),
            Some(TreeId::CSUM),
            self.quotas.are_on().then_some(TreeId::QUOTA),
        ];
        if self.quotas.are_on() {
            // Each commit may move the root of the quota tree.
            self.space.pending.roots.add(1);
        }
        trees.into_iter().flatten().try_for_each(|id| self.tree(volume, id).map(drop))
    }

    /// Ends all writing because of `cause`.
    fn stop_writing(&self, cause: &Error) {
        self.stop.set_and(&cause.to_string(), || self.tell_of_commit());
    }

    /// Ends all writing because the user wants that, when no other thread commits, has a handle, or
    /// discards.
    pub(crate) fn shut_down(&self) {
        {
            let _commit = self.lock_commits();
            let _gate = self.gate.write();
            self.stop.set_quietly("it was shut down");
            self.tell_of_commit();
        }
        // Threads that discard hold no handle. From now on they find that writing has ended.
        drop(self.space.chunk_lock.lock());
        drop(self.space.without_piece());
    }

    /// Does work that cannot be undone halfway. If it fails or panics, all writing ends.
    pub(crate) fn all_or_stop<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut begun = StopOnPanic { live: self, is_done: false };
        let outcome = work();
        begun.is_done = true;
        outcome.inspect_err(|e| self.stop_writing(e))
    }

    /// `EROFS` when the volume has stopped writing.
    pub(crate) fn require_writing(&self) -> Result<()> {
        match self.stop.cause() {
            None => Ok(()),
            Some(cause) => {
                Err(Error::posix(Errno::ROFS, format!("the volume, after this: {cause}")))
            }
        }
    }
}

/// Work that must be done whole. If it panics, this is dropped while `is_done` is false.
struct StopOnPanic<'l> {
    live: &'l LiveVolume,
    is_done: bool,
}

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.live.stop.set_quietly("a panic in the middle of a change");
            self.live.tell_of_commit();
        }
    }
}

impl Base {
    /// Joins the running transaction, without space to change anything.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or has stopped writing.
    pub(crate) fn enter(&self) -> Result<TransactionHandle<'_>> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        let joined = lock_order::NotedHandle::first();
        let share = GateShare {
            _gate: live.gate.read(),
            #[cfg(debug_assertions)]
            _joined: joined,
        };
        live.require_writing()?;
        let transaction = live.phases.read().running.clone();
        Ok(TransactionHandle {
            volume: self,
            live,
            transaction,
            gate: Some(share),
            reservation: None,
            item_cost: 0,
        })
    }

    /// Joins the running transaction once the one before it is on the devices. Until the handle is
    /// dropped, that one stays the last commit.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub(crate) fn enter_committed(&self) -> Result<TransactionHandle<'_>> {
        let live = self.live()?;
        loop {
            let handle = self.enter()?;
            if live.wait_until(|phases| phases.is_complete || phases.is_postponed)? {
                return Ok(handle);
            }
            // The postponed transaction is committed with the running one, which must end for that.
            drop(handle);
            live.wait_for_commit()?;
        }
    }

    /// Joins if space for `items` is free and no ticket waits. A caller that makes room, or writes
    /// back, takes the reserve for that even while tickets wait.
    pub(crate) fn try_join<'v>(
        &'v self,
        live: &'v LiveVolume,
        items: u64,
        claim: Claim,
    ) -> Result<Option<TransactionHandle<'v>>> {
        let reservation = live.space.try_reserve_for(claim, live.space.cost(items));
        let Some(reservation) = reservation else { return Ok(None) };
        Ok(Some(self.enter()?.with_reservation(reservation, items)))
    }
}

impl LiveVolume {
    /// How many dirty tree blocks the running transaction has.
    pub(crate) fn dirty_blocks(&self) -> u64 {
        self.phases.read().running.dirty.len()
    }

    /// The number of the running transaction.
    pub(crate) fn running(&self) -> Generation {
        self.phases.read().running.id
    }

    /// Locks commits: no other thread commits until this is dropped.
    pub(crate) fn lock_commits(&self) -> MutexGuard<'_, ()> {
        debug!(target: COMMIT, "waiting until no other thread commits");
        self.commit.lock()
    }

    /// The number of the running transaction, and about how many bytes of metadata its commit makes
    /// free.
    pub(crate) fn given_up(&self) -> (Generation, u64) {
        let phases = self.phases.read();
        (phases.running.id, phases.running.refs.given_up())
    }
}

impl<'v> TransactionHandle<'v> {
    /// The handle with a reservation for `items` items, until it is dropped.
    pub(crate) fn with_reservation(self, reservation: Reservation<'v>, items: u64) -> Self {
        let item_cost = self.space().share_of_an_item(reservation.bytes(), items);
        Self { reservation: Some(reservation), item_cost, ..self }
    }

    /// The tree `id`.
    pub(crate) fn tree(&self, id: TreeId) -> Result<Arc<ChangingTree>> {
        self.live.tree(self.volume, id)
    }

    /// The part of the reservation for one item, in bytes.
    pub(crate) fn item_cost(&self) -> u64 {
        self.item_cost
    }

    /// The bytes that are reserved for the handle.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reservation.as_ref().map_or(0, Reservation::bytes)
    }

    /// Moves `wanted` bytes of the reservation, or all that it has, to `to`. Returns how many these
    /// were.
    pub(crate) fn hand_over(&self, to: &mut Kept, wanted: u64) -> u64 {
        self.reservation.as_ref().map_or(0, |reservation| to.take_over(reservation, wanted))
    }

    /// Asks the background thread of the volume for room, if a chunk is needed before a caller has
    /// to wait.
    pub(crate) fn ask_for_room(&self) {
        if self.live.space.needs_chunk() {
            self.live.pressure.press();
        }
    }

    /// The bytes of the blocks of a tree.
    pub(crate) fn tree_bytes(&self, id: TreeId) -> Result<u64> {
        Ok(self.live.tree(self.volume, id)?.used.load(Ordering::Relaxed))
    }

    pub(crate) fn volume(&self) -> &'v Base {
        self.volume
    }

    pub(crate) fn live(&self) -> &'v LiveVolume {
        self.live
    }

    pub(crate) fn generation(&self) -> Generation {
        self.transaction.id
    }

    pub(crate) fn space(&self) -> &'v Arc<Space> {
        &self.live.space
    }

    /// Notes that from this transaction on `feature` is needed to read the volume.
    pub(crate) fn needs(&self, feature: Incompat) {
        self.live.new_features.fetch_or(feature.0, Ordering::Relaxed);
        if self.live.superblock.lock().incompat_flags.get() & feature.0 != feature.0 {
            // A log is written with the superblock of the last commit.
            self.obstruct(Obstacle::NewFeature);
        }
    }

    /// Locks checksums exclusively: no reader looks for checksums and no writer adds some, until
    /// this is dropped.
    pub(crate) fn checksums_changing(&self) -> SpreadWriteGuard<'v, ()> {
        self.live.checksums.write()
    }

    /// Locks checksums shared: none are removed until this is dropped.
    pub(crate) fn checksums_unchanging(&self) -> RwLockReadGuard<'v, ()> {
        self.live.checksums.read()
    }

    pub(crate) fn stats(&self) -> &'v EngineCounters {
        &self.live.stats
    }

    /// Calls `change` with a writer of the tree `id`. A failure may leave the tree half changed, so
    /// it ends all writing.
    pub(crate) fn change<T>(
        &self,
        id: TreeId,
        change: impl FnOnce(TreeWriter<'_>) -> Result<T>,
    ) -> Result<T> {
        let tree = self.live.tree(self.volume, id)?;
        self.all_or_stop(|| change(TreeWriter::new(&TreeAndHandle { handle: self, tree: &tree })))
    }

    /// Does work that cannot be undone halfway. If it fails or panics, all writing ends.
    pub(crate) fn all_or_stop<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.live.all_or_stop(work)
    }

    /// The changes of the transaction that quotas count.
    pub(crate) fn usage(&self) -> &QuotaUsage {
        &self.transaction.usage
    }

    /// From now on each fsync commits, until the next commit: no log can describe what the
    /// transaction does.
    pub(crate) fn obstruct(&self, obstacle: Obstacle) {
        self.log().obstruct(obstacle);
    }

    /// The knowledge that the running transaction and its log share.
    pub(crate) fn log(&self) -> &LogState {
        &self.transaction.log
    }

    /// Whether the block that a pointer in `tree` leads to may be changed: the transaction has made
    /// it, and, in a log tree, it was not written yet.
    pub(crate) fn owns(&self, tree: TreeId, generation: Generation, logical: Logical) -> bool {
        generation == self.generation() && (tree != TreeId::TREE_LOG || self.log().owns(logical))
    }

    /// Calls `call` with the blocks of `tree` that may be changed.
    fn with_blocks<T>(&self, tree: TreeId, call: impl FnOnce(&DirtyBlocks) -> T) -> T {
        if tree == TreeId::TREE_LOG {
            call(&self.log().changing())
        } else {
            call(&self.transaction.dirty)
        }
    }

    fn own_block(&self, tree: TreeId, logical: Logical) -> Result<Arc<Latch>> {
        self.with_blocks(tree, |blocks| blocks.get(logical)).ok_or_else(|| {
            Error::corrupt_at(
                Structure::TreeBlock,
                logical.0,
                "it has the generation of the running transaction",
            )
        })
    }

    /// Takes the latch of a block that this transaction owns, to read the block.
    pub(crate) fn latch_shared(&self, tree: TreeId, logical: Logical) -> Result<ReadLatch> {
        Ok(latch_shared(&self.own_block(tree, logical)?, self.stats()))
    }

    /// Takes the latch of a block that this transaction owns.
    pub(crate) fn latch(&self, tree: TreeId, logical: Logical) -> Result<WriteLatch> {
        Ok(WriteLatch::take(&self.own_block(tree, logical)?, self.stats()))
    }

    /// Makes an empty block for the tree `tree`.
    pub(crate) fn new_block(&self, tree: TreeId, level: u8) -> Result<WriteLatch> {
        assert!(level < LEVEL_COUNT, "no tree of a volume that can exist is so high");
        let block = self.empty_block(tree, level)?;
        self.count_tree(tree, true)?;
        Ok(block)
    }

    /// Makes the only block of a log tree, a leaf without items.
    pub(crate) fn new_log_root(&self) -> Result<TreeRoot> {
        Ok(root_at(TreeId::TREE_LOG, &*self.empty_block(TreeId::TREE_LOG, 0)?))
    }

    /// Makes the only block of the tree `id`, a leaf with these items. No other thread can find the
    /// tree before it has a root item.
    pub(crate) fn new_root(&self, id: TreeId, items: &[(Key, Vec<u8>)]) -> Result<TreeRoot> {
        let mut leaf = self.empty_block(id, 0)?;
        let items = items.iter().map(|(key, data)| (*key, &data[..]));
        insert_items(leaf.block_mut().bytes_mut(), 0, items);
        Ok(root_at(id, &leaf))
    }

    /// Makes the root of the tree `id` as a copy of the root of `tree`: from now on both share
    /// everything below. No other thread can find the new tree before it has a root item.
    pub(crate) fn copy_root(&self, tree: &ChangingTree, id: TreeId) -> Result<TreeRoot> {
        let root = *tree.root.read();
        let old = self.volume.block(&root.expected())?;
        let new = self.copied(&old, self.take_block(id, root.level)?, id);
        self.refer_to_children(&new, Some(id), 1)?;
        Ok(root_at(id, &self.transaction.dirty.add(new)))
    }

    fn empty_block(&self, tree: TreeId, level: u8) -> Result<WriteLatch> {
        let logical = self.take_block(tree, level)?;
        let superblock = self.volume.superblock();
        let identity = BlockIdentity {
            metadata_uuid: superblock.metadata_uuid,
            chunk_tree_uuid: self.volume.storage.chunk_tree_uuid(),
            logical,
            generation: self.generation(),
            owner: tree,
            level,
        };
        let bytes = encode::new_block(superblock.node_size, &identity);
        Ok(self.with_blocks(tree, |blocks| blocks.add(TreeBlock::verified(bytes))))
    }

    /// Copies a committed block of the tree `tree` to a new address, where it can be changed.
    pub(crate) fn copy_block(&self, tree: &ChangingTree, old: &TreeBlock) -> Result<WriteLatch> {
        let logical = self.take_block(tree.id, old.header().level)?;
        let new = self.copied(old, logical, tree.id);
        // Blocks of a log have no references: all of them are free after the commit.
        if tree.id != TreeId::TREE_LOG {
            self.references_of_copy(tree, old, &new)?;
            tree.hold.copied(u64::from(self.volume.superblock().node_size));
        }
        self.stats().block_copied();
        Ok(self.with_blocks(tree.id, |blocks| blocks.add(new)))
    }

    /// The copy of a committed block for the tree `owner`, at a new address.
    fn copied(&self, old: &TreeBlock, logical: Logical, owner: TreeId) -> TreeBlock {
        let mut new = old.clone();
        let header = header_mut(new.bytes_mut());
        header.bytenr = logical.0.into();
        header.fsid = self.volume.superblock().metadata_uuid.into_bytes();
        header.generation = self.generation().0.into();
        header.owner = owner.0.into();
        header.flags =
            (header.flags.get() & !(HEADER_WRITTEN | HEADER_RELOC) | HEADER_MIXED_BACKREF).into();
        new
    }

    /// Frees a block that this transaction made or copied.
    pub(crate) fn free_block(&self, tree: TreeId, block: WriteLatch) -> Result<()> {
        let (logical, level) = (Logical(block.header().bytenr.get()), block.header().level);
        drop(block);
        self.with_blocks(tree, |blocks| blocks.remove(logical));
        if tree == TreeId::TREE_LOG {
            return Ok(());
        }
        let node_size = u64::from(self.volume.superblock().node_size);
        self.count_tree(tree, false)?;
        let owner = RefOwner::Tree { root: tree };
        if self.transaction.refs.cancel_new(logical) {
            return self.live.space.give_back(logical, node_size);
        }
        self.transaction.refs.add(logical, node_size, ExtentKind::Block { level }, owner, -1);
        Ok(())
    }

    /// Counts a block that a tree gained or lost. Copying a block changes no count.
    fn count_tree(&self, tree: TreeId, is_new: bool) -> Result<()> {
        if tree == TreeId::TREE_LOG {
            return Ok(());
        }
        let node_size = u64::from(self.volume.superblock().node_size);
        let used = &self.live.tree(self.volume, tree)?.used;
        let all = is_of_commits(tree).then_some(&self.live.space.pending.tree_bytes);
        for count in [used].into_iter().chain(all) {
            if is_new {
                count.fetch_add(node_size, Ordering::Relaxed);
            } else {
                // The stored size may have been too small: the format does not depend on it.
                let less = |bytes: u64| Some(bytes.saturating_sub(node_size));
                let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
        }
        Ok(())
    }

    fn take_block(&self, tree: TreeId, level: u8) -> Result<Logical> {
        let node_size = u64::from(self.volume.superblock().node_size);
        let purpose = if tree == TreeId::CHUNK { Purpose::System } else { Purpose::Metadata };
        let logical = self.live.space.take(self.volume, purpose, node_size)?;
        if tree == TreeId::TREE_LOG {
            self.log().count_block();
            self.pin(logical, node_size);
            return Ok(logical);
        }
        let owner = RefOwner::Tree { root: tree };
        self.transaction.refs.add_new(logical, node_size, ExtentKind::Block { level }, owner);
        Ok(logical)
    }

    /// Queues a change of the references of `owner` to an extent.
    pub(crate) fn refer(
        &self,
        at: Logical,
        len: u64,
        kind: ExtentKind,
        owner: RefOwner,
        delta: i64,
    ) {
        self.transaction.refs.add(at, len, kind, owner, delta);
    }

    /// Queues the first reference to an extent that was just allocated.
    pub(crate) fn refer_new(&self, at: Logical, len: u64, kind: ExtentKind, owner: RefOwner) {
        self.transaction.refs.add_new(at, len, kind, owner);
    }

    /// Pins a range that was taken and holds no extent: it stays untouched until this transaction
    /// is on the devices, and is free then.
    pub(crate) fn pin(&self, logical: Logical, len: u64) {
        self.transaction.pinned.lock().push(logical.0..logical.0 + len);
    }

    /// Whether this transaction changes references to an extent.
    pub(crate) fn is_referred(&self, at: Logical) -> bool {
        self.transaction.refs.get(at).is_some()
    }

    /// Whether this transaction made the block at `logical`.
    fn is_own(&self, logical: Logical) -> bool {
        self.transaction.dirty.get(logical).is_some()
    }

    /// The block at `logical`, which this transaction made, as it is now.
    fn own_copy(&self, logical: Logical) -> Result<Arc<TreeBlock>> {
        Ok(self.own_block(TreeId::FS, logical)?.read().clone())
    }

    /// Makes the block at `to`, a copy of the root of the tree `id`, the root. What is in the tree
    /// stays the same. No other thread has a handle.
    fn relocate_root(&self, id: TreeId, to: Logical) -> Result<()> {
        let tree = self.tree(id)?;
        let root = {
            let mut root = tree.root.write();
            root.logical = to;
            *root
        };
        self.transaction.relocated_roots.lock().insert(id);
        self.root_changed(&root);
        Ok(())
    }

    /// Notes that the root of a tree moved.
    pub(crate) fn root_changed(&self, root: &TreeRoot) {
        self.live.space.note_level(root.level);
        if root.id == TreeId::TREE_LOG {
            return;
        }
        let before = self.transaction.moved_roots.lock().insert(root.id, *root);
        if before.is_none() && !is_named_by_superblock(root.id) {
            self.live.space.pending.roots.add(1);
        }
    }
}

/// The root of the tree `id` in this block.
fn root_at(id: TreeId, block: &TreeBlock) -> TreeRoot {
    let header = block.header();
    TreeRoot {
        id,
        logical: Logical(header.bytenr.get()),
        level: header.level,
        generation: header.generation(),
    }
}

/// Whether the superblock, and not the root tree, names the root of this tree.
fn is_named_by_superblock(id: TreeId) -> bool {
    matches!(id, TreeId::ROOT | TreeId::CHUNK)
}

/// Whether a commit changes this tree because other trees changed: to run their delayed references,
/// or to maintain quotas.
fn is_of_commits(id: TreeId) -> bool {
    matches!(
        id,
        TreeId::EXTENT | TreeId::FREE_SPACE | TreeId::BLOCK_GROUP | TreeId::CSUM | TreeId::QUOTA
    )
}
