//! Files that stay what they are while a caller uses their numbers.
//!
//! XFS gives the number of a file that has gone to a new one. A caller that keeps the number
//! between finding a file and using it would use the new one:
//!
//! ```text
//! this thread     lookup a: 131                      write to 131
//! another one                  remove a, make b: 131                 the write went to b
//! ```
//!
//! So it opens the file, and looks again. When the name still leads to the same number, the open
//! file is the one that has the name, and its number stays with it until it is released:
//!
//! ```text
//! this thread     lookup a: 131, open 131, lookup a: 131             write to 131
//! another one                                          remove a      b gets another number
//! ```
//!
//! [`HeldFiles`] does that for all files that a call by path finds. A
//! [walk](mod@crate::walk) does it for the directories that it is in and the file that it shows.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::{
    Attr, Dedupe, DirEntry, EntryPlace, Errno, Error, Fallocate, FileFlags, FileId, FilePosition,
    FileSystem, FileSystemMut, FileType, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs,
    Structure, Timestamp, XattrMode,
};

/// How often a name is looked up that leads to another file each time.
const MOST_TRIES: usize = 100;

/// An opening of a file, which ends when this is dropped. Where numbers are not given again it is
/// none.
#[must_use]
pub struct HeldFile<'a> {
    fs: Option<&'a dyn FileSystemMut>,
    file: FileId,
}

impl<'a> HeldFile<'a> {
    /// Holds a file that the caller knows to be the one it means.
    ///
    /// # Errors
    /// `ENOENT` when it has gone.
    pub fn new(fs: &'a dyn FileSystemMut, file: FileId) -> Result<Self> {
        if !fs.reuses_numbers() {
            return Ok(Self { fs: None, file });
        }
        fs.open(file).map(|()| Self { fs: Some(fs), file })
    }

    /// Holds the file that the entry `name` of `dir` leads to. The caller holds `dir`, and found
    /// that it leads to `found`.
    ///
    /// # Errors
    /// `ENOENT` when the name has gone, [`Error::Corrupt`] when it leads to no file, or to one that
    /// cannot be opened because it has no names.
    pub fn of_entry(
        fs: &'a dyn FileSystemMut,
        dir: FileId,
        name: &[u8],
        found: FileId,
    ) -> Result<Self> {
        let missing = |file| fs.attr_of_entry(dir, name, file).map(drop);
        Self::that(fs, found, || fs.lookup(dir, name), missing)
    }

    /// Holds the directory above `dir`, which the caller holds.
    fn above(fs: &'a dyn FileSystemMut, dir: FileId, found: FileId) -> Result<Self> {
        let parent = || {
            let gone = || Error::posix(Errno::NOENT, format!("the directory above {dir}"));
            fs.parent(dir)?.map(|parent| parent.dir).ok_or_else(gone)
        };
        Self::that(fs, found, parent, |_| Ok(()))
    }

    /// Holds what `look` finds, which was `found` before. `missing` looks for the cause when a file
    /// that was found is not there.
    fn that(
        fs: &'a dyn FileSystemMut,
        mut found: FileId,
        look: impl Fn() -> Result<FileId>,
        missing: impl Fn(FileId) -> Result<()>,
    ) -> Result<Self> {
        let mut was_missing = 0;
        for _ in 0..MOST_TRIES {
            let held = match Self::new(fs, found) {
                Ok(held) if held.fs.is_none() => return Ok(held),
                Err(Error::Posix { errno: Errno::NOENT, .. }) => None,
                held => Some(held?),
            };
            let again = look()?;
            match held {
                Some(held) if again == found => return Ok(held),
                None if again == found => {
                    missing(found)?;
                    was_missing += 1;
                }
                _ => {}
            }
            found = again;
            thread::yield_now();
        }
        if was_missing == MOST_TRIES {
            let problem = format!("its name leads to {found}, which counts no names");
            return Err(Error::corrupt(Structure::Directory, problem));
        }
        Err(Error::posix(Errno::AGAIN, format!("{found} is another file all the time")))
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> FileId {
        self.file
    }
}

/// The error has no caller: that of the last release of a file without names is about the removal,
/// which another call has made. The file is freed when the volume is opened again.
impl Drop for HeldFile<'_> {
    fn drop(&mut self) {
        if let Some(fs) = self.fs {
            let _ = fs.release(self.file);
        }
    }
}

/// The files of a filesystem, for one call by path: each that is found, or made, stays what it is
/// until this is dropped. Entries that [`FileSystem::read_dir`] shows are not found by that.
///
/// It keeps each of them, so it is for a call that looks up a path or a few, and not for a walk.
#[must_use]
pub struct HeldFiles<'a> {
    fs: &'a dyn FileSystemMut,
    held: Mutex<HashMap<FileId, HeldFile<'a>>>,
}

impl<'a> HeldFiles<'a> {
    /// The files of `fs`.
    pub fn new(fs: &'a dyn FileSystemMut) -> Self {
        Self { fs, held: Mutex::default() }
    }

    /// The filesystem itself, which holds nothing.
    #[must_use]
    pub fn inner(&self) -> &'a dyn FileSystemMut {
        self.fs
    }

    /// Keeps `found`, as `open` holds it, unless it is held.
    fn keep(&self, found: FileId, open: impl FnOnce() -> Result<HeldFile<'a>>) -> Result<FileId> {
        let held = || self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.fs.reuses_numbers() || held().contains_key(&found) {
            return Ok(found);
        }
        let new = open()?;
        let file = new.file();
        // One that is held already is released here, after the lock.
        let twice = held().insert(file, new);
        drop(twice);
        Ok(file)
    }

    /// Keeps a file that was just made at `place`.
    fn keep_new(&self, place: EntryPlace<'_>, made: FileId) -> Result<FileId> {
        let held = self.keep(made, || HeldFile::of_entry(self.fs, place.dir, place.name, made))?;
        if held == made {
            return Ok(made);
        }
        Err(Error::posix(Errno::NOENT, format!("{made}, which was removed when it was just made")))
    }
}

impl FileSystem for HeldFiles<'_> {
    fn root(&self) -> FileId {
        self.fs.root()
    }

    fn reuses_numbers(&self) -> bool {
        self.fs.reuses_numbers()
    }

    fn statfs(&self) -> Result<StatFs> {
        self.fs.statfs()
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        let found = self.fs.lookup(dir, name)?;
        self.keep(found, || HeldFile::of_entry(self.fs, dir, name, found))
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        let Some(parent) = self.fs.parent(dir)? else { return Ok(None) };
        let dir = self.keep(parent.dir, || HeldFile::above(self.fs, dir, parent.dir))?;
        Ok(Some(Parent { dir, ..parent }))
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        self.fs.attr(file)
    }

    fn attr_of_entry(&self, dir: FileId, name: &[u8], file: FileId) -> Result<Attr> {
        self.fs.attr_of_entry(dir, name, file)
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        self.fs.flags(file)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.fs.read_dir(dir, after, visit)
    }

    crate::forward_contents!(fs);

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.fs.xattrs(file, visit)
    }

    fn seek_data(&self, file: FileId, offset: u64) -> Result<u64> {
        self.fs.seek_data(file, offset)
    }

    fn seek_hole(&self, file: FileId, offset: u64) -> Result<u64> {
        self.fs.seek_hole(file, offset)
    }

    fn prefetch_listed(&self, files: &[(FileId, FileType)]) {
        self.fs.prefetch_listed(files);
    }
}

impl FileSystemMut for HeldFiles<'_> {
    fn create(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        self.fs.create(place, new).and_then(|made| self.keep_new(place, made))
    }

    fn mknod(&self, place: EntryPlace<'_>, node: NewNode, new: &NewFile) -> Result<FileId> {
        self.fs.mknod(place, node, new).and_then(|made| self.keep_new(place, made))
    }

    fn mkdir(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        self.fs.mkdir(place, new).and_then(|made| self.keep_new(place, made))
    }

    fn symlink(&self, place: EntryPlace<'_>, target: &[u8], new: &NewFile) -> Result<FileId> {
        self.fs.symlink(place, target, new).and_then(|made| self.keep_new(place, made))
    }

    fn create_unnamed(&self, dir: FileId, is_linkable: bool, new: &NewFile) -> Result<FileId> {
        self.fs.create_unnamed(dir, is_linkable, new)
    }

    fn link(&self, file: FileId, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.fs.link(file, place, at)
    }

    fn unlink(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.fs.unlink(place, at)
    }

    fn rmdir(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.fs.rmdir(place, at)
    }

    fn rename_with(
        &self,
        from: EntryPlace<'_>,
        to: EntryPlace<'_>,
        how: Rename,
        at: Timestamp,
    ) -> Result<()> {
        self.fs.rename_with(from, to, how, at)
    }

    fn set_attr(&self, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()> {
        self.fs.set_attr(file, set, at)
    }

    fn set_flags(&self, file: FileId, flags: FileFlags, at: Timestamp) -> Result<()> {
        self.fs.set_flags(file, flags, at)
    }

    fn write(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.fs.write(file, offset, data, at)
    }

    fn write_direct(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.fs.write_direct(file, offset, data, at)
    }

    fn fallocate(
        &self,
        file: FileId,
        what: Fallocate,
        offset: u64,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        self.fs.fallocate(file, what, offset, len, at)
    }

    fn clone_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        self.fs.clone_range(from, to, len, at)
    }

    fn dedupe_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<Dedupe> {
        self.fs.dedupe_range(from, to, len)
    }

    fn copy_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<u64> {
        self.fs.copy_range(from, to, len, at)
    }

    fn set_xattr(
        &self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()> {
        self.fs.set_xattr(file, name, value, mode, at)
    }

    fn remove_xattr(&self, file: FileId, name: &[u8], at: Timestamp) -> Result<()> {
        self.fs.remove_xattr(file, name, at)
    }

    fn open(&self, file: FileId) -> Result<()> {
        self.fs.open(file)
    }

    fn release(&self, file: FileId) -> Result<()> {
        self.fs.release(file)
    }

    fn fsync(&self, file: FileId) -> Result<()> {
        self.fs.fsync(file)
    }

    fn fdatasync(&self, file: FileId) -> Result<()> {
        self.fs.fdatasync(file)
    }

    fn sync(&self) -> Result<()> {
        self.fs.sync()
    }
}
