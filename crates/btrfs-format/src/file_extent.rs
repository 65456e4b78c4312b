//! File extents: where the data of a range of a file is.

use offshoot_vfs::Structure;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::compress::Compression;
use crate::view::view;
use crate::{Generation, Logical, Malformed};

/// The part that every EXTENT_DATA item has. 21 bytes; inline data follows directly.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FileExtentHead {
    /// The transaction that made the extent.
    pub generation: U64,
    /// The size of the extent's data before compression, in bytes.
    pub ram_bytes: U64,
    /// The number of its compression: [`Compression::from_disk`].
    pub compression: u8,
    /// Always 0.
    pub encryption: u8,
    /// Always 0.
    pub other_encoding: U16,
    /// One of [`extent_type`].
    pub extent_type: u8,
}

/// The part that follows in extents that are not inline. 32 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FileExtentTail {
    /// The address of the extent; 0 for a hole.
    pub disk_bytenr: U64,
    /// The size of the extent on disk, in bytes.
    pub disk_num_bytes: U64,
    /// The offset of this range in the uncompressed extent, in bytes.
    pub offset: U64,
    /// The length of this range in the file, in bytes.
    pub num_bytes: U64,
}

/// Values of [`FileExtentHead::extent_type`].
#[expect(missing_docs, reason = "the names are the format's and say what the values are")]
pub mod extent_type {
    pub const INLINE: u8 = 0;
    pub const REG: u8 = 1;
    pub const PREALLOC: u8 = 2;
}

/// The largest extent that may be compressed, in bytes before compression.
pub const MAX_COMPRESSED_EXTENT: u64 = 128 << 10;

/// A parsed EXTENT_DATA item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent<'a> {
    /// The transaction that made the extent.
    pub generation: Generation,
    /// The size of the whole extent before compression, in bytes.
    pub ram_bytes: u64,
    /// The compression of the extent.
    pub compression: Compression,
    /// Where the data is.
    pub body: FileExtentBody<'a>,
}

/// Where the data of a [`FileExtent`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileExtentBody<'a> {
    /// In the item itself.
    Inline(&'a [u8]),
    /// The file has no data here: the range reads as zeros.
    Hole {
        /// The length of the range in the file, in bytes.
        num_bytes: u64,
    },
    /// In an extent on disk.
    Extent {
        /// The address of the extent.
        disk_bytenr: Logical,
        /// Its size on disk, in bytes.
        disk_num_bytes: u64,
        /// The offset of the range in the uncompressed extent, in bytes.
        offset: u64,
        /// The length of the range in the file, in bytes.
        num_bytes: u64,
        /// Whether it was allocated and never written: it reads as zeros.
        is_preallocated: bool,
    },
}

impl<'a> FileExtent<'a> {
    /// Parses an EXTENT_DATA item. It does not check whether the numbers are consistent;
    /// [`crate::check`] does that.
    ///
    /// # Errors
    /// When the item is too short, or its type, compression or encoding is unknown.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let bad = |problem: String| Malformed::new(Structure::FileExtent, problem);
        let (head, rest) = view::<FileExtentHead>(Structure::FileExtent, data)?;
        let compression = Compression::from_disk(head.compression)
            .ok_or_else(|| bad(format!("unknown compression {}", head.compression)))?;
        if head.encryption != 0 || head.other_encoding.get() != 0 {
            return Err(bad("encrypted or in another encoding".into()));
        }
        let body = match head.extent_type {
            extent_type::INLINE => FileExtentBody::Inline(rest),
            extent_type::REG | extent_type::PREALLOC => {
                let (tail, _) = view::<FileExtentTail>(Structure::FileExtent, rest)?;
                match tail.disk_bytenr.get() {
                    0 => FileExtentBody::Hole { num_bytes: tail.num_bytes.get() },
                    disk_bytenr => FileExtentBody::Extent {
                        disk_bytenr: Logical(disk_bytenr),
                        disk_num_bytes: tail.disk_num_bytes.get(),
                        offset: tail.offset.get(),
                        num_bytes: tail.num_bytes.get(),
                        is_preallocated: head.extent_type == extent_type::PREALLOC,
                    },
                }
            }
            other => return Err(bad(format!("unknown type {other}"))),
        };
        Ok(Self {
            generation: Generation(head.generation.get()),
            ram_bytes: head.ram_bytes.get(),
            compression,
            body,
        })
    }
}
