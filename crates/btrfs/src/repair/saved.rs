//! The superblocks before a repair, as items of the new root tree: what `--undo` writes back.
//!
//! ```text
//! (UNDO, PERSISTENT_ITEM, 0)                       what was repaired, and by which transaction
//! (UNDO, PERSISTENT_ITEM, device << 8 | piece)     a part of the primary superblock of a device
//! ```
//!
//! The kernel and `btrfs check` know items of this type in the device tree alone, and pass over
//! others. The object id is above those of subvolumes, so it does not count when the kernel looks
//! for a free id, and no structure of the format has it. A superblock is split, so that an item
//! fits into a leaf of any size.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{Generation, ItemType, Key, U64};
use offshoot_vfs::{Errno, Error, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::plan::ItemMap;
use crate::check::{CheckedVolume, KeyRange};

/// The object id of the items.
const UNDO: u64 = 0u64.wrapping_sub(0x4f53);

/// How many bytes of a superblock an item has.
const PIECE: usize = 2048;

/// The first bytes of the first item.
const MAGIC: [u8; 8] = *b"_OsUndo1";

/// The first item.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SavedHead {
    magic: [u8; 8],
    /// The transaction of the repair.
    generation: U64,
    /// How many tree blocks the old roots led to.
    blocks: U64,
}

/// What a repair has saved.
#[derive(Clone, Debug)]
pub(super) struct SavedState {
    /// The transaction of the repair.
    pub(super) generation: Generation,
    /// How many tree blocks the old roots led to.
    pub(super) blocks: u64,
    /// The primary superblock of each member as it was, by the number of the member.
    pub(super) superblocks: BTreeMap<u64, Vec<u8>>,
}

/// Whether an item of the root tree with this key was saved by a repair.
pub(super) fn is_saved(key: Key) -> bool {
    key.objectid == UNDO && key.item_type == ItemType::PERSISTENT_ITEM
}

/// The superblocks of the members, which the old roots and `blocks` tree blocks belong to, as items
/// of the root tree that the transaction `generation` writes.
///
/// # Errors
/// When a superblock cannot be read.
pub(super) fn items(
    volume: &CheckedVolume<'_>,
    generation: Generation,
    blocks: u64,
) -> Result<ItemMap> {
    let head = SavedHead { magic: MAGIC, generation: generation.0.into(), blocks: blocks.into() };
    let key = |offset| Key::new(UNDO, ItemType::PERSISTENT_ITEM, offset);
    let mut items = ItemMap::from([(key(0), head.as_bytes().to_vec())]);
    let [primary, ..] = SUPERBLOCK_OFFSETS;
    for member in volume.storage.members() {
        let Some(device) = &member.device else { continue };
        let mut bytes = vec![0; SUPERBLOCK_SIZE];
        device
            .read_at(primary, &mut bytes)
            .map_err(|e| Error::io(format!("{}: reading the superblock", device.name()), e))?;
        for (piece, data) in (0u64..).zip(bytes.chunks(PIECE)) {
            items.insert(key(member.id.0 << 8 | piece), data.to_vec());
        }
    }
    Ok(items)
}

/// What the last repair of `volume` has saved.
///
/// # Errors
/// `ENOENT` when there is nothing.
pub(super) fn find(volume: &CheckedVolume<'_>) -> Result<SavedState> {
    let mut head: Option<SavedHead> = None;
    let mut superblocks: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    volume.each_item(volume.root_tree(), KeyRange::of_object(UNDO), &mut |key, data| {
        if !is_saved(key) {
            return ControlFlow::Continue(());
        }
        if key.offset == 0 {
            head = SavedHead::read_from_bytes(data).ok().filter(|head| head.magic == MAGIC);
        } else {
            superblocks.entry(key.offset >> 8).or_default().extend_from_slice(data);
        }
        ControlFlow::Continue(())
    });
    superblocks.retain(|_, bytes| bytes.len() == SUPERBLOCK_SIZE);
    let head = head.filter(|_| !superblocks.is_empty()).ok_or_else(|| {
        Error::posix(Errno::NOENT, "the volume has no repair that can be undone or confirmed")
    })?;
    let (generation, blocks) = (Generation(head.generation.get()), head.blocks.get());
    Ok(SavedState { generation, blocks, superblocks })
}
