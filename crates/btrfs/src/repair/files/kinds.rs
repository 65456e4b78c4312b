//! What kind of file an inode is, where its mode contradicts the rest or does not say it.
//!
//! | the mode | what says otherwise | what it becomes |
//! |---|---|---|
//! | of any type | it is the root of a subvolume | a directory |
//! | of a file, or no type | it has entries, and what leads to it says so, if any | a directory |
//! | no type | all entries that lead to it, and not its items | what these say |
//! | of what is no file | it has extents, and all entries say that it is a file or link | that |
//! | no type | extents on disk, without any entry | a regular file |
//!
//! Everything else stays as it is, because as much speaks for one kind as for the other. The flags
//! of a symbolic link that it cannot have are cleared.

use offshoot_btrfs_format::dir::file_type;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{Ino, ItemType, Key};
use offshoot_vfs::FileType;
use zerocopy::FromBytes;

use super::{FileMender, OwnedName};

/// The bits of a mode that say the type.
const TYPE_BITS: u32 = 0o170_000;

impl FileMender<'_, '_> {
    /// Gives an inode the type that it surely has, and takes flags from it that it cannot have.
    pub(super) fn mend_kind(&mut self, ino: u64) {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let Some(mut data) = self.item(key) else { return };
        let kind = self.sure_kind(ino);
        let Ok(inode) = InodeItem::mut_from_bytes(&mut data) else { return };
        if let Some(kind) = kind {
            inode.mode = (inode.mode.get() & !TYPE_BITS | kind.mode_bits()).into();
        }
        if FileType::from_mode(inode.mode.get()) == Some(FileType::Symlink) {
            let impossible = inode_flags::IMMUTABLE | inode_flags::APPEND;
            inode.flags = (inode.flags.get() & !impossible).into();
        }
        self.set(key, data);
    }

    /// The type that an inode has other than by its mode; `None` when that is not sure.
    fn sure_kind(&self, ino: u64) -> Option<FileType> {
        let current = self.type_of(ino);
        let has = |item_type| !self.items_of(ino, item_type).is_empty();
        let has_extents = has(ItemType::EXTENT_DATA);
        if current == Some(FileType::Directory) && !has_extents {
            return None;
        }
        let is_root = ino == Ino::ROOT_DIR.0;
        let has_entries = has(ItemType::DIR_ITEM) || has(ItemType::DIR_INDEX);
        let told = self.told_kinds(ino);
        if is_root || has_entries {
            let is_told = told.iter().all(|kind| *kind == FileType::Directory);
            let is_sure = !has_extents && (is_root || is_told);
            return is_sure.then_some(FileType::Directory);
        }
        let may_have_extents = |kind| matches!(kind, FileType::Regular | FileType::Symlink);
        if current.is_some_and(|kind| may_have_extents(kind) || !has_extents) {
            return None;
        }
        match told.split_first() {
            Some((&kind, others)) if others.iter().all(|other| *other == kind) => {
                Some(kind).filter(|&kind| may_have_extents(kind) || !has_extents)
            }
            None if current.is_none() && self.has_extents_on_disk(ino) => Some(FileType::Regular),
            _ => None,
        }
    }

    /// The types that the entries of the names of an inode give it.
    pub(super) fn told_kinds(&self, ino: u64) -> Vec<FileType> {
        let location = Key::new(ino, ItemType::INODE_ITEM, 0);
        let told = self.names(ino).into_iter().filter(|name| name.parent != ino);
        let told = told.flat_map(|OwnedName { parent, index, name }| {
            let mut entries = self.hashed_entries(parent, &name);
            entries.extend(self.indexed_entries(parent, index));
            entries.retain(|entry| entry.name == name && entry.location == location);
            entries
        });
        told.filter_map(|entry| file_type::from_value(entry.file_type)).collect()
    }

    fn has_extents_on_disk(&self, ino: u64) -> bool {
        self.items_of(ino, ItemType::EXTENT_DATA).values().any(|data| {
            let extent = FileExtent::parse(data);
            extent.is_ok_and(|extent| matches!(extent.body, FileExtentBody::Extent { .. }))
        })
    }
}
