//! Replays inodes: the inode item, removed attributes, and the final count of names.

use std::collections::HashSet;

use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::inode::{InodeItem, inode_extrefs, inode_refs};
use offshoot_btrfs_format::{Ino, ItemType, Key};
use offshoot_vfs::{Error, FileType, Result, Structure};
use zerocopy::IntoBytes;

use super::replay::SubvolumeReplay;
use crate::data::drop_range;
use crate::inode::xattr::with_property;
use crate::inode::{no_such_file, orphan_key, type_of};
use crate::storage::malformed;
use crate::tree::{Cursor, with_item};

impl SubvolumeReplay<'_, '_> {
    /// The inode item of the subvolume, if there is one.
    pub(super) fn inode(&self, ino: u64) -> Result<Option<InodeItem>> {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let view = |data: &[u8]| InodeItem::view(data).copied().map_err(malformed);
        with_item(self.volume, self.root()?, key, view)
    }

    pub(super) fn put_inode(&self, ino: u64, item: &InodeItem) -> Result<()> {
        self.put(Key::new(ino, ItemType::INODE_ITEM, 0), item.as_bytes())
    }

    /// Replaces the inode by that of the log, and removes the attributes, entries and data that the
    /// log says it lacks.
    pub(super) fn replay_inode(&mut self, key: Key, logged: InodeItem) -> Result<()> {
        let ino = key.objectid;
        let file_type = type_of(&logged)?;
        if let Some(stored) = self.inode(ino)? {
            if type_of(&stored)? != file_type {
                return Err(self.wrong(key, "the subvolume has a file of another type there"));
            }
            self.drop_attributes(ino)?;
            if file_type == FileType::Directory {
                self.drop_entries(ino)?;
            }
        }
        // Removing entries has changed the size of the directory, so this reads the inode again.
        let mut item = self.merged(logged, self.inode(ino)?, file_type);
        if file_type == FileType::Regular {
            let sector = u64::from(self.volume.superblock().sector_size);
            let end = item.size.get().checked_next_multiple_of(sector);
            let end = end.ok_or_else(|| self.wrong(key, "a size that no file has"))?;
            let dropped = drop_range(self.handle, self.file(ino), end..u64::MAX)?;
            item.nbytes = item.nbytes.get().saturating_sub(dropped).into();
        }
        self.uncounted.insert(ino);
        self.put_inode(ino, &item)
    }

    /// The inode item, from that of the log and perhaps one of the subvolume. Two fields are
    /// counted where they change, so they come from the subvolume: the bytes of data, and the size
    /// of a directory.
    fn merged(
        &self,
        logged: InodeItem,
        stored: Option<InodeItem>,
        file_type: FileType,
    ) -> InodeItem {
        let is_mention = logged.generation.get() == 0;
        if let Some(stored) = stored.filter(|_| is_mention) {
            // Such an item may give the length of a file. A length of 0 means that the file was not
            // fsynced.
            let is_long = file_type == FileType::Regular && logged.size.get() != 0;
            let size = if is_long { logged.size } else { stored.size };
            return InodeItem { size, ..stored };
        }
        let mut item = logged;
        if is_mention {
            item.generation = self.handle.generation().0.into();
        }
        item.nbytes = stored.map_or(0, |stored| stored.nbytes.get()).into();
        if file_type == FileType::Directory {
            item.size = stored.map_or(0, |stored| stored.size.get()).into();
        }
        item
    }

    /// Removes the attributes that the log does not have. A later pass puts those that it has.
    fn drop_attributes(&self, ino: u64) -> Result<()> {
        let mut gone = Vec::new();
        let first = Key::new(ino, ItemType::XATTR_ITEM, 0);
        let mut cursor = Cursor::seek(self.volume, self.root()?, first)?;
        while let Some((key, _)) = cursor.item_of(ino, ItemType::XATTR_ITEM) {
            if with_item(self.volume, self.log, key, |_| Ok(()))?.is_none() {
                gone.push((key, None));
            }
            cursor.advance()?;
        }
        drop(cursor);
        self.handle.change(self.tree, |tree| tree.apply_batch(&gone).map(drop))
    }

    /// Replaces an item of attributes, which holds all names with one hash, by that of the log.
    ///
    /// The log may have the compression property of an inode and not its flags, and then the flags
    /// follow from the property, as they do when the kernel loads an inode.
    pub(super) fn replay_attribute(&self, key: Key, data: &[u8]) -> Result<()> {
        let Some(mut item) = self.inode(key.objectid)? else {
            return Err(self.wrong(key, "an attribute of an inode that there is not"));
        };
        let mut flags = item.flags.get();
        for attribute in dir_entries(data) {
            let attribute = attribute.map_err(malformed)?;
            flags = with_property(flags, attribute.name, attribute.data);
        }
        if flags != item.flags.get() {
            item.flags = flags.into();
            self.put_inode(key.objectid, &item)?;
        }
        self.put(key, data)
    }

    /// Counts the names of all inodes whose names the log may have changed. An inode without names
    /// becomes an orphan.
    pub(super) fn count_links(&mut self) -> Result<()> {
        let mut attached = HashSet::from([Ino::ROOT_DIR.0]);
        while let Some(ino) = self.uncounted.pop_last() {
            let file = self.file(ino);
            let mut item = self.inode(ino)?.ok_or_else(|| no_such_file(file))?;
            let (count, is_directory) = (self.names(ino)?, type_of(&item)? == FileType::Directory);
            if is_directory && count > 1 {
                let problem = "with the log the directory has several names";
                return Err(Error::corrupt(Structure::InodeRef, problem).in_file(file));
            }
            if is_directory {
                self.require_attached(ino, &mut attached)?;
            }
            if is_directory && count == 0 {
                self.drop_all_entries(ino)?;
                item = self.inode(ino)?.ok_or_else(|| no_such_file(file))?;
            }
            if item.nlink.get() != count {
                item.nlink = count.into();
                self.put_inode(ino, &item)?;
            }
            if count == 0 {
                self.put(orphan_key(ino), &[])?;
            }
            self.require_little()?;
        }
        Ok(())
    }

    /// # Errors
    /// When the directory is below itself: the way up from it ends neither at the root nor at an
    /// orphan. `attached` holds directories whose way up is known to be good.
    fn require_attached(&self, dir: u64, attached: &mut HashSet<u64>) -> Result<()> {
        let (mut at, mut way) = (dir, HashSet::new());
        while !attached.contains(&at) {
            if !way.insert(at) {
                let problem = "with the log the directory is below itself";
                return Err(Error::corrupt(Structure::InodeRef, problem).in_file(self.file(dir)));
            }
            match self.parent(at)? {
                Some(parent) => at = parent,
                None => break,
            }
        }
        attached.extend(way);
        Ok(())
    }

    /// How many names the inode has.
    fn names(&self, ino: u64) -> Result<u32> {
        let mut count = 0;
        let first = Key::new(ino, ItemType::INODE_REF, 0);
        let mut cursor = Cursor::seek(self.volume, self.root()?, first)?;
        while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid == ino) {
            count += match key.item_type {
                // The root directory is called `..` in itself.
                ItemType::INODE_REF => inode_refs(key.offset, data).count(),
                ItemType::INODE_EXTREF => inode_extrefs(data).count(),
                _ => break,
            };
            cursor.advance()?;
        }
        u32::try_from(count)
            .map_err(|_| Error::corrupt(Structure::InodeRef, "more names than can be"))
    }
}
