//! An image of a disk, of whatever kind it says it is.
//!
//! What is done with the bytes is shared with the stable tests of the device crate.

#![no_main]

#[path = "../../crates/device/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::image(data);
});
