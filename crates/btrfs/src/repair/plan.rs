//! The new trees: their items, their blocks, and the places of these.
//!
//! Some items hold addresses of blocks, and the number of blocks depends on the items. So the
//! trees are laid out in rounds, as those of a new volume are (`mkfs/trees`):
//!
//! ```text
//! items of all trees  ->  blocks, as few as hold them  ->  places, the first free ones
//!        ^                                                          |
//!        +------------------ until a round changes nothing ---------+
//! ```
//!
//! More blocks need more items. Only the free-space tree may get fewer, where a block fills a gap.
//! A tree that would shrink from a round to the next is then laid out with more leaves than it
//! needs, so that the rounds end.
//!
//! | tree | its items |
//! |---|---|
//! | extent tree | those of the survey, of new blocks, of block groups |
//! | block group tree, free-space tree | made anew from what is in use |
//! | device tree | ranges made anew from the chunks, everything else as before |
//! | chunk tree | only if it counts bytes of a member wrong: as before, with the right counts |
//! | checksum tree | only if there are checksums without data: as before, without these |
//! | quota tree | as before, with items that were mended ([`QuotaChanges`]) |
//! | root tree | as before, with new roots and the old superblocks, without old space caches |

mod items;

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::encode::BlockIdentity;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::{CompatRo, SuperblockItem};
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result, Structure};
use uuid::Uuid;

use super::extents::ExtentForm;
use super::quotas::QuotaChanges;
use super::shape::{ShapeBuilder, TreeLoader, TreeShape};
use super::survey::SpaceSurvey;
use crate::check::{CheckedVolume, KeyRange};
use crate::tree::TreeRoot;

/// More rounds than any volume needs.
const MOST_ROUNDS: usize = 64;

/// From this round on, no tree shrinks.
const STEADY_ROUND: usize = 6;

/// Items by their keys.
pub(super) type ItemMap = BTreeMap<Key, Vec<u8>>;

/// A new tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlacedTree {
    pub(super) id: TreeId,
    pub(super) shape: TreeShape,
    /// The address of each block.
    pub(super) places: Vec<u64>,
}

/// All new trees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PlacedTrees {
    pub(super) trees: Vec<PlacedTree>,
    /// Each block by its address: the number of its tree, and its number in that.
    by_address: BTreeMap<u64, (usize, usize)>,
}

impl PlacedTree {
    /// Its root.
    pub(super) fn root(&self, generation: Generation) -> TreeRoot {
        TreeRoot {
            id: self.id,
            logical: Logical(self.places.last().copied().unwrap_or_default()),
            level: self.shape.root_level(),
            generation,
        }
    }
}

impl PlacedTrees {
    /// How many blocks they have.
    pub(super) fn blocks(&self) -> u64 {
        self.by_address.len() as u64
    }

    /// How many blocks are in a range of addresses.
    fn blocks_in(&self, range: Range<u64>) -> u64 {
        self.by_address.range(range).count() as u64
    }

    /// The tree `id`, if it is new.
    pub(super) fn get(&self, id: TreeId) -> Option<&PlacedTree> {
        self.trees.iter().find(|tree| tree.id == id)
    }
}

/// What the new trees are made from.
pub(super) struct RepairPlan<'p, 'c> {
    pub(super) volume: &'p CheckedVolume<'c>,
    pub(super) survey: &'p SpaceSurvey,
    pub(super) chunks: Vec<Chunk>,
    pub(super) form: ExtentForm,
    /// The superblock before the repair.
    pub(super) old: &'p SuperblockItem,
    /// The transaction of the repair.
    pub(super) generation: Generation,
    pub(super) chunk_tree_uuid: [u8; 16],
    /// The new trees, in the order of their blocks.
    pub(super) ids: Vec<TreeId>,
    /// The old superblocks, as items of the root tree.
    pub(super) saved: ItemMap,
    pub(super) quotas: QuotaChanges,
}

impl RepairPlan<'_, '_> {
    /// Lays the trees out.
    ///
    /// # Errors
    /// `ENOSPC` when there is too little room; when an item cannot be read.
    pub(super) fn lay_out(&self) -> Result<PlacedTrees> {
        let mut placed = PlacedTrees::default();
        let mut singles: BTreeMap<TreeId, usize> = BTreeMap::new();
        for round in 0..MOST_ROUNDS {
            let mut shapes = Vec::with_capacity(self.ids.len());
            for &id in &self.ids {
                self.volume.require_going_on()?;
                let before = placed.get(id).map_or(0, |tree| tree.shape.leaves());
                let shape = self.shape(id, &placed, singles.get(&id).copied().unwrap_or(0))?;
                if round >= STEADY_ROUND && shape.leaves() < before {
                    *singles.entry(id).or_default() += before - shape.leaves();
                }
                shapes.push((id, shape));
            }
            let next = self.place(shapes)?;
            if next == placed {
                return Ok(placed);
            }
            placed = next;
        }
        let what = "the layout of the new trees does not settle; nothing was written";
        Err(Error::posix(Errno::NOSPC, what))
    }

    fn shape(&self, id: TreeId, placed: &PlacedTrees, singles: usize) -> Result<TreeShape> {
        let mut builder = ShapeBuilder::new(self.form.node_size, singles);
        self.each_item(id, placed, &mut |key, data| builder.push(key, data.len()))?;
        Ok(builder.finish())
    }

    /// Gives each block its place.
    fn place(&self, shapes: Vec<(TreeId, TreeShape)>) -> Result<PlacedTrees> {
        let mut metadata = FreePlaces::new(&self.survey.metadata, self.form.node_size);
        let mut system = FreePlaces::new(&self.survey.system, self.form.node_size);
        let mut placed = PlacedTrees::default();
        for (id, shape) in shapes {
            let free = if id == TreeId::CHUNK { &mut system } else { &mut metadata };
            let found: Vec<_> = (0..shape.blocks.len()).map(|_| free.next()).collect();
            let number = placed.trees.len();
            for (block, &place) in found.iter().enumerate() {
                placed.by_address.insert(place.unwrap_or(u64::MAX), (number, block));
            }
            placed.trees.push(PlacedTree {
                id,
                shape,
                places: found.into_iter().flatten().collect(),
            });
        }
        let lacking = metadata.lacking + system.lacking;
        if lacking > 0 {
            return Err(no_room(lacking * u64::from(self.form.node_size)));
        }
        Ok(placed)
    }

    /// Makes the blocks of all trees.
    ///
    /// # Errors
    /// Those of `out`, and when an item cannot be read.
    pub(super) fn load(
        &self,
        placed: &PlacedTrees,
        out: &mut dyn FnMut(Logical, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let superblock = self.volume.superblock();
        for tree in &placed.trees {
            let identity = BlockIdentity {
                metadata_uuid: superblock.metadata_uuid,
                chunk_tree_uuid: Uuid::from_bytes(self.chunk_tree_uuid),
                logical: Logical(0),
                generation: self.generation,
                owner: tree.id,
                level: 0,
            };
            let blocks = (superblock.node_size, superblock.checksum);
            let mut loader =
                TreeLoader::new(blocks, identity, (&tree.shape, &tree.places), &mut *out);
            self.each_item(tree.id, placed, &mut |key, data| loader.push(key, data))?;
            loader.finish()?;
        }
        Ok(())
    }

    /// The bytes that all extents have.
    pub(super) fn bytes_used(&self, placed: &PlacedTrees) -> u64 {
        let new = placed.blocks() * u64::from(self.form.node_size);
        self.survey.used.values().sum::<u64>() + new
    }

    /// The bytes of the member `id` that belong to chunks.
    pub(super) fn bytes_of_member(&self, id: u64) -> u64 {
        member_bytes(&self.chunks, id)
    }
}

/// The bytes of the member `id` that belong to chunks.
pub(super) fn member_bytes(chunks: &[Chunk], id: u64) -> u64 {
    let of = |chunk: &Chunk| {
        let stripes = chunk.stripes.iter().filter(|stripe| stripe.device.0 == id).count();
        (stripes as u64).saturating_mul(chunk.stripe_bytes())
    };
    chunks.iter().map(of).fold(0, u64::saturating_add)
}

/// The items of the members in the chunk tree.
pub(super) fn device_items(volume: &CheckedVolume<'_>) -> Result<Vec<(Key, DevItem)>> {
    let mut items = Vec::new();
    let range = KeyRange::of_object(objectid::DEV_ITEMS);
    volume.each_item(volume.chunk_tree(), range, &mut |key, data| {
        items.push(DevItem::view(data).copied().map(|item| (key, item)));
        ControlFlow::Continue(())
    });
    let bad = |problem| Error::corrupt(Structure::DeviceItem, problem);
    items.into_iter().map(|item| item.map_err(|e| bad(e.problem))).collect()
}

/// What a repair does besides what each one does.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RepairScope {
    /// Whether checksums are dropped that belong to no data.
    pub(super) drops_checksums: bool,
    /// Whether the numbers of quota groups are counted anew.
    pub(super) recounts_quotas: bool,
}

/// The trees of `volume` that a repair makes anew. The chunk tree is one of them when it counts
/// the bytes of a member wrong.
pub(super) fn replaced(
    volume: &CheckedVolume<'_>,
    chunks: &[Chunk],
    scope: RepairScope,
) -> Result<Vec<TreeId>> {
    let mut ids = vec![TreeId::EXTENT];
    let compat_ro = volume.superblock().compat_ro;
    if compat_ro.has(CompatRo::BLOCK_GROUP_TREE) {
        ids.push(TreeId::BLOCK_GROUP);
    }
    if compat_ro.has(CompatRo::FREE_SPACE_TREE) {
        ids.push(TreeId::FREE_SPACE);
    }
    ids.push(TreeId::DEV);
    if scope.drops_checksums && volume.tree(TreeId::CSUM).is_some() {
        ids.push(TreeId::CSUM);
    }
    if volume.tree(TreeId::QUOTA).is_some() {
        ids.push(TreeId::QUOTA);
    }
    ids.push(TreeId::ROOT);
    let is_wrong = |(_, item): &(Key, DevItem)| {
        item.bytes_used.get() != member_bytes(chunks, item.devid.get())
    };
    if device_items(volume)?.iter().any(is_wrong) {
        ids.push(TreeId::CHUNK);
    }
    Ok(ids)
}

/// The error when the new blocks find no place: `bytes` more must be free.
pub(super) fn no_room(bytes: u64) -> Error {
    let what = format!(
        "the new trees need {bytes} bytes more for metadata than are free in the block groups; \
         nothing was written"
    );
    Error::posix(Errno::NOSPC, what)
}

/// Free places for blocks, from the first one on.
pub(super) struct FreePlaces<'r> {
    ranges: std::slice::Iter<'r, Range<u64>>,
    current: Range<u64>,
    node_size: u64,
    /// How many blocks have no place.
    lacking: u64,
}

impl<'r> FreePlaces<'r> {
    pub(super) fn new(ranges: &'r [Range<u64>], node_size: u32) -> Self {
        Self { ranges: ranges.iter(), current: 0..0, node_size: node_size.into(), lacking: 0 }
    }

    /// The next place; `None` when there is none, which counts as lacking.
    pub(super) fn next(&mut self) -> Option<u64> {
        while self.current.is_empty() {
            let Some(range) = self.ranges.next() else {
                self.lacking += 1;
                return None;
            };
            self.current = range.clone();
        }
        let place = self.current.start;
        self.current.start += self.node_size;
        Some(place)
    }
}
