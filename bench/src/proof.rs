//! Checks the volume after a benchmark of ours: `btrfs check` or `xfs_repair` finds no error, and
//! the kernel sees exactly the files that were acknowledged.

use std::path::{Path, PathBuf};

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::run::try_run;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;

use crate::Result;

/// Runs `btrfs check` on the volume, mounts it, and compares the names in each directory with those
/// in `expected`.
pub(crate) fn prove(image: &Path, expected: Vec<(String, Vec<Vec<u8>>)>) -> Result {
    try_run("btrfs", &["check".as_ref(), "--readonly".as_ref(), image.as_os_str()])?;
    let mount = MountedMembers::try_new(&[PathBuf::from(image)], "ro")?;
    compare(image, mount.path(), expected)
}

/// The same with `xfs_repair`, on a volume of XFS.
pub(crate) fn prove_xfs(image: &Path, expected: Vec<(String, Vec<Vec<u8>>)>) -> Result {
    let judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
    let disk = XfsDisk::served(&judges, image);
    disk.check()?;
    let mount = disk.mount("ro", &[]);
    compare(image, mount.path(), expected)
}

fn compare(image: &Path, mount: &Path, expected: Vec<(String, Vec<Vec<u8>>)>) -> Result {
    for (dir, mut expected) in expected {
        let mut found = names(&mount.join(&dir))?;
        found.sort_unstable();
        expected.sort_unstable();
        if found != expected {
            return Err(format!(
                "{dir} in {} has {} files, and not the {} that were acknowledged",
                image.display(),
                found.len(),
                expected.len()
            ));
        }
    }
    Ok(())
}

fn names(dir: &Path) -> Result<Vec<Vec<u8>>> {
    let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
    let entries = std::fs::read_dir(dir).map_err(failed)?;
    entries
        .map(|entry| entry.map(|entry| entry.file_name().into_encoded_bytes()).map_err(failed))
        .collect()
}
