//! The thread that commits a volume by itself: every so often, and when much was changed.
//!
//! It holds the volume only while it works. Whoever drops the volume last ends it, and waits for it unless it is
//! that thread itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offshoot_vfs::{Error, Result};
use parking_lot::{Condvar, Mutex};

use crate::inode::write_back;
use crate::volume::{Report, Volume};

/// The thread, and how to tell it something.
pub(super) struct Committer {
    signal: Arc<Signal>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Signal {
    /// Much was changed. It is set without the lock, and only looked at when the thread wakes.
    is_pressed: AtomicBool,
    is_stopped: Mutex<bool>,
    wake: Condvar,
}

impl Signal {
    /// Waits until `due`, or until much was changed, and says whether it was; `None` at the end.
    fn wait(&self, due: Instant) -> Option<bool> {
        let mut is_stopped = self.is_stopped.lock();
        let mut is_due = false;
        while !*is_stopped && !is_due && !self.is_pressed.load(Ordering::Relaxed) {
            is_due = self.wake.wait_until(&mut is_stopped, due).timed_out();
        }
        (!*is_stopped).then(|| self.is_pressed.swap(false, Ordering::Relaxed))
    }
}

impl Committer {
    /// Commits `volume` every `interval` from now on.
    pub(super) fn start(volume: &Arc<Volume>, interval: Duration) -> Result<Self> {
        let signal = Arc::new(Signal::default());
        let (volume, thread_signal) = (Arc::downgrade(volume), signal.clone());
        let thread = std::thread::Builder::new()
            .name("offshoot-commit".into())
            .spawn(move || run(&volume, &thread_signal, interval))
            .map_err(|e| Error::io("starting the thread that commits", e))?;
        Ok(Self { signal, thread: Some(thread) })
    }

    /// Wakes the thread, because much was changed.
    pub(super) fn press(&self) {
        if !self.signal.is_pressed.swap(true, Ordering::Relaxed) {
            let _stopped = self.signal.is_stopped.lock();
            self.signal.wake.notify_one();
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        *self.signal.is_stopped.lock() = true;
        self.signal.wake.notify_one();
        let thread =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(Err(panic)) = thread.map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

fn run(volume: &Weak<Volume>, signal: &Signal, interval: Duration) {
    let mut due = Instant::now() + interval;
    loop {
        let Some(is_pressed) = signal.wait(due) else { return };
        let Some(volume) = volume.upgrade() else { return };
        let is_due = Instant::now() >= due;
        let result = if is_due {
            volume.sync()
        } else if is_pressed {
            ease(&volume)
        } else {
            Ok(())
        };
        if let Err(error) = result {
            volume.report(&Report::CommitFailed { problem: error.to_string() });
        }
        if is_due {
            due = Instant::now() + interval;
        }
    }
}

/// Brings to the devices what there is much of.
fn ease(volume: &Volume) -> Result<()> {
    let half = volume.live()?.dirty_bytes / 2;
    if volume.buffers.bytes() > half {
        write_back::sync_all(volume)?;
    }
    volume.commit_over(half)
}
