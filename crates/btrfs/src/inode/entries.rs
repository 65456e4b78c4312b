//! Entries of directories.
//!
//! An entry is stored twice: under the hash of its name, together with others that have the same
//! hash, and under its index. The size of a directory counts both: twice the length of every name.

use std::ops::{ControlFlow, RangeInclusive};

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, file_type, name_hash};
use offshoot_btrfs_format::encode;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileType, NAME_MAX, Result, Structure, Timestamp,
};

use super::changes::{Changes, timespec};
use super::directories::DirectoryFacts;
use super::{ROOT_DIR, entry_called, no_such_file};
use crate::delayed;
use crate::inode::Rooms;
use crate::storage::malformed;

/// The index of the first entry of a directory. The indexes 0 and 1 are for `.` and `..`.
pub(super) const FIRST_INDEX: u64 = 2;

/// What an entry leads to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryTarget {
    location: Key,
    file_type: FileType,
}

impl EntryTarget {
    /// An inode of the same subvolume.
    pub(crate) fn inode(ino: u64, file_type: FileType) -> Self {
        Self { location: Key::new(ino, ItemType::INODE_ITEM, 0), file_type }
    }

    /// The root of another subvolume.
    pub(crate) fn subvolume(id: TreeId) -> Self {
        let location = Key::new(id.0, ItemType::ROOT_ITEM, u64::MAX);
        Self { location, file_type: FileType::Directory }
    }

    /// Whether `entry` has this name and leads here. The offset of a location is ignored.
    fn is_of(self, entry: &DirItemEntry<'_>, name: &[u8]) -> bool {
        let ends = |location: Key| (location.objectid, location.item_type);
        entry.name == name && ends(entry.location) == ends(self.location)
    }
}

/// `ENOENT`, `EINVAL` or `ENAMETOOLONG` for an invalid name of an entry.
pub(crate) fn require_name(name: &[u8]) -> Result<()> {
    let bad = |errno| Err(Error::posix(errno, format!("the name `{}`", name.escape_ascii())));
    match name {
        b"" => bad(Errno::NOENT),
        b"." | b".." => bad(Errno::INVAL),
        _ if name.len() > NAME_MAX => bad(Errno::NAMETOOLONG),
        _ if name.iter().any(|&byte| byte == 0 || byte == b'/') => bad(Errno::INVAL),
        _ => Ok(()),
    }
}

/// The keys of the index items of `dir`, from the index `first` on.
pub(super) fn indexes(dir: FileId, first: u64) -> RangeInclusive<Key> {
    let key = |index| Key::new(dir.ino, ItemType::DIR_INDEX, index);
    key(first)..=key(u64::MAX)
}

/// The index behind that of the last entry of `dir`.
fn index_after_last(volume: &Rooms, dir: FileId) -> Result<u64> {
    let root = super::tree_of(volume, dir)?;
    let highest = delayed::last_below(volume, root, indexes(dir, 0))?.map(|key| key.offset);
    Ok(highest.map_or(FIRST_INDEX, |index| index.saturating_add(1).max(FIRST_INDEX)))
}

/// The index of an entry of `dir` that leads to `target` by `name`. This reads all entries.
fn index_of(volume: &Rooms, dir: FileId, name: &[u8], target: EntryTarget) -> Result<u64> {
    let root = super::tree_of(volume, dir)?;
    let mut found = None;
    delayed::for_each_item(volume, root, indexes(dir, 0), &mut |key, data| {
        if leads_to(data, name, target)? {
            found = Some(key.offset);
            return Ok(ControlFlow::Break(()));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    found.ok_or_else(|| {
        let problem = format!("`{}` has no index", name.escape_ascii());
        Error::corrupt(Structure::DirectoryIndex, problem).in_file(dir)
    })
}

/// Whether the directory `dir` has an entry.
pub(crate) fn has_entries(volume: &Rooms, dir: FileId) -> Result<bool> {
    let root = super::tree_of(volume, dir)?;
    let mut has_some = false;
    delayed::for_each_item(volume, root, indexes(dir, 0), &mut |_, _| {
        has_some = true;
        Ok(ControlFlow::Break(()))
    })?;
    Ok(has_some)
}

impl Changes<'_, '_> {
    /// The index of the next entry of `dir`.
    pub(crate) fn next_index(&mut self, dir: FileId) -> Result<u64> {
        let volume = self.volume();
        if let Some(next) = volume.inodes.with_directory(dir, DirectoryFacts::take_index) {
            return Ok(next);
        }
        // A log may still contain entries that were removed in this transaction.
        let next = index_after_last(volume, dir)?.max(self.handle().log().index_after_removed(dir));
        let after = next.checked_add(1).ok_or_else(|| {
            Error::posix(Errno::NOSPC, format!("an index for one more entry of {dir}"))
        })?;
        volume.inodes.with_directory(dir, |directory| directory.set_next_index(after));
        Ok(next)
    }

    /// Adds an entry, and adjusts the size of the directory.
    ///
    /// # Errors
    /// `EEXIST`; `EOVERFLOW` when too many names have the same hash; `ENOENT` in a subvolume that
    /// has lost its name, for an entry in its root directory and for an entry of another subvolume
    /// anywhere in it.
    pub(crate) fn add_entry(
        &mut self,
        EntryPlace { dir, name }: EntryPlace<'_>,
        target: EntryTarget,
        index: u64,
        at: Timestamp,
    ) -> Result<()> {
        if dir.ino == ROOT_DIR || target.location.item_type == ItemType::ROOT_ITEM {
            self.require_subvolume_name()?;
        }
        let entry = encode::dir_entry(&DirItemEntry {
            location: target.location,
            transid: self.generation().0,
            file_type: file_type::of(target.file_type),
            name,
            data: &[],
        });
        let hash = name_hash(name);
        let key = Key::new(dir.ino, ItemType::DIR_ITEM, hash);
        if self.volume().inodes.with_directory(dir, |directory| directory.add_name(hash)) {
            self.put_new(key, entry.clone());
        } else {
            self.join_entry(key, dir, name, &entry)?;
        }
        self.put_new(Key::new(dir.ino, ItemType::DIR_INDEX, index), entry);
        let grown = 2 * name.len() as u64;
        let time = timespec(at)?;
        self.change_inode(dir, at, |item| {
            item.size = item.size.get().saturating_add(grown).into();
            item.mtime = time;
        })
    }

    /// Appends an entry to those whose names have the same hash.
    fn join_entry(&mut self, key: Key, dir: FileId, name: &[u8], entry: &[u8]) -> Result<()> {
        let mut all = self.get(key)?.unwrap_or_default().to_vec();
        for other in dir_entries(&all) {
            if other.map_err(malformed)?.name == name {
                let what = format!("`{}` in {dir}", name.escape_ascii());
                return Err(Error::posix(Errno::EXIST, what));
            }
        }
        all.extend_from_slice(entry);
        if !self.fits(all.len()) {
            let what = format!("names in {dir} with the hash of `{}`", name.escape_ascii());
            return Err(Error::posix(Errno::OVERFLOW, what));
        }
        self.put(key, all)
    }

    /// Whether the entry of `dir` at `index` leads to `target` by `name`.
    pub(super) fn is_entry(
        &mut self,
        EntryPlace { dir, name }: EntryPlace<'_>,
        target: EntryTarget,
        index: u64,
    ) -> Result<bool> {
        let key = Key::new(dir.ino, ItemType::DIR_INDEX, index);
        leads_to(self.get(key)?.unwrap_or_default(), name, target)
    }

    /// Removes the entry of a subvolume that does not exist, or is attached elsewhere. No reference
    /// stores its index, so this searches for it.
    pub(super) fn remove_placeholder(
        &mut self,
        place: EntryPlace<'_>,
        at: Timestamp,
    ) -> Result<()> {
        let EntryPlace { dir, name } = place;
        let key = Key::new(dir.ino, ItemType::DIR_ITEM, name_hash(name));
        let entry = entry_called(self.get(key)?.unwrap_or_default(), name)?;
        let location = entry.ok_or_else(|| no_such_file(dir))?.location;
        let target = EntryTarget { location, file_type: FileType::Directory };
        let index = index_of(self.volume(), dir, name, target)?;
        self.remove_entry(place, target, index, at)
    }

    /// Removes the entry that leads to `target` and has the index `index`. A damaged directory may
    /// have several with one name; the others stay.
    ///
    /// # Errors
    /// `ENOENT` when no entry has the name. [`Error::Corrupt`] when the two copies of the entry
    /// disagree, because removing one of them could remove another entry.
    pub(crate) fn remove_entry(
        &mut self,
        EntryPlace { dir, name }: EntryPlace<'_>,
        target: EntryTarget,
        index: u64,
        at: Timestamp,
    ) -> Result<()> {
        let corrupt = |structure, problem: &str| {
            let problem = format!("`{}` {problem}", name.escape_ascii());
            Err(Error::corrupt(structure, problem).in_file(dir))
        };
        let key = Key::new(dir.ino, ItemType::DIR_ITEM, name_hash(name));
        let all = self.get(key)?.unwrap_or_default();
        let Some(rest) = without_one(all, |entry| target.is_of(entry, name))? else {
            let Some(other) = entry_called(all, name)? else { return Err(no_such_file(dir)) };
            let problem = format!("leads to {}, not to {}", other.location, target.location);
            return corrupt(Structure::DirectoryItem, &problem);
        };
        self.put_or_remove(key, rest)?;
        let key = Key::new(dir.ino, ItemType::DIR_INDEX, index);
        let all = self.get(key)?.unwrap_or_default();
        let Some(rest) = without_one(all, |entry| target.is_of(entry, name))? else {
            let what = if all.is_empty() { "there is no entry" } else { "another entry stands" };
            return corrupt(
                Structure::DirectoryIndex,
                &format!("has the index {index}, where {what}"),
            );
        };
        self.put_or_remove(key, rest)?;
        let shrunk = 2 * name.len() as u64;
        let time = timespec(at)?;
        self.change_inode(dir, at, |item| {
            item.size = item.size.get().saturating_sub(shrunk).into();
            item.mtime = time;
        })
    }
}

/// Whether one of the entries in `data` leads to `target` by `name`.
fn leads_to(data: &[u8], name: &[u8], target: EntryTarget) -> Result<bool> {
    for entry in dir_entries(data) {
        if target.is_of(&entry.map_err(malformed)?, name) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The entries in `data` without the first for which `is_wanted` holds; `None` when there is none.
pub(super) fn without_one(
    data: &[u8],
    is_wanted: impl Fn(&DirItemEntry<'_>) -> bool,
) -> Result<Option<Vec<u8>>> {
    let (mut rest, mut is_found) = (Vec::with_capacity(data.len()), false);
    for entry in dir_entries(data) {
        let entry = entry.map_err(malformed)?;
        if !is_found && is_wanted(&entry) {
            is_found = true;
        } else {
            rest.extend_from_slice(&encode::dir_entry(&entry));
        }
    }
    Ok(is_found.then_some(rest))
}
