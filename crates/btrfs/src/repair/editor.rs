//! Changes of items of a tree by copy on write: new leaves, and new nodes above them.
//!
//! ```text
//!        root                root'            a leaf with changes becomes new leaves, and every
//!       /    \              /     \           node above it a new node; all other blocks stay,
//!    node    node   ->  (same)   node'        and both trees have them
//!            /  \                /   \
//!         leaf  leaf         (same)  leaf'
//! ```
//!
//! References are not counted here: the walk through the new trees finds them all.

mod prune;

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::block::{LEVEL_COUNT, NodePointer};
use offshoot_btrfs_format::edit::{
    ITEM_SIZE, insert_items, insert_pointers, leaf_capacity, node_capacity,
};
use offshoot_btrfs_format::encode::{BlockIdentity, new_block, seal_block};
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use uuid::Uuid;

use super::plan::{FreePlaces, no_room};
use super::superblocks;
use crate::block::TreeBlock;
use crate::check::CheckedVolume;
use crate::tree::{Blocks as _, TreeRoot};

pub(super) use prune::PrunedTree;

/// New data of items, or `None` to remove an item.
pub(super) type TreeEdits = BTreeMap<Key, Option<Vec<u8>>>;

/// Edits of a part of a tree, in the order of their keys.
type EditRun<'e> = &'e [(Key, Option<Vec<u8>>)];

/// Writes changed trees to free places.
pub(super) struct TreeEditor<'e, 'c> {
    volume: &'e CheckedVolume<'c>,
    generation: Generation,
    chunk_tree_uuid: [u8; 16],
    free: FreePlaces<'e>,
}

impl<'e, 'c> TreeEditor<'e, 'c> {
    /// An editor that takes its blocks from `free`.
    pub(super) fn new(
        volume: &'e CheckedVolume<'c>,
        (generation, chunk_tree_uuid): (Generation, [u8; 16]),
        free: &'e [Range<u64>],
    ) -> Self {
        let free = FreePlaces::new(free, volume.superblock().node_size);
        Self { volume, generation, chunk_tree_uuid, free }
    }

    /// Applies edits to a tree. Returns its new root.
    ///
    /// # Errors
    /// When a block cannot be read or written, or there is no room.
    pub(super) fn apply(&mut self, root: TreeRoot, edits: TreeEdits) -> Result<TreeRoot> {
        let edits: Vec<_> = edits.into_iter().collect();
        let block = self.volume.block(&root.expected())?;
        let (mut level, mut pointers) = (root.level, self.rewrite(root.id, &block, &edits)?);
        if pointers.is_empty() {
            (level, pointers) = (0, self.leaves(root.id, &[Vec::new()])?);
        }
        self.grown(root.id, level, pointers)
    }

    /// The root of a tree with these blocks of one level: one of them, or nodes above them.
    fn grown(
        &mut self,
        tree: TreeId,
        mut level: u8,
        mut pointers: Vec<NodePointer>,
    ) -> Result<TreeRoot> {
        while pointers.len() > 1 {
            level += 1;
            if level >= LEVEL_COUNT {
                let problem = "it would have more levels than a tree may have";
                return Err(Error::corrupt(Structure::TreeBlock, problem));
            }
            pointers = self.nodes(tree, level, &pointers)?;
        }
        let logical = pointers.first().map_or(Logical(0), NodePointer::logical);
        Ok(TreeRoot { id: tree, logical, level, generation: self.generation })
    }

    /// The blocks that take the place of `block`.
    fn rewrite(
        &mut self,
        tree: TreeId,
        block: &TreeBlock,
        edits: EditRun<'_>,
    ) -> Result<Vec<NodePointer>> {
        self.volume.require_going_on()?;
        if block.is_leaf() {
            let leaves = self.packed(&merged(block, edits));
            return self.leaves(tree, &leaves);
        }
        let (mut pointers, mut rest) = (Vec::with_capacity(block.len()), edits);
        for (slot, pointer) in block.pointers().iter().enumerate() {
            let end = match block.pointers().get(slot + 1) {
                Some(next) => rest.partition_point(|(key, _)| *key < next.key.get()),
                None => rest.len(),
            };
            let (own, behind) = rest.split_at(end);
            rest = behind;
            if own.is_empty() {
                pointers.push(*pointer);
            } else {
                let child = self.volume.child(block, slot, tree)?;
                pointers.append(&mut self.rewrite(tree, &child, own)?);
            }
        }
        self.nodes(tree, block.header().level, &pointers)
    }

    /// Splits items into leaves.
    fn packed(&self, items: &[(Key, Vec<u8>)]) -> Vec<Vec<(Key, Vec<u8>)>> {
        let capacity = leaf_capacity(self.volume.superblock().node_size);
        let (mut leaves, mut taken) = (Vec::<Vec<_>>::new(), capacity);
        for (key, data) in items {
            let size = ITEM_SIZE + data.len();
            if taken + size > capacity {
                leaves.push(Vec::new());
                taken = 0;
            }
            taken += size;
            if let Some(leaf) = leaves.last_mut() {
                leaf.push((*key, data.clone()));
            }
        }
        leaves
    }

    fn leaves(&mut self, tree: TreeId, leaves: &[Vec<(Key, Vec<u8>)>]) -> Result<Vec<NodePointer>> {
        let mut pointers = Vec::with_capacity(leaves.len());
        let capacity = leaf_capacity(self.volume.superblock().node_size);
        for items in leaves {
            // A damaged leaf may have names of one hash that do not fit into an item together.
            let size: usize = items.iter().map(|(_, data)| ITEM_SIZE + data.len()).sum();
            if size > capacity {
                let problem = format!("a new item of tree {tree} does not fit into a leaf");
                return Err(Error::corrupt(Structure::TreeBlock, problem));
            }
            let first_key = items.first().map_or(Key::MIN, |(key, _)| *key);
            let all = items.iter().map(|(key, data)| (*key, &data[..]));
            pointers.push(self.write(tree, 0, first_key, |leaf| insert_items(leaf, 0, all))?);
        }
        Ok(pointers)
    }

    fn nodes(
        &mut self,
        tree: TreeId,
        level: u8,
        children: &[NodePointer],
    ) -> Result<Vec<NodePointer>> {
        let most = node_capacity(self.volume.superblock().node_size);
        let mut pointers = Vec::new();
        for children in children.chunks(most) {
            let first_key = children.first().map_or(Key::MIN, |child| child.key.get());
            let fill = |node: &mut [u8]| insert_pointers(node, 0, children);
            pointers.push(self.write(tree, level, first_key, fill)?);
        }
        Ok(pointers)
    }

    /// Writes a block that `fill` fills. Returns the pointer to it.
    fn write(
        &mut self,
        tree: TreeId,
        level: u8,
        first_key: Key,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<NodePointer> {
        let superblock = self.volume.superblock();
        let node_size = superblock.node_size;
        let place = self.free.next().ok_or_else(|| no_room(node_size.into()))?;
        let identity = BlockIdentity {
            metadata_uuid: superblock.metadata_uuid,
            chunk_tree_uuid: Uuid::from_bytes(self.chunk_tree_uuid),
            logical: Logical(place),
            generation: self.generation,
            owner: tree,
            level,
        };
        let mut bytes = new_block(node_size, &identity);
        fill(&mut bytes);
        seal_block(&mut bytes, superblock.checksum);
        superblocks::write_block(self.volume, Logical(place), &bytes)?;
        Ok(NodePointer {
            key: first_key.into(),
            blockptr: place.into(),
            generation: self.generation.0.into(),
        })
    }
}

/// The items of a leaf with the edits applied.
fn merged(leaf: &TreeBlock, edits: EditRun<'_>) -> Vec<(Key, Vec<u8>)> {
    let (mut items, mut edits) = (Vec::with_capacity(leaf.len()), edits.iter().peekable());
    let mut push = |key: Key, data: &Option<Vec<u8>>| {
        if let Some(data) = data {
            items.push((key, data.clone()));
        }
    };
    for slot in 0..leaf.len() {
        let key = leaf.key(slot);
        while let Some((new, data)) = edits.next_if(|(new, _)| *new < key) {
            push(*new, data);
        }
        match edits.next_if(|(new, _)| *new == key) {
            Some((_, data)) => push(key, data),
            None => push(key, &Some(leaf.data(slot).to_vec())),
        }
    }
    edits.for_each(|(key, data)| push(*key, data));
    items
}
