//! Sizes of records, and how much of the ring a checkpoint takes.

use offshoot_xfs_format::log::op::{OP_HEADER, XfsTransactionHeader};
use offshoot_xfs_format::log::record::{BUFFER_MAX, header_count, padded_len};
use offshoot_xfs_format::log::{BLOCK, XfsLogRing};

/// The version of the log that we write.
pub(super) const LOG_VERSION: u32 = 2;

/// The least log buffer, in bytes: that of the kernel's option `logbsize=16k`.
const LEAST_BUFFER: u32 = 16 << 10;

/// The log buffer of a small log, in bytes.
const SMALL_BUFFER: u32 = 32 << 10;

/// From this size of the log on, in bytes, log buffers are as large as can be.
const LARGE_LOG: u64 = 32 << 20;

/// What a checkpoint has besides its items: a start op, the transaction header, a commit op.
const ENVELOPE: u64 = (3 * OP_HEADER + XfsTransactionHeader::LEN) as u64;

/// What a full record may leave unused, because an op header and 4 bytes do not fit, and what it
/// takes to split a region: one more op header.
const SPLIT: u64 = (OP_HEADER + 3 + OP_HEADER) as u64;

/// How many empty checkpoints are kept free: the one that tells a newer tail when all else is
/// taken, one that may still be on its way, and the unmount record.
const SET_ASIDE: u64 = 4;

/// The sizes of a log.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordSizes {
    /// The bytes of the ring.
    pub(super) ring: u64,
    /// The bytes of a log buffer, as headers name it.
    pub(super) buffer: u32,
    /// The bytes of the headers of a record.
    pub(super) headers: usize,
    /// The bytes of the longest body.
    pub(super) body: usize,
    /// The bytes that each record fills a multiple of.
    pub(super) unit: usize,
}

impl RecordSizes {
    /// The sizes of a log with buffers of `buffer` bytes, or of the usual ones. Recovery takes all
    /// records from the tail to the head as those of one size of buffers. So a log that has old
    /// records to keep goes on with theirs.
    pub(super) fn new(ring: XfsLogRing, unit: usize, buffer: Option<u32>) -> Self {
        let ring = u64::from(ring.blocks()) * BLOCK as u64;
        let usual = if ring < LARGE_LOG { SMALL_BUFFER } else { BUFFER_MAX };
        let least = u32::try_from(unit).unwrap_or(BUFFER_MAX).max(LEAST_BUFFER);
        let buffer = buffer.unwrap_or(usual).clamp(least.min(BUFFER_MAX), BUFFER_MAX);
        let headers = header_count(LOG_VERSION, buffer) as usize * BLOCK;
        let whole = buffer as usize / unit * unit;
        Self { ring, buffer, headers, body: whole.saturating_sub(headers), unit }
    }

    /// The basic blocks of the headers and a body of `used` bytes.
    pub(super) fn record_len(&self, used: usize) -> usize {
        let headers = u32::try_from(self.headers / BLOCK).unwrap_or(1);
        padded_len(used, headers, self.unit)
    }

    /// The most bytes of the ring that a checkpoint takes whose items and their op headers have
    /// `payload` bytes.
    ///
    /// All records but the last two are full. The last of the body and the one with the commit op,
    /// which may be alone, are padded. For example, with buffers of 32 KiB and no unit, items of
    /// 100,000 bytes take at most 103,744 bytes, 5 headers among them.
    pub(super) fn checkpoint(&self, payload: u64) -> u64 {
        let payload = payload + ENVELOPE;
        let room = (self.body as u64).saturating_sub(SPLIT).max(1);
        let records = payload.div_ceil(room);
        payload + records * SPLIT + (records + 1) * self.headers as u64 + 2 * self.unit as u64
    }

    /// The bytes of a checkpoint without items: the least that a record has.
    pub(super) fn empty_checkpoint(&self) -> u64 {
        (self.headers + self.record_len(BLOCK)) as u64
    }

    /// By how much the tail has to move on so that `wanted` bytes come free, when it has moved by
    /// `untold` bytes that no record tells. The record that tells them takes an empty checkpoint.
    /// For example, 100 bytes are wanted, and 400 are untold: a record of 1024 bytes that tells
    /// them frees nothing, so the tail has to move by 724 bytes first.
    pub(super) fn tail_move(&self, wanted: u64, untold: u64) -> u64 {
        if wanted == 0 { 0 } else { (wanted + self.empty_checkpoint()).saturating_sub(untold) }
    }

    /// What transactions may take of the ring together.
    pub(super) fn capacity(&self) -> u64 {
        self.ring.saturating_sub(SET_ASIDE * self.empty_checkpoint())
    }

    /// The most that one may ask for: an idle log holds the last records too.
    pub(super) fn most(&self) -> u64 {
        self.capacity().saturating_sub(2 * self.checkpoint(0))
    }
}
