//! `offshoot bench`: measures how fast the engine is.
//!
//! A benchmark makes a new volume, runs a [`workload`](crate::workload) on it through the library,
//! and reports the work, the time, and the counters of the engine. The volume stays, so that other
//! tools can read it.

mod arguments;
mod report;

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, MkfsOptions, mkfs};
use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, Timestamp, Volume,
};
use offshoot_xfs::{XfsMkfsOptions, XfsVolume, mkfs_xfs};
use uuid::Uuid;

use crate::args::LayerArguments;
use crate::edit::moment;
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, human_size};
use crate::verbs::btrfs::statistics::Statistics;
use crate::verbs::mkfs::{NewImages, NewVolumeFormat, usage};
use crate::verbs::statistics::{EngineStatistics, XfsCounters};
use crate::workload::{DirFsync, Enospc, FsMark, Site, timed_sync};
pub(crate) use arguments::{BENCH_HELP, BenchVerb};
use arguments::{BenchVolume, DirFsyncArguments, EnospcArguments, FsMarkArguments};
use report::{BenchPhase, BenchReport, Stopwatch};

pub(in crate::verbs) fn run(
    verb: &BenchVerb,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    match verb {
        BenchVerb::FsMark(arguments) => fs_mark(arguments, out, console),
        BenchVerb::Enospc(arguments) => enospc(arguments, out, console),
        BenchVerb::DirFsync(arguments) => dir_fsync(arguments, out, console),
    }
}

fn fs_mark(arguments: &FsMarkArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let &FsMarkArguments { threads, files, rounds, size, .. } = arguments;
    let began = Timestamp::now();
    let out_of_range = |_| VerbFailure::Usage("the time is not in 1970 to 2106".into());
    let began_secs = u64::from(u32::try_from(moment()?.secs).map_err(out_of_range)?);
    let seed = arguments.seed.unwrap_or(u64::from(began.nanos) << 32 ^ began_secs);
    let work =
        FsMark { threads, files, rounds, size, seed, began_secs, has_new_dirs: arguments.new_dirs };
    let too_many = || VerbFailure::Usage("these files need more than 1 PiB".into());
    let image_bytes = match arguments.image_size {
        // A block device or an existing image keeps its size.
        None if arguments.volume.image.exists() => None,
        None => Some(work.image_bytes().ok_or_else(too_many)?),
        given => given,
    };
    let site =
        BenchVolumeSite::new(&arguments.volume, image_bytes, arguments.dirty_bytes, console)?;
    let stopwatch = Stopwatch::start();
    let (rounds, sync) = work.run(&site)?;
    let phases = rounds.into_iter().map(|round| BenchPhase { name: None, round }).collect();
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
    let report =
        BenchReport { title, settings, phases, sync, stopwatch, statistics: site.statistics() };
    report.write(arguments.volume.json, out)
}

fn enospc(arguments: &EnospcArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let &EnospcArguments { workers, file_size: size, half_direct, .. } = arguments;
    let work = Enospc { workers, size, is_half_direct: half_direct };
    let engine = BenchVolumeSite::new(
        &arguments.volume,
        Some(arguments.size),
        arguments.dirty_bytes,
        console,
    )?;
    Enospc::prepare(&engine)?;
    let mut workers = work.workers(&engine)?;
    let stopwatch = Stopwatch::start();
    let fill = work.fill(&engine, &mut workers)?;
    let files: Vec<u64> = workers.iter().map(|worker| worker.files).collect();
    let mut phases = vec![BenchPhase { name: Some("fill"), round: fill }];
    if !arguments.keep {
        let round = Enospc::remove(&engine, &mut workers)?;
        phases.push(BenchPhase { name: Some("remove"), round });
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
        BenchReport { title, settings, phases, sync, stopwatch, statistics: engine.statistics() };
    report.write(arguments.volume.json, out)
}

fn dir_fsync(arguments: &DirFsyncArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let &DirFsyncArguments { files, deletes, nodesize, dirty_bytes, .. } = arguments;
    if deletes > files {
        let problem = format!("{deletes} files cannot be removed of {files}");
        return Err(VerbFailure::Usage(problem));
    }
    let work = DirFsync { files, deletes };
    let image_bytes = match arguments.image_size {
        None if arguments.volume.image.exists() => None,
        None => Some((1 << 30) + files * FILE_ITEMS_BYTES),
        given => given,
    };
    let engine = match arguments.volume.format {
        NewVolumeFormat::Btrfs => {
            // Without commits in between, all changes go to the log.
            let options = arguments.volume.options(dirty_bytes);
            let options = EngineOptions { commit_interval: None, ..options };
            BenchVolumeSite::btrfs(
                &arguments.volume,
                image_bytes,
                Some(nodesize),
                &options,
                console,
            )?
        }
        NewVolumeFormat::Xfs => {
            BenchVolumeSite::xfs(&arguments.volume, image_bytes, dirty_bytes, console)?
        }
    };
    let stopwatch = Stopwatch::start();
    let (rounds, sync) = work.run(&engine)?;
    let named = DirFsync::PHASES.into_iter().zip(rounds);
    let phases = named.map(|(name, round)| BenchPhase { name: Some(name), round }).collect();
    let title = format!(
        "dir-fsync: {files} files, {deletes} of them removed; tree blocks of {}, at most {} dirty",
        human_size(u64::from(nodesize)),
        human_size(dirty_bytes)
    );
    let settings = serde_json::json!({
        "workload": "dir-fsync",
        "files": files,
        "deletes": deletes,
        "node_size": nodesize,
        "dirty_bytes": dirty_bytes,
    });
    let report =
        BenchReport { title, settings, phases, sync, stopwatch, statistics: engine.statistics() };
    report.write(arguments.volume.json, out)
}

/// The most bytes that the items of an empty file take: in trees and in a log, each twice, and in
/// leaves that are half full.
const FILE_ITEMS_BYTES: u64 = 4 << 10;

/// A new volume.
struct BenchVolumeSite {
    files: Box<dyn FileSystemMut>,
    volume: BenchedVolume,
}

enum BenchedVolume {
    Btrfs(Arc<BtrfsVolume>),
    Xfs(Arc<XfsVolume>),
}

impl BenchVolumeSite {
    /// Makes the volume, and opens it. With `size_bytes` the image gets that size and need not
    /// exist; otherwise the existing file or device is used.
    fn new(
        arguments: &BenchVolume,
        size_bytes: Option<u64>,
        dirty_bytes: u64,
        console: &Arc<Console>,
    ) -> Result<Self> {
        match arguments.format {
            NewVolumeFormat::Btrfs => {
                let options = arguments.options(dirty_bytes);
                Self::btrfs(arguments, size_bytes, None, &options, console)
            }
            NewVolumeFormat::Xfs => Self::xfs(arguments, size_bytes, dirty_bytes, console),
        }
    }

    /// Makes a volume of btrfs. `node_size` is the size of tree blocks in bytes.
    fn btrfs(
        arguments: &BenchVolume,
        size_bytes: Option<u64>,
        node_size: Option<u32>,
        options: &EngineOptions,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let made = MkfsOptions {
            is_forced: arguments.force,
            node_size,
            ..MkfsOptions::new(Uuid::new_v4(), Timestamp::now())
        };
        let device = Self::device(arguments, size_bytes, |device| {
            mkfs(std::slice::from_ref(device), &made).map(drop)
        })?;
        let console = console.clone();
        let options = EngineOptions {
            reporter: Some(Arc::new(move |report| console.warning(report))),
            ..options.clone()
        };
        let volume = BtrfsVolume::open_writable(vec![device], &options)?;
        let files = volume.clone().files(TreeId::FS.0)?;
        Ok(Self { files, volume: BenchedVolume::Btrfs(volume) })
    }

    /// Makes a volume of XFS.
    fn xfs(
        arguments: &BenchVolume,
        size_bytes: Option<u64>,
        dirty_bytes: u64,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let made = XfsMkfsOptions {
            is_forced: arguments.force,
            log_size: arguments.log_size,
            ..XfsMkfsOptions::new(Uuid::new_v4(), moment()?)
        };
        let device =
            Self::device(arguments, size_bytes, |device| mkfs_xfs(&**device, &made).map(drop))?;
        let mut options = arguments.xfs_options(dirty_bytes);
        let console = console.clone();
        options.reporter = Some(Arc::new(move |report| console.warning(report)));
        let volume = XfsVolume::open_writable(device, &options)?;
        let files = volume.clone().files(volume.root().dev)?;
        Ok(Self { files, volume: BenchedVolume::Xfs(volume) })
    }

    /// The device of the image, on which `make` has made a volume.
    fn device(
        arguments: &BenchVolume,
        size_bytes: Option<u64>,
        make: impl FnOnce(&Arc<dyn BlockDevice>) -> Result<(), Error>,
    ) -> Result<Arc<dyn BlockDevice>> {
        let mut images = NewImages::default();
        let device = images.open(&arguments.image, size_bytes, &LayerArguments::default())?.device;
        make(&device).map_err(usage)?;
        images.keep();
        Ok(device)
    }

    fn statistics(&self) -> EngineStatistics {
        match &self.volume {
            BenchedVolume::Btrfs(volume) => {
                EngineStatistics::Btrfs(Box::new(Statistics::of(volume).with_locks()))
            }
            BenchedVolume::Xfs(volume) => EngineStatistics::Xfs(XfsCounters::of(volume)),
        }
    }
}

/// The attributes of a new file in a benchmark, made now.
fn new_file(permissions: u32) -> NewFile {
    NewFile { permissions, uid: 0, gid: 0, umask: None, at: Timestamp::now() }
}

impl Site for BenchVolumeSite {
    type Dir = FileId;
    type File = FileId;
    type Error = Error;

    fn make_dir(&self, name: &str) -> Result<FileId, Error> {
        self.files
            .mkdir(EntryPlace { dir: self.files.root(), name: name.as_bytes() }, &new_file(0o777))
    }

    fn create(&self, &dir: &FileId, name: &[u8]) -> Result<FileId, Error> {
        self.files.create(EntryPlace { dir, name }, &new_file(0o666))
    }

    fn write(&self, &file: &FileId, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.files.write(file, offset, data, Timestamp::now())
    }

    fn write_direct(&self, &file: &FileId, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.files.write_direct(file, offset, data, Timestamp::now())
    }

    fn remove(&self, &dir: &FileId, name: &[u8]) -> Result<(), Error> {
        self.files.unlink(EntryPlace { dir, name }, Timestamp::now())
    }

    fn fsync_dir(&self, &dir: &FileId) -> Result<(), Error> {
        self.files.fsync(dir)
    }

    fn available_bytes(&self) -> Result<u64, Error> {
        Ok(self.files.statfs()?.available_bytes)
    }

    fn sync(&self) -> Result<(), Error> {
        self.files.sync()
    }

    fn is_no_space(error: &Error) -> bool {
        error.errno() == Errno::NOSPC
    }
}
