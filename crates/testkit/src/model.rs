//! A filesystem in memory, small enough to be right.
//!
//! [`Model`] does what POSIX says, in the plainest way, behind the same traits as an engine. A test
//! makes the same calls on both and compares the result of every call, and at the end everything
//! that both show. [`actor`] makes random calls.
//!
//! Where POSIX leaves a choice, the model follows btrfs, or another one of [`ModelManners`].
//! Directories have one link, and their size is twice the length of all names in them. Data is
//! counted in sectors of 4 KiB, and a written sector stays data until it is truncated. The model
//! has no limits of space or of numbers, and it counts space in whole sectors: no data is inline.

pub mod actor;
mod attributes;
mod change;
mod contents;
mod copy;
mod read;
pub mod subvolumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use contents::{SECTOR, SectorContents};
use offshoot_vfs::{Attr, Errno, Error, FileFlags, FileId, FileType, Parent, Result, Timestamp};

/// The inode number of the root.
const ROOT: u64 = 1;

/// The format that the model follows where POSIX leaves a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelManners {
    /// Directories have one link.
    #[default]
    Btrfs,
    /// Directories have two links, and one more for each directory in them. Their size depends on
    /// the form of the directory, so a comparison leaves it out with
    /// [`Aspect::DirectorySize`](crate::compare::Aspect::DirectorySize). A clone behind the end of
    /// a file leaves what is before the end as it is. A directory that is not empty is not replaced
    /// with `EEXIST`, and one above the file that moves with `ENOTEMPTY`. New files and directories
    /// begin with some flags of their directory. Most files that exchange their names keep their
    /// times.
    Xfs,
}

/// A filesystem in memory.
#[derive(Debug)]
pub struct Model {
    state: Mutex<ModelState>,
}

#[derive(Debug)]
struct ModelState {
    manners: ModelManners,
    /// What ranges that are shared or moved consist of, in bytes.
    block_bytes: u64,
    nodes: BTreeMap<u64, ModelNode>,
    next_ino: u64,
    /// The roots of read-only subvolumes.
    read_only: BTreeSet<u64>,
    /// The creation time of each subvolume except the top-level one.
    made: BTreeMap<u64, Timestamp>,
    /// The root of the default subvolume, which a mount shows.
    default: u64,
    /// The compression method of files that have the flag COMPRESS and name no method.
    compression: &'static str,
}

#[derive(Clone, Debug)]
struct ModelNode {
    attr: Attr,
    /// The inode number of the root of its subvolume.
    subvolume: u64,
    body: NodeBody,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    flags: FileFlags,
    opens: u64,
    /// The file never had a name, and may get one.
    is_linkable: bool,
}

#[derive(Clone, Debug)]
enum NodeBody {
    Directory(ModelDirectory),
    Regular(SectorContents),
    Symlink(Vec<u8>),
    Other,
}

#[derive(Clone, Debug, Default)]
struct ModelDirectory {
    parent: Option<Parent>,
    /// The name and inode number of each entry, by its cookie.
    entries: BTreeMap<u64, (Vec<u8>, u64)>,
    /// The cookie of each name.
    names: BTreeMap<Vec<u8>, u64>,
    last_cookie: u64,
}

fn id(ino: u64) -> FileId {
    FileId { dev: 0, ino }
}

fn posix<T>(errno: Errno, what: impl std::fmt::Display) -> Result<T> {
    Err(Error::posix(errno, format!("{what} in the model")))
}

impl Model {
    /// An empty filesystem whose root has these attributes.
    #[must_use]
    pub fn new(root: &Attr) -> Self {
        let attr = Attr { file: id(ROOT), size: 0, nlink: 1, ..*root };
        let body = NodeBody::Directory(ModelDirectory::default());
        let (xattrs, flags) = (BTreeMap::new(), FileFlags::empty());
        let subvolume = ROOT;
        let node = ModelNode { attr, subvolume, body, xattrs, flags, opens: 0, is_linkable: false };
        let (nodes, next_ino) = ([(ROOT, node)].into(), ROOT + 1);
        let (read_only, made) = (BTreeSet::new(), BTreeMap::new());
        let (default, compression) = (ROOT, "zlib");
        let manners = ModelManners::default();
        let state = ModelState {
            manners,
            block_bytes: SECTOR,
            nodes,
            next_ino,
            read_only,
            made,
            default,
            compression,
        };
        Self { state: Mutex::new(state) }
    }

    /// The same files with the manners of another format.
    #[must_use]
    pub fn with_manners(self, manners: ModelManners) -> Self {
        self.state().manners = manners;
        self
    }

    /// The same files with blocks of this size, in bytes. Of these consist the ranges that calls
    /// share or move. The model goes on counting space in sectors of 4 KiB.
    #[must_use]
    pub fn with_blocks(self, bytes: u64) -> Self {
        self.state().block_bytes = bytes;
        self
    }

    /// Forgets the extended attributes with these names.
    pub fn forget_xattrs(&self, is_forgotten: impl Fn(&[u8]) -> bool) {
        for node in self.state().nodes.values_mut() {
            node.xattrs.retain(|name, _| !is_forgotten(name));
        }
    }

    /// From now on, files that have the flag COMPRESS and name no method use this one: `zlib`,
    /// `lzo` or `zstd`, as in `btrfs.compression`.
    pub fn compress_with(&self, method: &'static str) {
        self.state().compression = method;
    }

    /// An empty filesystem that was made at this time and belongs to the user root.
    #[must_use]
    pub fn made_at(at: Timestamp) -> Self {
        Self::new(&Attr {
            file: id(ROOT),
            file_type: FileType::Directory,
            permissions: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            size: 0,
            allocated_bytes: 0,
            atime: at,
            mtime: at,
            ctime: at,
            btime: at,
            generation: 0,
        })
    }

    fn state(&self) -> MutexGuard<'_, ModelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ModelState {
    fn node(&self, file: FileId) -> Result<&ModelNode> {
        self.nodes.get(&file.ino).map_or_else(|| posix(Errno::NOENT, file), Ok)
    }

    fn node_mut(&mut self, file: FileId) -> Result<&mut ModelNode> {
        self.nodes.get_mut(&file.ino).map_or_else(|| posix(Errno::NOENT, file), Ok)
    }

    /// `EROFS` if `file` is in a read-only subvolume.
    fn require_writable(&self, file: FileId) -> Result<()> {
        match self.nodes.get(&file.ino) {
            Some(node) if self.read_only.contains(&node.subvolume) => posix(Errno::ROFS, file),
            _ => Ok(()),
        }
    }

    /// `EXDEV` unless two files are in one subvolume.
    fn require_same_subvolume(&self, one: FileId, other: FileId) -> Result<()> {
        if self.node(one)?.subvolume == self.node(other)?.subvolume {
            return Ok(());
        }
        posix(Errno::XDEV, one)
    }

    fn is_subvolume(&self, file: FileId) -> bool {
        self.nodes.get(&file.ino).is_some_and(|node| node.subvolume == file.ino)
    }

    fn directory(&self, dir: FileId) -> Result<&ModelDirectory> {
        match &self.node(dir)?.body {
            NodeBody::Directory(directory) => Ok(directory),
            _ => posix(Errno::NOTDIR, dir),
        }
    }

    /// How many directories are in a directory.
    fn subdirectories(&self, dir: &ModelDirectory) -> Result<u32> {
        let types = dir.entries.values().map(|(_, ino)| self.file_type(id(*ino)));
        types.map(|found| found.map(|found| u32::from(found == FileType::Directory))).sum()
    }

    fn directory_mut(&mut self, dir: FileId) -> Result<&mut ModelDirectory> {
        match &mut self.node_mut(dir)?.body {
            NodeBody::Directory(directory) => Ok(directory),
            _ => posix(Errno::NOTDIR, dir),
        }
    }

    /// The contents of a regular file; `EISDIR` and `EINVAL` for anything else.
    fn contents(&self, file: FileId) -> Result<&SectorContents> {
        match &self.node(file)?.body {
            NodeBody::Regular(contents) => Ok(contents),
            NodeBody::Directory(_) => posix(Errno::ISDIR, file),
            _ => posix(Errno::INVAL, file),
        }
    }

    fn contents_mut(&mut self, file: FileId) -> Result<&mut SectorContents> {
        match &mut self.node_mut(file)?.body {
            NodeBody::Regular(contents) => Ok(contents),
            NodeBody::Directory(_) => posix(Errno::ISDIR, file),
            _ => posix(Errno::INVAL, file),
        }
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        let directory = self.directory(dir)?;
        match directory.names.get(name).and_then(|cookie| directory.entries.get(cookie)) {
            Some(&(_, ino)) => Ok(id(ino)),
            None => posix(Errno::NOENT, name.escape_ascii()),
        }
    }

    fn file_type(&self, file: FileId) -> Result<FileType> {
        Ok(self.node(file)?.attr.file_type)
    }

    /// Updates the times and the size of a directory after its entries changed.
    fn touch(&mut self, dir: FileId, at: Timestamp) -> Result<()> {
        let size = self.directory(dir)?.names.keys().map(|name| 2 * name.len() as u64).sum();
        let attr = &mut self.node_mut(dir)?.attr;
        (attr.mtime, attr.ctime, attr.size) = (at, at, size);
        Ok(())
    }
}
