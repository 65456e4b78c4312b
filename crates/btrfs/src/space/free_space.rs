//! Free ranges of one block group.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges that do not touch each other, by their start.
#[derive(Debug, Default)]
pub(crate) struct FreeSpace {
    ranges: BTreeMap<u64, u64>,
    total: u64,
    /// Where the last range was taken: the next search begins here, so that what is taken one after
    /// the other lies one behind the other.
    next: u64,
}

impl FreeSpace {
    /// All free bytes.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Adds `start..end`, which is not free yet, and joins it with its neighbours.
    pub(crate) fn add(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        self.total += end - start;
        if let Some((&before, &before_end)) = self.ranges.range(..=start).next_back() {
            debug_assert!(before_end <= start, "a range is freed once");
            if before_end == start {
                self.ranges.remove(&before);
                start = before;
            }
        }
        if let Some((&after, &after_end)) = self.ranges.range(start..).next() {
            debug_assert!(end <= after, "a range is freed once");
            if after == end {
                self.ranges.remove(&after);
                end = after_end;
            }
        }
        self.ranges.insert(start, end);
    }

    /// Takes exactly `start..end`, if all of it is free; whether it is.
    pub(crate) fn take_range(&mut self, start: u64, end: u64) -> bool {
        let around = self.ranges.range(..=start).next_back().map(|(&from, &to)| (from, to));
        let Some((from, to)) = around.filter(|&(_, to)| start < end && end <= to) else {
            return false;
        };
        self.ranges.remove(&from);
        for (from, to) in [(from, start), (end, to)] {
            if from < to {
                self.ranges.insert(from, to);
            }
        }
        self.total -= end - start;
        true
    }

    /// Takes the first piece in `within` that is free, and `most` bytes of it at the most.
    pub(crate) fn take_first(&mut self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        let first = self.ranges.range(..=within.start).next_back();
        let (&from, &to) = first
            .filter(|&(_, &to)| to > within.start)
            .or_else(|| self.ranges.range(within.start..within.end).next())?;
        let start = from.max(within.start);
        let end = to.min(within.end).min(start.saturating_add(most));
        self.take_range(start, end).then_some(start..end)
    }

    /// How long the range would be that `range`, which is not free, were in if it were.
    pub(crate) fn len_with(&self, range: &Range<u64>) -> u64 {
        let before = self.ranges.range(..range.start).next_back();
        let start = before.filter(|&(_, &to)| to == range.start).map_or(range.start, |one| *one.0);
        self.ranges.get(&range.end).copied().unwrap_or(range.end) - start
    }

    /// Takes `len` bytes in one piece, the first that fits from the last place on.
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        if len > self.total {
            return None;
        }
        let fits = |(&start, &end): (&u64, &u64)| (end - start >= len).then_some((start, end));
        let (start, end) = self
            .ranges
            .range(self.next..)
            .find_map(fits)
            .or_else(|| self.ranges.range(..self.next).find_map(fits))?;
        self.ranges.remove(&start);
        if start + len < end {
            self.ranges.insert(start + len, end);
        }
        self.next = start + len;
        self.total -= len;
        Some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_and_are_taken_in_order() {
        let mut free = FreeSpace::default();
        free.add(100, 200);
        free.add(300, 400);
        free.add(200, 300);
        assert_eq!(free.ranges.len(), 1);
        assert_eq!(free.take(50), Some(100));
        assert_eq!(free.take(250), Some(150));
        assert_eq!(free.take(1), None);
        free.add(100, 150);
        free.add(250, 300);
        assert_eq!(free.take(20), Some(100), "what lies before the last place is found too");
        assert_eq!(free.take(50), Some(250));
        assert_eq!(free.total(), 30);
    }

    #[test]
    fn a_range_is_taken_when_all_of_it_is_free() {
        let mut free = FreeSpace::default();
        free.add(100, 200);
        free.add(300, 400);
        for (start, end) in [(90, 110), (190, 210), (150, 350), (120, 120), (500, 510)] {
            assert!(!free.take_range(start, end), "{start}..{end}");
        }
        assert!(free.take_range(120, 150) && !free.take_range(149, 151));
        assert!(free.take_range(300, 400) && free.take_range(100, 120));
        assert_eq!((free.total(), free.take(50)), (50, Some(150)));
    }

    #[test]
    fn pieces_are_taken_from_one_end_to_the_other() {
        let mut free = FreeSpace::default();
        free.add(100, 200);
        free.add(300, 400);
        free.add(500, 600);
        assert_eq!(free.take_first(&(150..550), 20), Some(150..170));
        assert_eq!(free.len_with(&(150..170)), 100);
        assert_eq!(free.take_first(&(170..550), 100), Some(170..200));
        assert_eq!(free.len_with(&(170..200)), 30);
        assert_eq!(free.take_first(&(200..550), 100), Some(300..400));
        assert_eq!(free.take_first(&(400..550), 100), Some(500..550));
        assert_eq!(free.take_first(&(200..550), 100), None);
        assert_eq!(free.total(), 100);
    }
}
