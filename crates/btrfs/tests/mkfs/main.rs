//! Judges `mkfs`: new volumes of every layout.
//!
//! | module | what is judged |
//! |---|---|
//! | `matrix` | `btrfs check`, the kernel and our own reader accept every layout, before and after the kernel wrote to it |
//! | `sizes` | the smallest volumes, the largest, and devices of different sizes |
//! | `same` | our superblock says what that of `mkfs.btrfs` says; the same options give the same bytes |
//! | `refusals` | refused options and devices, to which nothing is written; errors and power cuts on the way |
//!
//! [`common::judge`] judges a volume. Some volumes have no judge: they need more devices than the
//! machine has loop devices, or sectors that the kernel cannot mount. A comment says so where they
//! are made.

mod common;
mod matrix;
mod refusals;
mod same;
mod sizes;
