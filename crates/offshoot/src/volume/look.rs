//! Calls that read.

use std::ffi::{OsStr, OsString};
use std::iter::FusedIterator;
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::path::{LastLink, at_path, prefix, resolve};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk as walk_tree};
use offshoot_vfs::{Attr, Errno, Error, FileId, FileSystem, FileType, Result, Structure};

use super::{Volume, bytes, fail, owned};

/// How many entries of a directory are read at a time.
const BATCH: usize = 512;

impl Volume {
    /// The contents of the file at `path`, all in memory.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `EINVAL` for what has no contents, `EFBIG` for more than
    /// [`OpenOptions::read_limit`](crate::OpenOptions::read_limit), `ENOMEM` when the memory is not
    /// there.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let named = |error| at_path(error, path);
        let file = call.file(path)?;
        let size = call.files.attr(file).map_err(named)?.size;
        if size > self.read_limit {
            let shown = Escaped(path);
            let what =
                format!("{shown} has {size} bytes, more than OpenOptions::read_limit; use read_at");
            return Err(Error::posix(Errno::FBIG, what));
        }
        let no_memory = || fail(Errno::NOMEM, path);
        let len = usize::try_from(size).map_err(|_| no_memory())?;
        let mut contents = Vec::new();
        contents.try_reserve_exact(len).map_err(|_| no_memory())?;
        call.files
            .read_data(file, 0..size, &mut |offset, piece| {
                // Up to a piece there is a hole.
                contents.resize(usize::try_from(offset).map_err(|_| no_memory())?, 0);
                contents.extend_from_slice(piece);
                Ok(())
            })
            .map_err(named)?;
        contents.resize(len, 0);
        Ok(contents)
    }

    /// Reads from byte `offset` of the file at `path` on. The count is short only at the end of the
    /// file.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_at(&self, path: impl AsRef<Path>, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let file = call.file(path)?;
        call.files.read(file, offset, buf).map_err(|error| at_path(error, path))
    }

    /// The attributes of the file at `path`, links followed.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ELOOP`.
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        self.attr(path.as_ref(), LastLink::Follow)
    }

    /// The attributes of the file at `path`, or of the link that it is.
    ///
    /// # Errors
    /// As [`metadata`](Self::metadata).
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        self.attr(path.as_ref(), LastLink::Keep)
    }

    fn attr(&self, path: &Path, last: LastLink) -> Result<Attr> {
        let (path, call) = (bytes(path), self.call());
        let file = resolve(&call.files, path, last)?;
        call.files.attr(file).map_err(|error| at_path(error, path))
    }

    /// Whether a file is at `path`, links followed.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        match self.call().file(bytes(path.as_ref())) {
            Ok(_) => Ok(true),
            Err(Error::Posix { errno: Errno::NOENT | Errno::NOTDIR, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The target of the symbolic link at `path`.
    ///
    /// # Errors
    /// `EINVAL` for another file.
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let file = resolve(&call.files, path, LastLink::Keep)?;
        let target = call.files.read_link(file).map_err(|error| at_path(error, path))?;
        Ok(PathBuf::from(OsString::from_vec(target)))
    }

    /// The value of an extended attribute of the file at `path`.
    ///
    /// # Errors
    /// `ENODATA` when it has none of that name.
    pub fn xattr(&self, path: impl AsRef<Path>, name: impl AsRef<OsStr>) -> Result<Vec<u8>> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let value = call.files.xattr(call.file(path)?, name.as_ref().as_bytes());
        value.map_err(|error| at_path(error, path))
    }

    /// The entries of the directory at `path`, without `.` and `..`.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let mut entries = ReadDir {
            directory: ListedDirectory::new(self, call.file(path)?)?,
            path: path.to_vec(),
            after: 0,
            waiting: Vec::new().into_iter(),
            is_read: false,
        };
        entries.fill()?;
        Ok(entries)
    }

    /// Shows everything below the directory at `path` to `visit`, each directory before what is in
    /// it, until `visit` breaks. What cannot be read is shown as an error, which names the file,
    /// and the walk goes on beside it.
    ///
    /// It ends on every volume, even on one that was made to lead it in a circle.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    pub fn walk(
        &self,
        path: impl AsRef<Path>,
        mut visit: impl FnMut(Result<WalkEntry<'_>>) -> ControlFlow<()>,
    ) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let top = call.file(path)?;
        if call.files.attr(top).map_err(|error| at_path(error, path))?.file_type
            != FileType::Directory
        {
            return Err(fail(Errno::NOTDIR, path));
        }
        let mut walker = Walker { top: path, visit: &mut visit, is_stopped: false };
        walk_tree(&*self.files, top, (), DEPTH_MAX, &mut walker);
        Ok(())
    }
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirEntry {
    /// The name.
    pub name: OsString,
    /// The file that it leads to.
    pub file: FileId,
    /// The type of the file.
    pub file_type: FileType,
}

/// A directory that is open until this is dropped.
struct ListedDirectory {
    volume: Volume,
    file: FileId,
}

impl ListedDirectory {
    fn new(volume: &Volume, file: FileId) -> Result<Self> {
        volume.files.open(file).map(|()| Self { volume: volume.clone(), file })
    }
}

/// An error of the last release is that of the removal of the directory, which another call made.
impl Drop for ListedDirectory {
    fn drop(&mut self) {
        let _ = self.volume.files.release(self.file);
    }
}

/// The entries of a directory, which is open meanwhile. An error ends them.
pub struct ReadDir {
    directory: ListedDirectory,
    path: Vec<u8>,
    after: u64,
    waiting: std::vec::IntoIter<DirEntry>,
    is_read: bool,
}

impl ReadDir {
    fn fill(&mut self) -> Result<()> {
        let (mut batch, mut last) = (Vec::new(), self.after);
        let mut descends = false;
        let ListedDirectory { volume, file } = &self.directory;
        let result = volume.files.read_dir(*file, last, &mut |entry| {
            descends = entry.cookie <= last;
            if descends || batch.len() == BATCH {
                return ControlFlow::Break(());
            }
            last = entry.cookie;
            let name = OsStr::from_bytes(entry.name).to_owned();
            batch.push(DirEntry { name, file: entry.file, file_type: entry.file_type });
            ControlFlow::Continue(())
        });
        self.is_read = result.is_err() || batch.len() < BATCH;
        (self.after, self.waiting) = (last, batch.into_iter());
        let result = result.and_then(|()| {
            let problem = "its entries are not in ascending order";
            if descends { Err(Error::corrupt(Structure::Directory, problem)) } else { Ok(()) }
        });
        result.map_err(|error| at_path(error, &self.path))
    }
}

impl Iterator for ReadDir {
    type Item = Result<DirEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.waiting.next() {
                return Some(Ok(entry));
            }
            if self.is_read {
                return None;
            }
            if let Err(error) = self.fill() {
                self.is_read = true;
                return Some(Err(error));
            }
        }
    }
}

impl FusedIterator for ReadDir {}

/// What [`Volume::walk`] shows.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WalkEntry<'a> {
    /// The path from the directory that the walk began at.
    pub path: &'a Path,
    /// The attributes.
    pub attr: &'a Attr,
}

struct Walker<'a> {
    top: &'a [u8],
    visit: &'a mut dyn FnMut(Result<WalkEntry<'_>>) -> ControlFlow<()>,
    is_stopped: bool,
}

impl Walker<'_> {
    fn show(&mut self, entry: Result<WalkEntry<'_>>) {
        self.is_stopped |= (self.visit)(entry).is_break();
    }

    fn entry(&mut self, entry: &WalkedFile<'_>) {
        let path = Path::new(OsStr::from_bytes(entry.path));
        self.show(Ok(WalkEntry { path, attr: entry.attr }));
    }
}

impl WalkVisitor for Walker<'_> {
    type Directory = ();

    fn enter(&mut self, (): &(), entry: &WalkedFile<'_>) -> Option<()> {
        self.entry(entry);
        (!self.is_stopped).then_some(())
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        self.entry(entry);
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        let path = [prefix(self.top), b"/", path].concat();
        self.show(Err(at_path(owned(error), &path)));
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped
    }
}
