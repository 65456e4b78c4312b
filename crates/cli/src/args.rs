//! The command line: verbs, options, help.

mod attributes;
mod edit;
mod look;
mod mount;
mod mounted;
mod property;
mod recover;
mod repair;
mod size;
mod subvolume;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum, ValueHint};
use offshoot_device::ImageKind;

use attributes::{CHMOD_HELP, CHOWN_HELP, MKNOD_HELP, RMDIR_HELP, TOUCH_HELP};
pub(crate) use attributes::{
    ChmodArguments, ChownArguments, MknodArguments, RmdirArguments, TouchArguments,
};
use edit::{
    CHATTR_HELP, CP_HELP, DEDUPE_HELP, FALLOCATE_HELP, GETFATTR_HELP, LN_HELP, MKDIR_HELP, MV_HELP,
    RM_HELP, SETFATTR_HELP, TRUNCATE_HELP,
};
pub(crate) use edit::{
    ChattrArguments, CpArguments, DedupeArguments, Encoding, FallocateArguments, FlagChange,
    GetfattrArguments, LnArguments, MkdirArguments, MvArguments, PreserveListArgument,
    ReflinkArgument, RmArguments, SetfattrArguments, TruncateArguments, TruncateSize,
};
pub(crate) use look::{
    ColorWhen, DfArguments, DuArguments, FindArguments, LsArguments, LsattrArguments,
    StatArguments, TreeVerbArguments,
};
use look::{DF_HELP, DU_HELP, FIND_HELP, LS_HELP, LSATTR_HELP, STAT_HELP, TREE_HELP};
pub(crate) use mount::{InForceArguments, MountArguments, SyncArguments, UnmountArguments};
use mount::{MOUNT_HELP, SYNC_HELP, UNMOUNT_HELP};
pub(crate) use mounted::OnMount;
pub(crate) use property::{
    GetPropertyArguments, ListPropertyArguments, Property, PropertyVerb, SetPropertyArguments,
};
use recover::RECOVER_HELP;
pub(crate) use recover::RecoverArguments;
use repair::REPAIR_HELP;
pub(crate) use repair::RepairArguments;
pub(crate) use size::{NewSize, SizeChange, parse_minimal, parse_size};
pub(crate) use subvolume::{
    EditSubvolumeArguments, ListArguments, SetArguments, SnapshotArguments, SubvolumeArguments,
    SubvolumeVerb, SubvolumesArguments,
};

use crate::live::ServedVolume;
use crate::mount::is_called_by_mount;
use crate::verbs::bench::{BENCH_HELP, BenchVerb};
use crate::verbs::btrfs::rescuing::RescueArguments;
use crate::verbs::btrfs::storing::StoringArguments;
use crate::verbs::build::{BUILD_HELP, BuildArguments};
use crate::verbs::mkfs::{MKFS_HELP, MkfsArguments};

// clap wraps lines that are longer than the terminal, so a paragraph is one line here.

const HELP: &str = "\
A place in a volume is VOLUME:/PATH; VOLUME alone is its root. VOLUME is an image or a block \
device. When several files fit, the longest name before a `:/` that exists is the volume.

VOLUME is btrfs or XFS. It may be a disk with partitions: the \
one that holds a volume is it, and FILE@PARTITION names one by number, label or UUID. A qcow2 or VMDK is read and written; VDI, VHD, \
VHDX, and what gzip, xz or zstd compressed, are read.

While a volume is mounted with `offshoot mount`, a path in it is a place too, for info, ls, \
property, scrub, stat, stats, subvolume, sync and trim: root, and who mounted it, have them done \
by the program that serves it. An image that is kept in a mount is the volume in it.

Examples:
  offshoot info disk.img
  offshoot ls -l disk.img:/etc
  offshoot cat disk.img:/etc/fstab
  offshoot extract disk.img out
  offshoot extract disk.img:/home --tar - | zstd > home.tar.zst
  offshoot mkfs new.img --size 4G
  offshoot build root.img --from rootfs.tar.zst
  offshoot cp -r src new.img:/src
  offshoot subvolume snapshot -r disk.img:/home disk.img:/snapshots/monday
  offshoot ls --subvolume snapshots/monday disk.img
  offshoot ls /dev/sdb --device /dev/sdc --degraded
  offshoot mount disk.img /mnt
  offshoot subvolume snapshot /mnt/home /mnt/home-of-monday
  offshoot bench fs-mark bench.img --threads 2

Names with control characters, invisible characters or bytes that are not UTF-8 are shown \
with `\\n`, `\\u{1b}` or `\\xff`, and `\\\\` for a backslash. In JSON strings only `\\xff` and \
`\\\\` are used besides JSON's own escapes.

-v before the verb, or OFFSHOOT_LOG in the environment, shows on standard error what the engine \
does: OFFSHOOT_LOG=debug, or OFFSHOOT_LOG=btrfs::commit=trace,fuse=debug for parts of it. \
docs/mount.md says more. Behind a verb, -v is the option of that verb.

With SOURCE_DATE_EPOCH in the environment (seconds since 1970) all changes are made at that time, \
and a verb that changes an image makes the same bytes each time: docs/reproducible.md.

Exit codes: 0 done, 1 failed, 2 wrong usage (of ls also a place that is not there), \
3 the volume is corrupt, 4 the volume needs a \
feature that is not supported.";

const INFO_HELP: &str = "\
Examples:
  offshoot info disk.img
  offshoot info cloud.qcow2@2
  offshoot info --backing overlay.qcow2
  offshoot info /dev/sdb --device /dev/sdc
  offshoot info disk.img --json | jq .devices";

const CAT_HELP: &str = "\
A file that cannot be read is reported, and the others are written.

Examples:
  offshoot cat disk.img:/etc/fstab
  offshoot cat disk.img:/etc/hostname disk.img:/etc/hosts
  offshoot cat --subvolume snapshots/monday disk.img:/etc/fstab | diff - fstab";

const STATS_HELP: &str = "\
What the engine does while it changes a volume is shown for one that is mounted, by cp, mkdir, mv, ln and rm with --stats, and by bench.

Examples:
  offshoot stats disk.img
  offshoot stats /mnt
  offshoot stats --locks /mnt
  offshoot stats /dev/sdb --device /dev/sdc --json";

const TRIM_HELP: &str = "\
Image files get holes where the volume holds nothing, and take less of the host; disks and memory cards are told that they need not keep it. \
What deleted subvolumes hold is not free until it is dropped.

Examples:
  offshoot trim disk.img
  offshoot trim /dev/sdb --device /dev/sdc --json";

const RESIZE_HELP: &str = "\
SIZE is a new size such as 20G, a change such as +4G or -512M, max for all of the device, or minimal for the smallest size; minimal+64M leaves so much room at the end. \
For a volume with several devices the number of one comes before it, as in 2:20G; otherwise it is device 1. XFS volumes only grow, and not while they are mounted.

What lies behind a new end moves first: no file, snapshot or clone changes, and what is shared stays shared. An image file becomes longer before its volume grows and is cut off after that has shrunk. A power cut at any time leaves the volume as it was, or with the new size. \
A volume that is mounted with offshoot can be used meanwhile; its image keeps its length when the volume shrinks.

Examples:
  offshoot resize root.img 8G
  offshoot resize root.img minimal
  offshoot resize /mnt -- -10G
  offshoot resize /dev/sdb --device /dev/sdc 2:max";

const CHECK_HELP: &str = "\
Nothing is written. Each finding has a number that stays the same in all versions, a place and a text; the exit code is 3 then, and 0 if \
there is none. docs/check.md has all numbers. A volume that does not open is checked, too.

Of btrfs everything is compared as the last commit left it, on all cores; a pending log is read and not replayed. What has no room in \
--memory goes to files in --scratch. With --data every copy of all data is read and compared with \
its checksums; scrub -r also verifies parity. \
Of a mount of ours the state of this moment is checked while programs go on; no other program may write the volume meanwhile.

Of XFS the log of a volume that was not unmounted is replayed in memory first, or ignored with --ignore-log: then structures may \
contradict each other.

Examples:
  offshoot check disk.img
  offshoot check --data /dev/sdb --device /dev/sdc
  offshoot check /mnt
  offshoot check server.img@2
  offshoot check --json /dev/sdb | jq .number";

const SCRUB_HELP: &str = "\
Every copy of everything that is allocated is read and compared with its checksum, and a bad one is written over with what a good one, \
or the rest of its row, gives; superblocks too. What was corrected is a warning. What was not is an error, with the names of the files \
that have it, and the exit code is 3 then. Volumes with RAID5 or RAID6 are only read.

Of a volume that is not mounted nothing else is changed: a log that is pending stays, and is not looked at. What another program writes \
meanwhile, as the kernel does where it has the volume mounted, may look bad with -r.

Examples:
  offshoot scrub disk.img
  offshoot scrub -r /dev/sdb --device /dev/sdc
  offshoot scrub /mnt
  offshoot scrub --json disk.img | tail -n 1";

const DUMP_HELP: &str = "\
Examples:
  offshoot dump super disk.img
  offshoot dump chunks disk.img
  offshoot dump tree disk.img extent
  offshoot dump tree disk.img 256 --json | jq .
  offshoot dump log disk.img
  offshoot dump inode server.img 128";

const RESCUE_HELP: &str = "\
A log that can be replayed is worth keeping: every verb that writes replays it, as a mount by the kernel would; of XFS, \
replay-log does nothing else. A log that was thrown away leaves XFS to xfs_repair.

Examples:
  offshoot dump log disk.img
  offshoot rescue replay-log server.img
  offshoot rescue zero-log disk.img";

/// Volumes of btrfs and XFS from the command line, without root and without the kernel.
#[derive(Parser)]
#[command(name = "offshoot", version, after_help = HELP, max_term_width = 100)]
#[command(subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Arguments {
    /// Show on standard error what the engine does; -vv shows more, -vvv all of it. Comes before
    /// the verb
    #[arg(short = 'v', long, action = ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

impl Arguments {
    /// How much of what the engine does is shown. `mount` has the option too, so that it may stand
    /// behind that verb, and passes it on to the run that serves.
    pub(crate) fn settle_verbosity(&mut self) -> u8 {
        match &mut self.verb {
            Verb::Mount(mount) => {
                // mount(8) has an option of that name for itself, and passes it on.
                let own = if is_called_by_mount() { 0 } else { mount.verbose };
                mount.verbose = own.saturating_add(self.verbose);
                mount.verbose
            }
            _ => self.verbose,
        }
    }
}

#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Show what a volume is: sizes, features, devices, profiles
    #[command(after_help = INFO_HELP)]
    Info(InfoArguments),
    /// List directories
    #[command(after_help = LS_HELP)]
    Ls(LsArguments),
    /// Show everything that is known of a file
    #[command(after_help = STAT_HELP)]
    Stat(StatArguments),
    /// Look for files by name, type, size and time
    #[command(after_help = FIND_HELP)]
    Find(FindArguments),
    /// Show directories as a tree
    #[command(after_help = TREE_HELP)]
    Tree(TreeVerbArguments),
    /// Show the space that files take
    #[command(after_help = DU_HELP)]
    Du(DuArguments),
    /// Show how much of volumes is used and free
    #[command(after_help = DF_HELP)]
    Df(DfArguments),
    /// Write the contents of files to standard output, one after the other
    #[command(after_help = CAT_HELP)]
    Cat(CatArguments),
    /// Take a file or a whole tree out of a volume
    #[command(after_help = EXTRACT_HELP)]
    Extract(ExtractArguments),
    /// Get out of a damaged btrfs volume what can still be read
    #[command(after_help = RECOVER_HELP)]
    Recover(RecoverArguments),
    /// Copy files and directories into, out of and between volumes
    #[command(after_help = CP_HELP)]
    Cp(CpArguments),
    /// Make directories
    #[command(after_help = MKDIR_HELP)]
    Mkdir(MkdirArguments),
    /// Remove empty directories
    #[command(after_help = RMDIR_HELP)]
    Rmdir(RmdirArguments),
    /// Remove files and directories
    #[command(after_help = RM_HELP)]
    Rm(RmArguments),
    /// Move or rename files and directories
    #[command(after_help = MV_HELP)]
    Mv(MvArguments),
    /// Give a file one more name, or make a symbolic link
    #[command(after_help = LN_HELP)]
    Ln(LnArguments),
    /// Make device nodes and FIFOs
    #[command(after_help = MKNOD_HELP)]
    Mknod(MknodArguments),
    /// Change times of files, and make empty ones
    #[command(after_help = TOUCH_HELP)]
    Touch(TouchArguments),
    /// Change permissions
    #[command(after_help = CHMOD_HELP)]
    Chmod(ChmodArguments),
    /// Change owners
    #[command(after_help = CHOWN_HELP)]
    Chown(ChownArguments),
    /// Show flags of files and directories
    #[command(after_help = LSATTR_HELP)]
    Lsattr(LsattrArguments),
    /// Change flags of files and directories
    #[command(after_help = CHATTR_HELP)]
    Chattr(ChattrArguments),
    /// Allocate, free, zero or move a range of a file
    #[command(after_help = FALLOCATE_HELP)]
    #[command(mut_arg("volume_offset", |arg| arg.long("volume-offset")))]
    Fallocate(FallocateArguments),
    /// Make files longer or shorter
    #[command(after_help = TRUNCATE_HELP)]
    Truncate(TruncateArguments),
    /// Let files share the space of what is the same in them
    #[command(after_help = DEDUPE_HELP)]
    #[command(mut_arg("volume_offset", |arg| arg.long("volume-offset")))]
    Dedupe(DedupeArguments),
    /// Set or remove an extended attribute
    #[command(after_help = SETFATTR_HELP)]
    Setfattr(SetfattrArguments),
    /// Show extended attributes
    #[command(after_help = GETFATTR_HELP)]
    Getfattr(GetfattrArguments),
    /// Show and set properties: the label, and those of btrfs
    #[command(subcommand, subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
    Property(PropertyVerb),
    /// Make a volume of btrfs or XFS
    #[command(after_help = MKFS_HELP)]
    Mkfs(MkfsArguments),
    /// Make a volume of btrfs or XFS and fill it from directories, archives and container images
    #[command(after_help = BUILD_HELP)]
    Build(Box<BuildArguments>),
    /// Mount a volume, or list what is mounted
    #[command(after_help = MOUNT_HELP)]
    Mount(MountArguments),
    /// Unmount a volume
    #[command(after_help = UNMOUNT_HELP, visible_alias = "umount")]
    Unmount(UnmountArguments),
    /// Show the options of a mount that are in force
    #[command(hide = true)]
    InForce(InForceArguments),
    /// Make everything durable that was done on a mounted volume
    #[command(after_help = SYNC_HELP)]
    Sync(SyncArguments),
    /// Show how much of a volume is used, of btrfs by kind and profile
    #[command(after_help = STATS_HELP)]
    Stats(StatsArguments),
    /// Tell the devices of a volume which ranges of them hold nothing
    #[command(after_help = TRIM_HELP)]
    Trim(InfoArguments),
    /// Make a device of a btrfs volume larger or smaller
    #[command(after_help = RESIZE_HELP)]
    Resize(ResizeArguments),
    /// Compare everything that the structures of a volume say about each other
    #[command(after_help = CHECK_HELP)]
    Check(CheckArguments),
    /// Mend structures of a btrfs volume that follow from others
    #[command(after_help = REPAIR_HELP)]
    Repair(RepairArguments),
    /// Read and verify every copy of everything in a btrfs volume, and repair what is bad
    #[command(after_help = SCRUB_HELP)]
    Scrub(ScrubArguments),
    /// Work with subvolumes of btrfs
    #[command(subcommand, subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
    Subvolume(SubvolumeVerb),
    /// Show structures of the format
    #[command(subcommand, after_help = DUMP_HELP)]
    #[command(subcommand_value_name = "STRUCTURE", subcommand_help_heading = "Structures")]
    Dump(DumpVerb),
    /// Go on with a volume that cannot be opened as it is
    #[command(subcommand, after_help = RESCUE_HELP)]
    #[command(subcommand_value_name = "WAY", subcommand_help_heading = "Ways")]
    Rescue(RescueVerb),
    /// Measure how fast the engine is
    #[command(subcommand, after_help = BENCH_HELP)]
    #[command(subcommand_value_name = "WORKLOAD", subcommand_help_heading = "Workloads")]
    Bench(BenchVerb),
    /// Write what a shell needs to complete command lines
    #[command(after_help = COMPLETIONS_HELP)]
    Completions(CompletionsArguments),
    /// Write man pages into a directory
    #[command(hide = true)]
    Man(ManArguments),
}

const COMPLETIONS_HELP: &str = "\
Examples:
  offshoot completions bash > /usr/share/bash-completion/completions/offshoot
  offshoot completions zsh > ~/.zfunc/_offshoot
  offshoot completions fish > ~/.config/fish/completions/offshoot.fish";

#[derive(Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Args)]
pub(crate) struct ManArguments {
    /// The directory; it is made when it is not there
    #[arg(value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
}

/// What lies between a file and a volume.
#[derive(Args, Clone, Default)]
pub(crate) struct LayerArguments {
    /// The volume begins at this byte of VOLUME, whatever else is there
    #[arg(id = "volume_offset", long = "offset", value_name = "BYTES", value_parser = parse_size)]
    pub(crate) offset: Option<u64>,
    /// What the files on the command line are; otherwise their first bytes say it. A disk whose
    /// contents look like an image is raw
    #[arg(long, value_name = "FORMAT")]
    pub(crate) image_format: Option<ImageFormat>,
    /// Open the backing files that a qcow2 names, too, and what a VMDK names that is no plain file
    /// beside it
    #[arg(long)]
    pub(crate) backing: bool,
    /// Read an internal snapshot of a qcow2, by its name or id
    #[arg(long, value_name = "NAME")]
    pub(crate) image_snapshot: Option<String>,
}

impl LayerArguments {
    /// The same for a further device. An offset applies to the first device only.
    pub(crate) fn of_further_device(&self) -> Self {
        Self { offset: None, ..self.clone() }
    }
}

/// What a file with a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFormat {
    /// A plain disk
    Raw,
    /// QEMU
    Qcow2,
    /// VirtualBox
    Vdi,
    /// Virtual PC, and old Hyper-V
    #[value(alias = "vpc")]
    Vhd,
    /// Hyper-V
    Vhdx,
    /// VMware
    Vmdk,
    /// Compressed by gzip
    Gzip,
    /// Compressed by xz
    Xz,
    /// Compressed by zstd
    Zstd,
}

impl ImageFormat {
    /// The kind of image; `None` for a plain disk.
    pub(crate) fn kind(self) -> Option<ImageKind> {
        Some(match self {
            Self::Raw => return None,
            Self::Qcow2 => ImageKind::Qcow2,
            Self::Vdi => ImageKind::Vdi,
            Self::Vhd => ImageKind::Vhd,
            Self::Vhdx => ImageKind::Vhdx,
            Self::Vmdk => ImageKind::Vmdk,
            Self::Gzip => ImageKind::Gzip,
            Self::Xz => ImageKind::Xz,
            Self::Zstd => ImageKind::Zstd,
        })
    }
}

/// How a volume is opened.
#[derive(Args, Default)]
pub(crate) struct OpenArguments {
    /// A further device of the same volume
    #[arg(long = "device", value_name = "FILE", action = ArgAction::Append)]
    pub(crate) devices: Vec<PathBuf>,
    /// Open the volume although devices are missing
    #[arg(long)]
    pub(crate) degraded: bool,
    /// Read the volume without its log: btrfs as the last commit left it, without what was fsynced
    /// since, and XFS as its blocks are
    #[arg(long)]
    pub(crate) ignore_log: bool,
    #[command(flatten)]
    pub(crate) rescue: RescueArguments,
    #[command(flatten)]
    pub(crate) layers: LayerArguments,
    /// It is not opened at all: it is open.
    #[arg(skip)]
    pub(crate) live: Option<Arc<ServedVolume>>,
}

/// How the tree of files in a volume is opened.
#[derive(Args)]
pub(crate) struct TreeArguments {
    /// Start at this subvolume instead of the default one: an id, or a path from the top level
    /// (/2024 for one that is called 2024)
    #[arg(long, value_name = "ID|PATH")]
    pub(crate) subvolume: Option<OsString>,
    #[command(flatten)]
    pub(crate) open: OpenArguments,
}

/// How a verb that changes volumes opens them.
#[derive(Args)]
pub(crate) struct EditArguments {
    #[command(flatten)]
    pub(crate) tree: TreeArguments,
    /// Write what was done as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// At the end, show on standard error what the engine did to each volume that was changed
    #[arg(long)]
    pub(crate) stats: bool,
    #[command(flatten)]
    pub(crate) storing: StoringArguments,
}

/// Where in a volume, and how it is opened.
#[derive(Args)]
pub(crate) struct PlaceArguments {
    /// The place in a volume, VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE")]
    pub(crate) place: OsString,
    #[command(flatten)]
    pub(crate) tree: TreeArguments,
}

/// Where in one or several volumes, and how all of them are opened.
#[derive(Args)]
pub(crate) struct PlacesArguments {
    /// The places, each VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    #[command(flatten)]
    pub(crate) tree: TreeArguments,
}

/// A volume without a path.
#[derive(Args)]
pub(crate) struct VolumeArguments {
    /// The image or block device
    #[arg(value_name = "VOLUME")]
    pub(crate) volume: PathBuf,
    #[command(flatten)]
    pub(crate) open: OpenArguments,
}

impl VolumeArguments {
    /// The volume, and how it is opened.
    pub(crate) fn parts(&self) -> (&Path, &OpenArguments) {
        (&self.volume, &self.open)
    }
}

#[derive(Args)]
pub(crate) struct InfoArguments {
    #[command(flatten)]
    pub(crate) volume: VolumeArguments,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct CheckArguments {
    #[command(flatten)]
    pub(crate) info: InfoArguments,
    /// Read all data, and compare it with its checksums (btrfs)
    #[arg(long)]
    pub(crate) data: bool,
    #[command(flatten)]
    pub(crate) room: CheckRoomArguments,
}

/// The room that a check of a btrfs volume takes.
#[derive(Args)]
pub(crate) struct CheckRoomArguments {
    /// The memory that a check may take (btrfs)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) memory: Option<u64>,
    /// The folder for what has no room in memory, and for the new blocks of a repair (btrfs)
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) scratch: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct ResizeArguments {
    #[command(flatten)]
    pub(crate) info: InfoArguments,
    /// The new size, with the number of the device before it if the volume has several
    #[arg(value_name = "[DEVID:]SIZE", value_parser = NewSize::parse, allow_hyphen_values = true)]
    pub(crate) size: NewSize,
}

#[derive(Args)]
pub(crate) struct StatsArguments {
    #[command(flatten)]
    pub(crate) info: InfoArguments,
    /// Of a volume that is mounted, also show how often locks were taken and waited for
    #[arg(long)]
    pub(crate) locks: bool,
}

#[derive(Args)]
pub(crate) struct ScrubArguments {
    #[command(flatten)]
    pub(crate) volume: VolumeArguments,
    /// Write nothing: only say what is bad
    #[arg(short = 'r', long)]
    pub(crate) read_only: bool,
    /// Write JSON: one object for each thing that is bad, and the counters at the end
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct CatArguments {
    #[command(flatten)]
    pub(crate) places: PlacesArguments,
    /// Refused: what is written is the contents
    #[arg(long, hide = true)]
    pub(crate) json: bool,
}

const EXTRACT_HELP: &str = "\
The destination is made, or is an empty directory, or one that an extraction of the same place left half done: \
then what is whole there stays. Until it is done no other user can enter it, and it holds a file `.offshoot-extract`. It gets the contents and the attributes of \
the directory at PLACE; a file at PLACE is put into it. Nothing is ever written outside of it.

Owner, mode, set-id bits, nanosecond times, extended attributes with ACLs and capabilities, \
hard links, holes, device nodes, fifos and sockets are made as they are in the volume. As \
root, think of that before you extract a volume that you do not trust. Without root, what may \
not be made is left out, and one summary at the end says so.

A tar archive holds the same but for sockets. GNU tar restores all of it with \
`tar --acls --xattrs --xattrs-include='*' -xpf`.

A file that cannot be read is reported and left out, and the rest goes on. With --salvage a file of btrfs is written with zeros for the \
data that cannot be read, and the exit code is 3 then. `offshoot recover` goes around damage of other kinds. In a tar archive a \
large file may be half written by then; the archive ends there.

Examples:
  offshoot extract disk.img out
  offshoot extract disk.img:/etc/fstab out
  offshoot extract disk.img --tar disk.tar
  offshoot extract disk.img:/etc --tar - | tar -tv";

#[derive(Args)]
pub(crate) struct ExtractArguments {
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    /// The directory to extract into
    #[arg(value_name = "DIRECTORY", required_unless_present = "tar", conflicts_with = "tar")]
    pub(crate) destination: Option<PathBuf>,
    /// Write a tar archive instead, to FILE or with `-` to standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) tar: Option<PathBuf>,
    /// Write zeros for data of a btrfs volume that no copy gives, with a list at the end of what
    /// was replaced
    #[arg(long)]
    pub(crate) salvage: bool,
    /// Write what was done as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Subcommand)]
pub(crate) enum DumpVerb {
    /// All superblocks, field by field, and whether each verifies: those of the given devices, or
    /// those of all groups of XFS
    Super(InfoArguments),
    /// The headers of all groups of XFS: AGF, AGI and AGFL
    Groups(InfoArguments),
    /// An inode of XFS, and the extents in it
    Inode(DumpInodeArguments),
    /// The chunk map of btrfs: which range is where on which device
    Chunks(InfoArguments),
    /// All items of a tree of btrfs, or all blocks and records of one of XFS, one line each
    Tree(DumpTreeArguments),
    /// What a pending log holds: of btrfs what was fsynced since the last commit, of XFS the
    /// records from the tail to the head, and their transactions
    Log(InfoArguments),
}

#[derive(Args)]
pub(crate) struct DumpInodeArguments {
    #[command(flatten)]
    pub(crate) volume: VolumeArguments,
    /// The number of the inode
    #[arg(value_name = "NUMBER")]
    pub(crate) number: u64,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Subcommand)]
pub(crate) enum RescueVerb {
    /// Replay the log of an XFS volume that was not unmounted, and empty it
    ReplayLog(InfoArguments),
    /// Throw the pending log away: what was fsynced since the last commit is lost
    ///
    /// On XFS all is lost that is only in the log, and structures may contradict each other then.
    ZeroLog(InfoArguments),
}

#[derive(Args)]
pub(crate) struct DumpTreeArguments {
    #[command(flatten)]
    pub(crate) volume: VolumeArguments,
    /// The tree, by its number or as root, extent, chunk, dev, fs, csum, quota, uuid, free-space,
    /// block-group, raid-stripe, data-reloc. Of XFS, free-by-block, free-by-size, inodes,
    /// free-inodes, reverse-map or references, of one group with @ and its number, or extents with
    /// @ and the number of an inode
    #[arg(value_name = "TREE")]
    pub(crate) tree: String,
    /// Write one JSON object on each line
    #[arg(long)]
    pub(crate) json: bool,
}
