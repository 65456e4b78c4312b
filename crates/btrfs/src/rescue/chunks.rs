//! The chunks that leaves on the devices describe, when the chunk tree cannot be read.
//!
//! First the system chunks are searched, which the superblock describes itself. They have the chunk
//! tree and older states of it. The superblock says how much of its device belongs to chunks. If
//! the found ones are less, all of each device is searched. Chunks that no leaf of the chunk tree
//! describes any more follow then from the extents of devices and from block groups, but for
//! profiles that spread data over stripes, whose order these do not say.

use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::block::{BlockHeader, HEADER_SIZE};
use offshoot_btrfs_format::check;
use offshoot_btrfs_format::chunk::{Chunk, DevItem, Stripe};
use offshoot_btrfs_format::{Logical, TreeId};

use super::described::DescribedVersions;
use super::places::each_place;
use crate::block::TreeBlock;
use crate::storage::{GivenDevice, Storage};

/// The newest versions of devices and chunks.
pub(crate) struct FoundChunks {
    pub(crate) devices: Vec<DevItem>,
    /// No two of them overlap.
    pub(crate) chunks: Vec<Chunk>,
}

/// Whether the chunks are all that the superblocks of the devices count.
fn is_complete(all: &DescribedVersions, found: &[GivenDevice]) -> bool {
    found.iter().all(|one| {
        let own = one.device_item();
        let on_device = |chunk: &Chunk| {
            let is_own = |stripe: &&Stripe| stripe.device.0 == own.devid.get();
            let stripes = chunk.stripes.iter().filter(is_own).count() as u64;
            stripes.saturating_mul(chunk.stripe_bytes())
        };
        let newest = all.chunks.values().filter_map(|versions| versions.first());
        let sum = newest.map(|(_, described)| on_device(&described.chunk));
        sum.fold(0, u64::saturating_add) == own.bytes_used.get()
    })
}

/// Searches the devices for the chunks of the volume.
pub(crate) fn find_chunks(storage: &Storage, found: &[GivenDevice]) -> FoundChunks {
    let mut all = DescribedVersions::default();
    for one in found {
        let own = one.device_item().devid.get();
        for range in system_ranges(storage, own) {
            search(storage, one, range, &mut all);
        }
    }
    if !is_complete(&all, found) {
        for one in found {
            search(storage, one, 0..one.device().size_bytes(), &mut all);
        }
    }
    let mut devices = all.newest_devices();
    for own in found.iter().map(GivenDevice::device_item) {
        if devices.iter().all(|item| item.devid != own.devid) {
            devices.push(own);
        }
    }
    let chunks = all.first_chunks(&devices, storage.superblock().sector_size);
    FoundChunks { devices, chunks: chunks.into_iter().map(|described| described.chunk).collect() }
}

/// Where the system chunks are on the device `id`.
fn system_ranges(storage: &Storage, id: u64) -> Vec<Range<u64>> {
    let chunks = storage.system_chunks();
    let stripes = chunks.iter().flat_map(|chunk| {
        let len = chunk.stripe_bytes();
        chunk.stripes.iter().filter(|stripe| stripe.device.0 == id).map(move |stripe| {
            let from = stripe.physical.0;
            from..from.saturating_add(len)
        })
    });
    stripes.collect()
}

/// Searches a range of a device for leaves that describe chunks.
fn search(storage: &Storage, one: &GivenDevice, range: Range<u64>, all: &mut DescribedVersions) {
    let superblock = storage.superblock();
    let places = (superblock.sector_size, superblock.node_size);
    let _ = each_place(one.device(), range, places, &mut |_, block| {
        if let Some(leaf) = leaf_in(storage, block) {
            let header = leaf.header();
            for slot in 0..leaf.len() {
                let (key, data) = (leaf.key(slot), leaf.data(slot));
                all.take(header.owner(), key, data, header.generation());
            }
        }
        ControlFlow::Continue(())
    });
}

/// The leaf in `bytes`, if it is one that may describe chunks. The cheap comparisons come first.
fn leaf_in(storage: &Storage, bytes: &[u8]) -> Option<TreeBlock> {
    let trees = [TreeId::CHUNK, TreeId::DEV, TreeId::EXTENT, TreeId::BLOCK_GROUP];
    let header = BlockHeader::view(bytes.get(..HEADER_SIZE)?).ok()?;
    let is_own = header.fsid == *storage.superblock().metadata_uuid.as_bytes();
    if !is_own || header.level != 0 || !trees.contains(&header.owner()) {
        return None;
    }
    let logical = Logical(header.bytenr.get());
    check::verify(bytes, storage.geometry(), logical).ok()?;
    Some(TreeBlock::verified(bytes.into()))
}
