//! The options of the verbs that change volumes, in the words of the core utilities.

use std::ffi::OsString;

use clap::{Args, ValueEnum};
use offshoot_transfer::copy;
use offshoot_vfs::FileFlags;

use super::EditArguments;
use super::parse_size;

pub(crate) const CP_HELP: &str = "\
SOURCE and DESTINATION are paths of the host or places in volumes; one of them at least is a \
place. A text with `:/` behind the name of a file is a place, and all else is a path of the host. \
The destination is a directory that is there, which the sources go into under their names, or the \
new name. * ? and [...] in a path of a volume match names there. `dir/.` and VOLUME:/ stand for what is in a directory. `-` as the only source is \
standard input, and as the destination of one file standard output.

Mode, owner, group, times, extended attributes with ACLs, hard links and holes are kept, whichever user \
runs it: a volume takes owners and device nodes without root. On the host, what may not be made \
without root is left out, and one summary at the end says so.

Directories are merged, files that are there are replaced. A file in a volume is written into, \
also where a link leads to it; with -r or -d one that has other names is removed, unless links \
are not kept. A file of the host that is named as the destination is written into as by cp -p: \
links are followed, and devices and FIFOs take the data. \
One that holds a filesystem is refused. Below a directory of the host nothing is written \
outside of it, and no symbolic link is followed. A file that cannot be copied is reported and \
left out, and the rest goes on; a file in a volume stays as it was when nothing of the source \
can be read. What a SOURCE becomes is not replaced by another SOURCE of the same command. A file \
that becomes shorter meanwhile is copied as far as it goes, with a warning.

With SOURCE_DATE_EPOCH in the environment a copy into a volume is the same each time: one thread \
goes through directories in the order of names, sectors that are all zeros are holes, no time is \
later than that, and the time of the last access is that of the last change.

Examples:
  offshoot cp -r src disk.img:/src
  offshoot cp motd issue disk.img:/etc
  offshoot cp -r rootfs/. disk.img:/
  offshoot cp -rx --exclude '*.o' / disk.img:/
  offshoot cp 'disk.img:/var/log/*.gz' .
  offshoot cp disk.img:/var/log/messages .
  offshoot cp disk.img:/backup.gz - | zcat
  offshoot cp -r old.img:/home new.img:/
  offshoot cp --reflink=always disk.img:/vm.raw disk.img:/vm-2.raw
  zcat data.gz | offshoot cp - disk.img:/data";

pub(crate) const MKDIR_HELP: &str = "\
Examples:
  offshoot mkdir disk.img:/data
  offshoot mkdir -p -m 700 disk.img:/home/alice/.config/app";

pub(crate) const RM_HELP: &str = "\
A subvolume is not removed, and keeps the directories above it: `offshoot subvolume delete` deletes one.

Examples:
  offshoot rm disk.img:/etc/motd
  offshoot rm -v 'disk.img:/var/log/*.gz'
  offshoot rm -rf disk.img:/var/cache disk.img:/tmp/old";

pub(crate) const MV_HELP: &str = "\
Both places are in one volume, and in one subvolume of it; a subvolume itself may go into another one. What has the new name is replaced, as \
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

pub(crate) const FALLOCATE_HELP: &str = "\
Without -p, -z, -c or -i, space is allocated, and a file that is not there is made. Sizes are in bytes, or with K, M, G. With -c and -i the \
range is whole sectors.

Examples:
  offshoot fallocate -l 10G disk.img:/vm.raw
  offshoot fallocate -p -o 1M -l 512K disk.img:/vm.raw";

pub(crate) const TRUNCATE_HELP: &str = "\
SIZE is the new length, in bytes, or with K, M, G. With + or - before it files grow or shrink by it, with < or > they become no longer or no \
shorter than it, with / or % a multiple of it, the next one below or above. What is new reads as zeros and takes no space. A file that is not there is made.

Examples:
  offshoot truncate -s 10G disk.img:/vm.raw
  offshoot truncate -s -1M disk.img:/log
  offshoot truncate -s %4K disk.img:/blob";

pub(crate) const DEDUPE_HELP: &str = "\
All are in one volume. What is the same in the original and in a file is stored once then, as after a copy with --reflink; nothing that they show \
changes. Offsets and the length are whole sectors, but that both ranges may end with their files. Without a length, ranges end where the \
shorter file does. Sizes are in bytes, or with K, M, G.

Examples:
  offshoot dedupe disk.img:/vm.raw disk.img:/vm-2.raw disk.img:/vm-3.raw
  offshoot dedupe -o 1M --to-offset 64M -l 16M disk.img:/a disk.img:/b";

pub(crate) const SETFATTR_HELP: &str = "\
A value is text, or bytes as 0x and digits. A name begins with user., trusted., security. or system. The default access control \
list of a directory is system.posix_acl_default.

Examples:
  offshoot setfattr -n user.origin -v somewhere disk.img:/file
  offshoot setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 disk.img:/usr/bin/ping
  offshoot setfattr -x user.origin disk.img:/file";

pub(crate) const GETFATTR_HELP: &str = "\
Values are shown as text when they are, otherwise as 0x and digits. With -d they are as getfattr of the host writes them: those in user., \
or that -m names by the beginning of their names.

Examples:
  offshoot getfattr disk.img:/file
  offshoot getfattr -d -m - disk.img:/usr/bin/ping
  offshoot getfattr -n user.origin disk.img:/file";

pub(crate) const LN_HELP: &str = "\
Without -s, TARGET is a place in the same subvolume and gets one more name. With -s, it is the text \
that the link will hold.

Examples:
  offshoot ln disk.img:/bin/busybox disk.img:/bin/sh
  offshoot ln -s ../usr/lib/os-release disk.img:/etc/os-release";

/// What `--preserve` and `--no-preserve` can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PreserveListArgument {
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

impl PreserveListArgument {
    /// The attributes in `list`.
    pub(crate) fn each(list: &[Self]) -> Vec<copy::PreservedAttribute> {
        if list.contains(&Self::All) {
            return copy::PreservedAttribute::ALL.to_vec();
        }
        let one = |attribute: &Self| match attribute {
            Self::Mode => Some(copy::PreservedAttribute::Mode),
            Self::Ownership => Some(copy::PreservedAttribute::Ownership),
            Self::Timestamps => Some(copy::PreservedAttribute::Timestamps),
            Self::Links => Some(copy::PreservedAttribute::Links),
            Self::Xattr => Some(copy::PreservedAttribute::Xattr),
            Self::All => None,
        };
        list.iter().filter_map(one).collect()
    }
}

/// When a copy shares its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReflinkArgument {
    /// Where both are in one volume, and can
    Auto,
    /// Nothing is copied that cannot share
    Always,
    /// Everything is written anew
    Never,
}

impl From<ReflinkArgument> for copy::ReflinkMode {
    fn from(reflink: ReflinkArgument) -> Self {
        match reflink {
            ReflinkArgument::Auto => Self::Auto,
            ReflinkArgument::Always => Self::Always,
            ReflinkArgument::Never => Self::Never,
        }
    }
}

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct CpArguments {
    /// What is copied, and at the end where to
    #[arg(value_name = "SOURCE... DESTINATION", required = true)]
    pub(crate) paths: Vec<OsString>,
    /// Copy directories with what is in them, and symbolic links as links
    #[arg(short = 'r', visible_short_aliases = ['R', 'a'], visible_alias = "archive", long)]
    pub(crate) recursive: bool,
    /// Copy symbolic links as links
    #[arg(short = 'd', visible_short_alias = 'P', long)]
    pub(crate) no_dereference: bool,
    /// Keep attributes, as is done anyway
    #[arg(short = 'p', long, value_name = "LIST", num_args = 0..=1, require_equals = true)]
    #[arg(value_delimiter = ',', default_missing_value = "all")]
    pub(crate) preserve: Vec<PreserveListArgument>,
    /// Replace what is there, as is done anyway
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// Replace nothing
    #[arg(short = 'n', long)]
    pub(crate) no_clobber: bool,
    /// Replace only what is older
    #[arg(short = 'u', long)]
    pub(crate) update: bool,
    /// Stay in the filesystem, or the subvolume, of each source
    #[arg(short = 'x', long)]
    pub(crate) one_file_system: bool,
    /// Leave out files with such names, SOURCE itself too, or with a / such paths below SOURCE
    #[arg(long, value_name = "PATTERN", action = clap::ArgAction::Append)]
    pub(crate) exclude: Vec<OsString>,
    /// Copy into this directory
    #[arg(short = 't', long, value_name = "DIRECTORY", conflicts_with = "no_target_directory")]
    pub(crate) target_directory: Option<OsString>,
    /// Say what was copied
    #[arg(short = 'v', long, conflicts_with = "json")]
    pub(crate) verbose: bool,
    /// The destination is the new name, also if it is a directory that is there
    #[arg(short = 'T', long)]
    pub(crate) no_target_directory: bool,
    /// Share data inside one volume, where that can be, must be (always) or is not wanted
    #[arg(long, value_name = "WHEN", default_value = "auto", num_args = 0..=1)]
    #[arg(require_equals = true, default_missing_value = "always")]
    pub(crate) reflink: ReflinkArgument,
    /// Do not keep these
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) no_preserve: Vec<PreserveListArgument>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
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
    /// The permissions, as for chmod of a=rwx; 777 without the umask otherwise
    #[arg(short = 'm', long, value_name = "MODE", allow_hyphen_values = true)]
    pub(crate) mode: Option<String>,
    /// Say what was made
    #[arg(short = 'v', long, conflicts_with = "json")]
    pub(crate) verbose: bool,
}

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
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
    #[arg(short = 'f', long, overrides_with = "interactive")]
    pub(crate) force: bool,
    /// Ask before each
    #[arg(short = 'i', long)]
    pub(crate) interactive: bool,
    /// Say what was removed
    #[arg(short = 'v', long, conflicts_with = "json")]
    pub(crate) verbose: bool,
    /// Remove empty directories, too
    #[arg(short = 'd', long)]
    pub(crate) dir: bool,
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
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct MvArguments {
    /// What is moved, and at the end where to
    #[arg(value_name = "SOURCE... DESTINATION", required = true)]
    pub(crate) places: Vec<OsString>,
    /// The destination is the new name, also if it is a directory that is there
    #[arg(short = 'T', long)]
    pub(crate) no_target_directory: bool,
    /// Do not move what would replace something
    #[arg(short = 'n', long, overrides_with = "force")]
    pub(crate) no_clobber: bool,
    /// Replace what is there, as is done anyway
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// Say what was moved
    #[arg(short = 'v', long, conflicts_with = "json")]
    pub(crate) verbose: bool,
    /// What has the new name gets the old one
    #[arg(long, conflicts_with = "no_clobber")]
    pub(crate) exchange: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
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
    /// PLACE is the new name, also if it is a link to a directory
    #[arg(short = 'n', long)]
    pub(crate) no_dereference: bool,
    /// Say what was made
    #[arg(short = 'v', long, conflicts_with = "json")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("what").multiple(false))]
#[expect(clippy::struct_excessive_bools, reason = "they are the options of util-linux")]
pub(crate) struct FallocateArguments {
    /// The place, VOLUME:/PATH
    #[arg(value_name = "PLACE")]
    pub(crate) place: OsString,
    /// Where the range begins
    #[arg(short = 'o', long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub(crate) offset: u64,
    /// How long it is
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) length: u64,
    /// The file does not become longer
    #[arg(short = 'n', long, conflicts_with_all = ["collapse_range", "insert_range"])]
    pub(crate) keep_size: bool,
    /// The range becomes a hole
    #[arg(short = 'p', long, group = "what")]
    pub(crate) punch_hole: bool,
    /// The range reads as zeros, and stays allocated
    #[arg(short = 'z', long, group = "what")]
    pub(crate) zero_range: bool,
    /// The range goes, and what is behind it moves down
    #[arg(short = 'c', long, group = "what")]
    pub(crate) collapse_range: bool,
    /// A hole comes in, and what is there and behind moves up
    #[arg(short = 'i', long, group = "what")]
    pub(crate) insert_range: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
pub(crate) struct TruncateArguments {
    /// The places, each VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    /// How long they are to be
    #[arg(short = 's', long, value_name = "SIZE", allow_hyphen_values = true)]
    #[arg(value_parser = parse_length)]
    pub(crate) size: TruncateSize,
    /// Make no files, and say nothing of what is not there
    #[arg(short = 'c', long)]
    pub(crate) no_create: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

/// The wanted size of a file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TruncateSize {
    Exactly(u64),
    Longer(u64),
    Shorter(u64),
    AtMost(u64),
    AtLeast(u64),
    /// The next multiple below. Never a multiple of 0.
    RoundedDown(u64),
    /// The next multiple above. Never a multiple of 0.
    RoundedUp(u64),
}

impl TruncateSize {
    /// The new size of a file that has the size `size`, both in bytes; `None` if it does not fit a
    /// `u64`.
    pub(crate) fn of(self, size: u64) -> Option<u64> {
        match self {
            Self::Exactly(bytes) => Some(bytes),
            Self::Longer(bytes) => size.checked_add(bytes),
            Self::Shorter(bytes) => Some(size.saturating_sub(bytes)),
            Self::AtMost(bytes) => Some(size.min(bytes)),
            Self::AtLeast(bytes) => Some(size.max(bytes)),
            Self::RoundedDown(bytes) => Some(size / bytes * bytes),
            Self::RoundedUp(bytes) => size.checked_next_multiple_of(bytes),
        }
    }
}

fn parse_length(text: &str) -> Result<TruncateSize, String> {
    let mut rest = text.chars();
    let kind = match rest.next() {
        Some('+') => TruncateSize::Longer,
        Some('-') => TruncateSize::Shorter,
        Some('<') => TruncateSize::AtMost,
        Some('>') => TruncateSize::AtLeast,
        Some('/') => TruncateSize::RoundedDown,
        Some('%') => TruncateSize::RoundedUp,
        _ => return parse_size(text).map(TruncateSize::Exactly),
    };
    match kind(parse_size(rest.as_str())?) {
        TruncateSize::RoundedDown(0) | TruncateSize::RoundedUp(0) => {
            Err("no multiple of 0 is meant".to_owned())
        }
        length => Ok(length),
    }
}

#[derive(Args)]
pub(crate) struct DedupeArguments {
    /// The file that the others are compared with, VOLUME:/PATH
    #[arg(value_name = "ORIGINAL")]
    pub(crate) original: OsString,
    /// The files that share with it what is the same, each VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    /// Where the range begins
    #[arg(short = 'o', long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub(crate) offset: u64,
    /// Where it begins in the others; in the same place otherwise
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) to_offset: Option<u64>,
    /// How long it is
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) length: Option<u64>,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("change").required(true))]
pub(crate) struct SetfattrArguments {
    /// The places, each VOLUME or VOLUME:/PATH
    #[arg(value_name = "PLACE", required = true)]
    pub(crate) places: Vec<OsString>,
    /// The attribute to set
    #[arg(short = 'n', long, value_name = "NAME", group = "change")]
    pub(crate) name: Option<OsString>,
    /// Its value; empty otherwise
    #[arg(short = 'v', long, value_name = "VALUE", requires = "name", value_parser = parse_value)]
    pub(crate) value: Option<XattrValue>,
    /// The attribute to remove
    #[arg(short = 'x', long, value_name = "NAME", group = "change")]
    pub(crate) remove: Option<OsString>,
    /// A symbolic link at the end is the file that is meant
    #[arg(long)]
    pub(crate) no_dereference: bool,
    #[command(flatten)]
    pub(crate) edit: EditArguments,
}

/// The value of an extended attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct XattrValue(pub(crate) Vec<u8>);

fn parse_value(text: &str) -> Result<XattrValue, String> {
    let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) else {
        if text.starts_with("0s") || text.starts_with("0S") {
            return Err("base64 is not supported: give the bytes as 0x and digits".to_owned());
        }
        return Ok(XattrValue(text.as_bytes().to_vec()));
    };
    let pair = |pair: &[u8]| {
        let digits = std::str::from_utf8(pair).ok().filter(|digits| !digits.starts_with('+'));
        digits.filter(|_| pair.len() == 2).and_then(|digits| u8::from_str_radix(digits, 16).ok())
    };
    let bytes: Option<Vec<u8>> = digits.as_bytes().chunks(2).map(pair).collect();
    bytes.map(XattrValue).ok_or_else(|| "0x is followed by pairs of hexadecimal digits".to_owned())
}

/// How values of extended attributes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Encoding {
    /// In quotes, with a backslash and octal digits for what is not printed
    Text,
    /// 0x and hexadecimal digits
    Hex,
    /// 0s and base64
    Base64,
}

#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct GetfattrArguments {
    #[command(flatten)]
    pub(crate) places: super::PlacesArguments,
    /// This attribute alone
    #[arg(short = 'n', long, value_name = "NAME")]
    pub(crate) name: Option<OsString>,
    /// Write attributes and values as getfattr -d of the host does
    #[arg(short = 'd', long, conflicts_with = "json")]
    pub(crate) dump: bool,
    /// Attributes whose names this regular expression matches, - for all; with -d those in user.
    /// otherwise
    #[arg(short = 'm', long = "match", value_name = "PATTERN", conflicts_with = "name")]
    pub(crate) matching: Option<OsString>,
    /// How values are written: text, hex or base64; as they are best read otherwise
    #[arg(short = 'e', long, value_name = "ENCODING")]
    pub(crate) encoding: Option<Encoding>,
    /// Write values alone, as they are
    #[arg(long, conflicts_with_all = ["json", "dump"])]
    pub(crate) only_values: bool,
    /// A symbolic link at the end is the file that is meant
    #[arg(long)]
    pub(crate) no_dereference: bool,
    /// Write one JSON object on each line: place, name and value
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use offshoot_vfs::FileFlags;

    use super::{FlagChange, TruncateSize, parse_flags, parse_length, parse_value};

    #[test]
    fn values() {
        for (text, bytes) in [("text", &b"text"[..]), ("", b""), ("0x", b""), ("0x00fF", b"\0\xff")]
        {
            assert_eq!(parse_value(text).map(|value| value.0), Ok(bytes.to_vec()), "{text}");
        }
        for text in ["0x1", "0xg0", "0x+1", "0sYQ=="] {
            parse_value(text).expect_err(text);
        }
    }

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
    fn lengths() {
        for (text, of_10k, of_1) in [
            ("3K", Some(3072), Some(3072)),
            ("+5", Some(10_245), Some(6)),
            ("-5", Some(10_235), Some(0)),
            ("<4K", Some(4096), Some(1)),
            (">4K", Some(10_240), Some(4096)),
            ("/4K", Some(8192), Some(0)),
            ("%4K", Some(12_288), Some(4096)),
            ("+18446744073709551615", None, None),
        ] {
            let length = parse_length(text).expect(text);
            assert_eq!((length.of(10_240), length.of(1)), (of_10k, of_1), "{text}");
        }
        for text in ["", "+", "--5", "+-5", "/0", "%0", "~5", "5X"] {
            parse_length(text).expect_err(text);
        }
        assert_eq!(parse_length("0"), Ok(TruncateSize::Exactly(0)));
    }
}
