//! Removing the checksums of ranges that hold no extent.

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::Result;

use super::{Base, TransactionHandle};
use crate::tree::Cursor;

/// Removes the checksums of `len` bytes from `logical` on, which hold no extent any more. The
/// committer calls it while no handle is open, so no writer changes the checksum tree at the same
/// time.
pub(crate) fn remove_checksums(
    handle: &TransactionHandle<'_>,
    logical: Logical,
    len: u64,
) -> Result<()> {
    let without = ChecksumRemoval::new(handle.volume(), logical, len)?;
    let _changing = handle.checksums_changing();
    without.apply(handle)
}

/// As [`remove_checksums`], while other writers change the checksum tree.
pub(crate) fn remove_checksums_beside_writers(
    handle: &TransactionHandle<'_>,
    logical: Logical,
    len: u64,
) -> Result<()> {
    // While we hold the lock, no other writer changes the items that we read.
    let _changing = handle.checksums_changing();
    ChecksumRemoval::new(handle.volume(), logical, len)?.apply(handle)
}

/// The changes of the checksum tree that remove the checksums of a range.
struct ChecksumRemoval {
    removed: Vec<Key>,
    /// The parts of removed items that belong to other sectors.
    kept: Vec<(Key, Vec<u8>)>,
}

impl ChecksumRemoval {
    fn new(volume: &Base, logical: Logical, len: u64) -> Result<Self> {
        let superblock = volume.superblock();
        let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
        let end = logical.0 + len;
        let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
        let mut without = Self { removed: Vec::new(), kept: Vec::new() };
        let root = volume.tree(TreeId::CSUM)?;
        let mut cursor = Cursor::seek_floor(volume, root, key(logical.0))?;
        while let Some((found, data)) = cursor.item().filter(|(found, _)| *found < key(end)) {
            let covers = found.offset..found.offset + (data.len() / sum_len) as u64 * sector;
            if found >= key(0) && covers.end > logical.0 {
                without.removed.push(found);
                let bytes = |sectors: u64| {
                    usize::try_from(sectors / sector).expect("within an item") * sum_len
                };
                if covers.start < logical.0 {
                    let before = data[..bytes(logical.0 - covers.start)].to_vec();
                    without.kept.push((found, before));
                }
                if covers.end > end {
                    let behind = data[bytes(end - covers.start)..].to_vec();
                    without.kept.push((key(end), behind));
                }
            }
            cursor.advance()?;
        }
        Ok(without)
    }

    /// Makes the changes. A removed item may hold the checksums of neighbouring sectors too, which
    /// are absent for a moment.
    fn apply(&self, handle: &TransactionHandle<'_>) -> Result<()> {
        handle.change(TreeId::CSUM, |tree| {
            for found in &self.removed {
                tree.remove(*found)?;
            }
            for (key, sums) in &self.kept {
                tree.insert(*key, sums)?;
            }
            Ok(())
        })
    }
}
