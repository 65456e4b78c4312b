//! Shards of tables, so that threads at different files take different locks.

use offshoot_vfs::FileId;

/// Scatters numbers (Fibonacci hashing): neighbours get results far apart, all below 2^32.
#[inline]
#[must_use]
pub fn scatter(number: u64) -> usize {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize
}

/// The number of shards of a table of inodes, a power of two.
pub const SHARDS: usize = 16;

/// The shard that `file` is in.
#[inline]
#[must_use]
pub fn shard_of(file: FileId) -> usize {
    scatter(file.ino ^ file.dev) & (SHARDS - 1)
}
