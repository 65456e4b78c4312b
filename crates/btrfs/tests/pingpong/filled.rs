//! Volumes that `mkfs.btrfs` fills from a directory. Then both sides change them by turns.
//!
//! The source directory is on a volume that the kernel filled with the names of the actors. So both
//! sides change files that `mkfs.btrfs` wrote: inline files, compressed extents, hard links,
//! subvolumes.

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::kernel_calls::KernelCalls;
use offshoot_testkit::model::actor::names_of;
use offshoot_testkit::random::{is_in_run, seed_of_run};

use crate::rounds::play_on;
use crate::volume::{PingpongLayout, VolumeMaker, open_read_only};

/// How many operations the kernel does in the source directory for each actor.
const OPERATIONS: u64 = 400;

const ROUNDS: u64 = 2;

/// Changes a volume that is made with these options. With `--subvol` the directories `live` and
/// `kept` become subvolumes.
fn play(options: &'static str) {
    let Some(judges) = judges::require() else { return };
    if !is_in_run(&format!("filled {options}")) {
        return;
    }
    let seed = seed_of_run();
    let source = Disks::create(&judges, 1, 512);
    source.mkfs(&[]);
    let mount = source.mount("rw,noatime");
    let with_subvolumes = options.contains("--subvol");
    let mut areas = vec![(mount.path().to_owned(), 0), (mount.path().to_owned(), 1)];
    if with_subvolumes {
        areas.extend([("live", 2), ("kept", 3)].map(|(name, number)| {
            let dir = mount.path().join(name);
            std::fs::create_dir(&dir).expect("a new directory");
            (dir, number)
        }));
    }
    for (dir, number) in &areas {
        KernelCalls::new(dir, names_of(*number), seed ^ number).act(OPERATIONS);
    }
    mount.sync();
    let disks = Disks::create(&judges, 1, 512);
    let path = mount.path().to_str().expect("a plain path");
    let words = ["--rootdir", path].into_iter().chain(options.split_whitespace());
    disks.mkfs(&words.collect::<Vec<_>>());
    disks.assert_checks();
    // `mkfs.btrfs` does not copy flags, change times and nanoseconds.
    let taken = [Aspect::Flags, Aspect::StoredTimes, Aspect::Allocation, Aspect::Holes];
    let compare = taken.into_iter().fold(Compare::default(), Compare::without);
    let compare = compare.without(Aspect::Ids).without(Aspect::Order);
    let compare = compare.without(Aspect::DirectoryShape).without(Aspect::Nanoseconds);
    compare.run(&open_read_only(&disks), mount.path()).assert_same(20);
    drop(mount);
    let layout = PingpongLayout { devices: 1, mib: 512, options };
    play_on(&disks, &layout, VolumeMaker::Progs, ROUNDS);
}

#[test]
fn plain() {
    play("");
}

#[test]
fn compressed_with_subvolumes() {
    play("--compress zstd:5 --subvol rw:live --subvol ro:kept");
}

#[test]
fn block_group_tree_zlib_with_subvolumes() {
    play("--compress zlib:3 --subvol rw:live --csum xxhash -O block-group-tree");
}

#[test]
fn explicit_holes_lzo() {
    play("--compress lzo -O ^no-holes");
}

#[test]
fn old_references_small_nodes() {
    play("-n 4096 -O ^free-space-tree,^block-group-tree,^skinny-metadata,^extref");
}

#[test]
fn mixed() {
    play("--mixed -d single -m single -n 4096 --compress zstd");
}
