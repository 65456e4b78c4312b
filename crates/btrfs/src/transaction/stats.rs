//! Counters of what the engine does.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident, $count:ident($($by:ident)?);)*) => {
        /// Counters since the volume was opened.
        #[derive(Debug, Default)]
        pub(crate) struct Stats { $($(#[$doc])* pub(crate) $field: AtomicU64,)* }

        impl Stats {
            $($(#[$doc])* pub(crate) fn $count(&self $(, $by: usize)?) {
                let by = 1u64 $(* $by as u64)?;
                self.$field.fetch_add(by, Ordering::Relaxed);
            })*
        }
    };
}

counters! {
    /// Latches of tree blocks taken for writing.
    locks_taken, lock_taken();
    /// Latches that had to be waited for.
    lock_waits, lock_waited();
    /// Leaves reached whose parents were let go before the search.
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
