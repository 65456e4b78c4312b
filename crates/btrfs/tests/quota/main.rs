//! Quotas: what counts for which group, after we wrote a volume, and after the kernel did.
//!
//! | module | what it holds |
//! |---|---|
//! | `full` | we mark the numbers, the kernel counts them anew, and they are right |
//! | `simple` | we keep the numbers, and the kernel has the same ones after the same calls |
//! | `logs` | logs of either side on volumes with quotas |
//!
//! `btrfs check` counts all groups and compares them with the volume's numbers, unless these are
//! marked as wrong. `pingpong` has the kernel and us change volumes with quotas by turns.

mod common;
mod full;
mod logs;
mod simple;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
