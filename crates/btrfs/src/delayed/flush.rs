//! Flushing: from the nodes to the trees.
//!
//! | flusher | when | how much |
//! |---|---|---|
//! | the thread of the volume | more than a quarter of [`most_bytes`](Delayed::most_bytes) is queued | all above an eighth of it, as counted when it began |
//! | a writer, before it joins | more than all of `most_bytes` is queued | its share, again until `most_bytes` is not exceeded |
//! | a writer, when its operation ends | the nodes hold much of the metadata that is left | the nodes that it changed |
//! | the leader that makes room | reserved metadata is wanted | until so much was released |
//! | an fsync of a directory with many new entries | before it copies them into a log | the nodes of these entries, and of the new inodes that they lead to |
//! | write-back of small files | before it stores several together | the nodes of their inodes |
//! | a commit | always | everything, on all cores: most of it before it blocks writers, the rest after |
//!
//! Indexes and inodes arrive in the order of keys, so their leaves gain nothing from waiting. They
//! are flushed first, in the order of keys. Hashes are scattered over all leaves of their
//! directory: the more of them are flushed together, the more share a leaf. So they stay longest,
//! and then the node with the most of them goes first. Nodes with less than a leaf of items come
//! last.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, Result, Structure};

use super::node::{ItemTotals, QueuedItem, QueuedItems, Releases};
use super::{Delayed, DelayedNodeKind, NodeId};
use crate::cores;
use crate::stats::EngineCounters;
use crate::transaction::{Base, ChangingTree, TransactionHandle};

/// The bytes from which on several threads flush. Less is flushed before a second thread has
/// started.
const WORTH_THREADS: u64 = 1 << 20;

/// The leaves of new items that go to a tree at a time. Sorted items of one batch rarely share a
/// leaf with the next batch, and a commit that waits for the handle does not wait long.
const BATCH_LEAVES: usize = 16;

/// The nodes that a thread takes at a time. They are neighbours, so threads rarely meet in a leaf.
const RUN: usize = 16;

/// A writer that finds too much queued flushes one such part of the limit.
const SHARES: u64 = 16;

/// The flusher, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushedBy {
    /// The thread of the volume.
    Background,
    /// An operation that found too much queued or no room, or write-back of many files.
    Writer,
    /// A commit.
    Commit,
    /// An fsync that copies items from the tree into a log.
    Fsync,
}

impl FlushedBy {
    /// Counts a flushed set of delayed items.
    fn count(self, stats: &EngineCounters) {
        match self {
            Self::Background => stats.flushed_in_background(),
            Self::Writer => stats.flushed_by_writer(),
            Self::Commit => stats.flushed_by_commit(),
            Self::Fsync => stats.flushed_by_fsync(),
        }
    }
}

/// Items that are being flushed, in the order of keys.
type SortedItems<'i> = [(Key, &'i QueuedItem)];

impl Delayed {
    /// Flushes delayed items until at least `bytes` of reserved metadata were released, or nothing
    /// more can be flushed now. Returns how many were released. The caller must hold no handle; it
    /// may hold locks of inodes.
    ///
    /// # Errors
    /// When a tree cannot be changed. This ends all writing.
    pub(crate) fn flush(&self, base: &Base, bytes: u64) -> Result<u64> {
        let mut released = 0;
        for id in self.ripe_first() {
            if released >= bytes {
                break;
            }
            released += self.flush_node(&base.enter()?, id, FlushedBy::Writer)?.released;
        }
        Ok(released)
    }

    /// Flushes delayed items while there are more than the limit, and asks the thread of the volume
    /// to flush from a quarter of the limit on. The caller must hold no handle; it may hold locks
    /// of inodes.
    ///
    /// # Errors
    /// As [`flush`](Self::flush), and `EROFS` when an earlier failure has ended all writing.
    pub(crate) fn limit(&self, base: &Base) -> Result<()> {
        let (live, most) = (base.live()?, self.most_bytes());
        if self.bytes() > most / 4 {
            live.pressure.press();
        }
        if self.bytes() <= most {
            return Ok(());
        }
        let mut watch = self.backlog.watch();
        while watch.sees_too_much() {
            let flushed = self.flush_bytes(base, most / SHARES, FlushedBy::Writer)?;
            live.require_writing()?;
            if flushed == 0 {
                // Other threads are flushing everything, or have not counted the end of their flush
                // yet.
                watch.wait();
            }
        }
        Ok(())
    }

    /// If more than a quarter of the limit is queued, flushes all above an eighth. Items that are
    /// queued meanwhile wait for the next call, so this ends however fast other threads queue.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub(crate) fn ease(&self, base: &Base) -> Result<()> {
        let (bytes, most) = (self.bytes(), self.most_bytes());
        if bytes > most / 4 {
            self.flush_bytes(base, bytes - most / 8, FlushedBy::Background)?;
        }
        Ok(())
    }

    /// Flushes nodes until so many bytes of memory were freed. Returns how many were.
    fn flush_bytes(&self, base: &Base, bytes: u64, by: FlushedBy) -> Result<u64> {
        let mut flushed = 0;
        for id in self.ripe_first() {
            if flushed >= bytes {
                break;
            }
            flushed += self.flush_node(&base.enter()?, id, by)?.bytes;
        }
        Ok(flushed)
    }

    /// Flushes everything that no other thread is flushing, on several threads if it is much. Each
    /// gets its handles from `join`.
    ///
    /// # Errors
    /// As [`flush`](Self::flush): the first error, after all threads have ended.
    pub(crate) fn flush_all<'v>(
        &self,
        join: impl Fn() -> Result<TransactionHandle<'v>> + Sync,
    ) -> Result<()> {
        let nodes = self.in_order();
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            loop {
                let from = next.fetch_add(RUN, Ordering::Relaxed).min(nodes.len());
                let run = &nodes[from..nodes.len().min(from + RUN)];
                if run.is_empty() {
                    return Ok(());
                }
                for &id in run {
                    self.flush_node(&join()?, id, FlushedBy::Commit)?;
                }
            }
        };
        // Several threads take their new blocks in an order that is another one each time.
        let cores = if self.is_reproducible { 1 } else { cores::count() };
        let threads = if self.bytes() < WORTH_THREADS { 1 } else { cores.min(nodes.len()) };
        if threads <= 1 {
            return work();
        }
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads)
                .map(|_| {
                    scope.spawn(|| {
                        cores::use_all();
                        work()
                    })
                })
                .collect();
            let own = work();
            others.into_iter().fold(own, |all, other| match other.join() {
                // After one thread failed, the others only get `EROFS`. The other error is the
                // cause.
                Ok(Err(cause)) if is_refused(&all) => Err(cause),
                Ok(result) => all.and(result),
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Flushes one node, unless another thread does.
    fn flush_node(
        &self,
        handle: &TransactionHandle<'_>,
        id: NodeId,
        by: FlushedBy,
    ) -> Result<FlushCounts> {
        let Some(frozen) = self.freeze(id) else { return Ok(FlushCounts::default()) };
        by.count(handle.stats());
        handle.all_or_stop(|| {
            let tree = handle.tree(id.tree)?;
            Flush { handle, tree: &tree, frozen: &frozen }.run()
        })
    }

    /// Flushes the node of the item with this key. Returns whether the node is empty then.
    ///
    /// # Errors
    /// When the tree cannot be changed. This ends all writing.
    pub(crate) fn flush_beside(
        &self,
        handle: &TransactionHandle<'_>,
        tree: TreeId,
        key: Key,
    ) -> Result<bool> {
        let Some(id) = NodeId::of(tree, key) else { return Ok(true) };
        self.flush_node(handle, id, FlushedBy::Fsync)?;
        Ok(!self.shard(id).read().contains_key(&id))
    }

    /// Flushes these nodes, except those that another thread is flushing.
    pub(super) fn flush_nodes(
        &self,
        handle: &TransactionHandle<'_>,
        nodes: &[NodeId],
    ) -> Result<()> {
        let flush = |&id| self.flush_node(handle, id, FlushedBy::Writer).map(drop);
        nodes.iter().try_for_each(flush)
    }

    /// Flushes the nodes of these inodes, which are sorted. A node that another thread is flushing
    /// keeps its items.
    ///
    /// # Errors
    /// When the tree cannot be changed. This ends all writing.
    pub(crate) fn flush_inodes(
        &self,
        handle: &TransactionHandle<'_>,
        tree: TreeId,
        inodes: impl Iterator<Item = u64>,
    ) -> Result<()> {
        let node = |ino| NodeId::of(tree, Key::new(ino, ItemType::INODE_ITEM, 0));
        let mut nodes: Vec<_> = inodes.filter_map(node).collect();
        nodes.dedup();
        self.flush_nodes(handle, &nodes)
    }

    /// Flushes the queued items of the inode `ino` if it is new. Other items of the inode go to the
    /// tree at once, and if they came first, leaves full of them would later be split for the inode
    /// item. If its node is being flushed, the items stay queued.
    ///
    /// # Errors
    /// When the tree cannot be changed. This ends all writing.
    pub(crate) fn flush_inode(
        &self,
        handle: &TransactionHandle<'_>,
        tree: &ChangingTree,
        ino: u64,
    ) -> Result<()> {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let Some(id) = NodeId::of(tree.id, key) else { return Ok(()) };
        let Some((frozen, more)) = self.freeze_inode(id, ino) else { return Ok(()) };
        handle.all_or_stop(|| {
            let _ = self.settle(tree, handle.space(), more, Some(handle));
            Flush { handle, tree, frozen: &frozen }.run().map(drop)
        })
    }
}

/// The result of a flush.
#[derive(Clone, Copy, Debug, Default)]
struct FlushCounts {
    /// The freed memory, in bytes.
    bytes: u64,
    /// The released metadata, in bytes.
    released: u64,
}

/// The items that a flush has frozen. Dropping this ends the flush, even after an error or a panic,
/// and wakes the writers that wait for it.
pub(super) struct FrozenItems<'v> {
    delayed: &'v Delayed,
    id: NodeId,
    items: Arc<QueuedItems>,
}

impl Drop for FrozenItems<'_> {
    fn drop(&mut self) {
        self.delayed.backlog.tell();
    }
}

/// One flush of a node.
struct Flush<'a, 'v> {
    handle: &'a TransactionHandle<'v>,
    tree: &'a ChangingTree,
    frozen: &'a FrozenItems<'v>,
}

impl Flush<'_, '_> {
    /// Flushes the frozen items, and removes them from the node. When that fails they stay there.
    fn run(&self) -> Result<FlushCounts> {
        let flushed = self.put(&self.frozen.items)?;
        self.frozen.delayed.forget(self.frozen.id);
        Ok(flushed)
    }

    fn put(&self, items: &QueuedItems) -> Result<FlushCounts> {
        let delayed = self.frozen.delayed;
        let sorted = items.in_order(self.frozen.id.first);
        let mut left = Releases::new(items, delayed.is_by_item, delayed.leaf);
        let mut released = 0;
        let mut rest = &sorted[..];
        loop {
            let batch;
            (batch, rest) = rest.split_at(fill(rest, BATCH_LEAVES * delayed.leaf as usize));
            self.apply(batch)?;
            let mut load = left.after(batch);
            if rest.is_empty() {
                load += left.rest();
                released += self.give_back(load);
                return Ok(FlushCounts { bytes: u64::try_from(load.bytes).unwrap_or(0), released });
            }
            released += self.give_back(load);
        }
    }

    /// Puts a batch into the tree.
    fn apply(&self, batch: &SortedItems<'_>) -> Result<()> {
        let edits: Vec<_> = batch.iter().map(|(key, pending)| (*key, pending.data())).collect();
        self.handle.change(self.tree.id, |tree| tree.apply_batch(&edits).map(drop))
    }

    /// Releases the reservation of items that are in the tree now. Returns how many bytes that
    /// were.
    fn give_back(&self, load: ItemTotals) -> u64 {
        let less = ItemTotals::default() - load;
        self.frozen.delayed.settle(self.tree, self.handle.space(), less, None)
    }
}

/// Whether the error only says that an earlier failure has ended all writing.
fn is_refused(result: &Result<()>) -> bool {
    matches!(result, Err(error) if error.errno() == Errno::ROFS)
}

/// How many of `items`, of which there is at least one, fit into so many bytes; at least one.
fn fill(items: &SortedItems<'_>, bytes: usize) -> usize {
    let mut room = bytes;
    let fit = items.iter().take_while(|(_, pending)| {
        let size = pending.data().map_or(0, <[u8]>::len) + ITEM_SIZE;
        let fits = size <= room;
        room = room.saturating_sub(size);
        fits
    });
    fit.count().max(1)
}

impl Delayed {
    /// The nodes that can be flushed, with the memory of their items.
    fn nodes(&self) -> Vec<(NodeId, u64)> {
        let mut nodes = Vec::new();
        for shard in &self.shards {
            let shard = shard.read();
            let idle =
                shard.iter().filter(|(_, node)| node.flushing.is_none() && !node.active.is_empty());
            let bytes = |items: &QueuedItems| u64::try_from(items.load(false).bytes).unwrap_or(0);
            nodes.extend(idle.map(|(&id, node)| (id, bytes(&node.active))));
        }
        nodes
    }

    /// The nodes that can be flushed, in the best order.
    fn ripe_first(&self) -> Vec<NodeId> {
        let mut nodes = self.nodes();
        nodes.sort_unstable_by_key(|&(id, bytes)| {
            let (is_hashed, is_small) =
                (id.kind == DelayedNodeKind::Hashes, bytes < u64::from(self.leaf));
            (is_small, is_hashed, Reverse(if is_hashed { bytes } else { 0 }), id)
        });
        nodes.into_iter().map(|(id, _)| id).collect()
    }

    /// The nodes that can be flushed, in the order of keys.
    fn in_order(&self) -> Vec<NodeId> {
        let mut nodes: Vec<_> = self.nodes().into_iter().map(|(id, _)| id).collect();
        nodes.sort_unstable();
        nodes
    }

    /// Freezes the active items of a node for a flush. `None` if a flush runs already or the node
    /// is empty. The caller holds a handle as long as it has the result.
    pub(super) fn freeze(&self, id: NodeId) -> Option<FrozenItems<'_>> {
        let mut shard = self.shard(id).write();
        let node = shard.get_mut(&id)?;
        if node.flushing.is_some() || node.active.is_empty() {
            return None;
        }
        let items = Arc::new(std::mem::take(&mut node.active));
        node.flushing = Some(items.clone());
        Some(FrozenItems { delayed: self, id, items })
    }

    /// Freezes the items of a new inode for a flush. Also returns by how much the reservation of
    /// the node changes.
    fn freeze_inode(&self, id: NodeId, ino: u64) -> Option<(FrozenItems<'_>, ItemTotals)> {
        let mut shard = self.shard(id).write();
        let node = shard.get_mut(&id).filter(|node| node.flushing.is_none())?;
        let mut more = ItemTotals::default() - node.active.load(self.is_by_item);
        let items = Arc::new(node.active.take_inode(ino, self.leaf)?);
        more += node.active.load(self.is_by_item);
        more += items.load(self.is_by_item);
        node.flushing = Some(items.clone());
        Some((FrozenItems { delayed: self, id, items }, more))
    }

    /// Forgets the flushed items of a node, which are in the tree.
    fn forget(&self, id: NodeId) {
        let mut shard = self.shard(id).write();
        let Some(node) = shard.get_mut(&id) else { return };
        node.flushing = None;
        if node.is_empty() {
            shard.remove(&id);
        }
    }

    /// Fails if anything is queued. The caller is a commit with the transaction quiesced: without
    /// all items it would tear operations apart.
    pub(crate) fn require_empty(&self) -> Result<()> {
        let left: usize = self.shards.iter().map(|shard| shard.read().len()).sum();
        if left > 0 {
            let problem = format!("{left} sets of items are queued behind the last flush");
            return Err(Error::corrupt(Structure::DelayedItems, problem));
        }
        Ok(())
    }
}
