//! Reading damaged volumes: through other roots, without checksums, around what is lost.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use offshoot_testkit::btrfs::fixture;
use serde_json::Value;

fn offshoot(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot")).args(arguments).output().expect("it runs")
}

fn json(arguments: &[&str]) -> Value {
    let output = offshoot(arguments);
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}"))
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A volume with places of it that can be damaged.
struct Damaged {
    _dir: tempfile::TempDir,
    image: PathBuf,
    chunks: Value,
    superblock: Value,
    root_tree: Vec<Value>,
}

impl Damaged {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let image = dir.path().join("volume.img");
        fixture::unpack(&image).expect("the fixture unpacks");
        let shown = text(&image);
        let output = offshoot(&["dump", "tree", "--json", shown, "root"]);
        let items = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
        Self {
            chunks: json(&["dump", "chunks", "--json", shown]),
            superblock: json(&["dump", "super", "--json", shown])[0]["superblock"].clone(),
            root_tree: items.map(|item| item.expect("JSON")).collect(),
            image,
            _dir: dir,
        }
    }

    /// Where the copies of a logical address are in the image.
    fn copies(&self, logical: u64) -> Vec<u64> {
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
    fn destroy(&self, logical: u64) {
        let file = File::options().write(true).open(&self.image).expect("the image opens");
        for at in self.copies(logical) {
            file.write_all_at(&[0xa5; 512], at).expect("it is written");
        }
    }

    /// The address of the root of the tree `id`.
    fn root_of(&self, id: u64) -> u64 {
        let is_root =
            |item: &&Value| item["key"]["objectid"] == id && item["key"]["type"] == "ROOT_ITEM";
        let item = self.root_tree.iter().find(is_root).expect("the tree is there");
        number(&item["item"]["bytenr"])
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let place = self.place("");
        offshoot(&[arguments, &[place.as_str()]].concat())
    }

    fn place(&self, path: &str) -> String {
        format!("{}:/{path}", text(&self.image))
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary path is text")
}

const FILE: &str = "root/usr/share/doc/zstd.txt";

#[test]
fn without_a_readable_checksum_tree_files_are_read_when_asked() {
    let damaged = Damaged::new();
    let sound = offshoot(&["cat", &damaged.place(FILE)]);
    assert!(sound.status.success() && !sound.stdout.is_empty(), "{sound:?}");
    damaged.destroy(damaged.root_of(7));
    let place = damaged.place(FILE);
    assert_eq!(offshoot(&["cat", &place]).status.code(), Some(3));
    for option in ["--rescue=ignorebadroots", "--rescue=all", "--ignore-checksums"] {
        let read = offshoot(&["cat", option, &place]);
        assert_eq!((read.status.code(), read.stdout), (Some(0), sound.stdout.clone()), "{option}");
    }
    let refused = offshoot(&["mkdir", "--rescue=all", &damaged.place("new")]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("writing"), "{refused:?}");
}

#[test]
fn a_backup_root_is_used_when_asked() {
    let damaged = Damaged::new();
    let sound = damaged.run(&["ls", "-l"]);
    damaged.destroy(number(&damaged.superblock["root"]));
    assert_eq!(damaged.run(&["ls", "-l"]).status.code(), Some(3));
    let found = damaged.run(&["ls", "-l", "--rescue", "usebackuproot"]);
    assert_eq!((found.status.code(), found.stdout), (Some(0), sound.stdout), "{:?}", found.stderr);
    assert!(String::from_utf8_lossy(&found.stderr).contains("ROOT_TREE"), "{:?}", found.stderr);
}
