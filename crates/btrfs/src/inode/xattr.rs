//! Changing extended attributes.
//!
//! The key of an attribute has the hash of its name. Attributes with the same hash share an item,
//! which must fit into a leaf. Values are stored as they are. Access control lists are the
//! exception, because they change the permissions.

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, file_type, name_hash};
use offshoot_btrfs_format::encode::dir_entry;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::acl::{ACCESS, Acl, DEFAULT};
use offshoot_vfs::xattr::{refused, require_file_type, require_namespace, require_sizes};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result, Timestamp, XattrMode};

use super::changes::{Changes, refuse_flags};
use super::compression::{NEVER_COMPRESSED, PROPERTY, flags_of_property};
use super::subvolume::writable;
use super::type_of;
use crate::inode::Rooms;
use crate::storage::malformed;

/// The item of one attribute.
pub(crate) fn encode(generation: u64, name: &[u8], value: &[u8]) -> Vec<u8> {
    dir_entry(&DirItemEntry {
        location: Key::MIN,
        transid: generation,
        file_type: file_type::XATTR,
        name,
        data: value,
    })
}

/// The flags of the inode after the attribute became `value`. Only the compression property changes
/// flags.
pub(crate) fn with_property(flags: u64, name: &[u8], value: &[u8]) -> u64 {
    const BOTH: u64 = inode_flags::COMPRESS | inode_flags::NOCOMPRESS;
    match flags_of_property(value) {
        Some(new) if name == PROPERTY => flags & !BOTH | new,
        _ => flags,
    }
}

/// The error for a missing attribute: it is not set, or no attribute can have this name.
pub(super) fn missing(file: FileId, name: &[u8]) -> Error {
    let none = || refused(Errno::NODATA, name, file);
    if name.starts_with(b"btrfs.") {
        return none();
    }
    require_namespace(file, name).err().unwrap_or_else(none)
}

/// Refuses names that cannot be stored, and values longer than system calls allow.
fn require_valid(file: FileId, name: &[u8], value: &[u8]) -> Result<()> {
    require_sizes(file, name, value)?;
    if matches!(name, ACCESS | DEFAULT) {
        return Acl::parse(value).map(drop);
    }
    if name.starts_with(b"btrfs.") {
        let is_known = name == PROPERTY && flags_of_property(value).is_some();
        return if is_known { Ok(()) } else { Err(refused(Errno::INVAL, name, file)) };
    }
    require_namespace(file, name)
}

fn is_plain(item: &InodeItem) -> Result<bool> {
    Ok(matches!(type_of(item)?, FileType::Regular | FileType::Directory))
}

/// Refuses attributes that files of this type, or with these flags, cannot have.
fn require_allowed(file: FileId, item: &InodeItem, name: &[u8]) -> Result<()> {
    refuse_flags(item, inode_flags::IMMUTABLE | inode_flags::APPEND, file)?;
    require_file_type(file, type_of(item)?, name)
}

/// Sets an attribute.
pub(crate) fn set(
    volume: &Rooms,
    file: FileId,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
    at: Timestamp,
) -> Result<()> {
    require_valid(file, name, value)?;
    writable(volume, file)?;
    let _locks = volume.inodes.lock(&[file]);
    let handle = volume.join()?;
    let mut changes = Changes::new(&handle, file)?;
    let item = changes.inode(file)?;
    require_allowed(file, &item, name)?;
    if name == PROPERTY && !value.is_empty() && item.flags.get() & NEVER_COMPRESSED != 0 {
        return Err(refused(Errno::INVAL, name, file));
    }
    let is_there = without(changes.get(key(file, name))?.unwrap_or_default(), name)?.is_some();
    let refuse = |errno| Err(refused(errno, name, file));
    match mode {
        XattrMode::Create if is_there => return refuse(Errno::EXIST),
        XattrMode::Replace if !is_there => return refuse(Errno::NODATA),
        _ => {}
    }
    let mut permissions = item.mode.get();
    // An empty property means none, and only files and directories have one.
    let mut value = Some(value).filter(|value| name != PROPERTY || !value.is_empty());
    if name == PROPERTY && !is_plain(&item)? {
        return Ok(());
    }
    if matches!(name, ACCESS | DEFAULT) {
        let list = Acl::parse(value.unwrap_or_default())?;
        if let Some(list) = list.as_ref().filter(|_| name == ACCESS) {
            permissions = list.permissions(permissions);
        }
        value = value.filter(|_| list.is_some_and(|list| name == DEFAULT || list.is_extended()));
        changes.volume().inodes.with_directory(file, |dir| dir.has_no_default_acl = false);
    }
    replace(&mut changes, file, name, value)?;
    let flags = with_property(item.flags.get(), name, value.unwrap_or_default());
    changes.change_inode(file, at, |item| {
        item.mode = permissions.into();
        item.flags = flags.into();
    })?;
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    volume.commit_if(is_durable)
}

fn key(file: FileId, name: &[u8]) -> Key {
    Key::new(file.ino, ItemType::XATTR_ITEM, name_hash(name))
}

/// Sets the attribute `name` to this value, or removes it.
pub(super) fn replace(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    name: &[u8],
    value: Option<&[u8]>,
) -> Result<()> {
    let key = key(file, name);
    let all = changes.get(key)?.unwrap_or_default().to_vec();
    let mut all = without(&all, name)?.unwrap_or(all);
    if let Some(value) = value {
        // This check comes before encoding, because the encoded length has only 16 bits.
        if !changes.fits(all.len() + value.len()) {
            return Err(refused(Errno::NOSPC, name, file));
        }
        let new = encode(changes.generation().0, name, value);
        if !changes.fits(all.len() + new.len()) {
            return Err(refused(Errno::NOSPC, name, file));
        }
        all.extend_from_slice(&new);
    }
    changes.put_or_remove(key, all)
}

/// Removes an attribute.
pub(crate) fn remove(volume: &Rooms, file: FileId, name: &[u8], at: Timestamp) -> Result<()> {
    require_valid(file, name, b"")?;
    writable(volume, file)?;
    let _locks = volume.inodes.lock(&[file]);
    let handle = volume.join_to_remove()?;
    let mut changes = Changes::new(&handle, file)?;
    let item = changes.inode(file)?;
    require_allowed(file, &item, name)?;
    let key = key(file, name);
    let all = changes.get(key)?.unwrap_or_default();
    let rest = without(all, name)?.ok_or_else(|| refused(Errno::NODATA, name, file))?;
    changes.put_or_remove(key, rest)?;
    changes.change_inode(file, at, |item| {
        item.flags = with_property(item.flags.get(), name, b"").into();
    })?;
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    volume.commit_if(is_durable)
}

/// The attributes in `data` without the one called `name`; `None` if there is none.
fn without(data: &[u8], name: &[u8]) -> Result<Option<Vec<u8>>> {
    let (mut rest, mut found) = (Vec::with_capacity(data.len()), false);
    for entry in dir_entries(data) {
        let entry = entry.map_err(malformed)?;
        if entry.name == name {
            found = true;
        } else {
            rest.extend_from_slice(&dir_entry(&entry));
        }
    }
    Ok(found.then_some(rest))
}
