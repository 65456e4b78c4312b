//! What layers a container image has: the indices, manifests and configurations of both layouts.

use std::collections::BTreeMap;

use offshoot_vfs::escape::Escaped;
use serde::Deserialize;

use super::Layer;
use super::blobs::Blobs;
use super::digest::Sha256Digest;
use crate::build::entry::SourceProblem;

/// How many names a message shows.
const NAMES_SHOWN: usize = 20;

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

pub(super) fn oci_layers(blobs: &Blobs, name: Option<&str>) -> Result<Vec<Layer>, SourceProblem> {
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

pub(super) fn docker_layers(blobs: &Blobs) -> Result<Vec<Layer>, SourceProblem> {
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
