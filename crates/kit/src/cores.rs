//! The CPUs that the threads of an engine run on: those of the thread that opened the first volume
//! of the process.
//!
//! A thread inherits the set of its CPUs from the thread that starts it, and counts only these. A
//! thread that calls the engine can be bound to one CPU. A mount does that with its threads, so
//! that they run beside the programs that they serve. The threads that such a thread starts would
//! all run on that one CPU.

use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

struct Cores {
    count: usize,
    /// `None` where the host does not give it. Then no thread changes its set.
    set: Option<CpuSet>,
}

fn cores() -> &'static Cores {
    static CORES: OnceLock<Cores> = OnceLock::new();
    CORES.get_or_init(|| Cores {
        count: thread::available_parallelism().map_or(1, NonZero::get),
        set: sched_getaffinity(None).ok(),
    })
}

/// Stores the CPUs of this thread for the whole process. Only the first call does something.
pub fn learn() {
    cores();
}

/// The number of these CPUs.
#[must_use]
pub fn count() -> usize {
    cores().count
}

/// Lets this thread, which the engine started, run on all of these CPUs. Where the host refuses
/// that, the thread keeps its set.
pub fn use_all() {
    if let Some(set) = &cores().set {
        let _ = sched_setaffinity(None, set);
    }
}

/// Calls `work` with each number below `count`, on all of these CPUs. Threads take the numbers in
/// ascending order.
pub fn for_each(count: usize, work: &(dyn Fn(usize) + Sync)) {
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            work(index);
        }
    };
    thread::scope(|scope| {
        for _ in 1..self::count().min(count) {
            scope.spawn(|| {
                use_all();
                run();
            });
        }
        run();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The threads that a bound thread starts are not bound.
    #[test]
    fn threads_of_bound_threads_run_everywhere() {
        learn();
        let all = sched_getaffinity(None).expect("the host says");
        let first = (0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).expect("it runs somewhere");
        let bound = thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(first);
            sched_setaffinity(None, &one).expect("it may run there");
            let started = thread::spawn(|| {
                use_all();
                (count(), sched_getaffinity(None))
            });
            started.join().expect("it ends")
        });
        let (count, set) = bound.join().expect("it ends");
        assert_eq!((count, set), (cores().count, Ok(all)));
    }
}
