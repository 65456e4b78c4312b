//! Inodes: loaded from their clusters, verified, and kept in a small cache.
//!
//! Before an inode is read, the tree of inodes of its group must say that it is in use. So a number
//! that leads to no file, from a stale handle or a damaged directory, gives an error that says so.

pub(crate) mod change;
pub(crate) mod exchange;
pub(crate) mod fork;

use std::sync::Arc;

use offshoot_vfs::{
    Attr, Errno, Error, FileFlags, FileId, FileType, Malformed, Result, Structure, Timestamp,
};
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::dir::short::ShortDir;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::inode::{
    XfsFork, XfsInode, XfsInodeCore, XfsInodeFlags, XfsTime, device_number, file_type,
};
use offshoot_xfs_format::record::{CHUNK_INODES, XfsInodeChunk};
use offshoot_xfs_format::{AgBlock, AgNumber, BasicBlock, Ino, XfsGeometry};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::buffer::{BufferRole, DiskRun, XfsBuffers, damaged_at};
use crate::group;
use fork::{ForkContents, LoadedFork};

/// The number space of all files of a volume.
pub(crate) const SPACE: u64 = 0;

/// The bytes of inodes that are read at once, if blocks are not larger.
const CLUSTER_BYTES: u32 = 16 << 10;

/// The file with an inode.
pub(crate) fn file_id(ino: Ino) -> FileId {
    FileId { dev: SPACE, ino: ino.0 }
}

/// An inode, apart from the bytes of the volume.
#[derive(Debug)]
pub(crate) struct LoadedInode {
    pub(crate) ino: Ino,
    pub(crate) core: XfsInodeCore,
    pub(crate) data: LoadedFork,
    pub(crate) attributes: Option<LoadedFork>,
}

/// Weighs an inode by its memory.
#[derive(Clone)]
struct InodeWeight;

impl Weighter<Ino, Arc<LoadedInode>> for InodeWeight {
    fn weight(&self, _: &Ino, inode: &Arc<LoadedInode>) -> u64 {
        let forks =
            inode.data.heap_bytes() + inode.attributes.as_ref().map_or(0, LoadedFork::heap_bytes);
        (size_of::<LoadedInode>() + forks) as u64
    }
}

/// The inodes of a volume.
#[derive(Debug)]
pub(crate) struct XfsInodes {
    cache: Cache<Ino, Arc<LoadedInode>, InodeWeight>,
}

impl XfsInodes {
    /// A cache of at most `budget_bytes`.
    pub(crate) fn new(budget_bytes: u64) -> Self {
        let inodes = usize::try_from(budget_bytes / size_of::<LoadedInode>() as u64);
        Self {
            cache: Cache::with_weighter(inodes.unwrap_or(usize::MAX), budget_bytes, InodeWeight),
        }
    }

    /// The inode of `file`; `ENOENT` when it is not in use.
    pub(crate) fn get(&self, buffers: &XfsBuffers, file: FileId) -> Result<Arc<LoadedInode>> {
        let missing = || Error::posix(Errno::NOENT, file.to_string());
        if file.dev != SPACE {
            return Err(missing());
        }
        let ino = Ino(file.ino);
        self.cache
            .get_or_insert_with(&ino, || load(buffers, ino)?.map(Arc::new).ok_or_else(missing))
    }
}

/// Reads an inode; `None` when it is not in use.
fn load(buffers: &XfsBuffers, ino: Ino) -> Result<Option<LoadedInode>> {
    let geometry = buffers.geometry();
    let (Some((ag, inode)), Some(at)) = (geometry.split_ino(ino), geometry.inode_offset(ino))
    else {
        return Ok(None);
    };
    let Some(chunk) = group::chunk_in_use(buffers, ag, inode)? else { return Ok(None) };
    let block = AgBlock(inode.0 >> geometry.inodes_per_block_log());
    let run = cluster(geometry, ag, block, &chunk);
    let buffer = buffers.read(&[run], BufferRole::InodeCluster)?;
    let inside = usize::try_from(at - run.at.bytes()).unwrap_or(usize::MAX);
    let bytes = buffer.bytes().get(inside..).and_then(|rest| rest.get(..geometry.inode_size()));
    let place = BasicBlock(at / BASIC_BLOCK);
    let bad = |problem| damaged_at(place, problem);
    let bytes = bytes.ok_or_else(|| {
        bad(Malformed::new(Structure::InodeCore, "it is outside the blocks of its chunk"))
    })?;
    let inode = LoadedInode::parse(geometry, ino, bytes).map_err(bad)?;
    let is_free = "the tree of inodes says that it is in use, but it is free";
    inode.map(Some).ok_or_else(|| bad(Malformed::new(Structure::InodeCore, is_free)))
}

/// The blocks to read for an inode in `block`. In a whole chunk it is a cluster, which holds other
/// inodes that will be wanted soon.
fn cluster(geometry: &XfsGeometry, ag: AgNumber, block: AgBlock, chunk: &XfsInodeChunk) -> DiskRun {
    let blocks = (CLUSTER_BYTES >> geometry.block_log).max(1);
    let first = chunk.start().0 >> geometry.inodes_per_block_log();
    let chunk_blocks = (CHUNK_INODES >> geometry.inodes_per_block_log()).max(1);
    let inside = block.0.saturating_sub(first);
    let start = first + inside / blocks * blocks;
    let count = blocks.min(chunk_blocks);
    let is_whole = chunk.holes(geometry) == 0 && geometry.is_usable_run(ag, AgBlock(start), count);
    let (start, count) = if is_whole { (AgBlock(start), count) } else { (block, 1) };
    DiskRun { at: geometry.place(ag, start), bytes: (count as usize) << geometry.block_log }
}

impl LoadedInode {
    /// Proves the bytes of an inode; `None` when no file has it.
    pub(crate) fn parse(
        geometry: &XfsGeometry,
        ino: Ino,
        bytes: &[u8],
    ) -> Result<Option<Self>, Malformed> {
        let inode = XfsInode::verify(bytes, geometry, ino)?;
        if inode.core.is_free() {
            return Ok(None);
        }
        if let (XfsFork::Local(fork), file_type::DIRECTORY) = (&inode.data, inode.core.file_type())
        {
            ShortDir::parse(geometry, fork)?;
        }
        if let Some(XfsFork::Local(fork)) = inode.attributes {
            ShortXattrs::parse(fork)?;
        }
        Ok(Some(Self {
            ino,
            core: *inode.core,
            data: LoadedFork::new(ino, false, &inode.data),
            attributes: inode.attributes.as_ref().map(|fork| LoadedFork::new(ino, true, fork)),
        }))
    }

    /// The file of the inode.
    pub(crate) fn file(&self) -> FileId {
        file_id(self.ino)
    }

    /// The type of the file. Verified inodes have one.
    pub(crate) fn file_type(&self) -> Result<FileType> {
        FileType::from_mode(self.core.mode.get().into()).ok_or_else(|| {
            let problem = format!("mode {:o} of no type", self.core.mode);
            Error::corrupt(Structure::InodeCore, problem)
        })
    }

    /// Fails with `ENOTDIR` when the file is no directory.
    pub(crate) fn require_directory(&self) -> Result<()> {
        if self.file_type()? == FileType::Directory {
            return Ok(());
        }
        Err(Error::posix(Errno::NOTDIR, self.file().to_string()))
    }

    /// What `stat` tells. V4 volumes have no times of birth.
    pub(crate) fn attr(&self, geometry: &XfsGeometry) -> Result<Attr> {
        let core = &self.core;
        let rdev = match self.data.contents {
            ForkContents::Device(field) => device_number(field),
            _ => (0, 0),
        };
        let time = |field| timestamp(core.time(field));
        let btime = if core.version == 3 { time(core.crtime) } else { Timestamp::default() };
        Ok(Attr {
            file: self.file(),
            file_type: self.file_type()?,
            permissions: u32::from(core.mode.get() & 0o7777),
            nlink: core.links(),
            uid: core.uid.get(),
            gid: core.gid.get(),
            rdev,
            size: core.size.get(),
            allocated_bytes: core.nblocks.get().saturating_mul(geometry.block_size() as u64),
            atime: time(core.atime),
            mtime: time(core.mtime),
            ctime: time(core.ctime),
            btime,
            generation: core.generation.get().into(),
        })
    }

    /// The flags that users see.
    pub(crate) fn flags(&self) -> FileFlags {
        const FLAGS: [(XfsInodeFlags, FileFlags); 5] = [
            (XfsInodeFlags::SYNC, FileFlags::SYNC),
            (XfsInodeFlags::IMMUTABLE, FileFlags::IMMUTABLE),
            (XfsInodeFlags::APPEND, FileFlags::APPEND),
            (XfsInodeFlags::NODUMP, FileFlags::NODUMP),
            (XfsInodeFlags::NOATIME, FileFlags::NOATIME),
        ];
        let flags = self.core.flags();
        FLAGS
            .iter()
            .filter(|(stored, _)| flags.contains(*stored))
            .map(|(_, shown)| *shown)
            .collect()
    }
}

fn timestamp(time: XfsTime) -> Timestamp {
    Timestamp { secs: time.seconds, nanos: time.nanoseconds }
}
