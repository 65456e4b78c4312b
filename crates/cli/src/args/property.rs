//! The verbs of `offshoot property`, and their options.

use std::ffi::OsString;

use clap::{Args, Subcommand, ValueEnum};

use super::{EditArguments, PlaceArguments};

pub(crate) const PROPERTY_HELP: &str = "\
ro is of a subvolume: true or false. compression is of a file or directory: zlib, lzo or zstd, none, or nothing for what the volume \
does; what is written then is compressed so, and what is made in a directory has it too. label is of the volume, at its top.

Examples:
  offshoot property list disk.img:/home
  offshoot property set disk.img:/var/log compression zstd
  offshoot property get disk.img:/snapshots/monday ro
  offshoot property set disk.img label backups";

/// What can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Property {
    /// Whether a subvolume is read-only
    Ro,
    /// The label of the volume
    Label,
    /// How a file, or what is made in a directory, is compressed
    Compression,
}

impl Property {
    /// All properties, in the order of `btrfs property list`.
    pub(crate) const ALL: [Self; 3] = [Self::Ro, Self::Label, Self::Compression];

    /// The name of the property and its description.
    pub(crate) fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Ro => ("ro", "read-only flag of a subvolume"),
            Self::Label => ("label", "label of the volume"),
            Self::Compression => ("compression", "compression algorithm of a file or directory"),
        }
    }
}

#[derive(Subcommand)]
pub(crate) enum PropertyVerb {
    /// Show a property, or all that are set
    #[command(after_help = PROPERTY_HELP)]
    Get(GetPropertyArguments),
    /// Set a property
    #[command(after_help = PROPERTY_HELP)]
    Set(SetPropertyArguments),
    /// Show which properties there are
    #[command(after_help = PROPERTY_HELP)]
    List(ListPropertyArguments),
}

#[derive(Args)]
pub(crate) struct GetPropertyArguments {
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    /// The property
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<Property>,
}

#[derive(Args)]
pub(crate) struct SetPropertyArguments {
    /// The place, VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE")]
    pub(crate) place: OsString,
    /// The property
    #[arg(value_name = "NAME")]
    pub(crate) name: Property,
    /// Its value
    #[arg(value_name = "VALUE")]
    pub(crate) value: OsString,
    /// Let a subvolume be changed that was received
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct ListPropertyArguments {
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
}
