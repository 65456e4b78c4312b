//! Syncs a large directory, with ours and with the kernel in turns.
//!
//! Both sides run the same workload (`workload`). It adds a million files and syncs the directory.
//! Then it syncs the whole volume, removes a thousand of the files, and syncs the directory again.
//! No timer commits, so the first fsync has to write all new files. The kernel's volume is on the
//! same disk, and mounted as in the test case of the kernel's patch. A second row of ours logs item
//! by item, as the kernel did before that patch. Every run has a new volume. After every run of
//! ours, `proof` checks that the right files are left.

use std::path::PathBuf;

use offshoot_testkit::btrfs::judges;
use serde_json::{Value, json};

use crate::kernel::KernelVolume;
use crate::measure::drop_caches;
use crate::ours::ProgramPaths;
use crate::proof::prove;
use crate::table::{median, shown, write_values};
use crate::workload::{DirFsync, dir_name};
use crate::{BenchOptions, Result};

const KERNEL: &str = "kernel";

/// The option with which the program logs item by item, instead of copying runs of items.
const BY_ITEM: &str = "log-by-item";

/// The options of a run.
struct DirFsyncJob {
    work: DirFsync,
    node_sizes: Vec<u32>,
    turns: usize,
    is_proved: bool,
    ours: ProgramPaths,
    dir: PathBuf,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let valued = ["--files", "--deletes", "--node-sizes", "--turns"];
    let options = BenchOptions::parse(args, &valued, &["--no-proof"])?;
    let dir = options.dir()?;
    let job = DirFsyncJob {
        work: DirFsync {
            files: options.number("--files", 1_000_000)?,
            deletes: options.number("--deletes", 1000)?,
        },
        node_sizes: options.numbers("--node-sizes", &[16384, 65536])?,
        turns: options.number("--turns", 3)?,
        is_proved: !options.has("--no-proof"),
        ours: ProgramPaths { offshoot: options.program()?, image: dir.join("dir-fsync.img") },
        dir,
    };
    let DirFsync { files, deletes } = job.work;
    ((1..=files).contains(&deletes) && job.turns > 0).then(|| job.run())
}

impl DirFsyncJob {
    fn run(&self) -> Result {
        let _judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
        std::fs::create_dir_all(&self.dir).map_err(|e| format!("{}: {e}", self.dir.display()))?;
        println!(
            "{} files are added, then {} removed; medians of {} turns",
            self.work.files, self.work.deletes, self.turns
        );
        println!(
            "{:>6} {:<12} {:>7} {:>12} {:>15} {:>8} {:>7} {:>12} {:>15} {:>8} {:>8}",
            "nodes",
            "side",
            "add s",
            "fsync 1 ms",
            "min..max",
            "x kernel",
            "sync s",
            "fsync 2 ms",
            "min..max",
            "x kernel",
            "commits"
        );
        let mut all = Vec::new();
        for &node_size in &self.node_sizes {
            let (mut ours, mut by_item, mut kernel) = (Vec::new(), Vec::new(), Vec::new());
            for turn in 0..self.turns {
                eprintln!("nodes of {node_size}, turn {} of {}", turn + 1, self.turns);
                ours.push(self.ours(node_size, None)?);
                by_item.push(self.ours(node_size, Some(BY_ITEM))?);
                kernel.push(self.kernel(node_size)?);
            }
            print_row(node_size, &ours, &kernel);
            print_row(node_size, &by_item, &kernel);
            print_row(node_size, &kernel, &kernel);
            all.extend([ours, by_item, kernel].into_iter().flatten());
        }
        write_values(&self.dir.join("dir-fsync.json"), all)
    }

    /// Runs the program once.
    fn ours(&self, node_size: u32, without: Option<&str>) -> Result<Value> {
        let DirFsync { files, deletes } = self.work;
        let values =
            [("--files", files), ("--deletes", deletes), ("--nodesize", u64::from(node_size))];
        let args: Vec<String> = values
            .iter()
            .flat_map(|(option, value)| [(*option).to_owned(), value.to_string()])
            .chain(without.map(|name| format!("--{name}")))
            .collect();
        drop_caches()?;
        let mut run = self.ours.run(&[], "dir-fsync", &args)?;
        run["side"] = without.unwrap_or("ours").into();
        if self.is_proved {
            let left = (1..=files).filter(|&number| !self.work.removes(number));
            let names = left.map(|number| DirFsync::name(number).into_bytes()).collect();
            prove(&self.ours.image, vec![(dir_name(0), names)])?;
        }
        Ok(run)
    }

    /// Runs the workload once on the kernel, after a run of the program.
    fn kernel(&self, node_size: u32) -> Result<Value> {
        // The same size as the image that the program has made.
        let size = std::fs::metadata(&self.ours.image)
            .map_err(|error| format!("{}: {error}", self.ours.image.display()))?
            .len();
        let nodes = node_size.to_string();
        let mkfs = ["--nodesize", &nodes];
        let kernel = KernelVolume::with_options(&self.ours.image, size, &mkfs, "ssd,commit=300")?;
        drop_caches()?;
        let (rounds, sync) =
            self.work.run(&kernel).map_err(|error| format!("the kernel's volume: {error}"))?;
        let rounds = DirFsync::PHASES.into_iter().zip(rounds).map(|(phase, round)| {
            json!({ "phase": phase, "files": round.files, "seconds": round.time.as_secs_f64() })
        });
        Ok(json!({
            "side": KERNEL,
            "workload": "dir-fsync",
            "files": self.work.files,
            "deletes": self.work.deletes,
            "node_size": node_size,
            "rounds": rounds.collect::<Vec<_>>(),
            "sync_seconds": sync.as_secs_f64(),
        }))
    }
}

/// The time of a phase in each run, in seconds.
fn seconds(runs: &[Value], phase: &str) -> Vec<f64> {
    let of_run = |run: &Value| {
        let mut rounds = run["rounds"].as_array()?.iter();
        rounds.find(|round| round["phase"] == phase)?["seconds"].as_f64()
    };
    runs.iter().filter_map(of_run).collect()
}

fn print_row(node_size: u32, runs: &[Value], kernel: &[Value]) {
    let middle = |runs: &[Value], phase: &str| median(seconds(runs, phase).into_iter());
    // In milliseconds, with the kernel's time divided by it.
    let fsync = |phase: &str| {
        let times = seconds(runs, phase);
        let min = times.iter().copied().fold(f64::MAX, f64::min) * 1e3;
        let max = times.iter().copied().fold(0.0, f64::max) * 1e3;
        let ratio = middle(kernel, phase) / middle(runs, phase);
        let spread = format!("{min:.1}..{max:.1}");
        format!("{:>12.1} {spread:>15} {ratio:>8.2}", middle(runs, phase) * 1e3)
    };
    let commits = median(runs.iter().filter_map(|run| run["statistics"]["commits"].as_f64()));
    println!(
        "{node_size:>6} {:<12} {:>7.2} {} {:>7.2} {} {:>8}",
        runs.first().and_then(|run| run["side"].as_str()).unwrap_or_default(),
        middle(runs, "add"),
        fsync("fsync 1"),
        middle(runs, "sync 1"),
        fsync("fsync 2"),
        shown(commits, 0),
    );
}
