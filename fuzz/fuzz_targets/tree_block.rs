//! A tree block: unchanged, and with a correct checksum. If it passes the checks, also all of its
//! items.
//!
//! The stable tests of the format crate use the same body.

#![no_main]

#[path = "../../crates/btrfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::tree_block(data);
});
