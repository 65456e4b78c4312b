//! Changing attributes, and counting how often a file is open.
//!
//! A new length is special. It waits for write-back, and cutting off much data takes several
//! transactions, as in the kernel. So `set_attr` first finds every reason to refuse the call, then
//! changes the length, and then changes the other attributes in a transaction that may use the
//! reserve for removals, so that it does not fail for want of room.

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::inode::inode_flags;
use offshoot_vfs::{Errno, Error, FileId, FileType, Result, SetAttr, Timestamp};

use super::changes::{Changes, refuse_flags, timespec};
use super::subvolume::writable;
use super::write_back::Patience;
use super::{acl, evict, write, write_back};
use super::{inode_item, no_such_file, placeholder_in, tree_of, type_of};
use crate::inode::Rooms;

/// Changes attributes of `file`.
pub(crate) fn set_attr(volume: &Rooms, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()> {
    let subvolume = writable(volume, file)?;
    let _buffering = set.size.map(|_| subvolume.buffering()).transpose()?;
    let _locks = volume.inodes.lock(&[file]);
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let is_refused = if *set == SetAttr::TOUCH { 0 } else { inode_flags::APPEND };
    refuse_flags(&item, inode_flags::IMMUTABLE | is_refused, file)?;
    if set.permissions.is_some() && type_of(&item)? == FileType::Symlink {
        return Err(Error::posix(Errno::OPNOTSUPP, format!("permissions of the link {file}")));
    }
    let times =
        [set.atime, set.mtime].map(|time| time.map(|time| timespec(time.at(at))).transpose());
    let [atime, mtime] = times;
    let (atime, mtime) = (atime?, mtime?);
    let now = set.size.map(|_| timespec(at)).transpose()?;
    let list = set.permissions.map_or(Ok(None), |_| acl::access_of(volume, file))?;
    if let Some(size) = set.size {
        write::truncate(volume, file, size, at)?;
        if set.permissions.is_some() || set.uid.is_some() || set.gid.is_some() {
            // Otherwise a commit could store the other attributes before the length, which is only
            // buffered.
            write_back::write_back(volume, file, Patience::Waits)?;
        }
    }
    // The length has changed already, so the rest must not fail.
    let handle = if set.size.is_some() { volume.join_to_remove() } else { volume.join() }?;
    let mut changes = Changes::new(&handle, file)?;
    if let (Some(_), Some(buffer)) = (mtime.or(now), volume.buffers.get(file)) {
        buffer.write().mtime = None;
    }
    if let (Some(permissions), Some(list)) = (set.permissions, list) {
        acl::follow(&mut changes, file, list, permissions)?;
    }
    changes.change_inode(file, at, |item| {
        if let Some(permissions) = set.permissions {
            item.mode = (item.mode.get() & !0o7777 | permissions & 0o7777).into();
        }
        item.uid = set.uid.map_or(item.uid, Into::into);
        item.gid = set.gid.map_or(item.gid, Into::into);
        item.atime = atime.unwrap_or(item.atime);
        item.mtime = mtime.or(now).unwrap_or(item.mtime);
    })?;
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    volume.commit_if(is_durable)
}

/// Opens `file` once more.
pub(crate) fn open(volume: &Rooms, file: FileId) -> Result<()> {
    if volume.live_part().is_none() || placeholder_in(file).is_some() {
        return super::attr(volume, file).map(drop);
    }
    let mut locks = volume.inodes.lock(&[file]);
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let opens = locks.opens(file);
    if item.nlink.get() == 0 && *opens == 0 {
        return Err(no_such_file(file));
    }
    volume.live()?.tree(volume, TreeId(file.dev))?.open_file()?;
    *opens += 1;
    Ok(())
}

/// Closes `file` once. A file without openings and names is removed; the inner result tells how
/// that went.
pub(crate) fn release(volume: &Rooms, file: FileId) -> Result<Result<()>> {
    let mut locks = volume.inodes.lock(&[file]);
    let opens = locks.opens(file);
    *opens = opens
        .checked_sub(1)
        .ok_or_else(|| Error::posix(Errno::BADF, format!("{file}, which is not open")))?;
    Ok(if *opens == 0 { remove_nameless(volume, file) } else { Ok(()) })
}

/// Removes `file`, which is not open, if it has no name.
fn remove_nameless(volume: &Rooms, file: FileId) -> Result<()> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    if item.nlink.get() == 0 { evict::evict(volume, file) } else { Ok(()) }
}
