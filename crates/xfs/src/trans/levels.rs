//! The most levels that each tree of a volume can get. The least log and the free lists follow from
//! them.

use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::btree::XfsTree;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::record::CHUNK_INODES;

/// The most extents of a data fork and of an attribute fork, with `nrext64` and without.
const MOST_EXTENTS: [(u64, u64); 2] =
    [((1 << 48) - 1, (1 << 32) - 1), ((1 << 31) - 1, (1 << 15) - 1)];

/// The entries of a root in an inode that count: the least that a data fork and an attribute fork
/// hold.
const ROOT_ENTRIES: (u64, u64) = (3, 2);

/// The most levels of each tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MostTreeLevels {
    /// The trees of free space.
    pub(crate) free: u64,
    /// The trees of inodes.
    pub(crate) inodes: u64,
    /// The reverse map.
    pub(crate) reverse: u64,
    /// The reference counts.
    pub(crate) counts: u64,
    /// The extents of a data fork.
    pub(crate) data: u64,
    /// The extents of an attribute fork.
    pub(crate) attributes: u64,
}

impl MostTreeLevels {
    pub(crate) fn of(geometry: &XfsGeometry) -> Self {
        let has = |layout| geometry.layout.contains(layout);
        let blocks = u64::from(geometry.ag_blocks);
        // Chunks in the group whose numbers fill all their bits.
        let inodes = 1 << (geometry.ag_block_log + geometry.inodes_per_block_log());
        let (data, attributes) = MOST_EXTENTS[usize::from(!has(XfsLayout::WIDE_COUNTS))];
        let extents = HalfFull::of(geometry, XfsTree::Extents);
        let reverse = HalfFull::of(geometry, XfsTree::ReverseMap);
        Self {
            // Every second block is free.
            free: HalfFull::of(geometry, XfsTree::FreeByBlock).levels(blocks.div_ceil(2), 1),
            inodes: HalfFull::of(geometry, XfsTree::Inodes)
                .levels(inodes / u64::from(CHUNK_INODES), 1),
            // With shared blocks, no number of records bounds it: only its blocks do.
            reverse: if has(XfsLayout::SHARED_BLOCKS) {
                reverse.levels_in(blocks)
            } else {
                reverse.levels(blocks, 1)
            },
            counts: HalfFull::of(geometry, XfsTree::ReferenceCounts).levels(blocks, 1),
            data: extents.levels(data, ROOT_ENTRIES.0),
            attributes: extents.levels(attributes, ROOT_ENTRIES.1),
        }
    }
}

/// A tree whose blocks are half full, the least that they are.
struct HalfFull {
    leaf: u64,
    node: u64,
}

impl HalfFull {
    fn of(geometry: &XfsGeometry, tree: XfsTree) -> Self {
        let half = |level| tree.capacity(geometry, level) as u64 / 2;
        Self { leaf: half(0), node: half(1) }
    }

    /// The levels of a tree with this many records, whose root holds `root` entries where it is
    /// smaller than a node.
    fn levels(&self, records: u64, root: u64) -> u64 {
        let (mut width, mut levels) = (records.div_ceil(self.leaf), 1);
        while width > 1 {
            width = if width <= root { 1 } else { width.div_ceil(self.node) };
            levels += 1;
        }
        levels
    }

    /// The levels that fit in this many blocks. The root has at least two children.
    fn levels_in(&self, blocks: u64) -> u64 {
        let (mut rest, mut width, mut levels) = (blocks, 1, 0);
        while rest >= width {
            rest -= width;
            levels += 1;
            width = if levels == 1 { 2 } else { width * self.node };
        }
        levels
    }
}
