//! A superblock: unchanged, and with a correct checksum.
//!
//! The stable tests of the format crate use the same body.

#![no_main]

#[path = "../../crates/btrfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::superblock(data);
});
