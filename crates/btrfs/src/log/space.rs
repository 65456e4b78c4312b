//! The space of the blocks and extents of a log. Nothing else may be allocated there before the
//! commit of the replay is on the devices.
//!
//! According to the trees, the blocks of logs and the extents that only a log refers to are free.
//! So this module takes them out of the free space before anything is allocated. If one of them is
//! not free, the log and the trees contradict each other.

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::extent::{EXTENT_FLAG_DATA, ParsedExtent};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};

use super::LogTree;
use super::{log_generation, log_root_tree};
use crate::block::TreeBlock;
use crate::inode::{Rooms, RoomsHandle};
use crate::space::growth_bytes;
use crate::storage::malformed;
use crate::tree::{Blocks, TreeRoot, with_item};

/// An extent that only the log refers to.
struct NewExtent {
    len: u64,
    /// A replayed file refers to it.
    is_used: bool,
}

/// The space that was taken.
pub(super) struct LogReservation<'v> {
    volume: &'v Rooms,
    /// The blocks of all logs.
    blocks: Vec<Logical>,
    /// New extents of data by their address.
    extents: BTreeMap<u64, NewExtent>,
    /// The most bytes that the items of all logs may add to trees.
    growth_bytes: u64,
    /// The range of the item of checksums that ends last, among those of the current log so far.
    sums: Range<u64>,
    /// The longest range of an item of checksums inside which another item starts, in bytes. Old
    /// kernels wrote such logs.
    sums_reach: u64,
}

fn contradiction(logical: Logical, problem: &str) -> Error {
    Error::corrupt_at(Structure::TreeLog, logical.0, problem)
}

impl<'v> LogReservation<'v> {
    /// The blocks of all logs.
    pub(super) fn blocks(&self) -> &[Logical] {
        &self.blocks
    }

    /// Takes the blocks and new extents of `logs`, and the blocks of the tree of log trees.
    ///
    /// # Errors
    /// When a log is damaged, or has something that is not free.
    pub(super) fn take(volume: &'v Rooms, logs: &[LogTree]) -> Result<Self> {
        let mut taken = Self {
            volume,
            blocks: Vec::new(),
            extents: BTreeMap::new(),
            growth_bytes: 0,
            sums: 0..0,
            sums_reach: 0,
        };
        let roots = log_root_tree(volume).into_iter().chain(logs.iter().map(|log| log.root));
        for root in roots {
            taken.sums = 0..0;
            taken.walk(&root.expected())?;
        }
        Ok(taken)
    }

    /// The most bytes that the items may add to trees.
    pub(super) fn growth_bytes(&self) -> u64 {
        self.growth_bytes
    }

    /// Items with checksums of a range of data start at most this many bytes before it. The last
    /// item before the range may start even earlier.
    pub(super) fn sums_reach(&self) -> u64 {
        self.sums_reach
    }

    fn node_size(&self) -> u64 {
        u64::from(self.volume.superblock().node_size)
    }

    fn walk(&mut self, expected: &ExpectedBlock) -> Result<()> {
        let at = expected.logical;
        if expected.generation != log_generation(self.volume) {
            return Err(contradiction(at, "a block of another transaction"));
        }
        if !self.take_one(at, self.node_size(), BlockGroupFlags::METADATA)? {
            return Err(contradiction(at, "a block of the log lies where something else is"));
        }
        self.blocks.push(at);
        let block = self.volume.block(expected)?;
        if block.is_leaf() {
            return self.leaf(&block);
        }
        (0..block.len())
            .try_for_each(|slot| self.walk(&block.child_expected(slot, TreeId::TREE_LOG)))
    }

    /// Takes a range of a block group for `flags`. Returns whether it was free.
    fn take_one(&self, logical: Logical, len: u64, flags: u64) -> Result<bool> {
        let space = &self.volume.live()?.space;
        let group = space.group_of(logical)?;
        if !group.serves(flags) {
            return Ok(false);
        }
        space.take_range(&self.volume.base, &group, logical, len)
    }

    fn leaf(&mut self, leaf: &TreeBlock) -> Result<()> {
        for slot in 0..leaf.len() {
            let (key, data) = (leaf.key(slot), leaf.data(slot));
            self.growth_bytes += growth_bytes(item_bytes(key.item_type, data.len()), 0);
            match key.item_type {
                ItemType::EXTENT_DATA => {
                    let extent = FileExtent::parse(data).map_err(malformed)?;
                    if let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, .. } = extent.body
                    {
                        self.extent(disk_bytenr, disk_num_bytes)?;
                    }
                }
                ItemType::EXTENT_CSUM => self.sums(key.offset, data.len()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Notes an item with `len` bytes of checksums from the address `start` on. Items come in the
    /// order of their keys.
    fn sums(&mut self, start: u64, len: usize) {
        let superblock = self.volume.superblock();
        let sectors = (len / superblock.checksum.len()) as u64;
        let end = start.saturating_add(sectors * u64::from(superblock.sector_size));
        if start < self.sums.end {
            self.sums_reach = self.sums_reach.max(self.sums.end - self.sums.start);
        }
        if end > self.sums.end {
            self.sums = start..end;
        }
    }

    fn extent(&mut self, logical: Logical, len: u64) -> Result<()> {
        if let Some(known) = self.extents.get(&logical.0) {
            let is_same = known.len == len;
            return if is_same {
                Ok(())
            } else {
                Err(contradiction(logical, "an extent of two lengths"))
            };
        }
        if is_allocated(self.volume, logical, len)? {
            return Ok(());
        }
        if !self.take_one(logical, len, BlockGroupFlags::DATA)? {
            return Err(contradiction(
                logical,
                "an extent of the log lies where something else is",
            ));
        }
        self.extents.insert(logical.0, NewExtent { len, is_used: false });
        Ok(())
    }

    /// Returns `true` on the first call for a new extent: the reference that the caller adds is its
    /// first.
    pub(super) fn is_first_use(&mut self, logical: Logical) -> bool {
        let extent = self.extents.get_mut(&logical.0);
        extent.is_some_and(|extent| !std::mem::replace(&mut extent.is_used, true))
    }

    /// Frees the blocks, and the extents that no file refers to after all, once the transaction of
    /// `handle` is on the devices.
    pub(super) fn give_up(self, handle: &RoomsHandle<'_>) {
        for &block in &self.blocks {
            handle.pin(block, self.node_size());
        }
        for (&at, extent) in self.extents.iter().filter(|(_, extent)| !extent.is_used) {
            handle.pin(Logical(at), extent.len);
        }
    }
}

/// The most bytes of items, in all trees, that an item of a log with `len` bytes may become. A name
/// is also in two items of the directory. Together these are 110 bytes longer than one of many
/// names of an inode in a log, so names count 12 times. An extent gets an item of its own, and
/// splits the extent that it lies in and a range of free space, so other items count 3 times.
fn item_bytes(item_type: ItemType, len: usize) -> u64 {
    let is_name = matches!(item_type, ItemType::INODE_REF | ItemType::INODE_EXTREF);
    (ITEM_SIZE + len) as u64 * if is_name { 12 } else { 3 }
}

/// Whether the extent tree has this extent of data.
fn is_allocated(volume: &Rooms, logical: Logical, len: u64) -> Result<bool> {
    let key = Key::new(logical.0, ItemType::EXTENT_ITEM, len);
    let root: TreeRoot = volume.tree(TreeId::EXTENT)?;
    let is_data = with_item(volume, root, key, |data| {
        let extent = ParsedExtent::parse(key.item_type, data).map_err(malformed)?;
        Ok(extent.item.flags.get() & EXTENT_FLAG_DATA != 0)
    })?;
    match is_data {
        Some(false) => Err(contradiction(logical, "data of a file that is a tree block")),
        is_data => Ok(is_data.is_some()),
    }
}
