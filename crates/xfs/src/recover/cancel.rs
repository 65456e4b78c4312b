//! Cancelled buffers: blocks that were freed. What was logged of them before is not replayed,
//! because they may hold the data of a file by now, which the log does not have.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use offshoot_xfs_format::log::items::XfsIcreateItem;
use offshoot_xfs_format::superblock::XfsSuperblockFields;
use offshoot_xfs_format::{BasicBlock, XfsGeometry};

/// The least bytes of a cluster of inodes, for inodes of 256 bytes.
const CLUSTER_BYTES: u32 = 8 << 10;

/// The bytes that an entry takes, roundly.
pub(super) const CANCEL_COST: u64 = 64;

/// How often buffers will be cancelled from here on.
#[derive(Clone, Debug)]
pub(super) struct CancelledBuffers {
    /// By place and basic blocks.
    counts: HashMap<(u64, u32), u32>,
    /// The blocks of a cluster of inodes, which are cancelled as one buffer.
    cluster_blocks: u32,
}

impl CancelledBuffers {
    pub(super) fn new(fields: &XfsSuperblockFields, geometry: &XfsGeometry) -> Self {
        // The kernel makes clusters larger with the inodes, if chunks are aligned to them.
        let large = CLUSTER_BYTES << (geometry.inode_log.saturating_sub(8));
        let is_aligned = fields.inoalignmt.get() >= large >> geometry.block_log;
        let is_large = geometry.has_checksums() && is_aligned;
        let bytes = if is_large { large } else { CLUSTER_BYTES };
        Self { counts: HashMap::new(), cluster_blocks: (bytes >> geometry.block_log).max(1) }
    }

    /// Counts one more.
    pub(super) fn add(&mut self, place: BasicBlock, blocks: u32) {
        let count = self.counts.entry((place.0, blocks)).or_insert(0);
        *count = count.saturating_add(1);
    }

    /// How many buffers will be cancelled.
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    /// Passes one: what is logged of the buffer from here on counts, unless it is cancelled again.
    pub(super) fn pass(&mut self, place: BasicBlock, blocks: u32) {
        if let Entry::Occupied(mut count) = self.counts.entry((place.0, blocks)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Whether the buffer will be cancelled.
    pub(super) fn has(&self, place: BasicBlock, blocks: u32) -> bool {
        self.counts.contains_key(&(place.0, blocks))
    }

    /// Whether a cluster of a chunk of new inodes will be cancelled.
    pub(super) fn has_cluster_of(&self, create: &XfsIcreateItem, geometry: &XfsGeometry) -> bool {
        let start = geometry.place(create.ag, create.block);
        let shift = geometry.block_log - 9;
        (0..create.blocks).step_by(self.cluster_blocks as usize).any(|block| {
            let place = BasicBlock(start.0 + (u64::from(block) << shift));
            self.has(place, self.cluster_blocks << shift)
        })
    }
}
