//! A byte that chooses the form, then a source of a build: a tar archive, a manifest of mtree or of
//! composefs, or an archive with a container image. A volume in memory is built from it.
//!
//! The stable tests of the crate that builds use the same body.

#![no_main]

#[path = "../../crates/transfer/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::hostile_source(data);
});
