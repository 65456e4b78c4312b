//! Which copy of a mirrored address is read.
//!
//! A reader of a range stays on one copy, and several readers use all copies. The space is divided
//! into regions of [`REGION_BYTES`]. The first read or prefetch of a region chooses its copy: that
//! of the region before it, or the first one, unless a member with another copy has fewer reads
//! under way. Later reads follow that choice unless another member has far fewer. So a read mostly
//! finds what the device was told to fetch.
//!
//! ```text
//!   reader   region   reads under way     chosen
//!   A           7     member 0: 0, 1: 0   copy 0
//!   B          90     member 0: 1, 1: 0   copy 1
//!   A           8     member 0: 0, 1: 1   copy 0, as 7
//! ```
//!
//! A volume that one thread reads thus reads the first copies alone, in the same way each time.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use offshoot_btrfs_format::Logical;
use offshoot_kit::shards::scatter;
use smallvec::SmallVec;

use super::members::Members;
use super::ways::ReadWay;

/// The length of a region in bytes.
const REGION_BYTES: u64 = 1 << 20;

/// The number of regions whose choice is remembered, at most. Another region with the same slot
/// replaces the one that is there.
const REGIONS: usize = 512;

/// How many more reads than another member one may have under way, before a region that it was
/// chosen for is read from the other one. Then what the device was told to fetch is fetched in
/// vain.
const SLACK: usize = 1;

/// As how many reads under way it counts that reads of a member fail.
const BAD_READS: usize = 1 << 20;

/// The copies that were chosen last. Nothing depends on them but speed, so their order in memory
/// does not matter.
pub(super) struct MirrorChoices {
    /// The number of the region plus one, and in the lowest byte the number of the copy.
    regions: Box<[AtomicU64]>,
}

impl Default for MirrorChoices {
    fn default() -> Self {
        Self { regions: (0..REGIONS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl MirrorChoices {
    /// Puts the way to be tried first in front. `ways` are those of a segment at `logical`, and
    /// those of members that are not stale come first.
    pub(super) fn choose(&self, logical: Logical, ways: &mut [ReadWay], members: &Members) {
        if members.all().len() < 2 {
            return;
        }
        let load = |way: &ReadWay| match way {
            ReadWay::Direct(place) if !way.is_stale(members) => {
                let condition = &members.get(place.member).condition;
                // A member whose reads fail has none under way for long.
                let penalty = if condition.has_bad_reads() { BAD_READS } else { 0 };
                Some(condition.reads_under_way() + penalty)
            }
            _ => None,
        };
        let loads: SmallVec<[usize; 4]> = ways.iter().map_while(load).collect();
        if loads.len() < 2 {
            return;
        }
        let region = logical.0 / REGION_BYTES;
        let known = self.of(region);
        let before = || region.checked_sub(1).and_then(|before| self.of(before));
        let (wanted, slack) = match known {
            Some(copy) => (copy, SLACK),
            None => (before().unwrap_or(0), 0),
        };
        let lowest = loads.iter().copied().enumerate().min_by_key(|(_, load)| *load);
        let Some((least, lowest)) = lowest else { return };
        let stays = loads.get(wanted).is_some_and(|own| *own <= lowest + slack);
        let copy = if stays { wanted } else { least };
        if known != Some(copy) {
            self.remember(region, copy);
        }
        ways.swap(0, copy);
    }

    /// The copy that was chosen for `region`, if it is remembered.
    fn of(&self, region: u64) -> Option<usize> {
        let stored = self.slot(region).load(Ordering::Relaxed);
        (stored >> 8 == region + 1).then_some(usize::from(stored.to_le_bytes()[0]))
    }

    /// A profile has at most four copies, but a damaged stripe tree may name more.
    fn remember(&self, region: u64, copy: usize) {
        if let Ok(copy) = u8::try_from(copy) {
            let stored = (region + 1) << 8 | u64::from(copy);
            self.slot(region).store(stored, Ordering::Relaxed);
        }
    }

    fn slot(&self, region: u64) -> &AtomicU64 {
        &self.regions[scatter(region) % REGIONS]
    }
}

/// A read that is under way. It counts until this is dropped.
pub(super) struct ReadUnderWay<'c>(&'c AtomicUsize);

impl<'c> ReadUnderWay<'c> {
    pub(super) fn new(count: &'c AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for ReadUnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use offshoot_btrfs_format::chunk::DevItem;
    use offshoot_btrfs_format::{Generation, Physical};
    use uuid::Uuid;
    use zerocopy::FromZeros;

    use super::*;
    use crate::storage::{Member, MemberOffset};

    fn members(count: u64) -> Members {
        let member = |id: u64| {
            let mut item = DevItem::new_zeroed();
            (item.devid, item.uuid) = (id.into(), Uuid::from_u128(id.into()).into_bytes());
            Member::present(&item, None, Uuid::nil(), Generation(7))
        };
        Members::new((1..=count).map(member).collect())
    }

    /// The member that is read first at this region.
    fn chosen(choices: &MirrorChoices, members: &Members, region: u64) -> usize {
        let place = |member| MemberOffset { member, physical: Physical(0) };
        let mut ways: Vec<_> =
            (0..members.all().len()).map(|member| ReadWay::Direct(place(member))).collect();
        choices.choose(Logical(region * REGION_BYTES + 4096), &mut ways, members);
        let ReadWay::Direct(first) = ways[0] else { panic!("{ways:?}") };
        first.member
    }

    #[test]
    fn a_reader_alone_reads_the_first_copy() {
        let (choices, members) = (MirrorChoices::default(), members(3));
        assert!((0..2 * REGIONS as u64).all(|region| chosen(&choices, &members, region) == 0));
    }

    #[test]
    fn a_new_region_is_that_of_the_least_busy_member_and_a_known_one_stays_where_it_is() {
        let (choices, members) = (MirrorChoices::default(), members(2));
        let read = |member: usize| members.get(member).condition.begin_read();
        let of_first = read(0);
        assert_eq!(chosen(&choices, &members, 100), 1);
        drop(of_first);
        assert_eq!([100, 101, 102].map(|region| chosen(&choices, &members, region)), [1; 3]);
        assert_eq!(chosen(&choices, &members, 300), 0, "another reader");
        let one = read(1);
        assert_eq!(chosen(&choices, &members, 102), 1, "one read more is no reason to change");
        assert_eq!(chosen(&choices, &members, 103), 0, "but a new region is better elsewhere");
        let two = read(1);
        assert_eq!(chosen(&choices, &members, 102), 0, "two are");
        drop((one, two));
        assert_eq!(chosen(&choices, &members, 102), 0);
    }

    #[test]
    fn a_member_whose_reads_fail_is_not_chosen() {
        let (choices, members) = (MirrorChoices::default(), members(2));
        let _busy = [(); 9].map(|()| members.get(0).condition.begin_read());
        assert_eq!(chosen(&choices, &members, 5), 1);
        members.get(1).condition.fail_reads();
        assert_eq!([5, 6].map(|region| chosen(&choices, &members, region)), [0; 2]);
    }

    #[test]
    fn a_stale_member_is_not_chosen() {
        let (choices, members) = (MirrorChoices::default(), members(3));
        let _busy = members.get(0).condition.begin_read();
        members.get(2).condition.fail();
        assert_eq!(chosen(&choices, &members, 5), 1);
        members.get(1).condition.fail();
        assert_eq!(chosen(&choices, &members, 5), 0);
    }
}
