//! Extents with wrong counts in the extent tree: writing must end before space that is in use is
//! freed.
//!
//! The kernel makes each volume. The test replaces an item of its extent tree, with right
//! checksums, and this engine changes references to the extent. After that the devices must be
//! unchanged, and the engine must show the same files as the kernel.

use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs_format::block::BlockHeader;
use offshoot_btrfs_format::edit::{ITEM_SIZE, data_mut};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::compare;
use offshoot_testkit::run::{command, run};
use offshoot_vfs::{EntryPlace, Error, FileSystem, FileSystemMut, NewFile, Result, Timestamp};

use super::{EXTENT_FLAG_DATA, EXTENT_FLAG_TREE_BLOCK, ExtentRecord, RefOwner};
use crate::test_volumes::{edit, patch_leaf};
use crate::{BtrfsVolume, EngineOptions, Filesystem, Mechanisms, VolumeReport};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
/// The first subvolume that is made in a volume.
const SNAPSHOT: TreeId = TreeId(256);
/// Files at the top level that a snapshot has too.
const FILES: usize = 600;
/// The fewest files that a comparison must have seen.
const AT_LEAST: u64 = 3;
const SECTOR: u64 = 4096;

/// Many small files, and a snapshot of them.
fn shared(root: &Path) {
    for number in 0..FILES {
        fill::write(&root.join(format!("file-{number}")), format!("{number}").as_bytes());
    }
    fill::sync(root);
    fill::subvolumes::snapshot(root, &root.join("snapshot"), false);
    fill::sync(root);
}

/// A file of 256 KiB and its clone; files that may be written in-place, with a clone and without;
/// and one file whose extent is not shared.
fn cloned(root: &Path) {
    let made = |name: &str, in_place: bool, byte: u8| {
        let path = root.join(name);
        std::fs::File::create(&path).expect("a file");
        if in_place {
            run("chattr", &["+C".as_ref(), path.as_os_str()]);
        }
        fill::write(&path, &vec![byte; 256 << 10]);
        fill::sync(root);
        path
    };
    let clone = |from: &Path, name: &str, in_place: bool| {
        let to = root.join(name);
        std::fs::File::create(&to).expect("a file");
        if in_place {
            run("chattr", &["+C".as_ref(), to.as_os_str()]);
        }
        run("cp", &["--reflink=always".as_ref(), from.as_os_str(), to.as_os_str()]);
    };
    clone(&made("one", false, 1), "other", false);
    clone(&made("in-place", true, 2), "in-place-other", true);
    made("alone", false, 3);
    fill::sync(root);
}

fn open_with(disks: &Disks, options: EngineOptions) -> Filesystem {
    // The commit looks up few extents too before it stops writers.
    let mechanisms = Mechanisms::default().plans_from(1);
    let options = EngineOptions { commit_interval: None, mechanisms, ..options };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("it has a top level")
}

fn open(disks: &Disks) -> Filesystem {
    open_with(disks, EngineOptions::default())
}

fn top<'n>(fs: &Filesystem, name: &'n str) -> EntryPlace<'n> {
    EntryPlace { dir: fs.root(), name: name.as_bytes() }
}

/// All extents for which `has` is true.
fn extents(volume: &BtrfsVolume, has: impl Fn(&ExtentRecord) -> bool) -> Vec<ExtentRecord> {
    let mut found = Vec::new();
    let first = Key::new(0, ItemType::EXTENT_ITEM, 0);
    let mut cursor = volume.cursor(volume.tree(TreeId::EXTENT).unwrap(), first).unwrap();
    while let Some((key, data)) = cursor.item() {
        if matches!(key.item_type, ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM) {
            let record = ExtentRecord::parse(key, data).unwrap();
            found.extend(has(&record).then_some(record));
        }
        cursor.advance().unwrap();
    }
    found
}

/// Changes the item of an extent.
fn damage(disks: &Disks, mut record: ExtentRecord, change: impl FnOnce(&mut ExtentRecord)) {
    let key = record.key;
    change(&mut record);
    let mut edits = vec![(record.key, Some(record.encode()))];
    if record.key != key {
        edits.push((key, None));
    }
    edit(disks, TreeId::EXTENT, &edits);
}

/// Sets the count of an item of the extent tree, whatever it names.
fn count_otherwise(disks: &Disks, key: Key, refs: u64) {
    patch_leaf(disks, TreeId::EXTENT, key, |leaf, slot| {
        data_mut(leaf, slot)[..8].copy_from_slice(&refs.to_le_bytes());
    });
}

/// The complaints of `btrfs check`.
fn complaints(disks: &Disks) -> Vec<String> {
    let attached = AttachedImages::new(disks.images());
    let output = command("btrfs")
        .args(["check", "--readonly", attached.devices()[0]])
        .output()
        .expect("btrfs check runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.lines().filter(|line| !line.starts_with('[')).map(ToOwned::to_owned).collect()
}

/// `btrfs check` has no more complaints than `before`. It does not check the last checksums. These
/// change when others are added.
#[track_caller]
fn no_more_than(before: &[String], disks: &Disks) {
    let mut now = complaints(disks);
    now.retain(|line| !line.contains("csum"));
    assert!(!before.is_empty() && now.len() <= before.len(), "{before:#?}\n{now:#?}");
}

/// `change` ends all writing because of the extent at `at`, and the devices stay as they are.
#[track_caller]
fn stops(
    judges: &Judges,
    disks: &Disks,
    at: Logical,
    fs: &Filesystem,
    change: impl FnOnce(&Filesystem) -> Result<()>,
) {
    let before = disks.copy(judges);
    let error = change(fs).and_then(|()| fs.sync()).expect_err("the extent is counted wrong");
    let said = error.to_string();
    println!("{said}");
    assert!(matches!(error, Error::Corrupt(_)), "{said}");
    assert!(said.contains(&at.0.to_string()), "{said} does not name {at}");
    let after = fs.create(top(fs, "after"), &NEW).expect_err("nothing is written any more");
    assert!(after.to_string().contains(&format!("{}", at.0)), "{after}");
    for (image, copy) in disks.images().iter().zip(before.images()) {
        run("cmp", &[image, copy]);
    }
}

/// The engine shows the same files as the kernel.
#[track_caller]
fn is_still_there(disks: &Disks, at_least: u64) {
    let mount = disks.mount("ro,noatime");
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it is read");
    let fs = volume.filesystem(TreeId::FS).expect("it has a top level");
    compare(&fs, mount.path()).assert_same(at_least);
}

/// The leaves of the top level that the snapshot shares, by address.
fn leaves_in_both(volume: &BtrfsVolume) -> Vec<ExtentRecord> {
    let both = [TreeId::FS, SNAPSHOT].map(|root| (RefOwner::Tree { root }, 1));
    let is_it = |one: &ExtentRecord| {
        let is_block = one.flags & EXTENT_FLAG_TREE_BLOCK != 0;
        is_block && one.refs == 2 && both.iter().all(|owner| one.inline.contains(owner))
    };
    extents(volume, is_it)
}

/// A leaf with files of the top level that the snapshot shares.
fn shared_leaf(volume: &BtrfsVolume) -> ExtentRecord {
    // The first leaf has the root directory, which changes with every file.
    leaves_in_both(volume).pop().expect("leaves are shared")
}

fn remove_files(fs: &Filesystem) -> Result<()> {
    (0..FILES).try_for_each(|number| fs.unlink(top(fs, &format!("file-{number}")), AT))
}

/// Removing all files of the top level must end after `change` was made to the item of a leaf that
/// the snapshot shares.
#[track_caller]
fn a_shared_leaf(judges: &Judges, mkfs: &'static str, change: fn(&mut ExtentRecord)) {
    let disks = Recipe::new().mkfs(mkfs).fill(shared).make(judges);
    let leaf = shared_leaf(open(&disks).volume());
    let at = Logical(leaf.key.objectid);
    damage(&disks, leaf, change);
    let before = complaints(&disks);
    let fs = open(&disks);
    stops(judges, &disks, at, &fs, remove_files);
    drop(fs);
    no_more_than(&before, &disks);
    is_still_there(&disks, 2 * FILES as u64);
}

macro_rules! shared_leaves {
    ($($(#[$doc:meta])* $test:ident: $mkfs:literal, $change:expr;)*) => {
        $(
            $(#[$doc])*
            #[test]
            fn $test() {
                let Some(judges) = judges::require() else { return };
                a_shared_leaf(&judges, $mkfs, $change);
            }
        )*
    };
}

fn forget(record: &mut ExtentRecord, root: TreeId) {
    record.inline.retain(|(owner, _)| *owner != RefOwner::Tree { root });
    record.refs = 1;
}

shared_leaves! {
    /// Before the mend, the last reference was removed, and with it the leaf, which the snapshot
    /// needed too.
    a_shared_leaf_that_counts_the_snapshot_alone: "", |leaf| forget(leaf, TreeId::FS);
    a_shared_leaf_without_skinny_items: "-O ^skinny-metadata", |leaf| forget(leaf, TreeId::FS);
    a_shared_leaf_that_counts_three_and_names_two: "", |leaf| leaf.refs = 3;
    a_shared_leaf_that_names_another_tree: "", |leaf| {
        let snapshot = RefOwner::Tree { root: SNAPSHOT };
        leaf.inline = vec![(RefOwner::Tree { root: TreeId(300) }, 1), (snapshot, 1)];
    };
    a_shared_leaf_that_names_another_parent: "", |leaf| {
        leaf.refs = 1;
        leaf.inline = vec![(RefOwner::Block { parent: Logical(30 << 20) }, 1)];
    };
    a_shared_leaf_of_another_level: "", |leaf| leaf.key.offset = 1;
    a_shared_leaf_that_is_data: "", |leaf| {
        leaf.flags = EXTENT_FLAG_DATA;
        leaf.key = Key::new(leaf.key.objectid, ItemType::EXTENT_ITEM, 16384);
        leaf.inline = vec![(RefOwner::File { root: TreeId::FS, ino: 300, offset: 0 }, 2)];
    };
}

/// The root item says that there never was a snapshot. Before the mend, shared leaves counted as
/// the tree's own, and their children were counted once too little.
#[test]
fn a_root_that_forgot_its_last_snapshot() {
    /// Where `last_snapshot` stands in a root item.
    const LAST_SNAPSHOT: std::ops::Range<usize> = 200..208;
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(shared).make(&judges);
    let lowest = leaves_in_both(open(&disks).volume())[0].key.objectid;
    let root = Key::new(TreeId::FS.0, ItemType::ROOT_ITEM, 0);
    patch_leaf(&disks, TreeId::ROOT, root, |leaf, slot| {
        let field = &mut data_mut(leaf, slot)[LAST_SNAPSHOT];
        assert_ne!(field, [0; 8], "a snapshot was made");
        field.fill(0);
    });
    let fs = open(&disks);
    stops(&judges, &disks, Logical(lowest), &fs, remove_files);
    drop(fs);
    is_still_there(&disks, 2 * FILES as u64);
}

/// The engine does not write a volume with an item that contradicts itself, and the error names the
/// extent.
#[track_caller]
fn is_refused(judges: &Judges, disks: &Disks, at: Logical, work: fn(&Filesystem) -> Result<()>) {
    let before = disks.copy(judges);
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let opened = BtrfsVolume::open_writable(disks.writable_devices(), &options);
    let outcome = opened.and_then(|volume| volume.filesystem(TreeId::FS)).and_then(|fs| {
        work(&fs)?;
        fs.sync()
    });
    let error = outcome.expect_err("the item contradicts itself");
    let said = error.to_string();
    println!("{said}");
    assert!(matches!(error, Error::Corrupt(_)) && said.contains(&at.0.to_string()), "{said}");
    for (image, copy) in disks.images().iter().zip(before.images()) {
        run("cmp", &[image, copy]);
    }
}

#[test]
fn a_shared_leaf_that_counts_fewer_than_it_names() {
    let Some(judges) = judges::require() else { return };
    for refs in [0, 1] {
        let disks = Recipe::new().fill(shared).make(&judges);
        let leaf = shared_leaf(open(&disks).volume()).key;
        count_otherwise(&disks, leaf, refs);
        is_refused(&judges, &disks, Logical(leaf.objectid), remove_files);
    }
}

#[test]
fn a_shared_leaf_that_has_no_item() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(shared).make(&judges);
    let leaf = shared_leaf(open(&disks).volume());
    edit(&disks, TreeId::EXTENT, &[(leaf.key, None)]);
    let fs = open(&disks);
    stops(&judges, &disks, Logical(leaf.key.objectid), &fs, remove_files);
    drop(fs);
    is_still_there(&disks, 2 * FILES as u64);
}

/// The walk through a deleted snapshot reaches a leaf that counts only the top level.
#[test]
fn a_leaf_of_a_deleted_snapshot_that_counts_the_top_level_alone() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(shared).make(&judges);
    let leaf = shared_leaf(open(&disks).volume());
    let at = Logical(leaf.key.objectid);
    damage(&disks, leaf, |leaf| forget(leaf, SNAPSHOT));
    let fs = open(&disks);
    fs.delete_subvolume(top(&fs, "snapshot"), AT).unwrap();
    fs.sync().unwrap();
    let before = complaints(&disks);
    stops(&judges, &disks, at, &fs, |fs| fs.volume().drop_deleted());
    drop(fs);
    no_more_than(&before, &disks);
    is_still_there(&disks, FILES as u64);
}

/// The extent of a file, with its record.
fn extent_of(fs: &Filesystem, name: &str) -> ExtentRecord {
    let file = fs.lookup(fs.root(), name.as_bytes()).unwrap();
    let is_its = |(owner, _): &(RefOwner, u32)| match owner {
        RefOwner::File { ino, .. } => *ino == file.ino,
        _ => false,
    };
    extents(fs.volume(), |one| one.inline.iter().any(is_its)).pop().expect("it has an extent")
}

/// `work` must end after `change` was made to the item of the extent of the file `name`.
#[track_caller]
fn a_data_extent(
    judges: &Judges,
    name: &str,
    change: impl FnOnce(&mut ExtentRecord),
    work: impl FnOnce(&Filesystem) -> Result<()>,
) {
    let disks = Recipe::new().fill(cloned).make(judges);
    let extent = extent_of(&open(&disks), name);
    let at = Logical(extent.key.objectid);
    damage(&disks, extent, change);
    let before = complaints(&disks);
    let fs = open(&disks);
    stops(judges, &disks, at, &fs, work);
    drop(fs);
    no_more_than(&before, &disks);
    is_still_there(&disks, AT_LEAST);
}

/// Keeps only the reference of the first of two inodes, the one that was made first.
fn forget_the_clone(extent: &mut ExtentRecord) {
    let ino = |owner: &RefOwner| match owner {
        RefOwner::File { ino, .. } => *ino,
        _ => u64::MAX,
    };
    let first = extent.inline.iter().map(|(owner, _)| ino(owner)).min();
    extent.inline.retain(|(owner, _)| Some(ino(owner)) == first);
    extent.refs = 1;
}

fn unlink(fs: &Filesystem, name: &str) -> Result<()> {
    fs.unlink(top(fs, name), AT)
}

/// Before the mend, the last reference was removed, and with it the data of the other file.
#[test]
fn a_clone_that_is_not_counted() {
    let Some(judges) = judges::require() else { return };
    a_data_extent(&judges, "one", forget_the_clone, |fs| unlink(fs, "other"));
}

#[test]
fn a_clone_and_its_source_that_are_counted_once() {
    let Some(judges) = judges::require() else { return };
    a_data_extent(&judges, "one", forget_the_clone, |fs| {
        unlink(fs, "other").and_then(|()| unlink(fs, "one"))
    });
}

#[test]
fn an_extent_that_counts_one_more_than_it_names() {
    let Some(judges) = judges::require() else { return };
    a_data_extent(&judges, "alone", |one| one.refs = 2, |fs| unlink(fs, "alone"));
}

/// Before the mend, half of the extent became free, and the other half belonged to no file.
#[test]
fn an_extent_of_another_length() {
    let Some(judges) = judges::require() else { return };
    for len in [128 << 10, 512 << 10] {
        a_data_extent(&judges, "alone", |one| one.key.offset = len, |fs| unlink(fs, "alone"));
    }
}

#[test]
fn data_that_is_a_tree_block() {
    let Some(judges) = judges::require() else { return };
    let change = |one: &mut ExtentRecord| {
        one.flags = EXTENT_FLAG_TREE_BLOCK;
        one.key = Key::new(one.key.objectid, ItemType::METADATA_ITEM, 0);
        one.inline = vec![(RefOwner::Tree { root: TreeId::FS }, 1)];
    };
    a_data_extent(&judges, "alone", change, |fs| unlink(fs, "alone"));
}

#[test]
fn an_extent_that_names_another_file() {
    let Some(judges) = judges::require() else { return };
    let change = |one: &mut ExtentRecord| {
        one.inline = vec![(RefOwner::File { root: TreeId::FS, ino: 4000, offset: 0 }, 1)];
    };
    a_data_extent(&judges, "alone", change, |fs| unlink(fs, "alone"));
}

/// Before the mend, the extent was freed with the first of two files. And an extent that counts as
/// exclusive is written in-place, which would change the clone too.
#[test]
fn a_cloned_extent_that_counts_one_and_names_two() {
    let Some(judges) = judges::require() else { return };
    let write = |fs: &Filesystem| {
        let file = fs.lookup(fs.root(), b"in-place")?;
        fs.write(file, SECTOR, &[9; 4096], AT).map(drop)
    };
    let remove = |fs: &Filesystem| unlink(fs, "in-place");
    for work in [write as fn(&Filesystem) -> Result<()>, remove] {
        let disks = Recipe::new().fill(cloned).make(&judges);
        let extent = extent_of(&open(&disks), "in-place").key;
        count_otherwise(&disks, extent, 1);
        is_refused(&judges, &disks, Logical(extent.objectid), work);
    }
}

/// A keyed reference behind an item that does not count it.
#[test]
fn a_reference_in_an_item_of_its_own_that_is_not_counted() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(cloned).make(&judges);
    let mut extent = extent_of(&open(&disks), "one");
    let at = extent.key.objectid;
    let (clone, count) = *extent
        .inline
        .iter()
        .max_by_key(|(owner, _)| match owner {
            RefOwner::File { ino, .. } => *ino,
            _ => 0,
        })
        .expect("it has two");
    forget_the_clone(&mut extent);
    let mut data = Vec::new();
    clone.encode(count, false, &mut data);
    let keyed = Key::new(at, clone.item_type(), clone.sequence());
    edit(&disks, TreeId::EXTENT, &[(extent.key, Some(extent.encode())), (keyed, Some(data))]);
    for name in ["one", "other"] {
        let fs = open(&disks);
        stops(&judges, &disks, Logical(at), &fs, |fs| unlink(fs, name));
        drop(fs);
        is_still_there(&disks, AT_LEAST);
    }
}

/// An extent that overlaps the next one: freeing one would free a part of the other.
#[test]
fn extents_that_overlap() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(cloned).make(&judges);
    let fs = open(&disks);
    let (first, second) = (extent_of(&fs, "in-place").key, extent_of(&fs, "alone").key);
    drop(fs);
    assert_eq!(first.objectid + first.offset, second.objectid, "they are side by side");
    patch_leaf(&disks, TreeId::EXTENT, first, |leaf, slot| {
        let at = size_of::<BlockHeader>() + slot * ITEM_SIZE;
        let longer = first.offset + SECTOR;
        leaf[at + 9..at + 17].copy_from_slice(&longer.to_le_bytes());
    });
    is_refused(&judges, &disks, Logical(second.objectid), |fs| unlink(fs, "alone"));
}

/// An extent that only the extent tree knows lies in a free range: a new extent must not overlap
/// it.
#[test]
fn a_new_extent_where_one_is() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(cloned).make(&judges);
    let fs = open(&disks);
    let mut extent = extent_of(&fs, "alone");
    drop(fs);
    // The first new file goes behind the last written one.
    extent.key.objectid += extent.key.offset;
    let at = extent.key.objectid;
    extent.key.offset = 400 << 20;
    let group = open(&disks).volume().live().unwrap().space.group_of(Logical(at)).unwrap().end();
    extent.key.offset = extent.key.offset.min(group - at);
    edit(&disks, TreeId::EXTENT, &[(extent.key, Some(extent.encode()))]);
    let fs = open(&disks);
    let error = write_new(&fs, 1 << 20).expect_err("the place is taken");
    let said = error.to_string();
    assert!(matches!(error, Error::Corrupt(_)) && said.contains("overlaps"), "{said}");
    drop(fs);
    is_still_there(&disks, AT_LEAST);
}

/// Writes a file of this size, with a commit.
fn write_new(fs: &Filesystem, len: usize) -> Result<()> {
    let file = fs.create(top(fs, "new"), &NEW)?;
    let piece = vec![7; 1 << 20];
    for at in (0..len).step_by(piece.len()) {
        fs.write(file, at as u64, &piece, AT)?;
    }
    fs.sync()
}

/// A volume, and the reports about free space.
fn open_watched(disks: &Disks) -> (Filesystem, Arc<parking_lot::Mutex<Vec<String>>>) {
    let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let telling = told.clone();
    let reporter = Arc::new(move |report: &VolumeReport| {
        if let VolumeReport::WrongFreeSpace { .. } = report {
            telling.lock().push(report.to_string());
        }
    });
    (open_with(disks, EngineOptions { reporter: Some(reporter), ..EngineOptions::default() }), told)
}

/// The free-space tree shows the place of a file as free. Before the mend, the next file got it.
#[test]
fn space_that_is_shown_as_free_and_is_not() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(cloned).make(&judges);
    let fs = open(&disks);
    let extent = extent_of(&fs, "alone").key;
    let behind = Key::new(extent.objectid + extent.offset, ItemType::FREE_SPACE_EXTENT, 0);
    let root = fs.volume().tree(TreeId::FREE_SPACE).unwrap();
    let free = fs.volume().cursor(root, behind).unwrap().item().unwrap().0;
    drop(fs);
    assert_eq!((free.objectid, free.item_type), (behind.objectid, behind.item_type));
    let wider = Key::new(extent.objectid, free.item_type, free.offset + extent.offset);
    edit(&disks, TreeId::FREE_SPACE, &[(free, None), (wider, Some(Vec::new()))]);
    let before = complaints(&disks);
    let (fs, told) = open_watched(&disks);
    write_new(&fs, 4 << 20).unwrap();
    let said = told.lock().join("\n");
    assert!(said.contains("shown") || said.contains("free-space tree"), "{said}");
    drop(fs);
    no_more_than(&before, &disks);
    is_still_there(&disks, AT_LEAST);
    let mount = disks.mount("ro,noatime");
    assert_eq!(std::fs::read(mount.path().join("alone")).unwrap(), vec![3; 256 << 10]);
}

/// Without a free-space tree, all space outside extents counts as free. Here the item of an extent
/// is missing.
#[test]
fn space_of_an_extent_without_an_item() {
    let Some(judges) = judges::require() else { return };
    let mkfs = "-O ^free-space-tree,^block-group-tree";
    let disks = Recipe::new().mkfs(mkfs).fill(cloned).make(&judges);
    let extent = extent_of(&open(&disks), "alone").key;
    edit(&disks, TreeId::EXTENT, &[(extent, None)]);
    let before = complaints(&disks);
    let (fs, told) = open_watched(&disks);
    write_new(&fs, 4 << 20).unwrap();
    let said = told.lock().join("\n");
    assert!(said.contains("its extents have"), "{said}");
    drop(fs);
    no_more_than(&before, &disks);
    let mount = disks.mount("ro,noatime");
    assert_eq!(std::fs::read(mount.path().join("alone")).unwrap(), vec![3; 256 << 10]);
}
