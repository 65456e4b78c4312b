//! On which CPUs the threads of the engine run: those of whoever opened the first volume of the
//! process.
//!
//! A thread inherits from the one that starts it where it may run, and counts no other CPUs as
//! there. Threads that call the engine may be bound to one, as those of a mount are, beside the
//! programs that they serve; what they start to be done on all cores would be done on that one.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

struct Cores {
    count: usize,
    /// `None` where the host does not say, and then nothing is changed.
    set: Option<CpuSet>,
}

fn cores() -> &'static Cores {
    static CORES: OnceLock<Cores> = OnceLock::new();
    CORES.get_or_init(|| Cores {
        count: thread::available_parallelism().map_or(1, NonZero::get),
        set: sched_getaffinity(None).ok(),
    })
}

/// Takes those of this thread for good, unless they are known.
pub fn learn() {
    cores();
}

/// How many there are.
#[must_use]
pub fn count() -> usize {
    cores().count
}

/// Lets this thread, which the engine started, run on all of them. Where that is refused it runs
/// where it runs.
pub fn use_all() {
    if let Some(set) = &cores().set {
        let _ = sched_setaffinity(None, set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a bound thread starts is not bound.
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
