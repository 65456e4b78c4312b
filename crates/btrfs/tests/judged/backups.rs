//! The backup roots in our superblocks, as the tools and the kernel see them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::progs::Progs;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::manifest::manifest;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, Error, FileSystem, FileSystemMut, NewFile, Timestamp};

use crate::common::open;

/// The trees that have backup roots: the name in a dump of a superblock, and the name in a dump of
/// the root tree. The superblock itself names the roots of those without the second name.
const TREES: [(&str, Option<&str>); 6] = [
    ("backup_tree_root", None),
    ("backup_chunk_root", None),
    ("backup_extent_root", Some("EXTENT_TREE")),
    ("backup_fs_root", Some("FS_TREE")),
    ("backup_dev_root", Some("DEV_TREE")),
    ("csum_root", Some("CSUM_TREE")),
];

/// The address, generation and level of a root.
type BackupRoot = (u64, u64, u64);

fn dump(disks: &Disks, what: &[&str]) -> String {
    let image = disks.images()[0].to_str().expect("a plain path");
    run("btrfs", &[&["inspect-internal"], what, &[image]].concat())
}

/// The number behind `name` in a line.
fn number(line: &str, name: &str) -> Option<u64> {
    let mut words = line.split_whitespace().skip_while(|word| word.trim_end_matches(':') != name);
    words.nth(1)?.parse().ok()
}

/// The roots in each of the four backup slots, in the order of [`TREES`].
fn remembered(disks: &Disks) -> Vec<Vec<BackupRoot>> {
    let text = dump(disks, &["dump-super", "-f"]);
    let slots: Vec<_> = text.split("\tbackup ").skip(1).collect();
    let root = |slot: &str, name: &str| {
        let line = slot.lines().find(|line| line.trim().starts_with(name))?;
        Some((number(line, name)?, number(line, "gen")?, number(line, "level")?))
    };
    let roots = |slot: &&str| {
        TREES.iter().map(|(name, _)| root(slot, name).expect("a line for each tree")).collect()
    };
    slots.iter().map(roots).collect()
}

/// The roots as they are now.
fn current(disks: &Disks) -> Vec<BackupRoot> {
    let superblock = dump(disks, &["dump-super"]);
    let field = |name: &str| {
        let line = superblock.lines().find(|line| line.split_whitespace().next() == Some(name));
        number(line.expect("a field"), name).expect("a number")
    };
    let trees = dump(disks, &["dump-tree", "-t", "root"]);
    let stored = |name: &str| {
        let key = format!("key ({name} ROOT_ITEM 0)");
        let item = trees.split("\titem ").find(|item| item.contains(&key)).expect("a root item");
        let of = |name| number(item, name).expect("a number");
        (of("bytenr"), of("generation"), of("level"))
    };
    let named = |(name, item): &(&str, Option<&str>)| match (item, *name) {
        (Some(item), _) => stored(item),
        (None, "backup_tree_root") => (field("root"), field("generation"), field("root_level")),
        (None, _) => {
            (field("chunk_root"), field("chunk_root_generation"), field("chunk_root_level"))
        }
    };
    TREES.iter().map(named).collect()
}

/// Makes a commit with one more file.
fn commit(disks: &Disks, number: usize) {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    let at = Timestamp { secs: 1_600_000_000, nanos: 0 };
    let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at };
    let name = format!("commit-{number}");
    let file =
        fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &new).expect("a file");
    fs.write(file, 0, &vec![7; 100_000], at).expect("there is room");
    fs.sync().expect("a commit");
}

/// What the kernel shows with these options.
fn shown(disks: &Disks, options: &str) -> String {
    let mount = disks.mount(options);
    let host = HostFilesystem::new(mount.path()).expect("the mount opens");
    manifest(&host).expect("everything is read")
}

/// The backup slots hold the last four commits, each in the slot behind the one of the commit
/// before. When the newest roots cannot be read, the kernel goes back to the commit before, and
/// finds all of it.
#[test]
fn the_kernel_goes_back_to_the_commit_before() {
    let Some(judges) = judges::require() else { return };
    for mkfs in ["", "-n 4k -m single", "-O ^block-group-tree,^free-space-tree"] {
        let little = |root: &Path| fill::data::plain_files(&fill::directory(root, "data"));
        let disks = Recipe::new().mkfs(mkfs).fill(little).make(&judges);
        let mut commits = BTreeMap::new();
        let mut newest = None;
        let mut before = String::new();
        for round in 0..7 {
            before = shown(&disks, "ro,noatime");
            commit(&disks, round);
            let roots = current(&disks);
            let slots = remembered(&disks);
            assert_eq!(slots.len(), 4, "slots of {mkfs}");
            let slot = slots.iter().position(|slot| *slot == roots);
            let slot = slot.unwrap_or_else(|| panic!("{roots:?} is in none of {slots:?}"));
            if let Some(newest) = newest.replace(slot) {
                assert_eq!(slot, (newest + 1) % 4, "the oldest gives way");
            }
            commits.insert(roots[0].1, roots);
            let last: Vec<_> = commits.values().rev().take(4).collect();
            assert!(last.iter().all(|roots| slots.contains(roots)), "{last:?} in {slots:?}");
        }
        let after = shown(&disks, "ro,noatime");
        assert!(after.contains("commit-6") && !before.contains("commit-6"), "{mkfs}");
        let root = current(&disks)[0].0;
        let places = Progs::of(&disks).places(root, 4096);
        for place in places {
            let image = File::options().write(true).open(&disks.images()[place.member]);
            image.and_then(|file| file.write_all_at(&[0x55; 4096], place.physical)).expect("bytes");
        }
        let error = open(disks.devices()).err().expect("the root tree cannot be read");
        assert!(matches!(error, Error::Corrupt(_)), "{error:?}");
        assert!(error.to_string().contains(&root.to_string()), "{error}");
        assert_eq!(shown(&disks, "ro,noatime,rescue=usebackuproot"), before, "{mkfs}");
    }
}
