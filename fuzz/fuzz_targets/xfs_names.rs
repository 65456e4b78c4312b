//! A block of a directory or of attributes of XFS with a right checksum, a list of them in an
//! inode, or a value in blocks of its own.
//!
//! The stable tests of the format crate use the same body.

#![no_main]

#[path = "../../crates/xfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::names::names(data);
});
