//! Equal names in one directory, and names whose entries disagree.

use std::ops::ControlFlow;
use std::path::Path;

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, file_type, name_hash};
use offshoot_btrfs_format::{ItemType, Key, TreeId, encode};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{Errno, Error, FileId, FileSystem, FileSystemMut, Rename};

use super::{AT, DamageStory, NEW, at, place};

const FS: TreeId = TreeId::FS;

/// Files in the directory `d`, each with its name as its data.
fn two_files(root: &Path) {
    let dir = fill::directory(root, "d");
    for name in ["one", "two", "end"] {
        fill::write(&dir.join(name), name.as_bytes());
    }
    fill::subvolumes::create(&root.join("first"));
    fill::subvolumes::create(&root.join("second"));
    fill::write(&root.join("second/file"), b"in the second one");
}

/// The names of a directory in the order of their indexes.
fn list(fs: &dyn FileSystem, dir: FileId) -> Vec<String> {
    let mut names = Vec::new();
    fs.read_dir(dir, 0, &mut |entry| {
        names.push(entry.name.escape_ascii().to_string());
        ControlFlow::Continue(())
    })
    .expect("it reads");
    names
}

fn read(fs: &dyn FileSystem, file: FileId) -> String {
    let mut bytes = [0; 16];
    let count = fs.read(file, 0, &mut bytes).expect("it reads");
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}

/// An entry that leads to an inode.
fn entry(ino: u64, name: &str) -> Vec<u8> {
    encode::dir_entry(&DirItemEntry {
        location: Key::new(ino, ItemType::INODE_ITEM, 0),
        transid: 1,
        file_type: file_type::REG_FILE,
        name: name.as_bytes(),
        data: &[],
    })
}

/// The directory, and the inodes of its files.
fn inodes(story: &DamageStory) -> [FileId; 3] {
    let fs = story.open();
    ["d", "d/one", "d/two"].map(|path| at(&fs, path))
}

/// Gives the second file the name of the first, in all items. Both names have three letters.
fn make_equal(story: &DamageStory, dir: FileId, two: FileId) {
    let by_hash = |name: &str| Key::new(dir.ino, ItemType::DIR_ITEM, name_hash(name.as_bytes()));
    let mut moved = Vec::new();
    story.edit(FS, by_hash("two"), |items| {
        let at = items.iter().position(|item| item.0 == by_hash("two")).expect("it is there");
        moved = items.remove(at).1;
    });
    let len = moved.len();
    moved[len - 3..].copy_from_slice(b"one");
    story.edit(FS, by_hash("one"), |items| {
        let item = items.iter_mut().find(|item| item.0 == by_hash("one")).expect("it is there");
        item.1.extend_from_slice(&moved);
    });
    // `one`, `two` and `end` have the indexes 2, 3 and 4.
    let index = Key::new(dir.ino, ItemType::DIR_INDEX, 3);
    let name = Key::new(two.ino, ItemType::INODE_REF, dir.ino);
    for key in [index, name] {
        story.edit(FS, key, |items| {
            let item = items.iter_mut().find(|item| item.0 == key).expect("it is there");
            let len = item.1.len();
            item.1[len - 3..].copy_from_slice(b"one");
        });
    }
}

/// Regression: the removal took both entries of the hash item, and the other file could not be
/// found any more.
#[test]
fn removing_one_of_two_equal_names_leaves_the_other() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, two_files);
    let [dir, one, two] = inodes(&story);
    make_equal(&story, dir, two);
    let before = story.check();
    let removed = |mount: &Path| std::fs::remove_file(mount.join("d/one")).expect("it is there");
    let mut kernels = story.kernel_does(removed);
    let fs = story.open();
    assert_eq!(list(&fs, dir), ["one", "one", "end"]);
    assert_eq!(at(&fs, "d/one"), one);
    // No new name and no move takes a name that two files have.
    let taken = |outcome: offshoot_vfs::Result<()>| outcome.expect_err("it is taken").errno();
    assert_eq!(taken(fs.create(place(dir, "one"), &NEW).map(drop)), Errno::EXIST);
    assert_eq!(taken(fs.rename(place(dir, "end"), place(dir, "one"), AT)), Errno::EXIST);
    let exchange = fs.rename_with(place(dir, "end"), place(dir, "one"), Rename::Exchange, AT);
    assert_eq!(taken(exchange), Errno::EXIST);
    fs.unlink(place(dir, "one"), AT).expect("it is there");
    fs.sync().expect("a commit");
    let shown = |fs: &dyn FileSystem| (list(fs, dir), at(fs, "d/one"), read(fs, at(fs, "d/one")));
    let expected = (vec!["one".to_owned(), "end".to_owned()], two, "two".to_owned());
    assert_eq!(shown(&fs), expected);
    drop(fs);
    assert_eq!(shown(&kernels.open()), expected, "the kernel");
    story.assert_no_worse_than(&before);
    assert_eq!(story.check().kinds(), kernels.check().kinds());
    let fs = story.open();
    fs.rename(place(dir, "one"), place(dir, "two"), AT).expect("it is there");
    fs.unlink(place(dir, "two"), AT).expect("it is there");
    assert_eq!(list(&fs, dir), ["end"]);
    fs.sync().expect("a commit");
    drop(fs);
    assert!(story.keys(FS, two.ino).is_empty() && story.keys(FS, one.ino).is_empty());
}

/// One file has the same name twice. It keeps the second one, with its index.
#[test]
fn removing_a_name_that_a_file_has_twice_leaves_it_once() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, two_files);
    let [dir, one, _] = inodes(&story);
    let again = Key::new(dir.ino, ItemType::DIR_INDEX, 9);
    story.edit(FS, Key::new(dir.ino, ItemType::DIR_INDEX, 2), |items| {
        items.push((again, entry(one.ino, "one")));
    });
    let by_hash = Key::new(dir.ino, ItemType::DIR_ITEM, name_hash(b"one"));
    let names = Key::new(one.ino, ItemType::INODE_REF, dir.ino);
    let inode = Key::new(one.ino, ItemType::INODE_ITEM, 0);
    for (key, more) in [(by_hash, entry(one.ino, "one")), (names, encode::inode_ref(9, b"one"))] {
        story.edit(FS, key, |items| {
            let item = items.iter_mut().find(|item| item.0 == key).expect("it is there");
            item.1.extend_from_slice(&more);
        });
    }
    story.edit(FS, inode, |items| {
        let item = items.iter_mut().find(|item| item.0 == inode).expect("it is there");
        item.1[40..44].copy_from_slice(&2_u32.to_le_bytes());
    });
    let before = story.check();
    let fs = story.open();
    fs.unlink(place(dir, "one"), AT).expect("it is there");
    assert_eq!(list(&fs, dir), ["two", "end", "one"]);
    assert_eq!((at(&fs, "d/one"), fs.attr(one).expect("it is there").nlink), (one, 1));
    fs.sync().expect("a commit");
    drop(fs);
    story.assert_no_worse_than(&before);
    let fs = story.open();
    fs.unlink(place(dir, "one"), AT).expect("it is there");
    assert_eq!(list(&fs, dir), ["two", "end"]);
    fs.sync().expect("a commit");
    drop(fs);
    assert!(story.keys(FS, one.ino).is_empty());
    story.assert_no_worse_than(&before);
}

fn is_corrupt(outcome: &offshoot_vfs::Result<()>) -> bool {
    matches!(outcome, Err(Error::Corrupt(_)))
}

/// Regression: we removed the entry at the index that a file names, even when it was the name of
/// another file.
#[test]
fn the_index_of_another_entry_is_not_removed() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, two_files);
    let [dir, one, _] = inodes(&story);
    let names = Key::new(one.ino, ItemType::INODE_REF, dir.ino);
    story.edit(FS, names, |items| {
        let item = items.iter_mut().find(|item| item.0 == names).expect("it is there");
        item.1 = encode::inode_ref(3, b"one");
    });
    let before = story.check();
    let fs = story.open();
    for outcome in [
        fs.unlink(place(dir, "one"), AT),
        fs.rename(place(dir, "one"), place(dir, "new"), AT),
        fs.rename(place(dir, "end"), place(dir, "one"), AT),
        fs.rename_with(place(dir, "end"), place(dir, "one"), Rename::Exchange, AT),
    ] {
        assert!(is_corrupt(&outcome), "{outcome:?}");
    }
    fs.unlink(place(dir, "end"), AT).expect("writing goes on");
    fs.sync().expect("writing goes on");
    assert_eq!(list(&fs, dir), ["one", "two"]);
    drop(fs);
    story.assert_no_worse_than(&before);
}

/// An entry whose hash item and index item lead to different files.
#[test]
fn an_entry_that_leads_to_two_files_is_not_removed() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, two_files);
    let [dir, one, two] = inodes(&story);
    let index = Key::new(dir.ino, ItemType::DIR_INDEX, 2);
    story.edit(FS, index, |items| {
        let item = items.iter_mut().find(|item| item.0 == index).expect("it is there");
        assert_eq!(dir_entries(&item.1).count(), 1);
        item.1 = entry(two.ino, "one");
    });
    let before = story.check();
    let fs = story.open();
    let outcome = fs.unlink(place(dir, "one"), AT);
    assert!(is_corrupt(&outcome), "{outcome:?}");
    fs.sync().expect("writing goes on");
    drop(fs);
    assert!(!story.keys(FS, one.ino).is_empty());
    story.assert_no_worse_than(&before);
}

/// Regression: the root tree gives a subvolume the index of another one. Deleting the subvolume
/// took the name of the other.
#[test]
fn the_place_of_another_subvolume_is_not_removed() {
    let Some(judges) = judges::require() else { return };
    let mut story = DamageStory::new(&judges, two_files);
    let fs = story.open();
    let root = fs.root();
    let [first, second] = ["first", "second"].map(|name| at(&fs, name));
    drop(fs);
    let [here, there] = [first, second].map(|one| Key::new(5, ItemType::ROOT_REF, one.dev));
    story.edit(TreeId::ROOT, here, |items| {
        let find = |key| items.iter().position(|item| item.0 == key).expect("it is there");
        let (here, there) = (find(here), find(there));
        let sequence = items[there].1[8..16].to_vec();
        items[here].1[8..16].copy_from_slice(&sequence);
    });
    let before = story.check();
    let fs = story.open();
    let [gone, moved] = [
        fs.delete_subvolume(place(root, "first"), AT),
        fs.rename(place(root, "first"), place(root, "new"), AT),
    ];
    assert!(is_corrupt(&gone) && is_corrupt(&moved), "{gone:?}, {moved:?}");
    fs.delete_subvolume(place(root, "second"), AT).expect("writing goes on");
    fs.sync().expect("writing goes on");
    assert_eq!(list(&fs, root), ["d", "first"]);
    drop(fs);
    story.assert_no_worse_than(&before);
}

/// A search for the first index, 1, read the leaf with the last names by hash, and a directory of
/// which that one is damaged was not listed.
#[test]
fn a_listing_needs_no_names_by_hash() {
    let Some(judges) = judges::require() else { return };
    let crowd = |root: &Path| {
        let dir = fill::directory(root, "d");
        for number in 0..60 {
            fill::write(&dir.join(format!("file-{number}")), b"data");
        }
    };
    let story = DamageStory::new(&judges, crowd);
    let dir = at(&story.open(), "d");
    let before = list(&story.open(), dir);
    let keys = story.keys(FS, dir.ino);
    let is_index = |key: &&Key| key.item_type == ItemType::DIR_INDEX;
    let first = keys.iter().find(is_index).expect("it has entries");
    let last_name = keys.iter().rfind(|key| key.item_type == ItemType::DIR_ITEM);
    let last_name = last_name.expect("it has entries");
    assert_ne!(
        story.leaf(FS, *first).0,
        story.leaf(FS, *last_name).0,
        "they have leaves of their own"
    );
    story.spoil(FS, *last_name);
    assert_eq!(list(&story.open(), dir), before);
}
