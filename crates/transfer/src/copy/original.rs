//! A file that is copied, wherever it is.
//!
//! Data is read into the buffer of the caller and not shown while the source is held: source and
//! target may be one volume.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use offshoot_vfs::{
    Attr, Code, Errno, Error, FileId, FileSystemMut, FileType, Result, SafeName, Timestamp,
};
use rustix::fs::{self, AtFlags, CWD, Mode, OFlags, SeekFrom, Stat};

use super::target::PIECE_BYTES;
use crate::xattrs::{XattrPair, held_xattrs};

/// A file to be copied.
pub(crate) trait Original {
    /// Its attributes.
    fn attr(&self) -> &Attr;

    /// Its extended attributes.
    fn xattrs(&self) -> Result<Vec<XattrPair>>;

    /// The target of a symbolic link.
    fn read_link(&self) -> Result<Vec<u8>>;

    /// The first range at or after `offset` that holds data. One that ends with [`u64::MAX`] ends
    /// where reading gives nothing more.
    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>>;

    /// The file, when it is in the volume that is copied into: that may share its data.
    fn in_same_volume(&self) -> Option<FileId> {
        None
    }

    /// Whether ranges without contents may count as data at one time and not at another. The host
    /// reports a range with room and without contents as data as long as clean pages of it are in
    /// memory.
    fn has_chance_data(&self) -> bool {
        false
    }

    /// Reads data; the count is short at the end only.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize>;

    /// Reads the beginning of the data into `buf`: a source that cannot be read costs nothing of
    /// what is there.
    fn require_readable(&self, buf: &mut Vec<u8>) -> Result<()> {
        let Some(data) = self.next_data(0)? else { return Ok(()) };
        let len =
            usize::try_from(data.end - data.start).map_or(PIECE_BYTES, |len| len.min(PIECE_BYTES));
        if buf.len() < len {
            buf.resize(len, 0);
        }
        self.read(data.start, &mut buf[..len]).map(drop)
    }

    /// Its size now, where something may have changed it since its attributes were read.
    fn size_now(&self) -> Result<u64> {
        Ok(self.attr().size)
    }
}

/// A file of a volume.
pub(super) struct VolumeFile<'a> {
    pub(super) fs: &'a dyn FileSystemMut,
    pub(super) attr: Attr,
    /// It is in the volume that is copied into.
    pub(super) is_same: bool,
}

impl Original for VolumeFile<'_> {
    fn in_same_volume(&self) -> Option<FileId> {
        self.is_same.then_some(self.attr.file)
    }

    fn attr(&self) -> &Attr {
        &self.attr
    }

    fn xattrs(&self) -> Result<Vec<XattrPair>> {
        held_xattrs(self.fs, self.attr.file)
    }

    fn read_link(&self) -> Result<Vec<u8>> {
        self.fs.read_link(self.attr.file)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.fs.next_data(self.attr.file, offset)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.fs.read(self.attr.file, offset, buf)
    }
}

/// A file of the host. Regular files and directories are open; all else is reached through the
/// directory and the name, because opening it might do something.
pub(crate) struct HostFile<'a> {
    attr: Attr,
    file: Option<File>,
    directory: BorrowedFd<'a>,
    name: PathBuf,
}

/// Whether a file of this type is open while it is an original.
fn is_opened_kind(file_type: FileType) -> bool {
    matches!(file_type, FileType::Regular | FileType::Directory)
}

/// Gives an error of the host the name of what was being done.
pub(crate) fn doing(what: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::io(what, errno)
}

impl<'a> HostFile<'a> {
    /// The file at `path`. A symbolic link at its end is followed if `is_followed`.
    pub(crate) fn named(path: &Path, is_followed: bool) -> Result<HostFile<'static>> {
        let at_flags = if is_followed { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        let stat = fs::statat(CWD, path, at_flags).map_err(doing("looking at it"))?;
        let file_type = attr_of(&stat)?.file_type;
        HostFile::open(CWD, path.to_path_buf(), file_type, is_followed)
    }

    /// The file `name` in `directory`. The directory gave its type.
    pub(crate) fn found(
        directory: BorrowedFd<'a>,
        name: &SafeName,
        file_type: FileType,
    ) -> Result<Self> {
        let name = Path::new(OsStr::from_bytes(name)).to_path_buf();
        Self::open(directory, name, file_type, false)
    }

    /// The open file `file`.
    pub(crate) fn of_open(file: File) -> Result<HostFile<'static>> {
        let attr = attr_of(&fs::fstat(&file).map_err(doing("looking at it"))?)?;
        Ok(HostFile { attr, file: Some(file), directory: CWD, name: PathBuf::new() })
    }

    fn open(
        directory: BorrowedFd<'a>,
        name: PathBuf,
        file_type: FileType,
        is_followed: bool,
    ) -> Result<Self> {
        let is_opened = is_opened_kind(file_type);
        let (file, stat) = if is_opened {
            // Not to wait for the other side, should it have become a pipe.
            let mut flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            flags.set(OFlags::NOFOLLOW, !is_followed);
            let file = fs::openat(directory, &name, flags, Mode::empty());
            let file = File::from(file.map_err(doing("opening it"))?);
            let stat = fs::fstat(&file).map_err(doing("looking at it"))?;
            (Some(file), stat)
        } else {
            let stat = fs::statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW);
            (None, stat.map_err(doing("looking at it"))?)
        };
        let attr = attr_of(&stat)?;
        if attr.file_type != file_type {
            if file.is_some() && !is_opened_kind(attr.file_type) {
                // `fakeroot` keeps what a device is beside a regular file of the host.
                return Self::open(directory, name, attr.file_type, is_followed);
            }
            return Err(Error::io(
                "opening it",
                std::io::Error::other("it was replaced meanwhile"),
            ));
        }
        Ok(Self { attr, file, directory, name })
    }

    /// The open directory.
    pub(crate) fn into_directory(self) -> Result<OwnedFd> {
        self.file.map(Into::into).ok_or_else(|| Error::posix(Errno::NOTDIR, "opening it"))
    }

    fn file(&self) -> Result<&File> {
        self.file.as_ref().ok_or_else(|| Error::posix(Errno::INVAL, "reading it"))
    }
}

impl Original for HostFile<'_> {
    fn attr(&self) -> &Attr {
        &self.attr
    }

    fn xattrs(&self) -> Result<Vec<XattrPair>> {
        if let Some(file) = &self.file {
            return host_xattrs(
                fs::flistxattr_query(file),
                |buf| fs::flistxattr(file, buf),
                |name, buf| fs::fgetxattr(file, name, buf),
            );
        }
        // There are no such calls that take a directory and a name.
        let path = if self.directory.as_raw_fd() == CWD.as_raw_fd() {
            self.name.clone()
        } else {
            let number = self.directory.as_fd().as_raw_fd();
            Path::new("/proc/self/fd").join(number.to_string()).join(&self.name)
        };
        host_xattrs(
            fs::llistxattr_query(&path),
            |buf| fs::llistxattr(&path, buf),
            |name, buf| fs::lgetxattr(&path, name, buf),
        )
    }

    fn read_link(&self) -> Result<Vec<u8>> {
        let target = fs::readlinkat(self.directory, &self.name, Vec::new());
        Ok(target.map_err(doing("reading the link"))?.into_bytes())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        let file = self.file()?;
        let start = match fs::seek(file, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // A file that knows no offsets, as in /proc.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::SPIPE) => {
                return Ok(Some(offset..u64::MAX));
            }
            Err(errno) => return Err(doing("looking for its data")(errno)),
        };
        let end = fs::seek(file, SeekFrom::Hole(start)).map_err(doing("looking for its data"))?;
        Ok(Some(start..end))
    }

    fn has_chance_data(&self) -> bool {
        true
    }

    fn size_now(&self) -> Result<u64> {
        let stat = fs::fstat(self.file()?).map_err(doing("looking at it"))?;
        Ok(stat.st_size.cast_unsigned())
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let file = self.file()?;
        fill(buf, |buf, done| file.read_at(buf, offset + done as u64))
    }
}

/// Reads until `buf` is full or nothing more comes.
fn fill(
    buf: &mut [u8],
    mut read: impl FnMut(&mut [u8], usize) -> std::io::Result<usize>,
) -> Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match read(&mut buf[done..], done) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("reading it", error)),
        }
    }
    Ok(done)
}

/// Bytes of unknown number, which come once.
pub(super) struct StreamOriginal<R> {
    attr: Attr,
    input: Mutex<BufReader<R>>,
}

impl<R: Read> StreamOriginal<R> {
    /// What `input` gives, as a file with these attributes.
    pub(super) fn new(input: R, attr: Attr) -> Self {
        Self { attr, input: Mutex::new(BufReader::new(input)) }
    }
}

impl<R: Read> Original for StreamOriginal<R> {
    fn attr(&self) -> &Attr {
        &self.attr
    }

    fn xattrs(&self) -> Result<Vec<XattrPair>> {
        Ok(Vec::new())
    }

    fn read_link(&self) -> Result<Vec<u8>> {
        Err(Error::posix(Errno::INVAL, "a stream"))
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        Ok(Some(offset..u64::MAX))
    }

    /// What this reads stays in the buffer for `read`, because it comes only once.
    fn require_readable(&self, _: &mut Vec<u8>) -> Result<()> {
        let mut input = self.input.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        loop {
            match input.fill_buf() {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io("reading it", error)),
            }
        }
    }

    fn read(&self, _offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut input = self.input.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        fill(buf, |buf, _| input.read(buf))
    }
}

/// The attributes in what the host says of a file.
pub(crate) fn attr_of(stat: &Stat) -> Result<Attr> {
    let file_type = FileType::from_mode(stat.st_mode).ok_or_else(|| {
        Error::unsupported(Code::Unsupported, format!("a file of the mode {:o}", stat.st_mode))
    })?;
    let time =
        |secs: i64, nanos: i64| Timestamp { secs, nanos: u32::try_from(nanos).unwrap_or_default() };
    let number = |number: i64| number.cast_unsigned();
    let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
    let rdev = if is_device { (fs::major(stat.st_rdev), fs::minor(stat.st_rdev)) } else { (0, 0) };
    let changed = time(stat.st_ctime, stat.st_ctime_nsec);
    Ok(Attr {
        file: FileId { dev: stat.st_dev, ino: stat.st_ino },
        file_type,
        permissions: stat.st_mode & 0o7777,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev,
        size: number(stat.st_size),
        allocated_bytes: number(stat.st_blocks).saturating_mul(512),
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: changed,
        btime: changed,
        generation: 0,
    })
}

/// The extended attributes that the calls give, in the order of their names; `len` is that of the
/// list of names.
fn host_xattrs(
    len: rustix::io::Result<usize>,
    list: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
    get: impl Fn(&[u8], &mut [u8]) -> rustix::io::Result<usize>,
) -> Result<Vec<XattrPair>> {
    /// The kernel gives no more, of names as of a value.
    const MAX: usize = 64 << 10;
    let mut names = match len {
        Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Ok(_) => vec![0; MAX],
        Err(errno) => return Err(doing("listing its extended attributes")(errno)),
    };
    let len = list(&mut names).map_err(doing("listing its extended attributes"))?;
    names.truncate(len);
    let mut value = vec![0; MAX];
    let mut xattrs = Vec::new();
    for name in names.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        match get(name, &mut value) {
            Ok(len) => xattrs.push((name.to_vec(), value[..len].to_vec())),
            // It went in between, or is one that only some may read.
            Err(Errno::NODATA) => {}
            Err(errno) => return Err(doing("reading an extended attribute")(errno)),
        }
    }
    // The host lists them in an order of its own.
    xattrs.sort_unstable();
    Ok(xattrs)
}
