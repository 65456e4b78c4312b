//! The trees of a new volume: their items, and the blocks that hold them.
//!
//! Some items hold addresses of blocks: the extent tree has an item for every block, the root tree
//! one for every tree, the free-space tree one for every gap. In turn, the number of blocks depends
//! on the items. So the trees are made in rounds:
//!
//! ```text
//! items of all trees  ->  blocks, as few as hold them  ->  addresses, in the order of the trees
//!        ^                                                           |
//!        +------------------ until a round changes nothing ----------+
//! ```
//!
//! 1. The sizes of the items do not depend on addresses, and more items never need fewer blocks.
//!    The number of items grows with the number of blocks, so the rounds end.
//! 2. After the last round, every item is exact.

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::block::NodePointer;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::edit::{
    ITEM_SIZE, insert_items, insert_pointers, leaf_capacity, node_capacity,
};
use offshoot_btrfs_format::encode::{BlockIdentity, new_block, seal_block};
use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_btrfs_format::{Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result};

use super::GENERATION;
use super::layout::Layout;
use super::options::VolumeSpec;

mod items;

pub(super) use items::device_item;

/// More rounds than any volume needs. Each round with a change adds a block to some tree, and a
/// block adds two items to other trees.
const MAX_ROUNDS: usize = 64;

/// The items of a tree, by their keys.
pub(super) type TreeItems = BTreeMap<Key, Vec<u8>>;

/// A tree of a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NewTree {
    pub(super) id: TreeId,
    items: Vec<(Key, Vec<u8>)>,
    /// The leaves in the order of their keys, then the nodes of level 1, and so on up to the root.
    blocks: Vec<NewBlock>,
}

/// A block of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NewBlock {
    level: u8,
    first_key: Key,
    /// For a leaf, a range of the items; for a node, a range of the blocks.
    holds: Range<usize>,
    logical: Logical,
}

impl NewTree {
    /// The tree with `items`, in as few blocks of `node_size` bytes as possible. The blocks have no
    /// addresses yet.
    fn new(id: TreeId, items: TreeItems, node_size: u32) -> Self {
        let items: Vec<_> = items.into_iter().collect();
        let block = |level, holds: Range<usize>, first_key| NewBlock {
            level,
            first_key,
            holds,
            logical: Logical(0),
        };
        let first_key = |at: usize| items.get(at).map_or(Key::MIN, |(key, _)| *key);
        let mut blocks: Vec<_> = leaves(&items, node_size)
            .into_iter()
            .map(|holds| block(0, holds.clone(), first_key(holds.start)))
            .collect();
        let mut below = 0..blocks.len();
        let mut level = 0;
        while below.len() > 1 {
            level += 1;
            for start in below.clone().step_by(node_capacity(node_size)) {
                let end = (start + node_capacity(node_size)).min(below.end);
                blocks.push(block(level, start..end, blocks[start].first_key));
            }
            below = below.end..blocks.len();
        }
        Self { id, items, blocks }
    }

    /// The root block.
    fn root(&self) -> &NewBlock {
        self.blocks.last().expect("a tree has a root")
    }

    /// The address of the root block.
    pub(super) fn root_logical(&self) -> Logical {
        self.root().logical
    }

    /// The level of the root block.
    pub(super) fn root_level(&self) -> u8 {
        self.root().level
    }

    fn identity(&self, block: &NewBlock, spec: &VolumeSpec) -> BlockIdentity {
        BlockIdentity {
            metadata_uuid: spec.fsid,
            chunk_tree_uuid: spec.chunk_tree_uuid,
            logical: block.logical,
            generation: GENERATION,
            owner: self.id,
            level: block.level,
        }
    }

    /// The blocks as they are stored, with their addresses.
    fn encode(&self, spec: &VolumeSpec) -> impl Iterator<Item = (Logical, Box<[u8]>)> {
        self.blocks.iter().map(|block| {
            let mut bytes = new_block(spec.node_size, &self.identity(block, spec));
            if block.level == 0 {
                let items = &self.items[block.holds.clone()];
                insert_items(&mut bytes, 0, items.iter().map(|(key, data)| (*key, &data[..])));
            } else {
                let pointer = |below: &NewBlock| NodePointer {
                    key: below.first_key.into(),
                    blockptr: below.logical.0.into(),
                    generation: GENERATION.0.into(),
                };
                let pointers: Vec<_> =
                    self.blocks[block.holds.clone()].iter().map(pointer).collect();
                insert_pointers(&mut bytes, 0, &pointers);
            }
            seal_block(&mut bytes, spec.checksum);
            (block.logical, bytes)
        })
    }
}

/// The range of items for each leaf. An empty tree has one empty leaf.
fn leaves(items: &[(Key, Vec<u8>)], node_size: u32) -> Vec<Range<usize>> {
    let mut leaves = Vec::new();
    let (mut start, mut used) = (0, 0);
    for (i, (_, data)) in items.iter().enumerate() {
        let size = ITEM_SIZE + data.len();
        if used + size > leaf_capacity(node_size) {
            leaves.push(start..i);
            (start, used) = (i, 0);
        }
        used += size;
    }
    leaves.push(start..items.len());
    leaves
}

/// All trees of a new volume.
#[derive(Debug)]
pub(super) struct NewTrees {
    /// The chunk tree first, the others in the order of their addresses.
    all: Vec<NewTree>,
}

impl NewTrees {
    /// The trees of the volume `spec` with this layout.
    ///
    /// # Errors
    /// `ENOSPC` when they do not fit into their block groups.
    pub(super) fn of(spec: &VolumeSpec, layout: &Layout) -> Result<Self> {
        let make = |known: &Self| -> Result<Self> {
            let all = ids(spec).into_iter().map(|id| {
                let items = items::of(id, spec, layout, known);
                NewTree::new(id, items, spec.node_size)
            });
            let mut trees = Self { all: all.collect() };
            trees.place(spec, layout)?;
            Ok(trees)
        };
        // The first round starts with one empty leaf for every tree.
        let empty =
            ids(spec).into_iter().map(|id| NewTree::new(id, TreeItems::new(), spec.node_size));
        let mut trees = Self { all: empty.collect() };
        trees.place(spec, layout)?;
        for _ in 0..MAX_ROUNDS {
            let next = make(&trees)?;
            if next.all == trees.all {
                return Ok(trees);
            }
            trees = next;
        }
        unreachable!("the trees of a new volume settle: see the essay above")
    }

    /// Gives every block its address, one behind the other: the chunk tree in the system chunk, all
    /// others in the metadata chunk. Skips the places of superblocks.
    fn place(&mut self, spec: &VolumeSpec, layout: &Layout) -> Result<()> {
        let mut system = BlockAddresses::new(layout.system(), spec.node_size);
        let mut metadata = BlockAddresses::new(layout.metadata(), spec.node_size);
        for tree in &mut self.all {
            let places = if tree.id == TreeId::CHUNK { &mut system } else { &mut metadata };
            for block in &mut tree.blocks {
                block.logical = places.next().ok_or_else(|| {
                    Error::posix(
                        Errno::NOSPC,
                        format!("too many devices for the first block group of tree {}", tree.id),
                    )
                })?;
            }
        }
        Ok(())
    }

    /// The tree `id`, which must exist.
    pub(super) fn get(&self, id: TreeId) -> &NewTree {
        self.all.iter().find(|tree| tree.id == id).expect("a tree of the volume")
    }

    /// Where the blocks of all trees are, ascending.
    fn addresses(&self) -> Vec<Logical> {
        let mut all: Vec<_> =
            self.all.iter().flat_map(|tree| &tree.blocks).map(|block| block.logical).collect();
        all.sort_unstable();
        all
    }

    /// The bytes of `chunk` that blocks occupy.
    fn used_in(&self, chunk: &Chunk, spec: &VolumeSpec) -> u64 {
        let all = self.addresses();
        let inside = all.iter().filter(|at| (chunk.start..chunk.end()).contains(at));
        inside.count() as u64 * u64::from(spec.node_size)
    }

    /// The bytes that all blocks occupy.
    pub(super) fn used_bytes(&self, spec: &VolumeSpec) -> u64 {
        self.addresses().len() as u64 * u64::from(spec.node_size)
    }

    /// All blocks as they are stored, with their addresses.
    pub(super) fn encode(&self, spec: &VolumeSpec) -> impl Iterator<Item = (Logical, Box<[u8]>)> {
        self.all.iter().flat_map(|tree| tree.encode(spec))
    }
}

/// The trees of a volume, in the order in which their blocks lie.
fn ids(spec: &VolumeSpec) -> Vec<TreeId> {
    let mut ids = vec![
        TreeId::CHUNK,
        TreeId::ROOT,
        TreeId::EXTENT,
        TreeId::DEV,
        TreeId::FS,
        TreeId::CSUM,
        TreeId::UUID,
        TreeId::DATA_RELOC,
    ];
    if spec.compat_ro.has(CompatRo::FREE_SPACE_TREE) {
        ids.push(TreeId::FREE_SPACE);
    }
    if spec.compat_ro.has(CompatRo::BLOCK_GROUP_TREE) {
        ids.push(TreeId::BLOCK_GROUP);
    }
    ids
}

/// The addresses for tree blocks in a chunk, from its start on.
struct BlockAddresses {
    next: u64,
    end: u64,
    node_size: u64,
    left_out: Vec<Range<Logical>>,
}

impl BlockAddresses {
    fn new(chunk: &Chunk, node_size: u32) -> Self {
        Self {
            next: chunk.start.0,
            end: chunk.end().0,
            node_size: node_size.into(),
            left_out: chunk.left_out_ranges(),
        }
    }

    fn next(&mut self) -> Option<Logical> {
        for range in &self.left_out {
            if self.next < range.end.0 && range.start.0 < self.next + self.node_size {
                self.next = range.end.0.next_multiple_of(self.node_size);
            }
        }
        let place = self.next;
        self.next += self.node_size;
        (self.next <= self.end).then_some(Logical(place))
    }
}
