//! The items of the members in the chunk tree, against what is elsewhere.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::ItemType;
use offshoot_btrfs_format::chunk::DevItem;
use offshoot_btrfs_format::key::objectid;

use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::volume::{CheckedVolume, KeyRange};
use crate::storage::Member;

/// The devices that the chunk tree knows, by number.
pub(super) struct KnownDevices {
    items: BTreeMap<u64, DevItem>,
    /// Whether all of them could be read.
    is_whole: bool,
}

/// The bytes of a device that belong to chunks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UsedBytes {
    /// As the extents of the device tree say.
    pub(super) extents: u64,
    /// As the stripes of chunks say.
    pub(super) stripes: u64,
}

impl KnownDevices {
    /// Reads the items.
    pub(super) fn read(volume: &CheckedVolume<'_>) -> Self {
        let mut items = BTreeMap::new();
        let range = KeyRange::of_object(objectid::DEV_ITEMS);
        let walked = volume.each_item(volume.chunk_tree(), range, &mut |key, data| {
            if key.item_type == ItemType::DEV_ITEM
                && let Ok(item) = DevItem::view(data)
            {
                items.insert(key.offset, *item);
            }
            ControlFlow::Continue(())
        });
        Self { items, is_whole: walked.is_whole() }
    }

    /// The item of a device.
    pub(super) fn get(&self, id: u64) -> Option<&DevItem> {
        self.items.get(&id)
    }

    /// Whether the item of every device is known.
    pub(super) fn are_whole(&self) -> bool {
        self.is_whole
    }

    /// Compares the number of devices and the bytes of all of them with the superblock.
    pub(super) fn check_counters(&self, volume: &CheckedVolume<'_>) {
        if !self.is_whole {
            return;
        }
        let superblock = &volume.superblock().item;
        let total: u128 = self.items.values().map(|item| u128::from(item.total_bytes.get())).sum();
        let counters = [
            ("devices", self.items.len() as u128, superblock.num_devices.get()),
            ("bytes of all devices", total, superblock.total_bytes.get()),
        ];
        for (what, expected, found) in counters {
            if expected != u128::from(found) {
                let code = BtrfsFindingCode::SuperblockCounter;
                volume.findings.differs(code, BtrfsFindingPlace::Volume, what, expected, found);
            }
        }
    }

    /// Compares the device item in the superblock of a member with that of the chunk tree. Both are
    /// of one commit.
    pub(super) fn check_own_item(
        &self,
        volume: &CheckedVolume<'_>,
        place: BtrfsFindingPlace,
        own: &DevItem,
    ) {
        let Some(item) = self.items.values().find(|item| item.uuid == own.uuid) else { return };
        for (what, expected, found) in [
            ("number", item.devid, own.devid),
            ("size", item.total_bytes, own.total_bytes),
            ("bytes used", item.bytes_used, own.bytes_used),
        ] {
            if expected != found {
                let what = format!("{what} of the device in its superblock");
                volume.findings.differs(BtrfsFindingCode::Member, place, what, expected, found);
            }
        }
    }

    /// Compares the size of a device with the one that the volume uses.
    pub(super) fn check_size(&self, volume: &CheckedVolume<'_>, member: &Member, size_bytes: u64) {
        let Some(item) = self.items.get(&member.id.0) else { return };
        let expected = item.total_bytes.get();
        if size_bytes < expected {
            let place = BtrfsFindingPlace::Member(member.id.0);
            let (code, what) = (BtrfsFindingCode::Member, "at least this many bytes of the device");
            volume.findings.differs(code, place, what, expected, size_bytes);
        }
    }

    /// Compares the bytes used of each device with what chunks have of it. When extents and stripes
    /// differ, which is a finding of its own, one of them has to agree.
    pub(super) fn check_used(&self, volume: &CheckedVolume<'_>, used: &BTreeMap<u64, UsedBytes>) {
        for (&id, item) in &self.items {
            let UsedBytes { extents, stripes } = used.get(&id).copied().unwrap_or_default();
            let found = item.bytes_used.get();
            if found != extents && found != stripes {
                let place = BtrfsFindingPlace::Member(id);
                let what = "bytes used of the device";
                volume.findings.differs(BtrfsFindingCode::Member, place, what, extents, found);
            }
        }
    }
}
