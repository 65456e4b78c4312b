//! The check of a volume finds each kind of damage, and nothing in a sound volume.
//!
//! Each damage is one changed structure with right checksums in all copies. The judge is
//! `btrfs check`: what it rejects, ours rejects too. A damage that it does not see says so.

mod common;
#[path = "../hostile/damage.rs"]
mod damage;
mod groups;
#[path = "../hostile/image.rs"]
mod image;
mod inodes;
mod live;
mod members;
mod moments;
#[path = "../../../btrfs-format/tests/mutation/mod.rs"]
mod mutation;
mod names;
mod places;
mod quota;
mod quota_volumes;
mod sound;
mod subvolumes;
mod verity;
