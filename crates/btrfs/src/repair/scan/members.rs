//! Which device is which member, when its superblock does not say so.
//!
//! A tree block has its logical address in it, and the chunk with that address says on which member
//! and where the block is. So the blocks that are found on a device tell its number:
//!
//! ```text
//! block of address 30 MiB at 9 MiB of the device
//! chunk from 22 MiB on: stripe on device 1 at 22 MiB, stripe on device 2 at 1 MiB
//!                       30 MiB would be at 30 MiB                    at 9 MiB  ->  device 2
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, Result};
use uuid::Uuid;

use super::ScanPurpose;
use super::search::{FoundBlock, ScannedVolume};
use super::stored::StoredSuperblocks;

/// The item of each device, in the order of the devices. `items` are those of all members, and of
/// some that were removed. What is only to be read may be guessed: if one device is known, those
/// that nothing tells apart get the other numbers in the order in which they were given.
///
/// # Errors
/// When nothing tells which one a device is, or two are the same.
pub(super) fn of_devices(
    devices: &[Arc<dyn BlockDevice>],
    stored: &[StoredSuperblocks],
    volume: &ScannedVolume,
    (items, chunks): (&[DevItem], &[Chunk]),
    purpose: ScanPurpose,
) -> Result<Vec<DevItem>> {
    let mut ids: Vec<Option<u64>> = stored
        .iter()
        .map(|stored| {
            let uuid = stored.device_uuid()?;
            let own = items.iter().find(|item| Uuid::from_bytes(item.uuid) == uuid);
            own.map(|item| item.devid.get())
        })
        .collect();
    let mut possible: BTreeMap<usize, BTreeSet<u64>> = BTreeMap::new();
    for (index, device) in devices.iter().enumerate() {
        if ids.get(index).is_some_and(Option::is_none) {
            let told = told_by_blocks(index, volume, chunks);
            if told.is_empty() && purpose == ScanPurpose::Repair {
                let what = format!(
                    "{}: neither a superblock nor a tree block tells which device of volume {} it \
                     is; nothing was written: get the files out with recover",
                    device.name(),
                    volume.fsid
                );
                return Err(Error::posix(Errno::INVAL, what));
            }
            possible.insert(index, told);
        }
    }
    assign(&mut ids, &mut possible);
    assign_equal(&mut ids, &possible, items, chunks);
    if purpose == ScanPurpose::Read {
        guess(&mut ids, &possible, chunks);
    }
    let find = |(index, id): (usize, &Option<u64>)| {
        let item = items.iter().find(|item| Some(item.devid.get()) == *id);
        item.copied().ok_or_else(|| {
            let name = devices.get(index).map_or("a device", |device| device.name());
            let what = match purpose {
                ScanPurpose::Repair => format!(
                    "{name}: its blocks fit more than one device of volume {}; nothing was \
                     written: get the files out with recover",
                    volume.fsid
                ),
                ScanPurpose::Read => format!(
                    "{name}: nothing on it tells that it is a device of volume {}: leave it out, \
                     and name all devices of the volume, each from where the volume begins",
                    volume.fsid
                ),
            };
            Error::posix(Errno::INVAL, what)
        })
    };
    let found = ids.iter().enumerate().map(find).collect::<Result<Vec<_>>>()?;
    let known: BTreeSet<_> = found.iter().map(|item| item.devid.get()).collect();
    if known.len() < found.len() {
        let what = "two devices are the same one of the volume; nothing was written";
        return Err(Error::posix(Errno::INVAL, what));
    }
    Ok(found)
}

/// The members that most blocks of a device fit.
fn told_by_blocks(device: usize, volume: &ScannedVolume, chunks: &[Chunk]) -> BTreeSet<u64> {
    let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
    let blocks = volume.blocks.iter().chain(&volume.samples);
    for block in blocks.filter(|block| block.device == device) {
        for id in members_of(block, chunks) {
            *votes.entry(id).or_default() += 1;
        }
    }
    let most = votes.values().copied().max().unwrap_or_default();
    votes.into_iter().filter(|(_, count)| *count == most).map(|(id, _)| id).collect()
}

/// The members on which a block may be, by its place and its address.
pub(super) fn members_of(block: &FoundBlock, chunks: &[Chunk]) -> BTreeSet<u64> {
    let mut ids = BTreeSet::new();
    let at = chunks.partition_point(|chunk| chunk.end() <= block.logical);
    let Some(chunk) = chunks.get(at).filter(|chunk| chunk.start <= block.logical) else {
        return ids;
    };
    for (stripe, physical) in chunk.copies_of(block.logical) {
        if let Some(stripe) = chunk.stripes.get(stripe)
            && physical.0 == block.physical
        {
            ids.insert(stripe.device.0);
        }
    }
    ids
}

/// Gives each device the one member that is left for it, as long as there is such a device.
fn assign(ids: &mut [Option<u64>], possible: &mut BTreeMap<usize, BTreeSet<u64>>) {
    loop {
        let taken: BTreeSet<u64> = ids.iter().flatten().copied().collect();
        let mut has_changed = false;
        for (index, told) in possible.iter_mut() {
            told.retain(|id| !taken.contains(id));
            if let (Some(slot @ None), 1) = (ids.get_mut(*index), told.len()) {
                *slot = told.first().copied();
                has_changed = true;
                break;
            }
        }
        if !has_changed {
            return;
        }
    }
}

/// Devices that fit the same members equally, because these have the same parts of all chunks at
/// the same places, get them in order: it makes no difference which is which.
fn assign_equal(
    ids: &mut [Option<u64>],
    possible: &BTreeMap<usize, BTreeSet<u64>>,
    items: &[DevItem],
    chunks: &[Chunk],
) {
    let open: Vec<usize> =
        possible.keys().copied().filter(|index| ids.get(*index) == Some(&None)).collect();
    let taken: BTreeSet<u64> = ids.iter().flatten().copied().collect();
    let left: Vec<u64> =
        items.iter().map(|item| item.devid.get()).filter(|id| !taken.contains(id)).collect();
    let places = |id: u64| {
        let of_chunk = move |chunk: &Chunk| {
            let own = chunk.stripes.iter().filter(move |stripe| stripe.device.0 == id);
            let copied = usize::from(chunk.profile.shape().copies) == chunk.stripes.len();
            own.map(|stripe| (chunk.start, copied, stripe.physical)).collect::<Vec<_>>()
        };
        chunks.iter().flat_map(of_chunk).collect::<Vec<_>>()
    };
    let Some(first) = left.first().map(|id| places(*id)) else { return };
    let are_equal =
        left.iter().all(|id| places(*id) == first) && first.iter().all(|(_, copied, _)| *copied);
    if are_equal && open.len() == left.len() {
        for (index, id) in open.into_iter().zip(left) {
            if let Some(slot) = ids.get_mut(index) {
                *slot = Some(id);
            }
        }
    }
}

/// Gives each device that is still open the lowest number that its blocks fit, or any one if there
/// are no blocks, of those that chunks have and no device has. Something must tell one of them.
fn guess(ids: &mut [Option<u64>], possible: &BTreeMap<usize, BTreeSet<u64>>, chunks: &[Chunk]) {
    let is_any_told = possible.values().any(|told| !told.is_empty());
    if ids.iter().all(Option::is_none) && !is_any_told {
        return;
    }
    let stripes = chunks.iter().flat_map(|chunk| &chunk.stripes);
    let mut free: BTreeSet<u64> = stripes.map(|stripe| stripe.device.0).collect();
    for id in ids.iter().flatten() {
        free.remove(id);
    }
    for has_blocks in [true, false] {
        for (index, told) in possible.iter().filter(|(_, told)| told.is_empty() != has_blocks) {
            let Some(slot @ None) = ids.get_mut(*index) else { continue };
            *slot = free.iter().find(|id| !has_blocks || told.contains(id)).copied();
            if let Some(id) = slot {
                free.remove(id);
            }
        }
    }
}
