//! A volume that is open, and calls by path.

mod create;
mod edit;
mod look;
mod subvolumes;

use std::io;
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs as btrfs;
use offshoot_btrfs_format::TreeId;
use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_vfs::escape::Escaped;
use offshoot_vfs::path::{LastLink, at_path, resolve, resolve_end};
use offshoot_vfs::{
    self as vfs, Code, EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, HeldFiles,
    Result, Timestamp,
};
use offshoot_xfs::XfsVolume;

use crate::OpenOptions;

pub use look::{DirEntry, ReadDir, WalkEntry};

/// A volume that is open, and its files by path.
///
/// A path begins at the root of the volume, with or without a `/` in front. It may have any bytes,
/// and crosses subvolumes. Symbolic links are followed inside of the volume only, an absolute one
/// from its root.
///
/// All calls may be made from many threads at once. A clone is another handle on the same volume.
/// No permissions are checked: a program that may open the image may change everything in it.
///
/// A call by path uses the file that has the path when the call finds it, whatever other threads do
/// to the path meanwhile.
///
/// Changes are durable when [`sync`](Self::sync) or [`sync_file`](Self::sync_file) returned. After
/// a crash the volume has what was durable. So has a btrfs volume whose last handle is dropped; one
/// of XFS is shut down then, which stores everything. [`close`](Self::close) ends the use of a
/// volume, and returns the error if something is not stored.
#[derive(Clone)]
pub struct Volume {
    files: VolumeFiles,
    owner: (u32, u32),
    time: Option<Timestamp>,
    read_limit: u64,
}

/// The files of a volume, by its format.
#[derive(Clone)]
enum VolumeFiles {
    Btrfs(btrfs::Filesystem),
    Xfs(XfsShare),
}

/// A volume of XFS, and its files, which refuse changes when it is open for reading.
#[derive(Clone)]
struct XfsShare {
    volume: Arc<XfsVolume>,
    files: Arc<dyn FileSystemMut>,
}

impl Deref for VolumeFiles {
    type Target = dyn FileSystemMut;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Btrfs(files) => files,
            Self::Xfs(share) => &*share.files,
        }
    }
}

impl VolumeFiles {
    /// Access to subvolumes.
    fn btrfs(&self) -> Result<&btrfs::Filesystem> {
        match self {
            Self::Btrfs(files) => Ok(files),
            Self::Xfs(_) => Err(only_in_btrfs("a subvolume")),
        }
    }
}

/// The error about `what`, which only volumes of btrfs have.
pub(crate) fn only_in_btrfs(what: &str) -> Error {
    let what = format!("{what} of an XFS volume: that is for btrfs alone");
    Error::unsupported(Code::NotInFormat, what)
}

impl Volume {
    /// Opens the volume in the image or on the block device at `path` for reading.
    /// [`OpenOptions`] opens it in other ways.
    ///
    /// # Errors
    /// [`Code`](crate::Code) lists the obstacles.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        OpenOptions::new().open(path)
    }

    pub(crate) fn open_at(path: &Path, options: &OpenOptions) -> Result<Self> {
        Self::over(options.devices_at(path)?, options)
    }

    pub(crate) fn over(devices: Vec<Arc<dyn BlockDevice>>, options: &OpenOptions) -> Result<Self> {
        let format = devices.first().map(|device| VolumeFormat::on(&**device));
        let files = if format == Some(VolumeFormat::Xfs) {
            VolumeFiles::Xfs(open_xfs(devices, options)?)
        } else {
            VolumeFiles::Btrfs(open_btrfs(devices, options)?)
        };
        let OpenOptions { owner, time, read_limit, .. } = *options;
        Ok(Self { files, owner, time, read_limit })
    }

    /// The files by number instead of by path: the trait that the mount uses, which can do more.
    #[must_use]
    pub fn files(&self) -> &dyn FileSystemMut {
        &*self.files
    }

    /// What the volume has that is about no file: label, identity, trimming.
    #[must_use]
    pub fn file_system(&self) -> Arc<dyn vfs::Volume> {
        match &self.files {
            VolumeFiles::Btrfs(files) => files.volume().clone(),
            VolumeFiles::Xfs(share) => share.volume.clone(),
        }
    }

    /// Makes everything durable that was done to the volume.
    ///
    /// # Errors
    /// Those of the devices. Then it is unknown what of it is durable.
    pub fn sync(&self) -> Result<()> {
        self.files.sync()
    }

    /// Makes everything durable that was done, and ends all writing through this handle and its
    /// clones: as an unmount. What is changed later fails with `EROFS`.
    ///
    /// A volume of XFS whose last handle is dropped instead is closed too, but an error is told to
    /// [`OpenOptions::on_warning`] alone.
    ///
    /// # Errors
    /// As [`sync`](Self::sync). Writing has ended in that case too.
    pub fn close(self) -> Result<()> {
        self.file_system().shut_down()
    }

    /// Makes everything durable that was done to one file. It costs less than [`sync`](Self::sync).
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub fn sync_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        call.files.fsync(call.file(path)?).map_err(|error| at_path(error, path))
    }

    fn now(&self) -> Timestamp {
        self.time.unwrap_or_else(Timestamp::now)
    }

    /// Begins a call by path.
    fn call(&self) -> PathCall<'_> {
        PathCall { volume: self, files: HeldFiles::new(&*self.files) }
    }
}

/// A call by path, which holds the files that it finds.
struct PathCall<'v> {
    volume: &'v Volume,
    files: HeldFiles<'v>,
}

impl PathCall<'_> {
    /// The file at `path`, links followed.
    fn file(&self, path: &[u8]) -> Result<FileId> {
        resolve(&self.files, path, LastLink::Follow)
    }

    /// The name of the file at `path`, and the file; a link is the file itself.
    fn named(&self, path: &[u8]) -> Result<(NameInDirectory, FileId)> {
        let end = resolve_end(&self.files, path, LastLink::Keep)?;
        let file = end.file.ok_or_else(|| fail(Errno::NOENT, path))?;
        let (dir, name) = end.place.ok_or_else(|| fail(Errno::BUSY, path))?;
        Ok((NameInDirectory { dir, name }, file))
    }

    /// The free name that `path` is.
    fn free(&self, path: &[u8]) -> Result<NameInDirectory> {
        let end = resolve_end(&self.files, path, LastLink::Keep)?;
        match (end.place, end.file) {
            (Some((dir, name)), None) => Ok(NameInDirectory { dir, name }),
            _ => Err(fail(Errno::EXIST, path)),
        }
    }
}

/// A directory and a name in it.
struct NameInDirectory {
    dir: FileId,
    name: Vec<u8>,
}

impl NameInDirectory {
    fn place(&self) -> EntryPlace<'_> {
        EntryPlace { dir: self.dir, name: &self.name }
    }
}

/// Opens the btrfs volume with these members.
fn open_btrfs(
    devices: Vec<Arc<dyn BlockDevice>>,
    options: &OpenOptions,
) -> Result<btrfs::Filesystem> {
    let engine = options.for_engine()?;
    let open = if options.is_writable {
        btrfs::BtrfsVolume::open_writable
    } else {
        btrfs::BtrfsVolume::open
    };
    let volume = open(devices, &engine)?;
    let root = match &options.subvolume {
        None => volume.default_subvolume()?,
        Some(path) => subvolume_at(&volume.filesystem(TreeId::FS)?, bytes(path))?,
    };
    volume.filesystem(root)
}

/// Opens the XFS volume on the only one of `devices`.
fn open_xfs(mut devices: Vec<Arc<dyn BlockDevice>>, options: &OpenOptions) -> Result<XfsShare> {
    let engine = options.for_xfs()?;
    let device = devices.pop().filter(|_| devices.is_empty());
    let device = device.ok_or_else(|| only_in_btrfs("a further device"))?;
    let open = if options.is_writable { XfsVolume::open_writable } else { XfsVolume::open };
    let volume = open(device, &engine)?;
    let files = vfs::Volume::files(volume.clone(), volume.root().dev)?;
    Ok(XfsShare { volume, files: files.into() })
}

/// The subvolume whose root is at `path`.
fn subvolume_at(files: &btrfs::Filesystem, path: &[u8]) -> Result<btrfs::SubvolumeId> {
    let file = resolve(files, path, LastLink::Follow)?;
    let id = TreeId(file.dev);
    if files.volume().filesystem(id)?.root() != file {
        let what = format!("{} is no subvolume", Escaped(path));
        return Err(Error::posix(Errno::INVAL, what));
    }
    Ok(id)
}

/// A path as the volume has it.
fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

fn fail(errno: Errno, path: &[u8]) -> Error {
    Error::posix(errno, Escaped(path).to_string())
}

/// An error that a walk shows, to be kept. (One of the host cannot be cloned.)
fn owned(error: &Error) -> Error {
    match error {
        Error::Posix { what, errno, code } => Error::posix(*errno, what).with_code(*code),
        Error::Io { file, what, source, code } => {
            let source = match source.raw_os_error() {
                Some(number) => io::Error::from_raw_os_error(number),
                None => io::Error::new(source.kind(), source.to_string()),
            };
            Error::Io { file: file.clone(), what: what.clone(), source, code: *code }
        }
        Error::Unsupported { what, code } => Error::unsupported(*code, what),
        Error::Corrupt(corrupt) => Error::Corrupt(corrupt.clone()),
    }
}
