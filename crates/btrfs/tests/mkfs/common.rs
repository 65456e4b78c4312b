//! Making volumes with our `mkfs`, and the verdict on them.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, MkfsOptions, VolumeReport, mkfs};
use offshoot_btrfs_format::encode::uuid_key;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::compare::compare;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_vfs::{Attr, FileSystem, FileType, Result, Timestamp};
use uuid::Uuid;

/// The time at which the tests make volumes.
pub(crate) const TIME: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 123_456_789 };

/// Default options, with an id that no other volume of the machine has. The kernel mounts no two
/// volumes with the same id, and tests run side by side.
pub(crate) fn options() -> MkfsOptions {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut random| std::io::Read::read_exact(&mut random, &mut bytes))
        .expect("random bytes");
    MkfsOptions::new(uuid::Builder::from_random_bytes(bytes).into_uuid(), TIME)
}

/// Makes a volume over new images of these sizes in MiB.
pub(crate) fn make(judges: &Judges, mib: &[u64], options: &MkfsOptions) -> Result<Disks> {
    let mut disks = Disks::create(judges, 0, 0);
    for &mib in mib {
        disks.add(mib);
    }
    mkfs(&disks.writable_devices(), options)?;
    Ok(disks)
}

/// Judges a new volume. We read it, and `btrfs check` finds nothing. The kernel mounts it, finds
/// every copy of everything right, and writes at least `fill_mib` MiB to it without a complaint. We
/// see what the kernel wrote, and `btrfs check` still finds nothing.
#[track_caller]
pub(crate) fn judge(disks: &Disks, options: &MkfsOptions, fill_mib: u64) {
    assert_reads(disks, options);
    disks.assert_checks();
    scrub(disks);
    let mount = disks.mount_watched("rw,noatime", &[]);
    fill(mount.path(), fill_mib);
    mount.sync();
    let shown = mount.path().to_owned();
    let (volume, reports) = open(disks);
    let id = volume.default_subvolume().expect("a default subvolume");
    let filesystem = volume.filesystem(id).expect("the default subvolume opens");
    compare(&filesystem, &shown).assert_same(FILES);
    drop(mount);
    assert_silent(&reports);
    disks.assert_checks();
}

/// The kernel reads every copy of every tree block and superblock, and all verify.
///
/// The mount is read-only, because a writable mount repairs a bad copy that it reads before the
/// scrub comes to it.
#[track_caller]
fn scrub(disks: &Disks) {
    let mount = disks.mount("ro,noatime");
    let words: [&std::ffi::OsStr; 5] =
        ["scrub".as_ref(), "start".as_ref(), "-BrR".as_ref(), "--".as_ref(), mount.path().as_ref()];
    let output = run("btrfs", &words);
    let (mut blocks, mut errors) = (0, 0);
    for line in output.lines() {
        let Some((name, number)) = line.trim().split_once(": ") else { continue };
        match name {
            "tree_extents_scrubbed" => blocks += number.parse::<u64>().expect("a number"),
            name if name.ends_with("_errors") => errors += number.parse::<u64>().expect("a number"),
            _ => {}
        }
    }
    assert!(blocks > 0 && errors == 0, "the scrub of a new volume:\n{output}");
}

type ReportLines = Arc<Mutex<Vec<String>>>;

fn open(disks: &Disks) -> (Arc<BtrfsVolume>, ReportLines) {
    let reports = ReportLines::default();
    let said = reports.clone();
    let record = move |report: &VolumeReport| {
        said.lock().expect("no test panics while it reports").push(report.to_string());
    };
    let options = EngineOptions { reporter: Some(Arc::new(record)), ..EngineOptions::default() };
    (BtrfsVolume::open(disks.devices(), &options).expect("the volume opens"), reports)
}

#[track_caller]
fn assert_silent(reports: &ReportLines) {
    let all = reports.lock().expect("no test panics while it reports");
    assert!(all.is_empty(), "a sound volume was reported on: {all:?}");
}

/// Requires that we read the volume as the options ask: its identity, an empty root directory, and
/// every block of every tree. Reading checks each block in full.
#[track_caller]
pub(crate) fn assert_reads(disks: &Disks, options: &MkfsOptions) {
    let (volume, reports) = open(disks);
    read_new(&volume, options);
    assert_silent(&reports);
}

#[track_caller]
pub(crate) fn read_new(volume: &Arc<BtrfsVolume>, options: &MkfsOptions) {
    assert_eq!(volume.superblock().fsid, options.fsid);
    assert_eq!(volume.superblock().item.label(), options.label.as_bytes());
    assert_eq!(volume.superblock().checksum, options.checksum);
    let trees = (1..=11).map(TreeId).chain([TreeId::DATA_RELOC]);
    let mut read = 0;
    for id in trees {
        let root = match id {
            TreeId::ROOT => volume.root_tree(),
            // A volume may lack some trees. A new one has no quota tree, and no tree with the id 6.
            _ => match volume.tree(id) {
                Ok(root) => root,
                Err(_) => continue,
            },
        };
        let visit = |_: Key, _: &[u8]| ControlFlow::Continue(());
        volume.for_each_item(root, Key::MIN, visit).expect("every block of a new tree verifies");
        read += 1;
    }
    assert!(read >= 7, "only {read} trees");
    assert_uuid_tree(volume);
    let id = volume.default_subvolume().expect("a default subvolume");
    let filesystem = volume.filesystem(id).expect("the default subvolume opens");
    let attr: Attr = filesystem.attr(filesystem.root()).expect("a root directory");
    assert_eq!((attr.file_type, attr.permissions), (FileType::Directory, 0o755));
    assert_eq!([attr.atime, attr.mtime, attr.ctime, attr.btime], [options.time; 4]);
    let mut entries = 0;
    filesystem
        .read_dir(filesystem.root(), 0, &mut |_| {
            entries += 1;
            ControlFlow::Continue(())
        })
        .expect("an empty directory");
    assert_eq!(entries, 0, "a new volume is empty");
}

/// Requires that the UUID tree leads to the top-level subvolume, and nowhere else.
#[track_caller]
fn assert_uuid_tree(volume: &Arc<BtrfsVolume>) {
    let mut items = Vec::new();
    let visit = |key: Key, data: &[u8]| {
        items.push((key, data.to_vec()));
        ControlFlow::Continue(())
    };
    let root = volume.tree(TreeId::UUID).expect("a UUID tree");
    volume.for_each_item(root, Key::MIN, visit).expect("it is read");
    let subvolumes = volume.subvolumes().collect::<Result<Vec<_>, _>>().expect("a list");
    let top = subvolumes.iter().find(|one| one.id == TreeId::FS).expect("the top level");
    let key = uuid_key(top.uuid.expect("its UUID"), ItemType::UUID_KEY_SUBVOL);
    assert_eq!(items, [(key, 5u64.to_le_bytes().to_vec())]);
}

/// [`fill`] makes at least this many entries.
const FILES: u64 = 100;

/// Writes something that changes every tree: small files, `mib` MiB of data, a subvolume, a
/// snapshot of it, and some removals.
fn fill(root: &Path, mib: u64) {
    let path = |name: &str| root.join(name);
    let mut random = Random::new(42);
    for number in 0..FILES {
        let len = usize::try_from(random.below(3000)).expect("a small file");
        std::fs::write(path(&format!("small-{number}")), random.text(len)).expect("a small file");
    }
    for number in 0..mib {
        let bytes = random.bytes(1 << 20);
        std::fs::write(path(&format!("data-{number}")), bytes).expect("room for the data");
    }
    let subvolume = path("subvolume");
    run("btrfs", &["subvolume".as_ref(), "create".as_ref(), subvolume.as_os_str()]);
    std::fs::write(subvolume.join("file"), b"in a subvolume").expect("a file in a subvolume");
    let snapshot = path("snapshot");
    let words: [&std::ffi::OsStr; 4] =
        ["subvolume".as_ref(), "snapshot".as_ref(), subvolume.as_ref(), snapshot.as_ref()];
    run("btrfs", &words);
    std::fs::write(snapshot.join("more"), b"in its snapshot").expect("a file in a snapshot");
    for number in 0..FILES / 10 {
        std::fs::remove_file(path(&format!("small-{number}"))).expect("a file goes");
    }
    for number in 0..FILES / 10 {
        std::fs::create_dir(path(&format!("dir-{number}"))).expect("a directory");
    }
}

pub(crate) fn uuid(number: u128) -> Uuid {
    Uuid::from_u128(number)
}
