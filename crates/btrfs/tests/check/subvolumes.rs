//! Damage to subvolumes: their names, links, UUIDs and removal. And to the log.

use offshoot_btrfs::{
    BtrfsFindingCode, BtrfsFindingPlace, BtrfsVolume, CheckOutcome, EngineOptions, SubvolumeId,
};
use offshoot_btrfs_format::dir::{DirEntryItem, name_hash};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRefItem};
use offshoot_btrfs_format::superblock::{Incompat, SUPERBLOCK_OFFSETS, SuperblockItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut, Timestamp};

use crate::common::{
    DamagedVolume, EditedItems, ProgsVerdict, checked, is, made_by, progs_complaints,
    require_sound, show, view,
};

/// A subvolume `a` (256) with `b` (257) in it, a snapshot `s` of `a` with its entry of `b`, a
/// received subvolume, and one that was deleted.
const SCRIPT: &str = "
    btrfs subvolume create a; btrfs subvolume create a/b; echo data > a/b/file
    btrfs subvolume snapshot a s
    btrfs subvolume snapshot -r a/b sent; mkdir received; btrfs send -q sent | btrfs receive -q received
    btrfs subvolume create c; btrfs subvolume delete -c c
    btrfs subvolume set-default s
";

const A: u64 = 256;
const B: u64 = 257;
const S: u64 = 258;

fn place(tree: TreeId, objectid: u64, item_type: ItemType, offset: u64) -> BtrfsFindingPlace {
    BtrfsFindingPlace::Item { tree, key: Key::new(objectid, item_type, offset) }
}

/// The places of the findings with this code.
fn places_of(outcome: &CheckOutcome, code: BtrfsFindingCode) -> Vec<BtrfsFindingPlace> {
    let found = outcome.findings.iter().filter(|finding| finding.code == code);
    found.map(|finding| finding.place).collect()
}

/// The snapshot has the root block of another subvolume. The kernel would give up what is in it
/// when it writes to one of them.
#[test]
fn a_root_block_of_two_subvolumes() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(made_by(&judges, SCRIPT));
    volume.share_root(S, B);
    let found = checked(volume.disks());
    let expected = [BtrfsFindingPlace::Tree(TreeId(S))];
    assert_eq!(places_of(&found, BtrfsFindingCode::SharedRoot), expected, "{}", show(&found));
    assert!(progs_complaints(volume.disks()).is_some());
}

/// The slot of an item.
#[track_caller]
fn slot_of(items: &EditedItems, objectid: u64, item_type: ItemType, offset: u64) -> usize {
    let key = Key::new(objectid, item_type, offset);
    items.iter().position(|(one, _)| *one == key).expect("it is in the same leaf")
}

#[test]
fn sound_subvolumes() {
    let Some(judges) = judges::require() else { return };
    require_sound(&made_by(&judges, SCRIPT));
}

macro_rules! damaged {
    ($($(#[$doc:meta])* $name:ident: $code:ident $progs:ident at $places:expr, $damage:expr;)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            let Some(judges) = judges::require() else { return };
            let volume = DamagedVolume::of(made_by(&judges, SCRIPT));
            let damage: fn(&DamagedVolume) = $damage;
            damage(&volume);
            let outcome = volume.require(BtrfsFindingCode::$code, ProgsVerdict::$progs);
            let found: Vec<_> = outcome.findings.iter().map(|finding| finding.place).collect();
            assert_eq!(found, $places, "{}", show(&outcome));
        }
    )*};
}

damaged! {
    a_link_without_its_back_reference:
        RootReference Agrees at [place(TreeId::ROOT, A, ItemType::ROOT_REF, B)],
        |volume| {
            let wanted = is(B, ItemType::ROOT_BACKREF, A);
            volume.edit(TreeId::ROOT, wanted, |items, slot| drop(items.remove(slot)));
        };
    a_back_reference_without_its_link:
        RootReference Agrees at [place(TreeId::ROOT, B, ItemType::ROOT_BACKREF, A)],
        |volume| {
            let wanted = is(A, ItemType::ROOT_REF, B);
            volume.edit(TreeId::ROOT, wanted, |items, slot| drop(items.remove(slot)));
        };
    links_with_different_names:
        RootReference Agrees at [place(TreeId::ROOT, B, ItemType::ROOT_BACKREF, A)],
        |volume| {
            let wanted = is(A, ItemType::ROOT_REF, B);
            volume.edit(TreeId::ROOT, wanted, |items, slot| {
                items[slot].1[size_of::<RootRefItem>()] = b'x';
            });
        };
    /// Both items of the entry lead to a subvolume that is not there.
    an_entry_of_another_subvolume:
        SubvolumeEntry Agrees at [
            place(TreeId(A), 256, ItemType::DIR_ITEM, name_hash(b"b")),
            place(TreeId(A), 256, ItemType::DIR_INDEX, 2),
        ],
        |volume| {
            // The snapshot has leaves of its own.
            volume.edit(TreeId(A), is(256, ItemType::DIR_INDEX, 2), |items, slot| {
                let other = slot_of(items, 256, ItemType::DIR_ITEM, name_hash(b"b"));
                for slot in [slot, other] {
                    view::<DirEntryItem>(&mut items[slot].1).location.objectid = 999.into();
                }
            });
        };
    a_default_subvolume_that_is_not_there:
        SubvolumeEntry SeesNothing at [
            place(TreeId::ROOT, 6, ItemType::DIR_ITEM, name_hash(b"default")),
        ],
        |volume| {
            let wanted = is(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(b"default"));
            volume.edit(TreeId::ROOT, wanted, |items, slot| {
                view::<DirEntryItem>(&mut items[slot].1).location.objectid = 999.into();
            });
        };
    a_subvolume_without_links:
        UnreachableSubvolume Agrees at [place(TreeId::ROOT, B, ItemType::ROOT_ITEM, 0)],
        |volume| {
            volume.edit(TreeId::ROOT, is(A, ItemType::ROOT_REF, B), |items, slot| {
                let other = slot_of(items, B, ItemType::ROOT_BACKREF, A);
                items.remove(other.max(slot));
                items.remove(other.min(slot));
            });
        };
    a_root_item_of_another_level:
        RootItem SeesNothing at [BtrfsFindingPlace::Tree(TreeId::UUID)],
        |volume| {
            let wanted = is(TreeId::UUID.0, ItemType::ROOT_ITEM, 0);
            volume.edit(TreeId::ROOT, wanted, |items, slot| {
                view::<RootItem>(&mut items[slot].1).level += 1;
            });
        };
    /// The reader would find no tree at this address that is as old as that.
    a_root_item_of_another_generation:
        RootItem Agrees at [BtrfsFindingPlace::Tree(TreeId::UUID)],
        |volume| {
            let wanted = is(TreeId::UUID.0, ItemType::ROOT_ITEM, 0);
            volume.edit(TreeId::ROOT, wanted, |items, slot| {
                let item = view::<RootItem>(&mut items[slot].1);
                item.generation -= 1;
                item.generation_v2 -= 1;
            });
        };
    a_missing_directory_of_the_root_tree:
        MissingTree SeesNothing at [place(TreeId::ROOT, 6, ItemType::INODE_ITEM, 0)],
        |volume| {
            let wanted = is(objectid::ROOT_TREE_DIR, ItemType::INODE_ITEM, 0);
            volume.edit(TreeId::ROOT, wanted, |items, slot| drop(items.remove(slot)));
        };
    /// The feature requires a tree, and it is not there.
    a_missing_tree:
        MissingTree SeesNothing at [BtrfsFindingPlace::Tree(TreeId::RAID_STRIPE)],
        |volume| {
            volume.edit_superblocks(0, |bytes| {
                view::<SuperblockItem>(bytes).incompat_flags |= Incompat::RAID_STRIPE_TREE.0;
            });
        };
}

/// Changes the first item of a type in the UUID tree.
fn damaged_uuids(item_type: ItemType, change: impl FnOnce(&mut EditedItems, usize)) {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(made_by(&judges, SCRIPT));
    let mut wanted = Key::MIN;
    volume.edit(
        TreeId::UUID,
        |key, _| key.item_type == item_type,
        |items, slot| {
            wanted = items[slot].0;
            change(items, slot);
        },
    );
    let outcome = volume.require(BtrfsFindingCode::UuidTree, ProgsVerdict::SeesNothing);
    let found: Vec<_> = outcome.findings.iter().map(|finding| finding.place).collect();
    assert_eq!(found, [BtrfsFindingPlace::Item { tree: TreeId::UUID, key: wanted }]);
}

#[test]
fn a_uuid_that_is_not_listed() {
    damaged_uuids(ItemType::UUID_KEY_SUBVOL, |items, slot| drop(items.remove(slot)));
}

#[test]
fn a_uuid_of_a_subvolume_that_is_not_there() {
    damaged_uuids(ItemType::UUID_KEY_SUBVOL, |items, slot| {
        items[slot].1.extend_from_slice(&999u64.to_le_bytes());
    });
}

#[test]
fn a_received_uuid_of_another_subvolume() {
    damaged_uuids(ItemType::UUID_KEY_RECEIVED_SUBVOL, |items, slot| {
        items[slot].1 = A.to_le_bytes().to_vec();
    });
}

/// A volume with a deleted subvolume, of several levels, of which nothing was given up yet.
fn with_deleted(judges: &Judges) -> Disks {
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
    disks
}

/// Notes in the item of the deleted subvolume that the removal ended at `progress`.
fn ended_at(volume: &DamagedVolume, progress: Key, level: u8) {
    volume.edit(TreeId::ROOT, is(A, ItemType::ROOT_ITEM, 0), |items, slot| {
        let item = view::<RootItem>(&mut items[slot].1);
        assert!(item.refs == 0 && item.level > 0, "it was deleted");
        item.drop_progress = progress.into();
        item.drop_level = level;
    });
}

/// The first key of a subvolume, to which all its nodes have a pointer.
const FIRST: Key = Key::new(256, ItemType::INODE_ITEM, 0);

/// The removal of a subvolume has begun that was not deleted. Its extents are in use all the same.
#[test]
fn a_removal_of_a_subvolume_that_was_not_deleted() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(made_by(&judges, SCRIPT));
    volume.edit(TreeId::ROOT, is(A, ItemType::ROOT_ITEM, 0), |items, slot| {
        view::<RootItem>(&mut items[slot].1).drop_progress = FIRST.into();
    });
    let outcome = volume.require(BtrfsFindingCode::DeletedSubvolume, ProgsVerdict::SeesNothing);
    let found: Vec<_> = outcome.findings.iter().map(|finding| finding.place).collect();
    assert_eq!(found, [place(TreeId::ROOT, A, ItemType::ROOT_ITEM, 0)]);
}

#[test]
fn sound_removal() {
    let Some(judges) = judges::require() else { return };
    let disks = with_deleted(&judges);
    require_sound(&disks);
    let volume = DamagedVolume::of(disks);
    ended_at(&volume, FIRST, 1);
    require_sound(volume.disks());
}

macro_rules! damaged_removals {
    ($($name:ident: $progs:ident, $damage:expr;)*) => {$(
        #[test]
        fn $name() {
            let Some(judges) = judges::require() else { return };
            let volume = DamagedVolume::of(with_deleted(&judges));
            let damage: fn(&DamagedVolume) = $damage;
            damage(&volume);
            let outcome = volume.require(BtrfsFindingCode::DeletedSubvolume, ProgsVerdict::$progs);
            let found: Vec<_> = outcome.findings.iter().map(|finding| finding.place).collect();
            assert_eq!(found, [place(TreeId::ROOT, A, ItemType::ROOT_ITEM, 0)]);
        }
    )*};
}

damaged_removals! {
    a_deleted_subvolume_that_is_not_listed: SeesNothing, |volume| {
        let wanted = is(objectid::ORPHAN, ItemType::ORPHAN_ITEM, A);
        volume.edit(TreeId::ROOT, wanted, |items, slot| drop(items.remove(slot)));
    };
    a_removal_that_ended_at_no_pointer: SeesNothing, |volume| {
        // In front of all pointers, so that none of them counts as given up.
        ended_at(volume, Key::new(255, ItemType::INODE_ITEM, 0), 1);
    };
    a_removal_that_ended_above_the_root: SeesNothing, |volume| ended_at(volume, FIRST, 5);
}

/// A volume whose log the kernel wrote.
fn with_log(judges: &Judges) -> Disks {
    let disks = Disks::create(judges, 1, 256);
    disks.mkfs_and_settle(&[]);
    let mount = disks.mount("rw,noatime,commit=300");
    let script = "mkdir dir; sync; for i in $(seq 30); do echo $i > dir/$i; sync dir/$i; done";
    run("sh", &["-ec", &format!("cd '{}'; {script}", mount.path().display())]);
    disks.copy(judges)
}

#[test]
fn a_sound_log() {
    let Some(judges) = judges::require() else { return };
    let disks = with_log(&judges);
    let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
    let volume = BtrfsVolume::open(disks.devices(), &options).expect("it opens");
    assert_eq!(volume.log_trees().expect("they are read").len(), 1, "a log is pending");
    require_sound(&disks);
}

#[test]
fn a_damaged_log() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(with_log(&judges));
    volume.edit_superblock(0, SUPERBLOCK_OFFSETS[0], |bytes| {
        view::<SuperblockItem>(bytes).log_root_level += 1;
    });
    let outcome = volume.require(BtrfsFindingCode::TreeLog, ProgsVerdict::Agrees);
    assert_eq!(outcome.findings.len(), 1, "{}", show(&outcome));
}
