//! The threads of a volume that is written. One writes old data back, and what is too much of it
//! (`buffered`). The other makes commits durable in time, covers the log, and tries to free inodes
//! again that could not be freed:
//!
//! ```text
//! interval   | changes |         |         |
//! at its end           force     cover     nothing: the log is covered
//! ```
//!
//! A log that is covered leaves a recovery nothing to do: everything is in its place.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offshoot_vfs::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::XfsLive;

/// The least interval.
const LEAST_INTERVAL: Duration = Duration::from_millis(10);

/// Tells the thread to end.
#[derive(Debug, Default)]
struct IdleSignal {
    is_ended: Mutex<bool>,
    ended: Condvar,
}

impl IdleSignal {
    /// Waits for an interval. Returns false when the thread has to end.
    fn wait(&self, interval: Duration) -> bool {
        let due = Instant::now().checked_add(interval);
        let mut is_ended = self.is_ended.lock();
        while !*is_ended {
            let Some(due) = due else {
                // An interval behind the end of the clock is never over.
                self.ended.wait(&mut is_ended);
                continue;
            };
            if self.ended.wait_until(&mut is_ended, due).timed_out() {
                return !*is_ended;
            }
        }
        false
    }
}

/// The threads. Dropping this ends them.
#[derive(Debug)]
pub(crate) struct XfsIdleThreads {
    live: Arc<XfsLive>,
    signal: Arc<IdleSignal>,
    threads: Vec<JoinHandle<()>>,
}

impl XfsIdleThreads {
    /// Starts the threads of a volume.
    pub(crate) fn start(live: &Arc<XfsLive>, interval: Duration) -> Result<Self> {
        let interval = interval.max(LEAST_INTERVAL);
        let mut started = Self { live: live.clone(), signal: Arc::default(), threads: Vec::new() };
        let (of_thread, signal) = (live.clone(), started.signal.clone());
        started.spawn("xfs idle", move || run(&of_thread, &signal, interval))?;
        let of_thread = live.clone();
        started.spawn("xfs write-back", move || {
            of_thread.data().run_background(|| of_thread.enter().ok());
        })?;
        Ok(started)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        let failed = |error| Error::io(format!("starting the thread \"{name}\""), error);
        self.threads.push(thread.map_err(failed)?);
        Ok(())
    }
}

impl Drop for XfsIdleThreads {
    fn drop(&mut self) {
        *self.signal.is_ended.lock() = true;
        self.signal.ended.notify_all();
        self.live.data().end_background();
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join()
                && !std::thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

fn run(live: &XfsLive, signal: &IdleSignal, interval: Duration) {
    let commits = || live.transactions.log().statistics().formats;
    let (mut forced, mut covered) = (commits(), None);
    while signal.wait(interval) {
        // An error ends all writing, which the log tells; the next calls say so too.
        let Ok(_call) = live.enter() else { return };
        if live.data().flush_places().is_err() {
            return;
        }
        let now = commits();
        if covered == Some(now) {
            continue;
        }
        let log = live.transactions.log();
        let outcome = if now == forced { log.quiesce() } else { log.force_all() };
        if outcome.is_err() {
            return;
        }
        (forced, covered) = (now, (now == forced).then_some(now));
        // Others may have freed the room that was missing.
        live.free_again();
    }
}
