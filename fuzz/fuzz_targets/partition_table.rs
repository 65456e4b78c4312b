//! A disk with a partition table: unchanged, and with correct checksums in its GPT.
//!
//! The stable tests of the device crate use the same body.

#![no_main]

#[path = "../../crates/device/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::partition_table(data);
});
