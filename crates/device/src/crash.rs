//! A device that remembers what was written to it, and what a power cut could leave.
//!
//! [`CrashDevice`] keeps a log over a base image that it never changes. The barriers in
//! the log divide it into epochs:
//!
//! ```text
//!   base | w0 w1 w2 | w3 | w4 m0 w5 w6 m1      w: a write or a discard
//!        |  epoch 0 | 1  |  epoch 2            m: a mark    |: a flush that returned
//! ```
//!
//! # The rules
//!
//! A *cut* is a moment between two entries of the log at which the power fails. A write is
//! *pending* when it precedes the cut and no barrier lies between them. After a cut,
//!
//! 1. the medium has every write before the last barrier that precedes the cut, whole and in log
//!    order;
//! 2. each pending write is either there or missing;
//! 3. pending writes that overlap may have been done in any order;
//! 4. a pending write that it has may be *torn*: only some of its sectors are there;
//!
//! and it has nothing else. When it misses all pending writes, the device lost its volatile cache.
//! When it has exactly the first few of them, the cut found the cache empty.
//!
//! A state does not tell when the cut was: every cut from w4 to the end of epoch 2 can leave the
//! state with w4 alone. All these cuts are one [`CrashState`], which says how many marks precede
//! the earliest and the latest of them:
//!
//! ```text
//!   state        writes there               earliest cut      latest cut
//!   epoch 2, {}    w0 w1 w2 w3                 behind w3        behind m1
//!   epoch 2, {w4}  w0 w1 w2 w3 w4              behind w4        behind m1
//!   epoch 2, {w5}  w0 w1 w2 w3 w5              behind w5        behind m1
//! ```
//!
//! The state with all of epoch 1 is the state with nothing of epoch 2, and is built once. A mark
//! behind a barrier precedes the latest cut of every state of its own epoch and of later epochs.
//! All these states have everything that is before the barrier. So a test must find what such a
//! mark acknowledges as durable in each of them.
//!
//! # Several devices
//!
//! A power cut stops all members of a volume at once, and each member loses its own cache.
//! [`CrashDevice::set`] makes devices with one log, in which a barrier is of one device only:
//!
//! ```text
//!   device 0   w0      w2 |0          w5     |0     an epoch ends with the barrier of any device;
//!   device 1      w1         w3 |1  w4              its pending writes are those of all devices:
//!   epoch      0          | 1   | 2          |      {w0 w1 w2}, {w1 w3}, {w4 w5}
//! ```
//!
//! A barrier of device 0 ends the epoch, but writes to device 1 stay pending in the next epoch. So
//! the same state may be built in several epochs, each time with the marks of that epoch.
//!
//! # What is built
//!
//! | | states of one epoch of n writes |
//! |---|---|
//! | always | every prefix; if torn ones are asked for, every prefix with the next write torn |
//! | n up to [`CrashPlan::exhaustive_limit`] | every subset; every order of up to four overlapping writes, and a sample of orders beyond; if asked for, each subset with one write torn |
//! | n above | [`CrashPlan::samples_per_epoch`] random subsets with many, half or few of the writes, in log order or shuffled; if asked for, some of them torn |
//!
//! The same log and plan give the same states in the same order.

mod choice;
mod random;
mod states;

use std::fmt;
use std::io::{self, IoSlice};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::{BlockDevice, MemoryDevice, request_range, together};

pub use states::{CrashState, CrashStates};

/// A device over a base image that keeps all changes and barriers in a log.
///
/// Its requests are atomic and its barrier takes no time: a flush ends the epoch of every write
/// that is in the log when the flush begins, even of a write that has not returned yet.
#[derive(Debug)]
pub struct CrashDevice {
    /// The index of the device in its set.
    number: usize,
    bases: Arc<[Arc<dyn BlockDevice>]>,
    /// The base with everything in the log applied, which is what reads see.
    now: MemoryDevice,
    /// The log of the whole set. A request holds its lock while it changes `now`, so that the log
    /// and `now` agree on the order.
    log: Arc<Mutex<Vec<CrashEntry>>>,
}

/// An entry of the log of a [`CrashDevice`]: a request or a mark.
#[derive(Clone)]
pub enum CrashEntry {
    /// A write.
    Write {
        /// The index of the device in its set.
        device: usize,
        /// Its first byte on the device.
        offset: u64,
        /// What was written.
        data: Arc<[u8]>,
    },
    /// A discard. It leaves bytes in its range that no caller wrote: those of
    /// [`MemoryDevice::spoil`].
    Discard {
        /// The index of the device in its set.
        device: usize,
        /// Its first byte on the device.
        offset: u64,
        /// How many bytes it covers.
        len: u64,
    },
    /// A flush that returned.
    Barrier {
        /// The index of the device in its set.
        device: usize,
    },
    /// A mark of the application, such as "the fsync of X returned".
    Mark(Arc<str>),
}

/// The log of a set of [`CrashDevice`]s at one moment, with the images it starts from.
#[derive(Clone, Debug)]
pub struct CrashLog {
    bases: Arc<[Arc<dyn BlockDevice>]>,
    entries: Arc<[CrashEntry]>,
}

/// Which of the possible states of a log are built.
#[derive(Clone, Copy, Debug)]
pub struct CrashPlan {
    /// All subsets of an epoch are built when it has at most this many writes. The largest limit is
    /// 16; a larger number counts as 16.
    pub exhaustive_limit: usize,
    /// How many random states are built of each larger epoch, in addition to its prefixes.
    pub samples_per_epoch: usize,
    /// The seed of the random choices.
    pub seed: u64,
    /// Whether states with torn writes are built as well.
    pub tears: bool,
}

/// Shows the offset and the length of a write without its bytes.
impl fmt::Debug for CrashEntry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { device, offset, data } => {
                write!(formatter, "write {offset}+{} of {device}", data.len())
            }
            Self::Discard { device, offset, len } => {
                write!(formatter, "discard {offset}+{len} of {device}")
            }
            Self::Barrier { device } => write!(formatter, "barrier of {device}"),
            Self::Mark(tag) => write!(formatter, "mark {tag:?}"),
        }
    }
}

impl Default for CrashPlan {
    fn default() -> Self {
        Self { exhaustive_limit: 6, samples_per_epoch: 64, seed: 0, tears: true }
    }
}

impl CrashDevice {
    /// A device that shows `base`, with an empty log.
    #[must_use]
    pub fn new(base: Arc<dyn BlockDevice>) -> Self {
        Self::set(vec![base]).swap_remove(0)
    }

    /// Devices that show `bases`, with one log that is empty.
    #[must_use]
    pub fn set(bases: Vec<Arc<dyn BlockDevice>>) -> Vec<Self> {
        let (bases, log): (Arc<[_]>, _) = (bases.into(), Arc::<Mutex<_>>::default());
        let device = |(number, base): (usize, &Arc<dyn BlockDevice>)| {
            let now = MemoryDevice::over(base.clone());
            Self { number, bases: bases.clone(), now, log: log.clone() }
        };
        bases.iter().enumerate().map(device).collect()
    }

    /// Appends a mark of the application to the log.
    pub fn mark(&self, tag: &str) {
        self.log.lock().push(CrashEntry::Mark(tag.into()));
    }

    /// The log of the whole set as it is now.
    #[must_use]
    pub fn log(&self) -> CrashLog {
        CrashLog { bases: self.bases.clone(), entries: self.log.lock().as_slice().into() }
    }
}

impl CrashLog {
    /// Everything that the devices have seen, in its order.
    #[must_use]
    pub fn entries(&self) -> &[CrashEntry] {
        &self.entries
    }

    /// The states that a power cut could have left, as far as `plan` asks for them.
    #[must_use]
    pub fn states(&self, plan: &CrashPlan) -> CrashStates {
        self.states_torn_where(plan, &|_, _| true)
    }

    /// The same states, in which a write is torn only if `is_tearable` holds for its first byte on
    /// the device and its bytes. It is for formats that rely on some writes being whole.
    #[must_use]
    pub fn states_torn_where(
        &self,
        plan: &CrashPlan,
        is_tearable: &dyn Fn(u64, &[u8]) -> bool,
    ) -> CrashStates {
        CrashStates::new(self.clone(), plan, is_tearable)
    }
}

impl BlockDevice for CrashDevice {
    fn name(&self) -> &str {
        self.bases[self.number].name()
    }

    fn size_bytes(&self) -> u64 {
        self.bases[self.number].size_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.now.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let data: Arc<[u8]> = buf.into();
        let mut log = self.log.lock();
        self.now.write_at(offset, &data)?;
        if !data.is_empty() {
            log.push(CrashEntry::Write { device: self.number, offset, data });
        }
        Ok(())
    }

    /// A vectored write is one request, so it is one entry of the log.
    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.write_at(offset, &together(bufs))
    }

    fn flush(&self) -> io::Result<()> {
        self.log.lock().push(CrashEntry::Barrier { device: self.number });
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        request_range(self.size_bytes(), offset, len)?;
        let mut log = self.log.lock();
        self.now.spoil(offset, len)?;
        if len > 0 {
            log.push(CrashEntry::Discard { device: self.number, offset, len });
        }
        Ok(())
    }
}
