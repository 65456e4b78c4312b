//! The options of the verbs that make files and change their attributes.

use std::ffi::OsString;

use clap::Args;

use super::EditArguments;

pub(crate) const CHMOD_HELP: &str = "\
MODE is in octal, or has parts as u+x, go-w, a=rX, +t with commas between them. Parts without u, \
g, o or a leave alone what the umask masks; it is an error when a MODE such as -w takes away less \
than it says for that reason. A symbolic link is followed, but not below a directory.

Examples:
  offshoot chmod 600 disk.img:/etc/shadow
  offshoot chmod -R go-rwx disk.img:/root
  offshoot chmod u+x,g+s 'disk.img:/srv/bin/*'";

pub(crate) const CHOWN_HELP: &str = "\
OWNER is USER, USER:GROUP or :GROUP: numbers, or names that /etc/passwd and /etc/group of the volume have. USER: is the user with \
the main group that /etc/passwd gives him. A symbolic link is followed, but not below a directory.

Examples:
  offshoot chown -R alice: disk.img:/home/alice
  offshoot chown 0:0 disk.img:/etc/shadow";

pub(crate) const TOUCH_HELP: &str = "\
TIME is 2026-11-20, with a time of day behind a blank or T, with a zone as Z or +01:00, or @SECONDS since 1970.

Examples:
  offshoot touch disk.img:/etc/machine-id
  offshoot touch -d '2026-11-20 10:30' disk.img:/a disk.img:/b
  offshoot touch -m -r disk.img:/a disk.img:/b";

pub(crate) const MKNOD_HELP: &str = "\
TYPE is b or c, with the numbers of the device, or p for a FIFO.

Examples:
  offshoot mknod -m 666 disk.img:/dev/null c 1 3
  offshoot mknod disk.img:/run/queue p";

pub(crate) const RMDIR_HELP: &str = "\
Examples:
  offshoot rmdir disk.img:/tmp/empty
  offshoot rmdir -p disk.img:/a/b/c";

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "they are the options of chmod")]
pub(crate) struct ChmodArguments {
    /// What the permissions become
    #[arg(value_name = "MODE", allow_hyphen_values = true)]
    pub(crate) mode: String,
    /// The places, each VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    /// Go down directories
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
    /// Say of each file what its permissions were and are
    #[arg(short = 'v', long, conflicts_with = "json", overrides_with = "changes")]
    pub(crate) verbose: bool,
    /// Say it of those that changed
    #[arg(short = 'c', long, conflicts_with = "json", overrides_with = "verbose")]
    pub(crate) changes: bool,
    /// Print no errors about files that cannot be changed
    #[arg(short = 'f', long, visible_alias = "quiet")]
    pub(crate) silent: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct ChownArguments {
    /// Whom the files will belong to
    #[arg(value_name = "OWNER")]
    pub(crate) owner: OsString,
    /// The places, each VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    /// Go down directories
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,
    /// A symbolic link at the end is the file that is meant
    #[arg(long)]
    pub(crate) no_dereference: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("when").multiple(false))]
#[expect(clippy::struct_excessive_bools, reason = "they are the options of touch")]
pub(crate) struct TouchArguments {
    /// The places, each VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    /// Change the access time only
    #[arg(short = 'a')]
    pub(crate) access: bool,
    /// Change the modification time only
    #[arg(short = 'm')]
    pub(crate) modification: bool,
    /// Make no files
    #[arg(short = 'c', long)]
    pub(crate) no_create: bool,
    /// A symbolic link at the end is the file that is meant
    #[arg(long)]
    pub(crate) no_dereference: bool,
    /// This time in place of now
    #[arg(short = 'd', long, value_name = "TIME", group = "when")]
    pub(crate) date: Option<String>,
    /// The same as [[CC]YY]MMDDhhmm[.ss]
    #[arg(short = 't', value_name = "STAMP", group = "when")]
    pub(crate) stamp: Option<String>,
    /// The times of the file at this place of the same volume
    #[arg(short = 'r', long, value_name = "PLACE", group = "when")]
    pub(crate) reference: Option<OsString>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct MknodArguments {
    /// The place, VOLUME:/PATH
    #[arg(value_name = "PLACE")]
    pub(crate) place: OsString,
    /// b, c or p
    #[arg(value_name = "TYPE")]
    pub(crate) node_type: String,
    /// The major number of a device
    #[arg(value_name = "MAJOR", value_parser = clap::value_parser!(u32).range(..1 << 12))]
    pub(crate) major: Option<u32>,
    /// The minor number of a device
    #[arg(value_name = "MINOR", value_parser = clap::value_parser!(u32).range(..1 << 20))]
    pub(crate) minor: Option<u32>,
    /// The permissions, as for chmod; 666 without the umask otherwise
    #[arg(short = 'm', long, value_name = "MODE")]
    pub(crate) mode: Option<String>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct RmdirArguments {
    /// The places, each VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    /// Remove the directories above as well, when they are empty then
    #[arg(short = 'p', long)]
    pub(crate) parents: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}
