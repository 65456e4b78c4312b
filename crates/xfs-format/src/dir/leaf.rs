//! Leaves: the hashes of all names, with the addresses of their entries.
//!
//! The array is sorted by hash. An entry that was removed stays there with the address 0, stale,
//! until another needs its room. The only leaf of a directory ends with the longest unused piece
//! of each data block.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::DirCookie;
use crate::da::{DaEdit, DaExpected, DaInfo, DaKind, slice_at, to_u16, view_at};
use crate::{Malformed, U16, U32, XfsGeometry};

/// A hash and the entry that has it. 8 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct DirHash {
    /// The hash of the name.
    pub hash: U32,
    /// The address of the entry: a [`DirCookie`], or 0.
    pub address: U32,
}

/// The number of entries of a leaf. 4 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DirLeafCounts {
    /// All entries.
    pub count: U16,
    /// The stale ones.
    pub stale: U16,
}

const _: () = assert!(size_of::<DirHash>() == ENTRY && size_of::<DirLeafCounts>() == 4);

const ENTRY: usize = 8;

/// The bytes of the number of data blocks at the end of the only leaf.
pub const TAIL: usize = 4;

impl DirHash {
    /// The entry of a leaf for a name with this hash.
    #[must_use]
    pub fn new(hash: u32, address: DirCookie) -> Self {
        Self { hash: hash.into(), address: address.0.into() }
    }

    /// The address; `None` for a stale entry.
    #[must_use]
    pub fn cookie(self) -> Option<DirCookie> {
        Some(DirCookie(self.address.get())).filter(|&address| address != DirCookie::STALE)
    }
}

/// The addresses of the entries with `hash`. Their names may still differ.
pub fn find(hashes: &[DirHash], hash: u32) -> impl Iterator<Item = DirCookie> + use<'_> {
    let start = hashes.partition_point(|entry| entry.hash.get() < hash);
    let same = hashes.iter().skip(start).take_while(move |entry| entry.hash.get() == hash);
    same.filter_map(|entry| entry.cookie())
}

/// Proves the order of an array, and the number of its stale entries.
pub(super) fn check_hashes(
    kind: DaKind,
    hashes: &[DirHash],
    stale: usize,
) -> Result<(), Malformed> {
    // Without a branch for each entry: each commit of a name proves a leaf.
    let (mut before, mut ascends, mut found) = (0, true, 0);
    for entry in hashes {
        let hash = entry.hash.get();
        ascends &= before <= hash;
        before = hash;
        found += usize::from(entry.cookie().is_none());
    }
    if !ascends {
        return Err(kind.bad("its hashes do not ascend"));
    }
    if found != stale {
        return Err(kind.bad(format!("{stale} stale entries, but {found} are")));
    }
    Ok(())
}

/// An array of hashes in a block that changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirHashArray {
    pub(super) start: usize,
    pub(super) count: usize,
    pub(super) stale: usize,
    /// Whether it has its end at the end of the block, and so grows downwards.
    pub(super) grows_down: bool,
}

impl DirHashArray {
    fn entries<'b>(&self, edit: &'b DaEdit<'_>) -> Result<&'b [DirHash], Malformed> {
        slice_at(edit.kind(), edit.block(), self.start, self.count)
    }

    /// Adds an entry in the room of a stale one, or else in 8 bytes in front of the array or
    /// behind it, which the caller knows to be free.
    pub(super) fn insert(
        &mut self,
        edit: &mut DaEdit<'_>,
        entry: DirHash,
    ) -> Result<(), Malformed> {
        let entries = self.entries(edit)?;
        let place = entries.partition_point(|other| other.hash.get() < entry.hash.get());
        let is_stale = |other: &DirHash| other.cookie().is_none();
        // Most arrays have no stale entry, and are not walked for one.
        let (below, above) = if self.stale == 0 {
            (None, None)
        } else {
            let above = entries.iter().skip(place).position(is_stale).map(|far| place + far);
            (entries.iter().take(place).rposition(is_stale), above)
        };
        let at = |index: usize| self.start + index * ENTRY;
        let is_below_nearer = |below: usize, above: usize| place - below <= above - place;
        let index = match (below, above) {
            (Some(below), above) if above.is_none_or(|above| is_below_nearer(below, above)) => {
                edit.shift(at(below + 1)..at(place), at(below))?;
                at(place - 1)
            }
            (_, Some(above)) => {
                edit.shift(at(place)..at(above), at(place + 1))?;
                at(place)
            }
            _ if self.grows_down => {
                let start = self.start.checked_sub(ENTRY);
                let start = start.ok_or_else(|| edit.kind().bad("no room for a hash"))?;
                edit.shift(self.start..at(place), start)?;
                start + place * ENTRY
            }
            _ => {
                edit.shift(at(place)..at(self.count), at(place + 1))?;
                at(place)
            }
        };
        edit.put(index, entry.as_bytes())?;
        if below.or(above).is_some() {
            self.stale = self.stale.saturating_sub(1);
        } else {
            self.count += 1;
            if self.grows_down {
                self.start -= ENTRY;
            }
        }
        Ok(())
    }

    /// Makes an entry stale.
    pub(super) fn remove(
        &mut self,
        edit: &mut DaEdit<'_>,
        entry: DirHash,
    ) -> Result<(), Malformed> {
        let entries = self.entries(edit)?;
        let start = entries.partition_point(|other| other.hash.get() < entry.hash.get());
        let same = entries.iter().skip(start).position(|other| *other == entry);
        let Some(place) = same.filter(|_| entry.cookie().is_some()) else {
            return Err(edit.kind().bad("a hash that is to be removed is not there"));
        };
        edit.put(self.start + (start + place) * ENTRY + 4, U32::ZERO.as_bytes())?;
        self.stale += 1;
        Ok(())
    }

    /// Moves the entries that are not stale to the end of an array that grows downwards.
    pub(super) fn compact_down(&mut self, edit: &mut DaEdit<'_>) -> Result<(), Malformed> {
        let entries = self.entries(edit)?;
        let live: Vec<_> =
            entries.iter().copied().filter(|entry| entry.cookie().is_some()).collect();
        self.start += (self.count - live.len()) * ENTRY;
        (self.count, self.stale) = (live.len(), 0);
        edit.put(self.start, live.as_bytes())
    }
}

/// A verified leaf: the only one ([`DaKind::DirLeaf`]) or one of several
/// ([`DaKind::DirNodeLeaf`]).
#[derive(Clone, Copy, Debug)]
pub struct DirLeaf<'a> {
    /// The links to the neighbours.
    pub info: &'a DaInfo,
    /// The hashes, ascending, with stale ones.
    pub hashes: &'a [DirHash],
    /// The stale ones.
    pub stale: usize,
    /// The longest unused piece of each data block; [`NO_BLOCK`] for one that is not there. Empty
    /// when the leaf is one of several.
    pub bests: &'a [U16],
}

/// The longest unused piece of a data block that is not there.
pub const NO_BLOCK: u16 = 0xffff;

impl<'a> DirLeaf<'a> {
    /// Proves that a block is the expected leaf of this kind.
    pub fn parse(
        geometry: &XfsGeometry,
        kind: DaKind,
        block: &'a [u8],
        expected: &DaExpected,
    ) -> Result<Self, Malformed> {
        kind.check(geometry, block, expected)?;
        let leaf = Self::view(geometry, kind, block)?;
        check_hashes(kind, leaf.hashes, leaf.stale)?;
        Ok(leaf)
    }

    /// Views a leaf that was proved before, and that only changes of this module touched since:
    /// its checksum may be out of date. Proves no more than that its parts do not lead out of it.
    pub fn view(geometry: &XfsGeometry, kind: DaKind, block: &'a [u8]) -> Result<Self, Malformed> {
        let counts: &DirLeafCounts = view_at(kind, block, kind.fields_at(geometry))?;
        let count = usize::from(counts.count.get());
        let start = kind.header_len(geometry);
        let hashes = slice_at(kind, block, start, count)?;
        let mut bests: &[U16] = &[];
        if kind == DaKind::DirLeaf {
            let tail = block.len().saturating_sub(TAIL);
            let blocks = view_at::<U32>(kind, block, tail)?.get();
            let len = usize::try_from(blocks).ok().and_then(|blocks| blocks.checked_mul(2));
            let at = len.and_then(|len| tail.checked_sub(len));
            let Some(at) = at.filter(|&at| at >= start + count * ENTRY) else {
                return Err(kind.bad(format!("{count} hashes and {blocks} blocks do not fit")));
            };
            bests = slice_at(kind, block, at, (tail - at) / 2)?;
        }
        let stale = usize::from(counts.stale.get());
        Ok(Self { info: view_at(kind, block, 0)?, hashes, stale, bests })
    }

    /// The hashes that are not stale.
    pub fn live(&self) -> impl Iterator<Item = DirHash> + use<'a> {
        self.hashes.iter().copied().filter(|entry| entry.cookie().is_some())
    }

    /// The hashes that one of several leaves has room for.
    #[must_use]
    pub fn capacity(geometry: &XfsGeometry) -> usize {
        let room = geometry.dir_block_size() - DaKind::DirNodeLeaf.header_len(geometry);
        room / ENTRY
    }

    /// The bytes of a leaf with these links, hashes and free space, without a checksum.
    pub fn encode(
        geometry: &XfsGeometry,
        kind: DaKind,
        expected: &DaExpected,
        (forw, back): (u32, u32),
        hashes: &[DirHash],
        bests: &[U16],
    ) -> Result<Vec<u8>, Malformed> {
        let mut block = kind.empty(geometry, expected)?;
        let mut edit = DaEdit::fill(kind, &mut block);
        edit.put(0, U32::new(forw).as_bytes())?;
        edit.put(4, U32::new(back).as_bytes())?;
        let stale = hashes.iter().filter(|entry| entry.cookie().is_none()).count();
        put_counts(geometry, &mut edit, hashes.len(), stale)?;
        edit.put(kind.header_len(geometry), hashes.as_bytes())?;
        if kind == DaKind::DirLeaf {
            put_bests(&mut edit, bests)?;
        }
        DirLeaf::view(geometry, kind, &block)?;
        Ok(block)
    }
}

fn put_counts(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    count: usize,
    stale: usize,
) -> Result<(), Malformed> {
    let kind = edit.kind();
    let counts = DirLeafCounts { count: to_u16(kind, count)?, stale: to_u16(kind, stale)? };
    edit.put(kind.fields_at(geometry), counts.as_bytes())
}

/// Writes the free space of data blocks at the end.
fn put_bests(edit: &mut DaEdit<'_>, bests: &[U16]) -> Result<(), Malformed> {
    let full = || DaKind::DirLeaf.bad("too many data blocks");
    let tail = edit.block().len().checked_sub(TAIL).ok_or_else(full)?;
    let blocks = u32::try_from(bests.len()).map_err(|_| full())?;
    edit.put(tail.checked_sub(bests.len() * 2).ok_or_else(full)?, bests.as_bytes())?;
    edit.put(tail, U32::new(blocks).as_bytes())
}

fn array(geometry: &XfsGeometry, edit: &DaEdit<'_>) -> Result<(DirHashArray, usize), Malformed> {
    let leaf = DirLeaf::view(geometry, edit.kind(), edit.block())?;
    let start = edit.kind().header_len(geometry);
    let (count, stale) = (leaf.hashes.len(), leaf.stale);
    let room = spare(geometry, edit.kind(), edit.block())?;
    Ok((DirHashArray { start, count, stale, grows_down: false }, room))
}

/// The bytes of a leaf that nothing uses, besides those of stale entries.
pub fn spare(geometry: &XfsGeometry, kind: DaKind, block: &[u8]) -> Result<usize, Malformed> {
    let leaf = DirLeaf::view(geometry, kind, block)?;
    let tail = if kind == DaKind::DirLeaf { TAIL + leaf.bests.len() * 2 } else { 0 };
    Ok(block.len() - tail - kind.header_len(geometry) - leaf.hashes.len() * ENTRY)
}

/// Adds a hash to a leaf. `false` when the leaf is full.
pub fn insert(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    entry: DirHash,
) -> Result<bool, Malformed> {
    let (mut array, room) = array(geometry, edit)?;
    if array.stale == 0 && room < ENTRY {
        return Ok(false);
    }
    array.insert(edit, entry)?;
    put_counts(geometry, edit, array.count, array.stale)?;
    Ok(true)
}

/// Makes a hash of a leaf stale.
pub fn remove(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    entry: DirHash,
) -> Result<(), Malformed> {
    let (mut array, _) = array(geometry, edit)?;
    array.remove(edit, entry)?;
    put_counts(geometry, edit, array.count, array.stale)
}

/// Writes the longest unused piece of data block number `index` into the only leaf. The number of
/// blocks grows up to it. `false` when the leaf is full.
pub fn set_best(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    index: usize,
    best: u16,
) -> Result<bool, Malformed> {
    let leaf = DirLeaf::view(geometry, DaKind::DirLeaf, edit.block())?;
    let (_, room) = array(geometry, edit)?;
    let blocks = leaf.bests.len();
    if index < blocks {
        let at = edit.block().len() - TAIL - (blocks - index) * 2;
        edit.put(at, U16::new(best).as_bytes())?;
        return Ok(true);
    }
    if index - blocks >= room / 2 {
        return Ok(false);
    }
    let mut bests = leaf.bests.to_vec();
    bests.resize(index, U16::new(NO_BLOCK));
    bests.push(U16::new(best));
    put_bests(edit, &bests)?;
    Ok(true)
}

/// Takes the data blocks from `blocks` on off the only leaf.
pub fn truncate_bests(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    blocks: usize,
) -> Result<(), Malformed> {
    let leaf = DirLeaf::view(geometry, DaKind::DirLeaf, edit.block())?;
    let mut bests = leaf.bests.to_vec();
    bests.truncate(blocks);
    put_bests(edit, &bests)
}
