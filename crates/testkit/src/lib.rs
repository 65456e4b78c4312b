//! Judges, volumes and comparisons for the tests of offshoot.
//!
//! A test that only our own code judges proves that we agree with ourselves. This crate brings in
//! the outside judges, the Linux kernel over a loop device and `btrfs-progs`, and everything a test
//! needs to use them:
//!
//! | module | what it holds |
//! |---|---|
//! | [`host`] | a mounted directory as a [`offshoot_vfs::FileSystem`] |
//! | [`compare`] | two filesystems, path by path |
//! | [`manifest`] | what a filesystem shows, as text |
//! | [`mod@memory`] | a filesystem in memory that does what it is told, lies included |
//! | [`model`] | a filesystem in memory, and random operations on it and on another one |
//! | [`crash`] | what power cuts and failing devices leave, judged by what was promised |
//! | [`judges`] | whether a test may run without its judges |
//! | [`images`], [`loops`] | image files, loop devices and mounts, undone on drop |
//! | [`fill`] | what the kernel writes into a volume of any format |
//! | [`kernel_calls`] | random system calls, the kernel's part of a game by turns |
//! | [`kernel_log`] | what the kernel said of chosen devices |
//! | [`names`] | names whose hashes collide |
//! | [`random`] | reproducible bytes |
//! | [`scratch_dir`] | where images are |
//! | [`sharing`] | space that files share, by the kernel |
//! | [`threads`] | the end of threads that work beside a test |
//! | [`io_uring`] | FUSE over io_uring switched on in the kernel |
//! | [`btrfs`], [`xfs`] | the judges of a format, and volumes for them |
//!
//! If a set-up step fails, it panics with the reason: a test without its volume cannot continue.
//! What a judge finds is returned.

#![expect(
    clippy::missing_panics_doc,
    reason = "a set-up that fails panics, as the essay above says once for all of them"
)]

pub mod btrfs;
pub mod compare;
pub mod crash;
pub mod fill;
pub mod host;
pub mod images;
pub mod io_uring;
pub mod judges;
pub mod kernel_calls;
pub mod kernel_log;
pub mod loops;
pub mod manifest;
pub mod memory;
pub mod model;
pub mod names;
pub mod random;
mod scratch;
pub mod sharing;
pub mod threads;
pub mod xfs;

pub use offshoot_machine::run;
pub use scratch::scratch_dir;
