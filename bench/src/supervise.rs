//! Cleans up after an interrupted benchmark: nothing stays mounted, attached or running.
//!
//! A benchmark with a directory runs in a child process with a process group of its own. The
//! supervisor waits for the end of that process, or for SIGTERM, SIGINT or SIGHUP. After such a
//! signal it kills the group. Then it unmounts everything that is mounted in the directory, or from
//! an image there, and detaches the loop devices of these images. It leaves alone what was there
//! before the benchmark. A server in the background is in another group, and ends with its mount.

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use offshoot_testkit::run::try_run;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, kill_process_group};

use crate::Result;

/// How long to wait for killed processes to let go of a loop device.
const PATIENCE: Duration = Duration::from_secs(60);

/// The first argument of the child process that runs a benchmark for the supervisor.
const WORKER: &str = "supervised";

/// Returns the arguments without [`WORKER`], and whether that word was there. If so, this is the
/// child of a supervisor, which inherits blocked signals, so this unblocks them.
pub(crate) fn supervised(args: &[String]) -> Result<(&[String], bool)> {
    match args.split_first() {
        Some((first, rest)) if first == WORKER => {
            SigSet::all().thread_unblock().map_err(|errno| format!("signals: {errno}"))?;
            Ok((rest, true))
        }
        _ => Ok((args, false)),
    }
}

/// The directory of a benchmark, if it has one.
pub(crate) fn dir_of(args: &[String]) -> Option<&Path> {
    let at = args.iter().position(|arg| arg == "--dir")?;
    args.get(at + 1).map(Path::new)
}

/// Runs the benchmark that `args` say, which works in `dir`.
pub(crate) fn supervise(args: &[String], dir: &Path) -> Result<ExitCode> {
    let mut signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.add(Signal::SIGCHLD);
    signals.thread_block().map_err(|errno| format!("signals: {errno}"))?;
    let existing = dir.canonicalize();
    let loops = existing.map_or_else(|_| Vec::new(), |dir| loops_in(&dir));
    let before = MountsBefore { mounts: mounts()?, loops };
    let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut child = Command::new(program)
        .arg(WORKER)
        .args(args)
        .process_group(0)
        .spawn()
        .map_err(|error| format!("the benchmark: {error}"))?;
    loop {
        let signal = signals.wait().map_err(|errno| format!("signals: {errno}"))?;
        if signal == Signal::SIGCHLD {
            let ended = child.try_wait().map_err(|error| format!("the benchmark: {error}"))?;
            if let Some(status) = ended {
                let code = status.code().and_then(|code| u8::try_from(code).ok());
                return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
            }
            continue;
        }
        end(&mut child, dir, &before)?;
        // The exit status that a shell reports for a signal.
        return Ok(ExitCode::from(128 + u8::try_from(signal as i32).unwrap_or_default()));
    }
}

/// The mounts and loop devices from before the benchmark.
struct MountsBefore {
    mounts: Vec<MountAndSource>,
    loops: Vec<String>,
}

/// A mount: its directory, and its source.
type MountAndSource = (PathBuf, String);

/// Ends the benchmark, and undoes its mounts and loop devices.
fn end(child: &mut Child, dir: &Path, before: &MountsBefore) -> Result {
    let group = Pid::from_child(child);
    kill_process_group(group, rustix::process::Signal::KILL)
        .and_then(|()| child.wait().map(drop).map_err(|_| rustix::io::Errno::CHILD))
        .map_err(|errno| format!("ending the benchmark: {errno}"))?;
    // If the directory does not exist, the benchmark has made nothing there.
    let Ok(dir) = dir.canonicalize() else { return Ok(()) };
    let mut loops = loops_in(&dir);
    loops.retain(|device| !before.loops.contains(device));
    for mount in mounts()?.into_iter().rev() {
        let (place, source) = &mount;
        let is_ours = place.starts_with(&dir) || loops.contains(source);
        if is_ours && !before.mounts.contains(&mount) {
            rustix::mount::unmount(place, UnmountFlags::DETACH)
                .map_err(|errno| format!("unmounting {}: {errno}", place.display()))?;
        }
    }
    loops.iter().try_for_each(|device| detach(device, &dir))
}

/// The loop devices of images in `dir`.
fn loops_in(dir: &Path) -> Vec<String> {
    let all = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let of_dir = |name: &String| backing_file(name).is_some_and(|file| file.starts_with(dir));
    let names = all.filter_map(|entry| entry.file_name().into_string().ok()).filter(of_dir);
    names.map(|name| format!("/dev/{name}")).collect()
}

/// The image of a loop device.
fn backing_file(name: &str) -> Option<PathBuf> {
    let file = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    Some(PathBuf::from(file.trim_end_matches('\n')))
}

/// Detaches a loop device of an image in `dir`. Tries again for a while, because a killed process
/// may hold its mount for a moment.
fn detach(device: &str, dir: &Path) -> Result {
    let name = device.trim_start_matches("/dev/");
    let mut reason = String::new();
    let since = Instant::now();
    while since.elapsed() < PATIENCE {
        if backing_file(name).is_none_or(|file| !file.starts_with(dir)) {
            return Ok(());
        }
        if let Err(error) = try_run("losetup", &["--detach", device]) {
            reason = error;
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(format!("{device} stays: {reason}"))
}

/// All mounts.
fn mounts() -> Result<Vec<MountAndSource>> {
    let table = fs::read_to_string("/proc/self/mountinfo");
    let table = table.map_err(|error| format!("the table of mounts: {error}"))?;
    // `36 35 98:0 / /mnt rw,noatime master:1 - ext4 /dev/root rw`
    let mount = |line: &str| {
        let (place, of) = line.split_once(" - ")?;
        let place = place.split(' ').nth(4)?;
        Some((unescaped(place), of.split(' ').nth(1)?.to_owned()))
    };
    Ok(table.lines().filter_map(mount).collect())
}

/// Decodes a path of the table of mounts, where `\040` stands for a space: a backslash and three
/// octal digits are one byte.
fn unescaped(text: &str) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let digits = digits.filter(|_| first == b'\\');
        if let Some(Ok(byte)) = digits.map(|digits| u8::from_str_radix(digits, 8)) {
            bytes.push(byte);
            rest = &behind[3..];
        } else {
            bytes.push(first);
            rest = behind;
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}
