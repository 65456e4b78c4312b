//! A walk over all blocks of a tree, from the root down and from the left to the right.
//!
//! The keys of a block lie between the two keys that its parent has for it and for its right
//! neighbour, so no block is visited twice, whatever a hostile volume holds.

use offshoot_xfs_format::FsBlock;
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsSearchKey};

use super::finding::{XfsFindingCode, XfsFindingPlace};
use super::whole::VolumeCheck;
use crate::btree::{XfsTreeRoot, file_key};

/// A block that is still to be visited.
struct ExpectedTreeBlock {
    at: FsBlock,
    level: u32,
    /// The lowest key that the parent has for it.
    low: Option<XfsSearchKey>,
    /// The highest key that the parent has for it. Only the reverse map has these.
    high: Option<XfsSearchKey>,
    /// The lowest key of its right neighbour.
    end: Option<XfsSearchKey>,
}

/// The last block that was visited on a level, and the neighbour that it names.
type LevelEnd = Option<(u64, Option<u64>)>;

impl VolumeCheck<'_> {
    /// Calls `visit` for each sound block of a tree. `false` when not all of it could be read.
    pub(super) fn walk_tree(
        &self,
        root: XfsTreeRoot<'_>,
        visit: &mut dyn FnMut(FsBlock, &XfsBtreeBlock<'_>),
    ) -> bool {
        let mut stack = first_blocks(self, root);
        let levels = stack.first().map_or(0, |block| block.level as usize + 1);
        let mut ends: Vec<LevelEnd> = vec![None; levels];
        let mut is_whole = true;
        while let Some(expected) = stack.pop() {
            if self.visit_block(root, &expected, &mut stack, &mut ends, visit).is_none() {
                is_whole = false;
                // Behind a damaged block no neighbours are known.
                ends.clear();
            }
        }
        for (block, right) in ends.into_iter().flatten() {
            if let Some(right) = right {
                let problem =
                    format!("block {block} is the last of its level, but {right} follows");
                self.findings.add(XfsFindingCode::TreeShape, place_of(root), problem);
            }
        }
        is_whole
    }

    /// Visits one block and puts its children on the stack. `None` when it is damaged.
    fn visit_block(
        &self,
        root: XfsTreeRoot<'_>,
        expected: &ExpectedTreeBlock,
        stack: &mut Vec<ExpectedTreeBlock>,
        ends: &mut [LevelEnd],
        visit: &mut dyn FnMut(FsBlock, &XfsBtreeBlock<'_>),
    ) -> Option<()> {
        let at = expected.at;
        let (tree, role) = (root.tree(), root.role(at));
        let bad = |problem: String| {
            let problem = format!("{tree:?}, block {at}: {problem}");
            self.findings.add(XfsFindingCode::TreeShape, place_of(root), problem);
        };
        let buffer = match self.buffers.block(at, role) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.findings.add_error(XfsFindingCode::TreeBlock, place_of(root), &error);
                return None;
            }
        };
        self.note_lsn(&buffer);
        let block = XfsBtreeBlock::view(buffer.bytes(), self.geometry(), tree);
        let level = u32::from(block.header.level);
        if level != expected.level || block.is_empty() && expected.low.is_some() {
            bad(format!("{} entries on level {level}, not {}", block.len(), expected.level));
            return None;
        }
        let last = block.len().checked_sub(1).and_then(|last| block.key(last));
        let is_beyond = expected.end.is_some_and(|end| last.is_some_and(|last| last >= end));
        if expected.low.is_some() && block.key(0) != expected.low || is_beyond {
            bad("its keys are not those that its parent has".to_owned());
            // Blocks that are visited twice have such keys.
            return None;
        }
        let high = (0..block.len()).filter_map(|index| block.high_key(index)).max();
        if expected.high.is_some() && high != expected.high {
            bad("its highest key is not that which its parent has".to_owned());
        }
        let own = if tree.is_long() { at.0 } else { self.block_in_group(at) };
        if let Some(end) = ends.get_mut(level as usize) {
            let before = end.replace((own, block.header.right));
            let left = before.map(|(block, _)| block);
            if block.header.left != left || before.is_some_and(|(_, right)| right != Some(own)) {
                bad("its neighbours do not name each other".to_owned());
            }
        }
        visit(at, &block);
        for index in (0..if level == 0 { 0 } else { block.len() }).rev() {
            let pointer = block.pointer(index)?;
            stack.push(ExpectedTreeBlock {
                at: root.block_of(self.geometry(), pointer),
                level: level - 1,
                low: block.key(index),
                high: block.stored_key(index).and_then(|stored| tree.child_high_key(stored)),
                end: block.key(index + 1).or(expected.end),
            });
        }
        Some(())
    }

    fn block_in_group(&self, at: FsBlock) -> u64 {
        at.0 & ((1 << self.geometry().ag_block_log) - 1)
    }
}

/// The root, or the children of a root in an inode from the right to the left.
fn first_blocks(check: &VolumeCheck<'_>, root: XfsTreeRoot<'_>) -> Vec<ExpectedTreeBlock> {
    match root {
        XfsTreeRoot::Group { ag, block, levels, .. } => {
            let (at, level) = (check.geometry().fs_block(ag, block), levels.saturating_sub(1));
            vec![ExpectedTreeBlock { at, level, low: None, high: None, end: None }]
        }
        XfsTreeRoot::Fork { root, .. } => {
            let ends = root.children.iter().skip(1).map(|(first, _)| Some(file_key(*first)));
            let children = root.children.iter().zip(ends.chain([None]));
            let expected = children.map(|((first, at), end)| ExpectedTreeBlock {
                at: *at,
                level: u32::from(root.level).saturating_sub(1),
                low: Some(file_key(*first)),
                high: None,
                end,
            });
            let mut blocks: Vec<_> = expected.collect();
            blocks.reverse();
            blocks
        }
    }
}

/// The group or the file with a tree.
fn place_of(root: XfsTreeRoot<'_>) -> XfsFindingPlace {
    match root {
        XfsTreeRoot::Group { ag, .. } => ag.into(),
        XfsTreeRoot::Fork { owner, .. } => owner.into(),
    }
}
