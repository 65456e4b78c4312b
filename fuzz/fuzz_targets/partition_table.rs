//! A disk with a partition table, as it is and with the checksums of its GPT made right.
//!
//! What is done with the bytes is shared with the stable tests of the device crate.

#![no_main]

#[path = "../../crates/device/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::partition_table(data);
});
