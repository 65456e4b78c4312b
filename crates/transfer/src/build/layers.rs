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

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use offshoot_vfs::escape::Escaped;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use super::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, SourceProblem, normal_path, split_path,
};
use super::tar::{ArchiveEnd, read_tar};
use super::unpack::{ArchiveInput, packing_of_file, require_not_interrupted, unpack};
use super::{BuildOptions, EntriesOf, Including, LayeredSink};
use crate::{Result, Watcher};

/// The largest manifest, index or configuration. Registries take manifests of up to 4 MiB.
const JSON_BYTES_MAX: u64 = 4 << 20;

/// The most layers of an image. Those that run as containers have up to 127.
const LAYERS_MAX: usize = 500;

/// How many names a message shows.
const NAMES_SHOWN: usize = 20;

/// The most files of an archive that holds an image.
const MEMBERS_MAX: usize = 1 << 20;

/// How much memory the names of these files may take.
const MEMBERS_BYTES_MAX: usize = 64 << 20;

/// What one of them takes beside its name.
const MEMBER_BYTES: usize = 128;

/// The most links that lead from one name in an archive to a file.
const LINKS_MAX: usize = 8;

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

    /// Gives `sink` the layers, the lowest first.
    pub(super) fn read(
        &self,
        options: &BuildOptions,
        watcher: &dyn Watcher,
        sink: &mut dyn LayeredSink,
    ) -> Result {
        let shown = self.path().as_os_str().as_bytes();
        let (blobs, layers) = self.layers(watcher).map_err(|problem| problem.at(shown))?;
        for layer in &layers {
            let place = [shown, b": ", layer.path.as_bytes()].concat();
            let removed = LayerReading { blobs: &blobs, place: &place, watcher, verifies: true };
            layer.read(&removed, &mut Whiteouts { options, sink: &mut *sink })?;
            let added = LayerReading { verifies: false, ..removed };
            let mut files = Files { sink: &mut EntriesOf(&mut *sink) };
            layer.read(&added, &mut Including { options, sink: &mut files })?;
            sink.end_layer()?;
        }
        Ok(())
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

/// The files of an image, by name.
enum Blobs {
    Directory(PathBuf),
    Archive { file: File, members: BTreeMap<Vec<u8>, ArchiveMember> },
}

/// A file of an archive.
enum ArchiveMember {
    /// It begins at this byte and has so many.
    File { offset: u64, len: u64 },
    /// It is another name of this one.
    Link(Vec<u8>),
}

impl Blobs {
    /// Those in the archive at `path`.
    fn in_archive(path: &Path, watcher: &dyn Watcher) -> Result<Self, SourceProblem> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            let what = "it is no regular file, and its layers are read from several places";
            return Err(SourceProblem::Refused(what.to_owned()));
        }
        if let Some(program) = packing_of_file(&file)?.program() {
            let what = format!("it is packed by {program}: unpack it first");
            return Err(SourceProblem::Refused(what));
        }
        let position = Rc::new(Cell::new(0));
        let mut input = Positioned { file: file.try_clone()?, position: position.clone(), watcher };
        let mut index = MemberIndex { position, members: BTreeMap::new(), bytes: 0 };
        let shown = path.as_os_str().as_bytes();
        match read_tar(&mut input, shown, watcher, &mut index) {
            Ok(_) => Ok(Self::Archive { file, members: index.members }),
            Err(crate::TransferFailure::Source(_, problem)) => Err(problem),
            Err(other) => Err(SourceProblem::Failed(other.to_string())),
        }
    }

    /// Opens the file `name`.
    fn open(&self, name: &str) -> Result<Box<dyn Read>, SourceProblem> {
        let missing = || SourceProblem::Damaged(format!("{} is missing", Escaped(name.as_bytes())));
        match self {
            Self::Directory(dir) => match File::open(dir.join(name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(missing()),
                opened => Ok(Box::new(opened?)),
            },
            Self::Archive { file, members } => {
                let mut path = normal_path(name.as_bytes())?;
                for _ in 0..LINKS_MAX {
                    match members.get(&path) {
                        Some(ArchiveMember::File { offset, len }) => {
                            let end = offset.saturating_add(*len);
                            let file = file.try_clone()?;
                            return Ok(Box::new(FilePart { file, at: *offset, end }));
                        }
                        Some(ArchiveMember::Link(target)) => path.clone_from(target),
                        None => return Err(missing()),
                    }
                }
                Err(missing())
            }
        }
    }

    /// The JSON in the file `name`, which has this digest.
    fn json<T: DeserializeOwned>(
        &self,
        name: &str,
        digest: Option<&Sha256Digest>,
    ) -> Result<T, SourceProblem> {
        let mut text = Vec::new();
        self.open(name)?.take(JSON_BYTES_MAX + 1).read_to_end(&mut text)?;
        if text.len() as u64 > JSON_BYTES_MAX {
            let what = format!("{} has more than 4 MiB", Escaped(name.as_bytes()));
            return Err(SourceProblem::Refused(what));
        }
        if digest.is_some_and(|digest| digest.0[..] != Sha256::digest(&text)[..]) {
            return Err(wrong_digest(name));
        }
        serde_json::from_slice(&text).map_err(|error| {
            SourceProblem::Damaged(format!("{}: {error}", Escaped(name.as_bytes())))
        })
    }
}

fn wrong_digest(name: &str) -> SourceProblem {
    let name = Escaped(name.as_bytes());
    SourceProblem::Damaged(format!("{name} has another digest than the one it is named by"))
}

/// A file that is read from a position that others know.
struct Positioned<'a> {
    file: File,
    position: Rc<Cell<u64>>,
    watcher: &'a dyn Watcher,
}

impl Read for Positioned<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        require_not_interrupted(self.watcher)?;
        let count = self.file.read_at(buf, self.position.get())?;
        self.position.set(self.position.get() + count as u64);
        Ok(count)
    }
}

impl ArchiveInput for Positioned<'_> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let next = self.position.get().checked_add(bytes);
        self.position.set(next.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Notes where the files of an archive are.
struct MemberIndex {
    position: Rc<Cell<u64>>,
    members: BTreeMap<Vec<u8>, ArchiveMember>,
    /// The memory that they take, about.
    bytes: usize,
}

impl EntrySink for MemberIndex {
    fn put(&mut self, entry: BuildEntry, _: &mut dyn Contents) -> Result {
        let member = match entry.kind {
            EntryKind::Regular { size } => {
                ArchiveMember::File { offset: self.position.get(), len: size }
            }
            EntryKind::HardLink(target) => ArchiveMember::Link(target),
            // `docker save` once wrote equal layers as links: `../HEX/layer.tar`.
            EntryKind::Symlink(target) => {
                let (dir, _) = split_path(&entry.path);
                let (up, target) = match target.strip_prefix(b"../") {
                    Some(target) => (split_path(dir).0, target.to_vec()),
                    None => (dir, target),
                };
                let Ok(target) = normal_path(&[up, b"/", &target].concat()) else { return Ok(()) };
                ArchiveMember::Link(target)
            }
            EntryKind::Directory | EntryKind::Node(_) => return Ok(()),
        };
        let target_len = if let ArchiveMember::Link(target) = &member { target.len() } else { 0 };
        self.bytes += entry.path.len() + target_len + MEMBER_BYTES;
        if self.members.len() >= MEMBERS_MAX || self.bytes > MEMBERS_BYTES_MAX {
            let what = "an archive of too many files, or of too long names, for one with an image";
            return Err(SourceProblem::Refused(what.to_owned()).at(b""));
        }
        self.members.insert(entry.path, member);
        Ok(())
    }
}

/// A part of a file.
struct FilePart {
    file: File,
    at: u64,
    end: u64,
}

impl Read for FilePart {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let len = buf.len().min(left);
        let count = self.file.read_at(buf.get_mut(..len).unwrap_or_default(), self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// A digest of SHA-256.
#[derive(Clone, PartialEq, Eq)]
struct Sha256Digest([u8; 32]);

impl Sha256Digest {
    /// The digest `sha256:HEX`.
    fn parse(text: &str) -> Result<Self, SourceProblem> {
        let refused = || {
            let text = Escaped(text.as_bytes());
            SourceProblem::Refused(format!("a digest that is none of sha256: {text}"))
        };
        let hex = text.strip_prefix("sha256:").ok_or_else(refused)?;
        let (pairs, []) = hex.as_bytes().as_chunks::<2>() else { return Err(refused()) };
        let digit = |byte: u8| char::from(byte).to_digit(16).filter(|_| !byte.is_ascii_uppercase());
        let byte = |&[high, low]: &[u8; 2]| {
            digit(high).zip(digit(low)).and_then(|(high, low)| u8::try_from(high << 4 | low).ok())
        };
        let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
        bytes.and_then(|bytes| bytes.try_into().ok()).map(Self).ok_or_else(refused)
    }

    /// The digest that the name of a file in an archive is: `blobs/sha256/HEX` or `HEX.json`.
    fn of_name(name: &str) -> Option<Self> {
        let hex = name.strip_prefix("blobs/sha256/").or_else(|| name.strip_suffix(".json"))?;
        Self::parse(&format!("sha256:{hex}")).ok()
    }

    /// The name of its blob in a layout of OCI.
    fn blob(&self) -> String {
        use std::fmt::Write;
        let mut name = "blobs/sha256/".to_owned();
        for byte in self.0 {
            // Writing to a string does not fail.
            let _ = write!(name, "{byte:02x}");
        }
        name
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

/// What is read, and its digest.
struct Hashed<R> {
    inner: R,
    hasher: Option<Sha256>,
}

impl<R: Read> Hashed<R> {
    fn new(inner: R, hashes: bool) -> Self {
        Self { inner, hasher: hashes.then(Sha256::new) }
    }

    /// The digest of all that there is, also of what was not read yet.
    fn digest(mut self) -> io::Result<Sha256Digest> {
        if self.hasher.is_some() {
            io::copy(&mut self, &mut io::sink())?;
        }
        let hasher = self.hasher.unwrap_or_default();
        Ok(Sha256Digest(hasher.finalize().into()))
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buf)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(buf.get(..count).unwrap_or_default());
        }
        Ok(count)
    }
}

struct HashedInput<'a>(Hashed<Box<dyn ArchiveInput + 'a>>);

impl Read for HashedInput<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl ArchiveInput for HashedInput<'_> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        if self.0.hasher.is_none() {
            return self.0.inner.skip(bytes);
        }
        let skipped = io::copy(&mut self.0.by_ref().take(bytes), &mut io::sink())?;
        if skipped < bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
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

/// What an index, a manifest and an image name.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    platform: Option<Platform>,
}

#[derive(Clone, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

/// A manifest, or an index, which stand in each other's place.
#[derive(Deserialize)]
struct Manifest {
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
struct Configuration {
    rootfs: Option<RootFs>,
}

#[derive(Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

impl Configuration {
    /// The digests of `count` unpacked layers.
    fn unpacked(&self, count: usize) -> Result<Vec<Option<Sha256Digest>>, SourceProblem> {
        let Some(RootFs { diff_ids }) = self.rootfs.as_ref().filter(|rootfs| {
            // Some tools leave them out.
            !rootfs.diff_ids.is_empty()
        }) else {
            return Ok(vec![None; count]);
        };
        if diff_ids.len() != count {
            let what = format!("it has {count} layers, and its configuration {}", diff_ids.len());
            return Err(SourceProblem::Damaged(what));
        }
        diff_ids.iter().map(|text| Sha256Digest::parse(text).map(Some)).collect()
    }
}

/// The name of an image in an index.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// How deep indices may lead to others.
const INDEX_DEPTH_MAX: usize = 4;

fn oci_layers(blobs: &Blobs, name: Option<&str>) -> Result<Vec<Layer>, SourceProblem> {
    let Index { manifests } = blobs.json("index.json", None)?;
    let is_named = |of: &&Descriptor| {
        name.is_none_or(|name| of.annotations.get(REF_NAME).is_some_and(|own| own == name))
    };
    let found: Vec<_> = manifests.iter().filter(is_named).collect();
    if found.is_empty() {
        let names = manifests.iter().filter_map(|of| of.annotations.get(REF_NAME).cloned());
        let what = format!("no image of this name is in it; there is {}", listed(names));
        return Err(SourceProblem::Refused(what));
    }
    let mut chosen = for_this_machine(&found)?;
    for _ in 0..INDEX_DEPTH_MAX {
        let digest = Sha256Digest::parse(&chosen.digest)?;
        let Manifest { config, layers, manifests } = blobs.json(&digest.blob(), Some(&digest))?;
        if let Some(manifests) = manifests {
            chosen = for_this_machine(&manifests.iter().collect::<Vec<_>>())?;
            continue;
        }
        let Some(layers) = layers else {
            let what = "its manifest is of a form without a list `layers`: an older schema, or no \
                        manifest";
            return Err(SourceProblem::Refused(what.to_owned()));
        };
        let unpacked = match config {
            Some(config) => {
                let digest = Sha256Digest::parse(&config.digest)?;
                let config: Configuration = blobs.json(&digest.blob(), Some(&digest))?;
                config.unpacked(layers.len())?
            }
            None => vec![None; layers.len()],
        };
        return layers
            .into_iter()
            .zip(unpacked)
            .map(|(layer, unpacked)| {
                if layer.media_type.ends_with("+encrypted") {
                    return Err(SourceProblem::Refused("its layers are encrypted".to_owned()));
                }
                let digest = Sha256Digest::parse(&layer.digest)?;
                Ok(Layer { path: digest.blob(), digest: Some(digest), unpacked })
            })
            .collect();
    }
    Err(SourceProblem::Damaged("its indices lead to each other".to_owned()))
}

/// The one of several images that is for this machine, or the only one.
fn for_this_machine(images: &[&Descriptor]) -> Result<Descriptor, SourceProblem> {
    if let [only] = images {
        return Ok((*only).clone());
    }
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    };
    let is_for = |image: &&&Descriptor| {
        image
            .platform
            .as_ref()
            .is_some_and(|platform| platform.os == "linux" && platform.architecture == architecture)
    };
    let mut fitting = images.iter().filter(is_for);
    if let (Some(only), None) = (fitting.next(), fitting.next()) {
        return Ok((*only).clone());
    }
    let name = |image: &&Descriptor| {
        let name = image.annotations.get(REF_NAME).cloned();
        let platform = image.platform.as_ref();
        let platform = platform.map(|of| format!("{}/{}", of.os, of.architecture));
        name.or(platform)
    };
    let names = listed(images.iter().filter_map(name));
    Err(SourceProblem::Refused(format!(
        "{} images are in it, and not one of them is for this machine alone: {names}",
        images.len(),
    )))
}

/// The first names, for a message.
fn listed(mut names: impl Iterator<Item = String>) -> String {
    let shown: Vec<_> = names.by_ref().take(NAMES_SHOWN).collect();
    let mut shown: Vec<_> = shown.iter().map(|name| Escaped(name.as_bytes()).to_string()).collect();
    if names.next().is_some() {
        shown.push("...".to_owned());
    }
    shown.join(", ")
}

/// An image in an archive of `docker save`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: Option<String>,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

fn docker_layers(blobs: &Blobs) -> Result<Vec<Layer>, SourceProblem> {
    let images: Vec<DockerImage> = blobs.json("manifest.json", None)?;
    let [image] = &images[..] else {
        let names = images.iter().flat_map(|image| image.repo_tags.iter().flatten().cloned());
        let what = format!("{} images are in it: {}", images.len(), listed(names));
        return Err(SourceProblem::Refused(what));
    };
    let unpacked = match &image.config {
        Some(name) => {
            let digest = Sha256Digest::of_name(name);
            let config: Configuration = blobs.json(name, digest.as_ref())?;
            config.unpacked(image.layers.len())?
        }
        None => vec![None; image.layers.len()],
    };
    let layers = image.layers.iter().zip(unpacked);
    let layer = |(path, unpacked): (&String, _)| {
        let digest = Sha256Digest::of_name(path);
        Layer { path: path.clone(), digest, unpacked }
    };
    Ok(layers.map(layer).collect())
}
