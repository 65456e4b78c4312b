//! The CPUs that the machine may ever have. The kernel puts a request into the queue of the CPU
//! that it is made on, and sends none over io_uring before all queues are served, those of CPUs
//! that are not there among them.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The number of queues.
pub(crate) fn queues() -> io::Result<u16> {
    let path = "/sys/devices/system/cpu/possible";
    let text = std::fs::read_to_string(path)?;
    length(text.trim())
        .filter(|&count| count > 0)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{path} says {text:?}")))
}

/// How many numbers a list has, such as `0-3,8`.
fn length(list: &str) -> Option<u16> {
    let ranges = list.split(',').map(|range| {
        let (first, end) = range.split_once('-').unwrap_or((range, range));
        end.parse::<u16>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    });
    ranges.sum()
}

/// Where a thread runs that serves a queue. Wherever it runs it serves it, only slower.
pub(crate) struct Place {
    /// Where the requests of the queue are made, and where it could run at first.
    own: CpuSet,
    all: Option<CpuSet>,
    is_bound: bool,
}

impl Place {
    /// That of a thread which serves `queue` and may run on `all`, as long as it is not bound.
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

/// Where this thread may run.
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
