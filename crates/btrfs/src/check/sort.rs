//! Sorting of what has to be compared, in bounded memory.
//!
//! Records go to partitions, by their address. A partition is sorted when it is taken. When all
//! partitions together have more than their share of memory, the largest one is sorted and
//! written to a file without a name. A partition that was written is merged from its files.
//!
//! ```text
//! add_all ──> partition 0: records in memory, runs in a file     ──> take ──> in order
//!             partition 1: records in memory
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use offshoot_vfs::{Error, Result};
use parking_lot::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What is sorted: a few integers, in the order in which they are compared.
pub(super) trait SortedRecord:
    Copy + Ord + FromBytes + IntoBytes + Immutable + Send + Sync
{
    /// The address by which a partition is chosen.
    fn address(&self) -> u64;
}

/// The records of a part of the logical space.
struct SortPartition<T> {
    records: Vec<T>,
    /// The file of the sorted runs, and how many records each has.
    runs: Option<(File, Vec<u64>)>,
}

/// Gathers records, and gives them back in order.
pub(super) struct Sorter<T> {
    /// The first address of each partition but the first.
    bounds: Vec<u64>,
    partitions: Vec<Mutex<SortPartition<T>>>,
    /// The records that are in memory.
    count: AtomicUsize,
    most: usize,
    scratch: PathBuf,
}

impl<T: SortedRecord> Sorter<T> {
    /// A sorter with a partition in front of the first and behind each of `bounds`, which ascend.
    /// It holds at most `memory_bytes` of records, and writes the others to files in `scratch`.
    pub(super) fn new(bounds: Vec<u64>, memory_bytes: u64, scratch: &Path) -> Self {
        let partition = |_| Mutex::new(SortPartition { records: Vec::new(), runs: None });
        let most = memory_bytes / size_of::<T>() as u64;
        Self {
            partitions: (0..=bounds.len()).map(partition).collect(),
            bounds,
            count: AtomicUsize::new(0),
            // A vector that grows has twice the room that its records take.
            most: usize::try_from(most / 2).unwrap_or(usize::MAX).max(1024),
            scratch: scratch.to_owned(),
        }
    }

    /// How many partitions there are.
    pub(super) fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// The addresses of a partition.
    pub(super) fn range(&self, index: usize) -> Range<u64> {
        let bound = |index: usize| self.bounds.get(index).copied();
        let start = index.checked_sub(1).map_or(0, |before| bound(before).unwrap_or(u64::MAX));
        start..bound(index).unwrap_or(u64::MAX)
    }

    /// Takes all of `records`.
    ///
    /// # Errors
    /// When a file cannot be made or written.
    pub(super) fn add_all(&self, records: &mut Vec<T>) -> Result<()> {
        records.sort_unstable();
        let mut rest = records.as_slice();
        while let Some(first) = rest.first() {
            let index = self.bounds.partition_point(|&bound| bound <= first.address());
            let end = self.bounds.get(index).map_or(rest.len(), |&bound| {
                rest.partition_point(|record| record.address() < bound)
            });
            let (these, behind) = rest.split_at(end);
            rest = behind;
            let Some(partition) = self.partitions.get(index) else { break };
            let mut partition = partition.lock();
            partition.records.extend_from_slice(these);
            self.count.fetch_add(these.len(), Ordering::Relaxed);
        }
        records.clear();
        while self.count.load(Ordering::Relaxed) > self.most {
            self.write_largest()?;
        }
        Ok(())
    }

    /// Writes the records of the largest partition to its file.
    fn write_largest(&self) -> Result<()> {
        let largest = self.partitions.iter().max_by_key(|one| one.lock().records.len());
        let Some(partition) = largest else { return Ok(()) };
        let mut partition = partition.lock();
        let count = partition.records.len();
        partition.write_run(&self.scratch).map_err(scratch_error)?;
        self.count.fetch_sub(count, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the records of a partition, in order.
    ///
    /// # Errors
    /// When the file of the partition cannot be read.
    pub(super) fn take(&self, index: usize) -> Result<SortedRecords<T>> {
        let empty = SortPartition { records: Vec::new(), runs: None };
        let Some(partition) = self.partitions.get(index) else {
            return Ok(SortedRecords::default());
        };
        let mut partition = partition.lock();
        let SortPartition { mut records, runs } = std::mem::replace(&mut *partition, empty);
        self.count.fetch_sub(records.len(), Ordering::Relaxed);
        drop(partition);
        records.sort_unstable();
        let mut sorted = SortedRecords { runs: Vec::new(), next: BinaryHeap::new() };
        sorted.add(SortedRun::Memory(records.into_iter()))?;
        if let Some((file, lens)) = runs {
            let mut at = 0;
            for len in lens {
                sorted.add(SortedRun::open(&file, at, len).map_err(scratch_error)?)?;
                at += len * size_of::<T>() as u64;
            }
        }
        Ok(sorted)
    }
}

impl<T: SortedRecord> SortPartition<T> {
    fn write_run(&mut self, scratch: &Path) -> io::Result<()> {
        if self.records.is_empty() {
            return Ok(());
        }
        self.records.sort_unstable();
        let (file, lens) = match &mut self.runs {
            Some(runs) => runs,
            none => none.insert((tempfile::tempfile_in(scratch)?, Vec::new())),
        };
        file.seek(SeekFrom::End(0))?;
        let mut out = BufWriter::with_capacity(1 << 20, &*file);
        out.write_all(self.records.as_bytes())?;
        out.flush()?;
        lens.push(self.records.len() as u64);
        self.records = Vec::new();
        Ok(())
    }
}

fn scratch_error(error: io::Error) -> Error {
    Error::io("a file for records that have no room in memory", error)
}

/// The records of one sorted run.
enum SortedRun<T> {
    Memory(std::vec::IntoIter<T>),
    File { reader: BufReader<RunReader>, left: u64 },
}

/// A range of a file, read without moving the place of other readers.
struct RunReader {
    file: File,
    at: u64,
}

impl Read for RunReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = std::os::unix::fs::FileExt::read_at(&self.file, buf, self.at)?;
        self.at += len as u64;
        Ok(len)
    }
}

impl<T: SortedRecord> SortedRun<T> {
    fn open(file: &File, at: u64, len: u64) -> io::Result<Self> {
        let range = RunReader { file: file.try_clone()?, at };
        Ok(Self::File { reader: BufReader::with_capacity(64 << 10, range), left: len })
    }

    fn next(&mut self) -> io::Result<Option<T>> {
        match self {
            Self::Memory(records) => Ok(records.next()),
            Self::File { left: 0, .. } => Ok(None),
            Self::File { reader, left } => {
                *left -= 1;
                let mut record = T::new_zeroed();
                reader.read_exact(record.as_mut_bytes())?;
                Ok(Some(record))
            }
        }
    }
}

/// The records of a partition, in order.
pub(super) struct SortedRecords<T> {
    runs: Vec<SortedRun<T>>,
    /// The next record of each run.
    next: BinaryHeap<Reverse<(T, usize)>>,
}

impl<T: Ord> Default for SortedRecords<T> {
    fn default() -> Self {
        Self { runs: Vec::new(), next: BinaryHeap::new() }
    }
}

impl<T: SortedRecord> SortedRecords<T> {
    fn add(&mut self, run: SortedRun<T>) -> Result<()> {
        self.runs.push(run);
        self.advance(self.runs.len() - 1)
    }

    /// Reads the next record of a run.
    fn advance(&mut self, index: usize) -> Result<()> {
        let Some(run) = self.runs.get_mut(index) else { return Ok(()) };
        if let Some(record) = run.next().map_err(scratch_error)? {
            self.next.push(Reverse((record, index)));
        }
        Ok(())
    }

    /// The next record, which stays the next one.
    pub(super) fn peek(&self) -> Option<&T> {
        self.next.peek().map(|Reverse((record, _))| record)
    }

    /// Takes the next record.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(super) fn next(&mut self) -> Result<Option<T>> {
        let Some(Reverse((record, index))) = self.next.pop() else { return Ok(None) };
        self.advance(index)?;
        Ok(Some(record))
    }
}

#[cfg(test)]
mod tests {
    use offshoot_testkit::random::Random;

    use super::*;

    #[derive(
        Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable,
    )]
    #[repr(C)]
    struct Two {
        address: u64,
        value: u64,
    }

    impl SortedRecord for Two {
        fn address(&self) -> u64 {
            self.address
        }
    }

    /// Far more records than there is room for come back in order, each in its partition.
    #[test]
    fn records_come_back_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let bounds = vec![1000, 5000, 5001];
        let sorter = Sorter::new(bounds, 40_000, dir.path());
        let mut random = Random::new(7);
        let mut all = Vec::new();
        for _ in 0..100 {
            let next = |_| Two { address: random.below(10_000), value: random.below(1 << 40) };
            let mut some: Vec<_> = (0..500).map(next).collect();
            all.extend_from_slice(&some);
            sorter.add_all(&mut some).unwrap();
            assert!(some.is_empty());
        }
        all.sort_unstable();
        let mut found = Vec::new();
        for index in 0..sorter.partitions() {
            let mut records = sorter.take(index).unwrap();
            while let Some(&peeked) = records.peek() {
                assert_eq!(records.next().unwrap(), Some(peeked));
                found.push(peeked);
            }
            assert_eq!(records.next().unwrap(), None);
        }
        assert!(found == all);
    }
}
