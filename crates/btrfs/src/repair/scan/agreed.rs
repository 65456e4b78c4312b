//! The chunks that the structures agree on, when the chunk tree is lost in part.
//!
//! Three structures describe a chunk: an item of the chunk tree, of which older versions may be
//! left, the ranges of members in the device tree, and its block group. A chunk counts when two of
//! them say it and the third does not say otherwise; it may only be silent where it is damaged
//! itself. What nothing but an old leaf describes was removed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevExtent, DevItem};
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::{Generation, ItemType, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::FromBytes;

use crate::check::{CheckedVolume, KeyRange};
use crate::rescue::{DescribedChunk, DescribedVersions, chunk_of_ranges};

/// What the device tree and the block groups of a commit say of chunks.
#[derive(Debug, Default)]
pub(super) struct ChunkWitnesses {
    /// By chunk: device, offset and length of each range.
    ranges: BTreeMap<Logical, Vec<(u64, u64, u64)>>,
    are_ranges_whole: bool,
    /// By address: length and flags.
    groups: BTreeMap<Logical, (u64, BlockGroupFlags)>,
    are_groups_whole: bool,
}

impl ChunkWitnesses {
    /// Reads the trees of `volume`.
    pub(super) fn read(volume: &CheckedVolume<'_>) -> Self {
        let mut all = Self::default();
        if let Some(tree) = volume.tree(TreeId::DEV) {
            let walked = volume.each_item(tree, KeyRange::ALL, &mut |key, data| {
                if key.item_type == ItemType::DEV_EXTENT
                    && let Ok((extent, _)) = DevExtent::ref_from_prefix(data)
                {
                    let ranges = all.ranges.entry(Logical(extent.chunk_offset.get()));
                    ranges.or_default().push((key.objectid, key.offset, extent.length.get()));
                }
                ControlFlow::Continue(())
            });
            all.are_ranges_whole = walked.is_whole();
        }
        let groups = volume.tree(TreeId::BLOCK_GROUP).or_else(|| volume.tree(TreeId::EXTENT));
        if let Some(tree) = groups {
            let walked = volume.each_item(tree, KeyRange::ALL, &mut |key, data| {
                if key.item_type == ItemType::BLOCK_GROUP_ITEM
                    && let Ok(item) = BlockGroupItem::view(data)
                {
                    let flags = BlockGroupFlags(item.flags.get());
                    all.groups.insert(Logical(key.objectid), (key.offset, flags));
                }
                ControlFlow::Continue(())
            });
            all.are_groups_whole = walked.is_whole();
        }
        all
    }

    /// The chunks of the commit, and the generation of the oldest leaf that one of them comes from.
    /// `devices` are the items of the members, with the size of a sector.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first chunk on which the structures do not agree.
    pub(super) fn chunks(
        &self,
        described: &DescribedVersions,
        devices: (&[DevItem], u32),
    ) -> Result<(Vec<DescribedChunk>, Generation)> {
        let starts: BTreeSet<_> = self.ranges.keys().chain(self.groups.keys()).copied().collect();
        let (mut chunks, mut oldest) = (Vec::new(), Generation(u64::MAX));
        for start in starts {
            let (chunk, generation) = self.chunk(start, described, devices)?;
            let is_over = |before: &&DescribedChunk| before.chunk.end() > start;
            if let Some(before) = chunks.last().filter(is_over) {
                let what = format!("it overlaps the chunk at {}", before.chunk.start);
                return Err(contradiction(start, &what));
            }
            oldest = oldest.min(generation.unwrap_or(oldest));
            chunks.push(chunk);
        }
        if chunks.is_empty() {
            let what = "neither the device tree nor the block groups can be read; nothing was \
                        written: get the files out with recover";
            return Err(Error::corrupt(Structure::ChunkTree, what));
        }
        Ok((chunks, oldest))
    }

    fn chunk(
        &self,
        start: Logical,
        described: &DescribedVersions,
        devices: (&[DevItem], u32),
    ) -> Result<(DescribedChunk, Option<Generation>)> {
        let (ranges, group) = (self.ranges.get(&start), self.groups.get(&start));
        if ranges.is_none() && self.are_ranges_whole {
            return Err(contradiction(start, "it has a block group and no range of a device"));
        }
        if group.is_none() && self.are_groups_whole {
            return Err(contradiction(start, "it has ranges of devices and no block group"));
        }
        let fits = |chunk: &Chunk| {
            let fits_group = group.is_none_or(|group| *group == (chunk.length, chunk.flags));
            fits_group && ranges.is_none_or(|ranges| has_ranges(chunk, ranges))
        };
        let versions = described.chunks.get(&start).map(Vec::as_slice).unwrap_or_default();
        let mut fitting = versions.iter().filter(|(_, version)| fits(&version.chunk));
        if let Some((generation, chunk)) = fitting.next() {
            if fitting.any(|(other, _)| other == generation) {
                let what =
                    format!("two leaves of transaction {generation} describe it differently");
                return Err(contradiction(start, &what));
            }
            return Ok((chunk.clone(), Some(*generation)));
        }
        let (Some(ranges), Some(group)) = (ranges, group) else {
            return Err(contradiction(start, "one structure alone describes it"));
        };
        if let Some(chunk) = chunk_of_ranges(start, *group, ranges, devices) {
            return Ok((chunk, None));
        }
        let what = if versions.is_empty() {
            "no leaf of the chunk tree describes it, and the order of its stripes is not known"
        } else {
            "leaves of the chunk tree, the device tree and its block group say different things"
        };
        Err(contradiction(start, what))
    }
}

/// Whether the stripes of a chunk are these ranges, in any order.
fn has_ranges(chunk: &Chunk, ranges: &[(u64, u64, u64)]) -> bool {
    let len = chunk.stripe_bytes();
    let stripes = chunk.stripes.iter().map(|stripe| (stripe.device.0, stripe.physical.0, len));
    let mut stripes: Vec<_> = stripes.collect();
    let mut ranges = ranges.to_vec();
    stripes.sort_unstable();
    ranges.sort_unstable();
    stripes == ranges
}

fn contradiction(start: Logical, what: &str) -> Error {
    let what = format!("{what}; nothing was written: get the files out with recover");
    Error::corrupt_at(Structure::Chunk, start.0, what)
}
