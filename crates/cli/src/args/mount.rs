//! The options of `offshoot mount` and `offshoot unmount`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgAction, Args};

use super::OpenArguments;
use crate::live::ServedVolume;

pub(crate) const MOUNT_HELP: &str = "\
Without VOLUME and DIRECTORY it lists what is mounted.

Options as of mount, separated by commas: ro, rw, subvol=PATH, subvolid=ID, compress[=zlib|lzo|zstd[:LEVEL]|none], \
compress-force[=...], nodatacow, nodatasum, max_inline=BYTES, commit=SECONDS, notreelog, discard[=sync|async] (both are done soon after a commit), flushoncommit, degraded, device=FILE, allow_other, uid=ID|NAME and gid=ID|NAME (all files are shown with that owner, and no owner \
can be changed), norecovery or nologreplay (read-only, without what was fsynced since the last commit), \
rescue=usebackuproot, ignorebadroots, ignoredatacsums, nologreplay or all, several with : between them (a damaged volume, read-only; docs/recover.md), suid, dev, noexec, \
nofail (a volume that is not there is no error), idmap (root can show it elsewhere with mapped ids, and no verb works on it meanwhile), io_uring and noio_uring (over io_uring or not at all, or over /dev/fuse; without these over io_uring where the kernel \
offers it: Linux 6.14, with Y in /sys/module/fuse/parameters/enable_uring), fuseblk (see below), nosandbox, \
remount with ro, rw, suid, dev, exec and the options that are in force. As a user, `fusermount3` mounts.

Each format has options of its own, which are refused by name on the other one. Those of XFS that are true in any case are accepted (inode64, noquota, attr2, logbufs=, logbsize= and others); \
quotas, wsync, inode32, dax, logdev= and rtdev= are refused. fuseblk is for btrfs alone.

Options that are only wishes are accepted, with one warning: autodefrag, lazytime, strictatime, thread_pool=, user_xattr, skip_balance, clear_cache, \
user_subvol_rm_allowed and others of btrfs(5) and mount(8). Those that a user would rely on are refused by name: sync, noacl, context= and others.

What may only be read is mounted read-only, and a message says so. For root, a volume that is mounted can be mounted in further places, each with a subvolume of its own: \
ro, rw, suid, dev and exec are those of the place, and all other options those of the first mount.

What programs fsync is stored when that returns, and everything when unmount does. sync and syncfs return before anything is stored: FUSE does not pass them \
on, so what they were called for is stored by the next commit (commit=, 30 seconds), or by `offshoot sync`. Nor does it pass on cloning (FICLONE; copy_file_range shares data) and \
fallocate that collapses or inserts. SEEK_DATA and SEEK_HOLE tell holes of files that no process has open for reading and writing.

With -o fuseblk root mounts a volume on whole block devices with the type fuseblk.offshoot: sync and syncfs store everything on it (since Linux 6.18), \
umount waits until everything is stored, and the mount keeps all others from the device. After `umount -f`, what was not synced may be lost, and a write \
under way may come too late for a program that takes the device at once. docs/mount.md says more.

While it serves a volume the program can open, run and connect to nothing: it has no capabilities, and Landlock and seccomp refuse the rest, where the kernel has \
them. A second process, which reads nothing of the volume, mounts and unmounts for it. -o nosandbox lets it keep its rights.

What goes wrong while it is mounted is written to FILE, or else to the log of the system. With -v it also shows what the engine does; SIGUSR1 switches that on, and off again. SIGTERM unmounts. Linked to /sbin/mount.fuse.offshoot and \
/sbin/umount.fuse.offshoot, and for -o fuseblk the same with fuseblk, the program is what mount, umount and /etc/fstab need for the type fuse.offshoot. Under these names it ends with the codes \
of mount(8): 1 for wrong options, 2 for a failure of the system, 32 for a mount that failed.

Examples:
  offshoot mount
  offshoot mount disk.img /mnt
  offshoot mount -o ro,subvol=snapshots/monday /dev/sdb1 /mnt
  offshoot mount -o compress=zstd,allow_other disk.img /mnt
  offshoot subvolume snapshot -r /mnt/home /mnt/monday
  offshoot unmount /mnt";

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(crate) struct MountArguments {
    /// The image or block device
    #[arg(value_name = "VOLUME")]
    pub(crate) volume: Option<PathBuf>,
    /// The directory to mount over
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) open: OpenArguments,
    /// List mounts as JSON
    #[arg(long, conflicts_with = "volume")]
    pub(crate) json: bool,
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
    /// Mount and unmount for the program that started this one, over the socket that is the
    /// standard input
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
    /// Show what the engine does, as -v before the verb does
    #[arg(short = 'v', long, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// As mount calls it: the type, which is this one
    #[arg(short = 't', hide = true)]
    _file_system_type: Option<String>,
}

pub(crate) const SYNC_HELP: &str = "\
Unlike sync and syncfs, which FUSE passes on for mounts with -o fuseblk only.

Examples:
  offshoot sync /mnt";

#[derive(Args)]
pub(crate) struct SyncArguments {
    /// A directory in the mounted volume
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The volume, in the process that serves it
    #[arg(skip)]
    pub(crate) live: Option<Arc<ServedVolume>>,
}

/// What one run of the program asks the one that serves a mount.
#[derive(Args)]
pub(crate) struct InForceArguments {
    /// A directory in the mounted volume
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
    /// The subvolume whose number is asked for
    #[arg(long, value_name = "ID|PATH")]
    pub(crate) subvolume: Option<OsString>,
    /// The volume, in the process that serves it
    #[arg(skip)]
    pub(crate) live: Option<Arc<ServedVolume>>,
}

pub(crate) const UNMOUNT_HELP: &str = "\
It returns when everything is on the devices, and they are free. A mount whose program has ended is cleaned up.

Examples:
  offshoot unmount /mnt
  offshoot unmount --lazy /mnt";

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(crate) struct UnmountArguments {
    /// Where the volume is mounted
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Also while it is in use: it goes when no process uses it any more, and is not waited for
    #[arg(short = 'l', long)]
    pub(crate) lazy: bool,
    /// As umount calls it: nothing that matters here
    #[arg(short = 'n', hide = true)]
    _no_mtab: bool,
    /// Also when the program that serves it does not answer; what was done last may not be stored
    /// then. One that is stopped is continued
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
