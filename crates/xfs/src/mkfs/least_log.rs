//! The least log: what the kernel needs to mount a volume.
//!
//! A transaction reserves the log space of the most that it can change. The kernel refuses a log
//! that does not hold the largest reservation several times. Its formula is a part of the format,
//! so it is followed to the byte: with blocks of 16 KiB and more, it is the default log size.
//!
//! ```text
//! reservation   what one transaction logs: whole blocks with their headers, inodes with theirs
//! unit          the reservation, and the headers of ops and records around it
//! least log     3 * (units that one operation takes, and two records or 1024 basic blocks)
//! ```
//!
//! Volumes without parent pointers keep the larger numbers of older kernels, so that these mount
//! them too.

use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::btree::XfsTree;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::ids::BASIC_BLOCK;

use super::levels::MostTreeLevels;

/// What the log adds to a buffer.
const BUFFER_HEADER: u64 = 128;

/// What it adds to an inode: the headers of four ops, the format, and two roots of trees.
const INODE_HEADERS: u64 = 4 * 12 + 56 + 2 * 72;

/// The quotas that a transaction may change.
const QUOTAS: u64 = 768;

/// A path of 1024 bytes in a buffer.
const LINK_TARGET: u64 = 1024 + BUFFER_HEADER;

/// What parent pointers add to a rename, and to any other change of a name: names and values in
/// intents.
const PARENT_OF_RENAME: u64 = 1192;
const PARENT_OF_CREATE: u64 = 308;

/// The blocks on the way down in a tree of hashes of an attribute fork, and of a directory.
const HASH_BLOCKS: u64 = 5;
const DIRECTORY_BLOCKS: u64 = 7;

/// The levels that older kernels reckoned with for the reverse map of a volume with shared blocks.
const OLD_REVERSE_LEVELS: u64 = 9;

/// The records of the log that are reckoned with, and the headers of one.
const RECORD: u64 = 256 << 10;
const RECORD_HEADERS: u64 = 8 * BASIC_BLOCK;

/// The header of an op, and those of one transaction.
const OP: u64 = 12;
const TRANSACTION: u64 = 40;

/// The least blocks of any log.
const LEAST_BLOCKS: u64 = 512;

/// A reservation, and how many of them one operation takes.
#[derive(Clone, Copy)]
struct OperationLogUse {
    bytes: u64,
    count: u64,
}

/// The least blocks of the log of a volume. Records of the log fill multiples of `log_stripe`
/// bytes, if that is not 0.
pub(super) fn least_log_blocks(
    geometry: &XfsGeometry,
    levels: &MostTreeLevels,
    log_stripe: u64,
) -> u64 {
    let OperationLogUse { bytes, count } = largest(geometry, levels);
    let is_striped = log_stripe > BASIC_BLOCK;
    let unit = unit(bytes, if log_stripe == 0 { BASIC_BLOCK } else { log_stripe });
    let basic_blocks = (unit * count).div_ceil(BASIC_BLOCK);
    let one = if is_striped {
        let stripe = log_stripe / BASIC_BLOCK;
        basic_blocks.next_multiple_of(stripe) + 2 * stripe
    } else {
        // The kernel means two basic blocks here, and adds their bytes.
        basic_blocks + 2 * BASIC_BLOCK
    };
    (3 * one * BASIC_BLOCK).div_ceil(geometry.block_size() as u64).max(LEAST_BLOCKS)
}

/// The log space of a transaction with this reservation. Its records are rounded up to `rounding`
/// bytes.
fn unit(reservation: u64, rounding: u64) -> u64 {
    let room = RECORD - RECORD_HEADERS;
    let mut bytes = reservation + TRANSACTION;
    let mut records = bytes.div_ceil(room);
    bytes += records * OP;
    while bytes.div_ceil(room) > records {
        records += 1;
        bytes += OP;
    }
    // One more record for the op that commits, and the rounding of both ends.
    bytes + (records + 1) * RECORD_HEADERS + 2 * rounding
}

/// The reservation that decides.
fn largest(geometry: &XfsGeometry, levels: &MostTreeLevels) -> OperationLogUse {
    let sizes =
        LogSizes { geometry, levels, is_old: !geometry.layout.contains(XfsLayout::PARENTS) };
    let of_operations = sizes.operations();
    let total = |reservation: &OperationLogUse| reservation.bytes * reservation.count;
    let [first, rest @ ..] = of_operations;
    let most = rest.into_iter().fold(
        first,
        |most, next| {
            if total(&next) > total(&most) { next } else { most }
        },
    );
    // The kernel compares one setting of an attribute with whole operations.
    let attribute = sizes.largest_attribute();
    if attribute > total(&most) { OperationLogUse { bytes: attribute, count: 3 } } else { most }
}

/// What transactions log.
struct LogSizes<'a> {
    geometry: &'a XfsGeometry,
    levels: &'a MostTreeLevels,
    /// The numbers of kernels without parent pointers.
    is_old: bool,
}

impl LogSizes<'_> {
    fn has(&self, layout: XfsLayout) -> bool {
        self.geometry.layout.contains(layout)
    }

    fn blocks(&self, count: u64) -> u64 {
        count * (self.geometry.block_size() as u64 + BUFFER_HEADER)
    }

    fn sectors(&self, count: u64) -> u64 {
        count * (self.geometry.sector_size() as u64 + BUFFER_HEADER)
    }

    fn inodes(&self, count: u64) -> u64 {
        count * (self.geometry.inode_size() as u64 + INODE_HEADERS)
    }

    /// The blocks of trees that change when `extents` are taken or freed: each path is written
    /// twice, but for the root.
    fn space_trees(&self, extents: u64) -> u64 {
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
    fn data_steps(&self) -> u64 {
        match (self.has(XfsLayout::SHARED_BLOCKS), self.has(XfsLayout::REVERSE_MAP)) {
            (true, _) if self.is_old => 8,
            (true, _) => 5,
            (false, true) if !self.is_old => 4,
            (false, _) => 2,
        }
    }

    /// The blocks of a directory, and of the tree of its extents, that one more name can change.
    fn directory(&self) -> u64 {
        let blocks = 1 << self.geometry.dir_block_log;
        let extent_blocks = self.extent_blocks(blocks, self.levels.data);
        DIRECTORY_BLOCKS * (blocks + extent_blocks) + 1
    }

    /// The blocks of the tree of extents of a fork that can change when it gets `extents` more.
    fn extent_blocks(&self, extents: u64, levels: u64) -> u64 {
        let leaf = XfsTree::Extents.capacity(self.geometry, 0) as u64;
        extents.div_ceil(leaf) * (levels - 1)
    }

    /// Those of write, truncation, rename, and making a symbolic link. No other is larger.
    fn operations(&self) -> [OperationLogUse; 4] {
        let [rename_parent, create_parent, renames, creates] =
            if self.is_old { [0, 0, 2, 3] } else { [PARENT_OF_RENAME, PARENT_OF_CREATE, 5, 6] };
        let data = self.blocks(self.levels.data);
        let write = (self.inodes(1) + data + self.sectors(3) + self.space_trees(2))
            .max(self.sectors(5) + self.space_trees(2));
        let truncate =
            (self.inodes(1) + data + self.blocks(1)).max(self.sectors(9) + self.space_trees(4));
        let rename = (self.inodes(5) + self.blocks(2 * self.directory()))
            .max(self.sectors(7) + self.space_trees(3));
        let chunk_tree = self.blocks(self.levels.inodes) + self.space_trees(1);
        let free_chunk_tree = if self.has(XfsLayout::FREE_INODES) { chunk_tree } else { 0 };
        let use_inode = self.inodes(2)
            + self.sectors(1)
            + self.geometry.block_size() as u64
            + self.blocks(self.directory());
        let make_chunk =
            self.sectors(2) + self.geometry.sector_size() as u64 + self.space_trees(1) + chunk_tree;
        let create = use_inode.max(make_chunk) + free_chunk_tree;
        let reservation = |bytes, count| OperationLogUse { bytes: QUOTAS + bytes, count };
        [
            reservation(write, self.data_steps()),
            reservation(truncate, self.data_steps()),
            reservation(rename + rename_parent, renames),
            reservation(create + LINK_TARGET + create_parent, creates),
        ]
    }

    /// That of setting the largest attribute that still lies in a leaf.
    fn largest_attribute(&self) -> u64 {
        let block = self.geometry.block_size() as u64;
        let size = block / 2 + block / 4 - 256;
        let levels = self.levels.attributes;
        let blocks = HASH_BLOCKS * (1 + self.extent_blocks(1, levels))
            + size.div_ceil(block)
            // The kernel takes the bytes for extents here.
            + self.extent_blocks(size, levels);
        let set = QUOTAS + self.inodes(1) + self.sectors(1) + self.blocks(HASH_BLOCKS);
        set + blocks * (self.sectors(1) + self.blocks(levels))
    }
}
