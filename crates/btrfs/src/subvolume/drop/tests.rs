//! Drops that stop at any point, the cost of a snapshot, and damaged subvolumes.

use std::sync::Arc;

use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, Timestamp,
};
use zerocopy::IntoBytes as _;

use super::{DropProgress, drop_step};
use crate::test_volumes::{check, edit_root, in_memory};
use crate::transaction::{root_item, root_item_key};
use crate::tree::TreeWriter;
use crate::{BtrfsVolume, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT };

fn open(devices: Vec<Arc<dyn BlockDevice>>) -> Filesystem {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(devices, &options).unwrap();
    volume.filesystem(TreeId::FS).unwrap()
}

fn top(name: &str) -> EntryPlace<'_> {
    EntryPlace { dir: FileId { dev: TreeId::FS.0, ino: 256 }, name: name.as_bytes() }
}

/// Makes so many files in a subvolume, every tenth with an extent.
fn fill(fs: &Filesystem, subvolume: TreeId, prefix: &str, count: u64) {
    let dir = FileId { dev: subvolume.0, ino: 256 };
    for number in 0..count {
        let name = format!("{prefix}-{number}");
        let file = fs.create(EntryPlace { dir, name: name.as_bytes() }, &NEW).unwrap();
        if number % 10 == 0 {
            fs.write(file, 0, &[1; 5000], AT).unwrap();
        }
    }
}

/// A subvolume and a snapshot of it that share many blocks. One of them is deleted.
fn prepare(disks: &Disks, deleted: &str) {
    let fs = open(disks.writable_devices());
    let live = fs.create_subvolume(top("live"), &NEW).unwrap();
    fill(&fs, live, "both", 3000);
    let snapshot = fs.snapshot(live, top("snapshot"), false, AT).unwrap();
    fill(&fs, live, "live", 300);
    fill(&fs, snapshot, "snapshot", 300);
    fs.sync().unwrap();
    fs.delete_subvolume(top(deleted), AT).unwrap();
    fs.sync().unwrap();
}

#[test]
fn the_kernel_goes_on_where_ours_stopped() {
    let Some(judges) = judges::require() else { return };
    for (deleted, steps) in [("live", 1), ("live", 9), ("snapshot", 1), ("snapshot", 4)] {
        let disks = Disks::create(&judges, 1, 512);
        disks.mkfs(&["-n", "4k"]);
        prepare(&disks, deleted);
        let fs = open(disks.writable_devices());
        for step in 0..steps {
            assert_eq!(
                drop_step(fs.volume(), &fs.volume().subvolumes).unwrap(),
                DropProgress::Went,
                "{deleted}, {step}"
            );
        }
        fs.sync().unwrap();
        assert!(fs.volume().subvolumes.has_deleted(), "{steps} steps are all");
        drop(fs);
        check(&disks);
        let mount = disks.mount("rw,noatime");
        run("btrfs", &["subvolume".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
        drop(mount);
        check(&disks);
        let fs = open(disks.writable_devices());
        assert!(!fs.volume().subvolumes.has_deleted());
    }
}

#[test]
fn a_drop_that_is_begun_anew_at_every_step_ends() {
    let Some(judges) = judges::require() else { return };
    for deleted in ["live", "snapshot"] {
        let disks = Disks::create(&judges, 1, 512);
        disks.mkfs(&["-n", "4k"]);
        prepare(&disks, deleted);
        for step in 0.. {
            let fs = open(disks.writable_devices());
            if drop_step(fs.volume(), &fs.volume().subvolumes).unwrap() == DropProgress::Waits {
                assert!(step > 3, "{deleted} was dropped in {step} steps");
                break;
            }
            fs.sync().unwrap();
            assert!(step < 1000, "{deleted} is dropped for ever");
            drop(fs);
            if step % 8 == 0 {
                check(&disks);
            }
        }
        check(&disks);
    }
}

/// With a damaged progress in the root item, blocks before that pointer once stayed in use for
/// ever.
#[test]
fn a_pointer_that_is_not_there_is_not_gone_on_from() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&["-n", "4k"]);
    prepare(&disks, "live");
    let fs = open(disks.writable_devices());
    for _ in 0..4 {
        assert_eq!(drop_step(fs.volume(), &fs.volume().subvolumes).unwrap(), DropProgress::Went);
    }
    let id = TreeId(256);
    let key = Key::new(id.0, ItemType::ROOT_ITEM, 0);
    let set = |item: RootItem| {
        let handle = fs.volume().join().unwrap();
        let changed = |old: Option<&[u8]>| Ok([item.as_bytes(), &old.unwrap()[439..]].concat());
        handle.change(TreeId::ROOT, |tree| tree.modify(key, 0, changed)).unwrap();
    };
    let whole = root_item(fs.volume(), id).unwrap().unwrap();
    let (progress, level) = (whole.drop_progress.get(), whole.drop_level);
    assert!(progress.objectid > 0 && level > 0, "{progress}, {level}");
    let objectids = (0..64).map(|bit| Key { objectid: progress.objectid ^ 1 << bit, ..progress });
    let offsets = (0..64).map(|bit| Key { offset: progress.offset ^ 1 << bit, ..progress });
    let keys = objectids.chain(offsets).map(|key| (key, level));
    let levels = [0, 7].map(|level| (progress, level));
    for (progress, level) in keys.chain(levels).filter(|(key, _)| key.objectid > 0) {
        set(RootItem { drop_progress: progress.into(), drop_level: level, ..whole });
        let handle = fs.volume().join().unwrap();
        let error = super::step(&handle, id, &mut super::Dropping::default()).unwrap_err();
        assert!(error.to_string().contains("which it has not"), "{progress}, {level}: {error}");
    }
    set(whole);
    fs.volume().drop_deleted().unwrap();
    fs.sync().unwrap();
    drop(fs);
    check(&disks);
}

/// A snapshot whose root item gave a too young age once left references in its name to shared
/// blocks.
#[test]
fn a_snapshot_of_which_nobody_knows_when_it_was_made_is_dropped() {
    let Some(judges) = judges::require() else { return };
    for (offset, otransid) in [(u64::MAX - 44_044, 0), (1 << 32, 1 << 32), (1 << 50, u64::MAX)] {
        let disks = Disks::create(&judges, 1, 512);
        disks.mkfs(&["-n", "4k"]);
        let fs = open(disks.writable_devices());
        let live = fs.create_subvolume(top("live"), &NEW).unwrap();
        fill(&fs, live, "both", 500);
        let snapshot = fs.snapshot(live, top("snapshot"), false, AT).unwrap();
        fill(&fs, snapshot, "snapshot", 300);
        // Another snapshot shares the blocks that were written for it.
        fs.snapshot(snapshot, top("other"), false, AT).unwrap();
        fs.delete_subvolume(top("snapshot"), AT).unwrap();
        fs.sync().unwrap();
        let item = root_item(fs.volume(), snapshot).unwrap().unwrap();
        let old = root_item_key(fs.volume(), snapshot).unwrap();
        let item = RootItem { otransid: otransid.into(), ..item };
        let handle = fs.volume().join().unwrap();
        let change = |tree: TreeWriter<'_>| {
            tree.remove(old)?;
            tree.insert(Key { offset, ..old }, item.as_bytes())
        };
        handle.change(TreeId::ROOT, change).unwrap();
        drop(handle);
        fs.volume().drop_deleted().unwrap();
        fs.sync().unwrap();
        drop(fs);
        check(&disks);
    }
}

/// However many files a subvolume has, its snapshot takes a few blocks, and one reference for each
/// pointer of its root.
#[test]
fn the_cost_of_a_snapshot_does_not_grow_with_the_tree() {
    const NODE: u64 = 4096;
    for files in [10, 1000, 20_000] {
        let fs = open(vec![in_memory(4096)]);
        let live = fs.create_subvolume(top("live"), &NEW).unwrap();
        fill(&fs, live, "file", files);
        fs.sync().unwrap();
        let volume = fs.volume();
        let waiting = &volume.live().unwrap().space.pending.reference_bytes;
        let now = || (volume.dirty_tree_bytes().unwrap(), waiting.get());
        let before = now();
        fs.snapshot(live, top("snapshot"), true, AT).unwrap();
        let (blocks, references) = ((now().0 - before.0) / NODE, now().1 - before.1);
        let (pointers, reference) = (NODE / 33, 53);
        assert!(blocks <= 12, "{blocks} blocks with {files} files");
        assert!(references <= (pointers + 60) * reference, "{references} with {files} files");
    }
}

/// A subvolume without the inode of its root directory once could not be deleted, because the flags
/// of that inode could not be read.
#[test]
fn a_subvolume_without_a_root_directory_can_be_deleted() {
    let memory = in_memory(4096);
    let fs = open(vec![memory.clone()]);
    let id = fs.create_subvolume(top("damaged"), &NEW).unwrap();
    fill(&fs, id, "file", 500);
    fs.sync().unwrap();
    let handle = fs.volume().join().unwrap();
    let inode = Key::new(256, ItemType::INODE_ITEM, 0);
    handle.change(id, |tree| tree.remove(inode)).unwrap();
    drop(handle);
    fs.sync().unwrap();
    drop(fs);

    let fs = open(vec![memory]);
    fs.delete_subvolume(top("damaged"), AT).unwrap();
    fs.volume().drop_deleted().unwrap();
    assert_eq!(fs.volume().subvolume_count().unwrap(), 1);
    assert_eq!(fs.volume().subvolume(id).unwrap_err().errno(), Errno::NOENT);
}

/// Without its root directory a subvolume has no list of its entries, and `rmdir` once took it for
/// empty.
#[test]
fn a_subvolume_of_which_nobody_knows_whether_it_is_empty_is_not_removed() {
    let fs = open(vec![in_memory(4096)]);
    let id = fs.create_subvolume(top("damaged"), &NEW).unwrap();
    let root = FileId { dev: id.0, ino: 256 };
    let kept = fs.create(EntryPlace { dir: root, name: b"kept" }, &NEW).unwrap();
    fs.sync().unwrap();
    let keys = [
        Key::new(256, ItemType::INODE_ITEM, 0),
        Key::new(256, ItemType::INODE_REF, 256),
        Key::new(256, ItemType::DIR_ITEM, name_hash(b"kept")),
        Key::new(256, ItemType::DIR_INDEX, 2),
    ];
    let handle = fs.volume().join().unwrap();
    handle
        .change(id, |tree| keys.into_iter().try_for_each(|key| tree.remove(key).map(drop)))
        .unwrap();
    drop(handle);
    assert_eq!(fs.rmdir(top("damaged"), AT).unwrap_err().errno(), Errno::NOENT);
    assert!(fs.attr(kept).is_ok());
}

/// If the block with the root directory is damaged, the error says so, and the name stays.
#[test]
fn a_subvolume_whose_root_directory_does_not_read_stays() {
    let memory = in_memory(4096);
    let fs = open(vec![memory.clone()]);
    let id = fs.create_subvolume(top("damaged"), &NEW).unwrap();
    fs.sync().unwrap();
    let root = fs.volume().tree(id).unwrap();
    edit_root(&memory, fs.volume(), root, |bytes| bytes[200] ^= 1);
    drop(fs);

    let fs = open(vec![memory]);
    let error = fs.delete_subvolume(top("damaged"), AT).unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, Error::Corrupt(_)), "{said}");
    let directory = FileId { dev: id.0, ino: 256 };
    assert!(said.contains(&directory.to_string()) && said.contains("checksum"), "{said}");
    fs.sync().unwrap();
    assert_eq!(fs.lookup(top("damaged").dir, b"damaged").unwrap(), directory);
}
