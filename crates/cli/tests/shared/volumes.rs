//! Volumes of the format that a test runs on.

use std::path::Path;

use offshoot_device::{FileDevice, VolumeFormat};
use offshoot_testkit::run::{run, try_run};
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;

use super::does;
use super::format::is_xfs;

/// A new volume `name` of at least `mib` MiB in `dir`.
pub(crate) fn volume(dir: &Path, name: &str, mib: u64) {
    if is_xfs() {
        does(dir, &format!("mkfs {name} --format xfs --size {}M", mib.max(300)));
    } else {
        does(dir, &format!("mkfs {name} --size {mib}M"));
    }
}

/// Has `btrfs check` or `xfs_repair` look at a volume, if this machine has it.
#[track_caller]
pub(crate) fn check(image: &Path) {
    let device = FileDevice::open(image).expect("an image");
    if VolumeFormat::on(&device) == VolumeFormat::Xfs {
        if let Some(judges) = judges::require() {
            XfsDisk::served(&judges, image).assert_checks();
        }
    } else if try_run("btrfs", &["--version"]).is_ok() {
        run("btrfs", &["check".as_ref(), "--readonly".as_ref(), image.as_os_str()]);
    }
}
