//! An image of a disk, in the format that its first bytes claim.
//!
//! The stable tests of the device crate use the same body.

#![no_main]

#[path = "../../crates/device/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::image(data);
});
