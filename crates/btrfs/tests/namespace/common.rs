//! What the tests of the namespace share.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, MkfsOptions, SubvolumeId, mkfs};
use offshoot_device::{BlockDevice, FileDevice};
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::compare::compare;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, NewFile, Timestamp};
use uuid::Uuid;

use crate::shown::show;

/// The time of all changes that need no time of their own.
pub(crate) const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 123_456_789 };

/// A new file that belongs to root.
pub(crate) const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// Opens the volume for writing.
pub(crate) fn open(disks: &Disks) -> Arc<BtrfsVolume> {
    open_with(disks, &EngineOptions::default())
}

pub(crate) fn open_with(disks: &Disks, options: &EngineOptions) -> Arc<BtrfsVolume> {
    let devices = disks
        .images()
        .iter()
        .map(|image| {
            let device = FileDevice::open_writable(image).expect("no other program uses the image");
            Arc::new(device) as Arc<dyn BlockDevice>
        })
        .collect();
    BtrfsVolume::open_writable(devices, options).expect("the volume opens")
}

/// A new volume of `mib` MiB in memory, and its device. The judges check it when the device is
/// dropped.
pub(crate) fn in_memory(node_size: u32, mib: u64) -> Arc<CheckedDevice> {
    let device = Arc::new(CheckedDevice::sparse(mib << 20, |device| {
        show(std::slice::from_ref(device)).expect("it opens")
    }));
    let mut options = MkfsOptions::new(Uuid::from_u128(1), AT);
    options.node_size = Some(node_size);
    mkfs(&[device.clone() as Arc<dyn BlockDevice>], &options).expect("a volume");
    device
}

/// Opens the top level for writing.
pub(crate) fn open_top(disks: &Disks) -> Filesystem {
    open(disks).filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// Opens the top level for reading.
pub(crate) fn open_read_only(disks: &Disks) -> Filesystem {
    let volume =
        BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("the volume opens");
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// Requires that `btrfs check` finds nothing, and that the kernel shows what we show.
pub(crate) fn judge(disks: &Disks, at_least: u64) {
    check(disks);
    let mount = disks.mount("ro,noatime");
    compare(&open_read_only(disks), mount.path()).assert_same(at_least);
}

/// Requires that `btrfs check` finds nothing.
pub(crate) fn check(disks: &Disks) {
    run("btrfs", &["check", "--readonly", disks.images()[0].to_str().expect("a plain path")]);
}

pub(crate) fn place(dir: FileId, name: &(impl AsRef<[u8]> + ?Sized)) -> EntryPlace<'_> {
    EntryPlace { dir, name: name.as_ref() }
}

/// The file at a path below the root of `fs`.
#[track_caller]
pub(crate) fn at(fs: &dyn FileSystem, path: &str) -> FileId {
    path.split('/').fold(fs.root(), |dir, name| {
        fs.lookup(dir, name.as_bytes()).unwrap_or_else(|error| panic!("{path}: {error}"))
    })
}
