//! The ways to read the bytes of a logical address.
//!
//! ```text
//! single, DUP, RAID1*   every stripe is a whole copy of the chunk
//! RAID0                 64 KiB units go round all stripes
//! RAID10                64 KiB units go round the pairs of stripes
//! RAID5, RAID6          64 KiB units go round the data stripes of a row; with every
//!                       row, all stripes move on by one device:
//!
//!                       device    0    1    2    3
//!                       row 0     D0   D1   P    Q
//!                       row 1     Q    D0   D1   P
//!                       row 2     P    Q    D0   D1
//! ```

use offshoot_btrfs_format::chunk::{Profile, STRIPE_LEN};
use offshoot_btrfs_format::{Logical, Physical};

use super::chunk_map::MappedChunk;
use super::members::Members;

/// An offset on a member that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberOffset {
    pub(crate) member: usize,
    pub(crate) physical: Physical,
}

/// One way to read a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReadWay {
    /// Read the copy at this place.
    Direct(MemberOffset),
    /// Compute it from the other stripes of its row.
    Rebuild(Rebuild),
}

/// How to compute a lost data stripe: from P alone, from Q alone, or from both when another data
/// stripe is lost too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rebuild {
    /// The index of the stripe to compute, among the data stripes of the row.
    pub(crate) target: usize,
    /// The data stripes to read, with their indexes.
    pub(crate) data: Vec<(usize, MemberOffset)>,
    pub(crate) p: Option<MemberOffset>,
    pub(crate) q: Option<MemberOffset>,
    /// The index of the other lost data stripe.
    pub(crate) other_lost: Option<usize>,
}

impl Rebuild {
    /// All places that it reads: data, P, Q.
    pub(super) fn places(&self) -> impl Iterator<Item = MemberOffset> + '_ {
        self.data.iter().map(|(_, place)| *place).chain(self.p).chain(self.q)
    }
}

impl ReadWay {
    /// All places that this way reads.
    pub(crate) fn places(&self) -> impl Iterator<Item = MemberOffset> + '_ {
        let (direct, rebuild) = match self {
            Self::Direct(place) => (Some(*place), None),
            Self::Rebuild(rebuild) => (None, Some(rebuild)),
        };
        direct.into_iter().chain(rebuild.into_iter().flat_map(Rebuild::places))
    }

    /// Whether it reads a stale member.
    pub(super) fn is_stale(&self, members: &Members) -> bool {
        self.places().any(|place| members.get(place.member).is_stale())
    }
}

/// A run of addresses that is contiguous on every stripe it is on.
#[derive(Debug)]
pub(crate) struct ReadSegment {
    /// Its length in bytes.
    pub(crate) len: u64,
    /// The ways to read it, the best first. Empty when too many members are missing.
    pub(crate) ways: Vec<ReadWay>,
    /// Whether the profile keeps more than one way when nothing is missing.
    pub(crate) is_redundant: bool,
}

/// Which ways of a segment to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaySelection {
    /// All copies, and rebuilds only when no copy is on a member that is present and current. A
    /// read of a sound volume needs no more.
    First,
    /// Every way there is.
    All,
}

/// The segment of at most `len` bytes that begins at `logical`, which `mapped` covers.
pub(super) fn segment(
    mapped: &MappedChunk,
    members: &Members,
    logical: Logical,
    len: u64,
    effort: WaySelection,
) -> ReadSegment {
    let chunk = &mapped.chunk;
    let has_parity = matches!(chunk.profile, Profile::Raid5 | Profile::Raid6);
    let (len, mut ways) = if has_parity {
        parity_ways(mapped, members, logical, len, effort)
    } else {
        let (len, copies) = copies(mapped, logical, len);
        (len, copies.into_iter().flatten().map(ReadWay::Direct).collect())
    };
    ways.sort_by_key(|way| way.is_stale(members));
    let shape = chunk.profile.shape();
    ReadSegment { len, ways, is_redundant: shape.copies > 1 || shape.parity > 0 }
}

/// The run of at most `len` bytes from `logical` on that is contiguous on every stripe it is on:
/// its length, and the place of each copy; `None` for a copy on a missing member. In a chunk with
/// parity the data itself is the one copy.
pub(super) fn copies(
    mapped: &MappedChunk,
    logical: Logical,
    len: u64,
) -> (u64, Vec<Option<MemberOffset>>) {
    let Some(run) = mapped.chunk.run(logical, len) else {
        let (row, target, within) = mapped.chunk.row(logical);
        return (len.min(STRIPE_LEN - within), vec![place_in_row(mapped, row, target, within)]);
    };
    let place = |&(stripe, physical): &(usize, Physical)| {
        mapped.members[stripe].map(|member| MemberOffset { member, physical })
    };
    (run.len, run.copies.iter().map(place).collect())
}

/// The place of stripe `index` in a row of a chunk with parity, `within` bytes into it. The data
/// stripes come first, then P, then Q. `None` when the member is missing.
pub(super) fn place_in_row(
    mapped: &MappedChunk,
    row: u64,
    index: u64,
    within: u64,
) -> Option<MemberOffset> {
    let (stripe, physical) = mapped.chunk.place_in_row(row, index, within);
    mapped.members[stripe].map(|member| MemberOffset { member, physical })
}

/// The ways to read from a chunk with parity.
fn parity_ways(
    mapped: &MappedChunk,
    members: &Members,
    logical: Logical,
    len: u64,
    effort: WaySelection,
) -> (u64, Vec<ReadWay>) {
    let (row, target, within) = mapped.chunk.row(logical);
    let data = mapped.chunk.data_stripes();
    let place = |index: u64| place_in_row(mapped, row, index, within);
    let len = len.min(STRIPE_LEN - within);
    let direct = place(target).map(ReadWay::Direct);
    if effort == WaySelection::First && direct.as_ref().is_some_and(|way| !way.is_stale(members)) {
        return (len, direct.into_iter().collect());
    }
    let q = (mapped.chunk.profile == Profile::Raid6).then(|| place(data + 1)).flatten();
    let row_places: Vec<_> = (0..data).map(place).collect();
    let target = usize::try_from(target).expect("an index into the stripes");
    (len, row_ways(&row_places, place(data), q, target))
}

/// The ways to read data stripe `target` of a row with parity. `data` has a place for every data
/// stripe whose member is present.
fn row_ways(
    data: &[Option<MemberOffset>],
    p: Option<MemberOffset>,
    q: Option<MemberOffset>,
    target: usize,
) -> Vec<ReadWay> {
    let mut ways: Vec<ReadWay> = data[target].map(ReadWay::Direct).into_iter().collect();
    // The stripes other than `target` and `lost`; `None` when one of them is missing.
    let others = |lost: Option<usize>| -> Option<Vec<(usize, MemberOffset)>> {
        data.iter()
            .enumerate()
            .filter(|&(i, _)| i != target && Some(i) != lost)
            .map(|(i, place)| place.map(|place| (i, place)))
            .collect()
    };
    if let Some(data) = others(None) {
        for (p, q) in [(p, None), (None, q)] {
            if p.is_some() || q.is_some() {
                let data = data.clone();
                ways.push(ReadWay::Rebuild(Rebuild { target, data, p, q, other_lost: None }));
            }
        }
    }
    if p.is_some() && q.is_some() {
        for lost in (0..data.len()).filter(|&lost| lost != target) {
            if let Some(data) = others(Some(lost)) {
                ways.push(ReadWay::Rebuild(Rebuild { target, data, p, q, other_lost: Some(lost) }));
            }
        }
    }
    ways
}

/// Whether too many members are missing to read all of the chunk.
pub(super) fn is_lost(mapped: &MappedChunk) -> bool {
    let missing = mapped.members.iter().filter(|member| member.is_none()).count();
    let shape = mapped.chunk.profile.shape();
    match mapped.chunk.profile {
        Profile::Raid10 => mapped.members.chunks(2).any(|pair| pair.iter().all(Option::is_none)),
        Profile::Raid0 | Profile::Raid5 | Profile::Raid6 => missing > usize::from(shape.parity),
        _ => missing == mapped.members.len(),
    }
}
