//! Delayed items: the changes of names and inodes, gathered in memory until they go to the tree a
//! leaf at a time.
//!
//! Making a file changes five items at four places of a tree. Done one by one, each of them costs a
//! search and a shift in a leaf. So items of these kinds are *queued* in the nodes of this module,
//! and put into the tree many at a time (*flushed*):
//!
//! | kind | contents | its node holds the items of |
//! |---|---|---|
//! | DIR_ITEM | entries by the hash of their name | one directory |
//! | DIR_INDEX | entries by index | one directory, in a second node |
//! | INODE_ITEM, INODE_REF | inodes and their names | 64 adjacent inode numbers |
//!
//! All other kinds go to the tree at once. A flush sorts its items, so it visits a leaf once for
//! all items that go there. An inode that changes a hundred times is written once. An item that is
//! queued and removed again before a flush never touches the tree: a file that was made and removed
//! in between writes nothing.
//!
//! ```text
//!   operation --queue--> active --freeze--> flushing --by the leaf--> tree --> commit
//!                           \___ readers look here first, in this order ___/
//! ```
//!
//! A node has two sets of items. Operations queue into the *active* set. A flush takes that whole
//! set, which becomes the *flushing* set and does not change any more, and works on it without any
//! lock. Meanwhile a new active set fills.
//!
//! # Invariants
//!
//! 1. A reader sees the active item of a key, else the flushing one, else the one in the tree. A
//!    flush puts items into the tree before it forgets them, so a reader that looks in this order
//!    misses none.
//! 2. An operation queues all its items under one handle, and a flush holds a handle from before it
//!    freezes until it is done. So everything that is queued in a transaction is in its trees when
//!    the transaction ends. While the transaction is quiesced no flush runs, so the commit flushes
//!    the active sets, and then nothing is queued.
//! 3. An item has `in_tree = false` if neither the tree nor a running flush has its key. When such
//!    an item is removed it just disappears. Any other removed item becomes a *tombstone*.
//! 4. Looking at nodes or changing them needs the lock of a shard of the table. It is not held
//!    while a tree is searched. It is a leaf in the order of locks, except for the account of the
//!    tree (`hold`) and the ledger.
//! 5. Queued items take no more memory than [`most_bytes`](Delayed::most_bytes), one operation for
//!    each thread, and 4 KiB for each tree. A writer that finds more queued flushes before it joins
//!    a transaction, or waits for other flushes. At a quarter of `most_bytes` the thread of the
//!    volume begins to flush.
//!
//! A failure or a panic inside a flush may leave the tree half changed, so it ends all writing,
//! like one in any change of a tree. The flushing thread returns the error: from the operation that
//! found too much queued, from the sync, or as a report of the thread of the volume. The flushing
//! set stays in place, so readers still see all of it. No commit completes any more, because a
//! commit fails if items are left in the queue after its last flush.
//!
//! # Reservations
//!
//! An operation reserves a unit for each item that it may change: the worst case of changing one
//! item (`space::reserve`). At its end the nodes keep the units that the queued items need until
//! they are flushed. The rest is released with the handle.
//!
//! | queued item | units that the node keeps |
//! |---|---|
//! | a new DIR_INDEX, INODE_ITEM or INODE_REF | by the leaf: one when its size exceeds the rest of the current leaf (`curr_index_batch_size`, `index_item_leaves`) |
//! | any change of an inode in the tree, or of a new inode after it was made | one for the inode, however often it changes |
//! | a DIR_ITEM | one each, because hashes are scattered |
//! | a removed DIR_INDEX or INODE_REF that is in the tree | one each |
//!
//! New keys of one node are adjacent, so a leaf of them changes one place of the tree. That no
//! longer holds once other items stand between them. An inode gets other items in later operations,
//! or in the one that makes it (the target of a symbolic link). From then on it keeps a unit of its
//! own.
//!
//! When a queued insertion is removed, its size is subtracted from the current leaf if there is
//! only one leaf. With several leaves it is unknown to which one it was counted, and all are kept
//! until no insertion is left. After each batch that a flush has put into the tree, it releases one
//! unit for each leaf that the batch filled while more insertions wait, and all of them at the end.
//! Units of single items are released with their items.
//!
//! All units of one tree together never exceed the cost of copying every block of the tree once and
//! adding the queued items (`hold`). The reason is that no block is copied twice, however many
//! scattered entries there are.
//!
//! All trees together hold no more than a quarter of the metadata that is left beside the reserve
//! and one more operation, or all but 64 MiB of it if that is more, and the items of operations
//! that are just ending. An operation that might exceed that bypasses the queue and puts its items
//! into the tree itself. There are two exceptions: if a chunk is a cheap way to more room
//! (`upkeep/reclaim`), or if items wait in one of its nodes already, it queues its items. In the
//! second case it flushes these nodes when it ends, if too much is held. So the fuller a volume is,
//! the fewer items are queued, and at last no thread has to wait in line for space that a flush
//! could release.
//!
//! What operations reserve, in units (`space::reserve`, `inode::rename`):
//!
//! | operation | items it queues | places it changes at once | reserves |
//! |---|---|---|---|
//! | create, mkdir, mknod, symlink | a DIR_ITEM, a DIR_INDEX, an INODE_ITEM with an INODE_REF in one leaf, the directory's inode: 4 | the target or a property; the new inode with its name is counted twice, because it is flushed before | 6 |
//! | link | a DIR_ITEM, a DIR_INDEX, an INODE_REF, two inodes: 5 | | 9 |
//! | unlink, rmdir | the same, removed; the inode changes, or goes with its last name: 5 | two leaves of the inode's items, or an orphan item: 2 | 7 |
//! | rename | two DIR_ITEMs, a new and a removed DIR_INDEX, two INODE_REFs, three inodes: 9 | | 9 |
//! | rename that replaces a file | also a removed DIR_INDEX, INODE_REF and inode: 12 | two leaves of the replaced inode's items, or an orphan item: 2 | 14 |
//! | an attribute | the inode: 1 | its item, and the inode when it is new: 2 | 9, or 7 to remove it |
//! | one step of an operation on a file that takes several | the inode, two names: 3 | two leaves of its items: 2 | 7 |
//!
//! A name that does not fit beside the others goes to the tree at once, as INODE_EXTREF, and counts
//! as the INODE_REF that it would be.
//!
//! Replaying a log joins without a reservation, because no other thread exists whose space it could
//! wait for. It uses an engine without delayed items.
//!
//! [`Mechanisms`](crate::Mechanisms) turns the delayed items, or the space that they share,
//! off for measurements.

mod backlog;
mod flush;
mod hold;
mod node;
mod read;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use foldhash::fast::FixedState;
use offshoot_btrfs_format::dir::DirEntryItem;
use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::RwLock;

use crate::counter::{NonNegativeCounter, WriteStop};
use crate::shared::Padded;
use crate::space::Space;
use crate::transaction::{ChangingTree, TransactionHandle};
use crate::tree::Blocks;
use backlog::Backlog;
use node::{DelayedNode, ItemTotals, QueuedItems};
pub(crate) use read::{for_each_item, last_below, queued_between, with_item};

/// Shards of the table of nodes, a power of two.
const SHARDS: usize = 64;

/// How many adjacent inode numbers share a node, a power of two: their items fill about a leaf.
pub(crate) const GROUP: u64 = 64;

/// Whether items of this kind wait in memory before they go to the tree of a subvolume.
pub(crate) fn is_delayed(item_type: ItemType) -> bool {
    matches!(
        item_type,
        ItemType::DIR_ITEM | ItemType::DIR_INDEX | ItemType::INODE_ITEM | ItemType::INODE_REF
    )
}

/// The bytes that an entry takes in a leaf beside its name.
const ENTRY_BYTES: u64 = (size_of::<DirEntryItem>() + ITEM_SIZE) as u64;

/// The kind of the items in a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum DelayedNodeKind {
    /// The items of adjacent inodes.
    Inodes,
    /// The entries of a directory by the hash of their name.
    Hashes,
    /// The entries of a directory by index.
    Indexes,
}

/// The id of a node. The order is about that of the keys in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct NodeId {
    tree: TreeId,
    /// The directory, or the first inode.
    first: u64,
    kind: DelayedNodeKind,
}

impl NodeId {
    /// The node of the item with this key; `None` for an item that goes to the tree at once.
    fn of(tree: TreeId, key: Key) -> Option<Self> {
        let (first, kind) = match key.item_type {
            item_type if !is_delayed(item_type) || !tree.is_subvolume() => return None,
            ItemType::DIR_ITEM => (key.objectid, DelayedNodeKind::Hashes),
            ItemType::DIR_INDEX => (key.objectid, DelayedNodeKind::Indexes),
            _ => (key.objectid & !(GROUP - 1), DelayedNodeKind::Inodes),
        };
        Some(Self { tree, first, kind })
    }
}

type DelayedShard = RwLock<HashMap<NodeId, DelayedNode, FixedState>>;

/// How items are delayed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DelayedConfig {
    /// Whether items are delayed at all.
    pub(crate) is_on: bool,
    /// Whether every item keeps a unit of its own.
    pub(crate) is_by_item: bool,
    /// Whether one thread alone flushes, so that the same items make the same blocks.
    pub(crate) is_reproducible: bool,
    /// The limit from which on writers flush themselves, in bytes of memory.
    pub(crate) most_bytes: u64,
}

/// A volume that has items queued for its trees.
pub(crate) trait Queues: Blocks {
    /// The delayed items.
    fn delayed(&self) -> &Delayed;
}

/// All delayed items of a volume.
pub(crate) struct Delayed {
    shards: Box<[Padded<DelayedShard>]>,
    hasher: FixedState,
    is_on: bool,
    /// Whether every item keeps a unit of its own.
    is_by_item: bool,
    /// Whether one thread alone flushes.
    is_reproducible: bool,
    /// The capacity of a leaf, in bytes.
    leaf: u32,
    backlog: Backlog,
    /// The approximate bytes of tree blocks that flushing everything would dirty.
    dirties: AtomicI64,
    /// The reserved metadata that all nodes hold, in bytes.
    held: NonNegativeCounter,
}

impl Delayed {
    /// An empty queue for a volume with nodes of this size. `stop` ends all writing if the held
    /// bytes are counted wrong.
    pub(crate) fn new(config: DelayedConfig, node_size: u32, stop: &Arc<WriteStop>) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Padded::default()).collect(),
            hasher: FixedState::default(),
            is_on: config.is_on,
            is_by_item: config.is_by_item,
            is_reproducible: config.is_reproducible,
            leaf: u32::try_from(leaf_capacity(node_size)).expect("a node is at most 64 KiB"),
            backlog: Backlog::new(config.most_bytes),
            dirties: AtomicI64::new(0),
            held: NonNegativeCounter::new("metadata that queued items hold", stop),
        }
    }

    /// A queue that never takes an item, for a volume with nodes of this size.
    pub(crate) fn off(node_size: u32) -> Self {
        let config = DelayedConfig {
            is_on: false,
            is_by_item: false,
            is_reproducible: false,
            most_bytes: 0,
        };
        Self::new(config, node_size, &Arc::default())
    }

    /// The memory of all queued items, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.backlog.bytes()
    }

    /// The most memory that queued items took at a time, in bytes.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.backlog.peak()
    }

    /// The approximate bytes of tree blocks that flushing everything would dirty; 0 only when
    /// nothing is queued.
    pub(crate) fn dirties(&self) -> u64 {
        u64::try_from(self.dirties.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// The limit from which on writers flush themselves, in bytes of memory.
    pub(crate) fn most_bytes(&self) -> u64 {
        self.backlog.most()
    }

    fn shard(&self, id: NodeId) -> &DelayedShard {
        #[expect(clippy::cast_possible_truncation, reason = "only the lowest bits are wanted")]
        let hash = self.hasher.hash_one(id) as usize;
        &self.shards[hash & (SHARDS - 1)]
    }

    /// Whether an operation on items of `tree` with these keys, which keeps no more than `cost`
    /// bytes reserved, queues them. Where little space is left, items go to the tree at once,
    /// unless an item of the same node is queued: new items that a node counts to one leaf must
    /// stay adjacent.
    pub(crate) fn takes(
        &self,
        space: &Space,
        cost: u64,
        tree: TreeId,
        mut keys: impl Iterator<Item = Key>,
    ) -> bool {
        let has_node =
            |key| NodeId::of(tree, key).is_some_and(|id| self.shard(id).read().contains_key(&id));
        self.is_on && (!self.holds_much(space, cost) || keys.any(has_node))
    }

    /// Whether items of `tree` with these keys are queued rather than put into the tree at once.
    pub(crate) fn queues(
        &self,
        handle: &TransactionHandle<'_>,
        tree: &ChangingTree,
        keys: impl Iterator<Item = Key>,
    ) -> bool {
        self.takes(handle.space(), handle.reserved_bytes(), tree.id, keys)
    }

    /// Calls `look` with the queued data of `key`, or with `None` if it was removed. Returns `None`
    /// when nothing is queued. `look` must take no lock.
    fn look<T>(&self, tree: TreeId, key: Key, look: impl FnOnce(Option<&[u8]>) -> T) -> Option<T> {
        let id = NodeId::of(tree, key).filter(|_| self.is_on)?;
        #[cfg(debug_assertions)]
        let _looking = crate::block::lock_order::NotedDelayedLock::begin();
        let shard = self.shard(id).read();
        shard.get(&id)?.get(key).map(|pending| look(pending.data()))
    }
}

/// Queues the changes of one operation in one tree. When it is dropped the nodes take over the
/// reservation that its items need.
pub(crate) struct OperationQueue<'a, 'v> {
    handle: &'a TransactionHandle<'v>,
    delayed: &'v Delayed,
    tree: &'a Arc<ChangingTree>,
    /// The approximate number of leaves with the hashes of the directory that gets entries.
    spread: Option<u64>,
    /// By how much the queue grew.
    more: ItemTotals,
    /// The nodes that got items.
    nodes: Vec<NodeId>,
    queued: usize,
    annihilated: usize,
}

impl<'a, 'v> OperationQueue<'a, 'v> {
    /// Begins to queue at most `items` items of `tree`.
    ///
    /// # Errors
    /// When the reservation is too small. Nothing was changed yet.
    pub(crate) fn begin(
        handle: &'a TransactionHandle<'v>,
        delayed: &'v Delayed,
        tree: &'a Arc<ChangingTree>,
        items: usize,
    ) -> Result<Self> {
        let (needs, has) = (items as u64 * handle.item_cost(), handle.reserved_bytes());
        if has < needs || (items > 0 && has == 0) {
            debug_assert!(false, "{items} items need {needs} bytes, but {has} are reserved");
            let what = format!("{has} bytes are reserved for {items} delayed items");
            return Err(Error::posix(Errno::NOSPC, what));
        }
        let (spread, more, nodes) = (None, ItemTotals::default(), Vec::with_capacity(items));
        Ok(Self { handle, delayed, tree, spread, more, nodes, queued: 0, annihilated: 0 })
    }

    /// Notes that the directory that gets entries has at most so many, with so many bytes of names.
    /// This bounds the number of leaves with their hashes.
    pub(crate) fn note_entries(&mut self, entries: u64, name_bytes: u64) {
        let bytes = entries.saturating_mul(ENTRY_BYTES).saturating_add(name_bytes);
        // Leaves that grow at random places are two thirds full.
        self.spread = Some(bytes / u64::from(self.delayed.leaf) * 3 / 2 + 1);
    }

    /// Queues new data for the item. `existed` says whether there was an item with this key.
    pub(crate) fn put(
        &mut self,
        key: Key,
        data: impl AsRef<[u8]> + Into<Box<[u8]>>,
        existed: bool,
    ) {
        let leaf = self.delayed.leaf;
        let spread = self.spread.filter(|_| key.item_type == ItemType::DIR_ITEM);
        self.change(key, |items| {
            items.put(key, data, existed, leaf);
            if let Some(leaves) = spread {
                items.set_spread(leaves);
            }
        });
        self.queued += 1;
    }

    /// Queues the removal of the item, which must exist.
    pub(crate) fn remove(&mut self, key: Key) {
        let mut is_gone = false;
        self.change(key, |items| is_gone = items.remove(key));
        self.queued += 1;
        self.annihilated += usize::from(is_gone);
    }

    /// Notes that the inode `ino` has other items in the tree, so that its queued items are no
    /// longer adjacent to those of other inodes.
    pub(crate) fn stands_apart(&mut self, ino: u64) {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        if self.delayed.look(self.tree.id, key, |_| ()).is_some() {
            self.change(key, |items| items.keep_unit(key));
        }
    }

    /// Ends queueing. Where little space is left for queued items, and more is not cheap, this
    /// flushes the nodes that got items.
    ///
    /// # Errors
    /// When the tree cannot be changed. This ends all writing.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.settle();
        let space = self.handle.space();
        if !self.delayed.holds_much(space, 0) {
            self.handle.ask_for_room();
            return Ok(());
        }
        let nodes = std::mem::take(&mut self.nodes);
        self.delayed.flush_nodes(self.handle, &nodes)
    }

    /// Counts the queued items, and hands their reservation over to the nodes.
    pub(crate) fn settle(&mut self) {
        let more = std::mem::take(&mut self.more);
        let _ = self.delayed.settle(self.tree, self.handle.space(), more, Some(self.handle));
    }

    fn change(&mut self, key: Key, change: impl FnOnce(&mut QueuedItems)) {
        let delayed = self.delayed;
        let id = NodeId::of(self.tree.id, key).expect("only items that are delayed are queued");
        #[cfg(debug_assertions)]
        let _looking = crate::block::lock_order::NotedDelayedLock::begin();
        let mut shard = delayed.shard(id).write();
        let node = shard.entry(id).or_default();
        let before = node.active.load(delayed.is_by_item);
        change(&mut node.active);
        self.more += node.active.load(delayed.is_by_item) - before;
        if !self.nodes.contains(&id) {
            self.nodes.push(id);
        }
        if node.is_empty() {
            shard.remove(&id);
        }
    }
}

impl Drop for OperationQueue<'_, '_> {
    fn drop(&mut self) {
        self.settle();
        self.handle.stats().queued(self.queued);
        self.handle.stats().annihilated(self.annihilated);
    }
}
