//! The space of what a log holds: nothing else may be put there before the log is replayed and its
//! commit is on the devices.
//!
//! Blocks of logs, and extents that only a log refers to, are free as far as the trees know. They
//! are taken from what is free before anything is allocated. When one of them is not free, the log
//! and the trees contradict each other.

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::check::Expected;
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::extent::{EXTENT_FLAG_DATA, Extent};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};

use super::LogTree;
use crate::block::TreeBlock;
use crate::engine::{Engine, Handle};
use crate::space::growth_bytes;
use crate::storage::malformed;
use crate::tree::{Blocks, TreeRoot, with_item};

/// An extent that only the log refers to.
struct NewExtent {
    len: u64,
    /// A file refers to it that was replayed.
    is_used: bool,
}

/// What was taken.
pub(super) struct Taken<'v> {
    volume: &'v Engine,
    /// The blocks of all logs.
    blocks: Vec<Logical>,
    /// New extents of data by their address.
    extents: BTreeMap<u64, NewExtent>,
    /// What the items of all logs may add to trees, in bytes.
    growth_bytes: u64,
    /// What the item of checksums covers that ends last of those of the log at hand.
    sums: Range<u64>,
    /// The most that an item of checksums covers in which another begins: old kernels wrote such
    /// logs.
    sums_reach: u64,
}

fn contradiction(logical: Logical, problem: &str) -> Error {
    Error::corrupt_at("tree log", logical.0, problem)
}

impl<'v> Taken<'v> {
    /// Takes what `logs` and the tree of them hold.
    ///
    /// # Errors
    /// When a log is damaged, or holds what is not free.
    pub(super) fn take(volume: &'v Engine, logs: &[LogTree]) -> Result<Self> {
        let mut taken = Self {
            volume,
            blocks: Vec::new(),
            extents: BTreeMap::new(),
            growth_bytes: 0,
            sums: 0..0,
            sums_reach: 0,
        };
        let roots = volume.log_root_tree().into_iter().chain(logs.iter().map(|log| log.root));
        for root in roots {
            taken.sums = 0..0;
            taken.walk(&root.expected())?;
        }
        Ok(taken)
    }

    /// What the items may add to trees, in bytes.
    pub(super) fn growth_bytes(&self) -> u64 {
        self.growth_bytes
    }

    /// How far before a range of data items begin, at the most, that have checksums of it, but for
    /// the last one before it.
    pub(super) fn sums_reach(&self) -> u64 {
        self.sums_reach
    }

    fn node_size(&self) -> u64 {
        u64::from(self.volume.superblock().node_size)
    }

    fn walk(&mut self, expected: &Expected) -> Result<()> {
        let at = expected.logical;
        if expected.generation != self.volume.log_generation() {
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

    /// Takes a range where block groups hold what `flags` say; whether it was free.
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

    /// Looks at an item with `len` bytes of checksums from `start` on. They come in the order of
    /// their keys.
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

    /// Whether nothing refers to the data at `logical` yet. From now on something does.
    pub(super) fn is_first_use(&mut self, logical: Logical) -> bool {
        let extent = self.extents.get_mut(&logical.0);
        extent.is_some_and(|extent| !std::mem::replace(&mut extent.is_used, true))
    }

    /// Makes the blocks, and the extents that no file refers to after all, free when the
    /// transaction of `handle` is on the devices.
    pub(super) fn give_up(self, handle: &Handle<'_>) {
        for &block in &self.blocks {
            handle.pin(block, self.node_size());
        }
        for (&at, extent) in self.extents.iter().filter(|(_, extent)| !extent.is_used) {
            handle.pin(Logical(at), extent.len);
        }
    }
}

/// What an item of a log with `len` bytes may become, in bytes of items of all trees: a name is in
/// two items of the directory too, which are 110 bytes longer than what one of many names of an
/// inode is here; an extent has an item of its own, and splits what it lies in, and free space.
fn item_bytes(item_type: ItemType, len: usize) -> u64 {
    let is_name = matches!(item_type, ItemType::INODE_REF | ItemType::INODE_EXTREF);
    (ITEM_SIZE + len) as u64 * if is_name { 12 } else { 3 }
}

/// Whether the extent tree has this extent of data.
fn is_allocated(volume: &Engine, logical: Logical, len: u64) -> Result<bool> {
    let key = Key::new(logical.0, ItemType::EXTENT_ITEM, len);
    let root: TreeRoot = volume.tree(TreeId::EXTENT)?;
    let is_data = with_item(volume, root, key, |data| {
        let extent = Extent::parse(key.item_type, data).map_err(malformed)?;
        Ok(extent.item.flags.get() & EXTENT_FLAG_DATA != 0)
    })?;
    match is_data {
        Some(false) => Err(contradiction(logical, "data of a file that is a tree block")),
        is_data => Ok(is_data.is_some()),
    }
}
