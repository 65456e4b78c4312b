//! Whether a test may run without its judges, and how many tests may use loop devices at a time.
//!
//! This is the only module that decides it:
//!
//! - Root (with the right to mount) on a machine with loop devices: the judges must be there. A
//!   missing judge **fails** the test with the command that installs it.
//! - Otherwise the kernel cannot judge. The test prints `skipped: ...` and is counted ([`skip`]).
//!
//! A format adds which judges it needs: its `require` returns a value without which no disk can be
//! made. That value is also the test's place in the queue for loop devices, so that a wide test run
//! does not swamp a small machine.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use offshoot_machine::may_mount;
pub use offshoot_machine::skip;

use crate::run::try_run;

/// How a missing judge is installed.
pub(crate) const SETUP: &str = "`cargo xtask setup` installs it";

/// Whether the judges of a format are there.
pub(crate) enum JudgeVerdict {
    Present,
    Impossible(String),
    Missing(String),
}

impl JudgeVerdict {
    /// `missing_judge` says which judge of the format is missing.
    pub(crate) fn of(missing_judge: fn() -> Option<String>) -> Self {
        if let Err(reason) = may_mount() {
            return Self::Impossible(reason);
        }
        if try_run("losetup", &["--version"]).is_err() {
            return Self::Missing(format!("losetup is missing: {SETUP} (Debian package `mount`)"));
        }
        missing_judge().map_or(Self::Present, Self::Missing)
    }

    /// Whether they are. Counts the test as skipped if the machine cannot have them.
    ///
    /// # Panics
    /// When a judge is missing on a machine that could have it.
    pub(crate) fn are_present(&self) -> bool {
        match self {
            Self::Present => true,
            Self::Impossible(reason) => {
                skip(reason);
                false
            }
            Self::Missing(reason) => panic!("{reason}"),
        }
    }
}

/// Why the kernel does not judge this file system; `None` if it does.
pub(crate) fn without_kernel(fs_type: &str) -> Option<String> {
    let is_known = || {
        std::fs::read_to_string("/proc/filesystems")
            .is_ok_and(|list| list.lines().any(|line| line.trim() == fs_type))
    };
    if !is_known() {
        // The kernel may have the module unloaded; load it and look again.
        let _ = try_run("modprobe", &[fs_type]);
    }
    (!is_known()).then(|| {
        format!(
            "the kernel has no {fs_type}: boot one that has, or load its module (`modprobe \
             {fs_type}`; Debian package `linux-image-amd64`)"
        )
    })
}

/// A place in the queue for loop devices. It stays on the thread that got it.
#[derive(Debug)]
pub(crate) struct LoopTurn {
    /// Whether the thread stood in the queue for it. The turns that it took meanwhile are part of
    /// that one: a test that holds a turn and waits for a second could wait for ever.
    queued: bool,
    _on_one_thread: PhantomData<MutexGuard<'static, ()>>,
}

/// How many tests use loop devices now.
static RUNNING: Mutex<usize> = Mutex::new(0);
static DONE: Condvar = Condvar::new();

thread_local! {
    /// Whether this thread has a turn.
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
}

fn running() -> MutexGuard<'static, usize> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LoopTurn {
    /// Waits until fewer tests than the machine bears use loop devices.
    pub(crate) fn queue() -> Self {
        let queued = !HAS_TURN.replace(true);
        if queued {
            // One more than there are cores: while one test waits for the disk, the others compute.
            let at_most = std::thread::available_parallelism().map_or(1, usize::from) + 1;
            let mut count = running();
            while *count >= at_most {
                count = DONE.wait(count).unwrap_or_else(PoisonError::into_inner);
            }
            *count += 1;
        }
        Self { queued, _on_one_thread: PhantomData }
    }
}

impl Drop for LoopTurn {
    fn drop(&mut self) {
        if self.queued {
            HAS_TURN.set(false);
            *running() -= 1;
            DONE.notify_one();
        }
    }
}
