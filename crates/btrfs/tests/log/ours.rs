//! Logs that we wrote: random operations, with fsyncs that each promise something.
//!
//! We cut a volume by copying its image after an fsync, while it is open. The kernel and we replay
//! copies, and find the same. Every file is as it was fsynced, with all its names, its data and its
//! attributes, unless it was changed since.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::threads::SetOnDrop;
use offshoot_vfs::{
    DirEntry, EntryPlace, Fallocate, FileId, FileSystem, FileSystemMut, NewFile, Rename, SetAttr,
    Timestamp, XattrMode,
};

use crate::cut::{LogShape, PLAIN, SHAPES, judge, make, read_only, top};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 7 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// How many directories there are. They stay, and each may be in an earlier one.
const DIRECTORIES: usize = 3;
const NAMES: u64 = 6;

/// A directory by its number, and a name in it.
type NumberedPath = (usize, u64);

/// What an fsync promised of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FsyncPromise {
    data: Vec<u8>,
    nlink: u32,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

fn name(number: u64) -> Vec<u8> {
    // Some names are long, so that some items are large.
    format!("{number}{}", "n".repeat(usize::try_from(number * number * 5).expect("small")))
        .into_bytes()
}

fn contents(fs: &Filesystem, file: FileId) -> FsyncPromise {
    let attr = fs.attr(file).expect("a file");
    let mut data = vec![0; usize::try_from(attr.size).expect("small")];
    assert_eq!(fs.read(file, 0, &mut data).expect("data"), data.len());
    let mut xattrs = BTreeMap::new();
    let visit = &mut |name: &[u8], value: &[u8]| {
        xattrs.insert(name.to_vec(), value.to_vec());
        ControlFlow::Continue(())
    };
    fs.xattrs(file, visit).expect("attributes");
    FsyncPromise { data, nlink: attr.nlink, xattrs }
}

fn names(fs: &Filesystem, dir: FileId) -> BTreeMap<Vec<u8>, FileId> {
    let mut names = BTreeMap::new();
    let visit = &mut |entry: DirEntry<'_>| {
        names.insert(entry.name.to_vec(), entry.file);
        ControlFlow::Continue(())
    };
    fs.read_dir(dir, 0, visit).expect("a directory");
    names
}

/// A volume at work, and what fsyncs promised.
struct FsyncWork {
    fs: Filesystem,
    random: Random,
    dirs: Vec<FileId>,
    paths: BTreeMap<NumberedPath, FileId>,
    promises: BTreeMap<FileId, FsyncPromise>,
    /// The names that an fsync of a directory promised.
    names: BTreeMap<FileId, BTreeMap<Vec<u8>, FileId>>,
    /// The files that the last commit has.
    committed: BTreeSet<FileId>,
}

impl FsyncWork {
    fn begin(volume: &Arc<BtrfsVolume>, random: Random) -> Self {
        let fs = top(volume);
        let mut dirs = vec![fs.root()];
        for number in 1..DIRECTORIES {
            let dir = *dirs.last().expect("the first");
            let name = format!("dir{number}");
            dirs.push(
                fs.mkdir(EntryPlace { dir, name: name.as_bytes() }, &NEW).expect("a directory"),
            );
        }
        let (paths, promises, names) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let committed = BTreeSet::new();
        Self { fs, random, dirs, paths, promises, names, committed }
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.random.below(bound as u64)).expect("an index")
    }

    fn path(&mut self) -> NumberedPath {
        (self.below(self.dirs.len()), self.random.below(NAMES))
    }

    fn with_place<T>(
        &self,
        (dir, number): NumberedPath,
        call: impl FnOnce(EntryPlace<'_>) -> T,
    ) -> T {
        call(EntryPlace { dir: self.dirs[dir], name: &name(number) })
    }

    /// A path at which there is a file, and the file.
    fn some(&mut self) -> Option<(NumberedPath, FileId)> {
        let count = self.paths.len();
        let at = if count == 0 { return None } else { self.below(count) };
        self.paths.iter().nth(at).map(|(path, file)| (*path, *file))
    }

    /// The test changes a file, so the promises for it end.
    fn touch(&mut self, file: FileId) {
        self.promises.remove(&file);
    }

    /// The test adds or removes names in a directory, so the promises for it end.
    fn touch_names(&mut self, (dir, _): NumberedPath) {
        self.names.remove(&self.dirs[dir]);
    }

    fn gone(&mut self, path: NumberedPath) {
        self.touch_names(path);
        if let Some(file) = self.paths.remove(&path) {
            self.touch(file);
        }
    }

    /// Does one operation; now and then it makes a new directory.
    fn step(&mut self) {
        let kind = self.below(20);
        let path = self.path();
        if kind == 1 && self.below(8) == 0 {
            return self.change_directories(path);
        }
        let Some((old, file)) = self.some().filter(|_| kind > 3) else {
            self.touch_names(path);
            if kind == 0 && self.dirs.len() < 8 {
                let (dir, number) = (self.dirs[path.0], self.dirs.len());
                let name = format!("new{number}");
                let made = self.fs.mkdir(EntryPlace { dir, name: name.as_bytes() }, &NEW);
                self.dirs.push(made.expect("a directory"));
            } else if !self.paths.contains_key(&path) {
                let made = self.with_place(path, |place| self.fs.create(place, &NEW));
                self.paths.insert(path, made.expect("a file"));
            }
            return;
        };
        match kind {
            4 | 5 if old != path => {
                if self.paths.get(&path) == Some(&file) {
                    return;
                }
                let (from, to) = (name(old.1), name(path.1));
                let from = EntryPlace { dir: self.dirs[old.0], name: &from };
                let to = EntryPlace { dir: self.dirs[path.0], name: &to };
                self.fs.rename_with(from, to, Rename::Replace, AT).expect("a rename");
                self.gone(path);
                self.gone(old);
                self.paths.insert(path, file);
            }
            6 => {
                let Some(other) = self.paths.get(&path).copied().filter(|&one| one != file) else {
                    return;
                };
                let (from, to) = (name(old.1), name(path.1));
                let from = EntryPlace { dir: self.dirs[old.0], name: &from };
                let to = EntryPlace { dir: self.dirs[path.0], name: &to };
                self.fs.rename_with(from, to, Rename::Exchange, AT).expect("an exchange");
                self.gone(old);
                self.gone(path);
                self.paths.insert(old, other);
                self.paths.insert(path, file);
                self.touch(file);
                self.touch(other);
            }
            7 | 8 => {
                self.with_place(old, |place| self.fs.unlink(place, AT)).expect("a removal");
                self.gone(old);
            }
            9 if !self.paths.contains_key(&path) => {
                self.with_place(path, |place| self.fs.link(file, place, AT)).expect("a link");
                self.paths.insert(path, file);
                self.touch(file);
                self.touch_names(path);
            }
            10 => {
                let number = self.random.below(4);
                let name = format!("user.{number}");
                let len = self.below(600);
                let value = self.random.bytes(len);
                if len < 200 {
                    let _ = self.fs.remove_xattr(file, name.as_bytes(), AT);
                } else {
                    let any = XattrMode::Set;
                    let set = self.fs.set_xattr(file, name.as_bytes(), &value, any, AT);
                    set.expect("an attribute");
                }
                self.touch(file);
            }
            _ => self.change_data(file),
        }
    }

    /// Makes a directory, and removes or moves it. After that an fsync commits instead of writing a
    /// log, until the next commit.
    fn change_directories(&mut self, path: NumberedPath) {
        let dir = self.dirs[path.0];
        let (one, other) = (EntryPlace { dir, name: b"one" }, EntryPlace { dir, name: b"other" });
        self.touch_names(path);
        match self.fs.rmdir(other, AT) {
            Ok(()) => {}
            Err(_) if self.fs.lookup(dir, b"one").is_ok() => {
                self.fs.rename(one, other, AT).expect("a move");
            }
            Err(_) => drop(self.fs.mkdir(one, &NEW).expect("a directory")),
        }
    }

    fn change_data(&mut self, file: FileId) {
        let offset = self.random.below(12) * 4096 + [0, 0, 1000][self.below(3)];
        let len = [1 + self.below(300), 4096, 1 + self.below(20_000)][self.below(3)];
        match self.below(8) {
            0 => {
                let set = SetAttr { size: Some(offset), ..SetAttr::default() };
                self.fs.set_attr(file, &set, AT).expect("another size");
            }
            1 => {
                let all = [
                    Fallocate::PunchHole,
                    Fallocate::Allocate { keeps_size: true },
                    Fallocate::Allocate { keeps_size: false },
                    Fallocate::Zero { keeps_size: false },
                ];
                let what = all[self.below(all.len())];
                let done = self.fs.fallocate(file, what, offset, len as u64, AT);
                done.expect("room");
            }
            2 => {
                let size = self.fs.attr(file).expect("a file").size;
                let at = |offset| offshoot_vfs::FilePosition { file, offset };
                let Some((_, other)) = self.some().filter(|(_, other)| *other != file) else {
                    return;
                };
                let to = offshoot_vfs::FilePosition { file: other, offset: 0 };
                let len = size / 4096 * 4096;
                if len > 0 && self.fs.attr(other).expect("a file").size < (1 << 20) {
                    self.fs.clone_range(at(0), to, len, AT).expect("a clone");
                    self.touch(other);
                }
                return;
            }
            _ => {
                let bytes = self.random.bytes(len);
                self.fs.write(file, offset, &bytes, AT).expect("room");
            }
        }
        self.touch(file);
    }

    fn fsync(&mut self) -> bool {
        if self.below(4) == 0 {
            let at = self.below(self.dirs.len());
            let dir = self.dirs[at];
            self.fs.fsync(dir).expect("an fsync");
            self.names.insert(dir, names(&self.fs, dir));
            return true;
        }
        let Some((_, file)) = self.some() else { return false };
        self.fs.fsync(file).expect("an fsync");
        let promise = contents(&self.fs, file);
        self.promises.insert(file, promise);
        true
    }

    /// Notes that everything is committed.
    fn committed(&mut self) {
        self.committed = self.paths.values().copied().collect();
    }

    /// Requires that every file that was committed and still has a name has one in `fs` too, the
    /// same or another, whatever happened to its names.
    #[track_caller]
    fn assert_none_vanished(&self, fs: &Filesystem, what: &str) {
        let there = self.dirs.iter().filter(|dir| fs.attr(**dir).is_ok());
        let found: BTreeSet<_> = there.flat_map(|dir| names(fs, *dir).into_values()).collect();
        for (path, file) in &self.paths {
            let is_there = !self.committed.contains(file) || found.contains(file);
            assert!(is_there, "{what}: {file}, now at {path:?}, is in no place");
        }
    }

    /// Requires that everything that was promised is in `fs`.
    #[track_caller]
    fn assert_kept(&self, fs: &Filesystem, what: &str) {
        self.assert_none_vanished(fs, what);
        for (dir, promise) in &self.names {
            assert_eq!(names(fs, *dir), *promise, "{what}: {dir}");
        }
        for (path, file) in &self.paths {
            let Some(promise) = self.promises.get(file) else { continue };
            let found = self.with_place(*path, |place| fs.lookup(place.dir, place.name));
            let found = found.unwrap_or_else(|e| panic!("{what}: {path:?} of {file}: {e}"));
            assert_eq!(found, *file, "{what}: {path:?}");
            let now = contents(fs, found);
            assert_eq!(
                (now.nlink, now.data.len(), &now.xattrs),
                (promise.nlink, promise.data.len(), &promise.xattrs),
                "{what}: {path:?} of {file}"
            );
            let differs = (0..now.data.len()).find(|&at| now.data[at] != promise.data[at]);
            assert_eq!(differs, None, "{what}: {path:?} of {file} differs there");
        }
    }
}

/// Does random operations on volumes of a shape, cuts them `cuts` times, and judges every cut.
fn run(shape: LogShape, seed: u64, cuts: usize) {
    let Some(judges) = judges::require() else { return };
    let disks = make(&judges, shape);
    let options =
        EngineOptions { commit_interval: None, has_tree_log: true, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
    let mut work = FsyncWork::begin(&volume, Random::new(seed));
    let (mut cut, mut step) = (0, 0);
    while cut < cuts {
        step += 1;
        for _ in 0..work.below(4) {
            work.step();
        }
        let commits = volume.stats().commits;
        if work.below(40) == 0 {
            work.fs.sync().expect("a commit");
        }
        let has_synced = work.fsync();
        if volume.stats().commits != commits {
            work.committed();
        }
        if !has_synced || work.below(6) != 0 {
            continue;
        }
        cut += 1;
        let what = format!("{shape:?}, OFFSHOOT_SEED={seed}, step {step}");
        let copy = disks.copy(&judges);
        work.assert_kept(&read_only(copy.devices()), &what);
        judge(&judges, &copy, &what, 1);
    }
    let stats = volume.stats();
    println!("{shape:?}: {step} steps");
    for counter in
        stats.counters().filter(|one| one.name.contains("fsync") || one.name.contains("log"))
    {
        println!("    {:8} {}", counter.value, counter.name);
    }
    // A run of few steps may have the one commit that a new feature needs, or a random sync.
    assert!(cuts < 20 || stats.fsyncs_logged > stats.commits, "{stats:?}");
    drop(work);
    drop(volume);
    disks.assert_checks();
}

#[test]
fn what_we_log_is_what_was_promised() {
    let seed = seed_of_run();
    run(PLAIN, seed, 25);
    for (number, shape) in (1..).zip(SHAPES) {
        run(shape, seed.wrapping_add(number), 5);
    }
}

/// Threads in one directory.
const THREADS: u64 = 4;

/// How many file names each thread replaces again and again.
const FILES: u64 = 3;

/// The contents of a file in the test of threads: its thread, its file, and its version.
fn version(thread: u64, file: u64, version: u64, random: &mut Random) -> Vec<u8> {
    let head = [thread, file, version].map(u64::to_le_bytes).concat();
    let len = usize::try_from(random.below(3) * 5000).expect("small");
    [head, vec![1; len]].concat()
}

/// Replaces files as editors and package managers do: writes a new file, fsyncs it, and moves it
/// over the old one. Sometimes it fsyncs the directory then.
fn replace(
    fs: &Filesystem,
    dir: FileId,
    thread: u64,
    round: u64,
    random: &mut Random,
) -> ((u64, u64), u64) {
    let number = random.below(FILES);
    let (new, old) = (format!("new{thread}"), format!("file{thread}-{number}"));
    let from = EntryPlace { dir, name: new.as_bytes() };
    let file = fs.create(from, &NEW).expect("a file");
    fs.write(file, 0, &version(thread, number, round, random), AT).expect("room");
    fs.fsync(file).expect("an fsync");
    fs.rename(from, EntryPlace { dir, name: old.as_bytes() }, AT).expect("a rename");
    match random.below(4) {
        0 => fs.fsync(dir).expect("an fsync"),
        1 => fs.fsync(file).expect("an fsync"),
        _ => {}
    }
    ((thread, number), round)
}

/// The newest versions of the files in a directory.
fn newest(fs: &Filesystem, dir: FileId) -> BTreeMap<(u64, u64), u64> {
    let mut newest = BTreeMap::new();
    for (name, file) in names(fs, dir) {
        let data = contents(fs, file).data;
        let number = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().expect("8 bytes"));
        if data.len() < 24 {
            // A new file whose fsync has not returned yet.
            assert!(name.starts_with(b"new"), "{}", name.escape_ascii());
            continue;
        }
        let known: &mut u64 = newest.entry((number(0), number(8))).or_default();
        *known = number(16).max(*known);
    }
    newest
}

/// An fsync beside other fsyncs does not return before its file is durable.
#[test]
fn many_who_fsync_in_one_directory() {
    const CUTS: u64 = 8;
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disks = make(&judges, PLAIN);
    let options =
        EngineOptions { commit_interval: None, has_tree_log: true, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
    let fs = top(&volume);
    let dir = fs.mkdir(EntryPlace { dir: fs.root(), name: b"dir" }, &NEW).expect("a directory");
    // The threads stop while an image is copied.
    let (still, promised) = (RwLock::new(()), Mutex::new(BTreeMap::new()));
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (fs, still, promised, is_done) = (&fs, &still, &promised, &is_done);
            scope.spawn(move || {
                let mut random = Random::new(seed ^ thread << 32);
                let mut round = 0;
                while !is_done.load(Ordering::Relaxed) {
                    round += 1;
                    let _busy = still.read().expect("no thread panicked");
                    let (file, round) = replace(fs, dir, thread, round, &mut random);
                    promised.lock().expect("no thread panicked").insert(file, round);
                }
            });
        }
        let _end = SetOnDrop(&is_done);
        for cut in 0..CUTS {
            std::thread::sleep(std::time::Duration::from_millis(50));
            let (copy, promised) = {
                let _still = still.write().expect("no thread panicked");
                (disks.copy(&judges), promised.lock().expect("no thread panicked").clone())
            };
            let what = format!("cut {cut}, OFFSHOOT_SEED={seed}");
            let found = newest(&read_only(copy.devices()), dir);
            for (file, round) in promised {
                let found = found.get(&file).copied();
                assert!(found >= Some(round), "{what}: {file:?}: {round}, but {found:?}");
            }
            judge(&judges, &copy, &what, 1);
        }
    });
    let stats = volume.stats();
    for counter in stats.counters().filter(|one| one.name.contains("fsyncs") && one.value > 0) {
        println!("    {:8} {}", counter.value, counter.name);
    }
    println!(
        "{} fsyncs in {} writes of the log, {} commits",
        stats.fsyncs_logged, stats.log_writes, stats.commits
    );
    assert!(stats.fsyncs_logged > 10 * stats.commits, "{stats:?}");
    assert!(stats.fsyncs_logged > stats.log_writes, "no two fsyncs shared a write: {stats:?}");
    drop((fs, volume));
    disks.assert_checks();
}
