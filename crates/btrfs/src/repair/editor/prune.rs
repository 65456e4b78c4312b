//! Cuts off a tree what cannot be used, and makes trees from items.
//!
//! Where something of a leaf is saved, new leaves with that come in its place.
//!
//! ```text
//!        root                root'            a node above a block that cannot be used becomes a
//!       /    \              /     \           new node without the pointer to it; a node that
//!    node    node   ->  (same)   node'        would be left without pointers goes, too
//!            /  \                   \
//!         lost  leaf               (same)
//! ```

use offshoot_btrfs_format::block::NodePointer;
use offshoot_btrfs_format::{Key, TreeId};
use offshoot_vfs::Result;

use super::TreeEditor;
use crate::block::TreeBlock;
use crate::tree::{LostSubtree, TreeRoot};

/// What is left of a tree when everything is cut off that cannot be used.
pub(in crate::repair) enum PrunedTree {
    /// All of it.
    Whole,
    /// A part, with this root.
    InPart(TreeRoot),
    /// Nothing.
    Lost,
}

/// Says what is saved of a part of a tree: items that ascend, or nothing.
type SubtreeSaver<'s> = dyn FnMut(&LostSubtree) -> Option<Vec<(Key, Vec<u8>)>> + 's;

impl TreeEditor<'_, '_> {
    /// Cuts off the tree at `root` what cannot be used. Calls `save` with each of these parts.
    ///
    /// # Errors
    /// When a block cannot be written, or there is no room; when the caller has ended the repair.
    pub(in crate::repair) fn prune(
        &mut self,
        root: TreeRoot,
        save: &mut SubtreeSaver<'_>,
    ) -> Result<PrunedTree> {
        let expected = root.expected();
        let Some(block) = self.volume.usable_block(&expected) else {
            let lost = LostSubtree { block: expected, from: Key::MIN, to: None };
            return match save(&lost) {
                Some(items) => self.plant(root.id, &items).map(PrunedTree::InPart),
                None => Ok(PrunedTree::Lost),
            };
        };
        match self.pruned(root.id, &block, None, save)? {
            None => Ok(PrunedTree::Whole),
            Some(pointers) if pointers.is_empty() => Ok(PrunedTree::Lost),
            Some(pointers) => self.grown(root.id, root.level, pointers).map(PrunedTree::InPart),
        }
    }

    /// The blocks that take the place of `block`, whose keys are below `upper`; `None` when it
    /// stays as it is.
    fn pruned(
        &mut self,
        tree: TreeId,
        block: &TreeBlock,
        upper: Option<Key>,
        save: &mut SubtreeSaver<'_>,
    ) -> Result<Option<Vec<NodePointer>>> {
        self.volume.require_going_on()?;
        if block.is_leaf() {
            return Ok(None);
        }
        self.volume.read_ahead(block, 0..block.len());
        let (mut kept, mut is_changed) = (Vec::with_capacity(block.len()), false);
        for (slot, pointer) in block.pointers().iter().enumerate() {
            let next = block.pointers().get(slot + 1).map(|next| next.key.get()).or(upper);
            let Some(child) = self.volume.usable_child(block, slot, tree, next) else {
                let expected = block.child_expected(slot, tree);
                let lost = LostSubtree { block: expected, from: pointer.key.get(), to: next };
                if let Some(items) = save(&lost) {
                    kept.append(&mut self.leaves(tree, &self.packed(&items))?);
                }
                is_changed = true;
                continue;
            };
            match self.pruned(tree, &child, next, save)? {
                None => kept.push(*pointer),
                Some(mut new) => {
                    kept.append(&mut new);
                    is_changed = true;
                }
            }
        }
        if is_changed { self.nodes(tree, block.header().level, &kept).map(Some) } else { Ok(None) }
    }

    /// Makes a tree with these items, which ascend.
    ///
    /// # Errors
    /// When a block cannot be written, or there is no room.
    pub(in crate::repair) fn plant(
        &mut self,
        tree: TreeId,
        items: &[(Key, Vec<u8>)],
    ) -> Result<TreeRoot> {
        let mut leaves = self.packed(items);
        if leaves.is_empty() {
            leaves.push(Vec::new());
        }
        let pointers = self.leaves(tree, &leaves)?;
        self.grown(tree, 0, pointers)
    }
}
