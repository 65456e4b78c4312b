//! Inodes that are not there, made anew from what is left of them.
//!
//! ```text
//! entries, or names with it as their directory     a directory
//! extents                                          a regular file that ends behind the last one
//! an entry that leads to it, and some other item   what the entry says
//! ```
//!
//! Owner and permissions are not known: only root can read what is made. A file may lack parts,
//! which read as zeros. What no kind can be told of is removed: it has no contents.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::dir::file_type;
use offshoot_btrfs_format::encode::inode_ref;
use offshoot_btrfs_format::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, FileExtentTail, extent_type,
};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId};
use offshoot_vfs::FileType;
use zerocopy::{FromZeros, IntoBytes};

use super::{FileMender, owned};
use crate::check::KeyRange;

/// The file types that entries give to inodes which are not there.
type EntryTypes = BTreeMap<u64, u8>;

impl FileMender<'_, '_> {
    /// Makes the inodes among `touched` anew that are not there, and the directories that these and
    /// others among them were in. Adds the directories to `touched`.
    pub(super) fn rebuild_inodes(&mut self, touched: &mut BTreeSet<u64>) {
        let types = self.entry_types(touched);
        let mut next: Vec<u64> = touched.iter().copied().collect();
        while let Some(ino) = next.pop() {
            if self.inode(ino).is_none() && !self.rebuild(ino, false, &types) {
                continue;
            }
            for name in self.names(ino) {
                let is_possible = (Ino::ROOT_DIR.0..=TreeId::LAST_FREE.0).contains(&name.parent);
                if is_possible
                    && self.inode(name.parent).is_none()
                    && self.rebuild(name.parent, true, &types)
                {
                    touched.insert(name.parent);
                    next.push(name.parent);
                }
            }
        }
    }

    /// Gives the root directory its name, which is always the same one.
    pub(super) fn name_root(&mut self) {
        let root = Ino::ROOT_DIR.0;
        if self.type_of(root) == Some(FileType::Directory) {
            self.set(Key::new(root, ItemType::INODE_REF, root), inode_ref(0, b".."));
        }
    }

    /// What the entries of these directories say of inodes that are not there.
    fn entry_types(&self, dirs: &BTreeSet<u64>) -> EntryTypes {
        let mut types = EntryTypes::new();
        for &dir in dirs {
            for item_type in [ItemType::DIR_ITEM, ItemType::DIR_INDEX] {
                for entry in self.items_of(dir, item_type).values().flat_map(|data| owned(data)) {
                    let ino = entry.location.objectid;
                    if entry.location.item_type == ItemType::INODE_ITEM && self.inode(ino).is_none()
                    {
                        types.insert(ino, entry.file_type & !file_type::ENCRYPTED);
                    }
                }
            }
        }
        types
    }

    /// Makes the item of an inode from its other items, or removes these. `has_children` says
    /// whether names have it as their directory. Returns whether the inode is there now.
    fn rebuild(&mut self, ino: u64, has_children: bool, types: &EntryTypes) -> bool {
        let items = self.items(KeyRange::of_object(ino));
        let has = |wanted: &[ItemType]| items.keys().any(|key| wanted.contains(&key.item_type));
        let has_extents = has(&[ItemType::EXTENT_DATA]);
        let has_entries = has(&[ItemType::DIR_ITEM, ItemType::DIR_INDEX]);
        let kind = match types.get(&ino) {
            _ if has_entries && has_extents => return false,
            _ if ino == Ino::ROOT_DIR.0 || has_entries => FileType::Directory,
            Some(&file_type::SYMLINK) if has_extents => FileType::Symlink,
            _ if has_extents => FileType::Regular,
            _ if has_children => FileType::Directory,
            Some(&file_type::DIR) if !items.is_empty() => FileType::Directory,
            Some(&file_type::REG_FILE) if !items.is_empty() => FileType::Regular,
            _ => {
                self.edits.extend(items.into_keys().map(|key| (key, None)));
                return false;
            }
        };
        let item = self.inode_item(ino, kind);
        self.set(Key::new(ino, ItemType::INODE_ITEM, 0), item.as_bytes().to_vec());
        true
    }

    /// The item of an inode, of which only the other items are known.
    fn inode_item(&self, ino: u64, kind: FileType) -> InodeItem {
        let root = self.inode(Ino::ROOT_DIR.0);
        let at = root.map_or_else(FromZeros::new_zeroed, |root| root.ctime);
        let (mode, size) = match kind {
            FileType::Directory => (0o040_700u32, 0),
            FileType::Symlink => (0o120_777, self.end_of(ino)),
            _ => (0o100_600, self.end_of(ino)),
        };
        let unsummed = inode_flags::NODATASUM | inode_flags::NODATACOW;
        let flags = if self.has_no_checksums(ino) { unsummed } else { 0 };
        InodeItem {
            generation: self.generation.0.into(),
            transid: self.generation.0.into(),
            size: size.into(),
            nlink: 1.into(),
            mode: mode.into(),
            flags: flags.into(),
            atime: at,
            ctime: at,
            mtime: at,
            otime: at,
            ..InodeItem::new_zeroed()
        }
    }

    /// The extents of a file, with their offsets in bytes.
    fn each_extent(&self, ino: u64, visit: &mut dyn FnMut(u64, &FileExtent<'_>)) {
        for (key, data) in self.items_of(ino, ItemType::EXTENT_DATA) {
            if let Ok(extent) = FileExtent::parse(&data) {
                visit(key.offset, &extent);
            }
        }
    }

    /// The offset behind the last byte of a file that was written, in bytes.
    fn end_of(&self, ino: u64) -> u64 {
        let mut end = 0;
        self.each_extent(ino, &mut |offset, extent| {
            let len = match extent.body {
                FileExtentBody::Inline(bytes) => len_of_inline(extent, bytes),
                FileExtentBody::Extent { num_bytes, is_preallocated: false, .. } => num_bytes,
                FileExtentBody::Hole { .. } | FileExtentBody::Extent { .. } => return,
            };
            end = end.max(offset.saturating_add(len));
        });
        end
    }

    /// The length of the target of a symbolic link, in bytes; `None` when it has no target. An old
    /// kernel stored some with a zero byte behind them, which does not count.
    pub(super) fn target_len(&self, ino: u64) -> Option<u64> {
        let mut len = None;
        self.each_extent(ino, &mut |offset, extent| {
            if let (0, FileExtentBody::Inline(bytes)) = (offset, &extent.body) {
                let has_zero = extent.compression == Compression::None && bytes.ends_with(&[0]);
                len = Some(len_of_inline(extent, bytes) - u64::from(has_zero));
            }
        });
        len
    }

    /// Whether the first data of a file that was written has no checksum.
    fn has_no_checksums(&self, ino: u64) -> bool {
        let mut first = None;
        self.each_extent(ino, &mut |_, extent| {
            if let FileExtentBody::Extent { disk_bytenr, offset, is_preallocated: false, .. } =
                extent.body
            {
                let is_plain = extent.compression == Compression::None;
                first = first.or(Some((disk_bytenr.0.saturating_add(offset), is_plain)));
            }
        });
        let Some((address, true)) = first else { return false };
        let Some(tree) = self.volume.tree(TreeId::CSUM) else { return false };
        let (sector, len) = (self.volume.sector_size(), self.volume.superblock().checksum.len());
        // An item has no more checksums than a leaf has room for.
        let most = self.volume.node_size() / len as u64 * sector;
        let key = |offset| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, offset);
        let range = KeyRange { first: key(address.saturating_sub(most)), last: key(address) };
        let mut is_there = false;
        self.volume.each_item(tree, range, &mut |key, data| {
            let sectors = (data.len() / len) as u64;
            is_there |= address < key.offset.saturating_add(sectors * sector);
            ControlFlow::Continue(())
        });
        !is_there
    }

    /// Puts an extent without data into each range of a file that has none, in a volume that
    /// records these.
    pub(super) fn fill_holes(&mut self, ino: u64) {
        if self.volume.superblock().incompat.has(Incompat::NO_HOLES) {
            return;
        }
        // No file is longer. What says otherwise is no size.
        let longest = i64::MAX.cast_unsigned();
        let Some(item) = self.inode(ino).filter(|item| item.size.get() <= longest) else { return };
        let sector = self.volume.sector_size();
        let (mut behind, mut holes) = (0u64, Vec::new());
        let whole = |bytes: u64| bytes.checked_next_multiple_of(sector).unwrap_or(bytes);
        self.each_extent(ino, &mut |offset, extent| {
            let len = match extent.body {
                FileExtentBody::Inline(bytes) => whole(len_of_inline(extent, bytes)),
                FileExtentBody::Hole { num_bytes } | FileExtentBody::Extent { num_bytes, .. } => {
                    num_bytes
                }
            };
            if behind < offset {
                holes.push(behind..offset);
            }
            behind = behind.max(offset.saturating_add(len));
        });
        let end = whole(item.size.get());
        if behind < end {
            holes.push(behind..end);
        }
        for hole in holes {
            let key = Key::new(ino, ItemType::EXTENT_DATA, hole.start);
            self.set(key, self.hole(hole.end - hole.start));
        }
    }

    /// The item of a range without data.
    fn hole(&self, len: u64) -> Vec<u8> {
        let head = FileExtentHead {
            generation: self.generation.0.into(),
            ram_bytes: len.into(),
            extent_type: extent_type::REG,
            ..FileExtentHead::new_zeroed()
        };
        let tail = FileExtentTail { num_bytes: len.into(), ..FileExtentTail::new_zeroed() };
        [head.as_bytes(), tail.as_bytes()].concat()
    }
}

/// The length of data that an item has itself, in bytes.
fn len_of_inline(extent: &FileExtent<'_>, bytes: &[u8]) -> u64 {
    if extent.compression == Compression::None { bytes.len() as u64 } else { extent.ram_bytes }
}
