//! The state of quotas before and after a writer.

use std::sync::Arc;

use offshoot_btrfs_format::quota::{LIMIT_MAX_EXCL, LIMIT_MAX_RFER};
use offshoot_btrfs_format::space::QgroupInfoItem;
use offshoot_testkit::btrfs::disks::{Disks, UUID_TREE};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileSystem as _, FileSystemMut as _, NewFile, Timestamp};
use zerocopy::IntoBytes;

use super::*;
use crate::BtrfsVolume;
use crate::test_volumes::open;

const NEW: NewFile = NewFile {
    permissions: 0o755,
    uid: 0,
    gid: 0,
    umask: None,
    at: Timestamp { secs: 1_600_000_000, nanos: 1 },
};

/// The status item as the volume has it.
fn status(volume: &crate::Engine) -> QgroupStatusItem {
    let tree = volume.tree(TreeId::QUOTA).expect("quotas are on");
    let view = |data: &[u8]| QgroupStatusItem::view(data).copied().map_err(malformed);
    with_item(&volume.rooms, tree, STATUS_KEY, view).expect("it reads").expect("there is one")
}

/// Some data that the kernel wrote on a volume with full quotas.
fn with_quotas(judges: &Judges) -> Disks {
    Recipe::new()
        .mkfs("-O quota")
        .fill(|root| {
            fill::write(&root.join("data"), &vec![7; 200_000]);
            fill::sync(root);
        })
        .make(judges)
}

fn make_file(volume: &Arc<BtrfsVolume>, name: &str) {
    let fs = volume.filesystem(TreeId::FS).expect("every volume has one");
    let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
    let file = fs.create(place, &NEW).expect("there is room");
    fs.write(file, 0, &vec![7; 100_000], NEW.at).expect("there is room");
    fs.sync().expect("a commit");
}

/// Changes an item of the quota tree, in a commit of its own that finds the quotas marked already.
fn set(disks: &Disks, key: Key, change: impl Fn(&mut Vec<u8>)) {
    let volume = open(disks);
    let same: &dyn Fn(&mut Vec<u8>) = &|_| ();
    for change in [same, &change] {
        let handle = volume.join().unwrap();
        let changed = |old: Option<&[u8]>| {
            let mut data = old.expect("the item is there").to_vec();
            change(&mut data);
            Ok(data)
        };
        handle.change(TreeId::QUOTA, |tree| tree.modify(key, 0, changed)).unwrap();
        drop(handle);
        volume.commit().unwrap();
    }
}

/// The kernel would continue the rescan where it stopped, and then mark numbers as right that miss
/// changes to extents before that place.
#[test]
fn a_rescan_that_was_running_is_not_gone_on_with() {
    let Some(judges) = judges::require() else { return };
    let disks = with_quotas(&judges);
    // The continued rescan would leave this file out.
    make_file(&open(&disks), "uncounted");
    set(&disks, STATUS_KEY, |data| {
        let rescan = QgroupStatusItem {
            version: STATUS_VERSION.into(),
            generation: 0.into(),
            flags: (STATUS_ON | STATUS_RESCAN | STATUS_INCONSISTENT).into(),
            // The rescan has counted all extents below this address.
            rescan: (1 << 40).into(),
        };
        data[..32].copy_from_slice(rescan.as_bytes());
    });
    let volume = open(&disks);
    assert!(status(&volume).has(STATUS_RESCAN), "the test has made one");
    make_file(&volume, "after");
    let item = status(&volume);
    assert!(item.has(STATUS_ON | STATUS_INCONSISTENT), "{item:?}");
    assert!(!item.has(STATUS_RESCAN) && item.rescan.get() == 0, "{item:?}");
    drop(volume);
    disks.assert_checks();
    let mount = disks.mount_watched("rw,noatime", &[UUID_TREE]);
    let shown = run(
        "btrfs",
        &["quota".as_ref(), "rescan".as_ref(), "-s".as_ref(), mount.path().as_os_str()],
    );
    assert!(shown.contains("no rescan"), "{shown}");
    run("btrfs", &["quota".as_ref(), "rescan".as_ref(), "-w".as_ref(), mount.path().as_os_str()]);
    drop(mount);
    let volume = BtrfsVolume::open(disks.devices(), &crate::EngineOptions::default()).unwrap();
    assert!(!status(&volume).has(STATUS_INCONSISTENT), "{:?}", status(&volume));
    drop(volume);
    disks.assert_checks();
}

/// Some tools remove a limit by setting it to all ones.
#[test]
fn a_limit_of_all_bits_is_none() {
    let Some(judges) = judges::require() else { return };
    let disks = with_quotas(&judges);
    let group = QgroupId::of_subvolume(TreeId::FS);
    let limit = |most: u64| {
        let item = QgroupLimitItem {
            flags: (LIMIT_MAX_RFER | LIMIT_MAX_EXCL).into(),
            max_rfer: most.into(),
            max_excl: most.into(),
            ..QgroupLimitItem::no_limits()
        };
        set(&disks, group.limit_key(), |data| data.copy_from_slice(item.as_bytes()));
    };
    limit(u64::MAX);
    make_file(&open(&disks), "after");
    disks.assert_checks();
    limit(u64::MAX - 1);
    let refused =
        BtrfsVolume::open_writable(disks.writable_devices(), &crate::EngineOptions::default());
    assert!(matches!(refused.err(), Some(Error::Unsupported { .. })));
}

/// Without a status item, or with one that says that quotas are off, the kernel maintains no
/// numbers.
#[test]
fn quotas_that_are_off_are_left_alone() {
    let Some(judges) = judges::require() else { return };
    let disks = with_quotas(&judges);
    set(&disks, STATUS_KEY, |data| data[16..24].fill(0));
    let volume = open(&disks);
    let fs = volume.filesystem(TreeId::FS).unwrap();
    let id = fs.create_subvolume(EntryPlace { dir: fs.root(), name: b"new" }, &NEW).unwrap();
    // `btrfs check` compares the numbers all the same, so the test only adds a name, which changes
    // none.
    fs.create(EntryPlace { dir: fs.root(), name: b"after" }, &NEW).unwrap();
    fs.sync().unwrap();
    assert_eq!(status(&volume).flags.get(), 0);
    assert_eq!(groups::used_by(&volume, QgroupId::of_subvolume(id)).unwrap(), None);
    drop((fs, volume));
    disks.assert_checks();
    // The kernel warns like this about its own volumes too, before it finds that quotas are off.
    drop(disks.mount_watched("rw,noatime", &["qgroup generation mismatch", UUID_TREE]));
}

/// If the numbers were too small, the first commit that freed more once stopped all writing.
#[test]
fn more_goes_than_simple_quotas_counted() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mkfs("-O squota").fill(fill::sync).make(&judges);
    let group = QgroupId::of_subvolume(TreeId::FS);
    make_file(&open(&disks), "file");
    set(&disks, group.info_key(), |data| {
        let item = QgroupInfoItem::nothing_used(Generation(0));
        data[8..].copy_from_slice(&item.as_bytes()[8..]);
    });
    let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let reports = told.clone();
    let options = crate::EngineOptions {
        reporter: Some(Arc::new(move |report: &VolumeReport| reports.lock().push(report.clone()))),
        ..crate::EngineOptions::default()
    };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).unwrap();
    let fs = volume.filesystem(TreeId::FS).unwrap();
    fs.unlink(EntryPlace { dir: fs.root(), name: b"file" }, NEW.at).unwrap();
    fs.sync().expect("writing goes on");
    assert!(told.lock().contains(&VolumeReport::WrongQuota { group }), "{:?}", told.lock());
    assert_eq!(groups::used_by(&volume, group).unwrap(), Some([0, 0]));
    make_file(&volume, "new");
    drop((fs, volume));
    disks.mount("rw,noatime").sync();
}

/// A group in another of the same or a lower level could contain itself: this is refused as
/// corrupt.
#[test]
fn groups_in_circles_are_corrupt() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mkfs("-O squota").fill(fill::sync).make(&judges);
    let generation = || {
        let volume = BtrfsVolume::open(disks.devices(), &crate::EngineOptions::default()).unwrap();
        volume.superblock().generation
    };
    let before = generation();
    let volume = open(&disks);
    let handle = volume.join().unwrap();
    let (one, two) = (QgroupId((1 << 48) + 1), QgroupId((1 << 48) + 2));
    for (key, data) in [
        (one.info_key(), QgroupInfoItem::nothing_used(handle.generation())),
        (two.info_key(), QgroupInfoItem::nothing_used(handle.generation())),
    ] {
        handle.change(TreeId::QUOTA, |tree| tree.insert(key, data.as_bytes())).unwrap();
    }
    let fs = QgroupId::of_subvolume(TreeId::FS);
    for key in [fs.relation_key(one), one.relation_key(two), two.relation_key(one)] {
        handle.change(TreeId::QUOTA, |tree| tree.insert(key, &[])).unwrap();
    }
    drop(handle);
    let top = volume.filesystem(TreeId::FS).unwrap();
    let file = top.create(EntryPlace { dir: top.root(), name: b"file" }, &NEW).unwrap();
    top.write(file, 0, &vec![7; 100_000], NEW.at).unwrap();
    let error = top.sync().expect_err("the numbers cannot be kept").to_string();
    assert!(error.contains("no lower level"), "{error}");
    drop((top, volume));
    assert_eq!(generation(), before, "the devices hold the last commit");
    disks.assert_checks();
}
