//! Tree logs: those of the kernel and ours, replayed by the kernel and by us.
//!
//! A volume is *cut* by copying its loop file while it is mounted: after an fsync, and before the
//! next commit. The kernel replays one copy and we replay another. Both must show the same, path by
//! path; we replay in memory and on the devices. The file of the fsync must be as it was when the
//! fsync returned.
//!
//! | module | what it holds |
//! |---|---|
//! | `cut` | cutting volumes, and the verdict |
//! | `scenarios` | operations that broke real filesystems, each with its story |
//! | `workloads` | the numbered workloads of the crash explorer, done by the kernel |
//! | `by_us` | the same workloads, done by us |
//! | `stories` | operations that broke real filesystems, done by us |
//! | `bounds` | what a log leaves out, and when an fsync commits instead |
//! | `directories` | directories with many new entries, and new directories below a synced one |
//! | `damage` | damaged logs: the volume opened without them, and the logs thrown away |
//! | `lies` | logs with right checksums and impossible contents |
//! | `crash` | power cuts while we replay |
//! | `ours` | our logs, behind random operations |
//! | `room` | logs of few items that change many items |

mod bounds;
mod by_us;
mod crash;
mod cut;
mod damage;
mod directories;
mod lies;
#[path = "../../../btrfs-format/tests/mutation/mod.rs"]
mod mutation;
mod ours;
mod room;
mod scenarios;
mod stories;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
mod workloads;
