//! The `vfs` trait for changing a subvolume and those nested in it.

use offshoot_vfs::{
    Dedupe, EntryPlace, Fallocate, FileFlags, FileId, FilePosition, FileSystemMut, NewFile,
    NewNode, Rename, Result, SetAttr, Timestamp, XattrMode,
};

use super::{Filesystem, of};
use crate::inode::create::{NewFileKind, make, make_unnamed};
use crate::inode::{allocate, attributes, clone, flags, unlink, write, xattr};
use crate::log::{self, FsyncScope};
use crate::subvolume::{delete, rename};

impl FileSystemMut for Filesystem {
    fn mknod(&self, place: EntryPlace<'_>, node: NewNode, new: &NewFile) -> Result<FileId> {
        make(&self.volume, place, NewFileKind::Node(node), new).map_err(of(place.dir))
    }

    fn mkdir(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        make(&self.volume, place, NewFileKind::Directory, new).map_err(of(place.dir))
    }

    fn symlink(&self, place: EntryPlace<'_>, target: &[u8], new: &NewFile) -> Result<FileId> {
        make(&self.volume, place, NewFileKind::Symlink(target), new).map_err(of(place.dir))
    }

    fn create_unnamed(&self, dir: FileId, is_linkable: bool, new: &NewFile) -> Result<FileId> {
        make_unnamed(&self.volume, dir, is_linkable, new).map_err(of(dir))
    }

    fn link(&self, file: FileId, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        unlink::link(&self.volume, file, place, at).map_err(of(file))
    }

    fn unlink(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        unlink::unlink(&self.volume, place, at).map_err(of(place.dir))
    }

    fn rmdir(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        delete::rmdir(&self.volume, &self.volume.subvolumes, place, at).map_err(of(place.dir))
    }

    fn rename_with(
        &self,
        from: EntryPlace<'_>,
        to: EntryPlace<'_>,
        how: Rename,
        at: Timestamp,
    ) -> Result<()> {
        rename::rename(&self.volume, from, to, how, at).map_err(of(from.dir))
    }

    fn set_attr(&self, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()> {
        attributes::set_attr(&self.volume, file, set, at).map_err(of(file))
    }

    fn set_flags(&self, file: FileId, flags: FileFlags, at: Timestamp) -> Result<()> {
        flags::set(&self.volume, file, flags, at).map_err(of(file))
    }

    fn write(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        write::write(&self.volume, file, offset, data, at).map_err(of(file))
    }

    fn write_direct(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        write::write_direct(&self.volume, file, offset, data, at).map_err(of(file))
    }

    fn fallocate(
        &self,
        file: FileId,
        what: Fallocate,
        offset: u64,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        allocate::fallocate(&self.volume, file, what, offset, len, at).map_err(of(file))
    }

    fn clone_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        clone::clone_range(&self.volume, from, to, len, at).map_err(of(to.file))
    }

    fn dedupe_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<Dedupe> {
        clone::dedupe_range(&self.volume, from, to, len).map_err(of(to.file))
    }

    fn copy_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<u64> {
        clone::copy_range(&self.volume, from, to, len, at).map_err(of(to.file))
    }

    fn set_xattr(
        &self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()> {
        xattr::set(&self.volume, file, name, value, mode, at).map_err(of(file))
    }

    fn remove_xattr(&self, file: FileId, name: &[u8], at: Timestamp) -> Result<()> {
        xattr::remove(&self.volume, file, name, at).map_err(of(file))
    }

    fn open(&self, file: FileId) -> Result<()> {
        attributes::open(&self.volume, file).map_err(of(file))
    }

    fn release(&self, file: FileId) -> Result<()> {
        delete::release(&self.volume, &self.volume.subvolumes, file).map_err(of(file))
    }

    fn fsync(&self, file: FileId) -> Result<()> {
        if self.volume.live_part().is_none() {
            return Ok(());
        }
        log::fsync(&self.volume, &self.volume.log, file, FsyncScope::Everything).map_err(of(file))
    }

    fn fdatasync(&self, file: FileId) -> Result<()> {
        if self.volume.live_part().is_none() {
            return Ok(());
        }
        log::fsync(&self.volume, &self.volume.log, file, FsyncScope::Data).map_err(of(file))
    }

    fn sync(&self) -> Result<()> {
        match self.volume.live_part() {
            Some(_) => self.volume.sync(),
            None => Ok(()),
        }
    }
}
