//! What the files of the benchmark hold.
//!
//! ```text
//! sector 0      | version | offset | random bytes     |
//! sector 1      | version | offset | text             |
//! sector 2      | version | offset | random bytes     |
//! ...
//! ```
//!
//! Offset and version are 64-bit little-endian: every sector is another one, and who reads knows which.

use offshoot_testkit::random::Random;

use crate::Result;

/// The unit of random requests, and of what is text or random, in bytes.
pub(super) const SECTOR: usize = 4096;

/// The rest of the sectors repeats after so many bytes, which is far longer than what is compressed at once.
const POOL_BYTES: usize = 8 << 20;

/// What two files have in common moves by so much, in bytes.
const FILE_SHIFT: usize = 1 << 20;

/// What files hold that were written once (version 1) or written over (2).
pub(super) struct Content(Vec<u8>);

impl Content {
    /// That of this seed.
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut pool = Vec::with_capacity(POOL_BYTES);
        while pool.len() < POOL_BYTES {
            pool.extend(random.bytes(SECTOR));
            pool.extend(random.text(SECTOR));
        }
        Self(pool)
    }

    /// Fills `buf`, whole sectors, with what `file` has at `offset` in this version.
    pub(super) fn fill(&self, file: usize, offset: u64, version: u64, buf: &mut [u8]) {
        let at = usize::try_from(offset % POOL_BYTES as u64).expect("below the length");
        let mut at = (at + file * FILE_SHIFT) % POOL_BYTES;
        for (number, sector) in (0..).zip(buf.chunks_exact_mut(SECTOR)) {
            sector.copy_from_slice(&self.0[at..at + SECTOR]);
            sector[..16].copy_from_slice(&stamp(offset + number * SECTOR as u64, version));
            at = (at + SECTOR) % POOL_BYTES;
        }
    }
}

/// What a sector begins with.
fn stamp(offset: u64, version: u64) -> [u8; 16] {
    let mut stamp = [0; 16];
    stamp[..8].copy_from_slice(&version.to_le_bytes());
    stamp[8..].copy_from_slice(&offset.to_le_bytes());
    stamp
}

/// Whether all sectors of `buf` are those of version 1 that belong at `offset`.
pub(super) fn verify(offset: u64, buf: &[u8]) -> Result {
    for (number, sector) in (0..).zip(buf.chunks_exact(SECTOR)) {
        let at = offset + number * SECTOR as u64;
        if sector[..16] != stamp(at, 1) {
            return Err(format!("the sector at {at} holds something else than was written"));
        }
    }
    Ok(())
}
