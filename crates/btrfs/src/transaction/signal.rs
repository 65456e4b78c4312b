//! The signal that tells the background thread of a volume that there is work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// A signal to the background thread of a volume.
#[derive(Default)]
pub(crate) struct CommitterSignal {
    /// Much was changed. Threads set it without the lock, and the background thread reads it when
    /// it wakes.
    is_pressed: AtomicBool,
    is_stopped: Mutex<bool>,
    wake: Condvar,
}

impl CommitterSignal {
    /// Signals that much was changed.
    pub(crate) fn press(&self) {
        if !self.is_pressed.swap(true, Ordering::Relaxed) {
            let _stopped = self.is_stopped.lock();
            self.wake.notify_one();
        }
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        *self.is_stopped.lock() = true;
        self.wake.notify_one();
    }

    /// Waits until `due`, or until much was changed. Returns whether much was changed; `None` when
    /// the thread must end.
    pub(crate) fn wait(&self, due: Option<Instant>) -> Option<bool> {
        let mut is_stopped = self.is_stopped.lock();
        let mut is_due = false;
        while !*is_stopped && !is_due && !self.is_pressed.load(Ordering::Relaxed) {
            match due {
                Some(due) => is_due = self.wake.wait_until(&mut is_stopped, due).timed_out(),
                None => self.wake.wait(&mut is_stopped),
            }
        }
        (!*is_stopped).then(|| self.is_pressed.swap(false, Ordering::Relaxed))
    }
}
