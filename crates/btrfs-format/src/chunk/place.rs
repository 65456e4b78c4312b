//! Where the bytes of a chunk are on its stripes, and which of its bytes superblocks cover.
//!
//! ```text
//! single, DUP, RAID1*   a byte is at its own offset in every stripe
//! RAID0, RAID10         64 KiB units go round the stripes, or round the pairs of stripes
//! ```
//!
//! A block group may lie over the places of superblocks. The allocator never allocates a byte that
//! a superblock would overwrite. Such bytes are not counted as used space either: `used` of a block
//! group and the free space tree do not know of them, so every allocator must leave them out
//! itself. The same holds for the lowest 64 KiB of the logical space.

use std::ops::Range;

use super::{Chunk, Profile, STRIPE_LEN};
use crate::superblock::SUPERBLOCK_OFFSETS;
use crate::{Logical, Physical};

/// The lowest logical address that an allocator uses. `btrfs-progs` takes a tree root at address 0
/// for a missing one. The kernel leaves out as many bytes as a device has before its superblock, 64
/// KiB.
pub const LOWEST_ALLOCATED: Logical = Logical(SUPERBLOCK_OFFSETS[0]);

/// A range of bytes that is contiguous on every stripe that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkRun {
    /// Its length in bytes.
    pub len: u64,
    /// Its copies: the index of each in [`Chunk::stripes`], and its offset on that device.
    pub copies: Vec<(usize, Physical)>,
}

impl Chunk {
    /// The run of at most `len` bytes from `logical`, an address of the chunk, with all its copies.
    /// `None` for a profile with parity, because a write there must also update the parity.
    #[must_use]
    pub fn run(&self, logical: Logical, len: u64) -> Option<ChunkRun> {
        let offset = logical.0 - self.start.0;
        let len = len.min(self.end().0 - logical.0);
        let width = self.data_stripes();
        let copies = match self.profile {
            Profile::Raid5 | Profile::Raid6 => return None,
            Profile::Raid0 | Profile::Raid10 => {
                let (unit, within) = (offset / STRIPE_LEN, offset % STRIPE_LEN);
                let len = len.min(STRIPE_LEN - within);
                let at = unit / width * STRIPE_LEN + within;
                return Some(ChunkRun { len, copies: self.copies(unit % width, at) });
            }
            _ => self.copies(0, offset),
        };
        Some(ChunkRun { len, copies })
    }

    /// The row, the index among the data stripes of that row, and the offset in its unit of 64 KiB,
    /// in bytes, of `logical`, an address of the chunk. Of use for profiles with parity.
    #[must_use]
    pub fn row(&self, logical: Logical) -> (u64, u64, u64) {
        let offset = logical.0 - self.start.0;
        let (unit, data) = (offset / STRIPE_LEN, self.data_stripes());
        (unit / data, unit % data, offset % STRIPE_LEN)
    }

    /// The place of stripe `index` in a row of a chunk with parity, `within` bytes into it: the
    /// index in [`Chunk::stripes`], and the offset on that device. The data stripes come first,
    /// then P, then Q.
    #[must_use]
    pub fn place_in_row(&self, row: u64, index: u64, within: u64) -> (usize, Physical) {
        let stripe = usize::try_from((index + row) % self.stripes.len() as u64)
            .expect("an index into the stripes");
        (stripe, Physical(self.stripes[stripe].physical.0 + row * STRIPE_LEN + within))
    }

    /// Where the data at `logical`, an address of the chunk, is: the index of each copy in
    /// [`Chunk::stripes`], and its offset on that device. What parity can make anew does not count.
    #[must_use]
    pub fn copies_of(&self, logical: Logical) -> Vec<(usize, Physical)> {
        self.run(logical, 1).map_or_else(
            || {
                let (row, index, within) = self.row(logical);
                vec![self.place_in_row(row, index, within)]
            },
            |run| run.copies,
        )
    }

    /// The copies of the byte that is `offset` bytes into the stripes of group `group`. A group has
    /// as many stripes as the profile has copies.
    fn copies(&self, group: u64, offset: u64) -> Vec<(usize, Physical)> {
        let copies = usize::from(self.profile.shape().copies);
        let first = usize::try_from(group).expect("an index into the stripes") * copies;
        self.stripes[first..first + copies]
            .iter()
            .enumerate()
            .map(|(i, stripe)| (first + i, Physical(stripe.physical.0 + offset)))
            .collect()
    }

    /// The logical ranges that superblocks of the devices cover, in ascending order and not
    /// adjacent. As in the kernel, each superblock takes a whole unit of 64 KiB.
    #[must_use]
    pub fn superblock_ranges(&self) -> Vec<Range<Logical>> {
        let mut starts: Vec<Range<Logical>> = Vec::new();
        for (index, stripe) in self.stripes.iter().enumerate() {
            let stripe_range = stripe.physical.0..stripe.physical.0 + self.stripe_bytes();
            for place in SUPERBLOCK_OFFSETS {
                if stripe_range.contains(&place) {
                    starts.push(self.covered(index as u64, place - stripe.physical.0));
                }
            }
        }
        joined(starts)
    }

    /// The logical ranges of the chunk that an allocator must leave out, in ascending order and not
    /// adjacent: those that superblocks cover, and those below [`LOWEST_ALLOCATED`].
    #[must_use]
    pub fn left_out_ranges(&self) -> Vec<Range<Logical>> {
        let mut ranges = self.superblock_ranges();
        let lowest = self.start..LOWEST_ALLOCATED.min(self.end());
        if lowest.start < lowest.end {
            ranges.push(lowest);
        }
        joined(ranges)
    }

    /// The logical range that a superblock at `offset` of stripe `index` covers.
    fn covered(&self, index: u64, offset: u64) -> Range<Logical> {
        let (row, within) = (offset / STRIPE_LEN, offset % STRIPE_LEN);
        let width = self.data_stripes();
        let (start, len) = match self.profile {
            Profile::Raid0 => ((row * width + index) * STRIPE_LEN + within, STRIPE_LEN),
            Profile::Raid10 => ((row * width + index / 2) * STRIPE_LEN + within, STRIPE_LEN),
            // The data stripes of a row differ from row to row, so the whole row is left out.
            Profile::Raid5 | Profile::Raid6 => (row * width * STRIPE_LEN, width * STRIPE_LEN),
            _ => (offset, STRIPE_LEN),
        };
        let start = self.start.0 + start;
        Logical(start)..Logical((start + len).min(self.end().0))
    }
}

/// The ranges in ascending order, with those merged that overlap or touch.
fn joined(mut ranges: Vec<Range<Logical>>) -> Vec<Range<Logical>> {
    ranges.sort_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let joins = next.start <= range.end;
        if joins {
            range.end = range.end.max(next.end);
        }
        joins
    });
    ranges
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::DeviceId;
    use crate::chunk::{BlockGroupFlags, Stripe};

    const MIB: u64 = 1 << 20;

    fn chunk(profile: Profile, physical: &[u64], stripe_mib: u64) -> Chunk {
        let stripe = |(i, &at): (usize, &u64)| Stripe {
            device: DeviceId(i as u64 + 1),
            physical: Physical(at * MIB),
            device_uuid: Uuid::from_u128(i as u128),
        };
        let mut chunk = Chunk {
            start: Logical(512 * MIB),
            length: stripe_mib * MIB,
            flags: BlockGroupFlags(BlockGroupFlags::DATA | profile.bits()),
            profile,
            stripes: physical.iter().enumerate().map(stripe).collect(),
        };
        chunk.length *= chunk.data_stripes();
        chunk
    }

    #[test]
    fn copies_are_at_one_offset_of_every_stripe() {
        let dup = chunk(Profile::Dup, &[1, 9], 8);
        let run = dup.run(Logical(513 * MIB), u64::MAX).unwrap();
        assert_eq!(run.len, 7 * MIB);
        assert_eq!(run.copies, [(0, Physical(2 * MIB)), (1, Physical(10 * MIB))]);
    }

    #[test]
    fn units_go_round_the_pairs() {
        let raid10 = chunk(Profile::Raid10, &[1, 1, 5, 5], 4);
        let at = 512 * MIB + 3 * STRIPE_LEN + 100;
        let run = raid10.run(Logical(at), 1 << 30).unwrap();
        assert_eq!(run.len, STRIPE_LEN - 100);
        let physical = Physical(5 * MIB + STRIPE_LEN + 100);
        assert_eq!(run.copies, [(2, physical), (3, physical)]);
        assert_eq!(chunk(Profile::Raid5, &[1, 1, 1], 4).run(Logical(512 * MIB), 1), None);
    }

    /// Chunks of old volumes may begin at logical address 0 and may also cover the first
    /// superblock.
    #[test]
    fn the_lowest_addresses_are_left_out() {
        let at = |start| Chunk { start: Logical(start), ..chunk(Profile::Single, &[40], 4) };
        let kib = |from: u64, to: u64| Logical(from << 10)..Logical(to << 10);
        assert_eq!(at(0).left_out_ranges(), [kib(0, 64)]);
        assert_eq!(at(60 << 10).left_out_ranges(), [kib(60, 64)]);
        assert_eq!(at(64 << 10).left_out_ranges(), []);
        let mut over_superblock = at(0);
        over_superblock.stripes[0].physical = Physical(0);
        assert_eq!(over_superblock.left_out_ranges(), [kib(0, 128)]);
        over_superblock.start = Logical(1 << 20);
        assert_eq!(over_superblock.left_out_ranges(), over_superblock.superblock_ranges());
    }

    /// `superblock_ranges` and `run` agree: a unit is left out if and only if one of its copies
    /// lies at a superblock.
    #[test]
    fn superblock_ranges_are_what_runs_would_hit() {
        for chunk in [
            chunk(Profile::Single, &[60], 100),
            chunk(Profile::Dup, &[40, 60], 20),
            chunk(Profile::Raid1c3, &[1, 60, 64], 100),
            chunk(Profile::Raid0, &[1, 63, 2], 80),
            chunk(Profile::Raid10, &[1, 33, 62, 63], 40),
        ] {
            let ranges = chunk.superblock_ranges();
            assert!(!ranges.is_empty(), "{chunk:?} lies over no superblock");
            for unit in 0..chunk.length / STRIPE_LEN {
                let at = Logical(chunk.start.0 + unit * STRIPE_LEN);
                let run = chunk.run(at, STRIPE_LEN).unwrap();
                let hit = run.copies.iter().any(|(_, at)| SUPERBLOCK_OFFSETS.contains(&at.0));
                let left_out = ranges.iter().any(|range| range.contains(&at));
                assert_eq!(hit, left_out, "{at} of {chunk:?}");
            }
        }
    }
}
