//! Directories with many new entries, and new directories below a directory that is synced.
//!
//! An fsync of a directory promises that after a crash its names are there, and so are the files
//! and directories that were new below it at the call. Our log must hold as much of that as the
//! kernel's own log does.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, Mechanisms, Stats};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{
    DirEntry, EntryPlace, FileId, FileSystem, FileSystemMut, FileType, NewNode, Timestamp,
    XattrMode,
};

use crate::by_us::{new_file, shapes};
use crate::cut::{LogShape, PLAIN, cut, judge, logs, make, read_only, shell, top};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 7 };

/// The paths below a directory, with the type and the size of the file at each.
fn paths(fs: &Filesystem, dir: FileId) -> BTreeMap<String, (FileType, u64)> {
    let mut entries = Vec::new();
    let visit = &mut |entry: DirEntry<'_>| {
        entries.push((entry.name.escape_ascii().to_string(), entry.file));
        ControlFlow::Continue(())
    };
    fs.read_dir(dir, 0, visit).expect("a directory");
    let mut paths = BTreeMap::new();
    for (name, file) in entries {
        let attr = fs.attr(file).expect("a file");
        // The size of a directory follows from its names, so it is left out.
        let size = if attr.file_type == FileType::Directory { 0 } else { attr.size };
        if attr.file_type == FileType::Directory {
            let below = paths_below(fs, file, &name);
            paths.extend(below);
        }
        paths.insert(name, (attr.file_type, size));
    }
    paths
}

fn paths_below(
    fs: &Filesystem,
    dir: FileId,
    name: &str,
) -> impl Iterator<Item = (String, (FileType, u64))> {
    paths(fs, dir).into_iter().map(move |(path, what)| (format!("{name}/{path}"), what))
}

fn open(disks: &Disks, logs_by_item: bool) -> Arc<BtrfsVolume> {
    let options = EngineOptions {
        commit_interval: None,
        has_tree_log: true,
        mechanisms: Mechanisms::default().log_by_item(logs_by_item),
        ..EngineOptions::default()
    };
    BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens")
}

/// A directory `dir` that the last commit has.
fn committed_dir(volume: &Arc<BtrfsVolume>) -> (Filesystem, FileId) {
    let fs = top(volume);
    let dir =
        fs.mkdir(EntryPlace { dir: fs.root(), name: b"dir" }, &new_file()).expect("a directory");
    (fs, dir)
}

/// New directories below the synced directory, and new files in them.
const NEW_TREE: [&str; 4] = ["a", "a/b", "a/b/c", "d"];
const NEW_FILES: [&str; 4] = ["a/x", "a/b/y", "a/b/c/file", "d/z"];

/// Makes those of them that are not there yet.
fn make_tree(fs: &Filesystem, dir: FileId) {
    let place = |path: &'static str| {
        let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = parents
            .split('/')
            .filter(|name| !name.is_empty())
            .fold(dir, |dir, name| fs.lookup(dir, name.as_bytes()).expect("it was made before"));
        EntryPlace { dir: parent, name: name.as_bytes() }
    };
    for path in NEW_TREE {
        fs.mkdir(place(path), &new_file()).expect("a directory");
    }
    for path in NEW_FILES {
        fs.create(place(path), &new_file()).expect("a file");
    }
}

/// A sync of a directory loses nothing that was below it at the call: the kernel's log and ours
/// hold the same.
#[test]
fn new_directories_below_are_in_the_log() {
    let Some(judges) = judges::require() else { return };
    let tree = NEW_TREE.join(" ");
    let theirs = cut(
        &judges,
        PLAIN,
        |root| shell(root, "mkdir dir"),
        |root| {
            shell(
                &root.join("dir"),
                &format!("mkdir {tree}; touch {}; sync .", NEW_FILES.join(" ")),
            );
        },
    );
    assert_eq!(logs(&theirs), 1, "the kernel wrote a log");
    let fs = read_only(theirs.devices());
    let kept = paths(&fs, fs.lookup(fs.root(), b"dir").expect("it was committed"));
    assert_eq!(kept.len(), NEW_TREE.len() + NEW_FILES.len(), "{kept:?}");
    for shape in shapes() {
        let disks = make(&judges, shape);
        let volume = open(&disks, false);
        let (fs, dir) = committed_dir(&volume);
        fs.sync().expect("a commit");
        make_tree(&fs, dir);
        let commits = volume.stats().commits;
        fs.fsync(dir).expect("an fsync");
        let copy = disks.copy(&judges);
        assert_eq!((volume.stats().commits, logs(&copy)), (commits, 1), "{shape:?}");
        assert_eq!(paths(&read_only(copy.devices()), dir), kept, "{shape:?}");
        judge(&judges, &copy, &format!("{shape:?}"), 1);
        // A file that is made later is there after a sync of its own directory.
        let below = fs.lookup(dir, b"a").expect("it is there");
        fs.create(EntryPlace { dir: below, name: b"later" }, &new_file()).expect("a file");
        fs.unlink(EntryPlace { dir: below, name: b"x" }, AT).expect("it was there");
        fs.fsync(below).expect("an fsync");
        let copy = disks.copy(&judges);
        assert_eq!((volume.stats().commits, logs(&copy)), (commits, 1), "{shape:?}");
        assert_eq!(paths(&read_only(copy.devices()), dir), paths(&fs, dir), "{shape:?}");
        judge(&judges, &copy, &format!("{shape:?}, later"), 1);
        drop((fs, volume));
        disks.assert_checks();
    }
}

/// A second sync of a directory logs what was made and removed below it since the first one: at any
/// depth, and also if something below was synced in between.
#[test]
fn new_directories_below_are_in_the_log_again() {
    let Some(judges) = judges::require() else { return };
    let tree = NEW_TREE.join(" ");
    let theirs = cut(
        &judges,
        PLAIN,
        |root| shell(root, "mkdir dir"),
        |root| {
            let script = format!("mkdir {tree}; touch {}; sync .", NEW_FILES.join(" "));
            let again = "rm d/z; mkdir d/e; touch d/e/f a/later; sync .";
            shell(&root.join("dir"), &format!("{script}; {again} ; touch top; sync ."));
        },
    );
    assert_eq!(logs(&theirs), 1, "the kernel wrote a log");
    let theirs = read_only(theirs.devices());
    let theirs = paths(&theirs, theirs.lookup(theirs.root(), b"dir").expect("it was committed"));
    for shape in shapes() {
        let disks = make(&judges, shape);
        let volume = open(&disks, false);
        let (fs, dir) = committed_dir(&volume);
        fs.sync().expect("a commit");
        make_tree(&fs, dir);
        let commits = volume.stats().commits;
        fs.fsync(dir).expect("an fsync");
        let [a, d] = [b"a", b"d"].map(|name| fs.lookup(dir, name).expect("it is there"));
        let deep = ["b", "c"]
            .iter()
            .fold(a, |dir, name| fs.lookup(dir, name.as_bytes()).expect("it is there"));
        fs.unlink(EntryPlace { dir: d, name: b"z" }, AT).expect("it was there");
        let e = fs.mkdir(EntryPlace { dir: d, name: b"e" }, &new_file()).expect("a directory");
        for (dir, name) in [(e, "f"), (a, "later"), (dir, "top")] {
            fs.create(EntryPlace { dir, name: name.as_bytes() }, &new_file()).expect("a file");
        }
        let check = |what| {
            let what = format!("{shape:?}, {what}");
            let copy = disks.copy(&judges);
            assert_eq!((volume.stats().commits, logs(&copy)), (commits, 1), "{what}");
            let ours = paths(&read_only(copy.devices()), dir);
            assert_eq!(ours, paths(&fs, dir), "{what}");
            judge(&judges, &copy, &what, 1);
            ours
        };
        fs.fsync(dir).expect("an fsync");
        let ours = check("changed at the top");
        let lost: Vec<_> = theirs.keys().filter(|path| !ours.contains_key(*path)).collect();
        assert!(lost.is_empty(), "the kernel kept {lost:?} too");
        // Only the lowest directory has changed.
        fs.create(EntryPlace { dir: deep, name: b"deep" }, &new_file()).expect("a file");
        fs.fsync(dir).expect("an fsync");
        check("changed below");
        // A sync of what has just been logged writes nothing.
        let items = volume.stats().log_items;
        fs.fsync(dir).expect("an fsync");
        assert_eq!(volume.stats().log_items, items, "{shape:?}");
        drop((fs, volume));
        disks.assert_checks();
    }
}

/// A new directory is in the log because a file's name needs it. When a synced directory leads to
/// it, the log has its entries as well.
#[test]
fn a_new_directory_that_names_need_is_in_the_log_with_its_entries() {
    let Some(judges) = judges::require() else { return };
    let disks = make(&judges, PLAIN);
    let volume = open(&disks, false);
    let (fs, dir) = committed_dir(&volume);
    fs.sync().expect("a commit");
    let p = fs.mkdir(EntryPlace { dir, name: b"p" }, &new_file()).expect("a directory");
    let q = fs.mkdir(EntryPlace { dir: p, name: b"q" }, &new_file()).expect("a directory");
    fs.create(EntryPlace { dir: q, name: b"z" }, &new_file()).expect("a file");
    let file = fs.create(EntryPlace { dir, name: b"f" }, &new_file()).expect("a file");
    fs.link(file, EntryPlace { dir: q, name: b"g" }, AT).expect("a name");
    fs.fsync(dir).expect("an fsync");
    let copy = disks.copy(&judges);
    assert_eq!((volume.stats().fsyncs_logged, logs(&copy)), (1, 1));
    let found = paths(&read_only(copy.devices()), dir);
    assert_eq!(found, paths(&fs, dir));
    assert!(found.contains_key("p/q/z"), "{found:?}");
    judge(&judges, &copy, "a name in a new directory", 1);
    drop((fs, volume));
    disks.assert_checks();
}

/// Makes an entry of a random kind.
fn make_entry(fs: &Filesystem, dir: FileId, number: u64, random: &mut Random) {
    let name =
        format!("new-{number}-{}", "n".repeat(usize::try_from(random.below(60)).expect("small")));
    let place = EntryPlace { dir, name: name.as_bytes() };
    let create = || fs.create(place, &new_file()).expect("a file");
    let old = random.below(OLD);
    let old = format!("old{old}");
    let old = EntryPlace { dir, name: old.as_bytes() };
    match random.below(24) {
        0 => drop(fs.symlink(place, b"somewhere/else", &new_file()).expect("a link")),
        1 => {
            let node = NewNode { file_type: FileType::Fifo, rdev: (0, 0) };
            fs.mknod(place, node, &new_file()).expect("a pipe");
        }
        2 => fs.write(create(), 0, &[7; 5000], AT).expect("room"),
        3 => {
            let value = vec![3; usize::try_from(random.below(300)).expect("small")];
            fs.set_xattr(create(), b"user.x", &value, XattrMode::Set, AT).expect("room");
        }
        4 => {
            let new = fs.mkdir(place, &new_file()).expect("a directory");
            fs.create(EntryPlace { dir: new, name: b"in it" }, &new_file()).expect("a file");
        }
        5 => {
            // A second name in another directory.
            fs.link(create(), EntryPlace { dir: fs.root(), name: place.name }, AT).expect("a link");
        }
        6 => {
            if let Ok(file) = fs.lookup(dir, old.name) {
                fs.link(file, place, AT).expect("a link");
            }
        }
        7 => {
            create();
            fs.rename(place, old, AT).expect("it takes the place of what is there");
        }
        8 => drop(fs.unlink(old, AT)),
        9 => {
            create();
            fs.unlink(place, AT).expect("it was there");
        }
        _ => drop(create()),
    }
}

/// How many entries the last commit has.
const OLD: u64 = 20;

/// Twice, adds many entries to a directory and syncs it, and judges the cut volume each time.
fn many_entries(judges: &Judges, shape: LogShape, logs_by_item: bool, seed: u64) -> Stats {
    let mut random = Random::new(seed);
    let disks = make(judges, shape);
    let volume = open(&disks, logs_by_item);
    let (fs, dir) = committed_dir(&volume);
    for number in 0..OLD {
        let name = format!("old{number}");
        let file =
            fs.create(EntryPlace { dir, name: name.as_bytes() }, &new_file()).expect("a file");
        fs.write(file, 0, &[1; 3000], AT).expect("room");
    }
    fs.sync().expect("a commit");
    let mut made = 0;
    for (round, count) in [300, 90].into_iter().enumerate() {
        for _ in 0..count {
            make_entry(&fs, dir, made, &mut random);
            made += 1;
        }
        fs.fsync(dir).expect("an fsync");
        let what =
            format!("{shape:?}, by item: {logs_by_item}, round {round}, OFFSHOOT_SEED={seed}");
        let copy = disks.copy(judges);
        let found = paths(&read_only(copy.devices()), dir);
        let names = |paths: &BTreeMap<String, (FileType, u64)>| {
            let of = |(path, (kind, _)): (&String, &(FileType, u64))| (path.clone(), *kind);
            paths.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(names(&found), names(&paths(&fs, dir)), "{what}");
        judge(judges, &copy, &what, 1);
    }
    let stats = volume.stats();
    drop((fs, volume));
    disks.assert_checks();
    stats
}

/// Entries and new inodes that are logged in runs leave the same as those that are logged one by
/// one, whatever else is among them.
#[test]
fn runs_of_entries_hold_what_single_ones_do() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    for (number, shape) in (0..).zip(shapes()) {
        let [by_run, by_item] =
            [false, true].map(|by_item| many_entries(&judges, shape, by_item, seed + number));
        println!(
            "{shape:?}: {} items in logs, {} runs; one by one {}, {} runs; {} and {} commits",
            by_run.log_items,
            by_run.log_runs,
            by_item.log_items,
            by_item.log_runs,
            by_run.commits,
            by_item.commits
        );
        assert!(by_run.log_runs > 4 && by_item.log_runs == 0, "{by_run:?}");
        assert_eq!(
            (by_run.fsyncs_logged, by_item.fsyncs_logged),
            (2, 2),
            "{by_run:?}, {by_item:?}"
        );
    }
}

/// The fsync of a directory commits if new entries of it are most of the changes, because a commit
/// is cheaper then. If they are few among the changes, it writes a log.
#[test]
fn a_commit_is_made_where_it_is_cheaper_than_a_log() {
    let Some(judges) = judges::require() else { return };
    for (beside, by_item, commits) in [(0, false, 1), (10_000, false, 0), (0, true, 0)] {
        let disks = Disks::create(&judges, 1, 1024);
        disks.mkfs(&[]);
        let volume = open(&disks, by_item);
        let (fs, dir) = committed_dir(&volume);
        fs.sync().expect("a commit");
        let before = volume.stats();
        for (dir, count) in [(fs.root(), beside), (dir, 600)] {
            for number in 0..count {
                let name = format!("new-{number}");
                fs.create(EntryPlace { dir, name: name.as_bytes() }, &new_file()).expect("a file");
            }
        }
        fs.fsync(dir).expect("an fsync");
        let stats = volume.stats();
        let what = format!("{beside} beside, by item: {by_item}: {stats:?}");
        assert_eq!(stats.fsyncs_with_cheaper_commit, commits, "{what}");
        assert_eq!(
            (stats.commits - before.commits, stats.fsyncs_logged),
            (commits, 1 - commits),
            "{what}"
        );
        let copy = disks.copy(&judges);
        assert_eq!(paths(&read_only(copy.devices()), dir), paths(&fs, dir), "{what}");
        drop((fs, volume));
        disks.assert_checks();
    }
}
