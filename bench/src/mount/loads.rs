//! The loads: work on a mount with the system calls of ordinary programs, and its time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use offshoot_testkit::run::try_run;
use rustix::fs::{fsync, syncfs};

use super::MountJob;
use crate::Result;
use crate::kernel::KernelVolume;
use crate::measure::drop_caches;
use crate::workload::FsMark;

/// The bytes of a sequential request, and of a random one.
const LARGE: usize = 1 << 20;
const SMALL: usize = 4096;

/// A figure.
#[derive(Clone, Debug)]
pub(super) struct LoadFigure {
    pub(super) load: String,
    /// The unit of `amount` per second.
    pub(super) unit: &'static str,
    pub(super) amount: f64,
    pub(super) time: Duration,
    /// The time of the sync after it, for loads that write.
    pub(super) sync: Option<Duration>,
}

/// Runs all loads of the job on the mount at `root`.
pub(super) fn run(job: &MountJob, root: &Path) -> Result<Vec<LoadFigure>> {
    let mut figures = Vec::new();
    for (group, size) in [("empty", 0), ("small", SMALL)] {
        for threads in job.has(group).then_some([1, 2]).into_iter().flatten() {
            figures.push(files(job, root, size, threads)?);
        }
    }
    if job.has("data") {
        figures.extend(data(job, root)?);
    }
    if job.has("tree") {
        figures.extend(tree(job, root)?);
    }
    Ok(figures)
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

/// Makes all changes on a mount durable. `syncfs` does not reach filesystems over FUSE, so this
/// also syncs the root directory.
fn sync(root: &Path) -> Result<Duration> {
    let started = Instant::now();
    let dir = File::open(root).map_err(failed(root))?;
    syncfs(&dir).and_then(|()| fsync(&dir)).map_err(|errno| failed(root)(errno.into()))?;
    Ok(started.elapsed())
}

fn as_f64(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

/// Makes many files of `size` bytes.
fn files(job: &MountJob, root: &Path, size: usize, threads: u64) -> Result<LoadFigure> {
    let dir = root.join(format!("files-{size}-{threads}"));
    std::fs::create_dir(&dir).map_err(failed(&dir))?;
    let work = FsMark {
        threads,
        files: job.files,
        rounds: job.rounds,
        size,
        seed: size as u64 + threads,
        began_secs: 0x6560_0000,
        has_new_dirs: false,
    };
    drop_caches()?;
    let place = KernelVolume::at(&dir)?;
    let started = Instant::now();
    let (rounds, _) = work.run(&place).map_err(|errno| failed(&dir)(errno.into()))?;
    let all = started.elapsed();
    let time = rounds.iter().map(|round| round.time).sum();
    let sync = sync(root)? + all.saturating_sub(time);
    let amount = as_f64(rounds.iter().map(|round| round.files).sum());
    let load = format!("create {size} B, {threads} thread{}", if threads == 1 { "" } else { "s" });
    Ok(LoadFigure { load, unit: "files/s", amount, time, sync: Some(sync) })
}

/// Writes and reads one large file.
fn data(job: &MountJob, root: &Path) -> Result<Vec<LoadFigure>> {
    let (all, random) = (job.mib * LARGE as u64, job.random_mib * LARGE as u64);
    let path = root.join("data");
    let io = |error| failed(&path)(error);
    let mut figures = Vec::new();
    let mut note = |load: &str, unit, amount: f64, time, sync| {
        figures.push(LoadFigure { load: load.to_owned(), unit, amount, time, sync });
    };
    let synced = |file: &File| {
        let started = Instant::now();
        file.sync_all().map(|()| Some(started.elapsed()))
    };
    let mut large = vec![0; LARGE];
    let mut pattern = 1_u64;
    for word in large.chunks_exact_mut(8) {
        pattern = pattern.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        word.copy_from_slice(&pattern.to_ne_bytes());
    }
    let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(io)?;
    drop_caches()?;
    let started = Instant::now();
    for offset in (0..all).step_by(LARGE) {
        large[..8].copy_from_slice(&offset.to_ne_bytes());
        file.write_all_at(&large, offset).map_err(io)?;
    }
    let time = started.elapsed();
    note("write 1 MiB", "MiB/s", as_f64(job.mib), time, synced(&file).map_err(io)?);

    drop_caches()?;
    let started = Instant::now();
    for offset in (0..all).step_by(LARGE) {
        file.read_exact_at(&mut large, offset).map_err(io)?;
    }
    note("read 1 MiB", "MiB/s", as_f64(job.mib), started.elapsed(), None);

    let count = random / SMALL as u64;
    let mut small = vec![7; SMALL];
    drop_caches()?;
    let started = Instant::now();
    for offset in ShuffledNumbers::new(all / SMALL as u64).take(index(count)) {
        file.read_exact_at(&mut small, offset * SMALL as u64).map_err(io)?;
    }
    note("random read 4 KiB", "reads/s", as_f64(count), started.elapsed(), None);

    drop_caches()?;
    let started = Instant::now();
    for offset in ShuffledNumbers::new(all / SMALL as u64).take(index(count)) {
        file.write_all_at(&small, offset * SMALL as u64).map_err(io)?;
    }
    let time = started.elapsed();
    note("random write 4 KiB", "writes/s", as_f64(count), time, synced(&file).map_err(io)?);
    drop(file);
    std::fs::remove_file(&path).map_err(io)?;
    sync(root)?;
    Ok(figures)
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// All numbers below `bound`, each once, in a fixed pseudo-random order.
struct ShuffledNumbers {
    bound: u64,
    mask: u64,
    next: u64,
}

impl ShuffledNumbers {
    fn new(bound: u64) -> Self {
        Self { bound, mask: bound.next_power_of_two().max(8) - 1, next: 1 }
    }
}

impl Iterator for ShuffledNumbers {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        // A linear congruential generator modulo a power of two: it visits all numbers up to `mask`
        // and then starts again.
        for _ in 0..=self.mask {
            let number = self.next;
            self.next =
                number.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f)
                    & self.mask;
            if number < self.bound {
                return Some(number);
            }
        }
        None
    }
}

/// Unpacks a source tree, lists it with attributes and cold caches, and removes it.
fn tree(job: &MountJob, root: &Path) -> Result<Vec<LoadFigure>> {
    let dir: PathBuf = root.join("tree");
    std::fs::create_dir(&dir).map_err(failed(&dir))?;
    let timed = |program: &str, words: &[&std::ffi::OsStr]| {
        drop_caches()?;
        let started = Instant::now();
        try_run(program, words).map(|said| (said, started.elapsed()))
    };
    let (archive, place) = (job.archive.as_os_str(), dir.as_os_str());
    let (_, unpack) = timed("tar", &["-xf".as_ref(), archive, "-C".as_ref(), place])?;
    let sync_time = sync(root)?;
    let (listed, find) = timed("find", &[place, "-printf".as_ref(), "%s %i\\n".as_ref()])?;
    let files = listed.lines().count();
    let amount = as_f64(files as u64);
    let (_, remove) = timed("rm", &["-rf".as_ref(), place])?;
    let after = sync(root)?;
    let figure = |load: &str, time, sync| LoadFigure {
        load: load.to_owned(),
        unit: "files/s",
        amount,
        time,
        sync,
    };
    Ok(vec![
        figure("untar", unpack, Some(sync_time)),
        figure("find, cold", find, None),
        figure("rm -rf", remove, Some(after)),
    ])
}
