//! Volumes of every layout, which the kernel fills with one of everything.
//!
//! Each line of the matrix is a test of its own. It makes a volume by its recipe, and requires that
//! we show everything as the kernel's mount does. A run takes about half of the lines.

use std::path::Path;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::is_in_run;
use offshoot_testkit::run::run;
use offshoot_vfs::FileSystem;

use crate::common::{default_filesystem, judge, open};

/// Makes one test of each recipe, with the name of its line.
macro_rules! matrix {
    ($($name:ident: $recipe:expr;)*) => {
        $(
            #[test]
            fn $name() {
                let Some(judges) = judges::require() else { return };
                if !is_in_run(stringify!($name)) {
                    return;
                }
                let disks = $recipe.make(&judges);
                judge(&disks, fill::EVERYTHING_AT_LEAST);
            }
        )*
    };
}

fn mkfs(options: &'static str) -> Recipe {
    Recipe::new().mkfs(options)
}

fn over(devices: usize, options: &'static str) -> Recipe {
    Recipe::new().devices(devices).mkfs(options)
}

fn mount(options: &'static str) -> Recipe {
    Recipe::new().mount(options)
}

matrix! {
    defaults: Recipe::new();

    node_4k: mkfs("-n 4k");
    node_8k: mkfs("-n 8k");
    node_32k: mkfs("-n 32k");
    node_64k: mkfs("-n 64k");

    csum_xxhash: mkfs("--csum xxhash");
    csum_sha256: mkfs("--csum sha256");
    csum_blake2: mkfs("--csum blake2");

    single: mkfs("-d single -m single");
    dup: mkfs("-d dup -m dup");
    raid0_of_2: over(2, "-d raid0 -m raid0");
    raid0_of_3: over(3, "-d raid0 -m raid0");
    raid0_of_1: over(1, "-d raid0 -m raid0");
    raid1_of_2: over(2, "-d raid1 -m raid1");
    raid1_of_3: over(3, "-d raid1 -m raid1");
    raid1c3_of_3: over(3, "-d raid1c3 -m raid1c3");
    raid1c3_of_4: over(4, "-d raid1c3 -m raid1c3");
    raid1c4_of_4: over(4, "-d raid1c4 -m raid1c4");
    raid10_of_2: over(2, "-d raid10 -m raid10");
    raid10_of_4: over(4, "-d raid10 -m raid10");
    raid10_of_6: over(6, "-d raid10 -m raid10");
    raid5_of_2: over(2, "-d raid5 -m raid5");
    raid5_of_3: over(3, "-d raid5 -m raid5");
    raid5_of_5: over(5, "-d raid5 -m raid5");
    raid6_of_3: over(3, "-d raid6 -m raid6");
    raid6_of_4: over(4, "-d raid6 -m raid6");
    raid6_of_6: over(6, "-d raid6 -m raid6");
    single_over_3: over(3, "-d single -m raid1");
    raid0_with_raid1_metadata: over(2, "-d raid0 -m raid1");
    raid6_with_raid1c3_metadata: over(5, "-d raid6 -m raid1c3");
    raid5_node_64k: over(3, "-d raid5 -m raid5 -n 64k");
    raid10_node_4k_sha256: over(4, "-d raid10 -m raid10 -n 4k --csum sha256");

    mixed_groups: mkfs("--mixed");
    mixed_groups_dup: mkfs("--mixed -d dup -m dup");
    mixed_groups_raid1: over(2, "--mixed -d raid1 -m raid1");

    old_references: mkfs("-O ^skinny-metadata");
    explicit_holes: mkfs("-O ^no-holes");
    explicit_holes_node_4k: mkfs("-O ^no-holes -n 4k");
    old_everything: mkfs("-O ^no-holes,^skinny-metadata,^free-space-tree");
    space_cache_v1: mkfs("-O ^free-space-tree").mount("space_cache=v1");
    no_space_cache: mkfs("-O ^free-space-tree").mount("nospace_cache");
    block_group_tree: mkfs("-O block-group-tree");
    all_new: mkfs("-O block-group-tree --csum xxhash -n 32k");

    compress_zlib: mount("compress=zlib");
    compress_lzo: mount("compress=lzo");
    compress_zstd: mount("compress=zstd");
    compress_force_zlib: mount("compress-force=zlib:9");
    compress_force_lzo: mount("compress-force=lzo");
    compress_force_zstd: mount("compress-force=zstd:15");
    compress_lzo_node_64k: mkfs("-n 64k").mount("compress-force=lzo");
    compress_lzo_raid5: over(3, "-d raid5 -m raid5").mount("compress-force=lzo");

    nodatasum: mount("nodatasum").fill(fill::everything_uncompressed);
    nodatacow: mount("nodatacow").fill(fill::everything_uncompressed);
    nothing_inline: mount("max_inline=0");
    much_inline: mkfs("-n 16k").mount("max_inline=4095");
    much_inline_compressed: mount("max_inline=4095,compress-force=zstd");

    quotas: mkfs("-O quota");
    simple_quotas: mkfs("-O squota");

    metadata_uuid: Recipe::new().tune("-f -m");
    metadata_uuid_named: Recipe::new().tune("-f -M 0ff50007-0000-4000-8000-00000000aaaa");
    metadata_uuid_raid1: over(2, "-d raid1 -m raid1").tune("-f -m");
    fsid_rewritten: Recipe::new().tune("-f -u");
    converted_to_block_group_tree: Recipe::new().tune("--convert-to-block-group-tree");
}

/// No file has more hard links than its reference item holds.
#[test]
fn no_extended_references() {
    let Some(judges) = judges::require() else { return };
    let disks = mkfs("-O ^extref").fill(fill_without_links).make(&judges);
    judge(&disks, 700);
}

fn fill_without_links(root: &Path) {
    fill::data::fill(root);
    fill::shapes::fill(&fill::directory(root, "shapes"));
    fill::subvolumes::fill(&fill::directory(root, "volumes"));
    let file = root.join("file");
    fill::write(&file, b"of some names");
    for number in 0..50 {
        std::fs::hard_link(&file, root.join(format!("link-{number}"))).expect("a hard link");
    }
    fill::crowd(root, 500);
}

/// A directory of 100,000 entries, and trees of height 3.
#[test]
fn a_crowd_of_100_000() {
    let Some(judges) = judges::require() else { return };
    let disks = mkfs("-n 4k").mib(1024).fill(|root| fill::crowd(root, 100_000)).make(&judges);
    let progs = offshoot_testkit::btrfs::progs::Progs::of(&disks);
    let dump = progs.dump_tree("5");
    let root = dump.lines().find(|line| line.starts_with("node ")).expect("a root");
    assert!(root.contains("level 3") || root.contains("level 2"), "not high enough: {root}");
    drop(progs);
    judge(&disks, 100_000);
}

/// Members that were added later, and chunks that were converted to another profile.
#[test]
fn grown_and_converted() {
    let Some(judges) = judges::require() else { return };
    let mut disks = mkfs("-d single -m dup").mib(1024).make(&judges);
    disks.add(1024);
    disks.add(1024);
    let mut mount = disks.mount_some(&[0], "rw,noatime");
    mount.add_device(&disks.images()[1]);
    mount.add_device(&disks.images()[2]);
    let convert = ["balance", "start", "-dconvert=raid1", "-mconvert=raid1c3"];
    let mut args: Vec<&std::ffi::OsStr> = convert.iter().map(AsRef::as_ref).collect();
    args.push(mount.path().as_os_str());
    run("btrfs", &args);
    drop(mount);
    judge(&disks, fill::EVERYTHING_AT_LEAST);
}

/// Files over many chunks, on devices of different sizes. Once the small devices are full, the
/// chunks have fewer stripes.
#[test]
fn chunks_of_different_widths() {
    let Some(judges) = judges::require() else { return };
    for (profile, mib) in [("raid0", 420), ("raid5", 200), ("single", 300)] {
        let mut disks = Disks::create(&judges, 1, 160);
        disks.add(300);
        disks.add(500);
        disks.mkfs(&["-d", profile, "-m", "raid1"]);
        let mount = disks.mount("rw,noatime");
        fill::bulk(mount.path(), mib);
        drop(mount);
        let chunks = offshoot_testkit::btrfs::progs::Progs::of(&disks).dump_tree("chunk");
        let widths: std::collections::BTreeSet<_> = chunks
            .lines()
            .skip_while(|line| !line.contains("CHUNK_ITEM"))
            .filter(|line| line.contains("num_stripes"))
            .collect();
        assert!(profile == "single" || widths.len() > 1, "{profile}: {widths:?}");
        judge(&disks, mib / 64);
    }
}

/// The sizes of the whole volume.
#[test]
fn sizes() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let mount = disks.mount("ro,noatime");
    let (volume, _) = open(disks.devices()).expect("the volume opens");
    let ours = default_filesystem(&volume).statfs().expect("sizes");
    let host = HostFilesystem::new(mount.path()).expect("the mount opens");
    let judge = host.statfs().expect("sizes");
    assert_eq!((ours.total_bytes, ours.block_size), (judge.total_bytes, judge.block_size));
}

/// The recipe really makes everything that it promises; a test of a volume that lacks something
/// would prove nothing about it. The judge is `dump-tree`.
#[test]
fn everything_is_in_everything() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let progs = offshoot_testkit::btrfs::progs::Progs::of(&disks);
    let dump = progs.dump_tree("5");
    for sign in [
        "INODE_EXTREF",
        "(inline)",
        "(regular)",
        "(prealloc)",
        "extent compression 0 (none)",
        "extent compression 1 (zlib)",
        "extent compression 2 (lzo)",
        "extent compression 3 (zstd)",
        "XATTR_ITEM",
        "NODATASUM",
        "location key (256 ROOT_ITEM",
        "type SOCK",
        "type CHRDEV",
        "security.capability",
        "system.posix_acl_default",
    ] {
        assert!(dump.contains(sign), "the filler makes no {sign}");
    }
    let compressed_inline = dump
        .lines()
        .any(|line| line.contains("inline extent data size") && line.contains("(zstd)"));
    assert!(compressed_inline, "the filler makes no compressed inline extent");
    // Collisions: one directory item has several names, and the dump has a line for each.
    let mut most = 0;
    let mut names = 0;
    for line in dump.lines() {
        if line.trim_start().starts_with("item ") {
            names = if line.contains(" DIR_ITEM ") { 0 } else { i32::MIN };
        } else if line.trim_start().starts_with("name: ") {
            names = names.saturating_add(1);
            most = most.max(names);
        }
    }
    assert!(most >= 5, "at most {most} names share a directory item");
}
