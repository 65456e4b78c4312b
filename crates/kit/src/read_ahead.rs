//! Reading ahead: a thread that reads a file sequentially will want the next bytes.
//!
//! A read that begins where another read of the same file ended is sequential. It tells the devices
//! of the bytes behind it, twice as many each time, up to 8 MiB. So the devices work while
//! this read is verified, decoded and used. Each shard remembers only the ends of the last
//! 8 reads. So several files, or several places of one file, can be read in turns, and
//! each is read ahead. Random reads push out the readers that have been idle longest.
//!
//! What is told of several files at once is told in the order of the devices ([`near_runs`]).

use std::collections::VecDeque;
use std::ops::Range;

use offshoot_vfs::FileId;
use parking_lot::Mutex;

use crate::shards::{SHARDS, shard_of};

/// The length of the first read-ahead, unless the requests are larger, in bytes.
const LEAST_BYTES: u64 = 256 << 10;

/// The longest read-ahead, in bytes.
const MOST_BYTES: u64 = 8 << 20;

/// The readers that a shard remembers. If more take turns, they look like random reads.
const READERS: usize = 8;

/// Ranges of a device that are at most this far apart are told of as one, in bytes: to skip the gap
/// would cost the device more than to read it.
const GAP_BYTES: u64 = 64 << 10;

/// Joins ranges of devices that are near each other, and returns them in the order of the devices
/// and of the places on each.
#[must_use]
pub fn near_runs<D: Copy + Ord>(mut ranges: Vec<(D, Range<u64>)>) -> Vec<(D, Range<u64>)> {
    ranges.sort_unstable_by_key(|(device, range)| (*device, range.start));
    ranges.dedup_by(|(next_device, next), (device, run)| {
        let is_near = next_device == device && next.start <= run.end.saturating_add(GAP_BYTES);
        if is_near {
            run.end = run.end.max(next.end);
        }
        is_near
    });
    ranges
}

/// The last reads of a volume.
#[derive(Default)]
pub struct ReadAhead {
    /// Ordered by the time of the last read.
    shards: [Mutex<VecDeque<SequentialReader>>; SHARDS],
}

/// A possibly sequential reader of a file.
struct SequentialReader {
    file: FileId,
    /// Where the last read ended.
    end: u64,
    /// The end of the range that the devices were told of.
    told: u64,
    /// The length of the last read-ahead, in bytes.
    ahead: u64,
}

impl ReadAhead {
    /// Notes that `range` of `file` is read now, and returns the range to tell the devices of.
    pub fn next(&self, file: FileId, range: &Range<u64>) -> Option<Range<u64>> {
        let mut readers = self.shards[shard_of(file)].lock();
        let mut take = |end| {
            let at = readers.iter().position(|reader| reader.file == file && reader.end == end)?;
            readers.remove(at)
        };
        let (reader, next) = if let Some(mut reader) = take(range.start) {
            let next = reader.next(range);
            (reader, next)
        } else {
            // Reading the same range again makes no second reader.
            let again = take(range.end);
            (
                again.unwrap_or(SequentialReader {
                    file,
                    end: range.end,
                    told: range.end,
                    ahead: 0,
                }),
                None,
            )
        };
        if readers.len() == READERS {
            readers.pop_front();
        }
        readers.push_back(reader);
        next
    }
}

impl SequentialReader {
    /// Goes on with `range`.
    fn next(&mut self, range: &Range<u64>) -> Option<Range<u64>> {
        self.end = range.end;
        // Many small reads share one request to the devices.
        if self.told >= range.end.saturating_add(self.ahead / 2) && self.ahead > 0 {
            return None;
        }
        let from = self.told.max(range.end);
        self.ahead = (2 * self.ahead).max(LEAST_BYTES).max(range.end - range.start).min(MOST_BYTES);
        self.told = range.end.saturating_add(self.ahead).max(from);
        Some(from..self.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { dev: 5, ino: 257 };

    #[test]
    fn near_ranges_of_a_device_are_told_of_as_one() {
        let far = 10 + GAP_BYTES + 1;
        let ranges = vec![(1, far..far + 9), (1, 4..10), (0, 12..14), (1, 0..6), (1, 2..3)];
        assert_eq!(near_runs(ranges), [(0, 12..14), (1, 0..10), (1, far..far + 9)]);
        let touching = vec![(0, 10 + GAP_BYTES..u64::MAX), (0, 0..10), (0, u64::MAX..u64::MAX)];
        assert_eq!(near_runs(touching), [(0, 0..u64::MAX)]);
        assert_eq!(near_runs::<u8>(Vec::new()), []);
    }

    #[test]
    fn what_comes_next_is_told_once_and_in_time() {
        let reads = ReadAhead::default();
        let mut told = Vec::new();
        for at in (0..64 << 20).step_by(64 << 10) {
            let next = reads.next(FILE, &(at..at + (64 << 10)));
            told.extend(next);
            let end = told.last().map_or(0, |range: &Range<u64>| range.end);
            assert!(end <= at + (64 << 10) + MOST_BYTES, "too far at {at}");
            assert!(at == 0 || end >= at + (64 << 10) + LEAST_BYTES / 2, "too late at {at}");
        }
        assert!(told.windows(2).all(|pair| pair[0].end == pair[1].start), "{told:?}");
        assert!(told.len() < 64, "{} times", told.len());
    }

    #[test]
    fn random_reads_are_not_read_ahead() {
        let reads = ReadAhead::default();
        for at in [0, 5, 5, 9, 2, 30, 4, 0, 9, 9] {
            let at = at * 4096;
            assert_eq!(reads.next(FILE, &(at..at + 4096)), None, "at {at}");
        }
        let other = FileId { ino: 258, ..FILE };
        assert_eq!(reads.next(other, &(10 * 4096..11 * 4096)), None, "it is another file");
    }

    /// Each reader reads sequentially, in turns with the others, and is read ahead as if it were
    /// alone.
    fn assert_told(readers: &[(FileId, u64)]) {
        let (together, alone) = (ReadAhead::default(), ReadAhead::default());
        let all_of = |reads: &ReadAhead, &(file, start): &(FileId, u64), at| {
            let at = start + at;
            reads.next(file, &(at..at + (64 << 10)))
        };
        let mut expected = vec![Vec::new(); readers.len()];
        for (reader, told) in readers.iter().zip(&mut expected) {
            told.extend((0..16 << 20).step_by(64 << 10).map(|at| all_of(&alone, reader, at)));
            assert!(told.iter().flatten().count() > 3, "{reader:?} is not read ahead alone");
        }
        for (turn, at) in (0..16 << 20).step_by(64 << 10).enumerate() {
            for (reader, expected) in readers.iter().zip(&expected) {
                assert_eq!(all_of(&together, reader, at), expected[turn], "{reader:?} at {at}");
            }
        }
    }

    #[test]
    fn two_files_of_a_shard_are_read_ahead_in_turns() {
        let same = |file: &FileId| shard_of(*file) == shard_of(FILE);
        let mut others = (258..).map(|ino| FileId { ino, ..FILE }).filter(same);
        assert_told(&[(FILE, 0), (others.next().expect("many"), 0)]);
        let others: Vec<_> = others.take(READERS - 1).map(|file| (file, 4096)).collect();
        assert_told(&[&[(FILE, 0)], &others[..]].concat());
    }

    #[test]
    fn two_places_of_a_file_are_read_ahead_in_turns() {
        assert_told(&[(FILE, 0), (FILE, 1 << 30)]);
    }

    /// The second of two readers causes no second read-ahead, and does not disturb the first.
    #[test]
    fn two_readers_of_the_same_are_told_once() {
        let (reads, alone) = (ReadAhead::default(), ReadAhead::default());
        for at in (0..16 << 20).step_by(64 << 10) {
            let range = at..at + (64 << 10);
            assert_eq!(reads.next(FILE, &range), alone.next(FILE, &range), "at {at}");
            assert_eq!(reads.next(FILE, &range), None, "at {at}, again");
        }
    }

    #[test]
    fn a_shard_remembers_so_many_readers_and_no_more() {
        let reads = ReadAhead::default();
        for at in 0..1000 {
            reads.next(FILE, &(at * 8192..at * 8192 + 4096));
        }
        assert_eq!(reads.shards[shard_of(FILE)].lock().len(), READERS);
    }
}
