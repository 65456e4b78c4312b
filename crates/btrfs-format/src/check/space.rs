//! Checks of block groups, free space, quotas, and the small items of the other trees.

use super::chunk::verify_types;
use super::item::{ItemChecked, ItemContext, ensure};
use crate::chunk::{BlockGroupFlags, RaidStride};
use crate::key::objectid;
use crate::quota::STATUS_SIMPLE;
use crate::space::{
    BlockGroupItem, DevReplaceItem, DevStatsItem, FreeSpaceHeader, FreeSpaceInfo, QgroupInfoItem,
    QgroupLimitItem, QgroupStatusItem,
};
use crate::{ItemType, U64};

pub(super) fn verify_block_group(item: &ItemContext<'_>) -> ItemChecked {
    item.size_at_least(size_of::<BlockGroupItem>())?;
    let group = BlockGroupItem::view(item.data)?;
    verify_range(item)?;
    let (used, length) = (group.used.get(), item.key.offset);
    ensure!(used <= length, "{used} bytes used of {length}");
    let flags = BlockGroupFlags(group.flags.get());
    flags.profile()?;
    verify_types(item, flags)
}

/// Checks a key that is a range of the address space: its start and its length.
fn verify_range(item: &ItemContext<'_>) -> ItemChecked {
    let (start, length) = (item.key.objectid, item.key.offset);
    item.aligned("start", start)?;
    item.aligned("length", length)?;
    ensure!(length != 0 && start.checked_add(length).is_some(), "a range of {length} bytes");
    Ok(())
}

/// Checks items of which a reader needs little more than the right size.
pub(super) fn verify_other(item: &ItemContext<'_>) -> ItemChecked {
    match item.key.item_type {
        ItemType::UNTYPED if item.key.objectid == objectid::FREE_SPACE => {
            item.size(size_of::<FreeSpaceHeader>())
        }
        ItemType::FREE_SPACE_INFO => {
            verify_range(item)?;
            item.size(size_of::<FreeSpaceInfo>())
        }
        ItemType::FREE_SPACE_EXTENT => {
            verify_range(item)?;
            item.size(0)
        }
        ItemType::FREE_SPACE_BITMAP => {
            verify_range(item)?;
            let sectors = item.key.offset / u64::from(item.geometry.sector_size);
            let held = item.data.len() as u64 * 8;
            ensure!(held >= sectors, "bits for {sectors} sectors expected, {held} found");
            Ok(())
        }
        ItemType::RAID_STRIPE => {
            verify_range(item)?;
            RaidStride::view_all(item.data)?;
            Ok(())
        }
        ItemType::QGROUP_STATUS => {
            item.size_at_least(size_of::<QgroupStatusItem>())?;
            if QgroupStatusItem::view(item.data)?.has(STATUS_SIMPLE) {
                QgroupStatusItem::enabled_in(item.data)?;
            }
            Ok(())
        }
        ItemType::QGROUP_INFO => item.size_at_least(size_of::<QgroupInfoItem>()),
        ItemType::QGROUP_LIMIT => item.size_at_least(size_of::<QgroupLimitItem>()),
        ItemType::QGROUP_RELATION => item.size(0),
        ItemType::PERSISTENT_ITEM if item.key.objectid == objectid::DEV_STATS => {
            item.size_at_least(size_of::<DevStatsItem>())
        }
        ItemType::DEV_REPLACE => item.size_at_least(size_of::<DevReplaceItem>()),
        ItemType::UUID_KEY_SUBVOL | ItemType::UUID_KEY_RECEIVED_SUBVOL => {
            ensure!(
                item.data.len().is_multiple_of(size_of::<U64>()),
                "ids of 8 bytes expected, {} bytes found",
                item.data.len()
            );
            Ok(())
        }
        _ => Ok(()),
    }
}
