//! Verbs on a mounted volume.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use offshoot_testkit::btrfs::disks::{Disks, Mount};
use offshoot_testkit::btrfs::progs;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run as run_host;
use offshoot_testkit::scratch_dir;
use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, unlinkat};
use rustix::process::Signal;

use super::program::copy_program;
use super::{Mounted, command, does, offshoot, require, volume};

/// The result of a run: the exit code, the output, and the messages.
type Said = (Option<i32>, String, String);

/// Runs the program with these words, where `@` stands for `root`.
fn run(line: &str, root: &str) -> Said {
    let words: Vec<String> = line.split(' ').map(|word| word.replacen('@', root, 1)).collect();
    let output = offshoot(&words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Runs command lines of the program on a mount.
trait Live {
    fn run(&self, line: &str) -> Said;
    fn does(&self, line: &str) -> String;
    fn fails(&self, line: &str, code: i32) -> String;
}

impl Live for Mounted {
    fn run(&self, line: &str) -> Said {
        run(line, self.path().to_str().expect("a plain path"))
    }

    /// Runs a line that must succeed without messages, and returns its output.
    #[track_caller]
    fn does(&self, line: &str) -> String {
        let (code, out, said) = self.run(line);
        assert_eq!((code, &*said), (Some(0), ""), "{line}");
        out
    }

    #[track_caller]
    fn fails(&self, line: &str, code: i32) -> String {
        let (found, _, said) = self.run(line);
        assert_eq!(found, Some(code), "{line}: {said}");
        said
    }
}

/// The names in a directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> = entries.map(|e| name(e).into_string().expect("a name")).collect();
    names.sort();
    names
}

/// The kernel's list of subvolumes, without what depends on the clock or on chance.
fn listed(mount: &Mount) -> Vec<(u64, u64, String, bool, bool)> {
    let all = progs::subvolumes(mount.path()).into_iter();
    all.map(|s| (s.id, s.parent, s.path, s.read_only, s.parent_uuid != "-")).collect()
}

/// Every verb says and does the same on a mount as on an image, and the kernel finds the same
/// afterwards.
#[test]
fn as_on_an_image() {
    let Some(judges) = require() else { return };
    let (disks, beside) = (volume(&judges, 256), volume(&judges, 256));
    let image = beside.images()[0].to_str().expect("a plain path").to_owned() + ":";
    let mounted = Mounted::new(&disks.images()[0], "rw");
    let mut failed = 0;
    for line in [
        "subvolume create @/home @/home/alice/ @/home/bob",
        "subvolume create @/home",
        "subvolume create @/home/alice/none/x",
        "subvolume snapshot -r @/home/alice @/home/bob",
        "subvolume snapshot @/ @/all",
        "subvolume snapshot @/ @/home",
        "subvolume snapshot @/home/missing @/x",
        "subvolume get @/home/bob/alice",
        "subvolume get --json @/home/bob/alice",
        "subvolume create @/home/bob/alice/x",
        "subvolume set @/home/bob/alice ro=false",
        "subvolume create @/home/bob/alice/x",
        "subvolume set @/home/bob/alice ro=true",
        "subvolume delete @/home/bob/alice/x",
        "subvolume delete @/home",
        "subvolume delete @/missing @/all",
        "subvolume delete @/",
        "subvolume show @/home/missing",
        "subvolume show @/home/bob/none",
    ] {
        let (mut ours, mut expected) = (mounted.run(line), run(line, &image));
        // Messages name the volume, and the two volumes have different names.
        let own = disks.images()[0].to_str().expect("a plain path").to_owned() + ":";
        ours.2 = ours.2.replace(&own, "");
        expected.2 = expected.2.replace(&image, "");
        assert_eq!(ours, expected, "{line}");
        failed += u32::from(ours.0 != Some(0));
    }
    assert_eq!(failed, 11, "lines that must fail did");
    // Times and UUIDs differ. Numbers and paths are the same.
    let columns = |text: String| -> Vec<_> {
        let column = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            (words[0].to_owned(), words[1].to_owned(), words[words.len() - 1].to_owned())
        };
        text.lines().map(column).collect()
    };
    let image = image.trim_end_matches(':');
    for line in ["subvolume list @", "subvolume get-default @"] {
        let (ours, expected) = (mounted.does(line), run(line, image).1);
        assert_eq!(columns(ours), columns(expected), "{line}");
    }
    mounted.unmount();
    for disks in [&disks, &beside] {
        disks.assert_checks();
    }
    let (ours, theirs) = (disks.mount("ro,subvolid=5"), beside.mount("ro,subvolid=5"));
    assert_eq!(listed(&ours), listed(&theirs));
    assert_eq!(listed(&ours).len(), 5);
}

/// Names that verbs make and delete are seen at once, although the kernel has cached that they
/// exist, or that they do not.
#[test]
fn the_kernel_sees_it_at_once() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = Mounted::new(&disks.images()[0], "rw");
    let [home, snapshot] = ["home", "snapshot"].map(|name| mounted.path().join(name));
    let inside = snapshot.join("dir/file");
    let gone = |path: &Path| path.metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound);
    let inner = mounted.path().join("dir");
    fs::create_dir(&inner).expect("a directory");
    // In the root, and in a directory with another node number.
    for dir in [mounted.path(), &inner] {
        let name = dir.join("new");
        for round in 0..3 {
            assert!(gone(&name), "round {round}");
            let before = [names(dir), names(dir)];
            let links =
                |dir: &Path| dir.metadata().expect("it is there").modified().expect("a time");
            let changed = links(dir);
            does(&["subvolume".as_ref(), "create".as_ref(), name.as_os_str()]);
            assert!(name.is_dir(), "round {round}");
            assert_eq!(names(dir).len(), before[1].len() + 1, "round {round}");
            assert!(links(dir) > changed, "round {round}");
            fs::write(name.join("file"), "x").expect("a file");
            does(&["subvolume".as_ref(), "delete".as_ref(), name.as_os_str()]);
            assert!(gone(&name) && gone(&name.join("file")), "round {round}");
            assert_eq!(names(dir), before[1], "round {round}");
        }
    }
    fs::remove_dir(&inner).expect("it is empty");
    assert!(gone(&home) && gone(&snapshot) && gone(&inside));
    mounted.does("subvolume create @/home");
    fs::create_dir(home.join("dir")).expect("a directory");
    fs::write(home.join("dir/file"), "contents").expect("a file");
    mounted.does("subvolume snapshot @/home @/snapshot");
    assert_eq!(fs::read_to_string(&inside).ok().as_deref(), Some("contents"));
    fs::write(&inside, "other").expect("it can be changed");
    assert_eq!(fs::read_to_string(home.join("dir/file")).ok().as_deref(), Some("contents"));
    mounted.does("subvolume set @/snapshot ro=true");
    let refused = fs::write(&inside, "x").map_err(|error| error.kind());
    assert_eq!(refused, Err(ErrorKind::ReadOnlyFilesystem));
    mounted.does("subvolume set @/snapshot ro=false");
    fs::write(&inside, "last").expect("it can be changed");
    // An open file of it can still be used.
    let open = File::options().write(true).open(&inside).expect("a file");
    mounted.does("subvolume delete @/snapshot");
    assert!(gone(&inside) && gone(&snapshot));
    open.write_all_at(b"x", 0).expect("it is open");
    drop(open);
    assert_eq!(names(mounted.path()), ["home"]);
    mounted.unmount();
    disks.assert_checks();
    assert_eq!(names(disks.mount("ro").path()), ["home"]);
}

/// A snapshot contains what a program stored through a mapping before. Only the kernel had these
/// bytes.
#[test]
#[expect(unsafe_code, reason = "the standard library has no mappings")]
fn mappings_are_in_the_snapshot() {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = Mounted::new(&disks.images()[0], "rw");
    let path = mounted.path().join("file");
    fs::write(&path, [1; 8192]).expect("a file");
    let file = File::options().read(true).write(true).open(&path).expect("a file");
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the test uses the mapping only through this pointer and within its length, until it
    // is unmapped.
    unsafe {
        let start = std::ptr::null_mut();
        let map = mmap(start, 8192, protection, MapFlags::SHARED, &file, 0).expect("a mapping");
        map.cast::<u8>().add(5000).write(2);
        mounted.does("subvolume snapshot -r @ @/snapshot");
        map.cast::<u8>().add(5000).write(3);
        munmap(map, 8192).expect("its end");
    }
    drop(file);
    let stored = |path: &Path| fs::read(path).expect("it is there")[5000];
    assert_eq!((stored(&path), stored(&mounted.path().join("snapshot/file"))), (3, 2));
    mounted.unmount();
    disks.assert_checks();
}

/// Ends the work of all threads when one of them ends, also by a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A thread makes one file after another. A snapshot has all files up to one moment, among them all
/// that were made before it was requested.
#[test]
fn snapshots_among_writers() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 512);
    let mounted = Mounted::new(&disks.images()[0], "rw");
    mounted.does("subvolume create @/home");
    let (home, is_over) = (mounted.path().join("home"), AtomicBool::new(false));
    let made = [const { AtomicUsize::new(0) }; 2];
    let mut before = Vec::new();
    std::thread::scope(|scope| {
        for (writer, made) in made.iter().enumerate() {
            let (home, is_over) = (&home, &is_over);
            scope.spawn(move || {
                let _ends = Ends(is_over);
                for number in 0.. {
                    let name = home.join(format!("{writer}-{number}"));
                    fs::write(name, vec![1; 5000]).expect("a file");
                    made.store(number + 1, Ordering::Release);
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
        let _ends = Ends(&is_over);
        let counts = || made.each_ref().map(|made| made.load(Ordering::Acquire));
        for round in 0..5 {
            while counts().iter().any(|count| *count < round * 30 + 30) {
                assert!(!is_over.load(Ordering::Relaxed), "a writer ended");
                std::thread::sleep(Duration::from_millis(1));
            }
            before.push(counts());
            mounted.does(&format!("subvolume snapshot @/home @/snapshot{round}"));
        }
        mounted.does("subvolume delete @/snapshot4");
    });
    mounted.unmount();
    disks.assert_checks();
    let found = disks.mount("ro");
    for (round, before) in before.iter().enumerate().take(4) {
        let dir = found.path().join(format!("snapshot{round}"));
        for (writer, &least) in before.iter().enumerate() {
            let is_there = |number: &usize| dir.join(format!("{writer}-{number}")).exists();
            let count = (0..1_000_000).take_while(is_there).count();
            let all = names(&dir).iter().filter(|n| n.starts_with(&format!("{writer}-"))).count();
            assert!(count >= least && count == all, "round {round}: {least} {count} {all}");
            for number in 0..least {
                let data = fs::read(dir.join(format!("{writer}-{number}")));
                assert!(data.is_ok_and(|data| data == [1; 5000]), "{writer}-{number}");
            }
        }
    }
}

/// `stats` shows the use of space as the engine of the mount knows it. After a sync, an image shows
/// the same.
#[test]
fn stats_and_sync() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 512);
    let image = disks.images()[0].to_str().expect("a plain path").to_owned();
    let mounted = Mounted::new(&disks.images()[0], "rw");
    let dir = mounted.path().join("dir");
    fs::create_dir(&dir).expect("a directory");
    // More than the first chunks hold, so that the engine allocates some.
    fs::write(dir.join("file"), vec![1; 100 << 20]).expect("a file");
    let stats = |text: &str| -> serde_json::Value {
        let mut all: serde_json::Value = serde_json::from_str(text).expect("JSON");
        all.as_object_mut().and_then(|all| all.remove("statistics")).expect("counters");
        all
    };
    // A later commit removes an empty block group.
    let synced = || {
        mounted.does("sync @/dir");
        stats(&mounted.does("stats --json @"))
    };
    let mut live = synced();
    while let again = synced()
        && again != live
    {
        live = again;
    }
    assert!(live["used"].as_u64().is_some_and(|used| used > 100 << 20), "{live}");
    assert!(mounted.does("stats @/dir").contains("what the engine did since it was mounted"));
    mounted.signal(Signal::KILL);
    drop(mounted);
    assert_eq!(live, stats(&run("stats --json @", &image).1));
    disks.assert_checks();
    let found = disks.mount("ro");
    assert_eq!(fs::read(found.path().join("dir/file")).expect("it is there").len(), 100 << 20);
    drop(found);
    let (code, _, said) = run("sync @", &image);
    assert!(code == Some(2) && said.contains("there is nothing to sync"), "{said}");
    let (code, _, said) = run("sync @/none", &image);
    assert!(code == Some(1) && said.contains("Not a directory"), "{said}");
}

/// A trim returns free space to the host while other threads write, and returns nothing else.
#[test]
fn trim() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 512);
    let image = &disks.images()[0];
    let mounted = Mounted::new(image, "rw");
    let path = |name: &str| mounted.path().join(name);
    for number in 0..8 {
        fs::write(path(&format!("gone{number}")), vec![7; 10 << 20]).expect("a file");
    }
    mounted.does("sync @");
    for number in 0..8 {
        fs::remove_file(path(&format!("gone{number}"))).expect("it goes");
    }
    mounted.does("sync @");
    let stored = || fs::metadata(image).expect("an image").blocks() * 512;
    let before = stored();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..200_u8 {
                fs::write(path(&format!("{number}")), vec![number; 40_000]).expect("a file");
            }
        });
        let report: serde_json::Value =
            serde_json::from_str(&mounted.does("trim --json @")).expect("JSON");
        assert!(report["bytes"].as_u64().is_some_and(|bytes| bytes > 80 << 20), "{report}");
        assert_eq!(report["unable"], serde_json::json!([]));
    });
    // A missing image must not be taken for the mounted volume that would hold it.
    for verb in ["trim", "stats", "sync", "subvolume list"] {
        let said = mounted.fails(&format!("{verb} @/none.img"), 1);
        assert!(said.contains("No such file"), "{verb}: {said}");
    }
    assert!(stored() + (60 << 20) < before, "{before} bytes, and {} now", stored());
    mounted.unmount();
    disks.assert_checks();
    let found = disks.mount("ro");
    for number in 0..200_u8 {
        let data = fs::read(found.path().join(number.to_string()));
        assert!(data.is_ok_and(|data| data == vec![number; 40_000]), "{number}");
    }
}

/// The offsets in an image of the sectors with these contents.
fn sectors(image: &Path, sector: &[u8]) -> Vec<u64> {
    let bytes = fs::read(image).expect("an image");
    let found = bytes.chunks(4096).enumerate().filter(|(_, found)| *found == sector);
    found.map(|(number, _)| number as u64 * 4096).collect()
}

/// The mounted volume is scrubbed while other threads write. The scrub finds only the damage of the
/// test, and repairs it.
#[test]
fn scrub() {
    let Some(judges) = require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&["-m", "dup", "-d", "dup"]);
    let image = &disks.images()[0];
    let mounted = Mounted::new(image, "rw");
    let path = |name: &str| mounted.path().join(name);
    let cold = Random::new(seed_of_run()).bytes(1 << 20);
    fs::write(path("cold"), &cold).expect("a file");
    mounted.does("sync @");
    let counters = |line: &str| -> serde_json::Value {
        let (code, out, said) = mounted.run(line);
        assert_eq!(code, Some(0), "{line}: {said}");
        let last = out.lines().last().expect("counters");
        serde_json::from_str(last).expect("JSON")
    };
    let is_over = AtomicBool::new(false);
    let end = || is_over.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in (0..20_u8).cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                fs::write(path(&format!("hot{number}")), vec![number; 200_000]).expect("a file");
                if number % 7 == 0 {
                    File::open(path(&format!("hot{number}"))).expect("it").sync_all().expect("it");
                }
            }
        });
        let scrubbed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..6 {
                let sector = &cold[round * 40_960..][..4096];
                let places = sectors(image, sector);
                assert_eq!(places.len(), 2, "both copies");
                let file = File::options().write(true).open(image).expect("an image");
                file.write_all_at(&[!sector[5]], places[round % 2] + 5).expect("it is written");
                let counts = counters("scrub --json @");
                let found = [&counts["csum_errors"], &counts["corrected_errors"]];
                assert_eq!(found, [1, 1], "{counts}");
                assert_eq!(
                    (&counts["verify_errors"], &counts["left_errors"]),
                    (&0.into(), &0.into())
                );
                assert_eq!(sectors(image, sector), places);
                let counts = counters("scrub -r --json @");
                assert_eq!(
                    (&counts["csum_errors"], &counts["left_errors"]),
                    (&0.into(), &0.into())
                );
            }
        }));
        end();
        scrubbed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    assert!(fs::read(path("cold")).expect("a file") == cold);
    mounted.unmount();
    disks.assert_checks();
}

/// Places are found through bind mounts, links and directories in between. Names may be any bytes.
#[test]
fn places() {
    let Some(judges) = require() else { return };
    let (disks, inner) = (volume(&judges, 512), volume(&judges, 128));
    let mounted = Mounted::new(&disks.images()[0], "rw");
    mounted.does("subvolume create @/a @/a/b");
    let other = scratch_dir();
    rustix::mount::mount_bind(mounted.path().join("a"), other.path()).expect("a bind mount");
    let bound = run("subvolume create @/b/bound", other.path().to_str().expect("a plain path"));
    rustix::mount::unmount(other.path(), rustix::mount::UnmountFlags::empty()).expect("its end");
    assert_eq!(bound, (Some(0), String::new(), String::new()));
    assert!(mounted.path().join("a/b/bound").is_dir());
    // A link from outside leads into the volume. A link inside leads within the volume.
    let link = other.path().join("link");
    std::os::unix::fs::symlink(mounted.path().join("a"), &link).expect("a link");
    std::os::unix::fs::symlink("a/b", mounted.path().join("within")).expect("a link");
    let [create, delete, show] = ["create", "delete", "show"].map(OsStr::new);
    does(&["subvolume".as_ref(), create, link.join("b/../linked").as_os_str()]);
    assert!(mounted.path().join("a/linked").is_dir());
    assert!(mounted.does("subvolume show @/within").starts_with("/a/b\n"));
    assert!(mounted.fails("subvolume delete @/within", 1).contains("/within is no subvolume"));
    let shown = offshoot(&["subvolume".as_ref(), show, link.as_os_str()]);
    assert!(String::from_utf8_lossy(&shown.stdout).starts_with("/a\n"), "{shown:?}");
    let relative = command()
        .current_dir(mounted.path().join("a"))
        .args(["subvolume", "create", "relative", "./b/x:/"])
        .status();
    assert!(relative.is_ok_and(|status| status.success()));
    assert!(mounted.path().join("a/relative").is_dir() && mounted.path().join("a/b/x:").is_dir());
    let bytes = mounted.path().join(OsString::from_vec(b"\xff \n'".to_vec()));
    does(&["subvolume".as_ref(), create, bytes.as_os_str()]);
    assert!(bytes.is_dir());
    does(&["subvolume".as_ref(), delete, bytes.as_os_str()]);
    assert!(!bytes.exists());
    // A file that holds a volume is an image, wherever it is stored.
    let kept = mounted.path().join("kept.img");
    fs::copy(&inner.images()[0], &kept).expect("a copy");
    mounted.does("subvolume create @/kept.img:/inside @/kept.img:/inside/too");
    assert!(mounted.does("subvolume list @/kept.img").contains("/inside"));
    assert!(!mounted.path().join("inside").exists());
    mounted.unmount();
    disks.assert_checks();
}

/// The subvolume that a mount shows cannot be deleted, nor can the default subvolume, wherever the
/// paths begin.
#[test]
fn the_default_subvolume() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = Mounted::new(&disks.images()[0], "rw");
    mounted.does("subvolume create @/home @/home/alice");
    mounted.does("subvolume set-default @/home");
    assert_eq!(mounted.does("subvolume get-default @"), "256 /home\n");
    mounted.does("subvolume delete @/home/alice");
    assert!(mounted.fails("subvolume delete @/home", 1).contains("default"));
    mounted.unmount();
    let mounted = Mounted::new(&disks.images()[0], "rw");
    assert!(mounted.fails("subvolume delete @", 1).contains("busy"));
    mounted.does("subvolume create @/bob");
    assert!(mounted.does("subvolume list @").contains("/home/bob"));
    mounted.unmount();
    disks.assert_checks();
}

/// The owner of a new subvolume: the user who asked, with that user's umask. On a mount that shows
/// all files with one owner, it is the owner of the directory.
#[test]
fn whose_it_is() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    for (options, owner) in [("rw", (0, 0)), ("uid=1234,gid=5678", (4, 5))] {
        let mounted = Mounted::new(&disks.images()[0], options);
        let name = mounted.path().join(options);
        let create = "umask 027 && exec \"$0\" subvolume create \"$1\"";
        let status = std::process::Command::new("sh")
            .args(["-c", create, env!("CARGO_BIN_EXE_offshoot")])
            .arg(&name)
            .status();
        assert!(status.is_ok_and(|status| status.success()));
        mounted.unmount();
        let found = disks.mount("rw");
        let metadata = found.path().join(options).metadata().expect("it is there");
        assert_eq!((metadata.uid(), metadata.gid()), owner, "{options}");
        assert_eq!(metadata.mode() & 0o7777, 0o750, "{options}");
        std::os::unix::fs::chown(found.path(), Some(4), Some(5)).expect("root may");
    }
}

/// Refusals and their messages.
#[test]
fn refused() {
    let Some(judges) = require() else { return };
    let (disks, other) = (volume(&judges, 256), volume(&judges, 256));
    let mounted = Mounted::new(&disks.images()[0], "allow_other");
    let said = mounted.fails("subvolume create --subvolume 5 @/x", 2);
    assert!(said.contains("--subvolume says how a volume is opened"), "{said}");
    assert!(mounted.fails("subvolume create --compress zstd @/x", 2).contains("--compress"));
    assert!(mounted.fails("stats --device /dev/null @", 2).contains("--device"));
    let image = other.images()[0].to_str().expect("a plain path");
    let said = mounted.fails(&format!("subvolume create @/x {image}:/x"), 2);
    assert!(said.contains("is not in the mounted volume"), "{said}");
    let long = vec!["@/0123456789"; 400].join(" ");
    assert!(mounted.fails(&format!("subvolume create {long}"), 2).contains("too long"));
    assert_eq!(names(mounted.path()), [""; 0]);
    // Other users than root and the one who serves the mount.
    let dir = scratch_dir();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let program = copy_program(dir.path());
    for line in ["subvolume create @/x", "stats @", "sync @", "subvolume list @"] {
        let root = mounted.path().to_str().expect("a plain path");
        let words: Vec<_> = line.split(' ').map(|word| word.replacen('@', root, 1)).collect();
        let mut command = Command::new(&program);
        let output = command.uid(65534).gid(65534).args(words).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        let is_told = output.status.code() == Some(1) && said.contains("only root");
        assert!(is_told && output.stdout.is_empty(), "{line}: {said}");
    }
    // On a read-only mount nothing changes.
    let remount = ["mount", "-o", "remount,ro", "any"].map(OsStr::new);
    does(&[&remount[..], &[mounted.path().as_os_str()]].concat());
    assert!(mounted.fails("subvolume create @/x", 1).contains("Read-only"));
    mounted.does("subvolume list @");
    mounted.unmount();
    let mounted = Mounted::new(&disks.images()[0], "ro");
    assert!(mounted.fails("subvolume create @/x", 1).contains("Read-only"));
    mounted.does("stats @");
    mounted.does("sync @");
    mounted.unmount();
    // In a directory where nothing is mounted, the message is as before.
    let dir = scratch_dir();
    let (code, _, said) = run("stats @", dir.path().to_str().expect("a plain path"));
    assert!(code == Some(1) && !said.contains("mounted"), "{said}");
}

/// Starts a listing that waits until its output is read.
fn listing(mounted: &Mounted) -> Child {
    let list = ["subvolume", "list", "--json"].map(OsStr::new);
    let mut child = command()
        .args([&list[..], &[mounted.path().as_os_str()]].concat())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // With the first byte, the other process is doing the job.
    let mut first = [0];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("a byte");
    child
}

/// The CPUs that a thread may run on. `thread` is its directory in `/proc`.
fn cpus(thread: &Path) -> String {
    let status = fs::read_to_string(thread.join("status")).expect("it is there");
    let line = status.lines().find(|line| line.starts_with("Cpus_allowed:"));
    line.expect("the kernel says it").to_owned()
}

/// The same of each thread that does a verb for another process.
fn cpus_of_jobs(mounted: &Mounted) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", mounted.child.id())).expect("it runs");
    let threads = threads.map(|thread| thread.expect("an entry").path());
    let is_job = |thread: &std::path::PathBuf| {
        fs::read_to_string(thread.join("comm")).is_ok_and(|name| name == "job\n")
    };
    threads.filter(is_job).map(|thread| cpus(&thread)).collect()
}

/// Clients that are killed leave nothing behind: all jobs that can run at a time are free again.
#[test]
fn clients_that_are_killed() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 512);
    let mounted = Mounted::new(&disks.images()[0], "rw");
    // More output than pipes and jobs can hold.
    for hundred in 0..10 {
        let all = (0..100).map(|number| format!("@/s{hundred}{number:02}"));
        mounted.does(&format!("subvolume create {}", all.collect::<Vec<_>>().join(" ")));
    }
    for _ in 0..3 {
        let mut clients: Vec<_> = (0..6).map(|_| listing(&mounted)).collect();
        // One more client waits in the queue.
        let mut late = command()
            .args([
                "subvolume".as_ref(),
                "create".as_ref(),
                mounted.path().join("late").as_os_str(),
            ])
            .spawn()
            .expect("the program starts");
        std::thread::sleep(Duration::from_millis(200));
        assert!(!mounted.path().join("late").exists(), "it is done beside six others");
        assert_eq!(cpus_of_jobs(&mounted), vec![cpus(Path::new("/proc/self")); 6]);
        // They hold no lock that others need.
        fs::write(mounted.path().join("file"), "x").expect("a file");
        File::open(mounted.path()).and_then(|root| root.sync_all()).expect("a commit");
        for client in &mut clients {
            client.kill().expect("it runs");
            client.wait().expect("a child");
        }
        let mut patience = (0..300).map(|_| {
            std::thread::sleep(Duration::from_millis(100));
            late.try_wait().expect("a child")
        });
        let status = patience.find_map(|status| status);
        assert!(status.is_some_and(|status| status.success()), "it waits for who is gone");
        mounted.does("subvolume delete @/late");
    }
    // A reader that closes its pipe ends the verb without an error.
    let mut client = listing(&mounted);
    drop(client.stdout.take());
    assert!(client.wait().is_ok_and(|status| status.success()));
    let mut client = listing(&mounted);
    let mut rest = String::from("[");
    client.stdout.take().expect("a pipe").read_to_string(&mut rest).expect("text");
    assert!(client.wait().is_ok_and(|status| status.success()));
    assert_eq!(rest.matches("\"id\"").count(), 1001);
    mounted.unmount();
    disks.assert_checks();
}

/// The request for a verb with these words and places.
fn request(words: &[&str], places: &[&str]) -> [u8; 16_000] {
    let texts = [words, places].concat().join("\0") + "\0";
    let number = |len: usize| u32::try_from(len).expect("short");
    let [count, others, len] = [words.len(), places.len(), texts.len()].map(number);
    let head = [0, 0, 1, 0o022, 0, count, others, len].map(u32::to_ne_bytes).concat();
    let mut data = [0; 16_000];
    data[..32].copy_from_slice(&head);
    data[32..][..texts.len()].copy_from_slice(texts.as_bytes());
    data
}

/// Other ioctls, and ours with random contents, are refused. The next request is served as before.
#[test]
#[expect(unsafe_code, reason = "the standard library has no ioctls")]
fn garbage() {
    use rustix::io::Errno;
    use rustix::ioctl::{Updater, ioctl, opcode};
    const START: u32 = opcode::read_write::<[u8; 16_000]>(0xbf, 0x51);
    const NEXT: u32 = opcode::read_write::<[u8; 8_000]>(0xbf, 0x52);
    const OTHER: u32 = opcode::read_write::<[u8; 16_000]>(0xbf, 0x53);
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = Mounted::new(&disks.images()[0], "rw");
    fs::write(mounted.path().join("file"), "x").expect("a file");
    let dir = File::open(mounted.path()).expect("a directory");
    let file = File::open(mounted.path().join("file")).expect("a file");
    // SAFETY: each number contains the length of the array that it is used with.
    let start = |on: &File, mut data| unsafe { ioctl(on, Updater::<START, _>::new(&mut data)) };
    let other = |on: &File, mut data| unsafe { ioctl(on, Updater::<OTHER, _>::new(&mut data)) };
    let next = |on: &File| {
        let mut data = [0_u8; 8_000];
        unsafe { ioctl(on, Updater::<NEXT, _>::new(&mut data)) }?;
        let number = |at: usize| u32::from_ne_bytes(*data[at..].first_chunk().expect("8,000"));
        Ok::<_, Errno>((number(0), number(4)))
    };
    let ends = || loop {
        match next(&dir).expect("a job") {
            (3, code) => return code,
            (kind, _) => assert!(kind < 3),
        }
    };
    assert_eq!(next(&dir), Err(Errno::INVAL), "there is no job");
    assert_eq!(other(&dir, [0_u8; 16_000]), Err(Errno::NOTTY));
    let sound = request(&["subvolume", "create", "x"], &["/x"]);
    assert_eq!(start(&file, sound), Err(Errno::NOTTY), "a file has no jobs");
    assert_eq!(next(&file), Err(Errno::NOTTY));
    assert_eq!(start(&dir, [0; 16_000]), Err(Errno::OPNOTSUPP), "another version");
    let mut random = Random::new(seed_of_run());
    let (mut done, mut refused) = (0, 0);
    for _ in 0..300 {
        let mut data = request(&["subvolume", "get", "x"], &["/"]);
        for _ in 0..=random.below(2) {
            let at = usize::try_from(random.below(60)).expect("little");
            data[at] = random.bytes(1)[0];
        }
        match start(&dir, data) {
            Ok(()) => {
                ends();
                done += 1;
            }
            Err(Errno::INVAL | Errno::OPNOTSUPP) => refused += 1,
            Err(errno) => panic!("{errno}"),
        }
    }
    assert!(done > 30 && refused > 30, "{done} done, {refused} refused");
    // Verbs that use files of the host, or more than the places that came with the request, are
    // refused.
    for (words, places) in [
        (&["rm", "-r", "/x"][..], &["/"][..]),
        (&["cp", "/etc/passwd", "x:/y"], &["/a", "/b"]),
        (&["subvolume", "create", "--device", "/dev/null", "x"], &["/x"]),
        (&["subvolume", "create", "x", "y"], &["/x"]),
        (&["stats", "x"], &[]),
        (&["mount", "x", "y"], &["/x"]),
        (&["--help"], &[]),
        (&[""], &[]),
    ] {
        start(&dir, request(words, places)).expect("a job");
        assert_eq!(ends(), 2, "{words:?}");
    }
    assert_eq!(names(mounted.path()), ["file"]);
    // A path cannot lead out of the volume.
    start(&dir, request(&["subvolume", "create", "x"], &["../../x"])).expect("a job");
    assert_eq!(ends(), 0);
    assert_eq!(next(&dir), Ok((3, 0)), "as often as it is asked for");
    assert_eq!(names(mounted.path()), ["file", "x"]);
    start(&dir, request(&["subvolume", "create", "x"], &["/"])).expect("a job");
    assert_eq!(ends(), 1);
    drop((dir, file));
    mounted.unmount();
    disks.assert_checks();
}

/// What programs can do with open files of the subvolume `sub`, which `delete` deletes.
fn used_when_deleted(root: &Path, delete: &dyn Fn(&Path)) -> Vec<String> {
    let sub = root.join("sub");
    let open = |path: &str| {
        let file = File::options().read(true).write(true).open(sub.join(path));
        file.expect("a file that is there")
    };
    fs::create_dir(sub.join("dir")).expect("a directory");
    for name in ["dir/file", "dir/other", "nameless"] {
        fs::write(sub.join(name), vec![1; 100_000]).expect("a file");
    }
    let (file, nameless) = (open("dir/file"), open("nameless"));
    let [dir, top] = ["dir", ""].map(|path| File::open(sub.join(path)).expect("a directory"));
    fs::remove_file(sub.join("nameless")).expect("it is there");
    delete(&sub);

    let mut said = Vec::new();
    let mut note = |what: &str, done: std::io::Result<String>| {
        said.push(format!("{what}: {:?}", done.map_err(|error| error.kind())));
    };
    let bytes = |file: &File, len: usize| {
        let mut buf = vec![0; len];
        file.read_exact_at(&mut buf, 0)
            .map(|()| format!("{:?}", [buf[0], buf[len / 2], buf[len - 1]]))
    };
    let made = |dir: &File, name: &str| {
        let flags = OFlags::CREATE | OFlags::RDWR;
        let new = File::from(openat(dir, name, flags, Mode::from_raw_mode(0o600))?);
        new.write_all_at(b"new", 0)?;
        // When it is closed, the kernel drops its cached contents.
        bytes(&new, 3)
    };
    let listed = |dir: &File| {
        let entries = rustix::fs::Dir::read_from(dir)?.collect::<Result<Vec<_>, _>>()?;
        let mut names: Vec<_> =
            entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names.join(" "))
    };
    note("the path", fs::metadata(&sub).map(|_| String::new()));
    for (name, file) in [("a file", &file), ("a nameless file", &nameless)] {
        note(name, bytes(file, 100_000));
        note(name, file.write_all_at(&vec![2; 150_000], 50_000).map(|()| String::new()));
        note(name, file.sync_all().map(|()| String::new()));
        note(name, bytes(file, 200_000));
        note(name, file.set_len(300_000).map(|()| String::new()));
        note(name, file.metadata().map(|found| format!("{} {}", found.len(), found.nlink())));
    }
    note("a new file", made(&dir, "new"));
    note(
        "a new directory",
        mkdirat(&dir, "deeper", Mode::from_raw_mode(0o700))
            .map(|()| String::new())
            .map_err(Into::into),
    );
    note(
        "a file that goes",
        unlinkat(&dir, "other", AtFlags::empty()).map(|()| String::new()).map_err(Into::into),
    );
    note("the directory", listed(&dir));
    note("the directory", dir.sync_all().map(|()| String::new()));
    note("a new file at the top", made(&top, "new"));
    note("the file at last", bytes(&file, 200_000));
    said
}

/// Regression: programs could no longer use their open files of a deleted subvolume.
#[test]
fn who_uses_a_deleted_subvolume_goes_on_as_on_the_kernels_mount() {
    let Some(judges) = require() else { return };
    let (disks, theirs) = (volume(&judges, 256), volume(&judges, 256));
    let theirs = {
        let mount = theirs.mount("rw,noatime");
        does_btrfs("create", &mount.path().join("sub"));
        used_when_deleted(mount.path(), &|sub| does_btrfs("delete", sub))
    };
    let mounted = Mounted::new(&disks.images()[0], "rw");
    for round in 0..2 {
        mounted.does("subvolume create @/sub");
        let ours = used_when_deleted(mounted.path(), &|_| {
            mounted.does("subvolume delete @/sub");
        });
        assert_eq!(ours, theirs, "round {round}");
        assert_eq!(mounted.does("subvolume list --json @").matches("\"id\"").count(), 1);
    }
    // An empty subvolume, deleted by the system call.
    mounted.does("subvolume create @/sub");
    let sub = mounted.path().join("sub");
    fs::write(sub.join("file"), vec![1; 100_000]).expect("a file");
    let file = File::options().read(true).write(true).open(sub.join("file")).expect("a file");
    fs::remove_file(sub.join("file")).expect("it is there");
    fs::remove_dir(&sub).expect("it is empty");
    file.write_all_at(&[2; 8192], 0).expect("it is open");
    file.sync_all().expect("it is durable");
    let mut buf = [0; 8192];
    file.read_exact_at(&mut buf, 0).expect("it is open");
    assert_eq!(buf, [2; 8192]);
    drop(file);
    mounted.unmount();
    disks.assert_checks();
    assert!(names(disks.mount("ro").path()).is_empty());
}

/// Runs a verb of `btrfs subvolume`.
fn does_btrfs(verb: &str, path: &Path) {
    run_host("btrfs", &["subvolume".as_ref(), verb.as_ref(), path.as_os_str()]);
}
