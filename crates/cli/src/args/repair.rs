//! The options of `offshoot repair`.

use std::ffi::OsString;

use clap::Args;
use offshoot_btrfs::RepairClass;

use super::{CheckRoomArguments, InfoArguments};

pub(crate) const REPAIR_HELP: &str = "\
What follows from other structures is made anew: the extent tree from all trees, block groups, free space and the ranges of the devices \
from that and from the chunks, superblocks. Everything else that a check finds stays, and is named. The volume must not be in use.

While blocks of a subvolume cannot be used, a repair is refused, because it would give up what is \
in them. --cut-off does that for the subvolumes that are named: the blocks are cut off, and what \
was in them is lost. Everything else of the subvolume stays, and what has no name any more comes to \
lost+found in it. With --dry-run it only says what would be lost. Get out what is needed with \
extract or recover first.

Nothing that the volume leads to is overwritten. The result is checked before anything is written, and is not written unless all that \
was to be mended is. Until something else writes to the volume, --undo brings it back to what it was. docs/repair.md says more.

Data that no copy fits its checksum of is lost to readers. --accept-data makes a file readable as \
it is on the devices, right or wrong; it is never done by itself.

With --scan a volume is repaired without any sound superblock, and with a damaged chunk tree: all \
devices are read from their beginning to their end, and superblocks, system chunks and chunk tree \
are made from the tree blocks that are found. If the root tree is damaged, the volume goes back to \
the newest commit that is whole.

Exit codes: 0 if nothing is wrong any more, 3 if something is left or the repair is refused because of damage, 4 if the volume cannot \
be repaired, 1 otherwise.

Examples:
  offshoot repair --dry-run /dev/sdb
  offshoot repair /dev/sdb
  offshoot repair --class extents --class space disk.img
  offshoot repair --dry-run --accept-data /var/log/messages disk.img
  offshoot repair --scan --dry-run --device /dev/sdc /dev/sdb
  offshoot repair --dry-run --cut-off 257 --cut-off /snapshots/monday disk.img
  offshoot repair --undo /dev/sdb
  offshoot repair --confirm /dev/sdb";

/// The class of a repair with this name.
fn parse_repair_class(name: &str) -> Result<RepairClass, String> {
    let found = RepairClass::ALL.into_iter().find(|class| class.name() == name);
    found.ok_or_else(|| {
        let names = RepairClass::ALL.map(RepairClass::name);
        format!("not a class; there are {}", names.join(", "))
    })
}

/// The search of the devices in a repair.
#[derive(Args)]
pub(crate) struct ScanArguments {
    /// Search all devices if superblocks, the chunk tree or the root tree cannot be used, and make
    /// them anew from what is found, or go back to the newest root tree that is whole
    #[arg(long)]
    pub(crate) scan: bool,
    /// The volume that a scan looks for, when the devices have blocks of several
    #[arg(long, value_name = "UUID", requires = "scan")]
    pub(crate) fsid: Option<uuid::Uuid>,
}

#[derive(Args)]
pub(crate) struct RepairArguments {
    #[command(flatten)]
    pub(crate) info: InfoArguments,
    /// Say what would be done, and write nothing
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
    /// Bring the volume back to what it was before the last repair
    #[arg(long, conflicts_with_all = ["confirm", "classes", "accept_data", "scan"])]
    pub(crate) undo: bool,
    /// Keep the last repair: it cannot be undone any more
    #[arg(long, conflicts_with_all = ["classes", "accept_data", "scan"])]
    pub(crate) confirm: bool,
    #[command(flatten)]
    pub(crate) search: ScanArguments,
    /// What may be mended: superblocks, chunks (the chunk tree, with --scan), space (block groups,
    /// free space, ranges of devices), extents, files (names, entries, counts), quotas or
    /// subvolumes (links, entries, UUIDs, removals). Can be given several times. Superblocks,
    /// space, extents and quotas are made anew even if nothing is wrong with them. One more class
    /// is only mended if it is given, because something is lost by it: overlaps (extents of files
    /// that overlap or are damaged, leaves with duplicate or overlapping items). All that is safe
    /// is mended with it
    #[arg(long = "class", value_name = "CLASS", value_parser = parse_repair_class)]
    pub(crate) classes: Vec<RepairClass>,
    /// Accept the data of this file as it is on the devices: what does not fit its checksum gets
    /// another one. The path begins at the top level of the volume, as check shows it. Can be given
    /// several times. Clones and snapshots that share the data show it, too
    #[arg(long, value_name = "PATH")]
    pub(crate) accept_data: Vec<OsString>,
    /// Give up what is in the blocks of this subvolume that cannot be used: an id, or a path from
    /// the top level (/2024 for one that is called 2024); 7 for the checksum tree, 8 for the quota
    /// tree. Can be given several times. Of classes only overlaps can be given with it
    #[arg(long, value_name = "ID|PATH", conflicts_with_all = ["undo", "confirm"])]
    pub(crate) cut_off: Vec<OsString>,
    #[command(flatten)]
    pub(crate) room: CheckRoomArguments,
}
