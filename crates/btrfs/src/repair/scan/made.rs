//! A superblock that is made from what was found.
//!
//! The label of the volume, a fsid that was changed later ([`METADATA_UUID`]) and what `fsync`
//! wrote since the last commit are in superblocks alone, so they are lost.
//!
//! [`METADATA_UUID`]: offshoot_btrfs_format::superblock::Incompat::METADATA_UUID

use offshoot_btrfs_format::Physical;
use offshoot_btrfs_format::chunk::DevItem;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::{
    MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SuperblockItem,
};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::FromZeros;

use std::sync::Arc;

use super::chunk_tree::ChunkTreeItems;
use super::search::{FoundBlock, ScannedVolume};
use super::stored::fill_array;
use crate::repair::staged::StagedDevice;
use crate::tree::TreeRoot;

/// The flag of a superblock that a commit wrote.
const SUPER_FLAG_WRITTEN: u64 = 1;

/// The superblock of the commit with this root, without chunk tree and system chunks. Counters that
/// a repair computes are zero.
pub(super) fn superblock(
    scanned: &ScannedVolume,
    items: &ChunkTreeItems,
    root: &FoundBlock,
) -> SuperblockItem {
    let total = items.devices.iter().map(|device| device.total_bytes.get());
    SuperblockItem {
        fsid: scanned.fsid.into_bytes(),
        flags: SUPER_FLAG_WRITTEN.into(),
        magic: MAGIC,
        generation: root.generation.0.into(),
        root: root.logical.0.into(),
        root_level: root.level,
        total_bytes: total.fold(0, u64::saturating_add).into(),
        root_dir_objectid: objectid::ROOT_TREE_DIR.into(),
        num_devices: (items.devices.len() as u64).into(),
        sectorsize: items.sector_size.into(),
        nodesize: scanned.node_size.into(),
        leafsize: scanned.node_size.into(),
        stripesize: items.sector_size.into(),
        incompat_flags: scanned.features.incompat(scanned.node_size, &items.chunks).0.into(),
        csum_type: scanned.checksum.to_disk().into(),
        ..SuperblockItem::new_zeroed()
    }
}

/// The superblock `known`, made to lead to an older root. What `fsync` wrote since is lost.
pub(super) fn with_root(known: &SuperblockItem, root: &FoundBlock) -> SuperblockItem {
    SuperblockItem {
        generation: root.generation.0.into(),
        root: root.logical.0.into(),
        root_level: root.level,
        log_root: 0.into(),
        log_root_level: 0,
        ..*known
    }
}

/// The superblock with this chunk tree.
///
/// # Errors
/// When the system chunks do not fit into it.
pub(super) fn with_chunk_tree(
    item: &SuperblockItem,
    items: &ChunkTreeItems,
    root: TreeRoot,
) -> Result<Box<SuperblockItem>> {
    let mut item = Box::new(*item);
    item.chunk_root = root.logical.0.into();
    item.chunk_root_level = root.level;
    item.chunk_root_generation = root.generation.0.into();
    fill_array(&mut item, &items.system_items(), false).ok_or_else(|| {
        let what = "the system chunks do not fit into a superblock; nothing was written";
        Error::corrupt(Structure::SystemChunkArray, what)
    })?;
    Ok(item)
}

/// Writes a superblock to all its places on staged devices, whose items are `order`.
///
/// # Errors
/// When the file of a staged device cannot be written.
pub(super) fn stage(
    item: &SuperblockItem,
    (staged, order): (&[Arc<StagedDevice>], &[DevItem]),
    checksum: ChecksumType,
) -> Result<()> {
    for (device, own) in staged.iter().zip(order) {
        let end = own.total_bytes.get().min(device.size_bytes());
        let fits = |at: &u64| at.saturating_add(SUPERBLOCK_SIZE as u64) <= end;
        for at in SUPERBLOCK_OFFSETS.into_iter().filter(fits) {
            let mut item = Box::new(*item);
            item.dev_item = *own;
            let bytes = sealed_superblock(&item, Physical(at), checksum);
            BlockDevice::write_at(&**device, at, &bytes[..])
                .map_err(|e| Error::io("a superblock that is not written yet", e))?;
        }
    }
    Ok(())
}
