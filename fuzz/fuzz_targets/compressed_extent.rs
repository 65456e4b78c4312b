//! A compressed extent, in the format that its first byte chooses.
//!
//! The stable tests of the format crate use the same body.

#![no_main]

#[path = "../../crates/btrfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::compressed_extent(data);
});
