//! Moving the tail: active items are written home, in the order of their LSNs.
//!
//! A background thread keeps a quarter of the ring free. When threads wait for room, it frees what
//! they need: it forces pinned items to the log, writes items home, and writes a checkpoint, if
//! need be without an item, because only a tail that a durable record tells frees blocks.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use offshoot_kit::counter::count;
use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::{BLOCK, XfsLogRecord};

use super::checkpoint::PushReason;
use super::home::HomeWrites;
use super::item::HomeOutcome;
use super::unmount::unmount_record;
use super::{LogShared, require_running};
use crate::buffer::malformed;

/// The items that are written home together.
const BATCH: usize = 512;

/// The checkpoints that cover a log at most. When no transaction commits, three do.
const MOST_COVERS: usize = 8;

/// How long a thread waits that found all items locked or pinned.
const PAUSE: Duration = Duration::from_millis(2);

/// What a pass over active items did.
#[derive(Clone, Copy, Debug, Default)]
struct HomePass {
    written: usize,
    pinned: usize,
    busy: usize,
}

/// How far making room has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoomProgress {
    /// No thread waits.
    Enough,
    /// Some room was made.
    Some,
    /// None was made: transactions have to end first.
    Stuck,
}

impl LogShared {
    /// What the background thread does.
    pub(super) fn tend(&self) {
        while self.tail_work.wait() {
            loop {
                match self.make_room() {
                    Ok(RoomProgress::Enough) => break,
                    Ok(RoomProgress::Some) => {}
                    Ok(RoomProgress::Stuck) => {
                        if !self.tail_work.pause(PAUSE) {
                            return;
                        }
                    }
                    Err(error) => {
                        self.fail(&error);
                        return;
                    }
                }
            }
        }
    }

    pub(super) fn bytes_between(&self, from: Lsn, to: Lsn) -> u64 {
        let blocks = self.disk.ring.distance(from, to).unwrap_or(0);
        u64::from(blocks) * BLOCK as u64
    }

    fn make_room(&self) -> Result<RoomProgress> {
        let usage = self.space.usage();
        let tail = self.active.tail();
        let excess = self.bytes_between(tail, usage.head).saturating_sub(self.sizes.ring / 4 * 3);
        let untold = self.bytes_between(usage.recorded, tail);
        let bytes = excess.max(self.sizes.tail_move(usage.wanted, untold));
        if bytes > 0 {
            let blocks = u32::try_from(bytes.div_ceil(BLOCK as u64)).unwrap_or(u32::MAX);
            let target = self.disk.ring.advance(tail, blocks).min(usage.head);
            let pass = self.write_home(target)?;
            if pass.pinned > 0 || pass.written == 0 && usage.has_waiters {
                self.force(self.contexts.newest())?;
            }
        }
        if !usage.has_waiters {
            return Ok(RoomProgress::Enough);
        }
        let moved = self.active.tail() > tail;
        if self.tell_tail()? || moved {
            return Ok(RoomProgress::Some);
        }
        self.require_hope(tail)?;
        Ok(RoomProgress::Stuck)
    }

    /// Fails when no room can come free any more: only intents hold the `tail`, and the threads
    /// that could end them wait for room themselves.
    fn require_hope(&self, tail: Lsn) -> Result<()> {
        let (usage, counts) = (self.space.usage(), self.active.counts());
        let is_idle = !usage.has_promises && counts.writing == 0 && counts.items == counts.intents;
        if is_idle && usage.wanted > 0 && self.active.tail() == tail {
            let what =
                format!("no room comes free in the log: {} intents hold its tail", counts.intents);
            return Err(Error::corrupt(Structure::LogRecord, what));
        }
        Ok(())
    }

    /// Lets a record tell the tail, if that frees more than the record takes. Returns whether it
    /// did.
    fn tell_tail(&self) -> Result<bool> {
        let untold = self.bytes_between(self.space.usage().recorded, self.active.tail());
        let is_worth_it = untold > self.sizes.empty_checkpoint();
        if is_worth_it {
            self.push(PushReason::Tail)?;
        }
        Ok(is_worth_it)
    }

    /// Writes items home that are active up to the record `to`.
    fn write_home(&self, to: Lsn) -> Result<HomePass> {
        let (mut pass, mut from) = (HomePass::default(), None);
        loop {
            require_running(&self.stop)?;
            let _turn = self.home.lock();
            let batch = self.active.batch(from, to, BATCH);
            let Some((last, _)) = batch.last() else { return Ok(pass) };
            from = Some(*last);
            let mut home = HomeWrites::default();
            for (_, item) in batch {
                match item.write_home(&mut home)? {
                    HomeOutcome::Queued => {}
                    HomeOutcome::Pinned => pass.pinned += 1,
                    HomeOutcome::Busy => pass.busy += 1,
                }
            }
            let written = home.write(&*self.disk.device)?;
            pass.written += written.len();
            count(&self.counters.written_home, written.len() as u64);
            let clean = self.active.at_home(&written);
            for ((item, _), is_clean) in written.iter().zip(clean) {
                item.written(is_clean);
            }
        }
    }

    /// Writes everything home that is committed now, but intents.
    pub(super) fn push_tail(&self) -> Result<()> {
        self.force(self.contexts.newest())?;
        let to = self.space.usage().head;
        loop {
            let pass = self.write_home(to).inspect_err(|error| self.fail(error))?;
            if self.active.batch(None, to, 1).is_empty() {
                return Ok(());
            }
            if pass.pinned > 0 {
                self.force(self.contexts.newest())?;
            }
            if pass.written == 0 {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Brings everything home but intents, and tells it in a record.
    fn settle(&self) -> Result<()> {
        self.push_tail()?;
        self.flush().inspect_err(|error| self.fail(error))?;
        while self.tell_tail()? {}
        Ok(())
    }

    /// Brings everything home that is committed now, but intents, and leaves a recovery no item to
    /// replay but intents. A record tells the last one before it as the tail, so that takes two
    /// checkpoints without items:
    ///
    /// ```text
    /// 1:8 items    1:12 empty, tail 1:8    1:14 empty, tail 1:12
    /// ```
    ///
    /// While transactions commit, the end would never come: then some of that has to do.
    pub(super) fn quiesce(&self) -> Result<()> {
        self.push_tail()?;
        self.flush().inspect_err(|error| self.fail(error))?;
        for _ in 0..MOST_COVERS {
            if self.is_quiet() {
                break;
            }
            self.push(PushReason::Tail)?;
        }
        Ok(())
    }

    /// Whether a recovery finds no item, or intents hold the tail. With nothing active, the tail is
    /// the last record, which may be the only one with items.
    fn is_quiet(&self) -> bool {
        let (recorded, last) = (self.space.usage().recorded, self.last_with_items.load(Relaxed));
        let is_held = self.active.counts().items > 0 && recorded == self.active.tail();
        is_held || recorded > Lsn(last)
    }

    /// Brings everything home, and writes that the log is empty.
    pub(super) fn end(&self) -> Result<()> {
        self.settle()?;
        let counts = self.active.counts();
        if counts.items > 0 || self.contexts.current().bytes > 0 {
            let what = format!(
                "unmounting while {} changes are not at home, {} of which wait for their ends",
                counts.items, counts.intents
            );
            return Err(Error::posix(Errno::BUSY, what));
        }
        self.write_unmount().inspect_err(|error| self.fail(error))
    }

    fn write_unmount(&self) -> Result<()> {
        self.flush()?;
        let (head, previous) = self.space.end();
        let record = XfsLogRecord { lsn: head, tail: head, previous, ..self.like() };
        let (_, blocks) =
            unmount_record(self.disk.ring, self.disk.unit, &record).map_err(malformed)?;
        self.disk.write(head, &blocks)?;
        self.disk.flush()
    }
}
