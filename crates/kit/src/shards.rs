//! Shards of tables of files, so that threads at different files take different locks.

use offshoot_vfs::FileId;

/// The number of shards of a table of inodes, a power of two.
pub const SHARDS: usize = 16;

/// The shard that `file` is in.
#[inline]
#[must_use]
pub fn shard_of(file: FileId) -> usize {
    let spread = (file.ino ^ file.dev).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    spread as usize & (SHARDS - 1)
}
