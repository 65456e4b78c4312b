//! The checksums of data that is no extent any more.

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::Result;

use super::Handle;
use crate::tree::Cursor;

/// Removes the checksums of `len` bytes from `logical` on, which are no extent any more.
pub(crate) fn remove_checksums(handle: &Handle<'_>, logical: Logical, len: u64) -> Result<()> {
    let superblock = handle.volume().superblock();
    let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
    let end = logical.0 + len;
    let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
    let mut kept = Vec::new();
    let mut removed = Vec::new();
    {
        let root = handle.volume().tree(TreeId::CSUM)?;
        let mut cursor = Cursor::seek_floor(handle.volume(), root, key(logical.0))?;
        while let Some((found, data)) = cursor.item().filter(|(found, _)| *found < key(end)) {
            let covers = found.offset..found.offset + (data.len() / sum_len) as u64 * sector;
            if found >= key(0) && covers.end > logical.0 {
                removed.push(found);
                let bytes = |sectors: u64| {
                    usize::try_from(sectors / sector).expect("within an item") * sum_len
                };
                if covers.start < logical.0 {
                    kept.push((found, data[..bytes(logical.0 - covers.start)].to_vec()));
                }
                if covers.end > end {
                    kept.push((key(end), data[bytes(end - covers.start)..].to_vec()));
                }
            }
            cursor.advance()?;
        }
    }
    // An item may hold the checksums of its neighbours, too, and is away for a moment.
    let _changing = handle.checksums_changing();
    handle.change(TreeId::CSUM, |tree| {
        for found in &removed {
            tree.remove(*found)?;
        }
        for (key, sums) in &kept {
            tree.insert(*key, sums)?;
        }
        Ok(())
    })
}
