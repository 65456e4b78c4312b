//! Worker threads for computations, such as compression.
//!
//! The process has one worker for each core, and all volumes share them. The first [`WorkerTask`]
//! starts them. They keep their thread-local encoders and decoders from task to task. The work of a
//! task holds no lock and no volume, and waits for no other thread.
//!
//! A caller that needs a result before a worker has begun the task does the work itself. So no
//! result depends on the workers: where the host lets the engine start none, the work only takes
//! longer. A task that the caller drops before a worker begins it is never run.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, OnceLock};
use std::thread;

use parking_lot::{Condvar, Mutex};

use crate::cores;

/// Work that was handed to the workers, and its result.
pub struct WorkerTask<T>(Arc<WorkerJob<T>>);

pub(crate) struct WorkerJob<T> {
    state: Mutex<JobState<T>>,
    is_done: Condvar,
}

enum JobState<T> {
    Waiting(Box<dyn FnOnce() -> T + Send>),
    /// A thread has begun it, and takes the work from here.
    Begun(Option<Box<dyn FnOnce() -> T + Send>>),
    Done(Result<T, Box<dyn Any + Send>>),
    /// The caller has taken the work back, or has its result.
    Over,
}

/// What a worker sees of a job.
pub(crate) trait QueuedWork: Send + Sync {
    /// Begins the work. False if the caller has taken it back.
    fn begin(&self) -> bool;

    /// Does the work that was begun. Calls `is_free` before the caller can see the result.
    fn run(&self, is_free: &dyn Fn());

    /// Whether no thread has begun the work, and the caller has not taken it back.
    fn is_waiting(&self) -> bool;
}

impl<T: Send> QueuedWork for WorkerJob<T> {
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let old = std::mem::replace(&mut *state, JobState::Over);
        let begins = matches!(old, JobState::Waiting(_));
        *state = if let JobState::Waiting(work) = old { JobState::Begun(Some(work)) } else { old };
        begins
    }

    fn run(&self, is_free: &dyn Fn()) {
        let work = match &mut *self.state.lock() {
            JobState::Begun(work) => work.take(),
            _ => None,
        };
        let result = catch_unwind(AssertUnwindSafe(work.expect("it was begun, by this thread")));
        is_free();
        *self.state.lock() = JobState::Done(result);
        self.is_done.notify_all();
    }

    fn is_waiting(&self) -> bool {
        matches!(*self.state.lock(), JobState::Waiting(_))
    }
}

impl<T> WorkerJob<T> {
    pub(crate) fn new(work: impl FnOnce() -> T + Send + 'static) -> Self {
        Self { state: Mutex::new(JobState::Waiting(Box::new(work))), is_done: Condvar::new() }
    }

    /// The work, if no thread has begun it and the caller has not taken it back.
    pub(crate) fn take_back(&self) -> Option<Box<dyn FnOnce() -> T + Send>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, JobState::Over) {
            JobState::Waiting(work) => Some(work),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Waits until the thread that has begun the work has ended it. Returns the outcome, if the
    /// caller does not have it yet.
    pub(crate) fn end(&self) -> Option<Result<T, Box<dyn Any + Send>>> {
        let mut state = self.state.lock();
        loop {
            match std::mem::replace(&mut *state, JobState::Over) {
                JobState::Done(result) => return Some(result),
                JobState::Over => return None,
                other => *state = other,
            }
            self.is_done.wait(&mut state);
        }
    }

    /// The result of work that was begun and not taken yet.
    ///
    /// # Panics
    /// When the work did.
    pub(crate) fn result(&self) -> T {
        let outcome = self.end().expect("the caller takes the result once");
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl<T: Send + 'static> WorkerTask<T> {
    /// Hands `work` to the workers.
    pub fn start(work: impl FnOnce() -> T + Send + 'static) -> Self {
        let job = Arc::new(WorkerJob::new(work));
        if let Some(workers) = Workers::get() {
            workers.add(job.clone());
        }
        Self(job)
    }

    /// Runs `work` now. For work that takes less time than handing it over.
    pub fn now(work: impl FnOnce() -> T) -> Self {
        let state = Mutex::new(JobState::Done(Ok(work())));
        Self(Arc::new(WorkerJob { state, is_done: Condvar::new() }))
    }

    /// Its result.
    ///
    /// # Panics
    /// When the work did.
    #[must_use]
    pub fn finish(self) -> T {
        match self.0.take_back() {
            Some(work) => work(),
            None => self.0.result(),
        }
    }
}

impl<T> Drop for WorkerTask<T> {
    fn drop(&mut self) {
        drop(self.0.take_back());
    }
}

/// The worker threads, and the jobs that they have not begun.
#[derive(Default)]
struct Workers {
    queue: Mutex<VecDeque<Arc<dyn QueuedWork>>>,
    is_added: Condvar,
}

impl Workers {
    /// The workers of the process; `None` where the host lets us start no thread.
    fn get() -> Option<&'static Self> {
        static WORKERS: OnceLock<Workers> = OnceLock::new();
        static THREADS: OnceLock<usize> = OnceLock::new();
        let workers = WORKERS.get_or_init(Self::default);
        let start = || {
            let thread = thread::Builder::new().name("offshoot-pack".into());
            let run = || {
                cores::use_all();
                workers.work();
            };
            thread.spawn(run).is_ok()
        };
        let threads = THREADS.get_or_init(|| (0..cores::count()).filter(|_| start()).count());
        (*threads > 0).then_some(workers)
    }

    fn add(&self, job: Arc<dyn QueuedWork>) {
        self.queue.lock().push_back(job);
        self.is_added.notify_one();
    }

    fn work(&self) {
        loop {
            let mut queue = self.queue.lock();
            let job = loop {
                match queue.pop_front() {
                    Some(job) => break job,
                    None => self.is_added.wait(&mut queue),
                }
            };
            drop(queue);
            if job.begin() {
                job.run(&|| {});
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_result_is_that_of_its_work() {
        let users: Vec<_> = (0..4)
            .map(|user| {
                thread::spawn(move || {
                    let start = |n| WorkerTask::start(move || user * 1000 + n);
                    let tasks: Vec<_> = (0..500).map(start).collect();
                    for (n, task) in (0..).zip(tasks) {
                        assert_eq!(task.finish(), user * 1000 + n);
                    }
                })
            })
            .collect();
        for user in users {
            user.join().expect("it has its results");
        }
    }

    #[test]
    fn a_panic_reaches_who_wants_the_result_and_nobody_else() {
        let tasks: Vec<_> =
            (0..50).map(|n| WorkerTask::start(move || assert!(n % 2 == 0, "odd"))).collect();
        for (n, task) in tasks.into_iter().enumerate() {
            let result = catch_unwind(AssertUnwindSafe(|| task.finish()));
            assert_eq!(result.is_ok(), n % 2 == 0);
        }
        assert_eq!(WorkerTask::start(|| 7).finish(), 7);
    }

    #[test]
    fn what_nobody_wants_is_not_begun() {
        let count = Arc::new(AtomicUsize::new(0));
        let gate = Arc::new(Mutex::new(()));
        let held = gate.lock();
        // As many as occupy all threads.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let busy: Vec<_> = (0..cores)
            .map(|_| {
                let gate = gate.clone();
                WorkerTask::start(move || drop(gate.lock()))
            })
            .collect();
        for _ in 0..10 {
            let count = count.clone();
            drop(WorkerTask::start(move || count.fetch_add(1, Ordering::Relaxed)));
        }
        drop(held);
        busy.into_iter().for_each(WorkerTask::finish);
        while Workers::get().is_some_and(|workers| !workers.queue.lock().is_empty()) {
            thread::yield_now();
        }
        assert_eq!(count.load(Ordering::Relaxed), 0, "it was done");
    }
}
