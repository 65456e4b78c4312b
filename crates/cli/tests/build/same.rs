//! The same sources and options make the same bytes.
//!
//! Each image is built by programs that believe in 1, 2, 4 and 16 processors: their threads end
//! their work in other orders. On the way a directory is one whose files were made in another
//! order, in a volume of btrfs, which lists them in that order.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use offshoot_testkit::fill;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use tempfile::TempDir;

use super::oci::make_images;
use super::processors::{library, shown};
use super::shuffled::write_shuffled;
use super::{BuildJudges, BuiltMount, program, words};

/// How many processors the builds of one image see, and on how many they are.
const PROCESSORS: [(u32, &str); 5] = [(1, "0"), (2, "0-1"), (16, "0"), (4, "0-1"), (16, "0-1")];

/// What images are built from, and the library that shows a number of processors.
struct Sources {
    dir: TempDir,
    /// The directory twice, listed in different orders.
    directories: [(BuiltMount, PathBuf); 2],
}

impl Sources {
    /// Sources with a file of so many MiB.
    fn new(judges: &BuildJudges, large_mib: usize) -> Self {
        let dir = scratch_dir();
        let directories = [1, 2].map(|order| {
            let mount = judges.scratch(1024);
            let source = fill::directory(mount.path(), "source");
            tree(&source, large_mib, order);
            fill::sync(&source);
            (mount, source)
        });
        let names = directories.each_ref().map(|(_, source)| listed(&source.join("d3")));
        assert_ne!(names[0], names[1], "both are listed in one order");
        let archive = dir.path().join("a.tar");
        let words = ["--sort=name", "--format=pax", "-C"].map(OsStr::new);
        let source = directories[0].1.as_os_str();
        let rest = [source, "-cf".as_ref(), archive.as_os_str(), ".".as_ref()];
        run("tar", &[&words[..], &rest].concat());
        run("zstd", &["-q".as_ref(), archive.as_os_str()]);
        library(dir.path());
        Self { dir, directories }
    }

    /// Builds from the directories, and compares the images.
    #[track_caller]
    fn always_make_the_same(&self, options: &str) {
        for (at, (processors, bound)) in PROCESSORS.into_iter().enumerate() {
            let from = self.directories[at % 2].1.display();
            let line = format!("--from {from} {options}");
            compare(self.dir.path(), &line, processors, bound, at == 0);
        }
    }

    /// The same from the archive, packed and not.
    #[track_caller]
    fn archives_always_make_the_same(&self, options: &str) {
        for (at, (processors, bound)) in PROCESSORS.into_iter().take(3).enumerate() {
            let from = if at == 1 { "a.tar.zst" } else { "a.tar" };
            let line = format!("--from {from} {options}");
            compare(self.dir.path(), &line, processors, bound, at == 0);
        }
    }
}

/// The names in a directory, in the order of the host.
fn listed(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path()).collect()
}

/// Some thousand files, more data than is kept in memory, files that are worth compressing, and
/// equal ones. They are made in the order that the seed gives.
fn tree(root: &Path, large_mib: usize, order: u64) {
    let mut random = Random::new(7);
    let mut files = Vec::new();
    for number in 0..3000 {
        let dir = root.join(format!("d{}", number % 40));
        let len = usize::try_from(random.below(20_000)).expect("a small number");
        let data = if number % 3 == 0 { random.bytes(len) } else { random.text(len) };
        files.push((dir.join(format!("f{number}")), data.clone()));
        if number % 10 == 0 {
            files.push((root.join("same").join(format!("f{number}")), data));
        }
    }
    let large = random.bytes(large_mib << 20);
    files.push((root.join("also-large"), large[1 << 20..9 << 20].to_vec()));
    files.push((root.join("large"), large));
    write_shuffled(files, order);
    let links = fill::directory(root, "links");
    let [one, other] = if order.is_multiple_of(2) { ["a", "b"] } else { ["b", "a"] };
    fs::write(links.join(one), "linked").expect("a file");
    fs::hard_link(links.join(one), links.join(other)).expect("a link");
}

/// Builds `v.img`.
fn build(dir: &Path, options: &str, processors: u32, bound: &str) {
    let line = format!("build v.img --force --uuid 0ff50007-0000-4000-8000-00000000bbbb {options}");
    let mut command = shown(dir, processors, bound);
    command.args(words(&line)).current_dir(dir).env("SOURCE_DATE_EPOCH", "1700000000");
    let output = command.stdin(Stdio::null()).output().expect("taskset starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
}

/// Builds an image, and compares it with the first one.
#[track_caller]
fn compare(dir: &Path, options: &str, processors: u32, bound: &str, is_first: bool) {
    build(dir, options, processors, bound);
    let (image, first) = (dir.join("v.img"), dir.join("first.img"));
    if is_first {
        fs::rename(image, first).expect("a rename");
        return;
    }
    let [one, other] = [image, first].map(|path| fs::read(path).expect("an image"));
    assert_same(&one, &other, &format!("{options}, {processors} processors, on {bound}"));
}

#[track_caller]
fn assert_same(first: &[u8], other: &[u8], what: &str) {
    if first != other {
        let at = first.iter().zip(other).position(|(one, other)| one != other);
        panic!("{what}: they differ from byte {at:?} on");
    }
}

/// More than is written back at a time, and less than must be in memory.
const LARGE_MIB: usize = 34;

#[track_caller]
fn always_the_same(options: &str) {
    let Some(judges) = BuildJudges::require() else { return };
    Sources::new(&judges, LARGE_MIB).always_make_the_same(options);
}

/// With more data than is kept in memory.
#[test]
fn plain() {
    let Some(judges) = BuildJudges::require() else { return };
    let sources = Sources::new(&judges, 80);
    sources.always_make_the_same("");
    sources.archives_always_make_the_same("");
}

#[test]
fn compressed() {
    let Some(judges) = BuildJudges::require() else { return };
    let sources = Sources::new(&judges, LARGE_MIB);
    let options = "--compress zstd:3 --csum xxhash";
    sources.always_make_the_same(options);
    sources.archives_always_make_the_same(options);
}

#[test]
fn with_small_blocks() {
    always_the_same("--nodesize 4096 --metadata single");
}

#[test]
fn with_subvolumes_and_snapshots() {
    always_the_same(
        "--subvolume default:/d1 --subvolume ro:/links --subvolume /new/way --snapshot /d1:/new/d1 \
         --snapshot rw:/:/all",
    );
}

/// A manifest, with labels, owners and properties, and equal data stored once.
#[test]
fn from_a_manifest() {
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("source")).expect("a directory");
    tree(&path("source"), LARGE_MIB, 1);
    library(dir.path());
    fs::write(path("fc"), "/.* u:r:all:s0\n/d.*/f.* -- u:r:file:s0\n").expect("a file");
    let manifest = run("mtree", &["-c".as_ref(), "-p".as_ref(), path("source").as_os_str()]);
    fs::write(path("m"), manifest).expect("a manifest");
    let options = "--from mtree:m,contents=source --selinux fc --map-uid 0:1000 --dedupe --property \
                   d1:compression=zstd --property d10:nodatacow --property also-large:nodatacow";
    for (at, (processors, bound)) in PROCESSORS.into_iter().take(3).enumerate() {
        compare(dir.path(), options, processors, bound, at == 0);
    }
}

#[test]
fn with_equal_data_stored_once() {
    let Some(judges) = BuildJudges::require() else { return };
    let sources = Sources::new(&judges, LARGE_MIB);
    sources.always_make_the_same("--dedupe");
    sources.always_make_the_same("--dedupe --compress zstd --subvolume /same");
}

/// Images whose layers are put one over the other, and are snapshots.
#[test]
fn container_images() {
    let dir = scratch_dir();
    make_images(dir.path(), 9, 1000);
    library(dir.path());
    let two = "--from oci:one --to /one --from docker-archive:three.tar --to /three";
    for options in [
        "--from oci:one",
        "--from oci:one --from oci:two --compress zstd",
        &format!("{two} --layers snapshots"),
        &format!("{two} --from oci:two --layers snapshots --dedupe --compress zstd"),
    ] {
        for (at, (processors, bound)) in PROCESSORS.into_iter().enumerate() {
            compare(dir.path(), options, processors, bound, at == 0);
        }
    }
}

#[test]
fn of_xfs() {
    let Some(judges) = BuildJudges::require() else { return };
    let sources = Sources::new(&judges, LARGE_MIB);
    sources.always_make_the_same("--format xfs");
    sources.always_make_the_same("--format xfs --dedupe");
}

/// Without a UUID they differ, and so do the times without SOURCE_DATE_EPOCH.
#[test]
fn what_is_not_given_differs() {
    let dir = scratch_dir();
    fs::create_dir(dir.path().join("d")).expect("a directory");
    let build = |line: &str| {
        let output = program(dir.path()).args(words(line)).output().expect("it starts");
        assert!(output.status.success(), "{line}");
        fs::read(dir.path().join("v.img")).expect("an image")
    };
    let line = "build v.img --from d --force";
    assert!(build(line) != build(line));
}
