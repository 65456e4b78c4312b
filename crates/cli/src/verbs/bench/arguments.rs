//! The options of the benchmarks.

#[cfg(feature = "measure")]
mod mechanisms;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use offshoot_btrfs::EngineOptions;
use offshoot_xfs::XfsOptions;

use crate::args::parse_size;
use crate::verbs::mkfs::{NewVolumeFormat, parse_node_size};
#[cfg(feature = "measure")]
use mechanisms::MechanismArguments;

pub(crate) const BENCH_HELP: &str = "\
Each makes a new volume on IMAGE and works on it in this process, without the kernel. The image is left behind.

Examples:
  offshoot bench fs-mark disk.img --threads 2
  offshoot bench fs-mark disk.img --threads 12 --files 10000 --rounds 3 --size 4K --force --json
  offshoot bench enospc disk.img --size 256M --workers 8
  offshoot bench dir-fsync disk.img --nodesize 64K";

const FS_MARK_HELP: &str = "\
Every thread makes files in a directory of its own, d1, d2 and so on. A round is over when all threads are \
done with it; after the last one everything is made durable, and the time for that is counted in the total. Names are those \
of the program fs_mark: the time, and 24 random letters and digits. A file begins with its name.";

const ENOSPC_HELP: &str = "\
A large file first takes what there is for data but 2 MiB. Then every worker makes files in a directory of its own, d1, \
d2 and so on, until there is no space, and at last removes them. They are called file_0, file_1 and so on, and begin with their \
name. A file that could be made and not be written is removed at once and not counted.";

const DIR_FSYNC_HELP: &str = "\
Empty files are made in the directory d1: file_1, file_2 and so on. The directory is synced by itself, which makes the new files durable \
too (fsync 1). Everything is synced (sync 1), some files are removed, each as far from the next, and the directory is synced again \
(fsync 2). Nothing is committed by the clock meanwhile.";

#[derive(Subcommand)]
pub(crate) enum BenchVerb {
    /// Make many small files, with several threads
    #[command(after_help = FS_MARK_HELP)]
    FsMark(FsMarkArguments),
    /// Make small files until there is no space, and remove them
    #[command(after_help = ENOSPC_HELP)]
    Enospc(EnospcArguments),
    /// Sync a large directory by itself, after adding to it and after removing from it
    #[command(after_help = DIR_FSYNC_HELP)]
    DirFsync(DirFsyncArguments),
}

/// The volume of a benchmark, and how the engine works on it.
#[derive(Args)]
pub(crate) struct BenchVolume {
    /// Where the volume is made: an image, which need not be there, or a block device
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,
    /// The format of the volume
    #[arg(long, value_name = "FORMAT", default_value = "btrfs")]
    pub(crate) format: NewVolumeFormat,
    /// The size of the log of an XFS volume; otherwise as large as mkfs makes it
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) log_size: Option<u64>,
    /// What the sizes of formatted items of XFS are rounded up to; 128 rounds nothing
    #[cfg(feature = "measure")]
    #[arg(long, value_name = "BYTES", default_value = "512")]
    pub(crate) shadow_round_bytes: usize,
    /// Overwrite what is on it
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[cfg(feature = "measure")]
    #[command(flatten)]
    mechanisms: MechanismArguments,
}

impl BenchVolume {
    /// How a btrfs volume is opened.
    #[cfg_attr(
        not(feature = "measure"),
        expect(clippy::unused_self, reason = "it holds only switches for measuring")
    )]
    pub(crate) fn options(&self, dirty_bytes: u64) -> EngineOptions {
        EngineOptions {
            dirty_bytes,
            #[cfg(feature = "measure")]
            mechanisms: self.mechanisms.chosen(),
            ..EngineOptions::default()
        }
    }
}

impl BenchVolume {
    /// How an XFS volume is opened.
    #[cfg_attr(
        not(feature = "measure"),
        expect(clippy::unused_self, reason = "it holds only switches for measuring")
    )]
    pub(crate) fn xfs_options(&self, dirty_bytes: u64) -> XfsOptions {
        XfsOptions {
            dirty_bytes,
            cache_bytes: dirty_bytes,
            #[cfg(feature = "measure")]
            shadow_round_bytes: self.shadow_round_bytes,
            ..XfsOptions::default()
        }
    }
}

#[derive(Args)]
pub(crate) struct FsMarkArguments {
    #[command(flatten)]
    pub(crate) volume: BenchVolume,
    /// How many threads make files
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_threads)]
    pub(crate) threads: u64,
    /// How many files each makes in a round
    #[arg(long, value_name = "F", default_value = "100000", value_parser = parse_count)]
    pub(crate) files: u64,
    /// How many rounds there are
    #[arg(long, value_name = "R", default_value = "10", value_parser = parse_count)]
    pub(crate) rounds: u64,
    /// Make the files of each round in new directories
    #[arg(long)]
    pub(crate) new_dirs: bool,
    /// How much each file holds, up to 1G
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_file_size)]
    pub(crate) size: usize,
    /// Make an image of this size; otherwise of one that is large enough and full of holes
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) image_size: Option<u64>,
    /// What the random names follow from; the time otherwise
    #[arg(long, value_name = "NUMBER")]
    pub(crate) seed: Option<u64>,
    // Names are hashed, so files in a large directory change leaves all over it. If all leaves for
    // two million names fit into memory, a file takes a third of the CPU time that it takes with
    // 256 MiB.
    /// What may be changed and not yet on the device, of data and of tree blocks
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    pub(crate) dirty_bytes: u64,
}

#[derive(Args)]
pub(crate) struct EnospcArguments {
    #[command(flatten)]
    pub(crate) volume: BenchVolume,
    /// The size of the image
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub(crate) size: u64,
    /// How many workers make files
    #[arg(long, value_name = "N", default_value = "8", value_parser = parse_threads)]
    pub(crate) workers: u64,
    /// How much each file holds, up to 1G
    #[arg(long, value_name = "SIZE", default_value = "1K", value_parser = parse_file_size)]
    pub(crate) file_size: usize,
    /// Write every second file directly: on the device, and not in memory, when the call returns
    #[arg(long)]
    pub(crate) half_direct: bool,
    /// Stop when there is no space, and remove nothing
    #[arg(long)]
    pub(crate) keep: bool,
    /// What may be changed and not yet on the device, of data and of tree blocks
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    pub(crate) dirty_bytes: u64,
}

#[derive(Args)]
pub(crate) struct DirFsyncArguments {
    #[command(flatten)]
    pub(crate) volume: BenchVolume,
    /// How many files are made
    #[arg(long, value_name = "N", default_value = "1000000", value_parser = parse_count)]
    pub(crate) files: u64,
    /// How many of them are removed
    #[arg(long, value_name = "N", default_value = "1000", value_parser = parse_count)]
    pub(crate) deletes: u64,
    /// The size of tree blocks, 4K to 64K
    #[arg(short = 'n', long, value_name = "SIZE", default_value = "16K")]
    #[arg(value_parser = parse_node_size)]
    pub(crate) nodesize: u32,
    /// Make an image of this size; otherwise of one that is large enough and full of holes
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) image_size: Option<u64>,
    // All new files should be in one transaction, so that the fsync has to write all of them.
    /// What may be changed and not yet on the device, of data and of tree blocks
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = parse_size)]
    pub(crate) dirty_bytes: u64,
}

/// More threads than any machine has processors, and fewer than a process may have.
const THREADS_MAX: u64 = 4096;

fn parse_threads(text: &str) -> Result<u64, String> {
    let count = parse_count(text)?;
    if count > THREADS_MAX { Err(format!("at most {THREADS_MAX}")) } else { Ok(count) }
}

fn parse_count(text: &str) -> Result<u64, String> {
    // The bound keeps products of two counts below 2^64.
    let count: Option<u32> = text.parse().ok().filter(|&count| count > 0);
    count.map(u64::from).ok_or_else(|| format!("a number from 1 to {} is expected", u32::MAX))
}

fn parse_file_size(text: &str) -> Result<usize, String> {
    let size = usize::try_from(parse_size(text)?).ok().filter(|&size| size <= 1 << 30);
    size.ok_or_else(|| "a file holds at most 1G here".to_owned())
}
