//! A mounted directory as a filesystem.
//!
//! The judge in most tests is what the kernel shows of a volume. [`HostFilesystem`] puts that
//! behind the same trait as our engine, so that one comparison serves both sides and can be tested
//! by comparing a directory with itself.
//!
//! A [`FileId`] is the inode number together with the id of the subvolume if `statx` returns it,
//! and with the device number otherwise. A file is reached through the name under which it was seen
//! last. Paths longer than `PATH_MAX` work, because a file is opened from a directory that is
//! opened piece by piece.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirEntryExt, FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use offshoot_vfs::{
    Attr, DirEntry, Errno, Error, FileFlags, FileId, FileSystem, FileType, Parent, Result, StatFs,
    Structure, Timestamp,
};
use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom, Statx, StatxFlags, StatxTimestamp};

/// `STATX_SUBVOL`, which rustix has no name for.
const STATX_SUBVOL: StatxFlags = StatxFlags::from_bits_retain(0x8000);

/// The most bytes of a path that are resolved at once, well below `PATH_MAX`.
const PATH_PIECE: usize = 2048;

/// A directory of the host and everything below it.
#[derive(Debug)]
pub struct HostFilesystem {
    base: OwnedFd,
    root: FileId,
    has_subvolumes: bool,
    /// The directory and the name under which each file was seen last.
    seen: Mutex<HashMap<FileId, Parent>>,
    /// The file that was read last, kept open because a file is usually read in several calls.
    open: Mutex<Option<(FileId, std::sync::Arc<File>)>>,
}

impl HostFilesystem {
    /// The tree that starts at `path`.
    ///
    /// # Errors
    /// When `path` is not a directory or cannot be opened.
    pub fn new(path: &Path) -> Result<Self> {
        let base = rustix::fs::open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| Error::posix(errno, path.display().to_string()))?;
        let stat = statx(&base, Path::new(""))?;
        Ok(Self {
            base,
            root: file_id(&stat),
            has_subvolumes: stat.stx_mask & STATX_SUBVOL.bits() != 0,
            seen: Mutex::default(),
            open: Mutex::default(),
        })
    }

    /// Whether the kernel returns subvolume ids here, so that file ids are those of the volume
    /// itself.
    #[must_use]
    pub fn tells_subvolumes(&self) -> bool {
        self.has_subvolumes
    }

    /// Opens the directory in which `file` was seen. Returns it with the name of the file there.
    fn locate(&self, file: FileId) -> Result<(OwnedFd, PathBuf)> {
        let mut names = Vec::new();
        {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let mut at = file;
            while at != self.root {
                let parent = seen
                    .get(&at)
                    .ok_or_else(|| Error::posix(Errno::NOENT, format!("{at} was never seen")))?;
                names.push(OsString::from_vec(parent.name.clone()));
                at = parent.dir;
            }
        }
        let mut dir = rustix::io::fcntl_dupfd_cloexec(&self.base, 0).map_err(posix(file))?;
        let mut piece = PathBuf::new();
        for (left, name) in names.iter().enumerate().skip(1).rev() {
            piece.push(name);
            if left == 1 || piece.as_os_str().len() > PATH_PIECE {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                dir =
                    rustix::fs::openat(&dir, &piece, flags, Mode::empty()).map_err(posix(file))?;
                piece.clear();
            }
        }
        Ok((dir, names.first().map_or_else(|| PathBuf::from("."), PathBuf::from)))
    }

    /// A path to `file` itself, even if it is a symbolic link, and the descriptor that keeps the
    /// path valid.
    fn path(&self, file: FileId) -> Result<(OwnedFd, PathBuf)> {
        let (dir, name) = self.locate(file)?;
        let through = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
        Ok((dir, through))
    }

    fn open_regular(&self, file: FileId) -> Result<std::sync::Arc<File>> {
        if let Some((last, opened)) = &*self.open.lock().unwrap_or_else(PoisonError::into_inner)
            && *last == file
        {
            return Ok(opened.clone());
        }
        match self.attr(file)?.file_type {
            FileType::Regular => {}
            FileType::Directory => return Err(Error::posix(Errno::ISDIR, file.to_string())),
            // Opening a device or a pipe has side effects, and no engine reads them.
            _ => return Err(Error::posix(Errno::INVAL, file.to_string())),
        }
        let (dir, name) = self.locate(file)?;
        let opened = rustix::fs::openat(
            &dir,
            &name,
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(posix(file))?;
        let opened = std::sync::Arc::new(File::from(opened));
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some((file, opened.clone()));
        Ok(opened)
    }

    fn remember(&self, file: FileId, dir: FileId, name: &[u8]) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert(file, Parent { dir, name: name.to_vec() });
    }
}

/// Turns an errno about `file` into an error.
fn posix(file: FileId) -> impl Fn(Errno) -> Error {
    move |errno| Error::posix(errno, file.to_string())
}

fn statx(dir: &OwnedFd, name: &Path) -> Result<Statx> {
    rustix::fs::statx(
        dir,
        name,
        AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH,
        StatxFlags::BASIC_STATS | StatxFlags::BTIME | STATX_SUBVOL,
    )
    .map_err(|errno| Error::posix(errno, name.display().to_string()))
}

fn file_id(stat: &Statx) -> FileId {
    let dev = if stat.stx_mask & STATX_SUBVOL.bits() != 0 {
        stat.stx_subvol
    } else {
        rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor)
    };
    FileId { dev, ino: stat.stx_ino }
}

fn time(time: StatxTimestamp) -> Timestamp {
    Timestamp { secs: time.tv_sec, nanos: time.tv_nsec }
}

fn file_type(host: std::fs::FileType) -> FileType {
    if host.is_dir() {
        FileType::Directory
    } else if host.is_symlink() {
        FileType::Symlink
    } else if host.is_char_device() {
        FileType::CharDevice
    } else if host.is_block_device() {
        FileType::BlockDevice
    } else if host.is_fifo() {
        FileType::Fifo
    } else if host.is_socket() {
        FileType::Socket
    } else {
        FileType::Regular
    }
}

impl FileSystem for HostFilesystem {
    fn root(&self) -> FileId {
        self.root
    }

    fn statfs(&self) -> Result<StatFs> {
        let stat = rustix::fs::fstatvfs(&self.base).map_err(posix(self.root))?;
        Ok(StatFs {
            total_bytes: stat.f_blocks * stat.f_frsize,
            used_bytes: (stat.f_blocks - stat.f_bfree) * stat.f_frsize,
            available_bytes: stat.f_bavail * stat.f_frsize,
            block_size: u32::try_from(stat.f_bsize).unwrap_or(u32::MAX),
        })
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        let (_keep, path) = self.path(dir)?;
        let opened = rustix::fs::open(
            &path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(posix(dir))?;
        let file = file_id(&statx(&opened, Path::new(std::ffi::OsStr::from_bytes(name)))?);
        self.remember(file, dir, name);
        Ok(file)
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        if dir == self.root {
            return Ok(None);
        }
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.get(&dir) {
            Some(parent) => Ok(Some(parent.clone())),
            None => Err(Error::posix(Errno::NOENT, format!("{dir} was never seen"))),
        }
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        let (dir, name) = self.locate(file)?;
        let stat = statx(&dir, &name)?;
        let mode = u32::from(stat.stx_mode);
        let file_type = FileType::from_mode(mode).ok_or_else(|| {
            Error::corrupt(Structure::Mode, format!("{mode:o} is of no file type"))
        })?;
        Ok(Attr {
            file: file_id(&stat),
            file_type,
            permissions: mode & 0o7777,
            nlink: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            rdev: (stat.stx_rdev_major, stat.stx_rdev_minor),
            size: stat.stx_size,
            allocated_bytes: stat.stx_blocks * 512,
            atime: time(stat.stx_atime),
            mtime: time(stat.stx_mtime),
            ctime: time(stat.stx_ctime),
            btime: time(stat.stx_btime),
            generation: 0,
        })
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        if !matches!(self.attr(file)?.file_type, FileType::Regular | FileType::Directory) {
            return Ok(FileFlags::empty());
        }
        let (_keep, path) = self.path(file)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, Mode::empty()).map_err(posix(file))?;
        match rustix::fs::ioctl_getflags(&opened) {
            Ok(flags) => Ok(FileFlags::from_bits_truncate(flags.bits())),
            // The filesystem has no flags.
            Err(Errno::NOTTY | Errno::OPNOTSUPP) => Ok(FileFlags::empty()),
            Err(errno) => Err(posix(file)(errno)),
        }
    }

    /// The kernel's own cookies may change between two calls. The index in the listing does not,
    /// because no process changes the directory during a test.
    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let (_keep, path) = self.path(dir)?;
        let entries = std::fs::read_dir(&path).map_err(|e| Error::io(dir.to_string(), e))?;
        let mut unseen = Ok(());
        for (place, entry) in (1..).zip(entries) {
            let entry = entry.map_err(|e| Error::io(dir.to_string(), e))?;
            if place <= after {
                continue;
            }
            let name = entry.file_name();
            // An entry that the kernel cannot open must not hide the names behind it.
            let file = match self.lookup(dir, name.as_bytes()) {
                Ok(file) => file,
                Err(error) => {
                    unseen = unseen.and(Err(error));
                    continue;
                }
            };
            let file_type =
                file_type(entry.file_type().map_err(|e| Error::io(dir.to_string(), e))?);
            debug_assert_ne!(entry.ino(), 0);
            let shown = DirEntry { name: name.as_bytes(), file, file_type, cookie: place };
            if visit(shown).is_break() {
                break;
            }
        }
        unseen
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        let (dir, name) = self.locate(file)?;
        let target = rustix::fs::readlinkat(&dir, &name, Vec::new()).map_err(posix(file))?;
        Ok(target.into_bytes())
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        let (_keep, path) = self.path(file)?;
        let len = rustix::fs::lgetxattr_query(&path, name).map_err(posix(file))?;
        let mut value = Vec::with_capacity(len + 1);
        rustix::fs::lgetxattr(&path, name, rustix::buffer::spare_capacity(&mut value))
            .map_err(posix(file))?;
        Ok(value)
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let (_keep, path) = self.path(file)?;
        let len = rustix::fs::llistxattr_query(&path).map_err(posix(file))?;
        let mut list = Vec::with_capacity(len + 1);
        rustix::fs::llistxattr(&path, rustix::buffer::spare_capacity(&mut list))
            .map_err(posix(file))?;
        for name in list.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
            if visit(name, &self.xattr(file, name)?).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let opened = self.open_regular(file)?;
        let mut done = 0;
        while done < buf.len() {
            match opened.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) => return Err(Error::io(file.to_string(), error)),
            }
        }
        Ok(done)
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut buf = vec![0; 1 << 17];
        let mut at = range.start;
        while let Some(data) = self.next_data(file, at)? {
            let data = data.start..data.end.min(range.end);
            let mut offset = data.start;
            while offset < data.end {
                let left = usize::try_from(data.end - offset).unwrap_or(usize::MAX);
                let part = left.min(buf.len());
                let count = self.read(file, offset, &mut buf[..part])?;
                visit(offset, &buf[..count])?;
                offset += count as u64;
            }
            if data.end >= range.end {
                break;
            }
            at = data.end;
        }
        Ok(())
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let opened = self.open_regular(file)?;
        let mut from = offset;
        loop {
            let start = match rustix::fs::seek(&*opened, SeekFrom::Data(from)) {
                Ok(start) => start,
                Err(Errno::NXIO) => return Ok(None),
                Err(errno) => return Err(posix(file)(errno)),
            };
            let end = rustix::fs::seek(&*opened, SeekFrom::Hole(start)).map_err(posix(file))?;
            // In the last block of the largest file the kernel answers with 2^63, behind the end.
            let end = end.min(i64::MAX.unsigned_abs());
            // In preallocated space it asks the cached pages, which may be written back between
            // the two calls.
            if end > start {
                return Ok(Some(start..end));
            }
            from = start + 1;
        }
    }

    fn prefetch(&self, _files: &[FileId]) {}
}
