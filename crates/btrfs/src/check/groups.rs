//! Each block group on its own: references, extents, free space, checksums.
//!
//! The logical space is cut into partitions of whole block groups, and all cores take partitions.
//! In each, what is compared comes in the order of addresses, so only a step of each stream is in
//! memory:
//!
//! ```text
//! records of the walk ─┐
//! extent tree ─────────┴─> extents ─┬─> space of the group: used bytes, overlaps, kinds
//!                                   ├─> free-space tree
//! checksum tree ────────────────────┴─> checksums <── records of data that files use
//! ```
//!
//! What could not be read is no finding of its own here: an extent without references, say, may
//! be referred to from a bad block ([`references::Doubt`]).

mod cache;
mod checksums;
mod extents;
mod free_space;
mod items;
mod references;
mod space;
mod stream;
mod verify;

use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::{CompatRo, Incompat};
use offshoot_btrfs_format::{ItemType, Logical, TreeId};
use offshoot_kit::cores;
use offshoot_vfs::{Error, Result};
use parking_lot::Mutex;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::volume::{CheckedVolume, KeyRange};
use super::walk::{Walk, WalkedVolume};
use crate::tree::TreeRoot;
use cache::SpaceCacheCheck;
use checksums::{ChecksumCheck, UseCheck};
use extents::{CheckedExtent, ExtentEntry, ExtentReader};
use free_space::FreeSpaceCheck;
use references::{Doubt, ReferenceCheck, UsedExtent};
use space::{FreeSpaceRecord, SpaceCheck, SpaceTotals};
use stream::ItemStream;
use verify::BadData;
pub(crate) use verify::bad_data_in;

/// About how many partitions there are at most.
const MOST_PARTITIONS: usize = 128;

/// What was looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockGroupCounts {
    /// Extents of data.
    pub(super) data_extents: u64,
    /// Bytes of data that were compared with checksums.
    pub(super) data_bytes: u64,
}

/// The addresses at which the records of the walk are cut: starts of block groups.
pub(super) fn bounds(volume: &CheckedVolume<'_>) -> Vec<u64> {
    let starts: Vec<_> = volume.storage.chunks().map(|chunk| chunk.start.0).collect();
    let step = starts.len().div_ceil(MOST_PARTITIONS).max(1);
    starts.into_iter().step_by(step).filter(|&start| start > 0).collect()
}

/// Checks all block groups.
///
/// # Errors
/// When a file of records cannot be read, or the caller has ended the check.
pub(super) fn check(walk: &Walk<'_, '_>, walked: &WalkedVolume) -> Result<BlockGroupCounts> {
    let volume = walk.volume;
    let Some(extents) = volume.tree(TreeId::EXTENT) else { return Ok(BlockGroupCounts::default()) };
    let checksums = volume.tree(TreeId::CSUM);
    let bad = match checksums.filter(|_| volume.options.verifies_data) {
        Some(checksums) => {
            // What is used and no tree block is data. Some of it may have no checksums.
            let blocks = walked.blocks.saturating_mul(volume.node_size());
            let used = volume.superblock().item.bytes_used.get();
            volume.expect_bytes(used.saturating_sub(blocks));
            verify::bad_data(volume, checksums)?
        }
        None => BadData::default(),
    };
    let check = GroupsCheck {
        walk,
        extents,
        groups: groups_tree(volume, extents),
        checksums,
        free: free_space_tree(volume),
        chunks: volume.storage.chunks().collect(),
        doubt: Doubt::of(walk, walked),
        bad,
    };
    check.run()
}

/// The tree with the items of block groups.
fn groups_tree(volume: &CheckedVolume<'_>, extents: TreeRoot) -> Option<TreeRoot> {
    if volume.superblock().compat_ro.has(CompatRo::BLOCK_GROUP_TREE) {
        return volume.tree(TreeId::BLOCK_GROUP);
    }
    Some(extents)
}

/// The free-space tree, if the volume has one that counts. The kernel makes one anew that is not
/// marked as valid.
fn free_space_tree(volume: &CheckedVolume<'_>) -> Option<TreeRoot> {
    let valid = CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID);
    let superblock = volume.superblock();
    if !superblock.compat_ro.has(valid) || superblock.incompat.has(Incompat::ZONED) {
        return None;
    }
    volume.tree(TreeId::FREE_SPACE)
}

/// The check of all partitions.
struct GroupsCheck<'w, 'c> {
    walk: &'w Walk<'w, 'c>,
    extents: TreeRoot,
    groups: Option<TreeRoot>,
    checksums: Option<TreeRoot>,
    free: Option<TreeRoot>,
    chunks: Vec<Chunk>,
    doubt: Doubt,
    bad: BadData,
}

/// What partitions add up to.
#[derive(Clone, Copy, Debug, Default)]
struct PartitionSums {
    data_extents: u64,
    space: SpaceTotals,
}

impl GroupsCheck<'_, '_> {
    fn run(&self) -> Result<BlockGroupCounts> {
        let volume = self.walk.volume;
        let sums = Mutex::new(PartitionSums::default());
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        cores::for_each(self.walk.references.partitions(), &|index| {
            if volume.is_over() || failure.lock().is_some() {
                return;
            }
            match self.check_partition(index) {
                Ok(own) => {
                    let mut sums = sums.lock();
                    sums.data_extents += own.data_extents;
                    sums.space.used = sums.space.used.saturating_add(own.space.used);
                    sums.space.is_uncertain |= own.space.is_uncertain;
                }
                Err(error) => {
                    failure.lock().get_or_insert(error);
                }
            }
        });
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        volume.require_going_on()?;
        let PartitionSums { data_extents, space } = sums.into_inner();
        let counted = volume.superblock().item.bytes_used.get();
        if !space.is_uncertain && counted != space.used {
            volume.findings.differs(
                BtrfsFindingCode::SuperblockCounter,
                BtrfsFindingPlace::Volume,
                "bytes used in all block groups",
                space.used,
                counted,
            );
        }
        Ok(BlockGroupCounts { data_extents, data_bytes: self.bad.bytes })
    }

    fn check_partition(&self, index: usize) -> Result<PartitionSums> {
        let (walk, volume) = (self.walk, self.walk.volume);
        let range = walk.references.range(index);
        let from = self.chunks.partition_point(|chunk| chunk.start.0 < range.start);
        let to = self.chunks.partition_point(|chunk| chunk.start.0 < range.end);
        let chunks = self.chunks.get(from..to).unwrap_or_default();
        let groups = match self.groups {
            Some(tree) => items::groups(volume, tree, chunks),
            None => chunks.iter().map(|chunk| space::CheckedGroup::new(chunk, None)).collect(),
        };
        if let Some(tree) = self.groups.filter(|tree| tree.id != self.extents.id) {
            let keys = KeyRange::of_objects(range.start, range.end);
            volume.each_item(tree, keys, &mut |key, _| {
                if key.item_type == ItemType::BLOCK_GROUP_ITEM {
                    items::require_chunk(volume, tree, chunks, key);
                }
                ControlFlow::Continue(())
            });
        }
        PartitionCheck {
            volume,
            extents: self.extents,
            chunks,
            has_group_items: self.groups.is_some_and(|tree| tree.id == self.extents.id),
            references: ReferenceCheck {
                findings: &volume.findings,
                doubt: &self.doubt,
                visited: &walk.visited,
                records: walk.references.take(index)?,
                node_size: volume.node_size(),
            },
            space: SpaceCheck::new(volume, groups, self.free_space(&range)),
            checksums: self.checksum_check(index, &range)?,
            data_extents: 0,
        }
        .run(&range)
    }

    fn free_space(&self, range: &Range<u64>) -> Option<FreeSpaceRecord<'_>> {
        let volume = self.walk.volume;
        let Some(tree) = self.free else {
            let in_use = cache::are_in_use(volume);
            return in_use.then(|| FreeSpaceRecord::Cache(SpaceCacheCheck::new(volume)));
        };
        let keys = KeyRange::of_objects(range.start, range.end);
        let stream = ItemStream::new(volume, tree, keys);
        let check = FreeSpaceCheck::new(&volume.findings, stream, volume.sector_size());
        Some(FreeSpaceRecord::Tree(Box::new(check)))
    }

    fn checksum_check(
        &self,
        index: usize,
        range: &Range<u64>,
    ) -> Result<Option<ChecksumCheck<'_>>> {
        let volume = self.walk.volume;
        let Some(tree) = self.checksums else { return Ok(None) };
        let uses = UseCheck::new(
            &volume.findings,
            self.walk.uses.take(index)?,
            range.start,
            self.doubt.hides_files(),
            &self.bad,
        );
        Ok(Some(ChecksumCheck::new(volume, tree, range.clone(), uses)))
    }
}

/// The check of a partition.
struct PartitionCheck<'p> {
    volume: &'p CheckedVolume<'p>,
    extents: TreeRoot,
    chunks: &'p [Chunk],
    /// Whether items of block groups are in the extent tree.
    has_group_items: bool,
    references: ReferenceCheck<'p>,
    space: SpaceCheck<'p>,
    checksums: Option<ChecksumCheck<'p>>,
    data_extents: u64,
}

impl PartitionCheck<'_> {
    fn run(mut self, range: &Range<u64>) -> Result<PartitionSums> {
        let volume = self.volume;
        let keys = KeyRange::of_objects(range.start, range.end);
        let stream = ItemStream::new(volume, self.extents, keys);
        let mut reader = ExtentReader::new(stream, volume.node_size(), volume.scratch());
        while let Some(entry) = reader.next()? {
            match entry {
                ExtentEntry::Gap { start, end } => {
                    let gap = start.max(range.start)..end.min(range.end);
                    self.pass_gap(&gap)?;
                }
                ExtentEntry::Extent(extent) => self.extent(&extent, &mut reader)?,
                ExtentEntry::Group(key) => {
                    if self.has_group_items {
                        items::require_chunk(volume, self.extents, self.chunks, key);
                    }
                }
                ExtentEntry::Malformed { key, len, problem } => {
                    let place = BtrfsFindingPlace::Item { tree: self.extents.id, key };
                    volume.findings.add(BtrfsFindingCode::ExtentItem, place, problem);
                    let end = key.objectid.saturating_add(len.max(1)).min(range.end);
                    self.pass_gap(&(key.objectid..end))?;
                }
            }
            if volume.is_over() {
                break;
            }
        }
        self.missing_before(range.end)?;
        self.space.finish();
        if let Some(checksums) = &mut self.checksums {
            checksums.finish()?;
        }
        Ok(PartitionSums { data_extents: self.data_extents, space: self.space.totals })
    }

    /// Passes over addresses of which it is not known what extents have them.
    fn pass_gap(&mut self, gap: &Range<u64>) -> Result<()> {
        self.missing_before(gap.start)?;
        while let Some(at) = self.references.next_address().filter(|&at| at < gap.end) {
            self.references.skip(Logical(at))?;
        }
        if gap.is_empty() {
            return Ok(());
        }
        self.space.add_unknown(gap.clone());
        match &mut self.checksums {
            Some(checksums) => checksums.add_extent(gap.clone()),
            None => Ok(()),
        }
    }

    /// Takes the extents before `end` that have no extent items.
    fn missing_before(&mut self, end: u64) -> Result<()> {
        while let Some(at) = self.references.next_address().filter(|&at| at < end) {
            let Some(extent) = self.references.take_missing()? else { break };
            self.add(at, extent, false)?;
        }
        Ok(())
    }

    fn extent(&mut self, extent: &CheckedExtent, reader: &mut ExtentReader<'_>) -> Result<()> {
        self.missing_before(extent.start)?;
        let used = self.references.next_extent();
        let used = used.filter(|_| self.references.next_address() == Some(extent.start));
        let Some(item) = &extent.item else {
            // References behind an extent item that cannot be read.
            if !extent.is_whole {
                return self.references.skip(Logical(extent.start));
            }
            if used.is_none() {
                let place = BtrfsFindingPlace::Logical(Logical(extent.start));
                let problem = format!("{} references without an extent item", extent.listed);
                self.volume.findings.add(BtrfsFindingCode::ExtraReference, place, problem);
            }
            return Ok(());
        };
        self.references.compare(extent, item, reader.references())?;
        self.data_extents += u64::from(!item.is_block);
        let is_of_chunk_tree = used.and_then(|used| used.is_of_chunk_tree);
        let is_data = !item.is_block;
        // The space is in use as far as the trees say it, whatever the item says.
        let used = used.filter(|used| used.is_data == is_data);
        let len = used.map_or(item.len, |used| used.len);
        let own = UsedExtent { len, is_data, is_of_chunk_tree };
        self.add(extent.start, own, true)
    }

    fn add(&mut self, start: u64, extent: UsedExtent, has_item: bool) -> Result<()> {
        self.space.add(start, extent, has_item);
        match &mut self.checksums {
            Some(checksums) if extent.is_data => {
                checksums.add_extent(start..start.saturating_add(extent.len))
            }
            _ => Ok(()),
        }
    }
}
