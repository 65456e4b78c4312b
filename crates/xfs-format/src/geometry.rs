//! The sizes and places that all structures of a volume share.

use uuid::Uuid;

use crate::ids::BASIC_BLOCK;
use crate::layout::ensure;
use crate::{AgBlock, AgIno, AgNumber, BasicBlock, FsBlock, Ino, Malformed, Structure};

bitflags::bitflags! {
    /// The features of a volume that its structures depend on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsLayout: u16 {
        /// Blocks carry checksums and say what they are (version 5). V4 volumes have neither.
        const CHECKSUMS = 1;
        /// Directory entries carry the type of their file.
        const FILE_TYPES = 2;
        /// Chunks of inodes may be partly allocated.
        const SPARSE_INODES = 4;
        /// Attributes that are parent pointers exist.
        const PARENTS = 8;
        /// Groups have a tree of inode chunks that have a free inode.
        const FREE_INODES = 16;
        /// Groups have a tree of the owners of blocks.
        const REVERSE_MAP = 32;
        /// Groups have a tree of reference counts.
        const SHARED_BLOCKS = 64;
        /// There is a realtime device.
        const REALTIME = 128;
        /// Inodes may have times in nanoseconds.
        const BIG_TIMES = 256;
        /// Inodes may count more extents.
        const WIDE_COUNTS = 512;
        /// Metadata inodes have a directory tree of their own.
        const METADATA_TREE = 1024;
    }
}

/// The sizes and places that all structures of a volume share.
///
/// [`XfsSuperblock::parse`](crate::superblock::XfsSuperblock::parse) proves them. Code that makes a
/// geometry in another way has to keep to the ranges below, so that every shift is below 64 and no
/// product of valid numbers overflows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsGeometry {
    /// What the layout of structures depends on.
    pub layout: XfsLayout,
    /// The bytes of a block, as a power of two: 9 to 16.
    pub block_log: u8,
    /// The bytes of a sector, as a power of two: 9 to 15.
    pub sector_log: u8,
    /// The bytes of an inode, as a power of two: 8 to 11.
    pub inode_log: u8,
    /// The blocks that inodes are read and written in: a cluster
    /// ([`cluster_blocks`](Self::cluster_blocks)).
    pub cluster_blocks: u32,
    /// The blocks of a directory block, as a power of two.
    pub dir_block_log: u8,
    /// The bits of a block number inside a group.
    pub ag_block_log: u8,
    /// The blocks of a group. The last one may have fewer.
    pub ag_blocks: u32,
    /// The groups.
    pub ag_count: u32,
    /// The blocks of the volume.
    pub blocks: u64,
    /// The first block of the log, or 0 when another device holds it.
    pub log_start: FsBlock,
    /// The blocks of the log.
    pub log_blocks: u32,
    /// The id that blocks carry: `meta_uuid` where that feature is on.
    pub uuid: Uuid,
}

/// The bytes of a cluster of inodes of 256 bytes; others have larger ones.
const CLUSTER_BYTES: u32 = 8 << 10;

impl XfsGeometry {
    /// The blocks of a cluster, in a volume whose chunks of inodes are aligned to `alignment`
    /// blocks. The kernel makes clusters larger with the inodes if chunks are aligned to them:
    /// 16 KiB with inodes of 512 bytes.
    #[must_use]
    pub fn cluster_blocks(inode_log: u8, block_log: u8, alignment: u32) -> u32 {
        let large = CLUSTER_BYTES << inode_log.saturating_sub(8);
        let is_aligned = alignment >= large >> block_log;
        let bytes = if is_aligned { large } else { CLUSTER_BYTES };
        (bytes >> block_log).max(1)
    }

    /// Whether blocks carry checksums and say what they are, as in all V5 volumes.
    #[must_use]
    pub fn has_checksums(&self) -> bool {
        self.layout.contains(XfsLayout::CHECKSUMS)
    }

    /// The bytes of a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        1 << self.block_log
    }

    /// The bytes of a sector.
    #[must_use]
    pub fn sector_size(&self) -> usize {
        1 << self.sector_log
    }

    /// The bytes of an inode.
    #[must_use]
    pub fn inode_size(&self) -> usize {
        1 << self.inode_log
    }

    /// The bytes of a directory block.
    #[must_use]
    pub fn dir_block_size(&self) -> usize {
        1 << (self.block_log + self.dir_block_log)
    }

    /// The inodes of a block, as a power of two.
    #[must_use]
    pub fn inodes_per_block_log(&self) -> u8 {
        self.block_log - self.inode_log
    }

    /// The blocks of group `ag`; 0 when there is no such group.
    #[must_use]
    pub fn ag_len(&self, ag: AgNumber) -> u32 {
        let start = u64::from(ag.0) * u64::from(self.ag_blocks);
        let rest = self.blocks.saturating_sub(start);
        u32::try_from(rest).map_or(self.ag_blocks, |rest| rest.min(self.ag_blocks))
    }

    /// Whether group `ag` has block `block`, and it is not one of the headers.
    #[must_use]
    pub fn is_usable(&self, ag: AgNumber, block: AgBlock) -> bool {
        self.is_usable_run(ag, block, 1)
    }

    /// Whether group `ag` has the `count` blocks from `block` on, at least one, and none of them is
    /// one of the headers.
    #[must_use]
    pub fn is_usable_run(&self, ag: AgNumber, block: AgBlock, count: u32) -> bool {
        let end = u64::from(block.0) + u64::from(count);
        count > 0 && block.0 >= self.header_blocks() && end <= u64::from(self.ag_len(ag))
    }

    /// Whether the `count` blocks from `block` on, at least one, lie in one group and none of them
    /// is one of its headers.
    #[must_use]
    pub fn is_usable_extent(&self, block: FsBlock, count: u32) -> bool {
        self.split(block).is_some_and(|(ag, block)| self.is_usable_run(ag, block, count))
    }

    /// The blocks at the start of each group that its four header sectors occupy.
    #[must_use]
    pub fn header_blocks(&self) -> u32 {
        (4_u32 << self.sector_log).div_ceil(1 << self.block_log)
    }

    /// Whether group `ag` has room for inode `inode`.
    #[must_use]
    pub fn has_inode(&self, ag: AgNumber, inode: AgIno) -> bool {
        self.is_usable(ag, AgBlock(inode.0 >> self.inodes_per_block_log()))
    }

    /// The block of the volume that is `block` of group `ag`.
    #[must_use]
    pub fn fs_block(&self, ag: AgNumber, block: AgBlock) -> FsBlock {
        FsBlock(u64::from(ag.0) << self.ag_block_log | u64::from(block.0))
    }

    /// The group of a block, and the block in it; `None` when the volume does not have it.
    #[must_use]
    pub fn split(&self, block: FsBlock) -> Option<(AgNumber, AgBlock)> {
        let ag = AgNumber(u32::try_from(block.0 >> self.ag_block_log).ok()?);
        let inside = u32::try_from(block.0 & ((1 << self.ag_block_log) - 1)).ok()?;
        (inside < self.ag_len(ag)).then_some((ag, AgBlock(inside)))
    }

    /// Where block `block` of group `ag` lies on the device.
    #[must_use]
    pub fn place(&self, ag: AgNumber, block: AgBlock) -> BasicBlock {
        let block = u64::from(ag.0) * u64::from(self.ag_blocks) + u64::from(block.0);
        BasicBlock(block << self.block_log >> BASIC_BLOCK.ilog2())
    }

    /// Where a block lies on the device; `None` when the volume does not have it.
    #[must_use]
    pub fn place_of(&self, block: FsBlock) -> Option<BasicBlock> {
        self.split(block).map(|(ag, block)| self.place(ag, block))
    }

    /// The group and the block in it that a place on the device belongs to; `None` when the volume
    /// does not have it.
    #[must_use]
    pub fn at(&self, place: BasicBlock) -> Option<(AgNumber, AgBlock)> {
        let block = place.bytes() >> self.block_log;
        if block >= self.blocks {
            return None;
        }
        let ag_blocks = u64::from(self.ag_blocks);
        let ag = u32::try_from(block.checked_div(ag_blocks)?).ok()?;
        let inside = u32::try_from(block.checked_rem(ag_blocks)?).ok()?;
        Some((AgNumber(ag), AgBlock(inside)))
    }

    /// The number of inode `inode` of group `ag` in the volume.
    #[must_use]
    pub fn ino(&self, ag: AgNumber, inode: AgIno) -> Ino {
        let bits = self.ag_block_log + self.inodes_per_block_log();
        Ino(u64::from(ag.0) << bits | u64::from(inode.0))
    }

    /// The group, the block and the index in the block of an inode; `None` when its number leads
    /// out of the volume or into the headers of a group.
    #[must_use]
    pub fn locate(&self, ino: Ino) -> Option<(AgNumber, AgBlock, u32)> {
        let log = self.inodes_per_block_log();
        let (ag, block) = self.split(FsBlock(ino.0 >> log))?;
        if !self.is_usable(ag, block) {
            return None;
        }
        let index = u32::try_from(ino.0 & ((1 << log) - 1)).ok()?;
        Some((ag, block, index))
    }

    /// Proves, about a `structure`, that an inode number in it leads to a place of the volume.
    pub(crate) fn check_ino(&self, structure: Structure, ino: Ino) -> Result<(), Malformed> {
        ensure!(structure, self.locate(ino).is_some(), "inode {ino} is not in the volume");
        Ok(())
    }

    /// The group of an inode and its number in the group; `None` as for [`Self::locate`].
    #[must_use]
    pub fn split_ino(&self, ino: Ino) -> Option<(AgNumber, AgIno)> {
        let (ag, block, index) = self.locate(ino)?;
        Some((ag, AgIno(block.0 << self.inodes_per_block_log() | index)))
    }

    /// Where an inode lies on the device, in bytes; `None` as for [`Self::locate`].
    #[must_use]
    pub fn inode_offset(&self, ino: Ino) -> Option<u64> {
        let (ag, block, index) = self.locate(ino)?;
        Some(self.place(ag, block).bytes() + (u64::from(index) << self.inode_log))
    }
}
