//! Inode flags as users see and set them.

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_vfs::{Errno, Error, FileFlags, FileId, FileType, Result, Timestamp};

use super::changes::Changes;
use super::compression::PROPERTY;
use super::subvolume::writable;
use super::{inode_item, placeholder_in, tree_of, type_of, xattr};
use crate::inode::Rooms;

/// Each user flag, with the flag in the inode.
const FLAGS: [(FileFlags, u64); 9] = [
    (FileFlags::SYNC, inode_flags::SYNC),
    (FileFlags::IMMUTABLE, inode_flags::IMMUTABLE),
    (FileFlags::APPEND, inode_flags::APPEND),
    (FileFlags::NODUMP, inode_flags::NODUMP),
    (FileFlags::NOATIME, inode_flags::NOATIME),
    (FileFlags::DIRSYNC, inode_flags::DIRSYNC),
    (FileFlags::COMPRESS, inode_flags::COMPRESS),
    (FileFlags::NOCOMPRESS, inode_flags::NOCOMPRESS),
    (FileFlags::NODATACOW, inode_flags::NODATACOW),
];

/// The flags of `file`.
pub(crate) fn flags(volume: &Rooms, file: FileId) -> Result<FileFlags> {
    if placeholder_in(file).is_some() {
        return Ok(FileFlags::empty());
    }
    Ok(shown(&inode_item(volume, tree_of(volume, file)?, file)?))
}

/// The flags that users see of an inode.
fn shown(item: &InodeItem) -> FileFlags {
    let stored = item.flags.get();
    let flags: FileFlags =
        FLAGS.iter().filter(|one| stored & one.1 != 0).map(|one| one.0).collect();
    // A file that compression did not make smaller has both flags.
    let is_tried = flags.contains(FileFlags::NOCOMPRESS);
    if is_tried { flags - FileFlags::COMPRESS } else { flags }
}

/// Sets all flags of `file`.
pub(crate) fn set(volume: &Rooms, file: FileId, flags: FileFlags, at: Timestamp) -> Result<()> {
    require_valid(file, flags)?;
    writable(volume, file)?;
    let _locks = volume.inodes.lock(&[file]);
    let handle = volume.join()?;
    let mut changes = Changes::new(&handle, file)?;
    let item = changes.inode(file)?;
    let file_type = type_of(&item)?;
    if !matches!(file_type, FileType::Regular | FileType::Directory) {
        return Err(Error::posix(
            Errno::OPNOTSUPP,
            format!("flags of {file}, which is no file or directory"),
        ));
    }
    // The kernel ignores DIRSYNC on files too, so that `chattr -R` works.
    let without =
        if file_type == FileType::Regular { FileFlags::DIRSYNC } else { FileFlags::empty() };
    let flags = flags - without;
    require_change(file, shown(&item), flags)?;
    let size = volume.buffers.get(file).map_or(item.size.get(), |buffer| buffer.read().size);
    let stored = stored(&item, flags, file_type, size);
    // The property gets the method of the volume, if that has one.
    let method = volume.options.compress.map(|compress| compress.method.compression());
    let name = method.unwrap_or(Compression::Zlib).name().as_bytes();
    let compression = Some(name).filter(|_| flags.contains(FileFlags::COMPRESS));
    let says = FileFlags::COMPRESS | FileFlags::NOCOMPRESS;
    if flags & says != shown(&item) & says {
        xattr::replace(&mut changes, file, PROPERTY, compression)?;
    }
    changes.change_inode(file, at, |item| item.flags = stored.into())?;
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    volume.commit_if(is_durable)
}

/// Refuses unknown flags, and combinations of flags that exclude each other.
fn require_valid(file: FileId, flags: FileFlags) -> Result<()> {
    let refuse = |errno| {
        Err(Error::posix(errno, format!("the flags `{flags}` ({:#x}) of {file}", flags.bits())))
    };
    if !FileFlags::all().contains(flags) {
        return refuse(Errno::OPNOTSUPP);
    }
    let compress = flags.contains(FileFlags::COMPRESS);
    if compress && flags.intersects(FileFlags::NOCOMPRESS | FileFlags::NODATACOW) {
        return refuse(Errno::INVAL);
    }
    Ok(())
}

/// Refuses to combine NODATACOW with COMPRESS or NOCOMPRESS, as the kernel does. A user must take
/// back the old flag first, in a call of its own.
fn require_change(file: FileId, old: FileFlags, new: FileFlags) -> Result<()> {
    let says = FileFlags::COMPRESS | FileFlags::NOCOMPRESS;
    let meet = |one: FileFlags, other: FileFlags| {
        one.contains(FileFlags::NODATACOW) && other.intersects(says)
    };
    if meet(old, new) || meet(new, old) {
        let what = format!("the flags `{new}` of {file}, which has `{old}`");
        return Err(Error::posix(Errno::INVAL, what));
    }
    Ok(())
}

/// The flags to store in an inode of `size` bytes. A file with data keeps its NODATACOW.
fn stored(item: &InodeItem, flags: FileFlags, file_type: FileType, size: u64) -> u64 {
    let mut stored = item.flags.get();
    for (flag, bit) in FLAGS {
        stored = if flags.contains(flag) { stored | bit } else { stored & !bit };
    }
    let in_place = match file_type {
        FileType::Regular => inode_flags::NODATACOW | inode_flags::NODATASUM,
        _ => inode_flags::NODATACOW,
    };
    if file_type == FileType::Regular && size > 0 {
        return stored & !in_place | item.flags.get() & in_place;
    }
    if flags.contains(FileFlags::NODATACOW) { stored | in_place } else { stored & !in_place }
}
