//! Lanes: threads that keep several devices busy at a time.
//!
//! ```text
//!   caller   share 0 ─────────────┐  share 2, which no lane began ──┐  results
//!   lane     share 1 ─────────────┘ ────────────────────────────────┘
//! ```
//!
//! The caller has one share of work for each device. It offers all but the first to lanes, does the
//! first itself, then those that no lane has begun, and waits for the rest. So work that takes less
//! time than waking a thread stays with the caller, and no result depends on a lane: where all
//! lanes are busy, or the host lets the engine start no thread, the work only takes longer.
//!
//! Invariants:
//!
//! 1. No lane works for a caller that has returned, not even when the caller panicked.
//! 2. A lane that a caller has waited for, or that it took work back from, is free for the next
//!    share of that caller.
//! 3. As many shares are in line as lanes are free, and no more.
//! 4. The threads start when there is work for them, and end when the [`Lanes`] are dropped.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use crate::cores;
use crate::workers::{QueuedWork, WorkerJob};

/// The lanes of a volume.
pub struct Lanes {
    queue: Arc<LaneQueue>,
}

struct LaneQueue {
    state: Mutex<LaneState>,
    is_changed: Condvar,
}

#[derive(Default)]
struct LaneState {
    waiting: VecDeque<Arc<dyn QueuedWork>>,
    threads: Vec<JoinHandle<()>>,
    /// The most threads there may be. Where the host refused one, those that there are.
    most: usize,
    /// The threads that do no work.
    free: usize,
    is_over: bool,
}

/// Work that was offered to a lane.
pub struct LaneTask<T>(Arc<WorkerJob<T>>);

impl Lanes {
    /// Lanes that start at most `most` threads.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let state = LaneState { most, ..LaneState::default() };
        Self { queue: Arc::new(LaneQueue { state: Mutex::new(state), is_changed: Condvar::new() }) }
    }

    /// Offers `work` to a lane; `None` when all are busy. The work holds no lock, and waits for
    /// nothing but a device.
    pub fn offer<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<LaneTask<T>> {
        let mut state = self.queue.state.lock();
        // What a caller has taken back keeps no lane busy.
        state.waiting.retain(|job| job.is_waiting());
        if state.free <= state.waiting.len() && !self.add_thread(&mut state) {
            return None;
        }
        let job = Arc::new(WorkerJob::new(work));
        state.waiting.push_back(job.clone());
        drop(state);
        self.queue.is_changed.notify_one();
        Some(LaneTask(job))
    }

    /// Does `work` for all `shares` at a time, and then gives the result of each to `take`, in
    /// their order. A single share takes no lane and no memory.
    ///
    /// # Panics
    /// When the work did.
    pub fn run<S, T>(&self, shares: &[S], work: fn(&S) -> T, mut take: impl FnMut(usize, T))
    where
        S: Clone + Send + 'static,
        T: Send + 'static,
    {
        let Some((first, others)) = shares.split_first() else { return };
        if others.is_empty() {
            return take(0, work(first));
        }
        let offer = |share: &S| {
            let share = share.clone();
            self.offer(move || work(&share))
        };
        let tasks: Vec<_> = others.iter().map(offer).collect();
        let first = work(first);
        let left = |(task, share): (Option<LaneTask<T>>, &S)| match task.and_then(LaneTask::begun) {
            Some(task) => Err(task),
            None => Ok(work(share)),
        };
        let rest: Vec<_> = tasks.into_iter().zip(others).map(left).collect();
        take(0, first);
        for (number, result) in (1..).zip(rest) {
            take(number, result.unwrap_or_else(LaneTask::finish));
        }
    }

    /// Starts one more thread. Returns false when there are enough, or the host refuses it.
    fn add_thread(&self, state: &mut LaneState) -> bool {
        if state.threads.len() >= state.most {
            return false;
        }
        let queue = self.queue.clone();
        let run = move || {
            cores::use_all();
            queue.work();
        };
        let Ok(thread) = thread::Builder::new().name("offshoot-lane".into()).spawn(run) else {
            state.most = state.threads.len();
            return false;
        };
        state.threads.push(thread);
        state.free += 1;
        true
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        let threads = {
            let mut state = self.queue.state.lock();
            state.is_over = true;
            std::mem::take(&mut state.threads)
        };
        self.queue.is_changed.notify_all();
        let own = thread::current().id();
        // A lane may let go of the last share in a volume.
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != own) {
            // A lane catches the panics of its work, and has none of its own.
            let _ = thread.join();
        }
    }
}

impl LaneQueue {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                // Under the lock of the queue: a lane never counts as busy for nothing.
                if !job.begin() {
                    continue;
                }
                state.free -= 1;
                drop(state);
                job.run(&|| self.state.lock().free += 1);
                drop(job);
                state = self.state.lock();
            } else if state.is_over {
                return;
            } else {
                self.is_changed.wait(&mut state);
            }
        }
    }
}

impl<T> LaneTask<T> {
    /// The task, if a lane has begun it. Otherwise no lane will, and the caller does the work.
    #[must_use]
    pub fn begun(self) -> Option<Self> {
        if self.0.take_back().is_some() { None } else { Some(self) }
    }

    /// The result of a task that was [begun](Self::begun).
    ///
    /// # Panics
    /// When the work did.
    #[must_use]
    pub fn finish(self) -> T {
        self.0.result()
    }
}

/// Waits for the lane, if one has begun the work.
impl<T> Drop for LaneTask<T> {
    fn drop(&mut self) {
        if self.0.take_back().is_none() {
            drop(self.0.end());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Each share waits for all others, so this ends only if they run at a time: in a hundred
    /// rounds, each right behind one of which the lanes may have begun nothing.
    #[test]
    fn all_shares_run_at_a_time_in_every_round() {
        for members in 2..=4 {
            let lanes = Lanes::new(members - 1);
            for _ in 0..100 {
                // So little work that the caller has mostly done it before a lane awakes.
                lanes.run(&vec![(); members], |()| (), |_, ()| {});
                let meeting = Arc::new(Barrier::new(members));
                let shares: Vec<_> = (0..members).map(|share| (share, meeting.clone())).collect();
                let work = |(share, meeting): &(usize, Arc<Barrier>)| {
                    meeting.wait();
                    *share
                };
                let mut results = Vec::new();
                lanes.run(&shares, work, |share, result| results.push((share, result)));
                assert_eq!(results, (0..members).map(|share| (share, share)).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_single_share_starts_no_thread_and_several_end_with_the_lanes() {
        let lanes = Lanes::new(3);
        let of_caller = thread::current().id();
        lanes.run(&[()], |()| thread::current().id(), |_, id| assert_eq!(id, of_caller));
        assert!(lanes.queue.state.lock().threads.is_empty());
        lanes.run(&[(); 9], |()| (), |_, ()| {});
        let queue = Arc::downgrade(&lanes.queue);
        drop(lanes);
        assert!(queue.upgrade().is_none(), "a thread still has the queue");
    }

    #[test]
    fn without_a_thread_the_caller_does_all() {
        let of_caller = thread::current().id();
        let mut ids = Vec::new();
        Lanes::new(0).run(&[(); 3], |()| thread::current().id(), |_, id| ids.push(id));
        assert_eq!(ids, [of_caller; 3]);
    }

    #[test]
    fn many_callers_get_their_own_results() {
        let lanes = Lanes::new(2);
        thread::scope(|scope| {
            for caller in 0..8 {
                let lanes = &lanes;
                scope.spawn(move || {
                    for round in 0..300 {
                        let shares = [0, 1, 2].map(|share| caller * 10_000 + round * 10 + share);
                        let mut results = Vec::new();
                        lanes.run(&shares, |share| *share, |_, result| results.push(result));
                        assert_eq!(results, shares);
                    }
                });
            }
        });
        assert!(lanes.queue.state.lock().waiting.len() <= 2, "more in line than lanes are free");
    }

    /// The caller returns only after the lanes have let go of their shares, whichever share panics.
    #[test]
    fn a_panic_reaches_the_caller_when_no_lane_works_for_it() {
        for bad in 0..3 {
            let lanes = Lanes::new(2);
            let (meeting, ended) = (Arc::new(Barrier::new(3)), Arc::new(AtomicUsize::new(0)));
            let shares: Vec<_> =
                (0..3).map(|share| (share == bad, meeting.clone(), ended.clone())).collect();
            let work = |(is_bad, meeting, ended): &(bool, Arc<Barrier>, Arc<AtomicUsize>)| {
                meeting.wait();
                assert!(!is_bad, "this share is bad");
                thread::yield_now();
                ended.fetch_add(1, Ordering::Relaxed);
            };
            let run = AssertUnwindSafe(|| lanes.run(&shares, work, |_, ()| {}));
            assert!(catch_unwind(run).is_err(), "{bad}");
            assert_eq!(ended.load(Ordering::Relaxed), 2, "a lane still works");
            lanes.run(&[(); 3], |()| (), |_, ()| {});
        }
    }
}
