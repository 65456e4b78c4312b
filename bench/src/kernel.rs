//! The kernel's btrfs and XFS as sides of the seed workloads.
//!
//! A new volume with default features lies on a sparse image behind a loop device. It is mounted
//! with default options unless the caller passes others. A file is made with the system calls of
//! `fs_mark`: open, write, close. This is a little less work than `fs_mark` has, because paths
//! begin at an open directory instead of the root of the host, and an empty file gets no write. A
//! file that is written directly gets `O_DIRECT` before the write. If its size is not a multiple of
//! the sector size, the kernel writes it to its page cache and from there to the device.
//!
//! The benchmark of mounts makes files with the same calls in any directory.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::loops::{AttachedLoop, LoopMount};
use offshoot_testkit::run::try_run;
use rustix::fs::{
    AtFlags, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstatvfs, fsync, mkdirat, openat, syncfs,
    unlinkat,
};
use rustix::io::{Errno, pwrite};

use crate::Result;
use crate::workload::Site;

/// A volume that the kernel has mounted.
pub(crate) struct KernelVolume {
    root: OwnedFd,
    // Dropped after `root`, so that nothing is open at the unmount.
    _mount: Option<LoopMount>,
}

impl KernelVolume {
    /// Makes a new image of this size, makes a volume on it, and mounts it.
    pub(crate) fn new(image: &Path, size_bytes: u64) -> Result<Self> {
        Self::with_options(image, size_bytes, &[], "")
    }

    /// As [`Self::new`], with options for `mkfs.btrfs` and for the mount.
    pub(crate) fn with_options(
        image: &Path,
        size_bytes: u64,
        mkfs: &[&str],
        mount: &str,
    ) -> Result<Self> {
        new_image(image, size_bytes)?;
        let mut options: Vec<&OsStr> = mkfs.iter().map(OsStr::new).collect();
        options.extend([OsStr::new("-q"), image.as_os_str()]);
        try_run("mkfs.btrfs", &options)?;
        let mount = MountedMembers::try_new(&[image.to_path_buf()], mount)?;
        let root = root_of(mount.path())?;
        Ok(Self { root, _mount: Some(mount.into_mount()) })
    }

    /// Makes a new image of this size, and a volume of XFS on it, with a log of `log_bytes` if that
    /// is given. Mounts it.
    pub(crate) fn xfs(image: &Path, size_bytes: u64, log_bytes: Option<u64>) -> Result<Self> {
        new_image(image, size_bytes)?;
        let log = log_bytes.map(|bytes| format!("-lsize={bytes}"));
        let mut words = vec![OsStr::new("-q")];
        words.extend(log.as_deref().map(OsStr::new));
        words.push(image.as_os_str());
        try_run("mkfs.xfs", &words)?;
        let mount = LoopMount::new(vec![AttachedLoop::attach_direct(image)], "xfs", "noatime")?;
        let root = root_of(mount.path())?;
        Ok(Self { root, _mount: Some(mount) })
    }

    /// A directory of any mounted filesystem.
    pub(crate) fn at(dir: &Path) -> Result<Self> {
        let root = File::open(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        Ok(Self { root: root.into(), _mount: None })
    }
}

fn root_of(mount: &Path) -> Result<OwnedFd> {
    File::open(mount).map(Into::into).map_err(|error| format!("the mount: {error}"))
}

/// Makes a new sparse image.
pub(crate) fn new_image(image: &Path, size_bytes: u64) -> Result {
    remove_image(image)?;
    File::create(image)
        .and_then(|file| file.set_len(size_bytes))
        .map_err(|error| format!("{}: {error}", image.display()))
}

/// Removes an image, if it is there.
pub(crate) fn remove_image(image: &Path) -> Result {
    match std::fs::remove_file(image) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", image.display()))
        }
        _ => Ok(()),
    }
}

impl Site for KernelVolume {
    type Dir = OwnedFd;
    type File = OwnedFd;
    type Error = Errno;

    fn make_dir(&self, name: &str) -> Result<OwnedFd, Errno> {
        mkdirat(&self.root, name, Mode::from_raw_mode(0o777))?;
        openat(
            &self.root,
            name,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
    }

    fn create(&self, dir: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::TRUNC | OFlags::CLOEXEC;
        openat(dir, name, flags, Mode::from_raw_mode(0o666))
    }

    fn write(&self, file: &OwnedFd, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < data.len() {
            match pwrite(file, &data[done..], offset + done as u64)? {
                0 => return Err(Errno::IO),
                more => done += more,
            }
        }
        Ok(())
    }

    fn write_direct(&self, file: &OwnedFd, offset: u64, data: &[u8]) -> Result<(), Errno> {
        fcntl_setfl(file, fcntl_getfl(file)? | OFlags::DIRECT)?;
        self.write(file, offset, data)
    }

    fn remove(&self, dir: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
        unlinkat(dir, name, AtFlags::empty())
    }

    fn fsync_dir(&self, dir: &OwnedFd) -> Result<(), Errno> {
        fsync(dir)
    }

    fn available_bytes(&self) -> Result<u64, Errno> {
        fstatvfs(&self.root).map(|stat| stat.f_bavail * stat.f_frsize)
    }

    fn sync(&self) -> Result<(), Errno> {
        syncfs(&self.root)
    }

    fn is_no_space(error: &Errno) -> bool {
        *error == Errno::NOSPC
    }
}
