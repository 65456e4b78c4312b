//! The thread that commits a volume by itself: every so often, and when much was changed.
//!
//! It has the engine only while it works. Whoever drops the volume ends the thread and waits for it, so nothing is
//! written to the devices after that.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offshoot_vfs::{Error, Result};
use parking_lot::{Condvar, Mutex};

use crate::inode::write_back;
use crate::volume::{Report, Volume};

/// The thread that commits a volume. It ends when this is dropped.
pub(crate) struct Committer {
    signal: Arc<Signal>,
    thread: Option<JoinHandle<()>>,
}

/// How the thread is told something.
#[derive(Default)]
pub(crate) struct Signal {
    /// Much was changed. It is set without the lock, and looked at when the thread wakes.
    is_pressed: AtomicBool,
    is_stopped: Mutex<bool>,
    wake: Condvar,
}

impl Signal {
    /// Tells that much was changed.
    pub(crate) fn press(&self) {
        if !self.is_pressed.swap(true, Ordering::Relaxed) {
            let _stopped = self.is_stopped.lock();
            self.wake.notify_one();
        }
    }

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
    /// Commits `volume`, which is open for writing, every `interval` from now on.
    pub(crate) fn start(volume: &Arc<Volume>, interval: Duration) -> Result<Self> {
        let signal = volume.live()?.pressure.clone();
        let (volume, thread_signal) = (Arc::downgrade(volume), signal.clone());
        let thread = std::thread::Builder::new()
            .name("offshoot-commit".into())
            .spawn(move || run(&volume, &thread_signal, interval))
            .map_err(|e| Error::io("starting the thread that commits", e))?;
        Ok(Self { signal, thread: Some(thread) })
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        *self.signal.is_stopped.lock() = true;
        self.signal.wake.notify_one();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
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
