//! Counters of what the engine does.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::volume::Engine;

/// Shards of the counters: about as many as threads that count at once.
const SHARDS: usize = 16;

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    shards: [Shard; SHARDS],
}

impl Counters {
    fn own(&self) -> &Shard {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static OWN: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
        }
        &self.shards[OWN.with(|own| *own)]
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident, $count:ident($($by:ident)?);)*) => {
        /// What the engine has done since the volume was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats { $($(#[$doc])* pub $field: u64,)* }

        /// The counters of some threads, which share no line of the processors' caches with those of others.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        struct Shard { $($field: AtomicU64,)* }

        impl Counters {
            $($(#[$doc])* pub(crate) fn $count(&self $(, $by: usize)?) {
                let by = 1u64 $(* $by as u64)?;
                self.own().$field.fetch_add(by, Ordering::Relaxed);
            })*

            fn read(&self) -> Stats {
                let mut all = Stats::default();
                for shard in &self.shards {
                    $(all.$field += shard.$field.load(Ordering::Relaxed);)*
                }
                all
            }
        }
    };
}

counters! {
    /// Latches of tree blocks taken for writing.
    locks_taken, lock_taken();
    /// Latches that had to be waited for.
    lock_waits, lock_waited();
    /// Leaves whose parents were let go before the search in them.
    early_unlocks, unlocked_early();
    /// Leaves and nodes split.
    splits, split();
    /// Times that items went to a sibling instead of a split.
    pushes, pushed();
    /// Leaves and nodes that became one with a sibling.
    merges, merged();
    /// Committed blocks copied to be changed.
    copies, block_copied();
    /// Items inserted.
    items_inserted, inserted(count);
    /// Commits completed.
    commits, committed();
}

impl Engine {
    /// What the engine has done since the volume was opened. Nothing in one that was opened for reading.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.live_part().map_or_else(Stats::default, |live| live.stats.read())
    }
}
