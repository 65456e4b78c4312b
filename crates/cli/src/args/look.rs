//! The options of the verbs that look at files, in the words of the core utilities and findutils.

use std::ffi::OsString;

use clap::{ArgAction, Args, ValueEnum};

use super::{PlacesArguments, TreeArguments};

pub(crate) const LS_HELP: &str = "\
Of several places the files come first, then the directories, each under its path. \
A place that cannot be listed is reported, and the others are listed. * ? and [...] in a path \
match names in the volume; quote them, so that the shell leaves them alone.

Owners have the names that /etc/passwd and /etc/group of the volume give them. Names are written as they are, \
but on a terminal what could change it is escaped. Colours are those of LS_COLORS.

Examples:
  offshoot ls -l disk.img:/etc
  offshoot ls -lR disk.img
  offshoot ls -lat 'disk.img:/var/log/*.log'
  offshoot ls disk.img:/bin disk.img:/usr/bin
  offshoot ls --subvolume 256 disk.img:/home";

pub(crate) const STAT_HELP: &str = "\
A symbolic link is shown itself, and not what it leads to.

FORMAT has the directives of GNU stat: %a %A %b %B %d %D %f %F %g %G %h %i %m %n %N %o %r %R %s %t %T %u %U %w %W %x %X %y %Y %z %Z, \
with a width and the flags - 0 and # between % and the letter. %d is the number of the subvolume.

Examples:
  offshoot stat disk.img:/etc/passwd
  offshoot stat -c '%a %U:%G %n' 'disk.img:/etc/ssh/*'
  offshoot stat --json disk.img:/usr/bin/ping";

pub(crate) const FIND_HELP: &str = "\
EXPRESSION has the words of find. Tests: -name -iname -path -ipath PATTERN, -type [bcdpfls],..., -size [+-]N[ckMGTb], -empty, \
-mtime -atime -ctime [+-]DAYS, -mmin -amin -cmin [+-]MINUTES, -newer PLACE, -newermt TIME, -perm [-/]MODE, -user NAME, -group NAME, \
-uid -gid -links -inum [+-]N. Operators: ( ) ! -not -a -o. Depth: -maxdepth -mindepth N, -depth, -xdev, -prune. Actions: -print, \
-print0, -delete; -print if there is none.

What is found is written as VOLUME:/PATH, which every verb takes. -path matches the path in the volume.

Examples:
  offshoot find disk.img:/etc -name '*.conf' -newermt 2026-01-01
  offshoot find disk.img:/var/log -type f -size +10M
  offshoot find disk.img:/tmp -mtime +7 -delete
  offshoot find disk.img -name '*.o' -print0 | xargs -0 offshoot rm";

pub(crate) const DU_HELP: &str = "\
Space is what the data of files takes, before it is compressed, as on a mount, and each inode counts once. --shares tells besides how much of it no other \
file and no snapshot has, which is what becomes free with the file, and how much is shared.

Examples:
  offshoot du -sh disk.img:/home
  offshoot du -d 1 disk.img
  offshoot du --shares 'disk.img:/snapshots/*'";

pub(crate) const DF_HELP: &str = "\
Examples:
  offshoot df -h disk.img
  offshoot df -h *.img";

pub(crate) const TREE_HELP: &str = "\
Examples:
  offshoot tree disk.img:/etc
  offshoot tree -a -L 2 disk.img";

pub(crate) const LSATTR_HELP: &str = "\
The letters are those of chattr.

Examples:
  offshoot lsattr disk.img:/var/lib
  offshoot lsattr -d disk.img:/var/lib/machines";

/// When names are coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorWhen {
    /// In any case
    Always,
    /// On a terminal
    Auto,
    /// Not at all
    Never,
}

#[derive(Args)]
#[command(disable_help_flag = true)]
#[expect(clippy::struct_excessive_bools, reason = "they are the options of ls")]
pub(crate) struct LsArguments {
    #[command(flatten)]
    pub(crate) places: PlacesArguments,
    /// Show names that begin with a dot, too, with . and ..
    #[arg(short = 'a', long)]
    pub(crate) all: bool,
    /// Show names that begin with a dot, too, without . and ..
    #[arg(short = 'A', long, overrides_with = "all")]
    pub(crate) almost_all: bool,
    /// Show type, mode, links, owner, group, size and time of each
    #[arg(short = 'l', long)]
    pub(crate) long: bool,
    /// As -l, with owners as numbers
    #[arg(short = 'n', long)]
    pub(crate) numeric_uid_gid: bool,
    /// Sizes as 1.5K and 12M
    #[arg(short = 'h', long)]
    pub(crate) human_readable: bool,
    /// Show inode numbers
    #[arg(short = 'i', long)]
    pub(crate) inode: bool,
    /// Show directories themselves, and not what is in them
    #[arg(short = 'd', long)]
    pub(crate) directory: bool,
    /// Newest first
    #[arg(short = 't', overrides_with = "by_size")]
    pub(crate) by_time: bool,
    /// Largest first
    #[arg(short = 'S')]
    pub(crate) by_size: bool,
    /// The other way round
    #[arg(short = 'r', long)]
    pub(crate) reverse: bool,
    /// List the directories below, too
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
    /// One name on each line, as always
    #[arg(short = '1')]
    pub(crate) one: bool,
    /// End lines with NUL, and write names as they are
    #[arg(short = '0', long)]
    pub(crate) zero: bool,
    /// Colour names
    #[arg(long, visible_alias = "colour", value_name = "WHEN", default_value = "auto")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "always")]
    pub(crate) color: ColorWhen,
    /// Write a JSON array with one object for each file, hidden or not
    #[arg(long)]
    pub(crate) json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

#[derive(Args)]
pub(crate) struct StatArguments {
    #[command(flatten)]
    pub(crate) places: PlacesArguments,
    /// Write this of each file, and a line break
    #[arg(short = 'c', long, value_name = "FORMAT", conflicts_with = "json")]
    pub(crate) format: Option<OsString>,
    /// Write this of each file, with backslash escapes and without a line break
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["json", "format"])]
    pub(crate) printf: Option<OsString>,
    /// Follow a symbolic link at the end
    #[arg(short = 'L', long)]
    pub(crate) dereference: bool,
    /// Write JSON: an object on a line for each file
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct FindArguments {
    #[command(flatten)]
    pub(crate) tree: TreeArguments,
    /// Write a JSON object on a line for each file that is found, in place of -print
    #[arg(long)]
    pub(crate) json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
    /// Where to begin, each VOLUME or VOLUME:/PATH, and what to look for
    #[arg(value_name = "PLACE... EXPRESSION", required = true)]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<OsString>,
}

#[derive(Args)]
#[command(disable_help_flag = true)]
#[expect(clippy::struct_excessive_bools, reason = "they are the options of du")]
pub(crate) struct DuArguments {
    #[command(flatten)]
    pub(crate) places: PlacesArguments,
    /// Show files as well
    #[arg(short = 'a', long, conflicts_with = "summarize")]
    pub(crate) all: bool,
    /// Show a total for each place only
    #[arg(short = 's', long, conflicts_with = "max_depth")]
    pub(crate) summarize: bool,
    /// Show directories so deep below a place
    #[arg(short = 'd', long, value_name = "N")]
    pub(crate) max_depth: Option<usize>,
    /// Show the sum of all places at the end
    #[arg(short = 'c', long)]
    pub(crate) total: bool,
    /// Sizes as 1.5K and 12M
    #[arg(short = 'h', long)]
    pub(crate) human_readable: bool,
    /// Bytes that files have, whatever they take
    #[arg(long)]
    pub(crate) apparent_size: bool,
    /// The same, in bytes
    #[arg(short = 'b', long)]
    pub(crate) bytes: bool,
    /// Stay in the subvolume of the place
    #[arg(short = 'x', long)]
    pub(crate) one_file_system: bool,
    /// Tell what nothing else has from what is shared
    #[arg(long, conflicts_with_all = ["apparent_size", "bytes"])]
    pub(crate) shares: bool,
    /// End lines with NUL
    #[arg(short = '0', long)]
    pub(crate) null: bool,
    /// Write a JSON object on a line for each that is shown, with sizes in bytes
    #[arg(long)]
    pub(crate) json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct DfArguments {
    #[command(flatten)]
    pub(crate) places: PlacesArguments,
    /// Sizes as 1.5K and 12M
    #[arg(short = 'h', long)]
    pub(crate) human_readable: bool,
    /// Write a JSON object on a line for each volume, with sizes in bytes
    #[arg(long)]
    pub(crate) json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

#[derive(Args)]
pub(crate) struct TreeVerbArguments {
    #[command(flatten)]
    pub(crate) places: PlacesArguments,
    /// Show names that begin with a dot, too
    #[arg(short = 'a', long)]
    pub(crate) all: bool,
    /// Show directories only
    #[arg(short = 'd', long)]
    pub(crate) directories: bool,
    /// Go so deep
    #[arg(short = 'L', long, value_name = "N")]
    pub(crate) level: Option<usize>,
    /// Write a JSON object on a line for each file
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct LsattrArguments {
    #[command(flatten)]
    pub(crate) places: PlacesArguments,
    /// Show names that begin with a dot, too
    #[arg(short = 'a', long)]
    pub(crate) all: bool,
    /// Show directories themselves, and not what is in them
    #[arg(short = 'd', long)]
    pub(crate) directory: bool,
    /// Show the directories below, too
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
    /// Write a JSON object on a line for each file
    #[arg(long)]
    pub(crate) json: bool,
}
