//! What removed files and subvolumes leave: items of unknown types, and damage that no operation
//! touches.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, VolumeReport};
use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{Error, FileId, FileSystem, FileSystemMut};

use super::{AT, DamageStory, NEW, at, place};
use crate::devices;

/// Types of items that we do not know, or that no call here makes. Some are lower and some higher
/// than all types that an inode has.
const TYPES: [u8; 6] = [2, 11, 36, 37, 99, 254];

fn a_few(root: &Path) {
    for number in 0..40 {
        fill::write(&root.join(format!("file-{number}")), b"data");
    }
    std::fs::create_dir(root.join("directory")).expect("there is room");
}

/// Regression: items with types below those of names stayed when their inode was removed.
#[test]
fn items_of_unknown_types_go_with_their_inode() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, a_few);
    let names = ["file-1", "file-2", "directory"];
    let inodes = {
        let fs = story.open();
        names.map(|name| at(&fs, name))
    };
    for (inode, count) in inodes.into_iter().zip([1, 5, 1]) {
        let key = Key::new(inode.ino, ItemType::INODE_ITEM, 0);
        story.edit(TreeId::FS, key, |items| {
            let new =
                |item_type, offset| (Key::new(inode.ino, ItemType(item_type), offset), vec![]);
            let all = TYPES
                .into_iter()
                .flat_map(|item_type| (7..7 + count).map(move |offset| new(item_type, offset)));
            items.extend(all);
        });
    }
    let kernels = story.kernel_does(move |mount| {
        for name in names {
            let path = mount.join(name);
            if path.is_dir() { std::fs::remove_dir(path) } else { std::fs::remove_file(path) }
                .expect("it is there");
        }
    });
    let before = story.check();
    let fs = story.open();
    let root = fs.root();
    fs.unlink(place(root, "file-1"), AT).expect("it is there");
    fs.open(inodes[1]).expect("it is there");
    fs.unlink(place(root, "file-2"), AT).expect("it is there");
    fs.release(inodes[1]).expect("it was open");
    fs.rmdir(place(root, "directory"), AT).expect("it is empty");
    fs.sync().expect("a commit");
    drop(fs);
    for inode in inodes {
        assert_eq!(story.keys(TreeId::FS, inode.ino), [], "ours");
        assert_eq!(kernels.keys(TreeId::FS, inode.ino), [], "the kernel");
    }
    story.assert_no_worse_than(&before);
}

/// Subvolumes of a few leaves.
fn subvolumes(root: &Path) {
    for name in ["first", "second", "third", "fourth"] {
        let dir = root.join(name);
        fill::subvolumes::create(&dir);
        for number in 0..40 {
            fill::write(&dir.join(format!("file-{number}")), &[b'x'; 300]);
        }
    }
}

/// Makes files of a few hundred bytes, which fill a few leaves.
fn make_files(fs: &Filesystem, dir: &str, prefix: &str) {
    for number in 0..40 {
        let name = format!("{prefix}-{number}");
        let file = fs.create(place(at(fs, dir), &name), &NEW).expect("there is room");
        fs.write(file, 0, &[8; 300], AT).expect("there is room");
    }
}

/// Leaves two files without names in each of these subvolumes. They are far from each other and
/// from the end of the tree.
fn leave_files(fs: &Filesystem, names: &[&str]) {
    for name in names {
        for prefix in ["between", "behind"] {
            let file = fs.create_unnamed(at(fs, name), false, &NEW).expect("there is room");
            fs.write(file, 0, &[7; 300], AT).expect("there is room");
            make_files(fs, name, prefix);
        }
    }
    fs.sync().expect("a commit");
}

type ReportList = Arc<Mutex<Vec<VolumeReport>>>;

fn collected() -> (ReportList, offshoot_btrfs::Reporter) {
    let reports = ReportList::default();
    let to = reports.clone();
    let reporter = Arc::new(move |report: &VolumeReport| {
        to.lock().expect("nothing panics").push(report.clone());
    });
    (reports, reporter)
}

/// The key of the first orphan item in a subvolume.
fn first_orphan(story: &DamageStory, tree: TreeId) -> Key {
    let keys = story.keys(tree, objectid::ORPHAN);
    *keys.first().expect("there is one")
}

/// Orphans that a crash left in a damaged subvolume stay, and we report them. The orphans of all
/// other subvolumes are removed, and writing goes on.
#[test]
fn the_sweep_goes_on_past_a_damaged_subvolume() {
    let Some(judges) = judges::require() else { return };
    let names = ["first", "second", "third"];
    let mut story = DamageStory::of(&judges, subvolumes, |fs| leave_files(fs, &names));
    let trees = {
        let fs = story.open();
        names.map(|name| TreeId(at(&fs, name).dev))
    };
    // In the first subvolume, the inode of one orphan is in a leaf that cannot be read. In the
    // second one, the leaf with both orphan items cannot be read.
    let orphan = first_orphan(&story, trees[0]);
    story.spoil(trees[0], Key::new(orphan.offset, ItemType::INODE_ITEM, 0));
    story.spoil(trees[1], first_orphan(&story, trees[1]));
    let before = story.check();
    let (reports, reporter) = collected();
    let fs = story.open_with(Some(reporter), Some(Duration::from_secs(30)));
    let end = Instant::now() + Duration::from_secs(60);
    while fs.volume().stats().orphans_removed < 3 || reports.lock().expect("a list").len() < 2 {
        assert!(Instant::now() < end, "the sweep does not go on: {:?}", reports.lock());
        std::thread::sleep(Duration::from_millis(5));
    }
    fs.create(place(fs.root(), "new"), &NEW).expect("writing goes on");
    fs.sync().expect("writing goes on");
    drop(fs);
    assert_eq!(story.keys(trees[0], objectid::ORPHAN), [orphan], "of the first the sound one went");
    assert_eq!(story.keys(trees[2], objectid::ORPHAN), [], "of the sound one");
    let reports = reports.lock().expect("a list");
    let is_expected = |report: &VolumeReport| matches!(report, VolumeReport::SweepFailed { .. });
    assert!(reports.iter().all(is_expected), "{reports:?}");
    story.assert_no_worse_than(&before);
}

/// Regression: we refused to open a subvolume for writing because an orphan in it could not be
/// removed.
#[test]
fn a_subvolume_with_a_damaged_file_without_a_name_opens() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::of(&judges, subvolumes, |fs| leave_files(fs, &["first"]));
    let (tree, root) = {
        let fs = story.open();
        (TreeId(at(&fs, "first").dev), at(&fs, "first"))
    };
    let orphan = first_orphan(&story, tree);
    let inode = Key::new(orphan.offset, ItemType::INODE_ITEM, 0);
    story.spoil(tree, inode);
    let before = story.check();
    let (reports, reporter) = collected();
    let fs = story.open_with(Some(reporter), None);
    fs.unlink(place(root, "file-1"), AT).expect("it is there");
    let first = fs.volume().filesystem(tree).expect("it opens");
    first.create(place(first.root(), "new"), &NEW).expect("there is room");
    drop(first);
    fs.sync().expect("a commit");
    drop(fs);
    let reports = reports.lock().expect("a list");
    assert!(!reports.is_empty(), "nothing is told");
    story.assert_no_worse_than(&before);
}

/// Regression: one deleted subvolume that could not be dropped kept the others from being dropped.
#[test]
fn dropping_goes_on_past_a_damaged_subvolume() {
    let Some(judges) = judges::require() else { return };
    let names = ["second", "third", "fourth"];
    let mut trees = vec![];
    let mut story = DamageStory::of(&judges, subvolumes, |fs| {
        trees.extend(names.map(|name| TreeId(at(fs, name).dev)));
        for name in names {
            fs.delete_subvolume(place(fs.root(), name), AT).expect("it goes");
        }
        fs.sync().expect("a commit");
    });
    let entry = Key::new(256, ItemType::DIR_ITEM, name_hash(b"file-20"));
    story.spoil(trees[0], entry);
    let before = story.check();
    let fs = story.open();
    let outcome = fs.volume().drop_deleted();
    assert!(matches!(outcome, Err(Error::Corrupt(_))), "{outcome:?}");
    fs.create(place(fs.root(), "new"), &NEW).expect("writing goes on");
    fs.sync().expect("writing goes on");
    drop(fs);
    let left = |tree: TreeId| story.keys(TreeId::ROOT, tree.0);
    assert!(left(trees[1]).is_empty() && left(trees[2]).is_empty(), "the sound ones");
    assert!(!left(trees[0]).is_empty(), "what is left is known");
    story.assert_no_worse_than(&before);
}

/// Regression: a deleted subvolume was gone except for its orphan item. A new subvolume got its
/// number, and was dropped.
#[test]
fn a_new_subvolume_does_not_get_the_number_of_one_to_be_dropped() {
    let Some(judges) = judges::require() else { return };
    let mut id = TreeId(0);
    let mut story = DamageStory::of(&judges, subvolumes, |fs| {
        id = TreeId(at(fs, "fourth").dev);
        fs.delete_subvolume(place(fs.root(), "fourth"), AT).expect("it goes");
        fs.sync().expect("a commit");
    });
    let key = story.keys(TreeId::ROOT, id.0)[0];
    story.edit(TreeId::ROOT, key, |items| items.retain(|item| item.0 != key));
    let before = story.check();
    let fs = story.open();
    let new = fs.create_subvolume(place(fs.root(), "new"), &NEW).expect("there is room");
    fs.create(place(at(&fs, "new"), "file"), &NEW).expect("there is room");
    fs.sync().expect("a commit");
    fs.volume().drop_deleted().expect("nothing is to be dropped");
    fs.sync().expect("a commit");
    drop(fs);
    let fs = story.open();
    assert_eq!(at(&fs, "new/file").dev, new.0);
    drop(fs);
    story.assert_no_worse_than(&before);
}

/// Regression: a tree had two root items. We changed the tree by one of them, and the other still
/// led to the old blocks.
#[test]
fn a_subvolume_with_two_root_items_is_not_changed() {
    let Some(judges) = judges::require() else { return };
    let mut trees = vec![];
    let mut story = DamageStory::made(&judges, "-n 16384", subvolumes, |fs| {
        trees.extend(["first", "second"].map(|name| TreeId(at(fs, name).dev)));
        fs.delete_subvolume(place(fs.root(), "second"), AT).expect("it goes");
        fs.sync().expect("a commit");
    });
    for tree in &trees {
        let key = Key::new(tree.0, ItemType::ROOT_ITEM, 0);
        story.edit(TreeId::ROOT, key, |items| {
            let item = items.iter().find(|item| item.0 == key).expect("it is there").clone();
            items.push((Key { offset: 7, ..key }, item.1));
        });
    }
    let before = story.check();
    let fs = story.open();
    let is_corrupt = |outcome| matches!(outcome, Err(Error::Corrupt(_)));
    let root = FileId { dev: trees[0].0, ino: 256 };
    assert!(is_corrupt(fs.create(place(root, "new"), &NEW).map(drop)));
    assert!(is_corrupt(fs.delete_subvolume(place(fs.root(), "first"), AT)));
    assert!(is_corrupt(fs.snapshot(trees[0], place(fs.root(), "new"), false, AT).map(drop)));
    assert!(is_corrupt(fs.volume().drop_deleted()));
    fs.unlink(place(at(&fs, "third"), "file-1"), AT).expect("writing goes on");
    fs.sync().expect("writing goes on");
    drop(fs);
    story.assert_no_worse_than(&before);
}

/// Regression: a UUID tree begins with a block of a subvolume. The kernel does not mount such a
/// volume. We wrote it, and freed that block with the subvolume.
#[test]
fn a_uuid_tree_in_a_subvolume_is_not_written() {
    let Some(judges) = judges::require() else { return };
    let mut tree = TreeId::FS;
    let story = DamageStory::made(&judges, "-n 16384", subvolumes, |fs| {
        tree = TreeId(at(fs, "first").dev);
    });
    let item_of = |tree: TreeId| Key::new(tree.0, ItemType::ROOT_ITEM, 0);
    let mut theirs = Vec::new();
    story.edit(TreeId::ROOT, item_of(tree), |items| {
        theirs = items.iter().find(|item| item.0 == item_of(tree)).expect("one").1.clone();
    });
    story.edit(TreeId::ROOT, item_of(TreeId::UUID), |items| {
        let item = items.iter_mut().find(|item| item.0 == item_of(TreeId::UUID)).expect("one");
        item.1 = theirs.clone();
    });
    let opened = BtrfsVolume::open_writable(devices(&story.members), &EngineOptions::default());
    let error = opened.err().expect("it is refused").to_string();
    assert!(error.contains("the root of the UUID tree is a block of tree"), "{error}");
    BtrfsVolume::open(devices(&story.members), &EngineOptions::default()).expect("it is read");
}

/// Regression: root items claimed more bytes than any volume has. The sum of what trees may change
/// overflowed, and the program ended.
#[test]
fn trees_that_claim_more_than_a_volume_has_are_written() {
    const BYTES_USED: std::ops::Range<usize> = 192..200;
    let Some(judges) = judges::require() else { return };
    for claimed in [u64::MAX, u64::MAX / 2, 1 << 63, i64::MAX as u64 - 1] {
        let mut trees = vec![];
        let story = DamageStory::made(&judges, "-n 16384", subvolumes, |fs| {
            trees.extend(["first", "second"].map(|name| TreeId(at(fs, name).dev)));
        });
        for tree in trees.iter().chain(&[TreeId::FS]) {
            let key = Key::new(tree.0, ItemType::ROOT_ITEM, 0);
            story.edit(TreeId::ROOT, key, |items| {
                let item = items.iter_mut().find(|item| item.0 == key).expect("it is there");
                item.1[BYTES_USED].copy_from_slice(&claimed.to_le_bytes());
            });
        }
        let fs = story.open();
        for tree in trees.iter().chain(&[TreeId::FS]) {
            let root = FileId { dev: tree.0, ino: 256 };
            for number in 0..200 {
                let name = format!("new-{number}");
                let file = fs.create(place(root, &name), &NEW).expect("there is room");
                fs.write(file, 0, b"data", AT).expect("there is room");
            }
        }
        fs.delete_subvolume(place(fs.root(), "third"), AT).expect("it goes");
        fs.volume().drop_deleted().expect("there is room");
        fs.sync().expect("a commit");
    }
}
