//! The blocks that a transaction has made.
//!
//! A committed block is never changed: the first change in a transaction copies it to a new
//! address. What a transaction made carries its generation, so the generation in a pointer says
//! where the block is: of the running transaction, or of the one that is being written out, in
//! their dirty sets; of any other, in the cache or on the devices. When it is written, what a
//! transaction has made stays here until the next one is to be written, but for leaves in which
//! hardly anything will be changed: names go to leaves all over a directory, and each of these
//! would be read again before it is changed the next time.
//!
//! A dirty block is behind a latch. Whoever holds the latch for writing owns the block; a reader
//! takes the latch long enough to share the bytes, and reads them without it. A
//! writer that finds its bytes shared copies them first ([`Arc::make_mut`]), so a reader keeps what
//! it saw.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::RandomState;
use offshoot_btrfs_format::block::Item;
use offshoot_btrfs_format::edit::leaf_free;
use offshoot_btrfs_format::{ItemType, Logical};

use super::{BlockCache, TreeBlock};
use crate::stats::Counters;
use crate::sync::{ArcReadGuard, ArcWriteGuard, RwLock};

/// A dirty block.
pub(crate) type Latch = RwLock<Arc<TreeBlock>>;
/// A dirty block that is being read.
pub(crate) type ReadLatch = ArcReadGuard<Arc<TreeBlock>>;

/// Takes the latch of a block that others can reach, to read the block.
pub(crate) fn latch_shared(latch: &Arc<Latch>, stats: &Counters) -> ReadLatch {
    let held = stats.lock_shared(RwLock::try_read_arc(latch), || RwLock::read_arc(latch));
    #[cfg(debug_assertions)]
    super::lock_order::require_order(&held);
    held
}

/// A dirty block that is being changed.
pub(crate) struct WriteLatch {
    guard: ArcWriteGuard<Arc<TreeBlock>>,
    /// Who holds what, to check the order of latches.
    #[cfg(debug_assertions)]
    _noted: super::lock_order::Noted,
}

impl WriteLatch {
    /// Takes the latch of a block that others can reach.
    pub(crate) fn take(latch: &Arc<Latch>, stats: &Counters) -> Self {
        #[cfg(debug_assertions)]
        let noted = super::lock_order::Noted::in_order(&latch.read());
        Self {
            guard: stats.lock(RwLock::try_write_arc(latch), || RwLock::write_arc(latch)),
            #[cfg(debug_assertions)]
            _noted: noted,
        }
    }

    /// The block, to be changed. It is copied first when a reader still looks at it.
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

/// Less room in a leaf than this is too little for more than one or two items, in bytes.
const LITTLE_BYTES: usize = 256;

/// Shards of the map, a power of two.
const SHARDS: usize = 16;

type Shard = RwLock<HashMap<u64, Arc<Latch>, RandomState>>;

/// Whether hardly anything will be changed in `block`: it is a leaf that is full, and no name may
/// come to it. New items of inodes and indexes come behind the last, hashes of names come anywhere.
pub(crate) fn changes_little(block: &TreeBlock) -> bool {
    let is_full = || leaf_free(block.bytes()) < LITTLE_BYTES;
    let is_hash = |item: &Item| item.key.get().item_type == ItemType::DIR_ITEM;
    block.is_leaf() && is_full() && !block.items().iter().any(is_hash)
}

/// The dirty blocks of one transaction, by address.
#[derive(Default)]
pub(crate) struct DirtyBlocks {
    shards: [Shard; SHARDS],
    count: AtomicU64,
}

impl DirtyBlocks {
    fn shard(&self, logical: Logical) -> &Shard {
        // Blocks are at least 4 KiB, so lower bits tell nothing.
        let spread = (logical.0 >> 12) ^ (logical.0 >> 16);
        #[expect(clippy::cast_possible_truncation, reason = "only the lowest bits are wanted")]
        &self.shards[spread as usize & (SHARDS - 1)]
    }

    /// The block at `logical`.
    pub(crate) fn get(&self, logical: Logical) -> Option<Arc<Latch>> {
        self.shard(logical).read().get(&logical.0).cloned()
    }

    /// Adds a block and takes its latch, which nobody else can have yet.
    pub(crate) fn add(&self, block: TreeBlock) -> WriteLatch {
        let logical = Logical(block.header().bytenr.get());
        #[cfg(debug_assertions)]
        let noted = super::lock_order::Noted::fresh(&block);
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

    /// Forgets a block that was freed before it was ever written.
    pub(crate) fn remove(&self, logical: Logical) {
        if self.shard(logical).write().remove(&logical.0).is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Moves the blocks that are `chosen` to the cache. All of them are on the devices.
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

    /// How many blocks there are, or were until some were moved to the cache.
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
