//! Files in memory whose numbers are given again at once, and another thread that comes between.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{ControlFlow, Range};
use std::sync::Mutex;

use offshoot_vfs::{
    Attr, Dedupe, DirEntry, EntryPlace, Errno, Error, Fallocate, FileFlags, FileId, FilePosition,
    FileSystem, FileSystemMut, FileType, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs,
    Timestamp, XattrMode,
};

const ROOT: u64 = 1;

/// A file. Its birth tells it from all others, as its number does not.
struct ReusedInode {
    birth: u64,
    file_type: FileType,
    parent: u64,
    is_named: bool,
    opens: u32,
}

struct ReusedState {
    inodes: BTreeMap<u64, ReusedInode>,
    names: BTreeMap<(u64, Vec<u8>), u64>,
    births: u64,
    /// Which files ever had a path.
    had: BTreeSet<(String, u64)>,
    /// Which files were changed or read, by their birth.
    touched: Vec<u64>,
}

/// What another thread does.
pub(crate) type OtherThreadStep = Box<dyn FnOnce(&ReusingFiles) + Send>;

pub(crate) struct ReusingFiles {
    state: Mutex<ReusedState>,
    /// What another thread does after each of the next calls that look at names or open files.
    steps: Mutex<VecDeque<Vec<OtherThreadStep>>>,
}

impl ReusingFiles {
    /// An empty root directory.
    pub(crate) fn new() -> Self {
        let root = ReusedInode {
            birth: 0,
            file_type: FileType::Directory,
            parent: ROOT,
            is_named: true,
            opens: 0,
        };
        let state = ReusedState {
            inodes: [(ROOT, root)].into(),
            names: BTreeMap::new(),
            births: 0,
            had: BTreeSet::new(),
            touched: Vec::new(),
        };
        Self { state: Mutex::new(state), steps: Mutex::default() }
    }

    /// Lets another thread do each of `steps` after the call of this number.
    pub(crate) fn interleave(&self, steps: impl IntoIterator<Item = (usize, OtherThreadStep)>) {
        let mut all = self.steps.lock().unwrap();
        for (at, step) in steps {
            while all.len() <= at {
                all.push_back(Vec::new());
            }
            all[at].push(step);
        }
    }

    /// How many steps were not reached.
    pub(crate) fn left(&self) -> usize {
        self.steps.lock().unwrap().iter().map(Vec::len).sum()
    }

    fn between(&self) {
        let steps = self.steps.lock().unwrap().pop_front();
        steps.into_iter().flatten().for_each(|step| step(self));
    }

    /// Makes a file at `path`, with the smallest free number.
    pub(crate) fn make(&self, path: &str, file_type: FileType) {
        let (dir, name) = self.split(path);
        self.make_at(dir, name, file_type).unwrap();
    }

    /// Removes what is at `path`.
    pub(crate) fn remove(&self, path: &str) {
        let (dir, name) = self.split(path);
        self.remove_at(dir, name).unwrap();
    }

    /// The births of what was touched that never had `path` or a path below it.
    pub(crate) fn wrong(&self, path: &str) -> Vec<u64> {
        let state = self.state.lock().unwrap();
        let had =
            |birth: &u64| state.had.iter().any(|(had, it)| it == birth && had.starts_with(path));
        state.touched.iter().copied().filter(|birth| !had(birth)).collect()
    }

    /// Whether every opening was released, and every file without a name is gone.
    pub(crate) fn is_released(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.inodes.values().all(|inode| inode.opens == 0 && inode.is_named)
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        let (dir, name) = self.split(path);
        self.state.lock().unwrap().names.contains_key(&(dir, name.to_vec()))
    }

    fn split<'p>(&self, path: &'p str) -> (u64, &'p [u8]) {
        let (above, name) = path.rsplit_once('/').unwrap();
        let state = self.state.lock().unwrap();
        let names = above.split('/').filter(|name| !name.is_empty());
        let dir = names.fold(ROOT, |dir, name| state.names[&(dir, name.as_bytes().to_vec())]);
        (dir, name.as_bytes())
    }

    fn make_at(&self, dir: u64, name: &[u8], file_type: FileType) -> Result<u64> {
        let mut state = self.state.lock().unwrap();
        let place = (dir, name.to_vec());
        if state.names.contains_key(&place) {
            return Err(errno(Errno::EXIST));
        }
        if !state.inodes.get(&dir).is_some_and(|inode| inode.is_named) {
            return Err(errno(Errno::NOENT));
        }
        let ino = (ROOT..1 << 20).find(|ino| !state.inodes.contains_key(ino)).unwrap();
        state.births += 1;
        let birth = state.births;
        let inode = ReusedInode { birth, file_type, parent: dir, is_named: true, opens: 0 };
        state.inodes.insert(ino, inode);
        state.names.insert(place, ino);
        let path = state.path(dir, name);
        state.had.insert((path, birth));
        Ok(ino)
    }

    fn remove_at(&self, dir: u64, name: &[u8]) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        let ino = state.names.get(&(dir, name.to_vec())).copied();
        let ino = ino.ok_or_else(|| errno(Errno::NOENT))?;
        if state.names.keys().any(|(dir, _)| *dir == ino) {
            return Err(errno(Errno::NOTEMPTY));
        }
        let birth = state.inodes[&ino].birth;
        state.touched.push(birth);
        state.names.remove(&(dir, name.to_vec()));
        let inode = state.inodes.get_mut(&ino).unwrap();
        inode.is_named = false;
        if inode.opens == 0 {
            state.inodes.remove(&ino);
        }
        Ok(())
    }

    fn touch(&self, file: FileId) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        let birth = state.inode(file)?.birth;
        state.touched.push(birth);
        Ok(())
    }

    /// Forgets what was touched so far.
    pub(crate) fn begin(&self) {
        self.state.lock().unwrap().touched.clear();
    }
}

impl ReusedState {
    fn inode(&self, file: FileId) -> Result<&ReusedInode> {
        self.inodes.get(&file.ino).ok_or_else(|| errno(Errno::NOENT))
    }

    fn path(&self, dir: u64, name: &[u8]) -> String {
        let name = String::from_utf8_lossy(name);
        if dir == ROOT {
            return format!("/{name}");
        }
        let (place, _) = self.names.iter().find(|(_, ino)| **ino == dir).unwrap();
        format!("{}/{name}", self.path(place.0, &place.1))
    }
}

pub(crate) fn id(ino: u64) -> FileId {
    FileId { dev: 0, ino }
}

fn errno(errno: Errno) -> Error {
    Error::posix(errno, "a file")
}

fn not_here<T>() -> Result<T> {
    Err(errno(Errno::NOSYS))
}

impl FileSystem for ReusingFiles {
    fn root(&self) -> FileId {
        id(ROOT)
    }

    fn statfs(&self) -> Result<StatFs> {
        not_here()
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        let found = {
            let state = self.state.lock().unwrap();
            let found = state.names.get(&(dir.ino, name.to_vec())).copied();
            found.map(id).ok_or_else(|| errno(Errno::NOENT))
        };
        self.between();
        found
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        let found = {
            let state = self.state.lock().unwrap();
            let inode = state.inode(dir)?;
            let mut names = state.names.iter();
            let name = names.find(|(_, ino)| **ino == dir.ino).map(|((_, name), _)| name.clone());
            name.map(|name| Parent { dir: id(inode.parent), name })
        };
        self.between();
        Ok(found)
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        let attr = {
            let state = self.state.lock().unwrap();
            let inode = state.inode(file)?;
            let at = Timestamp::default();
            Attr {
                file,
                file_type: inode.file_type,
                permissions: 0o755,
                nlink: u32::from(inode.is_named),
                uid: 0,
                gid: 0,
                rdev: (0, 0),
                size: 0,
                allocated_bytes: 0,
                atime: at,
                mtime: at,
                ctime: at,
                btime: at,
                generation: inode.birth,
            }
        };
        self.between();
        Ok(attr)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let entries: Vec<_> = {
            let state = self.state.lock().unwrap();
            state.inode(dir)?;
            let names = state.names.iter().filter(|((above, _), _)| *above == dir.ino);
            let type_of = |ino| state.inodes[ino].file_type;
            names.map(|((_, name), ino)| (name.clone(), *ino, type_of(ino))).collect()
        };
        for (cookie, (name, ino, file_type)) in (1..).zip(&entries) {
            let entry = DirEntry { name, file: id(*ino), file_type: *file_type, cookie };
            if cookie > after && visit(entry).is_break() {
                break;
            }
        }
        self.between();
        Ok(())
    }

    fn read_link(&self, _: FileId) -> Result<Vec<u8>> {
        not_here()
    }

    fn xattr(&self, _: FileId, _: &[u8]) -> Result<Vec<u8>> {
        not_here()
    }

    fn xattrs(&self, _: FileId, _: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<()> {
        not_here()
    }

    fn read(&self, file: FileId, _: u64, _: &mut [u8]) -> Result<usize> {
        self.touch(file).map(|()| 0)
    }

    fn read_data(
        &self,
        file: FileId,
        _: Range<u64>,
        _: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.touch(file)
    }

    fn next_data(&self, _: FileId, _: u64) -> Result<Option<Range<u64>>> {
        not_here()
    }

    fn prefetch(&self, _: &[FileId]) {}
}

impl FileSystemMut for ReusingFiles {
    fn mknod(&self, place: EntryPlace<'_>, node: NewNode, _: &NewFile) -> Result<FileId> {
        let made = self.make_at(place.dir.ino, place.name, node.file_type);
        self.between();
        made.map(id)
    }

    fn mkdir(&self, place: EntryPlace<'_>, _: &NewFile) -> Result<FileId> {
        let made = self.make_at(place.dir.ino, place.name, FileType::Directory);
        self.between();
        made.map(id)
    }

    fn symlink(&self, _: EntryPlace<'_>, _: &[u8], _: &NewFile) -> Result<FileId> {
        not_here()
    }

    fn create_unnamed(&self, _: FileId, _: bool, _: &NewFile) -> Result<FileId> {
        not_here()
    }

    fn link(&self, _: FileId, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        not_here()
    }

    fn unlink(&self, place: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        self.remove_at(place.dir.ino, place.name)
    }

    fn rmdir(&self, place: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        self.remove_at(place.dir.ino, place.name)
    }

    fn rename_with(
        &self,
        _: EntryPlace<'_>,
        _: EntryPlace<'_>,
        _: Rename,
        _: Timestamp,
    ) -> Result<()> {
        not_here()
    }

    fn set_attr(&self, file: FileId, _: &SetAttr, _: Timestamp) -> Result<()> {
        self.touch(file)
    }

    fn set_flags(&self, _: FileId, _: FileFlags, _: Timestamp) -> Result<()> {
        not_here()
    }

    fn write(&self, file: FileId, _: u64, _: &[u8], _: Timestamp) -> Result<()> {
        self.touch(file)
    }

    fn write_direct(&self, _: FileId, _: u64, _: &[u8], _: Timestamp) -> Result<()> {
        not_here()
    }

    fn fallocate(&self, _: FileId, _: Fallocate, _: u64, _: u64, _: Timestamp) -> Result<()> {
        not_here()
    }

    fn clone_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<()> {
        not_here()
    }

    fn dedupe_range(&self, _: FilePosition, _: FilePosition, _: u64) -> Result<Dedupe> {
        not_here()
    }

    fn copy_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<u64> {
        not_here()
    }

    fn set_xattr(&self, _: FileId, _: &[u8], _: &[u8], _: XattrMode, _: Timestamp) -> Result<()> {
        not_here()
    }

    fn remove_xattr(&self, _: FileId, _: &[u8], _: Timestamp) -> Result<()> {
        not_here()
    }

    fn open(&self, file: FileId) -> Result<()> {
        let opened = {
            let mut state = self.state.lock().unwrap();
            let inode = state.inodes.get_mut(&file.ino);
            inode.map(|inode| inode.opens += 1).ok_or_else(|| errno(Errno::NOENT))
        };
        self.between();
        opened
    }

    fn release(&self, file: FileId) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        let inode = state.inodes.get_mut(&file.ino).ok_or_else(|| errno(Errno::BADF))?;
        inode.opens = inode.opens.checked_sub(1).ok_or_else(|| errno(Errno::BADF))?;
        if inode.opens == 0 && !inode.is_named {
            state.inodes.remove(&file.ino);
        }
        Ok(())
    }

    fn fsync(&self, _: FileId) -> Result<()> {
        not_here()
    }

    fn sync(&self) -> Result<()> {
        not_here()
    }
}
