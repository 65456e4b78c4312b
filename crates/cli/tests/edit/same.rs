//! With `SOURCE_DATE_EPOCH` the same verb makes the same bytes of the same image.
//!
//! All verbs that change a volume run one after the other on copies of one image. After each of
//! them the copies are compared. The programs see different numbers of processors, and the last
//! ones compete with busy threads. The directories that they copy from have the same files, made in
//! other orders, with other times of access, and zeros in one that are holes in the other.

use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes};
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{hint, thread};

use offshoot_testkit::btrfs::disks::{Disks, MountedMembers};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;
use offshoot_testkit::{fill, scratch_dir};
use rustix::fs::{SeekFrom, XattrFlags, seek, setxattr};

use super::format::is_xfs;
use super::processors::{library, shown};
use super::shuffled::write_shuffled;
use super::{check, does, on_both, words};

/// The verbs that change a volume and end: each is in one of these lines at least, which follow one
/// another. `SOURCE` is a directory of the host.
const LINES: &[&str] = &[
    "mkdir -p v:/m/n/o",
    "cp -r SOURCE v:/new",
    "cp -r SOURCE/. v:/",
    "cp -r v:/d1 v:/m/shared",
    "cp -r --reflink=never v:/d1 v:/m/written",
    "rmdir v:/m/n/o",
    "mv v:/d3 v:/m/moved",
    "mv v:/d4/f4 v:/d5/f5",
    "ln v:/large v:/m/more",
    "ln -s target v:/m/link",
    "ln -f v:/large v:/m/link",
    "ln -sf other v:/m/more",
    "mknod v:/fifo p",
    "touch v:/new/large v:/m/empty",
    "chmod -R u+x v:/d6",
    "chown -R 5:6 v:/d6",
    "chattr +d v:/d6",
    "fallocate -l 3000000 v:/m/long",
    "truncate -s 70000 v:/m/long",
    "dedupe v:/large v:/same",
    "setfattr -n user.a -v b v:/d6",
    "property set v label renamed",
    "find v:/new -name 'f1*' -delete",
    "rm -r v:/new v:/d2",
    "trim v",
    "resize v 700M",
];

/// The same for what only btrfs has. These come behind the others.
const BTRFS_LINES: &[&str] = &[
    "cp -r --compress zstd SOURCE v:/packed",
    "property set v:/d5 compression zstd",
    "subvolume create v:/s1 v:/m/s2",
    "subvolume snapshot -r v:/ v:/frozen",
    "subvolume snapshot v:/sub v:/m/thawed",
    "cp -r SOURCE v:/m/thawed",
    "subvolume set v:/sub ro=true",
    "subvolume set-default v:/m/thawed",
    "subvolume set-default --subvolume 5 v:/",
    "subvolume delete v:/frozen v:/s1",
    "subvolume create v:/s3",
    "resize v minimal",
];

/// The other verbs.
const OTHERS: &[&str] = &[
    // They only read volumes.
    "cat",
    "check",
    "df",
    "du",
    "dump chunks",
    "dump groups",
    "dump inode",
    "dump log",
    "dump super",
    "dump tree",
    "extract",
    "getfattr",
    "info",
    "ls",
    "lsattr",
    "property get",
    "property list",
    "recover",
    "stat",
    "stats",
    "subvolume get",
    "subvolume get-default",
    "subvolume list",
    "subvolume show",
    "tree",
    // They have nothing to do with a volume that is there.
    "bench dir-fsync",
    "bench enospc",
    "bench fs-mark",
    "completions",
    // New volumes, which have tests of their own: `build/same` and `mkfs`.
    "build",
    "mkfs",
    // Programs of other users decide what happens to a mount, and when.
    "mount",
    "sync",
    "unmount",
    // They change nothing of a volume that is whole.
    "repair",
    "rescue replay-log",
    "rescue zero-log",
    "scrub",
];

/// What each run of all lines sees: how many processors, on which it is, and whether others are
/// busy.
const RUNS: [(u32, &str, bool); 3] = [(1, "0", false), (16, "0-1", false), (2, "0-1", true)];

const EPOCH: &str = "1700000000";

/// The verb that a line calls: its words up to the first that belongs to none in `verbs`.
fn verb_of(line: &str, verbs: &BTreeSet<String>) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let two = words.iter().take(2).copied().collect::<Vec<_>>().join(" ");
    let one = words.first().copied().unwrap_or_default().to_owned();
    if verbs.contains(&two) { two } else { one }
}

/// A verb that is new must be in one of the lists.
#[test]
fn every_verb_is_in_a_list() {
    let dir = scratch_dir();
    does(dir.path(), "man pages");
    let pages = fs::read_dir(dir.path().join("pages")).expect("a directory");
    let names = pages.map(|page| page.expect("an entry").file_name().into_string().expect("text"));
    let names: BTreeSet<String> =
        names.filter_map(|name| Some(name.strip_suffix(".1")?.to_owned())).collect();
    // One with others below it is none of its own.
    let is_above = |name: &str, other: &str| {
        name.matches('-').count() == 1 && other.starts_with(&format!("{name}-"))
    };
    let is_verb =
        |name: &&String| name.contains('-') && !names.iter().any(|other| is_above(name, other));
    // Of the verbs that have one above, the first hyphen is the one behind that.
    let verb = |name: &String| {
        let rest = name.strip_prefix("offshoot-").expect("a page of a verb");
        match rest.split_once('-') {
            Some((above, below)) => format!("{above} {below}"),
            None => rest.to_owned(),
        }
    };
    let verbs: BTreeSet<String> = names.iter().filter(is_verb).map(verb).collect();
    let lines = LINES.iter().chain(BTRFS_LINES).map(|line| verb_of(line, &verbs));
    let listed: BTreeSet<String> = lines.chain(OTHERS.iter().map(|&verb| verb.into())).collect();
    assert_eq!(listed, verbs, "verbs of the lists, and of the program");
}

/// A directory with two hundred files and more, made in the order that the seed gives.
fn tree(root: &Path, order: u64) {
    let mut random = Random::new(11);
    let mut files = Vec::new();
    for number in 0..200 {
        let len = usize::try_from(random.below(20_000)).expect("a small number");
        let data = if number % 3 == 0 { random.bytes(len) } else { random.text(len) };
        files.push((root.join(format!("d{}/f{number}", number % 10)), data));
    }
    let large = random.bytes(2 << 20);
    files.push((root.join("same"), large.clone()));
    files.push((root.join("large"), large));
    write_shuffled(files, order);
    let is_first = order == 1;
    let [one, other] = if is_first { ["x1", "x2"] } else { ["x2", "x1"] };
    fill::write(&root.join(one), b"linked");
    fs::hard_link(root.join(one), root.join(other)).expect("a link");
    for name in if is_first { ["user.a", "user.b"] } else { ["user.b", "user.a"] } {
        setxattr(root.join("large"), name, b"value", XattrFlags::empty()).expect("an attribute");
    }
    let holes = File::create(root.join("holes")).expect("a file");
    if is_first {
        holes.write_all_at(&vec![0; 300_000], 0).expect("zeros");
    }
    holes.write_all_at(&[7; 5000], 100_000).expect("data");
    holes.set_len(300_000).expect("holes");
    settle(root, order);
}

/// Gives everything below `path` times: the same of the last change, and others of the last access.
fn settle(path: &Path, order: u64) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("a directory") {
            settle(&entry.expect("an entry").path(), order);
        }
    }
    let at = |secs: u64| UNIX_EPOCH + Duration::from_secs(secs);
    // That of one file is later than the time that the environment sets.
    let modified = if path.ends_with("same") { 2_000_000_000 } else { 1_600_000_000 };
    let times = FileTimes::new().set_modified(at(modified)).set_accessed(at(order * 1_000_000));
    File::open(path).and_then(|file| file.set_times(times)).expect("times");
}

/// The directories that are copied from.
struct EditSources {
    directories: [PathBuf; 2],
    /// A volume of the kernel, which lists directories in the order in which files were made.
    _mount: Option<(MountedMembers, Disks)>,
}

impl EditSources {
    fn new(dir: &Path) -> Self {
        let mount = judges::require().map(|judges| {
            let disks = Disks::create(&judges, 1, 256);
            disks.mkfs(&[]);
            (disks.mount("noatime"), disks)
        });
        let top = mount.as_ref().map_or(dir, |(mount, _)| mount.path());
        let directories = [1, 2].map(|order| {
            let above = fill::directory(top, &format!("order{order}"));
            let source = fill::directory(&above, "source");
            tree(&source, order);
            fill::sync(&source);
            source
        });
        Self { directories, _mount: mount }
    }
}

/// Threads that are busy until this is dropped.
struct Busy<'a>(&'a AtomicBool);

impl<'a> Busy<'a> {
    fn start<'s>(scope: &'s thread::Scope<'s, '_>, is_over: &'a AtomicBool) -> Self
    where
        'a: 's,
    {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            });
        }
        Self(is_over)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A hash of the length of an image, and of what is in it.
fn digest(image: &Path) -> u64 {
    let file = File::open(image).expect("an image");
    let len = file.metadata().expect("its length").len();
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(len);
    let mut block = vec![0; 4096];
    let mut at = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = start / 4096 * 4096;
        let end = seek(&file, SeekFrom::Hole(start)).expect("an end");
        while at < end {
            let size = usize::try_from((len - at).min(4096)).expect("small");
            let block = &mut block[..size];
            file.read_exact_at(block, at).expect("the image is read");
            // Which zeros are holes is for the host to say.
            if block.iter().any(|&byte| byte != 0) {
                hasher.write_u64(at);
                hasher.write(block);
            }
            at += 4096;
        }
    }
    hasher.finish()
}

/// Runs a line on the image `v` in `dir`.
#[track_caller]
fn change(dir: &Path, line: &str, source: &Path, (processors, bound, _): (u32, &str, bool)) {
    let library = dir.parent().expect("a directory above");
    let line = line.replace("SOURCE", source.to_str().expect("text"));
    let mut command = shown(library, processors, bound);
    command.args(words(&line)).current_dir(dir).env("SOURCE_DATE_EPOCH", EPOCH);
    let output = command.stdin(Stdio::null()).output().expect("taskset starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said}");
}

/// Runs all lines on a copy of `image`. Gives a hash of the image after each.
fn changed(image: &Path, lines: &[&str], source: &Path, run: (u32, &str, bool)) -> Vec<u64> {
    let dir = image.with_file_name(format!("run{}", run.0));
    fs::create_dir(&dir).expect("a directory");
    let copy = dir.join("v");
    fs::copy(image, &copy).expect("a copy of the image");
    let is_over = AtomicBool::new(false);
    let digests = thread::scope(|scope| {
        let _busy = run.2.then(|| Busy::start(scope, &is_over));
        let one = |line: &&str| {
            change(&dir, line, source, run);
            digest(&copy)
        };
        lines.iter().map(one).collect()
    });
    // The others have the same bytes.
    if run == RUNS[0] {
        check(&copy);
    }
    fs::remove_dir_all(dir).expect("the copy is removed");
    digests
}

fn lines() -> Vec<&'static str> {
    let of_btrfs = if is_xfs() { &[] } else { BTRFS_LINES };
    [LINES, of_btrfs].concat()
}

/// An image with the contents of a directory.
fn image(dir: &Path, source: &Path) -> PathBuf {
    let format = if is_xfs() { "--format xfs" } else { "--subvolume /sub" };
    let source = source.display();
    does(dir, &format!("build first.img --from {source} {format} --size 500M"));
    dir.join("first.img")
}

fn every_verb_makes_the_same_bytes() {
    let dir = scratch_dir();
    library(dir.path());
    let sources = EditSources::new(dir.path());
    let image = image(dir.path(), &sources.directories[0]);
    let lines = lines();
    let mut first = None;
    for (at, run) in RUNS.into_iter().enumerate() {
        let found = changed(&image, &lines, &sources.directories[at % 2], run);
        let first = first.get_or_insert_with(|| found.clone());
        let other = found.iter().zip(&*first).position(|(found, first)| found != first);
        let other = other.map(|at| lines[at]);
        assert_eq!(other, None, "with (processors, on, busy) {run:?} this makes other bytes");
    }
}

/// Without the environment an image is another one each time.
fn what_is_not_asked_for_differs() {
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("source")).expect("a directory");
    let image = image(dir.path(), &path("source"));
    let digests = [1, 2].map(|_| {
        fs::copy(&image, path("v")).expect("a copy of the image");
        does(dir.path(), "mkdir v:/dir");
        digest(&path("v"))
    });
    assert_ne!(digests[0], digests[1]);
}

/// No file that is copied has a later time, and the copy was accessed when it was changed.
fn times_are_those_that_the_environment_allows() {
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("source")).expect("a directory");
    for name in ["source/same", "source/other"] {
        fs::write(path(name), "data").expect("a file");
    }
    settle(&path("source"), 1);
    let image = image(dir.path(), &path("source"));
    fs::rename(image, path("v")).expect("a name");
    library(dir.path());
    fs::create_dir(path("d")).expect("a directory");
    fs::rename(path("v"), path("d/v")).expect("a name");
    change(&path("d"), "cp -r SOURCE v:/", &path("source"), RUNS[0]);
    let epoch: u64 = EPOCH.parse().expect("a number");
    for (name, secs) in [("same", epoch), ("other", 1_600_000_000)] {
        let line = format!("stat -c '%X %Y' v:/source/{name}");
        assert_eq!(does(&path("d"), &line), format!("{secs} {secs}\n"));
    }
    assert!(epoch < SystemTime::now().duration_since(UNIX_EPOCH).expect("a time").as_secs());
}

on_both!(
    every_verb_makes_the_same_bytes,
    what_is_not_asked_for_differs,
    times_are_those_that_the_environment_allows,
);

/// A volume gives the id of the last subvolume again when that is gone, but never its UUID.
#[test]
fn a_subvolume_has_a_uuid_of_its_own() {
    let dir = scratch_dir();
    library(dir.path());
    let path = fill::directory(dir.path(), "d");
    does(&path, "mkfs v --size 200M");
    let of_new = || {
        change(&path, "subvolume create v:/new", &path, RUNS[0]);
        let shown = does(&path, "subvolume show --json v:/new");
        let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
        (shown["id"].clone(), shown["uuid"].clone())
    };
    let first = of_new();
    change(&path, "subvolume delete v:/new", &path, RUNS[0]);
    let second = of_new();
    assert_eq!(first.0, second.0, "the id is used again");
    assert_ne!(first.1, second.1);
}
