//! The volume of the repository, with places of it that can be damaged.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use offshoot_testkit::btrfs::fixture;
use serde_json::Value;

/// Runs the program.
pub(crate) fn offshoot(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot")).args(arguments).output().expect("it runs")
}

/// What the program writes as JSON.
pub(crate) fn json(arguments: &[&str]) -> Value {
    let output = offshoot(arguments);
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}"))
}

pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A volume with places of it that can be damaged.
pub(crate) struct Damaged {
    /// Of the image, if it goes with this.
    #[expect(dead_code, reason = "it is removed when this is dropped")]
    dir: Option<tempfile::TempDir>,
    pub(crate) image: PathBuf,
    chunks: Value,
    pub(crate) superblock: Value,
    root_tree: Vec<Value>,
}

impl Damaged {
    /// The volume of the repository.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let image = dir.path().join("volume.img");
        fixture::unpack(&image).expect("the fixture unpacks");
        Self { dir: Some(dir), ..Self::of(&image) }
    }

    /// The volume in `image`.
    pub(crate) fn of(image: &Path) -> Self {
        let shown = text(image);
        let output = offshoot(&["dump", "tree", "--json", shown, "root"]);
        let items = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
        Self {
            chunks: json(&["dump", "chunks", "--json", shown]),
            superblock: json(&["dump", "super", "--json", shown])[0]["superblock"].clone(),
            root_tree: items.map(|item| item.expect("JSON")).collect(),
            image: image.to_owned(),
            dir: None,
        }
    }

    /// Where the copies of a logical address are in the image.
    pub(crate) fn copies(&self, logical: u64) -> Vec<u64> {
        let chunks = self.chunks.as_array().expect("an array").iter();
        let mut found = chunks.filter_map(|chunk| {
            let at = logical.checked_sub(number(&chunk["logical"]))?;
            let stripes = chunk["stripes"].as_array().expect("an array").iter();
            (at < number(&chunk["length"]))
                .then(|| stripes.map(|stripe| number(&stripe["offset"]) + at).collect())
        });
        found.next().expect("a chunk has the address")
    }

    /// Writes noise over all copies of what is at a logical address.
    pub(crate) fn destroy(&self, logical: u64) {
        let file = File::options().write(true).open(&self.image).expect("the image opens");
        for at in self.copies(logical) {
            file.write_all_at(&[0xa5; 512], at).expect("it is written");
        }
    }

    /// The address of the root of the tree `id`.
    pub(crate) fn root_of(&self, id: u64) -> u64 {
        let is_root =
            |item: &&Value| item["key"]["objectid"] == id && item["key"]["type"] == "ROOT_ITEM";
        let item = self.root_tree.iter().find(is_root).expect("the tree is there");
        number(&item["item"]["bytenr"])
    }

    /// The place of a path in it, for the program.
    pub(crate) fn place(&self, path: &str) -> String {
        format!("{}:/{path}", text(&self.image))
    }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary path is text")
}

/// A file with compression.
pub(crate) const FILE: &str = "root/usr/share/doc/zstd.txt";

/// A file without compression, in one extent of several sectors.
pub(crate) const PLAIN_FILE: &str = "root/usr/share/doc/plain.txt";

/// The address of the first extent of a file.
pub(crate) fn extent_of(damaged: &Damaged, path: &str) -> u64 {
    let stat = json(&["stat", "--json", &damaged.place(path)]);
    let (tree, inode) = (number(&stat["subvolume"]).to_string(), number(&stat["inode"]));
    let output = offshoot(&["dump", "tree", "--json", text(&damaged.image), &tree]);
    let items = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let is_extent =
        |item: &Value| item["key"]["objectid"] == inode && item["key"]["type"] == "EXTENT_DATA";
    let item = items.map(|item| item.expect("JSON")).find(is_extent).expect("it has an extent");
    number(&item["item"]["disk_bytenr"])
}
