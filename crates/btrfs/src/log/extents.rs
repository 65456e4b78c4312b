//! Replays extents: the contents of ranges of files, and their checksums.

use std::ops::Range;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, Logical};
use offshoot_vfs::{FileType, Result};

use super::replay::SubvolumeReplay;
use crate::data::{drop_range, extent_len, insert_sums, note_use};
use crate::inode::type_of;
use crate::storage::malformed;
use crate::transaction::{ExtentKind, RefOwner};
use crate::tree::{Cursor, with_item};

impl SubvolumeReplay<'_, '_> {
    /// Replaces a range of a file by an extent of the log.
    pub(super) fn replay_extent(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let is_same = with_item(self.volume, self.root()?, key, |stored| Ok(stored == data))?;
        if is_same == Some(true) {
            return Ok(());
        }
        let ino = key.objectid;
        let inode = self.inode(ino)?;
        let has_data = match &inode {
            Some(item) => matches!(type_of(item)?, FileType::Regular | FileType::Symlink),
            None => false,
        };
        let Some(mut inode) = inode.filter(|_| has_data) else {
            return Err(self.wrong(key, "data of what is no file"));
        };
        let extent = FileExtent::parse(data).map_err(malformed)?;
        let sector = u64::from(self.volume.superblock().sector_size);
        let len = extent_len(&extent);
        let end = len.checked_next_multiple_of(sector).and_then(|len| key.offset.checked_add(len));
        let end = end.ok_or_else(|| self.wrong(key, "it reaches further than any file"))?;
        let dropped = drop_range(self.handle, self.file(ino), key.offset..end)?;
        note_use(self.handle, extent.compression);
        let held = self.hold(key, &extent)?;
        let nbytes = inode.nbytes.get().saturating_sub(dropped).saturating_add(held);
        inode.nbytes = nbytes.into();
        let is_needed = !matches!(extent.body, FileExtentBody::Hole { .. })
            || !self.volume.superblock().incompat.has(Incompat::NO_HOLES);
        if is_needed {
            self.put(key, data)?;
        }
        self.put_inode(ino, &inode)
    }

    /// Adds a reference to the extent that the item at `key` names. Returns how many bytes of data
    /// the item adds to the file: 0 for a hole.
    fn hold(&mut self, key: Key, extent: &FileExtent<'_>) -> Result<u64> {
        let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, num_bytes, .. } =
            extent.body
        else {
            let is_inline = matches!(extent.body, FileExtentBody::Inline(_));
            return Ok(if is_inline { extent_len(extent) } else { 0 });
        };
        let offset_in_file = key.offset.wrapping_sub(offset);
        let owner = RefOwner::File { root: self.tree, ino: key.objectid, offset: offset_in_file };
        if self.taken.is_first_use(disk_bytenr) {
            if self.handle.is_referred(disk_bytenr) {
                return Err(self.wrong(key, "a new extent that the subvolume had already"));
            }
            self.handle.refer_new(disk_bytenr, disk_num_bytes, ExtentKind::Data, owner);
        } else {
            self.handle.refer(disk_bytenr, disk_num_bytes, ExtentKind::Data, owner, 1);
        }
        // A compressed extent has checksums of all its stored bytes.
        let stored = if extent.compression == Compression::None {
            let start = disk_bytenr.0 + offset;
            start..start + num_bytes
        } else {
            disk_bytenr.0..disk_bytenr.0 + disk_num_bytes
        };
        self.replay_checksums(&stored)?;
        Ok(num_bytes)
    }

    /// Stores the checksums that the log has of a range of data. If items overlap, the later one is
    /// newer, and wins.
    fn replay_checksums(&self, range: &Range<u64>) -> Result<()> {
        let superblock = self.volume.superblock();
        let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
        let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
        let bytes = |len: u64| usize::try_from(len / sector).expect("within an item") * sum_len;
        let from = range.start.saturating_sub(self.taken.sums_reach());
        let mut cursor = Cursor::seek_floor(self.volume, self.log, key(from))?;
        while let Some((found, data)) = cursor.item().filter(|(found, _)| *found < key(range.end)) {
            // The floor may be an item of something else.
            if found < key(0) {
                cursor.advance()?;
                continue;
            }
            let covers = found.offset..found.offset + (data.len() / sum_len) as u64 * sector;
            let (from, to) = (covers.start.max(range.start), covers.end.min(range.end));
            if from < to {
                let sums = &data[bytes(from - covers.start)..bytes(to - covers.start)];
                insert_sums(self.handle, Logical(from), sums)?;
            }
            cursor.advance()?;
        }
        Ok(())
    }
}
