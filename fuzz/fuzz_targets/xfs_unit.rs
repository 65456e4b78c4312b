//! A superblock, a header of a group, a block of a tree or an inode of XFS, with a right checksum.
//!
//! The stable tests of the format crate use the same body.

#![no_main]

#[path = "../../crates/xfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::unit(data);
});
