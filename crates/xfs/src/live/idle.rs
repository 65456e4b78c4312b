//! The thread of a volume that is written: it makes changes durable in time, covers the log, and
//! tries to free inodes again that could not be freed.
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

/// The thread. Dropping this ends it.
#[derive(Debug)]
pub(crate) struct XfsIdleThread {
    signal: Arc<IdleSignal>,
    thread: Option<JoinHandle<()>>,
}

impl XfsIdleThread {
    /// Starts the thread of a volume.
    pub(crate) fn start(live: &Arc<XfsLive>, interval: Duration) -> Result<Self> {
        let (live, signal) = (live.clone(), Arc::<IdleSignal>::default());
        let of_thread = signal.clone();
        let thread = std::thread::Builder::new()
            .name("xfs idle".to_owned())
            .spawn(move || run(&live, &of_thread, interval.max(LEAST_INTERVAL)))
            .map_err(|error| Error::io("starting the thread \"xfs idle\"", error))?;
        Ok(Self { signal, thread: Some(thread) })
    }
}

impl Drop for XfsIdleThread {
    fn drop(&mut self) {
        *self.signal.is_ended.lock() = true;
        self.signal.ended.notify_all();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

fn run(live: &XfsLive, signal: &IdleSignal, interval: Duration) {
    let commits = || live.transactions.log().statistics().formats;
    let (mut forced, mut covered) = (commits(), None);
    while signal.wait(interval) {
        let now = commits();
        if covered == Some(now) {
            continue;
        }
        // An error ends all writing, which the log tells; the next calls say so too.
        let Ok(_call) = live.enter() else { return };
        // Others may have freed the room that was missing.
        live.free_again();
        let now = commits();
        let log = live.transactions.log();
        let outcome = if now == forced { log.quiesce() } else { log.force_all() };
        if outcome.is_err() {
            return;
        }
        (forced, covered) = (now, (now == forced).then_some(now));
    }
}
