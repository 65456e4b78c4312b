//! The log: its ring on the device, and delayed logging of what transactions change.
//!
//! ```text
//! transaction    reserve ── change items ── commit ── (roll ── change ── commit)
//!                  ticket                     context: each item once, whatever often it changes
//! push           context ──> checkpoint ──> records ──> ring          checkpoint, records
//! durable        items are active, and hold the tail                  active
//! home           items are written to their places, the tail moves    tail, home
//! ```
//!
//! What is committed is in memory until its context is pushed: when a thread forces it, when the
//! context is as large as it may be, or when the tail has to move. A crash leaves a beginning of
//! all contexts, each whole or absent.
//!
//! The log knows what transactions change only as [`LoggedItem`]s. An error of the device ends all
//! writing: what the device holds is a beginning too, and every later call says so.
//!
//! `disk` is the ring on the device, and `unmount` the record that ends it, for `recover` and
//! `mkfs` too; `space` and `ticket` give room in it; `item` and `vectors` are what is logged,
//! `context` gathers it, `checkpoint` and `records` write it; `active`, `tail` and `home` bring it
//! home.
//!
//! Locks, outer first: the turn to fill, or that to write home; the context lock; the vectors of an
//! item; the list of a context; the room of the ring; the list of active items; the place of an
//! item in it. Locks in which threads wait for a change, and those that are taken under them, are
//! the ones of `parking_lot`, which the model checker does not see.

mod active;
mod checkpoint;
mod context;
mod disk;
mod home;
mod item;
mod records;
mod signal;
mod sizes;
mod space;
mod statistics;
mod tail;
mod ticket;
mod unmount;
mod vectors;

#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use offshoot_kit::counter::{WriteStop, count};
use offshoot_kit::sync::Mutex;
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::XfsLogEnds;
use parking_lot::Condvar;

pub(crate) use disk::LogDisk;
pub(crate) use home::HomeWrites;
pub(crate) use item::{HomeOutcome, LoggedItem, LoggedKind, LoggedSize, LoggedState};
pub(crate) use statistics::LogStatistics;
pub(crate) use ticket::LogTicket;
pub(crate) use unmount::unmount_record;

use active::ActiveItems;
use checkpoint::PushReason;
use context::LogContexts;
use records::RecordBuffers;
use signal::ChangeSignal;
pub(crate) use signal::WorkSignal;
use sizes::RecordSizes;
use space::LogSpace;
use statistics::LogCounters;

/// The threads that write records.
const WRITERS: usize = 2;

/// The most bytes of a context before it is pushed in the background.
const MOST_CONTEXT: u64 = 32 << 20;

/// The same where the threads that reserve room push contexts: they wait for it, and gain nothing
/// from a large one. What a context has is in memory several times: as items, and as vectors.
const MOST_CONTEXT_IN_LINE: u64 = 8 << 20;

/// How often a thread looks again that waits for a context to be pushed.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A context: what was committed between two pushes. Later ones have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LogSequence(pub(crate) u64);

/// How the log works.
#[derive(Clone, Debug)]
pub(crate) struct XfsLogOptions {
    /// The bytes of a context that is pushed in the background; at twice that, new transactions
    /// wait. An eighth of the log by itself, and 32 MiB at most, or 8 MiB in line.
    pub(crate) context_bytes: Option<u64>,
    /// The bytes of a log buffer, 32 KiB to 256 KiB; by itself the most for logs from 32 MiB on.
    /// A log with records to be kept goes on with their size.
    pub(crate) record_bytes: Option<u32>,
    /// What sizes of vectors are rounded up to.
    pub(crate) shadow_rounding: usize,
    /// The threads that reserve room push contexts and bring them home, before they wait for it; no
    /// background thread does. Transaction ids follow from where in the ring the log begins.
    pub(crate) is_in_line: bool,
}

impl Default for XfsLogOptions {
    fn default() -> Self {
        Self { context_bytes: None, record_bytes: None, shadow_rounding: 512, is_in_line: false }
    }
}

/// The log of a volume that is written.
#[derive(Debug)]
pub(crate) struct XfsLog {
    shared: Arc<LogShared>,
    writers: Vec<JoinHandle<()>>,
    /// The threads that push and that move the tail, which need the writers.
    workers: Mutex<Vec<JoinHandle<()>>>,
}

/// What the threads of a log share.
#[derive(Debug)]
struct LogShared {
    disk: LogDisk,
    sizes: RecordSizes,
    space: LogSpace,
    contexts: LogContexts,
    context_bytes: u64,
    buffers: RecordBuffers,
    active: ActiveItems,
    /// The turn to fill records.
    fill: Mutex<()>,
    /// The turn to write a batch of items home.
    home: Mutex<()>,
    /// The newest context whose checkpoint has its first record.
    begun: AtomicU64,
    began: ChangeSignal,
    /// The last record of the newest checkpoint with items.
    last_with_items: AtomicU64,
    /// The newest durable context.
    durable: parking_lot::Mutex<u64>,
    completed: Condvar,
    /// Transactions wait here that find the context too large.
    throttle: ChangeSignal,
    push_work: WorkSignal,
    tail_work: WorkSignal,
    /// The transaction id of the first checkpoint, less one.
    first_tid: u32,
    is_in_line: bool,
    stop: Arc<WriteStop>,
    counters: LogCounters,
}

/// `EROFS` when writing has ended.
fn require_running(stop: &WriteStop) -> Result<()> {
    match stop.cause() {
        None => Ok(()),
        Some(cause) => Err(Error::posix(Errno::ROFS, format!("the log, after this: {cause}"))),
    }
}

impl XfsLog {
    /// Proves that the volume is still written.
    ///
    /// # Errors
    /// `EROFS` when writing has ended.
    pub(crate) fn require_running(&self) -> Result<()> {
        require_running(&self.shared.stop)
    }

    /// Begins to write the log at the head that was found in it.
    ///
    /// The log is clean, or all of it was replayed and is durable at home but for the intents
    /// `old`, each with its checkpoint: they hold the tail until their done items are durable.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn start(
        disk: LogDisk,
        ends: &XfsLogEnds,
        old: &[(Arc<dyn LoggedItem>, Lsn)],
        stop: &Arc<WriteStop>,
        options: &XfsLogOptions,
    ) -> Result<Self> {
        require_running(stop)?;
        // Recovery takes all records from the tail on as those of one size of buffers.
        let kept_last = ends.last.as_ref().filter(|_| !ends.is_clean);
        let kept = kept_last.map(|last| last.buffer);
        let sizes = RecordSizes::new(disk.ring, disk.unit, kept.or(options.record_bytes));
        let space = LogSpace::new(disk.ring, sizes.capacity(), stop, (ends.tail, ends.head));
        let active = ActiveItems::new(ends.head);
        for (intent, lsn) in old {
            active.hold(intent, *lsn);
        }
        if let Some(last) = &ends.last {
            disk.stamp(last, ends.tail, ends.head)?;
        }
        let last_replayed = kept_last.map_or(Lsn(0), |last| last.lsn);
        let most = if options.is_in_line { MOST_CONTEXT_IN_LINE } else { MOST_CONTEXT };
        let usual = (sizes.ring / 8).min(most);
        let shared = Arc::new(LogShared {
            space,
            contexts: LogContexts::new(options.shadow_rounding),
            context_bytes: options.context_bytes.map_or(usual, |bytes| bytes.min(usual)),
            buffers: RecordBuffers::new(&sizes),
            active,
            disk,
            sizes,
            fill: Mutex::default(),
            home: Mutex::default(),
            begun: AtomicU64::new(0),
            began: ChangeSignal::default(),
            last_with_items: AtomicU64::new(last_replayed.0),
            durable: parking_lot::Mutex::default(),
            completed: Condvar::new(),
            throttle: ChangeSignal::default(),
            push_work: WorkSignal::default(),
            tail_work: WorkSignal::default(),
            first_tid: if options.is_in_line { number_of(ends.head) } else { random_number() },
            is_in_line: options.is_in_line,
            stop: stop.clone(),
            counters: LogCounters::default(),
        });
        let mut log = Self { shared, writers: Vec::new(), workers: Mutex::default() };
        for _ in 0..WRITERS {
            log.writers.push(log.spawn("xfs log writer", LogShared::write_records)?);
        }
        let workers = [
            log.spawn("xfs log push", LogShared::push_in_background)?,
            log.spawn("xfs log tail", LogShared::tend)?,
        ];
        log.workers.lock().extend(workers);
        Ok(log)
    }

    fn spawn(&self, name: &str, work: fn(&LogShared)) -> Result<JoinHandle<()>> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || work(&shared));
        thread.map_err(|error| Error::io(format!("starting the thread {name:?}"), error))
    }

    fn join(&self, threads: Vec<JoinHandle<()>>) {
        for thread in threads {
            if thread.join().is_err() {
                self.shared.stop.set_quietly("a panic of a thread of the log");
            }
        }
    }

    /// Waits, first come first served, until the log has room for `steps` steps of `bytes` bytes of
    /// items each. The caller holds no lock of an item.
    ///
    /// # Errors
    /// When writing has ended, or the log is too small for that.
    pub(crate) fn reserve(&self, bytes: u64, steps: u32) -> Result<LogTicket> {
        LogTicket::reserve(&self.shared, bytes, steps)
    }

    /// Commits a transaction: adds its items to the current context. The caller has them all
    /// locked. Takes the room that they need from the ticket; neither waits nor allocates for them.
    ///
    /// # Errors
    /// When writing has ended. When the ticket has too little room, writing ends.
    pub(crate) fn commit(
        &self,
        ticket: &mut LogTicket,
        items: &[Arc<dyn LoggedItem>],
    ) -> Result<LogSequence> {
        let log = &self.shared;
        require_running(&log.stop)?;
        if items.is_empty() {
            return Ok(LogSequence(log.contexts.newest()));
        }
        let spend = |bytes| ticket.spend(bytes);
        let outcome = log.contexts.commit(items, &log.sizes, &log.counters, spend);
        let outcome = outcome.inspect_err(|error| log.fail(error))?;
        if outcome.bytes >= log.context_bytes && !log.is_in_line {
            log.push_work.want();
        }
        Ok(LogSequence(outcome.sequence))
    }

    /// Makes this context and all before it durable.
    ///
    /// # Errors
    /// When writing has ended before that.
    pub(crate) fn force(&self, sequence: LogSequence) -> Result<()> {
        self.shared.force(sequence.0)
    }

    /// Makes everything durable that was committed.
    ///
    /// # Errors
    /// As [`force`](Self::force).
    pub(crate) fn force_all(&self) -> Result<()> {
        self.shared.force(self.shared.contexts.newest())
    }

    /// The newest context that is durable, as all before it are.
    pub(crate) fn durable(&self) -> LogSequence {
        LogSequence(*self.shared.durable.lock())
    }

    /// Whether half of the ring or more lies between a record and the head: what is active there
    /// should not stay.
    pub(crate) fn is_near_tail(&self, lsn: Lsn) -> bool {
        let head = self.shared.space.usage().head;
        self.shared.bytes_between(lsn, head) >= self.shared.sizes.ring / 2
    }

    /// The oldest record that recovery would need.
    pub(crate) fn tail(&self) -> Lsn {
        self.shared.active.tail()
    }

    /// Lets a background thread push the current context.
    #[cfg(test)]
    pub(crate) fn push_in_background(&self) {
        self.shared.push_work.want();
    }

    /// Makes everything durable that was committed, and writes it home, but intents.
    ///
    /// # Errors
    /// As [`force`](Self::force).
    #[cfg(test)]
    pub(crate) fn push_tail(&self) -> Result<()> {
        self.shared.push_tail()
    }

    /// Brings everything home but intents, and covers the log: a recovery has nothing to do but
    /// checkpoints without items, unless transactions commit meanwhile.
    ///
    /// # Errors
    /// As [`force`](Self::force).
    pub(crate) fn quiesce(&self) -> Result<()> {
        self.shared.quiesce()
    }

    /// Brings everything home, and writes that the log is empty. No transaction runs, and none
    /// commits behind it.
    ///
    /// # Errors
    /// As [`force`](Self::force), and `EBUSY` while an intent has no end: the log is recovered
    /// then.
    pub(crate) fn unmount(&self) -> Result<()> {
        // The thread that moves the tail may be about to tell it in a record, which would lie
        // behind the one that says that the log is empty.
        self.end_workers();
        self.shared.end()
    }

    fn end_workers(&self) {
        self.shared.push_work.end();
        self.shared.tail_work.end();
        let workers = std::mem::take(&mut *self.workers.lock());
        self.join(workers);
    }

    /// The free bytes of the log with which a ticket of one step of `bytes` does not wait.
    pub(crate) fn room_for(&self, bytes: u64) -> u64 {
        let sizes = &self.shared.sizes;
        sizes.checkpoint(bytes) + sizes.ring.saturating_sub(sizes.capacity())
    }

    /// The bytes of the record that tells that the tail has moved.
    pub(crate) fn room_to_tell(&self) -> u64 {
        self.shared.sizes.empty_checkpoint()
    }

    /// What the log did.
    pub(crate) fn statistics(&self) -> LogStatistics {
        self.shared.counters.get()
    }
}

/// Ends the threads. What was not forced is lost, as in a crash.
impl Drop for XfsLog {
    fn drop(&mut self) {
        self.end_workers();
        // A checkpoint that one of them had begun needed the writers.
        self.shared.buffers.end();
        let writers = std::mem::take(&mut self.writers);
        self.join(writers);
    }
}

impl LogShared {
    fn force(&self, sequence: u64) -> Result<()> {
        require_running(&self.stop)?;
        count(&self.counters.forces, 1);
        let sequence = sequence.min(self.contexts.newest());
        self.push(PushReason::Sequence(sequence))?;
        self.wait_until_durable(sequence)
    }

    fn push_in_background(&self) {
        while self.push_work.wait() {
            let sequence = self.contexts.current().sequence;
            // An error ended all writing, and the next call tells it.
            if self.push(PushReason::Sequence(sequence)).is_err() {
                return;
            }
        }
    }

    /// Does the work of the background threads, where there is some and they do none.
    fn keep_up_in_line(&self) -> Result<()> {
        if self.is_in_line && self.contexts.current().bytes >= self.context_bytes {
            self.push_tail()?;
        }
        Ok(())
    }

    /// Waits while the context is twice as large as it may be.
    fn throttle(&self) -> Result<()> {
        self.throttle.wait_while(LOOK_AGAIN, || {
            let is_held = self.contexts.current().bytes >= 2 * self.context_bytes;
            if is_held {
                self.push_work.want();
            }
            is_held && self.stop.cause().is_none()
        });
        require_running(&self.stop)
    }

    /// A thread is about to wait for room.
    fn wait_for_room(&self) {
        count(&self.counters.waits, 1);
        self.tail_work.want();
    }

    /// Lets the background thread look whether the tail has to move.
    fn tend_tail(&self) {
        if !self.is_in_line {
            self.tail_work.want();
        }
    }

    /// The transaction id of a checkpoint. Those in the log from before a crash are others.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "only ids of open transactions must differ"
    )]
    fn tid(&self, sequence: u64) -> u32 {
        self.first_tid.wrapping_add(sequence as u32).max(1)
    }

    /// Ends all writing.
    fn fail(&self, error: &Error) {
        self.stop.set(&error.to_string());
        self.space.wake();
        self.buffers.wake();
        self.throttle.wake();
        self.began.wake();
        drop(self.durable.lock());
        self.completed.notify_all();
    }
}

/// A number that follows from a position in the log, and is another one for another position.
fn number_of(lsn: Lsn) -> u32 {
    // The multiplier of Fibonacci hashing: near positions get numbers that are far from each other.
    (lsn.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

#[expect(clippy::cast_possible_truncation, reason = "half of it is random too")]
fn random_number() -> u32 {
    RandomState::new().build_hasher().finish() as u32
}
