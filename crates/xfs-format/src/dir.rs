//! Directories (book, "Directories").
//!
//! A directory is in its inode ([`short`]), or one block ([`block`]), or data blocks ([`data`])
//! with one leaf, or with a tree of leaves ([`leaf`]) and an index of free space ([`free`]). The
//! blocks of a directory lie in one fork, in three spaces of 32 GiB: data, leaves, free index.
//!
//! Kernels put `.` and `..` in front of all other entries. Readers find them by name: a repair may
//! have added a missing one elsewhere (guess), so only where `.` leads to is proved.

pub mod block;
pub mod data;
pub mod free;
pub mod leaf;
pub mod short;

use crate::geometry::XfsLayout;
use crate::{FileBlock, Ino, Malformed, Structure, XfsGeometry};

/// The bytes of each of the three spaces of a directory.
const SPACE_LEN: u64 = 1 << 35;

/// The first block of the leaves, which is the root of the tree.
#[must_use]
pub fn leaf_start(geometry: &XfsGeometry) -> FileBlock {
    FileBlock(SPACE_LEN >> geometry.block_log)
}

/// The first block of the index of free space.
#[must_use]
pub fn free_start(geometry: &XfsGeometry) -> FileBlock {
    FileBlock((2 * SPACE_LEN) >> geometry.block_log)
}

/// The bytes of offsets that one unit of a [`DirCookie`] stands for.
pub const ALIGN: usize = 8;

/// The place of an entry in the data space, in units of 8 bytes. Leaves store it as the address,
/// and reading goes on from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DirCookie(pub u32);

impl DirCookie {
    /// The address in a leaf of an entry that was removed.
    pub const STALE: Self = Self(0);

    /// The cookie of `offset` in the directory block that begins with `block`; `None` when it is
    /// outside the data space.
    #[must_use]
    pub fn new(geometry: &XfsGeometry, block: FileBlock, offset: usize) -> Option<Self> {
        let start = block.0.checked_mul(1 << geometry.block_log)?;
        let byte = start.checked_add(u64::try_from(offset).ok()?)?;
        u32::try_from(byte / ALIGN as u64).ok().map(Self)
    }

    /// The first block of the directory block, and the offset in it.
    #[must_use]
    pub fn split(self, geometry: &XfsGeometry) -> (FileBlock, usize) {
        let byte = u64::from(self.0) * ALIGN as u64;
        let inside = byte & (geometry.dir_block_size() as u64 - 1);
        let block = (byte - inside) >> geometry.block_log;
        (FileBlock(block), usize::try_from(inside).unwrap_or(0))
    }
}

/// Values of [`XfsDirEntry::file_type`].
#[expect(missing_docs, reason = "the names are the format's and say what the values are")]
pub mod file_type {
    /// On volumes whose entries have no type.
    pub const UNKNOWN: u8 = 0;
    pub const REG_FILE: u8 = 1;
    pub const DIR: u8 = 2;
    pub const CHRDEV: u8 = 3;
    pub const BLKDEV: u8 = 4;
    pub const FIFO: u8 = 5;
    pub const SOCK: u8 = 6;
    pub const SYMLINK: u8 = 7;
    /// A whiteout.
    pub const WHT: u8 = 8;

    /// The value for a file with this mode.
    #[must_use]
    pub fn of_mode(mode: u16) -> u8 {
        use crate::inode::file_type;
        match mode & file_type::MASK {
            file_type::REGULAR => REG_FILE,
            file_type::DIRECTORY => DIR,
            file_type::CHARACTER => CHRDEV,
            file_type::BLOCK => BLKDEV,
            file_type::FIFO => FIFO,
            file_type::SOCKET => SOCK,
            file_type::SYMLINK => SYMLINK,
            _ => UNKNOWN,
        }
    }
}

/// An entry of a directory, in any form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsDirEntry<'a> {
    /// The offset in its directory block. In the short form, that which it will have in the block.
    pub offset: usize,
    /// The file.
    pub ino: Ino,
    /// The name.
    pub name: &'a [u8],
    /// One of [`file_type`].
    pub file_type: u8,
}

impl XfsDirEntry<'_> {
    /// The bytes of the entry in a data block.
    #[must_use]
    pub fn len_in_block(&self, geometry: &XfsGeometry) -> usize {
        entry_len(geometry, self.name.len())
    }

    /// Whether the entry is `.` or `..`.
    #[must_use]
    pub fn is_dot(&self) -> bool {
        matches!(self.name, b"." | b"..")
    }

    /// Proves what entries of all forms must have.
    fn check(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        let bad = |problem| Err(Malformed::new(Structure::DirectoryEntry, problem));
        if self.name.is_empty() || self.name.len() > 255 {
            return bad(format!("a name of {} bytes", self.name.len()));
        }
        if has_separator(self.name) {
            return bad("its name holds a slash or a NUL byte".to_owned());
        }
        if self.file_type > file_type::WHT {
            return bad(format!("it has the type {}", self.file_type));
        }
        geometry.check_ino(Structure::DirectoryEntry, self.ino)
    }
}

/// Whether bytes hold a slash or a NUL byte. Eight are looked at at a time: each commit of a name
/// proves all names in its block.
fn has_separator(name: &[u8]) -> bool {
    const ONES: u64 = u64::MAX / 0xff;
    const SLASHES: u64 = ONES * b'/' as u64;
    // Not 0 when one of the bytes is 0: only such a byte gets its high bit by the subtraction.
    let zeros = |word: u64| word.wrapping_sub(ONES) & !word & ONES << 7;
    let (words, rest) = name.as_chunks();
    let words = words.iter().map(|word| u64::from_ne_bytes(*word));
    let found = words.fold(0, |found, word| found | zeros(word) | zeros(word ^ SLASHES));
    found != 0 || rest.iter().any(|byte| matches!(byte, 0 | b'/'))
}

fn has_types(geometry: &XfsGeometry) -> bool {
    geometry.layout.contains(XfsLayout::FILE_TYPES)
}

/// The bytes in a data block of an entry with a name of `name_len` bytes: inode, length, name,
/// type and tag.
#[must_use]
pub fn entry_len(geometry: &XfsGeometry, name_len: usize) -> usize {
    (8 + 1 + name_len + usize::from(has_types(geometry)) + 2).next_multiple_of(ALIGN)
}

/// The offset of the first entry behind `.` and `..`.
#[must_use]
pub fn first_offset(geometry: &XfsGeometry) -> usize {
    crate::da::DaKind::DirBlock.header_len(geometry)
        + entry_len(geometry, 1)
        + entry_len(geometry, 2)
}
