//! Real programs on a mount. Afterwards `btrfs check` or `xfs_repair` must find nothing, and the
//! kernel's mount must show the same bytes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::{command, run};
use offshoot_testkit::scratch_dir;
use offshoot_testkit::threads::SetOnDrop;
use rustix::process::Signal;

use super::disk::MountDisk;
use super::{ServedMount, on_both, require, volume};

/// The amount of work.
#[derive(Clone, Copy)]
pub(super) struct WorkAmount {
    /// How many files the trees have that programs work on.
    files: u32,
    /// How many times a database is killed.
    kills: u32,
    /// How much each job of `fio` writes.
    fio_size: &'static str,
}

const SHORT: WorkAmount = WorkAmount { files: 60, kills: 3, fio_size: "4m" };
pub(super) const LONG: WorkAmount = WorkAmount { files: 600, kills: 20, fio_size: "64m" };

/// The mode bits of each path, and a hash of its contents.
type HashedContents = BTreeMap<PathBuf, (u32, u64)>;

/// All files below `root`, by their paths.
fn contents(root: &Path) -> HashedContents {
    let (mut found, mut dirs) = (HashedContents::new(), vec![root.to_path_buf()]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let metadata = path.symlink_metadata().expect("it is there");
            let mut hasher = DefaultHasher::new();
            if metadata.is_file() {
                hasher.write(&fs::read(&path).expect("it reads"));
            } else if metadata.is_symlink() {
                hasher.write(fs::read_link(&path).expect("a link").as_os_str().as_encoded_bytes());
            } else if metadata.is_dir() {
                dirs.push(path.clone());
            }
            let name = path.strip_prefix(root).expect("below it").to_path_buf();
            found.insert(name, (metadata.mode(), hasher.finish()));
        }
    }
    found
}

/// Unmounts a volume. The kernel's mount must show the same as ours before, and `btrfs check` must
/// find nothing.
#[track_caller]
pub(super) fn end(mounted: ServedMount, disks: &MountDisk) {
    let shown = contents(mounted.path());
    mounted.unmount();
    disks.assert_checks();
    let kernel = disks.mount("ro");
    let found = contents(kernel.path());
    let differs = |(path, what): &(&PathBuf, &(u32, u64))| found.get(*path) != Some(*what);
    let first = shown.iter().find(differs);
    assert!(first.is_none() && shown.len() == found.len(), "the kernel differs in {first:?}");
}

/// Runs `work` on a volume that is mounted in this way.
fn on_a_volume(judges: &Judges, way: &str, mib: u64, work: impl FnOnce(&Path)) {
    let disks = volume(judges, mib);
    let mounted = ServedMount::new(&disks.images()[0], way);
    work(mounted.path());
    end(mounted, &disks);
}

/// Runs `program` in `dir`, where it must succeed.
#[track_caller]
fn runs(dir: &Path, program: &str, args: &[&str]) -> String {
    let output = command(program)
        .args(args)
        .current_dir(dir)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_SYSTEM", "/dev/null")
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}: `cargo xtask setup` installs it"));
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {}\n{said}{errors}", output.status);
    said.into_owned()
}

/// Writes a C program of `files` files, which prints the sum of their numbers.
fn write_c_project(dir: &Path, files: u32, random: &mut Random) {
    fs::create_dir_all(dir.join("src")).expect("a directory");
    let mut main = String::from("#include <stdio.h>\n");
    let mut calls = String::new();
    for number in 0..files {
        writeln!(main, "long part{number}(void);").expect("a string");
        writeln!(calls, "  sum += part{number}();").expect("a string");
        let comment = String::from_utf8(random.text(3000)).expect("words").replace("*/", "");
        let text = format!(
            "/* {comment} */\n#include <string.h>\nlong part{number}(void) {{\n  char text[64];\n  \
             memset(text, 0, sizeof text);\n  return {number} + (long) strlen(text);\n}}\n"
        );
        fs::write(dir.join(format!("src/part{number}.c")), text).expect("a file");
    }
    let body = format!(
        "int main(void) {{\n  long sum = 0;\n{calls}  printf(\"%ld\\n\", sum);\n  return 0;\n}}\n"
    );
    fs::write(dir.join("src/main.c"), main + &body).expect("a file");
    let makefile = "OBJECTS := $(patsubst src/%.c,build/%.o,$(wildcard src/*.c))\n\
         program: $(OBJECTS)\n\tcc -o $@ $^\n\
         build/%.o: src/%.c | build\n\tcc -O1 -g -c -o $@ $<\n\
         build:\n\tmkdir -p build\n";
    fs::write(dir.join("Makefile"), makefile).expect("a file");
}

/// Unpacks a C project, compiles it and runs the program. A second `make` must find nothing to do.
fn compile(judges: &Judges, way: &str, amount: WorkAmount) {
    let source = scratch_dir();
    write_c_project(&source.path().join("project"), amount.files, &mut Random::new(1));
    runs(source.path(), "tar", &["-czf", "project.tar.gz", "project"]);
    on_a_volume(judges, way, 1024, |root| {
        let archive = source.path().join("project.tar.gz");
        runs(root, "tar", &["-xzf", archive.to_str().expect("a path")]);
        let project = root.join("project");
        runs(&project, "make", &["-j4"]);
        let sum: u32 = (0..amount.files).sum();
        assert_eq!(runs(&project, "./program", &[]).trim(), sum.to_string());
        assert!(runs(&project, "make", &[]).contains("up to date"), "times are not kept");
    });
}

/// Clones a repository, checks it, commits to the clone and packs it.
fn git(judges: &Judges, way: &str, amount: WorkAmount) {
    let origin = scratch_dir();
    let mut random = Random::new(2);
    let commit =
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-a", "-m", "a commit"];
    runs(origin.path(), "git", &["init", "--quiet", "origin"]);
    let tree = origin.path().join("origin");
    for _ in 0..3 {
        write_c_project(&tree, amount.files, &mut random);
        runs(&tree, "git", &["add", "."]);
        runs(&tree, "git", &commit);
    }
    on_a_volume(judges, way, 1024, |root| {
        let from = tree.to_str().expect("a path");
        runs(root, "git", &["clone", "--quiet", "--no-local", from, "clone"]);
        let clone = root.join("clone");
        let check = || {
            runs(&clone, "git", &["fsck", "--full", "--strict"]);
            assert_eq!(runs(&clone, "git", &["status", "--porcelain"]), "");
        };
        check();
        assert_eq!(contents(&clone.join("src")), contents(&tree.join("src")));
        fs::write(clone.join("src/part1.c"), "changed").expect("a file");
        runs(&clone, "git", &commit);
        runs(&clone, "git", &["gc", "--quiet", "--aggressive"]);
        check();
        // One more clone, by hard links in the same file system.
        runs(root, "git", &["clone", "--quiet", "clone", "another"]);
        runs(&root.join("another"), "git", &["fsck", "--full", "--strict"]);
    });
}

/// Writes files of all kinds, with everything that `rsync -aHAX` copies.
fn write_tree(dir: &Path, files: u32, random: &mut Random) {
    for number in 0..files {
        let below = dir.join(format!("dir{}", number % 7));
        fs::create_dir_all(&below).expect("a directory");
        let path = below.join(format!("file{number}"));
        let len = usize::try_from(random.below(40_000)).expect("little");
        let bytes = if number % 2 == 0 { random.bytes(len) } else { random.text(len) };
        fs::write(&path, bytes).expect("a file");
        let mode = [0o644, 0o600, 0o755, 0o4755][usize::try_from(number % 4).expect("few")];
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
        match number % 5 {
            0 => fs::hard_link(&path, dir.join(format!("link{number}"))).expect("a link"),
            1 => symlink(&path, below.join(format!("symlink{number}"))).expect("a link"),
            2 => drop(run(
                "setfattr",
                &[
                    "-n".as_ref(),
                    "user.a".as_ref(),
                    "-v".as_ref(),
                    "value".as_ref(),
                    path.as_os_str(),
                ],
            )),
            3 => drop(run("setfacl", &["-m".as_ref(), "u:1:rwx,g:2:r".as_ref(), path.as_os_str()])),
            _ => {
                // The file ends in a hole.
                let file = fs::File::options().write(true).open(&path).expect("it is there");
                file.set_len(300_000).expect("a length");
            }
        }
    }
    run("mkfifo", &[dir.join("fifo")]);
}

/// `rsync -aHAX` there and back.
fn rsync(judges: &Judges, way: &str, amount: WorkAmount) {
    let scratch = scratch_dir();
    let [source, back] = ["source", "back"].map(|name| scratch.path().join(name));
    fs::create_dir(&source).expect("a directory");
    write_tree(&source, amount.files * 2, &mut Random::new(3));
    let slash = |path: &Path| format!("{}/", path.display());
    on_a_volume(judges, way, 1024, |root| {
        let there = root.join("there");
        let copy = |from: &Path, to: &Path, flags| {
            runs(root, "rsync", &[flags, "--delete", &slash(from), &slash(to)])
        };
        copy(&source, &there, "-aHAX");
        copy(&there, &back, "-aHAX");
        for (from, to) in [(&source, &there), (&source, &back)] {
            assert_eq!(copy(from, to, "-aHAXcni"), "", "there is something left to copy");
        }
        assert_eq!(contents(&there), contents(&source));
        // Existing files are changed in place and by blocks.
        for number in 0..amount.files {
            let path = source.join(format!("dir{}/file{number}", number % 7));
            let file = fs::File::options().write(true).open(path).expect("it is there");
            file.write_all_at(b"changed", u64::from(number) * 100).expect("room");
        }
        runs(
            root,
            "rsync",
            // `rsync` takes times that differ by less than a second for equal.
            &["-aHAXI", "--inplace", "--no-whole-file", &slash(&source), &slash(&there)],
        );
        assert_eq!(copy(&source, &there, "-aHAXcni"), "", "there is something left to copy");
    });
}

/// `dpkg` unpacks a package, and a newer one over it, which replaces and removes files.
fn dpkg(judges: &Judges, way: &str, amount: WorkAmount) {
    let scratch = scratch_dir();
    let build = |version: u32| {
        let tree = scratch.path().join(format!("tree{version}"));
        write_c_project(
            &tree.join("usr/share/project"),
            amount.files / version,
            &mut Random::new(version.into()),
        );
        fs::create_dir(tree.join("DEBIAN")).expect("a directory");
        let control = format!(
            "Package: offshoot-test\nVersion: {version}\nArchitecture: all\nMaintainer: a <a@b>\nDescription: files\n"
        );
        fs::write(tree.join("DEBIAN/control"), control).expect("a file");
        let package = scratch.path().join(format!("{version}.deb"));
        run(
            "dpkg-deb",
            &[
                "--root-owner-group".as_ref(),
                "--build".as_ref(),
                tree.as_os_str(),
                package.as_os_str(),
            ],
        );
        fs::remove_dir_all(tree.join("DEBIAN")).expect("it goes");
        (tree, package)
    };
    let packages = [build(1), build(2)];
    on_a_volume(judges, way, 1024, |root| {
        let place = root.join("root");
        fs::create_dir_all(place.join("var/lib/dpkg/info")).expect("a directory");
        fs::create_dir_all(place.join("var/lib/dpkg/updates")).expect("a directory");
        fs::write(place.join("var/lib/dpkg/status"), "").expect("a file");
        for (tree, package) in &packages {
            let option = format!("--root={}", place.display());
            let package = package.to_str().expect("a path");
            runs(
                root,
                "dpkg",
                &[&option, "--force-not-root", "--log=/dev/null", "--unpack", package],
            );
            assert_eq!(contents(&place.join("usr")), contents(&tree.join("usr")));
        }
    });
}

/// Ten jobs of `fio` at once, of all kinds. Each reads back what it wrote.
fn fio(judges: &Judges, way: &str, amount: WorkAmount) {
    let jobs = "[seq]\nrw=write\nbs=64k\nnumjobs=3\n[random]\nrw=randwrite\nfsync=32\nnumjobs=3\n\
                [direct]\nrw=randrw\ndirect=1\nnumjobs=2\n[mapped]\nrw=randwrite\nioengine=mmap\nnumjobs=2\n";
    let scratch = scratch_dir();
    on_a_volume(judges, way, 2048, |root| {
        let global = format!(
            "[global]\ndirectory={}\nsize={}\nbs=4k\nverify=crc32c\nverify_fatal=1\nfallocate=none\n",
            root.display(),
            amount.fio_size,
        );
        let file = scratch.path().join("jobs.fio");
        fs::write(&file, global + jobs).expect("a file");
        let said = runs(scratch.path(), "fio", &[file.to_str().expect("a path")]);
        assert!(!said.contains("verify failed"), "{said}");
    });
}

/// A program reads a file through the page cache while another one writes it with asynchronous
/// direct writes. When all writes are done, both ways to read the file show the same.
#[test]
fn readers_see_asynchronous_direct_writes() {
    /// Each round writes each block once, so only the last write of each can leave a stale page.
    const ROUNDS: usize = 8;
    let Some(judges) = require() else { return };
    on_a_volume(&judges, "rw", 256, |root| {
        let path = root.join("file");
        fs::write(&path, vec![1; 4 << 20]).expect("a file");
        let file = fs::File::open(&path).expect("it is there");
        let read = || {
            let mut cached = vec![0; 4 << 20];
            file.read_exact_at(&mut cached, 0).expect("it reads");
            cached
        };
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    read();
                }
            });
            let _over = SetOnDrop(&is_over);
            let job = "--name=job --filename=file --size=4m --bs=4k --rw=randwrite --direct=1 \
                       --ioengine=libaio --iodepth=16 --randrepeat=0 --refill_buffers";
            let job: Vec<_> = job.split_ascii_whitespace().collect();
            let stale: [usize; ROUNDS] = std::array::from_fn(|_| {
                runs(root, "fio", &job);
                let mut direct = command("dd");
                direct.args(["bs=4k", "iflag=direct", "status=none"]);
                direct.stdin(fs::File::open(&path).expect("it opens"));
                let (cached, direct) = (read(), direct.output().expect("dd starts").stdout);
                assert_eq!(direct.len(), cached.len());
                let blocks = cached.chunks(4096).zip(direct.chunks(4096));
                blocks.filter(|(cached, stored)| cached != stored).count()
            });
            assert_eq!(stale, [0; ROUNDS], "stale pages of each round");
        });
    });
}

/// A database that works on a mount, whose server is killed.
pub(super) struct Database {
    pub(super) file: PathBuf,
    /// The last transaction whose commit was acknowledged.
    pub(super) promised: u64,
}

impl Database {
    /// Makes an empty database.
    pub(super) fn create(dir: &Path, journal: &str) -> Self {
        let file = dir.join(format!("{journal}.db"));
        let setup = format!(
            "PRAGMA journal_mode={journal}; CREATE TABLE t (id INTEGER PRIMARY KEY, data BLOB); \
             CREATE INDEX i ON t (data);"
        );
        run("sqlite3", &[file.as_os_str(), setup.as_ref()]);
        Self { file, promised: 0 }
    }

    /// Commits one transaction after the other, until one fails or `most` are done. Calls `told`
    /// for each acknowledged one.
    pub(super) fn work(&mut self, most: u64, mut told: impl FnMut(u64)) {
        let mut child = command("sqlite3")
            .args(["-batch".as_ref(), "-bail".as_ref(), self.file.as_os_str()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("sqlite3 starts: `cargo xtask setup` installs it");
        let mut input = child.stdin.take().expect("a pipe");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        // With a lower setting, the end of a journal is not synced, and a commit can be lost.
        let mut begun = writeln!(input, "PRAGMA synchronous=EXTRA;");
        for number in self.promised + 1..=self.promised.saturating_add(most) {
            let text = format!(
                "BEGIN; INSERT INTO t VALUES ({number}, randomblob({number} * 37 % 9000)); \
                 UPDATE t SET data = randomblob(100) WHERE id = {number} / 2; COMMIT; \
                 SELECT 'told ' || max(id) FROM t;"
            );
            // From now on, a failure comes from the kill.
            begun = begun.and_then(|()| writeln!(input, "{text}")).and_then(|()| input.flush());
            let answer = lines.next().and_then(Result::ok).unwrap_or_default();
            if begun.is_err() || answer != format!("told {number}") {
                break;
            }
            self.promised = number;
            told(number);
        }
        drop(input);
        let _ = child.wait();
    }

    /// Requires that the database is sound and has all acknowledged transactions.
    #[track_caller]
    pub(super) fn assert_whole(&self, seed: u64) {
        let query = "PRAGMA integrity_check; SELECT coalesce(max(id), 0), count(*) FROM t;";
        let said = run("sqlite3", &[self.file.as_os_str(), query.as_ref()]);
        let mut lines = said.lines();
        assert_eq!(lines.next(), Some("ok"), "{said} (seed {seed})");
        let numbers = lines.next().and_then(|line| line.split_once('|')).expect("two numbers");
        let last: u64 = numbers.0.parse().expect("a number");
        assert_eq!(numbers.0, numbers.1, "one of them is missing (seed {seed})");
        assert!(last >= self.promised, "{last} of {} (seed {seed})", self.promised);
    }

    /// Reads the last number: one more transaction may have been committed without an
    /// acknowledgement.
    fn reload(&mut self) {
        let said =
            run("sqlite3", &[self.file.as_os_str(), "SELECT coalesce(max(id), 0) FROM t".as_ref()]);
        self.promised = said.trim().parse().expect("a number");
    }
}

/// Databases with both kinds of journal work while the server is killed.
fn sqlite(judges: &Judges, way: &str, amount: WorkAmount) {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let disks = volume(judges, 512);
    let image = &disks.images()[0];
    let mut databases: Vec<Database> = Vec::new();
    let mut committed = 0;
    for round in 0..amount.kills {
        let mounted = ServedMount::new(image, way);
        if round == 0 {
            let journals = ["delete", "wal"];
            databases.extend(journals.map(|journal| Database::create(mounted.path(), journal)));
        }
        for database in &mut databases {
            let name = database.file.file_name().expect("a name");
            database.file = mounted.path().join(name);
            database.assert_whole(seed);
            database.reload();
        }
        let before: u64 = databases.iter().map(|database| database.promised).sum();
        std::thread::scope(|scope| {
            for database in &mut databases {
                scope.spawn(|| database.work(u64::MAX, |_| {}));
            }
            std::thread::sleep(Duration::from_millis(500 + random.below(1000)));
            mounted.signal(Signal::KILL);
        });
        committed += databases.iter().map(|database| database.promised).sum::<u64>() - before;
        drop(mounted);
        disks.assert_checks_after_kill();
    }
    println!("{committed} transactions were committed before {} kills", amount.kills);
    assert!(committed > 0, "nothing was committed");
    let mounted = ServedMount::new(image, way);
    for database in &mut databases {
        database.file = mounted.path().join(database.file.file_name().expect("a name"));
        database.assert_whole(seed);
    }
    end(mounted, &disks);
}

/// Runs all programs.
pub(super) fn run_all(judges: &Judges, way: &str, amount: WorkAmount) {
    for work in [compile, git, rsync, dpkg, fio, sqlite] {
        work(judges, way, amount);
    }
}

fn a_c_project_is_compiled() {
    let Some(judges) = require() else { return };
    compile(&judges, "rw", SHORT);
}

fn a_repository_is_cloned() {
    let Some(judges) = require() else { return };
    git(&judges, "rw", SHORT);
}

fn rsync_goes_there_and_back() {
    let Some(judges) = require() else { return };
    rsync(&judges, "allow_other,suid", SHORT);
}

fn packages_are_unpacked() {
    let Some(judges) = require() else { return };
    dpkg(&judges, "rw", SHORT);
}

fn ten_jobs_of_fio() {
    let Some(judges) = require() else { return };
    fio(&judges, "rw", SHORT);
}

fn databases_are_killed() {
    let Some(judges) = require() else { return };
    sqlite(&judges, "rw", SHORT);
}

on_both! {
    a_c_project_is_compiled,
    a_repository_is_cloned,
    rsync_goes_there_and_back,
    packages_are_unpacked,
    ten_jobs_of_fio,
    databases_are_killed,
}
