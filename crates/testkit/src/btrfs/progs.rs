//! What `btrfs-progs` shows of a volume.
//!
//! A test that damages a block has to know the physical address of the block without asking the
//! engine under test. `btrfs-map-logical` maps a logical address to physical ones, and `btrfs
//! inspect-internal dump-tree` prints logical addresses. Both need block devices to find all
//! members, so the images are attached (and not mounted) meanwhile.

use std::path::Path;

use crate::btrfs::disks::{AttachedImages, Disks};
use crate::run::{command, run};

/// The tools, with the members of one volume attached for them.
#[derive(Debug)]
pub struct Progs {
    attached: AttachedImages,
}

/// One mirror of a range of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorPlace {
    /// Which mirror: 1 is the one that is read first; with parity it is the data itself.
    pub mirror: u32,
    /// The logical address.
    pub logical: u64,
    /// The index of the member among the images.
    pub member: usize,
    /// The byte offset in the member.
    pub physical: u64,
}

/// Where the data of one file extent item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataExtent {
    /// The logical address of the extent.
    pub logical: u64,
    /// The length of the extent on the device, in bytes.
    pub disk_bytes: u64,
}

impl Progs {
    /// Attaches all members of `disks`, which must not be mounted.
    #[must_use]
    pub fn of(disks: &Disks) -> Self {
        Self { attached: AttachedImages::new(disks.images()) }
    }

    /// The output of `dump-tree` for a tree, given by number or by name.
    #[must_use]
    pub fn dump_tree(&self, tree: &str) -> String {
        let words = ["inspect-internal", "dump-tree", "--noscan", "-t", tree];
        run("btrfs", &[&words[..], &self.attached.devices()].concat())
    }

    /// The logical addresses of the blocks of a tree, the root first.
    #[must_use]
    pub fn blocks(&self, tree: &str) -> Vec<u64> {
        let dump = self.dump_tree(tree);
        let mut blocks: Vec<u64> = Vec::new();
        for line in dump.lines() {
            let mut words = line.split_whitespace();
            if matches!(words.next(), Some("leaf" | "node"))
                && let Some(logical) = words.next().and_then(|word| word.parse().ok())
                && !blocks.contains(&logical)
            {
                blocks.push(logical);
            }
        }
        assert!(!blocks.is_empty(), "dump-tree shows no block of tree {tree}:\n{dump}");
        blocks
    }

    /// The extents of a file, in file order, without inline extents and holes.
    #[must_use]
    pub fn extents(&self, tree: &str, ino: u64) -> Vec<DataExtent> {
        let dump = self.dump_tree(tree);
        let mut extents = Vec::new();
        let mut in_file = false;
        for line in dump.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                ["item", ..] => in_file = line.contains(&format!("key ({ino} EXTENT_DATA")),
                ["extent", "data", "disk", "byte", logical, "nr", disk_bytes] if in_file => {
                    let number = |text: &str| text.parse::<u64>().expect("a number");
                    let extent =
                        DataExtent { logical: number(logical), disk_bytes: number(disk_bytes) };
                    if extent.logical != 0 {
                        extents.push(extent);
                    }
                }
                _ => {}
            }
        }
        assert!(!extents.is_empty(), "dump-tree shows no extents of inode {ino}");
        extents
    }

    /// All mirrors of the `len` bytes at `logical`: one place for each stripe that they touch. With
    /// parity, the last mirrors are places of the parity.
    #[must_use]
    pub fn places(&self, logical: u64, len: u64) -> Vec<MirrorPlace> {
        let (logical, len) = (logical.to_string(), len.to_string());
        let devices = self.attached.devices();
        let output = self.attached.checked(|device| {
            let mut command = command("btrfs-map-logical");
            command.args(["-l", &logical, "-b", &len, device]).output().expect("it runs")
        });
        let said = String::from_utf8_lossy(&output.stdout);
        let places: Vec<_> = said.lines().filter_map(|line| place(line, &devices)).collect();
        assert!(!places.is_empty(), "btrfs-map-logical tells no place of {logical}: {output:?}");
        places
    }
}

/// Parses `mirror 1 logical 22020096 physical 22020096 device /dev/loop0`.
fn place(line: &str, devices: &[&str]) -> Option<MirrorPlace> {
    let words: Vec<_> = line.split_whitespace().collect();
    let ["mirror", mirror, "logical", logical, "physical", physical, "device", device] = words[..]
    else {
        return None;
    };
    Some(MirrorPlace {
        mirror: mirror.parse().ok()?,
        logical: logical.parse().ok()?,
        physical: physical.parse().ok()?,
        member: devices.iter().position(|known| *known == device)?,
    })
}

/// A subvolume as `btrfs subvolume list` shows it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListedSubvolume {
    /// The id of its tree.
    pub id: u64,
    /// The id of the subvolume that contains it.
    pub parent: u64,
    /// The last transaction that changed it.
    pub generation: u64,
    /// The transaction that made it.
    pub created: u64,
    /// Its UUID, as 32 digits with dashes.
    pub uuid: String,
    /// The UUID of the subvolume of which it is a snapshot; `-` for none.
    pub parent_uuid: String,
    /// The UUID of the subvolume from which it was received; `-` for none.
    pub received_uuid: String,
    /// Its path from the top of the volume.
    pub path: String,
    /// Whether it is read-only.
    pub is_read_only: bool,
}

/// The subvolumes of a mounted volume, ordered by id.
#[must_use]
pub fn subvolumes(mount: &Path) -> Vec<ListedSubvolume> {
    let list = |options: &str| {
        run("btrfs", &["subvolume".as_ref(), "list".as_ref(), options.as_ref(), mount.as_os_str()])
    };
    let id_of = |line: &str| line.split_whitespace().nth(1).and_then(|id| id.parse().ok());
    let read_only: Vec<u64> = list("-r").lines().filter_map(id_of).collect();
    let mut found: Vec<_> = list("-pcguqR")
        .lines()
        .map(|line| {
            // A line is `ID 256 gen 9 cgen 9 parent 5 top level 5 parent_uuid - received_uuid -
            // uuid ... path ...`. Only the path may hold spaces.
            let (fields, path) = line.split_once(" path ").expect("a path in the list");
            let words: Vec<_> = fields.split_whitespace().collect();
            let field = |name: &str| {
                let at = words.iter().position(|word| *word == name).expect("a field");
                words[at + 1].to_owned()
            };
            let number = |name: &str| field(name).parse().expect("a number");
            let id = number("ID");
            ListedSubvolume {
                id,
                parent: number("parent"),
                generation: number("gen"),
                created: number("cgen"),
                uuid: field("uuid"),
                parent_uuid: field("parent_uuid"),
                received_uuid: field("received_uuid"),
                path: path.to_owned(),
                is_read_only: read_only.contains(&id),
            }
        })
        .collect();
    found.sort();
    found
}
