//! The head and the tail of the log: where the valid part of the ring ends, and where recovery
//! begins.
//!
//! The search is exact in one respect: what it calls valid was written completely. A crash may have
//! torn the last writes, up to [`IN_FLIGHT_RECORDS`] records in any order; the log ends before the
//! first one that is torn. Damage before those is no trace of a crash, and an error.

use offshoot_vfs::Malformed;
use uuid::Uuid;

use super::op::{self, XfsOpFlags};
use super::record::{self, XfsLogChecksum, XfsLogRecord};
use super::ring::IN_FLIGHT;
use super::{BLOCK, BLOCK_BYTES, XfsLogRing, bad_record};
use crate::Lsn;

/// The records that can be in flight at once, and torn in any order.
pub const IN_FLIGHT_RECORDS: u32 = 8;

/// The blocks that a search reads at once.
const STRIDE: u32 = 64;

/// The blocks that show whether a log was zeroed, roundly.
const MOST_SAMPLES: u32 = 256;

/// The valid part of the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsLogEnds {
    /// Where the next record goes.
    pub head: Lsn,
    /// The record that recovery begins with; the head in a clean log.
    pub tail: Lsn,
    /// Whether nothing is to be recovered: the volume was unmounted, or its log is zeroed.
    pub is_clean: bool,
    /// The last valid record; none in a log that was never written.
    pub last: Option<XfsLogRecord>,
    /// Whether torn records lie at the head.
    pub is_torn: bool,
}

/// A reader of blocks of the ring: fills a buffer from a block on, never over the end of the ring.
pub trait ReadLog {
    /// Why reading fails.
    type Error: From<Malformed>;

    /// Fills `buffer` from block `block` of the ring on.
    ///
    /// # Errors
    /// Those of the device.
    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), Self::Error>;
}

impl<F: FnMut(u32, &mut [u8]) -> Result<(), E>, E: From<Malformed>> ReadLog for F {
    type Error = E;

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> Result<(), E> {
        self(block, buffer)
    }
}

/// Reads the record at `at` into `buffer`, still packed. The outer error is that of `log`, the
/// inner one says why there is no such record.
///
/// # Errors
/// Those of `log`.
pub fn read_record<L: ReadLog>(
    ring: XfsLogRing,
    at: Lsn,
    log: &mut L,
    buffer: &mut Vec<u8>,
) -> Result<Result<(XfsLogRecord, XfsLogChecksum), Malformed>, L::Error> {
    read_wrapped(ring, at, 1, log, buffer)?;
    let record = match XfsLogRecord::parse(buffer) {
        Ok(record) => record,
        Err(problem) => return Ok(Err(problem)),
    };
    if record.lsn != at {
        return Ok(Err(bad_record(format!("at {at}, but it says {}", record.lsn))));
    }
    if let Err(problem) = record.check_place(ring, at.block()) {
        return Ok(Err(problem));
    }
    read_wrapped(ring, at, record.block_count(), log, buffer)?;
    Ok(record.checksum(buffer).map(|checksum| (record, checksum)))
}

/// Reads `count` blocks from `at` on, over the end of the ring when they reach it.
fn read_wrapped<L: ReadLog>(
    ring: XfsLogRing,
    at: Lsn,
    count: u32,
    log: &mut L,
    buffer: &mut Vec<u8>,
) -> Result<(), L::Error> {
    buffer.resize(count as usize * BLOCK, 0);
    let before_end = ring.blocks().saturating_sub(at.block()).min(count) as usize * BLOCK;
    let (first, second) = buffer.split_at_mut(before_end);
    log.read(at.block(), first)?;
    if second.is_empty() { Ok(()) } else { log.read(0, second) }
}

/// Finds the head and the tail of the log of the volume with `uuid` in its superblock.
///
/// # Errors
/// Those of `log`, and a [`Malformed`] when there is no log of this volume, when a record is
/// damaged that no crash can have torn, or when a log that is not clean has another byte order.
pub fn find<L: ReadLog>(ring: XfsLogRing, uuid: Uuid, log: &mut L) -> Result<XfsLogEnds, L::Error> {
    let mut search = EndSearch { ring, log, buffer: Vec::new() };
    let by_cycle = search.head_by_cycle()?;
    let mut head = by_cycle;
    let clean = |head, last| {
        let is_torn = head != by_cycle;
        XfsLogEnds { head, tail: head, is_clean: true, last, is_torn }
    };
    if head == XfsLogRing::NEVER_WRITTEN {
        search.prove_zeroed()?;
        return Ok(clean(head, None));
    }
    let (mut at, mut header) = search.last_record(head, IN_FLIGHT)?;
    if header.as_ref().is_none_or(|header| ring.advance(at, header.block_count()) != head) {
        head = at;
        (at, header) = search.last_record(head, IN_FLIGHT)?;
    }
    let record = header.ok_or_else(|| bad_record(format!("no valid one at {at}")))?;
    if record.uuid != uuid && !record.uuid.is_nil() {
        return Err(
            bad_record(format!("of volume {uuid} expected, of {} found", record.uuid)).into()
        );
    }
    if search.is_unmount(&record, head)? {
        return Ok(clean(head, Some(record)));
    }
    record.check_readable(uuid)?;
    let (head, record) = search.before_torn(head, &record)?;
    if search.is_unmount(&record, head)? {
        return Ok(clean(head, Some(record)));
    }
    let tail = search.sound_tail(head, &record, uuid)?;
    Ok(XfsLogEnds { tail, is_clean: false, ..clean(head, Some(record)) })
}

/// A header that was found by its magic: where it is, and the record when it is one.
type FoundHeader = (Lsn, Option<XfsLogRecord>);

struct EndSearch<'a, L> {
    ring: XfsLogRing,
    log: &'a mut L,
    buffer: Vec<u8>,
}

impl<L: ReadLog> EndSearch<'_, L> {
    fn head_by_cycle(&mut self) -> Result<Lsn, L::Error> {
        // The window is read in order, so most cycles come from blocks that were read before.
        let (mut start, mut end) = (0, 0);
        let (ring, buffer, log) = (self.ring, &mut self.buffer, &mut *self.log);
        ring.find_head(|block| {
            if !(start..end).contains(&block) {
                let count = if block == end { STRIDE } else { 1 };
                (start, end) = (block, ring.blocks().min(block.saturating_add(count)));
                buffer.resize((end - start) as usize * BLOCK, 0);
                log.read(start, buffer)?;
            }
            let at = (block - start) as usize * BLOCK;
            Ok(record::cycle_of(buffer.get(at..).unwrap_or_default()))
        })
    }

    /// Proves that a log whose first block has cycle 0 was zeroed, by samples and its last block.
    fn prove_zeroed(&mut self) -> Result<(), L::Error> {
        let last = self.ring.blocks().saturating_sub(1);
        let stride = (last / MOST_SAMPLES).max(1) as usize;
        self.buffer.resize(BLOCK, 0);
        let samples = (0..last).step_by(stride).chain([last]);
        for block in (0..STRIDE.min(last)).chain(samples) {
            self.log.read(block, &mut self.buffer)?;
            if self.buffer.iter().any(|&byte| byte != 0) {
                let problem = format!("the first one has cycle 0, but block {block} is not zero");
                return Err(bad_record(problem).into());
            }
        }
        Ok(())
    }

    /// The last header in the `limit` blocks before `before`.
    fn header_before(&mut self, before: Lsn, limit: u32) -> Result<Option<FoundHeader>, L::Error> {
        let written = if before.cycle() == 1 { before.block() } else { self.ring.blocks() };
        let limit = limit.min(written);
        let mut passed = 0;
        while passed < limit {
            let count = STRIDE.min(limit - passed);
            passed += count;
            let Some(start) = self.ring.retreat(before, passed) else { break };
            read_wrapped(self.ring, start, count, self.log, &mut self.buffer)?;
            let blocks = self.buffer.chunks_exact(BLOCK).zip(0..);
            if let Some((block, index)) =
                blocks.filter(|(block, _)| record::is_header(block)).last()
            {
                let at = self.ring.advance(start, index);
                return Ok(Some((at, XfsLogRecord::parse(block).ok())));
            }
        }
        Ok(None)
    }

    /// The first header from `from` on and before `before`.
    fn header_from(&mut self, from: Lsn, before: Lsn) -> Result<Option<Lsn>, L::Error> {
        let limit = self.ring.distance(from, before).unwrap_or(0);
        let mut passed = 0;
        while passed < limit {
            let count = STRIDE.min(limit - passed);
            let start = self.ring.advance(from, passed);
            read_wrapped(self.ring, start, count, self.log, &mut self.buffer)?;
            let mut blocks = self.buffer.chunks_exact(BLOCK).zip(0..);
            if let Some((_, index)) = blocks.find(|(block, _)| record::is_header(block)) {
                return Ok(Some(self.ring.advance(start, index)));
            }
            passed += count;
        }
        Ok(None)
    }

    /// The last header before `head`. There is one behind every crash: at most [`IN_FLIGHT`] blocks
    /// before the head can be torn.
    fn last_record(&mut self, head: Lsn, limit: u32) -> Result<FoundHeader, L::Error> {
        self.header_before(head, limit)?.ok_or_else(|| {
            bad_record(format!("no record in the {limit} blocks before {head}")).into()
        })
    }

    /// The record at `at`, if it is whole and ends at or before `before`; `Err` says why not.
    fn whole(&mut self, at: Lsn, before: Lsn) -> Result<Result<XfsLogRecord, Malformed>, L::Error> {
        let read = read_record(self.ring, at, self.log, &mut self.buffer)?;
        Ok(read.and_then(|(record, checksum)| {
            let room = self.ring.distance(at, before);
            if room.is_none_or(|room| room < record.block_count()) {
                return Err(bad_record(format!("the one at {at} reaches over the head")));
            }
            if checksum == XfsLogChecksum::Wrong {
                return Err(bad_record(format!("the checksum of the one at {at} is wrong")));
            }
            Ok(record)
        }))
    }

    /// Whether `record` is an unmount record that ends at `head`.
    fn is_unmount(&mut self, record: &XfsLogRecord, head: Lsn) -> Result<bool, L::Error> {
        if record.ops != 1 || self.ring.advance(record.lsn, record.block_count()) != head {
            return Ok(false);
        }
        let body = self.ring.advance(record.lsn, record.header_blocks());
        read_wrapped(self.ring, body, 1, self.log, &mut self.buffer)?;
        // The number of the transaction is the packed word, and the flags lie behind it.
        let mut ops = op::ops(&self.buffer, 1).flatten();
        Ok(ops.next().is_some_and(|op| op.flags.contains(XfsOpFlags::UNMOUNT)))
    }

    /// The first of the records in flight that is torn, or `head`, and the record before it.
    fn before_torn(
        &mut self,
        head: Lsn,
        last: &XfsLogRecord,
    ) -> Result<(Lsn, XfsLogRecord), L::Error> {
        let tail = last.tail;
        let mut first = head;
        for _ in 0..IN_FLIGHT_RECORDS {
            let limit = self.ring.distance(tail, first).unwrap_or(0);
            let Some((at, _)) = self.header_before(first, limit)? else { break };
            first = at;
        }
        let (mut at, mut good) = (first, None);
        while at != head {
            match self.whole(at, head)? {
                Ok(record) => {
                    at = self.ring.advance(at, record.block_count());
                    good = Some(record);
                }
                Err(_) => break,
            }
        }
        if let Some(good) = good {
            return Ok((at, good));
        }
        // All that may have been in flight is torn, so the log ends with the record before it.
        let limit = self.ring.free(first, head).unwrap_or(0).min(IN_FLIGHT);
        let (before, _) = self.last_record(first, limit)?;
        Ok((first, self.whole(before, first)??))
    }

    /// The tail that `last` names, when all records from there to `head` are whole.
    ///
    /// A record that was torn at the head may have been written over the tail that `last` knew,
    /// after a later record, which is lost, had moved it. Records that lie so near before the head
    /// in the ring are passed over.
    fn sound_tail(&mut self, head: Lsn, last: &XfsLogRecord, uuid: Uuid) -> Result<Lsn, L::Error> {
        let near = IN_FLIGHT_RECORDS * last.buffer.div_ceil(BLOCK_BYTES);
        let (mut tail, mut at) = (last.tail, last.tail);
        while at != head {
            match self.whole(at, head)? {
                Ok(record) => {
                    record.check_readable(uuid)?;
                    at = self.ring.advance(at, record.block_count());
                }
                Err(problem) => {
                    let is_near = self.ring.free(at, head).is_some_and(|free| free <= near);
                    let next = self.ring.advance(at, 1);
                    let next = if is_near { self.header_from(next, head)? } else { None };
                    at = next.ok_or(problem)?;
                    tail = at;
                }
            }
        }
        Ok(tail)
    }
}
