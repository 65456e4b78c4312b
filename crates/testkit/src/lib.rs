//! Judges, volumes and comparisons for the tests of offshoot.
//!
//! A test that only our own code judges proves that we agree with ourselves. This
//! crate brings in the outside judges, the Linux kernel over a loop device and
//! `btrfs-progs`, and everything a test needs to use them:
//!
//! | module | what it holds |
//! |---|---|
//! | [`judges`] | decides whether a test may run here, must fail, or is skipped |
//! | [`checked`] | volumes in memory that are judged when nobody has them any more |
//! | [`disks`] | image files, loop devices and mounts, undone on drop |
//! | [`fill`] | what the kernel writes into a volume before we read it |
//! | [`host`] | a mounted directory as a [`offshoot_vfs::FileSystem`] |
//! | [`compare`] | two filesystems, path by path |
//! | [`outside`] | the kernel's turn on a volume that we wrote |
//! | [`kernel_log`] | what the kernel said of chosen devices |
//! | [`manifest`] | what a filesystem shows, as text |
//! | [`mod@memory`] | a filesystem in memory that does what it is told, lies included |
//! | [`model`] | a filesystem in memory, and random operations on it and on another one |
//! | [`progs`] | what `btrfs-progs` knows of an image: places, trees, subvolumes |
//! | [`crash`] | what power cuts and failing devices leave, judged by what was promised |
//! | [`damage`] | bad bytes at chosen places |
//! | [`fixture`] | the volume that the repository carries |
//! | [`names`] | names whose hashes collide |
//! | [`random`] | reproducible bytes |
//! | [`io_uring`] | FUSE over io_uring switched on in the kernel |
//! | [`recipe`] | how a volume is made |
//! | [`sharing`] | space that files share, by the kernel |
//!
//! What it sets up for a test either succeeds or panics with the reason: a test
//! without its volume has nothing to go on with. What it finds it returns.

#![expect(
    clippy::missing_panics_doc,
    reason = "a set-up that fails panics, as the essay above says once for all of them"
)]

pub mod checked;
pub mod compare;
pub mod crash;
pub mod damage;
pub mod disks;
pub mod fill;
pub mod fixture;
pub mod host;
pub mod io_uring;
pub mod judges;
pub mod kernel_log;
pub mod manifest;
pub mod memory;
pub mod model;
pub mod names;
pub mod outside;
pub mod progs;
pub mod random;
pub mod recipe;
pub mod sharing;

pub use offshoot_machine::run;
