//! The first look at one copy of a window: reads it in the order of the member, in large pieces,
//! without any lock.
//!
//! An error here may be none, if the place was freed or overwritten meanwhile. So the result only
//! says where a second look is due ([`settle`](super::settle)).

use std::collections::BTreeSet;
use std::ops::Range;

use offshoot_btrfs_format::chunk::STRIPE_LEN;
use offshoot_btrfs_format::{Logical, Physical};

use super::ScrubCounts;
use super::gather::{ScrubContent, ScrubPiece, ScrubWindow};
use crate::inode::Rooms;
use crate::storage::CopyPart;

/// The longest read, in bytes.
const READ_BYTES: u64 = 1 << 20;

/// Parts with a gap of at most this many bytes between them are read together.
const GAP_BYTES: u64 = 32 << 10;

/// Memory that devices can be read into directly.
#[derive(Default)]
pub(super) struct ScrubBuffer {
    bytes: Vec<u8>,
}

impl ScrubBuffer {
    /// `len` bytes that begin on a page.
    pub(super) fn of(&mut self, len: usize) -> &mut [u8] {
        const PAGE_BYTES: usize = 4096;
        if self.bytes.len() < len + PAGE_BYTES {
            self.bytes = vec![0; len + PAGE_BYTES];
        }
        let skip = self.bytes.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        &mut self.bytes[skip..skip + len]
    }
}

/// A part of a copy, with its piece.
struct CopyPiece<'w> {
    at: CopyPart,
    piece: &'w ScrubPiece,
}

/// Where a second look at one copy of a window is due: units of 64 KiB of the chunk, by their
/// number.
pub(super) type Suspects = BTreeSet<u64>;

/// The result of the first look at a copy.
#[derive(Default)]
pub(super) struct FirstLook {
    pub(super) suspects: Suspects,
    /// The counters of what was read.
    pub(super) counts: ScrubCounts,
}

/// Looks at copy `copy` of `window`, which is in the chunk at `chunk`.
pub(super) fn look(
    volume: &Rooms,
    chunk: Logical,
    window: &ScrubWindow,
    copy: usize,
    pages: &mut ScrubBuffer,
) -> FirstLook {
    let unit = |at: u64| (at - chunk.0) / STRIPE_LEN;
    let FirstLook { mut suspects, mut counts } = FirstLook::default();
    let mut suspect = |range: Range<u64>| suspects.extend(unit(range.start)..=unit(range.end - 1));
    let mut parts = Vec::with_capacity(window.pieces.len());
    let mut last = None;
    for piece in &window.pieces {
        let Ok(copies) = volume.storage.copies_of(&piece.range) else {
            // The chunk was removed meanwhile, or is wrong.
            suspect(piece.range.clone());
            continue;
        };
        for part in copies.into_iter().filter(|part| part.copy == copy) {
            let units = unit(part.range.start)..unit(part.range.end - 1) + 1;
            let is_known = last == Some((piece.extent, units.start));
            last = Some((piece.extent, units.end - 1));
            let extents = units.end - units.start - u64::from(is_known);
            count(volume, &mut counts, piece, &part.range, extents);
            parts.extend(cut(&part).map(|at| CopyPiece { at, piece }));
        }
    }
    parts.sort_unstable_by_key(|part| (part.at.member, part.at.physical));
    let mut rest = &parts[..];
    while let Some(first) = rest.first() {
        let start = first.at.physical.0;
        let mut end = start;
        let joins = |part: &&CopyPiece<'_>| {
            let (at, len) = (part.at.physical.0, part.at.range.end - part.at.range.start);
            let is_near = part.at.member == first.at.member
                && at <= end.saturating_add(GAP_BYTES)
                && at.saturating_add(len).saturating_sub(start) <= READ_BYTES;
            end = if is_near { end.max(at + len) } else { end };
            is_near
        };
        let count = rest.iter().take_while(joins).count();
        let (run, behind) = rest.split_at(count);
        rest = behind;
        let buf = pages.of(usize::try_from(end - start).expect("no more than is read at once"));
        let read = volume.storage.read_medium(first.at.member, Physical(start), buf);
        for CopyPiece { at, piece } in run {
            let from = usize::try_from(at.physical.0 - start).expect("within the buffer");
            let len = usize::try_from(at.range.end - at.range.start).expect("within the buffer");
            let bytes = &buf[from..from + len];
            if read.is_err() || !is_right(volume, piece, &at.range, bytes, &mut suspect) {
                // For a block on several stripes, the unit that it begins in.
                let is_block = matches!(piece.content, ScrubContent::Block(_));
                let begin = piece.range.start..piece.range.start + 1;
                suspect(if is_block { begin } else { at.range.clone() });
            }
        }
    }
    FirstLook { suspects, counts }
}

/// Counts a part that is read.
fn count(
    volume: &Rooms,
    counts: &mut ScrubCounts,
    piece: &ScrubPiece,
    range: &Range<u64>,
    extents: u64,
) {
    let len = range.end - range.start;
    if matches!(piece.content, ScrubContent::Block(_)) {
        counts.tree_extents_scrubbed += extents;
        counts.tree_bytes_scrubbed += len;
        return;
    }
    counts.data_extents_scrubbed += extents;
    counts.data_bytes_scrubbed += len;
    if piece.content == ScrubContent::Plain {
        counts.no_csum += len / u64::from(volume.superblock().sector_size);
    }
}

/// Splits a part into parts of at most [`READ_BYTES`].
pub(super) fn cut(part: &CopyPart) -> impl Iterator<Item = CopyPart> + use<> {
    let CopyPart { copy, member, physical, range } = part.clone();
    (0..(range.end - range.start).div_ceil(READ_BYTES)).map(move |number| {
        let from = number * READ_BYTES;
        let start = range.start + from;
        let range = start..(start + READ_BYTES).min(range.end);
        CopyPart { copy, member, physical: Physical(physical.0 + from), range }
    })
}

/// Whether `bytes`, read for `range` of `piece`, are right. For data it returns `true`, and reports
/// each bad sector to `suspect` itself.
fn is_right(
    volume: &Rooms,
    piece: &ScrubPiece,
    range: &Range<u64>,
    bytes: &[u8],
    suspect: &mut impl FnMut(Range<u64>),
) -> bool {
    match &piece.content {
        ScrubContent::Plain => true,
        ScrubContent::Block(block) => {
            *range == piece.range && block.verify(volume, Logical(range.start), bytes).is_ok()
        }
        ScrubContent::Summed(_) => {
            let sector = volume.superblock().sector_size as usize;
            for (number, bytes) in bytes.chunks(sector).enumerate() {
                let at = range.start + (number * sector) as u64;
                if volume.storage.verify_sector(bytes, piece.sum_of(volume, at)).is_err() {
                    suspect(at..at + sector as u64);
                }
            }
            true
        }
    }
}

impl ScrubPiece {
    /// The checksum of the sector at `at`, if it has one.
    pub(super) fn sum_of(&self, volume: &Rooms, at: u64) -> Option<&[u8]> {
        let ScrubContent::Summed(sums) = &self.content else { return None };
        let superblock = volume.superblock();
        let number = (at - self.range.start) / u64::from(superblock.sector_size);
        let len = superblock.checksum.len();
        let from = usize::try_from(number).expect("within a window") * len;
        Some(&sums[from..from + len])
    }
}
