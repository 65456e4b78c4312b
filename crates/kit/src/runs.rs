//! Bytes of a file that are only in memory: whole units, sectors or blocks, each of which is there
//! completely or not at all.
//!
//! They are kept in runs. A run that is shared, because it is being read or is on its way to a
//! device, does not change: a thread that writes over it gets a copy.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::pages::AlignedBytes;

/// The longest run in one piece of memory, in bytes.
pub const RUN_BYTES: usize = 1 << 20;

/// The longest run that is copied to be made longer, in bytes.
const COPIED_BYTES: usize = 64 << 10;

/// Consecutive bytes of a file, with the offset of the first.
pub type BufferRun = (u64, Arc<AlignedBytes>);

/// The runs of a file.
#[derive(Debug)]
pub struct DirtyRuns {
    runs: BTreeMap<u64, Arc<AlignedBytes>>,
    /// The bytes of all runs.
    bytes: u64,
    weigh: fn(&Range<u64>) -> u64,
    /// The sum of `weigh` over all runs.
    weight: u64,
}

impl DirtyRuns {
    /// No runs yet. `weigh` says what a run counts in [`weight`](Self::weight).
    #[must_use]
    pub fn new(weigh: fn(&Range<u64>) -> u64) -> Self {
        Self { runs: BTreeMap::new(), bytes: 0, weigh, weight: 0 }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Their bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What they weigh together.
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// All runs, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Arc<AlignedBytes>)> {
        self.runs.iter().map(|(&at, run)| (at, run))
    }

    /// The run that begins at `at`.
    #[must_use]
    pub fn at(&self, at: u64) -> Option<&Arc<AlignedBytes>> {
        self.runs.get(&at)
    }

    /// The runs that overlap `range`, in order.
    #[must_use]
    pub fn overlapping(&self, range: &Range<u64>) -> Vec<BufferRun> {
        self.overlaps(range).map(|(at, run)| (at, run.clone())).collect()
    }

    fn overlaps(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Arc<AlignedBytes>)> {
        let first = self.runs.range(..=range.start).next_back().map_or(range.start, |(&at, _)| at);
        let start = range.start;
        self.runs
            .range(first..range.end.max(first))
            .filter(move |(at, run)| **at + run.len() as u64 > start)
            .map(|(&at, run)| (at, run))
    }

    /// The first bytes in a row from `at` on: the part of `range` that consecutive runs have.
    #[must_use]
    pub fn first_row(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let mut row: Option<Range<u64>> = None;
        for (at, run) in self.overlaps(range) {
            let end = (at + run.len() as u64).min(range.end);
            match &mut row {
                Some(row) if row.end == at => row.end = end,
                Some(_) => break,
                None => row = Some(at.max(range.start)..end),
            }
        }
        row
    }

    /// The parts of `range` that are not there, in order.
    #[must_use]
    pub fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut at) = (Vec::new(), range.start);
        for (start, run) in self.overlaps(range) {
            if at < start {
                gaps.push(at..start);
            }
            at = start + run.len() as u64;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Adds `parts`, which together are whole units, none of which is there. They are copied once,
    /// to where they stay.
    pub fn add(&mut self, start: u64, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.bytes += len as u64;
        let end = start + len as u64;
        if let Some((&at, run)) = self.runs.range_mut(..start).next_back()
            && at + run.len() as u64 == start
            && run.len() + len <= RUN_BYTES
            && let Some(run) = own(run)
        {
            run.append(parts);
            self.weight += (self.weigh)(&(at..end)) - (self.weigh)(&(at..start));
        } else {
            self.insert(start, parts);
        }
    }

    fn insert(&mut self, start: u64, parts: &[&[u8]]) {
        let run = AlignedBytes::of(parts);
        self.weight += (self.weigh)(&(start..start + run.len() as u64));
        self.runs.insert(start, Arc::new(run));
    }

    /// Overwrites bytes, all of which are there.
    pub fn overwrite(&mut self, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        let first = self.runs.range(..=offset).next_back().map_or(offset, |(&at, _)| at);
        for (&at, run) in self.runs.range_mut(first..end) {
            let covered = offset.max(at)..end.min(at + run.len() as u64);
            if !covered.is_empty() {
                let target = index(covered.start - at)..index(covered.end - at);
                let source = index(covered.start - offset)..index(covered.end - offset);
                Arc::make_mut(run)[target].copy_from_slice(&data[source]);
            }
        }
    }

    /// Removes `range`, which is whole units.
    pub fn remove(&mut self, range: &Range<u64>) {
        for (at, run) in self.overlapping(range) {
            let end = at + run.len() as u64;
            self.runs.remove(&at);
            self.bytes -= end.min(range.end) - at.max(range.start);
            self.weight -= (self.weigh)(&(at..end));
            if at < range.start {
                self.insert(at, &[&run[..index(range.start - at)]]);
            }
            if range.end < end {
                self.insert(range.end, &[&run[index(range.end - at)..]]);
            }
        }
    }

    /// Zeros the rest of the unit of so many bytes that `size` lies in, if it is there.
    pub fn clear_behind(&mut self, size: u64, unit: u64) {
        let tail = size..size.next_multiple_of(unit);
        if !tail.is_empty() && self.gaps(&tail).is_empty() {
            self.overwrite(size, &vec![0; index(tail.end - tail.start)]);
        }
    }
}

/// The run, to be made longer. `None` for a long run that is on its way to the devices, or is being
/// read: copying it would take longer than writing one run more.
fn own(run: &mut Arc<AlignedBytes>) -> Option<&mut AlignedBytes> {
    if run.len() <= COPIED_BYTES { Some(Arc::make_mut(run)) } else { Arc::get_mut(run) }
}

/// The length of data in memory as an index.
fn index(len: u64) -> usize {
    usize::try_from(len).expect("it is in memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of runs of 4 and 8 bytes, the second of which is long by a run that is held.
    #[test]
    fn a_row_goes_over_runs_and_a_held_run_stays_as_it_is() {
        let mut runs = DirtyRuns::new(|range| range.end - range.start);
        runs.add(4, &[&[1; 4]]);
        runs.add(20, &[&[2; 4]]);
        let held = runs.at(20).cloned().unwrap();
        runs.add(24, &[&[3; 3], &[4]]);
        assert_eq!((runs.len(), runs.bytes(), runs.weight()), (2, 12, 12));
        assert_eq!(held.len(), 4);
        assert_eq!(runs.first_row(&(0..100)), Some(4..8));
        assert_eq!(runs.first_row(&(6..100)), Some(6..8));
        assert_eq!(runs.first_row(&(8..27)), Some(20..27));
        assert_eq!(runs.first_row(&(28..100)), None);
        runs.remove(&(22..24));
        assert_eq!(runs.first_row(&(8..100)), Some(20..22));
        runs.add(22, &[&[5; 2]]);
        // 24..28 is a run of its own by now, and 20..24 one row with it.
        assert_eq!(runs.first_row(&(8..100)), Some(20..28));
        runs.clear_behind(25, 4);
        let bytes: Vec<_> =
            runs.overlapping(&(20..28)).iter().flat_map(|(_, run)| run.to_vec()).collect();
        assert_eq!(bytes, [2, 2, 5, 5, 3, 0, 0, 0]);
    }
}
