//! Repairs of damaged volumes, and undoing them.
//!
//! The judges are `btrfs check` and the kernel: after a repair `btrfs check` finds nothing, and the
//! kernel mounts the volume for writing and shows what it showed before. After an undo every byte
//! that is in use is what it was.

mod accept;
#[path = "../check/common.rs"]
#[expect(dead_code, reason = "the tests of the check need more of it")]
mod common;
mod cut_off;
mod cuts;
#[path = "../hostile/damage.rs"]
mod damage;
mod damaged;
mod derived;
#[path = "../hostile/image.rs"]
mod image;
mod judged;
mod malformed;
#[path = "../../../btrfs-format/tests/mutation/mod.rs"]
mod mutation;
mod other_trees;
mod overlaps;
#[path = "../check/quota_volumes.rs"]
mod quota_volumes;
mod quotas;
mod scanned;
mod subvolumes;
