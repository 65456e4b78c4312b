//! The report of a benchmark.

use std::io::Write;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::exit::Result;
use crate::output::{human_size, write_line};
use crate::verbs::statistics::EngineStatistics;
use crate::workload::Round;

/// Time and CPU time since the measurement began.
pub(super) struct Stopwatch {
    started: Instant,
    cpu: Duration,
}

impl Stopwatch {
    /// Begins to measure.
    pub(super) fn start() -> Self {
        Self { started: Instant::now(), cpu: cpu_time() }
    }

    /// The time and the CPU time since then.
    fn read(&self) -> (Duration, Duration) {
        (self.started.elapsed(), cpu_time().saturating_sub(self.cpu))
    }
}

/// The CPU time of all threads of this process until now, in user and kernel mode.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let secs = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(secs, u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// A phase of a benchmark.
pub(super) struct BenchPhase {
    /// The name of the phase; `None` for a round, which has a number.
    pub(super) name: Option<&'static str>,
    /// Its work and time.
    pub(super) round: Round,
}

impl BenchPhase {
    fn json(&self) -> Value {
        let Round { files, time } = self.round;
        let mut value = json!({
            "files": files,
            "seconds": time.as_secs_f64(),
            "files_per_second": per_second(files, time),
        });
        if let Some(name) = self.name {
            value["phase"] = name.into();
        }
        value
    }
}

/// Everything that is reported of a run.
pub(super) struct BenchReport {
    pub(super) title: String,
    /// The settings of the run, for JSON.
    pub(super) settings: Value,
    pub(super) phases: Vec<BenchPhase>,
    /// How long the sync at the end took.
    pub(super) sync: Duration,
    pub(super) stopwatch: Stopwatch,
    pub(super) statistics: EngineStatistics,
}

impl BenchReport {
    /// Writes the report.
    pub(super) fn write(&self, is_json: bool, out: &mut dyn Write) -> Result {
        let (total, cpu) = self.stopwatch.read();
        if !is_json {
            return self.print(total, cpu, out);
        }
        let mut value = self.settings.clone();
        value["rounds"] = self.phases.iter().map(BenchPhase::json).collect();
        value["sync_seconds"] = self.sync.as_secs_f64().into();
        value["total_seconds"] = total.as_secs_f64().into();
        value["files_per_second"] = per_second(self.files(), total).into();
        value["cpu_seconds"] = cpu.as_secs_f64().into();
        value["peak_memory_bytes"] = peak_memory_bytes().into();
        value["statistics"] = serde_json::to_value(&self.statistics)?;
        Ok(write_line(out, &value)?)
    }

    /// The files of all phases. A file that was made and removed counts twice.
    fn files(&self) -> u64 {
        self.phases.iter().map(|phase| phase.round.files).sum()
    }

    fn print(&self, total: Duration, cpu: Duration, out: &mut dyn Write) -> Result {
        writeln!(out, "{}", self.title)?;
        writeln!(out, "{:<8} {:>12} {:>10} {:>12}", "round", "files", "seconds", "files/s")?;
        for (number, BenchPhase { name, round }) in (1..).zip(&self.phases) {
            let name = name.map_or_else(|| number.to_string(), str::to_owned);
            line(out, &name, round.files, round.time)?;
        }
        line(out, "sync", 0, self.sync)?;
        line(out, "total", self.files(), total)?;
        let each = cpu.as_secs_f64() * 1e6 / as_f64(self.files().max(1));
        writeln!(out, "CPU time {:.3} s, {each:.2} us a file", cpu.as_secs_f64())?;
        if let Some(bytes) = peak_memory_bytes() {
            writeln!(out, "peak of memory {}", human_size(bytes))?;
        }
        write!(out, "what the engine did\n{}", &self.statistics)?;
        Ok(())
    }
}

fn line(out: &mut dyn Write, name: &str, files: u64, time: Duration) -> Result {
    let (seconds, speed) = (time.as_secs_f64(), per_second(files, time));
    if files == 0 {
        return Ok(writeln!(out, "{name:<8} {:>12} {seconds:>10.3}", "")?);
    }
    Ok(writeln!(out, "{name:<8} {files:>12} {seconds:>10.3} {speed:>12.0}")?)
}

fn per_second(files: u64, time: Duration) -> f64 {
    as_f64(files) / time.as_secs_f64().max(1e-9)
}

#[expect(clippy::cast_precision_loss, reason = "a speed is not exact")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

/// The peak resident set of this process in bytes, if the host reports it.
fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
