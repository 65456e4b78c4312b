//! Writes, reads and clones data and takes snapshots, with ours and with the kernel in turns.
//!
//! Ours is the library in this process. The kernel's side is a volume over a loop device with
//! direct I/O, so that its data is cached once, like ours. Both start with a new volume with
//! default features, of btrfs or XFS, on a sparse image on the same disk, and compress with the
//! same method, forced. A thread makes its requests one after the other.
//!
//! | group | row | measured work |
//! |---|---|---|
//! | `plain`, `zstd:3`, `zstd:15` | write | a file in requests of 1 MiB, and a sync |
//! | | read | the same requests, in the same order |
//! | | random read | requests of 4 KiB, at places all over the file |
//! | | random write | the same requests, and a sync |
//! | | write, 2 threads | two files of half the size, one by each thread, and a sync |
//! | | read, 2 threads | the same two files |
//! | `direct` | write direct | as `write`, with `O_DIRECT` or `write_direct` |
//! | | clone | the whole file into a new one, and a sync |
//! | `snapshots` | snapshots | snapshots of a subvolume with many files, one of which is written before each, and a sync |
//!
//! Before every row that reads, and before random writes and clones, both sides open or mount their
//! volume again and the host drops its caches. So both read from the disk. Every second sector of
//! the data is text, and every other one random. Each sector starts with its version, file and
//! offset, which the reader compares. At the end of a group, the data of ours is checked by `btrfs
//! check` with checksums of data or by `xfs_repair`, and byte by byte through a mount of the
//! kernel.
//!
//! XFS has the groups `plain` and `direct` alone.

mod groups;

use std::path::PathBuf;

use offshoot_testkit::btrfs::judges;
use serde_json::json;

use crate::formats::{BenchFormat, Btrfs, Xfs};
use crate::sides::{LibraryVolume, MountedVolume};
use crate::table::{median, shown, write_values};
use crate::{BenchOptions, Result};
use groups::{GROUPS, GroupSizes, SideTime, XFS_GROUPS};

/// The options of a run.
struct DataJob {
    work: GroupSizes,
    groups: Vec<&'static str>,
    turns: usize,
    is_xfs: bool,
    dir: PathBuf,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let valued =
        ["--groups", "--mib", "--random-mib", "--snapshots", "--files", "--turns", "--format"];
    let options = BenchOptions::parse(args, &valued, &["--no-proof"])?;
    let is_xfs = options.is_xfs()?;
    let all = if is_xfs { &XFS_GROUPS[..] } else { &GROUPS };
    let named = options.get("--groups").map_or_else(|| all.to_vec(), |n| n.split(',').collect());
    let known = |name| all.iter().copied().find(|&group| group == name);
    let mib =
        |name, default| options.number(name, default).and_then(|n: u64| n.checked_mul(1 << 20));
    let dir = options.dir()?;
    let job = DataJob {
        work: GroupSizes {
            bytes: mib("--mib", 1024)?,
            random_bytes: mib("--random-mib", 64)?,
            snapshots: options.number("--snapshots", 1000)?,
            files: options.number("--files", 10_000)?,
            is_proved: !options.has("--no-proof"),
            image: dir.join("data.img"),
        },
        groups: named.into_iter().map(known).collect::<Option<_>>()?,
        turns: options.number("--turns", 3)?,
        is_xfs,
        dir,
    };
    let is_sane = job.work.bytes >= 2 << 20 && job.work.files > 0 && job.turns > 0;
    is_sane.then(|| if job.is_xfs { job.run::<Xfs>() } else { job.run::<Btrfs>() })
}

impl DataJob {
    fn run<F: BenchFormat + Sync>(&self) -> Result {
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
                ours.push(self.work.run::<LibraryVolume<F>>(group)?);
                eprintln!("{group}, turn {} of {}: kernel", turn + 1, self.turns);
                kernel.push(self.work.run::<MountedVolume<F>>(group)?);
            }
            for (index, &SideTime { name, .. }) in ours[0].iter().enumerate() {
                let seconds = |turns: &[Vec<SideTime>]| -> Vec<f64> {
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
