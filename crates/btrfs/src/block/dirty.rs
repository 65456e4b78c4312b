//! The blocks that a transaction has made, called *dirty*.
//!
//! A committed block never changes: the first change in a transaction copies it to a new address.
//! The copy carries the generation of the transaction. So the generation in a pointer says where
//! the block is. Blocks of the running transaction, and of the one that is being written, are in
//! their dirty sets. All other blocks are in the cache or on the devices.
//!
//! After a transaction is written, most of its blocks stay in the dirty set until the next
//! transaction is to be written. Only leaves that will hardly change move to the cache at once.
//! Without this, making files in a large directory would read many leaves again: names are hashed,
//! so each new name may go to any leaf of the directory.
//!
//! A latch protects each dirty block. A writer holds the latch exclusively while it changes the
//! block. A reader holds the latch only while it clones the [`Arc`], and reads without it. A writer
//! that finds the bytes shared with a reader copies them first ([`Arc::make_mut`]), so the reader
//! keeps what it saw.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::RandomState;
use offshoot_btrfs_format::block::LeafItem;
use offshoot_btrfs_format::edit::leaf_free;
use offshoot_btrfs_format::{ItemType, Logical};

use super::{BlockCache, TreeBlock};
use crate::shared::Padded;
use crate::stats::EngineCounters;
use crate::sync::{ArcReadGuard, ArcWriteGuard, RwLock};

/// A dirty block.
pub(crate) type Latch = RwLock<Arc<TreeBlock>>;
/// A dirty block that is being read.
pub(crate) type ReadLatch = ArcReadGuard<Arc<TreeBlock>>;

/// Takes the latch of a block that other threads can reach, to read the block.
pub(crate) fn latch_shared(latch: &Arc<Latch>, stats: &EngineCounters) -> ReadLatch {
    let held = stats.lock_shared(RwLock::try_read_arc(latch), || RwLock::read_arc(latch));
    #[cfg(debug_assertions)]
    super::lock_order::require_order(&held);
    held
}

/// A dirty block that is being changed.
pub(crate) struct WriteLatch {
    guard: ArcWriteGuard<Arc<TreeBlock>>,
    /// This thread's note of the latch, which checks the order of latches.
    #[cfg(debug_assertions)]
    _noted: super::lock_order::NotedLatch,
}

impl WriteLatch {
    /// Takes the latch of a block that other threads can reach.
    pub(crate) fn take(latch: &Arc<Latch>, stats: &EngineCounters) -> Self {
        #[cfg(debug_assertions)]
        let noted = super::lock_order::NotedLatch::in_order(&latch.read());
        Self {
            guard: stats.lock(RwLock::try_write_arc(latch), || RwLock::write_arc(latch)),
            #[cfg(debug_assertions)]
            _noted: noted,
        }
    }

    /// The block, mutable. It is copied first when a reader shares its bytes.
    pub(crate) fn block_mut(&mut self) -> &mut TreeBlock {
        Arc::make_mut(&mut self.guard)
    }
}

impl Deref for WriteLatch {
    type Target = TreeBlock;

    fn deref(&self) -> &TreeBlock {
        &self.guard
    }
}

/// A leaf with less free space than this takes one or two more items at most, in bytes.
const LITTLE_BYTES: usize = 256;

/// Shards of the map, a power of two.
const SHARDS: usize = 16;

type DirtyShard = RwLock<HashMap<u64, Arc<Latch>, RandomState>>;

/// Whether `block` will hardly change: it is a full leaf without names. New inodes and directory
/// indexes go behind the last item; hashes of names may go to any leaf of a directory.
pub(crate) fn changes_little(block: &TreeBlock) -> bool {
    let is_full = || leaf_free(block.bytes()) < LITTLE_BYTES;
    let is_hash = |item: &LeafItem| item.key.get().item_type == ItemType::DIR_ITEM;
    block.is_leaf() && is_full() && !block.items().iter().any(is_hash)
}

/// The dirty blocks of one transaction, by address.
#[derive(Default)]
pub(crate) struct DirtyBlocks {
    shards: [Padded<DirtyShard>; SHARDS],
    count: AtomicU64,
}

impl DirtyBlocks {
    fn shard(&self, logical: Logical) -> &DirtyShard {
        // Blocks are at least 4 KiB, so the lowest 12 bits are zero.
        let spread = (logical.0 >> 12) ^ (logical.0 >> 16);
        #[expect(clippy::cast_possible_truncation, reason = "only the lowest bits are wanted")]
        &self.shards[spread as usize & (SHARDS - 1)]
    }

    /// The block at `logical`.
    pub(crate) fn get(&self, logical: Logical) -> Option<Arc<Latch>> {
        self.shard(logical).read().get(&logical.0).cloned()
    }

    /// Adds a block and takes its latch, which no other thread can hold yet.
    pub(crate) fn add(&self, block: TreeBlock) -> WriteLatch {
        let logical = Logical(block.header().bytenr.get());
        #[cfg(debug_assertions)]
        let noted = super::lock_order::NotedLatch::fresh(&block);
        let latch = Arc::new(RwLock::new(Arc::new(block)));
        let held = WriteLatch {
            guard: RwLock::write_arc(&latch),
            #[cfg(debug_assertions)]
            _noted: noted,
        };
        let before = self.shard(logical).write().insert(logical.0, latch);
        debug_assert!(before.is_none(), "an address is allocated once");
        self.count.fetch_add(1, Ordering::Relaxed);
        held
    }

    /// Removes a block that was freed before it was written.
    pub(crate) fn remove(&self, logical: Logical) {
        if self.shard(logical).write().remove(&logical.0).is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Moves the blocks for which `chosen` is true to the cache. All blocks must be on the devices.
    pub(crate) fn move_to(&self, cache: &BlockCache, chosen: impl Fn(&TreeBlock) -> bool) {
        for shard in &self.shards {
            shard.write().retain(|_, latch| {
                let block = latch.read();
                let is_chosen = chosen(&block);
                if is_chosen {
                    cache.insert(block.clone());
                }
                !is_chosen
            });
        }
    }

    /// How many blocks the transaction has, including those that moved to the cache.
    pub(crate) fn len(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// All blocks with their addresses, in no order.
    pub(crate) fn all(&self) -> Vec<(Logical, Arc<Latch>)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(shard.read().iter().map(|(&at, latch)| (Logical(at), latch.clone())));
        }
        all
    }
}
