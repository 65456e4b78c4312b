//! Who mounts: a user without rights, with the help of `fusermount3`, and `mount` itself.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};

use offshoot_testkit::disks::scratch_dir;
use rustix::process::Signal;
use tempfile::TempDir;

use super::{Mounted, require, volume};

/// Who has no rights.
const NOBODY: u32 = 65534;

/// A directory of nobody's, with an image, and the program where nobody gets to it.
struct Home {
    dir: TempDir,
}

impl Home {
    fn new() -> Self {
        let home = Self { dir: scratch_dir() };
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(home.dir.path(), mode).expect("a mode");
        chown(home.dir.path(), Some(NOBODY), Some(NOBODY)).expect("an owner");
        // By another process: what is open for writing here goes to whatever other tests start meanwhile, and cannot be run until that ends.
        let mut copy = Command::new("cp");
        let copied = copy.arg(env!("CARGO_BIN_EXE_offshoot")).arg(home.program()).status();
        assert!(copied.expect("it starts").success(), "the program is copied");
        let output = home.run(&["mkfs".as_ref(), home.image().as_os_str(), "--size=256M".as_ref()]);
        assert!(output.status.success(), "{output:?}");
        home
    }

    fn program(&self) -> PathBuf {
        self.dir.path().join("offshoot")
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// The program, run by nobody.
    fn command(&self) -> Command {
        as_nobody(&self.program())
    }

    fn run(&self, args: &[&std::ffi::OsStr]) -> Output {
        self.command().args(args).output().expect("the program starts")
    }

    fn mount(&self) -> Mounted {
        let mode = fs::metadata("/dev/fuse").expect("it is there").permissions().mode();
        assert!(mode & 0o6 == 0o6, "users may not open /dev/fuse: `cargo xtask setup` lets them");
        Mounted::of(self.command(), own_dir(), &self.image(), "rw")
    }
}

fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.uid(NOBODY).gid(NOBODY).current_dir("/").stdin(Stdio::null());
    command
}

/// A directory that nobody may mount over.
fn own_dir() -> TempDir {
    let dir = scratch_dir();
    chown(dir.path(), Some(NOBODY), Some(NOBODY)).expect("an owner");
    dir
}

/// Runs these words of the shell as nobody in `dir`.
fn shell(dir: &Path, words: &str) -> String {
    let output = as_nobody("sh".as_ref()).args(["-c", words]).env("DIR", dir).output();
    let output = output.expect("a shell");
    assert!(output.status.success(), "{words}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a user mounts is written and unmounted by this user, and nobody else gets in.
#[test]
fn a_user_mounts_and_unmounts() {
    let Some(_judges) = require() else { return };
    let home = Home::new();
    let mounted = home.mount();
    // Nobody may write in the root directory, which is root's, before it is given away.
    assert_eq!(shell(mounted.path(), "cd $DIR && test ! -w . && ls -A"), "");
    assert!(fs::read_dir(mounted.path()).is_err(), "root is another user");
    let unmounted = home.run(&["unmount".as_ref(), mounted.path().as_os_str()]);
    assert!(unmounted.status.success(), "{unmounted:?}");
    mounted.ends_well();
}

/// SIGTERM stores what a user wrote, and unmounts it with the right that only the helper has.
#[test]
fn a_signal_unmounts_what_a_user_mounted() {
    let Some(judges) = require() else { return };
    let home = Home::new();
    // On the volume the root directory becomes nobody's.
    let ours = Mounted::new(&home.image(), "rw");
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
    let home = Home::new();
    let dir = own_dir();
    let mut command = home.command();
    command.arg("mount").arg(home.image()).arg(dir.path()).env("PATH", "/no/such/directory");
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("package fuse3"), "{said}");
}

/// The links by which `mount` and `umount` find the program, as long as one of these is there. Those that are there anyway are let be.
pub(super) struct Links;

/// How many want them, and which were made.
static LINKS: Mutex<(usize, Vec<PathBuf>)> = Mutex::new((0, Vec::new()));

impl Links {
    pub(super) fn new() -> Self {
        let mut links = LINKS.lock().expect("nobody panics");
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

impl Drop for Links {
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

/// A line of fstab, mounted by `mount` and unmounted by `umount`. That one asks no program when it is told a whole path, so the end of it is waited for.
#[test]
fn mount_and_umount_with_a_line_of_fstab() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let links = Links::new();
    let (dir, fstab) = (scratch_dir(), disks.images()[0].with_extension("fstab"));
    let (image, place) = (disks.images()[0].display(), dir.path().display());
    fs::write(&fstab, format!("{image} {place} fuse.offshoot noauto,compress=zstd,nodev 0 0\n"))
        .expect("a file");
    let mount = Command::new("mount").arg("--fstab").arg(&fstab).arg(dir.path()).output();
    let mount = mount.expect("mount runs");
    let written = fs::write(dir.path().join("file"), "contents");
    let umount = Command::new("umount").arg(dir.path()).output().expect("umount runs");
    drop(links);
    assert!(mount.status.success(), "{mount:?}");
    assert!(umount.status.success() && written.is_ok(), "{written:?} {umount:?}");
    assert!(!dir.path().join("file").exists());
    let lock = File::open(&disks.images()[0]).expect("an image");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    drop(lock);
    disks.assert_checks();
    let read = fs::read_to_string(disks.mount("ro").path().join("file"));
    assert_eq!(read.ok().as_deref(), Some("contents"));
}
