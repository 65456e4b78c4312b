//! Tree logs: those that the kernel wrote, and ours, replayed by the kernel and by us.
//!
//! A volume is *cut* by copying its loop file while it is mounted: after an fsync, and with no
//! commit since. The kernel replays one copy and we another, and both have to show the same, path
//! by path, in memory and on the devices. What the fsync was of has to be as it was when it
//! returned.
//!
//! | module | what it holds |
//! |---|---|
//! | `cut` | cutting volumes, and the verdict |
//! | `scenarios` | what broke real filesystems, each with its story |
//! | `workloads` | the numbered workloads of the crash explorer, done by the kernel |
//! | `calls` | the operations of a workload as system calls |
//! | `by_us` | the same workloads, done by us |
//! | `stories` | what broke real filesystems, done by us |
//! | `bounds` | what a log leaves out, and where it ends |
//! | `directories` | directories with many new entries, and new ones below one that is synced |
//! | `damage` | logs that are damaged, opened without, and thrown away |
//! | `lies` | logs whose checksums are right and that cannot be true |
//! | `crash` | power cuts while we replay |
//! | `ours` | logs that we wrote |
//! | `room` | logs of few items that change much |

mod bounds;
mod by_us;
mod calls;
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
