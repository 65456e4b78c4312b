//! A tree block, as it is and with its checksum made right, and all items of one that passes.
//!
//! What is done with the bytes is shared with the stable tests of the format crate.

#![no_main]

#[path = "../../crates/btrfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::tree_block(data);
});
