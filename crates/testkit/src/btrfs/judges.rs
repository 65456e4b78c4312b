//! Which judges this machine has, and whether a test may run without them.
//!
//! This is the only module that decides it:
//!
//! - Root (with the right to mount) on a machine with loop devices: the judges must be there. A
//!   missing judge **fails** the test with the command that installs it.
//! - Otherwise the kernel cannot judge. The test prints `skipped: ...` and is counted ([`skip`]).
//!
//! [`require`] returns a [`Judges`], without which no disk can be made. It is also the test's place
//! in the queue for loop devices, so that a wide test run does not swamp a small machine.

use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use offshoot_machine::progs_version;
pub use offshoot_machine::{PROGS_AT_LEAST, SKIPPED_FILE, may_mount, skip};

use crate::run::try_run;

/// The proof that the judges are there, and a place in the queue for loop devices.
#[derive(Debug)]
pub struct Judges {
    _private: (),
}

/// The judges, or `None` and a line on standard error if this machine cannot have them.
///
/// Waits while as many tests as the machine bears are running with judges.
///
/// # Panics
/// When a judge is missing on a machine that could have it.
#[must_use]
pub fn require() -> Option<Judges> {
    are_present().then(Judges::queue)
}

/// Whether there are judges. For a test that needs `btrfs check` of an image and no loop device,
/// and so no place in the queue. If the machine cannot have judges, prints so, like [`require`].
///
/// # Panics
/// When a judge is missing on a machine that could have it.
#[must_use]
pub fn are_present() -> bool {
    static VERDICT: OnceLock<JudgeVerdict> = OnceLock::new();
    match VERDICT.get_or_init(examine) {
        JudgeVerdict::Present => true,
        JudgeVerdict::Impossible(reason) => {
            skip(reason);
            false
        }
        JudgeVerdict::Missing(reason) => panic!("{reason}"),
    }
}

enum JudgeVerdict {
    Present,
    Impossible(String),
    Missing(String),
}

fn examine() -> JudgeVerdict {
    if let Err(reason) = may_mount() {
        return JudgeVerdict::Impossible(reason);
    }
    match missing_judge() {
        None => JudgeVerdict::Present,
        Some(reason) => JudgeVerdict::Missing(reason),
    }
}

fn missing_judge() -> Option<String> {
    const SETUP: &str = "`cargo xtask setup` installs it";
    if try_run("losetup", &["--version"]).is_err() {
        return Some(format!("losetup is missing: {SETUP} (Debian package `mount`)"));
    }
    let Ok(found) = try_run("btrfs", &["--version"]) else {
        return Some(format!("btrfs-progs is missing: {SETUP} (Debian package `btrfs-progs`)"));
    };
    if progs_version(&found).is_none_or(|version| version < PROGS_AT_LEAST) {
        let (major, minor) = PROGS_AT_LEAST;
        let found = found.lines().next().unwrap_or("nothing");
        return Some(format!(
            "btrfs-progs {major}.{minor} or newer is needed, `{found}` is installed: {SETUP} \
             (on Debian 12 from the suite `bookworm-backports`)"
        ));
    }
    if !kernel_knows_btrfs() {
        // The kernel may have the module unloaded; load it and look again.
        let _ = try_run("modprobe", &["btrfs"]);
        if !kernel_knows_btrfs() {
            return Some(
                "the kernel has no btrfs: boot one that has, or load its module \
                 (`modprobe btrfs`; Debian package `linux-image-amd64`)"
                    .to_owned(),
            );
        }
    }
    None
}

fn kernel_knows_btrfs() -> bool {
    std::fs::read_to_string("/proc/filesystems")
        .is_ok_and(|list| list.lines().any(|line| line.trim() == "btrfs"))
}

/// How many tests use loop devices now. A test waits for its turn only here, so there is no lock
/// order to keep.
static RUNNING: Mutex<usize> = Mutex::new(0);
static DONE: Condvar = Condvar::new();

fn running() -> MutexGuard<'static, usize> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Judges {
    fn queue() -> Self {
        // One more than there are cores: while one test waits for the disk, the others compute.
        let at_most = std::thread::available_parallelism().map_or(1, usize::from) + 1;
        let mut count = running();
        while *count >= at_most {
            count = DONE.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
        *count += 1;
        Self { _private: () }
    }
}

impl Drop for Judges {
    fn drop(&mut self) {
        *running() -= 1;
        DONE.notify_one();
    }
}
