//! Counters of what the engine does.
//!
//! A counter is declared once, in the list below. Its comment is the documentation of the field of
//! [`Stats`], and also the text of [`Stats::counters`], so programs that show counters need no list
//! of their own.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use offshoot_kit::counter::Counter;

use crate::shared::Padded;

/// The number of shards of the counters: about the number of threads that count at once.
const SHARDS: usize = 16;

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct EngineCounters {
    shards: [Padded<CounterShard>; SHARDS],
    peaks: Peaks,
}

impl EngineCounters {
    fn own(&self) -> &CounterShard {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static OWN: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
        }
        &self.shards[OWN.with(|own| *own)]
    }

    /// Counts a lock taken for writing, and returns it: `free` if it was free, or else the result
    /// of `wait`.
    pub(crate) fn lock<G>(&self, free: Option<G>, wait: impl FnOnce() -> G) -> G {
        self.lock_taken();
        free.unwrap_or_else(|| {
            self.lock_waited();
            wait()
        })
    }

    /// As [`lock`](Self::lock), for reading.
    pub(crate) fn lock_shared<G>(&self, free: Option<G>, wait: impl FnOnce() -> G) -> G {
        self.shared_lock_taken();
        free.unwrap_or_else(|| {
            self.shared_lock_waited();
            wait()
        })
    }
}

macro_rules! counters {
    (
        sums { $($(#[doc = $about:literal])+ $field:ident, $count:ident($($by:ident)?);)* }
        peaks { $($(#[doc = $most:literal])+ $peak:ident, $note:ident();)* }
    ) => {
        /// What the engine has done since the volume was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $about])+ pub $field: u64,)*
            $($(#[doc = $most])+ pub $peak: u64,)*
        }

        impl Stats {
            /// All counters, in the order of their declaration.
            pub fn counters(&self) -> impl Iterator<Item = Counter> + use<> {
                [
                    $(Counter {
                        name: stringify!($field),
                        about: concat!($($about),+).trim_ascii(),
                        value: self.$field,
                    },)*
                    $(Counter {
                        name: stringify!($peak),
                        about: concat!($($most),+).trim_ascii(),
                        value: self.$peak,
                    },)*
                ]
                .into_iter()
            }
        }

        /// The counters of some threads. Shards share no cache line.
        #[derive(Debug, Default)]
        struct CounterShard { $($field: AtomicU64,)* }

        /// The peaks.
        #[derive(Debug, Default)]
        struct Peaks { $($peak: AtomicU64,)* }

        impl EngineCounters {
            $($(#[doc = $about])+ pub(crate) fn $count(&self $(, $by: usize)?) {
                let by = 1u64 $(* $by as u64)?;
                self.own().$field.fetch_add(by, Ordering::Relaxed);
            })*

            $($(#[doc = $most])+ pub(crate) fn $note(&self, now: u64) {
                if now > self.peaks.$peak.load(Ordering::Relaxed) {
                    self.peaks.$peak.fetch_max(now, Ordering::Relaxed);
                }
            })*

            pub(crate) fn read(&self) -> Stats {
                let mut all = Stats::default();
                for shard in &self.shards {
                    $(all.$field += shard.$field.load(Ordering::Relaxed);)*
                }
                $(all.$peak = self.peaks.$peak.load(Ordering::Relaxed);)*
                all
            }
        }
    };
}

counters! {
    sums {
        /// Locks of tree blocks and of roots of trees taken for writing.
        locks_taken, lock_taken();
        /// Locks for writing that a thread had to wait for.
        lock_waits, lock_waited();
        /// Locks of tree blocks and of roots of trees taken for reading, on the way down to a
        /// change as well.
        shared_locks_taken, shared_lock_taken();
        /// Locks for reading that a thread had to wait for.
        shared_lock_waits, shared_lock_waited();
        /// Leaves whose parents were unlocked before the search in the leaf.
        early_unlocks, unlocked_early();
        /// Leaves and nodes split.
        splits, split();
        /// Times that items went to a sibling instead of a split.
        pushes, pushed();
        /// Leaves and nodes merged with a sibling.
        merges, merged();
        /// Committed blocks copied to be changed.
        copies, block_copied();
        /// Items inserted one by one.
        items_inserted_singly, inserted();
        /// Batches of items: changes of one leaf with one search.
        batches, batched();
        /// Items inserted in batches.
        items_inserted_in_batches, inserted_in_batch(count);
        /// Existing items replaced in batches.
        items_replaced_in_batches, replaced_in_batch(count);
        /// Items removed in batches.
        items_removed_in_batches, removed_in_batch(count);
        /// Changes of items queued as delayed items.
        delayed_queued, queued(count);
        /// Delayed items removed before they went to the tree.
        delayed_annihilated, annihilated(count);
        /// Sets of delayed items flushed by the thread of the volume.
        flushes_in_background, flushed_in_background();
        /// Sets of delayed items flushed by writers, because too many were queued, space was
        /// wanted, or data of many files was written back.
        flushes_by_writers, flushed_by_writer();
        /// Sets of delayed items flushed by commits.
        flushes_by_commits, flushed_by_commit();
        /// Sets of delayed items flushed to be copied into a log.
        flushes_by_fsyncs, flushed_by_fsync();
        /// Small files that were written back together with others.
        files_stored_together, stored_together(count);
        /// Commits completed.
        commits, committed();
        /// Commits that a caller asked for.
        commits_asked, committed_asked();
        /// Commits by the interval.
        commits_by_time, committed_by_time();
        /// Commits because many tree blocks were dirty.
        commits_of_dirty_blocks, committed_dirty_blocks();
        /// Commits to make room.
        commits_for_space, committed_for_space();
        /// Commits to take a snapshot of a changed subvolume.
        commits_for_snapshots, committed_for_snapshot();
        /// Commits for an fsync that could not be logged.
        commits_for_fsync, committed_for_fsync();
        /// Commits that followed another commit because members failed.
        commits_for_members, committed_for_member();
        /// Commits postponed to the next one because a member failed meanwhile.
        commits_postponed, postponed();
        /// Fsyncs written to a tree log.
        fsyncs_logged, fsynced();
        /// Fsyncs without changes since the last commit or fsync.
        fsyncs_of_nothing, fsynced_nothing();
        /// Fsyncs of data written in place to files whose other changes were only times. Each took
        /// only a barrier.
        fsyncs_in_place, fsynced_in_place();
        /// Writes of tree logs. Concurrent fsyncs share one.
        log_writes, log_written();
        /// Items put into tree logs, or removed from them.
        log_items, logged(count);
        /// Runs of items copied into tree logs unchanged from the subvolume.
        log_runs, logged_run();
        /// Fsyncs that made a commit because a chunk was new.
        fsyncs_with_new_chunk, committed_new_chunk();
        /// Fsyncs that made a commit because a subvolume was made, deleted or moved.
        fsyncs_with_subvolumes, committed_subvolumes();
        /// Fsyncs that made a commit because a directory was moved.
        fsyncs_with_directory_moved, committed_directory_moved();
        /// Fsyncs that made a commit because files exchanged their names.
        fsyncs_with_exchange, committed_exchanged();
        /// Fsyncs that made a commit because a whiteout took the old name of a file.
        fsyncs_with_whiteout, committed_whiteout();
        /// Fsyncs that made a commit because a directory was removed.
        fsyncs_with_directory_removed, committed_directory_removed();
        /// Fsyncs that made a commit because new data was cloned.
        fsyncs_with_clones, committed_clones();
        /// Fsyncs of files without a name, which are gone after a crash.
        fsyncs_of_nameless, fsynced_nameless();
        /// Fsyncs that made a commit because a name went to an inode that is not in the log.
        fsyncs_with_name_taken, committed_name_taken();
        /// Fsyncs that made a commit because an inode, or one hash, had more names than a log
        /// handles.
        fsyncs_with_many_names, committed_many_names();
        /// Fsyncs that made a commit because the volume needed a feature for the first time.
        fsyncs_with_new_feature, committed_new_feature();
        /// Fsyncs that made a commit because another thread changed a file that had to be logged
        /// too.
        fsyncs_contended, committed_contended();
        /// Fsyncs that made a commit because there was no room for a log.
        fsyncs_without_room, committed_without_room();
        /// Fsyncs that made a commit because there were more changes than the log notes.
        fsyncs_of_too_much, committed_too_much();
        /// Fsyncs that made a commit because the log had become large.
        fsyncs_with_large_log, committed_large_log();
        /// Fsyncs that made a commit because a directory had so many new entries that a commit was
        /// cheaper.
        fsyncs_with_cheaper_commit, committed_cheaper();
        /// Fsyncs that made a commit because an item to log could not be read.
        fsyncs_failed, committed_failed();
        /// Fsyncs that made a commit because a member had failed.
        fsyncs_with_failed_member, committed_failed_member();
        /// Pieces of files looked up again because a commit might have freed their extents during
        /// the read.
        reads_put_off, read_put_off();
        /// Pieces read while commits waited, because they had been looked up again before.
        reads_held, read_held();
        /// Pieces of files that were looked up: each is a part of one extent.
        pieces_looked_up, looked_up_pieces(count);
        /// Compressed extents decoded by readers.
        extents_decoded, extent_decoded();
        /// Orphan items that a crash left behind, removed with their files.
        orphans_removed, orphan_removed();
        /// Extents that commits looked up before they stopped writers.
        references_planned, planned_references(count);
        /// Extents that commits looked up while writers were stopped.
        references_looked_up_late, looked_up_late();
        /// Bytes of devices that were discarded.
        discarded_bytes, discarded(bytes);
        /// Reservations of space that were granted without waiting.
        reservations_at_once, granted_at_once();
    }
    peaks {
        /// The most memory of delayed items at a time, in bytes.
        delayed_peak_bytes, note_backlog();
        /// The most reserved metadata at a time, in bytes.
        metadata_reserved_peak, note_metadata_reserved();
        /// The longest time that a commit stopped writers, in microseconds. It begins when the
        /// commit waits for the operations under way, because new ones wait too.
        gate_shut_peak_us, note_gate_shut();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_shown_as_they_are_declared() {
        let counters = EngineCounters::default();
        counters.inserted_in_batch(7);
        counters.committed();
        let shown: Vec<_> = counters.read().counters().collect();
        let first = Counter {
            name: "locks_taken",
            about: "Locks of tree blocks and of roots of trees taken for writing.",
            value: 0,
        };
        assert_eq!(shown[0], first);
        let value = |name| shown.iter().find(|counter| counter.name == name).map(|c| c.value);
        assert_eq!((value("items_inserted_in_batches"), value("commits")), (Some(7), Some(1)));
    }
}
