//! What the tests of subvolumes share.

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_btrfs_format::{Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::compare;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, NewFile, Timestamp};

/// The time of all changes.
pub(crate) const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 123_456_789 };

/// A new file that belongs to root.
pub(crate) const NEW: NewFile = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT };

/// Opens the volume for writing. It commits only when the caller asks for it.
pub(crate) fn open(disks: &Disks) -> Arc<BtrfsVolume> {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("the volume opens")
}

/// A new volume of 256 MiB on a disk of its own, opened for writing, and its top level. Returns
/// `None` where there are no judges.
pub(crate) fn fresh(mkfs: &[&str]) -> Option<(Disks, Arc<BtrfsVolume>, Filesystem)> {
    let disks = Disks::create(&judges::require()?, 1, 256);
    disks.mkfs(mkfs);
    let volume = open(&disks);
    let fs = top(&volume);
    Some((disks, volume, fs))
}

pub(crate) fn top(volume: &Arc<BtrfsVolume>) -> Filesystem {
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// Opens the top level for reading.
pub(crate) fn open_read_only(disks: &Disks) -> Filesystem {
    let volume =
        BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("the volume opens");
    top(&volume)
}

/// Requires that `btrfs check` finds nothing, and that the kernel shows what we show.
pub(crate) fn judge(disks: &Disks, at_least: u64) {
    disks.assert_checks();
    let mount = disks.mount("ro,noatime");
    compare(&open_read_only(disks), mount.path()).assert_same(at_least);
}

pub(crate) fn place(dir: FileId, name: &(impl AsRef<[u8]> + ?Sized)) -> EntryPlace<'_> {
    EntryPlace { dir, name: name.as_ref() }
}

/// The file at a path below the root of `fs`.
#[track_caller]
pub(crate) fn at(fs: &dyn FileSystem, path: &str) -> FileId {
    path.split('/').filter(|name| !name.is_empty()).fold(fs.root(), |dir, name| {
        fs.lookup(dir, name.as_bytes()).unwrap_or_else(|error| panic!("{path}: {error}"))
    })
}

/// The directory of a path below the root of `fs`, and the last name in the path.
#[track_caller]
pub(crate) fn split<'p>(fs: &dyn FileSystem, path: &'p str) -> (FileId, &'p str) {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    (at(fs, dir), name)
}

/// The subvolume whose root is at a path below the root of `fs`.
#[track_caller]
pub(crate) fn subvolume_at(fs: &dyn FileSystem, path: &str) -> SubvolumeId {
    let file = at(fs, path);
    assert_eq!(file.ino, 256, "{path} is the root of a subvolume");
    TreeId(file.dev)
}

/// How many items of a tree have a key for which `is_wanted` holds.
pub(crate) fn items(fs: &Filesystem, tree: TreeId, is_wanted: impl Fn(Key) -> bool) -> u64 {
    let volume = fs.volume();
    let root = if tree == TreeId::ROOT { volume.root_tree() } else { volume.tree(tree).unwrap() };
    let mut count = 0;
    let outcome = volume.for_each_item(root, Key::MIN, |key, _| {
        count += u64::from(is_wanted(key));
        ControlFlow::Continue(())
    });
    outcome.expect("the tree is sound");
    count
}
