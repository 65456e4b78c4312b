//! Makes small files until no space is left, and removes them, with ours and with the kernel in
//! turns.
//!
//! Both sides run the same workload (`workload`) on volumes of the same size. One run of ours stops
//! when the volume is full, and `proof` checks that the volume holds the acknowledged files. After
//! the other runs of ours it checks that the volume is empty. The table shows the time that 99.9 %
//! of our reservations of space stay below.
//!
//! There are two variants: files of 1 KiB, all buffered, and files of 2 KiB, of which every second
//! is written directly.

use std::path::PathBuf;

use offshoot_testkit::btrfs::judges;
use serde_json::{Value, json};

use crate::kernel::KernelVolume;
use crate::measure::drop_caches;
use crate::ours::ProgramPaths;
use crate::proof::prove;
use crate::table::{median, shown, write_values};
use crate::workload::{Enospc, Round, dir_name, timed_sync};
use crate::{BenchOptions, Result};

/// Mechanisms, each with the options that switch it off.
const SWITCHES: [(&str, &[&str]); 3] = [
    ("no delayed items", &["--no-delayed-items"]),
    ("reserved by item", &["--reserve-by-item"]),
    ("two commits a cycle", &["--commits-per-cycle", "2"]),
];

const KERNEL: &str = "kernel";

/// The options of a run.
struct EnospcJob {
    work: Enospc,
    size_bytes: u64,
    turns: usize,
    ours: ProgramPaths,
    dir: PathBuf,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let options =
        BenchOptions::parse(args, &["--mib", "--workers", "--file-size", "--turns"], &[])?;
    let dir = options.dir()?;
    let mut job = EnospcJob {
        work: Enospc {
            workers: options.number("--workers", 8)?,
            size: usize::try_from(options.number("--file-size", 1024)?).ok()?,
            is_half_direct: false,
        },
        size_bytes: options.number("--mib", 256_u64)?.checked_mul(1 << 20)?,
        turns: usize::try_from(options.number("--turns", 3)?).ok()?,
        ours: ProgramPaths { offshoot: options.program()?, image: dir.join("enospc.img") },
        dir,
    };
    (job.work.workers > 0 && job.turns > 0).then(|| job.run())
}

impl EnospcJob {
    fn run(&mut self) -> Result {
        let _judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
        std::fs::create_dir_all(&self.dir).map_err(|e| format!("{}: {e}", self.dir.display()))?;
        let mut all = self.variant()?;
        self.work = Enospc { size: 2 * self.work.size, is_half_direct: true, ..self.work };
        all.extend(self.variant()?);
        write_values(&self.dir.join("enospc.json"), all)
    }

    /// Runs all sides of one variant, and returns all runs.
    fn variant(&self) -> Result<Vec<Value>> {
        let Enospc { workers, size, is_half_direct } = self.work;
        println!(
            "{workers} workers, files of {size} bytes{}, on {} MiB; medians of {} turns",
            if is_half_direct { ", half of them direct" } else { "" },
            self.size_bytes >> 20,
            self.turns
        );
        println!(
            "{:<20} {:>8} {:>9} {:>9} {:>7} {:>9} {:>8} {:>12} {:>12} {:>12}",
            "side",
            "files",
            "fill s",
            "remove s",
            "sync s",
            "CPU s",
            "commits",
            "99.9 % below",
            "kernel/fill",
            "kernel/remove"
        );
        self.prove_what_a_full_volume_holds()?;
        let (mut ours, mut kernel) = (Vec::new(), Vec::new());
        for _ in 0..self.turns {
            ours.push(self.ours("ours", &[])?);
            kernel.push(self.kernel()?);
        }
        print_row(&ours, &kernel);
        print_row(&kernel, &kernel);
        let mut all = [ours, kernel.clone()].concat();
        for (name, options) in SWITCHES {
            let run = self.ours(name, options)?;
            print_row(std::slice::from_ref(&run), &kernel);
            all.push(run);
        }
        Ok(all)
    }

    fn program(&self, options: &[&str]) -> Result<Value> {
        let values = [
            ("--workers", self.work.workers),
            ("--file-size", self.work.size as u64),
            ("--size", self.size_bytes),
        ];
        let mut args: Vec<String> = values
            .iter()
            .flat_map(|(option, value)| [(*option).to_owned(), value.to_string()])
            .collect();
        args.extend(self.work.is_half_direct.then(|| "--half-direct".to_owned()));
        args.extend(options.iter().map(|&option| option.to_owned()));
        drop_caches()?;
        self.ours.run(&[], "enospc", &args)
    }

    fn prove_what_a_full_volume_holds(&self) -> Result {
        eprintln!("a volume that stays full");
        let run = self.program(&["--keep"])?;
        let counts = run["files_of_workers"].as_array().map_or(&[][..], Vec::as_slice);
        let names = |count: &Value| {
            (0..count.as_u64().unwrap_or_default()).map(|n| Enospc::name(n).into_bytes()).collect()
        };
        prove(
            &self.ours.image,
            (0..).zip(counts).map(|(worker, count)| (dir_name(worker), names(count))).collect(),
        )
    }

    /// Runs the program once.
    fn ours(&self, name: &str, options: &[&str]) -> Result<Value> {
        eprintln!("{name}");
        let mut run = self.program(options)?;
        run["side"] = name.into();
        let empty = (0..self.work.workers).map(|worker| (dir_name(worker), Vec::new()));
        prove(&self.ours.image, empty.collect())?;
        Ok(run)
    }

    /// Runs the workload once on the kernel.
    fn kernel(&self) -> Result<Value> {
        eprintln!("{KERNEL}");
        let site = KernelVolume::new(&self.ours.image, self.size_bytes)?;
        drop_caches()?;
        let failed = |error| format!("the kernel's volume: {error}");
        Enospc::prepare(&site).map_err(failed)?;
        let mut workers = self.work.workers(&site).map_err(failed)?;
        let fill = self.work.fill(&site, &mut workers).map_err(failed)?;
        let remove = Enospc::remove(&site, &mut workers).map_err(failed)?;
        let sync = timed_sync(&site).map_err(failed)?;
        let phase = |name: &str, round: Round| json!({ "phase": name, "files": round.files, "seconds": round.time.as_secs_f64() });
        Ok(json!({
            "side": KERNEL,
            "file_size": self.work.size,
            "half_direct": self.work.is_half_direct,
            "rounds": [phase("fill", fill), phase("remove", remove)],
            "sync_seconds": sync.as_secs_f64(),
        }))
    }
}

fn print_row(runs: &[Value], kernel: &[Value]) {
    let figure = |figure: &dyn Fn(&Value) -> &Value| {
        median(runs.iter().filter_map(|run| figure(run).as_f64()))
    };
    let of_kernel = |phase: usize| {
        median(kernel.iter().filter_map(|run| run["rounds"][phase]["seconds"].as_f64()))
    };
    let (fill, remove) =
        (figure(&|run| &run["rounds"][0]["seconds"]), figure(&|run| &run["rounds"][1]["seconds"]));
    println!(
        "{:<20} {:>8.0} {fill:>9.2} {remove:>9.2} {:>7.2} {:>9} {:>8} {:>12} {:>12.1} {:>12.1}",
        runs.first().and_then(|run| run["side"].as_str()).unwrap_or_default(),
        figure(&|run| &run["rounds"][0]["files"]),
        figure(&|run| &run["sync_seconds"]),
        shown(figure(&|run| &run["cpu_seconds"]), 2),
        shown(figure(&|run| &run["statistics"]["commits"]), 0),
        shown(figure(&|run| &run["statistics"]["reservations"]["p999_below_us"]) / 1000.0, 2)
            + " ms",
        of_kernel(0) / fill,
        of_kernel(1) / remove,
    );
}
