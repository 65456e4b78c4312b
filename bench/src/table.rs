//! Prints medians of several runs, and writes all runs as JSON.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::Result;
use crate::measure::RunCosts;

/// One side of one job: all its runs.
#[derive(Debug)]
pub(crate) struct SideRuns {
    /// The job, which several sides run.
    pub(crate) job: String,
    /// The name of the side.
    pub(crate) name: String,
    /// Its runs.
    pub(crate) runs: Vec<RunCosts>,
}

impl SideRuns {
    fn median(&self, figure: impl Fn(&RunCosts) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    fn wall(&self) -> f64 {
        self.median(|run| run.wall.as_secs_f64())
    }

    fn spread(&self) -> (f64, f64) {
        let walls = self.runs.iter().map(|run| run.wall.as_secs_f64());
        (walls.clone().fold(f64::MAX, f64::min), walls.fold(0.0, f64::max))
    }

    fn json(&self) -> Value {
        let seconds = |figure: fn(&RunCosts) -> Duration| -> Vec<f64> {
            self.runs.iter().map(|run| figure(run).as_secs_f64()).collect()
        };
        json!({
            "job": self.job,
            "side": self.name,
            "wall_s": seconds(|run| run.wall),
            "sync_s": seconds(|run| run.sync),
            "cpu_s": seconds(|run| run.cpu),
            "machine_cpu_s": seconds(|run| run.machine),
            "peak_kib": self.runs.iter().map(|run| run.peak_kib).collect::<Vec<_>>(),
        })
    }
}

/// Prints the table. The first side of every job is ours. The last column is the time of a side
/// divided by ours: 2.00 takes twice as long.
pub(crate) fn print(sides: &[SideRuns]) {
    println!(
        "{:<18} {:<24} {:>8} {:>15} {:>8} {:>8} {:>9} {:>9} {:>8}",
        "job", "side", "time s", "min..max", "sync s", "CPU s", "machine s", "peak MiB", "x ours"
    );
    for side in sides {
        let ours = sides.iter().find(|one| one.job == side.job).map_or(f64::NAN, SideRuns::wall);
        let (min, max) = side.spread();
        println!(
            "{:<18} {:<24} {:>8.2} {:>15} {:>8.2} {:>8.2} {:>9.2} {:>9.1} {:>8.2}",
            side.job,
            side.name,
            side.wall(),
            format!("{min:.2}..{max:.2}"),
            side.median(|run| run.sync.as_secs_f64()),
            side.median(|run| run.cpu.as_secs_f64()),
            side.median(|run| run.machine.as_secs_f64()),
            side.median(|run| f64::from(u32::try_from(run.peak_kib).unwrap_or(u32::MAX))) / 1024.0,
            side.wall() / ours,
        );
    }
}

/// The value in the middle, or the mean of the two in the middle.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[middle],
        _ => values[middle - 1].midpoint(values[middle]),
    }
}

/// A figure with this many decimal places, or `-` if it is not finite.
pub(crate) fn shown(figure: f64, places: usize) -> String {
    if figure.is_finite() { format!("{figure:.places$}") } else { "-".to_owned() }
}

/// Writes all runs of all sides to `path`.
pub(crate) fn write_json(path: &Path, sides: &[SideRuns]) -> Result {
    write_values(path, sides.iter().map(SideRuns::json).collect())
}

/// Writes values to `path`, as an array.
pub(crate) fn write_values(path: &Path, values: Vec<Value>) -> Result {
    let text = serde_json::to_string_pretty(&Value::Array(values)).map_err(|e| e.to_string())?;
    let failed = |error| format!("{}: {error}", path.display());
    path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
    std::fs::write(path, text + "\n").map_err(failed)
}
