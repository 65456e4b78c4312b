//! Compares the content of one regular file: holes, and the bytes through every way to read them.
//!
//! Small files are compared as a whole. A file larger than [`WINDOW_BYTES`] is mostly hole in a
//! test. Of such a file, the data ranges and a margin around each are compared, in pieces of that
//! size.

use std::ops::Range;

use offshoot_vfs::{Error, FileId, FileSystem, Result, Structure};

use super::{Aspect, ComparedPair, ComparisonWalk};

/// The most content that is in memory at once, for each side, in bytes.
const WINDOW_BYTES: u64 = 8 << 20;

/// How much of the hole next to data is read too, in bytes.
const MARGIN_BYTES: u64 = 5000;

impl ComparisonWalk<'_> {
    pub(super) fn content(&mut self, pair: &ComparedPair) {
        let size = match self.judge.attr(pair.judge) {
            Ok(attr) => attr.size,
            Err(error) => return self.differs(pair, &format!("the judge fails: {error}")),
        };
        let ranges = match data_ranges(self.judge, pair.judge) {
            Ok(ranges) => ranges,
            Err(error) => return self.differs(pair, &format!("the judge fails: {error}")),
        };
        if self.compare.includes(Aspect::Holes) {
            self.holes(pair, size, &ranges);
        }
        for window in windows(size, &ranges) {
            if let Err(error) = self.window(pair, &window, &ranges) {
                self.differs(pair, &format!("content at {window:?}: {error}"));
            }
        }
        self.end_of_file(pair, size);
    }

    fn holes(&mut self, pair: &ComparedPair, size: u64, judge: &Vec<Range<u64>>) {
        match data_ranges(self.ours, pair.ours) {
            Ok(ours) => self.same(pair, "data ranges", &ours, judge),
            Err(error) => self.differs(pair, &format!("data ranges: {error}")),
        }
        for _ in 0..3 {
            let offset = self.random.below(size + 1);
            let ours = self.ours.next_data(pair.ours, offset);
            let theirs = self.judge.next_data(pair.judge, offset);
            self.same_results(pair, &format!("data from {offset} on"), ours, theirs);
        }
    }

    fn window(
        &mut self,
        pair: &ComparedPair,
        window: &Range<u64>,
        ranges: &[Range<u64>],
    ) -> Result<()> {
        let len = usize::try_from(window.end - window.start).expect("a window fits memory");
        self.outcome.bytes += len as u64;
        let mut expected = vec![0; len];
        let count = self.judge.read(pair.judge, window.start, &mut expected)?;
        if count != len {
            return Err(Error::corrupt(
                Structure::Data,
                format!("the judge reads {count} of {len} bytes"),
            ));
        }
        self.read_in_steps(pair, window, &expected)?;
        let mut parts = vec![window.clone()];
        if len > 1 {
            let start = window.start + self.random.below(len as u64);
            let end = start + self.random.below(window.end - start + 1);
            parts.push(start..end);
        }
        for part in parts {
            let pieces = self.visited_data(pair, part, window, &expected)?;
            // A copier would write out a hole that is shown as zeros.
            let in_data = |piece: &Range<u64>| {
                ranges.iter().any(|data| data.start <= piece.start && piece.end <= data.end)
            };
            if self.compare.includes(Aspect::Holes)
                && let Some(piece) = pieces.iter().find(|piece| !in_data(piece))
            {
                self.differs(pair, &format!("read_data shows {piece:?}, which is partly hole"));
            }
        }
        Ok(())
    }

    /// Calls `read` with sizes and offsets that are not multiples of a block.
    fn read_in_steps(
        &mut self,
        pair: &ComparedPair,
        window: &Range<u64>,
        expected: &[u8],
    ) -> Result<()> {
        const STEPS: [usize; 7] = [1, 4095, 70_001, 4096, 131_072, 13, 1_000_003];
        let mut at = 0;
        let mut steps =
            STEPS.iter().cycle().skip(usize::try_from(self.random.below(7)).unwrap_or(0));
        while at < expected.len() {
            let step = steps.next().copied().unwrap_or(1).min(expected.len() - at);
            // The buffer is filled with a pattern, so that bytes that were never written show.
            let mut buf = vec![0xa5; step];
            let count = self.ours.read(pair.ours, window.start + at as u64, &mut buf)?;
            if count != step || buf != expected[at..at + step] {
                let place = first_difference(&buf[..count], &expected[at..at + step]);
                self.differs(
                    pair,
                    &format!(
                        "read of {step} bytes at {} gave {count}, differing from byte {place} on",
                        window.start + at as u64
                    ),
                );
                return Ok(());
            }
            at += step;
        }
        Ok(())
    }

    /// Calls `read_data` of `range`, which lies in `window`, and compares with the bytes of the
    /// window, `expected`. Returns the pieces that it showed.
    fn visited_data(
        &mut self,
        pair: &ComparedPair,
        range: Range<u64>,
        window: &Range<u64>,
        expected: &[u8],
    ) -> Result<Vec<Range<u64>>> {
        let offset_in = |at: u64| usize::try_from(at - window.start).expect("inside the window");
        let mut painted = vec![0; expected.len()];
        let mut problem = None;
        let mut pieces = Vec::new();
        let mut reached = range.start;
        self.ours.read_data(pair.ours, range.clone(), &mut |offset, bytes| {
            let end = offset + bytes.len() as u64;
            if offset < reached || end > range.end || bytes.is_empty() {
                problem.get_or_insert(offset..end);
            } else {
                painted[offset_in(offset)..offset_in(end)].copy_from_slice(bytes);
                reached = end;
                pieces.push(offset..end);
            }
            Ok(())
        })?;
        if let Some(piece) = problem {
            self.differs(pair, &format!("read_data of {range:?} shows the piece {piece:?}"));
        }
        let (from, to) = (offset_in(range.start), offset_in(range.end));
        if painted[from..to] != expected[from..to] {
            let place = first_difference(&painted[from..to], &expected[from..to]);
            self.differs(
                pair,
                &format!(
                    "read_data of {range:?} differs from byte {} on",
                    range.start + place as u64
                ),
            );
        }
        Ok(pieces)
    }

    /// Checks that a read at the end of the file is short, and that one behind it returns 0.
    fn end_of_file(&mut self, pair: &ComparedPair, size: u64) {
        let mut buf = [0; 64];
        let back = size.min(10);
        let largest = i64::MAX.unsigned_abs();
        let counts = [size - back, size, largest.min(size + 5000)].map(|offset| {
            // System calls refuse to read at offsets that no file can have.
            let len = usize::try_from(largest - offset).map_or(buf.len(), |len| len.min(buf.len()));
            self.ours.read(pair.ours, offset, &mut buf[..len]).map_err(|error| error.to_string())
        });
        let back = usize::try_from(back).expect("at most 10");
        self.same(pair, "counts at the end of the file", &counts, &[Ok(back), Ok(0), Ok(0)]);
        let after = self.ours.next_data(pair.ours, size).map_err(|error| error.to_string());
        self.same(pair, "data behind the end", &after, &Ok(None));
    }
}

fn first_difference(ours: &[u8], expected: &[u8]) -> usize {
    ours.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(ours.len())
}

/// All data ranges of a file.
pub(crate) fn data_ranges(fs: &dyn FileSystem, file: FileId) -> Result<Vec<Range<u64>>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while let Some(range) = fs.next_data(file, at)? {
        if range.is_empty() || range.start < at {
            return Err(Error::corrupt(Structure::DataRanges, format!("{range:?} after {at}")));
        }
        at = range.end;
        ranges.push(range);
    }
    Ok(ranges)
}

/// The parts of a file that are compared.
fn windows(size: u64, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut wide: Vec<Range<u64>> = Vec::new();
    if size <= WINDOW_BYTES {
        wide.push(0..size);
    } else {
        let ends = [0..0, size..size];
        let mut all: Vec<_> = ranges.iter().chain(&ends).cloned().collect();
        all.sort_by_key(|range| range.start);
        for range in all {
            let start = range.start.saturating_sub(MARGIN_BYTES);
            let end = range.end.saturating_add(MARGIN_BYTES).min(size);
            match wide.last_mut() {
                Some(last) if last.end >= start => last.end = last.end.max(end),
                _ => wide.push(start..end),
            }
        }
    }
    let mut windows = Vec::new();
    for mut range in wide {
        while range.start < range.end {
            let end = range.end.min(range.start + WINDOW_BYTES);
            windows.push(range.start..end);
            range.start = end;
        }
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_the_data_and_its_margins() {
        assert_eq!(windows(0, &[]), []);
        assert_eq!(windows(100, &[]), vec![Range { start: 0, end: 100 }]);
        let size = 1 << 40;
        let data = Range { start: 1 << 30, end: (1 << 30) + 4096 };
        let windows = windows(size, &[data]);
        let (start, end) = ((1 << 30) - 5000, (1 << 30) + 4096 + 5000);
        assert_eq!(windows, [0..5000, start..end, size - 5000..size]);
    }
}
