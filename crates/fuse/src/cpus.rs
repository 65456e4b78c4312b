//! The CPUs that the machine can ever have. The kernel puts a request into the queue of the CPU
//! that the request is made on. It sends no request over io_uring before every queue is served,
//! also those of CPUs that are absent.

use std::io;
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The number of queues.
pub(crate) fn queues() -> io::Result<u16> {
    let path = "/sys/devices/system/cpu/possible";
    let text = std::fs::read_to_string(path)?;
    length(text.trim())
        .filter(|&count| count > 0)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{path} says {text:?}")))
}

/// How many numbers a list has: 5 for `0-3,8`.
fn length(list: &str) -> Option<u16> {
    let ranges = list.split(',').map(|range| {
        let (first, end) = range.split_once('-').unwrap_or((range, range));
        end.parse::<u16>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    });
    ranges.sum()
}

/// The CPUs that a thread of a queue runs on. On another CPU it serves the queue more slowly.
pub(crate) struct QueueCpus {
    /// The CPU of the queue, where its requests are made.
    own: CpuSet,
    all: Option<CpuSet>,
    is_bound: bool,
}

impl QueueCpus {
    /// For a thread that serves `queue`, and may run on `all` while it is not bound.
    pub(crate) fn new(queue: u16, all: Option<CpuSet>) -> Self {
        let mut own = CpuSet::new();
        if usize::from(queue) < CpuSet::MAX_CPU {
            own.set(usize::from(queue));
        }
        Self { own, all, is_bound: false }
    }

    /// Binds the thread to the CPU of its queue, or lets it go.
    pub(crate) fn bind(&mut self, is_bound: bool) {
        if let Some(all) = self.all.as_ref().filter(|_| is_bound != self.is_bound) {
            let _ = sched_setaffinity(None, if is_bound { &self.own } else { all });
            self.is_bound = is_bound;
        }
    }
}

/// How many CPUs the process may use.
pub(crate) fn usable() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The CPUs that this thread may run on.
pub(crate) fn all() -> Option<CpuSet> {
    sched_getaffinity(None).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        for (list, expected) in [("0", 1), ("0-1", 2), ("0-3,8", 5), ("0,2-2,5-7", 5)] {
            assert_eq!(length(list), Some(expected), "{list}");
        }
        for bad in ["", "a", "3-1", "0-65535,1", "0-", "-1", "0,,1"] {
            assert_eq!(length(bad), None, "{bad}");
        }
        assert!(queues().is_ok());
    }
}
