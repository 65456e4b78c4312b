//! Which blocks have full back references, as the trees alone have it.
//!
//! The extent tree says so too ([`marks`](super::marks)), but a repair makes that anew. A block of
//! a subvolume has full back references unless the tree that it was made for refers to it itself:
//! then what is below the block counts for that tree.
//!
//! ```text
//! tree 5     tree 257, a snapshot
//!   root       root'        both were made for the tree that has them: not full
//!      \      /    \
//!       node       node'    made for 5, and 5 refers to it: not full
//!        |
//!       leaf                if only `node'` of tree 257 led to it, it would be full
//! ```
//!
//! So the nodes are looked at from the highest level down: a node that is full does not refer for
//! its tree. The essay of `transaction/extent_tree` says how blocks become shared.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use offshoot_btrfs_format::block::{HEADER_RELOC, LEVEL_COUNT};
use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Logical, TreeId};
use offshoot_vfs::Result;

use super::addresses::AddressSet;
use super::marks::BlockMarks;
use super::volume::{CheckedVolume, KeyRange};
use super::walk::{WalkedTree, kept_slots, walked_tree};

/// The nodes of a level that are still to be looked at, with the tree that leads to each.
type NodesOfLevel = BTreeMap<u64, (ExpectedBlock, WalkedTree)>;

/// The search for blocks with full back references.
struct OwnedBlockSearch<'w, 'c> {
    volume: &'w CheckedVolume<'c>,
    /// The generation of the last snapshot of each subvolume. What is newer is not shared.
    last_snapshots: BTreeMap<TreeId, Generation>,
    /// Blocks that the tree refers to that they were made for.
    owned: AddressSet,
    levels: Vec<NodesOfLevel>,
    /// Leaves that may have full back references.
    leaves: BTreeSet<u64>,
}

/// The marks of all blocks, without the extent tree.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn marks(volume: &CheckedVolume<'_>) -> Result<BlockMarks> {
    let marks = BlockMarks::empty();
    let mut search = OwnedBlockSearch {
        volume,
        last_snapshots: BTreeMap::new(),
        owned: AddressSet::default(),
        levels: vec![NodesOfLevel::new(); usize::from(LEVEL_COUNT)],
        leaves: BTreeSet::new(),
    };
    let mut trees = Vec::new();
    volume.each_item(volume.root_tree(), KeyRange::ALL, &mut |key, data| {
        let id = TreeId(key.objectid);
        if key.item_type == ItemType::ROOT_ITEM
            && id.is_fs_like()
            && let Ok(item) = RootItem::parse(data)
        {
            search.last_snapshots.insert(id, Generation(item.last_snapshot.get()));
            trees.push(walked_tree(id, &item));
        }
        ControlFlow::Continue(())
    });
    if search.last_snapshots.values().all(|last| last.0 == 0) {
        return Ok(marks);
    }
    for tree in trees {
        search.add_root(&tree);
    }
    for level in (1..usize::from(LEVEL_COUNT)).rev() {
        let nodes = search.levels.get_mut(level).map(std::mem::take).unwrap_or_default();
        for (expected, tree) in nodes.values() {
            volume.require_going_on()?;
            search.look_at(expected, tree, &marks);
        }
    }
    for &leaf in search.leaves.iter().filter(|&&leaf| !search.owned.contains(Logical(leaf))) {
        marks.add(Logical(leaf));
    }
    Ok(marks)
}

impl OwnedBlockSearch<'_, '_> {
    fn add_root(&mut self, tree: &WalkedTree) {
        let expected = tree.root.expected();
        let Some(block) = self.volume.usable_block(&expected) else { return };
        if block.header().owner() == tree.root.id {
            self.owned.insert(expected.logical);
        }
        self.add(&expected, tree);
    }

    /// Adds a block that is to be looked at.
    fn add(&mut self, expected: &ExpectedBlock, tree: &WalkedTree) {
        if expected.level == 0 {
            self.leaves.insert(expected.logical.0);
        } else if let Some(nodes) = self.levels.get_mut(usize::from(expected.level)) {
            nodes.entry(expected.logical.0).or_insert_with(|| (*expected, tree.clone()));
        }
    }

    fn look_at(&mut self, expected: &ExpectedBlock, tree: &WalkedTree, marks: &BlockMarks) {
        let Some(node) = self.volume.usable_block(expected) else { return };
        let (owner, logical) = (node.header().owner(), expected.logical);
        let has_flag = node.header().flags.get() & HEADER_RELOC != 0;
        let is_full = has_flag || !self.owned.contains(logical);
        if is_full {
            marks.add(logical);
        }
        for slot in kept_slots(tree, &node) {
            let child = node.child_expected(slot, tree.root.id);
            let last = self.last_snapshots.get(&owner);
            let is_unshared = last.is_some_and(|&last| child.generation > last);
            let made_for = |child: &ExpectedBlock| {
                self.volume.usable_block(child).map(|block| block.header().owner())
            };
            if !is_full && (is_unshared || made_for(&child) == Some(owner)) {
                self.owned.insert(child.logical);
                if child.level == 0 {
                    continue;
                }
            }
            self.add(&child, tree);
        }
    }
}
