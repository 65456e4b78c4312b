//! A volume of XFS with a log that the input writes, and its recovery.
//!
//! The stable tests of the engine use the same body.

#![no_main]

#[path = "../../crates/xfs/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::replay(data);
});
