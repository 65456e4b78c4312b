//! The size and selected offsets of every structure, checked at compile time, and views of bytes
//! as structures.
//!
//! The numbers are those of the book. A structure with padding, or with a field of another width,
//! does not compile.

use std::mem::offset_of;

use offshoot_vfs::{Malformed, Structure};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::{btree, group, inode, record, superblock};

/// Returns a [`Malformed`] about `$structure` with the text behind it unless `$is_right`.
macro_rules! ensure {
    ($structure:expr, $is_right:expr, $($text:tt)+) => {
        if !$is_right {
            return Err(offshoot_vfs::Malformed::new($structure, format!($($text)+)));
        }
    };
}
pub(crate) use ensure;

/// Views the start of `bytes` as a `T`.
pub(crate) fn view<T: FromBytes + KnownLayout + Immutable>(
    structure: Structure,
    bytes: &[u8],
) -> Result<&T, Malformed> {
    T::ref_from_prefix(bytes).map(|(view, _)| view).map_err(|_| {
        Malformed::new(structure, format!("{} bytes, but it needs {}", bytes.len(), size_of::<T>()))
    })
}

/// The big-endian number in `len` bytes at `at`; 0 outside of `bytes`.
#[inline]
pub(crate) fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let rest = bytes.get(at..).unwrap_or_default();
    // The usual lengths are one load each.
    match len {
        2 => rest.first_chunk().map_or(0, |field| u16::from_be_bytes(*field).into()),
        4 => rest.first_chunk().map_or(0, |field| u32::from_be_bytes(*field).into()),
        8 => rest.first_chunk().map_or(0, |field| u64::from_be_bytes(*field)),
        _ => {
            let field = rest.get(..len).unwrap_or_default();
            field.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
        }
    }
}

macro_rules! sizes {
    ($($type:ty = $size:literal $(, $field:ident @ $offset:literal)*;)*) => {
        $(const _: () = {
            assert!(size_of::<$type>() == $size && align_of::<$type>() == 1);
            $(assert!(offset_of!($type, $field) == $offset);)*
        };)*
    };
}

sizes! {
    superblock::XfsSuperblockFields = 304, uuid @ 32, logstart @ 48, rextsize @ 80,
        versionnum @ 100, fname @ 108, blocklog @ 120, icount @ 128, uquotino @ 160,
        inoalignmt @ 180, dirblklog @ 192, features2 @ 200, crc @ 224, pquotino @ 232,
        meta_uuid @ 248, metadirino @ 264, rgblklog @ 280, rtreserved @ 296;
    group::Agf = 224, roots @ 16, flfirst @ 40, uuid @ 64, rmap_blocks @ 80, lsn @ 208, crc @ 216;
    group::Agi = 344, unlinked @ 40, uuid @ 296, crc @ 312, lsn @ 320, free_root @ 328,
        fblocks @ 340;
    group::AgflHeader = 36, uuid @ 8, crc @ 32;
    btree::ShortBlockHeader = 56, blkno @ 16, uuid @ 32, owner @ 48, crc @ 52;
    btree::LongBlockHeader = 72, right @ 16, blkno @ 24, uuid @ 40, owner @ 56, crc @ 64;
    record::XfsFreeExtent = 8;
    record::XfsInodeChunk = 16, free @ 8;
    record::XfsReverseMap = 24, owner @ 8;
    record::XfsReverseKey = 20, owner @ 4;
    record::XfsSharedExtent = 12;
    record::XfsExtentItem = 16;
    inode::XfsInodeCore = 176, nlink @ 16, big_nextents @ 24, atime @ 32, size @ 56, nextents @ 76,
        forkoff @ 82, flags @ 90, next_unlinked @ 96, crc @ 100, lsn @ 112, flags2 @ 120,
        crtime @ 144, ino @ 152, uuid @ 160;
}
