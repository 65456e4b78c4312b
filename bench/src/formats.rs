//! The formats of the volumes that are compared: how each side makes and opens them, and which
//! judge checks those of ours.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsVolume, Compress, EngineOptions, Filesystem, MkfsOptions, SubvolumeId, mkfs,
};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::loops::{AttachedLoop, LoopMount};
use offshoot_testkit::run::try_run;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{FileSystemMut, Timestamp, Volume};
use offshoot_xfs::{XfsMkfsOptions, XfsOptions, XfsVolume, mkfs_xfs};
use uuid::Uuid;

use crate::Result;
use crate::sides::said;

/// A format of volumes.
pub(crate) trait BenchFormat {
    /// A volume that the library has opened.
    type Opened: Send + Sync;

    /// Makes a volume with the library.
    fn make(device: &Arc<dyn BlockDevice>) -> Result;
    /// Opens a volume with the library. With `compress` it compresses all data that is written.
    fn open(device: Arc<dyn BlockDevice>, compress: Option<&str>) -> Result<Self::Opened>;
    /// The files of an open volume.
    fn files(opened: &Self::Opened) -> &dyn FileSystemMut;
    /// The same, where the format has subvolumes.
    fn subvolume(opened: &Self::Opened) -> Result<&Filesystem>;
    /// The number of commits so far, if the engine counts them.
    fn commits(opened: &Self::Opened) -> Option<u64>;

    /// Makes a volume with the program of the format.
    fn mkfs(image: &Path) -> Result;
    /// Mounts a volume with the kernel.
    fn mount(image: &Path, options: &str) -> Result<LoopMount>;
    /// Lets the judge of the format look at a volume.
    fn check(image: &Path) -> Result;
}

/// The format btrfs.
pub(crate) struct Btrfs;

impl BenchFormat for Btrfs {
    type Opened = Filesystem;

    fn make(device: &Arc<dyn BlockDevice>) -> Result {
        let options = MkfsOptions::new(Uuid::new_v4(), Timestamp::now());
        mkfs(std::slice::from_ref(device), &options).map(drop).map_err(said)
    }

    fn open(device: Arc<dyn BlockDevice>, compress: Option<&str>) -> Result<Filesystem> {
        let method = compress.map(str::parse).transpose().map_err(said)?;
        let options = EngineOptions {
            compress: method.map(|method| Compress { method, is_forced: true }),
            ..EngineOptions::default()
        };
        let volume = BtrfsVolume::open_writable(vec![device], &options).map_err(said)?;
        volume.filesystem(SubvolumeId::FS).map_err(said)
    }

    fn files(opened: &Filesystem) -> &dyn FileSystemMut {
        opened
    }

    fn subvolume(opened: &Filesystem) -> Result<&Filesystem> {
        Ok(opened)
    }

    fn commits(opened: &Filesystem) -> Option<u64> {
        Some(opened.volume().stats().commits)
    }

    fn mkfs(image: &Path) -> Result {
        try_run("mkfs.btrfs", &["-q".as_ref(), image.as_os_str()]).map(drop)
    }

    fn mount(image: &Path, options: &str) -> Result<LoopMount> {
        let mount = MountedMembers::try_new(&[PathBuf::from(image)], options)?;
        for device in mount.devices() {
            try_run::<&str>("losetup", &["--direct-io=on", device])?;
        }
        Ok(mount.into_mount())
    }

    fn check(image: &Path) -> Result {
        let options = ["check", "--readonly", "--check-data-csum"].map(AsRef::as_ref);
        try_run("btrfs", &[&options[..], &[image.as_os_str()]].concat()).map(drop)
    }
}

/// The format XFS.
pub(crate) struct Xfs;

/// An open volume of XFS, which is unmounted when this is dropped.
pub(crate) struct LibraryXfs {
    volume: Arc<XfsVolume>,
    files: Box<dyn FileSystemMut>,
}

impl Drop for LibraryXfs {
    fn drop(&mut self) {
        if let Err(error) = self.volume.shut_down() {
            eprintln!("offshoot-bench: the end of the volume: {error}");
        }
    }
}

impl BenchFormat for Xfs {
    type Opened = LibraryXfs;

    fn make(device: &Arc<dyn BlockDevice>) -> Result {
        let options = XfsMkfsOptions::new(Uuid::new_v4(), Timestamp::now());
        mkfs_xfs(&**device, &options).map(drop).map_err(said)
    }

    fn open(device: Arc<dyn BlockDevice>, compress: Option<&str>) -> Result<LibraryXfs> {
        if compress.is_some() {
            return Err("XFS compresses nothing".to_owned());
        }
        let volume = XfsVolume::open_writable(device, &XfsOptions::default()).map_err(said)?;
        let files = volume.clone().files(0).map_err(said)?;
        Ok(LibraryXfs { volume, files })
    }

    fn files(opened: &LibraryXfs) -> &dyn FileSystemMut {
        &*opened.files
    }

    fn subvolume(_: &LibraryXfs) -> Result<&Filesystem> {
        Err("XFS has no subvolumes".to_owned())
    }

    fn commits(_: &LibraryXfs) -> Option<u64> {
        None
    }

    fn mkfs(image: &Path) -> Result {
        try_run("mkfs.xfs", &["-q".as_ref(), image.as_os_str()]).map(drop)
    }

    fn mount(image: &Path, options: &str) -> Result<LoopMount> {
        let device = AttachedLoop::attach_direct(image);
        LoopMount::new(vec![device], "xfs", options)
    }

    fn check(image: &Path) -> Result {
        let judges = judges::require().ok_or("the kernel mounts volumes, which takes root")?;
        XfsDisk::served(&judges, image).check()
    }
}
