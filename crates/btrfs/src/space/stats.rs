//! What is counted about space.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use offshoot_vfs::{Errno, Error, Result};

use super::{Purpose, Space};

/// How room is made, from cheap to dear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlushState {
    /// Looking into block groups that were not looked into before, and at what a chunk would hold.
    LookAround,
    /// Flushing delayed items.
    DelayedItems,
    /// Writing back files.
    DirtyData,
    /// Allocating a chunk.
    AllocateChunk,
    /// Committing.
    Commit,
}

impl FlushState {
    /// All states, from cheap to dear.
    pub(crate) const ALL: [Self; 5] =
        [Self::LookAround, Self::DelayedItems, Self::DirtyData, Self::AllocateChunk, Self::Commit];
}

impl fmt::Display for FlushState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LookAround => "look around",
            Self::DelayedItems => "delayed items",
            Self::DirtyData => "dirty data",
            Self::AllocateChunk => "allocate chunk",
            Self::Commit => "commit",
        })
    }
}

/// When room is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Before anybody waits, by the thread of the volume.
    Ahead,
    /// When somebody waits.
    Awaited,
}

/// How often a flush state was entered, and what that gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlushCount {
    /// The state.
    pub state: FlushState,
    /// How often it was entered.
    pub entered: u64,
    /// How often of these by the thread of the volume, before anybody waited.
    pub entered_ahead: u64,
    /// How many of these have not come to their end.
    pub under_way: u64,
    /// By how much there was more room after it, in bytes.
    pub reclaimed_bytes: u64,
}

/// How many buckets a [`Histogram`] has.
pub const BUCKETS: usize = 32;

/// Counts of what took so long: bucket `i` has what took less than 2^i microseconds, and not less
/// than half of that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// The counts. The last has everything that took longer.
    pub buckets: [u64; BUCKETS],
}

impl Histogram {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// A time that this share of all did not exceed, in microseconds: the end of a bucket. `share`
    /// is from 0 to 1.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> u64 {
        #[expect(clippy::cast_precision_loss, reason = "counts of events are far below 2^52")]
        let wanted = self.count() as f64 * share;
        let mut sum = 0;
        for (i, count) in self.buckets.iter().enumerate() {
            sum += count;
            #[expect(clippy::cast_precision_loss, reason = "counts of events are far below 2^52")]
            if sum as f64 >= wanted {
                return 1 << i;
            }
        }
        1 << (BUCKETS - 1)
    }
}

/// What there is of one kind of space, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KindStats {
    /// The kind.
    pub kind: SpaceKind,
    /// All block groups of it.
    pub total_bytes: u64,
    /// What extents take.
    pub used_bytes: u64,
    /// What was taken and is not committed, or was given up and is still needed by the last commit
    /// (*pinned*).
    pub pinned_bytes: u64,
    /// What is free in block groups that were looked into.
    pub free_bytes: u64,
    /// What was not looked into, and is not in use.
    pub unknown_bytes: u64,
    /// What is not in use of block groups whose profile is not that of new ones, so that nothing is
    /// taken from it.
    pub other_profile_bytes: u64,
    /// What operations under way may take.
    pub reserved_bytes: u64,
    /// What has been promised for later.
    pub promised_bytes: u64,
    /// What the next chunk would hold, where promises may count on it: where most of the members
    /// belongs to no chunk.
    pub next_chunk_bytes: u64,
    /// What a commit may take now.
    pub commit_bytes: u64,
    /// What is kept for removals and for chunk allocation.
    pub kept_bytes: u64,
    /// The most that was reserved and promised at a time.
    pub reserved_peak_bytes: u64,
}

/// A kind of space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpaceKind {
    /// For data of files.
    Data,
    /// For trees.
    Metadata,
    /// For both.
    Mixed,
    /// For the chunk tree.
    System,
}

impl fmt::Display for SpaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "data",
            Self::Metadata => "metadata",
            Self::Mixed => "mixed",
            Self::System => "system",
        })
    }
}

/// What happened to reservations since the volume was opened, and what there is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpaceStats {
    /// How long reservations took. Those that were granted at once are in the first bucket.
    pub latency: Histogram,
    /// Reservations that were granted without waiting.
    pub granted_at_once: u64,
    /// Reservations for which there was room a moment later, before they became tickets.
    pub granted_soon: u64,
    /// Tickets that were granted.
    pub tickets_granted: u64,
    /// Tickets that were refused, because there was no room.
    pub tickets_refused: u64,
    /// Tickets that ended because making room failed.
    pub tickets_failed: u64,
    /// What making room did.
    pub flushes: Vec<FlushCount>,
    /// What there is of each kind.
    pub kinds: Vec<KindStats>,
}

/// The counters behind [`SpaceStats`], of what is not common.
#[derive(Debug, Default)]
pub(super) struct Counters {
    latency: [AtomicU64; BUCKETS],
    granted_soon: AtomicU64,
    granted: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    entered: [AtomicU64; FlushState::ALL.len()],
    entered_ahead: [AtomicU64; FlushState::ALL.len()],
    left: [AtomicU64; FlushState::ALL.len()],
    reclaimed: [AtomicU64; FlushState::ALL.len()],
}

impl Counters {
    /// A reservation that was not granted at once took so long.
    fn took(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = (64 - us.leading_zeros() as usize).min(BUCKETS - 1);
        self.latency[bucket].fetch_add(1, Relaxed);
    }

    /// A reservation was granted so long after it was not.
    pub(super) fn looked_again(&self, time: Duration) {
        self.took(time);
        self.granted_soon.fetch_add(1, Relaxed);
    }

    /// A ticket came to this end after so long.
    pub(super) fn waited(&self, time: Duration, result: &Result<()>) {
        self.took(time);
        let outcome = match result {
            Ok(()) => &self.granted,
            Err(Error::Posix { errno, .. }) if *errno == Errno::NOSPC => &self.refused,
            Err(_) => &self.failed,
        };
        outcome.fetch_add(1, Relaxed);
    }

    /// A flush state is entered, whether or not somebody waits.
    fn entered(&self, state: FlushState, when: When) {
        self.entered[state as usize].fetch_add(1, Relaxed);
        self.entered_ahead[state as usize].fetch_add(u64::from(when == When::Ahead), Relaxed);
    }

    fn flushes(&self, state: FlushState) -> FlushCount {
        let count = |counts: &[AtomicU64]| counts[state as usize].load(Relaxed);
        // Nothing has come to its end that was not entered.
        let left = count(&self.left);
        let entered = count(&self.entered);
        FlushCount {
            state,
            entered,
            entered_ahead: count(&self.entered_ahead),
            under_way: entered.saturating_sub(left),
            reclaimed_bytes: count(&self.reclaimed),
        }
    }

    /// It came to its end, and gave so much.
    fn left(&self, state: FlushState, bytes: u64) {
        self.left[state as usize].fetch_add(1, Relaxed);
        self.reclaimed[state as usize].fetch_add(bytes, Relaxed);
    }
}

impl Space {
    /// Makes room in this way, and counts what that gave.
    pub(crate) fn flush<T>(
        &self,
        purpose: Purpose,
        state: FlushState,
        when: When,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let room = self.room(purpose);
        self.stats.entered(state, when);
        let result = work();
        self.stats.left(state, self.room(purpose).saturating_sub(room));
        result
    }

    /// What is left of a kind beside what is spoken for and kept, or missing (then it is 0).
    fn room(&self, purpose: Purpose) -> u64 {
        let (ledger, floor) = (self.ledger(purpose), self.floor(purpose));
        let spoken = ledger.reserved() + ledger.promised();
        (ledger.free() + ledger.next_chunk()).saturating_sub(spoken + floor.commit + floor.kept)
    }

    fn kind_stats(&self, purpose: Purpose) -> KindStats {
        let (ledger, floor) = (self.ledger(purpose), self.floor(purpose));
        let kind = match purpose {
            Purpose::System => SpaceKind::System,
            _ if self.is_mixed() => SpaceKind::Mixed,
            Purpose::Data => SpaceKind::Data,
            Purpose::Metadata => SpaceKind::Metadata,
        };
        let mut stats = KindStats {
            kind,
            total_bytes: 0,
            used_bytes: 0,
            pinned_bytes: 0,
            free_bytes: ledger.free(),
            unknown_bytes: 0,
            other_profile_bytes: 0,
            reserved_bytes: ledger.reserved(),
            promised_bytes: ledger.promised(),
            next_chunk_bytes: ledger.next_chunk(),
            commit_bytes: floor.commit,
            kept_bytes: floor.kept,
            reserved_peak_bytes: ledger.peak(),
        };
        for group in self.groups_for(purpose) {
            let usage = group.usage();
            stats.total_bytes += group.len;
            stats.used_bytes += usage.used;
            stats.pinned_bytes += usage.between;
            let unused = group.len.saturating_sub(usage.used + usage.between);
            if !self.may_take(purpose, &group) {
                stats.other_profile_bytes += unused;
            } else if !usage.is_known {
                stats.unknown_bytes += unused;
            }
        }
        stats
    }

    /// What happened to reservations since the volume was opened, and what there is of each kind of
    /// space. So many were granted at once.
    pub(crate) fn stats(&self, granted_at_once: u64) -> SpaceStats {
        let counters = &self.stats;
        let mut latency =
            Histogram { buckets: counters.latency.each_ref().map(|count| count.load(Relaxed)) };
        latency.buckets[0] += granted_at_once;
        let flushes = FlushState::ALL.map(|state| counters.flushes(state));
        let purposes = [Purpose::Data, Purpose::Metadata, Purpose::System];
        let purposes = if self.is_mixed() { &purposes[1..] } else { &purposes };
        SpaceStats {
            latency,
            granted_at_once,
            granted_soon: counters.granted_soon.load(Relaxed),
            tickets_granted: counters.granted.load(Relaxed),
            tickets_refused: counters.refused.load(Relaxed),
            tickets_failed: counters.failed.load(Relaxed),
            flushes: flushes.to_vec(),
            kinds: purposes.iter().map(|&purpose| self.kind_stats(purpose)).collect(),
        }
    }
}
