//! Whether and how the data of a file is compressed.
//!
//! | who says so | what |
//! |---|---|
//! | flag NODATACOW, NODATASUM or PREALLOC | never: data is written in place, or may be |
//! | [`Compress::forced`] | always, as the property of the file or else the volume says |
//! | flag NOCOMPRESS | no: somebody wants that, or the beginning of the file did not become smaller |
//! | the property `btrfs.compression` | so; new files have that of their directory |
//! | [`OpenOptions::compress`](crate::OpenOptions::compress), flag COMPRESS | as the volume says, or with zlib |

use offshoot_btrfs_format::compress::{Compression, Method};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_vfs::{Errno, Error, FileId, Result};

use crate::data::Packing;
use crate::engine::Engine;

/// The extended attribute that says how a file is compressed.
pub(crate) const PROPERTY: &[u8] = b"btrfs.compression";

/// How an open volume compresses what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compress {
    /// What files are compressed with that do not say so themselves.
    pub method: Method,
    /// Files that are marked as not worth it are compressed as well, and none is marked.
    pub forced: bool,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    pub(super) packing: Packing,
    /// The file is to be marked when its beginning does not become smaller.
    pub(super) is_tried: bool,
}

/// The compression that a value of the property asks for, of which the beginning counts; `None` for
/// one that means none.
fn of_property(value: &[u8]) -> Option<Compression> {
    let all = [Compression::Zlib, Compression::Lzo, Compression::Zstd];
    all.into_iter().find(|compression| value.starts_with(compression.name().as_bytes()))
}

/// What a new file has where its directory has this value of the property: no level, and nothing
/// that the flags say as well.
pub(crate) fn inherited(value: &[u8]) -> Option<&'static [u8]> {
    of_property(value).map(|compression| compression.name().as_bytes())
}

/// The flags that a value of the property sets, of COMPRESS and NOCOMPRESS; `None` for a value that
/// it cannot have.
pub(super) fn flags_of_property(value: &[u8]) -> Option<u64> {
    match value {
        b"" => Some(0),
        b"no" | b"none" => Some(inode_flags::NOCOMPRESS),
        _ => of_property(value).map(|_| inode_flags::COMPRESS),
    }
}

/// Flags of files whose data is not compressed, whoever wants it.
pub(super) const NEVER_COMPRESSED: u64 = inode_flags::NODATACOW | inode_flags::NODATASUM;

/// How `file` is compressed, if it is.
pub(super) fn choose(volume: &Engine, file: FileId, item: &InodeItem) -> Result<Option<Chosen>> {
    let has = |flags| item.flags.get() & flags != 0;
    let option = volume.options.compress;
    let forced = option.is_some_and(|option| option.forced);
    if has(NEVER_COMPRESSED | inode_flags::PREALLOC) || has(inode_flags::NOCOMPRESS) && !forced {
        return Ok(None);
    }
    let property = if has(inode_flags::COMPRESS) { property(volume, file)? } else { None };
    let default = option.map(|option| option.method);
    let method = match property {
        // The volume says how hard to try.
        Some(compression) if default.is_none_or(|method| method.compression() != compression) => {
            Method::new(compression)
        }
        None if has(inode_flags::COMPRESS) => default.or_else(|| Method::new(Compression::Zlib)),
        _ => default,
    };
    let packing = |method| Packing { method, sector: volume.superblock().sector_size };
    let is_tried = !forced && property.is_none();
    Ok(method.map(|method| Chosen { packing: packing(method), is_tried }))
}

fn property(volume: &Engine, file: FileId) -> Result<Option<Compression>> {
    match super::xattr(volume, file, PROPERTY) {
        Ok(value) => Ok(of_property(&value)),
        Err(Error::Posix { errno: Errno::NODATA, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
