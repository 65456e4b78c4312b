//! The free ranges of one block group.
//!
//! A tree block must lie within a *window* of 64 KiB. Windows are counted from the start of the
//! block group, as stripes are. `btrfs check` complains about a tree block that crosses the border
//! between two windows, and the scrub of the kernel skips it. So a free range may hold fewer tree
//! blocks than its length suggests, if it does not begin and end at multiples of the node size.
//! Other programs leave such ranges when they convert volumes, or put tree blocks anywhere.
//!
//! ```text
//! window of 64 KiB    |       |       |       |       |   nodes of 16 KiB
//! free                    ################                 32 KiB: two tree blocks, not aligned
//! the aligned one             ########                     leaves room for none beside it
//! ```
//!
//! In a block group for tree blocks alone, the *usable* bytes are those that tree blocks can take.
//! Taking one tree block makes them less by exactly the node size. So a caller that has reserved
//! space for ten blocks can take all ten, one by one. An aligned place is taken if it costs no more
//! than that. A place that is not aligned is taken only when no aligned one is left.
//!
//! # How a range is found
//!
//! An index has each range by its *rank*. So the cost of an allocation does not depend on the
//! number of ranges.
//!
//! | block group for | rank of a range | a search begins with |
//! |---|---|---|
//! | data, or data and tree blocks | its length | the range behind the last one that was taken, then the shortest that is long enough |
//! | tree blocks alone | 2 with an aligned place, 1 with another place, 0 with none | the range behind the last one that was taken, then the next one of the rank |

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use offshoot_btrfs_format::chunk::STRIPE_LEN;

use super::looked::look;

/// No tree block crosses a multiple of this, counted from the start of the block group, in bytes.
const WINDOW: u64 = STRIPE_LEN;

/// Where in free space an extent may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// Anywhere: data.
    Anywhere,
    /// At a multiple of its own length from the start of the block group: the best place for a tree
    /// block.
    Aligned,
    /// Anywhere within a window: for a tree block when no aligned place is left.
    InWindow,
}

/// The rank of a range with place for a tree block, and with an aligned place for one.
const IN_WINDOW: u64 = 1;
const ALIGNED: u64 = 2;

/// The rank from which on ranges have `len` bytes in one piece. `has_blocks` is true where only
/// tree blocks of `len` bytes are taken.
pub(super) fn least_rank(has_blocks: bool, len: u64, fit: Fit) -> u64 {
    match fit {
        _ if !has_blocks => len,
        Fit::Aligned => ALIGNED,
        Fit::InWindow | Fit::Anywhere => IN_WINDOW,
    }
}

/// What has a rank, by rank and address: first what has the rank `least` or a higher one, from the
/// address `from` on, then what has this rank and lies before `from`.
pub(super) fn ranked_from(
    index: &BTreeSet<(u64, u64)>,
    least: u64,
    from: u64,
) -> impl Iterator<Item = (u64, u64)> + '_ {
    let behind = index.range((least, from)..).chain(index.range((least, 0)..(least, from)));
    behind.copied().inspect(|_| look())
}

/// Ranges that do not touch each other, by their start.
#[derive(Clone, Debug)]
pub(super) struct FreeSpace {
    ranges: BTreeMap<u64, u64>,
    /// The rank and the start of each range.
    index: BTreeSet<(u64, u64)>,
    total: u64,
    /// The bytes of `total` that can be taken.
    usable: u64,
    /// The start of the block group.
    origin: u64,
    /// The length of a tree block, if nothing else is taken here.
    block: Option<u64>,
    /// Ranges that are never free, ascending and apart.
    left_out: Vec<Range<u64>>,
    /// The end of the last range that was taken. The next search begins here, so that successive
    /// extents lie one behind the other.
    next: u64,
    /// Nothing behind this counts as free.
    limit: u64,
    /// The free ranges behind the limit, without those that are left out.
    behind: Vec<Range<u64>>,
}

impl FreeSpace {
    /// An empty set for a block group at `origin` that holds data. The ranges of `left_out` ascend,
    /// and are never free.
    pub(super) fn of_bytes(origin: u64, left_out: Vec<Range<u64>>) -> Self {
        let (ranges, index) = (BTreeMap::new(), BTreeSet::new());
        Self {
            ranges,
            index,
            total: 0,
            usable: 0,
            origin,
            block: None,
            left_out,
            next: 0,
            limit: u64::MAX,
            behind: Vec::new(),
        }
    }

    /// An empty set for a block group that holds only tree blocks of `node_size` bytes.
    pub(super) fn of_blocks(origin: u64, node_size: u64, left_out: Vec<Range<u64>>) -> Self {
        Self { block: Some(node_size), ..Self::of_bytes(origin, left_out) }
    }

    /// All free bytes.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The bytes that would be usable if `out`, which is not free, were free too.
    pub(super) fn usable_with(&self, out: &Range<u64>) -> u64 {
        if out.is_empty() {
            return self.usable;
        }
        let (start, end) = self.with(out);
        let apart = self.usable_in(start, out.start) + self.usable_in(out.end, end);
        self.usable - apart + self.usable_in(start, end)
    }

    /// The usable bytes of a free range.
    fn usable_in(&self, start: u64, end: u64) -> u64 {
        let Some(block) = self.block else { return end - start };
        let (start, end) = (start - self.origin, end - self.origin);
        let first_border = start.next_multiple_of(WINDOW).min(end);
        let last_border = (end / WINDOW * WINDOW).max(first_border);
        let whole_blocks = |len: u64| len / block * block;
        whole_blocks(first_border - start)
            + (last_border - first_border) / WINDOW * whole_blocks(WINDOW)
            + whole_blocks(end - last_border)
    }

    /// Adds `start..end`, which must not be free yet, without its left-out parts.
    pub(super) fn add(&mut self, start: u64, end: u64) {
        let mut at = start;
        for i in 0..self.left_out.len() {
            let hole = self.left_out[i].clone();
            if hole.start < end && hole.end > at {
                self.add_whole(at, hole.start.max(at));
                at = hole.end;
            }
        }
        self.add_whole(at, end);
    }

    /// Whether a part of `start..end` is free.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        self.ranges.range(..end).next_back().is_some_and(|(_, &to)| to > start)
    }

    /// Takes everything behind `end` away from what is free. From now on nothing there becomes
    /// free, until the limit is lifted.
    pub(super) fn limit(&mut self, end: u64) {
        self.limit = end;
        while let Some((&start, &to)) = self.ranges.last_key_value().filter(|&(_, &to)| to > end) {
            self.remove(start, to);
            self.total -= to - start;
            self.add_whole(start, to);
        }
    }

    /// Makes everything free again that is free behind the limit.
    pub(super) fn lift_limit(&mut self) {
        self.limit = u64::MAX;
        for range in std::mem::take(&mut self.behind) {
            self.add_whole(range.start, range.end);
        }
    }

    /// Whether nothing behind the limit is in use, up to `end`. Without a limit it is not known.
    pub(super) fn is_free_behind_limit(&self, end: u64) -> bool {
        if self.limit >= end {
            return false;
        }
        let len = |range: &Range<u64>| range.end.saturating_sub(range.start);
        let clamped = |range: &Range<u64>| range.start.max(self.limit)..range.end.min(end);
        let left_out: u64 = self.left_out.iter().map(|range| len(&clamped(range))).sum();
        let free: u64 = self.behind.iter().map(len).sum();
        free + left_out == end.saturating_sub(self.limit)
    }

    /// Forgets everything behind the limit: the block group ends there now.
    pub(super) fn end_at_limit(&mut self) {
        self.behind.clear();
        self.left_out.retain(|range| range.start < self.limit);
        self.limit = u64::MAX;
    }

    /// Adds a range, and joins it with its neighbours.
    fn add_whole(&mut self, mut start: u64, mut end: u64) {
        if end > self.limit && start < end {
            self.behind.push(start.max(self.limit)..end);
            end = self.limit;
        }
        if start >= end {
            return;
        }
        self.total += end - start;
        if let Some((&before, &before_end)) = self.ranges.range(..=start).next_back() {
            debug_assert!(before_end <= start, "a range is freed once");
            if before_end == start {
                self.remove(before, start);
                start = before;
            }
        }
        if let Some((&after, &after_end)) = self.ranges.range(start..).next() {
            debug_assert!(end <= after, "a range is freed once");
            if after == end {
                self.remove(after, after_end);
                end = after_end;
            }
        }
        self.insert(start, end);
    }

    fn insert(&mut self, start: u64, end: u64) {
        if start < end {
            self.usable += self.usable_in(start, end);
            self.ranges.insert(start, end);
            self.index.insert((self.rank(start, end), start));
        }
    }

    fn remove(&mut self, start: u64, end: u64) {
        self.usable -= self.usable_in(start, end);
        self.ranges.remove(&start);
        self.index.remove(&(self.rank(start, end), start));
    }

    /// The rank of a free range.
    fn rank(&self, start: u64, end: u64) -> u64 {
        let Some(block) = self.block else { return end - start };
        if self.place_in(start, end, block, Fit::Aligned).is_some() {
            ALIGNED
        } else if self.place_in(start, end, block, Fit::InWindow).is_some() {
            IN_WINDOW
        } else {
            0
        }
    }

    /// The highest rank of a range; 0 when none can be taken.
    pub(super) fn best_rank(&self) -> u64 {
        self.index.last().map_or(0, |&(rank, _)| rank)
    }

    /// Takes exactly `start..end`, if all of it is free. Returns whether it is.
    pub(super) fn take_range(&mut self, start: u64, end: u64) -> bool {
        let around = self.ranges.range(..=start).next_back().map(|(&from, &to)| (from, to));
        let Some((from, to)) = around.filter(|&(_, to)| start < end && end <= to) else {
            return false;
        };
        self.remove(from, to);
        self.insert(from, start);
        self.insert(end, to);
        self.total -= end - start;
        true
    }

    /// Takes the first free piece in `within`, at most `most` bytes of it.
    pub(super) fn take_first(&mut self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        let first = self.first(within, most)?;
        self.take_range(first.start, first.end).then_some(first)
    }

    /// The first free piece in `within`, at most `most` bytes of it.
    pub(super) fn first(&self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        let first = self.ranges.range(..=within.start).next_back();
        let (&from, &to) = first
            .filter(|&(_, &to)| to > within.start)
            .or_else(|| self.ranges.range(within.start..within.end).next())?;
        let start = from.max(within.start);
        let end = to.min(within.end).min(start.saturating_add(most));
        (start < end).then_some(start..end)
    }

    /// The shortest range of bytes that has `wanted` bytes, or else the longest one.
    pub(super) fn shortest_with(&self, wanted: u64) -> Option<Range<u64>> {
        let fitting = ranked_from(&self.index, wanted, 0).next();
        let (len, start) = fitting.or_else(|| self.index.last().copied())?;
        Some(start..start + len)
    }

    /// Whether `len` bytes in one piece would be free if `out`, which is not free, were free too.
    pub(super) fn fits_with(&self, out: &Range<u64>, len: u64, fit: Fit) -> bool {
        let (start, end) = self.with(out);
        self.place_in(start, end, len, fit).is_some()
    }

    /// The free range that `out` would be in if it were free.
    fn with(&self, out: &Range<u64>) -> (u64, u64) {
        let before = self.ranges.range(..out.start).next_back();
        let start = before.filter(|&(_, &to)| to == out.start).map_or(out.start, |one| *one.0);
        (start, self.ranges.get(&out.end).copied().unwrap_or(out.end))
    }

    /// Takes `len` bytes in one piece: behind the last piece that was taken, or else where the
    /// index finds a place. In a group for tree blocks, `len` is the node size.
    pub(super) fn take(&mut self, len: u64, fit: Fit) -> Option<u64> {
        if len > self.usable {
            return None;
        }
        let least = least_rank(self.block.is_some(), len, fit);
        // The shortest range that is long enough is the best one. Of ranges for tree blocks, it is
        // the next one.
        let from = self.block.map_or(0, |_| self.next);
        let next = self.ranges.range(self.next..).next().map(|(&start, _)| start);
        let start = next
            .into_iter()
            .inspect(|_| look())
            .chain(ranked_from(&self.index, least, from).map(|(_, start)| start))
            .find_map(|start| self.place_in(start, *self.ranges.get(&start)?, len, fit))?;
        self.next = start + len;
        self.take_range(start, start + len).then_some(start)
    }

    /// Takes the longest free range of a group for data, or as much of it as `most`, in whole
    /// `unit`s. `None` when no range has that many bytes.
    pub(super) fn take_longest(&mut self, most: u64, unit: u64) -> Option<Range<u64>> {
        let &(_, start) = self.index.last()?;
        look();
        let len = (self.ranges.get(&start)? - start).min(most) / unit * unit;
        let longest = start..start + len;
        self.take_range(start, longest.end).then(|| {
            self.next = longest.end;
            longest
        })
    }

    /// Where in a free range `len` bytes may lie.
    fn place_in(&self, start: u64, end: u64, len: u64, fit: Fit) -> Option<u64> {
        let fits = |at: &u64| at.checked_add(len).is_some_and(|to| to <= end);
        let next = |unit: u64| {
            (start - self.origin).checked_next_multiple_of(unit)?.checked_add(self.origin)
        };
        match fit {
            Fit::Anywhere => Some(start).filter(fits),
            Fit::Aligned => next(len).filter(fits).filter(|&at| {
                let left = self.usable_in(start, at) + self.usable_in(at + len, end);
                left + len == self.usable_in(start, end)
            }),
            Fit::InWindow if (start - self.origin) % WINDOW + len <= WINDOW => {
                Some(start).filter(fits)
            }
            Fit::InWindow => next(WINDOW).filter(fits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::looked::looked_at;

    /// Whether `len` bytes would be free in one piece with `out`, and not one more.
    fn longest_with(free: &FreeSpace, out: Range<u64>, len: u64) -> bool {
        let fits = |len| free.fits_with(&out, len, Fit::Anywhere);
        fits(len) && !fits(len + 1)
    }

    const KIB: u64 = 1 << 10;
    const NODE: u64 = 16 * KIB;

    fn of_blocks(ranges: &[(u64, u64)]) -> FreeSpace {
        let mut free = FreeSpace::of_blocks(0, NODE, Vec::new());
        for (from, to) in ranges {
            free.add(from * KIB, to * KIB);
        }
        free
    }

    fn take_block(free: &mut FreeSpace) -> Option<u64> {
        let taken = free.take(NODE, Fit::Aligned).or_else(|| free.take(NODE, Fit::InWindow));
        taken.map(|at| at / KIB)
    }

    #[test]
    fn a_tree_block_crosses_no_window() {
        // 12 KiB before the border, and 4 KiB behind it.
        let mut free = of_blocks(&[(52, 68)]);
        assert_eq!((free.total(), free.usable), (NODE, 0));
        assert_eq!(take_block(&mut free), None);
        free.add(68 * KIB, 80 * KIB);
        assert_eq!((free.usable, take_block(&mut free)), (NODE, Some(64)));
        assert_eq!(free.total(), 12 * KIB);
    }

    #[test]
    fn an_aligned_place_is_taken_unless_that_costs_another() {
        let mut free = of_blocks(&[(4, 40), (68, 100)]);
        assert_eq!(free.usable, 4 * NODE);
        // The aligned ones at 16 and 80 would leave 12 KiB and less.
        let taken: Vec<_> = std::iter::from_fn(|| take_block(&mut free)).collect();
        assert_eq!(taken, [4, 20, 68, 84]);
        let mut free = of_blocks(&[(20, 128)]);
        let taken: Vec<_> = std::iter::from_fn(|| take_block(&mut free)).collect();
        assert_eq!(taken, [32, 48, 64, 80, 96, 112]);
    }

    #[test]
    fn windows_are_counted_from_the_start_of_the_block_group() {
        let mut free = FreeSpace::of_blocks(20 * KIB, NODE, Vec::new());
        free.add(20 * KIB, 100 * KIB);
        let taken: Vec<_> = std::iter::from_fn(|| take_block(&mut free)).collect();
        assert_eq!(taken, [20, 36, 52, 68, 84]);
    }

    /// Whatever ranges are free, as many tree blocks can be taken as are usable, and each lies in
    /// one window.
    #[test]
    fn what_is_usable_can_be_taken() {
        for seed in 0..200 {
            let mut random = offshoot_testkit::random::Random::new(seed);
            let mut free = of_blocks(&[]);
            let mut at = 0;
            while at < 1000 {
                let from = at + 4 * random.below(8);
                at = from + 4 * (1 + random.below(30));
                free.add(from * KIB, at * KIB);
            }
            let mut taken = Vec::new();
            while free.usable > 0 {
                let before = free.usable;
                let block = take_block(&mut free);
                let block = block.unwrap_or_else(|| panic!("seed {seed}: {before} usable"));
                assert_eq!(free.usable, before - NODE, "seed {seed}: {block}");
                assert!(block % 64 <= 48, "seed {seed}: {block} crosses a window");
                taken.push(block * KIB);
            }
            assert_eq!(take_block(&mut free), None, "seed {seed}");
            let out = taken.pop().expect("there was room");
            let with = free.usable_with(&(out..out + NODE));
            free.add(out, out + NODE);
            assert_eq!(free.usable, with, "seed {seed}");
        }
    }

    /// The index finds a place exactly when a scan of all free ranges finds one, and the longest
    /// piece is the longest one of the scan.
    #[test]
    fn the_index_and_a_scan_agree() {
        for seed in 0..60 {
            let mut random = offshoot_testkit::random::Random::new(seed);
            let has_blocks = seed % 2 == 0;
            let mut free = of_blocks(&[]);
            if !has_blocks {
                free = FreeSpace::of_bytes(0, Vec::new());
            }
            let mut taken: Vec<(u64, u64)> = vec![(0, 4096 * KIB)];
            for step in 0..800 {
                let give_back = random.below(3) > 0 && !taken.is_empty();
                if give_back {
                    let some = random.below(taken.len() as u64);
                    let (start, end) = taken.swap_remove(usize::try_from(some).expect("small"));
                    let middle = start + (end - start) / (4 * KIB) / 2 * (4 * KIB);
                    free.add(middle, end);
                    if start < middle {
                        taken.push((start, middle));
                    }
                }
                let scan = |len, fit| {
                    free.ranges.iter().any(|(&s, &e)| free.place_in(s, e, len, fit).is_some())
                };
                let longest = free.ranges.iter().map(|(start, end)| end - start).max();
                let (len, fit) = match (has_blocks, random.below(2)) {
                    (true, 0) => (NODE, Fit::Aligned),
                    (true, _) => (NODE, Fit::InWindow),
                    _ => (4 * KIB * (1 + random.below(40)), Fit::Anywhere),
                };
                let expected = scan(len, fit);
                let found = free.take(len, fit).map(|start| start..start + len);
                assert_eq!(found.is_some(), expected, "seed {seed}, step {step}");
                let found = match found {
                    None if !has_blocks => {
                        let piece = free.take_longest(len, 4 * KIB);
                        let len = piece.clone().map(|piece| piece.end - piece.start);
                        assert_eq!(len, longest, "seed {seed}, step {step}");
                        piece
                    }
                    found => found,
                };
                taken.extend(found.map(|range| (range.start, range.end)));
                let ranks = free.ranges.iter().map(|(&s, &e)| (free.rank(s, e), s));
                assert_eq!(free.index, ranks.collect(), "seed {seed}, step {step}");
                let all: u64 = free.ranges.iter().map(|(start, end)| end - start).sum();
                let not_free: u64 = taken.iter().map(|(start, end)| end - start).sum();
                assert_eq!((free.total(), all + not_free), (all, 4096 * KIB), "seed {seed}");
            }
        }
    }

    /// Once an allocation looked at all ranges that were too short.
    #[test]
    fn the_cost_of_an_allocation_does_not_grow_with_the_free_ranges() {
        for pieces in [1_000, 10_000, 100_000] {
            let mut free = FreeSpace::of_bytes(0, Vec::new());
            let mut blocks = FreeSpace::of_blocks(0, NODE, Vec::new());
            for piece in 0..pieces {
                let start = piece * 64 * KIB;
                free.add(start, start + 4 * KIB * (1 + piece % 4));
                // Too short for a tree block.
                blocks.add(start, start + 12 * KIB);
            }
            let end = pieces * 64 * KIB;
            blocks.add(end, end + 64 * KIB);
            let (mut looked, mut count) = (0, 0);
            let mut take = |work: &mut dyn FnMut() -> bool| {
                let (more, is_taken) = looked_at(work);
                looked += more;
                assert!(more <= 3, "{more} of {pieces} ranges");
                is_taken
            };
            while take(&mut || free.take(1 << 20, Fit::Anywhere).is_some())
                || take(&mut || free.take_longest(1 << 20, 4 * KIB).is_some())
            {
                count += 1;
            }
            assert_eq!((count, free.total()), (pieces, 0));
            for _ in 0..4 {
                assert!(take(&mut || blocks.take(NODE, Fit::Aligned).is_some()));
            }
            assert!(!take(&mut || blocks.take(NODE, Fit::InWindow).is_some()));
            println!("{pieces} pieces: {looked} looked at");
        }
    }

    #[test]
    fn what_is_left_out_is_never_free() {
        let left_out = vec![0..64 * KIB, 128 * KIB..192 * KIB];
        let mut free = FreeSpace::of_bytes(0, left_out.clone());
        free.add(0, 1024 * KIB);
        assert_eq!(free.total(), 896 * KIB);
        assert_eq!(free.take(64 * KIB, Fit::Anywhere), Some(64 * KIB));
        let mut free = FreeSpace::of_bytes(0, left_out);
        free.add(32 * KIB, 48 * KIB);
        free.add(60 * KIB, 68 * KIB);
        assert_eq!((free.total(), free.take_range(60 * KIB, 64 * KIB)), (4 * KIB, false));
    }

    #[test]
    fn ranges_join_and_are_taken_in_order() {
        let mut free = FreeSpace::of_bytes(0, Vec::new());
        free.add(100, 200);
        free.add(300, 400);
        free.add(200, 300);
        assert_eq!(free.ranges.len(), 1);
        assert_eq!(free.take(50, Fit::Anywhere), Some(100));
        assert_eq!(free.take(250, Fit::Anywhere), Some(150));
        assert_eq!(free.take(1, Fit::Anywhere), None);
        free.add(100, 150);
        free.add(250, 300);
        assert_eq!(
            free.take(20, Fit::Anywhere),
            Some(100),
            "what lies before the last place is found too"
        );
        assert_eq!(free.take(50, Fit::Anywhere), Some(250));
        assert_eq!(free.total(), 30);
    }

    #[test]
    fn a_range_is_taken_when_all_of_it_is_free() {
        let mut free = FreeSpace::of_bytes(0, Vec::new());
        free.add(100, 200);
        free.add(300, 400);
        for (start, end) in [(90, 110), (190, 210), (150, 350), (120, 120), (500, 510)] {
            assert!(!free.take_range(start, end), "{start}..{end}");
        }
        assert!(free.take_range(120, 150) && !free.take_range(149, 151));
        assert!(free.take_range(300, 400) && free.take_range(100, 120));
        assert_eq!((free.total(), free.take(50, Fit::Anywhere)), (50, Some(150)));
    }

    #[test]
    fn pieces_are_taken_from_one_end_to_the_other() {
        let mut free = FreeSpace::of_bytes(0, Vec::new());
        free.add(100, 200);
        free.add(300, 400);
        free.add(500, 600);
        assert_eq!(free.take_first(&(150..550), 20), Some(150..170));
        assert!(longest_with(&free, 150..170, 100));
        assert_eq!(free.take_first(&(170..550), 100), Some(170..200));
        assert!(longest_with(&free, 170..200, 30));
        assert_eq!(free.take_first(&(200..550), 100), Some(300..400));
        assert_eq!(free.take_first(&(400..550), 100), Some(500..550));
        assert_eq!(free.take_first(&(200..550), 100), None);
        assert_eq!(free.total(), 100);
    }
}
