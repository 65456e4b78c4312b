//! The blocks of an open volume: recent blocks of transactions, and committed blocks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use offshoot_btrfs_format::block::NodePointer;
use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::{Generation, Key, TreeId};
use offshoot_vfs::{Error, Result};

use super::Base;
#[cfg(debug_assertions)]
use crate::block::lock_order::require_order;
use crate::block::{HeldBlock, Latch, TreeBlock, latch_shared};
use crate::transaction::LiveVolume;
use crate::tree::{Blocks, LostSubtree, share_root};

/// How many blocks after the wanted one are read ahead when the wanted one is not in the cache: a
/// walk over the tree will need these leaves next.
const READ_AHEAD_BLOCKS: usize = 32;

impl Blocks for Base {
    fn is_changing(&self) -> bool {
        self.live.is_some()
    }

    fn epoch(&self) -> u64 {
        self.live.as_ref().map_or(0, |live| live.epoch.load(Ordering::Acquire))
    }

    fn block(&self, expected: &ExpectedBlock) -> Result<Arc<TreeBlock>> {
        self.recent_block(expected).map_or_else(|| self.committed_block(expected), Ok)
    }

    fn child(&self, node: &TreeBlock, slot: usize, owner: TreeId) -> Result<Arc<TreeBlock>> {
        let expected = node.child_expected(slot, owner);
        if let Some(block) = self.recent_block(&expected) {
            return Ok(block);
        }
        if node.header().level == 1 {
            self.read_ahead(node, slot);
        }
        self.committed_block(&expected)
    }

    fn instead(&self, lost: &LostSubtree, error: Error) -> Result<Option<Arc<TreeBlock>>> {
        let Some(around) = &self.around else { return Err(error) };
        around.stand_in(&self.storage, self, self, lost, error)
    }

    fn may_have_lost(&self, tree: TreeId, key: Key) -> bool {
        self.around.as_ref().is_some_and(|around| around.may_have_lost(tree, key))
    }

    fn hold_root(&self, id: TreeId) -> Result<HeldBlock> {
        let live = self.live()?;
        let tree = live.tree(self, id)?;
        tree.require_alive()?;
        let root = share_root(&tree.root, &live.stats);
        self.hold(&root.expected())
    }

    fn hold(&self, expected: &ExpectedBlock) -> Result<HeldBlock> {
        match self.recent_latch(expected) {
            Some((live, latch)) => Ok(HeldBlock::Latched(latch_shared(&latch, &live.stats))),
            None => self.committed_block(expected).map(HeldBlock::Committed),
        }
    }
}

impl Base {
    /// The committed block that `expected` describes.
    pub(crate) fn committed_block(&self, expected: &ExpectedBlock) -> Result<Arc<TreeBlock>> {
        if let Some(around) = &self.around
            && let Some(made) = around.known(expected)?
        {
            return Ok(made);
        }
        self.cache.committed(&self.storage, expected)
    }

    /// The latch of the block that `expected` describes, if a recent transaction made it and it is
    /// in memory.
    fn recent_latch(&self, expected: &ExpectedBlock) -> Option<(&LiveVolume, Arc<Latch>)> {
        let live = self.live.as_ref()?;
        Some((live, live.recent_block(expected.generation, expected.logical)?))
    }

    /// The block that `expected` describes, if a recent transaction made it and it is in memory.
    fn recent_block(&self, expected: &ExpectedBlock) -> Option<Arc<TreeBlock>> {
        let (live, latch) = self.recent_latch(expected)?;
        let block = live.stats.lock_shared(latch.try_read(), || latch.read());
        #[cfg(debug_assertions)]
        require_order(&block);
        Some(block.clone())
    }

    /// Hints that the leaves behind `slot` of `node` will be read, if the leaf at `slot` must be
    /// read from the device.
    fn read_ahead(&self, node: &TreeBlock, slot: usize) {
        let is_held = |pointer: &NodePointer| {
            let (generation, at) = (Generation(pointer.generation.get()), pointer.logical());
            let recent = |live: &LiveVolume| live.recent_block(generation, at).is_some();
            self.cache.contains(at) || self.live_part().is_some_and(recent)
        };
        let is_known = |slot: usize| is_held(&node.pointers()[slot]);
        // A walk has read the leaf before, and has hinted at the following ones a few leaves ago.
        let is_due = || slot.is_multiple_of(READ_AHEAD_BLOCKS / 2) || !is_known(slot - 1);
        if is_known(slot) || !is_due() {
            return;
        }
        let node_size = u64::from(self.superblock().node_size);
        // Blocks of transactions that are not complete may not be on the device yet.
        let end = self.live_part().map_or(Generation(u64::MAX), LiveVolume::first_incomplete);
        let ahead = &node.pointers()[slot + 1..];
        let ahead = ahead[..ahead.len().min(READ_AHEAD_BLOCKS)]
            .iter()
            .filter(|pointer| pointer.generation.get() < end.0 && !is_held(pointer))
            .map(NodePointer::logical);
        self.storage.prefetch(self, ahead.map(|logical| (logical, node_size)));
    }
}
