//! Where a new chunk goes, and how long it is. These rules need no I/O.
//!
//! | kind | length of a chunk | of a stripe |
//! |---|---|---|
//! | data | at most 10 GiB | at most 1 GiB |
//! | metadata, mixed | at most 256 MiB, 1 GiB on volumes above 50 GiB | the same |
//! | system | at most 32 MiB | the same |
//!
//! No chunk is longer than a tenth of the volume. Every member offers its shortest hole that is
//! long enough, or else its longest. The members with the longest offers are chosen, as many as the
//! profile uses, and the shortest offer among them bounds the length. Nothing is placed in the
//! first MiB of a device.

use std::cmp::Reverse;
use std::ops::Range;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Profile, STRIPE_LEN};
use offshoot_btrfs_format::superblock::SUPERBLOCK_OFFSETS;

use super::free_space::FreeSpace;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The bytes that stay free at the start of every device, for the superblock and boot loaders. A
/// new volume leaves as much of the logical space free.
pub(crate) const RESERVED_BYTES: u64 = MIB;

/// A chunk that would be too long is cut to a multiple of this on each member, in bytes.
const STRIPE_STEP: u64 = 16 * MIB;

/// A shorter stripe is not worth its items, in bytes.
const LEAST_STRIPE: u64 = MIB;

/// The space of a member.
#[derive(Clone, Debug)]
pub(crate) struct MemberSpace {
    pub(crate) index: usize,
    /// The bytes that chunks may use; 0 when the member has failed.
    pub(crate) total_bytes: u64,
    /// The bytes that belong to chunks.
    pub(crate) allocated_bytes: u64,
    /// The ranges behind the reserved start that belong to no chunk.
    holes: FreeSpace,
    /// Where the last hole ends at most.
    end: u64,
}

/// A possible chunk: for each stripe the index of its member and the offset there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChunkPlan {
    pub(crate) stripes: Vec<(usize, u64)>,
    pub(crate) stripe_bytes: u64,
    /// The bytes that the chunk holds.
    pub(crate) bytes: u64,
}

impl ChunkPlan {
    /// Marks the ranges of its stripes as allocated in `members`.
    pub(crate) fn take_from(&self, members: &mut [MemberSpace]) {
        for &(index, at) in &self.stripes {
            members[index].take(at..at + self.stripe_bytes);
        }
    }

    /// Takes the marks back.
    pub(crate) fn give_to(&self, members: &mut [MemberSpace]) {
        for &(index, at) in &self.stripes {
            members[index].give_back(at..at + self.stripe_bytes);
        }
    }
}

impl MemberSpace {
    /// The space of a member of `total_bytes`. The ranges that belong to chunks ascend.
    pub(crate) fn new(
        index: usize,
        total_bytes: u64,
        extents: impl IntoIterator<Item = Range<u64>>,
    ) -> Self {
        let (mut holes, mut allocated_bytes) = (FreeSpace::of_bytes(0, Vec::new()), 0u64);
        let mut at = RESERVED_BYTES;
        for extent in extents {
            holes.add(at, extent.start.min(total_bytes));
            at = at.max(extent.end);
            allocated_bytes = allocated_bytes.saturating_add(extent.end - extent.start);
        }
        holes.add(at, total_bytes);
        Self { index, total_bytes, allocated_bytes, holes, end: total_bytes }
    }

    /// Marks this range as allocated to a chunk.
    pub(crate) fn take(&mut self, range: Range<u64>) {
        self.allocated_bytes = self.allocated_bytes.saturating_add(range.end - range.start);
        let range = self.cut(range);
        let was_free = range.is_empty() || self.holes.take_range(range.start, range.end);
        debug_assert!(was_free, "a range is allocated once: {range:?}");
    }

    /// Marks this range as belonging to no chunk.
    pub(crate) fn give_back(&mut self, range: Range<u64>) {
        self.allocated_bytes = self.allocated_bytes.saturating_sub(range.end - range.start);
        let range = self.cut(range);
        // Chunks of a damaged volume may overlap.
        if !self.holes.overlaps(range.start, range.end) {
            self.holes.add(range.start, range.end);
        }
    }

    /// The part of `range` where holes may be.
    fn cut(&self, range: Range<u64>) -> Range<u64> {
        range.start.max(RESERVED_BYTES)..range.end.min(self.end)
    }

    /// The holes, by address.
    #[cfg(test)]
    pub(super) fn holes(&self) -> Vec<Range<u64>> {
        let (mut holes, mut at) = (Vec::new(), 0);
        while let Some(hole) = self.holes.first(&(at..u64::MAX), u64::MAX) {
            at = hole.end;
            holes.push(hole);
        }
        holes
    }

    /// The first range in `within` that belongs to no chunk, to no superblock and not to the
    /// reserved start, of at most `most` bytes.
    pub(crate) fn unused(&self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        let superblocks = SUPERBLOCK_OFFSETS.map(|at| at..at + STRIPE_LEN);
        let mut within = within.start..within.end.min(self.total_bytes);
        while !within.is_empty() {
            let hole = self.holes.first(&within, most)?;
            let overlaps = |one: &&Range<u64>| one.start < hole.end && hole.start < one.end;
            match superblocks.iter().find(overlaps) {
                Some(superblock) if superblock.start <= hole.start => within.start = superblock.end,
                Some(superblock) => return Some(hole.start..superblock.start),
                None => return Some(hole),
            }
        }
        None
    }

    /// The lowest place for `len` bytes below `below` that belongs to no chunk and to no
    /// superblock.
    pub(crate) fn lowest_clear(&self, len: u64, below: u64) -> Option<u64> {
        let superblocks = SUPERBLOCK_OFFSETS.map(|at| at..at + STRIPE_LEN);
        let (mut at, end) = (0, below.min(self.total_bytes));
        while let Some(hole) = self.holes.first(&(at..end), u64::MAX) {
            let start = hole.start.next_multiple_of(STRIPE_LEN);
            let place = start..start.saturating_add(len);
            if place.end > hole.end {
                at = hole.end;
                continue;
            }
            let overlaps = |one: &&Range<u64>| one.start < place.end && place.start < one.end;
            match superblocks.iter().find(overlaps) {
                Some(superblock) => at = superblock.end,
                None => return Some(start),
            }
        }
        None
    }

    /// The lowest hole that has `len` bytes below `below`: where it begins, in whole units.
    fn lowest(&self, len: u64, below: u64) -> Option<u64> {
        let (mut at, end) = (0, below.min(self.total_bytes));
        while let Some(hole) = self.holes.first(&(at..end), u64::MAX) {
            let start = hole.start.next_multiple_of(STRIPE_LEN);
            if start.checked_add(len).is_some_and(|to| to <= hole.end) {
                return Some(start);
            }
            at = hole.end;
        }
        None
    }

    /// The whole units of all holes below `below`, the longest first, in bytes.
    pub(crate) fn hole_sizes(&self, below: u64) -> Vec<u64> {
        let (mut sizes, mut at, end) = (Vec::new(), 0, below.min(self.total_bytes));
        while let Some(hole) = self.holes.first(&(at..end), u64::MAX) {
            let start = hole.start.next_multiple_of(STRIPE_LEN);
            sizes.push(hole.end.saturating_sub(start) / STRIPE_LEN * STRIPE_LEN);
            at = hole.end;
        }
        sizes.sort_unstable_by_key(|size| Reverse(*size));
        sizes
    }

    /// The shortest hole of `wanted` bytes, or else the longest one: its start, and its length up
    /// to `wanted`.
    fn hole(&self, wanted: u64) -> (u64, u64) {
        let hole = self.holes.shortest_with(wanted).filter(|_| self.total_bytes > 0);
        hole.map_or((RESERVED_BYTES, 0), |hole| (hole.start, (hole.end - hole.start).min(wanted)))
    }
}

/// Plans a chunk of this kind and profile, on at most `most_members` members; `None` when too few
/// members have room.
pub(crate) fn plan(
    members: &[MemberSpace],
    flags: BlockGroupFlags,
    profile: Profile,
    most_members: usize,
) -> Option<ChunkPlan> {
    let shape = profile.shape();
    let (per_member, least, most) = if profile == Profile::Dup {
        (2, 1, 1)
    } else {
        let most = shape.max_stripes.map_or(most_members, |max| most_members.min(max.into()));
        (1, usize::from(shape.min_stripes), most)
    };
    let volume_bytes = members.iter().fold(0u64, |sum, m| sum.saturating_add(m.total_bytes));
    let most_chunk = most_bytes(flags, volume_bytes).min(volume_bytes / 10);
    let most_stripe = most_bytes(flags, volume_bytes).min(GIB);

    let mut offers: Vec<_> = members
        .iter()
        .map(|member| {
            let (start, len) = member.hole(most_stripe * per_member);
            (member, start, len)
        })
        .filter(|(_, _, len)| *len >= LEAST_STRIPE * per_member)
        .collect();
    offers.sort_by_key(|(member, _, len)| {
        Reverse((*len, member.total_bytes.saturating_sub(member.allocated_bytes)))
    });
    let step = if profile == Profile::Raid10 { 2 } else { 1 };
    let count = offers.len().min(most) / step * step;
    if count < least {
        return None;
    }
    offers.truncate(count);

    let tightest = offers.last().map_or(0, |(_, _, len)| len / per_member);
    let whole_stripes = count as u64 * per_member - u64::from(shape.parity);
    let data_stripes = whole_stripes / u64::from(shape.copies);
    let stripe_bytes = if tightest * data_stripes > most_chunk {
        tightest.min((most_chunk / data_stripes).max(1).next_multiple_of(STRIPE_STEP))
    } else {
        tightest
    };
    let stripe_bytes = stripe_bytes / STRIPE_LEN * STRIPE_LEN;
    let stripes = offers
        .iter()
        .flat_map(|&(member, start, _)| {
            (0..per_member).map(move |i| (member.index, start + i * stripe_bytes))
        })
        .collect();
    Some(ChunkPlan { stripes, stripe_bytes, bytes: stripe_bytes * data_stripes })
}

/// Plans a chunk of exactly `bytes` bytes on one member, with `copies` copies, each in the lowest
/// hole below `below`.
pub(crate) fn plan_tight(
    member: &mut MemberSpace,
    bytes: u64,
    copies: u64,
    below: u64,
) -> Option<ChunkPlan> {
    let mut stripes = Vec::new();
    for _ in 0..copies {
        let Some(at) = member.lowest(bytes, below) else { break };
        member.take(at..at + bytes);
        stripes.push((member.index, at));
    }
    for &(_, at) in &stripes {
        member.give_back(at..at + bytes);
    }
    (stripes.len() as u64 == copies).then_some(ChunkPlan { stripes, stripe_bytes: bytes, bytes })
}

/// The most bytes that a chunk of this kind holds.
fn most_bytes(flags: BlockGroupFlags, volume_bytes: u64) -> u64 {
    let has = |kind| flags.0 & kind != 0;
    if has(BlockGroupFlags::SYSTEM) {
        32 * MIB
    } else if !has(BlockGroupFlags::METADATA) {
        10 * GIB
    } else if volume_bytes > 50 * GIB {
        GIB
    } else {
        256 * MIB
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(index: usize, mib: u64, taken: &[(u64, u64)]) -> MemberSpace {
        MemberSpace::new(index, mib * MIB, taken.iter().map(|(from, to)| from * MIB..to * MIB))
    }

    const METADATA: BlockGroupFlags = BlockGroupFlags(BlockGroupFlags::METADATA);
    const DATA: BlockGroupFlags = BlockGroupFlags(BlockGroupFlags::DATA);

    #[test]
    fn superblocks_and_the_start_are_no_unused_space() {
        let member = member(0, 100, &[(2, 10), (10, 20), (70, 80)]);
        let unused = |from: u64, most| member.unused(&(from..u64::MAX), most);
        assert_eq!(unused(0, u64::MAX), Some(MIB..2 * MIB));
        assert_eq!(unused(2 * MIB, MIB), Some(20 * MIB..21 * MIB));
        assert_eq!(unused(21 * MIB, u64::MAX), Some(21 * MIB..64 * MIB));
        assert_eq!(unused(64 * MIB, u64::MAX), Some(64 * MIB + STRIPE_LEN..70 * MIB));
        assert_eq!(unused(70 * MIB, u64::MAX), Some(80 * MIB..100 * MIB));
        assert_eq!(unused(100 * MIB, u64::MAX), None);
        assert_eq!(member.unused(&(3 * MIB..20 * MIB), u64::MAX), None);
    }

    #[test]
    fn a_chunk_is_a_tenth_of_a_small_volume_in_whole_steps() {
        let found = plan(&[member(0, 1000, &[(1, 9)])], METADATA, Profile::Single, 9).unwrap();
        assert_eq!(
            found,
            ChunkPlan { stripes: vec![(0, 9 * MIB)], stripe_bytes: 112 * MIB, bytes: 112 * MIB }
        );
    }

    #[test]
    fn both_copies_of_dup_are_in_one_hole() {
        let found =
            plan(&[member(0, 100, &[(1, 80), (90, 91)])], METADATA, Profile::Dup, 9).unwrap();
        assert_eq!(found.stripes, vec![(0, 80 * MIB), (0, 85 * MIB)]);
        assert_eq!(found.stripe_bytes, 5 * MIB);
    }

    #[test]
    fn stripes_go_to_all_members_with_room_and_the_emptiest_first() {
        let members =
            [member(0, 4000, &[]), member(1, 4000, &[(1, 4000)]), member(2, 4000, &[(1, 3900)])];
        let found = plan(&members, DATA, Profile::Raid0, 9).unwrap();
        assert_eq!(found.stripes, vec![(0, MIB), (2, 3900 * MIB)]);
        assert_eq!(found.stripe_bytes, 100 * MIB);
        assert_eq!(plan(&members, DATA, Profile::Raid1c3, 9), None);
        assert_eq!(plan(&members, DATA, Profile::Raid1, 1), None);
    }
}
