//! Decoded extents that are kept for readers that want a part of one.
//!
//! However little of a compressed extent is wanted, it is read, verified and decoded as a whole. A
//! reader that asks for 4 KiB at a time would decode an extent of 128 KiB 32 times. So the volume
//! keeps what it decoded, within a bound, when a request wants only a part of what a file has in
//! the extent. Requests for all of it neither use nor fill this cache: large sequential reads leave
//! it to the others. Readers that want parts of one extent at the same time decode it once.
//!
//! The bytes at an address stay the same until a commit frees them, and a commit counts the epoch
//! up before it frees anything. So the key has the address and the epoch:
//!
//! 1. A reader takes the epoch before it looks for the extent.
//! 2. Bytes go into the cache only if the epoch is still the same after they were read.
//! 3. Bytes from the cache count only if the epoch is still the same after they were found. Then
//!    the extent was found in that epoch too.
//!
//! Example: an extent at 5 MiB is kept in epoch 8. The file drops it, a commit makes the epoch 9
//! and frees it, and another extent gets the address. A reader that finds this one begins in epoch
//! 9 and misses. No reader finds entries of earlier epochs any more, so they are evicted soon.
//!
//! The key also has what the bytes depend on beside the address, because two items of a damaged
//! tree may say different things about one extent. Bytes that were not verified are kept apart from
//! those that were: a file without checksums may share an extent with a file that has them.

use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::MAX_COMPRESSED_EXTENT;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

/// What the decoded bytes of an extent depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct DecodedKey {
    pub(super) extent: Logical,
    pub(super) epoch: u64,
    pub(super) disk_bytes: u64,
    pub(super) ram_bytes: u64,
    pub(super) compression: Compression,
    pub(super) is_verified: bool,
}

/// Weighs an extent by its decoded bytes.
#[derive(Clone)]
struct ByDecodedBytes;

impl Weighter<DecodedKey, Arc<[u8]>> for ByDecodedBytes {
    fn weight(&self, _: &DecodedKey, bytes: &Arc<[u8]>) -> u64 {
        bytes.len() as u64
    }
}

/// The decoded extents of a volume, within a budget of bytes.
pub(crate) struct DecodedExtents(Cache<DecodedKey, Arc<[u8]>, ByDecodedBytes>);

impl DecodedExtents {
    /// A cache of at most `budget_bytes`.
    pub(crate) fn new(budget_bytes: u64) -> Self {
        let extents = usize::try_from(budget_bytes / MAX_COMPRESSED_EXTENT).unwrap_or(usize::MAX);
        Self(Cache::with_weighter(extents, budget_bytes, ByDecodedBytes))
    }

    /// The decoded bytes of `key`, from the cache or else from `decode`. A thread that finds
    /// another one decoding them waits for it. `decode` may wait for devices and for locks of
    /// readers.
    pub(super) fn get_or_decode<E>(
        &self,
        key: DecodedKey,
        decode: impl FnOnce() -> Result<Arc<[u8]>, E>,
    ) -> Result<Arc<[u8]>, E> {
        self.0.get_or_insert_with(&key, decode)
    }
}
