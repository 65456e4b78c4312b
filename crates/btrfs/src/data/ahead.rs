//! Reading ahead: who reads a file from one end to the other will want what comes next.
//!
//! A read that begins where the last one of its file ended tells the devices of what lies behind it, twice as far each time up to
//! [`MOST_BYTES`]. So they work while what is here is verified, decoded and used. Nothing is kept but where the last
//! reads were: of as many files as there are shards, and who reads two files of one shard in turns is not told
//! apart from who jumps about.

use std::ops::Range;

use offshoot_vfs::FileId;
use parking_lot::Mutex;

use crate::inode::{SHARDS, shard_of};

/// What is read ahead first, if the requests are not larger, in bytes.
const LEAST_BYTES: u64 = 256 << 10;

/// What is read ahead at the most, in bytes.
const MOST_BYTES: u64 = 8 << 20;

/// The last reads of a volume.
#[derive(Default)]
pub(crate) struct ReadAhead {
    last: [Mutex<Option<Last>>; SHARDS],
}

/// The last read of a file.
struct Last {
    file: FileId,
    /// Where it ended.
    end: u64,
    /// How far the devices were told.
    told: u64,
    /// How far ahead that was, in bytes.
    ahead: u64,
}

impl ReadAhead {
    /// Notes that `range` of `file` is read now, and gives what the devices are to be told of.
    pub(super) fn next(&self, file: FileId, range: &Range<u64>) -> Option<Range<u64>> {
        let mut last = self.last[shard_of(file)].lock();
        let Some(known) = last.as_mut().filter(|l| l.file == file && l.end == range.start) else {
            *last = Some(Last { file, end: range.end, told: range.end, ahead: 0 });
            return None;
        };
        known.end = range.end;
        // Not for every request: many small ones are one for the devices.
        if known.told >= range.end.saturating_add(known.ahead / 2) && known.ahead > 0 {
            return None;
        }
        let from = known.told.max(range.end);
        known.ahead =
            (2 * known.ahead).max(LEAST_BYTES).max(range.end - range.start).min(MOST_BYTES);
        known.told = range.end.saturating_add(known.ahead).max(from);
        Some(from..known.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { dev: 5, ino: 257 };

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
    fn who_jumps_about_is_told_of_nothing() {
        let reads = ReadAhead::default();
        for at in [0, 5, 1, 9, 2, 30, 4] {
            let at = at * 4096;
            assert_eq!(reads.next(FILE, &(at..at + 4096)), None);
        }
        let other = FileId { ino: 258, ..FILE };
        assert_eq!(reads.next(other, &(5 * 4096..6 * 4096)), None, "it is another file");
    }
}
