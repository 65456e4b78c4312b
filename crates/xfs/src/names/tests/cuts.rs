//! Power cuts at any write: a volume has the names of one moment, and nothing of inodes that had no
//! name then.

use std::time::{SystemTime, UNIX_EPOCH};

use offshoot_device::{CrashDevice, CrashPlan};
use offshoot_xfs_format::attr::XattrFlags;

use super::*;
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::change_xattr;
use crate::file::XfsFileChanges;
use crate::trans::XfsTransactionKind as Kind;

/// A copy of a device in a file, for the kernel.
fn image_of(device: &dyn BlockDevice, mib: u64) -> XfsDisk {
    let disk = XfsDisk::create(&judges::require().unwrap(), mib);
    let to = disk.writable_device();
    let mut part = vec![0; 1 << 20];
    for at in (0..mib << 20).step_by(part.len()) {
        device.read_at(at, &mut part).unwrap();
        if part.iter().any(|byte| *byte != 0) {
            to.write_at(at, &part).unwrap();
        }
    }
    disk
}

fn cut_anywhere(options: &str, steps: usize) {
    const MIB: u64 = 128;
    let seed = seed_of_run();
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, MIB);
    disk.mkfs(options);
    let device = Arc::new(CrashDevice::new(disk.device()));
    let bench = NameBench::pushed(disk, device.clone(), options);
    let tree =
        NameTree::read(&*XfsVolume::open(bench.disk.device(), &XfsOptions::default()).unwrap());
    let clock = 1_700_000_000;
    let mut churn =
        NameChurn { bench: &bench, tree, random: Random::new(seed), clock, open: Vec::new() };
    let mut moments = vec![churn.tree.clone()];
    for step in 0..steps {
        churn.step();
        moments.push(churn.tree.clone());
        bench.engine.log().force_all().unwrap();
        if step % 50 == 0 {
            bench.engine.log().push_tail().unwrap();
        }
    }
    churn.close(0);
    bench.engine.unmount().unwrap();
    let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 5, seed, tears: false };
    let options = XfsOptions::default();
    let mut was_found = std::collections::BTreeSet::new();
    for (number, state) in device.log().states(&plan).enumerate() {
        let state = state.unwrap();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let found = check_xfs(&device, &options).unwrap().findings;
        assert!(found.is_empty(), "{}: {}", state.description, found[0]);
        let tree = NameTree::read(&*XfsVolume::open(device.clone(), &options).unwrap());
        let moment = moments.iter().position(|moment| *moment == tree);
        let moment = moment.unwrap_or_else(|| panic!("{}: other names", state.description));
        was_found.insert(moment);
        if number % 60 == 30 {
            let image = image_of(&*device, MIB);
            let start =
                i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs());
            let mount = image.mount("nouuid", &[RECOVERY]);
            tree.assert_kernel_recovers(mount.path(), start.unwrap());
            drop(mount);
            image.assert_checks();
        }
    }
    assert!(was_found.len() > 5, "{was_found:?}");
}

#[test]
fn a_cut_leaves_the_tree_of_one_moment() {
    cut_anywhere("--unsupported -b size=1024", 150);
}

#[test]
fn a_cut_leaves_the_tree_of_one_moment_with_parent_pointers() {
    cut_anywhere("--unsupported -n parent=1", 150);
}

fn set_xattr(bench: &NameBench, ino: Ino, name: &str, len: usize) {
    let (name, value) = (name.as_bytes().to_vec(), vec![3; len]);
    let xattr = OwnedXattr { namespace: XattrFlags::TRUSTED, name, value };
    let t = bench.engine.begin(Kind::ChangeAttribute, 200).unwrap();
    change_xattr(t, &bench.ids, XattrChange::set(ino, xattr)).unwrap();
}

/// The power fails while files with trees of attributes are freed. The kernel frees the rest.
#[test]
fn the_kernel_frees_what_a_cut_has_left_of_a_file() {
    const MIB: u64 = 128;
    let seed = seed_of_run();
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, MIB);
    disk.mkfs("--unsupported -b size=1024 -n parent=1");
    let device = Arc::new(CrashDevice::new(disk.device()));
    let bench = NameBench::over(disk, device.clone(), "");
    let names = bench.names();
    let target = vec![b't'; 1000];
    for (number, kind) in [XfsNewKind::Regular, XfsNewKind::Symlink(&target), XfsNewKind::Directory]
        .into_iter()
        .enumerate()
    {
        let new = new_file(0o600, 1);
        let name = format!("{number}").into_bytes();
        let place = NamePlace { dir: bench.root(), name: &name };
        let ino = names.create(place, kind, &new).unwrap();
        for number in 0..30 {
            set_xattr(&bench, ino, &format!("name {number}"), [300, 900, 3000][number % 3]);
        }
        if kind == XfsNewKind::Directory {
            names.rmdir(place, at(2)).unwrap();
        } else {
            names.unlink(place, at(2)).unwrap();
        }
        bench.engine.log().force_all().unwrap();
        names.inactivate(ino).unwrap();
        bench.engine.log().force_all().unwrap();
    }
    bench.engine.unmount().unwrap();
    let plan = CrashPlan { exhaustive_limit: 1, samples_per_epoch: 1, seed, tears: false };
    let log = device.log();
    let every = log.states(&plan).count().div_ceil(20);
    for state in log.states(&plan).step_by(every) {
        let [memory] = <[_; 1]>::try_from(state.unwrap().devices).unwrap();
        let image = image_of(&memory, MIB);
        drop(image.mount("nouuid", &[RECOVERY]));
        image.assert_checks();
    }
}

/// Files of all kinds lose their last names while they are open, and the power fails.
#[test]
fn recovery_frees_what_was_open_without_a_name() {
    let Some(bench) = NameBench::make(1 << 10, "-b size=1024 -n parent=1") else { return };
    let before = bench.tree();
    let names = bench.names();
    let target = vec![b't'; 1000];
    let kinds = [
        XfsNewKind::Regular,
        XfsNewKind::Directory,
        XfsNewKind::Symlink(&target),
        XfsNewKind::Symlink(b"short"),
        XfsNewKind::Node(FileType::Fifo, (0, 0)),
    ];
    let mut lost = Vec::new();
    for number in 0..200 {
        let kind = kinds[number % kinds.len()];
        let name = format!("file {number}").into_bytes();
        let place = NamePlace { dir: bench.root(), name: &name };
        let ino = names.create(place, kind, &new_file(0o600, 1)).unwrap();
        if kind == XfsNewKind::Regular {
            let changes = XfsFileChanges::new(&bench.engine, &bench.ids);
            (0..10).for_each(|piece| changes.allocate(ino, piece * 5..piece * 5 + 2).unwrap());
        }
        for name in 0..number % 7 {
            set_xattr(&bench, ino, &format!("name {name}"), 700 * name);
        }
        let is_directory = kind == XfsNewKind::Directory;
        let gone = if is_directory {
            Some(names.rmdir(place, at(2)).unwrap())
        } else {
            names.unlink(place, at(2)).unwrap()
        };
        assert_eq!(gone, Some(ino));
        lost.push(ino);
    }
    lost.push(names.create_unnamed(bench.root(), XfsNewKind::Regular, &new_file(0, 1)).unwrap());
    let mut before = before;
    before.touch(bench.root(), 2);
    bench.engine.log().force_all().unwrap();
    let cut = bench.disk.copy();
    let recovery = XfsVolume::recover(&cut.writable_device(), &XfsOptions::default()).unwrap();
    assert_eq!(recovery.unwrap().freed_inodes, lost.len() as u64);
    cut.assert_checks();
    bench.assert_cut_recovers(&before);
    // Some are freed, and recovery frees the rest.
    for ino in lost.drain(..100) {
        names.inactivate(ino).unwrap();
    }
    bench.assert_cut_recovers(&before);
    for ino in lost {
        names.inactivate(ino).unwrap();
    }
    drop(bench.assert_unmounts(&before));
}

/// What the log has of blocks that are freed never reaches the data that they hold next.
#[test]
fn freed_blocks_of_targets_and_attributes_hold_data_next() {
    let Some(bench) = NameBench::make(128, "--unsupported -b size=1024") else { return };
    let names = bench.names();
    let root = bench.root();
    let target = vec![b't'; 1000];
    let mut lost = Vec::new();
    for number in 0..300 {
        let name = format!("link {number}").into_bytes();
        let place = NamePlace { dir: root, name: &name };
        let ino = names.create(place, XfsNewKind::Symlink(&target), &new_file(0, 1)).unwrap();
        set_xattr(&bench, ino, "name", 600);
        lost.extend(names.unlink(place, at(1)).unwrap());
    }
    for ino in &lost {
        names.inactivate(*ino).unwrap();
    }
    bench.engine.log().force_all().unwrap();
    // All blocks that are free hold data now.
    let place = NamePlace { dir: root, name: b"data" };
    let ino = names.create(place, XfsNewKind::Regular, &new_file(0o600, 3)).unwrap();
    let changes = XfsFileChanges::new(&bench.engine, &bench.ids);
    let (mut at, mut step) = (0, 1 << 12);
    while step > 0 {
        let Ok(places) = changes.prepare_write(ino, at..at + step) else {
            step /= 2;
            continue;
        };
        for place in &places {
            let bytes = vec![0x5a; (place.count as usize) << 10];
            let to = bench.engine.geometry().place_of(place.start).unwrap();
            bench.engine.buffers().write(to, &bytes).unwrap();
        }
        at += step;
        changes.commit_write(ino, &places, Some(at << 10)).unwrap();
    }
    let assert_data = |volume: &XfsVolume| {
        let mut bytes = vec![0; 1 << 20];
        for start in (0..at << 10).step_by(bytes.len()) {
            let read = volume.read(file_id(ino), start, &mut bytes).unwrap();
            assert!(bytes[..read].iter().all(|byte| *byte == 0x5a), "near byte {start}");
        }
    };
    bench.engine.log().force_all().unwrap();
    let cut = bench.disk.copy();
    XfsVolume::recover(&cut.writable_device(), &XfsOptions::default()).unwrap();
    assert_data(&XfsVolume::open(cut.device(), &XfsOptions::default()).unwrap());
    bench.engine.log().push_tail().unwrap();
    bench.engine.unmount().unwrap();
    bench.disk.assert_checks();
    assert_data(&XfsVolume::open(bench.disk.device(), &XfsOptions::default()).unwrap());
}
