//! The blocks of trees that a search through the chunks of metadata finds.
//!
//! Each place that may have a block is read, from all copies until one verifies. So the search
//! reads everything that is allocated to metadata. It finds the blocks of the last commit and older
//! ones that nothing has overwritten yet. At most [`MOST_BLOCKS`] are kept, of about 80 bytes each.

use offshoot_btrfs_format::block::BlockHeader;
use offshoot_btrfs_format::check::{self, ExpectedBlock};
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use tracing::warn;

use crate::block::TreeBlock;
use crate::events::OPEN;
use crate::storage::Storage;

/// The most blocks that are kept.
const MOST_BLOCKS: usize = 1 << 20;

/// A block of a tree that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScannedBlock {
    /// The tree that it was made for.
    pub(crate) owner: TreeId,
    pub(crate) level: u8,
    pub(crate) generation: Generation,
    pub(crate) logical: Logical,
    /// Its first key.
    pub(crate) first: Key,
    /// Its last key; of a node that of its last pointer.
    pub(crate) last: Key,
}

impl ScannedBlock {
    fn of(block: &TreeBlock) -> Option<Self> {
        let header: &BlockHeader = block.header();
        let last = block.len().checked_sub(1)?;
        Some(Self {
            owner: header.owner(),
            level: header.level,
            generation: header.generation(),
            logical: Logical(header.bytenr.get()),
            first: block.key(0),
            last: block.key(last),
        })
    }

    /// What its header must say when it is read again.
    pub(crate) fn expected(&self) -> ExpectedBlock {
        ExpectedBlock {
            logical: self.logical,
            level: self.level,
            generation: self.generation,
            owner: self.owner,
            first_key: Some(self.first),
        }
    }
}

/// All blocks that were found, by the tree that they were made for and their first keys.
pub(crate) struct BlockIndex {
    blocks: Vec<ScannedBlock>,
}

impl BlockIndex {
    /// Searches all chunks of metadata.
    pub(crate) fn scan(storage: &Storage) -> Self {
        let node_size = u64::from(storage.superblock().node_size);
        let mut blocks = Vec::new();
        // A damaged chunk may claim any length. No place is read more often than it has copies.
        let bytes = storage.members().iter().filter_map(|member| member.device.as_ref());
        let bytes = bytes.map(|device| device.size_bytes()).fold(0, u64::saturating_add);
        let mut rest = bytes / node_size;
        let kinds = BlockGroupFlags::METADATA | BlockGroupFlags::SYSTEM;
        for chunk in storage.chunks().filter(|chunk| chunk.flags.0 & kinds != 0) {
            let (mut at, end) = (chunk.start.0, chunk.end().0);
            let has_room = |rest: u64, found: usize| rest > 0 && found < MOST_BLOCKS;
            while has_room(rest, blocks.len())
                && at.checked_add(node_size).is_some_and(|next| next <= end)
            {
                rest -= 1;
                let logical = Logical(at);
                let verify = |bytes: &[u8]| check::verify(bytes, storage.geometry(), logical);
                if let Ok(bytes) = storage.find_block(logical, verify)
                    && let Some(found) = ScannedBlock::of(&TreeBlock::verified(bytes))
                {
                    blocks.push(found);
                }
                at += node_size;
            }
            if blocks.len() >= MOST_BLOCKS {
                warn!(target: OPEN, "the search for blocks ends: there are too many");
                break;
            }
        }
        blocks.sort_by_key(|block| (block.owner, block.first));
        Self { blocks }
    }

    /// The blocks that were made for `tree`.
    pub(crate) fn of_tree(&self, tree: TreeId) -> &[ScannedBlock] {
        let begin = self.blocks.partition_point(|block| block.owner < tree);
        let end = self.blocks.partition_point(|block| block.owner <= tree);
        self.blocks.get(begin..end).unwrap_or_default()
    }

    /// Those of them whose first key is `from` or greater, and below `to`.
    pub(super) fn between(&self, tree: TreeId, from: Key, to: Option<Key>) -> &[ScannedBlock] {
        let of_tree = self.of_tree(tree);
        let begin = of_tree.partition_point(|block| block.first < from);
        let is_before = |block: &ScannedBlock| to.is_none_or(|to| block.first < to);
        let end = of_tree.partition_point(is_before);
        of_tree.get(begin..end).unwrap_or_default()
    }
}
