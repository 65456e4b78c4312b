//! What our reader shows of a volume, for a judge.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::checked::ShownVolume;
use offshoot_vfs::Result;

/// What the devices hold.
pub(crate) fn show(devices: &[Arc<dyn BlockDevice>]) -> Result<ShownVolume> {
    let open = |ignore_log| {
        let options = EngineOptions { is_log_ignored: ignore_log, ..EngineOptions::default() };
        BtrfsVolume::open(devices.to_vec(), &options)
    };
    let last_commit = open(true)?;
    let files = Box::new(open(false)?.filesystem(SubvolumeId::FS)?);
    let has_log = last_commit.superblock().has_pending_log();
    Ok(ShownVolume { files, has_log, has_orphans: has_orphans(&last_commit)? })
}

/// Whether there are files or subvolumes without a name.
fn has_orphans(volume: &BtrfsVolume) -> Result<bool> {
    let subvolumes = volume.subvolumes().map(|info| info.map(|info| info.id));
    for tree in subvolumes.chain([Ok(TreeId::ROOT)]) {
        let first = Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, 0);
        let cursor = volume.cursor(volume.tree(tree?)?, first)?;
        if cursor.item_of(objectid::ORPHAN, ItemType::ORPHAN_ITEM).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}
