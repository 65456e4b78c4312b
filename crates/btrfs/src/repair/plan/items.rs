//! The items of each new tree, in the order of their keys.

use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::chunk::{Chunk, DevExtent};
use offshoot_btrfs_format::extent::{EXTENT_FLAG_DATA, ParsedExtent};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::space::{BlockGroupItem, FreeSpaceHeader};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::Result;
use zerocopy::{FromZeros, IntoBytes};

use super::{ItemMap, PlacedTrees, RepairPlan, device_items};
use crate::check::KeyRange;
use crate::repair::spool::SpooledItems;
use crate::repair::{extents, free_space, saved};

/// Calls with each item of a tree.
type ItemVisitor<'v> = dyn FnMut(Key, &[u8]) -> Result<()> + 'v;

impl RepairPlan<'_, '_> {
    /// Calls `visit` with each item of a new tree, in order.
    pub(super) fn each_item(
        &self,
        id: TreeId,
        placed: &PlacedTrees,
        visit: &mut ItemVisitor<'_>,
    ) -> Result<()> {
        match id {
            TreeId::EXTENT => self.extent_items(placed, visit),
            TreeId::BLOCK_GROUP => {
                self.group_items(placed).iter().try_for_each(|(key, data)| visit(*key, data))
            }
            TreeId::FREE_SPACE => self.free_space_items(placed, visit),
            TreeId::DEV => self.changed_items(id, &self.device_extents(), &is_device_extent, visit),
            TreeId::CHUNK => self.changed_items(id, &self.device_items()?, &|_| false, visit),
            TreeId::CSUM => self.checksum_items(visit),
            TreeId::QUOTA => {
                let is_removed = |key: Key| self.quotas.removed.contains(&key);
                self.changed_items(id, &self.quotas.items, &is_removed, visit)
            }
            _ => self.root_items(placed, visit),
        }
    }

    fn extent_items(&self, placed: &PlacedTrees, visit: &mut ItemVisitor<'_>) -> Result<()> {
        let mut spooled = self.survey.items.read()?;
        let has_tree = self.ids.contains(&TreeId::BLOCK_GROUP);
        let groups = if has_tree { ItemMap::new() } else { self.group_items(placed) };
        let mut groups = groups.iter().peekable();
        let mut blocks =
            placed.by_address.values().filter_map(|at| self.block_item(placed, *at)).peekable();
        loop {
            let keys = [
                spooled.item().map(|(key, _)| key),
                groups.peek().map(|(key, _)| **key),
                blocks.peek().map(|(key, _)| *key),
            ];
            let Some(first) = keys.into_iter().flatten().min() else { return Ok(()) };
            if let Some((key, data)) = groups.next_if(|(key, _)| **key == first) {
                visit(*key, data)?;
            } else if let Some((key, data)) = blocks.next_if(|(key, _)| *key == first) {
                visit(key, &data)?;
            } else if let Some((key, data)) = spooled.item() {
                visit(key, data)?;
                spooled.advance()?;
            }
        }
    }

    /// The item of a new block.
    fn block_item(
        &self,
        placed: &PlacedTrees,
        (number, block): (usize, usize),
    ) -> Option<(Key, Vec<u8>)> {
        let tree = placed.trees.get(number)?;
        let (shaped, place) = (tree.shape.blocks.get(block)?, *tree.places.get(block)?);
        let head = (1, self.generation, false);
        let (key, mut data) =
            extents::block_head((Logical(place), shaped.level), head, shaped.first_key, self.form);
        data.push(ItemType::TREE_BLOCK_REF.0);
        data.extend_from_slice(&tree.id.0.to_le_bytes());
        Some((key, data))
    }

    fn group_items(&self, placed: &PlacedTrees) -> ItemMap {
        let item = |chunk: &Chunk| {
            let new = placed.blocks_in(chunk.start.0..chunk.end().0);
            let stays = self.survey.used.get(&chunk.start.0).copied().unwrap_or_default();
            let item = BlockGroupItem {
                used: (stays + new * u64::from(self.form.node_size)).into(),
                chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
                flags: chunk.flags.0.into(),
            };
            let key = Key::new(chunk.start.0, ItemType::BLOCK_GROUP_ITEM, chunk.length);
            (key, item.as_bytes().to_vec())
        };
        self.chunks.iter().map(item).collect()
    }

    fn free_space_items(&self, placed: &PlacedTrees, visit: &mut ItemVisitor<'_>) -> Result<()> {
        let node_size = u64::from(self.form.node_size);
        let mut spooled = self.survey.items.read()?;
        for chunk in &self.chunks {
            let (mut behind, end) = (chunk.start.0, chunk.end().0);
            let mut free: Vec<Range<u64>> = Vec::new();
            let mut use_range = |start: u64, len: u64| {
                if behind < start {
                    free.push(behind..start);
                }
                behind = start.saturating_add(len);
            };
            let mut new = placed.by_address.range(chunk.start.0..end).peekable();
            while let Some((key, _)) = spooled.item().filter(|(key, _)| key.objectid < end) {
                let len = match key.item_type {
                    ItemType::METADATA_ITEM => Some(node_size),
                    ItemType::EXTENT_ITEM => Some(key.offset),
                    _ => None,
                };
                if let Some(len) = len {
                    while let Some((at, _)) = new.next_if(|(at, _)| **at < key.objectid) {
                        use_range(*at, node_size);
                    }
                    use_range(key.objectid, len);
                }
                spooled.advance()?;
            }
            new.for_each(|(at, _)| use_range(*at, node_size));
            use_range(end, 0);
            free_space::items(chunk, &free, self.volume.sector_size(), visit)?;
        }
        Ok(())
    }

    /// The items of an old tree, without those that `is_left_out` takes, and with `changes`.
    fn changed_items(
        &self,
        id: TreeId,
        changes: &ItemMap,
        is_left_out: &dyn Fn(Key) -> bool,
        visit: &mut ItemVisitor<'_>,
    ) -> Result<()> {
        let old = match id {
            TreeId::ROOT => Some(self.volume.root_tree()),
            TreeId::CHUNK => Some(self.volume.chunk_tree()),
            _ => self.volume.tree(id),
        };
        let mut changes = changes.iter().peekable();
        let mut failure = None;
        if let Some(old) = old {
            let _ = self.volume.each_item(old, KeyRange::ALL, &mut |key, data| {
                let mut merge = || {
                    while let Some((new, data)) = changes.next_if(|(new, _)| **new < key) {
                        visit(*new, data)?;
                    }
                    match changes.next_if(|(new, _)| **new == key) {
                        Some((_, data)) => visit(key, data),
                        None if is_left_out(key) => Ok(()),
                        None => visit(key, data),
                    }
                };
                match merge() {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(error) => {
                        failure = Some(error);
                        ControlFlow::Break(())
                    }
                }
            });
        }
        failure.map_or(Ok(()), Err)?;
        changes.try_for_each(|(key, data)| visit(*key, data))
    }

    /// The checksums of the data that stays, each once.
    fn checksum_items(&self, visit: &mut ItemVisitor<'_>) -> Result<()> {
        let Some(old) = self.volume.tree(TreeId::CSUM) else { return Ok(()) };
        let (sector, len) = (self.volume.sector_size(), self.volume.superblock().checksum.len());
        let mut spooled = self.survey.items.read()?;
        let (mut behind, mut failure) = (0, None);
        let _ = self.volume.each_item(old, KeyRange::ALL, &mut |key, data| {
            let sectors = (data.len() / len) as u64;
            let end = key.offset.saturating_add(sectors * sector);
            let mut keep = || {
                let mut at = key.offset.max(behind);
                while at < end {
                    let Some(extent) = data_from(&mut spooled, at)? else { break };
                    let run = extent.start.max(at)..extent.end.min(end);
                    if run.start >= end {
                        break;
                    }
                    let from = small((run.start - key.offset) / sector) * len;
                    let to = small((run.end - key.offset) / sector) * len;
                    let kept = Key { offset: run.start, ..key };
                    visit(kept, data.get(from..to).unwrap_or_default())?;
                    (at, behind) = (run.end, run.end);
                }
                Ok(())
            };
            failure = keep().err();
            if failure.is_none() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        failure.map_or(Ok(()), Err)
    }

    fn device_extents(&self) -> ItemMap {
        let stripes = self.chunks.iter().flat_map(|chunk| {
            chunk.stripes.iter().map(move |stripe| {
                let extent = DevExtent {
                    chunk_tree: TreeId::CHUNK.0.into(),
                    chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
                    chunk_offset: chunk.start.0.into(),
                    length: chunk.stripe_bytes().into(),
                    chunk_tree_uuid: self.chunk_tree_uuid,
                };
                let key = Key::new(stripe.device.0, ItemType::DEV_EXTENT, stripe.physical.0);
                (key, extent.as_bytes().to_vec())
            })
        });
        stripes.collect()
    }

    /// The items of the members in the chunk tree, with the right counts.
    fn device_items(&self) -> Result<ItemMap> {
        let mut items = ItemMap::new();
        for (key, mut item) in device_items(self.volume)? {
            item.bytes_used = self.bytes_of_member(item.devid.get()).into();
            items.insert(key, item.as_bytes().to_vec());
        }
        Ok(items)
    }

    fn root_items(&self, placed: &PlacedTrees, visit: &mut ItemVisitor<'_>) -> Result<()> {
        let mut changes = self.saved.clone();
        let node_size = u64::from(self.form.node_size);
        for tree in &placed.trees {
            if matches!(tree.id, TreeId::ROOT | TreeId::CHUNK) {
                continue;
            }
            let key = Key::new(tree.id.0, ItemType::ROOT_ITEM, 0);
            let old = self.volume.with_item(self.volume.root_tree(), key, |data| {
                RootItem::parse(data).ok().map(|item| (item, data.len()))
            });
            let (mut item, len) = old.unwrap_or_else(|| {
                let new = RootItem { refs: 1.into(), ..RootItem::new_zeroed() };
                (new, size_of::<RootItem>())
            });
            let root = tree.root(self.generation);
            item.bytenr = root.logical.0.into();
            item.level = root.level;
            item.generation = self.generation.0.into();
            item.generation_v2 = self.generation.0.into();
            item.bytes_used = (tree.places.len() as u64 * node_size).into();
            changes.insert(key, item.as_bytes().get(..len).unwrap_or_default().to_vec());
        }
        let caches = self.space_caches();
        let is_left_out = |key: Key| {
            saved::is_saved(key)
                || key.objectid == objectid::FREE_SPACE
                || is_of_file(key) && caches.binary_search(&key.objectid).is_ok()
        };
        self.changed_items(TreeId::ROOT, &changes, &is_left_out, visit)
    }

    /// The inodes of the space caches of version 1.
    fn space_caches(&self) -> Vec<u64> {
        let mut inodes = Vec::new();
        let range = KeyRange::of_object(objectid::FREE_SPACE);
        self.volume.each_item(self.volume.root_tree(), range, &mut |_, data| {
            if let Ok(header) = FreeSpaceHeader::view(data) {
                inodes.push(header.location.objectid.get());
            }
            ControlFlow::Continue(())
        });
        inodes.retain(|&ino| TreeId(ino).is_subvolume());
        inodes.sort_unstable();
        inodes
    }
}

/// The first extent of data that ends behind `at`, at or behind the current item.
fn data_from(spooled: &mut SpooledItems<'_>, at: u64) -> Result<Option<Range<u64>>> {
    while let Some((key, data)) = spooled.item() {
        let is_data = key.item_type == ItemType::EXTENT_ITEM
            && ParsedExtent::parse(key.item_type, data)
                .is_ok_and(|extent| extent.item.flags.get() & EXTENT_FLAG_DATA != 0);
        let end = key.objectid.saturating_add(key.offset);
        if is_data && end > at {
            return Ok(Some(key.objectid..end));
        }
        spooled.advance()?;
    }
    Ok(None)
}

/// An offset in a buffer in memory.
fn small(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// Whether an item with this key describes an inode or its data.
fn is_of_file(key: Key) -> bool {
    matches!(key.item_type, ItemType::INODE_ITEM | ItemType::EXTENT_DATA)
}

fn is_device_extent(key: Key) -> bool {
    key.item_type == ItemType::DEV_EXTENT
}
