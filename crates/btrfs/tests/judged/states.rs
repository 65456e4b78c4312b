//! States of a volume: with a pending log, after a crash, with unknown features, or made by other
//! programs than the kernel.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_testkit::btrfs::damage::{Features, edit_superblocks, set_features};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::compare::{Aspect, Compare, compare};
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use offshoot_vfs::Error;

use crate::common::{CollectedReports, default_filesystem, judge, open};

/// A copy of a mounted volume with a log that an fsync wrote since the last commit. It shows what
/// was fsynced. Without the log it shows the last commit. The engine reports both.
#[test]
fn a_pending_log() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let mount = disks.mount("rw,noatime,commit=300");
    let file = File::create(mount.path().join("fsynced")).expect("a file");
    mount.sync();
    file.write_all_at(&vec![b'l'; 100_000], 0).expect("data");
    file.sync_all().expect("into the log");
    let crashed = disks.copy(&judges);
    drop(file);
    drop(mount);

    let superblock = run(
        "btrfs",
        &["inspect-internal".as_ref(), "dump-super".as_ref(), crashed.images()[0].as_os_str()],
    );
    let log = superblock.lines().find(|line| line.starts_with("log_root\t")).expect("a field");
    assert!(!log.ends_with("\t0"), "the kernel wrote no log: {log}");

    let mount = crashed.mount("ro,noatime,rescue=nologreplay");
    let reports = CollectedReports::default();
    let options = EngineOptions { is_log_ignored: true, ..reports.options() };
    let volume = BtrfsVolume::open(crashed.devices(), &options).expect("the volume opens");
    compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    reports.assert_said(&["log is ignored"]);
    drop(mount);

    let (volume, reports) = open(crashed.devices()).expect("the volume opens");
    let mount = crashed.mount("rw,noatime");
    compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    reports.assert_said(&["replayed in memory"]);
}

/// After a crash: an open file without a name, and writes that no commit contains.
#[test]
fn the_moment_of_a_crash() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let mount = disks.mount("rw,noatime,commit=300");
    let path = mount.path().join("open and removed");
    let file = File::create(&path).expect("a file");
    file.write_all_at(&vec![b'o'; 500_000], 0).expect("data");
    mount.sync();
    std::fs::remove_file(&path).expect("its name goes");
    mount.sync();
    fill::write(&mount.path().join("not committed"), &vec![b'n'; 50_000]);
    let crashed = disks.copy(&judges);
    drop(file);
    drop(mount);
    judge(&crashed, fill::EVERYTHING_AT_LEAST);
}

/// The kernel stopped in the middle of dropping a deleted subvolume.
#[test]
fn a_subvolume_that_is_half_gone() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mkfs("-n 4k").fill(fill::subvolumes_of_a_crowd).make(&judges);
    let mount = disks.mount("rw,noatime");
    for name in ["one", "two", "three"] {
        let path = mount.path().join(name);
        run("btrfs", &["subvolume".as_ref(), "delete".as_ref(), path.as_os_str()]);
    }
    mount.remount("ro");
    drop(mount);
    judge(&disks, 20);
    let mount = disks.mount("ro,noatime");
    let left = offshoot_testkit::btrfs::progs::subvolumes(mount.path());
    let (volume, _) = open(disks.devices()).expect("the volume opens");
    let ours = volume.subvolumes().collect::<Result<Vec<_>, _>>().expect("a list");
    let listed = ours.iter().filter(|info| info.id != crate::common::TOP).count();
    assert_eq!(listed, left.len());
}

/// Unknown features are refused, and the refusal names them.
#[test]
fn unknown_features_are_refused_by_name() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(128).fill(|_| {}).make(&judges);
    for (bit, name) in [(13, "extent-tree-v2"), (40, "40")] {
        let copy = disks.copy(&judges);
        set_features(&copy.images()[0], Features::Incompatible, 1 << bit);
        let error = open(copy.devices()).err().expect("an unknown feature");
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        let text = error.to_string().to_lowercase().replace('_', "-");
        assert!(text.contains(name), "bit {bit} is not called {name}: {text}");
    }
}

/// A conversion is under way, and only the program that began it can finish it. Not even a reader
/// can know which structures hold.
#[test]
fn conversions_under_way_are_refused_by_name() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(128).fill(|_| {}).make(&judges);
    for (bit, name) in [
        (35, "fsid is being changed"),
        (36, "fsid is being changed"),
        (38, "converted to a block group tree"),
        (39, "data checksums are being converted"),
        (40, "metadata checksums are being converted"),
    ] {
        let copy = disks.copy(&judges);
        edit_superblocks(&copy.images()[0], |block| block[56 + bit / 8] |= 1 << (bit % 8));
        let error = open(copy.devices()).err().expect("nobody knows what it holds");
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(name), "bit {bit} is not called `{name}`: {error}");
    }
}

/// A zoned volume on a device without zones: its superblocks are at their usual offsets.
#[test]
fn a_zoned_volume() {
    let Some(judges) = judges::require() else { return };
    let fill = |root: &Path| {
        fill::names::fill(&fill::directory(root, "names"));
        fill::names::hard_links(&fill::directory(root, "links"));
        fill::data::plain_files(&fill::directory(root, "data"));
        fill::xattrs::fill(&fill::directory(root, "xattrs"));
        fill::bulk(root, 192);
    };
    let recipe = Recipe::new().mib(4096).mkfs("-O zoned").mount("compress=zstd");
    judge(&recipe.fill(fill).make(&judges), 200);
}

/// A feature that forbids only writing does not keep a reader out.
#[test]
fn unknown_read_only_features_are_read() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let mount = disks.mount("ro,noatime");
    let copy = disks.copy(&judges);
    set_features(&copy.images()[0], Features::ReadOnlyCompatible, 1 << 40);
    let (volume, _) = open(copy.devices()).expect("it may be read");
    compare(&default_filesystem(&volume), mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
}

/// Volumes that `mkfs.btrfs --rootdir` filled, with sector sizes that this kernel may not mount.
/// The judge is the source directory.
#[test]
fn sectors_of_other_sizes() {
    let Some(judges) = judges::require() else { return };
    let source = scratch_dir();
    fill::data::plain_files(source.path());
    let special = fill::directory(source.path(), "special");
    fill::special::fill(&special);
    // `mkfs.btrfs` 6.14 fails on the longest link and leaves device numbers out.
    for name in ["symlink-4095", "char", "block", "char-large", "block-large"] {
        std::fs::remove_file(special.join(name)).expect("it is there");
    }
    fill::names::fill(&fill::directory(source.path(), "names"));
    for options in [
        "-s 4k -n 16k",
        "-s 8k -n 16k",
        "-s 16k -n 16k",
        "-s 16k -n 64k --csum sha256",
        "-s 32k -n 64k --compress zstd:3",
        "-s 64k -n 64k",
        "-s 64k -n 64k --compress zlib",
        "-s 64k -n 64k --compress lzo",
        "-s 4k --compress lzo",
    ] {
        let disks = Disks::create(&judges, 1, 512);
        let mut args: Vec<&str> = options.split_whitespace().collect();
        let from = source.path().to_str().expect("a plain path");
        args.extend(["--rootdir", from]);
        disks.mkfs(&args);
        let (volume, reports) =
            open(disks.devices()).unwrap_or_else(|error| panic!("{options}: {error}"));
        let outcome = Compare::default()
            .without(Aspect::Ids)
            .without(Aspect::Order)
            .without(Aspect::StoredTimes)
            .without(Aspect::Nanoseconds)
            .without(Aspect::DirectoryShape)
            .without(Aspect::Allocation)
            .without(Aspect::Holes)
            .without(Aspect::Flags)
            .run(&default_filesystem(&volume), source.path());
        eprintln!("{options}: {outcome}");
        outcome.assert_same(500);
        reports.assert_silent();
    }
}
