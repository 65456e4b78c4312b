//! Measures one run of a program.
//!
//! CPU and memory are what the kernel charges to the program and to the children that it waited
//! for. They lack the work of kernel threads, such as decompression for a mounted btrfs. The column
//! for the whole machine includes that work, and everything else that runs meanwhile.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wait4::Wait4;

use crate::Result;

/// The costs of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunCosts {
    /// From start to end.
    pub(crate) wall: Duration,
    /// The time of a `sync` right after the run.
    pub(crate) sync: Duration,
    /// CPU time of the program and its children.
    pub(crate) cpu: Duration,
    /// CPU time of the whole machine during the run.
    pub(crate) machine: Duration,
    /// The largest resident set of one of its processes, in KiB.
    pub(crate) peak_kib: u64,
}

/// Runs `command` with cold caches.
pub(crate) fn run(command: &mut Command) -> Result<RunCosts> {
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
    // Reads standard error to its end, so that the program never waits for a full pipe, and so that
    // a failure can show it.
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
    Ok(RunCosts {
        wall,
        sync: started.elapsed(),
        cpu: used.rusage.utime + used.rusage.stime,
        machine,
        peak_kib: used.rusage.maxrss / 1024,
    })
}

/// Drops the caches of the host, so that the next run reads from the disk.
pub(crate) fn drop_caches() -> Result {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3")
        .map_err(|error| format!("dropping caches takes root: {error}"))
}

/// The CPU time of all cores together since the machine started.
pub(crate) fn machine_cpu() -> Result<Duration> {
    /// `USER_HZ`, which is 100 on every architecture of Linux.
    const TICKS_PER_SECOND: u64 = 100;
    let stat = std::fs::read_to_string("/proc/stat").map_err(|e| format!("/proc/stat: {e}"))?;
    // `cpu user nice system idle iowait irq softirq steal ...`
    let fields: Vec<u64> =
        stat.lines().next().unwrap_or_default().split_whitespace().flat_map(str::parse).collect();
    let busy = fields.iter().take(7).sum::<u64>() - fields.iter().skip(3).take(2).sum::<u64>();
    Ok(Duration::from_millis(busy * 1000 / TICKS_PER_SECOND))
}

/// How many bytes of all files the kernel lets wait in memory before a writer waits for the device,
/// as it counts them by default: in percent of the memory that is available.
pub(crate) fn kernel_dirty_bytes() -> Result<u64> {
    let read = |path: &str| std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"));
    let number = |text: &str| text.split_whitespace().find_map(|word| word.parse::<u64>().ok());
    let percent = number(&read("/proc/sys/vm/dirty_ratio")?);
    let memory = read("/proc/meminfo")?;
    let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = available.and_then(number).ok_or("/proc/meminfo has no MemAvailable")?;
    // With 0 a number of bytes is set instead.
    let percent = percent.filter(|&percent| percent > 0).ok_or("vm.dirty_ratio is not set")?;
    Ok((kib << 10) / 100 * percent)
}
