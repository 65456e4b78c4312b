//! `--layers snapshots`: where the trees of container images are whose layers are snapshots.

use clap::ValueEnum;
use offshoot_transfer::build::BuildInput;

use crate::exit::{Result, VerbFailure};
use crate::output::Escaped;
use crate::verbs::btrfs::build::{NewSubvolume, is_same_path};

/// The place of a tree that no `--to` names. It becomes the default subvolume.
const TREE: &[u8] = b"/rootfs";

/// What becomes of the layers of a container image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayerForm {
    /// They are put one over the other
    #[default]
    Merged,
    /// Each is a read-only snapshot of the one below it, in layers/sha256
    Snapshots,
}

/// Gives each image its place, where a snapshot of its last layer will be. An option `--subvolume`
/// that names such a place says what kind of subvolume that is.
pub(super) fn place_trees(inputs: &mut [BuildInput], subvolumes: &mut Vec<NewSubvolume>) -> Result {
    for input in inputs.iter() {
        if !input.source.has_layers() {
            let source = input.source.shown();
            let message = format!(
                "--layers snapshots is for container images (oci:, oci-archive:, docker-archive:), \
                 and {} has no layers",
                Escaped(&source)
            );
            return Err(VerbFailure::Usage(message));
        }
    }
    let has_default = subvolumes.iter().any(NewSubvolume::is_default);
    let options = subvolumes.len();
    let mut placed: Vec<Vec<u8>> = Vec::new();
    for input in inputs {
        let is_usual = input.to.is_empty();
        if is_usual {
            input.to = TREE.to_vec();
        }
        let place = input.to.clone();
        if placed.iter().any(|other| is_same_path(other, &place)) {
            let message = format!(
                "two container images have the place {}, and with --layers snapshots each tree is \
                 a subvolume of its own: name another with --to",
                Escaped(&place)
            );
            return Err(VerbFailure::Usage(message));
        }
        if let Some(inner) = subvolumes.iter().take(options).find(|new| new.is_inside(&place)) {
            let message = format!(
                "--subvolume {}: with --layers snapshots the tree at {} is a snapshot of a layer, \
                 and a subvolume inside of it cannot be made: leave out one of the options",
                Escaped(inner.path()),
                Escaped(&place)
            );
            return Err(VerbFailure::Usage(message));
        }
        let known = subvolumes.iter().position(|new| new.is_at(&place));
        let at = known.unwrap_or(subvolumes.len());
        if known.is_none() {
            subvolumes.push(NewSubvolume::of_source(&place));
        }
        if let Some(tree) = subvolumes.get_mut(at) {
            tree.comes_with_its_source(is_usual && !has_default);
        }
        placed.push(place);
    }
    Ok(())
}
