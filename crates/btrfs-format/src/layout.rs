//! The size and selected offsets of every structure, checked at compile time.
//!
//! The numbers are those of the format's documentation. A structure with padding, or with a field
//! of another width, does not compile.

use std::mem::offset_of;

use crate::{block, chunk, dir, extent, file_extent, inode, key, root, space, superblock};

macro_rules! sizes {
    ($($type:ty = $size:literal $(, $field:ident @ $offset:literal)*;)*) => {
        $(const _: () = {
            assert!(size_of::<$type>() == $size && align_of::<$type>() == 1);
            $(assert!(offset_of!($type, $field) == $offset);)*
        };)*
    };
}

sizes! {
    key::DiskKey = 17;
    block::BlockHeader = 101, bytenr @ 48, generation @ 80, owner @ 88, level @ 100;
    block::LeafItem = 25;
    block::NodePointer = 33;
    superblock::SuperblockItem = 4096, magic @ 64, sectorsize @ 144, csum_type @ 196,
        dev_item @ 201, label @ 299, metadata_uuid @ 571, sys_chunk_array @ 811,
        super_roots @ 2859;
    superblock::RootBackup = 168;
    chunk::DevItem = 98;
    chunk::ChunkItem = 48;
    chunk::StripeItem = 32;
    chunk::DevExtent = 48;
    chunk::RaidStride = 16, physical @ 8;
    inode::Timespec = 12;
    inode::InodeItem = 160, nlink @ 40, flags @ 64, atime @ 112;
    inode::InodeRefItem = 10;
    inode::InodeExtrefItem = 18;
    dir::DirEntryItem = 30;
    file_extent::FileExtentHead = 21;
    file_extent::FileExtentTail = 32;
    root::RootItem = 439, bytenr @ 176, refs @ 216, generation_v2 @ 239, uuid @ 247,
        ctransid @ 295, otime @ 339;
    root::RootRefItem = 18;
    extent::ExtentItem = 24;
    extent::TreeBlockInfo = 18;
    extent::ExtentDataRef = 28;
    space::BlockGroupItem = 24;
    space::FreeSpaceInfo = 8;
    space::FreeSpaceHeader = 41;
    space::DevStatsItem = 40;
    space::DevReplaceItem = 72;
    space::QgroupStatusItem = 32;
    space::QgroupInfoItem = 40;
    space::QgroupLimitItem = 40;
    space::DirLogItem = 8;
}
