//! Statistics of space.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use offshoot_vfs::{Errno, Error, Result};
use tracing::debug;

use super::{Purpose, Space};
use crate::events::{RECLAIM, clock, micros};

/// The ways to make room, from cheap to expensive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlushState {
    /// Loading the free ranges of more block groups, and computing the size of the next chunk.
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
    /// All states, from cheap to expensive.
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
pub(crate) enum FlushTime {
    /// Before a caller waits, by the background thread of the volume.
    Ahead,
    /// While a caller waits.
    Awaited,
}

/// How often a flush state was entered, and how much room it made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlushCount {
    /// The state.
    pub state: FlushState,
    /// How often it was entered.
    pub entered: u64,
    /// How often the background thread entered it, before a caller waited.
    pub entered_ahead: u64,
    /// How many of these have not ended yet.
    pub under_way: u64,
    /// The room that it made, in bytes.
    pub reclaimed_bytes: u64,
}

/// How many buckets a [`Histogram`] has.
pub const BUCKETS: usize = 32;

/// Counts of durations. Bucket `i` counts those from 2^(i-1) to less than 2^i microseconds: bucket
/// 4 those from 8 to 15. Bucket 0 counts those below one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// The counts. The last one also has all longer durations.
    pub buckets: [u64; BUCKETS],
}

impl Histogram {
    /// The number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// A duration that the given share of all did not exceed, in microseconds: the end of a bucket.
    /// `share` is from 0 to 1; 0.5 gives the median.
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

/// The space of one kind, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KindStats {
    /// The kind.
    pub kind: SpaceKind,
    /// The sizes of all its block groups.
    pub total_bytes: u64,
    /// The bytes of extents.
    pub used_bytes: u64,
    /// The bytes that were taken and are not committed, or that were given up and that the last
    /// commit still needs (*pinned*).
    pub pinned_bytes: u64,
    /// The free bytes of block groups that are loaded.
    pub free_bytes: u64,
    /// The bytes that are not in use, of block groups that are not loaded.
    pub unknown_bytes: u64,
    /// The bytes that are not in use, of block groups with another profile than new ones: nothing
    /// is taken from them.
    pub other_profile_bytes: u64,
    /// The bytes that operations under way may take.
    pub reserved_bytes: u64,
    /// The bytes that are promised for later.
    pub promised_bytes: u64,
    /// The bytes that the next chunk would hold, if promises may count on it; 0 when less than half
    /// of the members is unallocated.
    pub next_chunk_bytes: u64,
    /// The bytes that a commit may take now.
    pub commit_bytes: u64,
    /// The reserve for removals and for chunk allocation, in bytes.
    pub kept_bytes: u64,
    /// The most bytes that were reserved and promised at one time.
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

/// What happened to reservations since the volume was opened, and the space that exists now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpaceStats {
    /// The durations of reservations. Those that were granted at once are in the first bucket.
    pub latency: Histogram,
    /// Reservations that were granted without waiting.
    pub granted_at_once: u64,
    /// Reservations that were granted on a retry, before they became tickets.
    pub granted_soon: u64,
    /// Tickets that were granted.
    pub tickets_granted: u64,
    /// Tickets that were refused, because there was no room.
    pub tickets_refused: u64,
    /// Tickets that ended because making room failed.
    pub tickets_failed: u64,
    /// The work of making room, by state.
    pub flushes: Vec<FlushCount>,
    /// The space of each kind.
    pub kinds: Vec<KindStats>,
}

/// The counters behind [`SpaceStats`], except the frequent ones.
#[derive(Debug, Default)]
pub(super) struct SpaceCounters {
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

impl SpaceCounters {
    /// Counts the duration of a reservation that was not granted at once.
    fn took(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = (64 - us.leading_zeros() as usize).min(BUCKETS - 1);
        self.latency[bucket].fetch_add(1, Relaxed);
    }

    /// Counts a reservation that was granted on a retry, and its duration.
    pub(super) fn looked_again(&self, time: Duration) {
        self.took(time);
        self.granted_soon.fetch_add(1, Relaxed);
    }

    /// Counts a ticket that ended with `result`, and its duration.
    pub(super) fn waited(&self, time: Duration, result: &Result<()>) {
        self.took(time);
        let outcome = match result {
            Ok(()) => &self.granted,
            Err(Error::Posix { errno, .. }) if *errno == Errno::NOSPC => &self.refused,
            Err(_) => &self.failed,
        };
        outcome.fetch_add(1, Relaxed);
    }

    /// Counts that a flush state is entered.
    fn entered(&self, state: FlushState, when: FlushTime) {
        self.entered[state as usize].fetch_add(1, Relaxed);
        self.entered_ahead[state as usize].fetch_add(u64::from(when == FlushTime::Ahead), Relaxed);
    }

    fn flushes(&self, state: FlushState) -> FlushCount {
        let count = |counts: &[AtomicU64]| counts[state as usize].load(Relaxed);
        // Reading `left` first keeps the difference from falling below zero.
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

    /// Counts that a flush state ended, and how much room it made.
    fn left(&self, state: FlushState, bytes: u64) {
        self.left[state as usize].fetch_add(1, Relaxed);
        self.reclaimed[state as usize].fetch_add(bytes, Relaxed);
    }
}

impl Space {
    /// Makes room by `work`, and counts how much room it made.
    pub(crate) fn flush<T>(
        &self,
        purpose: Purpose,
        state: FlushState,
        when: FlushTime,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let room = self.room(purpose);
        self.stats.entered(state, when);
        let clock = clock!(RECLAIM, DEBUG);
        debug!(target: RECLAIM, %purpose, %state, ?when, room, "a flush state begins");
        let result = work();
        debug!(
            target: RECLAIM,
            %purpose,
            %state,
            bytes = self.room(purpose).saturating_sub(room),
            us = micros(clock),
            error = result.as_ref().err().map(tracing::field::display),
            "the flush state has ended",
        );
        self.stats.left(state, self.room(purpose).saturating_sub(room));
        result
    }

    /// The bytes of a kind that remain beside all claims and reserves; 0 when too few remain.
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
        let taken_from = self.flags_for(purpose).0;
        for (flags, sums) in self.sums_of_type(purpose) {
            stats.total_bytes += sums.len;
            stats.used_bytes += sums.used;
            stats.pinned_bytes += sums.between;
            if flags.0 & taken_from == taken_from {
                stats.unknown_bytes += sums.unknown;
            } else {
                stats.other_profile_bytes += sums.unused();
            }
        }
        stats
    }

    /// The statistics since the volume was opened. `granted_at_once` comes from the counters of the
    /// volume.
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
