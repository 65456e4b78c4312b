//! Log buffers, and the threads that write them.
//!
//! A checkpoint fills a buffer, and when it is full hands it to a writer thread and goes on with
//! another. So records are packed, summed and written while the next ones are filled. There are 8
//! buffers, as many as records may be in flight.

use std::collections::VecDeque;

use offshoot_kit::counter::count;
use offshoot_vfs::Result;
use offshoot_xfs_format::log::op::XfsOpWriter;
use offshoot_xfs_format::log::ring::XfsLogRing;
use offshoot_xfs_format::log::{BLOCK, XfsLogRecord, ends::IN_FLIGHT_RECORDS};
use parking_lot::{Condvar, Mutex};

use super::sizes::{LOG_VERSION, RecordSizes};
use super::space::{PATIENCE, RecordPlace};
use super::{LogShared, require_running};
use crate::buffer::malformed;

/// The byte order of little-endian Linux, as headers name it.
const LITTLE_ENDIAN: u32 = 1;

/// A log buffer: room for the headers, and a body that is being filled.
#[derive(Debug, Default)]
pub(super) struct RecordBuffer {
    blocks: Vec<u8>,
    headers: usize,
    used: usize,
    ops: u32,
}

impl RecordBuffer {
    fn new(sizes: &RecordSizes) -> Self {
        let blocks = vec![0; sizes.headers + sizes.body];
        Self { blocks, headers: sizes.headers, used: 0, ops: 0 }
    }

    /// Adds ops with `write`.
    pub(super) fn write<T>(&mut self, write: impl FnOnce(&mut XfsOpWriter<'_>) -> T) -> T {
        let body = self.blocks.get_mut(self.headers..).unwrap_or_default();
        let mut ops = XfsOpWriter::new(body, self.used, self.ops);
        let outcome = write(&mut ops);
        (self.used, self.ops) = (ops.used(), ops.count());
        outcome
    }

    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Makes a record of the ops, for a place in the ring. Returns its blocks.
    fn seal(
        &mut self,
        ring: XfsLogRing,
        like: &XfsLogRecord,
        len: usize,
        place: &RecordPlace,
    ) -> Result<&[u8]> {
        let end = self.headers + len;
        let RecordPlace { lsn, tail, previous, .. } = *place;
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        let record = XfsLogRecord { lsn, tail, previous, len, ops: self.ops, ..like.clone() };
        let used = self.headers + self.used;
        if let Some(padding) = self.blocks.get_mut(used..end) {
            padding.fill(0);
        }
        let blocks = self.blocks.get_mut(..end).unwrap_or_default();
        record.seal(ring, blocks).map_err(malformed)?;
        Ok(blocks)
    }

    fn clear(&mut self) {
        (self.used, self.ops) = (0, 0);
    }
}

/// The buffers of a log.
#[derive(Debug)]
pub(super) struct RecordBuffers {
    free: Mutex<Vec<RecordBuffer>>,
    freed: Condvar,
    full: Mutex<FullBuffers>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct FullBuffers {
    queue: VecDeque<(RecordBuffer, RecordPlace)>,
    is_ended: bool,
}

impl RecordBuffers {
    pub(super) fn new(sizes: &RecordSizes) -> Self {
        let free = (0..IN_FLIGHT_RECORDS).map(|_| RecordBuffer::new(sizes)).collect();
        Self {
            free: Mutex::new(free),
            freed: Condvar::new(),
            full: Mutex::default(),
            filled: Condvar::new(),
        }
    }

    fn give_back(&self, mut buffer: RecordBuffer) {
        buffer.clear();
        self.free.lock().push(buffer);
        self.freed.notify_one();
    }

    /// Ends the writer threads when everything is written.
    pub(super) fn end(&self) {
        self.full.lock().is_ended = true;
        self.filled.notify_all();
    }

    /// Wakes all threads that wait, because writing has ended.
    pub(super) fn wake(&self) {
        self.freed.notify_all();
        self.filled.notify_all();
    }
}

impl LogShared {
    /// An empty buffer. Waits for one.
    pub(super) fn take_buffer(&self) -> Result<RecordBuffer> {
        let mut free = self.buffers.free.lock();
        loop {
            require_running(&self.stop)?;
            if let Some(buffer) = free.pop() {
                return Ok(buffer);
            }
            self.buffers.freed.wait_for(&mut free, PATIENCE);
        }
    }

    /// Hands a buffer with a place in the ring to the writer threads.
    pub(super) fn submit(&self, buffer: RecordBuffer, place: RecordPlace) {
        self.buffers.full.lock().queue.push_back((buffer, place));
        self.buffers.filled.notify_one();
    }

    /// What a writer thread does.
    pub(super) fn write_records(&self) {
        let mut full = self.buffers.full.lock();
        loop {
            if let Some((buffer, place)) = full.queue.pop_front() {
                drop(full);
                if let Err(error) = self.write_record(buffer, &place) {
                    self.fail(&error);
                }
                full = self.buffers.full.lock();
            } else if full.is_ended {
                return;
            } else {
                self.buffers.filled.wait(&mut full);
            }
        }
    }

    /// Writes a record to its place.
    pub(super) fn write_record(&self, mut buffer: RecordBuffer, place: &RecordPlace) -> Result<()> {
        require_running(&self.stop)?;
        let len = self.sizes.record_len(buffer.used());
        let blocks = buffer.seal(self.disk.ring, &self.like(), len, place)?;
        self.disk.write(place.lsn, blocks)?;
        count(&self.counters.records, 1);
        count(&self.counters.bytes, blocks.len() as u64);
        self.buffers.give_back(buffer);
        self.space.written(place.number);
        Ok(())
    }

    /// What all records of the log have in common.
    pub(super) fn like(&self) -> XfsLogRecord {
        XfsLogRecord {
            lsn: XfsLogRing::NEVER_WRITTEN,
            tail: XfsLogRing::NEVER_WRITTEN,
            version: LOG_VERSION,
            len: 0,
            previous: None,
            ops: 0,
            byte_order: LITTLE_ENDIAN,
            uuid: self.disk.uuid,
            buffer: self.sizes.buffer,
        }
    }

    /// The basic blocks of a record with the ops of `buffer`.
    pub(super) fn block_count(&self, buffer: &RecordBuffer) -> u32 {
        let len = self.sizes.headers + self.sizes.record_len(buffer.used());
        u32::try_from(len / BLOCK).unwrap_or(u32::MAX)
    }
}
