//! Stripes of chunks against extents of the device tree, and the system chunks of the superblock.
//!
//! Both sides are in the order of devices and places on them: extents as the device tree has them,
//! stripes after they were sorted.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::ops::ControlFlow;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevExtent};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use zerocopy::FromBytes;

use super::devices::{KnownDevices, UsedBytes};
use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::volume::{CheckedVolume, KeyRange};

/// A range of a device that belongs to a chunk, by either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DeviceRange {
    device: u64,
    /// The first byte on the device.
    start: u64,
    /// In bytes.
    len: u64,
    /// The address of the chunk.
    chunk: u64,
}

impl DeviceRange {
    fn place(&self) -> (u64, u64) {
        (self.device, self.start)
    }

    fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }
}

/// Checks chunks and device extents.
pub(super) fn check(volume: &CheckedVolume<'_>, devices: &KnownDevices) {
    let mut stripes = Vec::new();
    let mut system = BTreeMap::new();
    let range = KeyRange::of_object(objectid::FIRST_CHUNK_TREE);
    let walked = volume.each_item(volume.chunk_tree(), range, &mut |key, data| {
        let sector_size = volume.superblock().sector_size;
        if key.item_type == ItemType::CHUNK_ITEM
            && let Ok((chunk, _)) = Chunk::parse_prefix(key, data, sector_size)
        {
            check_stripes(volume, devices, &chunk);
            stripes.extend(ranges_of(&chunk));
            if chunk.flags.0 & BlockGroupFlags::SYSTEM != 0 {
                system.insert(chunk.start, chunk);
            }
        }
        ControlFlow::Continue(())
    });
    if walked.is_whole() {
        check_system_chunks(volume, &system);
    }
    stripes.sort_unstable();
    let Some(tree) = volume.tree(TreeId::DEV) else { return };
    let mut comparison = ExtentComparison {
        volume,
        devices,
        used: used_by(&stripes),
        unmatched: Vec::new(),
        stripes: stripes.into_iter().peekable(),
        are_chunks_whole: walked.is_whole(),
        before: None,
    };
    let walked = volume.each_item(tree, KeyRange::ALL, &mut |key, data| {
        // An item with the length of one that does not fit is refused with its leaf.
        if key.item_type == ItemType::DEV_EXTENT
            && let Ok((extent, _)) = DevExtent::read_from_prefix(data)
        {
            comparison.add(key, &extent);
        }
        ControlFlow::Continue(())
    });
    if walked.is_whole() {
        comparison.finish();
    }
}

/// The range of a device that each stripe of a chunk has.
fn ranges_of(chunk: &Chunk) -> impl Iterator<Item = DeviceRange> {
    chunk.stripes.iter().map(|stripe| DeviceRange {
        device: stripe.device.0,
        start: stripe.physical.0,
        len: chunk.stripe_bytes(),
        chunk: chunk.start.0,
    })
}

/// The bytes of stripes on each device.
fn used_by(stripes: &[DeviceRange]) -> BTreeMap<u64, UsedBytes> {
    let mut used = BTreeMap::<u64, UsedBytes>::new();
    for stripe in stripes {
        let one = used.entry(stripe.device).or_default();
        one.stripes = one.stripes.saturating_add(stripe.len);
    }
    used
}

/// Checks that each stripe of a chunk is on a device of the volume, and ends on it.
fn check_stripes(volume: &CheckedVolume<'_>, devices: &KnownDevices, chunk: &Chunk) {
    let (code, place) = (BtrfsFindingCode::Chunk, BtrfsFindingPlace::Logical(chunk.start));
    for (stripe, range) in chunk.stripes.iter().zip(ranges_of(chunk)) {
        let id = stripe.device;
        match devices.get(id.0) {
            None if devices.are_whole() => {
                let problem = format!("a stripe is on device {id}, which the volume does not have");
                volume.findings.add(code, place, problem);
            }
            Some(item) if item.uuid != *stripe.device_uuid.as_bytes() => {
                let what = format!("UUID of device {id} in a stripe");
                let uuid = uuid::Uuid::from_bytes(item.uuid);
                volume.findings.differs(code, place, what, uuid, stripe.device_uuid);
            }
            Some(item) if range.end() > item.total_bytes.get() => {
                let what = format!("end of a stripe on device {id} at most");
                volume.findings.differs(code, place, what, item.total_bytes, range.end());
            }
            _ => {}
        }
    }
}

/// Compares the system chunks of the superblock with those of the chunk tree.
fn check_system_chunks(volume: &CheckedVolume<'_>, system: &BTreeMap<Logical, Chunk>) {
    let code = BtrfsFindingCode::SystemChunk;
    let array = &volume.superblock().system_chunks;
    for chunk in array {
        let place = BtrfsFindingPlace::Logical(chunk.start);
        match system.get(&chunk.start) {
            None => {
                let problem = "the chunk tree does not have this chunk of the superblock";
                volume.findings.add(code, place, problem);
            }
            Some(stored) if stored != chunk => {
                let problem = "the superblock and the chunk tree describe the chunk differently";
                volume.findings.add(code, place, problem);
            }
            Some(_) => {}
        }
    }
    for start in system.keys().filter(|&&start| array.iter().all(|chunk| chunk.start != start)) {
        let problem = "the superblock does not have this chunk";
        volume.findings.add(code, BtrfsFindingPlace::Logical(*start), problem);
    }
}

/// A comparison of device extents, in their order, with stripes.
struct ExtentComparison<'a, 'c, I: Iterator<Item = DeviceRange>> {
    volume: &'a CheckedVolume<'c>,
    devices: &'a KnownDevices,
    used: BTreeMap<u64, UsedBytes>,
    stripes: Peekable<I>,
    /// Stripes without an extent.
    unmatched: Vec<DeviceRange>,
    are_chunks_whole: bool,
    /// The extent before.
    before: Option<DeviceRange>,
}

impl<I: Iterator<Item = DeviceRange>> ExtentComparison<'_, '_, I> {
    /// Adds the next extent.
    fn add(&mut self, key: Key, extent: &DevExtent) {
        let place = BtrfsFindingPlace::Item { tree: TreeId::DEV, key };
        let (code, findings) = (BtrfsFindingCode::DeviceExtent, &self.volume.findings);
        let found = DeviceRange {
            device: key.objectid,
            start: key.offset,
            len: extent.length.get(),
            chunk: extent.chunk_offset.get(),
        };
        let used = self.used.entry(found.device).or_default();
        used.extents = used.extents.saturating_add(found.len);
        let before = self.before.replace(found).filter(|before| before.device == found.device);
        if let Some(before) = before.filter(|before| before.end() > found.start) {
            let problem = format!("overlaps the extent at {}, which ends later", before.start);
            findings.add(code, place, problem);
        }
        match self.devices.get(found.device) {
            None if self.devices.are_whole() => {
                findings.add(code, place, "is of a device that the volume does not have");
            }
            Some(item) if found.end() > item.total_bytes.get() => {
                let what = "end of the extent at most";
                findings.differs(code, place, what, item.total_bytes, found.end());
            }
            _ => {}
        }
        while let Some(stripe) = self.stripes.next_if(|stripe| stripe.place() < found.place()) {
            self.unmatched.push(stripe);
        }
        let Some(stripe) = self.stripes.next_if(|stripe| stripe.place() == found.place()) else {
            if self.are_chunks_whole {
                let problem = format!("no stripe of the chunk at {} is there", found.chunk);
                findings.add(code, place, problem);
            }
            return;
        };
        let owner = (objectid::FIRST_CHUNK_TREE, TreeId::CHUNK.0);
        let found_owner = (extent.chunk_objectid.get(), extent.chunk_tree.get());
        for (what, expected, found) in [
            ("address of the chunk", stripe.chunk, found.chunk),
            ("length", stripe.len, found.len),
            ("object id of the chunk", owner.0, found_owner.0),
            ("chunk tree", owner.1, found_owner.1),
        ] {
            if expected != found {
                findings.differs(code, place, what, expected, found);
            }
        }
    }

    /// Ends the comparison after the last extent.
    fn finish(self) {
        let Self { volume, devices, used, stripes, unmatched, .. } = self;
        for stripe in unmatched.into_iter().chain(stripes) {
            // A stripe on an unknown device is a finding of the chunk.
            if devices.get(stripe.device).is_some() {
                let DeviceRange { device, start, .. } = stripe;
                let problem = format!("the stripe at {start} of device {device} has no extent");
                let place = BtrfsFindingPlace::Logical(Logical(stripe.chunk));
                volume.findings.add(BtrfsFindingCode::DeviceExtent, place, problem);
            }
        }
        if self.are_chunks_whole {
            devices.check_used(volume, &used);
        }
    }
}
