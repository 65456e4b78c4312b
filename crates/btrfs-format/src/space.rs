//! Block groups, free space, quotas, and small items of the other trees.

use offshoot_vfs::Structure;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Malformed;
use crate::key::DiskKey;
use crate::view::view;

macro_rules! viewed {
    ($($(#[$doc:meta])* $name:ident, $structure:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        #[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
        pub struct $name { $(pub $field: $type,)* }

        impl $name {
            /// Views the item in `data`.
            pub fn view(data: &[u8]) -> Result<&Self, Malformed> {
                Ok(view(Structure::$structure, data)?.0)
            }
        }
    )*};
}

viewed! {
    /// A block group: how much of a chunk is used. 24 bytes.
    BlockGroupItem, BlockGroupItem { used: U64, chunk_objectid: U64, flags: U64, }

    /// Whether the free space of a block group is stored as extents or bitmaps. 8 bytes.
    FreeSpaceInfo, FreeSpaceInfo { extent_count: U32, flags: U32, }

    /// Version 1 free space of a block group: the inode of its cache file. 41 bytes.
    FreeSpaceHeader, FreeSpaceHeader {
        location: DiskKey,
        generation: U64,
        num_entries: U64,
        num_bitmaps: U64,
    }

    /// Error counts of a device. 40 bytes.
    DevStatsItem, DeviceStats {
        write_errs: U64,
        read_errs: U64,
        flush_errs: U64,
        corruption_errs: U64,
        generation_errs: U64,
    }

    /// The replacement of a device. 72 bytes.
    DevReplaceItem, DeviceReplace {
        src_devid: U64,
        cursor_left: U64,
        cursor_right: U64,
        cont_reading_from_srcdev_mode: U64,
        replace_state: U64,
        time_started: U64,
        time_stopped: U64,
        num_write_errors: U64,
        num_uncorrectable_read_errors: U64,
    }

    /// The state of quotas. 32 bytes, and 8 more with simple quotas.
    QgroupStatusItem, QuotaStatus { version: U64, generation: U64, flags: U64, rescan: U64, }

    /// How much a quota group uses. 40 bytes.
    QgroupInfoItem, QuotaInfo {
        generation: U64,
        rfer: U64,
        rfer_cmpr: U64,
        excl: U64,
        excl_cmpr: U64,
    }

    /// How much a quota group may use. 40 bytes.
    QgroupLimitItem, QuotaLimit {
        flags: U64,
        max_rfer: U64,
        max_excl: U64,
        rsv_rfer: U64,
        rsv_excl: U64,
    }

    /// A range of directory indexes that a log covers. 8 bytes.
    DirLogItem, DirectoryLogItem { end: U64, }
}

/// The free space of the block group is stored as bitmaps.
pub const FREE_SPACE_USING_BITMAPS: u32 = 1;

/// The size of one free space bitmap in bytes; each bit is a sector.
pub const FREE_SPACE_BITMAP_SIZE: u32 = 256;
