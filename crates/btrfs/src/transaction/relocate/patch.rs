//! Changing the addresses in a block.

use std::collections::BTreeMap;

use offshoot_btrfs_format::block::{LeafItem, NodePointer};
use offshoot_btrfs_format::edit::{data_mut, pointer_mut};
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail, extent_type};
use offshoot_btrfs_format::{ItemType, Logical};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::FromBytes;

use super::Relocation;
use crate::block::TreeBlock;

/// How many pointers lead to each moved extent, by its old address.
pub(super) type FoundPointers = BTreeMap<u64, u64>;

impl Relocation<'_, '_> {
    /// The new address of a block that moves.
    fn new_block(&self, at: u64) -> Option<Logical> {
        self.blocks.get(&at).map(|block| block.to)
    }

    /// Changes all addresses of moved extents in `block`. `found` gets the address of each.
    ///
    /// # Errors
    /// When an item is cut. The block was verified, so this is a mistake of the caller.
    pub(super) fn patch(&self, block: &mut TreeBlock, mut found: impl FnMut(u64)) -> Result<()> {
        if !block.is_leaf() {
            let at = |pointer: &NodePointer| pointer.logical().0;
            let moved: Vec<_> = (0..)
                .zip(block.pointers())
                .filter_map(|(slot, one)| Some((slot, at(one), self.new_block(at(one))?)))
                .collect();
            for (slot, at, to) in moved {
                pointer_mut(block.bytes_mut(), slot).blockptr = to.0.into();
                found(at);
            }
            return Ok(());
        }
        if self.data.is_empty() {
            return Ok(());
        }
        let is_extent = |item: &LeafItem| item.key.get().item_type == ItemType::EXTENT_DATA;
        let extents: Vec<usize> = (0..)
            .zip(block.items())
            .filter_map(|(slot, item)| is_extent(item).then_some(slot))
            .collect();
        for slot in extents {
            let cut = || Error::corrupt(Structure::FileExtent, "it is cut");
            let data = data_mut(block.bytes_mut(), slot);
            let (head, rest) = FileExtentHead::mut_from_prefix(data).map_err(|_| cut())?;
            if head.extent_type == extent_type::INLINE {
                continue;
            }
            let (tail, _) = FileExtentTail::mut_from_prefix(rest).map_err(|_| cut())?;
            let at = tail.disk_bytenr.get();
            if let Some(moving) = self.data.get(&at) {
                tail.disk_bytenr = moving.to.0.into();
                found(at);
            }
        }
        Ok(())
    }
}
