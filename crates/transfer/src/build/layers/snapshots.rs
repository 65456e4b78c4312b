//! The layers of container images as snapshots, each of the one below it.
//!
//! ```text
//! layers/sha256/ID of layer 1     a subvolume, read-only when it is built
//! layers/sha256/ID of layer 2     a snapshot of that, with what the layer changes, read-only
//! ...
//! the place of the image          a snapshot of the last one, writable
//! ```
//!
//! What a layer leaves as it was is stored once. The same layer over other layers is another tree,
//! so the name of a snapshot is the *chain ID* of OCI, which tells all layers up to this one:
//!
//! ```text
//! chain ID of layer 1 = diff ID of layer 1         the digest of the unpacked archive
//! chain ID of layer n = sha256 of "CHAIN-ID-OF-LAYER-(n-1) DIFF-ID-OF-LAYER-n"
//! ```
//!
//! Images that begin with the same layers have the same first chain IDs, and these are built once,
//! from the image that comes first. Those of the others are not read.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_vfs::{EntryPlace, Errno, FileId, NewFile, Result as VfsResult, Timestamp};
use serde::Serialize;

use super::digest::Sha256Digest;
use super::{ContainerImage, Layer, LayerReading, OpenedImage};
use crate::build::builder::{BuildContext, Builder, MISSING_PERMISSIONS, at};
use crate::build::entry::{SourceProblem, normal_path, split_path};
use crate::build::measure::Measure;
use crate::build::{BuildOptions, LayeredSink};
use crate::{Result, Watcher};

/// The directory of the snapshots.
const DIRECTORY: &[u8] = b"layers/sha256";

/// What a volume with snapshots does for layers. A subvolume is named by its root directory.
pub trait Snapshots {
    /// Makes an empty subvolume.
    fn create(&self, place: EntryPlace<'_>, new: &NewFile) -> VfsResult<FileId>;

    /// Makes a writable snapshot of a subvolume.
    fn snapshot(&self, of: FileId, place: EntryPlace<'_>, at: Timestamp) -> VfsResult<FileId>;

    /// Makes a subvolume read-only.
    fn make_read_only(&self, subvolume: FileId, at: Timestamp) -> VfsResult<()>;
}

/// A layer that became a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BuiltLayer {
    /// Its path in the volume.
    pub path: String,
    /// The digest of the unpacked layer.
    pub diff_id: String,
    /// The digest that stands for all layers up to this one.
    pub chain_id: String,
}

/// A layer, with the digests that name it.
struct ChainedLayer<'a> {
    layer: &'a Layer,
    diff_id: Sha256Digest,
    chain_id: Sha256Digest,
}

impl OpenedImage {
    /// The layers, the lowest first.
    fn chain(&self, watcher: &dyn Watcher) -> Result<Vec<ChainedLayer<'_>>> {
        let mut chain: Vec<ChainedLayer<'_>> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let place = self.place_of(layer);
            let reading =
                LayerReading { blobs: &self.blobs, place: &place, watcher, verifies: true };
            let diff_id = layer.diff_id(&reading)?;
            let chain_id = match chain.last() {
                None => diff_id.clone(),
                Some(ChainedLayer { chain_id: below, .. }) => {
                    Sha256Digest::of(format!("{below} {diff_id}").as_bytes())
                }
            };
            chain.push(ChainedLayer { layer, diff_id, chain_id });
        }
        Ok(chain)
    }
}

/// The layers that are measured already.
#[derive(Default)]
pub(in crate::build) struct KnownChains(BTreeSet<Sha256Digest>);

impl KnownChains {
    /// Measures the layers of an image that none before has.
    pub(in crate::build) fn measure(
        &mut self,
        image: &ContainerImage,
        options: &BuildOptions,
        watcher: &dyn Watcher,
        measure: &mut Measure<'_>,
    ) -> Result {
        let image = image.open(watcher)?;
        for ChainedLayer { layer, chain_id, .. } in image.chain(watcher)? {
            if self.0.insert(chain_id) {
                image.read_layer(layer, options, watcher, measure)?;
            }
        }
        Ok(())
    }
}

/// The layers that are snapshots already; see the top of this file.
pub(in crate::build) struct LayerSnapshots<'a> {
    snapshots: &'a dyn Snapshots,
    known: BTreeMap<Sha256Digest, FileId>,
    built: Vec<BuiltLayer>,
}

impl<'a> LayerSnapshots<'a> {
    pub(in crate::build) fn new(snapshots: &'a dyn Snapshots) -> Self {
        Self { snapshots, known: BTreeMap::new(), built: Vec::new() }
    }

    /// The layers that were built, in their order.
    pub(in crate::build) fn into_built(self) -> Vec<BuiltLayer> {
        self.built
    }

    /// Builds the layers of an image that none before has, and its tree at `to`.
    pub(in crate::build) fn build(
        &mut self,
        image: &ContainerImage,
        to: &[u8],
        context: BuildContext<'_>,
        watcher: &dyn Watcher,
    ) -> Result {
        let to = normal_path(to).map_err(|problem| problem.at(to))?;
        let (parent, name) = split_path(&to);
        if name.is_empty() {
            let what = "the top of a volume is no snapshot: build the image to a path".to_owned();
            return Err(SourceProblem::Refused(what).at(b"/"));
        }
        let image = image.open(watcher)?;
        let mut below = None;
        for layer in image.chain(watcher)? {
            let root = match self.known.get(&layer.chain_id) {
                Some(&root) => root,
                None => self.build_layer(&image, &layer, below, context, watcher)?,
            };
            below = Some(root);
        }
        let mut way = Builder::new(context, context.fs.root(), Vec::new())?;
        let (dir, _) = way.make_way(parent)?;
        way.touch_here();
        let place = EntryPlace { dir, name };
        let made = match below {
            Some(below) => self.snapshots.snapshot(below, place, context.options.at),
            None => self.snapshots.create(place, &new_root(context.options)),
        };
        match made {
            Err(error) if error.errno() == Errno::EXIST => {
                let what = "something is there already, and the tree of an image with its layers \
                            as snapshots is a snapshot of its own: build it to another path";
                return Err(SourceProblem::Refused(what.to_owned()).at(&to));
            }
            made => made.map_err(|error| at(error, &to))?,
        };
        way.finish()
    }

    /// Builds one layer over the snapshot of those below it. Gives the root of its own.
    fn build_layer(
        &mut self,
        image: &OpenedImage,
        layer: &ChainedLayer<'_>,
        below: Option<FileId>,
        context: BuildContext<'_>,
        watcher: &dyn Watcher,
    ) -> Result<FileId> {
        let ChainedLayer { layer, diff_id, chain_id } = layer;
        let options = context.options;
        let name = chain_id.hex();
        let path = [DIRECTORY, b"/", name.as_bytes()].concat();
        let fail = |error| at(error, &path);
        let mut way = Builder::new(context, context.fs.root(), Vec::new())?;
        let (dir, _) = way.make_way(DIRECTORY)?;
        let place = EntryPlace { dir, name: name.as_bytes() };
        let made = match below {
            Some(below) => self.snapshots.snapshot(below, place, options.at),
            None => self.snapshots.create(place, &new_root(options)),
        };
        let root = made.map_err(fail)?;
        way.finish()?;
        let mut builder = Builder::new(context, root, path.clone())?;
        image.read_layer(layer, options, watcher, &mut builder as &mut dyn LayeredSink)?;
        builder.finish()?;
        self.snapshots.make_read_only(root, options.at).map_err(fail)?;
        self.known.insert(chain_id.clone(), root);
        self.built.push(BuiltLayer {
            path: String::from_utf8_lossy(&path).into_owned(),
            diff_id: diff_id.to_string(),
            chain_id: chain_id.to_string(),
        });
        Ok(root)
    }
}

/// The root directory of a tree that no layer describes.
fn new_root(options: &BuildOptions) -> NewFile {
    let (uid, gid) = options.missing_owner();
    NewFile { permissions: MISSING_PERMISSIONS, uid, gid, umask: None, at: options.at }
}
