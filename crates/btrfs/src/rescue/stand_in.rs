//! A node that stands in for a lost one, over the blocks that were behind it.
//!
//! Of the blocks that were made for the tree, those count whose keys are in the range of the lost
//! node. Where the extent tree can be read it says which blocks are in use; the others are older
//! states. Where it cannot, the newest block of each range of keys wins. Higher blocks win over
//! lower ones, because they say what is below them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use offshoot_btrfs_format::block::NodePointer;
use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::edit::{insert_pointers, node_capacity};
use offshoot_btrfs_format::encode::{BlockIdentity, new_block};
use offshoot_btrfs_format::{Generation, Key, Logical};

use super::around::TreesAbove;
use super::index::{BlockIndex, ScannedBlock};
use crate::block::TreeBlock;
use crate::storage::Storage;
use crate::tree::{Blocks, LostSubtree};

/// The address of the first node that is made in memory. No chunk is so high.
const MADE: u64 = 1 << 63;

/// The blocks that were behind `subtree`, by their keys. Their ranges do not overlap.
pub(super) fn choose(
    index: &BlockIndex,
    blocks: &dyn Blocks,
    trees: &dyn TreesAbove,
    subtree: &LostSubtree,
) -> Vec<ScannedBlock> {
    let is_before_end = |key: Key| subtree.to.is_none_or(|to| key < to);
    let is_behind = |block: &&ScannedBlock| {
        block.level < subtree.block.level
            && block.generation <= subtree.block.generation
            && is_before_end(block.last)
    };
    let makers = trees.makers(subtree.block.owner);
    let found = makers
        .iter()
        .flat_map(|&maker| index.between(maker, subtree.from, subtree.to))
        .filter(is_behind);
    let found = found.map(|block| (trees.is_allocated(block), *block));
    let mut found: Vec<_> = found.filter(|(in_use, _)| *in_use != Some(false)).collect();
    found.sort_by_key(|(in_use, block)| Reverse((block.level, *in_use, block.generation)));
    let mut chosen: BTreeMap<Key, (Key, ScannedBlock)> = BTreeMap::new();
    for (_, block) in found {
        let end_key = last_key(blocks, &block);
        let before = chosen.range(..=block.first).next_back();
        let after = chosen.range(block.first..).next();
        let is_apart = before.is_none_or(|(_, (end, _))| *end < block.first)
            && after.is_none_or(|(begin, _)| end_key < *begin);
        if is_apart && is_before_end(end_key) {
            chosen.insert(block.first, (end_key, block));
        }
    }
    chosen.into_values().map(|(_, block)| block).collect()
}

/// The last key in or below a block, as far as blocks below it can be read.
fn last_key(blocks: &dyn Blocks, block: &ScannedBlock) -> Key {
    let (mut last, mut expected) = (block.last, block.expected());
    while expected.level > 0 {
        let Ok(node) = blocks.block(&expected) else { break };
        let Some(slot) = node.len().checked_sub(1) else { break };
        last = node.key(slot).max(last);
        if node.is_leaf() {
            break;
        }
        expected = node.child_expected(slot, block.owner);
    }
    if expected.level == 0
        && let Ok(leaf) = blocks.block(&expected)
        && let Some(slot) = leaf.len().checked_sub(1)
    {
        last = leaf.key(slot).max(last);
    }
    last
}

/// A pointer of a node that is made.
struct MadePointer {
    key: Key,
    logical: Logical,
    generation: Generation,
    level: u8,
}

/// The root of a tower of nodes over `chosen`, which are sorted by their keys; `None` over nothing.
/// The nodes below it are added to `nodes`.
pub(super) fn tower(
    storage: &Storage,
    nodes: &mut HashMap<Logical, Arc<TreeBlock>>,
    replaced: &ExpectedBlock,
    chosen: Vec<ScannedBlock>,
) -> Option<Arc<TreeBlock>> {
    let node_size = storage.superblock().node_size;
    let capacity = node_capacity(node_size);
    let mut level = chosen.iter().map(|block| block.level).max()?;
    let mut pointers: Vec<_> = chosen
        .into_iter()
        .map(|ScannedBlock { first, logical, generation, level, .. }| MadePointer {
            key: first,
            logical,
            generation,
            level,
        })
        .collect();
    let mut make = |level: u8, group: &[MadePointer]| {
        let logical = Logical(MADE + nodes.len() as u64 * u64::from(node_size));
        let identity = BlockIdentity {
            metadata_uuid: storage.superblock().metadata_uuid,
            chunk_tree_uuid: storage.chunk_tree_uuid(),
            logical,
            generation: replaced.generation,
            owner: replaced.owner,
            level,
        };
        let block = Arc::new(node(node_size, &identity, group));
        nodes.insert(logical, block.clone());
        (logical, block)
    };
    // Lower blocks get nodes over them, until all are on one level.
    for below in 0..level {
        pointers =
            raise(pointers, below, capacity, &mut |group| make(below + 1, group).0, replaced);
    }
    while pointers.len() > capacity {
        pointers =
            raise(pointers, level, capacity, &mut |group| make(level + 1, group).0, replaced);
        level += 1;
    }
    Some(make(level + 1, &pointers).1)
}

/// Puts nodes over the runs of pointers to blocks of `level`.
fn raise(
    pointers: Vec<MadePointer>,
    level: u8,
    capacity: usize,
    make: &mut dyn FnMut(&[MadePointer]) -> Logical,
    replaced: &ExpectedBlock,
) -> Vec<MadePointer> {
    let mut raised = Vec::new();
    let mut run: Vec<MadePointer> = Vec::new();
    let mut flush = |run: &mut Vec<MadePointer>, raised: &mut Vec<MadePointer>| {
        if let Some(first) = run.first() {
            let (key, generation) = (first.key, replaced.generation);
            let logical = make(run);
            raised.push(MadePointer { key, logical, generation, level: level + 1 });
            run.clear();
        }
    };
    for pointer in pointers {
        if pointer.level != level || run.len() == capacity {
            flush(&mut run, &mut raised);
        }
        if pointer.level == level {
            run.push(pointer);
        } else {
            raised.push(pointer);
        }
    }
    flush(&mut run, &mut raised);
    raised
}

fn node(node_size: u32, identity: &BlockIdentity, group: &[MadePointer]) -> TreeBlock {
    let mut bytes = new_block(node_size, identity);
    let pointers: Vec<_> = group
        .iter()
        .map(|pointer| NodePointer {
            key: pointer.key.into(),
            blockptr: pointer.logical.0.into(),
            generation: pointer.generation.0.into(),
        })
        .collect();
    insert_pointers(&mut bytes, 0, &pointers);
    TreeBlock::verified(bytes)
}
