//! Buffers: verified blocks of metadata, and the cache of them. All reads of the volume go through
//! this room, those of data too.
//!
//! A caller says where the block is and what it has to be. An [`XfsBuffer`] is the proof that its
//! bytes were verified as that. Buffers are shared by [`Arc`], so a cache hit copies nothing, and
//! two threads that miss the same buffer read it once. The cache holds at most its budget in bytes.

use std::io;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsTree};
use offshoot_xfs_format::da::{DaExpected, DaKind, DaNode};
use offshoot_xfs_format::dir::block::DirBlock;
use offshoot_xfs_format::dir::data::DirData;
use offshoot_xfs_format::dir::leaf::DirLeaf;
use offshoot_xfs_format::group::{Agf, Agi};
use offshoot_xfs_format::{AgNumber, BasicBlock, FileBlock, FsBlock, Ino, XfsGeometry};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

/// What a buffer has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferRole {
    /// The AGF of a group.
    FreeSpace(AgNumber),
    /// The AGI of a group.
    Inodes(AgNumber),
    /// Blocks of inodes, which are verified one by one when they are loaded.
    InodeCluster,
    /// A block of a tree; of the extents of a file, if there is an owner.
    TreeBlock(XfsTree, FsBlock, Option<Ino>),
    /// A block of a directory, at this place of its data fork.
    Directory(Ino, FileBlock),
    /// A leaf or a node of the attributes of a file, at this place of its attribute fork.
    Attributes(Ino, FileBlock),
}

/// A range of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskRun {
    pub(crate) at: BasicBlock,
    pub(crate) bytes: usize,
}

/// Bytes that were verified as their role.
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

    fn verify(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        let bytes = self.bytes();
        match self.role {
            BufferRole::FreeSpace(ag) => Agf::parse(bytes, geometry, ag).map(drop),
            BufferRole::Inodes(ag) => Agi::parse(bytes, geometry, ag).map(drop),
            BufferRole::InodeCluster => Ok(()),
            BufferRole::TreeBlock(tree, at, owner) => {
                XfsBtreeBlock::verify(bytes, geometry, tree, at, owner).map(drop)
            }
            BufferRole::Directory(..) => self.directory(geometry).map(drop),
            BufferRole::Attributes(..) => self.attributes(geometry).map(drop),
        }
    }

    fn expected(&self, owner: Ino, block: FileBlock) -> DaExpected {
        DaExpected { place: self.place, owner: Some(owner), block: Some(block) }
    }

    /// The block as one of a directory, by its magic number.
    pub(crate) fn directory(&self, geometry: &XfsGeometry) -> Result<DirectoryView<'_>, Malformed> {
        let BufferRole::Directory(owner, block) = self.role else {
            return Err(Malformed::new(Structure::DirectoryBlock, "it is no block of a directory"));
        };
        let (expected, bytes) = (self.expected(owner, block), self.bytes());
        Ok(match DaKind::of_directory(geometry, bytes) {
            Some(DaKind::DirBlock) => {
                DirectoryView::Whole(DirBlock::parse(geometry, bytes, &expected)?)
            }
            Some(DaKind::DirData) => {
                DirectoryView::Data(DirData::parse(geometry, bytes, &expected)?)
            }
            Some(kind @ (DaKind::DirLeaf | DaKind::DirNodeLeaf)) => {
                DirectoryView::Leaf(DirLeaf::parse(geometry, kind, bytes, &expected)?)
            }
            Some(kind @ DaKind::DirNode) => {
                DirectoryView::Node(DaNode::parse(geometry, kind, bytes, &expected)?)
            }
            _ => {
                let problem = "it has the magic number of no block of a directory";
                return Err(Malformed::new(Structure::DirectoryBlock, problem));
            }
        })
    }

    /// The block as one of an attribute fork, by its magic number.
    pub(crate) fn attributes(
        &self,
        geometry: &XfsGeometry,
    ) -> Result<AttributeView<'_>, Malformed> {
        let BufferRole::Attributes(owner, block) = self.role else {
            return Err(Malformed::new(Structure::AttributeBlock, "it is no block of attributes"));
        };
        let (expected, bytes) = (self.expected(owner, block), self.bytes());
        Ok(match DaKind::of_attributes(geometry, bytes) {
            Some(DaKind::AttrLeaf) => {
                AttributeView::Leaf(XattrLeaf::parse(geometry, bytes, &expected)?)
            }
            Some(kind @ DaKind::AttrNode) => {
                AttributeView::Node(DaNode::parse(geometry, kind, bytes, &expected)?)
            }
            _ => {
                let problem = "it has the magic number of no block of attributes";
                return Err(Malformed::new(Structure::AttributeBlock, problem));
            }
        })
    }
}

/// A verified block of a directory.
pub(crate) enum DirectoryView<'a> {
    /// The only block: entries and their hashes.
    Whole(DirBlock<'a>),
    /// Entries.
    Data(DirData<'a>),
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
        Self { device, geometry, cache }
    }

    pub(crate) fn geometry(&self) -> &XfsGeometry {
        &self.geometry
    }

    /// Fills `bytes` from a place on. The caller verifies them, if they can be verified.
    pub(crate) fn read_into(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len();
        self.device.read_at(at, bytes).map_err(|error| self.failed(at, len, error))
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
        let mut was_read = false;
        let found = self.cache.get_or_insert_with(&place.0, || {
            was_read = true;
            self.read_verified(runs, role)
        })?;
        if was_read || found.role == role && found.bytes.len() == len {
            return Ok(found);
        }
        // Two structures name this place, and at least one of them is wrong.
        let buffer = self.read_verified(runs, role)?;
        self.cache.insert(place.0, buffer.clone());
        Ok(buffer)
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
        buffer.verify(&self.geometry).map_err(|problem| self.damaged(&buffer, problem))?;
        Ok(Arc::new(buffer))
    }

    /// The error about a buffer.
    #[cold]
    pub(crate) fn damaged(&self, buffer: &XfsBuffer, problem: Malformed) -> Error {
        damaged_at(buffer.place, problem)
    }

    #[cold]
    fn failed(&self, at: u64, len: usize, error: io::Error) -> Error {
        Error::io(format!("reading {len} bytes at {at} of {}", self.device.name()), error)
    }
}

/// The error about a structure at a place.
#[cold]
pub(crate) fn damaged_at(place: BasicBlock, problem: Malformed) -> Error {
    let text = format!("at byte {}: {}", place.bytes(), problem.problem);
    Error::corrupt(problem.structure, text)
}
