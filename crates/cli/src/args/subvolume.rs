//! The verbs of `offshoot subvolume`, and their options.

use std::ffi::OsString;

use clap::{ArgAction, Args, Subcommand};

use super::{EditArguments, InfoArguments, PlaceArguments};

const LIST_HELP: &str = "\
Flags: ro is read-only, snap is a snapshot of another subvolume, default is what a mount shows. -u, -q and -R are those of `btrfs subvolume list`; with --json \
everything is there.

Examples:
  offshoot subvolume list disk.img
  offshoot subvolume list -uqR disk.img
  offshoot subvolume list --json disk.img | jq -r '.[].path'";

const SHOW_HELP: &str = "\
Examples:
  offshoot subvolume show disk.img:/home
  offshoot subvolume show --json disk.img:/home | jq .snapshots";

const CREATE_HELP: &str = "\
Examples:
  offshoot subvolume create disk.img:/home disk.img:/home/alice
  offshoot subvolume create /mnt/home";

const SNAPSHOT_HELP: &str = "\
DESTINATION is the new name, or a directory that is there, which the snapshot goes into under the name of its source. \
Subvolumes inside of the source are not in the snapshot: an empty directory is in the place of each.

Examples:
  offshoot subvolume snapshot disk.img:/home disk.img:/home-of-monday
  offshoot subvolume snapshot -r disk.img disk.img:/snapshots/monday
  offshoot subvolume snapshot -r /mnt/home /mnt/snapshots/monday";

const DELETE_HELP: &str = "\
What is in it goes as well, but not what other subvolumes share with it. One that holds subvolumes is not deleted, nor the default one. \
The command ends when the space is free. On a mount, programs that have files of it open can go on with them; what is in it is dropped when the last one is closed, and \
the command does not wait for that.

Examples:
  offshoot subvolume delete disk.img:/snapshots/monday disk.img:/snapshots/tuesday";

const GET_DEFAULT_HELP: &str = "\
Examples:
  offshoot subvolume get-default disk.img";

const SET_DEFAULT_HELP: &str = "\
The default subvolume is what a mount without options shows, and where a place of this program begins. With --subvolume 5 a place begins at \
the top level.

Examples:
  offshoot subvolume set-default disk.img:/snapshots/monday
  offshoot subvolume set-default --subvolume 5 disk.img:/";

const GET_HELP: &str = "\
Examples:
  offshoot subvolume get disk.img:/snapshots/monday";

const SET_HELP: &str = "\
One that was received and may be changed does not count as received any more: nothing can be received on top of it.

Examples:
  offshoot subvolume set disk.img:/snapshots/monday ro=true";

#[derive(Subcommand)]
pub(crate) enum SubvolumeVerb {
    /// List all subvolumes with their path from the top level
    #[command(after_help = LIST_HELP)]
    List(ListArguments),
    /// Show everything that is known of a subvolume
    #[command(after_help = SHOW_HELP)]
    Show(SubvolumeArguments),
    /// Make subvolumes
    #[command(after_help = CREATE_HELP)]
    Create(SubvolumesArguments),
    /// Make a snapshot of a subvolume
    #[command(after_help = SNAPSHOT_HELP)]
    Snapshot(SnapshotArguments),
    /// Delete subvolumes
    #[command(after_help = DELETE_HELP)]
    Delete(SubvolumesArguments),
    /// Show the default subvolume
    #[command(after_help = GET_DEFAULT_HELP)]
    GetDefault(InfoArguments),
    /// Make a subvolume the default one
    #[command(after_help = SET_DEFAULT_HELP)]
    SetDefault(EditSubvolumeArguments),
    /// Show whether a subvolume is read-only
    #[command(after_help = GET_HELP)]
    Get(SubvolumeArguments),
    /// Make a subvolume read-only, or let it be changed again
    #[command(after_help = SET_HELP)]
    Set(SetArguments),
}

/// What is shown of all subvolumes.
#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "they are the options of btrfs")]
pub(crate) struct ListArguments {
    #[command(flatten)]
    pub(crate) info: InfoArguments,
    /// Show their UUIDs
    #[arg(short = 'u', long)]
    pub(crate) uuid: bool,
    /// Show the UUID of what each is a snapshot of
    #[arg(short = 'q', long)]
    pub(crate) parent_uuid: bool,
    /// Show the UUID of what each was received from
    #[arg(short = 'R', long)]
    pub(crate) received_uuid: bool,
    /// As btrfs calls it: show the id of the subvolume that each is in, which is always shown
    #[arg(short = 'p', hide = true)]
    _parent: bool,
}

/// A subvolume that is looked at.
#[derive(Args)]
pub(crate) struct SubvolumeArguments {
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    /// Write JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// A subvolume that is changed.
#[derive(Args)]
pub(crate) struct EditSubvolumeArguments {
    /// The subvolume, VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE")]
    pub(crate) place: OsString,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

/// Subvolumes that come or go.
#[derive(Args)]
pub(crate) struct SubvolumesArguments {
    /// The places, each VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct SnapshotArguments {
    /// The subvolume, VOLUME or VOLUME:/PATH
    #[arg(value_name = "SOURCE")]
    pub(crate) source: OsString,
    /// Where the snapshot is to be, in the same volume
    #[arg(value_name = "DESTINATION")]
    pub(crate) destination: OsString,
    /// It may not be changed
    #[arg(short = 'r', long)]
    pub(crate) read_only: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct SetArguments {
    #[command(flatten)]
    pub(crate) subvolume: EditSubvolumeArguments,
    /// ro=true or ro=false
    #[arg(value_name = "PROPERTY", action = ArgAction::Set, value_parser = parse_read_only)]
    pub(crate) read_only: bool,
    /// Let one be changed that was received
    #[arg(long)]
    pub(crate) force: bool,
}

fn parse_read_only(text: &str) -> Result<bool, String> {
    let value = text.strip_prefix("ro=").and_then(|value| value.parse().ok());
    value.ok_or_else(|| "a property is ro=true or ro=false".to_owned())
}

#[cfg(test)]
mod tests {
    use super::parse_read_only;

    #[test]
    fn properties() {
        assert_eq!(parse_read_only("ro=true"), Ok(true));
        assert_eq!(parse_read_only("ro=false"), Ok(false));
        for text in ["", "ro", "ro=", "ro=1", "true", "rw=true"] {
            parse_read_only(text).expect_err(text);
        }
    }
}
