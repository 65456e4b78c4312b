//! A cursor over the trees: those of a group, and the extents of a fork. [`edit`] changes them.
//!
//! The cursor keeps the path from the root to a record. A child must be one level lower than its
//! parent, and its records must lie between the keys that the parent has for it and for the next
//! child. So a walk only goes forward and ends, whatever a hostile volume holds: in a tree with
//! a cycle or with a block in two places, one of the keys is wrong.

pub(crate) mod edit;

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_vfs::{Malformed, Result, Structure};
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsForkRoot, XfsSearchKey, XfsTree};
use offshoot_xfs_format::record::{XfsExtent, XfsExtentItem, XfsTreeRecord};
use offshoot_xfs_format::{AgBlock, AgNumber, FileBlock, FsBlock, Ino, XfsGeometry};

use crate::buffer::{BufferRole, XfsBuffer, XfsBuffers};

/// Where a tree begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum XfsTreeRoot<'a> {
    /// In a block of a group.
    Group { tree: XfsTree, ag: AgNumber, block: AgBlock, levels: u32 },
    /// In a fork of an inode.
    Fork { root: &'a XfsForkRoot, owner: Ino },
}

impl XfsTreeRoot<'_> {
    /// Which tree it is.
    pub(crate) fn tree(self) -> XfsTree {
        match self {
            Self::Group { tree, .. } => tree,
            Self::Fork { .. } => XfsTree::Extents,
        }
    }

    /// What the block `at` of the tree has to be.
    pub(crate) fn role(self, at: FsBlock) -> BufferRole {
        let owner = match self {
            Self::Group { .. } => None,
            Self::Fork { owner, .. } => Some(owner),
        };
        BufferRole::TreeBlock(self.tree(), at, owner)
    }

    /// The block that a pointer of the tree means.
    pub(crate) fn block_of(self, geometry: &XfsGeometry, pointer: u64) -> FsBlock {
        match self {
            Self::Group { ag, .. } => {
                let block = AgBlock(u32::try_from(pointer).unwrap_or(u32::MAX));
                geometry.fs_block(ag, block)
            }
            Self::Fork { .. } => FsBlock(pointer),
        }
    }
}

/// A block of the path, and the record or the child in it.
struct PathStep {
    buffer: Arc<XfsBuffer>,
    index: usize,
    /// The least key that the next block on this level may have; none for the last one.
    end: Option<XfsSearchKey>,
}

/// A place in a tree.
pub(crate) struct XfsTreeCursor<'a> {
    buffers: &'a XfsBuffers,
    root: XfsTreeRoot<'a>,
    /// The child of the root, when that is in an inode.
    child: usize,
    /// The path, from the root block down. Its last step is a leaf.
    path: Vec<PathStep>,
}

impl<'a> XfsTreeCursor<'a> {
    pub(crate) fn new(buffers: &'a XfsBuffers, root: XfsTreeRoot<'a>) -> Self {
        Self { buffers, root, child: 0, path: Vec::new() }
    }

    /// Goes to the last record whose key is at most `key`, or to the first one of the tree.
    pub(crate) fn seek(&mut self, key: XfsSearchKey) -> Result<()> {
        self.path.clear();
        match self.root {
            XfsTreeRoot::Group { ag, block, levels, .. } => {
                let at = self.buffers.geometry().fs_block(ag, block);
                self.descend(at, levels.saturating_sub(1), None, None, Some(key))
            }
            XfsTreeRoot::Fork { root, .. } => {
                let behind = root.children.partition_point(|(first, _)| file_key(*first) <= key);
                self.child = behind.saturating_sub(1);
                self.enter_child(root, Some(key))
            }
        }
    }

    /// The record at the cursor; `None` behind the last one.
    pub(crate) fn record<R: XfsTreeRecord>(&self) -> Option<R> {
        let step = self.path.last()?;
        self.view(&step.buffer).records().get(step.index).copied()
    }

    /// Goes to the next record.
    pub(crate) fn advance(&mut self) -> Result<()> {
        while let Some(mut step) = self.path.pop() {
            let block = self.view(&step.buffer);
            step.index += 1;
            if step.index >= block.len() {
                continue;
            }
            let index = step.index;
            let (level, first) = (u32::from(block.header.level), block.key(index));
            let end = block.key(index + 1).or(step.end);
            let child = self.block_of(block.pointer(index));
            self.path.push(step);
            return match level.checked_sub(1) {
                Some(below) => self.descend(child, below, first, end, None),
                None => Ok(()),
            };
        }
        if let XfsTreeRoot::Fork { root, .. } = self.root
            && self.child + 1 < root.children.len()
        {
            self.child += 1;
            return self.enter_child(root, None);
        }
        Ok(())
    }

    fn enter_child(&mut self, root: &XfsForkRoot, key: Option<XfsSearchKey>) -> Result<()> {
        let Some(&(first, at)) = root.children.get(self.child) else { return Ok(()) };
        let end = root.children.get(self.child + 1).map(|(next, _)| file_key(*next));
        self.descend(at, u32::from(root.level) - 1, Some(file_key(first)), end, key)
    }

    /// Adds the path from the block `at` of this level to a leaf: to the last record that is at
    /// most `key`, or to the first one. The keys of the block are from `first` on and before `end`.
    fn descend(
        &mut self,
        mut at: FsBlock,
        mut level: u32,
        mut first: Option<XfsSearchKey>,
        mut end: Option<XfsSearchKey>,
        key: Option<XfsSearchKey>,
    ) -> Result<()> {
        loop {
            let buffer = self.read(at)?;
            let mut step = PathStep { buffer, index: 0, end };
            let block = self.view(&step.buffer);
            prove_child(&block, level, first, end)
                .map_err(|problem| step.buffer.damaged(problem))?;
            if let Some(key) = key {
                step.index = floor(&block, key);
            }
            if level == 0 {
                // Only the root of a group's tree may be empty.
                if !block.is_empty() {
                    self.path.push(step);
                }
                return Ok(());
            }
            first = block.key(step.index);
            end = block.key(step.index + 1).or(end);
            at = self.block_of(block.pointer(step.index));
            self.path.push(step);
            level -= 1;
        }
    }

    fn read(&self, at: FsBlock) -> Result<Arc<XfsBuffer>> {
        self.buffers.block(at, self.root.role(at))
    }

    fn view<'b>(&self, buffer: &'b XfsBuffer) -> XfsBtreeBlock<'b> {
        XfsBtreeBlock::view(buffer.bytes(), self.buffers.geometry(), self.root.tree())
    }

    fn block_of(&self, pointer: Option<u64>) -> FsBlock {
        self.root.block_of(self.buffers.geometry(), pointer.unwrap_or(u64::MAX))
    }
}

/// A block on the way down the tree of a fork, and what its parent says of it: for a search that
/// reads the blocks itself, and needs no cursor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForkSearch {
    /// The block that is read next.
    pub(crate) at: FsBlock,
    /// The place that the extent is to have.
    place: FileBlock,
    level: u32,
    first: Option<XfsSearchKey>,
    end: Option<XfsSearchKey>,
}

impl ForkSearch {
    /// The first step of a search for the last extent that begins at `place` or before.
    pub(crate) fn new(root: &XfsForkRoot, place: FileBlock) -> Option<Self> {
        let behind = root.children.partition_point(|(first, _)| *first <= place);
        let child = behind.saturating_sub(1);
        let &(first, at) = root.children.get(child)?;
        let end = root.children.get(child + 1).map(|(next, _)| file_key(*next));
        let level = u32::from(root.level).checked_sub(1)?;
        Some(Self { at, place, level, first: Some(file_key(first)), end })
    }

    /// The next step, or what a leaf has.
    pub(crate) fn next(
        self,
        geometry: &XfsGeometry,
        bytes: &[u8],
    ) -> std::result::Result<ControlFlow<Option<XfsExtent>, Self>, Malformed> {
        let block = XfsBtreeBlock::view(bytes, geometry, XfsTree::Extents);
        prove_child(&block, self.level, self.first, self.end)?;
        let Some(level) = self.level.checked_sub(1) else {
            let items = block.records::<XfsExtentItem>();
            let behind = items.partition_point(|item| item.get().offset <= self.place);
            let found = behind.checked_sub(1).and_then(|index| items.get(index));
            return Ok(ControlFlow::Break(found.map(|item| item.get())));
        };
        let index = floor(&block, file_key(self.place));
        let at = FsBlock(block.pointer(index).unwrap_or(u64::MAX));
        let (first, end) = (block.key(index), block.key(index + 1).or(self.end));
        Ok(ControlFlow::Continue(Self { at, level, first, end, ..self }))
    }
}

/// The key of a place in a file.
pub(crate) fn file_key(at: FileBlock) -> XfsSearchKey {
    XfsSearchKey([at.0, 0, 0])
}

/// Proves that a block is the child that its parent means: at this level, with keys from `first` on
/// and before `end`.
fn prove_child(
    block: &XfsBtreeBlock<'_>,
    level: u32,
    first: Option<XfsSearchKey>,
    end: Option<XfsSearchKey>,
) -> std::result::Result<(), Malformed> {
    let bad = |problem: String| Err(Malformed::new(Structure::BtreeBlock, problem));
    if u32::from(block.header.level) != level {
        return bad(format!("level {level} expected, {} found", block.header.level));
    }
    let has_parent = first.is_some();
    let lowest = block.key(0);
    let highest = block.len().checked_sub(1).and_then(|last| block.key(last));
    if has_parent && block.is_empty() {
        return bad("it has no records, and is not the root".to_owned());
    }
    if first > lowest && has_parent {
        return bad("its first key is below the one that its parent has".to_owned());
    }
    if let (Some(highest), Some(end)) = (highest, end)
        && highest >= end
    {
        return bad("its last key is not below the next one of its parent".to_owned());
    }
    Ok(())
}

/// The last entry of a block whose key is at most `key`, or the first one.
fn floor(block: &XfsBtreeBlock<'_>, key: XfsSearchKey) -> usize {
    let (mut low, mut high) = (0, block.len());
    while low < high {
        let middle = low + (high - low) / 2;
        let is_at_most = block.key(middle).is_some_and(|found| found <= key);
        if is_at_most { low = middle + 1 } else { high = middle }
    }
    low.saturating_sub(1)
}
