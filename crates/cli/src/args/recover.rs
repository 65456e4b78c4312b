//! The options of `offshoot recover`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::OpenArguments;

pub(crate) const RECOVER_HELP: &str = "\
Everything that can still be read of a damaged btrfs volume is written into DIRECTORY, or to a tar archive, as extract writes it. \
Nothing is written to the volume. With PATH only what is at that path from the top level is taken.

The volume is read through the newest root that can be used, and around blocks that cannot be read. Files whose names are lost are in \
lost+found/SUBVOLUME/INODE. Data that no copy gives becomes zeros, and data whose checksums are lost is taken as it is; at the end a list says \
which files have some of these, and the exit code is 3 then.

Without a sound superblock on one of the devices, all devices are searched for what the volume has on them, and a superblock is made of \
that in a temporary file. --fsid chooses between several volumes that are found.

--deleted looks through the roots of older commits for files that the volume does not show any more. Their data may have been overwritten since, \
which their checksums tell.

--list-roots shows the roots of older commits that are still there, the newest first; --generation reads the volume through one of them.

Examples:
  offshoot recover broken.img out
  offshoot recover broken.img --tar out.tar home/alice
  offshoot recover --device /dev/sdc /dev/sdb out
  offshoot recover --list-roots broken.img
  offshoot recover --generation 1042 /dev/sdb out
  offshoot recover --deleted='*.jpg' card.img out
  offshoot recover --ignore-checksums --json broken.img out | jq .replaced";

#[derive(Args)]
pub(crate) struct RecoverArguments {
    /// The image or block device
    #[arg(value_name = "VOLUME")]
    pub(crate) volume: PathBuf,
    /// The directory to write into, unless there is an archive, and a path in the volume
    #[arg(value_name = "DIRECTORY] [PATH", num_args = 0..=2)]
    pub(crate) words: Vec<OsString>,
    #[command(flatten)]
    pub(crate) open: OpenArguments,
    /// Write a tar archive instead, to FILE or with `-` to standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) tar: Option<PathBuf>,
    /// Read the volume as the commit with this generation left it
    #[arg(long, value_name = "NUMBER")]
    pub(crate) generation: Option<u64>,
    /// Read the volume through the block of the root tree at this logical address
    #[arg(long, value_name = "ADDRESS", conflicts_with = "generation")]
    pub(crate) root: Option<u64>,
    /// Write files that older roots show and the volume as it is now does not, into a directory for
    /// each generation. PATTERN is compared with their names, or with their paths if it has a slash
    #[arg(long, value_name = "PATTERN", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "*", conflicts_with_all = ["tar", "generation", "root"])]
    pub(crate) deleted: Option<OsString>,
    /// The volume to look for when no superblock is sound and the devices have blocks of several
    #[arg(long, value_name = "UUID")]
    pub(crate) fsid: Option<uuid::Uuid>,
    /// Show the roots that are there
    #[arg(long, conflicts_with_all = ["tar", "generation", "root", "deleted"])]
    pub(crate) list_roots: bool,
    /// Write what was done as JSON
    #[arg(long)]
    pub(crate) json: bool,
}
