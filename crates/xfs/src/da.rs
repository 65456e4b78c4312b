//! The trees of hashes: those of large directories, and of attribute forks.
//!
//! ```text
//! root: node --> nodes --> leaves, which are linked to their neighbours
//! ```
//!
//! A child of a node must be one level lower, so a descent ends. A walk along leaves ends too: it
//! notices when it comes to a leaf for the second time.

pub(crate) mod change;

use std::sync::Arc;

use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::da::{DaInfo, DaNode};

use crate::buffer::{AttributeView, BufferRole, DirectoryView, XfsBuffer, XfsBuffers};
use crate::inode::LoadedInode;
use crate::inode::fork::LoadedFork;

/// The tree of a directory or of an attribute fork.
#[derive(Clone, Copy)]
pub(crate) struct HashTree<'a> {
    pub(crate) buffers: &'a XfsBuffers,
    pub(crate) inode: &'a LoadedInode,
    pub(crate) fork: &'a LoadedFork,
    pub(crate) is_directory: bool,
}

/// A leaf, and where it is in its fork.
pub(crate) struct HashLeaf {
    pub(crate) at: FileBlock,
    pub(crate) buffer: Arc<XfsBuffer>,
}

impl<'a> HashTree<'a> {
    /// The block at `at` of the fork; `None` where there is a hole.
    pub(crate) fn block(&self, at: FileBlock) -> Result<Option<Arc<XfsBuffer>>> {
        let geometry = self.buffers.geometry();
        let (count, role) = if self.is_directory {
            (1 << geometry.dir_block_log, BufferRole::Directory(self.inode.ino, at))
        } else {
            (1, BufferRole::Attributes(self.inode.ino, at))
        };
        let Some(runs) = self.fork.runs(self.buffers, at, count)? else { return Ok(None) };
        self.buffers.read(&runs, role).map(Some)
    }

    /// The block at `at` of the fork, to which another block leads.
    pub(crate) fn require(&self, at: FileBlock) -> Result<Arc<XfsBuffer>> {
        self.block(at)?.ok_or_else(|| self.fork.damaged(format!("block {at} is not there")))
    }

    /// The block as a node; `None` when it is a leaf.
    fn node<'b>(&self, buffer: &'b XfsBuffer) -> Result<Option<DaNode<'b>>> {
        let geometry = self.buffers.geometry();
        let node = if self.is_directory {
            match buffer.directory(geometry)? {
                DirectoryView::Node(node) => Some(node),
                DirectoryView::Leaf(_) => None,
                _ => return Err(self.bad(buffer, "it is neither a node nor a leaf")),
            }
        } else {
            match buffer.attributes(geometry)? {
                AttributeView::Node(node) => Some(node),
                AttributeView::Leaf(_) => None,
            }
        };
        Ok(node)
    }

    #[cold]
    fn bad(&self, buffer: &XfsBuffer, problem: &'static str) -> Error {
        let structure =
            if self.is_directory { Structure::DirectoryBlock } else { Structure::AttributeBlock };
        buffer.damaged(Malformed::new(structure, problem))
    }

    /// The first leaf below the root at `root` that may have `hash`; `None` when all hashes are
    /// below.
    pub(crate) fn find(&self, root: FileBlock, hash: u32) -> Result<Option<HashLeaf>> {
        let (mut at, mut above) = (root, None);
        loop {
            let buffer = self.require(at)?;
            let Some(node) = self.node(&buffer)? else {
                if above.is_some_and(|level| level != 1) {
                    return Err(self.bad(&buffer, "a leaf is in the place of a node"));
                }
                return Ok(Some(HashLeaf { at, buffer }));
            };
            if above.is_some_and(|above| node.level + 1 != above) {
                return Err(self.bad(&buffer, "its level is not that below its parent's"));
            }
            above = Some(node.level);
            let entry = node.find(hash).and_then(|place| node.entries.get(place));
            let Some(entry) = entry else { return Ok(None) };
            at = FileBlock(entry.before.get().into());
        }
    }

    /// A walk along the leaves from this one on.
    pub(crate) fn walk(&self, first: HashLeaf) -> LeafWalk<'a> {
        LeafWalk { tree: *self, mark: first.at, leaf: first, steps: 0 }
    }
}

/// A walk along leaves.
pub(crate) struct LeafWalk<'a> {
    tree: HashTree<'a>,
    pub(crate) leaf: HashLeaf,
    /// A leaf that the walk passed: it moves on after 1, 2, 4, ... steps, so a ring is found.
    mark: FileBlock,
    steps: u64,
}

impl LeafWalk<'_> {
    /// Goes to the next leaf, which the links of this one name. `false` when it is the last one.
    pub(crate) fn advance(&mut self, links: &DaInfo) -> Result<bool> {
        if links.forw.get() == 0 {
            return Ok(false);
        }
        let at = FileBlock(links.forw.get().into());
        let buffer = self.tree.require(at)?;
        if self.tree.node(&buffer)?.is_some() {
            return Err(self.tree.bad(&buffer, "a leaf leads to a node"));
        }
        if at == self.mark {
            return Err(self.tree.bad(&buffer, "the leaves form a ring"));
        }
        self.steps += 1;
        if self.steps.is_power_of_two() {
            self.mark = at;
        }
        self.leaf = HashLeaf { at, buffer };
        Ok(true)
    }
}
