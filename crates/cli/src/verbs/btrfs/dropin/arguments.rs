//! The command line of `mkfs.btrfs`.
//!
//! As for `getopt_long`, the beginning of a long option is enough, options may stand behind
//! devices, and of an option that is given twice the later counts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};
use offshoot_btrfs::MkfsOptions;
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::compress::CompressionMethod;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_vfs::FileFlags;
use uuid::Uuid;

use super::{NAME, features};
use crate::edit::moment;
use crate::exit::{Result, VerbFailure};
use crate::verbs::btrfs::build::NewSubvolume;
use crate::verbs::mkfs::{parse_checksum, parse_profile};

/// What `-V` prints behind the name and the version of the program: programs that look for the
/// version of btrfs-progs find the one whose options this tool has.
const VERSION: &str = concat!(
    "mkfs.btrfs of offshoot ",
    env!("CARGO_PKG_VERSION"),
    ", with the options of btrfs-progs v6.19\n",
    "+LZO +ZSTD\n"
);

const HELP: &str = "\
This is offshoot under the name mkfs.btrfs. Sizes are in bytes, or with k, m, g, t, p or e in powers \
of 1024. `offshoot mkfs` and `offshoot build` do more.";

/// What the command line asks for.
pub(super) enum Parsed {
    /// A volume.
    Volume(Box<DropinArguments>),
    /// This text: the help, or the version.
    Text(String),
}

/// Makes a btrfs filesystem on one or several devices
#[derive(Parser)]
#[command(
    name = NAME,
    after_help = HELP,
    disable_help_flag = true,
    disable_version_flag = true,
    args_override_self = true,
    infer_long_args = true
)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub(super) struct DropinArguments {
    /// The devices or files
    #[arg(value_name = "DEVICE")]
    pub(super) devices: Vec<PathBuf>,
    /// The profile of data: single (default), dup, raid0, raid1, raid1c3, raid1c4 or raid10
    #[arg(short = 'd', long, value_name = "PROFILE", value_parser = parse_profile)]
    data: Option<Profile>,
    /// The profile of metadata: dup on one device and raid1 on several otherwise
    #[arg(short = 'm', long, value_name = "PROFILE", value_parser = parse_profile)]
    metadata: Option<Profile>,
    /// Data and metadata share block groups
    #[arg(short = 'M', long)]
    mixed: bool,
    /// The checksum: crc32c (default), xxhash, sha256 or blake2
    #[arg(long, visible_alias = "checksum", value_name = "TYPE", value_parser = parse_checksum)]
    csum: Option<ChecksumType>,
    /// The size of tree blocks: 16K, or the sector size if that is larger or with --mixed
    #[arg(short = 'n', long, value_name = "SIZE", value_parser = parse_unit)]
    nodesize: Option<u32>,
    /// The unit of data: 4K otherwise
    #[arg(short = 's', long, value_name = "SIZE", value_parser = parse_unit)]
    sectorsize: Option<u32>,
    /// Features to turn on, or with ^ off; list-all lists them
    #[arg(short = 'O', long, value_name = "LIST", action = ArgAction::Append)]
    features: Vec<String>,
    /// As --features
    #[arg(short = 'R', long, value_name = "LIST")]
    pub(super) runtime_features: Option<String>,
    /// The label, up to 255 bytes
    #[arg(short = 'L', long, value_name = "LABEL", allow_hyphen_values = true)]
    pub(super) label: Option<String>,
    /// The filesystem id; a random one otherwise
    #[arg(short = 'U', long)]
    uuid: Option<Uuid>,
    /// The id of the device, if there is one
    #[arg(long, value_name = "UUID")]
    pub(super) device_uuid: Option<Uuid>,
    /// Use so much of each device
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = parse_size)]
    pub(super) byte_count: Option<u64>,
    /// Fill the volume from this directory. A file that is missing or too small becomes large
    /// enough
    #[arg(short = 'r', long, value_name = "DIR")]
    pub(super) rootdir: Option<PathBuf>,
    /// Compress the files: no (default), zstd, lzo or zlib, with a level as in zstd:15
    #[arg(long, value_name = "ALGO[:LEVEL]", value_parser = parse_compression)]
    compress: Option<CompressArgument>,
    /// Make a directory of --rootdir a subvolume; TYPE is rw (default), ro, default or default-ro
    #[arg(short = 'u', long, value_name = "TYPE:SUBDIR", action = ArgAction::Append)]
    subvol: Vec<OsString>,
    /// Give a file of --rootdir, or a directory and all that is made in it, the flag nodatacow
    #[arg(long, value_name = "FLAG:PATH", action = ArgAction::Append)]
    inode_flags: Vec<OsString>,
    /// Share the data of files with the image, if both are on one filesystem that shares blocks
    #[arg(long)]
    pub(super) reflink: bool,
    /// Make the volume as small as its files allow; a file ends behind it
    #[arg(long)]
    pub(super) shrink: bool,
    /// Discard nothing on devices
    #[arg(short = 'K', long)]
    pub(super) nodiscard: bool,
    /// Overwrite what is on the devices
    #[arg(short = 'f', long)]
    pub(super) force: bool,
    /// Print errors and warnings alone
    #[arg(short = 'q', long, overrides_with = "verbose")]
    pub(super) quiet: bool,
    /// Take --quiet back
    #[arg(short = 'v', long, overrides_with = "quiet")]
    verbose: bool,
    /// Print the version
    #[arg(short = 'V', long)]
    version: bool,
    /// Print this help
    #[arg(long)]
    help: bool,
}

/// The value of `--compress`.
#[derive(Clone)]
struct CompressArgument {
    /// As it was given.
    text: String,
    /// `None` for none.
    method: Option<CompressionMethod>,
}

/// What the command line asks for.
pub(super) fn parse(words: &[OsString]) -> Result<Parsed> {
    let matches = DropinArguments::command().try_get_matches_from(words);
    let parsed = matches.and_then(|matches| DropinArguments::from_arg_matches(&matches));
    let arguments = parsed.map_err(|error| VerbFailure::Usage(message(&error)))?;
    if arguments.help {
        return Ok(Parsed::Text(DropinArguments::command().render_help().to_string()));
    }
    if arguments.version {
        return Ok(Parsed::Text(VERSION.to_owned()));
    }
    Ok(Parsed::Volume(Box::new(arguments)))
}

/// The message of clap, with what can follow an option that is not known.
fn message(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end().to_owned();
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let first = text.lines().next().unwrap_or_default();
            format!("{first}\n{}", DropinArguments::command().render_help())
        }
        _ => text,
    }
}

impl DropinArguments {
    /// Whether they ask for the list of features.
    pub(super) fn lists_features(&self) -> bool {
        self.lists().any(|list| list.split(',').any(|word| word == features::LIST))
    }

    fn lists(&self) -> impl Iterator<Item = &str> {
        self.features.iter().chain(&self.runtime_features).map(String::as_str)
    }

    /// The volume to be made.
    ///
    /// # Errors
    /// When the options contradict each other, or ask for what is not made.
    pub(super) fn new_volume(&self) -> Result<MkfsOptions> {
        let usage = |message: &str| Err(VerbFailure::Usage(message.to_owned()));
        if self.devices.is_empty() {
            return usage("no device is given; --help shows the options");
        }
        if let Some(option) = self.option_for_rootdir() {
            return usage(&format!("{option} is an option for the files of --rootdir"));
        }
        if self.rootdir.is_some() && self.devices.len() > 1 {
            return usage("--rootdir fills a volume on one device");
        }
        if self.device_uuid.is_some() && self.devices.len() > 1 {
            return usage("--device-uuid is for a volume on one device");
        }
        if self.reflink && self.compression().is_some() {
            return usage("--reflink shares data as it is, and --compress stores other bytes");
        }
        let mut features = features::chosen(self.lists())?;
        if self.mixed {
            features.incompat = features.incompat.union(Incompat::MIXED_GROUPS);
        }
        let profile = |given: Option<Profile>| given.unwrap_or(Profile::Single);
        let is_mixed = features.incompat.has(Incompat::MIXED_GROUPS);
        if is_mixed && profile(self.data) != profile(self.metadata) {
            return usage("with --mixed, --data and --metadata are the same profile");
        }
        let fsid = self.uuid.unwrap_or_else(Uuid::new_v4);
        let usual = MkfsOptions::new(fsid, moment()?);
        Ok(MkfsOptions {
            label: self.label.clone().unwrap_or_default(),
            device_uuids: self.device_uuid.into_iter().collect(),
            node_size: self.nodesize,
            sector_size: self.sectorsize.unwrap_or(usual.sector_size),
            checksum: self.csum.unwrap_or(usual.checksum),
            metadata: self.metadata,
            data: self.data,
            features,
            is_forced: self.force,
            ..usual
        })
    }

    /// An option that is there without `--rootdir`, which it is for.
    fn option_for_rootdir(&self) -> Option<&'static str> {
        let given = [
            ("--compress", self.compression().is_some()),
            ("--subvol", !self.subvol.is_empty()),
            ("--inode-flags", !self.inode_flags.is_empty()),
            ("--reflink", self.reflink),
            ("--shrink", self.shrink),
        ];
        let given = given.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option);
        given.filter(|_| self.rootdir.is_none())
    }

    /// How files are compressed.
    pub(super) fn compression(&self) -> Option<CompressionMethod> {
        self.compress.as_ref().and_then(|chosen| chosen.method)
    }

    /// The name of the compression in the summary.
    pub(super) fn compression_name(&self) -> &str {
        self.compress.as_ref().map_or("no", |chosen| &chosen.text)
    }

    /// The subvolumes among the directories.
    ///
    /// # Errors
    /// When one has no path, or two are to be the default one.
    pub(super) fn subvolumes(&self) -> Result<Vec<NewSubvolume>> {
        let subvolumes: Vec<_> =
            self.subvol.iter().map(|text| NewSubvolume::parse(text)).collect::<Result<_>>()?;
        if subvolumes.iter().filter(|subvolume| subvolume.is_default()).count() > 1 {
            let message = "--subvol: one subvolume is the default one, and these are several";
            return Err(VerbFailure::Usage(message.to_owned()));
        }
        Ok(subvolumes)
    }

    /// The flags of files and directories, by their paths in `--rootdir`.
    ///
    /// # Errors
    /// For a flag that is none, or that we do not set.
    pub(super) fn file_flags(&self) -> Result<Vec<(Vec<u8>, FileFlags)>> {
        let path_of = |text: &OsString| {
            let text = text.as_bytes();
            let usage = |message: String| Err(VerbFailure::Usage(message));
            let Some(colon) = text.iter().position(|&byte| byte == b':') else {
                return usage("--inode-flags takes a flag, a colon and a path".to_owned());
            };
            let (flag, path) = text.split_at(colon);
            match flag {
                b"nodatacow" => {
                    let path = path.strip_prefix(b":").unwrap_or(path);
                    Ok((path.to_vec(), FileFlags::NODATACOW))
                }
                b"nodatasum" => {
                    let message = "--inode-flags nodatasum is not set yet; nodatacow is";
                    Err(VerbFailure::Refused(message.to_owned()))
                }
                _ => usage(format!("--inode-flags: no flag is called {}", flag.escape_ascii())),
            }
        };
        self.inode_flags.iter().map(path_of).collect()
    }
}

/// A size in bytes, or with a letter in powers of 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: &str = "bkmgtpe";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default().to_ascii_lowercase();
    let mut units = (0_u32..).zip(UNITS.chars());
    let power = match unit.len() {
        0 => Some(0),
        1 => units.find(|(_, one)| unit.starts_with(*one)).map(|(power, _)| power),
        _ => None,
    };
    let number = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u64>());
    let (Some(power), Some(Ok(number))) = (power, number) else {
        return Err("a number is expected, with k, m, g, t, p or e or without".to_owned());
    };
    let scale = 1_u64.checked_shl(10 * power);
    let bytes = scale.and_then(|scale| number.checked_mul(scale));
    bytes.ok_or_else(|| "more than 16 EiB".to_owned())
}

/// A size with 32 bits.
fn parse_unit(text: &str) -> Result<u32, String> {
    u32::try_from(parse_size(text)?).map_err(|_| "it is below 4G".to_owned())
}

fn parse_compression(text: &str) -> Result<CompressArgument, String> {
    let method = match text.split_once(':') {
        None if text == "no" => None,
        // Level 0 is the usual one.
        Some((name, "0")) => Some(name.parse()?),
        _ => Some(text.parse()?),
    };
    Ok(CompressArgument { text: text.to_owned(), method })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Box<DropinArguments>> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        match parse(&words)? {
            Parsed::Volume(arguments) => Ok(arguments),
            Parsed::Text(text) => panic!("{line}: {text}"),
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("16k", 16384),
            ("1G", 1 << 30),
            ("7b", 7),
            ("15E", 15 << 60),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "k", "1x", "300MiB", "1.5G", "-1", "16e", "99999999999999999999"] {
            parse_size(text).expect_err(text);
        }
    }

    #[test]
    fn a_command_line_is_read_as_getopt_reads_it() {
        let arguments = parsed("mkfs.btrfs -qf disk.img -Lname -d raid0 --byte-c=1g -d DUP -L -x")
            .unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(arguments.devices, [PathBuf::from("disk.img")]);
        assert!(arguments.quiet && arguments.force);
        assert_eq!(arguments.label.as_deref(), Some("-x"));
        assert_eq!(arguments.data, Some(Profile::Dup));
        assert_eq!(arguments.byte_count, Some(1 << 30));
        let quiet = |line: &str| parsed(line).map(|arguments| arguments.quiet).ok();
        assert_eq!(quiet("mkfs.btrfs -vvq disk.img"), Some(true));
        assert_eq!(quiet("mkfs.btrfs -qv disk.img"), Some(false));
    }

    #[test]
    fn what_contradicts_itself_is_wrong_usage() {
        for line in [
            "mkfs.btrfs",
            "mkfs.btrfs --subvol home disk.img",
            "mkfs.btrfs --compress zstd disk.img",
            "mkfs.btrfs --shrink disk.img",
            "mkfs.btrfs --rootdir etc a.img b.img",
            "mkfs.btrfs -r etc --subvol default:a --subvol default-ro:b disk.img",
            "mkfs.btrfs -r etc --inode-flags immutable:a disk.img",
            "mkfs.btrfs -r etc --inode-flags a disk.img",
            "mkfs.btrfs -r etc --compress lzo:3 disk.img",
            "mkfs.btrfs -r etc --compress zstd:16 disk.img",
            "mkfs.btrfs --unknown disk.img",
            "mkfs.btrfs -l 16k disk.img",
            "mkfs.btrfs -A 0 disk.img",
        ] {
            let used = parsed(line).and_then(|arguments| {
                arguments.new_volume()?;
                arguments.subvolumes()?;
                arguments.file_flags().map(drop)
            });
            assert!(matches!(used, Err(VerbFailure::Usage(_))), "{line}: {used:?}");
        }
    }
}
