//! What the trees use: the items of all extents that stay, and the places that are free.
//!
//! A place for a new block is free when nothing that the old roots lead to is there, whether it
//! stays or not, and no superblock lies over it. So the old trees stay whole.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::check as format_check;
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, Profile};
use offshoot_btrfs_format::extent::{EXTENT_FLAG_DATA, InlineRef, ParsedExtent, RefOwner};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};

use super::extents::{self, ExtentFacts, ExtentForm};
use super::spool::{ItemSpool, SpoolWriter};
use crate::block::TreeBlock;
use crate::check::{CheckedVolume, ExtentWithOwners, KeyRange, ReachedVolume, ReferenceTarget};

/// What the trees use.
pub(super) struct SpaceSurvey {
    /// The items of all extents that stay.
    pub(super) items: ItemSpool,
    /// The bytes that stay in use, by the start of the chunk.
    pub(super) used: BTreeMap<u64, u64>,
    /// Free places for blocks of all trees but the chunk tree, ascending, in whole blocks.
    pub(super) metadata: Vec<Range<u64>>,
    /// The same for blocks of the chunk tree.
    pub(super) system: Vec<Range<u64>>,
}

impl SpaceSurvey {
    /// Leaves only those free places that were free in `before`, too.
    pub(super) fn keep_off(&mut self, before: &Self) {
        self.metadata = common(&self.metadata, &before.metadata);
        self.system = common(&self.system, &before.system);
    }

    /// Leaves only those free places for blocks of all trees but the chunk tree that lie in `free`,
    /// whose ranges ascend.
    pub(super) fn keep_metadata_in(&mut self, free: &[Range<u64>]) {
        self.metadata = common(&self.metadata, free);
    }
}

/// What two lists of ranges have in common. Both ascend.
fn common(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut common, mut others) = (Vec::new(), other.iter().peekable());
    for range in one {
        while let Some(other) = others.peek().filter(|other| other.start < range.end) {
            let (from, to) = (range.start.max(other.start), range.end.min(other.end));
            if from < to {
                common.push(from..to);
            }
            if other.end > range.end {
                break;
            }
            others.next();
        }
    }
    common
}

/// The addresses at which the walk must cut its records: the starts of the chunks.
pub(super) fn bounds(chunks: &[Chunk]) -> Vec<u64> {
    chunks.iter().map(|chunk| chunk.start.0).collect()
}

/// Looks at all extents. The blocks of the trees in `replaced` do not stay.
///
/// # Errors
/// When extents overlap or lie outside of the chunks, a file cannot be written, or the caller has
/// ended the repair.
pub(super) fn survey(
    volume: &CheckedVolume<'_>,
    reached: &ReachedVolume<'_, '_>,
    chunks: &[Chunk],
    replaced: &BTreeSet<TreeId>,
    form: ExtentForm,
) -> Result<SpaceSurvey> {
    reached.each_extent(0, &mut |extent| Err(outside(extent.logical)))?;
    let mut items = SpoolWriter::new(&volume.scratch())?;
    let (mut used, mut metadata, mut system) = (BTreeMap::new(), Vec::new(), Vec::new());
    for (index, chunk) in chunks.iter().enumerate() {
        volume.require_going_on()?;
        let mut group = GroupSurvey {
            chunk,
            form,
            behind: chunk.start.0,
            used: 0,
            left_out: chunk.left_out_ranges(),
            free: Vec::new(),
        };
        let known = known_data(volume, chunk);
        reached.each_extent(index + 1, &mut |extent| {
            group.pass(extent)?;
            let Some(extent) = kept(extent, replaced) else { return Ok(()) };
            let facts = facts(volume, &extent, &known, form);
            group.used += group.len(&extent);
            extents::items(&extent, &facts, form)
                .iter()
                .try_for_each(|(key, data)| items.push(*key, data))
        })?;
        group.add_free(chunk.end().0);
        used.insert(chunk.start.0, group.used);
        if takes_blocks(chunk, BlockGroupFlags::SYSTEM) {
            system.append(&mut group.free);
        } else if takes_blocks(chunk, BlockGroupFlags::METADATA) {
            metadata.append(&mut group.free);
        }
    }
    Ok(SpaceSurvey { items: items.finish()?, used, metadata, system })
}

/// Whether new blocks may go to the chunk.
fn takes_blocks(chunk: &Chunk, kind: u64) -> bool {
    let has_parity = matches!(chunk.profile, Profile::Raid5 | Profile::Raid6);
    chunk.flags.0 & kind != 0 && !has_parity
}

fn outside(logical: Logical) -> Error {
    let problem = "something refers to it, and no chunk has it";
    Error::corrupt_at(Structure::ExtentItem, logical.0, problem)
}

/// The survey of a block group.
struct GroupSurvey<'c> {
    chunk: &'c Chunk,
    form: ExtentForm,
    /// Everything in front of this address was looked at.
    behind: u64,
    used: u64,
    left_out: Vec<Range<Logical>>,
    free: Vec<Range<u64>>,
}

impl GroupSurvey<'_> {
    fn len(&self, extent: &ExtentWithOwners) -> u64 {
        match extent.target {
            ReferenceTarget::Block { .. } => self.form.node_size.into(),
            ReferenceTarget::Data { len } => len,
        }
    }

    /// Notes that an extent is there.
    fn pass(&mut self, extent: &ExtentWithOwners) -> Result<()> {
        let (start, len) = (extent.logical.0, self.len(extent));
        let end = start.saturating_add(len);
        if end > self.chunk.end().0 {
            return Err(outside(extent.logical));
        }
        if start < self.behind {
            let problem = "two extents that are in use overlap";
            return Err(Error::corrupt_at(Structure::ExtentItem, start, problem));
        }
        let fits = match extent.target {
            ReferenceTarget::Block { .. } => self.chunk.flags.has_metadata(),
            ReferenceTarget::Data { .. } => self.chunk.flags.has_data(),
        };
        if !fits {
            let problem =
                format!("an extent lies in a block group for {}", self.chunk.flags.kind());
            return Err(Error::corrupt_at(Structure::ExtentItem, start, problem));
        }
        self.add_free(start);
        self.behind = end;
        Ok(())
    }

    /// Adds the free places between what was looked at and `end`.
    fn add_free(&mut self, end: u64) {
        let mut from = self.behind;
        let node_size = u64::from(self.form.node_size);
        let mut add = |from: u64, to: u64| {
            let (from, to) = (from.next_multiple_of(node_size), to / node_size * node_size);
            if from < to {
                self.free.push(from..to);
            }
        };
        for range in &self.left_out {
            if range.start.0 < end && from < range.end.0 {
                add(from, range.start.0);
                from = range.end.0;
            }
        }
        add(from, end);
    }
}

/// The extent without the references that do not stay; `None` when it has no others. Space caches
/// of version 1 are files of the root tree. The kernel makes them anew.
fn kept(extent: &ExtentWithOwners, replaced: &BTreeSet<TreeId>) -> Option<ExtentWithOwners> {
    let mut extent = extent.clone();
    extent.owners.retain(|(owner, _)| match owner {
        RefOwner::Tree { root: tree } => !replaced.contains(tree),
        RefOwner::File { root, .. } => *root != TreeId::ROOT,
        _ => true,
    });
    (!extent.owners.is_empty()).then_some(extent)
}

/// What the old extent tree says of data, by address.
type KnownData = BTreeMap<u64, (u64, ExtentFacts)>;

fn known_data(volume: &CheckedVolume<'_>, chunk: &Chunk) -> KnownData {
    let mut known = KnownData::new();
    let tree = volume.tree(TreeId::EXTENT).filter(|_| chunk.flags.has_data());
    let Some(tree) = tree else { return known };
    let range = KeyRange::of_objects(chunk.start.0, chunk.end().0);
    let newest = volume.superblock().generation.0;
    volume.each_item(tree, range, &mut |key, data| {
        if key.item_type == ItemType::EXTENT_ITEM
            && let Ok(parsed) = ParsedExtent::parse(key.item_type, data)
            && parsed.item.flags.get() & EXTENT_FLAG_DATA != 0
        {
            let owner = parsed.inline_refs().find_map(|reference| match reference {
                Ok(InlineRef::Owner(root)) => Some(TreeId(root)),
                _ => None,
            });
            let generation = Some(parsed.item.generation.get()).filter(|&one| one <= newest);
            let facts = ExtentFacts {
                generation: generation.unwrap_or_default(),
                owner,
                first_key: Key::MIN,
            };
            known.insert(key.objectid, (key.offset, facts));
        }
        ControlFlow::Continue(())
    });
    known
}

/// What the references to an extent do not tell.
fn facts(
    volume: &CheckedVolume<'_>,
    extent: &ExtentWithOwners,
    known: &KnownData,
    form: ExtentForm,
) -> ExtentFacts {
    match extent.target {
        ReferenceTarget::Data { len } => {
            let found = known.get(&extent.logical.0).filter(|(known, _)| *known == len);
            found.map(|(_, facts)| *facts).unwrap_or_default()
        }
        ReferenceTarget::Block { .. } if form.is_skinny => ExtentFacts::default(),
        ReferenceTarget::Block { .. } => {
            let geometry = volume.storage.geometry();
            let verify = |bytes: &[u8]| format_check::verify(bytes, geometry, extent.logical);
            // A block that cannot be read is cut off, and the survey of the result has no item
            // of it.
            let bytes = volume.storage.find_block(extent.logical, verify).ok();
            let block = bytes.map(TreeBlock::verified).filter(|block| !block.is_empty());
            let first_key = block.map_or(Key::MIN, |block| block.key(0));
            ExtentFacts { first_key, ..ExtentFacts::default() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_lists_of_ranges_have_in_common() {
        let one = [0..10, 20..30, 40..50, 60..70];
        let other = [5..25, 26..27, 28..45, 50..60, 65..66];
        let expected = [5..10, 20..25, 26..27, 28..30, 40..45, 65..66];
        assert_eq!(common(&one, &other), expected);
        assert_eq!(common(&other, &one), expected);
    }
}
