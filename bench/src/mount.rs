//! Measures mounts through the system calls of ordinary programs: ours, the kernel's btrfs and XFS,
//! and a null filesystem.
//!
//! The sides take turns. In each turn a side is mounted on a new volume and runs all loads one
//! after the other. Volumes are sparse images in one directory; those of the kernel lie behind loop
//! devices with direct I/O.
//!
//! | side | filesystem | served by |
//! |---|---|---|
//! | `ours`, `ours-dev` | offshoot on btrfs | our server, over io_uring and over `/dev/fuse` |
//! | `ours-xfs`, `ours-xfs-dev` | offshoot on XFS | the same |
//! | `null`, `null-dev` | one that does nothing | our server, over io_uring and over `/dev/fuse` |
//! | `fuser` | the same | the crate `fuser`, over `/dev/fuse` with two threads |
//! | `btrfs`, `xfs` | the kernel's | the kernel |
//!
//! No filesystem over our server can be faster than `null`. A fault of our server slows down `null`
//! as well, and shows up beside `fuser`.
//!
//! A figure comes without the sync at the end, as `fs_mark -S 0` and `fio` count, and beside it
//! with that sync. Ours and `null` need FUSE over io_uring, so the benchmark switches it on in the
//! kernel while it runs.

mod independent;
mod loads;
mod null;
mod places;

use std::path::{Path, PathBuf};

use offshoot_fuse::Transport;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::io_uring::SwitchedOn;
use offshoot_testkit::run::try_run;
use serde_json::{Value, json};

use crate::formats::{BenchFormat, Btrfs, Xfs};
use crate::table::{median, shown, write_values};
use crate::{BenchOptions, Result};
use loads::LoadFigure;
use places::{MountPaths, MountSide, MountedSide};

/// The first argument of the child process that serves the null filesystem.
pub(crate) const NULL: &str = "serve-null";

/// The side whose server is the crate `fuser`, and the argument of its child process.
const FUSER: &str = "fuser";

const LOADS: [&str; 4] = ["empty", "small", "data", "tree"];

/// The options of a run.
struct MountJob {
    sides: Vec<MountSide>,
    loads: Vec<String>,
    files: u64,
    rounds: u64,
    mib: u64,
    random_mib: u64,
    turns: usize,
    /// The archive that the load `tree` unpacks.
    archive: PathBuf,
    source: PathBuf,
    offshoot: PathBuf,
    dir: PathBuf,
}

/// A side, and its figures turn by turn.
type SideFigures = (MountSide, Vec<LoadFigure>);

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let valued = [
        "--sides",
        "--loads",
        "--files",
        "--rounds",
        "--mib",
        "--random-mib",
        "--source",
        "--turns",
    ];
    let options = BenchOptions::parse(args, &valued, &[])?;
    let sides = options.get("--sides").unwrap_or("ours,null,btrfs,xfs");
    let loads = options.get("--loads").map_or_else(
        || LOADS.map(str::to_owned).to_vec(),
        |loads| loads.split(',').map(str::to_owned).collect(),
    );
    let dir = options.dir()?;
    let job = MountJob {
        sides: sides.split(',').map(MountSide::named).collect::<Option<_>>()?,
        loads,
        files: options.number("--files", 20_000)?,
        rounds: options.number("--rounds", 3)?,
        mib: options.number("--mib", 1024)?,
        random_mib: options.number("--random-mib", 64)?,
        turns: options.number("--turns", 3)?,
        archive: dir.join("mount-tree.tar"),
        source: options.get("--source").unwrap_or("/usr/include").into(),
        offshoot: options.program()?,
        dir,
    };
    let is_sane = job.loads.iter().all(|load| LOADS.contains(&load.as_str()))
        && job.files * job.rounds * job.turns as u64 > 0
        && (1..=job.mib).contains(&job.random_mib);
    is_sane.then(|| job.run())
}

/// Serves the null filesystem: over the transport in `args`, or by the crate `fuser`.
pub(crate) fn serve_null(args: &[String]) -> Option<Result> {
    let [dir, transport] = args else { return None };
    let transport = match transport.as_str() {
        "io_uring" => Transport::IoUring,
        "noio_uring" => Transport::Device,
        FUSER => return Some(places::serve_independently(Path::new(dir))),
        _ => return None,
    };
    Some(places::serve(Path::new(dir), transport))
}

impl MountJob {
    fn has(&self, load: &str) -> bool {
        self.loads.iter().any(|known| known == load)
    }

    fn run(&self) -> Result {
        let _judges = judges::require().ok_or("volumes are mounted, which takes root")?;
        std::fs::create_dir_all(&self.dir).map_err(|e| format!("{}: {e}", self.dir.display()))?;
        if self.has("tree") {
            self.make_archive()?;
        }
        let over_ring = [MountSide::Ours, MountSide::OursXfs, MountSide::Null];
        let wants_ring = self.sides.iter().any(|side| over_ring.contains(side));
        let _switched = wants_ring.then(SwitchedOn::new).transpose().map_err(|e| e.to_string())?;
        let mut rows: Vec<SideFigures> =
            self.sides.iter().map(|&side| (side, Vec::new())).collect();
        for turn in 0..self.turns {
            for (side, figures) in &mut rows {
                eprintln!("turn {} of {}: {}", turn + 1, self.turns, side.name());
                figures.extend(self.one(*side)?);
            }
        }
        self.print(&rows);
        let values = rows.iter().flat_map(|(side, figures)| {
            figures.iter().map(|figure| {
                json!({
                    "side": side.name(),
                    "load": figure.load,
                    "unit": figure.unit,
                    "amount": figure.amount,
                    "seconds": figure.time.as_secs_f64(),
                    "sync_seconds": figure.sync.map(|sync| sync.as_secs_f64()),
                })
            })
        });
        write_values(&self.dir.join("mount.json"), values.collect::<Vec<Value>>())
    }

    /// Makes a tar archive of the source directory, or links to a source that is an archive itself.
    fn make_archive(&self) -> Result {
        if !self.source.is_dir() {
            let target = self.source.canonicalize();
            let target = target.map_err(|e| format!("{}: {e}", self.source.display()))?;
            crate::kernel::remove_image(&self.archive)?;
            return std::os::unix::fs::symlink(target, &self.archive)
                .map_err(|e| format!("{}: {e}", self.archive.display()));
        }
        crate::kernel::remove_image(&self.archive)?;
        let (archive, source) = (self.archive.as_os_str(), self.source.as_os_str());
        let words = ["-chf".as_ref(), archive, "--hard-dereference".as_ref(), "-C".as_ref()];
        try_run("tar", &[&words[..], &[source, ".".as_ref()]].concat()).map(drop)
    }

    /// One turn of one side.
    fn one(&self, side: MountSide) -> Result<Vec<LoadFigure>> {
        let image = self.dir.join("mount.img");
        let dir = self.dir.join("mount");
        let files = self.files * self.rounds * 6;
        let image_bytes = (8 << 30) + 3 * (self.mib << 20) + files * (16 << 10);
        let places = MountPaths { offshoot: &self.offshoot, image: &image, dir: &dir, image_bytes };
        let mounted = MountedSide::new(side, &places)?;
        let figures = loads::run(self, mounted.path())?;
        mounted.unmount()?;
        match side {
            MountSide::Ours | MountSide::OursDevice => Btrfs::check(&image)?,
            MountSide::OursXfs | MountSide::OursXfsDevice => Xfs::check(&image)?,
            _ => {}
        }
        crate::kernel::remove_image(&image)?;
        Ok(figures)
    }

    fn print(&self, rows: &[SideFigures]) {
        println!(
            "medians of {} turns; `with sync` counts what made it durable as well",
            self.turns
        );
        println!(
            "{:<24} {:<12} {:>10} {:>17} {:<9} {:>10} {:>8} {:>8} {:>8}",
            "load", "side", "speed", "min..max", "unit", "with sync", "x null", "x btrfs", "x xfs"
        );
        let loads: Vec<&str> = rows.first().map_or(Vec::new(), |(_, figures)| {
            let each = figures.len() / self.turns;
            figures.iter().take(each).map(|figure| figure.load.as_str()).collect()
        });
        for load in loads {
            let speeds = |side: MountSide, is_synced: bool| -> Vec<f64> {
                let row = rows.iter().find(|(known, _)| *known == side);
                let figures = row.map_or(&[][..], |(_, figures)| figures);
                figures
                    .iter()
                    .filter(|figure| figure.load == load)
                    .map(|f| f.speed(is_synced))
                    .collect()
            };
            for (side, figures) in rows {
                let all = speeds(*side, false);
                let speed = median(all.iter().copied());
                let beside = |other| shown(speed / median(speeds(other, false).into_iter()), 2);
                let (min, max) = (
                    all.iter().copied().fold(f64::MAX, f64::min),
                    all.iter().copied().fold(0.0, f64::max),
                );
                let unit = figures.iter().find(|f| f.load == load).map_or("", |f| f.unit);
                println!(
                    "{load:<24} {:<12} {speed:>10.0} {:>17} {unit:<9} {:>10.0} {:>8} {:>8} {:>8}",
                    side.name(),
                    format!("{min:.0}..{max:.0}"),
                    median(speeds(*side, true).into_iter()),
                    beside(MountSide::Null),
                    beside(MountSide::Btrfs),
                    beside(MountSide::Xfs),
                );
            }
        }
    }
}

impl LoadFigure {
    /// The amount per second.
    fn speed(&self, is_synced: bool) -> f64 {
        let sync = self.sync.filter(|_| is_synced).unwrap_or_default();
        self.amount / (self.time + sync).as_secs_f64()
    }
}
