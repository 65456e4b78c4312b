//! How a mount ends: by unmounting, by a signal, by SIGKILL, on a full volume.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::random::Random;
use rustix::fs::OFlags;
use rustix::mount::MountFlags;
use rustix::process::Signal;

use super::{
    ServedMount, command, does, offshoot, on_both, require, unmount, unmount_here, volume,
};

/// When `unmount` returns, everything is on the devices, and other programs can use them.
fn unmount_makes_all_durable() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    for round in 0..3_u32 {
        let mounted = ServedMount::new(image, "rw");
        for before in 0..round {
            let read = fs::read_to_string(mounted.path().join(format!("file{before}")));
            assert_eq!(read.ok(), Some(before.to_string()));
        }
        fs::write(mounted.path().join(format!("file{round}")), round.to_string()).expect("a file");
        mounted.unmount();
        let listed = offshoot(&["ls".as_ref(), image.as_os_str()]);
        let lines = String::from_utf8_lossy(&listed.stdout).lines().count();
        assert_eq!(lines, usize::try_from(round).expect("few") + 1);
    }
    disks.assert_checks();
}

/// The program that the user calls returns when the volume can be used. The one that serves it goes
/// on.
fn it_goes_to_the_background() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let dir = offshoot_testkit::scratch_dir();
    let (image, path) = (disks.images()[0].as_os_str(), dir.path().as_os_str());
    // With the name and the options that `mount` uses. The link is hard, because the program finds
    // itself by it.
    let program = Path::new(env!("CARGO_BIN_EXE_offshoot"));
    let helper = program.with_file_name("mount.fuse.offshoot");
    let _ = fs::remove_file(&helper);
    fs::hard_link(program, &helper).expect("a link");
    let status = std::process::Command::new(&helper)
        .args([image, path, "-o".as_ref(), "rw,noatime".as_ref()])
        .status();
    let _ = fs::remove_file(&helper);
    let is_mounted = status.is_ok_and(|status| status.success());
    let written = fs::write(dir.path().join("file"), "contents");
    let unmounted = offshoot(&["unmount".as_ref(), path]);
    assert!(is_mounted && written.is_ok(), "{written:?}");
    assert!(unmounted.status.success(), "{unmounted:?}");
    assert_eq!(fs::read_dir(dir.path()).expect("the directory below").count(), 0);
    disks.assert_checks();
    assert!(
        fs::read_to_string(disks.mount("ro").path().join("file")).is_ok_and(|c| c == "contents")
    );
}

/// SIGTERM stores everything. Open files can still be used, and the server ends with the last of
/// them.
fn a_signal_unmounts() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let path = mounted.path().join("file");
    let mut file = File::create(&path).expect("a file");
    file.write_all(b"before").expect("data");
    mounted.signal(Signal::TERM);
    let is_gone = || !path.exists();
    while !is_gone() {
        std::thread::sleep(Duration::from_millis(5));
    }
    file.write_all(b" and after").expect("data");
    drop(file);
    mounted.ends_well();
    disks.assert_checks();
    let read = fs::read_to_string(disks.mount("ro").path().join("file"));
    assert_eq!(read.ok().as_deref(), Some("before and after"));
}

/// A mount in use is not unmounted, and goes on working.
fn what_is_in_use_stays_mounted() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let file = File::create(mounted.path().join("file")).expect("a file");
    let refused = offshoot(&["unmount".as_ref(), mounted.path().as_os_str()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("busy"), "{said}");
    file.write_all_at(b"data", 0).expect("it works on");
    // With `--lazy`, it goes when the last user closes it.
    does(&["unmount".as_ref(), "--lazy".as_ref(), mounted.path().as_os_str()]);
    assert!(!mounted.path().join("file").exists());
    file.write_all_at(b"more", 4).expect("it works on");
    drop(file);
    mounted.ends_well();
    disks.assert_checks();
    let read = fs::read_to_string(disks.mount("ro").path().join("file"));
    assert_eq!(read.ok().as_deref(), Some("datamore"));
}

/// Killed under load, again and again: the volume opens, and has everything that was fsynced.
#[test]
fn killed_under_load() {
    let Some(judges) = require() else { return };
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    let disks = volume(&judges, 512);
    let image = &disks.images()[0];
    let mut random = Random::new(seed);
    let promised = Mutex::new(Vec::new());
    for round in 0..20 {
        let mounted = ServedMount::new(image, "rw");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (promised, is_over, root) = (&promised, &is_over, mounted.path());
                let writer = WritingThread { round, thread, root };
                scope.spawn(move || writer.work(is_over, promised));
            }
            std::thread::sleep(Duration::from_millis(50 + random.below(300)));
            mounted.signal(Signal::KILL);
            is_over.store(true, Ordering::Relaxed);
        });
        drop(mounted);
        disks.assert_checks();
    }
    let promised = promised.into_inner().expect("no thread panicked");
    assert!(promised.len() >= 20, "only {} files were fsynced", promised.len());
    let found = disks.mount("ro");
    for (name, bytes) in &promised {
        let read = fs::read(found.path().join(name));
        assert!(read.is_ok_and(|read| read == *bytes), "{name} was fsynced (seed {seed})");
    }
}

/// A thread that writes files, and fsyncs every third.
struct WritingThread<'a> {
    round: u32,
    thread: u32,
    root: &'a Path,
}

impl WritingThread<'_> {
    fn work(&self, is_over: &AtomicBool, promised: &Mutex<Vec<(String, Vec<u8>)>>) {
        let mut random = Random::new(u64::from(self.round * 10 + self.thread));
        for number in 0_u32.. {
            let name = format!("r{}t{}n{number}", self.round, self.thread);
            let byte = number.to_le_bytes()[0];
            let bytes = vec![byte; usize::try_from(random.below(20_000)).expect("little")];
            // From now on, a failure comes from the kill.
            let written = File::create(self.root.join(&name)).and_then(|mut file| {
                file.write_all(&bytes)?;
                if number % 3 == 0 {
                    file.sync_all()?;
                }
                Ok(())
            });
            match written {
                Ok(()) if number % 3 == 0 => {
                    promised.lock().expect("no thread panicked").push((name, bytes));
                }
                Ok(()) => {}
                Err(_) => return,
            }
            if is_over.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

/// A program that fills a volume gets the error, and the log has it too. Removing files makes room
/// again.
#[test]
fn a_full_volume() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 128);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let path = mounted.path().join("file");
    let fill = |path: &Path| -> std::io::Result<()> {
        let mut file = File::create(path)?;
        for _ in 0..200 {
            file.write_all(&vec![7; 1 << 20])?;
        }
        file.sync_all()
    };
    let refused = fill(&path).expect_err("200 MiB do not fit");
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull);
    fs::remove_file(&path).expect("it can be removed");
    // The kernel releases the file a moment later. The commit after that frees its space.
    let write_again = || {
        File::open(mounted.path()).and_then(|root| root.sync_all()).expect("a sync");
        fs::write(&path, vec![1; 4 << 20])
    };
    let written = std::iter::repeat_with(write_again)
        .take(500)
        .inspect(|_| std::thread::sleep(Duration::from_millis(10)))
        .find(Result::is_ok);
    assert!(written.is_some(), "there is no room again");
    let said = mounted.log();
    assert!(said.contains("No space left on device"), "{said:?}");
    does(&["unmount".as_ref(), mounted.path().as_os_str()]);
    drop(mounted);
    disks.assert_checks();
}

/// When the host refuses writes, the volume becomes read-only, and the log says that once. What was
/// stored before is intact.
#[test]
fn a_host_that_fails_makes_it_read_only() {
    let Some(_judges) = require() else { return };
    let dir = offshoot_testkit::scratch_dir();
    let small = SmallHost::new();
    // The log is on another filesystem than the one that fails.
    let image = dir.path().join("image");
    let sparse = small.0.path().join("image");
    does(&["mkfs".as_ref(), sparse.as_os_str(), "--size=256M".as_ref()]);
    std::os::unix::fs::symlink(sparse, &image).expect("a link");
    let mounted = ServedMount::new(&image, "rw");
    let path = |name: &str| mounted.path().join(name);
    let stored = |name: &str| {
        let mut file = File::create(path(name))?;
        file.write_all(&vec![7; 4 << 20])?;
        file.sync_all()?;
        File::open(mounted.path())?.sync_all()
    };
    stored("before").expect("there is room");
    let refused = (0..100).map(|n| stored(&format!("{n}"))).find_map(|result| {
        result.err().filter(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem)
    });
    assert!(refused.is_some(), "it can be written on: {}", mounted.log());
    assert!(fs::create_dir(path("late")).is_err(), "nothing more is taken");
    assert_eq!(fs::read(path("before")).ok(), Some(vec![7; 4 << 20]));
    let said = mounted.log();
    assert_eq!(said.matches("from now on the volume is only read").count(), 1, "{said}");
    let place = mounted.path().to_path_buf();
    let unmounted = offshoot(&["unmount".as_ref(), place.as_os_str()]);
    assert_eq!(unmounted.status.code(), Some(1), "what was done last is not stored");
    drop(mounted);
    small.grow();
    offshoot_testkit::run::run("btrfs", &["check".as_ref(), image.as_os_str()]);
    fs::remove_file(image.with_extension("log")).expect("a log");
    let read = ServedMount::new(&image, "ro");
    assert_eq!(fs::read(read.path().join("before")).ok(), Some(vec![7; 4 << 20]));
    read.unmount();
}

/// A filesystem of the host with little room.
struct SmallHost(tempfile::TempDir);

impl SmallHost {
    fn new() -> Self {
        let dir = offshoot_testkit::scratch_dir();
        let size = Some(c"size=24m");
        rustix::mount::mount("small", dir.path(), "tmpfs", MountFlags::empty(), size)
            .expect("a tmpfs");
        Self(dir)
    }

    /// Makes the filesystem larger.
    fn grow(&self) {
        let flags = MountFlags::empty();
        rustix::mount::mount_remount(self.0.path(), flags, c"size=512m").expect("more room");
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// Unlinked files that were open when the server was killed are removed when the volume is opened
/// next.
#[test]
fn unlinked_files_are_gone_after_a_kill() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let path = mounted.path().join("file");
    let mut file = File::create(&path).expect("a file");
    file.write_all(&vec![1; 100_000]).expect("data");
    fs::remove_file(&path).expect("it is removed");
    file.sync_all().expect("it still is a file");
    assert_eq!(file.metadata().expect("it still is a file").len(), 100_000);
    mounted.signal(Signal::KILL);
    drop(file);
    drop(mounted);
    disks.assert_checks();
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    fs::write(mounted.path().join("other"), "x").expect("a file");
    mounted.unmount();
    disks.assert_checks();
    assert_eq!(fs::read_dir(disks.mount("rw").path()).expect("a listing").count(), 1);
}

/// After each write to a file with `O_SYNC` or `O_DSYNC`, the kernel sends the sync that the flag
/// means. It tells fdatasync from fsync. Both must work with and without tree logs.
#[test]
fn writes_that_are_durable_when_they_return() {
    let Some(judges) = require() else { return };
    for options in ["rw", "rw,notreelog"] {
        let disks = volume(&judges, 256);
        let mounted = ServedMount::new(&disks.images()[0], options);
        let make = |name: &str, flags: OFlags| {
            let path = mounted.path().join(name);
            let mut options = File::options();
            options.write(true).create_new(true);
            options.custom_flags(i32::try_from(flags.bits()).expect("flags of open"));
            let mut file = options.open(path).expect("a file");
            for part in [[1; 5000], [2; 5000]] {
                file.write_all(&part).expect("data");
            }
            file
        };
        let open = [
            make("sync", OFlags::SYNC),
            make("dsync", OFlags::DSYNC),
            make("fdatasync", OFlags::empty()),
            make("lost", OFlags::empty()),
        ];
        open[2].sync_data().expect("an fdatasync");
        mounted.signal(Signal::KILL);
        drop((open, mounted));
        disks.assert_checks();
        let found = disks.mount("rw");
        let expected = [[1; 5000], [2; 5000]].concat();
        for name in ["sync", "dsync", "fdatasync"] {
            let read = fs::read(found.path().join(name));
            assert!(read.is_ok_and(|read| read == expected), "{name} with {options}");
        }
        let lost = fs::read(found.path().join("lost"));
        assert!(
            lost.is_err() || lost.is_ok_and(|lost| lost.is_empty()),
            "the program had not synced it"
        );
    }
}

/// A mapping that is read and written, with reads and writes of the file beside it.
#[test]
#[expect(unsafe_code, reason = "the standard library has no mappings")]
fn mappings() {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let path = mounted.path().join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
    file.write_all_at(&[1; 8192], 0).expect("data");
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the test uses the mapping only through this pointer and within its length, until it
    // is unmapped.
    unsafe {
        let start = std::ptr::null_mut();
        let map = mmap(start, 8192, protection, MapFlags::SHARED, &file, 0).expect("a mapping");
        let bytes = map.cast::<u8>();
        assert_eq!(bytes.add(5000).read(), 1);
        bytes.add(5000).write(2);
        file.write_all_at(&[3], 5001).expect("a write beside it");
        assert_eq!(bytes.add(5001).read(), 3);
        let mut read = [0; 3];
        file.read_exact_at(&mut read, 4999).expect("a read beside it");
        assert_eq!(read, [1, 2, 3]);
        msync(map, 8192, MsyncFlags::SYNC).expect("a sync of the mapping");
        // The mapping stored bytes in a hole, and only the kernel has them. A program that copies
        // the file at this moment sees them as data.
        file.set_len(1 << 20).expect("a hole");
        let hole =
            mmap(start, 4096, protection, MapFlags::SHARED, &file, 1 << 19).expect("a mapping");
        hole.cast::<u8>().write(5);
        let copy = mounted.path().join("copy");
        offshoot_testkit::run::run(
            "cp",
            &["--sparse=always".as_ref(), path.as_os_str(), copy.as_os_str()],
        );
        assert_eq!(fs::read(&copy).expect("a copy")[1 << 19], 5);
        munmap(hole, 4096).expect("its end");
        file.set_len(8192).expect("as it was");
        bytes.write(4);
        munmap(map, 8192).expect("its end");
    }
    drop(file);
    mounted.unmount();
    disks.assert_checks();
    let read = fs::read(disks.mount("ro").path().join("file")).expect("it is there");
    assert_eq!((read[0], read[1], read[5000], read[5001], read.len()), (4, 1, 2, 3, 8192));
}

/// Other users may use the mount only with the option for it.
#[test]
fn other_users() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    assert_eq!((seen_by_another(&judges, &disks.images()[0], "rw")), "");
    assert_eq!((seen_by_another(&judges, &disks.images()[0], "allow_other")), "file\n");
    let mapped = ServedMount::new(&disks.images()[0], "uid=1234,gid=5678");
    let made = mapped.path().join("made");
    fs::write(&made, "x").expect("a file");
    let metadata = made.metadata().expect("it is there");
    let ids = |m: &fs::Metadata| {
        use std::os::unix::fs::MetadataExt;
        (m.uid(), m.gid())
    };
    assert_eq!(ids(&metadata), (1234, 5678));
    let refused = std::os::unix::fs::chown(&made, Some(0), None).map_err(|e| e.raw_os_error());
    assert_eq!(refused, Err(Some(1)));
    std::os::unix::fs::chown(&made, Some(1234), Some(5678)).expect("what it is already");
    mapped.unmount();
    let found = disks.mount("ro");
    assert_eq!(ids(&found.path().join("made").metadata().expect("it is there")), (0, 0));
}

/// What another user sees of a mount with these options.
fn seen_by_another(_judges: &Judges, image: &Path, options: &str) -> String {
    use std::os::unix::process::CommandExt;
    let mounted = ServedMount::new(image, options);
    fs::write(mounted.path().join("file"), "x").expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(mounted.path(), mode).expect("a mode");
    let listed = std::process::Command::new("ls").arg(mounted.path()).uid(1000).gid(1000).output();
    let listed = listed.expect("ls runs");
    mounted.unmount();
    String::from_utf8_lossy(&listed.stdout).into_owned()
}

/// In the foreground, the program writes its messages to the terminal where it was started. The
/// mount is gone when it ends.
#[test]
fn in_the_foreground() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let dir = offshoot_testkit::scratch_dir();
    let mut child = command()
        .args(["mount".as_ref(), "--foreground".as_ref(), disks.images()[0].as_os_str()])
        .arg(dir.path())
        .spawn()
        .expect("the program starts");
    let file = dir.path().join("file");
    let mounted = || fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    while !mounted().contains(&*dir.path().to_string_lossy()) {
        assert!(child.try_wait().expect("a child").is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::write(file, "x").expect("a file");
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.expect("a process"), Signal::INT).expect("it runs");
    assert!(child.wait().expect("a child").success());
    assert!(!mounted().contains(&*dir.path().to_string_lossy()));
    disks.assert_checks();
}

/// When the server is gone, `unmount` reports that not everything is stored.
#[test]
fn unmounting_what_was_killed() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    fs::write(mounted.path().join("file"), "x").expect("a file");
    mounted.signal(Signal::KILL);
    while File::open(mounted.path()).is_ok() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = offshoot(&["unmount".as_ref(), mounted.path().as_os_str()]);
    let said = String::from_utf8_lossy(&output.stderr);
    let is_told = output.status.code() == Some(1) && said.contains("not everything");
    assert!(is_told, "{}: {said}", output.status);
    assert!(!is_mounted(mounted.path()));
    disks.assert_checks();
}

/// `--force` unmounts when the server does not answer and another program waits for its answer.
/// Over io_uring, the kernel aborted neither the request that a stopped thread was about to take
/// nor the mount.
#[test]
fn unmounting_by_force() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    fs::write(mounted.path().join("file"), "x").expect("a file");
    mounted.signal(Signal::STOP);
    let waiting = mounted.path().join("not asked for before");
    let waiting = std::thread::spawn(move || waiting.symlink_metadata());
    std::thread::sleep(Duration::from_millis(100));
    let output = unmount(&["-f".as_ref(), mounted.path().as_os_str()]);
    waiting.join().expect("no panic").expect_err("no such file, or no such mount");
    let said = String::from_utf8_lossy(&output.stderr);
    let is_told = output.status.code() == Some(1) && said.contains("may not be stored");
    assert!(is_told && said.contains("was stopped"), "{}: {said}", output.status);
    assert!(!is_mounted(mounted.path()));
    mounted.ends_well();
    disks.assert_checks();
}

/// `unmount` does not wait for the server if the mount is still visible at another path.
#[test]
fn unmounting_one_of_two_places() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let other = offshoot_testkit::scratch_dir();
    rustix::mount::mount_bind(mounted.path(), other.path()).expect("a bind mount");
    let output = offshoot(&["unmount".as_ref(), mounted.path().as_os_str()]);
    let written = fs::write(other.path().join("file"), "x");
    unmount_here(other.path());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("still mounted over"), "{said}");
    written.expect("it works on");
    mounted.ends_well();
    disks.assert_checks();
}

/// A signal does not unmount another mount on top.
#[test]
fn a_signal_leaves_other_mounts() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", mounted.path(), "tmpfs", flags, None).expect("a mount on top");
    let file = mounted.path().join("of another");
    fs::write(&file, "x").expect("a file");
    mounted.signal(Signal::TERM);
    while mounted.log().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let is_there = file.exists();
    unmount_here(mounted.path());
    assert!(is_there && mounted.log().contains("not unmounted"), "{}", mounted.log());
    does(&["unmount".as_ref(), mounted.path().as_os_str()]);
    disks.assert_checks();
}

/// If the server cannot start, there is no mount.
#[test]
fn a_log_that_cannot_be_opened() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let dir = offshoot_testkit::scratch_dir();
    let image = disks.images()[0].as_os_str();
    let log = ["mount", "--log", "/no/such/directory/log"].map(std::ffi::OsStr::new);
    let output = offshoot(&[&log[..], &[image, dir.path().as_os_str()]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("/no/such/directory/log"), "{said}");
    assert!(!is_mounted(dir.path()));
}

/// Whether something is mounted over `dir`.
fn is_mounted(dir: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    table.contains(&*dir.to_string_lossy())
}

on_both! {
    unmount_makes_all_durable,
    it_goes_to_the_background,
    a_signal_unmounts,
    what_is_in_use_stays_mounted,
}
