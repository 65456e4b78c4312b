//! Data and snapshots, by us and by the kernel in turns.
//!
//! Ours is the library in this process, the kernel's a volume over a loop device with direct I/O,
//! so that what it writes is cached once, as ours is. Both begin with a new volume of default
//! features on a sparse image on the same disk, and have the same compression, forced. Requests are
//! made one after the other, those of a thread.
//!
//! | group | row | what is measured |
//! |---|---|---|
//! | `plain`, `zstd:3`, `zstd:15` | write | a file in requests of 1 MiB, and a sync |
//! | | read | the same, in the same order |
//! | | random read | 4 KiB each, at places all over the file |
//! | | random write | the same, and a sync |
//! | | write, 2 threads | two files that have half as much each, a thread for each, and a sync |
//! | | read, 2 threads | the same |
//! | `direct` | write direct | as write, past the page cache, or leaving nothing in the buffer |
//! | | clone | the whole file into a new one, and a sync |
//! | `snapshots` | snapshots | of a subvolume of many files, one of which is written before each, and a sync |
//!
//! Before every row of reading, and before random writes and clones, ours is opened anew and the
//! kernel's mounted anew, and the host drops its caches, so both read from the disk. Every second
//! sector of the data is text and every other one random. Each begins with what it is (version,
//! file, offset), which the reader compares. What ours wrote is proved at the end of a group:
//! `btrfs check` with checksums of data, and all bytes as the kernel shows them.

mod groups;

use std::path::PathBuf;

use offshoot_testkit::btrfs::judges;
use serde_json::json;

use crate::sides::{Kernel, Ours};
use crate::table::{median, shown, write_values};
use crate::{Options, Result};
use groups::{GROUPS, Row, Work};

/// What is measured.
struct Job {
    work: Work,
    groups: Vec<&'static str>,
    turns: usize,
    dir: PathBuf,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let valued = ["--groups", "--mib", "--random-mib", "--snapshots", "--files", "--turns"];
    let options = Options::parse(args, &valued, &["--no-proof"])?;
    let named = options.get("--groups").map_or_else(|| GROUPS.to_vec(), |n| n.split(',').collect());
    let known = |name| GROUPS.into_iter().find(|&group| group == name);
    let mib =
        |name, default| options.number(name, default).and_then(|n: u64| n.checked_mul(1 << 20));
    let dir = options.dir()?;
    let job = Job {
        work: Work {
            bytes: mib("--mib", 1024)?,
            random_bytes: mib("--random-mib", 64)?,
            snapshots: options.number("--snapshots", 1000)?,
            files: options.number("--files", 10_000)?,
            is_proved: !options.has("--no-proof"),
            image: dir.join("data.img"),
        },
        groups: named.into_iter().map(known).collect::<Option<_>>()?,
        turns: options.number("--turns", 3)?,
        dir,
    };
    let is_sane = job.work.bytes >= 2 << 20 && job.work.files > 0 && job.turns > 0;
    is_sane.then(|| job.run())
}

impl Job {
    fn run(&self) -> Result {
        let _judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
        std::fs::create_dir_all(&self.dir).map_err(|e| format!("{}: {e}", self.dir.display()))?;
        println!(
            "{} MiB, {} MiB of them at random; {} snapshots of {} files; medians of {} turns, sync included",
            self.work.bytes >> 20,
            self.work.random_bytes >> 20,
            self.work.snapshots,
            self.work.files,
            self.turns
        );
        println!(
            "{:<10} {:<18} {:>9} {:>15} {:>9} {:>15} {:>8}",
            "group", "row", "ours s", "min..max", "kernel s", "min..max", "x kernel"
        );
        let mut all = Vec::new();
        for &group in &self.groups {
            let (mut ours, mut kernel) = (Vec::new(), Vec::new());
            for turn in 0..self.turns {
                eprintln!("{group}, turn {} of {}: ours", turn + 1, self.turns);
                ours.push(self.work.run::<Ours>(group)?);
                eprintln!("{group}, turn {} of {}: kernel", turn + 1, self.turns);
                kernel.push(self.work.run::<Kernel>(group)?);
            }
            for (index, &Row { name, .. }) in ours[0].iter().enumerate() {
                let seconds = |turns: &[Vec<Row>]| -> Vec<f64> {
                    turns.iter().map(|rows| rows[index].time.as_secs_f64()).collect()
                };
                let (ours, kernel) = (seconds(&ours), seconds(&kernel));
                print_row(group, name, &ours, &kernel);
                all.push(
                    json!({ "group": group, "row": name, "ours_s": ours, "kernel_s": kernel }),
                );
            }
        }
        write_values(&self.dir.join("data.json"), all)
    }
}

fn print_row(group: &str, name: &str, ours: &[f64], kernel: &[f64]) {
    let middle = |times: &[f64]| median(times.iter().copied());
    let spread = |times: &[f64]| {
        let (min, max) =
            times.iter().fold((f64::MAX, 0.0_f64), |(min, max), &t| (min.min(t), max.max(t)));
        format!("{min:.2}..{max:.2}")
    };
    println!(
        "{group:<10} {name:<18} {:>9} {:>15} {:>9} {:>15} {:>8}",
        shown(middle(ours), 2),
        spread(ours),
        shown(middle(kernel), 2),
        spread(kernel),
        shown(middle(kernel) / middle(ours), 2),
    );
}
