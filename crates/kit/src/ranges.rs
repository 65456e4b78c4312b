//! Sets of ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges that neither overlap nor touch: the start of each, and its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range, and joins it with those that it overlaps or touches.
    pub fn insert(&mut self, mut range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some(other) = self.touching(&range) {
            self.0.remove(&other.start);
            range = range.start.min(other.start)..range.end.max(other.end);
        }
        self.0.insert(range.start, range.end);
    }

    /// Removes the numbers of `range`.
    pub fn remove(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&start, &end)) = self.0.range(..range.end).next_back()
            && end > range.start
        {
            self.0.remove(&start);
            for rest in [start..range.start, range.end..end] {
                if !rest.is_empty() {
                    self.0.insert(rest.start, rest.end);
                }
            }
        }
    }

    /// How many numbers of `range` are in the ranges.
    #[must_use]
    pub fn count(&self, range: &Range<u64>) -> u64 {
        let missing: u64 = self.missing(range).iter().map(|gap| gap.end - gap.start).sum();
        range.end.saturating_sub(range.start) - missing
    }

    /// The last range that overlaps or touches `range`.
    fn touching(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let (&start, &end) = self.0.range(..=range.end).next_back()?;
        (end >= range.start).then_some(start..end)
    }

    /// Whether a range overlaps or touches `range`.
    #[must_use]
    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.touching(range).is_some()
    }

    /// Whether a range has numbers of `range`.
    #[must_use]
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        let before = self.0.range(..range.end).next_back();
        !range.is_empty() && before.is_some_and(|(_, &end)| end > range.start)
    }

    /// Removes the first range, or its first `most` numbers if it has more.
    pub fn pop_first(&mut self, most: u64) -> Option<Range<u64>> {
        let (start, end) = self.0.pop_first()?;
        let rest = start.saturating_add(most);
        if rest < end {
            self.0.insert(rest, end);
        }
        Some(start..end.min(rest))
    }

    /// The parts of `range` that are in none of the ranges.
    #[must_use]
    pub fn missing(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let before = self.0.range(..=range.start).next_back();
        let mut at = before.map_or(range.start, |(_, &end)| end.max(range.start));
        let mut missing = Vec::new();
        for (&start, &end) in self.0.range(range.start..range.end.max(range.start)) {
            if start > at {
                missing.push(at..start);
            }
            at = at.max(end);
        }
        if at < range.end {
            missing.push(at..range.end);
        }
        missing
    }

    /// Joins the two ranges with the smallest gap between them, until there are at most `most`.
    pub fn limit(&mut self, most: usize) {
        while self.0.len() > most.max(1) {
            let pairs = self.iter().zip(self.iter().skip(1));
            let gaps = pairs.map(|(one, next)| one.end..next.start);
            let Some(least) = gaps.min_by_key(|gap| gap.end - gap.start) else { return };
            self.insert(least);
        }
    }

    /// How many ranges there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no range.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().map(|(&start, &end)| start..end)
    }
}

/// `ranges`, which ascend by their start, with those that touch or overlap as one.
pub fn joined(ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges that are far apart stay apart, however many there are.
    #[test]
    fn the_least_gaps_go_first() {
        let mut ranges = Ranges::default();
        for start in [0, 10, 25, 1000, 1015, 5_000_000] {
            ranges.insert(start..start + 5);
            ranges.limit(3);
        }
        let expected = vec![0..30, 1000..1020, 5_000_000..5_000_005];
        assert_eq!(ranges.iter().collect::<Vec<_>>(), expected);
        ranges.limit(0);
        assert_eq!(ranges.iter().collect::<Vec<_>>(), vec![0..5_000_005]);
    }

    /// Compares with sets of numbers, for all pairs of ranges below a small bound.
    #[test]
    fn ranges_are_sets_of_numbers() {
        const MOST: u64 = 7;
        let all = || (0..MOST).flat_map(|start| (start..=MOST).map(move |end| start..end));
        for one in all() {
            for other in all() {
                let mut ranges = Ranges::default();
                ranges.insert(one.clone());
                ranges.insert(other.clone());
                let holds = |at: u64| ranges.iter().any(|range| range.contains(&at));
                for at in 0..MOST {
                    let is_in = one.contains(&at) || other.contains(&at);
                    assert_eq!(holds(at), is_in, "{at} of {one:?} and {other:?}");
                }
                let apart: Vec<_> = ranges.iter().collect();
                assert!(apart.is_sorted_by(|a, b| a.end < b.start), "{ranges:?}");
                for asked in all() {
                    let is_in_part = asked.clone().any(holds);
                    assert_eq!(ranges.overlaps(&asked), is_in_part, "{asked:?} of {ranges:?}");
                    let count = asked.clone().filter(|&at| holds(at)).count() as u64;
                    assert_eq!(ranges.count(&asked), count, "{asked:?} of {ranges:?}");
                    let mut rest = ranges.clone();
                    rest.remove(&asked);
                    let left: Vec<_> = rest.iter().flatten().collect();
                    let expected: Vec<_> =
                        (0..MOST).filter(|at| holds(*at) && !asked.contains(at)).collect();
                    assert_eq!(left, expected, "{asked:?} of {ranges:?}");
                    let missing: Vec<_> = ranges.missing(&asked).into_iter().flatten().collect();
                    let expected: Vec<_> = asked.filter(|&at| !holds(at)).collect();
                    assert_eq!(missing, expected, "{ranges:?}");
                }
            }
        }
    }

    #[test]
    fn the_first_range_goes_in_pieces() {
        let mut ranges = Ranges::default();
        ranges.insert(0..5);
        ranges.insert(10..20);
        assert!(ranges.touches(&(5..7)) && !ranges.touches(&(6..9)));
        let pieces: Vec<_> = std::iter::from_fn(|| ranges.pop_first(6)).collect();
        assert_eq!(pieces, [0..5, 10..16, 16..20]);
    }
}
