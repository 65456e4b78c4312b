//! The block form: entries, and at the end of the block the array of their hashes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::data::{self, DirBestTable, DirData, DirPiece};
use super::leaf::{self, DirHash, DirHashArray, DirLeaf, NO_BLOCK};
use super::short::ShortDir;
use super::{ALIGN, DirCookie, XfsDirEntry, file_type, first_offset};
use crate::da::{DaEdit, DaExpected, DaKind, slice_at, view_at};
use crate::hash::name_hash;
use crate::{FileBlock, Malformed, U16, U32, XfsGeometry};

const KIND: DaKind = DaKind::DirBlock;

/// The end of the block. 8 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DirBlockTail {
    /// The hashes in front of it.
    pub count: U32,
    /// The stale ones.
    pub stale: U32,
}

const TAIL: usize = size_of::<DirBlockTail>();
const _: () = assert!(TAIL == 8);

/// A verified directory with one block.
#[derive(Clone, Debug)]
pub struct DirBlock<'a> {
    /// The entries.
    pub data: DirData<'a>,
    /// Their hashes, ascending, with stale ones.
    pub hashes: &'a [DirHash],
}

/// The address of an entry of the only block.
fn address(offset: usize) -> DirCookie {
    DirCookie(u32::try_from(offset / ALIGN).unwrap_or(0))
}

fn array(geometry: &XfsGeometry, block: &[u8]) -> Result<DirHashArray, Malformed> {
    let tail_at = block.len().saturating_sub(TAIL);
    let tail: &DirBlockTail = view_at(KIND, block, tail_at)?;
    let (count, stale) = (tail.count.get(), tail.stale.get());
    let number = |number| usize::try_from(number).unwrap_or(usize::MAX);
    let start = number(count).checked_mul(8).and_then(|len| tail_at.checked_sub(len));
    let start = start.filter(|&start| start >= KIND.header_len(geometry) && stale <= count);
    let start = start.ok_or_else(|| KIND.bad(format!("{count} hashes, {stale} stale")))?;
    Ok(DirHashArray { start, count: number(count), stale: number(stale), grows_down: true })
}

fn put_tail(edit: &mut DaEdit<'_>, array: &DirHashArray) -> Result<(), Malformed> {
    let number =
        |number| u32::try_from(number).map(U32::new).map_err(|_| KIND.bad("too many hashes"));
    let tail = DirBlockTail { count: number(array.count)?, stale: number(array.stale)? };
    edit.put(array.start + array.count * 8, tail.as_bytes())
}

impl<'a> DirBlock<'a> {
    /// Proves that a block is the expected directory with one block, and that each of its entries
    /// has just one hash.
    pub fn parse(
        geometry: &XfsGeometry,
        block: &'a [u8],
        expected: &DaExpected,
    ) -> Result<Self, Malformed> {
        KIND.check(geometry, block, expected)?;
        let DirHashArray { start, count, stale, .. } = array(geometry, block)?;
        let hashes = slice_at(KIND, block, start, count)?;
        leaf::check_hashes(KIND, hashes, stale)?;
        let mut places = DirPlaces([0; 128]);
        let mut entries = 0;
        let data = DirData::check(geometry, KIND, block, start, expected, |entry| {
            places.insert(entry.offset);
            entries += 1;
        })?;
        if entries != count - stale {
            return Err(KIND.bad(format!("{entries} entries with {} hashes", count - stale)));
        }
        for hash in hashes {
            let Some(cookie) = hash.cookie() else { continue };
            let (file_block, offset) = cookie.split(geometry);
            if file_block != FileBlock(0) || !places.remove(offset) {
                return Err(KIND.bad(format!("a hash leads to {}", cookie.0)));
            }
            if name_hash(data.entry(offset)?.name) != hash.hash.get() {
                return Err(KIND.bad(format!("the entry at {offset} has another hash")));
            }
        }
        Ok(Self { data, hashes })
    }

    /// Views a block that was proved before, and that only changes of this module touched since:
    /// its checksum may be out of date. Proves no more than that its parts do not lead out of it.
    pub fn view(geometry: &XfsGeometry, block: &'a [u8]) -> Result<Self, Malformed> {
        let DirHashArray { start, count, .. } = array(geometry, block)?;
        let data = DirData::view_to(geometry, KIND, block, start)?;
        Ok(Self { data, hashes: slice_at(KIND, block, start, count)? })
    }

    /// The entry with a name.
    pub fn find(&self, name: &[u8]) -> Result<Option<XfsDirEntry<'a>>, Malformed> {
        for cookie in leaf::find(self.hashes, name_hash(name)) {
            let entry = self.data.entry(cookie.0 as usize * ALIGN)?;
            if entry.name == name {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }
}

/// A set of places in a directory block, one bit for each 8 bytes of 64 KiB.
struct DirPlaces([u64; 128]);

impl DirPlaces {
    fn insert(&mut self, offset: usize) {
        if let Some(word) = self.0.get_mut(offset / 512) {
            *word |= 1 << (offset / ALIGN % 64);
        }
    }

    /// Takes a place out. `false` when it is not in the set.
    fn remove(&mut self, offset: usize) -> bool {
        let bit = 1 << (offset / ALIGN % 64);
        let Some(word) = self.0.get_mut(offset / 512) else { return false };
        let is_there = *word & bit != 0;
        *word &= !bit;
        is_there
    }
}

/// Adds an entry to a directory with one block. Returns its offset; `None` when it does not fit.
pub fn insert(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    entry: &XfsDirEntry<'_>,
) -> Result<Option<usize>, Malformed> {
    let mut array = array(geometry, edit.block())?;
    let mut unused = room(geometry, edit, &array, entry)?;
    if unused.is_none() && array.stale > 1 {
        compact(geometry, edit, &mut array)?;
        unused = room(geometry, edit, &array, entry)?;
    }
    let Some(unused) = unused else { return Ok(None) };
    data::use_front(geometry, edit, array.start, unused, entry)?;
    if array.stale == 0 {
        let (offset, len) = unused_end(geometry, edit, array.start)?
            .ok_or_else(|| KIND.bad("no room for a hash"))?;
        let new = [(offset, len - 8)];
        data::replace(geometry, edit, array.start - 8, &[offset], &new)?;
    }
    array.insert(edit, DirHash::new(name_hash(entry.name), address(unused.0)))?;
    put_tail(edit, &array)?;
    Ok(Some(unused.0))
}

/// The unused piece right in front of the array: offset and length.
fn unused_end(
    geometry: &XfsGeometry,
    edit: &DaEdit<'_>,
    start: usize,
) -> Result<Option<(usize, usize)>, Malformed> {
    Ok(match data::piece_before(geometry, KIND, edit.block(), start)? {
        Some(DirPiece::Unused { offset, len }) if offset + len == start => Some((offset, len)),
        _ => None,
    })
}

/// An unused piece for an entry, which leaves room for its hash.
fn room(
    geometry: &XfsGeometry,
    edit: &DaEdit<'_>,
    array: &DirHashArray,
    entry: &XfsDirEntry<'_>,
) -> Result<Option<(usize, usize)>, Malformed> {
    let len = entry.len_in_block(geometry);
    let mut pieces = DirBestTable::read(geometry, KIND, edit.block())?.pieces();
    if array.stale > 0 {
        return Ok(pieces.find(|piece| piece.1 >= len));
    }
    let Some(last) = unused_end(geometry, edit, array.start)? else { return Ok(None) };
    Ok(pieces.find(|&piece| piece.1 >= len + if piece == last { 8 } else { 0 }))
}

/// Takes the stale hashes out of the array, and adds their room to the unused piece in front of it.
fn compact(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    array: &mut DirHashArray,
) -> Result<(), Malformed> {
    let last = unused_end(geometry, edit, array.start)?.unwrap_or((array.start, 0));
    let old_start = array.start;
    array.compact_down(edit)?;
    let piece = (last.0, last.1 + array.start - old_start);
    data::replace(geometry, edit, array.start, &[last.0], &[piece])?;
    put_tail(edit, array)
}

/// Removes the entry at `offset`, which has this name.
pub fn remove(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    offset: usize,
    name: &[u8],
) -> Result<(), Malformed> {
    let mut array = array(geometry, edit.block())?;
    array.remove(edit, DirHash::new(name_hash(name), address(offset)))?;
    put_tail(edit, &array)?;
    data::free(geometry, edit, array.start, offset)
}

/// Makes a directory in short form one with a block, without a checksum. The entries keep their
/// offsets. `expected` has the directory as its owner.
pub fn from_short(
    geometry: &XfsGeometry,
    expected: &DaExpected,
    short: &ShortDir<'_>,
) -> Result<Vec<u8>, Malformed> {
    let own = expected.owner.ok_or_else(|| KIND.bad("its owner is missing"))?;
    let mut block = KIND.empty(geometry, expected)?;
    let count = short.entries.len() + 2;
    let tail = block.len() - TAIL;
    let start = tail.checked_sub(count * 8).ok_or_else(|| KIND.bad("too many entries"))?;
    let mut edit = DaEdit::fill(KIND, &mut block);
    let dot = |offset, ino, name| XfsDirEntry { offset, ino, name, file_type: file_type::DIR };
    let mut at = KIND.header_len(geometry);
    let up = at + super::entry_len(geometry, 1);
    let dots: [XfsDirEntry<'_>; 2] = [dot(at, own, b"."), dot(up, short.parent, b"..")];
    let mut hashes = Vec::with_capacity(count);
    for entry in dots.iter().chain(&short.entries) {
        let gap = entry.offset.checked_sub(at);
        let gap = gap.ok_or_else(|| KIND.bad("entries overlap"))?;
        data::replace(geometry, &mut edit, at + gap, &[], &[(at, gap)])?;
        data::put_entry(geometry, &mut edit, entry)?;
        hashes.push(DirHash::new(name_hash(entry.name), address(entry.offset)));
        at = entry.offset + entry.len_in_block(geometry);
    }
    let rest = start.checked_sub(at).ok_or_else(|| KIND.bad("too many entries"))?;
    data::replace(geometry, &mut edit, start, &[], &[(at, rest)])?;
    hashes.sort_by_key(|entry| (entry.hash.get(), entry.address.get()));
    edit.put(start, hashes.as_bytes())?;
    put_tail(&mut edit, &DirHashArray { start, count, stale: 0, grows_down: true })?;
    Ok(block)
}

/// Makes a directory with one block one in short form. The entries keep their offsets.
pub fn to_short<'a>(
    geometry: &XfsGeometry,
    block: &DirBlock<'a>,
) -> Result<ShortDir<'a>, Malformed> {
    let up = block.find(b"..")?.ok_or_else(|| KIND.bad("it has no \"..\""))?;
    let mut entries: Vec<_> = block.data.entries(0).filter(|entry| !entry.is_dot()).collect();
    // Repair may have put "." or ".." elsewhere, and an entry in their place.
    let mut next = first_offset(geometry);
    for entry in &mut entries {
        entry.offset = entry.offset.max(next);
        next = entry.offset + entry.len_in_block(geometry);
    }
    Ok(ShortDir { parent: up.ino, entries })
}

/// Makes a verified directory with one block one with a data block and a leaf. Returns the leaf,
/// without a checksum; `expected` is that of the leaf.
pub fn to_leaf(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    expected: &DaExpected,
) -> Result<Vec<u8>, Malformed> {
    let array = array(geometry, edit.block())?;
    let hashes: &[DirHash] = slice_at(KIND, edit.block(), array.start, array.count)?;
    let hashes: Vec<_> = hashes.iter().copied().filter(|hash| hash.cookie().is_some()).collect();
    let (offset, len) = unused_end(geometry, edit, array.start)?.unwrap_or((array.start, 0));
    let end = edit.block().len();
    let piece = (offset, len + end - array.start);
    edit.become_kind(geometry, DaKind::DirData)?;
    data::replace(geometry, edit, end, &[offset], &[piece])?;
    let table = DirBestTable::read(geometry, KIND, edit.block())?;
    let best = table.pieces().next().map_or(0, |(_, len)| len);
    let best = u16::try_from(best).ok().filter(|&best| best != NO_BLOCK);
    let best = U16::new(best.ok_or_else(|| KIND.bad("a long unused piece"))?);
    DirLeaf::encode(geometry, DaKind::DirLeaf, expected, (0, 0), &hashes, &[best])
}

/// Makes the only data block of a directory with a leaf, which has these hashes, all of the
/// directory. Returns false, and changes nothing, when the end of the block has no room for them.
pub fn from_leaf(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    hashes: &[DirHash],
) -> Result<bool, Malformed> {
    let end = edit.block().len();
    let live: Vec<_> = hashes.iter().copied().filter(|hash| hash.cookie().is_some()).collect();
    let needed = TAIL + live.len() * size_of::<DirHash>();
    let Some((offset, len)) = unused_end(geometry, edit, end)?.filter(|unused| unused.1 >= needed)
    else {
        return Ok(false);
    };
    let start = end - needed;
    edit.become_kind(geometry, KIND)?;
    data::replace(geometry, edit, start, &[offset], &[(offset, len - needed)])?;
    edit.put(start, live.as_bytes())?;
    put_tail(edit, &DirHashArray { start, count: live.len(), stale: 0, grows_down: true })?;
    Ok(true)
}
