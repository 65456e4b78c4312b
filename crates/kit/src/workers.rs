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

struct WorkerJob<T> {
    state: Mutex<JobState<T>>,
    is_done: Condvar,
}

enum JobState<T> {
    Waiting(Box<dyn FnOnce() -> T + Send>),
    /// A thread runs it, or the caller has dropped it or taken its result.
    Taken,
    Done(Result<T, Box<dyn Any + Send>>),
}

/// What a worker sees of a job.
trait QueuedWork: Send + Sync {
    fn run(&self);
}

impl<T: Send> QueuedWork for WorkerJob<T> {
    fn run(&self) {
        let Some(work) = self.take() else { return };
        let result = catch_unwind(AssertUnwindSafe(work));
        *self.state.lock() = JobState::Done(result);
        self.is_done.notify_all();
    }
}

impl<T> WorkerJob<T> {
    /// The work, if no thread has begun it and the caller has not dropped it.
    fn take(&self) -> Option<Box<dyn FnOnce() -> T + Send>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, JobState::Taken) {
            JobState::Waiting(work) => Some(work),
            other => {
                *state = other;
                None
            }
        }
    }
}

impl<T: Send + 'static> WorkerTask<T> {
    /// Hands `work` to the workers.
    pub fn start(work: impl FnOnce() -> T + Send + 'static) -> Self {
        let state = Mutex::new(JobState::Waiting(Box::new(work) as Box<_>));
        let job = Arc::new(WorkerJob { state, is_done: Condvar::new() });
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
    pub fn finish(self) -> T {
        if let Some(work) = self.0.take() {
            return work();
        }
        let mut state = self.0.state.lock();
        loop {
            match std::mem::replace(&mut *state, JobState::Taken) {
                JobState::Done(result) => {
                    return result.unwrap_or_else(|panic| resume_unwind(panic));
                }
                other => *state = other,
            }
            self.0.is_done.wait(&mut state);
        }
    }
}

impl<T> Drop for WorkerTask<T> {
    fn drop(&mut self) {
        drop(self.0.take());
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
            job.run();
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
