//! Volumes that the sweep damages, and the verbs that run on each.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::{self, subvolumes};
use offshoot_testkit::btrfs::fixture;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::scratch_dir;

use crate::damage::DamageTarget;
use crate::image::{Patched, SparseImage};

/// A sound volume, and the places in it that the verbs use.
pub(crate) struct HostileVolume {
    /// The image files, in a directory of their own.
    images: Vec<PathBuf>,
    /// A directory below the root.
    start: &'static str,
    files: &'static [&'static str],
    /// The trees that are dumped.
    trees: &'static [&'static str],
    is_writable: bool,
    /// The directory or disks that own the images.
    _dir: Option<tempfile::TempDir>,
    _disks: Option<Disks>,
}

impl HostileVolume {
    /// The volume that the repository carries.
    pub(crate) fn fixture() -> Self {
        let dir = scratch_dir();
        let image = dir.path().join("volume.img");
        fixture::unpack(&image).expect("the fixture unpacks");
        Self {
            images: vec![image],
            start: "/snapshots/root-before-upgrade/usr",
            files: &[
                "/snapshots/root-before-upgrade/usr/share/doc/zlib.txt",
                "/snapshots/root-before-upgrade/usr/share/doc/lzo.txt",
                "/snapshots/root-before-upgrade/usr/share/doc/zstd.txt",
                "/snapshots/root-before-upgrade/usr/share/doc/plain.txt",
            ],
            trees: &["root", "chunk", "fs", "extent", "csum", "256"],
            // `start` is in a read-only snapshot.
            is_writable: false,
            _dir: Some(dir),
            _disks: None,
        }
    }

    /// A volume that the kernel makes.
    pub(crate) fn made(judges: &Judges, recipe: Recipe) -> Self {
        let disks = recipe.mib(256).mount("compress=zstd").fill(small).make(judges);
        Self {
            images: disks.images().to_vec(),
            start: "/start",
            files: &["/start/text", "/start/below/noise"],
            trees: &["root", "chunk", "fs", "dev", "256"],
            is_writable: true,
            _dir: None,
            _disks: Some(disks),
        }
    }

    /// The volume for which a sweep chooses the damage.
    pub(crate) fn target(&self) -> DamageTarget {
        let read = |path: &PathBuf| Arc::new(SparseImage::read(path).expect("an image"));
        DamageTarget::new(self.images.iter().map(read).collect(), true)
    }

    /// Runs `call` while the damage is in the image files.
    pub(crate) fn with<T>(&self, members: &[Patched], call: impl FnOnce() -> T) -> T {
        let open = |path: &PathBuf| OpenOptions::new().write(true).open(path).expect("an image");
        let files: Vec<File> = self.images.iter().map(open).collect();
        for (member, file) in members.iter().zip(&files) {
            member.apply(file).expect("the image is written");
        }
        let result = call();
        for (member, file) in members.iter().zip(&files) {
            member.undo(file).expect("the image is written");
        }
        result
    }

    /// Every verb that writes to standard output, with its arguments.
    pub(crate) fn verbs(&self) -> Vec<Vec<String>> {
        let (image, start) = (self.image(), format!("{}:{}", self.image(), self.start));
        let mut verbs = vec![
            vec!["info", image],
            vec!["info", "--json", image],
            vec!["stats", image],
            vec!["stats", "--json", image],
            vec!["ls", "-l", "-R", image],
            vec!["ls", "-R", "--json", &start],
            vec!["stat", &start],
            vec!["stat", "--json", image],
            vec!["subvolume", "list", image],
            vec!["subvolume", "list", "--json", image],
            vec!["dump", "super", image],
            vec!["dump", "super", "--json", image],
            vec!["dump", "chunks", "--json", image],
            vec!["extract", image, "--tar", "-"],
            vec!["extract", &start, "--tar", "-"],
            vec!["recover", image, "--tar", "-"],
            vec!["recover", image, "--list-roots", "--json"],
        ];
        for (at, tree) in self.trees.iter().enumerate() {
            let json = if at % 2 == 0 { "--json" } else { "--degraded" };
            verbs.push(vec!["dump", "tree", image, tree, json]);
        }
        let verbs = verbs.into_iter().map(|verb| verb.iter().map(ToString::to_string).collect());
        let cat = |file: &&str| vec!["cat".to_owned(), format!("{image}:{file}")];
        verbs.chain(self.files.iter().map(cat)).map(|verb| self.with_devices(verb)).collect()
    }

    /// The arguments of `extract` and `cp` without the destination: from the root, and from a
    /// directory below.
    pub(crate) fn extractions(&self) -> Vec<Vec<String>> {
        let image = self.image();
        let verbs = [
            format!("extract --json {image}"),
            format!("extract --json {image}:{}", self.start),
            format!("cp -r --json {image}:/"),
            format!("cp -r --json {image}:{}", self.start),
        ];
        verbs.map(|verb| self.with_devices(verb.split(' ').map(str::to_owned).collect())).into()
    }

    /// A copy of the images in `dir`, as they are now.
    pub(crate) fn copy(&self, dir: &Path) -> Self {
        let copy = |image: &PathBuf| {
            let copy = dir.join(image.file_name().expect("an image has a name"));
            let words = ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()];
            offshoot_testkit::run::run("cp", &words);
            copy
        };
        let images = self.images.iter().map(copy).collect();
        Self { images, _dir: None, _disks: None, ..*self }
    }

    /// Whether the verbs of [`changes`](Self::changes) succeed on the sound volume.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Verbs that change the volume, one after the other.
    pub(crate) fn changes(&self) -> Vec<Vec<String>> {
        let (image, file) = (self.image(), self.files[0]);
        let start = format!("{image}:{}", self.start);
        let host = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
        let verbs = [
            format!("scrub -r --json {image}"),
            format!("scrub {image}"),
            format!("mkdir -p {start}/new/deep"),
            format!("cp -r --json {host} {start}/host"),
            format!("ln {image}:{file} {start}/hard"),
            format!("ln -s nowhere {start}/soft"),
            format!("mv {start}/host {start}/new/deep"),
            format!("cp -r --json {start}/hard {start}/soft {image}:/"),
            format!("cp -rT --json {start} {image}:/copy"),
            format!("rm {start}/hard {image}:{file}"),
            format!("rm -r {start} {image}:/copy"),
            format!("scrub {image}"),
        ];
        verbs.map(|verb| self.with_devices(verb.split(' ').map(str::to_owned).collect())).into()
    }

    pub(crate) fn images(&self) -> &[PathBuf] {
        &self.images
    }

    fn image(&self) -> &str {
        self.images[0].to_str().expect("a temporary path is text")
    }

    fn with_devices(&self, mut verb: Vec<String>) -> Vec<String> {
        for image in &self.images[1..] {
            verb.push("--device".to_owned());
            verb.push(image.to_str().expect("a temporary path is text").to_owned());
        }
        verb
    }
}

/// A few files for the verbs to show, so that running all of them is quick.
fn small(root: &Path) {
    let start = fill::directory(root, "start");
    fill::write(&start.join("text"), "a line like every other one\n".repeat(20_000).as_bytes());
    let below = fill::directory(&start, "below");
    let noise: Vec<u8> = (0..300_000_u32).map(|n| n.wrapping_mul(n).to_be_bytes()[1]).collect();
    fill::write(&below.join("noise"), &noise);
    fs::hard_link(below.join("noise"), start.join("noise too")).expect("a hard link");
    std::os::unix::fs::symlink("below/noise", start.join("link")).expect("a symbolic link");
    for n in 0..60 {
        fill::write(&below.join(format!("small file {n}")), format!("{n}\n").as_bytes());
    }
    subvolumes::create(&root.join("nested"));
    fill::xattrs::access_control_lists(&fill::directory(&root.join("nested"), "lists"));
    subvolumes::snapshot(&root.join("nested"), &root.join("snapshot"), true);
}
