//! Ctrl-C during a long verb.
//!
//! A verb that [watches](watch) for SIGINT, SIGTERM and SIGHUP stops in order after the first
//! signal. It removes what it began and cannot finish, makes its finished changes durable, and
//! reports both in its last message. The second signal ends the program at once, as a signal does
//! by default, but for the [temporary file](remove_at_end) that it removes before that.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, thread};

use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask, raise};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use tempfile::TempPath;

use crate::exit::{Result, VerbFailure};
use crate::output::Console;

static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// The file that goes when the second signal ends the program.
static TEMPORARY: Mutex<Option<Box<Path>>> = Mutex::new(None);

/// A temporary file that goes when it is dropped, and when the second signal ends the program.
pub(crate) struct RemovedAtEnd {
    /// `None` after [`take`](Self::take).
    path: Option<TempPath>,
}

/// Removes `path` when the result is dropped, and when the second signal ends the program. One file
/// at a time can be that one.
pub(crate) fn remove_at_end(path: TempPath) -> RemovedAtEnd {
    *temporary() = Some(Box::from(&*path));
    RemovedAtEnd { path: Some(path) }
}

fn temporary() -> MutexGuard<'static, Option<Box<Path>>> {
    TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RemovedAtEnd {
    /// The path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.path.as_deref().unwrap_or(Path::new(""))
    }

    /// Ends this use of the file with `call`, which gives it its name. A second signal waits for
    /// that.
    pub(crate) fn take<T>(mut self, call: impl FnOnce(TempPath) -> io::Result<T>) -> io::Result<T> {
        let path = self.path.take().ok_or(io::ErrorKind::NotFound)?;
        let mut temporary = temporary();
        let taken = call(path);
        *temporary = None;
        taken
    }
}

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        *temporary() = None;
    }
}

/// Whether a signal asked the program to end.
pub(crate) fn is_interrupted() -> bool {
    IS_INTERRUPTED.load(Ordering::Relaxed)
}

/// Reads a line of standard input. Stops waiting when a signal asks the program to end. Returns an
/// empty line if there is none, or if a signal came before its end.
pub(crate) fn line_of_stdin() -> Vec<u8> {
    /// How much of the line is kept, in bytes.
    const LEN_MAX: usize = 4096;
    let stdin = io::stdin().lock();
    let mut line = Vec::new();
    let pause = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    while !is_interrupted() {
        let mut ready = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut ready, Some(&pause)) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(_) => return Vec::new(),
        }
        let mut byte = [0];
        match rustix::io::read(&stdin, &mut byte) {
            // A longer line is read to its end, so that the rest does not answer the next question.
            Ok(1) if byte != *b"\n" => line.extend((line.len() < LEN_MAX).then_some(byte[0])),
            Err(Errno::INTR) => {}
            _ => return line,
        }
    }
    Vec::new()
}

/// Makes the first signal only set [`is_interrupted`] from now on. The caller must not have started
/// other threads yet.
pub(crate) fn watch(console: &Arc<Console>) -> Result {
    let failed = |error: io::Error| VerbFailure::Host("watching for signals".to_owned(), error);
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block().map_err(|errno| failed(errno.into()))?;
    let console = console.clone();
    let wait = move || {
        while signals.wait().is_err() {}
        IS_INTERRUPTED.store(true, Ordering::Relaxed);
        console.note(&"interrupted: ending in order; once more to end at once");
        loop {
            if let Ok(signal) = signals.wait() {
                console.stop_progress();
                console.error(&"ended at once: what was not stored yet is lost");
                // The lock is held to the end: no new file begins.
                let temporary = temporary();
                if let Some(path) = &*temporary
                    && let Err(error) = fs::remove_file(path)
                {
                    console.error(&format_args!("{}: {error}", path.display()));
                }
                let only = SigSet::from_iter([signal]);
                // Here the default action of the signal ends the program.
                let _ = pthread_sigmask(SigmaskHow::SIG_UNBLOCK, Some(&only), None);
                let _ = raise(signal);
            }
        }
    };
    let started = thread::Builder::new().name("signals".to_owned()).spawn(wait);
    started.map(drop).map_err(failed)
}
