//! Buffers: verified blocks of metadata, and the cache of them. All reads of the volume go through
//! this room, those of data too, and writes of what the log does not carry.
//!
//! A caller says where the block is and what it has to be. An [`XfsBuffer`] that was read from the
//! device is the proof that its bytes were verified as that. One that a commit has published has
//! what edits have made of such bytes: each edit proves its own place, and the log proves blocks of
//! directories and attributes whole before it writes them. Buffers are shared by [`Arc`], so a
//! cache hit copies nothing, and two threads that miss the same buffer read it once. The cache
//! holds at most its budget in bytes. What transactions have changed is in `changed` until it is in
//! its place, and inodes in `committed`.

mod changed;
mod committed;

use std::io::{self, IoSlice};
use std::sync::Arc;

use changed::ChangedBuffers;
use committed::CommittedInodes;
pub(crate) use committed::MOST_TRIES;
use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsTree};
use offshoot_xfs_format::da::{DaExpected, DaKind, DaNode};
use offshoot_xfs_format::dir::block::DirBlock;
use offshoot_xfs_format::dir::data::DirData;
use offshoot_xfs_format::dir::free::DirFree;
use offshoot_xfs_format::dir::leaf::DirLeaf;
use offshoot_xfs_format::group::{Agf, Agfl, Agi};
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::superblock::{MOST_SECTOR_BYTES, XfsSuperblock};
use offshoot_xfs_format::{AgBlock, AgNumber, BasicBlock, FileBlock, FsBlock, Ino, XfsGeometry};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

/// The largest sector at `at`, cut at the end of the device; empty behind it.
pub(crate) fn sector_at(device: &dyn BlockDevice, at: u64) -> Result<Vec<u8>> {
    let len = device.size_bytes().saturating_sub(at).min(MOST_SECTOR_BYTES);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    if bytes.is_empty() {
        return Ok(bytes);
    }
    device.read_at(at, &mut bytes).map_err(|error| {
        Error::io(format!("reading {len} bytes at {at} of {}", device.name()), error)
    })?;
    Ok(bytes)
}

/// What a buffer has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferRole {
    /// The superblock of group 0.
    Superblock,
    /// The AGF of a group.
    FreeSpace(AgNumber),
    /// The AGI of a group.
    Inodes(AgNumber),
    /// The AGFL of a group.
    FreeList(AgNumber),
    /// Blocks of inodes, which are verified one by one when they are loaded.
    InodeCluster,
    /// A block of a tree; of the extents of a file, if there is an owner.
    TreeBlock(XfsTree, FsBlock, Option<Ino>),
    /// A block of a directory, at this place of its data fork.
    Directory(Ino, FileBlock),
    /// A leaf or a node of the attributes of a file, at this place of its attribute fork.
    Attributes(Ino, FileBlock),
    /// An extent of the target of a symbolic link.
    SymlinkTarget(Ino),
}

impl BufferRole {
    /// Proves the bytes of a place as this. `is_sealed` is false before a changed block of a
    /// directory or of attributes has its checksum.
    fn verify(
        self,
        geometry: &XfsGeometry,
        place: BasicBlock,
        bytes: &[u8],
        is_sealed: bool,
    ) -> Result<(), Malformed> {
        let expected =
            |owner, block| DaExpected { place, owner: Some(owner), block: Some(block), is_sealed };
        match self {
            Self::Superblock => XfsSuperblock::parse(bytes).map(drop),
            Self::FreeSpace(ag) => Agf::parse(bytes, geometry, ag).map(drop),
            Self::Inodes(ag) => Agi::parse(bytes, geometry, ag).map(drop),
            Self::FreeList(ag) => Agfl::parse(bytes, geometry, ag).map(drop),
            Self::InodeCluster => Ok(()),
            Self::TreeBlock(tree, at, owner) => {
                XfsBtreeBlock::verify(bytes, geometry, tree, at, owner).map(drop)
            }
            Self::Directory(owner, block) => {
                verify_directory(geometry, bytes, &expected(owner, block))
            }
            Self::Attributes(owner, block) => {
                verify_attributes(geometry, bytes, &expected(owner, block))
            }
            Self::SymlinkTarget(owner) => {
                let expected = DaExpected { block: None, ..expected(owner, FileBlock(0)) };
                RemoteKind::SymlinkTarget.check(geometry, bytes, &expected)
            }
        }
    }

    /// Whether a changed block is proved whole before the log gets it: one of a directory or of
    /// attributes. Blocks of the other roles have owners that prove their changes.
    pub(crate) fn is_proved_whole(self) -> bool {
        matches!(self, Self::Directory(..) | Self::Attributes(..))
    }

    /// Proves what transactions have made of a block, if it is proved whole. Its checksum may be
    /// that of older bytes.
    pub(crate) fn verify_changed(
        self,
        geometry: &XfsGeometry,
        place: BasicBlock,
        bytes: &[u8],
    ) -> Result<()> {
        if !self.is_proved_whole() {
            return Ok(());
        }
        self.verify(geometry, place, bytes, false).map_err(|problem| damaged_at(place, problem))
    }

    /// Whether it is a header, which transactions wait for in the order of all locks. Any other
    /// buffer has one user at a time: the transaction that has locked its inode or its header.
    pub(crate) fn is_header(self) -> bool {
        matches!(self, Self::Superblock | Self::FreeSpace(_) | Self::Inodes(_))
    }
}

/// Proves a block of a directory, as what its magic number says.
fn verify_directory(
    geometry: &XfsGeometry,
    bytes: &[u8],
    expected: &DaExpected,
) -> Result<(), Malformed> {
    match DaKind::of_directory(geometry, bytes) {
        Some(DaKind::DirBlock) => DirBlock::parse(geometry, bytes, expected).map(drop),
        Some(DaKind::DirData) => DirData::parse(geometry, bytes, expected).map(drop),
        Some(DaKind::DirFree) => DirFree::parse(geometry, bytes, expected).map(drop),
        Some(kind @ (DaKind::DirLeaf | DaKind::DirNodeLeaf)) => {
            DirLeaf::parse(geometry, kind, bytes, expected).map(drop)
        }
        Some(kind @ DaKind::DirNode) => DaNode::parse(geometry, kind, bytes, expected).map(drop),
        _ => Err(Malformed::new(Structure::DirectoryBlock, NO_MAGIC)),
    }
}

/// Proves a block of an attribute fork, as what its magic number says.
fn verify_attributes(
    geometry: &XfsGeometry,
    bytes: &[u8],
    expected: &DaExpected,
) -> Result<(), Malformed> {
    match DaKind::of_attributes(geometry, bytes) {
        Some(DaKind::AttrLeaf) => XattrLeaf::parse(geometry, bytes, expected).map(drop),
        Some(kind @ DaKind::AttrNode) => DaNode::parse(geometry, kind, bytes, expected).map(drop),
        _ => Err(Malformed::new(Structure::AttributeBlock, NO_MAGIC)),
    }
}

/// A range of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskRun {
    pub(crate) at: BasicBlock,
    pub(crate) bytes: usize,
}

impl DiskRun {
    /// The cluster that the inodes in `block` of a group belong to.
    pub(crate) fn cluster(geometry: &XfsGeometry, ag: AgNumber, block: AgBlock) -> Self {
        let blocks = geometry.cluster_blocks.max(1);
        let start = AgBlock(block.0 / blocks * blocks);
        Self { at: geometry.place(ag, start), bytes: (blocks as usize) << geometry.block_log }
    }

    /// Adds a run behind others. One that follows the last of them on the device is a part of it.
    pub(crate) fn push_to(self, runs: &mut Vec<Self>) {
        match runs.last_mut() {
            Some(last) if last.at.bytes() + last.bytes as u64 == self.at.bytes() => {
                last.bytes += self.bytes;
            }
            _ => runs.push(self),
        }
    }
}

/// Bytes that were verified as their role, or that edits of a transaction have made of such.
#[derive(Debug)]
pub(crate) struct XfsBuffer {
    role: BufferRole,
    place: BasicBlock,
    bytes: Box<[u8]>,
}

impl XfsBuffer {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where the buffer begins.
    pub(crate) fn place(&self) -> BasicBlock {
        self.place
    }

    fn verify(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        self.role.verify(geometry, self.place, self.bytes(), true)
    }

    /// A view of a block that was verified as one of a directory.
    pub(crate) fn directory(&self, geometry: &XfsGeometry) -> Result<DirectoryView<'_>> {
        let bytes = self.bytes();
        let view = match DaKind::of_directory(geometry, bytes) {
            Some(DaKind::DirBlock) => DirBlock::view(geometry, bytes).map(DirectoryView::Whole),
            Some(DaKind::DirData) => DirData::view(geometry, bytes).map(DirectoryView::Data),
            Some(DaKind::DirFree) => DirFree::view(geometry, bytes).map(DirectoryView::Free),
            Some(kind @ DaKind::DirNode) => {
                DaNode::view(geometry, kind, bytes).map(DirectoryView::Node)
            }
            kind => DirLeaf::view(geometry, kind.unwrap_or(DaKind::DirLeaf), bytes)
                .map(DirectoryView::Leaf),
        };
        view.map_err(|problem| self.damaged(problem))
    }

    /// A view of a block that was verified as one of an attribute fork.
    pub(crate) fn attributes(&self, geometry: &XfsGeometry) -> Result<AttributeView<'_>> {
        let bytes = self.bytes();
        let view = match DaKind::of_attributes(geometry, bytes) {
            Some(kind @ DaKind::AttrNode) => {
                DaNode::view(geometry, kind, bytes).map(AttributeView::Node)
            }
            _ => XattrLeaf::view(geometry, bytes).map(AttributeView::Leaf),
        };
        view.map_err(|problem| self.damaged(problem))
    }

    /// The error about the buffer.
    #[cold]
    pub(crate) fn damaged(&self, problem: Malformed) -> Error {
        damaged_at(self.place, problem)
    }
}

/// What is wrong with a block that has the magic number of no block of its kind.
const NO_MAGIC: &str = "its magic number is that of no such block";

/// A verified block of a directory.
pub(crate) enum DirectoryView<'a> {
    /// The only block: entries and their hashes.
    Whole(DirBlock<'a>),
    /// Entries.
    Data(DirData<'a>),
    /// The longest unused pieces of data blocks.
    Free(DirFree<'a>),
    /// Hashes.
    Leaf(DirLeaf<'a>),
    /// A node above the leaves.
    Node(DaNode<'a>),
}

/// A verified block of an attribute fork.
pub(crate) enum AttributeView<'a> {
    /// Attributes.
    Leaf(XattrLeaf<'a>),
    /// A node above the leaves.
    Node(DaNode<'a>),
}

/// Weighs a buffer by its bytes.
#[derive(Clone)]
struct BufferWeight;

impl Weighter<u64, Arc<XfsBuffer>> for BufferWeight {
    fn weight(&self, _place: &u64, buffer: &Arc<XfsBuffer>) -> u64 {
        buffer.bytes.len() as u64
    }
}

/// The device of a volume, its geometry, and the cache of its metadata.
#[derive(Debug)]
pub(crate) struct XfsBuffers {
    device: Arc<dyn BlockDevice>,
    geometry: XfsGeometry,
    cache: Cache<u64, Arc<XfsBuffer>, BufferWeight>,
    changed: ChangedBuffers,
    committed: CommittedInodes,
}

impl XfsBuffers {
    /// The blocks of a volume on `device`, with a cache of at most `budget_bytes`.
    pub(crate) fn new(
        device: Arc<dyn BlockDevice>,
        geometry: XfsGeometry,
        budget_bytes: u64,
    ) -> Self {
        let blocks = usize::try_from(budget_bytes >> geometry.block_log).unwrap_or(usize::MAX);
        let cache = Cache::with_weighter(blocks, budget_bytes, BufferWeight);
        let (changed, committed) = (ChangedBuffers::default(), CommittedInodes::default());
        Self { device, geometry, cache, changed, committed }
    }

    pub(crate) fn geometry(&self) -> &XfsGeometry {
        &self.geometry
    }

    /// Fills `bytes` from a place on. The caller verifies them, if they can be verified.
    pub(crate) fn read_into(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len();
        self.device.read_at(at, bytes).map_err(|error| self.failed(at, len, error))
    }

    /// Writes blocks that the log does not carry. They are durable before anything that a
    /// transaction commits from now on: a checkpoint flushes the device before its first record.
    pub(crate) fn write(&self, at: BasicBlock, bytes: &[u8]) -> Result<()> {
        self.device.write_at(at.bytes(), bytes).map_err(|error| {
            let what = format!("writing {} bytes at {}", bytes.len(), at.bytes());
            Error::io(format!("{what} of {}", self.device.name()), error)
        })
    }

    /// The same for several pieces, one behind the other.
    pub(crate) fn write_pieces(&self, at: BasicBlock, pieces: &[IoSlice<'_>]) -> Result<()> {
        self.device.write_vectored_at(at.bytes(), pieces).map_err(|error| {
            let len: usize = pieces.iter().map(|piece| piece.len()).sum();
            let what = format!("writing {len} bytes at {}", at.bytes());
            Error::io(format!("{what} of {}", self.device.name()), error)
        })
    }

    /// The device.
    pub(crate) fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// Makes durable what was written.
    pub(crate) fn flush(&self) -> Result<()> {
        let what = || format!("flushing {}", self.device.name());
        self.device.flush().map_err(|error| Error::io(what(), error))
    }

    /// Tells the device that the range will be read soon.
    pub(crate) fn prefetch(&self, at: u64, len: u64) {
        self.device.prefetch(at, len);
    }

    /// The block of the volume at `at`, verified as `role`.
    pub(crate) fn block(&self, at: FsBlock, role: BufferRole) -> Result<Arc<XfsBuffer>> {
        let place = self.geometry.place_of(at).ok_or_else(|| {
            let problem = format!("block {at} is not in the volume");
            Error::corrupt(Structure::ExtentRecord, problem)
        })?;
        self.read(&[DiskRun { at: place, bytes: self.geometry.block_size() }], role)
    }

    /// The buffer that consists of `runs`, at least one, verified as `role`.
    pub(crate) fn read(&self, runs: &[DiskRun], role: BufferRole) -> Result<Arc<XfsBuffer>> {
        let place = runs.first().map_or(BasicBlock(0), |run| run.at);
        let len = runs.iter().map(|run| run.bytes).sum();
        let is_this = |found: &XfsBuffer| found.role == role && found.bytes.len() == len;
        if let Some(changed) = self.changed.get(place) {
            return self.as_role(changed, role, is_this);
        }
        let mut was_read = false;
        let found = self.cache.get_or_insert_with(&place.0, || {
            if let Some(changed) = self.changed.get(place) {
                return Ok(changed);
            }
            was_read = true;
            self.read_verified(runs, role)
        })?;
        if was_read || is_this(&found) {
            return Ok(found);
        }
        if let Some(changed) = self.changed.get(place) {
            return self.as_role(changed, role, is_this);
        }
        let buffer = self.read_verified(runs, role)?;
        self.cache.insert(place.0, buffer.clone());
        Ok(buffer)
    }

    /// What a transaction has made of a place, as `role`. If it is another one, two structures name
    /// this place, and at least one of them is wrong.
    fn as_role(
        &self,
        changed: Arc<XfsBuffer>,
        role: BufferRole,
        is_this: impl Fn(&XfsBuffer) -> bool,
    ) -> Result<Arc<XfsBuffer>> {
        if is_this(&changed) { Ok(changed) } else { changed.as_role(self, role).map(Arc::new) }
    }

    fn read_verified(&self, runs: &[DiskRun], role: BufferRole) -> Result<Arc<XfsBuffer>> {
        let mut bytes = vec![0; runs.iter().map(|run| run.bytes).sum()].into_boxed_slice();
        let mut rest = &mut bytes[..];
        for run in runs {
            let (part, behind) = rest.split_at_mut(run.bytes);
            self.read_into(run.at.bytes(), part)?;
            rest = behind;
        }
        let place = runs.first().map_or(BasicBlock(0), |run| run.at);
        let buffer = XfsBuffer { role, place, bytes };
        buffer.verify(&self.geometry).map_err(|problem| buffer.damaged(problem))?;
        Ok(Arc::new(buffer))
    }

    #[cold]
    fn failed(&self, at: u64, len: usize, error: io::Error) -> Error {
        Error::io(format!("reading {len} bytes at {at} of {}", self.device.name()), error)
    }
}

/// The error about a structure that has no place of its own.
#[cold]
pub(crate) fn malformed(problem: Malformed) -> Error {
    Error::corrupt(problem.structure, problem.problem)
}

/// The error about a structure at a place.
#[cold]
pub(crate) fn damaged_at(place: BasicBlock, problem: Malformed) -> Error {
    let Malformed { structure, problem } = problem;
    Error::corrupt(structure, format!("at byte {}: {problem}", place.bytes()))
}
