//! A record of the log of XFS, and its items.
//!
//! The stable tests of the format crate use the same body.

#![no_main]

#[path = "../../crates/xfs-format/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::log_record(data);
});
