//! One run of a program.
//!
//! CPU and memory are what the kernel accounts to the program and the children that it
//! waited for. Work that the kernel does for it in threads of its own, such as
//! decompression for a mounted btrfs, is not in there; the column for the whole machine
//! has it, and everything else that ran meanwhile.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wait4::Wait4;

use crate::Result;

/// What a run took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Run {
    /// From start to end.
    pub(crate) wall: Duration,
    /// What a `sync` took right after it.
    pub(crate) sync: Duration,
    /// CPU time of the program and its children.
    pub(crate) cpu: Duration,
    /// CPU time of the whole machine meanwhile.
    pub(crate) machine: Duration,
    /// The largest resident set of one of its processes, in KiB.
    pub(crate) peak_kib: u64,
}

/// Runs `command` with cold caches.
pub(crate) fn run(command: &mut Command) -> Result<Run> {
    drop_caches()?;
    let name = format!("{command:?}");
    let before = machine_cpu()?;
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{name}: {error}"))?;
    // What it says is kept for a failure; reading it to its end is also what keeps the
    // program from waiting for a full pipe.
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = std::io::Read::read_to_string(&mut stderr, &mut said);
    }
    let used = child.wait4().map_err(|error| format!("{name}: {error}"))?;
    let wall = started.elapsed();
    let machine = machine_cpu()?.saturating_sub(before);
    if !used.status.success() {
        return Err(format!("{name} ended with {}\n{said}", used.status));
    }
    let started = Instant::now();
    rustix::fs::sync();
    Ok(Run {
        wall,
        sync: started.elapsed(),
        cpu: used.rusage.utime + used.rusage.stime,
        machine,
        peak_kib: used.rusage.maxrss / 1024,
    })
}

/// Has the next run read from the disk.
pub(crate) fn drop_caches() -> Result {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3")
        .map_err(|error| format!("dropping caches takes root: {error}"))
}

/// What all cores together have worked since the machine started.
pub(crate) fn machine_cpu() -> Result<Duration> {
    /// `USER_HZ`, which is this on every machine that Linux has an ABI for.
    const TICKS_PER_SECOND: u64 = 100;
    let stat = std::fs::read_to_string("/proc/stat").map_err(|e| format!("/proc/stat: {e}"))?;
    // `cpu user nice system idle iowait irq softirq steal ...`
    let fields: Vec<u64> =
        stat.lines().next().unwrap_or_default().split_whitespace().flat_map(str::parse).collect();
    let busy = fields.iter().take(7).sum::<u64>() - fields.iter().skip(3).take(2).sum::<u64>();
    Ok(Duration::from_millis(busy * 1000 / TICKS_PER_SECOND))
}
