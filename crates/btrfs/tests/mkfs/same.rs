//! Our `mkfs` makes the same as `mkfs.btrfs`, and the same every time.

use std::collections::BTreeMap;
use std::sync::Arc;

use offshoot_btrfs::{MkfsOptions, mkfs};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::progs::Progs;
use offshoot_testkit::run::run;

use crate::common::{TIME, make, options, uuid};

/// The fields of a superblock that `dump-super` shows, without those that differ between any two
/// volumes.
fn superblock(disks: &Disks) -> BTreeMap<String, String> {
    const OF_ONE_VOLUME: [&str; 12] = [
        "csum",
        "fsid",
        "generation",
        "root",
        "chunk_root",
        "chunk_root_generation",
        "uuid_tree_generation",
        "bytes_used",
        "dev_item.uuid",
        "dev_item.fsid",
        "dev_item.bytes_used",
        "sys_array_size",
    ];
    let image = disks.images()[0].as_os_str();
    let words: [&std::ffi::OsStr; 3] = ["inspect-internal".as_ref(), "dump-super".as_ref(), image];
    run("btrfs", &words)
        .lines()
        .skip(2)
        .filter_map(|line| {
            let (name, value) = line.split_once('\t')?;
            Some((name.to_owned(), value.trim().to_owned()))
        })
        .filter(|(name, _)| !name.is_empty() && !OF_ONE_VOLUME.contains(&name.as_str()))
        .collect()
}

/// The keys of all items of a tree whose keys hold no addresses.
fn keys(disks: &Disks, tree: &str) -> Vec<String> {
    let dump = Progs::of(disks).dump_tree(tree);
    let items = dump.lines().filter(|line| line.trim_start().starts_with("item "));
    items
        .filter_map(|line| line.split_once("key ").map(|(_, rest)| rest))
        .filter_map(|line| line.split_once(')').map(|(key, _)| key.to_owned()))
        .collect()
}

/// Requires that `mkfs.btrfs` with `words` and our `mkfs` after `change` make volumes with the same
/// superblock fields and keys.
#[track_caller]
fn assert_same(devices: usize, words: &[&str], change: fn(&mut MkfsOptions)) {
    let Some(judges) = judges::require() else { return };
    let theirs = Disks::create(&judges, devices, 300);
    theirs.mkfs(words);
    let mut options = options();
    change(&mut options);
    let ours = make(&judges, &vec![300; devices], &options).expect("mkfs");
    assert_eq!(superblock(&ours), superblock(&theirs));
    for tree in ["root", "fs"] {
        assert_eq!(keys(&ours, tree), keys(&theirs, tree), "tree {tree}");
    }
}

#[test]
fn defaults_are_those_of_current_mkfs() {
    // `mkfs.btrfs` 6.19 turns the block group tree on by default. Older versions need the option.
    assert_same(1, &["-O", "block-group-tree"], |_| {});
    assert_same(3, &["-O", "block-group-tree"], |_| {});
}

#[test]
fn options_mean_the_same() {
    assert_same(1, &["-n", "4k", "--csum", "xxhash", "-L", "name"], |options| {
        options.node_size = Some(4096);
        options.checksum = ChecksumType::Xxhash64;
        options.label = "name".to_owned();
        options.features.apply("^block-group-tree").expect("features");
    });
    assert_same(1, &["--mixed", "--csum", "blake2"], |options| {
        options.checksum = ChecksumType::Blake2b;
        options.features.apply("mixed-bg,^block-group-tree").expect("features");
    });
    assert_same(4, &["-d", "raid10", "-m", "raid1c4", "-O", "^skinny-metadata,bgt"], |options| {
        options.data = Some(Profile::Raid10);
        options.metadata = Some(Profile::Raid1c4);
        options.features.apply("^skinny-metadata").expect("features");
    });
}

fn image(options: &MkfsOptions) -> Vec<Vec<u8>> {
    const SIZE: usize = 100 << 20;
    let devices = [(); 2].map(|()| Arc::new(MemoryDevice::sparse(SIZE as u64)) as _);
    mkfs(&devices, options).expect("mkfs");
    let read = |device: &Arc<dyn BlockDevice>| {
        let mut bytes = vec![0; SIZE];
        device.read_at(0, &mut bytes).expect("the whole device");
        bytes
    };
    devices.iter().map(read).collect()
}

#[test]
fn the_same_options_make_the_same_bytes() {
    let options = MkfsOptions::new(uuid(7), TIME);
    let first = image(&options);
    assert!(first == image(&options), "two volumes with the same options differ");
    for other in [
        MkfsOptions::new(uuid(8), TIME),
        MkfsOptions { seed: 1, ..options.clone() },
        MkfsOptions { device_uuids: vec![uuid(1), uuid(2)], ..options.clone() },
        MkfsOptions { time: offshoot_vfs::Timestamp::default(), ..options.clone() },
        MkfsOptions { label: "x".to_owned(), ..options },
    ] {
        assert!(first != image(&other), "an option that changes nothing: {other:?}");
    }
}
