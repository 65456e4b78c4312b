//! Which times a change of a name sets: those that the kernel sets for the same call.

use std::fs;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::*;

/// A call, with paths of one or two names.
#[derive(Clone, Copy, Debug)]
enum NameCall {
    Create(&'static str),
    Mkdir(&'static str),
    Symlink(&'static str),
    Link(&'static str, &'static str),
    Unlink(&'static str),
    Rmdir(&'static str),
    Rename(&'static str, &'static str),
    Exchange(&'static str, &'static str),
    Whiteout(&'static str, &'static str),
}

use NameCall as Call;

/// `b/kept` and `a/kept` stay, and hold the inodes that other names lose.
const CALLS: [NameCall; 29] = [
    Call::Mkdir("a"),
    Call::Mkdir("b"),
    Call::Create("a/file"),
    Call::Symlink("a/link"),
    Call::Mkdir("a/dir"),
    Call::Mkdir("a/other dir"),
    Call::Create("b/other"),
    Call::Link("a/file", "b/kept"),
    Call::Link("b/other", "a/kept"),
    Call::Rename("a/link", "a/moved link"),
    Call::Rename("a/moved link", "b/link"),
    Call::Rename("a/dir", "b/dir"),
    Call::Rename("b/dir", "b/the dir"),
    Call::Rename("a/other dir", "b/the dir"),
    Call::Rename("b/the dir", "a/dir"),
    Call::Exchange("a/file", "a/kept"),
    Call::Exchange("a/file", "b/other"),
    Call::Exchange("a/dir", "b/other"),
    Call::Exchange("b/other", "b/kept"),
    Call::Exchange("b/kept", "a/file"),
    Call::Mkdir("b/second"),
    Call::Exchange("a/file", "b/second"),
    Call::Rename("a/kept", "b/link"),
    Call::Whiteout("b/link", "a/link"),
    Call::Unlink("a/link"),
    Call::Create("a/last"),
    Call::Unlink("a/last"),
    Call::Mkdir("b/empty"),
    Call::Rmdir("b/empty"),
];

/// The inode and the times of change of each path, of contents and of the inode.
type TimesByPath = BTreeMap<Vec<u8>, (u64, [i128; 2])>;

/// What a call has changed: of each path, the times; `None` for a new file.
type ChangedTimes = BTreeMap<Vec<u8>, Option<[bool; 2]>>;

fn changed(before: &TimesByPath, after: &TimesByPath) -> ChangedTimes {
    let old: BTreeMap<_, _> = before.values().copied().collect();
    let times = |(path, (ino, times)): (&Vec<u8>, &(u64, [i128; 2]))| {
        let old = old.get(ino).map(|old| [0, 1].map(|index| old[index] != times[index]));
        (path.clone(), old)
    };
    after.iter().map(times).collect()
}

fn joined(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}

fn times_of_kernel(root: &Path, path: &[u8], all: &mut TimesByPath) {
    let full = root.join(std::ffi::OsStr::from_bytes(path));
    let found = full.symlink_metadata().unwrap();
    let time = |seconds: i64, nanos: i64| i128::from(seconds) << 32 | i128::from(nanos);
    let times = [time(found.mtime(), found.mtime_nsec()), time(found.ctime(), found.ctime_nsec())];
    all.insert(path.to_vec(), (found.ino(), times));
    if found.is_dir() {
        for entry in fs::read_dir(&full).unwrap() {
            times_of_kernel(root, &joined(path, entry.unwrap().file_name().as_bytes()), all);
        }
    }
}

fn times_of(tree: &NameTree, ino: Ino, path: &[u8], all: &mut TimesByPath) {
    let node = &tree.nodes[&ino];
    all.insert(path.to_vec(), (ino.0, [node.mtime.into(), node.ctime.into()]));
    for (name, below) in &node.names {
        times_of(tree, *below, &joined(path, name), all);
    }
}

fn call_kernel(root: &Path, call: NameCall) {
    let renamed = |from: &str, to: &str, flags| {
        renameat_with(CWD, root.join(from), CWD, root.join(to), flags).unwrap();
    };
    match call {
        Call::Create(path) => fs::write(root.join(path), b"").unwrap(),
        Call::Mkdir(path) => fs::create_dir(root.join(path)).unwrap(),
        Call::Symlink(path) => symlink("target", root.join(path)).unwrap(),
        Call::Link(from, to) => fs::hard_link(root.join(from), root.join(to)).unwrap(),
        Call::Unlink(path) => fs::remove_file(root.join(path)).unwrap(),
        Call::Rmdir(path) => fs::remove_dir(root.join(path)).unwrap(),
        Call::Rename(from, to) => renamed(from, to, RenameFlags::empty()),
        Call::Exchange(from, to) => renamed(from, to, RenameFlags::EXCHANGE),
        Call::Whiteout(from, to) => renamed(from, to, RenameFlags::WHITEOUT),
    }
}

fn call_us(bench: &NameBench, call: NameCall, now: i64) {
    let (names, new) = (bench.names(), new_file(0o755, now));
    let place = |path: &'static str| match path.split_once('/') {
        Some((dir, name)) => {
            let dir = NamePlace { dir: bench.root(), name: dir.as_bytes() };
            NamePlace { dir: names.find(dir).unwrap().0, name: name.as_bytes() }
        }
        None => NamePlace { dir: bench.root(), name: path.as_bytes() },
    };
    let create = |path, kind| names.create(place(path), kind, &new).map(drop);
    let rename = |from, to, how| names.rename(place(from), place(to), how, at(now)).map(drop);
    match call {
        Call::Create(path) => create(path, XfsNewKind::Regular),
        Call::Mkdir(path) => create(path, XfsNewKind::Directory),
        Call::Symlink(path) => create(path, XfsNewKind::Symlink(b"target")),
        Call::Link(from, to) => names.link(names.find(place(from)).unwrap().0, place(to), at(now)),
        Call::Unlink(path) => names.unlink(place(path), at(now)).map(drop),
        Call::Rmdir(path) => names.rmdir(place(path), at(now)).map(drop),
        Call::Rename(from, to) => rename(from, to, Rename::Replace),
        Call::Exchange(from, to) => rename(from, to, Rename::Exchange),
        Call::Whiteout(from, to) => rename(from, to, Rename::Whiteout { new, replaces: true }),
    }
    .unwrap();
}

fn same_times(options: &str) {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 1 << 10);
    disk.mkfs(options);
    let mount = disk.mount("", &[]);
    let root = mount.path();
    let find = || {
        let mut all = TimesByPath::new();
        times_of_kernel(root, b"", &mut all);
        all
    };
    let Some(bench) = NameBench::make(1 << 10, options) else { return };
    let find_ours = || {
        let (tree, mut all) = (bench.tree(), TimesByPath::new());
        times_of(&tree, bench.root(), b"", &mut all);
        all
    };
    let (mut before, mut ours) = (find(), find_ours());
    for (number, call) in (1..).zip(CALLS) {
        // The clock of the kernel goes by 4 ms.
        thread::sleep(Duration::from_millis(12));
        call_kernel(root, call);
        let after = find();
        call_us(&bench, call, 1_700_000_000 + number);
        let after_ours = find_ours();
        assert_eq!(changed(&ours, &after_ours), changed(&before, &after), "{number}: {call:?}");
        (before, ours) = (after, after_ours);
    }
}

#[test]
fn changes_set_the_times_that_the_kernel_sets() {
    same_times("");
}

#[test]
fn changes_set_the_times_that_the_kernel_sets_with_parent_pointers() {
    same_times("-n parent=1");
}
