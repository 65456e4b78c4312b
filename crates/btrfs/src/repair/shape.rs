//! Trees that are made from their items, in order: which blocks they have, and the blocks.
//!
//! The items of a tree come twice. The first time they are counted: a leaf takes as many as fit.
//! The second time, when each block has its place, the blocks are made.

use std::ops::Range;

use offshoot_btrfs_format::block::NodePointer;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::edit::{
    ITEM_SIZE, LeafFiller, insert_pointers, leaf_capacity, node_capacity,
};
use offshoot_btrfs_format::encode::{BlockIdentity, new_block, seal_block};
use offshoot_btrfs_format::{Key, Logical};
use offshoot_vfs::{Error, Result, Structure};

/// A block of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShapedBlock {
    pub(super) first_key: Key,
    pub(super) level: u8,
    /// How many items or pointers it has.
    count: usize,
}

/// The blocks of a tree: the leaves in the order of their keys, then the nodes of level 1, and so
/// on up to the root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TreeShape {
    pub(super) blocks: Vec<ShapedBlock>,
}

impl TreeShape {
    /// The level of the root.
    pub(super) fn root_level(&self) -> u8 {
        self.blocks.last().map_or(0, |root| root.level)
    }

    /// How many of the blocks are leaves.
    pub(super) fn leaves(&self) -> usize {
        self.blocks.iter().take_while(|block| block.level == 0).count()
    }
}

/// Counts the items of a tree.
#[derive(Debug)]
pub(super) struct ShapeBuilder {
    node_size: u32,
    leaves: Vec<ShapedBlock>,
    /// The bytes of the last leaf that are taken.
    taken: usize,
    last: Option<Key>,
    /// How many of the first leaves take one item only.
    singles: usize,
}

impl ShapeBuilder {
    /// A tree without items, whose first `singles` leaves will take one item only.
    pub(super) fn new(node_size: u32, singles: usize) -> Self {
        let first = ShapedBlock { first_key: Key::MIN, level: 0, count: 0 };
        Self { node_size, leaves: vec![first], taken: 0, last: None, singles }
    }

    /// Adds an item.
    ///
    /// # Errors
    /// When its key does not follow the last one.
    pub(super) fn push(&mut self, key: Key, len: usize) -> Result<()> {
        if let Some(last) = self.last.replace(key).filter(|last| *last >= key) {
            let problem = format!("item {key} does not follow {last}");
            return Err(Error::corrupt(Structure::TreeBlock, problem));
        }
        let size = ITEM_SIZE + len;
        let is_single = self.leaves.len() <= self.singles && self.taken > 0;
        let fits = !is_single && self.taken + size <= leaf_capacity(self.node_size);
        if let Some(leaf) = self.leaves.last_mut().filter(|_| fits) {
            if leaf.count == 0 {
                leaf.first_key = key;
            }
            leaf.count += 1;
            self.taken += size;
        } else {
            self.leaves.push(ShapedBlock { first_key: key, level: 0, count: 1 });
            self.taken = size;
        }
        Ok(())
    }

    /// The shape of the tree.
    pub(super) fn finish(self) -> TreeShape {
        let mut blocks = self.leaves;
        let mut below = 0..blocks.len();
        while below.len() > 1 {
            blocks.extend(nodes_above(&blocks, below.clone(), self.node_size));
            below = below.end..blocks.len();
        }
        TreeShape { blocks }
    }
}

/// The nodes above the blocks in the range `below`.
fn nodes_above(blocks: &[ShapedBlock], below: Range<usize>, node_size: u32) -> Vec<ShapedBlock> {
    let below = blocks.get(below).unwrap_or_default();
    below
        .chunks(node_capacity(node_size))
        .filter_map(|children| {
            let first = children.first()?;
            let (level, first_key) = (first.level + 1, first.first_key);
            Some(ShapedBlock { first_key, level, count: children.len() })
        })
        .collect()
}

/// Makes the blocks of a tree whose shape and places are known.
pub(super) struct TreeLoader<'l> {
    node_size: u32,
    checksum: ChecksumType,
    /// The identity of its blocks; level and address are those of each block.
    identity: BlockIdentity,
    shape: &'l TreeShape,
    /// The place of each block.
    places: &'l [u64],
    /// Takes the finished blocks.
    out: &'l mut dyn FnMut(Logical, &[u8]) -> Result<()>,
    /// How many leaves are finished.
    leaves: usize,
    items: Vec<(Key, Range<usize>)>,
    data: Vec<u8>,
    /// The first key of each finished block.
    first_keys: Vec<Key>,
}

impl<'l> TreeLoader<'l> {
    pub(super) fn new(
        (node_size, checksum): (u32, ChecksumType),
        identity: BlockIdentity,
        (shape, places): (&'l TreeShape, &'l [u64]),
        out: &'l mut dyn FnMut(Logical, &[u8]) -> Result<()>,
    ) -> Self {
        let (items, data, first_keys) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            node_size,
            checksum,
            identity,
            shape,
            places,
            out,
            leaves: 0,
            items,
            data,
            first_keys,
        }
    }

    /// Adds the next item.
    ///
    /// # Errors
    /// When there are more items than were counted, or a block cannot be written.
    pub(super) fn push(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let from = self.data.len();
        self.data.extend_from_slice(data);
        self.items.push((key, from..self.data.len()));
        let leaf = self.shape.blocks.get(self.leaves).filter(|block| block.level == 0);
        match leaf.map(|leaf| leaf.count) {
            None => Err(changed()),
            Some(count) if self.items.len() == count => self.finish_leaf(),
            Some(_) => Ok(()),
        }
    }

    fn finish_leaf(&mut self) -> Result<()> {
        let mut bytes = self.block(self.leaves)?;
        let size = self.data.len() + self.items.len() * ITEM_SIZE;
        if size > leaf_capacity(self.node_size) {
            return Err(changed());
        }
        let mut filler = LeafFiller::new(&mut bytes);
        for (key, range) in &self.items {
            filler.push(*key, self.data.get(range.clone()).unwrap_or_default());
        }
        filler.finish();
        let first_key = self.items.first().map_or(Key::MIN, |(key, _)| *key);
        self.items.clear();
        self.data.clear();
        self.leaves += 1;
        self.write(first_key, bytes)
    }

    /// An empty block for the number `index`.
    fn block(&self, index: usize) -> Result<Box<[u8]>> {
        let (Some(shaped), Some(&place)) = (self.shape.blocks.get(index), self.places.get(index))
        else {
            return Err(changed());
        };
        let identity =
            BlockIdentity { logical: Logical(place), level: shaped.level, ..self.identity };
        Ok(new_block(self.node_size, &identity))
    }

    /// Writes the next block.
    fn write(&mut self, first_key: Key, mut bytes: Box<[u8]>) -> Result<()> {
        let place = self.places.get(self.first_keys.len()).copied().ok_or_else(changed)?;
        seal_block(&mut bytes, self.checksum);
        self.first_keys.push(first_key);
        (self.out)(Logical(place), &bytes)
    }

    /// Writes the nodes.
    ///
    /// # Errors
    /// When there were fewer items than were counted, or a block cannot be written.
    pub(super) fn finish(mut self) -> Result<()> {
        let leaves = self.shape.leaves();
        if leaves == 1 && self.leaves == 0 {
            // An empty tree has one empty leaf.
            self.finish_leaf()?;
        }
        if self.leaves != leaves || !self.items.is_empty() {
            return Err(changed());
        }
        let mut child = 0;
        for index in leaves..self.shape.blocks.len() {
            let mut bytes = self.block(index)?;
            let count = self.shape.blocks.get(index).map_or(0, |block| block.count);
            let children = self.first_keys.iter().zip(self.places).skip(child).take(count);
            let pointers: Vec<_> = children
                .map(|(key, place)| NodePointer {
                    key: (*key).into(),
                    blockptr: (*place).into(),
                    generation: self.identity.generation.0.into(),
                })
                .collect();
            if pointers.len() != count {
                return Err(changed());
            }
            insert_pointers(&mut bytes, 0, &pointers);
            let first_key = self.first_keys.get(child).copied().unwrap_or_default();
            child += count;
            self.write(first_key, bytes)?;
        }
        Ok(())
    }
}

/// The error when the items of a tree are others than those that were counted.
fn changed() -> Error {
    Error::corrupt(Structure::TreeBlock, "a tree changed while it was made anew")
}
