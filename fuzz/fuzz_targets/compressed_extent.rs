//! A compressed extent in each of the three compressions.
//!
//! What is done with the bytes is shared with the stable tests of the format crate.

#![no_main]

#[path = "../../crates/btrfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::compressed_extent(data);
});
