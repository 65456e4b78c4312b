//! Looking up the checksums of data.
//!
//! The checksum tree has an item for every run of sectors that have checksums, whose key
//! offset is the address of the first.

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical};
use offshoot_vfs::{Error, Result};

use crate::tree::Cursor;
use crate::volume::Volume;

/// The checksums of all sectors of `len` bytes from `logical` on, one behind the other.
///
/// # Errors
/// When a sector has none: without it, nothing says whether its data is right.
pub(super) fn checksums(volume: &Volume, logical: Logical, len: u64) -> Result<Vec<u8>> {
    let superblock = volume.superblock();
    let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
    let end = logical.0.saturating_add(len);
    let none = |at: u64| Error::corrupt_at("data", at, "it has no checksum");
    let root = volume.csum_tree().ok_or_else(|| none(logical.0))?;
    let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
    let mut cursor = Cursor::seek_floor(volume, root, key(logical.0))?;
    if cursor.item().is_some_and(|(at, _)| at < key(0)) {
        cursor.advance()?;
    }
    let mut sums = Vec::new();
    let mut at = logical.0;
    while at < end {
        let Some((found, data)) = cursor.item_of(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM)
        else {
            return Err(none(at));
        };
        if found.offset > at {
            return Err(none(at));
        }
        let skip = usize::try_from((at - found.offset) / sector).unwrap_or(usize::MAX);
        let rest = data.get(skip.saturating_mul(sum_len)..).unwrap_or_default();
        let wanted = usize::try_from((end - at) / sector).unwrap_or(usize::MAX) * sum_len;
        let taken = &rest[..rest.len().min(wanted)];
        sums.extend_from_slice(taken);
        at += (taken.len() / sum_len) as u64 * sector;
        if at < end {
            cursor.advance()?;
        }
    }
    Ok(sums)
}
