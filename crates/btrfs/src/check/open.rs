//! From devices to a volume that can be checked.
//!
//! Opening takes what it can get. Chunks that cannot be read or that overlap are findings, and
//! the check goes on with the others.

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::Superblock;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_device::BlockDevice;
use offshoot_kit::cores;
use offshoot_vfs::Result;
use parking_lot::Mutex;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::volume::{CheckedVolume, KeyRange};
use super::{CheckOptions, CheckWatch};
use crate::report::{Reporter, VolumeReport};
use crate::storage::{ChunkMap, MappedChunk, Members, Storage};

/// Opens the volume on `devices`, as of the commit with the superblock `at`, or else as of the last
/// one.
pub(crate) fn open<'c>(
    devices: Vec<Arc<dyn BlockDevice>>,
    at: Option<Superblock>,
    options: &CheckOptions,
    watch: &'c CheckWatch<'c>,
) -> Result<CheckedVolume<'c>> {
    cores::learn();
    let reports = Arc::new(Mutex::new(Vec::new()));
    let told = reports.clone();
    let reporter: Reporter =
        Arc::new(move |report: &VolumeReport| told.lock().push(report.clone()));
    let is_written = at.is_some();
    let (mut storage, given) = match at {
        Some(superblock) => Storage::open_at(devices, superblock, Some(reporter))?,
        None => Storage::open(devices, Some(reporter), true)?,
    };
    storage.set_strict();
    let mut volume = CheckedVolume::new(storage, options, watch, reports);
    volume.is_written = is_written;
    let items = device_items(&volume);
    let members = volume.storage.match_members(&items, &given, options.is_degraded)?;
    let chunks = chunks(&volume, &members);
    volume.storage.learn(&items, members, chunks);
    Ok(volume)
}

/// The device items of the chunk tree.
fn device_items(volume: &CheckedVolume<'_>) -> Vec<DevItem> {
    let mut items = Vec::new();
    let range = KeyRange::of_object(objectid::DEV_ITEMS);
    volume.each_item(volume.chunk_tree(), range, &mut |key, data| {
        if key.item_type == ItemType::DEV_ITEM
            && let Ok(item) = DevItem::view(data)
        {
            items.push(*item);
        }
        ControlFlow::Continue(())
    });
    items
}

/// The chunks of the chunk tree, and those system chunks of the superblock that are not there.
fn chunks(volume: &CheckedVolume<'_>, members: &Members) -> ChunkMap {
    let sector_size = volume.superblock().sector_size;
    let mut map = ChunkMap::default();
    let mut add = |chunk: Chunk| {
        let place = BtrfsFindingPlace::Logical(chunk.start);
        if let Err(error) = map.add(MappedChunk::new(chunk, members)) {
            volume.findings.add_error(BtrfsFindingCode::Chunk, place, &error);
        }
    };
    let range = KeyRange::of_object(objectid::FIRST_CHUNK_TREE);
    let mut starts = Vec::new();
    let walked = volume.each_item(volume.chunk_tree(), range, &mut |key: Key, data| {
        if key.item_type == ItemType::CHUNK_ITEM {
            match Chunk::parse_prefix(key, data, sector_size) {
                Ok((chunk, _)) => {
                    starts.push(chunk.start);
                    add(chunk);
                }
                Err(error) => {
                    let place = BtrfsFindingPlace::Item { tree: volume.chunk_tree().id, key };
                    volume.findings.add(BtrfsFindingCode::Chunk, place, error.problem);
                }
            }
        }
        ControlFlow::Continue(())
    });
    if !walked.is_whole() {
        let system = volume.superblock().system_chunks.iter();
        system.filter(|chunk| !starts.contains(&chunk.start)).cloned().for_each(add);
    }
    map
}
