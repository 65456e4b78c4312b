//! What an inode counts: its links, the names of a directory, the bytes of a file.

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::FileType;
use zerocopy::FromBytes;

use super::FileMender;

impl FileMender<'_, '_> {
    /// Mends what an inode counts.
    pub(in crate::repair) fn mend_counts(&mut self, ino: u64) {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let (Some(mut data), Some(file_type)) = (self.item(key), self.type_of(ino)) else { return };
        let links = u32::try_from(self.names(ino).len()).unwrap_or(u32::MAX);
        if file_type == FileType::Regular && links > 0 {
            self.fill_holes(ino);
        }
        let (name_bytes, bytes) = (self.name_bytes(ino), self.bytes(ino));
        let target = (file_type == FileType::Symlink).then(|| self.target_len(ino)).flatten();
        if let Ok((item, _)) = InodeItem::mut_from_prefix(&mut data) {
            item.nlink = links.into();
            match file_type {
                FileType::Directory if links > 0 => item.size = (2 * name_bytes).into(),
                FileType::Regular if links > 0 => item.nbytes = bytes.into(),
                FileType::Symlink if links > 0 => mend_link(item, target, bytes),
                _ => {}
            }
        }
        self.set(key, data);
        let orphan = Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, ino);
        match (links, self.item(orphan)) {
            (0, None) => self.set(orphan, Vec::new()),
            (1.., Some(_)) => drop(self.edits.insert(orphan, None)),
            _ => {}
        }
    }

    /// The lengths of the names of all entries of a directory.
    fn name_bytes(&self, dir: u64) -> u64 {
        self.entries(dir).iter().map(|(_, entry)| entry.name.len() as u64).sum()
    }

    /// The bytes that the extents of a file have.
    fn bytes(&self, ino: u64) -> u64 {
        let items = self.items_of(ino, ItemType::EXTENT_DATA);
        let extents = items.values().filter_map(|data| FileExtent::parse(data).ok());
        let bytes = extents.map(|extent| match extent.body {
            FileExtentBody::Inline(bytes) if extent.compression == Compression::None => {
                bytes.len() as u64
            }
            FileExtentBody::Inline(_) => extent.ram_bytes,
            FileExtentBody::Hole { .. } => 0,
            FileExtentBody::Extent { num_bytes, .. } => num_bytes,
        });
        bytes.fold(0, u64::wrapping_add)
    }
}

/// Mends what a symbolic link counts, which has a `target` of so many bytes. A link that is shorter
/// by its size and does not count the bytes of its target either may have that of another link: it
/// stays as it reads.
fn mend_link(item: &mut InodeItem, target: Option<u64>, bytes: u64) {
    let is_cut = target.is_some_and(|len| (1..len).contains(&item.size.get()));
    if is_cut && item.nbytes != bytes {
        return;
    }
    item.size = target.map_or(item.size, Into::into);
    item.nbytes = bytes.into();
}
