//! The trees of hashes of directories and attributes: a walk over all nodes and leaves.
//!
//! A hostile fork can have a block in two places of the tree. So a walk ends when it has visited
//! more blocks than the inode has.

use std::sync::Arc;

use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::da::DaInfo;

use super::finding::XfsFindingCode as Code;
use super::whole::VolumeCheck;
use crate::buffer::{AttributeView, DirectoryView, XfsBuffer};
use crate::da::HashTree;

/// A node or a leaf that is still to be visited.
struct ExpectedHashBlock {
    at: FileBlock,
    /// The level of its parent.
    above: Option<u16>,
    /// The last hash that the parent has for it.
    last: Option<u32>,
}

/// What a walk takes from a block.
struct HashBlock {
    forw: u32,
    back: u32,
    level: u16,
    last: Option<u32>,
    children: Vec<(FileBlock, u32)>,
}

impl VolumeCheck<'_> {
    /// Calls `visit` for each sound leaf below `root`, in order. `false` when the tree is damaged.
    pub(super) fn walk_hashes(
        &self,
        tree: &HashTree<'_>,
        root: FileBlock,
        visit: &mut dyn FnMut(&XfsBuffer),
    ) -> bool {
        let code = if tree.is_directory { Code::DirectoryBlock } else { Code::Attribute };
        let bad = |at: FileBlock, problem: &str| {
            self.findings.add(code, tree.inode.ino, format!("block {at} of the fork: {problem}"));
        };
        let mut stack = vec![ExpectedHashBlock { at: root, above: None, last: None }];
        // For each level, the last block and the next one that it names.
        let mut ends: Vec<Option<(u64, u64)>> = Vec::new();
        let (mut visited, mut is_whole) = (0, true);
        while let Some(expected) = stack.pop() {
            let at = expected.at;
            visited += 1;
            if visited > tree.inode.core.nblocks.get() {
                bad(at, "the tree has more blocks than the inode");
                return false;
            }
            let buffer = match tree.require(at) {
                Ok(buffer) => buffer,
                Err(error) => {
                    self.findings.add_error(code, tree.inode.ino, &error);
                    is_whole = false;
                    continue;
                }
            };
            self.note_lsn(&buffer);
            let Some(block) = self.hash_block(tree, &buffer) else {
                bad(at, "it is neither a node nor a leaf");
                is_whole = false;
                continue;
            };
            if expected.above.is_some_and(|above| above != block.level + 1) {
                bad(at, "its level is not that below its parent's");
                is_whole = false;
                continue;
            }
            if expected.last.is_some() && block.last.is_some() && block.last != expected.last {
                bad(at, "its last hash is not that which its parent has");
            }
            let level = usize::from(block.level);
            ends.resize(ends.len().max(level + 1), None);
            if let Some(end) = ends.get_mut(level) {
                let before = end.replace((at.0, block.forw.into()));
                let back = before.map_or(0, |(block, _)| block);
                let is_named = before.is_none_or(|(_, next)| next == at.0);
                if is_whole && (u64::from(block.back) != back || !is_named) {
                    bad(at, "its neighbours do not name each other");
                }
            }
            if block.level == 0 {
                visit(&buffer);
            }
            let children = block.children.into_iter().rev();
            stack.extend(children.map(|(at, last)| ExpectedHashBlock {
                at,
                above: Some(block.level),
                last: Some(last),
            }));
        }
        is_whole
    }

    fn hash_block(&self, tree: &HashTree<'_>, buffer: &Arc<XfsBuffer>) -> Option<HashBlock> {
        let of = |info: &DaInfo, level, last| HashBlock {
            forw: info.forw.get(),
            back: info.back.get(),
            level,
            last,
            children: Vec::new(),
        };
        let node = if tree.is_directory {
            match buffer.directory(self.geometry()).ok()? {
                DirectoryView::Leaf(leaf) => {
                    return Some(of(leaf.info, 0, leaf.hashes.last().map(|last| last.hash.get())));
                }
                DirectoryView::Node(node) => node,
                _ => return None,
            }
        } else {
            match buffer.attributes(self.geometry()).ok()? {
                AttributeView::Leaf(leaf) => {
                    return Some(of(leaf.info, 0, leaf.hashes.last().map(|last| last.hash.get())));
                }
                AttributeView::Node(node) => node,
            }
        };
        let children = node.entries.iter();
        let children =
            children.map(|child| (FileBlock(child.before.get().into()), child.hash.get()));
        let last = node.entries.last().map(|last| last.hash.get());
        Some(HashBlock { children: children.collect(), ..of(node.info, node.level, last) })
    }
}
