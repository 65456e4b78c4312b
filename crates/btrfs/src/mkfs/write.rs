//! Writes a new volume to its devices.
//!
//! ```text
//! wipe the ends and the places of superblocks | barrier | tree blocks | barrier | superblocks | barrier
//! ```
//!
//! Wiping skips pieces that are zero already, so an image stays as sparse as it was. The primary
//! superblock is written last on every device, because readers recognise a device by it.

use std::sync::Arc;

use offshoot_btrfs_format::encode::{sealed_superblock, system_chunk_array};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::{
    MAGIC, RootBackup, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SuperblockItem,
};
use offshoot_btrfs_format::{Physical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_kit::new_volume;
use offshoot_vfs::Result;
use zerocopy::FromZeros;

use super::GENERATION;
use super::layout::Layout;
use super::options::VolumeSpec;
use super::trees::{NewTrees, device_item};
use crate::tree::{TreeRoot, root_backup};

/// The flag of a superblock that a commit wrote.
const SUPER_FLAG_WRITTEN: u64 = 1;

/// Writes the volume.
pub(super) fn volume(
    devices: &[Arc<dyn BlockDevice>],
    spec: &VolumeSpec,
    layout: &Layout,
    trees: &NewTrees,
) -> Result<()> {
    for device in devices {
        new_volume::wipe(&**device)?;
    }
    flush(devices)?;
    write_blocks(devices, spec, layout, trees)?;
    flush(devices)?;
    let superblock = superblock(spec, layout, trees);
    for (index, device) in devices.iter().enumerate() {
        let mut superblock = superblock;
        superblock.dev_item = device_item(spec, layout, index);
        for place in superblock_places(layout.devices[index].total_bytes).rev() {
            let bytes = sealed_superblock(&superblock, Physical(place), spec.checksum);
            new_volume::write(&**device, place, &bytes[..])?;
        }
    }
    flush(devices)
}

/// Where the superblocks of a device of `total_bytes` are, the primary first.
fn superblock_places(total_bytes: u64) -> impl DoubleEndedIterator<Item = u64> {
    let fits = move |place: &u64| place + SUPERBLOCK_SIZE as u64 <= total_bytes;
    SUPERBLOCK_OFFSETS.into_iter().filter(fits)
}

fn write_blocks(
    devices: &[Arc<dyn BlockDevice>],
    spec: &VolumeSpec,
    layout: &Layout,
    trees: &NewTrees,
) -> Result<()> {
    for (logical, block) in trees.encode(spec) {
        let chunk =
            layout.chunks.iter().find(|chunk| (chunk.start..chunk.end()).contains(&logical));
        let chunk = chunk.expect("a block lies in the chunk that it was placed in");
        let (mut at, mut rest) = (logical, &block[..]);
        while !rest.is_empty() {
            let run = chunk.run(at, rest.len() as u64).expect("a profile without parity");
            let (part, after) = rest.split_at(usize::try_from(run.len).expect("within a block"));
            for (stripe, place) in run.copies {
                let number = chunk.stripes[stripe].device.0;
                let index = usize::try_from(number - 1).expect("a device that was given");
                new_volume::write(&*devices[index], place.0, part)?;
            }
            at.0 += run.len;
            rest = after;
        }
    }
    Ok(())
}

/// The superblock, without the fields that differ between devices and between its places.
fn superblock(spec: &VolumeSpec, layout: &Layout, trees: &NewTrees) -> SuperblockItem {
    let (root, chunk) = (trees.get(TreeId::ROOT), trees.get(TreeId::CHUNK));
    let generation = GENERATION.0.into();
    let mut item = SuperblockItem {
        fsid: spec.fsid.into_bytes(),
        flags: SUPER_FLAG_WRITTEN.into(),
        magic: MAGIC,
        generation,
        root: root.root_logical().0.into(),
        root_level: root.root_level(),
        chunk_root: chunk.root_logical().0.into(),
        chunk_root_level: chunk.root_level(),
        chunk_root_generation: generation,
        // The UUID tree is complete as of this transaction.
        uuid_tree_generation: generation,
        total_bytes: layout.total_bytes().into(),
        bytes_used: trees.used_bytes(spec).into(),
        root_dir_objectid: objectid::ROOT_TREE_DIR.into(),
        num_devices: (layout.devices.len() as u64).into(),
        sectorsize: spec.sector_size.into(),
        nodesize: spec.node_size.into(),
        leafsize: spec.node_size.into(),
        stripesize: spec.sector_size.into(),
        compat_ro_flags: spec.compat_ro.0.into(),
        incompat_flags: spec.incompat.0.into(),
        csum_type: spec.checksum.to_disk().into(),
        ..SuperblockItem::new_zeroed()
    };
    item.label[..spec.label.len()].copy_from_slice(spec.label.as_bytes());
    let array = system_chunk_array([layout.system()], spec.sector_size);
    item.sys_chunk_array[..array.len()].copy_from_slice(&array);
    item.sys_chunk_array_size = u32::try_from(array.len()).expect("within the array").into();
    item.super_roots[0] = backup(&item, trees);
    item
}

/// The backup of the roots of this transaction, for recovery after a later one fails.
fn backup(item: &SuperblockItem, trees: &NewTrees) -> RootBackup {
    let root = |id| {
        let tree = trees.get(id);
        let (logical, level) = (tree.root_logical(), tree.root_level());
        TreeRoot { id, logical, level, generation: GENERATION }
    };
    root_backup(item, [TreeId::EXTENT, TreeId::FS, TreeId::DEV, TreeId::CSUM].map(root))
}

fn flush(devices: &[Arc<dyn BlockDevice>]) -> Result<()> {
    devices.iter().try_for_each(|device| new_volume::flush(&**device))
}
