//! Devices of ours as files of a mount, to which the kernel attaches loop devices. Each request of
//! the kernel reaches the device: what a [`CrashDevice`](offshoot_device::CrashDevice) records then
//! is what the kernel wrote, and in which order, and its FSYNC is the flush of the loop device.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use offshoot_device::BlockDevice;
use offshoot_fuse::{MountOptions, MountPoint, ServeOptions, Server, Transport, Unmount, unmount};
use offshoot_testkit::loops::unmount_when_free;
use offshoot_testkit::scratch_dir;
use offshoot_vfs::{
    Attr, Dedupe, DirEntry, EntryPlace, Errno, Error, Fallocate, FileFlags, FileId, FilePosition,
    FileSystem, FileSystemMut, FileType, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs,
    Timestamp, XattrMode,
};
use tempfile::TempDir;

const ROOT: FileId = FileId { dev: 0, ino: 1 };

/// The mount that shows the devices.
pub(crate) struct ServedDevices {
    dir: TempDir,
    files: DeviceFiles,
    last: AtomicU64,
    server: Option<Server>,
}

/// A device that is shown until this is dropped.
pub(crate) struct ServedDevice<'a> {
    served: &'a ServedDevices,
    ino: u64,
    path: PathBuf,
}

impl ServedDevices {
    pub(crate) fn start() -> Self {
        let dir = scratch_dir();
        let files = DeviceFiles::default();
        let place = MountPoint::new(dir.path(), MountOptions::new("devices", "offshoot"));
        let options = ServeOptions::over(Transport::Device);
        let server = Server::start(Box::new(files.clone()), Arc::new(place), options).unwrap();
        Self { dir, files, last: ROOT.ino.into(), server: Some(server) }
    }

    /// Shows `device` as a file. No name is used twice, because the kernel keeps names.
    pub(crate) fn show(&self, device: Arc<dyn BlockDevice>) -> ServedDevice<'_> {
        let ino = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.files.devices().insert(ino, device);
        ServedDevice { served: self, ino, path: self.dir.path().join(ino.to_string()) }
    }
}

impl Drop for ServedDevices {
    fn drop(&mut self) {
        // A loop device that stays attached keeps the connection, and `wait` would not return.
        let unmounted = if unmount_when_free(self.dir.path()).is_ok() {
            Ok(())
        } else {
            let _ = unmount(self.dir.path(), Unmount::ByForce);
            unmount(self.dir.path(), Unmount::Lazily)
        };
        let ended = self.server.take().map_or(Ok(()), Server::wait);
        let outcome = unmounted.and(ended);
        assert!(std::thread::panicking() || outcome.is_ok(), "{outcome:?}");
    }
}

impl ServedDevice<'_> {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ServedDevice<'_> {
    fn drop(&mut self) {
        self.served.files.devices().remove(&self.ino);
    }
}

/// One directory with a file for each device.
#[derive(Clone, Default)]
struct DeviceFiles(Arc<Mutex<DevicesByNumber>>);

type DevicesByNumber = BTreeMap<u64, Arc<dyn BlockDevice>>;

fn refused<T>(errno: Errno) -> Result<T> {
    Err(Error::posix(errno, "a device as a file"))
}

fn failed(error: std::io::Error) -> Error {
    Error::io("a device as a file", error)
}

impl DeviceFiles {
    fn devices(&self) -> MutexGuard<'_, DevicesByNumber> {
        self.0.lock().unwrap()
    }

    fn device(&self, file: FileId) -> Result<Arc<dyn BlockDevice>> {
        let device = self.devices().get(&file.ino).cloned();
        device.map_or_else(|| refused(Errno::NOENT), Ok)
    }
}

impl FileSystem for DeviceFiles {
    fn root(&self) -> FileId {
        ROOT
    }

    fn statfs(&self) -> Result<StatFs> {
        let total_bytes = 1 << 40;
        Ok(StatFs { total_bytes, used_bytes: 0, available_bytes: total_bytes, block_size: 4096 })
    }

    fn lookup(&self, _dir: FileId, name: &[u8]) -> Result<FileId> {
        let ino = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok());
        let file = FileId { ino: ino.unwrap_or(0), ..ROOT };
        self.device(file).map(|_| file)
    }

    fn parent(&self, _dir: FileId) -> Result<Option<Parent>> {
        Ok(None)
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        let (file_type, permissions, size) = if file == ROOT {
            (FileType::Directory, 0o700, 0)
        } else {
            (FileType::Regular, 0o600, self.device(file)?.size_bytes())
        };
        let time = Timestamp::default();
        Ok(Attr {
            file,
            file_type,
            permissions,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            size,
            allocated_bytes: size,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            generation: 0,
        })
    }

    fn read_dir(
        &self,
        _dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let numbers: Vec<u64> = self.devices().keys().copied().collect();
        for ino in numbers.into_iter().filter(|ino| *ino > after) {
            let (name, file) = (ino.to_string(), FileId { ino, ..ROOT });
            let file_type = FileType::Regular;
            let entry = DirEntry { name: name.as_bytes(), file, file_type, cookie: ino };
            if visit(entry).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn read_link(&self, _: FileId) -> Result<Vec<u8>> {
        refused(Errno::INVAL)
    }

    fn xattr(&self, _: FileId, _: &[u8]) -> Result<Vec<u8>> {
        refused(Errno::NODATA)
    }

    fn xattrs(&self, _: FileId, _: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<()> {
        Ok(())
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let device = self.device(file)?;
        let left = device.size_bytes().saturating_sub(offset);
        let len = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        device.read_at(offset, &mut buf[..len]).map_err(failed)?;
        Ok(len)
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = vec![0; 1 << 20];
        let mut at = range.start;
        while at < range.end {
            let most = usize::try_from(range.end - at).map_or(bytes.len(), |l| l.min(bytes.len()));
            let len = self.read(file, at, &mut bytes[..most])?;
            if len == 0 {
                break;
            }
            visit(at, &bytes[..len])?;
            at += len as u64;
        }
        Ok(())
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let size = self.attr(file)?.size;
        Ok((offset < size).then_some(offset..size))
    }

    fn prefetch(&self, _: &[FileId]) {}
}

impl FileSystemMut for DeviceFiles {
    fn write(&self, file: FileId, offset: u64, data: &[u8], _: Timestamp) -> Result<()> {
        self.device(file)?.write_at(offset, data).map_err(failed)
    }

    fn write_direct(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.write(file, offset, data, at)
    }

    fn fsync(&self, file: FileId) -> Result<()> {
        self.device(file)?.flush().map_err(failed)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn open(&self, _: FileId) -> Result<()> {
        Ok(())
    }

    fn release(&self, _: FileId) -> Result<()> {
        Ok(())
    }

    /// The kernel sets times.
    fn set_attr(&self, _: FileId, set: &SetAttr, _: Timestamp) -> Result<()> {
        if set.size.is_some() { refused(Errno::PERM) } else { Ok(()) }
    }

    fn mknod(&self, _: EntryPlace<'_>, _: NewNode, _: &NewFile) -> Result<FileId> {
        refused(Errno::PERM)
    }

    fn mkdir(&self, _: EntryPlace<'_>, _: &NewFile) -> Result<FileId> {
        refused(Errno::PERM)
    }

    fn symlink(&self, _: EntryPlace<'_>, _: &[u8], _: &NewFile) -> Result<FileId> {
        refused(Errno::PERM)
    }

    fn create_unnamed(&self, _: FileId, _: bool, _: &NewFile) -> Result<FileId> {
        refused(Errno::PERM)
    }

    fn link(&self, _: FileId, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        refused(Errno::PERM)
    }

    fn unlink(&self, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        refused(Errno::PERM)
    }

    fn rmdir(&self, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        refused(Errno::PERM)
    }

    fn rename_with(
        &self,
        _: EntryPlace<'_>,
        _: EntryPlace<'_>,
        _: Rename,
        _: Timestamp,
    ) -> Result<()> {
        refused(Errno::PERM)
    }

    fn set_flags(&self, _: FileId, _: FileFlags, _: Timestamp) -> Result<()> {
        refused(Errno::OPNOTSUPP)
    }

    /// The kernel writes zeros then.
    fn fallocate(&self, _: FileId, _: Fallocate, _: u64, _: u64, _: Timestamp) -> Result<()> {
        refused(Errno::OPNOTSUPP)
    }

    fn clone_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<()> {
        refused(Errno::OPNOTSUPP)
    }

    fn dedupe_range(&self, _: FilePosition, _: FilePosition, _: u64) -> Result<Dedupe> {
        refused(Errno::OPNOTSUPP)
    }

    fn copy_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<u64> {
        refused(Errno::OPNOTSUPP)
    }

    fn set_xattr(&self, _: FileId, _: &[u8], _: &[u8], _: XattrMode, _: Timestamp) -> Result<()> {
        refused(Errno::OPNOTSUPP)
    }

    fn remove_xattr(&self, _: FileId, _: &[u8], _: Timestamp) -> Result<()> {
        refused(Errno::OPNOTSUPP)
    }
}
