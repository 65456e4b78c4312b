//! The blocks of an attribute fork, as a transaction sees them.

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::da::{DaEdit, DaExpected, DaKind, DaNode};
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::{BasicBlock, FileBlock, FsBlock, Ino, Malformed, XfsGeometry};

use crate::buffer::{BufferRole, DiskRun, malformed};
use crate::group::{ExtentWish, ReverseOwner, allocate_anywhere};
use crate::inode::change::{ForkStep, first_hole, map_extent, mapped, unmap_extents};
use crate::trans::{ForkName, XfsChangedInode, XfsTransaction};

/// The parts of a block that are compared and logged.
const CHUNK: usize = 128;

pub(super) const FORK: ForkName = ForkName::Attributes;

/// The attribute fork of a file that a transaction changes.
pub(super) struct ChangedXattrs<'t, 'e> {
    pub(super) t: &'t mut XfsTransaction<'e>,
    pub(super) ino: Ino,
    /// What the fork has no longer.
    pub(super) step: ForkStep,
}

impl<'t, 'e> ChangedXattrs<'t, 'e> {
    pub(super) fn new(t: &'t mut XfsTransaction<'e>, ino: Ino) -> Self {
        Self { t, ino, step: ForkStep::default() }
    }

    pub(super) fn geometry(&self) -> &'e XfsGeometry {
        self.t.geometry()
    }

    pub(super) fn inode(&mut self) -> Result<&mut XfsChangedInode> {
        self.t.inode(self.ino)
    }

    /// The error about the fork.
    #[cold]
    pub(super) fn damaged(&self, problem: impl std::fmt::Display) -> Error {
        let problem = format!("inode {}: attribute fork: {problem}", self.ino);
        Error::corrupt(Structure::AttributeBlock, problem)
    }

    #[cold]
    pub(super) fn no_space(&self, what: &str) -> Error {
        Error::posix(Errno::NOSPC, format!("{what} for attributes of inode {}", self.ino))
    }

    /// The extent with block `at` of the fork.
    pub(super) fn extent(&mut self, at: FileBlock) -> Result<XfsExtent> {
        let found = mapped(self.t, self.ino, FORK, at)?.filter(|extent| !extent.is_unwritten);
        found.ok_or_else(|| self.damaged(format!("block {at} is not there")))
    }

    /// Where block `at` of the fork is on the device.
    fn run(&mut self, at: FileBlock) -> Result<DiskRun> {
        let extent = self.extent(at)?;
        let geometry = self.geometry();
        let place = self.place(FsBlock(extent.start.0 + at.0 - extent.offset.0))?;
        Ok(DiskRun { at: place, bytes: geometry.block_size() })
    }

    /// Where a block of the volume is on the device.
    pub(super) fn place(&self, block: FsBlock) -> Result<BasicBlock> {
        let place = self.geometry().place_of(block);
        place.ok_or_else(|| self.damaged(format!("block {block} is not in the volume")))
    }

    /// What a leaf or a node at `at` says about itself.
    pub(super) fn expected(&mut self, at: FileBlock) -> Result<DaExpected> {
        let place = self.run(at)?.at;
        Ok(DaExpected { place, owner: Some(self.ino), block: Some(at) })
    }

    /// The leaf or the node at `at`.
    pub(super) fn read(&mut self, at: FileBlock) -> Result<Vec<u8>> {
        let (run, role) = (self.run(at)?, BufferRole::Attributes(self.ino, at));
        self.t.read(run, role).map(<[u8]>::to_vec)
    }

    /// The block as a node; `None` when it is a leaf.
    pub(super) fn node<'b>(&self, block: &'b [u8]) -> Result<Option<DaNode<'b>>> {
        let geometry = self.geometry();
        match DaKind::of_attributes(geometry, block) {
            Some(DaKind::AttrNode) => {
                DaNode::view(geometry, DaKind::AttrNode, block).map(Some).map_err(malformed)
            }
            _ => Ok(None),
        }
    }

    pub(super) fn leaf<'b>(&self, block: &'b [u8]) -> Result<XattrLeaf<'b>> {
        XattrLeaf::view(self.geometry(), block).map_err(malformed)
    }

    /// Makes `bytes` those of the block at `at`. The log gets the parts that differ.
    pub(super) fn store(&mut self, at: FileBlock, bytes: &[u8]) -> Result<()> {
        let (run, role) = (self.run(at)?, BufferRole::Attributes(self.ino, at));
        let old = self.t.read(run, role)?.to_vec();
        for ((old, new), index) in old.chunks(CHUNK).zip(bytes.chunks(CHUNK)).zip(0..) {
            if old != new {
                self.t.put(run.at, index * CHUNK, new)?;
            }
        }
        Ok(())
    }

    /// Changes a leaf or a node. Returns what `change` does.
    pub(super) fn edit<T>(
        &mut self,
        (at, kind): (FileBlock, DaKind),
        change: impl FnOnce(&XfsGeometry, &mut DaEdit<'_>) -> Result<T, Malformed>,
    ) -> Result<T> {
        let mut block = self.read(at)?;
        let outcome = change(self.geometry(), &mut DaEdit::fill(kind, &mut block));
        let outcome = outcome.map_err(malformed)?;
        self.store(at, &block)?;
        Ok(outcome)
    }

    /// The first `count` blocks in a row that are not mapped.
    pub(super) fn hole(&mut self, count: u32) -> Result<FileBlock> {
        first_hole(self.t, self.ino, count)
    }

    /// Takes a new block into the fork, for a leaf or a node, at the first place that is free. It
    /// is zeros.
    pub(super) fn create(&mut self) -> Result<FileBlock> {
        let at = self.hole(1)?;
        self.map(at, 1)?;
        let (run, role) = (self.run(at)?, BufferRole::Attributes(self.ino, at));
        self.t.fresh(run, role)?;
        Ok(at)
    }

    /// Maps new blocks from `at` of the fork on: at least one, and up to `most` in a row. Returns
    /// how many.
    pub(super) fn map(&mut self, at: FileBlock, most: u32) -> Result<u32> {
        let geometry = self.geometry();
        let owner = Some(ReverseOwner::file(self.ino, FORK, at, false));
        let near = geometry.locate(self.ino).map(|(ag, block, _)| (ag, block));
        let left = self.t.engine().most_levels().attributes;
        let wish = ExtentWish { owner, least: 1, left, ..ExtentWish::blocks(most) };
        let Some((ag, found)) = allocate_anywhere(self.t, near, &wish)? else {
            return Err(self.no_space("a block"));
        };
        let start = geometry.fs_block(ag, found.start);
        let extent = XfsExtent { offset: at, start, count: found.count, is_unwritten: false };
        let ForkStep { tree_blocks, .. } = map_extent(self.t, self.ino, FORK, &extent)?;
        self.step.tree_blocks.extend(tree_blocks);
        Ok(found.count)
    }

    /// Gives up the block at `at` of the fork, a leaf or a node.
    pub(super) fn free(&mut self, at: FileBlock) -> Result<()> {
        let run = self.run(at)?;
        self.t.cancel(run)?;
        self.unmap(at.0..at.0 + 1, 1).map(drop)
    }

    /// Unmaps up to `most` extents of a range, the last ones first. Returns whether all are.
    pub(super) fn unmap(&mut self, range: std::ops::Range<u64>, most: usize) -> Result<bool> {
        let ForkStep { extents, tree_blocks, is_done } =
            unmap_extents(self.t, self.ino, FORK, range, most)?;
        self.step.extents.extend(extents);
        self.step.tree_blocks.extend(tree_blocks);
        Ok(is_done)
    }
}
