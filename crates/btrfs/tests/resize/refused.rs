//! What cannot be moved is refused by name, before anything is written.

use offshoot_btrfs_format::DeviceId;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::random::Random;
use offshoot_vfs::{Code, Errno};

use crate::common::{MIB, open};

/// Files of so many bytes that the kernel stores a cache of their block groups.
fn with_large_files(root: &std::path::Path) {
    for number in 0..6 {
        fill::write(&root.join(format!("{number}")), &Random::new(number).bytes(20 << 20));
        fill::sync(root);
    }
}

#[test]
fn a_cache_of_version_1() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mib(2048).mkfs("-O ^free-space-tree,^block-group-tree");
    let disks = recipe.mount("space_cache=v1").fill(with_large_files).make(&judges);
    let fs = open(&disks);
    let volume = fs.volume();
    let before = volume.superblock().generation;
    let least = volume.chunks().map(|chunk| chunk.start).max().expect("there are some");
    let moved = volume.relocate(least).expect_err("the cache would be left behind");
    let shrunk = volume.resize_to_minimum(DeviceId(1), 0).expect_err("the same");
    for error in [moved, shrunk] {
        assert_eq!(error.code(), Code::Relocation, "{error}");
        assert!(error.to_string().contains("--clear-space-cache v1"), "{error}");
    }
    // Growing moves nothing.
    volume.resize(DeviceId(1), 2100 * MIB).expect("it grows");
    drop(fs);
    let fs = open(&disks);
    let after = fs.volume().superblock().generation;
    assert_eq!(after.0, before.0 + 1, "only the new size was written");
    drop(fs);
    disks.assert_checks();
}

#[test]
fn sizes_that_cannot_be() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(600).fill(with_large_files).make(&judges);
    let fs = open(&disks);
    let volume = fs.volume();
    let error = volume.resize(DeviceId(1), 100 * MIB).expect_err("there are 120 MiB");
    assert_eq!(error.errno(), Errno::NOSPC, "{error}");
    let error = volume.resize(DeviceId(7), 100 * MIB).expect_err("there is one member");
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    assert_eq!(volume.members()[0].total_bytes(), 600 * MIB);
    drop(fs);
    disks.assert_checks();
}
