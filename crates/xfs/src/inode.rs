//! Inodes: loaded from their clusters, verified, and kept in a small cache.
//!
//! A reader sees an inode as the last commit left it, also when its cluster does not have that yet:
//! then the commit says whether the inode is in use. Before an inode is read from its cluster, the
//! tree of inodes of its group must say so. So a number that leads to no file, from a stale handle
//! or a damaged directory, gives an error that says so.

pub(crate) mod change;
pub(crate) mod exchange;
pub(crate) mod fork;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

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
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, BasicBlock, Ino, XfsGeometry};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::buffer::{BufferRole, DiskRun, XfsBuffers, damaged_at};
use crate::group;
use fork::{ForkContents, LoadedFork};

/// The number space of all files of a volume.
pub(crate) const SPACE: u64 = 0;

/// The file with an inode.
pub(crate) fn file_id(ino: Ino) -> FileId {
    FileId { dev: SPACE, ino: ino.0 }
}

/// The flags that users see and set.
pub(crate) const SHOWN_FLAGS: [(XfsInodeFlags, FileFlags); 5] = [
    (XfsInodeFlags::SYNC, FileFlags::SYNC),
    (XfsInodeFlags::IMMUTABLE, FileFlags::IMMUTABLE),
    (XfsInodeFlags::APPEND, FileFlags::APPEND),
    (XfsInodeFlags::NODUMP, FileFlags::NODUMP),
    (XfsInodeFlags::NOATIME, FileFlags::NOATIME),
];

/// An inode, apart from the bytes of the volume.
#[derive(Debug)]
pub(crate) struct LoadedInode {
    pub(crate) ino: Ino,
    pub(crate) core: XfsInodeCore,
    pub(crate) data: LoadedFork,
    pub(crate) attributes: Option<LoadedFork>,
    /// Whether somebody has seen its times.
    is_seen: AtomicBool,
}

/// Weighs an inode by its memory.
#[derive(Clone)]
struct InodeWeight;

/// An inode, and the number that its commits had before it was loaded.
type KeptInode = (u64, Arc<LoadedInode>);

impl Weighter<Ino, KeptInode> for InodeWeight {
    fn weight(&self, _: &Ino, (_, inode): &KeptInode) -> u64 {
        let forks =
            inode.data.heap_bytes() + inode.attributes.as_ref().map_or(0, LoadedFork::heap_bytes);
        (size_of::<LoadedInode>() + forks) as u64
    }
}

/// How often a reader begins again because commits change what it reads, before it makes them wait.
const FREE_TRIES: usize = 8;

/// The inodes of a volume.
#[derive(Debug)]
pub(crate) struct XfsInodes {
    cache: Cache<Ino, KeptInode, InodeWeight>,
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
        let fresh = || {
            let commits = buffers.inode_commits(ino);
            let inode = load(buffers, ino)?.ok_or_else(missing)?;
            Ok::<_, Error>((commits, Arc::new(inode)))
        };
        let (commits, inode) = self.cache.get_or_insert_with(&ino, fresh)?;
        if commits == buffers.inode_commits(ino) {
            return Ok(inode);
        }
        let newest = fresh().inspect_err(|_| drop(self.cache.remove(&ino)))?;
        self.cache.insert(ino, newest.clone());
        Ok(newest.1)
    }

    /// What `read` finds in an inode and its blocks as one commit has left them. It is called again
    /// when another commit of the inode came between, whatever it found.
    pub(crate) fn at_one_moment<T>(
        &self,
        buffers: &XfsBuffers,
        file: FileId,
        mut read: impl FnMut(&LoadedInode) -> Result<T>,
    ) -> Result<T> {
        let ino = Ino(file.ino);
        for _ in 0..FREE_TRIES {
            if let Some(moment) = buffers.moment(ino) {
                let found = self.get(buffers, file).and_then(|inode| read(&inode));
                if buffers.is_moment(ino, moment) {
                    return found;
                }
            }
            thread::yield_now();
        }
        let _still = buffers.hold_still(ino);
        self.get(buffers, file).and_then(|inode| read(&inode))
    }
}

/// Reads an inode; `None` when it is not in use.
fn load(buffers: &XfsBuffers, ino: Ino) -> Result<Option<LoadedInode>> {
    let geometry = buffers.geometry();
    let Some((ag, inode)) = geometry.split_ino(ino) else { return Ok(None) };
    if let (Some(bytes), Some(at)) = (buffers.committed_inode(ino), geometry.inode_offset(ino)) {
        let parsed = LoadedInode::parse_committed(geometry, ino, &bytes);
        return parsed.map_err(|problem| damaged_at(BasicBlock(at / BASIC_BLOCK), problem));
    }
    buffers.at_one_moment_of_group(ag, || load_in(buffers, ino, (ag, inode)))
}

fn load_in(
    buffers: &XfsBuffers,
    ino: Ino,
    (ag, inode): (AgNumber, AgIno),
) -> Result<Option<LoadedInode>> {
    let geometry = buffers.geometry();
    let Some(at) = geometry.inode_offset(ino) else { return Ok(None) };
    let Some(chunk) = group::chunk_in_use(buffers, ag, inode)? else { return Ok(None) };
    let bad = |problem| damaged_at(BasicBlock(at / BASIC_BLOCK), problem);
    let parse = |bytes: &[u8]| {
        let inode = LoadedInode::parse(geometry, ino, bytes).map_err(bad)?;
        let is_free = "the tree of inodes says that it is in use, but it is free";
        inode.map(Some).ok_or_else(|| bad(Malformed::new(Structure::InodeCore, is_free)))
    };
    // It was not committed before, and may be now.
    if let Some(bytes) = buffers.committed_inode(ino) {
        return LoadedInode::parse_committed(geometry, ino, &bytes).map_err(bad);
    }
    let block = AgBlock(inode.0 >> geometry.inodes_per_block_log());
    let run = cluster(geometry, ag, block, &chunk);
    let buffer = buffers.read(&[run], BufferRole::InodeCluster)?;
    let inside = usize::try_from(at - run.at.bytes()).unwrap_or(usize::MAX);
    let bytes = buffer.bytes().get(inside..).and_then(|rest| rest.get(..geometry.inode_size()));
    parse(bytes.ok_or_else(|| {
        bad(Malformed::new(Structure::InodeCore, "it is outside the blocks of its chunk"))
    })?)
}

/// The blocks to read for an inode in `block`: its cluster, which holds other inodes that will be
/// wanted soon, unless the chunk has only a part of that.
fn cluster(geometry: &XfsGeometry, ag: AgNumber, block: AgBlock, chunk: &XfsInodeChunk) -> DiskRun {
    let run = DiskRun::cluster(geometry, ag, block);
    let blocks = geometry.cluster_blocks.max(1);
    let per_block = geometry.inodes_per_block_log();
    let first = (block.0 / blocks * blocks) << per_block;
    let inodes = u64::from(blocks) << per_block;
    // A block of 64 KiB has the inodes of two chunks.
    let is_in = blocks == 1
        || first.checked_sub(chunk.start().0).is_some_and(|index| {
            let end = u64::from(index) + inodes;
            let all = u64::MAX.checked_shr(CHUNK_INODES - u32::try_from(inodes).unwrap_or(0));
            let mask = all.and_then(|all| all.checked_shl(index));
            end <= u64::from(CHUNK_INODES)
                && mask.is_some_and(|mask| chunk.allocated(geometry) & mask == mask)
        });
    let start = AgBlock(block.0 / blocks * blocks);
    if is_in && geometry.is_usable_run(ag, start, blocks) {
        return run;
    }
    DiskRun { at: geometry.place(ag, block), bytes: geometry.block_size() }
}

impl LoadedInode {
    /// Proves the bytes of an inode; `None` when no file has it.
    pub(crate) fn parse(
        geometry: &XfsGeometry,
        ino: Ino,
        bytes: &[u8],
    ) -> Result<Option<Self>, Malformed> {
        Self::of(geometry, ino, &XfsInode::verify(bytes, geometry, ino)?)
    }

    /// The same of the bytes of a commit, which have no checksum.
    fn parse_committed(
        geometry: &XfsGeometry,
        ino: Ino,
        bytes: &[u8],
    ) -> Result<Option<Self>, Malformed> {
        Self::of(geometry, ino, &XfsInode::verify_unsealed(bytes, geometry, ino)?)
    }

    fn of(
        geometry: &XfsGeometry,
        ino: Ino,
        inode: &XfsInode<'_>,
    ) -> Result<Option<Self>, Malformed> {
        if inode.core.is_free() {
            return Ok(None);
        }
        if let (XfsFork::Local(fork), file_type::DIRECTORY) = (&inode.data, inode.core.file_type())
        {
            ShortDir::parse(geometry, fork)?;
        }
        if let Some(XfsFork::Local(fork)) = &inode.attributes {
            ShortXattrs::parse(fork)?;
        }
        Ok(Some(Self {
            ino,
            core: *inode.core,
            data: LoadedFork::new(ino, false, &inode.data),
            attributes: inode.attributes.as_ref().map(|fork| LoadedFork::new(ino, true, fork)),
            is_seen: AtomicBool::new(false),
        }))
    }

    /// Says that somebody sees its times from now on.
    pub(crate) fn see(&self) {
        self.is_seen.store(true, Ordering::SeqCst);
    }

    /// Whether somebody has seen its times, so that the next change needs others.
    pub(crate) fn is_seen(&self) -> bool {
        self.is_seen.load(Ordering::SeqCst)
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
        let flags = self.core.flags();
        SHOWN_FLAGS
            .iter()
            .filter(|(stored, _)| flags.contains(*stored))
            .map(|(_, shown)| *shown)
            .collect()
    }
}

pub(crate) fn timestamp(time: XfsTime) -> Timestamp {
    Timestamp { secs: time.seconds, nanos: time.nanoseconds }
}

/// A moment in the form of inodes.
pub(crate) fn xfs_time(at: Timestamp) -> XfsTime {
    XfsTime { seconds: at.secs, nanoseconds: at.nanos }
}
