//! How threads of the log, and of rooms above, are woken.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

#[derive(Debug, Default)]
struct SignalState {
    is_wanted: bool,
    is_ended: bool,
}

/// What a background thread waits for: work, or the end.
#[derive(Debug, Default)]
pub(crate) struct WorkSignal {
    state: Mutex<SignalState>,
    wake: Condvar,
}

impl WorkSignal {
    /// There is work.
    pub(crate) fn want(&self) {
        let mut state = self.state.lock();
        if !state.is_wanted {
            state.is_wanted = true;
            self.wake.notify_one();
        }
    }

    /// There is no more work.
    pub(crate) fn end(&self) {
        self.state.lock().is_ended = true;
        self.wake.notify_one();
    }

    /// Waits for work. Returns false at the end.
    pub(crate) fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while !state.is_wanted && !state.is_ended {
            self.wake.wait(&mut state);
        }
        state.is_wanted = false;
        !state.is_ended
    }

    /// Waits a moment, or until more is wanted. Returns false at the end.
    pub(crate) fn pause(&self, moment: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.is_wanted && !state.is_ended {
            self.wake.wait_for(&mut state, moment);
        }
        state.is_wanted = false;
        !state.is_ended
    }
}

/// A place to wait until something may have changed.
#[derive(Debug, Default)]
pub(super) struct ChangeSignal {
    lock: Mutex<()>,
    changed: Condvar,
}

impl ChangeSignal {
    /// Waits while `is_held`, which is asked again after each change and each `moment`.
    pub(super) fn wait_while(&self, moment: Duration, mut is_held: impl FnMut() -> bool) {
        if !is_held() {
            return;
        }
        let mut guard = self.lock.lock();
        while is_held() {
            self.changed.wait_for(&mut guard, moment);
        }
    }

    /// Something changed.
    pub(super) fn wake(&self) {
        // A thread that has just asked waits before this goes on.
        drop(self.lock.lock());
        self.changed.notify_all();
    }
}
