//! The files of a volume that is open for writing.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_vfs::{
    Attr, Dedupe, DirEntry, EntryPlace, Fallocate, FileFlags, FileId, FilePosition, FileSystem,
    FileSystemMut, FileType, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs, Timestamp,
    XattrMode,
};

use super::{XfsVolume, of};

/// The files of a volume.
#[derive(Clone, Debug)]
pub(super) struct XfsFiles(Arc<XfsVolume>);

impl XfsFiles {
    pub(super) fn new(volume: Arc<XfsVolume>) -> Self {
        Self(volume)
    }
}

impl FileSystem for XfsFiles {
    fn root(&self) -> FileId {
        self.0.root()
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

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        self.0.read_link(file)
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        self.0.xattr(file, name)
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.0.xattrs(file, visit)
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.0.read(file, offset, buf)
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.0.read_data(file, range, visit)
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        self.0.next_data(file, offset)
    }

    fn prefetch(&self, files: &[FileId]) {
        self.0.prefetch(files);
    }

    fn prefetch_listed(&self, files: &[(FileId, FileType)]) {
        self.0.prefetch_listed(files);
    }
}

impl FileSystemMut for XfsFiles {
    fn mknod(&self, place: EntryPlace<'_>, node: NewNode, new: &NewFile) -> Result<FileId> {
        self.0.live()?.mknod(place, node, new).map_err(of(place.dir))
    }

    fn mkdir(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        self.0.live()?.mkdir(place, new).map_err(of(place.dir))
    }

    fn symlink(&self, place: EntryPlace<'_>, target: &[u8], new: &NewFile) -> Result<FileId> {
        self.0.live()?.symlink(place, target, new).map_err(of(place.dir))
    }

    fn create_unnamed(&self, dir: FileId, is_linkable: bool, new: &NewFile) -> Result<FileId> {
        self.0.live()?.create_unnamed(dir, is_linkable, new).map_err(of(dir))
    }

    fn link(&self, file: FileId, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.0.live()?.link(file, place, at).map_err(of(file))
    }

    fn unlink(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.0.live()?.unlink(place, at).map_err(of(place.dir))
    }

    fn rmdir(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.0.live()?.rmdir(place, at).map_err(of(place.dir))
    }

    fn rename_with(
        &self,
        from: EntryPlace<'_>,
        to: EntryPlace<'_>,
        how: Rename,
        at: Timestamp,
    ) -> Result<()> {
        self.0.live()?.rename(from, to, how, at).map_err(of(from.dir))
    }

    fn set_attr(&self, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()> {
        self.0.live()?.set_attr(file, set, at).map_err(of(file))
    }

    fn set_flags(&self, file: FileId, flags: FileFlags, at: Timestamp) -> Result<()> {
        self.0.live()?.set_flags(file, flags, at).map_err(of(file))
    }

    fn write(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.0.live()?.write(file, offset, data, at).map_err(of(file))
    }

    fn write_direct(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.0.live()?.write_direct(file, offset, data, at).map_err(of(file))
    }

    fn fallocate(
        &self,
        file: FileId,
        what: Fallocate,
        offset: u64,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        self.0.live()?.fallocate(file, what, offset, len, at).map_err(of(file))
    }

    fn clone_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        self.0.live()?.clone_range(from, to, len, at).map_err(of(to.file))
    }

    fn dedupe_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<Dedupe> {
        self.0.live()?.dedupe_range(from, to, len).map_err(of(to.file))
    }

    fn copy_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<u64> {
        self.0.live()?.copy_range(from, to, len, at).map_err(of(to.file))
    }

    fn set_xattr(
        &self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()> {
        self.0.live()?.set_xattr(file, name, value, mode, at).map_err(of(file))
    }

    fn remove_xattr(&self, file: FileId, name: &[u8], at: Timestamp) -> Result<()> {
        self.0.live()?.remove_xattr(file, name, at).map_err(of(file))
    }

    fn open(&self, file: FileId) -> Result<()> {
        self.0.live()?.open(file).map_err(of(file))
    }

    fn release(&self, file: FileId) -> Result<()> {
        self.0.live()?.release(file).map_err(of(file))
    }

    fn fsync(&self, file: FileId) -> Result<()> {
        self.0.live()?.fsync(file).map_err(of(file))
    }

    fn fdatasync(&self, file: FileId) -> Result<()> {
        self.0.live()?.fdatasync(file).map_err(of(file))
    }

    fn sync(&self) -> Result<()> {
        self.0.live()?.sync()
    }
}
