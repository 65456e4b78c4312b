//! What the primary superblock says of the last state of a volume that was stored.

use std::ops::Range;

use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};

/// Where the primary superblock is on a device: every writer of the volume changes it.
pub(crate) const PRIMARY_SUPERBLOCK: Range<u64> =
    SUPERBLOCK_OFFSETS[0]..SUPERBLOCK_OFFSETS[0] + SUPERBLOCK_SIZE as u64;

/// Describes the state behind the superblock in `bytes`.
pub(crate) fn last_stored(bytes: &[u8]) -> String {
    match Superblock::parse(bytes, PRIMARY_SUPERBLOCK.start) {
        Ok(superblock) if superblock.has_pending_log() => {
            format!("the commit of generation {} and the fsyncs after it", superblock.generation)
        }
        Ok(superblock) => format!("the commit of generation {}", superblock.generation),
        Err(fault) => format!("a commit that is not known ({fault})"),
    }
}
