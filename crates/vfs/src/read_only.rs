//! A filesystem that is only read, for callers that take one that can be changed.

use std::ops::{ControlFlow, Deref};

use crate::{
    Attr, Dedupe, DirEntry, EntryPlace, Errno, Error, Fallocate, FileFlags, FileId, FilePosition,
    FileSystem, FileSystemMut, FileType, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs,
    Timestamp, XattrMode,
};

/// The files of a filesystem that is only read, through a pointer such as `Arc` or `&`: each change
/// fails with `EROFS`.
#[derive(Clone, Debug)]
pub struct ReadOnlyFiles<P>(P);

impl<P> ReadOnlyFiles<P> {
    /// The files that `files` points to.
    pub fn new(files: P) -> Self {
        Self(files)
    }
}

/// `EROFS`.
fn refused<T>() -> Result<T> {
    Err(Error::posix(Errno::ROFS, "a volume that is open for reading"))
}

impl<P: Deref<Target: FileSystem> + Send + Sync> FileSystem for ReadOnlyFiles<P> {
    fn root(&self) -> FileId {
        self.0.root()
    }

    /// No file goes, so no number becomes free.
    fn reuses_numbers(&self) -> bool {
        false
    }

    fn statfs(&self) -> Result<StatFs> {
        self.0.statfs()
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        self.0.lookup(dir, name)
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        self.0.parent(dir)
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        self.0.attr(file)
    }

    fn attr_of_entry(&self, dir: FileId, name: &[u8], file: FileId) -> Result<Attr> {
        self.0.attr_of_entry(dir, name, file)
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        self.0.flags(file)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.0.read_dir(dir, after, visit)
    }

    crate::forward_contents!(0);

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.0.xattrs(file, visit)
    }

    fn seek_data(&self, file: FileId, offset: u64) -> Result<u64> {
        self.0.seek_data(file, offset)
    }

    fn seek_hole(&self, file: FileId, offset: u64) -> Result<u64> {
        self.0.seek_hole(file, offset)
    }

    fn prefetch_listed(&self, files: &[(FileId, FileType)]) {
        self.0.prefetch_listed(files);
    }
}

impl<P: Deref<Target: FileSystem> + Send + Sync> FileSystemMut for ReadOnlyFiles<P> {
    fn mknod(&self, _: EntryPlace<'_>, _: NewNode, _: &NewFile) -> Result<FileId> {
        refused()
    }

    fn mkdir(&self, _: EntryPlace<'_>, _: &NewFile) -> Result<FileId> {
        refused()
    }

    fn symlink(&self, _: EntryPlace<'_>, _: &[u8], _: &NewFile) -> Result<FileId> {
        refused()
    }

    fn create_unnamed(&self, _: FileId, _: bool, _: &NewFile) -> Result<FileId> {
        refused()
    }

    fn link(&self, _: FileId, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        refused()
    }

    fn unlink(&self, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        refused()
    }

    fn rmdir(&self, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        refused()
    }

    fn rename_with(
        &self,
        _: EntryPlace<'_>,
        _: EntryPlace<'_>,
        _: Rename,
        _: Timestamp,
    ) -> Result<()> {
        refused()
    }

    fn set_attr(&self, _: FileId, _: &SetAttr, _: Timestamp) -> Result<()> {
        refused()
    }

    fn set_flags(&self, _: FileId, _: FileFlags, _: Timestamp) -> Result<()> {
        refused()
    }

    fn write(&self, _: FileId, _: u64, _: &[u8], _: Timestamp) -> Result<()> {
        refused()
    }

    fn write_direct(&self, _: FileId, _: u64, _: &[u8], _: Timestamp) -> Result<()> {
        refused()
    }

    fn fallocate(&self, _: FileId, _: Fallocate, _: u64, _: u64, _: Timestamp) -> Result<()> {
        refused()
    }

    fn clone_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<()> {
        refused()
    }

    fn dedupe_range(&self, _: FilePosition, _: FilePosition, _: u64) -> Result<Dedupe> {
        refused()
    }

    fn copy_range(&self, _: FilePosition, _: FilePosition, _: u64, _: Timestamp) -> Result<u64> {
        refused()
    }

    fn set_xattr(&self, _: FileId, _: &[u8], _: &[u8], _: XattrMode, _: Timestamp) -> Result<()> {
        refused()
    }

    fn remove_xattr(&self, _: FileId, _: &[u8], _: Timestamp) -> Result<()> {
        refused()
    }

    /// No file goes, so there is nothing to count.
    fn open(&self, file: FileId) -> Result<()> {
        self.0.attr(file).map(drop)
    }

    fn release(&self, _: FileId) -> Result<()> {
        Ok(())
    }

    fn fsync(&self, file: FileId) -> Result<()> {
        self.0.attr(file).map(drop)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
