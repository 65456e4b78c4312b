//! Data blocks: entries and unused pieces, back to back from the header to the end.
//!
//! Each piece ends with its own offset, the tag, so that the piece in front of another can be
//! found. The header lists the three longest unused pieces.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ALIGN, XfsDirEntry, entry_len, file_type, has_types};
use crate::da::{DaEdit, DaExpected, DaKind, to_u16, u16_at, view_at};
use crate::{Ino, Malformed, U16, XfsGeometry};

/// The first two bytes of an unused piece. No inode number begins with them.
const FREE_TAG: usize = 0xffff;

/// The bytes of an entry whose name has 255.
const LONGEST_ENTRY: usize = 272;

/// An unused piece that the header lists. 4 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct DirBestFree {
    /// The offset in the block, or 0.
    pub offset: U16,
    /// The bytes, or 0.
    pub length: U16,
}

const _: () = assert!(size_of::<DirBestFree>() == 4 && align_of::<DirBestFree>() == 1);

impl DirBestFree {
    const NONE: Self = Self { offset: U16::ZERO, length: U16::ZERO };

    fn new(kind: DaKind, offset: usize, length: usize) -> Result<Self, Malformed> {
        Ok(Self { offset: to_u16(kind, offset)?, length: to_u16(kind, length)? })
    }

    /// The offset and the length.
    #[must_use]
    pub fn get(self) -> (usize, usize) {
        (usize::from(self.offset.get()), usize::from(self.length.get()))
    }
}

/// A piece of a data block.
#[derive(Clone, Copy, Debug)]
pub(super) enum DirPiece<'a> {
    Unused { offset: usize, len: usize },
    Used(XfsDirEntry<'a>, usize),
}

impl DirPiece<'_> {
    fn end(&self) -> usize {
        match *self {
            Self::Unused { offset, len } => offset + len,
            Self::Used(entry, len) => entry.offset + len,
        }
    }
}

/// The piece at `at`, which must not reach beyond `end`.
fn piece<'a>(
    geometry: &XfsGeometry,
    kind: DaKind,
    block: &'a [u8],
    at: usize,
    end: usize,
) -> Result<DirPiece<'a>, Malformed> {
    let bad = |problem| kind.bad(format!("at {at} {problem}"));
    let cut = || bad("a piece leads out of it");
    let bytes = block.get(at..end).ok_or_else(cut)?;
    let len = if u16_at(bytes, 0) == Some(FREE_TAG) {
        u16_at(bytes, 2).ok_or_else(cut)?
    } else {
        entry_len(geometry, usize::from(*bytes.get(8).ok_or_else(cut)?))
    };
    let bytes = bytes.get(..len).ok_or_else(cut)?;
    if len < ALIGN || len % ALIGN != 0 || u16_at(bytes, len - 2) != Some(at) {
        return Err(bad("a piece has a wrong tag or length"));
    }
    if u16_at(bytes, 0) == Some(FREE_TAG) {
        return Ok(DirPiece::Unused { offset: at, len });
    }
    let (ino, rest) = bytes.split_first_chunk::<8>().ok_or_else(cut)?;
    let (&name_len, rest) = rest.split_first().ok_or_else(cut)?;
    let (name, rest) = rest.split_at_checked(usize::from(name_len)).ok_or_else(cut)?;
    let file_type = if has_types(geometry) { rest.first().copied() } else { None };
    let entry = XfsDirEntry {
        offset: at,
        ino: Ino(u64::from_be_bytes(*ino)),
        name,
        file_type: file_type.unwrap_or(file_type::UNKNOWN),
    };
    Ok(DirPiece::Used(entry, len))
}

/// The pieces from the header to `end`. It ends after the first malformed one.
fn pieces<'a>(
    geometry: &XfsGeometry,
    kind: DaKind,
    block: &'a [u8],
    end: usize,
) -> impl Iterator<Item = Result<DirPiece<'a>, Malformed>> + use<'a> {
    let geometry = geometry.clone();
    let mut at = kind.header_len(&geometry);
    std::iter::from_fn(move || {
        let found = (at < end).then(|| piece(&geometry, kind, block, at, end))?;
        at = found.as_ref().map_or(end, DirPiece::end);
        Some(found)
    })
}

/// The table of the longest unused pieces, the longest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirBestTable([DirBestFree; 3]);

impl DirBestTable {
    const EMPTY: Self = Self([DirBestFree::NONE; 3]);

    fn at(geometry: &XfsGeometry, kind: DaKind) -> usize {
        kind.fields_at(geometry)
    }

    pub(super) fn read(
        geometry: &XfsGeometry,
        kind: DaKind,
        block: &[u8],
    ) -> Result<Self, Malformed> {
        view_at(kind, block, Self::at(geometry, kind)).map(|table| Self(*table))
    }

    pub(super) fn pieces(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        self.0.into_iter().map(DirBestFree::get).filter(|&(_, len)| len != 0)
    }

    fn smallest(&self) -> usize {
        let [_, _, third] = self.0;
        third.get().1
    }

    fn add(&mut self, piece: DirBestFree) {
        let place = self.0.iter().position(|best| best.length.get() < piece.length.get());
        if let Some(place) = place {
            self.0[place..].rotate_right(1);
            self.0[place] = piece;
        }
    }

    fn drop_piece(&mut self, offset: usize) {
        if let Some(place) = self.pieces().position(|(start, _)| start == offset) {
            self.0[place..].rotate_left(1);
            self.0[2] = DirBestFree::NONE;
        }
    }

    /// The table of a block by its pieces.
    fn count(
        geometry: &XfsGeometry,
        kind: DaKind,
        block: &[u8],
        end: usize,
    ) -> Result<Self, Malformed> {
        let mut table = Self::EMPTY;
        for piece in pieces(geometry, kind, block, end) {
            if let DirPiece::Unused { offset, len } = piece? {
                table.add(DirBestFree::new(kind, offset, len)?);
            }
        }
        Ok(table)
    }
}

/// A verified data block, or the data of a directory with one block.
#[derive(Clone, Debug)]
pub struct DirData<'a> {
    geometry: XfsGeometry,
    kind: DaKind,
    block: &'a [u8],
    end: usize,
    longest: usize,
}

impl<'a> DirData<'a> {
    /// Proves that a block is the expected data block.
    pub fn parse(
        geometry: &XfsGeometry,
        block: &'a [u8],
        expected: &DaExpected,
    ) -> Result<Self, Malformed> {
        let kind = DaKind::DirData;
        kind.check(geometry, block, expected)?;
        Self::check(geometry, kind, block, block.len(), expected, |_| {})
    }

    /// Views a block that was proved before, and that only changes of this module touched since:
    /// its checksum may be out of date. Proves no more than that its parts do not lead out of it.
    pub fn view(geometry: &XfsGeometry, block: &'a [u8]) -> Result<Self, Malformed> {
        Self::view_to(geometry, DaKind::DirData, block, block.len())
    }

    pub(super) fn view_to(
        geometry: &XfsGeometry,
        kind: DaKind,
        block: &'a [u8],
        end: usize,
    ) -> Result<Self, Malformed> {
        let table = DirBestTable::read(geometry, kind, block)?;
        let longest = table.pieces().next().map_or(0, |(_, len)| len);
        Ok(Self { geometry: geometry.clone(), kind, block, end, longest })
    }

    /// Proves the pieces up to `end`, the table of unused ones, and names and numbers of entries.
    pub(super) fn check(
        geometry: &XfsGeometry,
        kind: DaKind,
        block: &'a [u8],
        end: usize,
        expected: &DaExpected,
        mut seen: impl FnMut(&XfsDirEntry<'a>),
    ) -> Result<Self, Malformed> {
        let table = DirBestTable::read(geometry, kind, block)?;
        let mut listed = 0;
        let mut follows_unused = false;
        for piece in pieces(geometry, kind, block, end) {
            let unused = match piece? {
                DirPiece::Unused { offset, len } => Some((offset, len)),
                DirPiece::Used(entry, _) => {
                    entry.check(geometry)?;
                    if entry.name == b"." && expected.owner.is_some_and(|own| own != entry.ino) {
                        return Err(kind.bad(format!("its \".\" is inode {}", entry.ino)));
                    }
                    seen(&entry);
                    None
                }
            };
            if let Some(unused) = unused {
                if follows_unused {
                    return Err(kind.bad(format!("two unused pieces meet at {}", unused.0)));
                }
                if table.pieces().any(|piece| piece == unused) {
                    listed += 1;
                } else if unused.1 > table.smallest() {
                    return Err(kind.bad(format!("the unused piece at {} is not listed", unused.0)));
                }
            }
            follows_unused = unused.is_some();
        }
        let lengths = table.0.map(|best| best.length.get());
        if listed != table.pieces().count() || !lengths.is_sorted_by(|a, b| a >= b) {
            return Err(kind.bad("its table of unused pieces is wrong"));
        }
        Self::view_to(geometry, kind, block, end)
    }

    /// The entries from `offset` on, with `.` and `..`.
    pub fn entries(&self, offset: usize) -> impl Iterator<Item = XfsDirEntry<'a>> + use<'a> {
        let used =
            pieces(&self.geometry, self.kind, self.block, self.end).filter_map(
                |piece| match piece {
                    Ok(DirPiece::Used(entry, _)) => Some(entry),
                    _ => None,
                },
            );
        used.skip_while(move |entry| entry.offset < offset)
    }

    /// The entry at an offset that a leaf names. A wrong offset may lead into an entry, so that
    /// its name must still be compared.
    pub fn entry(&self, offset: usize) -> Result<XfsDirEntry<'a>, Malformed> {
        match piece(&self.geometry, self.kind, self.block, offset, self.end)? {
            DirPiece::Used(entry, _) => {
                entry.check(&self.geometry)?;
                Ok(entry)
            }
            DirPiece::Unused { .. } => {
                Err(self.kind.bad(format!("an address leads to the unused piece at {offset}")))
            }
        }
    }

    /// The bytes of the longest unused piece.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.longest
    }
}

/// The bytes of an empty data block, without a checksum.
pub fn encode_empty(geometry: &XfsGeometry, expected: &DaExpected) -> Result<Vec<u8>, Malformed> {
    let kind = DaKind::DirData;
    let mut block = kind.empty(geometry, expected)?;
    let (start, end) = (kind.header_len(geometry), block.len());
    let mut edit = DaEdit::fill(kind, &mut block);
    replace(geometry, &mut edit, end, &[], &[(start, end - start)])?;
    Ok(block)
}

/// Adds an entry to a data block at the front of its longest unused piece. Returns its offset;
/// `None` when the piece is too short.
pub fn insert(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    entry: &XfsDirEntry<'_>,
) -> Result<Option<usize>, Malformed> {
    let table = DirBestTable::read(geometry, edit.kind(), edit.block())?;
    let len = entry.len_in_block(geometry);
    let Some(unused) = table.pieces().next().filter(|unused| unused.1 >= len) else {
        return Ok(None);
    };
    let end = edit.block().len();
    use_front(geometry, edit, end, unused, entry)?;
    Ok(Some(unused.0))
}

/// Writes an entry at the front of an unused piece.
pub(super) fn use_front(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    end: usize,
    (offset, unused_len): (usize, usize),
    entry: &XfsDirEntry<'_>,
) -> Result<(), Malformed> {
    let len = entry.len_in_block(geometry);
    let rest = unused_len.checked_sub(len).ok_or_else(|| edit.kind().bad("no room"))?;
    put_entry(geometry, edit, &XfsDirEntry { offset, ..*entry })?;
    replace(geometry, edit, end, &[offset], &[(offset + len, rest)])
}

/// Writes an entry at its offset.
pub(super) fn put_entry(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    entry: &XfsDirEntry<'_>,
) -> Result<(), Malformed> {
    entry.check(geometry)?;
    let len = entry.len_in_block(geometry);
    let name_len = u8::try_from(entry.name.len()).map_err(|_| edit.kind().bad("a long name"))?;
    let file_type = if has_types(geometry) { entry.file_type } else { 0 };
    let ino = entry.ino.0.to_be_bytes();
    let fields = ino.iter().chain([&name_len]).chain(entry.name).chain([&file_type]);
    let mut bytes = [0; LONGEST_ENTRY];
    for (byte, field) in bytes.iter_mut().zip(fields) {
        *byte = *field;
    }
    let tag_at = len - 2;
    edit.put(entry.offset, bytes.get(..tag_at).unwrap_or(&bytes))?;
    edit.put(entry.offset + tag_at, to_u16(edit.kind(), entry.offset)?.as_bytes())
}

/// Lets the entry at `offset` of a data block, or of the only block, lead to another file.
pub fn set_file(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    offset: usize,
    (ino, file_type): (Ino, u8),
) -> Result<(), Malformed> {
    let (kind, end) = (edit.kind(), edit.block().len());
    let DirPiece::Used(old, _) = piece(geometry, kind, edit.block(), offset, end)? else {
        return Err(kind.bad(format!("at {offset} there is no entry")));
    };
    let type_at = has_types(geometry).then_some(offset + 9 + old.name.len());
    XfsDirEntry { ino, file_type, ..old }.check(geometry)?;
    edit.put(offset, &ino.0.to_be_bytes())?;
    type_at.map_or(Ok(()), |at| edit.put(at, &[file_type]))
}

/// Makes the entry at `offset` of a data block unused.
pub fn remove(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    offset: usize,
) -> Result<(), Malformed> {
    let end = edit.block().len();
    free(geometry, edit, end, offset)
}

/// Makes the entry at `offset` unused, as one piece with its unused neighbours.
pub(super) fn free(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    end: usize,
    offset: usize,
) -> Result<(), Malformed> {
    let kind = edit.kind();
    let DirPiece::Used(_, len) = piece(geometry, kind, edit.block(), offset, end)? else {
        return Err(kind.bad(format!("at {offset} there is no entry")));
    };
    let (mut start, mut stop) = (offset, offset + len);
    let mut gone = [offset; 2];
    if let Some(DirPiece::Unused { offset: before, len }) =
        piece_before(geometry, kind, edit.block(), offset)?
        && before + len == offset
    {
        (start, gone[0]) = (before, before);
    }
    if stop < end
        && let DirPiece::Unused { len, .. } = piece(geometry, kind, edit.block(), stop, end)?
    {
        gone[1] = stop;
        stop += len;
    }
    replace(geometry, edit, end, &gone, &[(start, stop - start)])
}

/// The piece that ends at `end`, if one does.
pub(super) fn piece_before<'a>(
    geometry: &XfsGeometry,
    kind: DaKind,
    block: &'a [u8],
    end: usize,
) -> Result<Option<DirPiece<'a>>, Malformed> {
    let header = kind.header_len(geometry);
    match end.checked_sub(2).and_then(|tag| u16_at(block, tag)) {
        Some(start) if end > header && start >= header => {
            piece(geometry, kind, block, start, end).map(Some)
        }
        _ => Ok(None),
    }
}

/// Takes the unused pieces at `gone` off the table, and writes and lists those in `new`; those of
/// length 0 do not count.
pub(super) fn replace(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    end: usize,
    gone: &[usize],
    new: &[(usize, usize)],
) -> Result<(), Malformed> {
    let kind = edit.kind();
    let old = DirBestTable::read(geometry, kind, edit.block())?;
    let mut table = old;
    for &offset in gone {
        table.drop_piece(offset);
    }
    for &(offset, len) in new.iter().filter(|piece| piece.1 != 0) {
        edit.put(offset, to_u16(kind, FREE_TAG)?.as_bytes())?;
        edit.put(offset + 2, to_u16(kind, len)?.as_bytes())?;
        edit.put(offset + len - 2, to_u16(kind, offset)?.as_bytes())?;
        table.add(DirBestFree::new(kind, offset, len)?);
    }
    // A piece that the old table did not list is at most as long as the smallest of the old table.
    if table.smallest() < old.smallest() {
        table = DirBestTable::count(geometry, kind, edit.block(), end)?;
    }
    if table != old {
        edit.put(DirBestTable::at(geometry, kind), table.0.as_bytes())?;
    }
    Ok(())
}
