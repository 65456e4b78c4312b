//! Where each copy of a range is: what scrub reads and repairs.

use std::ops::Range;

use offshoot_btrfs_format::chunk::{Chunk, Profile, STRIPE_LEN};
use offshoot_btrfs_format::{Logical, Physical};
use offshoot_vfs::{Error, Result, Structure};

use super::read::read_error;
use super::ways::{MemberOffset, ReadSegment, WaySelection, copies, place_in_row};
use super::{Storage, parity};

/// The part of one copy of a range that is contiguous on a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyPart {
    /// Which copy, from 0 on.
    pub(crate) copy: usize,
    /// The index of the member, which is present.
    pub(crate) member: usize,
    /// The offset on it.
    pub(crate) physical: Physical,
    /// The logical addresses that it holds.
    pub(crate) range: Range<u64>,
}

/// A row of a chunk with parity: 64 KiB on each of its stripes.
pub(crate) struct ParityRow {
    data: Vec<MemberOffset>,
    p: MemberOffset,
    q: Option<MemberOffset>,
}

/// A stripe of parity: the bytes that the data requires, and where they belong.
pub(crate) struct Parity {
    /// The index of the member.
    pub(crate) member: usize,
    /// The offset on it.
    pub(crate) physical: Physical,
    /// The bytes that it must have.
    pub(crate) bytes: Vec<u8>,
}

impl Storage {
    /// All copies of `range` on members that are present. In a chunk with parity the data itself is
    /// the one copy.
    ///
    /// # Errors
    /// When no chunk covers some of it.
    pub(crate) fn copies_of(&self, range: &Range<u64>) -> Result<Vec<CopyPart>> {
        let chunks = self.chunk_map();
        let mut parts = Vec::with_capacity(2);
        let mut at = range.start;
        while at < range.end {
            let mapped = chunks.find(Logical(at)).ok_or_else(|| {
                Error::corrupt_at(
                    Structure::Extent,
                    at,
                    "no chunk covers an address that is allocated",
                )
            })?;
            let (len, places) = copies(mapped, Logical(at), range.end - at);
            let part = |(copy, place): (usize, Option<MemberOffset>)| {
                let MemberOffset { member, physical } = place?;
                Some(CopyPart { copy, member, physical, range: at..at + len })
            };
            parts.extend(places.into_iter().enumerate().filter_map(part));
            at += len;
        }
        Ok(parts)
    }

    /// How many bytes of `range` cannot be read, because too many members are missing.
    pub(crate) fn lost_bytes(&self, range: &Range<u64>) -> Result<u64> {
        if self.members.all().iter().all(|member| member.device.is_some()) {
            return Ok(0);
        }
        let len = range.end - range.start;
        let segments =
            self.chunk_segments(Structure::Extent, Logical(range.start), len, WaySelection::All)?;
        let is_lost = |segment: &&ReadSegment| segment.ways.is_empty();
        Ok(segments.iter().filter(is_lost).map(|segment| segment.len).sum())
    }

    /// How many bytes of `chunk`, from its start, lie before the end of at least one member. The
    /// rest is past the ends of all members that are present.
    pub(crate) fn reachable_bytes(&self, chunk: &Chunk) -> u64 {
        let own = chunk.stripes.iter().filter_map(|stripe| {
            let member = self.members.get(self.members.find_present(stripe.device_uuid)?);
            let device = member.device.as_ref()?;
            Some(device.size_bytes().saturating_sub(stripe.physical.0))
        });
        let longest = own.max().unwrap_or(0).min(chunk.stripe_bytes());
        longest.next_multiple_of(STRIPE_LEN).saturating_mul(chunk.data_stripes()).min(chunk.length)
    }

    /// The row `row` of a chunk with parity; `None` when a member of the row is missing.
    pub(crate) fn row(&self, chunk: &Chunk, row: u64) -> Option<ParityRow> {
        let chunks = self.chunk_map();
        let mapped = chunks.find(chunk.start)?;
        let width = chunk.data_stripes();
        let place = |index| place_in_row(mapped, row, index, 0);
        let q = if chunk.profile == Profile::Raid6 { Some(place(width + 1)?) } else { None };
        Some(ParityRow { data: (0..width).map(place).collect::<Option<_>>()?, p: place(width)?, q })
    }

    /// Computes the parity of `row` from its data.
    ///
    /// # Errors
    /// When some of the data cannot be read.
    pub(crate) fn parity_of(&self, row: &ParityRow) -> Result<Vec<Parity>> {
        let unit = usize::try_from(STRIPE_LEN).expect("64 KiB");
        let (mut stripe, mut p) = (vec![0; unit], vec![0; unit]);
        let mut q = row.q.map(|_| vec![0; unit]);
        for (index, place) in row.data.iter().enumerate() {
            self.read_medium(place.member, place.physical, &mut stripe)?;
            parity::add(&mut p, &stripe);
            if let Some(q) = &mut q {
                parity::add_to_q(q, &stripe, index);
            }
        }
        let of = |place: MemberOffset, bytes| Parity {
            member: place.member,
            physical: place.physical,
            bytes,
        };
        let q = row.q.zip(q).map(|(place, bytes)| of(place, bytes));
        Ok([of(row.p, p)].into_iter().chain(q).collect())
    }

    /// Reads from the medium of a member, past the caches of the host as far as the host allows
    /// that.
    ///
    /// # Errors
    /// When the device reports an error.
    pub(crate) fn read_medium(&self, member: usize, at: Physical, buf: &mut [u8]) -> Result<()> {
        let (_, device) = self.present(member);
        device.read_medium_at(at.0, buf).map_err(|e| read_error(&**device, at.0, buf.len(), e))
    }
}
