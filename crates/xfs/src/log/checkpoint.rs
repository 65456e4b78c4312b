//! Checkpoints: a context becomes a transaction of the log.
//!
//! ```text
//! turn to fill     a new context takes the place of this one
//!                  its items are proved
//!                  barrier: what the tail passes is at home, file data is durable
//!                  start op, header, regions into buffers; full ones are written meanwhile
//! turn to commit   the record with the commit op gets its place, behind those of all contexts
//!                  before; all records before it are written
//!                  barrier, unless no record was written since the last one
//!                  the record with the commit op
//!                  barrier
//!                  its items are active, then unpinned; threads that force it go on
//! ```
//!
//! Any thread can do this: the one that forces a context, the background thread, the one that
//! writes items home. While one waits for its turn to commit, the next fills. So several
//! checkpoints are in flight, their records interleave, and their commit ops are in order. So are
//! their first records, whose LSNs say which of two changes of a block is the newer one.
//!
//! A checkpoint that fits one record is that record between two barriers.
//!
//! A directory block may change a hundred times in a context. The push proves it once, as the
//! context has it in the end, and so do commits in debug builds. A block that is not sound ends all
//! writing before anything of its context is written. So the device has the contexts before. The
//! commits of this context have returned, and are lost like all that was not synced in a crash.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use offshoot_kit::counter::count;
use offshoot_vfs::Result;
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::op::XfsTransactionHeader;

use super::active::ActiveChange;
use super::context::ContextList;
use super::item::{LoggedItem, LoggedKind};
use super::records::RecordBuffer;
use super::space::{PATIENCE, RecordPlace};
use super::{LogShared, require_running};

/// A checkpoint that is being written.
struct RunningCheckpoint<'l> {
    log: &'l LogShared,
    sequence: u64,
    tid: u32,
    /// The buffer that is being filled.
    buffer: RecordBuffer,
    /// The first record, once it has its place.
    start: Option<Lsn>,
    /// What is left of what tickets gave for it.
    charged: u64,
}

/// What a push is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PushReason {
    /// The context with this sequence must not stay the current one.
    Sequence(u64),
    /// A record has to tell a newer tail, even if there is nothing else to write.
    Tail,
}

impl LogShared {
    /// Pushes the current context, and waits until it is durable. Does nothing when another thread
    /// pushed the one that it is for.
    pub(super) fn push(&self, reason: PushReason) -> Result<()> {
        self.push_current(reason).inspect_err(|error| self.fail(error))
    }

    fn push_current(&self, reason: PushReason) -> Result<()> {
        let turn = self.fill.lock();
        require_running(&self.stop)?;
        if let PushReason::Sequence(sequence) = reason
            && self.contexts.current().sequence > sequence
        {
            return Ok(());
        }
        let Some((sequence, list)) = self.contexts.switch(reason == PushReason::Tail) else {
            return Ok(());
        };
        self.throttle.wake();
        list.entries.iter().try_for_each(|entry| entry.item.prove())?;
        self.flush()?;
        let checkpoint = RunningCheckpoint::fill(self, sequence, &list)?;
        drop(turn);
        self.wait_until_durable(sequence - 1)?;
        let (start, end) = checkpoint.commit()?;
        self.complete(sequence, (start, end), &list);
        Ok(())
    }

    /// Makes everything durable that was written. Records that get their places from now on tell
    /// the tail as it is now.
    pub(super) fn flush(&self) -> Result<()> {
        let (number, tail) = (self.space.first_unwritten(), self.active.tail());
        self.disk.flush()?;
        count(&self.counters.flushes, 1);
        self.space.flushed(number, tail);
        Ok(())
    }

    /// A place for the record in `buffer`. Makes records durable while too many are not.
    fn place(
        &self,
        sequence: u64,
        buffer: &RecordBuffer,
        charged: &mut u64,
    ) -> Result<RecordPlace> {
        let blocks = self.block_count(buffer);
        let bytes = (u64::from(blocks) << 9).min(*charged);
        loop {
            let begin = |lsn| self.active.begin(sequence, lsn);
            if let Some(place) = self.space.allocate(blocks, bytes, begin)? {
                *charged -= bytes;
                if self.begun.fetch_max(sequence, SeqCst) < sequence {
                    self.began.wake();
                }
                return Ok(place);
            }
            self.space.wait_written(u64::MAX)?;
            self.flush()?;
        }
    }

    /// The checkpoint is durable.
    fn complete(&self, sequence: u64, (start, end): (Lsn, Lsn), list: &ContextList) {
        self.end_writes_to_freed(list);
        self.active.complete(sequence, (start, end), |change| {
            for entry in &list.entries {
                let item = &entry.item;
                match &entry.kind {
                    Some(LoggedKind::Home) => {
                        change(ActiveChange::Insert { item, is_intent: false });
                    }
                    Some(LoggedKind::Intent) => {
                        change(ActiveChange::Insert { item, is_intent: true });
                    }
                    Some(LoggedKind::Cancelled) => change(ActiveChange::Remove(item)),
                    Some(LoggedKind::Done(intent)) => change(ActiveChange::Remove(intent)),
                    Some(LoggedKind::Once) | None => {}
                }
            }
        });
        for entry in &list.entries {
            entry.item.unpin(entry.kind.is_some().then_some(start));
        }
        count(&self.counters.checkpoints, 1);
        count(&self.counters.empty_checkpoints, u64::from(list.entries.is_empty()));
        if !list.entries.is_empty() {
            // Contexts complete in their order.
            self.last_with_items.store(end.0, Relaxed);
        }
        *self.durable.lock() = sequence;
        self.completed.notify_all();
        self.tend_tail();
    }

    /// Waits until no write home is under way that was begun before blocks of the checkpoint were
    /// freed. From here on they may get another owner, over whose data it would write.
    fn end_writes_to_freed(&self, list: &ContextList) {
        let is_freed = |kind: &Option<LoggedKind>| matches!(kind, Some(LoggedKind::Cancelled));
        if list.entries.iter().any(|entry| is_freed(&entry.kind)) {
            drop(self.home.lock());
        }
    }

    /// Waits until the checkpoint of this context, which was pushed, has its first record.
    fn wait_until_begun(&self, sequence: u64) -> Result<()> {
        let has_to_wait = || self.begun.load(SeqCst) < sequence && self.stop.cause().is_none();
        self.began.wait_while(PATIENCE, has_to_wait);
        require_running(&self.stop)
    }

    /// Waits until the context with this sequence, which was pushed, is durable.
    pub(super) fn wait_until_durable(&self, sequence: u64) -> Result<()> {
        let mut durable = self.durable.lock();
        while *durable < sequence {
            require_running(&self.stop)?;
            self.completed.wait_for(&mut durable, PATIENCE);
        }
        Ok(())
    }
}

impl<'l> RunningCheckpoint<'l> {
    /// Writes everything but the last record.
    fn fill(log: &'l LogShared, sequence: u64, list: &ContextList) -> Result<Self> {
        let tid = log.tid(sequence);
        let buffer = log.take_buffer()?;
        let mut checkpoint =
            Self { log, sequence, tid, buffer, start: None, charged: list.charged };
        while !checkpoint.buffer.write(|ops| ops.start(tid)) {
            checkpoint.next_record()?;
        }
        let mut entries = list.entries.iter().filter(|entry| entry.kind.is_some()).peekable();
        // A transaction without items has no header: the kernel takes a header for the beginning of
        // an item, and refuses one without regions.
        if entries.peek().is_some() {
            let regions = u32::try_from(list.regions).unwrap_or(u32::MAX);
            checkpoint.region(&XfsTransactionHeader { tid, regions }.encode())?;
        }
        for entry in entries {
            checkpoint.item(&entry.item)?;
        }
        while !checkpoint.buffer.write(|ops| ops.commit(tid)) {
            checkpoint.next_record()?;
        }
        Ok(checkpoint)
    }

    fn item(&mut self, item: &Arc<dyn LoggedItem>) -> Result<()> {
        // While the vector is copied, its item may be formatted for the next context.
        let taken = item.state().vectors.lock().take(self.sequence);
        let Some(vector) = taken else { return Ok(()) };
        for region in vector.regions().iter() {
            self.region(region)?;
        }
        let mut vectors = item.state().vectors.lock();
        // What is in the next context already changes again and again.
        if item.keeps_vectors() || vectors.sequence > self.sequence {
            vectors.give_back(vector);
        }
        Ok(())
    }

    /// Writes a region, over as many records as it takes.
    fn region(&mut self, region: &[u8]) -> Result<()> {
        let (tid, mut done) = (self.tid, 0);
        loop {
            done = self.buffer.write(|ops| ops.region(tid, region, done));
            if done >= region.len() {
                return Ok(());
            }
            self.next_record()?;
        }
    }

    /// Hands the buffer over to be written, and takes an empty one.
    fn next_record(&mut self) -> Result<()> {
        if self.start.is_none() {
            self.log.wait_until_begun(self.sequence - 1)?;
        }
        let place = self.log.place(self.sequence, &self.buffer, &mut self.charged)?;
        self.start.get_or_insert(place.lsn);
        // While this thread waits for a buffer, others wait until this record is written.
        self.log.submit(std::mem::take(&mut self.buffer), place);
        self.buffer = self.log.take_buffer()?;
        Ok(())
    }

    /// Writes the last record, with the commit op. Returns the first and the last record.
    fn commit(mut self) -> Result<(Lsn, Lsn)> {
        let log = self.log;
        let place = log.place(self.sequence, &self.buffer, &mut self.charged)?;
        log.space.release(self.charged);
        log.space.wait_written(place.number)?;
        if log.space.has_pending(place.number) {
            log.flush()?;
        }
        log.write_record(self.buffer, &place)?;
        log.flush()?;
        Ok((self.start.unwrap_or(place.lsn), place.lsn))
    }
}
