//! The index of free space: the longest unused piece of each data block, in blocks of its own.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::free_start;
use super::leaf::NO_BLOCK;
use crate::da::{DaEdit, DaExpected, DaKind, slice_at, view_at};
use crate::{FileBlock, Malformed, U16, U32, XfsGeometry};

/// The counts of a block of the index. 12 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DirFreeCounts {
    /// The first data block of this block of the index, in directory blocks.
    pub first: U32,
    /// The entries.
    pub valid: U32,
    /// The entries of data blocks that are there.
    pub used: U32,
}

const _: () = assert!(size_of::<DirFreeCounts>() == 12);

/// A verified block of the index.
#[derive(Clone, Copy, Debug)]
pub struct DirFree<'a> {
    /// The first data block, in directory blocks.
    pub first: u32,
    /// The longest unused piece of each data block; [`NO_BLOCK`] for one that is not there.
    pub bests: &'a [U16],
    /// The data blocks that are there.
    pub used: usize,
}

/// The data blocks that one block of the index has room for.
#[must_use]
pub fn per_block(geometry: &XfsGeometry) -> usize {
    (geometry.dir_block_size() - DaKind::DirFree.header_len(geometry)) / 2
}

/// The block of the index for a data block (in directory blocks), and the place in it.
#[must_use]
pub fn locate(geometry: &XfsGeometry, data_block: u32) -> (FileBlock, usize) {
    let per_block = per_block(geometry) as u64;
    let index = u64::from(data_block) / per_block;
    let block = free_start(geometry).0 + (index << geometry.dir_block_log);
    let inside = u64::from(data_block) % per_block;
    (FileBlock(block), usize::try_from(inside).unwrap_or(0))
}

impl<'a> DirFree<'a> {
    /// Proves that a block is the expected one of the index.
    pub fn parse(
        geometry: &XfsGeometry,
        block: &'a [u8],
        expected: &DaExpected,
    ) -> Result<Self, Malformed> {
        let kind = DaKind::DirFree;
        kind.check(geometry, block, expected)?;
        let free = Self::view(geometry, block)?;
        let (place, inside) = locate(geometry, free.first);
        if inside != 0 || expected.block.is_some_and(|expected| expected != place) {
            return Err(kind.bad(format!("its first data block is {}", free.first)));
        }
        let used = free.bests.iter().filter(|best| best.get() != NO_BLOCK).count();
        if used != free.used {
            return Err(kind.bad(format!("{} data blocks, but {used} are there", free.used)));
        }
        Ok(free)
    }

    /// Views a block that was proved before, and that only changes of this module touched since:
    /// its checksum may be out of date. Proves no more than that its parts do not lead out of it.
    pub fn view(geometry: &XfsGeometry, block: &'a [u8]) -> Result<Self, Malformed> {
        let kind = DaKind::DirFree;
        let counts: &DirFreeCounts = view_at(kind, block, kind.fields_at(geometry))?;
        let valid = usize::try_from(counts.valid.get()).unwrap_or(usize::MAX);
        let used = usize::try_from(counts.used.get()).unwrap_or(usize::MAX);
        if valid > per_block(geometry) {
            return Err(kind.bad(format!("it has {valid} entries")));
        }
        let bests = slice_at(kind, block, kind.header_len(geometry), valid)?;
        Ok(Self { first: counts.first.get(), bests, used })
    }

    /// The bytes of a block of the index, without a checksum.
    pub fn encode(
        geometry: &XfsGeometry,
        expected: &DaExpected,
        first: u32,
        bests: &[U16],
    ) -> Result<Vec<u8>, Malformed> {
        let kind = DaKind::DirFree;
        let mut block = kind.empty(geometry, expected)?;
        let mut edit = DaEdit::fill(kind, &mut block);
        put(geometry, &mut edit, first, bests, 0)?;
        Ok(block)
    }
}

/// Writes the counts, and the entries from number `from` on.
fn put(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    first: u32,
    bests: &[U16],
    from: usize,
) -> Result<(), Malformed> {
    let kind = DaKind::DirFree;
    let used = bests.iter().filter(|best| best.get() != NO_BLOCK).count();
    let number =
        |number| u32::try_from(number).map(U32::new).map_err(|_| kind.bad("too many data blocks"));
    let counts =
        DirFreeCounts { first: first.into(), valid: number(bests.len())?, used: number(used)? };
    edit.put(kind.fields_at(geometry), counts.as_bytes())?;
    let changed = bests.get(from..).unwrap_or(&[]);
    edit.put(kind.header_len(geometry) + from * 2, changed.as_bytes())
}

/// Writes the longest unused piece of the data block at place `inside` ([`locate`]); [`NO_BLOCK`]
/// when it is gone. The entries grow up to it, and shrink behind the last block that is there.
pub fn set_best(
    geometry: &XfsGeometry,
    edit: &mut DaEdit<'_>,
    inside: usize,
    best: u16,
) -> Result<(), Malformed> {
    let free = DirFree::view(geometry, edit.block())?;
    let first = free.first;
    let at = DaKind::DirFree.header_len(geometry) + inside * 2;
    match free.bests.get(inside).map(|old| old.get()) {
        Some(old) if old != NO_BLOCK && best != NO_BLOCK => {
            return edit.put(at, U16::new(best).as_bytes());
        }
        None if inside >= per_block(geometry) => {
            return Err(DaKind::DirFree.bad(format!("it has no place {inside}")));
        }
        _ => {}
    }
    let mut bests = free.bests.to_vec();
    let old_len = bests.len();
    bests.resize(old_len.max(inside + 1), U16::new(NO_BLOCK));
    if let Some(place) = bests.get_mut(inside) {
        *place = best.into();
    }
    let live = bests.iter().rposition(|best| best.get() != NO_BLOCK).map_or(0, |last| last + 1);
    edit.put(at, U16::new(best).as_bytes())?;
    bests.truncate(live);
    put(geometry, edit, first, &bests, old_len.min(inside).min(live))
}
