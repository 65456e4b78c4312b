//! From the nodes to the trees.
//!
//! | who | when | how much |
//! |---|---|---|
//! | the thread of the volume | more than a quarter of [`most_bytes`](Delayed::most_bytes) is queued | what was more than an eighth when it began |
//! | a writer, before it joins | more than all of it is | its share, and until no more than all is |
//! | a writer, when its operation ends | the nodes hold much of what is left of metadata | the nodes that it changed |
//! | who makes room | reserved metadata is wanted | until as much was given back |
//! | an fsync of a directory with many new entries | before it copies them into a log | the nodes of these entries, and of the new inodes that they lead to |
//! | who writes small files back | before it stores several together | the nodes of their inodes |
//! | a commit | always | everything, on all cores: most of it before the gate is shut, the rest behind it |
//!
//! Indexes and inodes come in the order of keys, so a leaf of them has nothing to gain from
//! waiting. They go first, in the order of keys. Hashes are scattered over all leaves of their
//! directory: the more of them go at once, the more meet in a leaf. So they stay longest, and then
//! the largest node of them goes first. At last come nodes with less than a leaf.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, Result};

use super::node::{Items, Load, Pending, Releases};
use super::{Delayed, Kind, NodeId};
use crate::cores;
use crate::stats::Counters;
use crate::transaction::{Base, Handle, Tree};

/// What more than one thread flushes, in bytes of memory: less is done before a thread has begun.
const WORTH_THREADS: u64 = 1 << 20;

/// What goes to a tree at a time, in leaves of new items. Those that are sorted meet few leaves
/// twice, and a commit that waits for the handle does not wait long.
const BATCH_LEAVES: usize = 16;

/// How many nodes a thread takes at a time. They are neighbours, so threads meet in few leaves.
const RUN: usize = 16;

/// The part of what may be queued that a writer flushes when there is too much.
const SHARES: u64 = 16;

/// Who flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushedBy {
    /// The thread of the volume.
    Background,
    /// An operation that found too much queued, or no room, or that stores many files.
    Writer,
    /// A commit.
    Commit,
    /// An fsync that copies what it logs from the tree.
    Fsync,
}

impl FlushedBy {
    /// A set of delayed items was flushed.
    fn count(self, stats: &Counters) {
        match self {
            Self::Background => stats.flushed_in_background(),
            Self::Writer => stats.flushed_by_writer(),
            Self::Commit => stats.flushed_by_commit(),
            Self::Fsync => stats.flushed_by_fsync(),
        }
    }
}

/// What items that are being flushed are, in the order of keys.
type Sorted<'i> = [(Key, &'i Pending)];

impl Delayed {
    /// Flushes delayed items until at least `bytes` of reserved metadata were given back, or
    /// nothing is left that can be flushed now. Says how many were given back. The caller must hold
    /// no handle; it may hold locks of inodes.
    ///
    /// # Errors
    /// When a tree cannot be changed: nothing more is written then.
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

    /// Flushes a share of the delayed items when there are too many, and has them flushed before.
    /// The caller must hold no handle; it may hold locks of inodes.
    ///
    /// # Errors
    /// As [`flush`](Self::flush), and `EROFS` when something failed before.
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
            live.require_whole()?;
            if flushed == 0 {
                // Others are flushing all that there is, or are about to count that it is gone.
                watch.wait();
            }
        }
        Ok(())
    }

    /// Flushes what is more than an eighth of what may be queued, when more than a quarter of that
    /// is. What others queue meanwhile is left for the next time: however much they change, this
    /// ends.
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

    /// Flushes nodes until this many bytes of memory are free; how many became free.
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

    /// Flushes everything that is queued and that nobody else is flushing, on several threads when
    /// it is worth that. Each gets its handles from `join`.
    ///
    /// # Errors
    /// As [`flush`](Self::flush): the first, when no thread is at work any more.
    pub(crate) fn flush_all<'v>(&self, join: impl Fn() -> Result<Handle<'v>> + Sync) -> Result<()> {
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
        let cores = cores::count();
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
                // Who comes later is only told that nothing is written any more: the cause is what
                // another met.
                Ok(Err(cause)) if is_refused(&all) => Err(cause),
                Ok(result) => all.and(result),
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Flushes one node, unless somebody else does.
    fn flush_node(&self, handle: &Handle<'_>, id: NodeId, by: FlushedBy) -> Result<Flushed> {
        let Some(frozen) = self.freeze(id) else { return Ok(Flushed::default()) };
        by.count(handle.stats());
        handle.whole(|| {
            let tree = handle.tree(id.tree)?;
            Flush { handle, tree: &tree, frozen: &frozen }.run()
        })
    }

    /// Flushes what waits beside the item with this key, and says whether nothing waits there any
    /// more.
    ///
    /// # Errors
    /// When the tree cannot be changed: nothing more is written then.
    pub(crate) fn flush_beside(&self, handle: &Handle<'_>, tree: TreeId, key: Key) -> Result<bool> {
        let Some(id) = NodeId::of(tree, key) else { return Ok(true) };
        self.flush_node(handle, id, FlushedBy::Fsync)?;
        Ok(!self.shard(id).read().contains_key(&id))
    }

    /// Flushes these nodes now, but for those that somebody else is flushing.
    pub(super) fn flush_nodes(&self, handle: &Handle<'_>, nodes: &[NodeId]) -> Result<()> {
        let flush = |&id| self.flush_node(handle, id, FlushedBy::Writer).map(drop);
        nodes.iter().try_for_each(flush)
    }

    /// Puts what is queued of these inodes, which are in order, and of those beside them into the
    /// tree now. What somebody else is flushing stays queued.
    ///
    /// # Errors
    /// When the tree cannot be changed: nothing more is written then.
    pub(crate) fn flush_inodes(
        &self,
        handle: &Handle<'_>,
        tree: TreeId,
        inodes: impl Iterator<Item = u64>,
    ) -> Result<()> {
        let node = |ino| NodeId::of(tree, Key::new(ino, ItemType::INODE_ITEM, 0));
        let mut nodes: Vec<_> = inodes.filter_map(node).collect();
        nodes.dedup();
        self.flush_nodes(handle, &nodes)
    }

    /// Puts what is queued of the inode `ino` into the tree now, if the inode is new: items beside
    /// it have gone there, and leaves that are full of those would be split for it later. When its
    /// node is being flushed, it stays queued.
    ///
    /// # Errors
    /// When the tree cannot be changed: nothing more is written then.
    pub(crate) fn flush_inode(&self, handle: &Handle<'_>, tree: &Tree, ino: u64) -> Result<()> {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let Some(id) = NodeId::of(tree.id, key) else { return Ok(()) };
        let Some((frozen, more)) = self.freeze_inode(id, ino) else { return Ok(()) };
        handle.whole(|| {
            let _ = self.settle(tree, handle.space(), more, Some(handle));
            Flush { handle, tree, frozen: &frozen }.run().map(drop)
        })
    }
}

/// What a flush did.
#[derive(Clone, Copy, Debug, Default)]
struct Flushed {
    /// Memory that became free, in bytes.
    bytes: u64,
    /// Reserved metadata that was given back, in bytes.
    released: u64,
}

/// What a flush has taken out of a node. When this is dropped the flush has ended, well or not, and
/// who waits for it is told.
pub(super) struct Frozen<'v> {
    delayed: &'v Delayed,
    id: NodeId,
    items: Arc<Items>,
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.delayed.backlog.tell();
    }
}

/// One flush of a node.
struct Flush<'a, 'v> {
    handle: &'a Handle<'v>,
    tree: &'a Tree,
    frozen: &'a Frozen<'v>,
}

impl Flush<'_, '_> {
    /// Flushes what was frozen, and thaws the node. When that fails the items stay where they are.
    fn run(&self) -> Result<Flushed> {
        let flushed = self.put(&self.frozen.items)?;
        self.frozen.delayed.forget(self.frozen.id);
        Ok(flushed)
    }

    fn put(&self, items: &Items) -> Result<Flushed> {
        let delayed = self.frozen.delayed;
        let sorted = items.in_order(self.frozen.id.first);
        let mut left = Releases::new(items, delayed.by_item, delayed.leaf);
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
                return Ok(Flushed { bytes: u64::try_from(load.bytes).unwrap_or(0), released });
            }
            released += self.give_back(load);
        }
    }

    /// Puts a batch into the tree.
    fn apply(&self, batch: &Sorted<'_>) -> Result<()> {
        let edits: Vec<_> = batch.iter().map(|(key, pending)| (*key, pending.data())).collect();
        self.handle.change(self.tree.id, |tree| tree.apply_batch(&edits).map(drop))
    }

    /// The items are in the tree: gives back what was reserved for them, and says how much that
    /// was.
    fn give_back(&self, load: Load) -> u64 {
        let less = Load::default() - load;
        self.frozen.delayed.settle(self.tree, self.handle.space(), less, None)
    }
}

/// Whether nothing is written any more because of something that happened before.
fn is_refused(result: &Result<()>) -> bool {
    matches!(result, Err(error) if error.errno() == Errno::ROFS)
}

/// How many of `items`, which are not none, fill leaves of this many bytes; at least one.
fn fill(items: &Sorted<'_>, bytes: usize) -> usize {
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
    /// The nodes that can be flushed, and what they take.
    fn nodes(&self) -> Vec<(NodeId, u64)> {
        let mut nodes = Vec::new();
        for shard in &self.shards {
            let shard = shard.read();
            let idle =
                shard.iter().filter(|(_, node)| node.flushing.is_none() && !node.active.is_empty());
            let bytes = |items: &Items| u64::try_from(items.load(false).bytes).unwrap_or(0);
            nodes.extend(idle.map(|(&id, node)| (id, bytes(&node.active))));
        }
        nodes
    }

    /// The nodes that can be flushed, in the order in which it is best done.
    fn ripe_first(&self) -> Vec<NodeId> {
        let mut nodes = self.nodes();
        nodes.sort_unstable_by_key(|&(id, bytes)| {
            let (is_hashed, is_small) = (id.kind == Kind::Hashes, bytes < u64::from(self.leaf));
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

    /// Takes what waits in a node to be flushed, unless that is done already, or there is nothing.
    /// The caller has a handle for as long as it has that.
    pub(super) fn freeze(&self, id: NodeId) -> Option<Frozen<'_>> {
        let mut shard = self.shard(id).write();
        let node = shard.get_mut(&id)?;
        if node.flushing.is_some() || node.active.is_empty() {
            return None;
        }
        let items = Arc::new(std::mem::take(&mut node.active));
        node.flushing = Some(items.clone());
        Some(Frozen { delayed: self, id, items })
    }

    /// Takes what waits of a new inode to be flushed, and says by how much there is more for that
    /// to be reserved.
    fn freeze_inode(&self, id: NodeId, ino: u64) -> Option<(Frozen<'_>, Load)> {
        let mut shard = self.shard(id).write();
        let node = shard.get_mut(&id).filter(|node| node.flushing.is_none())?;
        let mut more = Load::default() - node.active.load(self.by_item);
        let items = Arc::new(node.active.take_inode(ino, self.leaf)?);
        more += node.active.load(self.by_item);
        more += items.load(self.by_item);
        node.flushing = Some(items.clone());
        Some((Frozen { delayed: self, id, items }, more))
    }

    /// What was flushing is in the tree.
    fn forget(&self, id: NodeId) {
        let mut shard = self.shard(id).write();
        let Some(node) = shard.get_mut(&id) else { return };
        node.flushing = None;
        if node.is_empty() {
            shard.remove(&id);
        }
    }

    /// Refuses to go on while anything is queued. The caller is alone: a commit without all items
    /// would tear operations apart.
    pub(crate) fn require_empty(&self) -> Result<()> {
        let left: usize = self.shards.iter().map(|shard| shard.read().len()).sum();
        if left > 0 {
            let problem = format!("{left} sets of items are queued behind the last flush");
            return Err(Error::corrupt("delayed items", problem));
        }
        Ok(())
    }
}
