//! Quotas: what counts for which group, after ours wrote a volume, and after the kernel did.
//!
//! | module | what it holds |
//! |---|---|
//! | `full` | the numbers are marked, the kernel counts them anew, and they are what they should be |
//! | `simple` | the numbers are kept, and the kernel's are the same for the same calls |
//! | `logs` | logs of either side on volumes with quotas |
//!
//! `btrfs check` counts all groups and compares them with what the volume says, unless that says
//! that its numbers are wrong. `pingpong` has the kernel and ours in turns on volumes with quotas.

mod common;
mod full;
mod logs;
mod simple;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
