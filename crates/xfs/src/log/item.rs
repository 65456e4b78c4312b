//! What the log knows of the things that transactions change.
//!
//! An item belongs to one object in memory: a buffer, an inode, or an intent. It lives as long as
//! the object, and is logged any number of times. Each time it is formatted into a *vector* of its
//! own, with all its changes since it was last written home, so one copy in the log is enough.
//!
//! ```text
//! commit    size, vectors grow      no lock of the log
//!           pin, format             the context lock, shared; nothing is allocated
//!           or patch                in a vector of the same context
//! push      prove                   before anything of the context is written
//!           vector -> records       the vector goes back to the item as its spare one; that of
//!                                   an inode only if a later context has the inode already
//! durable   unpin, told the LSN     from here on the item is active: it holds the tail
//! home      write_home, written     the item is clean, and the tail may pass it
//! ```
//!
//! An item has at most two vectors. While the newer one is formatted for a context, the other may
//! hold what the context before, which is being written, has of the item.

use std::fmt::Debug;
use std::sync::Arc;

use offshoot_kit::sync;
use offshoot_vfs::Result;
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::XfsLogVector;
use parking_lot::Mutex;

use super::home::HomeWrites;
use super::vectors::LoggedVectors;

/// What becomes of an item when its checkpoint is durable.
#[derive(Clone, Debug)]
pub(crate) enum LoggedKind {
    /// It is active until it is written home: a buffer, an inode. One without regions is *ordered*:
    /// nothing of it is logged, and it holds the tail like others. Such are buffers of new inodes.
    Home,
    /// It is never written home again, and stops to be active: the buffer of a freed block.
    Cancelled,
    /// It is active until its done item is durable. With a done item in the same context neither is
    /// logged.
    Intent,
    /// The end of this intent. It is not active itself.
    Done(Arc<dyn LoggedItem>),
    /// It is logged once, and nothing else is done about it: a chunk of new inodes.
    Once,
}

/// The size of what an item formats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoggedSize {
    /// The bytes of all regions, each padded to a multiple of 4.
    pub(crate) bytes: usize,
    /// The regions; 0 for an ordered item.
    pub(crate) regions: usize,
}

/// How an attempt to write an item home ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HomeOutcome {
    /// Its bytes are in the [`HomeWrites`] of the call, with those of this call or an earlier one.
    Queued,
    /// A context that is not durable has it: the log is forced, and the item is tried again.
    Pinned,
    /// A transaction has it locked: it is tried again.
    Busy,
}

/// A thing that transactions change.
///
/// The committing thread holds the lock of the object from before [`size`](Self::size) until
/// `commit` returns. The log calls [`unpin`](Self::unpin), [`write_home`](Self::write_home) and
/// [`written`](Self::written) from its own threads, without a lock of its own.
pub(crate) trait LoggedItem: Send + Sync + Debug {
    /// What the log keeps about the item.
    fn state(&self) -> &LoggedState;

    /// What becomes of it.
    fn kind(&self) -> LoggedKind;

    /// The exact size of what [`format`](Self::format) adds.
    fn size(&self) -> LoggedSize;

    /// Adds all changes since the item was last written home to the empty vector `to`. Called with
    /// the context lock: it allocates nothing (but for a directory block that lies in several
    /// pieces of the device, which is rare), and takes no lock for which another thread may wait
    /// long.
    fn format(&self, to: &mut XfsLogVector);

    /// Makes of `vector`, which has the item as it was formatted last, what
    /// [`format`](Self::format) would make now, if the regions are as long as before: copies the
    /// bytes that have changed since. Returns false if it cannot. Called as
    /// [`format`](Self::format) is.
    fn patch(&self, _vector: &mut XfsLogVector) -> bool {
        false
    }

    /// Whether the item keeps the memory of a vector whose bytes are in the log, even if no later
    /// context has it yet. Many inodes are in one context and in no other, and wait long until they
    /// are home.
    fn keeps_vectors(&self) -> bool {
        true
    }

    /// Proves what the oldest context that is not proved has of the item. A push calls it before it
    /// writes anything of the context.
    ///
    /// # Errors
    /// Those that end all writing: a commit has made of the item what no reader would take.
    fn prove(&self) -> Result<()> {
        Ok(())
    }

    /// A context has the item for the first time, and formats it next. Until as many calls of
    /// [`unpin`](Self::unpin) as of this, the object is not written home and not evicted.
    fn pin(&self);

    /// A context with the item is durable. `lsn` is the record with its start op: what is written
    /// home from now on carries it. `None` when the item was not logged after all (an intent that
    /// left with its done item).
    fn unpin(&self, lsn: Option<Lsn>);

    /// Adds the bytes of the object, complete with LSN and checksum, to `home`, unless it is pinned
    /// or locked. It never waits for a lock. An inode adds its whole cluster, with all
    /// inodes of it that are neither pinned nor locked. Intents are never asked.
    ///
    /// # Errors
    /// Those that end all writing.
    fn write_home(self: Arc<Self>, home: &mut HomeWrites) -> Result<HomeOutcome>;

    /// The bytes that were added for the item are on the device. `is_clean` says that the item is
    /// not active any more: no newer checkpoint is durable that has it. A context that is not
    /// durable may have it nevertheless. So an item that was pinned since its bytes were taken
    /// keeps all its dirty marks: the log must go on to have all changes since this write.
    fn written(&self, is_clean: bool);
}

/// Where an item is in the list of active ones: by LSN, and then by the order of coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ActivePlace {
    pub(crate) lsn: Lsn,
    pub(super) order: u64,
}

/// What the log keeps about an item.
#[derive(Debug, Default)]
pub(crate) struct LoggedState {
    pub(super) vectors: sync::Mutex<LoggedVectors>,
    /// Changed only under the lock of the list of active items.
    pub(super) active: Mutex<Option<ActivePlace>>,
}

impl LoggedState {
    /// The LSN at which the item is active: the start of the newest durable checkpoint with it.
    /// `None` for a clean item.
    pub(crate) fn active_lsn(&self) -> Option<Lsn> {
        self.active.lock().map(|place| place.lsn)
    }
}
