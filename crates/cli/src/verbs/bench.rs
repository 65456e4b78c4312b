//! `offshoot bench`: how fast the engine is.
//!
//! A benchmark makes a new volume, runs a [`workload`](crate::workload) on it through the
//! library, and tells what it did, what that took, and what the engine counted meanwhile. The volume stays, so
//! that others can look at what is in it.

mod report;

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{Filesystem, MkfsOptions, OpenOptions, SubvolumeId, Volume, mkfs};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, Place, Timestamp};
use uuid::Uuid;

use crate::args::{BenchVerb, BenchVolume, EnospcArguments, FsMarkArguments};
use crate::edit::moment;
use crate::exit::{Failure, Result};
use crate::output::{Console, Statistics, human_size};
use crate::verbs::mkfs::{NewImages, usage};
use crate::workload::{Enospc, FsMark, Site, timed_sync};
use report::{Phase, Report, Stopwatch};

pub(super) fn run(verb: &BenchVerb, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    match verb {
        BenchVerb::FsMark(arguments) => fs_mark(arguments, out, console),
        BenchVerb::Enospc(arguments) => enospc(arguments, out, console),
    }
}

fn fs_mark(arguments: &FsMarkArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let &FsMarkArguments { threads, files, rounds, size, .. } = arguments;
    let began = Timestamp::now();
    let out_of_range = |_| Failure::Usage("the time is not in 1970 to 2106".into());
    let began_secs = u64::from(u32::try_from(moment()?.secs).map_err(out_of_range)?);
    let seed = arguments.seed.unwrap_or(u64::from(began.nanos) << 32 ^ began_secs);
    let work = FsMark { threads, files, rounds, size, seed, began_secs };
    let too_many = || Failure::Usage("these files need more than 1 PiB".into());
    let image_bytes = match arguments.image_size {
        // A block device has the size that it has, and so has an image that is there.
        None if arguments.volume.image.exists() => None,
        None => Some(work.image_bytes().ok_or_else(too_many)?),
        given => given,
    };
    let site = Engine::new(&arguments.volume, image_bytes, arguments.dirty_bytes, console)?;
    let stopwatch = Stopwatch::start();
    let (rounds, sync) = work.run(&site)?;
    let phases = rounds.into_iter().map(|round| Phase { name: None, round }).collect();
    let title = format!(
        "fs-mark: {threads} threads, each {} rounds of {files} files of {}; at most {} dirty",
        work.rounds,
        human_size(size as u64),
        human_size(arguments.dirty_bytes)
    );
    let settings = serde_json::json!({
        "workload": "fs-mark",
        "threads": threads,
        "files": files,
        "size": size,
        "seed": seed,
        "began_seconds": began_secs,
        "dirty_bytes": arguments.dirty_bytes,
    });
    let report = Report { title, settings, phases, sync, stopwatch, statistics: site.statistics() };
    report.write(arguments.volume.json, out)
}

fn enospc(arguments: &EnospcArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let &EnospcArguments { workers, file_size: size, half_direct, .. } = arguments;
    let work = Enospc { workers, size, half_direct };
    let engine =
        Engine::new(&arguments.volume, Some(arguments.size), arguments.dirty_bytes, console)?;
    Enospc::prepare(&engine)?;
    let mut workers = work.workers(&engine)?;
    let stopwatch = Stopwatch::start();
    let fill = work.fill(&engine, &mut workers)?;
    let files: Vec<u64> = workers.iter().map(|worker| worker.files).collect();
    let mut phases = vec![Phase { name: Some("fill"), round: fill }];
    if !arguments.keep {
        let round = Enospc::remove(&engine, &mut workers)?;
        phases.push(Phase { name: Some("remove"), round });
    }
    let sync = timed_sync(&engine)?;
    let title = format!(
        "enospc: {} workers on {}, files of {}{}; at most {} dirty",
        work.workers,
        human_size(arguments.size),
        human_size(work.size as u64),
        if half_direct { ", half of them direct" } else { "" },
        human_size(arguments.dirty_bytes)
    );
    let settings = serde_json::json!({
        "workload": "enospc",
        "workers": work.workers,
        "file_size": work.size,
        "half_direct": half_direct,
        "size": arguments.size,
        "files_of_workers": files,
        "dirty_bytes": arguments.dirty_bytes,
    });
    let report =
        Report { title, settings, phases, sync, stopwatch, statistics: engine.statistics() };
    report.write(arguments.volume.json, out)
}

/// A new volume.
struct Engine(Filesystem);

impl Engine {
    /// Makes it, on an image of this size that need not be there, or on what is there.
    fn new(
        arguments: &BenchVolume,
        size_bytes: Option<u64>,
        dirty_bytes: u64,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let mut images = NewImages::default();
        let device: Arc<dyn BlockDevice> = Arc::new(images.open(&arguments.image, size_bytes)?);
        let options = MkfsOptions {
            force: arguments.force,
            ..MkfsOptions::new(Uuid::new_v4(), Timestamp::now())
        };
        mkfs(std::slice::from_ref(&device), &options).map_err(usage)?;
        images.keep();
        let console = console.clone();
        let options = OpenOptions {
            reporter: Some(Arc::new(move |report| console.warning(report))),
            ..arguments.mechanisms.options(dirty_bytes)
        };
        let volume = Volume::open_writable(vec![device], &options)?;
        Ok(Self(volume.filesystem(SubvolumeId::FS)?))
    }

    fn statistics(&self) -> Statistics {
        Statistics::of(self.0.volume())
    }
}

/// What a file of the benchmarks begins with, now.
fn new_file(permissions: u32) -> NewFile {
    NewFile { permissions, uid: 0, gid: 0, umask: None, at: Timestamp::now() }
}

impl Site for Engine {
    type Dir = FileId;
    type File = FileId;
    type Error = Error;

    fn make_dir(&self, name: &str) -> Result<FileId, Error> {
        self.0.mkdir(Place { dir: self.0.root(), name: name.as_bytes() }, &new_file(0o777))
    }

    fn create(&self, &dir: &FileId, name: &[u8]) -> Result<FileId, Error> {
        self.0.create(Place { dir, name }, &new_file(0o666))
    }

    fn write(&self, &file: &FileId, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.0.write(file, offset, data, Timestamp::now())
    }

    fn write_direct(&self, &file: &FileId, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.0.write_direct(file, offset, data, Timestamp::now())
    }

    fn remove(&self, &dir: &FileId, name: &[u8]) -> Result<(), Error> {
        self.0.unlink(Place { dir, name }, Timestamp::now())
    }

    fn available_bytes(&self) -> Result<u64, Error> {
        Ok(self.0.statfs()?.available_bytes)
    }

    fn sync(&self) -> Result<(), Error> {
        self.0.sync()
    }

    fn is_no_space(error: &Error) -> bool {
        error.errno() == Errno::NOSPC
    }
}
