//! Appends 4 KiB to a file and syncs it, with ours and with the kernel in turns.
//!
//! Several threads work at once, each on a file of its own. Ours is the library in this process.
//! The kernel's side is a volume over a loop device with direct I/O. Both images are sparse files
//! in the same directory, so an fsync on either side ends with the same flush of the same disk.
//! Each run has a new volume with default features, of btrfs or XFS.
//!
//! The time of an fsync runs from before its write to its return. The table has the median over all
//! turns of the fsyncs per second and of the percentiles, and the longest time of all. After each
//! run, the data of ours is checked by `btrfs check` with checksums of data or by `xfs_repair`, and
//! byte by byte through a mount of the kernel.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use offshoot_testkit::btrfs::judges;
use serde_json::{Value, json};

use crate::content::{SECTOR, VersionedContent, verify};
use crate::formats::{BenchFormat, Btrfs, Xfs};
use crate::sides::{ComparedVolume, LibraryVolume, MountedVolume, WriteWay};
use crate::table::{median, shown, write_values};
use crate::{BenchOptions, Result};

/// The percentiles, by their names.
const PERCENTILES: [(&str, f64); 4] =
    [("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999), ("max_ms", 1.0)];

/// The options of a run.
struct FsyncJob {
    threads: Vec<u64>,
    /// The number of fsyncs of all threads together.
    fsyncs: u64,
    turns: usize,
    is_proved: bool,
    is_xfs: bool,
    image: PathBuf,
    dir: PathBuf,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let valued = ["--threads", "--fsyncs", "--turns", "--format"];
    let options = BenchOptions::parse(args, &valued, &["--no-proof"])?;
    let dir = options.dir()?;
    let job = FsyncJob {
        threads: options.numbers("--threads", &[1, 2, 4, 8, 16])?,
        fsyncs: options.number("--fsyncs", 4000)?,
        turns: options.number("--turns", 3)?,
        is_proved: !options.has("--no-proof"),
        is_xfs: options.is_xfs()?,
        image: dir.join("fsync.img"),
        dir,
    };
    let is_sane = job.threads.iter().all(|threads| (1..=job.fsyncs).contains(threads));
    let run = || if job.is_xfs { job.run::<Xfs>() } else { job.run::<Btrfs>() };
    (is_sane && job.turns > 0).then(run)
}

impl FsyncJob {
    fn run<F: BenchFormat + Sync>(&self) -> Result {
        let _judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
        std::fs::create_dir_all(&self.dir).map_err(|e| format!("{}: {e}", self.dir.display()))?;
        println!(
            "{} times 4 KiB appended and synced by all threads together; medians of {} turns",
            self.fsyncs, self.turns
        );
        println!(
            "{:>7} {:<8} {:>9} {:>15} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}",
            "threads",
            "side",
            "fsyncs/s",
            "min..max",
            "p50 ms",
            "p99 ms",
            "p99.9 ms",
            "max ms",
            "commits",
            "x kernel"
        );
        let mut all = Vec::new();
        for &threads in &self.threads {
            let (mut ours, mut kernel) = (Vec::new(), Vec::new());
            for turn in 0..self.turns {
                eprintln!("{threads} threads, turn {} of {}", turn + 1, self.turns);
                ours.push(self.one::<LibraryVolume<F>>("ours", threads)?);
                kernel.push(self.one::<MountedVolume<F>>("kernel", threads)?);
            }
            print_row(threads, &ours, &kernel);
            print_row(threads, &kernel, &kernel);
            all.extend(ours.into_iter().chain(kernel));
        }
        write_values(&self.dir.join("fsync.json"), all)
    }

    /// Runs one side once.
    fn one<S: ComparedVolume>(&self, name: &str, threads: u64) -> Result<Value> {
        let each = self.fsyncs / threads;
        S::make(&self.image, (2 << 30) + 16 * self.fsyncs * SECTOR as u64)?;
        let side = S::open_cold(&self.image, None)?;
        let files: Vec<S::File> =
            (0..threads).map(|number| side.create(&file_name(number))).collect::<Result<_>>()?;
        side.sync()?;
        let content = VersionedContent::new(threads);
        let (commits, started) = (side.commits(), Instant::now());
        let mut times = std::thread::scope(|scope| {
            let (side, content) = (&side, &content);
            let workers: Vec<_> = (0..)
                .zip(&files)
                .map(|(number, file)| {
                    scope.spawn(move || append(side, file, number, each, content))
                })
                .collect();
            let ends = workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            ends.collect::<Result<Vec<_>>>()
        })?
        .concat();
        let took = started.elapsed();
        let commits = side.commits().zip(commits).map(|(after, before)| after - before);
        drop((files, side));
        if S::IS_OURS && self.is_proved {
            self.prove::<S::Format>(threads, each)?;
        }
        times.sort_unstable();
        let mut run = json!({
            "side": name,
            "threads": threads,
            "fsyncs": times.len(),
            "seconds": took.as_secs_f64(),
            "fsyncs_per_second": as_f64(times.len()) / took.as_secs_f64(),
            "commits": commits,
        });
        for (name, part) in PERCENTILES {
            run[name] = (percentile(&times, part).as_secs_f64() * 1e3).into();
        }
        Ok(run)
    }

    /// Checks the volume, and that the files hold the appended data.
    fn prove<F: BenchFormat>(&self, threads: u64, each: u64) -> Result {
        F::check(&self.image)?;
        let mount = F::mount(&self.image, "ro")?;
        for number in 0..threads {
            let path = mount.path().join(file_name(number));
            let failed = |error: std::io::Error| format!("{}: {error}", path.display());
            let file = File::open(&path).map_err(failed)?;
            let len = file.metadata().map_err(failed)?.len();
            if len != each * SECTOR as u64 {
                return Err(format!("{} is {len} bytes long", path.display()));
            }
            let mut sector = [0; SECTOR];
            for offset in (0..len).step_by(SECTOR) {
                file.read_exact_at(&mut sector, offset).map_err(failed)?;
                verify(index(number), offset, &sector)?;
            }
        }
        Ok(())
    }
}

fn file_name(number: u64) -> String {
    format!("file{number}")
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("a number of a thread")
}

/// Appends `count` sectors to a file, and syncs it after each. Returns the time of each.
fn append<S: ComparedVolume>(
    side: &S,
    file: &S::File,
    number: u64,
    count: u64,
    content: &VersionedContent,
) -> Result<Vec<Duration>> {
    let mut sector = [0; SECTOR];
    let one = |at: u64| {
        content.fill(index(number), at * SECTOR as u64, 1, &mut sector);
        let started = Instant::now();
        side.write(file, at * SECTOR as u64, &sector, WriteWay::Buffered)?;
        side.fsync(file)?;
        Ok(started.elapsed())
    };
    (0..count).map(one).collect()
}

/// The time that a fraction `part` of the sorted times does not exceed: with 0.5 the median.
fn percentile(times: &[Duration], part: f64) -> Duration {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a part of a length is one"
    )]
    let rank = (as_f64(times.len()) * part).ceil() as usize;
    times[rank.clamp(1, times.len()) - 1]
}

#[expect(clippy::cast_precision_loss, reason = "a speed is not exact")]
fn as_f64(number: usize) -> f64 {
    number as f64
}

fn print_row(threads: u64, runs: &[Value], kernel: &[Value]) {
    let figures = |runs: &[Value], what: &str| -> Vec<f64> {
        runs.iter().filter_map(|run| run[what].as_f64()).collect()
    };
    let middle = |runs: &[Value], what: &str| median(figures(runs, what).into_iter());
    let speeds = figures(runs, "fsyncs_per_second");
    let (min, max) = speeds
        .iter()
        .fold((f64::MAX, 0.0_f64), |(min, max), &speed| (min.min(speed), max.max(speed)));
    println!(
        "{threads:>7} {:<8} {:>9.0} {:>15} {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>9} {:>8.2}",
        runs.first().and_then(|run| run["side"].as_str()).unwrap_or_default(),
        middle(runs, "fsyncs_per_second"),
        format!("{min:.0}..{max:.0}"),
        middle(runs, "p50_ms"),
        middle(runs, "p99_ms"),
        middle(runs, "p999_ms"),
        figures(runs, "max_ms").into_iter().fold(0.0, f64::max),
        shown(middle(runs, "commits"), 0),
        middle(runs, "fsyncs_per_second") / middle(kernel, "fsyncs_per_second"),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_times_that_there_are() {
        let times: Vec<_> = (1..=1000).map(Duration::from_millis).collect();
        let found = PERCENTILES.map(|(_, part)| percentile(&times, part).as_millis());
        assert_eq!(found, [500, 990, 999, 1000]);
        let found = PERCENTILES.map(|(_, part)| percentile(&times[..1], part).as_millis());
        assert_eq!(found, [1; 4]);
    }
}
