//! The superblocks that lead to the new trees, and the order in which everything is written.
//!
//! ```text
//! new blocks | barrier | primary superblocks | barrier | copies | barrier
//! ```
//!
//! The new blocks lie where nothing was. So until the superblocks are written a power cut leaves
//! the old state, and behind that the new one. A cut between the superblocks of two members leaves
//! the newer one of both states: the newest superblock describes the volume, and all members have
//! the blocks of both. Undoing a repair writes superblocks in the same order, and a cut in the
//! middle of that leaves the repaired state.

use std::sync::Arc;

use offshoot_btrfs_format::chunk::DevItem;
use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::superblock::{
    CompatRo, RootBackup, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SuperblockItem,
};
use offshoot_btrfs_format::{Generation, Logical, Physical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result};

use super::plan::{PlacedTrees, RepairPlan};
use super::staged::StagedDevice;
use crate::check::CheckedVolume;
use crate::storage::Member;
use crate::tree::{TreeRoot, root_backup};

/// The superblock of the repair, without the item of the member. `devices` are the items of all.
pub(super) fn new_superblock(
    plan: &RepairPlan<'_, '_>,
    placed: &PlacedTrees,
    devices: &[DevItem],
) -> Box<SuperblockItem> {
    let (volume, generation) = (plan.volume.superblock(), plan.generation);
    let mut item = Box::new(*plan.old);
    if let Some(root) = placed.get(TreeId::ROOT).map(|tree| tree.root(generation)) {
        item.root = root.logical.0.into();
        item.root_level = root.level;
    }
    if let Some(chunks) = placed.get(TreeId::CHUNK).map(|tree| tree.root(generation)) {
        item.chunk_root = chunks.logical.0.into();
        item.chunk_root_level = chunks.level;
        item.chunk_root_generation = generation.0.into();
    }
    if item.uuid_tree_generation == item.generation {
        item.uuid_tree_generation = generation.0.into();
    }
    if volume.compat_ro.has(CompatRo::FREE_SPACE_TREE) {
        let flags = volume.compat_ro.union(CompatRo::FREE_SPACE_TREE_VALID);
        item.compat_ro_flags = flags.0.into();
    }
    item.generation = generation.0.into();
    item.bytes_used = plan.bytes_used(placed).into();
    item.num_devices = (devices.len() as u64).into();
    let total = devices.iter().map(|device| device.total_bytes.get());
    item.total_bytes = total.fold(0, u64::saturating_add).into();
    let before = plan.old.generation.get();
    let newest = item.super_roots.iter().position(|one| one.tree_root_gen.get() == before);
    let next = newest.map_or(0, |at| (at + 1) % item.super_roots.len());
    let backup = backup(plan, placed, &item);
    if let Some(slot) = item.super_roots.get_mut(next) {
        *slot = backup;
    }
    item
}

/// The backup of the roots of the repair.
fn backup(plan: &RepairPlan<'_, '_>, placed: &PlacedTrees, item: &SuperblockItem) -> RootBackup {
    let root = |id| {
        let new = placed.get(id).map(|tree| tree.root(plan.generation));
        let none = TreeRoot { id, logical: Logical(0), level: 0, generation: Generation(0) };
        new.or_else(|| plan.volume.tree(id)).unwrap_or(none)
    };
    root_backup(item, [TreeId::EXTENT, TreeId::FS, TreeId::DEV, TreeId::CSUM].map(root))
}

/// Whether a member has a superblock at this offset.
pub(super) fn is_inside(member: &Member, offset: u64) -> bool {
    offset + SUPERBLOCK_SIZE as u64 <= member.total_bytes()
}

/// Writes `item` to a staged member at all its places. `primary` are the bytes of the primary one,
/// if they are known.
///
/// # Errors
/// When the file of the staged device cannot be written.
pub(super) fn stage(
    volume: &CheckedVolume<'_>,
    member: &Member,
    item: &SuperblockItem,
    primary: Option<&[u8]>,
) -> Result<()> {
    let Some(device) = &member.device else { return Ok(()) };
    for offset in SUPERBLOCK_OFFSETS.into_iter().filter(|&offset| is_inside(member, offset)) {
        let sealed = sealed_superblock(item, Physical(offset), volume.superblock().checksum);
        let is_primary = SUPERBLOCK_OFFSETS.first() == Some(&offset);
        let bytes = primary.filter(|_| is_primary).unwrap_or(&sealed[..]);
        device
            .write_at(offset, bytes)
            .map_err(|e| Error::io(format!("{}: writing the superblock", device.name()), e))?;
    }
    Ok(())
}

/// Writes what was staged to the devices.
///
/// # Errors
/// Those of the devices.
pub(super) fn write_through(devices: &[Arc<StagedDevice>]) -> Result<()> {
    let [primary, copies @ ..] = SUPERBLOCK_OFFSETS;
    let is_block = |offset: u64| !SUPERBLOCK_OFFSETS.contains(&offset);
    let steps: [&dyn Fn(u64) -> bool; 3] =
        [&is_block, &|offset| offset == primary, &|offset| copies.contains(&offset)];
    for step in steps {
        devices.iter().try_for_each(|device| device.write_through(step))?;
        devices.iter().try_for_each(|device| device.flush_through())?;
    }
    Ok(())
}

/// Writes a block to all its places.
///
/// # Errors
/// When no member that it goes to is there.
pub(super) fn write_block(
    volume: &CheckedVolume<'_>,
    logical: offshoot_btrfs_format::Logical,
    bytes: &[u8],
) -> Result<()> {
    let storage = &volume.storage;
    for (member, physical, part) in storage.write_places(logical, bytes.len() as u64)? {
        let range = usize::try_from(part.start).ok().zip(usize::try_from(part.end).ok());
        let part = range.and_then(|(from, to)| bytes.get(from..to));
        let device = storage.members().get(member).and_then(|member| member.device.as_ref());
        let (Some(part), Some(device)) = (part, device) else { continue };
        device
            .write_at(physical.0, part)
            .map_err(|e| Error::io(format!("{}: writing at {physical}", device.name()), e))?;
    }
    Ok(())
}

/// The devices over which a repair works, as those of a volume.
pub(super) fn as_devices(staged: &[Arc<StagedDevice>]) -> Vec<Arc<dyn BlockDevice>> {
    staged.iter().map(|device| device.clone() as Arc<dyn BlockDevice>).collect()
}
