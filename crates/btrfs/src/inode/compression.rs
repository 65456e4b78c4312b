//! Whether and how the data of a file is compressed.
//!
//! | source | the data is |
//! |---|---|
//! | flag NODATACOW, NODATASUM or PREALLOC | never compressed, because it is written in place, or may be, or has no checksums |
//! | [`Compress::is_forced`](crate::Compress::is_forced) | always compressed, with the method of the property or else of the volume |
//! | flag NOCOMPRESS | not compressed: a user asked for that, or the beginning of the file did not become smaller |
//! | the property `btrfs.compression` | compressed with that method; new files inherit the property of their directory |
//! | flag COMPRESS, or [`EngineOptions::compress`](crate::EngineOptions::compress) | compressed with the method of the volume, or with zlib if that has none |

use offshoot_btrfs_format::compress::{Compression, CompressionMethod};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_vfs::{Errno, Error, FileId, Result};

use crate::data::Packing;
use crate::inode::Rooms;

/// The extended attribute that says how a file is compressed.
pub(crate) const PROPERTY: &[u8] = b"btrfs.compression";

/// How a file is compressed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChosenCompression {
    pub(super) packing: Packing,
    /// Whether the file gets the flag NOCOMPRESS if its beginning does not become smaller.
    pub(super) is_tried: bool,
}

/// The compression in a value of the property, whose beginning counts: `zstd:3` means zstd. `None`
/// if the value names no compression.
fn of_property(value: &[u8]) -> Option<Compression> {
    let all = [Compression::Zlib, Compression::Lzo, Compression::Zstd];
    all.into_iter().find(|compression| value.starts_with(compression.name().as_bytes()))
}

/// The value of the property that a new file inherits from its directory: the method without a
/// level. `None` if the flags of the file say the same.
pub(crate) fn inherited(value: &[u8]) -> Option<&'static [u8]> {
    of_property(value).map(|compression| compression.name().as_bytes())
}

/// The flags that a value of the property sets, of COMPRESS and NOCOMPRESS. `None` if the value is
/// not valid.
pub(super) fn flags_of_property(value: &[u8]) -> Option<u64> {
    match value {
        b"" => Some(0),
        b"no" | b"none" => Some(inode_flags::NOCOMPRESS),
        _ => of_property(value).map(|_| inode_flags::COMPRESS),
    }
}

/// Flags of files whose data is never compressed.
pub(super) const NEVER_COMPRESSED: u64 = inode_flags::NODATACOW | inode_flags::NODATASUM;

/// How `file` is compressed, if it is.
pub(super) fn choose(
    volume: &Rooms,
    file: FileId,
    item: &InodeItem,
) -> Result<Option<ChosenCompression>> {
    let has = |flags| item.flags.get() & flags != 0;
    let option = volume.options.compress;
    let is_forced = option.is_some_and(|option| option.is_forced);
    if has(NEVER_COMPRESSED | inode_flags::PREALLOC) || has(inode_flags::NOCOMPRESS) && !is_forced {
        return Ok(None);
    }
    let property = if has(inode_flags::COMPRESS) { property(volume, file)? } else { None };
    let default = option.map(|option| option.method);
    let method = match property {
        // The level comes from the volume.
        Some(compression) if default.is_none_or(|method| method.compression() != compression) => {
            CompressionMethod::new(compression)
        }
        None if has(inode_flags::COMPRESS) => {
            default.or_else(|| CompressionMethod::new(Compression::Zlib))
        }
        _ => default,
    };
    let packing = |method| Packing { method, sector: volume.superblock().sector_size };
    let is_tried = !is_forced && property.is_none();
    Ok(method.map(|method| ChosenCompression { packing: packing(method), is_tried }))
}

fn property(volume: &Rooms, file: FileId) -> Result<Option<Compression>> {
    match super::xattr(volume, file, PROPERTY) {
        Ok(value) => Ok(of_property(&value)),
        Err(Error::Posix { errno: Errno::NODATA, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
