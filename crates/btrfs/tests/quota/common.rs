//! What the tests of quotas share.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, Engine, EngineOptions, Filesystem, SubvolumeId, VolumeReport};
use offshoot_btrfs_format::quota::{QgroupId, STATUS_INCONSISTENT, STATUS_KEY, STATUS_RESCAN};
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupStatusItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut, NewFile, SetAttr, Timestamp};
use parking_lot::Mutex;

/// The time of all changes.
pub(crate) const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 123_456_789 };

/// A new file that belongs to root.
pub(crate) const NEW: NewFile = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT };

/// A volume of one member that `mkfs.btrfs` made and the kernel changed.
pub(crate) fn made(judges: &Judges, mkfs: &str, script: &str) -> Disks {
    let disks = Disks::create(judges, 1, 512);
    disks.mkfs_and_settle(&mkfs.split_whitespace().collect::<Vec<_>>());
    by_kernel(&disks, script, &[]);
    disks
}

/// Has the kernel run a script in the volume. Its log may have only the `expected` complaints.
pub(crate) fn by_kernel(disks: &Disks, script: &str, expected: &[&'static str]) {
    let mount = disks.mount_watched("rw,noatime,max_inline=0", expected);
    shell(mount.path(), script);
}

/// Runs a script in a directory.
pub(crate) fn shell(dir: &Path, script: &str) -> String {
    let script = format!("set -e; cd '{}'; {script}", dir.display());
    run("sh", &["-c", &script])
}

/// The reports of a volume since it was opened.
#[derive(Clone, Default)]
pub(crate) struct VolumeReports(Arc<Mutex<Vec<VolumeReport>>>);

impl VolumeReports {
    /// How many reports say that quotas are not kept.
    pub(crate) fn not_kept(&self) -> usize {
        self.0.lock().iter().filter(|&report| *report == VolumeReport::QuotasNotKept).count()
    }
}

/// Opens the volume for writing. It commits only when the caller asks for it, and keeps no data
/// inline.
pub(crate) fn open(disks: &Disks) -> (Filesystem, VolumeReports) {
    let told = VolumeReports::default();
    let reports = told.0.clone();
    let options = EngineOptions {
        commit_interval: None,
        max_inline: 0,
        reporter: Some(Arc::new(move |report: &VolumeReport| reports.lock().push(report.clone()))),
        ..EngineOptions::default()
    };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
    (volume.filesystem(SubvolumeId::FS).expect("every volume has one"), told)
}

/// The file at a path below the root of `fs`.
#[track_caller]
pub(crate) fn at(fs: &dyn FileSystem, path: &str) -> FileId {
    path.split('/').filter(|name| !name.is_empty()).fold(fs.root(), |dir, name| {
        fs.lookup(dir, name.as_bytes()).unwrap_or_else(|error| panic!("{path}: {error}"))
    })
}

/// Writes a new file.
pub(crate) fn write(fs: &dyn FileSystemMut, dir: FileId, name: &str, bytes: usize) -> FileId {
    let place = EntryPlace { dir, name: name.as_bytes() };
    let file = fs.create(place, &NEW).expect("a new file");
    fs.write(file, 0, &vec![7; bytes], AT).expect("there is room");
    file
}

/// Truncates a file.
pub(crate) fn cut(fs: &dyn FileSystemMut, file: FileId, size: u64) {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fs.set_attr(file, &set, AT).expect("it is cut");
}

/// The quota tree of a volume.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) flags: u64,
    /// How many bytes each group refers to, and how many of them are exclusive to it.
    pub(crate) used: BTreeMap<String, [u64; 2]>,
    /// The group relations, as the quota tree has them.
    pub(crate) relations: Vec<[String; 2]>,
}

impl Groups {
    pub(crate) fn of(disks: &Disks) -> Self {
        let volume =
            BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
        Self::in_volume(&volume)
    }

    pub(crate) fn in_volume(volume: &Engine) -> Self {
        let (mut groups, mut limits) = (Self::default(), Vec::new());
        let root = volume.tree(TreeId::QUOTA).expect("there are quotas");
        let outcome = volume.for_each_item(root, Key::MIN, |key, data| {
            let (one, other) = (QgroupId(key.objectid), QgroupId(key.offset));
            match key.item_type {
                ItemType::QGROUP_STATUS => {
                    assert_eq!(key, STATUS_KEY);
                    groups.flags = QgroupStatusItem::view(data).expect("its status").flags.get();
                }
                ItemType::QGROUP_INFO => {
                    let item = QgroupInfoItem::view(data).expect("what it uses");
                    groups.used.insert(other.to_string(), [item.rfer.get(), item.excl.get()]);
                }
                ItemType::QGROUP_LIMIT => limits.push(other.to_string()),
                ItemType::QGROUP_RELATION => {
                    groups.relations.push([one.to_string(), other.to_string()]);
                }
                other => panic!("an item of type {other} in the quota tree"),
            }
            ControlFlow::Continue(())
        });
        outcome.expect("the quota tree reads");
        limits.sort();
        assert_eq!(groups.used.keys().cloned().collect::<Vec<_>>(), limits, "both items of each");
        groups
    }

    pub(crate) fn is_inconsistent(&self) -> bool {
        self.flags & STATUS_INCONSISTENT != 0
    }

    pub(crate) fn is_counting(&self) -> bool {
        self.flags & STATUS_RESCAN != 0
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.used.keys().map(String::as_str).collect()
    }
}

/// Has the kernel count everything anew, and requires that `btrfs check` agrees.
#[track_caller]
pub(crate) fn assert_counted_anew(disks: &Disks) -> Groups {
    by_kernel(disks, "btrfs quota rescan -w .", &[]);
    let groups = Groups::of(disks);
    assert!(!groups.is_inconsistent() && !groups.is_counting(), "{groups:?}");
    disks.assert_checks();
    groups
}
