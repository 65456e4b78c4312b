//! Filling a new volume from directories, archives and container images.
//!
//! ```text
//! directory ─┐                           ┌─> measure: how much it is
//! tar ───────┼─> entries, one at a time ─┤
//! layers ────┘                           └─> builder: calls of the `vfs` traits
//! ```
//!
//! | part | what it does |
//! |---|---|
//! | [`entry`] | one file of a source, in the form that all sources have in common |
//! | [`directory`] | a directory of the host |
//! | [`mod@tar`], [`acl`] | a tar archive, the way back from [`extract_tar`](crate::extract::extract_tar) |
//! | [`manifest`] | a manifest that lists files, and a directory with their contents |
//! | [`unpack`] | what compressed it |
//! | [`layers`] | the layers of a container image, with whiteouts, one over the other or as snapshots |
//! | [`builder`] | writes entries into a volume |
//! | [`dedupe`] | stores equal data of them once |
//! | [`owners`] | owners that become others |
//! | [`selinux`] | labels from a file of contexts |
//! | [`settings`] | flags and properties, which decide how data is stored |
//! | [`measure`] | counts what they would take |
//!
//! A source says everything of its files: owners, permissions, devices, extended attributes and
//! times need no rights on the host. The first thing that cannot be read or written ends the build,
//! because an image that lacks a file is worth nothing. What the volume has no place for, such as
//! an extended attribute of a kind of its own, is counted and said in the end.
//!
//! The same sources make the same calls in the same order, on one thread.

mod acl;
mod builder;
mod dedupe;
mod directory;
mod entry;
mod layers;
mod manifest;
mod measure;
mod owners;
mod selinux;
mod settings;
mod tar;
#[cfg(test)]
mod tests;
mod unpack;
mod verity;

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::wildcard::Pattern;
use offshoot_vfs::{FileSystemMut, Timestamp};
use serde::Serialize;

use crate::copy::Manner;
use crate::extract::{ExtractOutcome, Problems, TransferCounters, finish};
use crate::host::{HostId, Process};
use crate::{Result, TransferFailure, Watcher};
use builder::{BuildContext, Builder};
use dedupe::StoredUnits;
pub use entry::SourceProblem;
use entry::{BuildEntry, Contents, EntrySink, normal_path};
pub use layers::{BuiltLayer, ContainerImage, Snapshots};
use layers::{KnownChains, LayerSnapshots};
pub use manifest::{FileManifest, ManifestForm};
use measure::Measure;
pub use measure::SourceSize;
pub use owners::OwnerMap;
pub use selinux::FileContexts;
use selinux::labels;
pub use settings::FileProperty;
use settings::{FileSettings, PropertiesByPath, property_path};
use tar::{ArchiveEnd, read_tar};
use unpack::{Pipe, unpack, unpack_file};

/// What a volume is filled from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BuildSource {
    /// A directory of the host.
    Directory(PathBuf),
    /// A tar archive, compressed or not.
    Archive(PathBuf),
    /// A tar archive on standard input.
    Stream,
    /// The layers of a container image.
    Container(ContainerImage),
    /// A manifest, and a directory with the contents of its files.
    Manifest(FileManifest),
}

impl BuildSource {
    /// The source that `text` names: `-`, `oci:`, `oci-archive:` or `docker-archive:` and a path,
    /// `mtree:` or `composefs:` and a manifest, a directory, or else an archive.
    #[must_use]
    pub fn named(text: &OsStr) -> Self {
        if text == "-" {
            return Self::Stream;
        }
        if let Some(image) = ContainerImage::named(text) {
            return Self::Container(image);
        }
        if let Some(manifest) = FileManifest::named(text) {
            return Self::Manifest(manifest);
        }
        let path = PathBuf::from(text);
        if path.is_dir() { Self::Directory(path) } else { Self::Archive(path) }
    }

    /// Whether it can be read only once: standard input, and pipes with a name.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        match self {
            Self::Stream => true,
            Self::Archive(path) | Self::Manifest(FileManifest { path, .. }) => {
                path.metadata().is_ok_and(|metadata| is_pipe(&metadata))
            }
            Self::Directory(_) | Self::Container(_) => false,
        }
    }

    /// Whether it is a directory, which can be measured without reading its files.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        matches!(self, Self::Directory(_))
    }

    /// Whether it has layers.
    #[must_use]
    pub fn has_layers(&self) -> bool {
        matches!(self, Self::Container(_))
    }

    /// Its name for messages.
    #[must_use]
    pub fn shown(&self) -> Vec<u8> {
        match self {
            Self::Directory(path) | Self::Archive(path) => path.as_os_str().as_bytes().to_vec(),
            Self::Stream => b"standard input".to_vec(),
            Self::Container(image) => image.path().as_os_str().as_bytes().to_vec(),
            Self::Manifest(manifest) => manifest.path().as_os_str().as_bytes().to_vec(),
        }
    }

    /// Gives `sink` all files of the source.
    fn read(
        &self,
        options: &BuildOptions,
        process: Process,
        watcher: &dyn Watcher,
        sink: &mut dyn LayeredSink,
    ) -> Result {
        let shown = self.shown();
        match self {
            Self::Directory(path) => {
                directory::read_directory(path, options, process, watcher, sink)
            }
            Self::Archive(_) | Self::Stream => {
                let input = self.open(watcher).map_err(|problem| problem.at(&shown));
                let mut sink = Including { options, sink };
                let end = read_tar(&mut *input?, &shown, watcher, &mut sink)?;
                self.look_at_end(end, watcher).map_err(|problem| problem.at(&shown))
            }
            Self::Container(image) => image.open(watcher)?.read(options, watcher, sink),
            Self::Manifest(manifest) => manifest.read(options, watcher, sink),
        }
    }

    /// Opens an archive, or standard input.
    fn open<'a>(
        &self,
        watcher: &'a dyn Watcher,
    ) -> Result<Box<dyn unpack::ArchiveInput + 'a>, SourceProblem> {
        let Self::Archive(path) = self else {
            let stdin = File::from(io::stdin().as_fd().try_clone_to_owned()?);
            return unpack(Pipe::new(stdin, watcher), watcher);
        };
        let file = File::open(path)?;
        if file.metadata()?.is_file() {
            unpack_file(file, watcher)
        } else {
            unpack(Pipe::new(file, watcher), watcher)
        }
    }

    /// Refuses a stream that has no mark at its end, because the program that writes it may have
    /// failed. In a file that is only strange, and some programs write none.
    fn look_at_end(&self, end: ArchiveEnd, watcher: &dyn Watcher) -> Result<(), SourceProblem> {
        if end == ArchiveEnd::Marked {
            return Ok(());
        }
        if self.is_stream() {
            let what = "the archive has no mark at its end: it was cut off".to_owned();
            return Err(SourceProblem::Damaged(what));
        }
        let shown = self.shown();
        let path = Escaped(&shown);
        watcher.warning(&format_args!("{path}: the archive has no mark at its end: is it whole?"));
        Ok(())
    }
}

/// Whether a file can be read only once.
fn is_pipe(metadata: &Metadata) -> bool {
    let file_type = metadata.file_type();
    !file_type.is_file() && !file_type.is_block_device()
}

/// What a volume is filled from, and where in it.
pub struct BuildInput {
    /// The source.
    pub source: BuildSource,
    /// The path in the volume that its top becomes.
    pub to: Vec<u8>,
}

/// How a volume is filled.
pub struct BuildOptions {
    /// When everything is made.
    pub at: Timestamp,
    /// The latest time that a file gets; later ones become this one.
    pub latest: Option<Timestamp>,
    /// The owner of all files, user and group, instead of those that the sources say.
    pub owner: Option<(u32, u32)>,
    /// What users that the sources say become. [`Self::owner`] counts before that.
    pub users: OwnerMap,
    /// The same for groups.
    pub groups: OwnerMap,
    /// What labels the files get, instead of those that the sources say.
    pub labels: Option<FileContexts>,
    /// Whether sectors of a directory's files that are all zeros become holes, and no others do. So
    /// the holes that the host happens to have make no difference.
    pub finds_zeros: bool,
    /// The longest name and value, together, of an extended attribute, if the volume has a bound of
    /// its own. Longer ones are left out and counted.
    pub xattr_bytes_max: Option<usize>,
    /// Whether each layer of a container image becomes a snapshot of the one below it. The volume
    /// must have snapshots, and all sources layers.
    pub keeps_layers: bool,
    /// Whether equal data is stored once. The volume must be able to share it.
    pub dedupes: bool,
    /// Files of the host that are left out: the image itself.
    pub images: Vec<HostId>,
    excluded: Manner,
    properties: PropertiesByPath,
}

impl BuildOptions {
    /// Everything is built as the sources have it, at the time `at`.
    #[must_use]
    pub fn new(at: Timestamp) -> Self {
        Self {
            at,
            latest: None,
            owner: None,
            users: OwnerMap::default(),
            groups: OwnerMap::default(),
            labels: None,
            finds_zeros: false,
            xattr_bytes_max: None,
            keeps_layers: false,
            dedupes: false,
            images: Vec::new(),
            excluded: Manner::plain(),
            properties: PropertiesByPath::new(),
        }
    }

    /// Leaves files out whose names match the pattern, or if it has a `/`, whose paths in the
    /// source do.
    pub fn exclude(&mut self, pattern: &[u8]) {
        let pattern = pattern.strip_suffix(b"/").unwrap_or(pattern);
        if pattern.contains(&b'/') {
            let path = pattern.strip_prefix(b"/").unwrap_or(pattern);
            self.excluded.paths.push(Pattern::new(path));
        } else {
            self.excluded.names.push(Pattern::new(pattern));
        }
    }

    /// The owner of directories that no source says anything of.
    #[must_use]
    pub fn missing_owner(&self) -> (u32, u32) {
        self.owner.unwrap_or_else(|| (self.users.mapped(0), self.groups.mapped(0)))
    }

    /// Gives the file at `path` in the volume a property before it has contents.
    ///
    /// # Errors
    /// When the path leads upwards, or has a property already: each says how data is stored.
    pub fn add_property(&mut self, path: &[u8], property: FileProperty) -> Result {
        if self.properties.insert(property_path(path)?, property).is_some() {
            let what = "it is given two properties, and takes one".to_owned();
            return Err(SourceProblem::Refused(what).at(path));
        }
        Ok(())
    }

    /// Whether the file at `path` is left out, where the directories on the way are not.
    fn leaves_out(&self, path: &[u8]) -> bool {
        let (_, name) = entry::split_path(path);
        !path.is_empty() && self.excluded.leaves_out(name, || path.to_vec())
    }

    /// Whether the file at `path` is left out, or a directory on the way.
    fn leaves_out_way(&self, path: &[u8]) -> bool {
        if self.excluded.names.is_empty() && self.excluded.paths.is_empty() {
            return false;
        }
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        let mut ways = ends.chain([path.len()]).filter_map(|end| path.get(..end));
        ways.any(|way| self.leaves_out(way))
    }
}

/// What takes the files of sources with layers: each layer may remove files of those below it.
trait LayeredSink: EntrySink {
    /// Removes the file at `path`.
    fn remove(&mut self, path: &[u8]) -> Result;

    /// Removes everything in the directory at `path`.
    fn clear(&mut self, path: &[u8]) -> Result;

    /// Removes the file at `path`, unless it is a directory.
    fn remove_unless_directory(&mut self, path: &[u8]) -> Result;

    /// The layer ends.
    fn end_layer(&mut self) -> Result;
}

impl LayeredSink for Measure<'_> {
    /// What is removed is counted still: sizes are upper bounds.
    fn remove(&mut self, _: &[u8]) -> Result {
        Ok(())
    }

    fn clear(&mut self, _: &[u8]) -> Result {
        Ok(())
    }

    fn remove_unless_directory(&mut self, _: &[u8]) -> Result {
        Ok(())
    }

    fn end_layer(&mut self) -> Result {
        Ok(())
    }
}

/// Leaves out what the options exclude.
struct Including<'a> {
    options: &'a BuildOptions,
    sink: &'a mut dyn EntrySink,
}

impl EntrySink for Including<'_> {
    fn put(&mut self, entry: BuildEntry, contents: &mut dyn Contents) -> Result {
        if self.options.leaves_out_way(&entry.path) {
            return Ok(());
        }
        self.sink.put(entry, contents)
    }
}

/// Counts what sources hold. Standard input cannot be counted, because it comes once.
pub fn measure_sources(
    inputs: &[BuildInput],
    options: &BuildOptions,
    process: Process,
    watcher: &dyn Watcher,
) -> Result<SourceSize> {
    let mut measure = Measure::new(watcher);
    let mut known = KnownChains::default();
    for input in inputs {
        measure.begin_source();
        let quiet = MeasuringWatcher(watcher);
        let read = match &input.source {
            BuildSource::Container(image) if options.keeps_layers => {
                known.measure(image, options, &quiet, &mut measure)
            }
            source => source.read(options, process, &quiet, &mut measure),
        };
        read.map_err(|failure| interrupted_or(failure, watcher))?;
    }
    let mut size = measure.size;
    if options.labels.is_some() {
        let labels = size.entries.saturating_mul(labels::LABEL_BYTES);
        size.text_bytes = size.text_bytes.saturating_add(labels);
    }
    Ok(size)
}

/// The failure of a source, or that the user interrupted the build: then reading fails with an
/// error that means only that.
fn interrupted_or(failure: TransferFailure, watcher: &dyn Watcher) -> TransferFailure {
    if watcher.is_interrupted() { TransferFailure::Interrupted } else { failure }
}

/// A volume that is filled.
pub struct BuildTarget<'a> {
    /// Its files.
    pub fs: &'a dyn FileSystemMut,
    /// Its snapshots, if it has some.
    pub snapshots: Option<&'a dyn Snapshots>,
}

/// What was built.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct BuildOutcome {
    /// What was written.
    #[serde(flatten)]
    pub written: ExtractOutcome,
    /// The layers that became snapshots, in the order in which they were built.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<BuiltLayer>,
    /// How many bytes of the data were equal to others and are shared with them; `None` when they
    /// were not looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_bytes: Option<u64>,
}

/// Fills a volume from its root on, one source after the other. `expected` is how many bytes of
/// data that will be, if it is known. The caller makes it durable.
pub fn build(
    target: &BuildTarget<'_>,
    inputs: &[BuildInput],
    options: &BuildOptions,
    process: Process,
    watcher: &dyn Watcher,
    expected: Option<u64>,
) -> Result<BuildOutcome> {
    let problems = Problems::new(watcher);
    let settings = FileSettings::begin(target.fs, &options.properties, options.at)?;
    let progress = watcher.start_progress("built");
    if let Some(bytes) = expected {
        progress.expect(bytes);
    }
    let counters = TransferCounters::default();
    let mut layers = target.snapshots.filter(|_| options.keeps_layers).map(LayerSnapshots::new);
    let units = options.dedupes.then(|| StoredUnits::new(target.fs)).transpose()?;
    let units = units.map(RefCell::new);
    let context = BuildContext {
        units: units.as_ref(),
        fs: target.fs,
        options,
        problems: &problems,
        progress: &*progress,
        counters: &counters,
        settings: &settings,
    };
    let built = inputs.iter().try_for_each(|input| match (&input.source, &mut layers) {
        (BuildSource::Container(image), Some(layers)) => {
            layers.build(image, &input.to, context, watcher)
        }
        (source, _) if options.keeps_layers => {
            let what = "it has no layers that could become snapshots, or the volume no snapshots";
            Err(SourceProblem::Refused(what.to_owned()).at(&source.shown()))
        }
        (source, _) => build_source(source, &input.to, context, process, watcher),
    });
    watcher.stop_progress();
    built.map_err(|failure| interrupted_or(failure, watcher))?;
    if let Some(contexts) = &options.labels {
        labels::set_labels(target.fs, contexts, &problems, options.at)?;
    }
    settings.finish()?;
    drop(progress);
    let layers = layers.map(LayerSnapshots::into_built).unwrap_or_default();
    let shared_bytes = units.map(|units| units.into_inner().shared_bytes());
    Ok(BuildOutcome { written: finish(counters, problems), layers, shared_bytes })
}

/// Builds a source to the directory `to`.
fn build_source(
    source: &BuildSource,
    to: &[u8],
    context: BuildContext<'_>,
    process: Process,
    watcher: &dyn Watcher,
) -> Result {
    let to = normal_path(to).map_err(|problem| problem.at(to))?;
    let mut way = Builder::new(context, context.fs.root(), Vec::new())?;
    let (base, base_path) = way.make_way(&to)?;
    let mut builder = Builder::new(context, base, base_path)?;
    source.read(context.options, process, watcher, &mut builder)?;
    builder.finish()?;
    way.finish()
}

/// A watcher that shows no warnings: those of a source that is read twice.
struct MeasuringWatcher<'a>(&'a dyn Watcher);

impl Watcher for MeasuringWatcher<'_> {
    fn words(&self, hint: crate::Hint) -> &'static str {
        self.0.words(hint)
    }

    fn error(&self, text: &dyn std::fmt::Display) {
        self.0.error(text);
    }

    fn detail(&self, text: &dyn std::fmt::Display) {
        self.0.detail(text);
    }

    fn warning(&self, _: &dyn std::fmt::Display) {}

    fn note(&self, text: &dyn std::fmt::Display) {
        self.0.note(text);
    }

    fn is_interrupted(&self) -> bool {
        self.0.is_interrupted()
    }

    fn start_progress(&self, verb: &'static str) -> Box<dyn crate::TransferProgress> {
        self.0.start_progress(verb)
    }

    fn stop_progress(&self) {
        self.0.stop_progress();
    }
}
