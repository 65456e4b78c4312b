//! Makes many small files, with ours and with the kernel in turns.
//!
//! Both sides run the same workload (`workload`) on the same disk. Ours is the program with the
//! engine in its process. The kernel's side is a volume over a loop device. The figures of both
//! include the sync at the end. Every run has a new volume. After every run of ours, `proof` checks
//! that the volume holds the acknowledged files.
//!
//! Ours may keep as many bytes that are not stored yet as the kernel may: its `vm.dirty_ratio`, in
//! percent of the memory that is available.
//!
//! Of XFS, the size of the log is that of the option `--log-mib`, or what mkfs takes.
//!
//! Then ours of btrfs runs once with each mechanism switched off, and once on a single core. With
//! more cores, other threads flush and write what the one thread makes. The run on one core shows
//! what one thread does on its own, and two threads are compared with that too.

use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use offshoot_testkit::btrfs::judges;
use serde_json::{Value, json};

use crate::kernel::KernelVolume;
use crate::measure::{drop_caches, kernel_dirty_bytes, machine_cpu};
use crate::ours::ProgramPaths;
use crate::proof::{prove, prove_xfs};
use crate::table::{median, shown, write_values};
use crate::workload::{FsMark, WorkloadNames, dir_name};
use crate::{BenchOptions, Result};

/// Mechanisms, each with the options that switch it off.
const SWITCHES: &[(&str, &[&str])] = &[
    ("no delayed items", &["--no-delayed-items"]),
    ("reserved by item", &["--reserve-by-item"]),
    ("exclusive latches", &["--latching", "before-search"]),
];

/// How the sizes of formatted items are rounded: not at all, and more than usually.
const XFS_SWITCHES: &[(&str, &[&str])] = &[
    ("vectors by 128", &["--shadow-round-bytes", "128"]),
    ("vectors by 4096", &["--shadow-round-bytes", "4096"]),
];

const ONE_CORE: &str = "on one core";

const KERNEL: &str = "kernel";

/// The options of a run.
struct FsMarkJob {
    threads: Vec<u64>,
    files: u64,
    rounds: u64,
    size: usize,
    turns: usize,
    is_proved: bool,
    has_switches: bool,
    is_xfs: bool,
    log_mib: Option<u64>,
    ours: ProgramPaths,
    dir: PathBuf,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let options = BenchOptions::parse(
        args,
        &["--threads", "--files", "--rounds", "--size", "--turns", "--format", "--log-mib"],
        &["--no-proof", "--no-switches"],
    )?;
    let dir = options.dir()?;
    let job = FsMarkJob {
        threads: options.numbers("--threads", &[1, 2, 12])?,
        files: options.number("--files", 100_000)?,
        rounds: options.number("--rounds", 10)?,
        size: usize::try_from(options.number("--size", 0)?).ok()?,
        turns: usize::try_from(options.number("--turns", 3)?).ok()?,
        is_proved: !options.has("--no-proof"),
        has_switches: !options.has("--no-switches"),
        is_xfs: options.is_xfs()?,
        log_mib: options.get("--log-mib").map(str::parse).transpose().ok()?,
        ours: ProgramPaths { offshoot: options.program()?, image: dir.join("fs-mark.img") },
        dir,
    };
    let is_sane = job.threads.iter().all(|&threads| threads > 0) && job.rounds > 0 && job.turns > 0;
    is_sane.then(|| job.run())
}

impl FsMarkJob {
    fn run(&self) -> Result {
        let _judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
        std::fs::create_dir_all(&self.dir).map_err(|e| format!("{}: {e}", self.dir.display()))?;
        println!(
            "{} rounds of {} files of {} bytes by each thread; medians of {} turns, sync included",
            self.rounds, self.files, self.size, self.turns
        );
        println!(
            "{:>7} {:<20} {:>9} {:>15} {:>9} {:>9} {:>9} {:>7} {:>10} {:>11} {:>8} {:>8}",
            "threads",
            "side",
            "files/s",
            "min..max /1000",
            "1st round",
            "best",
            "last",
            "sync s",
            "CPU us/f",
            "machine us/f",
            "peak MiB",
            "x kernel"
        );
        let mut all = Vec::new();
        for &threads in &self.threads {
            let (mut ours, mut kernel) = (Vec::new(), Vec::new());
            for _ in 0..self.turns {
                ours.push(self.ours(threads, "ours", &[], &[])?);
                kernel.push(self.kernel(threads)?);
            }
            let baseline = speed(&kernel);
            print_row(threads, &ours, baseline);
            print_row(threads, &kernel, baseline);
            all.extend(ours.into_iter().chain(kernel));
            if !self.has_switches {
                continue;
            }
            let mut once = |name, under: &[&str], options: &[&str]| -> Result {
                let run = self.ours(threads, name, under, options)?;
                print_row(threads, std::slice::from_ref(&run), baseline);
                all.push(run);
                Ok(())
            };
            once(ONE_CORE, &["taskset", "--cpu-list", "0"], &[])?;
            for (name, options) in if self.is_xfs { XFS_SWITCHES } else { SWITCHES } {
                once(name, &[], options)?;
            }
        }
        print_ratios(&all);
        write_values(&self.dir.join("fs-mark.json"), all)
    }

    fn work(&self, threads: u64) -> FsMark {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        FsMark {
            threads,
            files: self.files,
            rounds: self.rounds,
            size: self.size,
            seed: u64::from(now.subsec_nanos()),
            // Names have room for 32 bits of seconds, which last until 2106.
            began_secs: now.as_secs() & u64::from(u32::MAX),
            has_new_dirs: false,
        }
    }

    fn image_bytes(&self, threads: u64) -> Result<u64> {
        self.work(threads)
            .image_bytes()
            .ok_or_else(|| "these files need more than 1 PiB".to_owned())
    }

    /// Runs the program once. If `under` is not empty, that command starts it.
    fn ours(&self, threads: u64, name: &str, under: &[&str], options: &[&str]) -> Result<Value> {
        let size = self.image_bytes(threads)?;
        let mut args: Vec<String> = [
            ("--threads", threads),
            ("--files", self.files),
            ("--rounds", self.rounds),
            ("--size", self.size as u64),
            ("--image-size", size),
            ("--dirty-bytes", kernel_dirty_bytes()?),
        ]
        .iter()
        .flat_map(|(option, value)| [(*option).to_owned(), value.to_string()])
        .collect();
        args.extend(options.iter().map(|&option| option.to_owned()));
        if self.is_xfs {
            args.extend(["--format".to_owned(), "xfs".to_owned()]);
            args.extend(self.log_mib.map(|mib| format!("--log-size={mib}M")));
        }
        eprintln!("{threads} threads: {name}");
        drop_caches()?;
        let before = machine_cpu()?;
        let mut run = self.ours.run(under, "fs-mark", &args)?;
        run["machine_cpu_seconds"] = machine_cpu()?.saturating_sub(before).as_secs_f64().into();
        run["side"] = name.into();
        if self.is_proved {
            let prove = if self.is_xfs { prove_xfs } else { prove };
            prove(&self.ours.image, self.acknowledged(&run)?)?;
        }
        Ok(run)
    }

    /// The names of the files that a run of ours acknowledged, by directory.
    fn acknowledged(&self, run: &Value) -> Result<Vec<(String, Vec<Vec<u8>>)>> {
        let number = |what: &str| run[what].as_u64().ok_or_else(|| format!("no {what} in {run}"));
        let (seed, began, threads) =
            (number("seed")?, number("began_seconds")?, number("threads")?);
        let rounds = run["rounds"].as_array().map_or(&[][..], Vec::as_slice);
        let files: u64 = rounds.iter().filter_map(|round| round["files"].as_u64()).sum();
        if files != self.files * self.rounds * threads {
            return Err(format!("{files} files were made, and not all that were asked for"));
        }
        Ok((0..threads)
            .map(|thread| {
                let mut names = WorkloadNames::new(seed, began, thread);
                let each = files / threads;
                (dir_name(thread), (0..each).map(|_| names.next().to_vec()).collect())
            })
            .collect())
    }

    /// Runs the workload once on the kernel.
    fn kernel(&self, threads: u64) -> Result<Value> {
        eprintln!("{threads} threads: {KERNEL}");
        let (image, bytes) = (&self.ours.image, self.image_bytes(threads)?);
        let site = if self.is_xfs {
            KernelVolume::xfs(image, bytes, self.log_mib.map(|mib| mib << 20))?
        } else {
            KernelVolume::new(image, bytes)?
        };
        drop_caches()?;
        let (before, started) = (machine_cpu()?, Instant::now());
        let (rounds, sync) = self
            .work(threads)
            .run(&site)
            .map_err(|error| format!("the kernel's volume: {error}"))?;
        let total = started.elapsed().as_secs_f64();
        let files: u64 = rounds.iter().map(|round| round.files).sum();
        let rounds = rounds.iter().map(|round| {
            let seconds = round.time.as_secs_f64();
            let speed = as_f64(round.files) / seconds;
            json!({ "files": round.files, "seconds": seconds, "files_per_second": speed })
        });
        Ok(json!({
            "side": KERNEL,
            "threads": threads,
            "rounds": rounds.collect::<Vec<_>>(),
            "sync_seconds": sync.as_secs_f64(),
            "total_seconds": total,
            "files_per_second": as_f64(files) / total,
            "machine_cpu_seconds": machine_cpu()?.saturating_sub(before).as_secs_f64(),
        }))
    }
}

#[expect(clippy::cast_precision_loss, reason = "a speed is not exact")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

/// The median of the files per second of all runs, with their syncs.
fn speed(runs: &[Value]) -> f64 {
    median(runs.iter().filter_map(|run| run["files_per_second"].as_f64()))
}

/// The median over all runs of `figure`, which gets the files per second of all rounds of a run.
fn of_rounds(runs: &[Value], figure: impl Fn(&[f64]) -> f64) -> f64 {
    median(runs.iter().map(|run| {
        let rounds = run["rounds"].as_array().map_or(&[][..], Vec::as_slice);
        let speeds = rounds.iter().filter_map(|round| round["files_per_second"].as_f64());
        figure(&speeds.collect::<Vec<_>>())
    }))
}

fn best(speeds: &[f64]) -> f64 {
    speeds.iter().copied().fold(0.0, f64::max)
}

fn last(speeds: &[f64]) -> f64 {
    speeds.last().copied().unwrap_or(f64::NAN)
}

fn print_row(threads: u64, runs: &[Value], kernel: f64) {
    let speeds = || runs.iter().filter_map(|run| run["files_per_second"].as_f64());
    let (min, max) = (speeds().fold(f64::MAX, f64::min), speeds().fold(0.0, f64::max));
    let figure = |what: &str| median(runs.iter().filter_map(|run| run[what].as_f64()));
    let a_file = |what: &str| {
        let files =
            |run: &Value| Some(run["files_per_second"].as_f64()? * run["total_seconds"].as_f64()?);
        median(runs.iter().filter_map(|run| Some(run[what].as_f64()? * 1e6 / files(run)?)))
    };
    println!(
        "{threads:>7} {:<20} {:>9.0} {:>15} {:>9.0} {:>9.0} {:>9.0} {:>7.2} {:>10} {:>11.2} {:>8} {:>8.2}",
        runs.first().and_then(|run| run["side"].as_str()).unwrap_or_default(),
        speed(runs),
        format!("{:.0}..{:.0}", min / 1000.0, max / 1000.0),
        of_rounds(runs, |speeds| speeds.first().copied().unwrap_or(f64::NAN)),
        of_rounds(runs, best),
        of_rounds(runs, last),
        figure("sync_seconds"),
        shown(a_file("cpu_seconds"), 2),
        a_file("machine_cpu_seconds"),
        shown(figure("peak_memory_bytes") / f64::from(1 << 20), 1),
        speed(runs) / kernel,
    );
}

/// Prints the ratios that the goals name.
fn print_ratios(all: &[Value]) {
    let of = |side: &str, threads: Option<u64>| -> Vec<Value> {
        let is_threads = |run: &Value| threads.is_none_or(|threads| run["threads"] == threads);
        all.iter().filter(|run| run["side"] == side && is_threads(run)).cloned().collect()
    };
    let last_of_best = of_rounds(&of("ours", None), |speeds| last(speeds) / best(speeds));
    println!("ours: the last round has {:.0} % of the speed of the best", last_of_best * 100.0);
    let two = of("ours", Some(2));
    for (side, place) in [("ours", "that has all cores as well"), (ONE_CORE, "on one core")] {
        let one = of(side, Some(1));
        if !one.is_empty() && !two.is_empty() {
            let ratio = speed(&two) / speed(&one);
            println!("ours: two threads are {ratio:.2} times as fast as one {place}");
        }
    }
}
