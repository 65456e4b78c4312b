//! File extents: where a range of a file is.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::compress::Compression;
use crate::error::view;
use crate::{Generation, Logical, Malformed};

/// The part that every EXTENT_DATA item has. 21 bytes; inline data follows at once.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FileExtentHead {
    /// The transaction that made the extent.
    pub generation: U64,
    /// The size of the extent's data when it is not compressed, in bytes.
    pub ram_bytes: U64,
    /// How it is compressed.
    pub compression: u8,
    /// Always 0.
    pub encryption: u8,
    /// Always 0.
    pub other_encoding: U16,
    /// One of [`extent_type`].
    pub extent_type: u8,
}

/// What follows in extents that are not inline. 32 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FileExtentTail {
    /// Where the extent is; 0 for a hole.
    pub disk_bytenr: U64,
    /// The size that it has there, in bytes.
    pub disk_num_bytes: U64,
    /// Where in the uncompressed extent this range begins, in bytes.
    pub offset: U64,
    /// How much of the file this range is, in bytes.
    pub num_bytes: U64,
}

/// Values of [`FileExtentHead::extent_type`].
#[expect(missing_docs, reason = "the names are the format's and say what the values are")]
pub mod extent_type {
    pub const INLINE: u8 = 0;
    pub const REG: u8 = 1;
    pub const PREALLOC: u8 = 2;
}

/// The largest extent that is compressed, in bytes before compression.
pub const MAX_COMPRESSED_EXTENT: u64 = 128 << 10;

/// A parsed EXTENT_DATA item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent<'a> {
    /// The transaction that made it.
    pub generation: Generation,
    /// The size of the whole extent before compression, in bytes.
    pub ram_bytes: u64,
    /// How it is compressed.
    pub compression: Compression,
    /// Where the data is.
    pub body: FileExtentBody<'a>,
}

/// Where the data of a [`FileExtent`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileExtentBody<'a> {
    /// In the item itself.
    Inline(&'a [u8]),
    /// Nowhere: it reads as zeros.
    Hole {
        /// The length of the range in the file, in bytes.
        num_bytes: u64,
    },
    /// In an extent.
    Extent {
        /// The address of the extent.
        disk_bytenr: Logical,
        /// Its size on disk, in bytes.
        disk_num_bytes: u64,
        /// Where in the uncompressed extent the range begins, in bytes.
        offset: u64,
        /// The length of the range in the file, in bytes.
        num_bytes: u64,
        /// Allocated and never written: it reads as zeros.
        preallocated: bool,
    },
}

impl<'a> FileExtent<'a> {
    /// Parses an EXTENT_DATA item. Whether its numbers fit together is for
    /// [`crate::check`] to say.
    ///
    /// # Errors
    /// When the item is too short, or its type, compression or encoding is unknown.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let bad = |problem: String| Malformed::new("file extent", problem);
        let (head, rest) = view::<FileExtentHead>("file extent", data)?;
        let compression = Compression::from_disk(head.compression)
            .ok_or_else(|| bad(format!("unknown compression {}", head.compression)))?;
        if head.encryption != 0 || head.other_encoding.get() != 0 {
            return Err(bad("encrypted or in another encoding".into()));
        }
        let body = match head.extent_type {
            extent_type::INLINE => FileExtentBody::Inline(rest),
            extent_type::REG | extent_type::PREALLOC => {
                let (tail, _) = view::<FileExtentTail>("file extent", rest)?;
                match tail.disk_bytenr.get() {
                    0 => FileExtentBody::Hole { num_bytes: tail.num_bytes.get() },
                    disk_bytenr => FileExtentBody::Extent {
                        disk_bytenr: Logical(disk_bytenr),
                        disk_num_bytes: tail.disk_num_bytes.get(),
                        offset: tail.offset.get(),
                        num_bytes: tail.num_bytes.get(),
                        preallocated: head.extent_type == extent_type::PREALLOC,
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
