//! Committing: from a transaction in memory to the superblock that makes it the volume's state.

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::superblock::{Incompat, RootBackup, SuperblockItem};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId, U64};
use offshoot_vfs::{Error, Result};
use zerocopy::IntoBytes;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Base, LogState, Obstacle};
use super::{Begun, Handle, Live, Transaction, is_named_by_superblock, root_item_key};
use crate::block::changes_little;
use crate::space::Reserved;
use crate::stats::Counters;
use crate::storage::malformed;
use crate::tree::TreeRoot;

/// Why a commit is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Somebody asked for it.
    Asked,
    /// It was time.
    Time,
    /// There were many dirty tree blocks.
    DirtyBlocks,
    /// Somebody needs room.
    Space,
    /// A snapshot is taken of what was changed.
    Snapshot,
    /// An fsync could not be logged.
    Fsync,
    /// A member failed, or could not be written, in the commit before.
    Member,
}

impl Cause {
    /// Counts a commit for its cause.
    pub(crate) fn count(self, stats: &Counters) {
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

/// What rooms above have of the running transaction.
pub(crate) trait Above {
    /// What is known of a transaction.
    type Known;

    /// Puts all that is queued into the trees, on several threads when it is worth that. Each gets
    /// its handles from `join`.
    fn flush_all<'v>(&'v self, join: impl Fn() -> Result<Handle<'v>> + Sync) -> Result<()>;

    /// An error where something is queued still.
    fn require_flushed(&self) -> Result<()>;

    /// The transaction is finished, and nobody has a handle of it. Gives what was known of it, which
    /// is dropped when others go on.
    fn end(&self) -> Self::Known;
}

impl Base {
    /// Calls `work` while nobody else has a handle. The caller must hold none.
    ///
    /// # Errors
    /// `EROFS` when something failed before, and what `work` fails with.
    pub(crate) fn alone<'v, T>(
        &'v self,
        reserved: Reserved<'v>,
        work: impl FnOnce(Handle<'v>) -> Result<T>,
    ) -> Result<T> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let _gate = live.gate.write();
        live.require_whole()?;
        let handle = self.only_handle(live);
        handle.obstruct(Obstacle::Subvolumes);
        work(handle.with_reservation(reserved.0, reserved.1))
    }

    /// Calls `work` while nobody has a handle, with the running transaction, of which it changes
    /// nothing. The caller must hold none.
    pub(crate) fn between_handles<T>(&self, work: impl FnOnce(Generation) -> T) -> Result<T> {
        let live = self.live()?;
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let _gate = live.gate.write();
        Ok(work(live.phases.read().running.id))
    }

    /// Calls `work` while nobody writes superblocks, neither for a commit nor for a log. The caller
    /// must hold no handle.
    ///
    /// # Errors
    /// `EROFS` when something failed before, and what `work` fails with.
    pub(crate) fn with_superblocks_at_rest<T>(
        &self,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(live) = self.live_part() else { return work() };
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let _commit = live.commit.lock();
        let _gate = live.gate.write();
        live.require_whole()?;
        work()
    }

    /// A handle of the running transaction, for who shut the gate.
    fn only_handle<'v>(&'v self, live: &'v Live) -> Handle<'v> {
        let transaction = live.phases.read().running.clone();
        Handle { volume: self, live, transaction, _gate: None, reservation: None, item_cost: 0 }
    }

    /// Flushes what is queued, and commits if `is_needed` then. `begin` is called alone, with a
    /// handle of the transaction that runs afterwards. The caller holds the commit lock. Gives what
    /// `begin` did, and whether a transaction is on the devices: one may be postponed, and is a part
    /// of the next then.
    pub(crate) fn commit_running<'v, T>(
        &'v self,
        live: &'v Live,
        above: &'v impl Above,
        is_needed: impl FnOnce() -> bool,
        begin: impl FnOnce(Handle<'v>) -> Result<T>,
    ) -> Result<(Result<T>, bool)> {
        self.note_failures(live)?;
        self.store_device_errors(live)?;
        // What is queued until the gate is shut is little.
        above.flush_all(|| self.enter())?;
        let gate = live.gate.write();
        live.require_whole()?;
        let transaction = live.phases.read().running.clone();
        let finished = live.whole(|| {
            above.flush_all(|| Ok(self.only_handle(live)))?;
            above.require_flushed()?;
            if !is_needed() {
                return Ok(None);
            }
            // Checksums of data that files gave up go now, and what came and went is free again.
            drop(live.freeing.write());
            live.epoch.fetch_add(1, Ordering::AcqRel);
            let superblock = self.only_handle(live).finish()?;
            // Accounts may have turned out to be wrong.
            live.require_whole()?;
            let before = live.begin_next(transaction.clone());
            Ok(Some((superblock, before, above.end())))
        })?;
        // Who waits for this transaction waits until it is on the devices, or will never be.
        let mut unfinished = Begun { live, is_done: finished.is_none() };
        let outcome = begin(self.only_handle(live));
        drop(gate);
        let Some((superblock, before, known)) = finished else { return Ok((outcome, false)) };
        // Nobody has a handle of it, so nobody looks into its log any more.
        transaction.log.forget();
        drop(known);
        if let Some(before) = before {
            before.dirty.move_to(&self.cache, |_| true);
        }
        let is_complete = live.whole(|| {
            if !self.write_out(&transaction, &superblock)? {
                live.postpone(&transaction);
                return Ok(false);
            }
            live.superblock.lock().clone_from(&superblock);
            live.complete(self, &transaction)?;
            Ok(true)
        })?;
        unfinished.is_done = true;
        Ok((outcome, is_complete))
    }
}

impl Live {
    /// Says in the next superblock that the volume has a default subvolume of its own.
    pub(crate) fn note_default_subvolume(&self) {
        self.new_features.fetch_or(Incompat::DEFAULT_SUBVOL.0, Ordering::Relaxed);
    }

    /// Lets the next transaction run while `finished` is written. Gives the one before that, whose
    /// blocks are many: who lets go of them keeps nobody waiting.
    fn begin_next(&self, finished: Arc<Transaction>) -> Option<Arc<Transaction>> {
        for tree in self.trees.read().values() {
            tree.hold.begin(tree.used.load(Ordering::Relaxed));
        }
        let mut phases = self.phases.write();
        let next = Generation(finished.id.0 + 1);
        phases.running = Arc::new(Transaction::new(
            next,
            self.space.pending.clone(),
            LogState::new(self.has_log),
        ));
        (phases.is_complete, phases.is_postponed) = (false, false);
        phases.before.replace(finished)
    }

    /// The blocks of `finished` are on the devices, and no superblock leads to them: what it did
    /// becomes durable with the running transaction, and what the last commit refers to stays until
    /// then.
    fn postpone(&self, finished: &Transaction) {
        let mut phases = self.phases.write();
        let running = &phases.running;
        running.pinned.lock().append(&mut finished.pinned.lock());
        running.shared.lock().extend(finished.shared.lock().iter());
        // The log of it is what a crash finds.
        running.log.go_on_from(&finished.log);
        phases.is_postponed = true;
        drop(phases);
        self.stats.postponed();
        self.tell_of_commit();
    }

    /// `transaction` is on the devices: its blocks are like all others now, and what it freed is
    /// free.
    fn complete(&self, volume: &Base, transaction: &Transaction) -> Result<()> {
        transaction.dirty.move_to(&volume.cache, changes_little);
        self.phases.write().is_complete = true;
        self.tell_of_commit();
        // Before anything is free again: whoever still follows old pointers then knows to begin
        // anew.
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let freed = std::mem::take(&mut *transaction.pinned.lock());
        for range in &freed {
            self.space.give_back(Logical(range.start), range.end - range.start)?;
        }
        self.space.note_freed(freed);
        self.stats.committed();
        Ok(())
    }
}

impl Handle<'_> {
    /// Brings the trees to where they say all that is in them, and makes the superblock.
    fn finish(&self) -> Result<Box<SuperblockItem>> {
        loop {
            self.run_references()?;
            let stored = self.store_quotas()? + self.store_block_groups()? + self.store_roots()?;
            if stored == 0 && self.transaction.refs.is_empty() && !self.touch_root_tree()? {
                break;
            }
        }
        self.superblock()
    }

    /// Has the root tree change in this transaction, if nothing else did: its generation has to be
    /// that of the superblock. Whether that was so.
    fn touch_root_tree(&self) -> Result<bool> {
        let is_due = self.volume.tree(TreeId::ROOT)?.generation != self.generation();
        if is_due {
            let some_root = root_item_key(self.volume, TreeId::FS)?;
            let same = |data: Option<&[u8]>| Ok(data.unwrap_or_default().to_vec());
            self.change(TreeId::ROOT, |tree| tree.modify(some_root, 0, same))?;
        }
        Ok(is_due)
    }

    /// Stores how much of each block group is used, where that changed.
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

    /// Stores the roots of all trees that moved, but for the two that the superblock names.
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
                        Error::corrupt("root tree", format!("it has no root of tree {}", root.id))
                    })?;
                    let mut item = RootItem::parse(old).map_err(malformed)?;
                    item.bytenr = root.logical.0.into();
                    item.level = root.level;
                    item.generation = root.generation.0.into();
                    item.generation_v2 = item.generation;
                    item.bytes_used = used.into();
                    if root.id.is_subvolume() {
                        item.ctransid = item.generation;
                    }
                    Ok(item.as_bytes()[..old.len()].to_vec())
                })
            })?;
        }
        self.live.space.pending.roots.sub(moved.len() as u64);
        Ok(moved.len())
    }

    /// The superblock of this transaction, without what differs from device to device.
    fn superblock(&self) -> Result<Box<SuperblockItem>> {
        let mut item = self.live.superblock.lock().clone();
        let generation: U64 = self.generation().0.into();
        let root = self.volume.tree(TreeId::ROOT)?;
        let chunk = self.volume.tree(TreeId::CHUNK)?;
        // The UUID tree is kept with the subvolumes, so it stays as current as it was. A version 1
        // free space cache is not kept: its generation stays behind, which tells the kernel to
        // discard it.
        if item.uuid_tree_generation == item.generation {
            item.uuid_tree_generation = generation;
        }
        item.generation = generation;
        // Whatever a log had is in the trees now.
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
        let allocated = self.live.space.allocated();
        self.transaction.allocated.get_or_init(|| allocated);
        self.store_backup(&mut item)?;
        Ok(item)
    }

    /// Puts the roots of this commit in the place of the oldest that the superblock remembers.
    fn store_backup(&self, item: &mut SuperblockItem) -> Result<()> {
        let newest = (0..item.super_roots.len())
            .max_by_key(|&i| item.super_roots[i].tree_root_gen.get())
            .unwrap_or(0);
        let place = (newest + 1) % item.super_roots.len();
        let [extent, fs, dev] =
            [TreeId::EXTENT, TreeId::FS, TreeId::DEV].map(|id| self.volume.tree(id));
        let (extent, fs, dev) = (extent?, fs?, dev?);
        let csum = self.volume.tree(TreeId::CSUM)?;
        let number = |n: u64| U64::new(n);
        item.super_roots[place] = RootBackup {
            tree_root: item.root,
            tree_root_gen: item.generation,
            chunk_root: item.chunk_root,
            chunk_root_gen: item.chunk_root_generation,
            extent_root: number(extent.logical.0),
            extent_root_gen: number(extent.generation.0),
            fs_root: number(fs.logical.0),
            fs_root_gen: number(fs.generation.0),
            dev_root: number(dev.logical.0),
            dev_root_gen: number(dev.generation.0),
            csum_root: number(csum.logical.0),
            csum_root_gen: number(csum.generation.0),
            total_bytes: item.total_bytes,
            bytes_used: item.bytes_used,
            num_devices: item.num_devices,
            unused_64: [number(0); 4],
            tree_root_level: item.root_level,
            chunk_root_level: item.chunk_root_level,
            extent_root_level: extent.level,
            fs_root_level: fs.level,
            dev_root_level: dev.level,
            csum_root_level: csum.level,
            unused_8: [0; 10],
        };
        Ok(())
    }
}
