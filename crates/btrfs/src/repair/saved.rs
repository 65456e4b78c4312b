//! The superblocks before a repair, as items of the new root tree: what `--undo` writes back.
//!
//! ```text
//! (UNDO, PERSISTENT_ITEM, 0)                       what was repaired, and by which transaction
//! (UNDO, PERSISTENT_ITEM, device << 8 | piece)     a part of the superblocks of a device
//! (UNDO, PERSISTENT_ITEM, 16 | piece)              a part of the superblock that was found
//! ```
//!
//! A repair saves the primary superblock of each device. If one of them does not verify, it saves
//! what was at all places of superblocks, one place behind the other, whatever that was. A sound
//! superblock that leads to the old trees is saved besides: that of a copy, or what a scan found.
//!
//! The kernel and `btrfs check` know items of this type in the device tree alone, and pass over
//! others. The object id is above those of subvolumes, so it does not count when the kernel looks
//! for a free id, and no structure of the format has it. A superblock is split, so that an item
//! fits into a leaf of any size.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{Generation, ItemType, Key, Physical, U64};
use offshoot_vfs::{Errno, Error, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::plan::ItemMap;
use super::superblocks;
use crate::check::{CheckedVolume, KeyRange};
use crate::storage::superblock_at;

/// The object id of the items.
const UNDO: u64 = 0u64.wrapping_sub(0x4f53);

/// How many bytes of a superblock an item has.
const PIECE: usize = 2048;

/// The offset of the key of the first part of the superblock that was found. No device has the
/// number 0.
const FOUND: u64 = 16;

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
    /// The superblocks of each member as they were, by the number of the member: the primary, and
    /// with [`found`](Self::found) all of them.
    pub(super) superblocks: BTreeMap<u64, Vec<u8>>,
    /// The superblock that was found elsewhere, which leads to the old trees.
    pub(super) found: Option<Vec<u8>>,
}

/// What a repair saves.
#[derive(Clone, Debug)]
pub(super) struct OldState {
    /// As those of [`SavedState`].
    pub(super) superblocks: BTreeMap<u64, Vec<u8>>,
    pub(super) found: Option<Vec<u8>>,
}

impl OldState {
    /// The primary superblocks of the members. If one does not verify, what is at all places of
    /// superblocks, and the superblock of the volume.
    ///
    /// # Errors
    /// When a superblock cannot be read.
    pub(super) fn read(volume: &CheckedVolume<'_>) -> Result<Self> {
        let [primary, ..] = SUPERBLOCK_OFFSETS;
        let devices = volume.storage.members().iter().filter_map(|one| one.device.as_deref());
        let are_all_sound = devices.into_iter().all(|one| superblock_at(one, primary).is_ok());
        let most = if are_all_sound { 1 } else { SUPERBLOCK_OFFSETS.len() };
        let mut superblocks: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for member in volume.storage.members() {
            let Some(device) = &member.device else { continue };
            let places = SUPERBLOCK_OFFSETS.into_iter().take(most);
            for at in places.filter(|at| superblocks::is_inside(member, *at)) {
                let mut bytes = vec![0; SUPERBLOCK_SIZE];
                device.read_at(at, &mut bytes).map_err(|e| {
                    Error::io(format!("{}: reading the superblock", device.name()), e)
                })?;
                superblocks.entry(member.id.0).or_default().extend_from_slice(&bytes);
            }
        }
        if are_all_sound {
            return Ok(Self { superblocks, found: None });
        }
        let found = volume.superblock();
        let found = sealed_superblock(&found.item, Physical(primary), found.checksum);
        Ok(Self { superblocks, found: Some(found.to_vec()) })
    }
}

/// Whether an item of the root tree with this key was saved by a repair.
pub(super) fn is_saved(key: Key) -> bool {
    key.objectid == UNDO && key.item_type == ItemType::PERSISTENT_ITEM
}

/// The old state, to which `blocks` tree blocks belong, as items of the root tree that the
/// transaction `generation` writes.
pub(super) fn items(old: &OldState, generation: Generation, blocks: u64) -> ItemMap {
    let head = SavedHead { magic: MAGIC, generation: generation.0.into(), blocks: blocks.into() };
    let key = |offset| Key::new(UNDO, ItemType::PERSISTENT_ITEM, offset);
    let mut items = ItemMap::from([(key(0), head.as_bytes().to_vec())]);
    let mut add = |from: u64, bytes: &[u8]| {
        for (piece, data) in (from..).zip(bytes.chunks(PIECE)) {
            items.insert(key(piece), data.to_vec());
        }
    };
    old.superblocks.iter().for_each(|(id, bytes)| add(id << 8, bytes));
    old.found.iter().for_each(|found| add(FOUND, found));
    items
}

/// Writes what was at all places of superblocks to staged devices, if it is saved.
///
/// # Errors
/// When the file of a staged device cannot be written.
pub(super) fn stage_bytes(volume: &CheckedVolume<'_>, saved: &SavedState) -> Result<()> {
    if saved.found.is_none() {
        return Ok(());
    }
    for member in volume.storage.members() {
        let bytes = saved.superblocks.get(&member.id.0).map(Vec::as_slice).unwrap_or_default();
        let places = SUPERBLOCK_OFFSETS.into_iter().zip(bytes.chunks(SUPERBLOCK_SIZE));
        let Some(device) = &member.device else { continue };
        for (at, bytes) in places.filter(|(at, _)| superblocks::is_inside(member, *at)) {
            device
                .write_at(at, bytes)
                .map_err(|e| Error::io(format!("{}: writing the superblock", device.name()), e))?;
        }
    }
    Ok(())
}

/// What the last repair of `volume` has saved.
///
/// # Errors
/// `ENOENT` when there is nothing.
pub(super) fn find(volume: &CheckedVolume<'_>) -> Result<SavedState> {
    let mut head: Option<SavedHead> = None;
    let mut superblocks: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut found: Option<Vec<u8>> = None;
    volume.each_item(volume.root_tree(), KeyRange::of_object(UNDO), &mut |key, data| {
        if !is_saved(key) {
            return ControlFlow::Continue(());
        }
        if key.offset == 0 {
            head = SavedHead::read_from_bytes(data).ok().filter(|head| head.magic == MAGIC);
        } else if key.offset >> 8 == 0 {
            found.get_or_insert_default().extend_from_slice(data);
        } else {
            superblocks.entry(key.offset >> 8).or_default().extend_from_slice(data);
        }
        ControlFlow::Continue(())
    });
    let most = if found.is_some() { SUPERBLOCK_OFFSETS.len() } else { 1 };
    let is_whole = |bytes: &[u8]| {
        bytes.len().is_multiple_of(SUPERBLOCK_SIZE)
            && (1..=most).contains(&(bytes.len() / SUPERBLOCK_SIZE))
    };
    superblocks.retain(|_, bytes| is_whole(bytes));
    let head = head.filter(|_| !superblocks.is_empty()).ok_or_else(|| {
        Error::posix(Errno::NOENT, "the volume has no repair that can be undone or confirmed")
    })?;
    let (generation, blocks) = (Generation(head.generation.get()), head.blocks.get());
    Ok(SavedState { generation, blocks, superblocks, found })
}
