//! Inodes and their names.

use offshoot_vfs::Structure;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Malformed;
use crate::view::{take, view};

/// A time as it is stored. 12 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Timespec {
    /// Seconds since the epoch, two's complement.
    pub sec: U64,
    /// Nanoseconds.
    pub nsec: U32,
}

impl Timespec {
    /// Seconds since 1970, negative before.
    #[must_use]
    pub fn seconds(&self) -> i64 {
        self.sec.get().cast_signed()
    }
}

/// An inode. 160 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct InodeItem {
    pub generation: U64,
    pub transid: U64,
    pub size: U64,
    pub nbytes: U64,
    pub block_group: U64,
    pub nlink: U32,
    pub uid: U32,
    pub gid: U32,
    pub mode: U32,
    pub rdev: U64,
    pub flags: U64,
    pub sequence: U64,
    pub reserved: [U64; 4],
    pub atime: Timespec,
    pub ctime: Timespec,
    pub mtime: Timespec,
    pub otime: Timespec,
}

/// Bits of [`InodeItem::flags`]. The high half is read-only compatible; fs-verity uses it.
#[expect(missing_docs, reason = "the names are the format's and say what the bits are")]
pub mod inode_flags {
    pub const NODATASUM: u64 = 1 << 0;
    pub const NODATACOW: u64 = 1 << 1;
    pub const READONLY: u64 = 1 << 2;
    pub const NOCOMPRESS: u64 = 1 << 3;
    pub const PREALLOC: u64 = 1 << 4;
    pub const SYNC: u64 = 1 << 5;
    pub const IMMUTABLE: u64 = 1 << 6;
    pub const APPEND: u64 = 1 << 7;
    pub const NODUMP: u64 = 1 << 8;
    pub const NOATIME: u64 = 1 << 9;
    pub const DIRSYNC: u64 = 1 << 10;
    pub const COMPRESS: u64 = 1 << 11;
    pub const ROOT_ITEM_INIT: u64 = 1 << 31;
    pub const VERITY: u64 = 1 << 32;

    /// All flags that do not keep a reader from an inode: the known ones of the low half, and the
    /// high half.
    pub const READABLE: u64 = NODATASUM
        | NODATACOW
        | READONLY
        | NOCOMPRESS
        | PREALLOC
        | SYNC
        | IMMUTABLE
        | APPEND
        | NODUMP
        | NOATIME
        | DIRSYNC
        | COMPRESS
        | ROOT_ITEM_INIT
        | 0xffff_ffff_0000_0000;

    /// The names of the flags that are set.
    #[must_use]
    pub fn names(flags: u64) -> Vec<&'static str> {
        [
            (NODATASUM, "NODATASUM"),
            (NODATACOW, "NODATACOW"),
            (READONLY, "READONLY"),
            (NOCOMPRESS, "NOCOMPRESS"),
            (PREALLOC, "PREALLOC"),
            (SYNC, "SYNC"),
            (IMMUTABLE, "IMMUTABLE"),
            (APPEND, "APPEND"),
            (NODUMP, "NODUMP"),
            (NOATIME, "NOATIME"),
            (DIRSYNC, "DIRSYNC"),
            (COMPRESS, "COMPRESS"),
            (ROOT_ITEM_INIT, "ROOT_ITEM_INIT"),
            (VERITY, "VERITY"),
        ]
        .into_iter()
        .filter_map(|(bit, name)| (flags & bit != 0).then_some(name))
        .collect()
    }
}

impl InodeItem {
    /// Views an inode item.
    pub fn view(data: &[u8]) -> Result<&Self, Malformed> {
        Ok(view(Structure::InodeItem, data)?.0)
    }

    /// Major and minor number of a device node. The field holds them as the kernel does in memory:
    /// 12 bits of major above 20 bits of minor.
    #[must_use]
    pub fn device_number(&self) -> (u32, u32) {
        #[expect(clippy::cast_possible_truncation, reason = "a device number has 32 bits")]
        let rdev = self.rdev.get() as u32;
        (rdev >> 20, rdev & 0xf_ffff)
    }
}

/// The fixed part of a name in an INODE_REF item. 10 bytes; the name follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct InodeRefItem {
    /// The index of the entry in its directory.
    pub index: U64,
    /// The length of the name.
    pub name_len: U16,
}

/// The fixed part of a name in an INODE_EXTREF item. 18 bytes; the name follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct InodeExtrefItem {
    /// The inode number of the directory.
    pub parent: U64,
    /// The index of the entry in the directory.
    pub index: U64,
    /// The length of the name.
    pub name_len: U16,
}

/// One name of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeName<'a> {
    /// The inode number of the directory that holds the name.
    pub parent: u64,
    /// The index of the entry in that directory.
    pub index: u64,
    /// The name.
    pub name: &'a [u8],
}

/// The names in the INODE_REF item `data`. `parent` is the offset of its key. The iterator ends
/// after the first malformed name.
pub fn inode_refs(
    parent: u64,
    data: &[u8],
) -> impl Iterator<Item = Result<InodeName<'_>, Malformed>> {
    crate::dir::sequence(data, move |data| {
        let (item, rest) = view::<InodeRefItem>(Structure::InodeRef, data)?;
        let (name, rest) =
            take(Structure::InodeRef, "name", rest, usize::from(item.name_len.get()))?;
        Ok((InodeName { parent, index: item.index.get(), name }, rest))
    })
}

/// The names in the INODE_EXTREF item `data`. The iterator ends after the first malformed name.
pub fn inode_extrefs(data: &[u8]) -> impl Iterator<Item = Result<InodeName<'_>, Malformed>> {
    crate::dir::sequence(data, |data| {
        let (item, rest) = view::<InodeExtrefItem>(Structure::InodeExtref, data)?;
        let (name, rest) =
            take(Structure::InodeExtref, "name", rest, usize::from(item.name_len.get()))?;
        Ok((InodeName { parent: item.parent.get(), index: item.index.get(), name }, rest))
    })
}
