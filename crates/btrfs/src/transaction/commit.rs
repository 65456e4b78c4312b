//! Committing: makes a transaction in memory the state of the volume, by writing its superblock.

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::superblock::{Incompat, SuperblockItem};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId, U64};
use offshoot_vfs::{Error, Result, Structure};
use tracing::{debug, warn};
use zerocopy::IntoBytes;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::extent_tree::PlannedReferences;
use super::{Base, LogState, Obstacle};
use super::{
    LiveVolume, MemberSizes, StopOnPanic, Transaction, TransactionHandle, is_named_by_superblock,
    root_item_key,
};
use crate::block::changes_little;
use crate::events::{COMMIT, micros};
use crate::space::Reserved;
use crate::stats::EngineCounters;
use crate::storage::malformed;
use crate::tree::{TreeRoot, root_backup};

/// Why a commit is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommitCause {
    /// A caller asked for it.
    Asked,
    /// The commit interval has passed.
    Time,
    /// There were many dirty tree blocks.
    DirtyBlocks,
    /// A caller needs room.
    Space,
    /// A snapshot is taken of a changed subvolume.
    Snapshot,
    /// An fsync could not be logged.
    Fsync,
    /// In the commit before, a member failed or a write to it failed.
    Member,
}

impl CommitCause {
    /// Counts a commit for its cause.
    pub(crate) fn count(self, stats: &EngineCounters) {
        match self {
            Self::Asked => stats.committed_asked(),
            Self::Time => stats.committed_by_time(),
            Self::DirtyBlocks => stats.committed_dirty_blocks(),
            Self::Space => stats.committed_for_space(),
            Self::Snapshot => stats.committed_for_snapshot(),
            Self::Fsync => stats.committed_for_fsync(),
            Self::Member => stats.committed_for_member(),
        }
    }
}

/// The last changes of a transaction. An error ends all writing.
pub(crate) type LastChange<'w, 'v> = Box<dyn FnOnce(&TransactionHandle<'v>) -> Result<()> + 'w>;

/// What the rooms above keep for the running transaction.
pub(crate) trait RoomsAbove {
    /// The data that a room above keeps for a transaction.
    type Known;

    /// Flushes all queued items into the trees, on several threads if that is worth it. Each thread
    /// gets its handles from `join`.
    fn flush_all<'v>(&self, join: impl Fn() -> Result<TransactionHandle<'v>> + Sync) -> Result<()>;

    /// An error when an item is still queued.
    fn require_flushed(&self) -> Result<()>;

    /// Notes that the transaction is finished and no thread has a handle of it. Returns the data
    /// that was kept for it, which the committer drops after the gate is open again.
    fn end(&self) -> Self::Known;
}

impl Base {
    /// Calls `work` while no other thread has a handle. The caller must hold none.
    ///
    /// # Errors
    /// `EROFS` when the volume has stopped writing; errors of `work`.
    pub(crate) fn alone<'v, T>(
        &'v self,
        reserved: Reserved<'v>,
        work: impl FnOnce(TransactionHandle<'v>) -> Result<T>,
    ) -> Result<T> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let _gate = live.gate.write();
        live.require_writing()?;
        let handle = self.only_handle(live);
        handle.obstruct(Obstacle::Subvolumes);
        work(handle.with_reservation(reserved.0, reserved.1))
    }

    /// Calls `work` with the number of the running transaction, while no thread has a handle.
    /// `work` must not change the transaction. The caller must hold no handle.
    pub(crate) fn between_handles<T>(&self, work: impl FnOnce(Generation) -> T) -> Result<T> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let _gate = live.gate.write();
        Ok(work(live.phases.read().running.id))
    }

    /// Calls `work` while no thread writes superblocks, for a commit or for a log. The caller must
    /// hold no handle.
    ///
    /// # Errors
    /// `EROFS` when the volume has stopped writing; errors of `work`.
    pub(crate) fn with_superblocks_at_rest<T>(
        &self,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(live) = self.live_part() else { return work() };
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let _commit = live.commit.lock();
        let _gate = live.gate.write();
        live.require_writing()?;
        work()
    }

    /// A handle of the running transaction, for the thread that has shut the gate.
    fn only_handle<'v>(&'v self, live: &'v LiveVolume) -> TransactionHandle<'v> {
        let transaction = live.phases.read().running.clone();
        TransactionHandle {
            volume: self,
            live,
            transaction,
            gate: None,
            reservation: None,
            item_cost: 0,
        }
    }

    /// Flushes queued items, and commits if `is_needed` is true after that. `last` makes the last
    /// changes of the transaction, while no other thread has a handle and all references are in the
    /// extent tree. Then calls `begin`
    /// while no other thread has a handle, with a handle of the transaction that runs from then on.
    /// The caller holds the commit lock. Returns the result of `begin`, and whether the committed
    /// transaction is on the devices. It is not when it was postponed: then it becomes a part of
    /// the next one.
    pub(crate) fn commit_running<'v, T>(
        &'v self,
        live: &'v LiveVolume,
        above: &impl RoomsAbove,
        is_needed: impl Fn() -> bool,
        last: Option<LastChange<'_, 'v>>,
        begin: impl FnOnce(TransactionHandle<'v>) -> Result<T>,
    ) -> Result<(Result<T>, bool)> {
        self.note_failures(live)?;
        self.store_device_errors(live)?;
        // Flush most items now, so that few are left to flush while writers are blocked.
        debug!(target: COMMIT, "flushing delayed items");
        above.flush_all(|| self.enter())?;
        // A later change may make the commit necessary. Then it looks up all extents itself.
        let planned = if is_needed() {
            debug!(target: COMMIT, "planning references");
            self.plan_references(live)
        } else {
            PlannedReferences::default()
        };
        debug!(target: COMMIT, "waiting until all operations under way have ended");
        // New operations wait from now on.
        let shut = Some(Instant::now());
        let gate = live.gate.write();
        debug!(target: COMMIT, us = micros(shut), "no operation is under way, others wait");
        live.require_writing()?;
        let transaction = live.phases.read().running.clone();
        let finished = live.all_or_stop(|| {
            above.flush_all(|| Ok(self.only_handle(live)))?;
            above.require_flushed()?;
            if !is_needed() {
                return Ok(None);
            }
            // Running the references removes checksums of freed data, and frees extents that were
            // made in this transaction. Readers must notice that.
            drop(live.freeing.write());
            live.epoch.fetch_add(1, Ordering::AcqRel);
            let handle = self.only_handle(live);
            let mut planned = planned;
            if let Some(last) = last {
                handle.run_references(std::mem::take(&mut planned))?;
                last(&handle)?;
            }
            let superblock = handle.finish(planned)?;
            // Wrong accounts may have ended all writing meanwhile.
            live.require_writing()?;
            let before = live.begin_next(&transaction);
            Ok(Some((superblock, before, above.end())))
        })?;
        // The threads that wait for this transaction wait until it is on the devices, or will never
        // be.
        let mut unfinished = StopOnPanic { live, is_done: finished.is_none() };
        let outcome = begin(self.only_handle(live));
        drop(gate);
        let us = micros(shut);
        live.stats.note_gate_shut(us.unwrap_or_default());
        debug!(target: COMMIT, us, "operations go on");
        let Some((superblock, before, known)) = finished else { return Ok((outcome, false)) };
        // No thread has a handle of it, so no thread reads its log any more.
        transaction.log.forget();
        drop(known);
        if let Some(before) = before {
            before.dirty.move_to(&self.cache, |_| true);
        }
        let is_complete = live.all_or_stop(|| {
            if !self.write_out(&transaction, &superblock)? {
                live.postpone(&transaction);
                return Ok(false);
            }
            *live.superblock.lock() = superblock.into();
            live.complete(self, &transaction)?;
            Ok(true)
        })?;
        unfinished.is_done = true;
        Ok((outcome, is_complete))
    }
}

impl LiveVolume {
    /// Notes for the next superblock that the volume has a default subvolume other than the top
    /// level.
    pub(crate) fn note_default_subvolume(&self) {
        self.new_features.fetch_or(Incompat::DEFAULT_SUBVOL.0, Ordering::Relaxed);
    }

    /// Begins the next transaction, while `finished` is written. Returns the transaction before
    /// `finished`. It has many blocks, so the caller drops it when no thread waits for that.
    fn begin_next(&self, finished: &Arc<Transaction>) -> Option<Arc<Transaction>> {
        for tree in self.trees.read().values() {
            tree.hold.begin(tree.used.load(Ordering::Relaxed));
        }
        let mut phases = self.phases.write();
        let next = Generation(finished.id.0 + 1);
        let pending = self.space.pending.clone();
        let running = Arc::new(Transaction::new(next, pending, LogState::new(self.has_log)));
        let before = phases.before.clone();
        phases.change(|phases| {
            phases.running = running.clone();
            phases.before = Some(finished.clone());
            (phases.is_complete, phases.is_postponed) = (false, false);
        });
        // The transactions before `finished` are on the devices, postponed ones too.
        self.oldest.store(finished.id.0, Ordering::Release);
        before
    }

    /// Postpones `finished`: its blocks are on the devices, but no superblock leads to them. Its
    /// changes become durable with the running transaction. Blocks that the last commit refers to
    /// stay pinned until then.
    fn postpone(&self, finished: &Transaction) {
        let mut phases = self.phases.write();
        let running = &phases.running;
        running.pinned.lock().append(&mut finished.pinned.lock());
        running.shared.lock().extend(finished.shared.lock().iter());
        // A crash finds the log of `finished`.
        running.log.go_on_from(&finished.log);
        phases.change(|phases| phases.is_postponed = true);
        drop(phases);
        warn!(target: COMMIT, generation = finished.id.0, "postponed, because a member failed");
        self.stats.postponed();
        self.tell_of_commit();
    }

    /// Completes `transaction`, which is on the devices: its blocks are now like all committed
    /// ones, and the ranges that it freed become free.
    fn complete(&self, volume: &Base, transaction: &Transaction) -> Result<()> {
        transaction.dirty.move_to(&volume.cache, changes_little);
        self.phases.write().change(|phases| phases.is_complete = true);
        self.tell_of_commit();
        // This comes before any range becomes free, so a reader that still follows old pointers
        // knows that it must begin again.
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let freed = std::mem::take(&mut *transaction.pinned.lock());
        debug!(
            target: COMMIT,
            generation = transaction.id.0,
            bytes = freed.iter().map(|range| range.end - range.start).sum::<u64>(),
            "freeing what it gave up",
        );
        self.free_or_keep(freed)?;
        self.stats.committed();
        Ok(())
    }
}

impl TransactionHandle<'_> {
    /// Runs references and stores all changed items until the trees are consistent, and makes the
    /// superblock.
    fn finish(&self, mut planned: PlannedReferences) -> Result<Box<SuperblockItem>> {
        loop {
            self.run_references(std::mem::take(&mut planned))?;
            let stored = self.store_quotas()? + self.store_block_groups()? + self.store_roots()?;
            if stored == 0 && self.transaction.refs.is_empty() && !self.touch_root_tree()? {
                break;
            }
        }
        self.superblock()
    }

    /// Changes the root tree in this transaction, if nothing else did: its generation must be that
    /// of the superblock. Returns whether it had to.
    fn touch_root_tree(&self) -> Result<bool> {
        let is_due = self.volume.tree(TreeId::ROOT)?.generation != self.generation();
        if is_due {
            let some_root = root_item_key(self.volume, TreeId::FS)?;
            let same = |data: Option<&[u8]>| Ok(data.unwrap_or_default().to_vec());
            self.change(TreeId::ROOT, |tree| tree.modify(some_root, 0, same))?;
        }
        Ok(is_due)
    }

    /// Stores the used bytes of each block group where they changed.
    fn store_block_groups(&self) -> Result<usize> {
        let tree = self.block_group_tree();
        let changed = self.live.space.changed_groups();
        for group in &changed {
            let key = Key::new(group.start.0, ItemType::BLOCK_GROUP_ITEM, group.len);
            self.change(tree, |tree| {
                tree.modify(key, 0, |data| {
                    let mut item =
                        *BlockGroupItem::view(data.unwrap_or_default()).map_err(malformed)?;
                    item.used = group.used_to_store().into();
                    Ok(item.as_bytes().to_vec())
                })
            })?;
        }
        Ok(changed.len())
    }

    /// Stores the roots of all trees that moved, except the two that the superblock names.
    fn store_roots(&self) -> Result<usize> {
        let mut moved: Vec<TreeRoot> = Vec::new();
        self.transaction.moved_roots.lock().retain(|id, root| {
            let is_named = is_named_by_superblock(*id);
            if !is_named {
                moved.push(*root);
            }
            is_named
        });
        for root in &moved {
            let key = root_item_key(self.volume, root.id)?;
            let used = self.tree_bytes(root.id)?;
            self.change(TreeId::ROOT, |tree| {
                tree.modify(key, 0, |data| {
                    let old = data.ok_or_else(|| {
                        Error::corrupt(
                            Structure::RootTree,
                            format!("it has no root of tree {}", root.id),
                        )
                    })?;
                    let mut item = RootItem::parse(old).map_err(malformed)?;
                    item.bytenr = root.logical.0.into();
                    item.level = root.level;
                    item.generation = root.generation.0.into();
                    item.generation_v2 = item.generation;
                    item.bytes_used = used.into();
                    let is_relocated =
                        || self.transaction.relocated_roots.lock().contains(&root.id);
                    if root.id.is_subvolume() && !is_relocated() {
                        item.ctransid = item.generation;
                    }
                    Ok(item.as_bytes()[..old.len()].to_vec())
                })
            })?;
        }
        self.live.space.pending.roots.sub(moved.len() as u64);
        Ok(moved.len())
    }

    /// The superblock of this transaction, without the fields that differ from device to device.
    fn superblock(&self) -> Result<Box<SuperblockItem>> {
        let mut item = Box::new(*self.live.last_superblock());
        let generation: U64 = self.generation().0.into();
        let root = self.volume.tree(TreeId::ROOT)?;
        let chunk = self.volume.tree(TreeId::CHUNK)?;
        // Writers of subvolumes maintain the UUID tree, so it stays as current as it was. The free
        // space cache of version 1 is not maintained: its generation stays behind, which tells the
        // kernel to discard it.
        if item.uuid_tree_generation == item.generation {
            item.uuid_tree_generation = generation;
        }
        item.generation = generation;
        // The trees now have everything that a log had.
        item.log_root = 0.into();
        item.log_root_transid = 0.into();
        item.log_root_level = 0;
        item.root = root.logical.0.into();
        item.root_level = root.level;
        item.chunk_root = chunk.logical.0.into();
        item.chunk_root_level = chunk.level;
        item.chunk_root_generation = chunk.generation.0.into();
        item.incompat_flags |= self.live.new_features.load(Ordering::Relaxed);
        if let Some(label) = &*self.live.new_label.lock() {
            item.label = **label;
        }
        item.bytes_used = self.live.space.bytes_used().into();
        self.store_system_chunks(&mut item)?;
        let members = self.volume.members().iter().zip(self.live.space.allocated());
        let sizes: Vec<_> = members
            .map(|(member, allocated)| MemberSizes { total: member.total_bytes(), allocated })
            .collect();
        item.total_bytes = self.live.total_bytes().into();
        self.transaction.sizes.get_or_init(|| sizes);
        self.store_backup(&mut item)?;
        Ok(item)
    }

    /// Replaces the oldest backup roots of the superblock by the roots of this commit.
    fn store_backup(&self, item: &mut SuperblockItem) -> Result<()> {
        let newest = (0..item.super_roots.len())
            .max_by_key(|&i| item.super_roots[i].tree_root_gen.get())
            .unwrap_or(0);
        let place = (newest + 1) % item.super_roots.len();
        let root = |id| self.volume.tree(id);
        let roots =
            [root(TreeId::EXTENT)?, root(TreeId::FS)?, root(TreeId::DEV)?, root(TreeId::CSUM)?];
        item.super_roots[place] = root_backup(item, roots);
        Ok(())
    }
}
