//! A filesystem that does next to nothing. Its speed is the most that a mount can reach.
//!
//! It keeps names and attributes, as far as programs need them to make, list and remove a tree. It
//! stores no data: files read as zeros. Everything is in memory and disappears with the process.

use std::collections::{BTreeMap, HashMap};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offshoot_vfs::{
    Attr, Dedupe, DirEntry, EntryPlace, Errno, Error, Fallocate, FileFlags, FileId, FilePosition,
    FileSystem, FileSystemMut, FileType, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs,
    Timestamp, XattrMode,
};

/// Parts of the table of files, so that threads do not wait for each other.
const SHARDS: usize = 64;
const ROOT: FileId = FileId { dev: 5, ino: 256 };

/// A file.
struct NullFile {
    attr: Attr,
    target: Vec<u8>,
    parent: Option<FileId>,
    names: HashMap<Vec<u8>, u64>,
    entries: BTreeMap<u64, (Vec<u8>, FileId, FileType)>,
    last_cookie: u64,
}

/// The filesystem.
pub(crate) struct NullFilesystem {
    shards: [Mutex<HashMap<u64, NullFile>>; SHARDS],
    last: AtomicU64,
}

type NullShard<'a> = MutexGuard<'a, HashMap<u64, NullFile>>;

fn error(errno: Errno) -> Error {
    Error::posix(errno, "the null filesystem")
}

impl NullFilesystem {
    /// An empty filesystem.
    pub(crate) fn new() -> Self {
        let null = Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            last: AtomicU64::new(ROOT.ino),
        };
        let new = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: Timestamp::now() };
        let root = file(ROOT, FileType::Directory, &new);
        null.shard(ROOT).insert(ROOT.ino, root);
        null
    }

    fn shard(&self, file: FileId) -> NullShard<'_> {
        let shard = usize::try_from(file.ino % SHARDS as u64).expect("a shard");
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, file: FileId, look: impl FnOnce(&mut NullFile) -> Result<T>) -> Result<T> {
        self.shard(file).get_mut(&file.ino).ok_or_else(|| error(Errno::NOENT)).and_then(look)
    }

    fn make(
        &self,
        place: EntryPlace<'_>,
        file_type: FileType,
        rdev: (u32, u32),
        target: &[u8],
        new: &NewFile,
    ) -> Result<FileId> {
        let ino = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let made = FileId { dev: ROOT.dev, ino };
        let mut node = file(made, file_type, new);
        node.parent = Some(place.dir);
        node.attr.rdev = rdev;
        node.attr.size = target.len() as u64;
        node.target = target.to_vec();
        self.shard(made).insert(ino, node);
        let added = self.with(place.dir, |dir| {
            if dir.names.contains_key(place.name) {
                return Err(error(Errno::EXIST));
            }
            dir.last_cookie += 1;
            dir.names.insert(place.name.to_vec(), dir.last_cookie);
            dir.entries.insert(dir.last_cookie, (place.name.to_vec(), made, file_type));
            Ok(())
        });
        if added.is_err() {
            self.shard(made).remove(&ino);
        }
        added.map(|()| made)
    }

    fn remove(&self, place: EntryPlace<'_>) -> Result<()> {
        let removed = self.lookup(place.dir, place.name)?;
        if self.with(removed, |file| Ok(!file.entries.is_empty()))? {
            return Err(error(Errno::NOTEMPTY));
        }
        self.with(place.dir, |dir| {
            let cookie = dir.names.remove(place.name).ok_or_else(|| error(Errno::NOENT))?;
            dir.entries.remove(&cookie);
            Ok(())
        })?;
        self.shard(removed).remove(&removed.ino);
        Ok(())
    }
}

/// A new file.
fn file(id: FileId, file_type: FileType, new: &NewFile) -> NullFile {
    let attr = Attr {
        file: id,
        file_type,
        permissions: new.permissions & !new.umask.unwrap_or(0),
        nlink: 1,
        uid: new.uid,
        gid: new.gid,
        rdev: (0, 0),
        size: 0,
        allocated_bytes: 0,
        atime: new.at,
        mtime: new.at,
        ctime: new.at,
        btime: new.at,
        generation: 0,
    };
    let (names, entries) = (HashMap::new(), BTreeMap::new());
    NullFile { attr, target: Vec::new(), parent: None, names, entries, last_cookie: 0 }
}

impl FileSystem for NullFilesystem {
    fn root(&self) -> FileId {
        ROOT
    }

    fn statfs(&self) -> Result<StatFs> {
        let total_bytes = 1 << 40;
        Ok(StatFs { total_bytes, used_bytes: 0, available_bytes: total_bytes, block_size: 4096 })
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        self.with(dir, |dir| {
            let entry = dir.names.get(name).and_then(|cookie| dir.entries.get(cookie));
            entry.map(|(_, file, _)| *file).ok_or_else(|| error(Errno::NOENT))
        })
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        let parent = self.with(dir, |dir| Ok(dir.parent))?;
        Ok(parent.map(|dir| Parent { dir, name: Vec::new() }))
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        self.with(file, |file| Ok(file.attr))
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.with(dir, |dir| {
            for (&cookie, (name, file, file_type)) in dir.entries.range(after.saturating_add(1)..) {
                let entry = DirEntry { name, file: *file, file_type: *file_type, cookie };
                if visit(entry).is_break() {
                    break;
                }
            }
            Ok(())
        })
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        self.with(file, |file| Ok(file.target.clone()))
    }

    fn xattr(&self, _file: FileId, _name: &[u8]) -> Result<Vec<u8>> {
        Err(error(Errno::NODATA))
    }

    fn xattrs(
        &self,
        _file: FileId,
        _visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        Ok(())
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let left = self.attr(file)?.size.saturating_sub(offset);
        let len = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        buf[..len].fill(0);
        Ok(len)
    }

    fn read_data(
        &self,
        _file: FileId,
        _range: Range<u64>,
        _visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        Ok(())
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let size = self.attr(file)?.size;
        Ok((offset < size).then_some(offset..size))
    }

    fn prefetch(&self, _files: &[FileId]) {}
}

impl FileSystemMut for NullFilesystem {
    fn mknod(&self, place: EntryPlace<'_>, node: NewNode, new: &NewFile) -> Result<FileId> {
        self.make(place, node.file_type, node.rdev, &[], new)
    }

    fn mkdir(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        self.make(place, FileType::Directory, (0, 0), &[], new)
    }

    fn symlink(&self, place: EntryPlace<'_>, target: &[u8], new: &NewFile) -> Result<FileId> {
        self.make(place, FileType::Symlink, (0, 0), target, new)
    }

    fn create_unnamed(&self, _: FileId, _: bool, _: &NewFile) -> Result<FileId> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn link(&self, _: FileId, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn unlink(&self, place: EntryPlace<'_>, _at: Timestamp) -> Result<()> {
        self.remove(place)
    }

    fn rmdir(&self, place: EntryPlace<'_>, _at: Timestamp) -> Result<()> {
        self.remove(place)
    }

    fn rename_with(
        &self,
        _: EntryPlace<'_>,
        _: EntryPlace<'_>,
        _: Rename,
        _: Timestamp,
    ) -> Result<()> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn set_attr(&self, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()> {
        self.with(file, |file| {
            let attr = &mut file.attr;
            attr.permissions = set.permissions.unwrap_or(attr.permissions);
            attr.uid = set.uid.unwrap_or(attr.uid);
            attr.gid = set.gid.unwrap_or(attr.gid);
            attr.atime = set.atime.map_or(attr.atime, |time| time.at(at));
            attr.mtime = set.mtime.map_or(attr.mtime, |time| time.at(at));
            attr.size = set.size.unwrap_or(attr.size);
            attr.ctime = at;
            Ok(())
        })
    }

    fn set_flags(&self, _: FileId, _: FileFlags, _: Timestamp) -> Result<()> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn write(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.with(file, |file| {
            file.attr.size = file.attr.size.max(offset.saturating_add(data.len() as u64));
            (file.attr.mtime, file.attr.ctime) = (at, at);
            Ok(())
        })
    }

    fn write_direct(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.write(file, offset, data, at)
    }

    fn fallocate(&self, _: FileId, _: Fallocate, _: u64, _: u64, _: Timestamp) -> Result<()> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn clone_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<()> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn dedupe_range(&self, _: FilePosition, _: FilePosition, _: u64) -> Result<Dedupe> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn copy_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<u64> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn set_xattr(&self, _: FileId, _: &[u8], _: &[u8], _: XattrMode, _: Timestamp) -> Result<()> {
        Err(error(Errno::OPNOTSUPP))
    }

    fn remove_xattr(&self, _: FileId, _: &[u8], _: Timestamp) -> Result<()> {
        Err(error(Errno::NODATA))
    }

    fn open(&self, _: FileId) -> Result<()> {
        Ok(())
    }

    fn release(&self, _: FileId) -> Result<()> {
        Ok(())
    }

    fn fsync(&self, _: FileId) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
