//! Ctrl-C while something long is done.
//!
//! A verb that [watches](watch) for SIGINT and SIGTERM ends in order after the first one: what it
//! began and cannot end is taken away, what it did is made
//! durable, and its last message says both. The second one ends the program at once, as a signal
//! does.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask, raise};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;

use crate::exit::{Failure, Result};
use crate::output::Console;

static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Whether a signal asked the program to end.
pub(crate) fn is_interrupted() -> bool {
    IS_INTERRUPTED.load(Ordering::Relaxed)
}

/// A line of standard input, without waiting for it any more when a signal asked the program to
/// end. What cannot be read, or is not whole then, is nothing.
pub(crate) fn line_of_stdin() -> Vec<u8> {
    /// What is kept of it at the most.
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
            // What is longer is read to its end all the same: it answers no other question.
            Ok(1) if byte != *b"\n" => line.extend((line.len() < LEN_MAX).then_some(byte[0])),
            Err(Errno::INTR) => {}
            _ => return line,
        }
    }
    Vec::new()
}

/// From now on the first signal only sets [`is_interrupted`]. It is called before there are other
/// threads.
pub(crate) fn watch(console: &Arc<Console>) -> Result {
    let failed = |error: io::Error| Failure::Host("watching for signals".to_owned(), error);
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
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
                let only = SigSet::from_iter([signal]);
                // The default of the signal ends the program here.
                let _ = pthread_sigmask(SigmaskHow::SIG_UNBLOCK, Some(&only), None);
                let _ = raise(signal);
            }
        }
    };
    let started = thread::Builder::new().name("signals".to_owned()).spawn(wait);
    started.map(drop).map_err(failed)
}
