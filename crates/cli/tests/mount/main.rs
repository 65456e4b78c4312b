//! Volumes mounted with `offshoot mount`, used through the system calls of ordinary programs.
//!
//! | module | judge |
//! |---|---|
//! | `same` | the kernel's btrfs, which shows the same volume, or does the same calls on one of its own |
//! | `calls` | those calls |
//! | `block` | the kernel, which mounts the same block device before, meanwhile and after |
//! | `ends` | `btrfs check`, and the promises: unmounting, signals, SIGKILL under load, full volumes |
//! | `events` | the lines that `-v`, `OFFSHOOT_LOG` and SIGUSR1 ask for |
//! | `suites` | test suites of other projects: `pjdfstest` and `fsx` |
//! | `work` | real programs, which check their own work; `btrfs check`, and the kernel's mount showing the same bytes |
//! | `power` | a database, after power cuts |
//! | `campaign` | the same for a long time, with every way of storing data |
//! | `callers` | the users who mount: one without rights, and `mount` with a line of fstab |
//! | `confined` | the kernel, which reports the rights of the process |
//! | `manners` | `mount -a`, the kernel's mount with the same lines, the same verbs on an image |
//! | `refused` | refusals: options, volumes in use, directories that are not there |
//! | `rescue` | the files before the damage |
//! | `control` | the same verbs on an image, `btrfs check`, the list of the kernel |
//! | `handles` | the kernel's btrfs, on which the same handles are opened |
//! | `ioctls` | the kernel's btrfs, with the same ioctls and the same programs |
//! | `mapped` | the kernel's btrfs, shown with the same mapped ids |
//! | `overlay` | an overlay over the kernel's btrfs, with the same changes |
//! | `transports` | the log, which names the transport |
//! | `xfs` | the kernel's XFS, which shows the same volume |
//!
//! The tests run over `/dev/fuse`, and over io_uring where `OFFSHOOT_TEST_TRANSPORT` is `io_uring`:
//! `cargo xtask test` does both.
//!
//! Tests of what both formats have run on both ([`format`]). `disk` has their volumes.
//!
//! They need root and `/dev/fuse`. A machine with the other judges must have both, or the tests
//! fail.

mod block;
mod callers;
mod calls;
mod campaign;
mod confined;
mod control;
#[path = "../shared/damaged.rs"]
mod damaged;
mod disk;
mod ends;
mod events;
#[path = "../shared/format.rs"]
mod format;
mod handles;
mod ioctls;
mod manners;
mod mapped;
mod overlay;
mod power;
#[path = "../shared/program.rs"]
mod program;
mod refused;
mod rescue;
mod same;
mod suites;
mod transports;
mod work;
mod xfs;

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use disk::MountDisk;
use format::on_both;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::io_uring::{self, SwitchedOn};
use offshoot_testkit::loops::unmount_or_detach;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use rustix::fs::{Gid, Uid};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{set_thread_gid, set_thread_uid};
use tempfile::TempDir;

/// The judges; the kernel must offer FUSE too.
fn require() -> Option<Judges> {
    judges::require().filter(|_| can_mount())
}

/// Whether the kernel offers the transport of this run. If not, the reason is printed.
fn can_mount() -> bool {
    if is_over_ring()
        && let Err(reason) = io_uring::can_be_had()
    {
        judges::skip(&reason);
        return false;
    }
    let device = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    device.expect(
        "/dev/fuse is there: boot a kernel with FUSE, or load its module (`modprobe fuse`)",
    );
    true
}

/// Whether this run uses io_uring.
fn is_over_ring() -> bool {
    std::env::var_os("OFFSHOOT_TEST_TRANSPORT").is_some_and(|transport| transport == "io_uring")
}

fn offshoot<S: AsRef<OsStr>>(args: &[S]) -> Output {
    command().args(args).output().expect("the program starts")
}

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
    command.stdin(Stdio::null());
    command
}

/// Runs the program, which must succeed without messages.
#[track_caller]
fn does(args: &[&OsStr]) {
    is_done(args, &offshoot(args));
}

/// Runs `unmount` with these words, again while the mount is busy. A process that another test
/// starts inherits our open files for a moment, and keeps a mount busy that long.
fn unmount(args: &[&OsStr]) -> Output {
    let args = [&["unmount".as_ref()], args].concat();
    again_while_busy(|| offshoot(&args))
}

/// The same with umount(8).
fn run_umount(dir: &Path) -> Output {
    again_while_busy(|| Command::new("umount").arg(dir).output().expect("umount runs"))
}

fn again_while_busy(unmount: impl Fn() -> Output) -> Output {
    for _ in 0..100 {
        let output = unmount();
        if !String::from_utf8_lossy(&output.stderr).contains("busy") {
            return output;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    unmount()
}

/// The same with the system call alone.
#[track_caller]
fn unmount_here(dir: &Path) {
    unmount_or_detach(dir).expect("the end of a mount");
}

/// A process in a namespace of its own, which ends with the value.
struct NamespaceHolder(Child);

impl NamespaceHolder {
    /// Starts one in a new namespace of the kind that `space` says to unshare(1), by `script` of
    /// the shell. `keep` is what the script knows as `$KEEP`.
    fn start(space: &str, script: &str, keep: &Path) -> Self {
        let script = format!("{script}\necho; exec sleep 1000");
        let mut unshare = Command::new("unshare");
        unshare.args([space, "sh", "-ec", &script]).env("KEEP", keep).stdout(Stdio::piped());
        let mut holder = Self(unshare.spawn().expect("unshare starts"));
        // The line says that the namespace is there.
        let output = holder.0.stdout.as_mut().expect("a pipe");
        output.read_exact(&mut [0]).expect("a line");
        holder
    }

    /// The number of the process.
    fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program of the shell that a process with a new mount namespace runs first: without it, the
/// copies that the namespace has of the mounts of other tests would keep those alive. `$KEEP` is
/// the place of the mount that it keeps.
const LEAVE_OTHER_MOUNTS: &str = r#"
    awk -v keep="${KEEP-}" '$2 != "/" && $2 != keep && ($3 ~ /^(fuse|overlay)/ ||
        $1 ~ "^/dev/loop") { print $2 }' /proc/self/mounts |
        xargs -r umount --lazy --no-canonicalize --internal-only ||
        true
"#;

#[track_caller]
fn is_done(args: &[&OsStr], output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    let is_silent = output.status.success() && said.is_empty();
    assert!(is_silent, "offshoot {args:?}: {}\n{said}", output.status);
}

/// An empty volume of at least `mib` MiB of the format of the test, made by the program.
fn volume(judges: &Judges, mib: u64) -> MountDisk {
    let disk = MountDisk::create(judges, mib);
    let image = disk.images()[0].as_os_str();
    does(&["mkfs".as_ref(), "--format".as_ref(), disk.format().as_ref(), image]);
    disk
}

/// Two such volumes: one made by the program, and one by the program of the format.
fn twins(judges: &Judges, mib: u64) -> (MountDisk, MountDisk) {
    let theirs = MountDisk::create(judges, mib);
    theirs.mkfs();
    (volume(judges, mib), theirs)
}

/// Requires that calls on our mount had the results that the same calls had on the kernel's.
#[track_caller]
fn assert_alike(ours: &[String], kernel: &[String]) {
    let differences: Vec<_> = ours
        .iter()
        .zip(kernel)
        .filter(|(ours, kernel)| ours != kernel)
        .map(|(ours, kernel)| format!("ours   {ours}\nkernel {kernel}"))
        .collect();
    assert!(differences.is_empty(), "of {} calls:\n{}", ours.len(), differences.join("\n"));
    assert_eq!(ours.len(), kernel.len());
}

/// Calls `act` as this user, with a group of the same number.
fn as_user<T: Send>(user: u32, act: impl FnOnce() -> T + Send) -> T {
    let act = move || {
        set_thread_gid(Gid::from_raw(user)).expect("root may");
        set_thread_uid(Uid::from_raw(user)).expect("root may");
        act()
    };
    std::thread::scope(|scope| scope.spawn(act).join()).expect("no panic")
}

/// Gives all files in a directory the same times.
fn touch_all(dir: &Path) {
    let touch = ["-depth", "-exec", "touch", "-h", "-d", "@1000000000", "{}", "+"];
    run("find", &[&[dir.as_os_str()], &touch.map(OsStr::new)[..]].concat());
}

/// The log line about the sandbox, on a kernel that has all parts of it.
const SANDBOXED: &str =
    "offshoot: sandbox: no capabilities, no new privileges, Landlock, seccomp\n";

/// A volume that the program has mounted. The server is a child of the test.
struct ServedMount {
    dir: TempDir,
    child: Child,
    log: PathBuf,
    /// The transport that the log names.
    transport: &'static str,
    _switched: Option<SwitchedOn>,
}

impl ServedMount {
    /// Mounts `image` with these options.
    #[track_caller]
    fn new(image: &Path, options: &str) -> Self {
        Self::of(command(), scratch_dir(), image, options)
    }

    /// Mounts it over `dir` with the program that `command` starts.
    #[track_caller]
    fn of(command: Command, dir: TempDir, image: &Path, options: &str) -> Self {
        let is_ring = is_over_ring();
        let switched = is_ring.then(|| SwitchedOn::new().expect("the kernel has it"));
        let (word, transport) =
            if is_ring { ("io_uring", "io_uring") } else { ("noio_uring", "/dev/fuse") };
        Self::serve(command, dir, image, &format!("{options},{word}"), transport, switched)
    }

    /// The same with a program that serves over `transport`.
    #[track_caller]
    fn serve(
        mut command: Command,
        dir: TempDir,
        image: &Path,
        options: &str,
        transport: &'static str,
        switched: Option<SwitchedOn>,
    ) -> Self {
        // Beside the image, so that both are removed together.
        let log = image.with_extension("log");
        let mut child = command
            .args(["mount", "--in-background", "-o", options, "--log"])
            .args([log.as_os_str(), image.as_os_str(), dir.path().as_os_str()])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut ready = [0];
        let output = child.stdout.as_mut().expect("a pipe");
        let is_ready = output.read_exact(&mut ready).is_ok();
        let mounted = Self { dir, child, log, transport, _switched: switched };
        assert!(is_ready, "{} is not mounted with {options:?}", image.display());
        mounted
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The log so far, without the line about the transport.
    fn log(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let said = log.replace(SANDBOXED, "");
        let others = said.split_inclusive('\n').filter(|line| !line.starts_with(&self.served()));
        others.collect()
    }

    fn served(&self) -> String {
        format!("offshoot: served over {}", self.transport)
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("it runs");
    }

    /// Waits for the server's end.
    #[track_caller]
    fn wait_for_end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the server's end, which must be a success without messages.
    #[track_caller]
    fn ends_well(mut self) {
        let status = self.wait_for_end();
        assert!(status.success(), "it ends with {status}: {}", self.log());
        assert_eq!(self.log(), "");
        let log = std::fs::read_to_string(&self.log).expect("a log");
        assert!(log.contains(&self.served()), "{log}");
    }

    /// Unmounts it with the program.
    #[track_caller]
    fn unmount(self) {
        let args = [self.path().as_os_str()];
        is_done(&args, &unmount(&args));
        self.ends_well();
    }
}

impl Drop for ServedMount {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the log of the mount:\n{}", self.log());
        }
        // After a failed test. A volume that is unmounted has nothing left to do.
        let _ = rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
