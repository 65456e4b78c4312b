//! `--dedupe`: equal data is stored once, and every file has what its source has.

use std::fs;
use std::path::Path;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::fill::{self, shapes};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::{BuildJudges, check, does, fails, format_name, is_xfs, on_both};

on_both!(equal_data_is_stored_once, files_that_are_gone_are_no_source);

const UNIT: usize = 128 << 10;

/// Files that have parts in common in every way.
fn tree(root: &Path, random: &mut Random) -> u64 {
    let write = |name: &str, data: &[u8]| fs::write(root.join(name), data).expect("a file");
    let text = random.text(700_000);
    // More than is in memory before it is written back.
    let large = random.bytes((8 << 20) + 100);
    write("a-large", &large);
    write("a-text", &text);
    write("b-same", &large);
    write("c-text", &text);
    let mut changed = large.clone();
    changed[3 * UNIT + 17] ^= 1;
    write("d-changed", &changed);
    write("e-shorter", &large[..large.len() - 50]);
    write("f-longer", &[&large[..], b"and more"].concat());
    write("g-shifted", &[&large[5 * UNIT..], &large[..5 * UNIT]].concat());
    write("h-unaligned", &[b"x", &large[..]].concat());
    let unit = random.bytes(UNIT);
    write("i-repeated", &unit.repeat(20));
    write("j-zeros", &vec![0; 1 << 20]);
    write("k-small", &large[..3000]);
    write("l-small", &large[..3000]);
    write("m-sector", &large[..4096]);
    write("n-sector", &large[..4096]);
    for (name, at) in [("o-holes", 10), ("p-holes", 3)] {
        let file = shapes::create(root, name);
        shapes::put(&file, at * UNIT as u64, &large[..UNIT]);
        file.set_len(20 * UNIT as u64 + 5).expect("a length");
    }
    // What at least is equal to something before.
    (8 << 20) * 4 + 700_000
}

fn used(mount: &Path) -> u64 {
    let stat = rustix::fs::statvfs(mount).expect("a mount");
    (stat.f_blocks - stat.f_bfree) * stat.f_frsize
}

fn equal_data_is_stored_once() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    // In a volume of the format, so that directories have as many links.
    let scratch = judges.scratch(512);
    let source = scratch.path();
    let equal = tree(source, &mut Random::new(11));
    fill::sync(source);
    let pack = ["--format=pax".as_ref(), "-C".as_ref(), source.as_os_str(), "-cf".as_ref()];
    let archive = dir.path().join("a.tar");
    run("tar", &[&pack[..], &[archive.as_os_str(), ".".as_ref()]].concat());
    let image = dir.path().join("v.img");
    let format = format_name();
    let directory = source.to_str().expect("a path");
    let build = |from: &str, options: &str| {
        let line = format!("build v.img --force --from {from} --format {format} {options} --json");
        let shown = does(dir.path(), &line);
        check(&judges, &image);
        let mount = judges.mount(&image);
        let ours = HostFilesystem::new(mount.path()).expect("the mount opens");
        let compare = Compare::of_copies().without(Aspect::DirectorySize).without(Aspect::Holes);
        compare.run(&ours, source).assert_same(16);
        (shown, used(mount.path()))
    };
    let (shown, plain) = build(directory, "");
    assert!(!shown.contains("shared_bytes"), "{shown}");
    let compressed = if is_xfs() { "--dedupe" } else { "--dedupe --compress zstd" };
    for (from, options) in [(directory, "--dedupe"), ("a.tar", "--dedupe"), (directory, compressed)]
    {
        let (shown, deduped) = build(from, options);
        let shared = shown.split("\"shared_bytes\":").nth(1).expect("it is said");
        let shared = shared.split(|c: char| !c.is_ascii_digit()).next().expect("a number");
        let shared: u64 = shared.parse().expect("a number");
        assert!(shared >= equal, "{from} {options}: {shared} of {equal}");
        let saved = plain.saturating_sub(deduped);
        assert!(saved + (1 << 20) > equal, "{from} {options}: {plain} and {deduped}, {shared}");
    }
    let shown = does(
        dir.path(),
        &format!("build v.img --force --from {directory} --format {format} --dedupe"),
    );
    assert!(shown.contains(" MiB are shared; "), "{shown}");
}

/// A later source removes files whose data others would share, and their numbers come back.
fn files_that_are_gone_are_no_source() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let mut random = Random::new(12);
    let data: Vec<Vec<u8>> = (0..40).map(|_| random.bytes(200_000)).collect();
    let scratch = judges.scratch(512);
    let write = |source: &str, order: &dyn Fn(usize) -> usize| {
        let source = fill::directory(scratch.path(), source);
        for at in 0..data.len() {
            let path = source.join(format!("f{at}"));
            fs::write(path, &data[order(at)]).expect("a file");
        }
    };
    write("one", &|at| at);
    // Each replaces a file, and has the data of one that was replaced already or will be.
    write("two", &|at| (at * 7 + 3) % 40);
    fill::sync(scratch.path());
    let (format, top) = (format_name(), scratch.path().display());
    let line = format!("build v.img --from {top}/one --from {top}/two --dedupe --format {format}");
    does(dir.path(), &line);
    check(&judges, &dir.path().join("v.img"));
    let mount = judges.mount(&dir.path().join("v.img"));
    let ours = HostFilesystem::new(mount.path()).expect("the mount opens");
    let compare = Compare::of_copies().without(Aspect::DirectorySize);
    compare.run(&ours, &scratch.path().join("two")).assert_same(40);
}

/// A volume that cannot share data says so.
#[test]
fn a_volume_of_xfs_without_shared_blocks_is_refused() {
    let dir = scratch_dir();
    fs::create_dir(dir.path().join("d")).expect("a directory");
    for name in ["a", "b"] {
        fs::write(dir.path().join("d").join(name), vec![7; 10_000]).expect("a file");
    }
    let line = "build v.img --from d --dedupe --format xfs -O ^reflink";
    let said = fails(dir.path(), line, 4);
    assert!(said.contains("build without --dedupe"), "{said}");
}
