//! `mkfs` before its judges: new volumes of every layout.
//!
//! | module | what is judged |
//! |---|---|
//! | `matrix` | `btrfs check`, the kernel and our own reader accept every layout, before and after the kernel wrote to it |
//! | `sizes` | the smallest volumes, the largest, and devices of different sizes |
//! | `same` | what `mkfs.btrfs` writes into its superblock, we write; the same options give the same bytes |
//! | `refusals` | what is refused, and that nothing is written then; errors and power cuts on the way |
//!
//! A volume is judged by [`common::judge`]; a volume that no judge can take (more devices
//! than the machine has loop devices, sectors that the kernel cannot mount) says so where it
//! is made.

mod common;
mod matrix;
mod refusals;
mod same;
mod sizes;
