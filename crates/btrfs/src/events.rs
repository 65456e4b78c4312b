//! Targets of the `tracing` events of the engine.
//!
//! An event says what a thread begins, what it waits for, or what it has done. There is one for a
//! request, a run of data or a phase of a transaction, and none for a block or an item. Without a
//! subscriber an event costs one load of an atomic: its fields are not computed, and [`clock!`]
//! does not look at the clock.
//!
//! `INFO` is for what happens a few times a minute, `DEBUG` for the phases and waits in between,
//! and `TRACE` for single runs of data.

use std::time::Instant;

/// Volumes that are opened and closed.
pub(crate) const OPEN: &str = "btrfs::open";
/// Barriers, and superblocks that are written.
pub(crate) const DEVICE: &str = "btrfs::device";
/// Commits and their phases.
pub(crate) const COMMIT: &str = "btrfs::commit";
/// Threads that wait for space, and the states of making room for them.
pub(crate) const RECLAIM: &str = "btrfs::reclaim";
/// Fsyncs, the log that they write, and its replay.
pub(crate) const LOG: &str = "btrfs::log";
/// Buffered data on its way to the devices.
pub(crate) const WRITEBACK: &str = "btrfs::writeback";
/// Discarded ranges of devices.
pub(crate) const DISCARD: &str = "btrfs::discard";
/// Files without names that a crash left behind.
pub(crate) const ORPHANS: &str = "btrfs::orphans";
/// Deleted subvolumes that are dropped.
pub(crate) const DROP: &str = "btrfs::drop";
/// Block groups that are emptied, and members that get another size.
pub(crate) const RELOCATE: &str = "btrfs::relocate";
/// Every [`VolumeReport`](crate::VolumeReport).
pub(crate) const REPORT: &str = "btrfs::report";

/// The targets of all `tracing` events of this crate.
pub const EVENT_TARGETS: &[&str] =
    &[OPEN, DEVICE, COMMIT, RECLAIM, LOG, WRITEBACK, DISCARD, ORPHANS, DROP, RELOCATE, REPORT];

/// The time, if events of this target and level are recorded.
macro_rules! clock {
    ($target:expr, $level:ident) => {
        tracing::enabled!(target: $target, tracing::Level::$level).then(std::time::Instant::now)
    };
}
pub(crate) use clock;

/// The microseconds since [`clock!`], for the field `us` of an event.
pub(crate) fn micros(since: Option<Instant>) -> Option<u64> {
    since.map(|since| u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests of the engine run without a subscriber, like most programs.
    #[test]
    fn without_a_subscriber_nothing_is_computed() {
        let (clock, mut computed) = (clock!(COMMIT, INFO), 0);
        tracing::error!(target: COMMIT, number = { computed += 1; computed });
        assert_eq!((clock, micros(clock), computed), (None, None, 0));
    }
}
