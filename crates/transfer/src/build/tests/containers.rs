//! Container images: layers, whiteouts, digests, and the layouts that hold them.

use std::fmt::Write as _;
use std::io::Write;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::*;

/// An image that is made.
struct NewImage {
    site: BuildSite,
    /// The digests of unpacked layers.
    unpacked: Vec<String>,
    layers: Vec<Value>,
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(bytes) {
        write!(text, "{byte:02x}").expect("a string");
    }
    text
}

impl NewImage {
    fn new() -> Self {
        let site = BuildSite::new();
        std::fs::create_dir_all(site.path("oci/blobs/sha256")).expect("a layout");
        Self { site, unpacked: Vec::new(), layers: Vec::new() }
    }

    /// Stores a blob, and gives its descriptor.
    fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = hex(bytes);
        std::fs::write(self.site.path(&format!("oci/blobs/sha256/{digest}")), bytes)
            .expect("a blob");
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() })
    }

    fn layer(&mut self, members: &[Vec<u8>]) {
        let archive = ended(members.concat());
        self.unpacked.push(format!("sha256:{}", hex(&archive)));
        // Every other layer is packed.
        let bytes = if self.layers.len().is_multiple_of(2) {
            archive
        } else {
            let level = flate2::Compression::fast();
            let mut out = flate2::write::GzEncoder::new(Vec::new(), level);
            out.write_all(&archive).expect("memory");
            out.finish().expect("memory")
        };
        let layer = self.blob("application/vnd.oci.image.layer.v1.tar+gzip", &bytes);
        self.layers.push(layer);
    }

    fn manifest(&self) -> Value {
        let config = json!({ "rootfs": { "type": "layers", "diff_ids": self.unpacked } });
        let config = self.blob("config", config.to_string().as_bytes());
        let manifest = json!({ "config": config, "layers": self.layers });
        self.blob("application/vnd.oci.image.manifest.v1+json", manifest.to_string().as_bytes())
    }

    fn index(&self, manifests: &[Value]) {
        let index = json!({ "schemaVersion": 2, "manifests": manifests });
        std::fs::write(self.site.path("oci/index.json"), index.to_string()).expect("an index");
    }

    fn named(mut manifest: Value, name: &str) -> Value {
        manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
        manifest
    }

    fn build(&self, source: &str) -> Result<ExtractOutcome> {
        let (kind, rest) = source.split_once(':').expect("a kind");
        let source = format!("{kind}:{}/{rest}", self.site.dir.path().display());
        let source = BuildSource::named(OsStr::new(&source));
        self.site.build_with(&BuildOptions::new(AT), vec![(source, "")])
    }

    #[track_caller]
    fn refuses(&self, source: &str, said: &str) {
        let failure = self.build(source).expect_err("it is refused").to_string();
        assert!(failure.contains(said), "{failure}, not {said}");
    }

    /// The layout as a tar archive.
    fn archived(&self, name: &str) {
        let mut members = Vec::new();
        for entry in std::fs::read_dir(self.site.path("oci/blobs/sha256")).expect("blobs") {
            let entry = entry.expect("a blob");
            let name = format!("blobs/sha256/{}", entry.file_name().to_string_lossy());
            members.push(plain(&name, b'0', &std::fs::read(entry.path()).expect("a blob")));
        }
        let index = std::fs::read(self.site.path("oci/index.json")).expect("an index");
        members.push(plain("index.json", b'0', &index));
        std::fs::write(self.site.path(name), ended(members.concat())).expect("an archive");
    }
}

/// Three layers with everything that a layer can say of those below it.
fn layered() -> NewImage {
    let mut image = NewImage::new();
    image.layer(&[
        directory("etc/", 1),
        file("etc/a", "a of 1"),
        file("etc/b", "b of 1"),
        file("opaque/x", "x of 1"),
        file("opaque/deep/y", "y of 1"),
        file("gone/z", "z of 1"),
        file("turned", "a file"),
    ]);
    image.layer(&[
        // Whiteouts count for the layers below alone, wherever they stand.
        file("etc/b", "b of 2"),
        file("etc/.wh.b", ""),
        file("etc/.wh.a", ""),
        file("opaque/new", "of 2"),
        file("opaque/.wh..wh..opq", ""),
        file(".wh.gone", ""),
        file(".wh..wh.plnk/1.2", "of aufs"),
        file("etc/.wh.never", ""),
        directory("turned/", 1),
        file("turned/into", "a directory"),
    ]);
    image.layer(&[file("etc/a", "a of 3")]);
    image
}

const LAYERED: &str = "etc /\netc/a x1 a of 3\netc/b x1 b of 2\nopaque /\nopaque/new x1 of 2\n\
                       turned /\nturned/into x1 a directory\n";

#[test]
fn layers_are_put_one_over_the_other() {
    let image = layered();
    image.index(&[image.manifest()]);
    image.archived("oci.tar");
    image.build("oci:oci").unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(image.site.shown(), LAYERED);
    let again = NewImage { site: BuildSite { model: Model::made_at(AT), ..image.site }, ..image };
    again.build("oci-archive:oci.tar").unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(again.site.shown(), LAYERED);
}

#[test]
fn one_of_several_images_is_chosen() {
    let mut image = NewImage::new();
    image.layer(&[file("first", "")]);
    let first = NewImage::named(image.manifest(), "one:v1");
    image.layers.clear();
    image.unpacked.clear();
    image.layer(&[file("second", "")]);
    let second = NewImage::named(image.manifest(), "two");
    image.index(&[first.clone(), second.clone()]);
    image.refuses("oci:oci", "2 images are in it");
    image.refuses("oci:oci:three", "there is one:v1, two");
    image.build("oci:oci:one:v1").expect("a build");
    assert_eq!(image.site.shown(), "first x1 \n");
    // An index of one image for several machines.
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let on = |mut manifest: Value, architecture: &str| {
        manifest["platform"] = json!({ "os": "linux", "architecture": architecture });
        manifest
    };
    let list = json!({ "manifests": [on(first, "mips"), on(second, architecture)] });
    let list = image.blob("application/vnd.oci.image.index.v1+json", list.to_string().as_bytes());
    image.index(&[list]);
    image.build("oci:oci").unwrap_or_else(|failure| panic!("{failure}"));
    assert!(image.site.shown().contains("second"));
}

#[test]
fn what_has_another_digest_is_refused() {
    let image = layered();
    let manifest = image.manifest();
    image.index(std::slice::from_ref(&manifest));
    let spoil = |descriptor: &Value, said: &str| {
        let digest = descriptor["digest"].as_str().expect("a digest").replace(':', "/");
        let path = image.site.path(&format!("oci/blobs/{digest}"));
        let bytes = std::fs::read(&path).expect("a blob");
        let mut spoiled = bytes.clone();
        // White space in JSON, and the padding of an archive, mean nothing.
        spoiled.push(if bytes.starts_with(b"{") { b' ' } else { 0 });
        std::fs::write(&path, spoiled).expect("a blob");
        image.refuses("oci:oci", said);
        std::fs::remove_file(&path).expect("it goes");
        image.refuses("oci:oci", "is missing");
        std::fs::write(&path, bytes).expect("a blob");
    };
    spoil(&manifest, "has another digest");
    spoil(&image.layers[0], "has another digest");
    let mut wrong = layered();
    wrong.unpacked.swap(0, 1);
    wrong.index(&[wrong.manifest()]);
    wrong.refuses("oci:oci", "has another digest");
    wrong.unpacked.pop();
    wrong.index(&[wrong.manifest()]);
    wrong.refuses("oci:oci", "it has 3 layers, and its configuration 2");
    wrong.index(&[json!({ "digest": "sha256:../../etc/passwd" })]);
    wrong.refuses("oci:oci", "a digest that is none of sha256");
    wrong.refuses("oci:nowhere", "is missing");
}

/// What `docker save` writes: names of layers in a manifest, equal layers as links.
#[test]
fn archives_of_docker_save() {
    let image = NewImage::new();
    let lower = ended([file("a", "1"), file("b", "1")].concat());
    let upper = ended([file(".wh.a", ""), file("c", "2")].concat());
    let digests: Vec<_> =
        [&lower, &upper, &lower].iter().map(|bytes| format!("sha256:{}", hex(bytes))).collect();
    let config = json!({ "rootfs": { "diff_ids": digests } }).to_string();
    let config_name = format!("{}.json", hex(config.as_bytes()));
    let manifest = json!([{
        "Config": config_name,
        "RepoTags": ["app:latest"],
        "Layers": ["1/layer.tar", "2/layer.tar", "3/layer.tar"],
    }]);
    let members = [
        plain("1/layer.tar", b'0', &lower),
        plain("2/layer.tar", b'0', &upper),
        linked("3/layer.tar", b'2', "../1/layer.tar"),
        plain(&config_name, b'0', config.as_bytes()),
        plain("manifest.json", b'0', manifest.to_string().as_bytes()),
    ];
    std::fs::write(image.site.path("save.tar"), ended(members.concat())).expect("an archive");
    image.build("docker-archive:save.tar").unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(image.site.shown(), "a x1 1\nb x1 1\nc x1 2\n");
    std::fs::write(image.site.path("no.tar"), ended(members[..1].concat())).expect("an archive");
    image.refuses("docker-archive:no.tar", "manifest.json is missing");
}

#[track_caller]
fn assert_layered(layers: &[&[Vec<u8>]], expected: &str) {
    let mut image = NewImage::new();
    for members in layers {
        image.layer(members);
    }
    image.index(&[image.manifest()]);
    image.build("oci:oci").unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(image.site.shown(), expected);
}

/// What a layer says of its directory `lib` is not about the one that a link `lib` led to.
#[test]
fn whiteouts_do_not_follow_a_link_that_their_layer_replaces() {
    let lower = [linked("lib", b'2', "usr/lib"), file("usr/lib/a", "a"), file("usr/lib/x/y", "y")];
    let kept = "usr /\nusr/lib /\nusr/lib/a x1 a\nusr/lib/x /\nusr/lib/x/y x1 y\n";
    let opaque = [directory("lib/", 1), file("lib/.wh..wh..opq", ""), file("lib/b", "b")];
    assert_layered(&[&lower, &opaque], &format!("lib /\nlib/b x1 b\n{kept}"));
    let within = [directory("lib/", 1), file("lib/x/.wh.y", ""), file("lib/b", "b")];
    assert_layered(&[&lower, &within], &format!("lib /\nlib/b x1 b\n{kept}"));
    // The marker may stand before the directory.
    let before = [file("lib/.wh..wh..opq", ""), directory("lib/", 1)];
    assert_layered(&[&lower, &before], &format!("lib /\n{kept}"));
    // A layer that leaves the link alone removes behind it.
    let through = [file("lib/.wh.a", "")];
    let left = "lib -> usr/lib\nusr /\nusr/lib /\nusr/lib/x /\nusr/lib/x/y x1 y\n";
    assert_layered(&[&lower, &through], left);
}

#[test]
fn a_link_that_waited_goes_with_a_whiteout_of_a_later_layer() {
    let lower = [linked("a", b'1', "b"), file("b", "b")];
    assert_layered(&[&lower, &[file(".wh.a", "")]], "b x1 b\n");
    assert_layered(&[&lower, &[file(".wh.b", "")]], "a x1 b\n");
}

#[test]
fn whiteouts_that_mean_nothing() {
    let mut image = NewImage::new();
    image.layer(&[file("d/a", "a")]);
    image.layer(&[file("d/.wh..", "")]);
    image.index(&[image.manifest()]);
    image.refuses("oci:oci", "a whiteout of the directory that it is in");
}

#[test]
fn manifests_that_are_none() {
    let image = NewImage::new();
    let of_schema_1 = json!({ "schemaVersion": 1, "fsLayers": [{ "blobSum": "sha256:00" }] });
    for manifest in [json!({}), of_schema_1] {
        let manifest = image.blob("manifest", manifest.to_string().as_bytes());
        image.index(&[manifest]);
        image.refuses("oci:oci", "a form without a list `layers`");
    }
    let mut many = NewImage::new();
    many.layer(&[file("a", "")]);
    many.layers = vec![many.layers[0].clone(); 1000];
    many.unpacked.clear();
    many.index(&[many.manifest()]);
    many.refuses("oci:oci", "it has 1000 layers");
    many.blob("large", &vec![b' '; 5 << 20]);
    let large = many.blob("large", &vec![b' '; 5 << 20]);
    many.index(&[large]);
    many.refuses("oci:oci", "more than 4 MiB");
}

/// Names that are digests are compared with what they name, and a layer without a digest must end.
#[test]
fn names_in_archives_of_docker_save_are_digests() {
    let image = NewImage::new();
    let layer = ended(file("a", "1"));
    let build = |config: &str, name: &str, layer: &[u8]| {
        let manifest = json!([{ "Config": config, "Layers": [name] }]).to_string();
        let members = [
            plain(name, b'0', layer),
            plain(config, b'0', b"{}"),
            plain("manifest.json", b'0', manifest.as_bytes()),
        ];
        std::fs::write(image.site.path("save.tar"), ended(members.concat())).expect("an archive");
        image.build("docker-archive:save.tar").map(|_| ()).map_err(|failure| failure.to_string())
    };
    let right = format!("blobs/sha256/{}", hex(&layer));
    let wrong = format!("blobs/sha256/{}", hex(b"other"));
    let config = format!("{}.json", hex(b"{}"));
    build(&config, &right, &layer).expect("a build");
    build("config.json", "1/layer.tar", &layer).expect("a build");
    for (config, name) in [(&config, &wrong), (&format!("{}.json", hex(b"")), &right)] {
        let said = build(config, name, &layer).expect_err("it is refused");
        assert!(said.contains("has another digest"), "{said}");
    }
    let cut = &layer[..1024];
    let said = build("config.json", "1/layer.tar", cut).expect_err("it is refused");
    assert!(said.contains("no mark at its end"), "{said}");
}

#[test]
fn packed_archives_of_images_are_named() {
    let image = layered();
    image.index(&[image.manifest()]);
    image.archived("oci.tar");
    let archive = std::fs::read(image.site.path("oci.tar")).expect("an archive");
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(&archive).expect("memory");
    std::fs::write(image.site.path("oci.tgz"), out.finish().expect("memory")).expect("a file");
    image.refuses("oci-archive:oci.tgz", "it is packed by gzip: unpack it first");
    image.refuses("docker-archive:oci.tgz", "it is packed by gzip: unpack it first");
}
