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
//! | [`unpack`] | what compressed it |
//! | [`layers`] | the layers of a container image, with whiteouts |
//! | [`builder`] | writes entries into a volume |
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
mod directory;
mod entry;
mod layers;
mod measure;
mod tar;
#[cfg(test)]
mod tests;
mod unpack;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use offshoot_vfs::wildcard::Pattern;
use offshoot_vfs::{FileSystemMut, Timestamp};

use crate::copy::Manner;
use crate::extract::{ExtractOutcome, Problems, TransferCounters, finish};
use crate::host::{HostId, Process};
use crate::{Result, Watcher};
use builder::{BuildContext, Builder};
pub use entry::SourceProblem;
use entry::{Contents, Entry, EntrySink, normal_path};
pub use layers::ContainerImage;
use measure::Measure;
pub use measure::SourceSize;
use tar::{ArchiveEnd, read_tar};
use unpack::{unpack, unpack_file};

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
}

impl BuildSource {
    /// The source that `text` names: `-`, `oci:`, `oci-archive:` or `docker-archive:` and a path,
    /// a directory, or else an archive.
    #[must_use]
    pub fn named(text: &OsStr) -> Self {
        if text == "-" {
            return Self::Stream;
        }
        if let Some(image) = ContainerImage::named(text) {
            return Self::Container(image);
        }
        let path = PathBuf::from(text);
        if path.is_dir() { Self::Directory(path) } else { Self::Archive(path) }
    }

    /// Whether it can be read only once: standard input, and pipes with a name.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        match self {
            Self::Stream => true,
            Self::Archive(path) => path.metadata().is_ok_and(|metadata| {
                let file_type = metadata.file_type();
                !file_type.is_file() && !file_type.is_block_device()
            }),
            Self::Directory(_) | Self::Container(_) => false,
        }
    }

    /// Whether it is a directory, which can be measured without reading its files.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        matches!(self, Self::Directory(_))
    }

    /// Its name for messages.
    fn shown(&self) -> Vec<u8> {
        match self {
            Self::Directory(path) | Self::Archive(path) => path.as_os_str().as_bytes().to_vec(),
            Self::Stream => b"standard input".to_vec(),
            Self::Container(image) => image.path().as_os_str().as_bytes().to_vec(),
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
                directory::read_directory(path, options, process, &mut EntriesOf(sink))
            }
            Self::Archive(path) => {
                let mut input = open_archive(path).map_err(|problem| problem.at(&shown))?;
                let mut sink = Including { options, sink: &mut EntriesOf(sink) };
                let end = read_tar(&mut *input, &shown, &mut sink)?;
                warn_of_end(end, path, watcher);
                Ok(())
            }
            Self::Stream => {
                let stdin = io::stdin().lock();
                let mut input = unpack(stdin).map_err(|problem| problem.at(&shown))?;
                let mut sink = Including { options, sink: &mut EntriesOf(sink) };
                let end = read_tar(&mut *input, &shown, &mut sink)?;
                warn_of_end(end, Path::new("standard input"), watcher);
                Ok(())
            }
            Self::Container(image) => image.read(options, sink),
        }
    }
}

fn open_archive(path: &Path) -> Result<Box<dyn unpack::ArchiveInput>, SourceProblem> {
    let file = File::open(path)?;
    if file.metadata()?.is_file() { unpack_file(file) } else { unpack(file) }
}

fn warn_of_end(end: ArchiveEnd, path: &Path, watcher: &dyn Watcher) {
    if end == ArchiveEnd::Missing {
        let path = path.display();
        watcher.warning(&format_args!("{path}: the archive has no mark at its end: is it whole?"));
    }
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
    /// Whom all files belong to, instead of those that the sources say.
    pub owner: Option<(u32, u32)>,
    /// Files of the host that are left out: the image itself.
    pub images: Vec<HostId>,
    excluded: Manner,
}

impl BuildOptions {
    /// Everything is built as the sources have it, at the time `at`.
    #[must_use]
    pub fn new(at: Timestamp) -> Self {
        Self { at, latest: None, owner: None, images: Vec::new(), excluded: Manner::plain() }
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
}

impl LayeredSink for Builder<'_> {
    fn remove(&mut self, path: &[u8]) -> Result {
        Builder::remove(self, path)
    }

    fn clear(&mut self, path: &[u8]) -> Result {
        Builder::clear(self, path)
    }
}

impl LayeredSink for Measure<'_> {
    /// What is removed is counted still: sizes are upper bounds.
    fn remove(&mut self, _: &[u8]) -> Result {
        Ok(())
    }

    fn clear(&mut self, _: &[u8]) -> Result {
        Ok(())
    }
}

/// The files alone.
struct EntriesOf<'a>(&'a mut dyn LayeredSink);

impl EntrySink for EntriesOf<'_> {
    fn put(&mut self, entry: Entry, contents: &mut dyn Contents) -> Result {
        self.0.put(entry, contents)
    }
}

/// Leaves out what the options exclude.
struct Including<'a> {
    options: &'a BuildOptions,
    sink: &'a mut dyn EntrySink,
}

impl EntrySink for Including<'_> {
    fn put(&mut self, entry: Entry, contents: &mut dyn Contents) -> Result {
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
    for input in inputs {
        input.source.read(options, process, &Silent(watcher), &mut measure)?;
    }
    Ok(measure.size)
}

/// Fills the volume behind `fs` from its root on, one source after the other. `expected` is how
/// many bytes of data that will be, if it is known. The caller makes it durable.
pub fn build(
    fs: &dyn FileSystemMut,
    inputs: &[BuildInput],
    options: &BuildOptions,
    process: Process,
    watcher: &dyn Watcher,
    expected: Option<u64>,
) -> Result<ExtractOutcome> {
    let problems = Problems::new(watcher);
    let progress = watcher.start_progress("built");
    if let Some(bytes) = expected {
        progress.expect(bytes);
    }
    let counters = TransferCounters::default();
    let built = inputs.iter().try_for_each(|input| {
        let context = BuildContext {
            fs,
            options,
            problems: &problems,
            progress: &*progress,
            counters: &counters,
        };
        let to = normal_path(&input.to).map_err(|problem| problem.at(&input.to))?;
        let mut way = Builder::new(context, fs.root())?;
        let base = way.make_way(&to)?;
        let mut builder = Builder::new(context, base)?;
        input.source.read(options, process, watcher, &mut builder)?;
        builder.finish()?;
        way.finish()
    });
    watcher.stop_progress();
    built?;
    drop(progress);
    Ok(finish(counters, problems))
}

/// A watcher that shows no warnings: those of a source that is read twice.
struct Silent<'a>(&'a dyn Watcher);

impl Watcher for Silent<'_> {
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
