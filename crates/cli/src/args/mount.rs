//! The options of `offshoot mount` and `offshoot unmount`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgAction, Args};

use super::VolumeArguments;
use crate::live::Live;

pub(crate) const MOUNT_HELP: &str = "\
Options as of mount, separated by commas: ro, rw, subvol=PATH, subvolid=ID, compress[=zlib|lzo|zstd[:LEVEL]|none], \
compress-force[=...], nodatacow, nodatasum, max_inline=BYTES, commit=SECONDS, notreelog, discard[=sync|async] (both are done soon after a commit), flushoncommit, degraded, device=FILE, allow_other, uid=ID and gid=ID (all files are shown with that owner, and no owner \
can be changed), suid, dev, noexec, io_uring and noio_uring (over io_uring or not at all, or over /dev/fuse; without these over io_uring where the kernel \
offers it: Linux 6.14, with Y in /sys/module/fuse/parameters/enable_uring), nosandbox, \
remount with ro or rw. Others of btrfs are refused by name. As a user, `fusermount3` mounts.

What programs fsync is stored when that returns, and everything when unmount does. sync and syncfs return before anything is stored: FUSE does not pass them \
on, so what they were called for is stored by the next commit (commit=, 30 seconds), or by `offshoot sync`. Nor does it pass on cloning (FICLONE; copy_file_range shares data) and \
fallocate that collapses or inserts. SEEK_DATA and SEEK_HOLE tell holes of files that nobody has open for reading and writing.

While it serves a volume the program can open, run and connect to nothing: it has no capabilities, and Landlock and seccomp refuse the rest, where the kernel has \
them. A second process, which reads nothing of the volume, mounts and unmounts for it. -o nosandbox lets it keep its rights.

What goes wrong while it is mounted is written to FILE, or else to the log of the system. SIGTERM unmounts. Under the names mount.offshoot and \
umount.fuse.offshoot in /sbin the program is what mount, umount and /etc/fstab need for the type offshoot.

Examples:
  offshoot mount disk.img /mnt
  offshoot mount -o ro,subvol=snapshots/monday /dev/sdb1 /mnt
  offshoot mount -o compress=zstd,allow_other disk.img /mnt
  offshoot subvolume snapshot -r /mnt/home /mnt/monday
  offshoot unmount /mnt";

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(crate) struct MountArguments {
    #[command(flatten)]
    pub(crate) volume: VolumeArguments,
    /// The directory to mount over
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
    /// Options in the form of mount
    #[arg(short = 'o', value_name = "OPTIONS", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) options: Vec<String>,
    /// Stay in the foreground, with messages on standard error
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Write messages to FILE while it is mounted
    #[arg(long, value_name = "FILE", conflicts_with = "foreground")]
    pub(crate) log: Option<PathBuf>,
    /// Serve in the background of the program that started this one, and tell it when that began
    #[arg(long, hide = true, conflicts_with = "foreground")]
    pub(crate) in_background: bool,
    /// Mount and unmount for the program that started this one, over the socket that is the standard input
    #[arg(long, hide = true, conflicts_with = "in_background")]
    pub(crate) helper: bool,
    /// As mount calls it: let options be that are not known
    #[arg(short = 's', hide = true)]
    pub(crate) sloppy: bool,
    /// As mount calls it: do not mount
    #[arg(short = 'f', hide = true)]
    pub(crate) fake: bool,
    /// As mount calls it: nothing that matters here
    #[arg(short = 'n', hide = true)]
    _no_mtab: bool,
    /// As mount calls it: nothing that matters here
    #[arg(short = 'v', hide = true, action = ArgAction::Count)]
    _verbose: u8,
    /// As mount calls it: the type, which is this one
    #[arg(short = 't', hide = true)]
    _file_system_type: Option<String>,
}

pub(crate) const SYNC_HELP: &str = "\
Unlike sync and syncfs, which FUSE does not pass on.

Examples:
  offshoot sync /mnt";

#[derive(Args)]
pub(crate) struct SyncArguments {
    /// A directory in the mounted volume
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
    /// The volume, in the process that serves it
    #[arg(skip)]
    pub(crate) live: Option<Arc<Live>>,
}

pub(crate) const UNMOUNT_HELP: &str = "\
It returns when everything is on the devices, and they are free.

Examples:
  offshoot unmount /mnt
  offshoot unmount --lazy /mnt";

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(crate) struct UnmountArguments {
    /// Where the volume is mounted
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
    /// Also while it is in use: it goes when nobody uses it any more, and is not waited for
    #[arg(short = 'l', long)]
    pub(crate) lazy: bool,
    /// As umount calls it: nothing that matters here
    #[arg(short = 'n', hide = true)]
    _no_mtab: bool,
    /// Also when the program that serves it does not answer; what was done last may not be stored then. One that is stopped is continued
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// As umount calls it: nothing that matters here
    #[arg(short = 'r', hide = true)]
    _remount: bool,
    /// As umount calls it: nothing that matters here
    #[arg(short = 'v', hide = true, action = ArgAction::Count)]
    _verbose: u8,
    /// As umount calls it: the type, which is this one
    #[arg(short = 't', hide = true)]
    _file_system_type: Option<String>,
}
