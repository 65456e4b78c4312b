//! The options of the verbs that change volumes, in the words of the core utilities.

use std::ffi::OsString;

use clap::{Args, ValueEnum};
use offshoot_vfs::FileFlags;

use super::EditArguments;

pub(crate) const CP_HELP: &str = "\
SOURCE and DESTINATION are paths of the host or places in volumes; one of them at least is a \
place. A text with `:/` behind the name of a file is a place, and all else is a path of the host. \
The destination is a directory that is there, which the sources go into under their names, or the \
new name. `dir/.` and VOLUME:/ stand for what is in a directory. `-` as the only source is \
standard input.

Mode, owner, group, times, extended attributes with ACLs, hard links and holes are kept, whoever \
runs it: a volume takes owners and device nodes without root. On the host, what may not be made \
without root is left out, and one summary at the end says so.

Directories are merged, files that are there are replaced. On the host nothing is written \
outside of the destination, and no symbolic link below it is followed. A file that cannot be \
copied is reported and left out, and the rest goes on.

Examples:
  offshoot cp -r src disk.img:/src
  offshoot cp motd issue disk.img:/etc
  offshoot cp -r rootfs/. disk.img:/
  offshoot cp disk.img:/var/log/messages .
  offshoot cp -r old.img:/home new.img:/
  zcat data.gz | offshoot cp - disk.img:/data";

pub(crate) const MKDIR_HELP: &str = "\
Examples:
  offshoot mkdir disk.img:/data
  offshoot mkdir -p -m 700 disk.img:/home/alice/.config/app";

pub(crate) const RM_HELP: &str = "\
A subvolume is not removed, and keeps the directories above it: `offshoot subvolume delete` deletes one.

Examples:
  offshoot rm disk.img:/etc/motd
  offshoot rm -rf disk.img:/var/cache disk.img:/tmp/old";

pub(crate) const MV_HELP: &str = "\
Both places are in one volume, and in one subvolume of it. What has the new name is replaced, as \
by rename(2).

Examples:
  offshoot mv disk.img:/etc/fstab.new disk.img:/etc/fstab
  offshoot mv --exchange -T disk.img:/root disk.img:/root.new
  offshoot mv disk.img:/a disk.img:/b disk.img:/dir";

pub(crate) const CHATTR_HELP: &str = "\
FLAGS is `+`, `-` or `=` and letters: a (only appended to), i (immutable), c (compressed), m (not \
compressed), C (written in place, without checksums: of files without data, and of directories for new \
files), d (left out of backups), A (access time stays), S (all changes durable at once), D (those of names \
in a directory). `stat` shows them.

Examples:
  offshoot chattr +C disk.img:/var/lib/machines
  offshoot chattr -- -i disk.img:/etc/resolv.conf";

pub(crate) const LN_HELP: &str = "\
Without -s, TARGET is a place in the same subvolume and gets one more name. With -s, it is the text \
that the link will hold.

Examples:
  offshoot ln disk.img:/bin/busybox disk.img:/bin/sh
  offshoot ln -s ../usr/lib/os-release disk.img:/etc/os-release";

/// What `--no-preserve` can leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Attribute {
    /// Permissions: those that are left by the umask
    Mode,
    /// User and group: those of the caller
    Ownership,
    /// Access and modification time: now
    Timestamps,
    /// Hard links: files of their own
    Links,
    /// Extended attributes, with ACLs
    Xattr,
    /// All of these
    All,
}

#[derive(Args)]
pub(crate) struct CpArguments {
    /// What is copied, and at the end where to
    #[arg(value_name = "SOURCE... DESTINATION", required = true)]
    pub(crate) paths: Vec<OsString>,
    /// Copy directories with what is in them, and symbolic links as links
    #[arg(short = 'r', short_aliases = ['R', 'a'], long)]
    pub(crate) recursive: bool,
    /// The destination is the new name, also if it is a directory that is there
    #[arg(short = 'T', long)]
    pub(crate) no_target_directory: bool,
    /// Do not keep these
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) no_preserve: Vec<Attribute>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
    /// Write what was done as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct MkdirArguments {
    /// The places, each VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
    /// Make the directories above as well, and let be what is there
    #[arg(short = 'p', long)]
    pub(crate) parents: bool,
    /// The permissions in octal; 777 without the umask otherwise
    #[arg(short = 'm', long, value_name = "MODE", value_parser = parse_mode)]
    pub(crate) mode: Option<u32>,
}

#[derive(Args)]
pub(crate) struct RmArguments {
    /// The places, each VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
    /// Remove directories with what is in them
    #[arg(short = 'r', short_alias = 'R', long)]
    pub(crate) recursive: bool,
    /// Say nothing of what is not there
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
}

#[derive(Args)]
pub(crate) struct ChattrArguments {
    /// What to change: `+`, `-` or `=`, and letters
    #[arg(value_name = "FLAGS", allow_hyphen_values = true, value_parser = parse_flags)]
    pub(crate) flags: FlagChange,
    /// The places, each VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

/// What becomes of the flags of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagChange {
    /// These are set.
    Add(FileFlags),
    /// These are cleared.
    Remove(FileFlags),
    /// These are set, and all others cleared.
    Set(FileFlags),
}

fn parse_flags(text: &str) -> Result<FlagChange, String> {
    let usage = || "flags are `+`, `-` or `=`, and letters; --help shows them".to_owned();
    let mut letters = text.chars();
    let kind = match letters.next() {
        Some('+') => FlagChange::Add,
        Some('-') => FlagChange::Remove,
        Some('=') => FlagChange::Set,
        _ => return Err(usage()),
    };
    letters.map(FileFlags::of_letter).collect::<Option<_>>().map(kind).ok_or_else(usage)
}

#[derive(Args)]
pub(crate) struct MvArguments {
    /// What is moved, and at the end where to
    #[arg(value_name = "SOURCE... DESTINATION", required = true)]
    pub(crate) places: Vec<OsString>,
    /// The destination is the new name, also if it is a directory that is there
    #[arg(short = 'T', long)]
    pub(crate) no_target_directory: bool,
    /// Do not move what would replace something
    #[arg(short = 'n', long)]
    pub(crate) no_clobber: bool,
    /// What has the new name gets the old one
    #[arg(long, conflicts_with = "no_clobber")]
    pub(crate) exchange: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct LnArguments {
    /// The file, or with -s the text of the link
    #[arg(value_name = "TARGET")]
    pub(crate) target: OsString,
    /// The new name, or a directory that it goes into
    #[arg(value_name = "PLACE")]
    pub(crate) place: OsString,
    /// Make a symbolic link
    #[arg(short = 's', long)]
    pub(crate) symbolic: bool,
    /// Replace what has the name
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// PLACE is the new name, also if it is a directory that is there
    #[arg(short = 'T', long)]
    pub(crate) no_target_directory: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|&mode| mode <= 0o7777 && !text.starts_with('+'))
        .ok_or_else(|| "a mode is up to four octal digits".to_owned())
}

#[cfg(test)]
mod tests {
    use offshoot_vfs::FileFlags;

    use super::{FlagChange, parse_flags, parse_mode};

    #[test]
    fn flags() {
        let both = FileFlags::IMMUTABLE | FileFlags::NODUMP;
        assert_eq!(parse_flags("+id"), Ok(FlagChange::Add(both)));
        assert_eq!(parse_flags("-i"), Ok(FlagChange::Remove(FileFlags::IMMUTABLE)));
        assert_eq!(parse_flags("="), Ok(FlagChange::Set(FileFlags::empty())));
        for text in ["", "i", "+x", "+i d"] {
            parse_flags(text).expect_err(text);
        }
    }

    #[test]
    fn modes() {
        assert_eq!(parse_mode("755"), Ok(0o755));
        assert_eq!(parse_mode("01777"), Ok(0o1777));
        for text in ["", "8", "u+x", "+7", "17777", "-1"] {
            parse_mode(text).expect_err(text);
        }
    }
}
