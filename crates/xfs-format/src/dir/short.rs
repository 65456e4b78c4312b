//! The short form: a directory in its inode.
//!
//! `.` is not stored, and of `..` only the number. All numbers have eight bytes as soon as one of
//! them needs more than four.

use super::{XfsDirEntry, file_type, first_offset, has_types};
use crate::da::u16_at;
use crate::layout::number;
use crate::{Ino, Malformed, Structure, XfsGeometry};

/// A verified directory in short form.
#[derive(Clone, Debug)]
pub struct ShortDir<'a> {
    /// The directory above.
    pub parent: Ino,
    /// The entries, ascending by offset, without `.` and `..`.
    pub entries: Vec<XfsDirEntry<'a>>,
}

/// A directory in short form that [`ShortDir::parse`] has accepted before. Other bytes may give
/// wrong entries, or none.
#[derive(Clone, Copy, Debug)]
pub struct ShortDirView<'a> {
    /// The directory above.
    pub parent: Ino,
    shape: ShortEntryShape,
    entries: &'a [u8],
}

/// How entries are stored: the bytes of a number, and whether there are types.
#[derive(Clone, Copy, Debug)]
struct ShortEntryShape {
    width: usize,
    has_types: bool,
}

fn bad(problem: String) -> Malformed {
    Malformed::new(Structure::Directory, problem)
}

/// The first `len` of `bytes`, which are moved behind them.
fn take<'a>(bytes: &mut &'a [u8], len: usize) -> Result<&'a [u8], Malformed> {
    let (taken, rest) =
        bytes.split_at_checked(len).ok_or_else(|| bad("an entry leads out of it".to_owned()))?;
    *bytes = rest;
    Ok(taken)
}

fn take_number(bytes: &mut &[u8], width: usize) -> Result<u64, Malformed> {
    Ok(number(take(bytes, width)?, 0, width))
}

fn is_wide(ino: Ino) -> bool {
    ino.0 > u64::from(u32::MAX)
}

impl<'a> ShortDir<'a> {
    /// Proves the data fork of a directory in short form; `fork` has as many bytes as the inode
    /// says that the directory has.
    pub fn parse(geometry: &XfsGeometry, fork: &'a [u8]) -> Result<Self, Malformed> {
        let mut rest = fork;
        let (count, wide_count, shape, parent) = take_header(geometry, &mut rest)?;
        geometry.check_ino(Structure::DirectoryEntry, parent)?;
        let mut wide_found = u64::from(is_wide(parent));
        let mut next = first_offset(geometry);
        let mut entries = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        for _ in 0..count {
            let entry = take_entry(&mut rest, shape)?;
            entry.check(geometry)?;
            if entry.is_dot() {
                return Err(bad("\".\" or \"..\" is among its entries".to_owned()));
            }
            if entry.offset < next || entry.offset % super::ALIGN != 0 {
                return Err(bad(format!("an entry has the offset {}", entry.offset)));
            }
            next = entry.offset + entry.len_in_block(geometry);
            wide_found += u64::from(is_wide(entry.ino));
            entries.push(entry);
        }
        if wide_found != wide_count || !rest.is_empty() {
            return Err(bad(format!(
                "{wide_count} wide numbers, but {wide_found} are there, and {} bytes are left",
                rest.len()
            )));
        }
        let directory = Self { parent, entries };
        if directory.block_len(geometry) > geometry.dir_block_size() {
            return Err(bad("its entries do not fit in a block".to_owned()));
        }
        Ok(directory)
    }

    /// The offset behind the last entry.
    fn end(&self, geometry: &XfsGeometry) -> usize {
        let last = self.entries.last();
        last.map_or(first_offset(geometry), |last| last.offset + last.len_in_block(geometry))
    }

    /// The bytes of a block that holds the entries at their offsets, and their hashes.
    fn block_len(&self, geometry: &XfsGeometry) -> usize {
        self.end(geometry) + (self.entries.len() + 2) * 8 + 8
    }

    /// Adds an entry and gives it an offset: behind the last one, or, when the block form would
    /// have no room there, in a gap. `false` when there is none: the directory needs a block.
    pub fn insert(&mut self, geometry: &XfsGeometry, mut entry: XfsDirEntry<'a>) -> bool {
        let len = entry.len_in_block(geometry);
        let room = geometry.dir_block_size().saturating_sub((self.entries.len() + 3) * 8 + 8);
        entry.offset = self.end(geometry);
        let mut place = self.entries.len();
        if self.entries.len() == 255 || entry.offset + len > room {
            let mut start = first_offset(geometry);
            let gap = self.entries.iter().position(|other| {
                let fits = other.offset >= start + len;
                if !fits {
                    start = other.offset + other.len_in_block(geometry);
                }
                fits
            });
            let has_room = self.entries.len() < 255 && self.end(geometry) <= room;
            let Some(gap) = gap.filter(|_| has_room) else { return false };
            (place, entry.offset) = (gap, start);
        }
        self.entries.insert(place, entry);
        true
    }

    /// Removes the entry with a name.
    pub fn remove(&mut self, name: &[u8]) -> Option<XfsDirEntry<'a>> {
        let place = self.entries.iter().position(|entry| entry.name == name)?;
        Some(self.entries.remove(place))
    }

    /// The bytes for the fork. They may be more than it has room for.
    pub fn encode(&self, geometry: &XfsGeometry) -> Result<Vec<u8>, Malformed> {
        let inodes = self.entries.iter().map(|entry| entry.ino).chain([self.parent]);
        let wide = inodes.filter(|&ino| is_wide(ino)).count();
        let byte = |number: usize| {
            u8::try_from(number).map_err(|_| bad(format!("{number} does not fit in a byte")))
        };
        let put = |bytes: &mut Vec<u8>, ino: Ino| {
            bytes.extend_from_slice(&ino.0.to_be_bytes()[if wide == 0 { 4 } else { 0 }..]);
        };
        let mut bytes = vec![byte(self.entries.len())?, byte(wide)?];
        put(&mut bytes, self.parent);
        for entry in &self.entries {
            entry.check(geometry)?;
            let offset = u16::try_from(entry.offset)
                .map_err(|_| bad(format!("the offset {} of an entry", entry.offset)))?;
            bytes.push(byte(entry.name.len())?);
            bytes.extend_from_slice(&offset.to_be_bytes());
            bytes.extend_from_slice(entry.name);
            if has_types(geometry) {
                bytes.push(entry.file_type);
            }
            put(&mut bytes, entry.ino);
        }
        Ok(bytes)
    }
}

impl<'a> ShortDirView<'a> {
    /// The view of a data fork.
    pub fn new(geometry: &XfsGeometry, fork: &'a [u8]) -> Result<Self, Malformed> {
        let mut entries = fork;
        let (_, _, shape, parent) = take_header(geometry, &mut entries)?;
        Ok(Self { parent, shape, entries })
    }

    /// The entries, ascending by offset, without `.` and `..`.
    pub fn entries(self) -> impl Iterator<Item = XfsDirEntry<'a>> {
        let Self { shape, mut entries, .. } = self;
        std::iter::from_fn(move || take_entry(&mut entries, shape).ok())
    }

    /// The entry with a name other than `.` and `..`.
    #[must_use]
    pub fn find(self, name: &[u8]) -> Option<XfsDirEntry<'a>> {
        self.entries().find(|entry| entry.name == name)
    }
}

/// The number of entries and of wide numbers, how entries are stored, and the directory above.
fn take_header(
    geometry: &XfsGeometry,
    bytes: &mut &[u8],
) -> Result<(u64, u64, ShortEntryShape, Ino), Malformed> {
    let count = take_number(bytes, 1)?;
    let wide_count = take_number(bytes, 1)?;
    let width = if wide_count == 0 { 4 } else { 8 };
    let shape = ShortEntryShape { width, has_types: has_types(geometry) };
    Ok((count, wide_count, shape, Ino(take_number(bytes, width)?)))
}

/// The entry with which `bytes` begin.
fn take_entry<'a>(
    bytes: &mut &'a [u8],
    shape: ShortEntryShape,
) -> Result<XfsDirEntry<'a>, Malformed> {
    let name_len = usize::try_from(take_number(bytes, 1)?).unwrap_or(0);
    let offset = u16_at(take(bytes, 2)?, 0).unwrap_or(0);
    let name = take(bytes, name_len)?;
    let file_type = if shape.has_types {
        take(bytes, 1)?.first().copied().unwrap_or(file_type::UNKNOWN)
    } else {
        file_type::UNKNOWN
    };
    Ok(XfsDirEntry { offset, ino: Ino(take_number(bytes, shape.width)?), name, file_type })
}
