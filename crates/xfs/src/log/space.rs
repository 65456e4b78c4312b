//! The room of the ring: what is in use, what is promised, and the lines for it.
//!
//! ```text
//! ring      tail in a durable record ======== in use ======== head ... free ... tail
//! free      set aside | promised: tickets, and contexts that are not written | can be promised
//! ```
//!
//! Nothing is written over blocks that the last durable record still names as its tail or as what
//! follows it, so recovery finds all of them whatever a crash tears. A tail that only memory knows
//! frees nothing: a record has to tell it first.
//!
//! There are two *grant heads*, both in bytes. The reserve head has all that is promised to
//! tickets: all their steps. The write head has what can really be written next: of a rolling
//! transaction that used up its steps, one step. A new transaction waits at the first, and a
//! rolling one at the second, for which it promises itself its step at the first without waiting.
//! So a transaction that is half done never waits for one that has not begun.
//!
//! Up to 8 records, or 4096 blocks, are written but not durable at any time: that is how far
//! recovery looks for torn ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use offshoot_kit::counter::{WriteStop, below_zero};
use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::ends::IN_FLIGHT_RECORDS;
use offshoot_xfs_format::log::ring::IN_FLIGHT;
use offshoot_xfs_format::log::{BLOCK, XfsLogRing};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::require_running;

/// How often a thread that waits looks whether writing has ended elsewhere.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);

/// Which promises are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrantHead {
    /// All steps of all tickets.
    Reserve,
    /// What can be written before a thread waits again.
    Write,
}

/// A thread in a line.
#[derive(Debug)]
struct SpaceWaiter {
    bytes: u64,
    wake: Condvar,
}

/// A record that is not known to be durable.
#[derive(Debug)]
struct PendingRecord {
    number: u64,
    tail: Lsn,
    blocks: u32,
    is_written: bool,
}

/// Where a record goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordPlace {
    /// Its number, from 0 on.
    pub(super) number: u64,
    pub(super) lsn: Lsn,
    pub(super) tail: Lsn,
    /// The record before it.
    pub(super) previous: Option<u32>,
}

#[derive(Debug)]
struct RingState {
    head: Lsn,
    previous: Option<u32>,
    /// The number of the next record.
    number: u64,
    /// The tail in the newest durable record.
    recorded: Lsn,
    /// The newest tail below which everything is durable at home. Records get it.
    durable_tail: Lsn,
    /// In the order of the ring.
    pending: VecDeque<PendingRecord>,
    /// What is promised at each head.
    promised: [u64; 2],
    lines: [VecDeque<Arc<SpaceWaiter>>; 2],
}

/// The room of the ring.
#[derive(Debug)]
pub(super) struct LogSpace {
    ring: XfsLogRing,
    /// What can be in use and promised together.
    capacity: u64,
    stop: Arc<WriteStop>,
    state: Mutex<RingState>,
    /// A record was written or is durable.
    moved: Condvar,
}

/// How full the ring is.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceUse {
    pub(super) head: Lsn,
    pub(super) recorded: Lsn,
    /// The bytes that must become free before the first thread in each line can go on; 0 when
    /// nobody waits.
    pub(super) wanted: u64,
    pub(super) has_waiters: bool,
    /// Whether a transaction may still write into room that it has.
    pub(super) has_promises: bool,
}

impl LogSpace {
    pub(super) fn new(
        ring: XfsLogRing,
        capacity: u64,
        stop: &Arc<WriteStop>,
        (tail, head): (Lsn, Lsn),
    ) -> Self {
        let state = RingState {
            head,
            // As after every mount.
            previous: None,
            number: 0,
            recorded: tail,
            durable_tail: tail,
            pending: VecDeque::new(),
            promised: [0; 2],
            lines: Default::default(),
        };
        let (state, moved) = (Mutex::new(state), Condvar::new());
        Self { ring, capacity, stop: stop.clone(), state, moved }
    }

    /// Promises `bytes` at both heads. Waits in line until they fit; `wait` is called before.
    pub(super) fn reserve(&self, bytes: u64, wait: impl FnOnce()) -> Result<()> {
        self.promise(self.state.lock(), GrantHead::Reserve, bytes, wait)
    }

    /// Promises one more step of `bytes` to a rolling transaction: at the reserve head at once, at
    /// the write head when they fit. It gives back what it has `left` of the step before, which
    /// goes to no transaction that has not begun.
    pub(super) fn roll(&self, left: u64, bytes: u64, wait: impl FnOnce()) -> Result<()> {
        let mut state = self.state.lock();
        *state.promised_at(GrantHead::Reserve) += bytes;
        self.take_back(&mut state, left);
        let outcome = self.promise(state, GrantHead::Write, bytes, wait);
        if outcome.is_err() {
            *self.state.lock().promised_at(GrantHead::Reserve) -= bytes;
        }
        outcome
    }

    fn promise(
        &self,
        mut state: MutexGuard<'_, RingState>,
        head: GrantHead,
        bytes: u64,
        wait: impl FnOnce(),
    ) -> Result<()> {
        require_running(&self.stop)?;
        if state.line(head).is_empty() && self.fits(&state, head, bytes) {
            state.grant(head, bytes);
            return Ok(());
        }
        let waiter = Arc::new(SpaceWaiter { bytes, wake: Condvar::new() });
        state.line(head).push_back(waiter.clone());
        // A rolling transaction has given bytes back, which may do for one before it.
        self.serve(&mut state);
        wait();
        // A thread is granted its bytes by that which makes room, and is in no line any more then.
        while state.is_waiting(head, &waiter) {
            if let Err(stopped) = require_running(&self.stop) {
                state.line(head).retain(|other| !Arc::ptr_eq(other, &waiter));
                return Err(stopped);
            }
            waiter.wake.wait_for(&mut state, PATIENCE);
        }
        Ok(())
    }

    fn fits(&self, state: &RingState, head: GrantHead, bytes: u64) -> bool {
        let promised = state.promised.get(head as usize).copied().unwrap_or(u64::MAX);
        self.in_use(state).saturating_add(promised).saturating_add(bytes) <= self.capacity
    }

    /// The bytes from the recorded tail to the head.
    fn in_use(&self, state: &RingState) -> u64 {
        let blocks = self.ring.distance(state.recorded, state.head);
        blocks.map_or(u64::MAX, |blocks| u64::from(blocks) * BLOCK as u64)
    }

    /// Grants what fits from the front of each line.
    fn serve(&self, state: &mut RingState) {
        for head in [GrantHead::Write, GrantHead::Reserve] {
            while let Some(first) = state.line(head).front().cloned()
                && self.fits(state, head, first.bytes)
            {
                state.grant(head, first.bytes);
                state.line(head).pop_front();
                first.wake.notify_one();
            }
        }
    }

    /// Takes promised bytes back, at both heads.
    pub(super) fn release(&self, bytes: u64) {
        let mut state = self.state.lock();
        self.take_back(&mut state, bytes);
        self.serve(&mut state);
    }

    fn take_back(&self, state: &mut RingState, bytes: u64) {
        for promised in &mut state.promised {
            if let Some(less) = promised.checked_sub(bytes) {
                *promised = less;
            } else {
                let error = below_zero("promised log space", *promised, bytes);
                self.stop.set(&error.to_string());
            }
        }
    }

    /// Takes the next `blocks` of the ring for a record, which `promised` bytes were kept for.
    /// `None` when too many records are not durable. `begin` is called with the place before
    /// another record can get one.
    ///
    /// # Errors
    /// When the blocks are not free, which no promise that was kept allows.
    pub(super) fn allocate(
        &self,
        blocks: u32,
        promised: u64,
        begin: impl FnOnce(Lsn),
    ) -> Result<Option<RecordPlace>> {
        let mut state = self.state.lock();
        let pending: u32 = state.pending.iter().map(|record| record.blocks).sum();
        let is_full = state.pending.len() >= IN_FLIGHT_RECORDS as usize
            || !state.pending.is_empty() && pending.saturating_add(blocks) > IN_FLIGHT;
        if is_full {
            return Ok(None);
        }
        let RingState { head, recorded, .. } = *state;
        if self.ring.free(recorded, head).is_none_or(|free| free <= blocks) {
            let problem = format!(
                "no room for {blocks} blocks at {head}, whose tail is {recorded}: the accounts of \
                 the log are wrong"
            );
            return Err(Error::corrupt(Structure::LogRecord, problem));
        }
        self.take_back(&mut state, promised);
        let place = RecordPlace {
            number: state.number,
            lsn: head,
            tail: state.durable_tail,
            previous: state.previous,
        };
        begin(head);
        let (number, tail) = (place.number, place.tail);
        state.pending.push_back(PendingRecord { number, tail, blocks, is_written: false });
        state.number += 1;
        state.previous = Some(head.block());
        state.head = self.ring.advance(head, blocks);
        Ok(Some(place))
    }

    /// A record was written.
    pub(super) fn written(&self, number: u64) {
        let mut state = self.state.lock();
        if let Some(record) = state.pending.iter_mut().find(|record| record.number == number) {
            record.is_written = true;
        }
        self.moved.notify_all();
    }

    /// Waits until all records before this one are written.
    pub(super) fn wait_written(&self, before: u64) -> Result<()> {
        let mut state = self.state.lock();
        while state.pending.iter().any(|record| record.number < before && !record.is_written) {
            require_running(&self.stop)?;
            self.moved.wait_for(&mut state, PATIENCE);
        }
        require_running(&self.stop)
    }

    /// Whether a record before this one may not be durable.
    pub(super) fn has_pending(&self, before: u64) -> bool {
        self.state.lock().pending.front().is_some_and(|record| record.number < before)
    }

    /// The first record that is not written: a barrier makes those before it durable.
    pub(super) fn first_unwritten(&self) -> u64 {
        let state = self.state.lock();
        let first = state.pending.iter().find(|record| !record.is_written);
        first.map_or(state.number, |record| record.number)
    }

    /// A barrier made the records before `number` durable, and all items at home below `tail`.
    pub(super) fn flushed(&self, number: u64, tail: Lsn) {
        let mut state = self.state.lock();
        while let Some(record) = state.pending.front()
            && record.number < number
        {
            state.recorded = state.recorded.max(record.tail);
            state.pending.pop_front();
        }
        state.durable_tail = state.durable_tail.max(tail);
        self.serve(&mut state);
        self.moved.notify_all();
    }

    /// How full the ring is.
    pub(super) fn usage(&self) -> SpaceUse {
        let state = self.state.lock();
        let in_use = self.in_use(&state);
        let wanted = state.lines.iter().zip(state.promised).filter_map(|(line, promised)| {
            let need = in_use.saturating_add(promised).saturating_add(line.front()?.bytes);
            Some(need.saturating_sub(self.capacity))
        });
        let [_, at_write_head] = state.promised;
        SpaceUse {
            has_promises: at_write_head > 0,
            head: state.head,
            recorded: state.recorded,
            wanted: wanted.max().unwrap_or(0),
            has_waiters: state.lines.iter().any(|line| !line.is_empty()),
        }
    }

    /// The next record, when nothing else is written any more.
    pub(super) fn end(&self) -> (Lsn, Option<u32>) {
        let state = self.state.lock();
        (state.head, state.previous)
    }

    /// Wakes all threads that wait, because writing has ended.
    pub(super) fn wake(&self) {
        let state = self.state.lock();
        for waiter in state.lines.iter().flatten() {
            waiter.wake.notify_one();
        }
        self.moved.notify_all();
    }
}

impl RingState {
    fn promised_at(&mut self, head: GrantHead) -> &mut u64 {
        let [reserve, write] = &mut self.promised;
        if head == GrantHead::Reserve { reserve } else { write }
    }

    fn line(&mut self, head: GrantHead) -> &mut VecDeque<Arc<SpaceWaiter>> {
        let [reserve, write] = &mut self.lines;
        if head == GrantHead::Reserve { reserve } else { write }
    }

    fn is_waiting(&mut self, head: GrantHead, waiter: &Arc<SpaceWaiter>) -> bool {
        self.line(head).iter().any(|other| Arc::ptr_eq(other, waiter))
    }

    /// What is reserved is promised at both heads; a step was promised at the first before.
    fn grant(&mut self, head: GrantHead, bytes: u64) {
        *self.promised_at(GrantHead::Write) += bytes;
        if head == GrantHead::Reserve {
            *self.promised_at(GrantHead::Reserve) += bytes;
        }
    }
}
