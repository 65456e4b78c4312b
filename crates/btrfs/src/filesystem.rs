//! An open volume, and a subvolume of it as a mount shows it: the `vfs` traits.

mod change;
mod deleted;
mod recovered;
pub(crate) mod sharing;
mod subvolumes;
mod volume;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_vfs::{
    Attr, DirEntry, Errno, Error, FileFlags, FileId, FileSystem, FileType, Parent, Result, StatFs,
    Structure,
};

use crate::SubvolumeId;
use crate::data::{self, FileData};
use crate::inode;
use crate::subvolume;
pub use deleted::{DeletedFiles, DeletedSearch};
pub use recovered::RecoveredFiles;
pub use volume::BtrfsVolume;

/// A subvolume of a volume, and those nested in it.
#[derive(Clone)]
pub struct Filesystem {
    volume: Arc<BtrfsVolume>,
    root: SubvolumeId,
}

impl Filesystem {
    pub(crate) fn new(volume: Arc<BtrfsVolume>, root: SubvolumeId) -> Self {
        Self { volume, root }
    }

    /// The volume that this is a view of.
    #[must_use]
    pub fn volume(&self) -> &Arc<BtrfsVolume> {
        &self.volume
    }
}

/// Names the file in errors that do not name one yet.
fn of(file: FileId) -> impl Fn(Error) -> Error {
    move |error| error.in_file_if_unnamed(file)
}

impl FileSystem for Filesystem {
    /// While the volume is open, each new inode of a subvolume has a number above all before it.
    fn reuses_numbers(&self) -> bool {
        false
    }

    fn root(&self) -> FileId {
        FileId { dev: self.root.0, ino: inode::ROOT_DIR }
    }

    fn statfs(&self) -> Result<StatFs> {
        self.volume.statfs()
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        inode::lookup(&self.volume, dir, name).map_err(of(dir))
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        if dir == self.root() || inode::placeholder_in(dir).is_some() {
            return Ok(None);
        }
        if dir.ino == inode::ROOT_DIR {
            return subvolume::parent_of(&self.volume, TreeId(dir.dev)).map_err(of(dir));
        }
        inode::parent(&self.volume, dir).map(Some).map_err(of(dir))
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        inode::attr(&self.volume, file).map_err(of(file))
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        inode::flags::flags(&self.volume, file).map_err(of(file))
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        inode::read_dir(&self.volume, dir, after, visit).map_err(of(dir))
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        /// No system call follows a longer target.
        const PATH_MAX: u64 = 4096;
        let read = || {
            let no_link = || Error::posix(Errno::INVAL, format!("{file} is not a symbolic link"));
            let data = FileData::open(&self.volume.rooms, file).map_err(|e| match e {
                // `readlink` of a directory returns `EINVAL` too.
                Error::Posix { errno: Errno::ISDIR, .. } => no_link(),
                e => e,
            })?;
            if inode::type_of(data.inode())? != FileType::Symlink {
                return Err(no_link());
            }
            if data.size() >= PATH_MAX {
                let problem = format!("the target of a symbolic link has {} bytes", data.size());
                return Err(Error::corrupt(Structure::InodeItem, problem));
            }
            let mut target = Vec::new();
            data::read_data(&self.volume.rooms, &data, 0..data.size(), &mut |_, bytes| {
                target.extend_from_slice(bytes);
                Ok(())
            })?;
            let is_zeroed = !target.is_empty() && target.iter().all(|&byte| byte == 0);
            if is_zeroed && self.volume.superblock().is_metadata_only() {
                return Err(Error::posix(
                    Errno::NODATA,
                    format!("the target of {file}, which a metadata dump does not hold"),
                ));
            }
            if target.len() as u64 != data.size() || target.is_empty() || target.contains(&0) {
                return Err(Error::corrupt(
                    Structure::FileExtent,
                    "the target of a symbolic link is cut",
                ));
            }
            Ok(target)
        };
        read().map_err(of(file))
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        inode::xattr(&self.volume, file, name).map_err(of(file))
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        inode::xattrs(&self.volume, file, visit).map_err(of(file))
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        FileData::open(&self.volume.rooms, file)
            .and_then(|data| data::read_at(&self.volume.rooms, &data, offset, buf))
            .map_err(of(file))
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        FileData::open(&self.volume.rooms, file)
            .and_then(|data| data::read_data(&self.volume.rooms, &data, range, visit))
            .map_err(of(file))
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        FileData::open(&self.volume.rooms, file)
            .and_then(|data| data::next_data(&self.volume.rooms, &data, offset..u64::MAX))
            .map_err(of(file))
    }

    fn prefetch(&self, files: &[FileId]) {
        data::prefetch(&self.volume.rooms, files);
    }
}
