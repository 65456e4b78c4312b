//! `offshoot build`: makes a volume and fills it.
//!
//! The image is built under a temporary name beside its own and renamed at the end, so under its
//! own name there never is a half one. Without `--size` the sources are measured first; where the
//! size turns out too small, the build starts again with twice of it.

mod arguments;
mod fill;
mod layers;

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use offshoot_device::{BlockDevice, FileDevice};
use offshoot_transfer::TransferFailure;
use offshoot_transfer::build::{
    BuildInput, BuildOptions, BuildOutcome, BuildSource, FileContexts, SourceSize,
};
use offshoot_transfer::host::{Process, host_id_of_file, umask};
use serde::Serialize;
use tempfile::NamedTempFile;
use uuid::Uuid;

use crate::exit::{ExitStatus, Result, VerbFailure, reported};
use crate::interrupt::{self, RemovedAtEnd};
use crate::output::{Console, Escaped, human_size, json_name, write_line};
use crate::verbs::btrfs::build::{NewSnapshot, NewSubvolume};
use crate::verbs::mkfs::{NewVolumeArguments, NewVolumeFormat, NewVolumeOptions, usage};
use crate::verbs::{btrfs, xfs};
use arguments::VolumeSize;
pub(crate) use arguments::{BUILD_HELP, BuildArguments};
pub(in crate::verbs) use fill::{FreshVolume, GROWN_MAX, VolumeFill, fill_options, is_full};
use layers::{LayerForm, place_trees};

/// What was built.
#[derive(Serialize)]
struct BuiltImage {
    /// The image, as a JSON name.
    image: String,
    format: &'static str,
    uuid: Uuid,
    total_bytes: u64,
    /// What the image takes on the host, where it has holes.
    image_bytes: u64,
    #[serde(flatten)]
    outcome: BuildOutcome,
}

pub(super) fn run(
    arguments: &BuildArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let begin = Instant::now();
    let mut inputs = arguments.sources.inputs()?;
    require_measurable(arguments, &inputs)?;
    let mut subvolumes: Vec<_> =
        arguments.subvolumes.iter().map(|text| NewSubvolume::parse(text)).collect::<Result<_>>()?;
    let snapshots: Vec<_> =
        arguments.snapshots.iter().map(|text| NewSnapshot::parse(text)).collect::<Result<_>>()?;
    let keeps_layers = arguments.layers == LayerForm::Snapshots;
    let minimal = match arguments.size {
        Some(VolumeSize::Minimal(slack)) => Some(slack),
        _ => None,
    };
    let given = [
        (!subvolumes.is_empty(), "--subvolume"),
        (!snapshots.is_empty(), "--snapshot"),
        (keeps_layers, "--layers snapshots"),
        (!arguments.properties.is_empty(), "--property"),
        (minimal.is_some(), "--size minimal"),
    ];
    let given = given.iter().find_map(|&(is_given, option)| is_given.then_some(option));
    if arguments.volume.format == NewVolumeFormat::Xfs
        && let Some(option) = given.or(arguments.storing.given())
    {
        return Err(VerbFailure::Usage(format!("XFS volumes have no {option}")));
    }
    if keeps_layers {
        arguments.require_no_shapes()?;
        place_trees(&mut inputs, &mut subvolumes)?;
    }
    let mut options = arguments.build_options(fill_options()?)?;
    let owner = arguments.volume.root_owner.unwrap_or_else(|| options.missing_owner());
    let made = NewVolumeOptions::of(&arguments.volume, owner, false)?;
    let image = ImagePath::of(&arguments.image, arguments.force)?;
    interrupt::watch(console)?;
    let process = Process::prepare()?;
    options.images.extend(host_id_of_file(&image.path));
    let root_owner = arguments.volume.root_owner;
    let fill = VolumeFill { inputs, subvolumes, snapshots, root_owner, minimal, process, console };
    let run = BuildRun { arguments, made, image, fill };
    let (mut size_bytes, expected) = if let Some(VolumeSize::Bytes(bytes)) = arguments.size {
        (bytes, run.fill.expected(&options).map_err(|failure| run.ended(failure))?)
    } else {
        let size = run.fill.measure(&options).map_err(|failure| run.ended(failure))?;
        (size_for(&size, &arguments.volume), Some(size.data_bytes))
    };
    let mut grown = 0;
    let built = loop {
        match run.build(size_bytes, &mut options, expected) {
            Err(failure) if grown < GROWN_MAX && is_measured(arguments) && is_full(&failure) => {
                (size_bytes, grown) = (size_bytes.saturating_mul(2), grown + 1);
            }
            built => break built?,
        }
    };
    let worst = built.outcome.written.worst;
    if arguments.json {
        write_line(out, &built)?;
    } else {
        let seconds = begin.elapsed().as_secs_f64();
        writeln!(out, "{}, in {seconds:.1} s", built.summary(arguments))?;
    }
    reported(worst)
}

impl BuildArguments {
    /// Refuses options that go by the paths of files, which a layer has as part of a snapshot.
    fn require_no_shapes(&self) -> Result {
        let given =
            [(self.selinux.is_some(), "--selinux"), (!self.properties.is_empty(), "--property")];
        match given.iter().find(|(is_given, _)| *is_given) {
            None => Ok(()),
            Some((_, option)) => {
                let what = format!("layers as snapshots have no {option} yet: leave out --layers");
                Err(VerbFailure::Usage(what))
            }
        }
    }

    /// What becomes of the files of the sources.
    fn build_options(&self, mut options: BuildOptions) -> Result<BuildOptions> {
        options.owner = self.owner;
        options.keeps_layers = self.layers == LayerForm::Snapshots;
        options.dedupes = self.dedupe;
        for pattern in &self.exclude {
            options.exclude(pattern.as_bytes());
        }
        for (name, ranges, map) in [
            ("--map-uid", &self.map_uid, &mut options.users),
            ("--map-gid", &self.map_gid, &mut options.groups),
        ] {
            for &(from, to, count) in ranges {
                let added = map.add(from, to, count);
                added.map_err(|what| VerbFailure::Usage(format!("{name}: {what}")))?;
            }
        }
        for text in &self.properties {
            let (path, property) = btrfs::build::parse_property(text)?;
            options.add_property(path, property)?;
        }
        options.labels = self.selinux.as_deref().map(FileContexts::read).transpose()?;
        Ok(options)
    }
}

/// Refuses sources that cannot be measured, unless the size is given.
fn require_measurable(arguments: &BuildArguments, inputs: &[BuildInput]) -> Result {
    let is_stdin = |input: &&BuildInput| matches!(input.source, BuildSource::Stream);
    if inputs.iter().filter(is_stdin).count() > 1 {
        return Err(VerbFailure::Usage("standard input (-) is one source, and not two".into()));
    }
    if is_measured(arguments) && inputs.iter().any(|input| input.source.is_stream()) {
        let message = "how much comes from a pipe is not known before its end: say how large the \
                       volume is to be with --size";
        return Err(VerbFailure::Usage(message.into()));
    }
    Ok(())
}

/// Whether the sources say how large the volume is made.
fn is_measured(arguments: &BuildArguments) -> bool {
    !matches!(arguments.size, Some(VolumeSize::Bytes(_)))
}

fn size_for(size: &SourceSize, arguments: &NewVolumeArguments) -> u64 {
    match arguments.format {
        NewVolumeFormat::Btrfs => btrfs::build::size_for(size, arguments),
        NewVolumeFormat::Xfs => xfs::build::size_for(size, arguments),
    }
}

/// Where the image will be.
struct ImagePath {
    /// Links are followed.
    path: PathBuf,
    /// Its directory.
    directory: PathBuf,
    /// An image that is there is replaced.
    is_replaced: bool,
    /// The permissions of the image: those of the one that is replaced, or those of a new file.
    permissions: u32,
}

impl ImagePath {
    fn of(path: &Path, is_forced: bool) -> Result<Self> {
        let failed = |error| VerbFailure::Host(path.display().to_string(), error);
        let mut permissions = 0o666 & !umask();
        let path = match fs::canonicalize(path) {
            Ok(existing) => {
                if !existing.is_file() {
                    let message = "it is no regular file, and an image is built as one: make a \
                                   volume there with `offshoot mkfs` and fill it with `offshoot cp`";
                    return Err(VerbFailure::Refused(format!("{}: {message}", path.display())));
                }
                if !is_forced {
                    let message = "it exists already; --force replaces it";
                    return Err(VerbFailure::Refused(format!("{}: {message}", path.display())));
                }
                permissions = existing.metadata().map_err(failed)?.mode() & 0o777;
                existing
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_path_buf(),
            Err(error) => return Err(failed(error)),
        };
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new(".")).to_path_buf();
        Ok(Self { path, directory, is_replaced: is_forced, permissions })
    }

    fn failed(&self, error: io::Error) -> VerbFailure {
        VerbFailure::Host(self.path.display().to_string(), error)
    }

    /// A new file beside the image, which goes when it is dropped. Only its owner may read it
    /// before it is the image.
    fn temporary(&self) -> Result<RemovedAtEnd> {
        let file = tempfile::Builder::new().prefix(".offshoot-build-").tempfile_in(&self.directory);
        let path = file.map(NamedTempFile::into_temp_path).map_err(|error| self.failed(error))?;
        Ok(interrupt::remove_at_end(path))
    }

    /// Gives `temporary` the name of the image, and makes that durable.
    fn take(&self, temporary: RemovedAtEnd) -> Result {
        let taken = temporary.take(|temporary| {
            let file = File::open(&temporary)?;
            file.set_permissions(Permissions::from_mode(self.permissions))?;
            // Its data is durable already; its permissions are not.
            file.sync_all()?;
            let taken = if self.is_replaced {
                temporary.persist(&self.path)
            } else {
                temporary.persist_noclobber(&self.path)
            };
            taken.map_err(|failure| failure.error)?;
            match File::open(&self.directory)?.sync_all() {
                // Some filesystems cannot sync a directory. They make names durable themselves.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
                synced => synced,
            }
        });
        taken.map_err(|error| self.failed(error))
    }
}

/// One run of the verb.
struct BuildRun<'a> {
    arguments: &'a BuildArguments,
    made: NewVolumeOptions,
    image: ImagePath,
    fill: VolumeFill<'a>,
}

impl BuildRun<'_> {
    /// Makes the volume and fills it.
    fn build(
        &self,
        size_bytes: u64,
        options: &mut BuildOptions,
        expected: Option<u64>,
    ) -> Result<BuiltImage> {
        let temporary = self.image.temporary()?;
        options.images.extend(host_id_of_file(temporary.path()));
        let device = FileDevice::create(temporary.path(), size_bytes);
        let device: Arc<dyn BlockDevice> =
            Arc::new(device.map_err(|error| self.image.failed(error))?);
        let uuid = self.made.make(std::slice::from_ref(&device)).map_err(usage)?;
        let fresh = match self.arguments.volume.format {
            NewVolumeFormat::Btrfs => {
                let storing = self.arguments.storing.chosen();
                btrfs::build::open_new(device.clone(), storing, self.fill.console)
            }
            NewVolumeFormat::Xfs => xfs::build::open_new(device.clone(), self.fill.console),
        }?;
        let outcome = self.fill.fill(fresh, options, expected);
        let outcome = outcome.map_err(|failure| self.ended(failure))?;
        let total_bytes = device.size_bytes();
        drop(device);
        let metadata = fs::metadata(temporary.path()).map_err(|error| self.image.failed(error))?;
        if interrupt::is_interrupted() {
            return Err(self.ended(TransferFailure::Interrupted));
        }
        self.image.take(temporary)?;
        Ok(BuiltImage {
            image: json_name(self.arguments.image.as_os_str().as_bytes()),
            format: match self.arguments.volume.format {
                NewVolumeFormat::Btrfs => "btrfs",
                NewVolumeFormat::Xfs => "xfs",
            },
            uuid,
            total_bytes,
            image_bytes: metadata.blocks().saturating_mul(512),
            outcome,
        })
    }

    /// Why a build ended, for the user.
    fn ended(&self, failure: TransferFailure) -> VerbFailure {
        if let TransferFailure::Interrupted = failure {
            let image = Escaped(self.arguments.image.as_os_str().as_bytes());
            self.fill.console.error(&format_args!("interrupted: {image} was not made"));
            return VerbFailure::Reported(ExitStatus::Failed);
        }
        failure.into()
    }
}

impl BuiltImage {
    fn summary(&self, arguments: &BuildArguments) -> String {
        let Self { uuid, outcome, .. } = self;
        let BuildOutcome { written, layers, shared_bytes, .. } = outcome;
        let files = |count: u64, one: &str, many: &str| match count {
            1 => format!("1 {one}"),
            count => format!("{count} {many}"),
        };
        let layers = match layers.len() as u64 {
            0 => String::new(),
            count => format!(" and {}", files(count, "layer", "layers")),
        };
        let shared =
            shared_bytes.map(|bytes| format!(" of which {} are shared", human_size(bytes)));
        let shared = shared.unwrap_or_default();
        format!(
            "built {} volume {uuid}, {}, with {} in {}{layers}, {} of data{shared}; the image takes {}",
            arguments.volume.format,
            human_size(self.total_bytes),
            files(written.files, "file", "files"),
            files(written.directories, "directory", "directories"),
            human_size(written.bytes),
            human_size(self.image_bytes),
        )
    }
}
