//! The idle threads of `/dev/fuse`, and the thread that calls one when requests wait.
//!
//! Each thread that sleeps in a read of the device costs: the kernel wakes one for each request,
//! the one that slept longest, although a thread that just answered would take the request anyway.
//! On 2 CPUs, making small files on a file system that does nothing took 1.7 to 1.9 times the CPU
//! time with up to 8 sleeping threads as with 2. So as many threads as there are CPUs sleep there.
//! The others are parked: they wait for a call.
//!
//! ```text
//!            takes a long request and leaves no thread at the device
//!            none is there for some ticks                                  ┌───────────┐
//!   ┌─────────┐  no idle thread: a new one starts  ┌─────────────────┐ <──  │ parked    │
//!   │ started │ ─────────────────────────────────> │ at the device   │      │ or ended, │
//!   └─────────┘                                    │ or answers      │ ──>  │ if enough │
//!                                                  └─────────────────┘      └───────────┘
//!                                                     enough threads are at the device
//! ```
//!
//! A thread that takes a request that may wait for the disk calls another at once. Most other
//! requests take some 10 us, less than a call, but each may wait for the disk or for space. So a
//! guard looks once in a [`TICK`] whether a thread is at the device, and calls one more when none
//! was there at [`SHORT_TICKS`] in a row. Threads that answer short requests are soon back, and
//! more of them would only wake each other. The guard sleeps while no thread takes the last place
//! at the device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The time between two looks of the guard.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// At how many looks in a row no thread is at the device before the guard calls one. Two threads
/// that answer short requests half of the time are both away at one look in four, and at all of
/// these looks once in 65,000.
pub(crate) const SHORT_TICKS: u32 = 8;

/// Threads that are parked, and the sleep of the guard.
pub(crate) struct IdleThreads {
    most_parked: usize,
    state: Mutex<IdleState>,
    called: Condvar,
    guard_called: Condvar,
    /// A thread left no other at the device since the guard looked.
    is_short: AtomicBool,
    guard_sleeps: AtomicBool,
}

#[derive(Default)]
struct IdleState {
    /// Parked threads that are not called.
    parked: usize,
    /// Calls that no thread has taken yet.
    calls: usize,
    has_ended: bool,
}

impl IdleThreads {
    /// At most `most_parked` threads are parked.
    pub(crate) fn new(most_parked: usize) -> Self {
        Self {
            most_parked,
            state: Mutex::default(),
            called: Condvar::new(),
            guard_called: Condvar::new(),
            is_short: AtomicBool::new(false),
            guard_sleeps: AtomicBool::new(false),
        }
    }

    /// Parks this thread until it is called. Returns `false` if it shall end, because enough
    /// threads are parked or the mount has ended.
    pub(crate) fn park(&self) -> bool {
        let mut state = self.state.lock();
        if state.parked >= self.most_parked || state.has_ended {
            return false;
        }
        state.parked += 1;
        self.called.wait_while(&mut state, |state| state.calls == 0 && !state.has_ended);
        if state.has_ended {
            return false;
        }
        state.calls -= 1;
        true
    }

    /// Calls a parked thread. Returns `false` if there is none.
    pub(crate) fn call(&self) -> bool {
        let mut state = self.state.lock();
        if state.parked == 0 || state.has_ended {
            return false;
        }
        (state.parked, state.calls) = (state.parked - 1, state.calls + 1);
        self.called.notify_one();
        true
    }

    /// Notes that no thread is at the device.
    pub(crate) fn note_short(&self) {
        self.is_short.store(true, Ordering::SeqCst);
        if self.guard_sleeps.load(Ordering::SeqCst) {
            // The lock is free when the guard has seen the note or waits.
            let _state = self.state.lock();
            self.guard_called.notify_one();
        }
    }

    /// The guard waits until no thread may have been at the device for a [`TICK`]. Returns `false`
    /// if the mount has ended.
    pub(crate) fn wait_until_short(&self) -> bool {
        let mut state = self.state.lock();
        self.guard_sleeps.store(true, Ordering::SeqCst);
        while !self.is_short.load(Ordering::SeqCst) && !state.has_ended {
            self.guard_called.wait(&mut state);
        }
        self.guard_sleeps.store(false, Ordering::SeqCst);
        if !state.has_ended {
            self.guard_called.wait_for(&mut state, TICK);
        }
        // A note that comes later is seen at the next call: the caller looks at the number of
        // waiting threads after this.
        self.is_short.swap(false, Ordering::SeqCst);
        !state.has_ended
    }

    /// Ends all parked threads and the guard.
    pub(crate) fn end(&self) {
        self.state.lock().has_ended = true;
        self.called.notify_all();
        self.guard_called.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    /// Parked threads are called one by one, and the rest ends with the mount.
    #[test]
    fn parked_threads_are_called_or_end() {
        let idle = Arc::new(IdleThreads::new(2));
        assert!(!idle.call(), "none is parked");
        let parked: Vec<_> = (0..2)
            .map(|_| {
                let idle = idle.clone();
                thread::spawn(move || idle.park())
            })
            .collect();
        while idle.state.lock().parked < 2 {
            thread::yield_now();
        }
        assert!(!idle.park(), "a third one ends");
        assert!(idle.call());
        while idle.state.lock().calls > 0 {
            thread::yield_now();
        }
        idle.end();
        let called = parked.into_iter().filter_map(|parked| parked.join().ok());
        assert_eq!(called.filter(|is_called| *is_called).count(), 1);
        assert!(!idle.park() && !idle.call() && !idle.wait_until_short(), "the mount has ended");
    }

    /// The guard misses no note, whether it sleeps or not.
    #[test]
    fn the_guard_misses_no_note() {
        let idle = Arc::new(IdleThreads::new(0));
        let noting = idle.clone();
        let guard = thread::spawn(move || (0..20).all(|_| idle.wait_until_short()));
        while !guard.is_finished() {
            noting.note_short();
            thread::sleep(TICK / 4);
        }
        assert!(guard.join().expect("no panic"));
    }
}
