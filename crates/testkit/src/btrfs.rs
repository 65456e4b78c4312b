//! The judges of btrfs, which are `btrfs-progs` and the kernel over a loop device, and volumes for
//! them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`judges`] | decides whether a test may run here, must fail, or is skipped |
//! | [`checked`] | volumes in memory that are judged when the last user drops them |
//! | [`disks`] | image files, loop devices and mounts, undone on drop |
//! | [`fill`] | what the kernel writes into a volume before we read it |
//! | [`outside`] | the kernel's turn on a volume that we wrote |
//! | [`progs`] | what `btrfs-progs` shows of an image: addresses, trees, subvolumes |
//! | [`damage`] | bad bytes at chosen places |
//! | [`fixture`] | the volume in the repository |
//! | [`recipe`] | how a volume is made |
//! | [`sharing`] | the space of files, by the kernel and by `btrfs-progs` |

pub mod checked;
pub mod damage;
pub mod disks;
pub mod fill;
pub mod fixture;
pub mod judges;
pub mod outside;
pub mod progs;
pub mod recipe;
pub mod sharing;
