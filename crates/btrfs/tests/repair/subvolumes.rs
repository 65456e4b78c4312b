//! Damaged links, entries, root items and UUIDs of subvolumes, and what a repair makes of them.
//!
//! ```text
//! 256 a            received, so that both kinds of UUIDs are there
//! 257 a/b          has a file
//! 258 snapshot     of a, with an entry of b and no link
//! ```

use offshoot_btrfs::{BtrfsFindingCode as Code, BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_btrfs_format::block::BlockHeader;
use offshoot_btrfs_format::dir::{DirEntryItem, name_hash};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRefItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut, Timestamp};

use crate::common::{
    DamagedVolume, EditedItems, checked, is, made_by, progs_complaints, show, view,
};
use crate::damaged::spoil_blocks;
use crate::judged::{repair, require_repaired, shown_by_kernel};

const SCRIPT: &str = "\
btrfs subvolume create a; echo a > a/file
btrfs subvolume create a/b; echo b > a/b/file
btrfs subvolume snapshot a snapshot
btrfs subvolume snapshot -r a sent; mkdir received
btrfs send -q sent | btrfs receive -q received";

const A: u64 = 256;
const B: u64 = 257;
const SNAPSHOT: u64 = 258;

/// Removes the items with these keys, which are in the leaf of the first one.
fn remove(volume: &DamagedVolume, tree: u64, keys: &[Key]) {
    let wanted = keys[0];
    volume.edit(
        TreeId(tree),
        |key, _| key == wanted,
        |items, _| {
            items.retain(|(key, _)| !keys.contains(key));
        },
    );
}

/// A damage that a repair takes back: the kernel shows what it showed before.
#[track_caller]
fn require_taken_back(damage: fn(&DamagedVolume), code: Code) {
    let Some(judges) = judges::require() else { return };
    let disks = made_by(&judges, SCRIPT);
    let before = shown_by_kernel(&disks);
    let volume = DamagedVolume::of(disks);
    damage(&volume);
    let found = checked(volume.disks());
    assert!(found.findings.iter().any(|one| one.code == code), "{}", show(&found));
    require_repaired(volume.disks(), &[], &before);
}

macro_rules! taken_back {
    ($($(#[$doc:meta])* $name:ident: $code:ident, $damage:expr;)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            require_taken_back($damage, Code::$code);
        }
    )*};
}

const REF: Key = Key::new(A, ItemType::ROOT_REF, B);
const BACKREF: Key = Key::new(B, ItemType::ROOT_BACKREF, A);

taken_back! {
    a_back_reference_is_made_again: RootReference, |volume| {
        remove(volume, TreeId::ROOT.0, &[BACKREF]);
    };
    a_reference_is_made_again: RootReference, |volume| {
        remove(volume, TreeId::ROOT.0, &[REF]);
    };
    /// The entries say which of two names is right.
    a_reference_with_another_name: RootReference, |volume| {
        volume.edit(TreeId::ROOT, |key, _| key == REF, |items, slot| {
            items[slot].1[size_of::<RootRefItem>()] = b'x';
        });
    };
    a_back_reference_with_another_index: RootReference, |volume| {
        volume.edit(TreeId::ROOT, |key, _| key == BACKREF, |items, slot| {
            view::<RootRefItem>(&mut items[slot].1).sequence = 70.into();
        });
    };
    entries_of_another_subvolume: SubvolumeEntry, |volume| {
        volume.edit(TreeId(A), is(256, ItemType::DIR_INDEX, 3), |items, _| {
            for (key, data) in items.iter_mut() {
                let is_hash = *key == Key::new(256, ItemType::DIR_ITEM, name_hash(b"b"));
                if is_hash || *key == Key::new(256, ItemType::DIR_INDEX, 3) {
                    view::<DirEntryItem>(data).location.objectid = 999.into();
                }
            }
        });
    };
    missing_entries: SubvolumeEntry, |volume| {
        let by_hash = Key::new(256, ItemType::DIR_ITEM, name_hash(b"b"));
        remove(volume, A, &[by_hash, Key::new(256, ItemType::DIR_INDEX, 3)]);
    };
    a_reference_to_a_subvolume_that_is_not_there: RootReference, |volume| {
        volume.edit(TreeId::ROOT, |key, _| key == REF, |items, slot| {
            let stale = (Key { offset: 900, ..items[slot].0 }, items[slot].1.clone());
            items.insert(slot + 1, stale);
        });
    };
    a_default_subvolume_that_is_not_there: SubvolumeEntry, |volume| {
        let wanted = is(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(b"default"));
        volume.edit(TreeId::ROOT, wanted, |items, slot| {
            view::<DirEntryItem>(&mut items[slot].1).location.objectid = 999.into();
        });
    };
    a_missing_directory_of_the_root_tree: MissingTree, |volume| {
        let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::INODE_ITEM, 0);
        remove(volume, TreeId::ROOT.0, &[key]);
    };
    a_root_item_of_another_level: RootItem, |volume| {
        volume.edit(TreeId::ROOT, is(A, ItemType::ROOT_ITEM, 0), |items, slot| {
            view::<RootItem>(&mut items[slot].1).level += 1;
        });
    };
    /// Its own root is still there, and nothing leads to it.
    a_root_block_of_another_subvolume: SharedRoot, |volume| volume.share_root(SNAPSHOT, B);
    a_removal_of_a_subvolume_that_was_not_deleted: DeletedSubvolume, |volume| {
        volume.edit(TreeId::ROOT, is(B, ItemType::ROOT_ITEM, 0), |items, slot| {
            let item = view::<RootItem>(&mut items[slot].1);
            item.drop_progress = Key::new(257, ItemType::INODE_ITEM, 0).into();
        });
    };
    /// It counts as deleted, and has links and entries.
    a_subvolume_that_was_not_deleted: DeletedSubvolume, |volume| {
        volume.edit(TreeId::ROOT, is(B, ItemType::ROOT_ITEM, 0), |items, slot| {
            view::<RootItem>(&mut items[slot].1).refs = 0.into();
        });
    };
    a_uuid_that_is_not_listed: UuidTree, |volume| {
        volume.edit(TreeId::UUID, |key, _| key.item_type == ItemType::UUID_KEY_SUBVOL, drop_item);
    };
    a_received_uuid_of_another_subvolume: UuidTree, |volume| {
        let is_it = |key: Key, _: &[u8]| key.item_type == ItemType::UUID_KEY_RECEIVED_SUBVOL;
        volume.edit(TreeId::UUID, is_it, |items, slot| items[slot].1 = A.to_le_bytes().to_vec());
    };
    a_lost_uuid_tree: TreeBlock, |volume| volume.break_leaf(TreeId::UUID);
}

/// A snapshot has the root block of its source, and its own is lost. The repair gives it a copy,
/// and then the kernel changes and removes either of them without a loss to the other one.
#[test]
fn two_subvolumes_with_one_root_block_are_parted() {
    let Some(judges) = judges::require() else { return };
    let script = "btrfs subvolume create a; for i in $(seq 200); do echo $i > a/$i; done
        btrfs subvolume snapshot a snapshot; echo new > snapshot/new";
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs_and_settle(&["-n", "4k"]);
    let mount = disks.mount("rw,noatime");
    run("sh", &["-ec", &format!("cd '{}'; {script}", mount.path().display())]);
    drop(mount);
    let volume = DamagedVolume::of(disks);
    volume.share_root(257, A);
    let is_own_root = |block: &BlockHeader| (block.level, block.owner()) == (1, TreeId(257));
    spoil_blocks(&volume, is_own_root);
    let disks = volume.disks();
    let outcome = repair(disks, &[]).expect("it is mended");
    assert!(outcome.before.findings.iter().any(|one| one.code == Code::SharedRoot));
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(disks), None);
    let mount = disks.mount("rw,noatime,commit=1");
    let work = "for i in $(seq 1 2 200); do echo other > snapshot/$i; done; sync
        for i in $(seq 2 2 200); do echo changed > a/$i; done; sync
        for i in $(seq 1 2 200); do test $(cat a/$i) = $i; test $(cat snapshot/$i) = other; done
        for i in $(seq 2 2 200); do test $(cat a/$i) = changed; test $(cat snapshot/$i) = $i; done
        btrfs subvolume delete -c a; btrfs subvolume sync .; test $(cat snapshot/2) = 2";
    run("sh", &["-ec", &format!("cd '{}'; {work}", mount.path().display())]);
    drop(mount);
    assert_eq!(progs_complaints(disks), None, "after the kernel changed both");
}

fn drop_item(items: &mut EditedItems, slot: usize) {
    items.remove(slot);
}

/// Nothing leads to a subvolume: it comes to `lost+found`.
#[test]
fn a_subvolume_without_links_is_found_again() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(made_by(&judges, SCRIPT));
    volume.edit(
        TreeId::ROOT,
        |key, _| key == REF,
        |items, _| {
            items.retain(|(key, _)| ![REF, BACKREF].contains(key));
        },
    );
    let outcome = repair(volume.disks(), &[]).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(volume.disks()), None);
    let mount = volume.disks().mount("rw,commit=1");
    let found = std::fs::read(mount.path().join(format!("lost+found/{B}/file")));
    assert_eq!(found.expect("it is there"), b"b\n");
    let path = mount.path().join(format!("lost+found/{B}"));
    run("btrfs", &["subvolume", "delete", &path.display().to_string()]);
    run("btrfs", &["subvolume", "sync", &mount.path().display().to_string()]);
    drop(mount);
    assert_eq!(progs_complaints(volume.disks()), None, "after it was deleted");
}

/// The root item of the tree for data on its way has the contents of that of another tree. The tree
/// becomes empty, and its root item that of a tree with a root directory.
#[test]
fn the_tree_for_data_on_its_way_has_the_root_item_of_another_tree() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(made_by(&judges, SCRIPT));
    let is_root =
        |key: Key, id: TreeId| (key.objectid, key.item_type) == (id.0, ItemType::ROOT_ITEM);
    volume.edit(
        TreeId::ROOT,
        |key, _| is_root(key, TreeId::DATA_RELOC),
        |items, slot| {
            let other = items.iter().find(|(key, _)| is_root(*key, TreeId::DEV));
            items[slot].1 = other.expect("it is in this leaf").1.clone();
        },
    );
    let outcome = repair(volume.disks(), &[]).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(volume.disks()), None);
}

/// A volume with a deleted subvolume, of several levels, of which nothing was given up yet.
fn with_deleted(judges: &Judges) -> DamagedVolume {
    let disks = Disks::create(judges, 1, 256);
    disks.mkfs_and_settle(&["-n", "4k"]);
    let mount = disks.mount("rw,noatime");
    let script = "btrfs subvolume create gone; for i in $(seq 200); do echo $i > gone/$i; done";
    run("sh", &["-ec", &format!("cd '{}'; {script}", mount.path().display())]);
    drop(mount);
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    let place = EntryPlace { dir: fs.root(), name: b"gone" };
    fs.delete_subvolume(place, Timestamp { secs: 1, nanos: 0 }).expect("it is deleted");
    fs.sync().expect("a commit");
    drop((fs, volume));
    DamagedVolume::of(disks)
}

/// Requires that the removal goes on after a repair, and that the kernel ends it.
#[track_caller]
fn require_removed(volume: &DamagedVolume) {
    let disks = volume.disks();
    let outcome = repair(disks, &[]).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(disks), None);
    let mount = disks.mount("rw,commit=1");
    run("btrfs", &["subvolume", "sync", &mount.path().display().to_string()]);
    drop(mount);
    assert_eq!(progs_complaints(disks), None, "after the kernel removed it");
    let left = run("btrfs", &["inspect-internal", "dump-tree", "-r", &image(disks)]);
    assert!(!left.contains(&format!("({A} ROOT_ITEM")), "{left}");
}

/// The path of the only member.
fn image(disks: &Disks) -> String {
    disks.images()[0].display().to_string()
}

#[test]
fn a_deleted_subvolume_is_listed_for_removal() {
    let Some(judges) = judges::require() else { return };
    let volume = with_deleted(&judges);
    remove(&volume, TreeId::ROOT.0, &[Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, A)]);
    require_removed(&volume);
}

#[test]
fn a_removal_that_cannot_go_on_is_ended() {
    let Some(judges) = judges::require() else { return };
    for (ino, level) in [(255, 1), (256, 5)] {
        let volume = with_deleted(&judges);
        volume.edit(TreeId::ROOT, is(A, ItemType::ROOT_ITEM, 0), |items, slot| {
            let item = view::<RootItem>(&mut items[slot].1);
            item.drop_progress = Key::new(ino, ItemType::INODE_ITEM, 0).into();
            item.drop_level = level;
        });
        require_removed(&volume);
    }
}
