//! The options of `offshoot build`: those of a new volume, and what fills it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use offshoot_transfer::build::{BuildInput, BuildSource};

use super::layers::LayerForm;
use crate::args::{parse_minimal, parse_size};
use crate::exit::{Result, VerbFailure};
use crate::verbs::btrfs::storing::StoringArguments;
use crate::verbs::mkfs::{NewVolumeArguments, parse_owner};

pub(crate) const BUILD_HELP: &str = "\
SOURCE is a directory; a tar archive, or - for one on standard input, of any dialect and packed by gzip, zstd, xz, bzip2 or nothing; or a container image: \
oci:DIRECTORY[:NAME], oci-archive:FILE or docker-archive:FILE, whose layers are put one over the other; or a manifest: \
mtree:FILE[,contents=DIRECTORY] or composefs:FILE[,contents=DIRECTORY], whose files have their data in that directory, and their digests compared. \
Several are built one over the other, each to the directory that the --to behind it names.

Owners, permissions, devices, extended attributes with ACLs and capabilities, hard links, holes and nanosecond times are as the source has them: no root is needed, and nothing of the host \
but what a directory shows. Of two files with one path the later counts; two directories become one. Names in archives are below the directory that is built to, whatever they begin with, and one with .. is refused. \
A symbolic link to a directory that is there already is followed, inside the volume.

The first file that cannot be read ends the build. Then, and after Ctrl-C, there is no image.

With SOURCE_DATE_EPOCH in the environment the volume and all files in it are made at that time (seconds since 1970), and no file is younger. The time of the last access is that of the last change, unless an archive has one. \
The same sources and options, a UUID among them, then make the same bytes.

Examples:
  offshoot build root.img --from rootfs/
  offshoot build root.img --from rootfs.tar.zst --size 4G --label root
  offshoot build root.img --from rootfs/ --size minimal+256M
  offshoot build root.img --from base.tar --from overlay/ --from modules.tar.xz --to /lib/modules
  zcat rootfs.tar.gz | offshoot build root.img --from - --size 2G
  offshoot build app.img --from oci:image:latest --compress zstd:3
  offshoot build root.img --from mtree:root.mtree,contents=stage/ --from composefs:app.dump,contents=objects/ --to /app
  offshoot build app.img --format xfs --from docker-archive:app.tar
  offshoot build root.img --from rootfs.tar --subvolume default:/@ --subvolume /@home --snapshot /@:/@fresh
  offshoot build apps.img --from oci:one --to /one --from oci:two --to /two --layers snapshots
  offshoot build root.img --from rootfs.tar --selinux file_contexts --property /var/log:compression=zstd --property /var/lib/db:nodatacow
  offshoot build box.img --from rootfs.tar --map-uid 0:100000:65536 --map-gid 0:100000:65536
  offshoot build home.img --from /home --exclude '*.o' --exclude /alice/cache --owner 1000:1000";

#[derive(Args)]
pub(crate) struct BuildArguments {
    /// The image that is made
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,
    #[command(flatten)]
    pub(crate) sources: SourceArguments,
    /// The size of the volume, or minimal for the smallest one, or minimal+SIZE for so much more:
    /// so that the sources have room, and a little more, otherwise
    #[arg(long, value_name = "SIZE", value_parser = VolumeSize::parse)]
    pub(crate) size: Option<VolumeSize>,
    /// Leave out files with such names, or with a / such paths in a source
    #[arg(long, value_name = "PATTERN", action = ArgAction::Append)]
    pub(crate) exclude: Vec<OsString>,
    /// The owner of all files, instead of those that the sources say
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    pub(crate) owner: Option<(u32, u32)>,
    /// Let users of the sources become others: COUNT numbers from FROM on become those from TO on.
    /// Others stay
    #[arg(
        long,
        value_name = "FROM:TO[:COUNT]",
        value_parser = parse_mapped,
        action = ArgAction::Append
    )]
    pub(crate) map_uid: Vec<(u32, u32, u32)>,
    /// The same for groups
    #[arg(
        long,
        value_name = "FROM:TO[:COUNT]",
        value_parser = parse_mapped,
        action = ArgAction::Append
    )]
    pub(crate) map_gid: Vec<(u32, u32, u32)>,
    /// Give all files labels of SELinux, from a file of contexts (file_contexts) as setfiles reads
    /// it
    #[arg(long, value_name = "FILE")]
    pub(crate) selinux: Option<PathBuf>,
    /// Set a property of the file or directory of btrfs at this path before anything is in it:
    /// compression=zstd, lzo, zlib, none or no; nodatacow; nocompress. New files inherit those of
    /// their directory
    #[arg(long = "property", value_name = "PATH:NAME[=VALUE]", action = ArgAction::Append)]
    pub(crate) properties: Vec<OsString>,
    /// Make a subvolume of btrfs at this path, for what the sources have there: rw:PATH, ro:PATH,
    /// default:PATH or default-ro:PATH, or PATH alone
    #[arg(long = "subvolume", value_name = "[KIND:]PATH", action = ArgAction::Append)]
    pub(crate) subvolumes: Vec<OsString>,
    /// Take a snapshot of the subvolume SOURCE at PATH when all is built: read-only, or with rw:
    /// before it one that can be written
    #[arg(long = "snapshot", value_name = "[rw:]SOURCE:PATH", action = ArgAction::Append)]
    pub(crate) snapshots: Vec<OsString>,
    /// Store equal data of all files once
    #[arg(long)]
    pub(crate) dedupe: bool,
    /// What becomes of the layers of container images
    #[arg(long, value_name = "FORM", value_enum, default_value_t)]
    pub(crate) layers: LayerForm,
    /// Replace an image that is there
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// Write what was built as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) volume: NewVolumeArguments,
    #[command(flatten)]
    pub(crate) storing: StoringArguments,
}

fn parse_mapped(text: &str) -> Result<(u32, u32, u32), String> {
    let mut numbers = text.split(':').map(str::parse);
    let range = (numbers.next(), numbers.next(), numbers.next().unwrap_or(Ok(1)), numbers.next());
    match range {
        (Some(Ok(from)), Some(Ok(to)), Ok(count), None) => Ok((from, to, count)),
        _ => Err("numbers are expected, as in 0:100000:65536 or 1000:0".to_owned()),
    }
}

/// The size of the volume that is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VolumeSize {
    /// So many bytes.
    Bytes(u64),
    /// The smallest size, and so many bytes more.
    Minimal(u64),
}

impl VolumeSize {
    fn parse(text: &str) -> Result<Self, String> {
        parse_minimal(text)
            .map_or_else(|| parse_size(text).map(Self::Bytes), |slack| slack.map(Self::Minimal))
    }
}

/// The sources, each with the `--to` behind it. Their order on the command line matters, which
/// derived options do not show.
#[derive(Clone, Debug, Default)]
pub(crate) struct SourceArguments(Vec<(OsString, Option<OsString>)>);

impl SourceArguments {
    /// The sources.
    pub(crate) fn inputs(&self) -> Result<Vec<BuildInput>> {
        let input = |(source, to): &(OsString, Option<OsString>)| {
            if source.is_empty() {
                return Err(VerbFailure::Usage("a source without a name".to_owned()));
            }
            let to = to.as_ref().map(|to| to.as_bytes().to_vec()).unwrap_or_default();
            Ok(BuildInput { source: BuildSource::named(source), to })
        };
        self.0.iter().map(input).collect()
    }
}

impl Args for SourceArguments {
    fn augment_args(command: Command) -> Command {
        let option = |name: &'static str| {
            let option = Arg::new(name).long(name).action(ArgAction::Append);
            option.value_parser(value_parser!(OsString))
        };
        let from = option("from").value_name("SOURCE").required(true);
        let to = option("to").value_name("PATH").requires("from");
        command
            .arg(from.help("What the volume is filled from; several are built one over the other"))
            .arg(to.help(
                "The directory in the volume that the source before it becomes: the root \
                          otherwise",
            ))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SourceArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let of = |name: &str| {
            let values = matches.get_many::<OsString>(name).into_iter().flatten().cloned();
            matches.indices_of(name).into_iter().flatten().zip(values)
        };
        let from: Vec<(usize, OsString)> = of("from").collect();
        let mut sources: Vec<_> = from.iter().map(|(_, source)| (source.clone(), None)).collect();
        for (at, to) in of("to") {
            let before = from.iter().filter(|(from, _)| *from < at).count();
            let source = before.checked_sub(1).and_then(|last| sources.get_mut(last));
            let message = match source {
                None => "--to stands behind the --from that it is for",
                Some((_, Some(_))) => "a source has two --to",
                Some((_, none)) => {
                    *none = Some(to);
                    continue;
                }
            };
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, format!("{message}\n")));
        }
        Ok(Self(sources))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_belongs_to_the_source_before_it() {
        let parse = |line: &str| {
            let command = SourceArguments::augment_args(Command::new("build"));
            let words = ["build"].into_iter().chain(line.split(' '));
            let matches = command.try_get_matches_from(words).ok()?;
            let SourceArguments(sources) = SourceArguments::from_arg_matches(&matches).ok()?;
            let text = |text: OsString| text.to_string_lossy().into_owned();
            let pair = |(from, to): (OsString, Option<OsString>)| (text(from), to.map(text));
            Some(sources.into_iter().map(pair).collect::<Vec<_>>())
        };
        let pair = |from: &str, to: Option<&str>| (from.to_owned(), to.map(str::to_owned));
        assert_eq!(
            parse("--from a --from b --to /b --from c"),
            Some(vec![pair("a", None), pair("b", Some("/b")), pair("c", None)])
        );
        for wrong in ["--to /a --from a", "--from a --to /a --to /b", "--to /a"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
