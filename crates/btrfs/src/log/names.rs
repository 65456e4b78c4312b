//! Replays names from both sides: entries of directories, and names of inodes.
//!
//! An entry leads to an inode, and the inode has the name in an item of its own. Both are added and
//! removed together.

use std::ops::RangeInclusive;

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, extref_hash, name_hash};
use offshoot_btrfs_format::inode::{InodeName, inode_extrefs, inode_refs};
use offshoot_btrfs_format::space::DirLogItem;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{Code, EntryPlace, Error, FileType, Result, Structure};

use super::replay::SubvolumeReplay;
use crate::inode::{entry_called, logged, type_of};
use crate::storage::malformed;
use crate::tree::{Cursor, TreeRoot, with_item};

/// An entry of a directory, or a name of an inode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LoggedName {
    pub(super) dir: u64,
    pub(super) index: u64,
    pub(super) bytes: Vec<u8>,
}

impl From<InodeName<'_>> for LoggedName {
    fn from(one: InodeName<'_>) -> Self {
        Self { dir: one.parent, index: one.index, bytes: one.name.to_vec() }
    }
}

pub(super) fn is_of_names(item_type: ItemType) -> bool {
    matches!(item_type, ItemType::INODE_REF | ItemType::INODE_EXTREF)
}

/// The names in an INODE_REF or INODE_EXTREF item.
pub(super) fn names_of(key: Key, data: &[u8]) -> Result<Vec<LoggedName>> {
    let all: Result<Vec<_>, _> = if key.item_type == ItemType::INODE_REF {
        inode_refs(key.offset, data).map(|one| one.map(LoggedName::from)).collect()
    } else {
        inode_extrefs(data).map(|one| one.map(LoggedName::from)).collect()
    };
    all.map_err(malformed)
}

/// The one entry in a DIR_INDEX item.
pub(super) fn only_entry(data: &[u8]) -> Result<DirItemEntry<'_>> {
    let one = dir_entries(data).next();
    one.ok_or_else(|| Error::corrupt(Structure::DirectoryIndex, "an item without an entry"))?
        .map_err(malformed)
}

impl SubvolumeReplay<'_, '_> {
    /// The location that the entry `name` leads to.
    fn target_of_name(&self, dir: u64, name: &[u8]) -> Result<Option<Key>> {
        let key = Key::new(dir, ItemType::DIR_ITEM, name_hash(name));
        let found = with_item(self.volume, self.root()?, key, |data| {
            Ok(entry_called(data, name)?.map(|entry| entry.location))
        })?;
        Ok(found.flatten())
    }

    /// The name of the entry at `index`, and the location that it leads to.
    fn entry_at(&self, tree: TreeRoot, dir: u64, index: u64) -> Result<Option<(Vec<u8>, Key)>> {
        let key = Key::new(dir, ItemType::DIR_INDEX, index);
        let owned = |data: &[u8]| only_entry(data).map(|one| (one.name.to_vec(), one.location));
        with_item(self.volume, tree, key, owned)
    }

    /// Removes an entry, and the name from the inode that it leads to.
    fn unlink(&mut self, dir: u64, name: &[u8], location: Key) -> Result<()> {
        if location.item_type != ItemType::INODE_ITEM {
            let name = name.escape_ascii();
            let what =
                format!("replaying a tree log that removes `{name}`, the place of a subvolume");
            return Err(Error::unsupported(Code::Unsupported, what));
        }
        let (dir, file) = (self.file(dir), self.file(location.objectid));
        logged::remove_name(self.handle, EntryPlace { dir, name }, file)?;
        self.uncounted.insert(file.ino);
        Ok(())
    }

    /// Gives the inode the name, unless it has the name at this index already. Another inode with
    /// the name, and another entry at the index, are removed.
    fn link(
        &mut self,
        ino: u64,
        LoggedName { dir, index, bytes: name }: &LoggedName,
    ) -> Result<()> {
        let location = Key::new(ino, ItemType::INODE_ITEM, 0);
        let (by_name, at_index) =
            (self.target_of_name(*dir, name)?, self.entry_at(self.root()?, *dir, *index)?);
        let is_there =
            at_index.as_ref().is_some_and(|(other, at)| other == name && *at == location);
        if by_name == Some(location) && is_there {
            return Ok(());
        }
        if let Some(other) = by_name {
            self.unlink(*dir, name, other)?;
        }
        if let Some((other, at)) = at_index.filter(|(other, _)| other != name) {
            self.unlink(*dir, &other, at)?;
        }
        let place = EntryPlace { dir: self.file(*dir), name };
        logged::add_name(self.handle, place, self.file(ino), *index)?;
        self.uncounted.insert(ino);
        Ok(())
    }

    /// Removes the entries of a directory that the log covers and lacks.
    pub(super) fn drop_entries(&mut self, dir: u64) -> Result<()> {
        let volume = self.volume;
        let first = Key::new(dir, ItemType::DIR_LOG_INDEX, 0);
        let mut ranges = Cursor::seek(volume, self.log, first)?;
        let mut done = 0;
        while let Some((key, data)) = ranges.item_of(dir, ItemType::DIR_LOG_INDEX) {
            let end = DirLogItem::view(data).map_err(malformed)?.end.get();
            let from = key.offset.max(done);
            if from <= end {
                self.drop_entries_in(dir, from..=end, true)?;
                done = end.saturating_add(1);
            }
            ranges.advance()?;
        }
        Ok(())
    }

    /// Removes all entries of a directory that has no name left.
    pub(super) fn drop_all_entries(&mut self, dir: u64) -> Result<()> {
        self.drop_entries_in(dir, 0..=u64::MAX, false)
    }

    /// Removes the entries of `dir` in a range of indexes. With `log_keeps`, those that the log has
    /// stay.
    fn drop_entries_in(
        &mut self,
        dir: u64,
        range: RangeInclusive<u64>,
        log_keeps: bool,
    ) -> Result<()> {
        let (first, last) = range.into_inner();
        let mut next = Some(Key::new(dir, ItemType::DIR_INDEX, first));
        while let Some(from) = next {
            let cursor = Cursor::seek(self.volume, self.root()?, from)?;
            let Some((key, data)) =
                cursor.item_of(dir, ItemType::DIR_INDEX).filter(|(key, _)| key.offset <= last)
            else {
                return Ok(());
            };
            let DirItemEntry { name, location, .. } = only_entry(data)?;
            let name = name.to_vec();
            next = key.successor();
            drop(cursor);
            let logged = if log_keeps { self.entry_at(self.log, dir, key.offset)? } else { None };
            if logged.is_none_or(|(kept, _)| kept != name) {
                self.unlink(dir, &name, location)?;
                self.require_little()?;
            }
        }
        Ok(())
    }

    /// Replays an entry of the log. If the log has the name of the inode as well, this leaves the
    /// name to the later pass over names.
    pub(super) fn replay_entry(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let (dir, index) = (key.objectid, key.offset);
        let DirItemEntry { name, location, .. } = only_entry(data)?;
        if !self.has_directory(key, dir)? {
            return Err(self.wrong(key, "an entry of a directory that there is not"));
        }
        let by_name = self.target_of_name(dir, name)?;
        let at_index = self.entry_at(self.root()?, dir, index)?;
        let is_there =
            at_index.as_ref().is_some_and(|(other, at)| other == name && *at == location);
        if by_name == Some(location) && is_there {
            return Ok(());
        }
        if location.item_type != ItemType::INODE_ITEM {
            let name = name.escape_ascii();
            let what = format!("replaying a tree log with `{name}`, the place of a subvolume");
            return Err(Error::unsupported(Code::Unsupported, what));
        }
        let ino = location.objectid;
        // The log may have a newer entry for an inode that it does not have. Then this entry is
        // skipped.
        if self.inode(ino)?.is_none() {
            return Ok(());
        }
        let new = LoggedName { dir, index, bytes: name.to_vec() };
        if let Some(other) = by_name.filter(|other| *other != location) {
            self.unlink(dir, name, other)?;
        }
        if let Some((other, at)) = at_index.filter(|(other, at)| other != name && *at != location) {
            self.unlink(dir, &other, at)?;
        }
        if self.knows_name(ino, &new)? || by_name == Some(location) {
            return Ok(());
        }
        self.link(ino, &new)
    }

    /// Whether the subvolume has the inode `dir`, which is a directory according to the item `key`
    /// of the log.
    ///
    /// # Errors
    /// When the inode is not a directory.
    fn has_directory(&self, key: Key, dir: u64) -> Result<bool> {
        match self.inode(dir)? {
            Some(item) if type_of(&item)? != FileType::Directory => {
                Err(self.wrong(key, "a name in what is no directory"))
            }
            found => Ok(found.is_some()),
        }
    }

    /// The directory that the first name of an inode is in, if it has a name.
    pub(super) fn parent(&self, ino: u64) -> Result<Option<u64>> {
        let first = Key::new(ino, ItemType::INODE_REF, 0);
        let cursor = Cursor::seek(self.volume, self.root()?, first)?;
        match cursor.item() {
            Some((key, data)) if key.objectid == ino && is_of_names(key.item_type) => {
                Ok(names_of(key, data)?.first().map(|name| name.dir))
            }
            _ => Ok(None),
        }
    }

    /// Whether the log has this name of the inode.
    fn knows_name(&self, ino: u64, name: &LoggedName) -> Result<bool> {
        let keys = [
            Key::new(ino, ItemType::INODE_REF, name.dir),
            Key::new(ino, ItemType::INODE_EXTREF, extref_hash(name.dir, &name.bytes)),
        ];
        for key in keys {
            let has = |one: &LoggedName| one.dir == name.dir && one.bytes == name.bytes;
            let found = with_item(self.volume, self.log, key, |data| {
                Ok(names_of(key, data)?.iter().any(has))
            })?;
            if found == Some(true) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Gives an inode the names of an item of the log, and removes the other names in the same item
    /// of the subvolume.
    pub(super) fn replay_names(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let (ino, new) = (key.objectid, names_of(key, data)?);
        // A root directory has only a name in itself.
        if key.offset == ino {
            return Ok(());
        }
        if self.inode(ino)?.is_none() {
            return Err(self.wrong(key, "a name of an inode that there is not"));
        }
        let stored = with_item(self.volume, self.root()?, key, |data| names_of(key, data))?;
        let is_gone = |one: &LoggedName| {
            !new.iter().any(|kept| kept.dir == one.dir && kept.bytes == one.bytes)
        };
        let location = Key::new(ino, ItemType::INODE_ITEM, 0);
        for gone in stored.unwrap_or_default().iter().filter(|one| is_gone(one)) {
            self.unlink(gone.dir, &gone.bytes, location)?;
        }
        for name in &new {
            // If the directory is deleted, the name is gone with it.
            if self.has_directory(key, name.dir)? {
                self.link(ino, name)?;
            }
        }
        Ok(())
    }
}
