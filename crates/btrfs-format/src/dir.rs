//! Directory entries and extended attributes.
//!
//! Both are stored as [`DirEntryItem`]s with a name and a value behind them. A directory entry is
//! stored twice: in a DIR_ITEM, which is found by the hash of its name, and in a DIR_INDEX, which
//! is found by the order in which entries were made. A DIR_ITEM or XATTR_ITEM holds all entries
//! whose names have the same hash.

use offshoot_vfs::Structure;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::key::DiskKey;
use crate::view::{take, view};
use crate::{Key, Malformed, TreeId};

/// The fixed part of an entry. 30 bytes; the name and then the data follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DirEntryItem {
    /// The key that the entry leads to: an inode, or the root of a subvolume. Zero for xattrs.
    pub location: DiskKey,
    /// The transaction that made the entry.
    pub transid: U64,
    /// The length of an xattr's value. Zero for directory entries.
    pub data_len: U16,
    /// The length of the name.
    pub name_len: U16,
    /// One of [`file_type`].
    pub file_type: u8,
}

/// Values of [`DirEntryItem::file_type`].
#[expect(missing_docs, reason = "the names are the format's and say what the values are")]
pub mod file_type {
    pub const UNKNOWN: u8 = 0;
    pub const REG_FILE: u8 = 1;
    pub const DIR: u8 = 2;
    pub const CHRDEV: u8 = 3;
    pub const BLKDEV: u8 = 4;
    pub const FIFO: u8 = 5;
    pub const SOCK: u8 = 6;
    pub const SYMLINK: u8 = 7;
    pub const XATTR: u8 = 8;
    /// On a directory in a volume with encryption: the name is encrypted.
    pub const ENCRYPTED: u8 = 0x80;

    /// The value of a file type.
    #[must_use]
    pub fn of(file_type: offshoot_vfs::FileType) -> u8 {
        use offshoot_vfs::FileType;
        match file_type {
            FileType::Regular => REG_FILE,
            FileType::Directory => DIR,
            FileType::CharDevice => CHRDEV,
            FileType::BlockDevice => BLKDEV,
            FileType::Fifo => FIFO,
            FileType::Socket => SOCK,
            FileType::Symlink => SYMLINK,
        }
    }

    /// The file type with this value; `None` when there is none.
    #[must_use]
    pub fn from_value(value: u8) -> Option<offshoot_vfs::FileType> {
        use offshoot_vfs::FileType;
        Some(match value & !ENCRYPTED {
            REG_FILE => FileType::Regular,
            DIR => FileType::Directory,
            CHRDEV => FileType::CharDevice,
            BLKDEV => FileType::BlockDevice,
            FIFO => FileType::Fifo,
            SOCK => FileType::Socket,
            SYMLINK => FileType::Symlink,
            _ => return None,
        })
    }
}

/// The longest name of a directory entry or extended attribute, in bytes.
pub const NAME_LEN: usize = 255;

/// One entry of a DIR_ITEM, DIR_INDEX or XATTR_ITEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirItemEntry<'a> {
    /// The key that the entry leads to.
    pub location: Key,
    /// The transaction that made the entry.
    pub transid: u64,
    /// One of [`file_type`].
    pub file_type: u8,
    /// The name.
    pub name: &'a [u8],
    /// The value of an xattr; empty otherwise.
    pub data: &'a [u8],
}

/// The entries in `data`. The iterator ends after the first malformed one.
pub fn dir_entries(data: &[u8]) -> impl Iterator<Item = Result<DirItemEntry<'_>, Malformed>> {
    sequence(data, |data| {
        let (item, rest) = view::<DirEntryItem>(Structure::DirectoryEntry, data)?;
        let name_len = usize::from(item.name_len.get());
        let (name, rest) = take(Structure::DirectoryEntry, "name", rest, name_len)?;
        let (data, rest) =
            take(Structure::DirectoryEntry, "data", rest, usize::from(item.data_len.get()))?;
        let entry = DirItemEntry {
            location: item.location.get(),
            transid: item.transid.get(),
            file_type: item.file_type,
            name,
            data,
        };
        Ok((entry, rest))
    })
}

/// Repeats `parse` until it has consumed all of `data` or fails. Each call must consume at least
/// one byte; the fixed part of each entry guarantees that.
pub(crate) fn sequence<'a, T>(
    mut data: &'a [u8],
    parse: impl Fn(&'a [u8]) -> Result<(T, &'a [u8]), Malformed>,
) -> impl Iterator<Item = Result<T, Malformed>> {
    std::iter::from_fn(move || {
        if data.is_empty() {
            return None;
        }
        match parse(data) {
            Ok((value, rest)) => {
                data = rest;
                Some(Ok(value))
            }
            Err(malformed) => {
                data = &[];
                Some(Err(malformed))
            }
        }
    })
}

/// The hash of a name, which is the offset in the key of its DIR_ITEM or XATTR_ITEM: a CRC-32C with
/// the seed -2 that is not inverted at the end.
#[must_use]
pub fn name_hash(name: &[u8]) -> u64 {
    u64::from(raw_crc32c(!1, name))
}

/// The hash of a name in a directory, which is the offset in the key of its INODE_EXTREF.
#[must_use]
pub fn extref_hash(parent: u64, name: &[u8]) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "the format seeds with the low half")]
    let seed = parent as u32;
    u64::from(raw_crc32c(seed, name))
}

/// The hash of a reference from a file to a data extent, which is the offset in the key of its
/// EXTENT_DATA_REF.
#[must_use]
pub fn data_ref_hash(root: TreeId, ino: u64, offset: u64) -> u64 {
    let high = raw_crc32c(!0, &root.0.to_le_bytes());
    let low = raw_crc32c(!0, &ino.to_le_bytes());
    let low = raw_crc32c(low, &offset.to_le_bytes());
    (u64::from(high) << 31) ^ u64::from(low)
}

/// CRC-32C without the inversions of the usual definition at the beginning and the end.
fn raw_crc32c(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}
