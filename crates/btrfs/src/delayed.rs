//! Delayed items: what operations of the namespace change, gathered until it goes to the tree by
//! the leaf.
//!
//! Making a file changes five items at four places of a tree, and one at a time each of them costs
//! a way down and a shift in a leaf. So the items of these kinds are *queued*, and put into the
//! tree many at a time (*flushed*):
//!
//! | kind | of | waits in the node of |
//! |---|---|---|
//! | DIR_ITEM | entries by the hash of their name | the directory |
//! | DIR_INDEX | entries by index | the directory, another one |
//! | INODE_ITEM, INODE_REF | inodes and their names | 64 adjacent inode numbers |
//!
//! All other kinds go to the tree at once. What is flushed is sorted, so a flush meets a leaf once
//! for all that goes into it. An inode that changes a hundred times is written once, and what is
//! queued and taken back before it was flushed never touches the tree: a file that was made and
//! removed leaves nothing to write.
//!
//! ```text
//!   operation --queue--> active --freeze--> flushing --by the leaf--> tree --> commit
//!                           \___ readers look here first, in this order ___/
//! ```
//!
//! A node has two sets of items. Operations queue into the *active* one. A flush takes that as a
//! whole, which becomes the *flushing* one and does not change any more, and works on it without
//! any lock; meanwhile a new active one fills.
//!
//! # Invariants
//!
//! 1. What a reader sees of a key is the active item, else the flushing one, else that of the tree.
//!    A flush puts items into the tree before it forgets them, so a reader that looks in this order
//!    misses none.
//! 2. An operation queues all its items under one handle, and a flush has a handle from before it
//!    freezes until it is done. So whatever is queued in a transaction is in its trees when it is
//!    finished, and with the gate shut nothing is flushing: a commit flushes what is active, and
//!    then nothing is queued.
//! 3. An item whose key neither the tree nor a flush under way has is `in_tree = false`. When such
//!    an item is removed it just disappears; any other becomes a *tombstone*.
//! 4. A table's shard lock is held to look at nodes or change them, never while a tree is searched.
//!    It is a leaf in the order of locks, but for the account of the tree (`hold`) and the ledger.
//! 5. What is queued takes no more than [`most_bytes`](Delayed::most_bytes) of memory, one
//!    operation for each thread, and 4 KiB for each tree: who finds more than that queued flushes
//!    before it joins a transaction, or waits for those who do. At a quarter of it the thread of
//!    the volume begins to flush.
//!
//! A failure or a panic inside a flush may have left the tree half changed and ends all writing,
//! like one in any change of a tree. A failure is returned to who flushed: the operation that found
//! too much queued, the sync, or the thread of the volume, which reports it. What was flushing
//! stays where it is, so readers go on seeing all of it, and no commit completes: one that finds
//! anything queued behind its last flush fails.
//!
//! # What is reserved
//!
//! An operation reserves a unit (`space::reserve`, the worst case of changing one item) for each
//! item that it may change. What its queued items need until they are flushed it leaves to their
//! nodes when it is done, and the rest is released with its handle.
//!
//! | queued | units that the node keeps |
//! |---|---|
//! | a new DIR_INDEX, INODE_ITEM or INODE_REF | by the leaf: one when its size passes what is left of the current leaf (`curr_index_batch_size`, `index_item_leaves`) |
//! | any change of an inode that the tree has, or of a new one after it was made | one for the inode, however often it changes |
//! | a DIR_ITEM | one each, because hashes are scattered |
//! | a removed DIR_INDEX or INODE_REF that the tree has | one each |
//!
//! New keys of one node are adjacent, so a leaf of them changes one place of the tree. That is not
//! so once other items stand between them: inodes get those in operations after the one that made
//! them, or with it (the target of a link), and keep a unit of their own from then on.
//!
//! When a queued insertion is removed, it is taken off the current leaf if there is just that one;
//! with several nobody knows which one it was counted to, and they are kept until none is left.
//! After each batch that a flush has put into the tree, a unit for each leaf that it filled is
//! released if more insertions wait, and else all; units of single items go with them.
//!
//! All units of one tree together are never more than what it takes to copy every block of it once
//! and to add what is queued (`hold`): however many scattered entries there are, no block is copied
//! twice.
//!
//! All trees together hold no more than a quarter of what is left of metadata beside what is kept
//! back and one more operation, or all but 64 MiB of it where that is more, and what operations
//! that end just now have queued. An operation that might make it more goes past the queue: it puts
//! its items into the tree itself, but where a chunk is a cheap way to more room (`upkeep/reclaim`),
//! or something waits in one of their nodes already. Then it queues them, and flushes these nodes
//! when it ends and more is held. So the fuller a volume is, the less waits, and at last nobody has
//! to wait in line for what others could flush.
//!
//! What operations reserve, in units (`space::reserve`, `inode::rename`):
//!
//! | operation | items it queues | places it changes at once | reserves |
//! |---|---|---|---|
//! | create, mkdir, mknod, symlink | a DIR_ITEM, a DIR_INDEX, an INODE_ITEM with an INODE_REF in one leaf, the directory's inode: 4 | the target or a property; the new inode with its name is counted twice, as it is flushed before | 6 |
//! | link | a DIR_ITEM, a DIR_INDEX, an INODE_REF, two inodes: 5 | | 9 |
//! | unlink, rmdir | the same, removed; the inode changes, or goes with its last name: 5 | two leaves of the inode's items, or an orphan item: 2 | 7 |
//! | rename | two DIR_ITEMs, a new and a removed DIR_INDEX, two INODE_REFs, three inodes: 9 | | 9 |
//! | the same, replacing | besides a removed DIR_INDEX, INODE_REF and inode: 12 | two leaves of the replaced inode's items, or an orphan item: 2 | 14 |
//! | an attribute | the inode: 1 | its item, and the inode when it is new: 2 | 9, or 7 to remove it |
//! | a part of a file that goes in steps | the inode, two names: 3 | two leaves of its items: 2 | 7 |
//!
//! A name for which there is no room beside the others goes to the tree at once, as INODE_EXTREF,
//! and counts as the INODE_REF that it would be.
//!
//! Replaying a log joins without a reservation, because there is nobody to wait for: it is done by
//! an engine without delayed items.
//!
//! Two options take the mechanisms away to measure them: [`OpenOptions::delayed_items`] and
//! [`OpenOptions::reserve_by_item`].
//!
//! [`OpenOptions::delayed_items`]: crate::OpenOptions::delayed_items
//! [`OpenOptions::reserve_by_item`]: crate::OpenOptions::reserve_by_item

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

use crate::counter::{Counter, Stop};
use crate::space::Space;
use crate::transaction::{Handle, Tree};
use crate::tree::Blocks;
use backlog::Backlog;
use node::{Items, Load, Node};
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

/// What an entry takes of a leaf beside its name, in bytes.
const ENTRY_BYTES: u64 = (size_of::<DirEntryItem>() + ITEM_SIZE) as u64;

/// What the items of a node are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    /// The items of adjacent inodes.
    Inodes,
    /// The entries of a directory by the hash of their name.
    Hashes,
    /// The entries of a directory by index.
    Indexes,
}

/// Which node. The order is that of the keys in a tree, about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct NodeId {
    tree: TreeId,
    /// The directory, or the first inode.
    first: u64,
    kind: Kind,
}

impl NodeId {
    /// The node in which the item with this key waits; `None` for what goes to the tree at once.
    fn of(tree: TreeId, key: Key) -> Option<Self> {
        let (first, kind) = match key.item_type {
            item_type if !is_delayed(item_type) || !tree.is_subvolume() => return None,
            ItemType::DIR_ITEM => (key.objectid, Kind::Hashes),
            ItemType::DIR_INDEX => (key.objectid, Kind::Indexes),
            _ => (key.objectid & !(GROUP - 1), Kind::Inodes),
        };
        Some(Self { tree, first, kind })
    }
}

type Shard = RwLock<HashMap<NodeId, Node, FixedState>>;

/// What is delayed, and how much of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DelayedConfig {
    /// Anything is.
    pub(crate) is_on: bool,
    /// Every item keeps a unit of its own.
    pub(crate) by_item: bool,
    /// What may be queued before writers flush themselves, in bytes of memory.
    pub(crate) most_bytes: u64,
}

/// A volume that has items queued for its trees.
pub(crate) trait Queues: Blocks {
    /// They.
    fn delayed(&self) -> &Delayed;
}

/// All delayed items of a volume.
pub(crate) struct Delayed {
    shards: Box<[Shard]>,
    hasher: FixedState,
    is_on: bool,
    /// Every item keeps a unit of its own.
    by_item: bool,
    /// What a leaf has room for, in bytes.
    leaf: u32,
    backlog: Backlog,
    /// The tree blocks that flushing everything makes dirty, about, in bytes.
    dirties: AtomicI64,
    /// What all nodes keep of reserved metadata, in bytes.
    held: Counter,
}

impl Delayed {
    /// Nothing is queued yet in a volume with nodes of this size. `stop` is told when what is held
    /// is counted wrong.
    pub(crate) fn new(config: DelayedConfig, node_size: u32, stop: &Arc<Stop>) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            hasher: FixedState::default(),
            is_on: config.is_on,
            by_item: config.by_item,
            leaf: u32::try_from(leaf_capacity(node_size)).expect("a node is at most 64 KiB"),
            backlog: Backlog::new(config.most_bytes),
            dirties: AtomicI64::new(0),
            held: Counter::new("metadata that queued items hold", stop),
        }
    }

    /// Nothing is ever queued, in a volume with nodes of this size.
    pub(crate) fn off(node_size: u32) -> Self {
        let config = DelayedConfig { is_on: false, by_item: false, most_bytes: 0 };
        Self::new(config, node_size, &Arc::default())
    }

    /// What is queued, in bytes of memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.backlog.bytes()
    }

    /// The most that was queued at a time, in bytes of memory.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.backlog.peak()
    }

    /// The tree blocks that flushing everything makes dirty, about, in bytes; 0 only when nothing
    /// is queued.
    pub(crate) fn dirties(&self) -> u64 {
        u64::try_from(self.dirties.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// What may be queued before writers flush themselves, in bytes of memory.
    pub(crate) fn most_bytes(&self) -> u64 {
        self.backlog.most()
    }

    fn shard(&self, id: NodeId) -> &Shard {
        #[expect(clippy::cast_possible_truncation, reason = "only the lowest bits are wanted")]
        let hash = self.hasher.hash_one(id) as usize;
        &self.shards[hash & (SHARDS - 1)]
    }

    /// Whether an operation on items of `tree` with these keys, which keeps no more than `cost`
    /// bytes reserved, queues them. They go to the tree at once where little space is left for what
    /// waits, and nothing waits beside them: new items that a node counts to one leaf stay
    /// adjacent.
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

    /// Whether items of `tree` with these keys are queued, and do not go to the tree at once.
    pub(crate) fn queues(
        &self,
        handle: &Handle<'_>,
        tree: &Tree,
        keys: impl Iterator<Item = Key>,
    ) -> bool {
        self.takes(handle.space(), handle.reserved_bytes(), tree.id, keys)
    }

    /// Lets `look` see what is queued for `key`: its data, or that it was removed. `None` when
    /// nothing is queued. Nothing may be locked in `look`.
    fn look<T>(&self, tree: TreeId, key: Key, look: impl FnOnce(Option<&[u8]>) -> T) -> Option<T> {
        let id = NodeId::of(tree, key).filter(|_| self.is_on)?;
        #[cfg(debug_assertions)]
        let _looking = crate::block::lock_order::Looking::begin();
        let shard = self.shard(id).read();
        shard.get(&id)?.get(key).map(|pending| look(pending.data()))
    }
}

/// Queues what one operation changes in one tree. What its items need in reserved space stays with
/// their nodes when this is dropped.
pub(crate) struct Queue<'a, 'v> {
    handle: &'a Handle<'v>,
    delayed: &'v Delayed,
    tree: &'a Arc<Tree>,
    /// How many leaves all hashes of the directory that gets entries fill, about.
    spread: Option<u64>,
    /// By how much there is more now.
    more: Load,
    /// The nodes that got something.
    nodes: Vec<NodeId>,
    queued: usize,
    annihilated: usize,
}

impl<'a, 'v> Queue<'a, 'v> {
    /// Begins to queue at most this many items of `tree`.
    ///
    /// # Errors
    /// When less is reserved than these may need: nothing was changed yet.
    pub(crate) fn begin(
        handle: &'a Handle<'v>,
        delayed: &'v Delayed,
        tree: &'a Arc<Tree>,
        items: usize,
    ) -> Result<Self> {
        let (needs, has) = (items as u64 * handle.item_cost(), handle.reserved_bytes());
        if has < needs || (items > 0 && has == 0) {
            debug_assert!(false, "{items} items need {needs} bytes, but {has} are reserved");
            let what = format!("{has} bytes are reserved for {items} delayed items");
            return Err(Error::posix(Errno::NOSPC, what));
        }
        let (spread, more, nodes) = (None, Load::default(), Vec::with_capacity(items));
        Ok(Self { handle, delayed, tree, spread, more, nodes, queued: 0, annihilated: 0 })
    }

    /// The directory that gets entries has no more than this many with names of this many bytes. It
    /// tells how many leaves their hashes may be in.
    pub(crate) fn note_entries(&mut self, entries: u64, name_bytes: u64) {
        let bytes = entries.saturating_mul(ENTRY_BYTES).saturating_add(name_bytes);
        // Leaves that grow where it happens are two thirds full.
        self.spread = Some(bytes / u64::from(self.delayed.leaf) * 3 / 2 + 1);
    }

    /// The item becomes this; `existed` says whether there was one.
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

    /// The item, which there was, goes.
    pub(crate) fn remove(&mut self, key: Key) {
        let mut is_gone = false;
        self.change(key, |items| is_gone = items.remove(key));
        self.queued += 1;
        self.annihilated += usize::from(is_gone);
    }

    /// The inode `ino`, if anything of it is queued, has items between that and those of other
    /// inodes.
    pub(crate) fn stands_apart(&mut self, ino: u64) {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        if self.delayed.look(self.tree.id, key, |_| ()).is_some() {
            self.change(key, |items| items.keep_unit(key));
        }
    }

    /// Ends queueing. Where little space is left for what waits, and no more can be had cheaply,
    /// what was queued goes to the tree at once, with all that waits beside it.
    ///
    /// # Errors
    /// When the tree cannot be changed: nothing more is written then.
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

    /// Counts what was queued, and leaves what is reserved for it to the nodes.
    pub(crate) fn settle(&mut self) {
        let more = std::mem::take(&mut self.more);
        let _ = self.delayed.settle(self.tree, self.handle.space(), more, Some(self.handle));
    }

    fn change(&mut self, key: Key, change: impl FnOnce(&mut Items)) {
        let delayed = self.delayed;
        let id = NodeId::of(self.tree.id, key).expect("only items that are delayed are queued");
        #[cfg(debug_assertions)]
        let _looking = crate::block::lock_order::Looking::begin();
        let mut shard = delayed.shard(id).write();
        let node = shard.entry(id).or_default();
        let before = node.active.load(delayed.by_item);
        change(&mut node.active);
        self.more += node.active.load(delayed.by_item) - before;
        if !self.nodes.contains(&id) {
            self.nodes.push(id);
        }
        if node.is_empty() {
            shard.remove(&id);
        }
    }
}

impl Drop for Queue<'_, '_> {
    fn drop(&mut self) {
        self.settle();
        self.handle.stats().queued(self.queued);
        self.handle.stats().annihilated(self.annihilated);
    }
}
