//! The cursor: the path from the root to a record, and how it moves.

use offshoot_vfs::{Malformed, Result, Structure};
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsSearchKey, XfsTree};
use offshoot_xfs_format::record::XfsTreeRecord;
use offshoot_xfs_format::{AgBlock, FsBlock};

use super::super::{file_key, floor, prove_child};
use super::block::SiblingSide;
use super::{XfsEditRoot, XfsTreeEdit};

/// A block of the path, and the record or the child in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct EditStep {
    pub(super) at: FsBlock,
    pub(super) index: usize,
    /// The least key that the next block on this level may have; none for the last one.
    pub(super) end: Option<XfsSearchKey>,
}

/// Where a path leads that goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CursorGoal {
    /// To the last record that is at most this, or to the first one.
    Key(XfsSearchKey),
    First,
    Last,
}

impl EditStep {
    /// A block that is the last of its level.
    pub(super) fn last(at: FsBlock, index: usize) -> Self {
        Self { at, index, end: None }
    }
}

impl CursorGoal {
    /// The entry of a block that leads there.
    fn choose(self, block: &XfsBtreeBlock<'_>) -> usize {
        match self {
            Self::Key(key) => floor(block, key),
            Self::First => 0,
            Self::Last => block.len().saturating_sub(1),
        }
    }
}

/// The last key of a record, which the next one lies behind. Mappings of the reverse map may
/// overlap.
pub(super) fn end_of(tree: XfsTree, record: &[u8]) -> XfsSearchKey {
    match tree {
        XfsTree::ReverseMap => tree.low_key(record),
        _ => tree.high_key(record),
    }
}

impl XfsTreeEdit<'_> {
    /// Sets the cursor to the last record that is at most `key`, or to the first one. The path
    /// leads to a leaf also when that has no records.
    pub(super) fn locate(&mut self, key: XfsSearchKey) -> Result<()> {
        self.path.clear();
        match &self.root {
            XfsEditRoot::Group { ag, block, levels, .. } => {
                let (at, levels) = (self.geometry.fs_block(*ag, *block), *levels);
                self.descend(at, levels.saturating_sub(1), None, None, CursorGoal::Key(key))
            }
            XfsEditRoot::Fork { root, .. } => {
                let behind = root.children.partition_point(|(first, _)| file_key(*first) <= key);
                self.child = behind.saturating_sub(1);
                self.enter_child(CursorGoal::Key(key))
            }
        }
    }

    /// Goes to the next record ([`CursorGoal::First`]), or to the one before
    /// ([`CursorGoal::Last`]).
    pub(super) fn step(&mut self, toward: CursorGoal) -> Result<()> {
        let is_forward = toward == CursorGoal::First;
        while let Some(mut step) = self.path.pop() {
            let block = self.view(step.at)?;
            let index = if is_forward { Some(step.index + 1) } else { step.index.checked_sub(1) };
            let Some(index) = index.filter(|&index| index < block.len()) else { continue };
            step.index = index;
            let (level, first) = (u32::from(block.header.level), block.key(index));
            let end = block.key(index + 1).or(step.end);
            let pointer = block.pointer(index);
            self.path.push(step);
            return match level.checked_sub(1) {
                Some(below) => self.descend(self.block_of(pointer), below, first, end, toward),
                None => Ok(()),
            };
        }
        if let XfsEditRoot::Fork { root, .. } = &self.root {
            let next = if is_forward { Some(self.child + 1) } else { self.child.checked_sub(1) };
            if let Some(next) = next.filter(|&next| next < root.children.len()) {
                self.child = next;
                return self.enter_child(toward);
            }
        }
        Ok(())
    }

    fn enter_child(&mut self, toward: CursorGoal) -> Result<()> {
        let XfsEditRoot::Fork { root, .. } = &self.root else { return Ok(()) };
        let Some(&(first, at)) = root.children.get(self.child) else {
            return Err(self.broken("a root without children"));
        };
        let level = u32::from(root.level).saturating_sub(1);
        let end = root.children.get(self.child + 1).map(|(next, _)| file_key(*next));
        // The last record may have gone from the only leaf.
        let is_alone = level == 0 && root.children.len() == 1;
        self.descend(at, level, (!is_alone).then_some(file_key(first)), end, toward)
    }

    /// Adds the path from the block `at` of this level to a leaf. The keys of the block are from
    /// `first` on and before `end`.
    fn descend(
        &mut self,
        mut at: FsBlock,
        mut level: u32,
        mut first: Option<XfsSearchKey>,
        mut end: Option<XfsSearchKey>,
        toward: CursorGoal,
    ) -> Result<()> {
        loop {
            let block = self.view(at)?;
            let index = toward.choose(&block);
            let proof = prove_child(&block, level, first, end);
            let below = (block.key(index), block.key(index + 1).or(end), block.pointer(index));
            proof.map_err(|problem| self.damaged(at, problem))?;
            self.path.push(EditStep { at, index, end });
            if level == 0 {
                return Ok(());
            }
            (first, end) = (below.0, below.1);
            at = self.block_of(below.2);
            level -= 1;
        }
    }

    /// The block that a pointer of the tree means.
    pub(super) fn block_of(&self, pointer: Option<u64>) -> FsBlock {
        self.root.view().block_of(self.geometry, pointer.unwrap_or(AgBlock::NULL.0.into()))
    }

    /// Whether the leaf that has `key`, or would have it, has no room for one more record.
    pub(crate) fn is_leaf_full(&mut self, key: XfsSearchKey) -> Result<bool> {
        self.locate(key)?;
        let Some(leaf) = self.path.last().copied() else { return Ok(true) };
        Ok(self.shape(leaf.at)?.room() == 0)
    }

    /// The key of the record at the cursor.
    pub(super) fn key_here(&mut self) -> Result<Option<XfsSearchKey>> {
        let Some(leaf) = self.path.last().copied() else { return Ok(None) };
        Ok(self.view(leaf.at)?.key(leaf.index))
    }

    /// The record at the cursor, and its key.
    pub(super) fn record_here<R: XfsTreeRecord>(&mut self) -> Result<Option<(XfsSearchKey, R)>> {
        let Some(leaf) = self.path.last().copied() else { return Ok(None) };
        let block = self.view(leaf.at)?;
        Ok(block.key(leaf.index).zip(block.records().get(leaf.index).copied()))
    }

    /// What a search has found. The cursor is nowhere when that is nothing.
    pub(super) fn settle<R>(&mut self, found: Option<(XfsSearchKey, R)>) -> Option<R> {
        if found.is_none() {
            self.path.clear();
        }
        found.map(|(_, record)| record)
    }

    /// The record at the cursor. The cursor is nowhere when there is none.
    pub(super) fn record<R: XfsTreeRecord>(&mut self) -> Result<Option<R>> {
        let Some(leaf) = self.path.last().copied() else { return Ok(None) };
        let record = self.view(leaf.at)?.records().get(leaf.index).copied();
        if record.is_none() {
            self.path.clear();
        }
        Ok(record)
    }

    /// Proves that a record belongs in front of record `behind` of a leaf, and behind record
    /// `before`; if there is none, behind the last one of the leaf to the left.
    pub(super) fn prove_order(
        &mut self,
        leaf: EditStep,
        before: Option<usize>,
        behind: usize,
        record: &[u8],
    ) -> Result<()> {
        let tree = self.tree();
        let end_of = |record: &[u8]| end_of(tree, record);
        let (low, last) = (tree.low_key(record), end_of(record));
        let before = match before {
            Some(before) => Some((leaf.at, before)),
            None => self.sibling(leaf.at, SiblingSide::Left)?.map(|left| (left, usize::MAX)),
        };
        let before = match before {
            Some((at, index)) => {
                let block = self.view(at)?;
                block.record(index.min(block.len().saturating_sub(1))).map(end_of)
            }
            None => None,
        };
        let block = self.view(leaf.at)?;
        if block.header.level > 0 || record.len() != tree.record_len() {
            return Err(self.broken("a record of another tree"));
        }
        let behind = block.key(behind).or(leaf.end);
        if before.is_some_and(|before| before >= low) || behind.is_some_and(|next| next <= last) {
            let problem = format!("a new record at {:?} overlaps its neighbours", low.0);
            return Err(self.damaged(leaf.at, Malformed::new(Structure::BtreeBlock, problem)));
        }
        Ok(())
    }

    /// The index that the block of this depth has in its parent; none for the root.
    pub(super) fn index_in_parent(&self, depth: usize) -> Option<usize> {
        match (depth.checked_sub(1), &self.root) {
            (Some(above), _) => self.path.get(above).map(|step| step.index),
            (None, XfsEditRoot::Fork { .. }) => Some(self.child),
            (None, XfsEditRoot::Group { .. }) => None,
        }
    }

    /// Child `index` of the parent of this depth, with its index; proved to be that child.
    pub(super) fn child_of_parent(
        &mut self,
        depth: usize,
        index: Option<usize>,
    ) -> Result<Option<(usize, FsBlock)>> {
        let Some(index) = index else { return Ok(None) };
        let (first, end, at) = if let Some(above) = depth.checked_sub(1) {
            let Some(parent) = self.path.get(above).copied() else { return Ok(None) };
            let block = self.view(parent.at)?;
            if index >= block.len() {
                return Ok(None);
            }
            let end = block.key(index + 1).or(parent.end);
            let (first, pointer) = (block.key(index), block.pointer(index));
            (first, end, self.block_of(pointer))
        } else {
            let XfsEditRoot::Fork { root, .. } = &self.root else { return Ok(None) };
            let Some(&(first, at)) = root.children.get(index) else { return Ok(None) };
            let end = root.children.get(index + 1).map(|(next, _)| file_key(*next));
            (Some(file_key(first)), end, at)
        };
        let Some(own) = self.path.get(depth).copied() else { return Ok(None) };
        let level = u32::from(self.view(own.at)?.header.level);
        prove_child(&self.view(at)?, level, first, end)
            .map_err(|problem| self.damaged(at, problem))?;
        Ok(Some((index, at)))
    }

    /// Stores the keys of the block of this depth, and of its neighbour if there is one, in their
    /// parent; then those of the parent if that changed something, and so on up to the root.
    pub(super) fn refresh_keys(
        &mut self,
        depth: usize,
        neighbour: Option<(usize, FsBlock)>,
    ) -> Result<()> {
        let own = self.path.get(depth).map(|step| step.at);
        let mut children: Vec<_> = self.index_in_parent(depth).zip(own).into_iter().collect();
        children.extend(neighbour);
        for above in (0..depth).rev() {
            let Some(parent) = self.path.get(above).copied() else { return Ok(()) };
            let mut has_changed = false;
            for (index, child) in children {
                has_changed |= self.store_key(parent.at, index, child)?;
            }
            if !has_changed {
                return Ok(());
            }
            children =
                self.index_in_parent(above).map(|index| (index, parent.at)).into_iter().collect();
        }
        self.refresh_root(&children)
    }
}
