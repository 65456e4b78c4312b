//! The carried volume, which every machine can test.
//!
//! The kernel made the volume and recorded what it shows of it. A test compares with that record,
//! so it needs no root, no driver of the kernel and no tool.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem};
use offshoot_device::{BlockDevice, FileDevice, MemoryDevice};
use offshoot_testkit::btrfs::fixture;
use offshoot_testkit::manifest::{differences, manifest};

fn unpacked() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let image = dir.path().join("kernel.btrfs");
    fixture::unpack(&image).expect("the fixture unpacks");
    (dir, image)
}

fn top(device: Arc<dyn BlockDevice>) -> Filesystem {
    let volume = BtrfsVolume::open(vec![device], &EngineOptions::default()).expect("it opens");
    let id = volume.default_subvolume().expect("a default subvolume");
    volume.filesystem(id).expect("it opens")
}

#[track_caller]
fn judge(fs: &Filesystem) {
    let expected = fixture::repository().join(fixture::MANIFEST);
    let expected = std::fs::read_to_string(expected).expect("the manifest is carried");
    assert!(expected.lines().count() > 40, "the manifest lists the volume");
    let ours = manifest(fs).expect("everything is read");
    assert!(ours == expected, "{:#?}", differences(&ours, &expected));
}

#[test]
fn it_shows_what_the_kernel_showed() {
    let (_dir, image) = unpacked();
    judge(&top(Arc::new(FileDevice::open(&image).expect("it opens"))));
}

#[test]
fn the_same_from_memory() {
    let (_dir, image) = unpacked();
    let bytes = std::fs::read(image).expect("it is read");
    judge(&top(Arc::new(MemoryDevice::new(bytes))));
}

/// The volume has everything that the program can show; that makes it worth carrying.
#[test]
fn it_holds_one_of_each() {
    let (_dir, image) = unpacked();
    let device = Arc::new(FileDevice::open(&image).expect("it opens"));
    let volume = BtrfsVolume::open(vec![device], &EngineOptions::default()).expect("it opens");
    let subvolumes = volume.subvolumes().collect::<Result<Vec<_>, _>>().expect("a list");
    assert!(subvolumes.iter().any(|one| one.is_read_only), "a snapshot");
    assert!(subvolumes.len() >= 4, "subvolumes");
    let id = volume.default_subvolume().expect("a default subvolume");
    let text = manifest(&volume.filesystem(id).expect("it opens")).expect("it is read");
    for sign in [
        "xattr:security.capability",
        "xattr:system.posix_acl_access",
        "xattr:user.mime_type",
        "links=3",
        "CharDevice",
        "Fifo",
        "Symlink",
        "zlib.txt",
        "lzo.txt",
        "zstd.txt",
        "size=1073741824",
    ] {
        assert!(text.contains(sign), "the fixture holds no {sign}");
    }
}
