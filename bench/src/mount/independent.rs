//! The null filesystem over the crate `fuser`, an independent program that serves requests of
//! `/dev/fuse`.
//!
//! The side `null-dev` serves the same filesystem with our server. So the two differ in the server
//! alone, and a fault of ours that slows down every filesystem shows up beside `fuser`. It has two
//! threads, each with an opening of the device of its own, and may keep what ours may keep.

use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use fuser::{
    Config, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, Session, TimeOrNow, WriteFlags,
};
use offshoot_vfs::{
    Attr, EntryPlace, Error, FileId, FileSystem, FileSystemMut, FileType, NewFile, NewNode, Result,
    SetAttr, SetTime, Timestamp,
};

use super::null::NullFilesystem;

/// How long the kernel may keep names and attributes.
const KEPT: Duration = Duration::from_secs(365 * 24 * 3600);
const THREADS: usize = 2;
/// The most bytes of one request, as with our server.
const MAX_BYTES: u32 = 1 << 20;
/// The requests in the background, as with our server.
const MAX_BACKGROUND: u16 = 64;

/// Mounts a null filesystem over `dir`, calls `is_mounted`, and serves it until it is unmounted.
pub(super) fn serve(dir: &Path, is_mounted: impl FnOnce()) -> crate::Result {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("null".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
    ];
    (config.n_threads, config.clone_fd) = (Some(THREADS), true);
    let failed = |error: io::Error| format!("{} over fuser: {error}", dir.display());
    let session = Session::new(IndependentNull(NullFilesystem::new()), dir, &config);
    let session = session.map_err(failed)?;
    is_mounted();
    session.run().map_err(failed)
}

/// The null filesystem, for `fuser`.
struct IndependentNull(NullFilesystem);

impl IndependentNull {
    /// The file with this number. The protocol gives the root a number of its own.
    fn file(&self, ino: INodeNo) -> FileId {
        let root = self.0.root();
        if ino == INodeNo::ROOT { root } else { FileId { ino: ino.0, ..root } }
    }

    fn number(&self, file: FileId) -> INodeNo {
        if file == self.0.root() { INodeNo::ROOT } else { INodeNo(file.ino) }
    }

    fn attr(&self, file: FileId) -> Result<FileAttr> {
        let attr = self.0.attr(file)?;
        Ok(file_attr(&attr, self.number(file)))
    }

    /// Makes a file and gets its attributes.
    fn made(
        &self,
        (parent, name): (INodeNo, &OsStr),
        node: Option<NewNode>,
        request: &Request,
        (mode, umask): (u32, u32),
    ) -> Result<FileAttr> {
        let place = EntryPlace { dir: self.file(parent), name: name.as_bytes() };
        let new = NewFile {
            permissions: mode & 0o7777,
            uid: request.uid(),
            gid: request.gid(),
            umask: Some(umask),
            at: Timestamp::now(),
        };
        let file = match node {
            Some(node) => self.0.mknod(place, node, &new)?,
            None => self.0.mkdir(place, &new)?,
        };
        self.attr(file)
    }

    /// Gives `visit` the entries behind the cookie `offset`: the file, the cookie, the type and the
    /// name. It returns whether it has no room.
    fn list(
        &self,
        dir: INodeNo,
        offset: u64,
        mut visit: impl FnMut(FileId, u64, FileType, &OsStr) -> bool,
    ) -> Result<()> {
        self.0.read_dir(self.file(dir), offset, &mut |entry| {
            let name = OsStr::from_bytes(entry.name);
            if visit(entry.file, entry.cookie, entry.file_type, name) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
    }
}

fn errno(error: &Error) -> Errno {
    Errno::from_i32(error.errno().raw_os_error())
}

fn time(at: Timestamp) -> SystemTime {
    let whole = Duration::from_secs(at.secs.unsigned_abs());
    let epoch = SystemTime::UNIX_EPOCH;
    let second = if at.secs < 0 { epoch - whole } else { epoch + whole };
    second + Duration::from_nanos(at.nanos.into())
}

fn timestamp(at: SystemTime) -> Timestamp {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let secs = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Timestamp { secs, nanos: since.subsec_nanos() }
}

fn kind(file_type: FileType) -> fuser::FileType {
    match file_type {
        FileType::Regular => fuser::FileType::RegularFile,
        FileType::Directory => fuser::FileType::Directory,
        FileType::Symlink => fuser::FileType::Symlink,
        FileType::CharDevice => fuser::FileType::CharDevice,
        FileType::BlockDevice => fuser::FileType::BlockDevice,
        FileType::Fifo => fuser::FileType::NamedPipe,
        FileType::Socket => fuser::FileType::Socket,
    }
}

fn file_attr(attr: &Attr, ino: INodeNo) -> FileAttr {
    FileAttr {
        ino,
        size: attr.size,
        blocks: attr.allocated_bytes / 512,
        atime: time(attr.atime),
        mtime: time(attr.mtime),
        ctime: time(attr.ctime),
        crtime: time(attr.btime),
        kind: kind(attr.file_type),
        perm: u16::try_from(attr.permissions & 0o7777).expect("12 bits"),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

const GENERATION: Generation = Generation(0);
const NO_HANDLE: FileHandle = FileHandle(0);
const OPEN: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE
    .union(FopenFlags::FOPEN_NOFLUSH)
    .union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

fn entry(result: Result<FileAttr>, reply: ReplyEntry) {
    match result {
        Ok(attr) => reply.entry(&KEPT, &attr, GENERATION),
        Err(error) => reply.error(errno(&error)),
    }
}

fn empty(result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

impl Filesystem for IndependentNull {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2;
        let offered = wanted & config.capabilities();
        let refused = |what: &str| io::Error::other(format!("fuser refuses {what}"));
        config.add_capabilities(offered).map_err(|_| refused("a capability"))?;
        config.set_max_write(MAX_BYTES).map_err(|_| refused("requests of 1 MiB"))?;
        config.set_max_background(MAX_BACKGROUND).map_err(|_| refused("64 requests"))?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.0.lookup(self.file(parent), name.as_bytes());
        entry(found.and_then(|file| self.attr(file)), reply);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(self.file(ino)) {
            Ok(attr) => reply.attr(&KEPT, &attr),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set_time = |time| match time {
            TimeOrNow::Now => SetTime::Now,
            TimeOrNow::SpecificTime(time) => SetTime::To(timestamp(time)),
        };
        let (permissions, file) = (mode.map(|mode| mode & 0o7777), self.file(ino));
        let (atime, mtime) = (atime.map(set_time), mtime.map(set_time));
        let set = SetAttr { permissions, uid, gid, atime, mtime, size };
        let done = self.0.set_attr(file, &set, Timestamp::now());
        match done.and_then(|()| self.attr(file)) {
            Ok(attr) => reply.attr(&KEPT, &attr),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.0.read_link(self.file(ino)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some(file_type) = FileType::from_mode(mode) else {
            return reply.error(Errno::EINVAL);
        };
        let node = NewNode { file_type, rdev: (0, 0) };
        entry(self.made((parent, name), Some(node), request, (mode, umask)), reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        entry(self.made((parent, name), None, request, (mode, umask)), reply);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let node = NewNode { file_type: FileType::Regular, rdev: (0, 0) };
        match self.made((parent, name), Some(node), request, (mode, umask)) {
            Ok(attr) => reply.created(&KEPT, &attr, GENERATION, NO_HANDLE, OPEN),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let place = EntryPlace { dir: self.file(parent), name: name.as_bytes() };
        let (uid, gid, at) = (request.uid(), request.gid(), Timestamp::now());
        let new = NewFile { permissions: 0o777, uid, gid, umask: None, at };
        let made = self.0.symlink(place, target.as_os_str().as_bytes(), &new);
        entry(made.and_then(|file| self.attr(file)), reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let place = EntryPlace { dir: self.file(parent), name: name.as_bytes() };
        empty(self.0.unlink(place, Timestamp::now()), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let place = EntryPlace { dir: self.file(parent), name: name.as_bytes() };
        empty(self.0.rmdir(place, Timestamp::now()), reply);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(NO_HANDLE, OPEN);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut data = vec![0; usize::try_from(size.min(MAX_BYTES)).expect("1 MiB")];
        match self.0.read(self.file(ino), offset, &mut data) {
            Ok(len) => reply.data(&data[..len]),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.write(self.file(ino), offset, data, Timestamp::now()) {
            Ok(()) => reply.written(u32::try_from(data.len()).expect("1 MiB at most")),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(self.0.fsync(self.file(ino)), reply);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(self.0.sync(), reply);
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(NO_HANDLE, FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR);
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.list(ino, offset, |file, cookie, file_type, name| {
            reply.add(self.number(file), cookie, kind(file_type), name)
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        // The lock of the directory may be that of an entry, so the attributes come after it.
        let mut entries = Vec::new();
        let listed = self.list(ino, offset, |file, cookie, _, name| {
            entries.push((file, cookie, name.to_os_string()));
            entries.len() == 4096
        });
        if let Err(error) = listed {
            return reply.error(errno(&error));
        }
        for (file, cookie, name) in entries {
            // A file that was removed meanwhile is left out.
            let Ok(attr) = self.attr(file) else { continue };
            if reply.add(attr.ino, cookie, name, &KEPT, &attr, GENERATION) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        match self.0.statfs() {
            Ok(all) => {
                let block = u64::from(all.block_size);
                let (total, free) = (all.total_bytes / block, all.available_bytes / block);
                reply.statfs(total, free, free, 0, 0, all.block_size, 255, all.block_size);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, _: u32, reply: ReplyXattr) {
        match self.0.xattr(self.file(ino), name.as_bytes()) {
            Ok(value) => reply.data(&value),
            Err(error) => reply.error(errno(&error)),
        }
    }
}
