//! The layers of a container image as a source.
//!
//! ```text
//! oci:DIR[:REF]         index.json ─> manifest ─> layers      blobs/sha256/HEX each
//! oci-archive:FILE      the same in a tar archive
//! docker-archive:FILE   manifest.json ─> layers               as `docker save` writes it
//! ```
//!
//! A layer is a tar archive. Besides the files that it adds it names those that it removes from the
//! layers below it: an empty file `.wh.NAME` removes NAME from its directory, and `.wh..wh..opq`
//! everything in it. These may stand before and after what the layer adds, so each layer is read
//! twice: first what it removes, then what it adds. A directory that a layer adds removes in the
//! first reading what is no directory in its place. So a layer that makes a directory of `lib`,
//! which was a link to `usr/lib`, and that calls it opaque, leaves `usr/lib` as it is.
//!
//! Every blob whose name is its digest is compared with that, and every unpacked layer with the
//! digest in the configuration of the image. A layer that has neither must end with the mark of an
//! archive.

mod blobs;
mod digest;
mod manifest;
mod snapshots;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, SourceProblem, normal_path, split_path,
};
use super::tar::{ArchiveEnd, read_tar};
use super::unpack::unpack;
use super::{BuildOptions, Including, LayeredSink};
use crate::{Result, Watcher};
use blobs::{Blobs, wrong_digest};
use digest::{Hashed, HashedInput, Sha256Digest};
use manifest::{docker_layers, oci_layers};
pub use snapshots::{BuiltLayer, Snapshots};
pub(super) use snapshots::{KnownChains, LayerSnapshots};

/// The most layers of an image. Those that run as containers have up to 127.
const LAYERS_MAX: usize = 500;

/// What is wrong with a layer that may be cut off, and that no digest covers.
const NO_END: &str = "the archive has no mark at its end";

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Where the layers of a container image are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerImage {
    /// A directory in the layout of OCI, and which of its images.
    Oci(PathBuf, Option<String>),
    /// The same layout in a tar archive.
    OciArchive(PathBuf),
    /// An archive of `docker save`.
    DockerArchive(PathBuf),
}

impl ContainerImage {
    /// The image that `text` names: one of the three prefixes and a path.
    pub(super) fn named(text: &OsStr) -> Option<Self> {
        let text = text.as_bytes();
        let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
        if let Some(file) = text.strip_prefix(b"oci-archive:") {
            return Some(Self::OciArchive(path(file)));
        }
        if let Some(file) = text.strip_prefix(b"docker-archive:") {
            return Some(Self::DockerArchive(path(file)));
        }
        let rest = text.strip_prefix(b"oci:")?;
        // A name may hold a colon, and so may the path of a directory that is there.
        if path(rest).is_dir() {
            return Some(Self::Oci(path(rest), None));
        }
        let is_colon = |at: &usize| rest.get(*at) == Some(&b':');
        for at in (0..rest.len()).filter(is_colon) {
            let (dir, name) = rest.split_at(at);
            if path(dir).is_dir() {
                let name = String::from_utf8_lossy(name.get(1..).unwrap_or_default());
                return Some(Self::Oci(path(dir), Some(name.into_owned())));
            }
        }
        Some(Self::Oci(path(rest), None))
    }

    /// The directory or file.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Oci(path, _) | Self::OciArchive(path) | Self::DockerArchive(path) => path,
        }
    }

    /// Finds the layers.
    pub(super) fn open(&self, watcher: &dyn Watcher) -> Result<OpenedImage> {
        let shown = self.path().as_os_str().as_bytes();
        let (blobs, layers) = self.layers(watcher).map_err(|problem| problem.at(shown))?;
        Ok(OpenedImage { shown: shown.to_vec(), blobs, layers })
    }

    fn layers(&self, watcher: &dyn Watcher) -> Result<(Blobs, Vec<Layer>), SourceProblem> {
        let (blobs, layers) = match self {
            Self::Oci(dir, name) => {
                let blobs = Blobs::Directory(dir.clone());
                let layers = oci_layers(&blobs, name.as_deref())?;
                (blobs, layers)
            }
            Self::OciArchive(file) => {
                let blobs = Blobs::in_archive(file, watcher)?;
                let layers = oci_layers(&blobs, None)?;
                (blobs, layers)
            }
            Self::DockerArchive(file) => {
                let blobs = Blobs::in_archive(file, watcher)?;
                let layers = docker_layers(&blobs)?;
                (blobs, layers)
            }
        };
        if layers.len() > LAYERS_MAX {
            let what = format!("it has {} layers, more than {LAYERS_MAX}", layers.len());
            return Err(SourceProblem::Refused(what));
        }
        Ok((blobs, layers))
    }
}

/// An image whose layers are known.
pub(super) struct OpenedImage {
    /// Its name for messages.
    shown: Vec<u8>,
    blobs: Blobs,
    /// The lowest first.
    layers: Vec<Layer>,
}

impl OpenedImage {
    /// Gives `sink` all layers, the lowest first.
    pub(super) fn read(
        &self,
        options: &BuildOptions,
        watcher: &dyn Watcher,
        sink: &mut dyn LayeredSink,
    ) -> Result {
        self.layers.iter().try_for_each(|layer| self.read_layer(layer, options, watcher, sink))
    }

    /// Gives `sink` one layer: what it removes, and then what it adds.
    fn read_layer(
        &self,
        layer: &Layer,
        options: &BuildOptions,
        watcher: &dyn Watcher,
        sink: &mut dyn LayeredSink,
    ) -> Result {
        let place = self.place_of(layer);
        let removed = LayerReading { blobs: &self.blobs, place: &place, watcher, verifies: true };
        layer.read(&removed, &mut Whiteouts { options, sink: &mut *sink })?;
        let added = LayerReading { verifies: false, ..removed };
        let mut files = Files { sink: &mut *sink };
        layer.read(&added, &mut Including { options, sink: &mut files })?;
        sink.end_layer()
    }

    /// The name of a layer for messages.
    fn place_of(&self, layer: &Layer) -> Vec<u8> {
        [&self.shown, &b": "[..], layer.path.as_bytes()].concat()
    }
}

/// One layer.
struct Layer {
    /// The name of its blob.
    path: String,
    digest: Option<Sha256Digest>,
    /// The digest of what it is unpacked.
    unpacked: Option<Sha256Digest>,
}

impl Layer {
    /// Gives `sink` what is in the archive.
    fn read(&self, reading: &LayerReading<'_>, sink: &mut dyn EntrySink) -> Result {
        let LayerReading { blobs, place, watcher, verifies } = *reading;
        let fail = |problem: SourceProblem| problem.at(place);
        let mut packed = Hashed::new(blobs.open(&self.path).map_err(fail)?, verifies);
        let found = {
            let unpacked = unpack(&mut packed, watcher).map_err(fail)?;
            let mut unpacked = HashedInput(Hashed::new(unpacked, verifies));
            let end = read_tar(&mut unpacked, place, watcher, sink)?;
            if end == ArchiveEnd::Missing && self.digest.is_none() && self.unpacked.is_none() {
                return Err(fail(SourceProblem::Damaged(NO_END.to_owned())));
            }
            unpacked.0.digest().map_err(|error| fail(error.into()))?
        };
        if verifies && self.unpacked.as_ref().is_some_and(|digest| *digest != found) {
            return Err(fail(wrong_digest(&self.path)));
        }
        let found = packed.digest().map_err(|error| fail(error.into()))?;
        if verifies && self.digest.as_ref().is_some_and(|digest| *digest != found) {
            return Err(fail(wrong_digest(&self.path)));
        }
        Ok(())
    }

    /// The digest of what it is unpacked: that in the configuration, which is compared when the
    /// layer is read, or else what is found now.
    fn diff_id(&self, reading: &LayerReading<'_>) -> Result<Sha256Digest> {
        if let Some(digest) = &self.unpacked {
            return Ok(digest.clone());
        }
        let LayerReading { blobs, place, watcher, .. } = *reading;
        let fail = |problem: SourceProblem| problem.at(place);
        let packed = blobs.open(&self.path).map_err(fail)?;
        let unpacked = unpack(packed, watcher).map_err(fail)?;
        Hashed::new(unpacked, true).digest().map_err(|error| fail(error.into()))
    }
}

/// How a layer is read.
struct LayerReading<'a> {
    blobs: &'a Blobs,
    /// Its name for messages.
    place: &'a [u8],
    watcher: &'a dyn Watcher,
    /// Whether its digests are compared.
    verifies: bool,
}

/// Does what a layer says about those below it.
struct Whiteouts<'a> {
    options: &'a BuildOptions,
    sink: &'a mut dyn LayeredSink,
}

impl EntrySink for Whiteouts<'_> {
    fn put(&mut self, entry: BuildEntry, _: &mut dyn Contents) -> Result {
        if let EntryKind::Directory = entry.kind {
            if self.options.leaves_out_way(&entry.path) || is_of_whiteout(&entry.path) {
                return Ok(());
            }
            return self.sink.remove_unless_directory(&entry.path);
        }
        let (dir, name) = split_path(&entry.path);
        if name == OPAQUE {
            return self.sink.clear(dir);
        }
        let Some(removed) = name.strip_prefix(WHITEOUT) else { return Ok(()) };
        // `.wh..wh.` is the beginning of names that only one program understands.
        if removed.is_empty() || removed.starts_with(WHITEOUT) {
            return Ok(());
        }
        if removed == b"." {
            let what = "a whiteout of the directory that it is in".to_owned();
            return Err(SourceProblem::Damaged(what).at(&entry.path));
        }
        let path = normal_path(&[dir, b"/", removed].concat());
        self.sink.remove(&path.map_err(|problem| problem.at(&entry.path))?)
    }
}

/// Whether a name of the path is that of a whiteout.
fn is_of_whiteout(path: &[u8]) -> bool {
    path.split(|&byte| byte == b'/').any(|name| name.starts_with(WHITEOUT))
}

/// Takes what a layer adds.
struct Files<'a> {
    sink: &'a mut dyn EntrySink,
}

impl EntrySink for Files<'_> {
    fn put(&mut self, entry: BuildEntry, contents: &mut dyn Contents) -> Result {
        if is_of_whiteout(&entry.path) {
            return Ok(());
        }
        self.sink.put(entry, contents)
    }
}
