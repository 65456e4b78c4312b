//! Leaves whose checksum and header are right, and whose items are duplicate, overlap or are out of
//! order: what is intact of them is saved.
//!
//! Such a leaf was written like this, by a kernel whose memory or code was bad. Each item is looked
//! at on its own:
//!
//! 1. Its data is where it says if the items on both sides say the same. Otherwise it is between
//!    these two, or else where it says, if the contents are sound there.
//! 2. Its contents are sound by the check of the format. Flags that do not exist and bits of a mode
//!    that mean nothing are cleared.
//! 3. Its key fits: of all items those stay that ascend, as many as can be. The first key is also
//!    in the node above.
//!
//! Of items with one key, extents are cut as all that [overlap](super::overlaps). Of others the
//! first stays, and of inodes the one that was changed last.

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::block::{self, BlockHeader, HEADER_SIZE, LeafItem};
use offshoot_btrfs_format::check::{self as format_check, ExpectedBlock, Geometry};
use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::file_extent::FileExtent;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::FileType;
use zerocopy::FromBytes;

use super::overlaps::{
    ExtentCutter, FileExtentItem, ItemChange, OverlapStep, address_of, problem_with_place,
};
use crate::check::CheckedVolume;
use crate::tree::LostSubtree;

/// Extents of files that do not fit into the leaf that they were in, by subvolume and inode: they
/// begin behind its last key.
pub(super) type MovedExtents = BTreeMap<(TreeId, u64), Vec<FileExtentItem>>;

/// An item of a leaf.
type SavedItem = (Key, Vec<u8>);

/// Saves what is intact of leaves.
pub(super) struct LeafSaver<'s, 'c> {
    volume: &'s CheckedVolume<'c>,
    geometry: Geometry,
    overlaps: &'s mut OverlapStep,
}

/// A leaf whose items may be malformed.
struct MalformedLeaf<'l> {
    subvolume: TreeId,
    bytes: &'l [u8],
    header: &'l BlockHeader,
    items: &'l [LeafItem],
    /// The key that the node above has for it.
    first_key: Option<Key>,
    from: Key,
    to: Option<Key>,
}

impl<'s, 'c> LeafSaver<'s, 'c> {
    pub(super) fn new(volume: &'s CheckedVolume<'c>, overlaps: &'s mut OverlapStep) -> Self {
        let geometry = Geometry { is_strict: false, ..volume.storage.geometry().clone() };
        Self { volume, geometry, overlaps }
    }

    /// The items that are intact in a block that cannot be used; `None` when it is no leaf, its
    /// checksum or header is wrong, or no item is intact.
    pub(super) fn save(&mut self, subvolume: TreeId, lost: &LostSubtree) -> Option<Vec<SavedItem>> {
        let expected = ExpectedBlock { first_key: None, ..lost.block };
        if expected.level != 0 {
            return None;
        }
        let verify = |bytes: &[u8]| {
            format_check::verify_identity(bytes, &self.geometry, expected.logical)?;
            format_check::expect(bytes, &expected)?;
            block::items(bytes).map(drop)
        };
        let bytes = self.volume.storage.find_block(expected.logical, verify).ok()?;
        let leaf = MalformedLeaf {
            subvolume,
            bytes: &bytes,
            header: BlockHeader::view(&bytes).ok()?,
            items: block::items(&bytes).ok()?,
            first_key: lost.block.first_key,
            from: lost.from,
            to: lost.to,
        };
        // What is dropped is told of a leaf of which something is saved.
        let mut changes = Vec::new();
        let items = self.intact(&leaf, &mut changes);
        let items = ascending(items, &mut changes);
        let items = without_duplicates(items, &mut changes);
        if items.is_empty() {
            return None;
        }
        for (key, change) in changes {
            self.overlaps.log.add(subvolume, key.objectid, change);
        }
        Some(self.without_overlaps(&leaf, items))
    }

    /// The items whose contents are sound and whose keys may be in the leaf.
    fn intact(
        &self,
        leaf: &MalformedLeaf<'_>,
        changes: &mut Vec<(Key, ItemChange)>,
    ) -> Vec<SavedItem> {
        let joined = |slot: &usize| leaf.is_joined(*slot);
        let mut taken: Vec<Range<usize>> =
            (0..leaf.items.len()).filter(joined).filter_map(|slot| leaf.own_place(slot)).collect();
        let mut intact = Vec::new();
        for slot in 0..leaf.items.len() {
            let Some(key) = leaf.key(slot, changes) else { continue };
            let is_joined = leaf.is_joined(slot);
            let own = leaf.own_place(slot);
            let places = if is_joined { [own, None] } else { [leaf.place_between(slot), own] };
            let mut problem = "its data is not in the leaf".to_owned();
            let mut found = None;
            for place in places.into_iter().flatten() {
                let is_taken = |one: &Range<usize>| one.start < place.end && place.start < one.end;
                if !is_joined && taken.iter().any(is_taken) {
                    "its data overlaps that of other items".clone_into(&mut problem);
                    continue;
                }
                let Some(data) = leaf.bytes.get(place.clone()) else { continue };
                match self.sound(leaf, slot, key, data) {
                    Ok((data, corrected)) => {
                        found = Some((data, corrected));
                        if !is_joined {
                            taken.push(place);
                        }
                        break;
                    }
                    Err(other) => problem = other,
                }
            }
            match found {
                Some((data, corrected)) => {
                    let change = |problem| (key, ItemChange::Corrected { key, problem });
                    changes.extend(corrected.map(change));
                    intact.push((key, data));
                }
                None => changes.push((key, ItemChange::Dropped { key, problem })),
            }
        }
        intact
    }

    /// The data of an item that is sound, or can be corrected; then also what was wrong with it.
    fn sound(
        &self,
        leaf: &MalformedLeaf<'_>,
        slot: usize,
        key: Key,
        data: &[u8],
    ) -> Result<(Vec<u8>, Option<String>), String> {
        let verify =
            |data: &[u8]| format_check::verify_item(&self.geometry, leaf.header, slot, (key, data));
        let Err(malformed) = verify(data) else {
            let extent = FileExtent::parse(data).ok();
            let extent = extent.filter(|_| key.item_type == ItemType::EXTENT_DATA);
            let outside = extent.and_then(|extent| problem_with_place(self.volume, &extent));
            return outside.map_or(Ok((data.to_vec(), None)), Err);
        };
        let problem = malformed.problem.into_owned();
        let corrected = corrected_inode(key, data).filter(|data| verify(data).is_ok());
        corrected.map(|data| (data, Some(problem.clone()))).ok_or(problem)
    }

    /// Cuts the extents of each file that overlap. What begins behind the last key of the leaf is
    /// kept for later.
    fn without_overlaps(
        &mut self,
        leaf: &MalformedLeaf<'_>,
        items: Vec<SavedItem>,
    ) -> Vec<SavedItem> {
        let cutter = ExtentCutter::new(self.volume);
        let (mut all, mut files) = (Vec::new(), BTreeMap::<u64, Vec<FileExtentItem>>::new());
        for (key, data) in items {
            if key.item_type == ItemType::EXTENT_DATA {
                files.entry(key.objectid).or_default().push((key.offset, data));
            } else {
                all.push((key, data));
            }
        }
        for (ino, extents) in files {
            let kept = cutter.without_overlaps(extents, &mut |range, extent| {
                self.overlaps.log.add(leaf.subvolume, ino, cut(&range, extent));
            });
            for (offset, data) in kept {
                let key = Key::new(ino, ItemType::EXTENT_DATA, offset);
                if leaf.to.is_none_or(|to| key < to) {
                    all.push((key, data));
                } else {
                    self.overlaps
                        .moved
                        .entry((leaf.subvolume, ino))
                        .or_default()
                        .push((offset, data));
                }
            }
        }
        all.sort_by_key(|(key, _)| *key);
        all
    }
}

impl MalformedLeaf<'_> {
    fn offset(&self, slot: usize) -> Option<usize> {
        usize::try_from(self.items.get(slot)?.offset.get()).ok()?.checked_add(HEADER_SIZE)
    }

    /// Where an item says that its data ends.
    fn end(&self, slot: usize) -> Option<usize> {
        let size = usize::try_from(self.items.get(slot)?.size.get()).ok()?;
        self.offset(slot)?.checked_add(size)
    }

    /// Where the data of the item before this one begins.
    fn above(&self, slot: usize) -> Option<usize> {
        slot.checked_sub(1).map_or(Some(self.bytes.len()), |before| self.offset(before))
    }

    /// A range, if it is behind the headers of the items.
    fn within(&self, start: usize, end: usize) -> Option<Range<usize>> {
        let behind = HEADER_SIZE + self.items.len() * ITEM_SIZE;
        (behind <= start && start <= end && end <= self.bytes.len()).then_some(start..end)
    }

    /// Where an item says that its data is.
    fn own_place(&self, slot: usize) -> Option<Range<usize>> {
        self.within(self.offset(slot)?, self.end(slot)?)
    }

    /// The place between the data of the items on both sides.
    fn place_between(&self, slot: usize) -> Option<Range<usize>> {
        let is_last = slot + 1 == self.items.len();
        let start = if is_last { self.offset(slot)? } else { self.end(slot + 1)? };
        self.within(start, self.above(slot)?)
    }

    /// Whether the data of an item is where the items on both sides expect it.
    fn is_joined(&self, slot: usize) -> bool {
        let own = self.own_place(slot);
        own.is_some() && own == self.place_between(slot)
    }

    /// The key of an item; `None` when it cannot be in this leaf.
    fn key(&self, slot: usize, changes: &mut Vec<(Key, ItemChange)>) -> Option<Key> {
        let key = self.items.get(slot)?.key.get();
        let mut drop = |problem: String| {
            changes.push((key, ItemChange::Dropped { key, problem }));
            None
        };
        if let Some(first) = self.first_key.filter(|&first| slot == 0 && key != first) {
            let next = self.items.get(1).map(|next| next.key.get());
            if next.is_some_and(|next| first < next && next <= key) {
                let problem = format!("its key was {key}, and the node above has {first}");
                changes.push((first, ItemChange::Corrected { key: first, problem }));
                return Some(first);
            }
            return drop(format!("the node above has the key {first} for it"));
        }
        if key < self.from || self.to.is_some_and(|to| key >= to) {
            return drop("its key belongs to another leaf".into());
        }
        Some(key)
    }
}

/// The change that takes a range from an extent.
pub(super) fn cut(range: &Range<u64>, extent: &FileExtent<'_>) -> ItemChange {
    ItemChange::Cut {
        offset: range.start,
        len: range.end.saturating_sub(range.start),
        generation: extent.generation,
        logical: address_of(extent),
    }
}

/// An inode without flags and bits of its mode that mean nothing.
fn corrected_inode(key: Key, data: &[u8]) -> Option<Vec<u8>> {
    if key.item_type != ItemType::INODE_ITEM {
        return None;
    }
    let mut data = data.to_vec();
    let inode = InodeItem::mut_from_bytes(&mut data).ok()?;
    inode.flags = (inode.flags.get() & inode_flags::READABLE).into();
    let mut mode = inode.mode.get() & 0o177_777;
    let file_type = FileType::from_mode(mode);
    if file_type.is_none() {
        // What has no type gets one from what leads to it.
        mode &= 0o7777;
    }
    inode.mode = mode.into();
    if file_type == Some(FileType::Directory) {
        inode.nlink = inode.nlink.get().min(1).into();
    }
    Some(data)
}

/// The most of the items whose keys ascend. The same key may follow.
fn ascending(items: Vec<SavedItem>, changes: &mut Vec<(Key, ItemChange)>) -> Vec<SavedItem> {
    let keys: Vec<Key> = items.iter().map(|(key, _)| *key).collect();
    let key_of = |index: usize| keys.get(index).copied().unwrap_or(Key::MAX);
    // `ends` has, for each length, the item with the lowest key that ends so long a row.
    let (mut ends, mut before) = (Vec::<usize>::new(), Vec::with_capacity(keys.len()));
    for (index, key) in keys.iter().enumerate() {
        let len = ends.partition_point(|&end| key_of(end) <= *key);
        before.push(len.checked_sub(1).and_then(|at| ends.get(at)).copied());
        match ends.get_mut(len) {
            Some(end) => *end = index,
            None => ends.push(index),
        }
    }
    let mut is_kept = vec![false; keys.len()];
    let mut next = ends.last().copied();
    while let Some(index) = next {
        if let Some(kept) = is_kept.get_mut(index) {
            *kept = true;
        }
        next = before.get(index).copied().flatten();
    }
    let mut kept = Vec::with_capacity(items.len());
    for ((key, data), is_kept) in items.into_iter().zip(is_kept) {
        if is_kept {
            kept.push((key, data));
        } else {
            let problem = "it is out of order".into();
            changes.push((key, ItemChange::Dropped { key, problem }));
        }
    }
    kept
}

/// Leaves one of the items with the same key, but for extents, which ascend.
fn without_duplicates(
    items: Vec<SavedItem>,
    changes: &mut Vec<(Key, ItemChange)>,
) -> Vec<SavedItem> {
    let mut kept = Vec::<SavedItem>::with_capacity(items.len());
    for (key, data) in items {
        let is_extent = key.item_type == ItemType::EXTENT_DATA;
        match kept.last_mut().filter(|(last, _)| *last == key && !is_extent) {
            Some((_, last)) => {
                let is_inode = key.item_type == ItemType::INODE_ITEM;
                if is_inode && changed_in(&data) > changed_in(last) {
                    *last = data;
                }
                let problem = "another item has its key".into();
                changes.push((key, ItemChange::Dropped { key, problem }));
            }
            None => kept.push((key, data)),
        }
    }
    kept
}

/// The transaction that changed an inode last.
fn changed_in(inode: &[u8]) -> u64 {
    InodeItem::view(inode).map_or(0, |inode| inode.transid.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(offsets: &[u64]) -> Vec<SavedItem> {
        let key = |offset| Key::new(257, ItemType::DIR_INDEX, offset);
        offsets.iter().map(|&offset| (key(offset), vec![0; 3])).collect()
    }

    fn kept(offsets: &[u64]) -> Vec<u64> {
        let mut changes = Vec::new();
        let all = ascending(items(offsets), &mut changes);
        let all = without_duplicates(all, &mut changes);
        assert_eq!(all.len() + changes.len(), offsets.len());
        all.iter().map(|(key, _)| key.offset).collect()
    }

    #[test]
    fn items_out_of_order_are_left_out() {
        assert_eq!(kept(&[1, 2, 3]), [1, 2, 3]);
        assert_eq!(kept(&[1, 900, 3, 4]), [1, 3, 4]);
        assert_eq!(kept(&[5, 6, 1, 7, 7, 8]), [5, 6, 7, 8]);
        assert_eq!(kept(&[9]), [9]);
        assert_eq!(kept(&[]), [0u64; 0]);
    }
}
