//! Inodes: attributes, names, directory entries, extended attributes.
//!
//! All functions take the [`FileId`] of a file in some subvolume. Errors of the corrupt kind name
//! that file. This module reads; these modules change inodes:
//!
//! | module | what it holds |
//! |---|---|
//! | `rooms` | the state of this room and those below, and what it asks of the one above |
//! | `handle`, `join` | joining the running transaction with space reserved; commits |
//! | `in_use` | locks of inodes, their order, and the count of openings |
//! | `directories` | a cache of facts about directories: numbers for new files, the next index, names |
//! | `subvolume` | numbers of new inodes; whether a subvolume may be changed |
//! | `changes` | the changes of one operation, gathered in memory and applied together |
//! | `entries`, `names` | the two sides of a name: in the directory and in the inode |
//! | `create`, `unlink`, `rename`, `attributes`, `flags`, `xattr`, `write` | the operations |
//! | `acl` | how access control lists and permissions follow each other |
//! | `write_back` | from buffered data to extents |
//! | `logged` | names as a tree log has them |
//! | `evict` | removing whole inodes, at once or after they were open |
//! | `orphans` | removing files without names that a crash left behind |

pub(crate) mod acl;
pub(crate) mod allocate;
pub(crate) mod attributes;
pub(crate) mod changes;
pub(crate) mod clone;
pub(crate) mod compression;
pub(crate) mod create;
mod directories;
pub(crate) mod entries;
pub(crate) mod evict;
#[cfg(test)]
mod faults;
pub(crate) mod flags;
mod handle;
mod in_use;
mod join;
pub(crate) mod logged;
mod names;
pub(crate) mod orphans;
pub(crate) mod rename;
mod rooms;
#[cfg(test)]
mod stale_tests;
pub(crate) mod subvolume;
#[cfg(test)]
mod tests;
pub(crate) mod unlink;
pub(crate) mod write;
pub(crate) mod write_back;
pub(crate) mod xattr;

use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, file_type, name_hash};
use offshoot_btrfs_format::inode::{InodeName, inode_extrefs, inode_refs};
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId};
use offshoot_vfs::{Attr, Errno, Error, FileId, FileType, Parent, Result, Structure};

use crate::data::{PLACEHOLDER, timestamp};
pub(crate) use crate::data::{inode_item, no_such_file, placeholder_in, tree_of, type_of};
use crate::delayed;
use crate::storage::malformed;
use crate::transaction::stands_at;
use crate::tree::{Cursor, TreeRoot, with_item};
use entries::{FIRST_INDEX, indexes};
pub(crate) use evict::orphan_key;
pub(crate) use handle::RoomsHandle;
pub(crate) use in_use::{Inodes, Locks};
pub use rooms::Rooms;
pub(crate) use rooms::{AtRest, Upkeep};
pub(crate) use subvolume::SubvolumeMoves;

/// The inode number of the root directory of every subvolume.
pub(crate) const ROOT_DIR: u64 = Ino::ROOT_DIR.0;

/// The attributes of `file`.
pub(crate) fn attr(volume: &Rooms, file: FileId) -> Result<Attr> {
    if let Some(dir) = placeholder_in(file) {
        let dir = attr(volume, dir)?;
        let (permissions, size, allocated_bytes, nlink) = (0o755, 0, 0, 1);
        return Ok(Attr { file, permissions, size, allocated_bytes, nlink, ..dir });
    }
    let buffer = volume.buffers.get(file);
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let file_type = type_of(&item)?;
    let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
    let unit = u64::from(volume.superblock().sector_size);
    let stored = Attr {
        file,
        file_type,
        permissions: item.mode.get() & 0o7777,
        nlink: item.nlink.get(),
        uid: item.uid.get(),
        gid: item.gid.get(),
        rdev: if is_device { item.device_number() } else { (0, 0) },
        size: item.size.get(),
        // The kernel counts whole sectors, even for inline data.
        allocated_bytes: item.nbytes.get().checked_next_multiple_of(unit).unwrap_or(u64::MAX),
        atime: timestamp(&item.atime),
        mtime: timestamp(&item.mtime),
        ctime: timestamp(&item.ctime),
        btime: timestamp(&item.otime),
        generation: item.generation.get(),
    };
    Ok(buffer.map_or(stored, |buffer| {
        let dirty = buffer.read();
        // Buffered data counts as additional, up to the length of the file.
        let most = dirty.size.next_multiple_of(unit).max(stored.allocated_bytes);
        Attr {
            size: dirty.size,
            allocated_bytes: stored.allocated_bytes.saturating_add(dirty.bytes()).min(most),
            mtime: dirty.mtime.unwrap_or(stored.mtime),
            ctime: dirty.ctime.max(stored.ctime),
            ..stored
        }
    }))
}

/// `ENOTDIR` unless `dir` is a directory.
fn require_dir(volume: &Rooms, root: TreeRoot, dir: FileId) -> Result<()> {
    match type_of(&inode_item(volume, root, dir)?)? {
        FileType::Directory => Ok(()),
        _ => Err(Error::posix(Errno::NOTDIR, dir.to_string())),
    }
}

/// The file that the entry `name` of the directory `dir` leads to. `location` is that of the entry.
fn target(volume: &Rooms, dir: FileId, name: &[u8], location: Key) -> Result<FileId> {
    let Key { objectid, item_type, .. } = location;
    match item_type {
        ItemType::INODE_ITEM if objectid != ROOT_DIR && objectid & PLACEHOLDER == 0 => {
            Ok(FileId { dev: dir.dev, ino: objectid })
        }
        ItemType::ROOT_ITEM if stands_at(volume, TreeId(objectid), dir, name)? => {
            Ok(FileId { dev: objectid, ino: ROOT_DIR })
        }
        ItemType::ROOT_ITEM => Ok(FileId { dev: dir.dev, ino: dir.ino | PLACEHOLDER }),
        _ => Err(Error::corrupt(
            Structure::DirectoryEntry,
            format!("leads to {location}, which nothing can stand at"),
        )),
    }
}

/// The file called `name` in `dir`.
pub(crate) fn lookup(volume: &Rooms, dir: FileId, name: &[u8]) -> Result<FileId> {
    loop {
        let moves = volume.moves.count();
        let found = lookup_once(volume, dir, name)?;
        // While a subvolume moves, its entry may not match its ROOT_REF for a moment.
        if placeholder_in(found).is_none() || volume.moves.is_still(moves) {
            return Ok(found);
        }
        std::thread::yield_now();
    }
}

/// The entry called `name` in a DIR_ITEM or XATTR_ITEM item.
pub(crate) fn entry_called<'d>(data: &'d [u8], name: &[u8]) -> Result<Option<DirItemEntry<'d>>> {
    for entry in dir_entries(data) {
        let entry = entry.map_err(malformed)?;
        if entry.name == name {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

pub(crate) fn lookup_once(volume: &Rooms, dir: FileId, name: &[u8]) -> Result<FileId> {
    let missing = || {
        let name = name.escape_ascii();
        Error::posix(Errno::NOENT, format!("`{name}` in {dir}"))
    };
    if placeholder_in(dir).is_some() {
        return Err(missing());
    }
    let root = tree_of(volume, dir)?;
    let hash = name_hash(name);
    if volume.inodes.lacks_name(dir, hash) {
        return Err(missing());
    }
    let key = Key::new(dir.ino, ItemType::DIR_ITEM, hash);
    let found = delayed::with_item(volume, root, key, |data| {
        Ok(entry_called(data, name)?.map(|entry| entry.location))
    })?;
    match found.flatten() {
        Some(location) => target(volume, dir, name, location),
        None => require_dir(volume, root, dir).and_then(|()| Err(missing())),
    }
}

/// Calls `visit` with the entries of `dir` whose index is greater than `after`, until it breaks.
pub(crate) fn read_dir(
    volume: &Rooms,
    dir: FileId,
    after: u64,
    visit: &mut dyn FnMut(offshoot_vfs::DirEntry<'_>) -> ControlFlow<()>,
) -> Result<()> {
    if placeholder_in(dir).is_some() {
        return Ok(());
    }
    let root = tree_of(volume, dir)?;
    require_dir(volume, root, dir)?;
    let Some(first) = after.checked_add(1) else { return Ok(()) };
    // No entry has a lower index, and a search for a lower one would read a leaf of other items.
    let first = first.max(FIRST_INDEX);
    delayed::for_each_item(volume, root, indexes(dir, first), &mut |key, data| {
        for entry in dir_entries(data) {
            let entry = entry.map_err(malformed)?;
            let mut file = target(volume, dir, entry.name, entry.location)?;
            if placeholder_in(file).is_some() {
                file = match lookup(volume, dir, entry.name) {
                    Ok(found) => found,
                    Err(Error::Posix { errno: Errno::NOENT, .. }) => continue,
                    Err(e) => return Err(e),
                };
            }
            let entry = offshoot_vfs::DirEntry {
                name: entry.name,
                file,
                file_type: entry_type(entry.file_type)?,
                cookie: key.offset,
            };
            if visit(entry).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    })
}

fn entry_type(value: u8) -> Result<FileType> {
    Ok(match value {
        file_type::REG_FILE => FileType::Regular,
        file_type::DIR => FileType::Directory,
        file_type::CHRDEV => FileType::CharDevice,
        file_type::BLKDEV => FileType::BlockDevice,
        file_type::FIFO => FileType::Fifo,
        file_type::SOCK => FileType::Socket,
        file_type::SYMLINK => FileType::Symlink,
        _ => return Err(Error::corrupt(Structure::DirectoryEntry, format!("file type {value}"))),
    })
}

/// The parent and the name of the directory `dir`, which is not the root of a subvolume. The caller
/// must hold no lock of an inode.
///
/// # Errors
/// `ENOENT` when it was removed. [`Error::Corrupt`] when it has no name, or several.
pub(crate) fn parent(volume: &Rooms, dir: FileId) -> Result<Parent> {
    let mut found = parents(volume, dir)?;
    if found.len() != 1 {
        // While it moves, a reader without its lock may see both names, or none.
        let _lock = volume.inodes.lock(&[dir]);
        found = parents(volume, dir)?;
        if found.is_empty() && inode_item(volume, tree_of(volume, dir)?, dir)?.nlink.get() == 0 {
            return Err(no_such_file(dir));
        }
    }
    let count = found.len();
    match found.pop() {
        Some(parent) if count == 1 => Ok(parent),
        Some(_) => Err(Error::corrupt(Structure::InodeRef, "a directory with several names")),
        None => Err(Error::corrupt(Structure::InodeRef, "a directory without a name")),
    }
}

/// The first two names of the directory `dir`. A sound directory has one.
fn parents(volume: &Rooms, dir: FileId) -> Result<Vec<Parent>> {
    let root = tree_of(volume, dir)?;
    require_dir(volume, root, dir)?;
    names_of(volume, root, dir)
}

/// One of the names of `file`; `None` when it has none.
pub(crate) fn one_name(volume: &Rooms, file: FileId) -> Result<Option<Parent>> {
    Ok(names_of(volume, tree_of(volume, file)?, file)?.into_iter().next())
}

/// The first two names of `file`.
fn names_of(volume: &Rooms, root: TreeRoot, file: FileId) -> Result<Vec<Parent>> {
    let mut parents = Vec::with_capacity(1);
    let parent = |name: InodeName<'_>| Parent {
        dir: FileId { dev: file.dev, ino: name.parent },
        name: name.name.to_vec(),
    };
    let first = Key::new(file.ino, ItemType::INODE_REF, 0);
    let last = Key::new(file.ino, ItemType::INODE_EXTREF, u64::MAX);
    delayed::for_each_item(volume, root, first..=last, &mut |key, data| {
        if key.item_type == ItemType::INODE_REF {
            for name in inode_refs(key.offset, data) {
                parents.push(parent(name.map_err(malformed)?));
            }
        } else {
            for name in inode_extrefs(data) {
                parents.push(parent(name.map_err(malformed)?));
            }
        }
        let is_enough = parents.len() > 1;
        Ok(if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(parents)
}

/// Calls `visit` with name and value of every extended attribute of `file` until it breaks.
pub(crate) fn xattrs(
    volume: &Rooms,
    file: FileId,
    mut visit: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
) -> Result<()> {
    if placeholder_in(file).is_some() {
        return Ok(());
    }
    let root = tree_of(volume, file)?;
    let mut cursor = Cursor::seek(volume, root, Key::new(file.ino, ItemType::XATTR_ITEM, 0))?;
    while let Some((_, data)) = cursor.item_of(file.ino, ItemType::XATTR_ITEM) {
        for entry in dir_entries(data) {
            let entry = entry.map_err(malformed)?;
            if visit(entry.name, entry.data).is_break() {
                return Ok(());
            }
        }
        cursor.advance()?;
    }
    Ok(())
}

/// The value of the extended attribute `name` of `file`.
pub(crate) fn xattr(volume: &Rooms, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
    let key = Key::new(file.ino, ItemType::XATTR_ITEM, name_hash(name));
    let value = with_item(volume, tree_of(volume, file)?, key, |data| {
        Ok(entry_called(data, name)?.map(|entry| entry.data.to_vec()))
    })?;
    value.flatten().ok_or_else(|| xattr::missing(file, name))
}
