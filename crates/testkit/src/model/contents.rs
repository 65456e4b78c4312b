//! The bytes of a file, sector by sector.
//!
//! A written sector is kept as a whole; a missing one is a hole. So a byte far behind the end costs
//! one sector, and the model knows sector by sector where data is, as filesystems count it. The
//! size of the file is kept with its attributes; bytes behind it in the last sector are zeros.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The unit in which data is kept, in bytes.
pub(super) const SECTOR: u64 = 4096;

/// The largest file, in bytes: the offsets of system calls are signed.
pub(super) const MAX_SIZE: u64 = i64::MAX.cast_unsigned();

/// The written sectors of a file, by number, and the numbers of the preallocated sectors.
#[derive(Clone, Debug, Default)]
pub(super) struct SectorContents {
    sectors: BTreeMap<u64, Box<[u8]>>,
    preallocated: BTreeSet<u64>,
}

/// Splits a range of bytes by sectors. Each part is a triple: the number of the sector, the offset
/// of the part in the sector, and the part of the range.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let within = usize::try_from(at % SECTOR).expect("below a sector");
        let next = len.min(done + usize::try_from(SECTOR).expect("small") - within);
        let part = (done < next).then_some((at / SECTOR, within, done..next));
        done = next;
        part
    })
}

impl SectorContents {
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        for (sector, within, part) in parts(offset, data.len()) {
            let bytes = self.sectors.entry(sector).or_insert_with(|| vec![0; 4096].into());
            self.preallocated.remove(&sector);
            bytes[within..][..part.len()].copy_from_slice(&data[part]);
        }
    }

    /// Fills `buf` with the bytes from `offset` on. Holes read as zeros.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) {
        for (sector, within, part) in parts(offset, buf.len()) {
            match self.sectors.get(&sector) {
                Some(bytes) => {
                    let len = part.len();
                    buf[part].copy_from_slice(&bytes[within..][..len]);
                }
                None => buf[part].fill(0),
            }
        }
    }

    /// Preallocates the sectors of a range that have no space.
    pub(super) fn preallocate(&mut self, range: Range<u64>) {
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        let is_missing = |sector: &u64| !self.sectors.contains_key(sector);
        self.preallocated.extend(sectors.filter(is_missing));
    }

    /// The space of the written and preallocated sectors, in bytes.
    pub(super) fn allocated_bytes(&self) -> u64 {
        (self.sectors.len() + self.preallocated.len()) as u64 * SECTOR
    }

    /// Drops everything from `size` on.
    pub(super) fn cut(&mut self, size: u64) {
        self.sectors.split_off(&size.div_ceil(SECTOR));
        self.preallocated.split_off(&size.div_ceil(SECTOR));
        if let Some(last) = self.sectors.get_mut(&(size / SECTOR)) {
            last[usize::try_from(size % SECTOR).expect("below a sector")..].fill(0);
        }
    }

    /// Makes a range a hole. If a sector is only partly in the range and was written, it stays
    /// data, and the part reads as zeros.
    pub(super) fn punch(&mut self, range: Range<u64>) {
        let len = usize::try_from(range.end - range.start).expect("ranges of the model are small");
        for (sector, within, part) in parts(range.start, len) {
            if part.len() == 4096 {
                self.sectors.remove(&sector);
                self.preallocated.remove(&sector);
            } else if let Some(bytes) = self.sectors.get_mut(&sector) {
                bytes[within..][..part.len()].fill(0);
            }
        }
    }

    /// Zeros the written sectors of a range.
    pub(super) fn zero(&mut self, range: Range<u64>) {
        let len = usize::try_from(range.end - range.start).expect("ranges of the model are small");
        for (sector, within, part) in parts(range.start, len) {
            if let Some(bytes) = self.sectors.get_mut(&sector) {
                bytes[within..][..part.len()].fill(0);
            }
        }
    }

    /// Moves everything from `from` on to `to`; both are multiples of the sector size. If `to` is
    /// smaller, the sectors in between are removed; if it is larger, they become a hole.
    pub(super) fn shift(&mut self, from: u64, to: u64) {
        let new = |at: u64| at + to / SECTOR - from / SECTOR;
        let moved = self.sectors.split_off(&(from / SECTOR));
        self.sectors.split_off(&(to / SECTOR));
        self.sectors.extend(moved.into_iter().map(|(at, bytes)| (new(at), bytes)));
        let moved = self.preallocated.split_off(&(from / SECTOR));
        self.preallocated.split_off(&(to / SECTOR));
        self.preallocated.extend(moved.into_iter().map(new));
    }

    /// Copies the sectors of a range, renumbered so that they begin at `to`. Both are aligned to
    /// sectors.
    pub(super) fn moved(&self, range: Range<u64>, to: u64) -> Self {
        let sectors = self.sectors.range(range.start / SECTOR..range.end.div_ceil(SECTOR));
        let new = |at: u64| at - range.start / SECTOR + to / SECTOR;
        let sectors = sectors.map(|(&at, bytes)| (new(at), bytes.clone())).collect();
        Self { sectors, preallocated: BTreeSet::new() }
    }

    /// Replaces the sectors of a range, which is aligned to sectors.
    pub(super) fn replace(&mut self, range: Range<u64>, by: Self) {
        let replaced = range.start / SECTOR..range.end.div_ceil(SECTOR);
        self.sectors.retain(|at, _| !replaced.contains(at));
        self.preallocated.retain(|at| !replaced.contains(at));
        self.sectors.extend(by.sectors);
    }

    /// The first run of data at or after `offset` of a file of `size` bytes.
    pub(super) fn next_data(&self, offset: u64, size: u64) -> Option<Range<u64>> {
        let mut sectors = self.sectors.range(offset / SECTOR..).map(|(&sector, _)| sector);
        let first = sectors.next()?;
        let mut end = first + 1;
        for sector in sectors.take_while(|&sector| sector * SECTOR < size) {
            if sector != end {
                break;
            }
            end += 1;
        }
        let found = (first * SECTOR).max(offset)..(end * SECTOR).min(size);
        (!found.is_empty()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(contents: &SectorContents, offset: u64, len: usize) -> Vec<u8> {
        let mut buf = vec![0xa5; len];
        contents.read(offset, &mut buf);
        buf
    }

    #[test]
    fn what_is_written_is_read_and_the_rest_is_zeros() {
        let mut contents = SectorContents::default();
        contents.write(4094, b"abcd");
        contents.write(1 << 40, b"far");
        assert_eq!(bytes(&contents, 4093, 6), b"\0abcd\0");
        assert_eq!(bytes(&contents, (1 << 40) - 1, 5), b"\0far\0");
        assert_eq!(contents.sectors.len(), 3);
    }

    #[test]
    fn what_was_cut_off_does_not_come_back() {
        let mut contents = SectorContents::default();
        contents.write(4000, &[7; 200]);
        contents.cut(4050);
        assert_eq!(bytes(&contents, 4049, 3), [7, 0, 0]);
        assert_eq!(bytes(&contents, 4096, 2), [0, 0]);
        contents.cut(0);
        assert!(contents.sectors.is_empty());
    }

    #[test]
    fn space_is_there_until_it_is_written_or_given_back() {
        let mut contents = SectorContents::default();
        contents.write(0, b"x");
        contents.preallocate(0..5 * SECTOR);
        assert_eq!(contents.allocated_bytes(), 5 * SECTOR);
        contents.write(SECTOR, b"y");
        contents.punch(SECTOR..3 * SECTOR);
        assert_eq!(contents.allocated_bytes(), 3 * SECTOR);
        contents.cut(SECTOR);
        assert_eq!((contents.allocated_bytes(), contents.sectors.len()), (SECTOR, 1));
    }

    #[test]
    fn data_is_known_to_the_sector_and_ends_with_the_file() {
        let mut contents = SectorContents::default();
        contents.write(5000, b"x");
        contents.write(8192, b"y");
        assert_eq!(contents.next_data(0, 10_000), Some(4096..10_000));
        assert_eq!(contents.next_data(6000, 20_000), Some(6000..12_288));
        assert_eq!(contents.next_data(12_288, 20_000), None);
        assert_eq!(contents.next_data(0, 0), None);
    }
}
