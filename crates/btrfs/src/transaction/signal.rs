//! How the thread of a volume is told that there is something to do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// How the thread of a volume is told something.
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

    /// Has the thread end.
    pub(crate) fn stop(&self) {
        *self.is_stopped.lock() = true;
        self.wake.notify_one();
    }

    /// Waits until `due`, or until much was changed, and says whether it was; `None` at the end.
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
