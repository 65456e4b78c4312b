//! The contents of the files of benchmarks.
//!
//! ```text
//! sector 0      | version | file | offset | random bytes     |
//! sector 1      | version | file | offset | text             |
//! sector 2      | version | file | offset | random bytes     |
//! ...
//! ```
//!
//! Version, number of the file and offset are 64-bit little-endian numbers. So every sector differs
//! from all others, and the reader can check that it read the right one.

use offshoot_testkit::random::Random;

use crate::Result;

/// The size of a random request, and of a stretch of text or of random bytes, in bytes.
pub(crate) const SECTOR: usize = 4096;

/// The bytes behind the stamps repeat after this many bytes. That is far more than the 128 KiB that
/// are compressed at once.
const POOL_BYTES: usize = 8 << 20;

/// The length of version, file and offset at the start of a sector, in bytes.
const STAMP: usize = 24;

/// The contents of file `n + 1` start this many bytes further on in the pool than those of file
/// `n`.
const FILE_SHIFT: usize = 1 << 20;

/// The contents of files: version 1 is the first write, version 2 overwrites it.
pub(crate) struct VersionedContent(Vec<u8>);

impl VersionedContent {
    /// The contents that follow from `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut pool = Vec::with_capacity(POOL_BYTES);
        while pool.len() < POOL_BYTES {
            pool.extend(random.bytes(SECTOR));
            pool.extend(random.text(SECTOR));
        }
        Self(pool)
    }

    /// Fills `buf`, a number of whole sectors, with the contents of `file` at `offset` in this
    /// version.
    pub(crate) fn fill(&self, file: usize, offset: u64, version: u64, buf: &mut [u8]) {
        let at = usize::try_from(offset % POOL_BYTES as u64).expect("below the length");
        let mut at = (at + file * FILE_SHIFT) % POOL_BYTES;
        for (number, sector) in (0..).zip(buf.chunks_exact_mut(SECTOR)) {
            sector.copy_from_slice(&self.0[at..at + SECTOR]);
            sector[..STAMP].copy_from_slice(&stamp(file, offset + number * SECTOR as u64, version));
            at = (at + SECTOR) % POOL_BYTES;
        }
    }
}

/// The first bytes of a sector.
fn stamp(file: usize, offset: u64, version: u64) -> [u8; STAMP] {
    let mut stamp = [0; STAMP];
    for (place, number) in stamp.chunks_exact_mut(8).zip([version, file as u64, offset]) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    stamp
}

/// Checks that all sectors of `buf` are of version 1, of `file`, and from `offset` on.
pub(crate) fn verify(file: usize, offset: u64, buf: &[u8]) -> Result {
    for (number, sector) in (0..).zip(buf.chunks_exact(SECTOR)) {
        let at = offset + number * SECTOR as u64;
        if sector[..STAMP] != stamp(file, at, 1) {
            return Err(format!(
                "the sector at {at} of file {file} holds something else than was written"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_of_another_file_place_or_version_are_noticed() {
        let content = VersionedContent::new(1);
        let mut buf = vec![0; 4 * SECTOR];
        let filled = |file, offset, version, buf: &mut [u8]| {
            content.fill(file, offset, version, buf);
            verify(1, 8 << 20, buf)
        };
        assert_eq!(filled(1, 8 << 20, 1, &mut buf), Ok(()));
        for (file, offset, version) in [(2, 8 << 20, 1), (1, 16 << 20, 1), (1, 8 << 20, 2)] {
            assert!(filled(file, offset, version, &mut buf).is_err(), "{file} {offset} {version}");
        }
    }
}
