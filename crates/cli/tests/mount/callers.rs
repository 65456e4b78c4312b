//! The users who mount: one without rights, by `fusermount3`, and `mount` itself.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use offshoot_fuse::{Mounter, ServeOptions, Server, Transport, Unmount};
use offshoot_testkit::model::Model;
use offshoot_testkit::scratch_dir;
use offshoot_vfs::Timestamp;
use rustix::fs::StatVfsMountFlags;
use rustix::mount::MountFlags;
use rustix::process::Signal;
use tempfile::TempDir;

use super::program::copy_program;
use super::{LEAVE_OTHER_MOUNTS, ServedMount, require, run_umount, volume};

/// The user id of `nobody`, who has no rights.
const NOBODY: u32 = 65534;

/// A directory that belongs to `nobody`, with an image and a program that `nobody` can run.
pub(super) struct NobodyHome {
    dir: TempDir,
}

impl NobodyHome {
    pub(super) fn new() -> Self {
        let home = Self { dir: scratch_dir() };
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(home.dir.path(), mode).expect("a mode");
        chown(home.dir.path(), Some(NOBODY), Some(NOBODY)).expect("an owner");
        copy_program(home.dir.path());
        let mkfs = ["mkfs", "--size=256M", "--root-owner=0:0"].map(OsStr::new);
        let output = home.run(&[&mkfs[..], &[home.image().as_os_str()]].concat());
        assert!(output.status.success(), "{output:?}");
        home
    }

    fn program(&self) -> PathBuf {
        self.dir.path().join("offshoot")
    }

    pub(super) fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// The program, run by `nobody`.
    fn command(&self) -> Command {
        as_nobody(&self.program())
    }

    pub(super) fn run(&self, args: &[&std::ffi::OsStr]) -> Output {
        self.command().args(args).output().expect("the program starts")
    }

    fn mount(&self) -> ServedMount {
        let mode = fs::metadata("/dev/fuse").expect("it is there").permissions().mode();
        assert!(mode & 0o6 == 0o6, "users may not open /dev/fuse: `cargo xtask setup` lets them");
        ServedMount::of(self.command(), own_dir(), &self.image(), "rw")
    }
}

fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.uid(NOBODY).gid(NOBODY).current_dir("/").stdin(Stdio::null());
    command
}

/// A directory that `nobody` may mount over.
pub(super) fn own_dir() -> TempDir {
    let dir = scratch_dir();
    chown(dir.path(), Some(NOBODY), Some(NOBODY)).expect("an owner");
    dir
}

/// Runs a shell command as `nobody` in `dir`.
fn shell(dir: &Path, words: &str) -> String {
    let output = as_nobody("sh".as_ref()).args(["-c", words]).env("DIR", dir).output();
    let output = output.expect("a shell");
    assert!(output.status.success(), "{words}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A user can write and unmount what this user mounted, and no other user can enter it.
#[test]
fn a_user_mounts_and_unmounts() {
    let Some(_judges) = require() else { return };
    let home = NobodyHome::new();
    let mounted = home.mount();
    // Before `nobody` owns the root directory, it belongs to root, and `nobody` cannot write in it.
    assert_eq!(shell(mounted.path(), "cd $DIR && test ! -w . && ls -A"), "");
    assert!(fs::read_dir(mounted.path()).is_err(), "root is another user");
    let unmounted = home.run(&["unmount".as_ref(), mounted.path().as_os_str()]);
    assert!(unmounted.status.success(), "{unmounted:?}");
    mounted.ends_well();
}

/// SIGTERM stores what a user wrote, and unmounts the volume with the help of the only process that
/// may.
#[test]
fn a_signal_unmounts_what_a_user_mounted() {
    let Some(judges) = require() else { return };
    let home = NobodyHome::new();
    // `nobody` becomes the owner of the volume's root directory.
    let ours = ServedMount::new(&home.image(), "rw");
    chown(ours.path(), Some(NOBODY), Some(NOBODY)).expect("an owner");
    ours.unmount();
    fs::remove_file(home.image().with_extension("log")).expect("a log of root's");
    chown(home.image(), Some(NOBODY), Some(NOBODY)).expect("an owner");
    let mounted = home.mount();
    shell(mounted.path(), "cd $DIR && echo contents > file && sync file");
    mounted.signal(Signal::TERM);
    let place = mounted.path().to_path_buf();
    mounted.ends_well();
    assert!(!place.exists(), "its directory could be removed");
    let read = home.run(&["cat".as_ref(), format!("{}:/file", home.image().display()).as_ref()]);
    assert_eq!(String::from_utf8_lossy(&read.stdout), "contents\n");
    drop(judges);
}

#[test]
fn without_fusermount3_a_user_is_told() {
    let Some(_judges) = require() else { return };
    let home = NobodyHome::new();
    let dir = own_dir();
    let mut command = home.command();
    command.arg("mount").arg(home.image()).arg(dir.path()).env("PATH", "/no/such/directory");
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("package fuse3"), "{said}");
}

/// `nobody` in a container without `/dev/fuse`: mounting reports that, and all other verbs work.
#[test]
fn without_dev_fuse_a_user_is_told_and_goes_on() {
    const CONTAINER: &str = r#"
        mount -t tmpfs -o mode=755 none "$NEW"
        mkdir "$NEW/shm"
        mount --rbind /dev/shm "$NEW/shm"
        cp -a /dev/null /dev/urandom "$NEW"
        mount --rbind "$NEW" /dev
        exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -ec "$WORDS""#;
    let Some(_judges) = require() else { return };
    let home = NobodyHome::new();
    let (new, dir) = (scratch_dir(), own_dir());
    let run = |words: &str| -> Output {
        let mut command = Command::new("unshare");
        let script = [LEAVE_OTHER_MOUNTS, CONTAINER].concat();
        command.args(["--mount", "sh", "-ec", &script]).current_dir(home.dir.path());
        command.env("NEW", new.path()).env("WORDS", words).env("DIR", dir.path());
        command.output().expect("util-linux is there")
    };
    let output = run(r#"./offshoot mount image "$DIR""#);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("mounting needs /dev/fuse") && said.lines().count() == 1, "{said}");
    let output = run("./offshoot mkfs --size=200M new
        echo contents | ./offshoot cp - new:/file
        ./offshoot subvolume snapshot new:/ new:/snapshot
        ./offshoot rm new:/file
        ./offshoot extract new:/ out
        ls out
        cat out/snapshot/file");
    assert!(output.status.success(), "{output:?}");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.ends_with("snapshot\ncontents\n"), "{shown}");
}

/// The links by which `mount` and `umount` find the program. They exist while a value of this type
/// exists. Links that existed before are left alone.
pub(super) struct MountLinks;

/// How many values of [`MountLinks`] there are, and the links that they made.
static LINKS: Mutex<(usize, Vec<PathBuf>)> = Mutex::new((0, Vec::new()));

impl MountLinks {
    pub(super) fn new() -> Self {
        let mut links = LINKS.lock().expect("no thread panicked");
        if links.0 == 0 {
            let names = ["/sbin/mount.fuse.offshoot", "/sbin/umount.fuse.offshoot"];
            let program = env!("CARGO_BIN_EXE_offshoot");
            let made = |name: &PathBuf| symlink(program, name).is_ok();
            links.1 = names.map(PathBuf::from).into_iter().filter(made).collect();
        }
        links.0 += 1;
        Self
    }
}

impl Drop for MountLinks {
    fn drop(&mut self) {
        let mut links = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
        links.0 -= 1;
        if links.0 == 0 {
            for link in links.1.drain(..) {
                let _ = fs::remove_file(link);
            }
        }
    }
}

/// `mount` mounts a line of fstab, and `umount` unmounts it. With a full path, `umount` does not
/// call our program, so the test waits for its end.
#[test]
fn mount_and_umount_with_a_line_of_fstab() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let links = MountLinks::new();
    let (dir, fstab) = (scratch_dir(), disks.images()[0].with_extension("fstab"));
    let (image, place) = (disks.images()[0].display(), dir.path().display());
    fs::write(&fstab, format!("{image} {place} fuse.offshoot noauto,compress=zstd,nodev 0 0\n"))
        .expect("a file");
    let mount = Command::new("mount").arg("--fstab").arg(&fstab).arg(dir.path()).output();
    let mount = mount.expect("mount runs");
    let flags = rustix::fs::statvfs(dir.path()).expect("it is mounted").f_flag;
    let written = fs::write(dir.path().join("file"), "contents");
    let umount = run_umount(dir.path());
    drop(links);
    assert!(mount.status.success(), "{mount:?}");
    // Those of mount(8), which tells a helper only what differs from them.
    assert!(flags.contains(StatVfsMountFlags::NODEV) && !flags.contains(StatVfsMountFlags::NOSUID));
    assert!(umount.status.success() && written.is_ok(), "{written:?} {umount:?}");
    assert!(!dir.path().join("file").exists());
    let lock = File::open(&disks.images()[0]).expect("an image");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    drop(lock);
    disks.assert_checks();
    let read = fs::read_to_string(disks.mount("ro").path().join("file"));
    assert_eq!(read.ok().as_deref(), Some("contents"));
}

/// The verbs on subvolumes refuse a user what the kernel refuses. Each verb runs beside the system
/// call that needs the same permission of the directory.
#[test]
fn subvolumes_need_the_permissions_of_directories() {
    let Some(_judges) = require() else { return };
    let home = NobodyHome::new();
    // As root: the owners of these directories decide what `nobody` may do on a mount of `nobody`.
    let ours = ServedMount::new(&home.image(), "rw");
    let root = ours.path();
    let make = |name: &str, mode: u32, owner: u32, group: u32| {
        let path = root.join(name);
        fs::create_dir(&path).expect("a directory");
        chown(&path, Some(owner), Some(group)).expect("an owner");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
    };
    make("open", 0o777, 0, 0);
    make("mine", 0o700, NOBODY, NOBODY);
    make("group", 0o070, 0, NOBODY);
    make("others", 0o755, 0, 0);
    make("read-only", 0o555, NOBODY, NOBODY);
    make("no-search", 0o766, 0, 0);
    make("sticky", 0o1777, 0, 0);
    make("listed", 0o700, 0, 0);
    make("denied", 0o777, 0, 0);
    make("closed", 0o700, 0, 0);
    make("closed/open", 0o777, 0, 0);
    for (list, name) in [("u:65534:rwx", "listed"), ("u:65534:r-x", "denied")] {
        let path = root.join(name);
        let set = Command::new("setfacl").args(["-m", list]).arg(&path).status();
        assert!(set.is_ok_and(|status| status.success()), "setfacl (Debian package acl)");
    }
    for (name, owner) in [("sticky/roots", 0), ("sticky/mine", NOBODY), ("others/mine", NOBODY)] {
        let path = root.join(name);
        let words = ["subvolume".as_ref(), "create".as_ref(), path.as_os_str()];
        super::does(&words);
        chown(&path, Some(owner), Some(owner)).expect("an owner");
        let mode = fs::Permissions::from_mode(0o777);
        fs::set_permissions(&path, mode).expect("a mode");
    }
    ours.unmount();
    fs::remove_file(home.image().with_extension("log")).expect("a log of root's");
    chown(home.image(), Some(NOBODY), Some(NOBODY)).expect("an owner");
    let mounted = home.mount();
    // In the mount of `nobody` only `nobody` sees that, so all commands run there as `nobody`.
    let run = |words: &str| {
        let script = format!("cd $DIR && {words} 2>&1");
        let mut command = as_nobody("sh".as_ref());
        command.args(["-c", &script, home.program().to_str().expect("a plain path")]);
        let output = command.env("DIR", mounted.path()).output().expect("a shell");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let reason = |said: &str| said.trim().rsplit(": ").next().unwrap_or_default().to_owned();
    let dirs = [
        ("open", true),
        ("mine", true),
        ("group", true),
        ("others", false),
        ("read-only", false),
        ("no-search", false),
        ("listed", true),
        ("denied", false),
        ("closed/open", false),
        (".", false),
    ];
    for (dir, is_allowed) in dirs {
        let (is_done, said) = run(&format!("mkdir {dir}/directory"));
        assert_eq!(is_done, is_allowed, "mkdir in {dir}: {said}");
        for verb in ["create", "snapshot sticky/mine"] {
            let name = verb.replace([' ', '/'], "-");
            let (done, answer) = run(&format!("$0 subvolume {verb} {dir}/{name}"));
            assert_eq!(done, is_done, "{verb} in {dir}: {answer}");
            assert_eq!(reason(&answer), reason(&said), "{verb} in {dir}");
        }
    }
    for (words, expected) in [
        // Subvolumes that another user owns.
        ("snapshot sticky/roots open/snapshot", "Operation not permitted"),
        ("set sticky/roots ro=true", "Operation not permitted"),
        ("delete sticky/roots", "Operation not permitted"),
        ("delete others/mine", "Permission denied"),
        ("delete sticky/nothing", "no such file"),
        ("delete sticky/mine", ""),
        ("delete open/create", ""),
        ("delete group/create", ""),
    ] {
        let (done, said) = run(&format!("$0 subvolume {words}"));
        assert_eq!(done, expected.is_empty(), "{words}: {said}");
        assert!(said.contains(expected), "{words}: {said}");
    }
    let (_, listed) = run("$0 subvolume list .");
    let is_there = |name: &str| listed.contains(name);
    assert!(is_there("sticky/roots") && is_there("others/mine") && is_there("mine/create"));
    assert!(!is_there("sticky/mine") && !is_there("open/create"), "{listed}");
    let unmounted = home.run(&["unmount".as_ref(), mounted.path().as_os_str()]);
    assert!(unmounted.status.success(), "{unmounted:?}");
    mounted.ends_well();
}

/// Mounts a filesystem that claims to be a volume of a user, as `fusermount3` lets any user do.
struct Impostor {
    dir: PathBuf,
    source: PathBuf,
    user: u32,
}

impl Mounter for Impostor {
    fn mount(&self) -> offshoot_vfs::Result<OwnedFd> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = OwnedFd::from(device.expect("it is there"));
        let (fd, user) = (device.as_raw_fd(), self.user);
        let data = format!(
            "fd={fd},rootmode=40000,user_id={user},group_id={user},allow_other,default_permissions"
        );
        let data = CString::new(data).expect("text");
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount(&self.source, &self.dir, "fuse.offshoot", flags, data.as_c_str())
            .expect("it is mounted");
        Ok(device)
    }

    fn unmount(&self, how: Unmount) -> offshoot_vfs::Result<()> {
        offshoot_fuse::unmount(&self.dir, how)
    }
}

/// A mount that only claims to be ours gets no requests and is bound nowhere.
#[test]
fn a_mount_of_another_user_is_not_trusted() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    let runs = |words: &[&OsStr]| {
        let output = super::offshoot(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned(), said)
    };
    let (dir, other) = (scratch_dir(), scratch_dir());
    let impostor = Impostor { dir: dir.path().into(), source: image.clone(), user: NOBODY };
    let options = ServeOptions::over(Transport::Device);
    let server =
        Server::start(Box::new(Model::made_at(Timestamp::now())), Arc::new(impostor), options);
    let server = server.expect("it is served");
    fs::create_dir(dir.path().join("theirs")).expect("a directory");
    for verb in ["info", "ls", "stat", "stats", "sync", "trim"] {
        let (is_done, out, said) = runs(&[verb.as_ref(), dir.path().as_os_str()]);
        assert!(!is_done && out.is_empty(), "{verb}: {out}{said}");
        assert!(said.contains(&format!("user {NOBODY} mounted that")), "{verb}: {said}");
    }
    let (_, listed, _) = runs(&["mount".as_ref()]);
    let line = listed.lines().find(|line| line.contains(dir.path().to_str().expect("text")));
    assert!(line.is_some_and(|line| line.contains("another user mounted it")), "{listed}");
    // The program mounts the volume itself, and not the mount that claims to be it.
    let (is_done, _, said) = runs(&["mount".as_ref(), image.as_ref(), other.path().as_ref()]);
    assert!(is_done && said.is_empty(), "{said}");
    assert!(!other.path().join("theirs").exists());
    let unmounted = super::unmount(&[other.path().as_os_str()]);
    assert!(unmounted.status.success(), "{unmounted:?}");
    // The program cannot know whether everything is stored.
    let control = server.control();
    let ended = std::thread::spawn(move || server.wait());
    let (is_done, _, said) = runs(&["unmount".as_ref(), dir.path().as_ref()]);
    assert!(!is_done && said.contains("another user mounted that"), "{said}");
    ended.join().expect("no panic").expect("it ends");
    drop(control);
}

/// A mount whose process does not say with which options it serves, as one of another version,
/// becomes read-only and never writable.
#[test]
fn a_mount_without_known_options_becomes_read_only_alone() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let dir = scratch_dir();
    let impostor = Impostor { dir: dir.path().into(), source: disks.images()[0].clone(), user: 0 };
    let options = ServeOptions::over(Transport::Device);
    let server =
        Server::start(Box::new(Model::made_at(Timestamp::now())), Arc::new(impostor), options);
    let server = server.expect("it is served");
    let remount = |options: &str| {
        let words = ["mount", "-o", options, "any"].map(OsStr::new);
        let output = super::offshoot(&[&words[..], &[dir.path().as_os_str()]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), said)
    };
    let is_read_only = || {
        let flags = rustix::fs::statvfs(dir.path()).expect("it is mounted").f_flag;
        flags.contains(rustix::fs::StatVfsMountFlags::RDONLY)
    };
    let (is_done, said) = remount("remount,ro");
    assert!(is_done && said.contains("its options are not known"), "{said}");
    assert!(is_read_only());
    let (is_done, said) = remount("remount,rw");
    assert!(!is_done && said.contains("another version of offshoot"), "{said}");
    assert!(is_read_only());
    offshoot_fuse::unmount(dir.path(), Unmount::Lazily).expect("it is unmounted");
    server.wait().expect("it ends");
}

/// A mount over another user's dead mount does not unmount that: the program does not believe what
/// the dead mount says of itself.
#[test]
fn a_dead_mount_of_another_user_is_not_taken_away() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    let dir = scratch_dir();
    let impostor = Impostor { dir: dir.path().into(), source: image.clone(), user: NOBODY };
    // No program ever serves it.
    drop(impostor.mount().expect("it is mounted"));
    let is_mounted = || {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("the mounts");
        mounts.lines().any(|line| line.contains(&format!(" {} ", dir.path().display())))
    };
    let words: [&OsStr; 3] = ["mount".as_ref(), image.as_ref(), dir.path().as_ref()];
    let mount = super::offshoot(&words);
    let said = String::from_utf8_lossy(&mount.stderr);
    assert_eq!(mount.status.code(), Some(1), "{said}");
    assert!(said.contains("`offshoot unmount` takes it away"), "{said}");
    assert!(!said.contains("unmounted") && is_mounted(), "{said}");
    let unmount = super::unmount(&[dir.path().as_os_str()]);
    let said = String::from_utf8_lossy(&unmount.stderr);
    assert!(said.contains("another user mounted that"), "{said}");
    assert!(!is_mounted(), "{said}");
}
