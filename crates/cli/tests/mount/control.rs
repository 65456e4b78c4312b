//! Verbs on a mounted volume.

mod clients;
mod deleted;
mod resized;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::progs;
use offshoot_testkit::loops::LoopMount;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::scratch_dir;
use offshoot_testkit::threads::SetOnDrop;
use rustix::process::Signal;

use super::program::copy_program;
use super::{ServedMount, command, does, offshoot, require, unmount_here, volume};

/// The result of a run: the exit code, the output, and the messages.
type RunResult = (Option<i32>, String, String);

/// Runs the program with these words, where `@` stands for `root`.
fn run(line: &str, root: &str) -> RunResult {
    let words: Vec<String> = line.split(' ').map(|word| word.replacen('@', root, 1)).collect();
    let output = offshoot(&words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Runs command lines of the program on a mount.
pub(super) trait LiveCommands {
    fn run(&self, line: &str) -> RunResult;
    fn does(&self, line: &str) -> String;
    fn fails(&self, line: &str, code: i32) -> String;
}

impl LiveCommands for ServedMount {
    fn run(&self, line: &str) -> RunResult {
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
fn listed(mount: &LoopMount) -> Vec<(u64, u64, String, bool, bool)> {
    let all = progs::subvolumes(mount.path()).into_iter();
    all.map(|s| (s.id, s.parent, s.path, s.is_read_only, s.parent_uuid != "-")).collect()
}

/// Every verb says and does the same on a mount as on an image, and the kernel finds the same
/// afterwards.
#[test]
fn as_on_an_image() {
    let Some(judges) = require() else { return };
    let (disks, beside) = (volume(&judges, 256), volume(&judges, 256));
    let image = beside.images()[0].to_str().expect("a plain path").to_owned() + ":";
    let mounted = ServedMount::new(&disks.images()[0], "rw");
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
    let mounted = ServedMount::new(&disks.images()[0], "rw");
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
    let mounted = ServedMount::new(&disks.images()[0], "rw");
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

/// A thread makes one file after another. A snapshot has all files up to one moment, among them all
/// that were made before it was requested.
#[test]
fn snapshots_among_writers() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 512);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    mounted.does("subvolume create @/home");
    let (home, is_over) = (mounted.path().join("home"), AtomicBool::new(false));
    let made = [const { AtomicUsize::new(0) }; 2];
    let mut before = Vec::new();
    std::thread::scope(|scope| {
        for (writer, made) in made.iter().enumerate() {
            let (home, is_over) = (&home, &is_over);
            scope.spawn(move || {
                let _ends = SetOnDrop(is_over);
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
        let _ends = SetOnDrop(&is_over);
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
    let mounted = ServedMount::new(&disks.images()[0], "rw");
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
    let mounted = ServedMount::new(image, "rw");
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
    let mounted = ServedMount::new(image, "rw");
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
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    mounted.does("subvolume create @/a @/a/b");
    let other = scratch_dir();
    rustix::mount::mount_bind(mounted.path().join("a"), other.path()).expect("a bind mount");
    let bound = run("subvolume create @/b/bound", other.path().to_str().expect("a plain path"));
    unmount_here(other.path());
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
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    mounted.does("subvolume create @/home @/home/alice");
    mounted.does("subvolume set-default @/home");
    assert_eq!(mounted.does("subvolume get-default @"), "256 /home\n");
    mounted.does("subvolume delete @/home/alice");
    assert!(mounted.fails("subvolume delete @/home", 1).contains("default"));
    mounted.unmount();
    let mounted = ServedMount::new(&disks.images()[0], "rw");
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
        let mounted = ServedMount::new(&disks.images()[0], options);
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
    let mounted = ServedMount::new(&disks.images()[0], "allow_other");
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
    let mounted = ServedMount::new(&disks.images()[0], "ro");
    assert!(mounted.fails("subvolume create @/x", 1).contains("Read-only"));
    mounted.does("stats @");
    mounted.does("sync @");
    mounted.unmount();
    // In a directory where nothing is mounted, the message is as before.
    let dir = scratch_dir();
    let (code, _, said) = run("stats @", dir.path().to_str().expect("a plain path"));
    assert!(code == Some(1) && !said.contains("mounted"), "{said}");
}
