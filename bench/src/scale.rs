//! Does the same work on volumes of several sizes, with ours and with the kernel.
//!
//! | group | size | rows |
//! |---|---|---|
//! | `chunks` | chunks of data in use: 10, 1,000, 10,000 | preallocate them; open; create and write 1,000 bytes; commit; `statfs`; snapshot; remove; close |
//! | `pieces` | pieces of free space of 4 KiB: 1,000, 10,000, 100,000 | open; fill nine in ten of them, and a sync |
//! | `directory` | entries of one directory: 10^4, 10^5, 10^6 | create; open; list; find; remove |
//! | `files` | files of the volume, in millions: `--millions`, 100,000 in a directory | create, and the peak of memory; only ours |
//!
//! Ours is the library in this process, and for `files` the program. The kernel's side is a volume
//! over a loop device with direct I/O. A row is the time of one unit of its work: of a file, a
//! piece, a chunk, a call. The factor of a side is its largest size against its smallest one. The
//! last column is the kernel's time against ours at the largest size. The kernel's open and close
//! are those of `losetup`, `mount` and `umount`, with the start of these programs.

use std::path::{Path, PathBuf};
use std::time::Instant;

use offshoot_btrfs::EngineOptions;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;
use serde_json::json;

use crate::content::SECTOR;
use crate::formats::Btrfs;
use crate::kernel::remove_image;
use crate::measure::drop_caches;
use crate::ours::ProgramPaths;
use crate::sides::{ComparedVolume, LibraryVolume, MountedVolume, WriteWay};
use crate::table::{shown, write_values};
use crate::{BenchOptions, Result};

const SECTOR_BYTES: u64 = SECTOR as u64;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The files that are made, and the calls that are made, at each size of `chunks`.
const FILES: u64 = 10_000;
const COMMITS: u64 = 50;
const STATFS_CALLS: u64 = 10_000;
const SNAPSHOTS: u64 = 50;

/// The entries that are looked for, and those that are removed, in `directory`.
const FINDS: u64 = 5_000;

/// The files that `fs-mark` makes in a round.
const FILES_OF_ROUND: u32 = 100_000;

/// The groups, and the sizes of each.
const GROUPS: [(&str, [u64; 3]); 4] = [
    ("chunks", [10, 1_000, 10_000]),
    ("pieces", [1_000, 10_000, 100_000]),
    ("directory", [10_000, 100_000, 1_000_000]),
    ("files", [1, 10, 50]),
];

/// One measured row at one size: its name, which ends in its unit, and its figure.
struct UnitTime {
    name: &'static str,
    /// Microseconds of one unit, or MiB for a row of memory.
    figure: f64,
}

/// The options of a run.
struct ScaleJob {
    groups: Vec<(&'static str, Vec<u64>)>,
    has_kernel: bool,
    ours: ProgramPaths,
    dir: PathBuf,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let options = BenchOptions::parse(args, &["--groups", "--millions"], &["--no-kernel"])?;
    let named: Vec<&str> = options.get("--groups").map_or_else(
        || GROUPS.iter().map(|(name, _)| *name).collect(),
        |names| names.split(',').collect(),
    );
    let mut groups = Vec::new();
    for name in named {
        let (name, sizes) = GROUPS.into_iter().find(|(group, _)| *group == name)?;
        let sizes =
            if name == "files" { options.numbers("--millions", &sizes)? } else { sizes.to_vec() };
        groups.push((name, sizes));
    }
    let dir = options.dir()?;
    let job = ScaleJob {
        groups,
        has_kernel: !options.has("--no-kernel"),
        ours: ProgramPaths { offshoot: options.program()?, image: dir.join("scale.img") },
        dir,
    };
    Some(job.run())
}

impl ScaleJob {
    fn run(&self) -> Result {
        let _judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
        std::fs::create_dir_all(&self.dir).map_err(|e| format!("{}: {e}", self.dir.display()))?;
        println!(
            "{:<10} {:<22} {:>11} {:>11} {:>11} {:>7} {:>11} {:>11} {:>11} {:>7} {:>9}",
            "group", "row", "ours", "", "", "factor", "kernel", "", "", "factor", "x kernel"
        );
        let mut all = Vec::new();
        for (group, sizes) in &self.groups {
            println!("{group:<10} {:<22} {}", "", sizes_line(sizes));
            let (mut ours, mut kernel) = (Vec::new(), Vec::new());
            for &size in sizes {
                eprintln!("{group}, {size}: ours");
                ours.push(match *group {
                    "files" => self.many_files(size)?,
                    group => self.group::<LibraryVolume<Btrfs>>(group, size)?,
                });
                // The kernel makes too few files a second for this.
                kernel.push(if self.has_kernel && *group != "files" {
                    eprintln!("{group}, {size}: kernel");
                    self.group::<MountedVolume<Btrfs>>(group, size)?
                } else {
                    Vec::new()
                });
            }
            remove_image(&self.ours.image)?;
            for (index, row) in ours.first().into_iter().flatten().enumerate() {
                let of = |side: &[Vec<UnitTime>]| -> Vec<f64> {
                    let of_size = |rows: &Vec<UnitTime>| rows.get(index).map(|row| row.figure);
                    side.iter().map(|rows| of_size(rows).unwrap_or(f64::NAN)).collect()
                };
                let (ours, kernel) = (of(&ours), of(&kernel));
                print_row(row.name, &ours, &kernel);
                all.push(json!({
                    "group": group, "row": row.name, "sizes": sizes, "ours": ours, "kernel": kernel,
                }));
            }
        }
        write_values(&self.dir.join("scale.json"), all)
    }

    fn group<S: ComparedVolume>(&self, group: &str, size: u64) -> Result<Vec<UnitTime>> {
        let image = &self.ours.image;
        match group {
            "chunks" => chunks::<S>(image, size),
            "pieces" => pieces::<S>(image, size),
            _ => directory::<S>(image, size),
        }
    }

    /// Makes so many millions of files with the program.
    fn many_files(&self, millions: u64) -> Result<Vec<UnitTime>> {
        let rounds = millions * 1_000_000 / u64::from(FILES_OF_ROUND);
        let options = [
            ("--threads", 1),
            ("--files", u64::from(FILES_OF_ROUND)),
            ("--rounds", rounds),
            ("--image-size", (2 + millions * 2) * GIB),
            ("--dirty-bytes", EngineOptions::default().dirty_bytes),
        ];
        let mut options: Vec<String> = options
            .iter()
            .flat_map(|(option, value)| [(*option).to_owned(), value.to_string()])
            .collect();
        options.push("--new-dirs".to_owned());
        let run = self.ours.run(&[], "fs-mark", &options)?;
        let figure = |what: &str| run[what].as_f64().unwrap_or(f64::NAN);
        let last = run["rounds"].as_array().and_then(|rounds| rounds.last()?["seconds"].as_f64());
        let last = last.map_or(f64::NAN, |seconds| seconds * 1e6 / f64::from(FILES_OF_ROUND));
        Ok(vec![
            UnitTime { name: "create us", figure: 1e6 / figure("files_per_second") },
            UnitTime { name: "create, last round us", figure: last },
            UnitTime { name: "peak MiB", figure: figure("peak_memory_bytes") / 1_048_576.0 },
        ])
    }
}

/// Runs `work`, which is so many units, and keeps the time of one.
fn timed<T>(
    rows: &mut Vec<UnitTime>,
    name: &'static str,
    units: u64,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let started = Instant::now();
    let done = work()?;
    #[expect(clippy::cast_precision_loss, reason = "a time is not exact")]
    let figure = started.elapsed().as_secs_f64() * 1e6 / units as f64;
    rows.push(UnitTime { name, figure });
    Ok(done)
}

fn chunks<S: ComparedVolume>(image: &Path, chunks: u64) -> Result<Vec<UnitTime>> {
    let mut rows = Vec::new();
    S::make(image, (chunks + 100) * GIB)?;
    let side = S::open(image, None)?;
    let big = side.create("big")?;
    timed(&mut rows, "preallocate, a chunk us", chunks, || {
        side.preallocate(&big, 0, chunks * GIB)?;
        side.sync()
    })?;
    drop((big, side));
    drop_caches()?;
    let side = timed(&mut rows, "open us", 1, || S::open(image, None))?;
    let name = |number: u64| format!("file{number}");
    timed(&mut rows, "create and write us", FILES, || {
        (0..FILES).try_for_each(|number| {
            side.write(&side.create(&name(number))?, 0, &[7; 1000], WriteWay::Buffered)
        })
    })?;
    side.sync()?;
    let small = side.create("small")?;
    timed(&mut rows, "commit us", COMMITS, || {
        (0..COMMITS).try_for_each(|number| {
            side.write(&small, number * SECTOR_BYTES, &[7; 1000], WriteWay::Buffered)?;
            side.sync()
        })
    })?;
    timed(&mut rows, "statfs us", STATFS_CALLS, || {
        (0..STATFS_CALLS).try_for_each(|_| side.available_bytes().map(drop))
    })?;
    let subvolume = side.make_subvolume("sub", 100, &[7; 1000])?;
    side.sync()?;
    timed(&mut rows, "snapshot us", SNAPSHOTS, || {
        side.snapshots(&subvolume, 100, SNAPSHOTS, &[8; 1000])?;
        side.sync()
    })?;
    timed(&mut rows, "remove us", FILES, || {
        (0..FILES).try_for_each(|number| side.remove(&name(number)))?;
        side.sync()
    })?;
    side.write(&small, 0, &[9; 1000], WriteWay::Buffered)?;
    drop(small);
    timed(&mut rows, "close us", 1, || {
        drop(side);
        Ok(())
    })?;
    Ok(rows)
}

fn pieces<S: ComparedVolume>(image: &Path, pieces: u64) -> Result<Vec<UnitTime>> {
    let mut rows = Vec::new();
    S::make(image, 4 * GIB)?;
    let side = S::open(image, None)?;
    let sectors = side.create("pieces")?;
    // Each direct write is an extent of its own.
    for number in 0..2 * pieces {
        side.write(&sectors, number * SECTOR_BYTES, &[1; SECTOR], WriteWay::Direct)?;
    }
    side.sync()?;
    // Takes all other space, in ever smaller steps.
    let filler = side.create("filler")?;
    let (mut at, mut step) = (0, 256 * MIB);
    while step >= SECTOR_BYTES {
        match side.preallocate(&filler, at, step) {
            Ok(()) => at += step,
            Err(_) => step /= 2,
        }
    }
    for number in 0..pieces {
        side.punch(&sectors, 2 * number * SECTOR_BYTES, SECTOR_BYTES)?;
    }
    side.sync()?;
    drop((sectors, filler, side));
    drop_caches()?;
    let side = timed(&mut rows, "open us", 1, || S::open(image, None))?;
    let fill = side.create("fill")?;
    let nine_tenths = pieces / 10 * 9;
    timed(&mut rows, "fill, a piece us", nine_tenths, || {
        let block = vec![2; 256 * SECTOR];
        for number in (0..nine_tenths).step_by(256) {
            let len = 256.min(nine_tenths - number) * SECTOR_BYTES;
            let block = &block[..usize::try_from(len).expect("at most a block")];
            side.write(&fill, number * SECTOR_BYTES, block, WriteWay::Buffered)?;
        }
        side.sync()
    })?;
    Ok(rows)
}

fn directory<S: ComparedVolume>(image: &Path, entries: u64) -> Result<Vec<UnitTime>> {
    let mut rows = Vec::new();
    S::make(image, 16 * GIB)?;
    let side = S::open(image, None)?;
    let name = |number: u64| format!("file-of-a-large-directory-{number:08}");
    timed(&mut rows, "create us", entries, || {
        (0..entries).try_for_each(|number| side.create(&name(number)).map(drop))?;
        side.sync()
    })?;
    drop(side);
    drop_caches()?;
    let side = timed(&mut rows, "open us", 1, || S::open(image, None))?;
    // Each number of a stride that shares no factor with the size comes once.
    let mut random = Random::new(entries);
    let first = random.below(entries);
    let some = |number: u64| name((first + number * 7919) % entries);
    timed(&mut rows, "list, an entry us", entries, || match side.list()? {
        found if found >= entries => Ok(()),
        found => Err(format!("{found} entries of {entries}")),
    })?;
    timed(&mut rows, "find us", FINDS, || {
        (0..FINDS).try_for_each(|number| side.find(&some(number)))
    })?;
    timed(&mut rows, "remove us", FINDS, || {
        (0..FINDS).try_for_each(|number| side.remove(&some(number)))?;
        side.sync()
    })?;
    Ok(rows)
}

fn sizes_line(sizes: &[u64]) -> String {
    sizes.iter().map(|size| format!("{size:>11}")).collect::<Vec<_>>().join(" ")
}

fn print_row(name: &str, ours: &[f64], kernel: &[f64]) {
    let figures = |figures: &[f64]| {
        figures.iter().map(|&one| format!("{:>11}", shown(one, 2))).collect::<Vec<_>>().join(" ")
    };
    let ends = |figures: &[f64]| Some((*figures.first()?, *figures.last()?));
    let factor = |side: &[f64]| ends(side).map_or(f64::NAN, |(first, last)| last / first);
    let beside = ends(kernel).zip(ends(ours)).map_or(f64::NAN, |(kernel, ours)| kernel.1 / ours.1);
    println!(
        "{:<10} {name:<22} {} {:>7} {} {:>7} {:>9}",
        "",
        figures(ours),
        shown(factor(ours), 2),
        figures(kernel),
        shown(factor(kernel), 2),
        shown(beside, 2),
    );
}
