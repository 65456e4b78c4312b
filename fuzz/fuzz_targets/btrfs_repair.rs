//! A btrfs volume that the input damages, with right checksums: its check, its repair, and the undo
//! of that.
//!
//! The stable tests of the engine use the same body.

#![no_main]

#[path = "../../crates/btrfs/tests/bodies/mod.rs"]
mod bodies;
#[path = "../../crates/btrfs/tests/hostile/damage.rs"]
mod damage;
#[path = "../../crates/btrfs/tests/hostile/image.rs"]
mod image;
#[path = "../../crates/btrfs-format/tests/mutation/mod.rs"]
mod mutation;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bodies::check_and_repair(data);
});
