//! The items of one node, and the space that is reserved for them.

use std::collections::{BTreeMap, HashMap};
use std::ops::{AddAssign, RangeInclusive, Sub};
use std::sync::Arc;

use foldhash::fast::FixedState;
use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::{ItemType, Key};

use super::GROUP;

/// The approximate memory of a queued item beside its data, in bytes: its slot in a map that is not
/// full, and the rounding of allocators.
const OVERHEAD_BYTES: usize = 96;

/// A queued item.
#[derive(Debug)]
pub(super) struct QueuedItem {
    /// `None` for a tombstone.
    data: Option<Box<[u8]>>,
    /// Whether the tree may have an item with this key, or get one from a running flush.
    is_in_tree: bool,
}

impl QueuedItem {
    pub(super) fn data(&self) -> Option<&[u8]> {
        self.data.as_deref()
    }

    /// The bytes that it takes in a leaf.
    fn size(&self) -> usize {
        self.data.as_ref().map_or(0, |data| data.len() + ITEM_SIZE)
    }

    fn bytes(&self) -> usize {
        OVERHEAD_BYTES + self.data.as_ref().map_or(0, |data| data.len())
    }
}

/// The totals of some items, or their change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ItemTotals {
    /// Units of reserved metadata.
    pub(super) units: i64,
    /// The approximate number of tree blocks that they go to.
    pub(super) blocks: i64,
    /// The most by which they enlarge a tree, in bytes of leaves.
    pub(super) growth: i64,
    /// The memory that they take, in bytes.
    pub(super) bytes: i64,
}

impl AddAssign for ItemTotals {
    fn add_assign(&mut self, more: Self) {
        self.units += more.units;
        self.blocks += more.blocks;
        self.growth += more.growth;
        self.bytes += more.bytes;
    }
}

impl Sub for ItemTotals {
    type Output = Self;

    fn sub(self, less: Self) -> Self {
        Self {
            units: self.units - less.units,
            blocks: self.blocks - less.blocks,
            growth: self.growth - less.growth,
            bytes: self.bytes - less.bytes,
        }
    }
}

/// What the unit of a sorted item is counted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemUnit {
    /// The leaf of new items to which it was counted.
    Leaf,
    /// The inode.
    Inode,
    /// The item itself.
    Own,
}

/// Items of a node that wait for one flush.
#[derive(Debug, Default)]
pub(super) struct QueuedItems {
    /// DIR_ITEMs by hash. They are only looked up one by one.
    hashed: HashMap<u64, QueuedItem, FixedState>,
    /// The approximate number of leaves with the hashes of the directory.
    spread: Option<u64>,
    sorted: BTreeMap<Key, QueuedItem>,
    bytes: usize,
    growth: usize,
    /// The number of items in `sorted` that are not in the tree.
    insertions: usize,
    /// The bytes in the current leaf of new items, with their headers.
    curr_index_batch_size: u32,
    /// The number of leaves that the new items fill. After removals it may be more than they need.
    index_item_leaves: u32,
    /// The number of items in `sorted` that keep a unit of their own.
    own: u64,
    /// The inodes of the group that keep a unit, one bit each.
    inodes: u64,
}

impl QueuedItems {
    pub(super) fn is_empty(&self) -> bool {
        self.hashed.is_empty() && self.sorted.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.hashed.len() + self.sorted.len()
    }

    pub(super) fn get(&self, key: Key) -> Option<&QueuedItem> {
        if key.item_type == ItemType::DIR_ITEM {
            self.hashed.get(&key.offset)
        } else {
            self.sorted.get(&key)
        }
    }

    /// The totals of all items.
    pub(super) fn load(&self, is_by_item: bool) -> ItemTotals {
        let hashed = self.hashed.len() as u64;
        let shared = u64::from(self.index_item_leaves) + u64::from(self.inodes.count_ones());
        let units = if is_by_item { self.len() as u64 } else { hashed + self.own + shared };
        let blocks = hashed.min(self.spread.unwrap_or(u64::MAX)) + self.own + shared;
        let load = ItemTotals {
            units: units.cast_signed(),
            blocks: blocks.cast_signed(),
            growth: (self.growth as u64).cast_signed(),
            bytes: (self.bytes as u64).cast_signed(),
        };
        debug_assert!(
            !self.is_empty() || load == ItemTotals::default(),
            "kept for nothing: {load:?}"
        );
        load
    }

    /// Notes the approximate number of leaves with the hashes of the directory.
    pub(super) fn set_spread(&mut self, leaves: u64) {
        self.spread = Some(leaves);
    }

    /// Sets the data of the item.
    pub(super) fn put(
        &mut self,
        key: Key,
        data: impl AsRef<[u8]> + Into<Box<[u8]>>,
        existed: bool,
        leaf: u32,
    ) {
        if key.item_type == ItemType::DIR_ITEM {
            let is_in_tree = self.hashed.get(&key.offset).map_or(existed, |old| old.is_in_tree);
            let new = QueuedItem { data: Some(data.into()), is_in_tree };
            self.count(&new);
            if let Some(old) = self.hashed.insert(key.offset, new) {
                self.discount(&old);
            }
            return;
        }
        let Some(old) = self.sorted.get_mut(&key) else {
            let new = QueuedItem { data: Some(data.into()), is_in_tree: existed };
            self.count(&new);
            self.add_unit(unit(key, &new), key, new.size(), leaf);
            self.sorted.insert(key, new);
            return;
        };
        let (before, was, is_in_tree) = (unit(key, old), old.size(), old.is_in_tree);
        if let Some(same) = old.data.as_deref_mut().filter(|old| old.len() == data.as_ref().len()) {
            same.copy_from_slice(data.as_ref());
        } else {
            let new = QueuedItem { data: Some(data.into()), is_in_tree };
            let (after, is) = (unit(key, &new), new.size());
            self.replace(key, new);
            if after == ItemUnit::Leaf {
                self.resize_in_leaf(was, is, leaf);
            } else if before != after {
                self.remove_own(before);
                self.add_unit(after, key, is, leaf);
            }
        }
        if before == ItemUnit::Leaf {
            // It changed after it was made, so other items may stand beside it by now.
            self.keep_unit(key);
        }
    }

    /// Removes the item. Returns whether that needs no tombstone, because it never was in the tree.
    pub(super) fn remove(&mut self, key: Key) -> bool {
        let tombstone = QueuedItem { data: None, is_in_tree: true };
        let is_gone = self.get(key).is_some_and(|old| !old.is_in_tree);
        if key.item_type == ItemType::DIR_ITEM {
            let old = if is_gone {
                self.hashed.remove(&key.offset)
            } else {
                self.count(&tombstone);
                self.hashed.insert(key.offset, tombstone)
            };
            if let Some(old) = old {
                self.discount(&old);
            }
        } else if is_gone {
            self.take(key);
        } else {
            let before = self.sorted.get(&key).map(|old| unit(key, old));
            let after = unit(key, &tombstone);
            if before != Some(after) {
                if let Some(before) = before {
                    self.remove_own(before);
                }
                self.add_unit(after, key, 0, 0);
            }
            self.replace(key, tombstone);
        }
        is_gone
    }

    /// Makes the inode of `key` keep a unit of its own, if items of it are queued.
    pub(super) fn keep_unit(&mut self, key: Key) {
        if self.has_inode(key) {
            self.inodes |= bit_of(key);
        }
    }

    /// Whether `key` belongs to an inode with queued items.
    fn has_inode(&self, key: Key) -> bool {
        let is_inode = matches!(key.item_type, ItemType::INODE_ITEM | ItemType::INODE_REF);
        is_inode && self.range(all_of_inode(key.objectid)).next().is_some()
    }

    /// Takes out the items of the inode `ino`, if it is new.
    pub(super) fn take_inode(&mut self, ino: u64, leaf: u32) -> Option<Self> {
        let all = all_of_inode(ino);
        self.sorted.get(all.start()).filter(|item| !item.is_in_tree)?;
        let keys: Vec<_> = self.range(all).map(|(key, _)| key).collect();
        let mut taken = Self::default();
        for key in keys {
            let item = self.take(key)?;
            taken.count(&item);
            taken.add_unit(unit(key, &item), key, item.size(), leaf);
            taken.sorted.insert(key, item);
        }
        Some(taken)
    }

    /// Takes out one of the sorted items, with its unit.
    fn take(&mut self, key: Key) -> Option<QueuedItem> {
        let old = self.sorted.remove(&key)?;
        self.discount(&old);
        match unit(key, &old) {
            ItemUnit::Leaf => self.remove_from_leaf(old.size()),
            unit => self.remove_own(unit),
        }
        if self.inodes & bit_of(key) != 0 && !self.has_inode(key) {
            self.inodes &= !bit_of(key);
        }
        Some(old)
    }

    fn remove_from_leaf(&mut self, size: usize) {
        debug_assert!(self.index_item_leaves > 0, "new items fill leaves");
        debug_assert!(self.insertions > 0, "new items are counted");
        self.resize_in_leaf(size, 0, 0);
        self.insertions -= 1;
        if self.insertions == 0 {
            self.index_item_leaves = 0;
            self.curr_index_batch_size = 0;
        }
    }

    fn replace(&mut self, key: Key, new: QueuedItem) {
        self.count(&new);
        if let Some(old) = self.sorted.insert(key, new) {
            self.discount(&old);
        }
    }

    fn count(&mut self, one: &QueuedItem) {
        self.bytes += one.bytes();
        self.growth += one.size();
    }

    fn discount(&mut self, one: &QueuedItem) {
        self.bytes -= one.bytes();
        self.growth -= one.size();
    }

    fn add_unit(&mut self, by: ItemUnit, key: Key, size: usize, leaf: u32) {
        match by {
            ItemUnit::Leaf => {
                self.insertions += 1;
                self.add_to_leaf(size, leaf);
            }
            ItemUnit::Inode => self.inodes |= bit_of(key),
            ItemUnit::Own => self.own += 1,
        }
    }

    fn remove_own(&mut self, by: ItemUnit) {
        debug_assert_ne!(by, ItemUnit::Leaf, "what is new stays new until it is flushed or gone");
        self.own -= u64::from(by == ItemUnit::Own);
    }

    fn add_to_leaf(&mut self, size: usize, leaf: u32) {
        let size = u32::try_from(size).expect("an item fits a leaf");
        if self.index_item_leaves == 0 || self.curr_index_batch_size + size > leaf {
            self.curr_index_batch_size = size;
            self.index_item_leaves += 1;
        } else {
            self.curr_index_batch_size += size;
        }
    }

    /// Counts that a new item became larger or smaller.
    fn resize_in_leaf(&mut self, was: usize, is: usize, leaf: u32) {
        if is > was {
            self.add_to_leaf(is - was, leaf);
        } else if self.index_item_leaves == 1 {
            // With several leaves it is unknown to which one the item was counted.
            let less = u32::try_from(was - is).expect("an item fits a leaf");
            debug_assert!(self.curr_index_batch_size >= less, "the only leaf has all new items");
            self.curr_index_batch_size = self.curr_index_batch_size.saturating_sub(less);
        }
    }

    /// The sorted items in a range.
    pub(super) fn range(
        &self,
        range: RangeInclusive<Key>,
    ) -> impl DoubleEndedIterator<Item = (Key, &QueuedItem)> {
        self.sorted.range(range).map(|(key, pending)| (*key, pending))
    }

    /// All items in the order of keys. The hashed ones belong to the directory `dir`.
    pub(super) fn in_order(&self, dir: u64) -> Vec<(Key, &QueuedItem)> {
        let by_hash = |(&hash, pending)| (Key::new(dir, ItemType::DIR_ITEM, hash), pending);
        let mut all: Vec<_> = Vec::with_capacity(self.len());
        all.extend(self.hashed.iter().map(by_hash));
        all.sort_unstable_by_key(|(key, _)| key.offset);
        // Only a node of hashes has hashed items, and they come before all other kinds.
        all.extend(self.sorted.iter().map(|(key, pending)| (*key, pending)));
        all
    }
}

/// The bit of an inode in its group.
fn bit_of(key: Key) -> u64 {
    1 << (key.objectid % GROUP)
}

/// The range of keys of the queued items of the inode `ino`.
fn all_of_inode(ino: u64) -> RangeInclusive<Key> {
    Key::new(ino, ItemType::INODE_ITEM, 0)..=Key::new(ino, ItemType::INODE_REF, u64::MAX)
}

/// What the unit of a sorted item is counted to.
fn unit(key: Key, pending: &QueuedItem) -> ItemUnit {
    match (key.item_type, &pending.data) {
        _ if !pending.is_in_tree => ItemUnit::Leaf,
        (ItemType::INODE_ITEM, _) | (ItemType::INODE_REF, Some(_)) => ItemUnit::Inode,
        _ => ItemUnit::Own,
    }
}

/// The units of items that are being flushed and were not released yet.
#[derive(Debug)]
pub(super) struct Releases<'i> {
    items: &'i QueuedItems,
    is_by_item: bool,
    /// The totals that were not released yet.
    left: ItemTotals,
    leaves: u32,
    insertions: usize,
    /// The capacity of a leaf, in bytes.
    leaf: u32,
}

impl<'i> Releases<'i> {
    pub(super) fn new(items: &'i QueuedItems, is_by_item: bool, leaf: u32) -> Self {
        let (left, leaves) = (items.load(is_by_item), items.index_item_leaves);
        Self { items, is_by_item, left, leaves, insertions: items.insertions, leaf }
    }

    /// The totals to release when `batch` is in the tree. The memory of items is released only when
    /// all of them are.
    pub(super) fn after(&mut self, batch: &[(Key, &QueuedItem)]) -> ItemTotals {
        let growth: usize = batch.iter().map(|(_, pending)| pending.size()).sum();
        let by = |(key, pending): &(Key, &QueuedItem)| {
            if key.item_type == ItemType::DIR_ITEM { ItemUnit::Own } else { unit(*key, pending) }
        };
        let new = || batch.iter().filter(|one| by(one) == ItemUnit::Leaf);
        let (inserted, bytes) = (new().count(), new().map(|(_, new)| new.size()).sum::<usize>());
        let own = batch.iter().filter(|one| by(one) == ItemUnit::Own).count();
        self.insertions -= inserted;
        let leaves = match (inserted, self.insertions) {
            (0, _) => 0,
            (_, 0) => self.leaves,
            // With other items in between there may be more batches than leaves, so the last batch
            // keeps one leaf.
            _ => {
                let filled = u32::try_from(bytes).unwrap_or(u32::MAX).div_ceil(self.leaf);
                self.leaves.saturating_sub(1).min(filled)
            }
        };
        self.leaves -= leaves;
        let units =
            if self.is_by_item { batch.len() as u64 } else { own as u64 + u64::from(leaves) };
        let (units, growth) = (units.cast_signed(), (growth as u64).cast_signed());
        let less = ItemTotals { units, growth, ..ItemTotals::default() };
        self.left = self.left - less;
        less
    }

    /// The rest, to release at the end.
    pub(super) fn rest(self) -> ItemTotals {
        debug_assert!(self.insertions == 0 && self.leaves == 0, "all is flushed: {self:?}");
        debug_assert!(self.left.growth == 0, "{:?} of {:?}", self.left, self.items);
        self.left
    }
}

/// A node: the items that wait for the next flush, and those that are being flushed.
#[derive(Debug, Default)]
pub(super) struct DelayedNode {
    pub(super) active: QueuedItems,
    pub(super) flushing: Option<Arc<QueuedItems>>,
}

impl DelayedNode {
    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty() && self.flushing.is_none()
    }

    /// The newest queued item for `key`.
    pub(super) fn get(&self, key: Key) -> Option<&QueuedItem> {
        self.active.get(key).or_else(|| self.flushing.as_ref()?.get(key))
    }
}
