//! Sectors of the host's files that are all zeros.
//!
//! Which ranges of a file are holes depends on the host: it reports a range with room and without
//! contents as data as long as clean pages of it are in memory. What must be the same everywhere
//! makes a hole of every sector that is all zeros, and of nothing else.

use std::ops::Range;

/// The unit in which zeros are looked for, in bytes.
pub(crate) const SECTOR_BYTES: usize = 4096;

/// The same for offsets.
pub(crate) const SECTOR: u64 = SECTOR_BYTES as u64;

/// The first run of sectors in `bytes` that are not all zeros; an empty range at the end if there
/// is none. `bytes` begin with a sector, and the last one may be shorter.
pub(crate) fn first_nonzero_run(bytes: &[u8]) -> Range<usize> {
    let is_zero = |sector: &&[u8]| sector.iter().all(|&byte| byte == 0);
    let start: usize = bytes.chunks(SECTOR_BYTES).take_while(is_zero).map(<[u8]>::len).sum();
    let rest = bytes.get(start..).unwrap_or_default();
    let sectors = rest.chunks(SECTOR_BYTES).take_while(|sector| !is_zero(sector));
    start..start + sectors.map(<[u8]>::len).sum::<usize>()
}

/// The sectors that `data`, a range of a file of `size` bytes, lies in. The host's holes may be
/// smaller than a sector. What ends behind the size ends there still.
pub(crate) fn whole_sectors(data: Range<u64>, size: u64) -> Range<u64> {
    let end = data.end.checked_next_multiple_of(SECTOR).unwrap_or(u64::MAX);
    data.start / SECTOR * SECTOR..end.min(size.max(data.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_whole_sectors_that_are_not_all_zeros() {
        let mut bytes = vec![0; 5 * SECTOR_BYTES + 3];
        assert_eq!(first_nonzero_run(&bytes), bytes.len()..bytes.len());
        bytes[SECTOR_BYTES] = 1;
        bytes[3 * SECTOR_BYTES - 1] = 1;
        assert_eq!(first_nonzero_run(&bytes), SECTOR_BYTES..3 * SECTOR_BYTES);
        *bytes.last_mut().expect("there are some") = 1;
        let rest = 2 * SECTOR_BYTES;
        assert_eq!(first_nonzero_run(&bytes[3 * SECTOR_BYTES..]), rest..rest + 3);
        assert_eq!(first_nonzero_run(&[]), 0..0);
    }

    #[test]
    fn data_is_extended_to_whole_sectors_of_the_file() {
        assert_eq!(whole_sectors(1000..5000, 10_000), 0..8192);
        assert_eq!(whole_sectors(5000..8193, 9000), 4096..9000);
        assert_eq!(whole_sectors(0..9500, 9000), 0..9500);
        assert_eq!(whole_sectors(0..u64::MAX, 0), 0..u64::MAX);
    }
}
