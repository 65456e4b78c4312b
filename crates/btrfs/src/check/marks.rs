//! What the extent tree says of tree blocks, which the walk through the trees needs first.
//!
//! A block has *full back references* when the references of what it points to name its address
//! and not its tree. Only its extent item says so. The extent tree is in the order of addresses,
//! so the items of tree blocks are together: those of the block groups for metadata.

use std::ops::ControlFlow;

use offshoot_btrfs_format::extent::{
    EXTENT_FLAG_FULL_BACKREF, EXTENT_FLAG_TREE_BLOCK, ParsedExtent,
};
use offshoot_btrfs_format::{ItemType, Logical, TreeId};
use offshoot_kit::cores;

use super::addresses::AddressSet;
use super::volume::{CheckedVolume, KeyRange, Walked};

/// What the extent tree says of tree blocks.
pub(super) struct BlockMarks {
    /// The blocks with full back references.
    full: AddressSet,
    /// Whether all extent items of tree blocks could be read. If not, it is not known which blocks
    /// have full back references, and references cannot be compared.
    pub(super) is_whole: bool,
}

impl BlockMarks {
    /// Reads them.
    pub(super) fn read(volume: &CheckedVolume<'_>) -> Self {
        let full = AddressSet::default();
        let Some(extents) = volume.tree(TreeId::EXTENT) else {
            return Self { full, is_whole: false };
        };
        let chunks: Vec<_> =
            volume.storage.chunks().filter(|chunk| chunk.flags.has_metadata()).collect();
        let is_whole = std::sync::atomic::AtomicBool::new(true);
        cores::for_each(chunks.len(), &|index| {
            let Some(chunk) = chunks.get(index) else { return };
            let range = KeyRange::of_objects(chunk.start.0, chunk.end().0);
            let mut blocks = 0;
            let walked = volume.each_item(extents, range, &mut |key, data| {
                let is_extent =
                    [ItemType::EXTENT_ITEM, ItemType::METADATA_ITEM].contains(&key.item_type);
                let parsed = is_extent.then(|| ParsedExtent::parse(key.item_type, data).ok());
                let flags = parsed.flatten().map_or(0, |extent| extent.item.flags.get());
                if flags & EXTENT_FLAG_TREE_BLOCK != 0 {
                    blocks += 1;
                    if flags & EXTENT_FLAG_FULL_BACKREF != 0 {
                        full.insert(Logical(key.objectid));
                    }
                }
                ControlFlow::Continue(())
            });
            volume.expect_bytes(blocks * volume.node_size());
            if walked == Walked::InPart {
                is_whole.store(false, std::sync::atomic::Ordering::Relaxed);
            }
        });
        Self { full, is_whole: is_whole.into_inner() }
    }

    /// Marks of blocks that are added one by one.
    pub(super) fn empty() -> Self {
        Self { full: AddressSet::default(), is_whole: true }
    }

    /// Notes that the block at `logical` has full back references.
    pub(super) fn add(&self, logical: Logical) {
        self.full.insert(logical);
    }

    /// Whether the block at `logical` has full back references.
    pub(super) fn has_full_references(&self, logical: Logical) -> bool {
        self.full.contains(logical)
    }
}
