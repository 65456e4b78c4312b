//! Benchmarks: programs that print a table and write JSON.
//!
//! A figure of one side alone says little, because machines and days differ. Every benchmark runs
//! its sides in turns in one run, with cold caches, and prints all of them. The ratio is what
//! counts. No test asserts a time.
//!
//! | module | what it does |
//! |---|---|
//! | `measure` | one run of a program: time, CPU, memory |
//! | `table` | medians of several runs as text and as JSON |
//! | `volumes` | the input of `extract`: volumes that the kernel filled with a source tree |
//! | `extract` | a whole volume into a directory and into a tar stream |
//! | `build` | a volume from a directory, an archive, a container image |
//! | `check` | the check of whole volumes |
//! | `tree` | many threads insert into one tree |
//! | `fs_mark`, `enospc` | the seed workloads, on ours and on the kernel |
//! | `data` | large files, clones and snapshots, on ours and on the kernel |
//! | `dir_fsync`, `fsync` | fsync of a large directory, and of many files, on ours and on the kernel |
//! | `members` | fsync and reads over several members that each take time |
//! | `scale` | the same work on volumes of several sizes, on ours and on the kernel |
//! | `mount` | ours, the kernel's btrfs and XFS and a null filesystem, through the system calls of programs |
//! | `workload` | the seed workloads, which the program `offshoot` has too |
//! | `ours`, `kernel`, `proof` | the two sides of the seed workloads, and the check of the result |
//! | `supervise` | cleans up after a benchmark that is interrupted |
//! | `sides`, `content` | the two sides of `data`, `fsync` and `scale`, and the contents of their files |

mod build;
mod check;
mod content;
mod data;
mod dir_fsync;
mod enospc;
mod extract;
mod formats;
mod fs_mark;
mod fsync;
mod kernel;
mod measure;
mod members;
mod mount;
mod ours;
mod proof;
mod scale;
mod sides;
mod supervise;
mod table;
mod tree;
mod volumes;
#[path = "../../crates/cli/src/workload.rs"]
mod workload;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// The outcome of a benchmark. An error is a line for the user.
type Result<T = (), E = String> = std::result::Result<T, E>;

const HELP: &str = "\
Usage: offshoot-bench extract --offshoot PROGRAM --dir DIR [--source PATH] [--rounds N]
       offshoot-bench build --offshoot PROGRAM --dir DIR [--source PATH] [--rounds N]
       offshoot-bench check --offshoot PROGRAM --dir DIR [--source PATH] [--files N] [--rounds N]
                      [--lowmem]
       offshoot-bench tree [--dir DIR] [--rounds N] [--items N]
       offshoot-bench fs-mark --offshoot PROGRAM --dir DIR [--threads N,N...] [--files N]
                      [--rounds N] [--size BYTES] [--turns N] [--no-proof] [--no-switches]
                      [--format btrfs|xfs] [--log-mib N]
       offshoot-bench enospc --offshoot PROGRAM --dir DIR [--mib N] [--workers N]
                      [--file-size BYTES] [--turns N]
       offshoot-bench data --dir DIR [--groups GROUP,GROUP...] [--mib N] [--random-mib N]
                      [--snapshots N] [--files N] [--turns N] [--no-proof]
                      [--format btrfs|xfs]
       offshoot-bench dir-fsync --offshoot PROGRAM --dir DIR [--files N] [--deletes N]
                      [--node-sizes BYTES,BYTES...] [--turns N] [--no-proof]
       offshoot-bench fsync --dir DIR [--threads N,N...] [--fsyncs N] [--turns N] [--no-proof]
                      [--format btrfs|xfs]
       offshoot-bench members [--dir DIR] [--latency-us N] [--rate-mib N] [--fsyncs N] [--mib N]
                      [--turns N]
       offshoot-bench mount --offshoot PROGRAM --dir DIR [--sides SIDE,SIDE...] [--loads LOAD,LOAD...]
                      [--files N] [--rounds N] [--mib N] [--random-mib N] [--source PATH] [--turns N]
       offshoot-bench scale --offshoot PROGRAM --dir DIR [--groups GROUP,GROUP...]
                      [--millions N,N...] [--no-kernel]

Options:
  --offshoot PROGRAM  The program to measure, built with optimisation
  --dir DIR           Where volumes and output go, on the disk to measure; for extract 4 GiB,
                      and 8 GiB for each round until all are done; for build 8 GiB
  --source PATH       A directory or a tar archive to fill the volumes with
                      [default: /usr/src/linux-source-6.1.tar.xz]
  --rounds N          How often each side runs [default: 3]; of fs-mark, how often each thread
                      makes its files [default: 10]; of mount the same [default: 3]
  --items N           Items to insert into a tree [default: 1000000]
  --threads N,N...    Threads that make files [default: 1,2,12]; of fsync, those that append to
                      one each [default: 1,2,4,8,16]
  --files N           Files that each thread makes in a round [default: 100000]; of data, those
                      of the subvolume that has snapshots [default: 10000]; of dir-fsync, those
                      in the directory [default: 1000000]; of mount those in a round [default: 20000];
                      of check, those of the first volume [default: 2000000]
  --deletes N         How many of them are removed [default: 1000]
  --node-sizes SIZES  The sizes of tree blocks of the volumes [default: 16384,65536]
  --fsyncs N          How often 4 KiB are appended and synced by all threads together
                      [default: 4000]; of members, 1 MiB by one [default: 50]
  --latency-us N      How long a member takes for a write or a barrier [default: 2000]
  --rate-mib N        How much a member reads in a second [default: 200]
  --size BYTES        What each of them holds [default: 0]
  --format FORMAT     Of which format the volumes are, btrfs or xfs [default: btrfs]
  --log-mib N         The size of the logs of XFS [default: that of mkfs]
  --mib N             The size of the volume that is filled [default: 256]; of data, that of the
                      files that are written and read [default: 1024]; of members, that of the
                      file of each reader [default: 32]
  --groups GROUPS     What is measured of plain, zstd:3, zstd:15, direct and snapshots; of scale,
                      of chunks, pieces, directory and files [default: all]
  --millions N,N...   How many millions of files the volumes of files get: some 300 bytes of disk
                      each [default: 1,10,50]
  --no-kernel         Only ours
  --random-mib N      What of a file is read and written in random order [default: 64]
  --snapshots N       How many are taken [default: 1000]
  --workers N         Threads that fill it [default: 8]
  --file-size BYTES   What each file in it holds [default: 1024]; twice that where half of them
                      are written directly
  --sides SIDES       What is mounted, of ours, ours-xfs, btrfs, xfs and null, of ours-dev,
                      ours-xfs-dev and null-dev, which are served over /dev/fuse, and of fuser,
                      which is null-dev with the crate of this name as its server
                      [default: ours,null,btrfs,xfs]
  --loads LOADS       What is measured of empty, small, data and tree [default: all]
  --turns N           How often each side runs [default: 3]
  --no-proof          Let no judge look at what was made
  --lowmem            Also the low-memory mode of btrfs check
  --no-switches       Leave out the runs with a mechanism switched off, and on one core
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    run(&args).unwrap_or_else(|reason| {
        eprintln!("offshoot-bench: {reason}");
        ExitCode::FAILURE
    })
}

/// Runs the benchmark that `args` say. One that works in a directory runs in a child process.
fn run(args: &[String]) -> Result<ExitCode> {
    let (args, is_supervised) = supervise::supervised(args)?;
    if let Some(dir) = supervise::dir_of(args).filter(|_| !is_supervised) {
        return supervise::supervise(args, dir);
    }
    let done = args.split_first().and_then(|(what, args)| match what.as_str() {
        "extract" => extract::benchmark(args),
        "build" => build::benchmark(args),
        "check" => check::benchmark(args),
        "tree" => tree::benchmark(args),
        "fs-mark" => fs_mark::benchmark(args),
        "enospc" => enospc::benchmark(args),
        "data" => data::benchmark(args),
        "dir-fsync" => dir_fsync::benchmark(args),
        "fsync" => fsync::benchmark(args),
        "members" => members::benchmark(args),
        "mount" => mount::benchmark(args),
        "scale" => scale::benchmark(args),
        check::READ_DATA => check::read_data(args),
        mount::NULL => mount::serve_null(args),
        _ => None,
    });
    let Some(done) = done else {
        eprint!("{HELP}");
        return Ok(ExitCode::from(2));
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// The options of a benchmark, each given once at most.
pub(crate) struct BenchOptions(BTreeMap<String, String>);

/// The options of a benchmark that works on a source tree.
struct SourceBenchOptions {
    offshoot: PathBuf,
    dir: PathBuf,
    source: PathBuf,
    rounds: usize,
}

impl SourceBenchOptions {
    /// `None` for options that it does not know.
    fn parse(args: &[String]) -> Option<Self> {
        let options = BenchOptions::parse(args, &["--source", "--rounds"], &[])?;
        let source = options.get("--source").unwrap_or("/usr/src/linux-source-6.1.tar.xz");
        Some(Self {
            offshoot: options.program()?,
            dir: options.dir()?,
            source: source.into(),
            rounds: options.number("--rounds", 3).filter(|&rounds| rounds > 0)?,
        })
    }
}

impl BenchOptions {
    /// Parses the options that all benchmarks have, those in `valued`, which take a value, and
    /// those in `plain`, which take none. Returns `None` for any other option.
    fn parse(args: &[String], valued: &[&str], plain: &[&str]) -> Option<Self> {
        let mut options = BTreeMap::new();
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let has_value =
                ["--offshoot", "--dir"].contains(&name.as_str()) || valued.contains(&name.as_str());
            let value = if has_value {
                args.next()?.clone()
            } else if plain.contains(&name.as_str()) {
                String::new()
            } else {
                return None;
            };
            if options.insert(name.clone(), value).is_some() {
                return None;
            }
        }
        Some(Self(options))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The value of an option as a number, or else `default`; `None` if it is not a number.
    fn number<N: std::str::FromStr>(&self, name: &str, default: N) -> Option<N> {
        self.get(name).map_or(Some(default), |value| value.parse().ok())
    }

    /// The numbers between commas of an option, or else `default`; `None` if one is not a number.
    fn numbers<N: std::str::FromStr + Clone>(&self, name: &str, default: &[N]) -> Option<Vec<N>> {
        let parse = |numbers: &str| numbers.split(',').map(|one| one.parse().ok()).collect();
        self.get(name).map_or_else(|| Some(default.to_vec()), parse)
    }

    /// The program to measure.
    fn program(&self) -> Option<PathBuf> {
        self.get("--offshoot").map(PathBuf::from)
    }

    /// Whether the volumes are of XFS; `None` for a format that is not known.
    fn is_xfs(&self) -> Option<bool> {
        match self.get("--format") {
            None | Some("btrfs") => Some(false),
            Some("xfs") => Some(true),
            Some(_) => None,
        }
    }

    /// The directory for volumes and output.
    fn dir(&self) -> Option<PathBuf> {
        self.get("--dir").and_then(|dir| std::path::absolute(dir).ok())
    }
}
