//! What transactions log at most: whole blocks with their headers, inodes with theirs.

use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::btree::XfsTree;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::record::CHUNK_INODES;

use super::levels::MostTreeLevels;

/// What the log adds to a buffer.
const BUFFER_HEADER: u64 = 128;

/// What it adds to an inode: the headers of four ops, the format, and two roots of trees.
const INODE_HEADERS: u64 = 4 * 12 + 56 + 2 * 72;

/// The inodes of a cluster, if blocks are not larger.
const CLUSTER_INODES: u64 = 32;

/// The blocks on the way down in a tree of hashes of an attribute fork, and of a directory.
pub(crate) const HASH_BLOCKS: u64 = 5;
pub(crate) const DIRECTORY_BLOCKS: u64 = 7;

/// The levels that older kernels reckoned with for the reverse map of a volume with shared blocks.
const OLD_REVERSE_LEVELS: u64 = 9;

/// What transactions log on a volume, in bytes.
pub(crate) struct ReservationSizes<'a> {
    pub(crate) geometry: &'a XfsGeometry,
    pub(crate) levels: &'a MostTreeLevels,
    /// Whether the larger numbers of kernels without parent pointers count. Only the least log
    /// follows them.
    pub(crate) is_old: bool,
}

impl ReservationSizes<'_> {
    pub(crate) fn has(&self, layout: XfsLayout) -> bool {
        self.geometry.layout.contains(layout)
    }

    fn block_size(&self) -> u64 {
        self.geometry.block_size() as u64
    }

    /// A block of a directory, which is one buffer whatever blocks it has.
    pub(crate) fn directory_block(&self) -> u64 {
        self.geometry.dir_block_size() as u64 + BUFFER_HEADER
    }

    fn sector_size(&self) -> u64 {
        self.geometry.sector_size() as u64
    }

    pub(crate) fn blocks(&self, count: u64) -> u64 {
        count * (self.block_size() + BUFFER_HEADER)
    }

    pub(crate) fn sectors(&self, count: u64) -> u64 {
        count * (self.sector_size() + BUFFER_HEADER)
    }

    pub(crate) fn inodes(&self, count: u64) -> u64 {
        count * (self.geometry.inode_size() as u64 + INODE_HEADERS)
    }

    /// The blocks of trees that change when `extents` are taken or freed: each path is written
    /// twice, but for the root.
    pub(crate) fn space_trees(&self, extents: u64) -> u64 {
        let path = |levels: u64| 2 * levels - 1;
        let is_shared = self.has(XfsLayout::SHARED_BLOCKS);
        let mut blocks = 2 * path(self.levels.free);
        if self.has(XfsLayout::REVERSE_MAP) {
            let is_oldest = self.is_old && is_shared;
            blocks += path(if is_oldest { OLD_REVERSE_LEVELS } else { self.levels.reverse });
        }
        if self.is_old && is_shared {
            blocks += path(self.levels.counts);
        }
        self.blocks(extents * blocks)
    }

    /// How many transactions a write and a truncation take.
    pub(crate) fn data_steps(&self) -> u64 {
        match (self.has(XfsLayout::SHARED_BLOCKS), self.has(XfsLayout::REVERSE_MAP)) {
            (true, _) if self.is_old => 8,
            (true, true) => 5,
            (true, false) => 4,
            (false, true) if !self.is_old => 4,
            (false, _) => 2,
        }
    }

    /// The blocks of a directory, and of the tree of its extents, that one more name can change.
    pub(crate) fn directory(&self) -> u64 {
        let blocks = 1 << self.geometry.dir_block_log;
        let extent_blocks = self.extent_blocks(blocks, self.levels.data);
        self.blocks(DIRECTORY_BLOCKS * (blocks + extent_blocks) + 1)
    }

    /// The blocks of the tree of extents of a fork that can change when it gets `extents` more.
    pub(crate) fn extent_blocks(&self, extents: u64, levels: u64) -> u64 {
        let leaf = XfsTree::Extents.capacity(self.geometry, 0) as u64;
        extents.div_ceil(leaf) * (levels - 1)
    }

    /// What changes when a file is written: its inode and the path in the tree of its extents, or
    /// the space that a step frees.
    pub(crate) fn write(&self) -> u64 {
        let data = self.blocks(self.levels.data);
        (self.inodes(1) + data + self.sectors(3) + self.space_trees(2))
            .max(self.sectors(5) + self.space_trees(2))
    }

    /// What changes when extents of a file are removed: up to four are freed in one step.
    pub(crate) fn truncate(&self) -> u64 {
        (self.inodes(1) + self.blocks(self.levels.data + 1))
            .max(self.sectors(9) + self.space_trees(4))
    }

    /// What a chunk of inodes adds to or takes from one tree of inodes.
    pub(crate) fn chunk_tree(&self) -> u64 {
        self.blocks(self.levels.inodes) + self.space_trees(1)
    }

    /// The same of the tree of free inodes.
    pub(crate) fn free_chunk_tree(&self) -> u64 {
        if self.has(XfsLayout::FREE_INODES) { self.chunk_tree() } else { 0 }
    }

    /// What changes when an inode of a chunk is taken, and its directory gets a name.
    pub(crate) fn use_inode(&self) -> u64 {
        self.inodes(2) + self.sectors(1) + self.block_size() + self.directory()
    }

    /// What changes when a chunk of inodes is made, but for the tree of free inodes.
    pub(crate) fn make_chunk(&self) -> u64 {
        self.sectors(2) + self.sector_size() + self.space_trees(1) + self.chunk_tree()
    }

    /// A cluster of inodes, or the block that holds several.
    pub(crate) fn cluster(&self) -> u64 {
        self.block_size().max(CLUSTER_INODES << self.geometry.inode_log)
    }

    /// The blocks of a chunk of inodes.
    pub(crate) fn chunk_blocks(&self) -> u64 {
        u64::from((CHUNK_INODES >> self.geometry.inodes_per_block_log()).max(1))
    }
}
