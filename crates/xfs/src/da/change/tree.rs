//! Changes to a tree of hashes: the way to a leaf, splits, joins, and the loss of a level.
//!
//! ```text
//! the first block: node --> nodes --> leaves        or: the only leaf
//! ```
//!
//! The root stays in its block. When it is split its contents move to new blocks, and it becomes a
//! node above them. When it has one child, the contents of the child move to it.

use offshoot_vfs::Result;
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::da::{self, DaExpected, DaInfo, DaKind, DaNode, DaNodeEntry, MAX_LEVEL};
use offshoot_xfs_format::dir::leaf::DirLeaf;
use offshoot_xfs_format::dir::leaf_start;
use offshoot_xfs_format::{FileBlock, Malformed};

use super::ChangedHashFork;
use super::proof::{HashSide, ProvedHashBlock};
use crate::buffer::malformed;

/// A node, and the number of an entry in it.
pub(super) type NodeEntry = (FileBlock, usize);

/// The way to a leaf.
#[derive(Clone, Debug)]
pub(crate) struct HashPath {
    pub(crate) nodes: Vec<NodeEntry>,
    pub(crate) leaf: FileBlock,
}

/// A leaf of either fork.
pub(super) enum HashLeafView<'b> {
    Directory(DirLeaf<'b>),
    Attributes(XattrLeaf<'b>),
}

impl<'b> HashLeafView<'b> {
    pub(super) fn info(&self) -> &'b DaInfo {
        match self {
            Self::Directory(leaf) => leaf.info,
            Self::Attributes(leaf) => leaf.info,
        }
    }

    /// The first hash and the last one.
    pub(super) fn ends(&self) -> Option<(u32, u32)> {
        match self {
            Self::Directory(DirLeaf { hashes, .. }) => {
                Some((hashes.first()?.hash.get(), hashes.last()?.hash.get()))
            }
            Self::Attributes(XattrLeaf { hashes, .. }) => {
                Some((hashes.first()?.hash.get(), hashes.last()?.hash.get()))
            }
        }
    }

    pub(super) fn last_hash(&self) -> Option<u32> {
        self.ends().map(|(_, last)| last)
    }
}

pub(super) fn number(at: FileBlock) -> u32 {
    u32::try_from(at.0).unwrap_or(u32::MAX)
}

pub(super) fn place_of(entry: DaNodeEntry) -> FileBlock {
    FileBlock(entry.before.get().into())
}

/// What a node says about one of its children.
#[derive(Clone, Copy, Debug)]
pub(super) struct HashParent {
    /// The level of the node.
    pub(super) level: u16,
    /// The last hash of the child before, and that of the child.
    pub(super) range: (Option<u32>, u32),
}

/// Child `index` of a node.
pub(super) fn child_of(node: &DaNode<'_>, index: usize) -> Option<(FileBlock, HashParent)> {
    let entry = *node.entries.get(index)?;
    let before = index.checked_sub(1).and_then(|before| node.entries.get(before));
    let range = (before.map(|before| before.hash.get()), entry.hash.get());
    Some((place_of(entry), HashParent { level: node.level, range }))
}

impl ChangedHashFork<'_, '_> {
    /// The root of the tree.
    pub(crate) fn root(&self) -> FileBlock {
        if self.is_directory { leaf_start(self.geometry()) } else { FileBlock(0) }
    }

    pub(super) fn node_kind(&self) -> DaKind {
        if self.is_directory { DaKind::DirNode } else { DaKind::AttrNode }
    }

    /// The kind of a leaf with neighbours.
    pub(super) fn leaf_kind(&self) -> DaKind {
        if self.is_directory { DaKind::DirNodeLeaf } else { DaKind::AttrLeaf }
    }

    pub(super) fn leaf_view<'b>(&self, block: &'b [u8]) -> Result<HashLeafView<'b>> {
        let geometry = self.geometry();
        let view = match self.kind(block) {
            Some(DaKind::AttrLeaf) => {
                XattrLeaf::view(geometry, block).map(HashLeafView::Attributes)
            }
            Some(kind @ (DaKind::DirLeaf | DaKind::DirNodeLeaf)) => {
                DirLeaf::view(geometry, kind, block).map(HashLeafView::Directory)
            }
            _ => return Err(self.damaged("a block is in the place of a leaf")),
        };
        view.map_err(malformed)
    }

    /// The way to the first leaf that may have `hash`, or to the last leaf.
    pub(crate) fn find(&mut self, hash: u32) -> Result<HashPath> {
        self.t.count_search();
        let root = self.root();
        self.descend(Vec::new(), (root, None), hash)
    }

    /// Goes on from the block at `at`, below a node of level `above`.
    fn descend(
        &mut self,
        mut nodes: Vec<NodeEntry>,
        (mut at, mut above): (FileBlock, Option<HashParent>),
        hash: u32,
    ) -> Result<HashPath> {
        loop {
            let block = if let Some(HashParent { level, range }) = above {
                let block = self.hash_block_on(at, level.saturating_sub(1))?;
                self.prove_range(&block, range)?;
                block
            } else {
                let block = self.hash_block(at)?;
                self.prove_alone(&block)?;
                block
            };
            let Some(node) = self.node(self.bytes(block.place)?)? else {
                return Ok(HashPath { nodes, leaf: at });
            };
            let index = node.find(hash).unwrap_or(node.entries.len().saturating_sub(1));
            let child = child_of(&node, index);
            let (child, parent) =
                child.ok_or_else(|| self.damaged(format!("block {at} has no children")))?;
            nodes.push((at, index));
            (at, above) = (child, Some(parent));
        }
    }

    /// The way to the next leaf of a walk that began at `first`.
    pub(crate) fn next(&mut self, path: &HashPath, first: FileBlock) -> Result<Option<HashPath>> {
        let leaf = self.hash_block(path.leaf)?;
        let beside = self.neighbour(&leaf, HashSide::Next)?.map(|beside| beside.at);
        let mut nodes = path.nodes.clone();
        let mut next = None;
        while let Some((at, index)) = nodes.pop() {
            let place = self.hold(at)?;
            let node = self.node(self.bytes(place)?)?;
            let child = node.and_then(|node| child_of(&node, index + 1));
            if let Some((child, parent)) = child {
                nodes.push((at, index + 1));
                next = Some(self.descend(nodes, (child, Some(parent)), 0)?);
                break;
            }
        }
        let found = next.as_ref().map(|next| next.leaf);
        if found != beside || found == Some(first) {
            let leaf = path.leaf;
            return Err(self.damaged(format!("the nodes and block {leaf} name other next leaves")));
        }
        Ok(next)
    }

    /// Stores the contents of a leaf in `count` leaves. `encode` gives the bytes of each.
    pub(crate) fn split_leaf(
        &mut self,
        path: &HashPath,
        count: usize,
        mut encode: impl FnMut(usize, &DaExpected, (u32, u32)) -> Result<Vec<u8>, Malformed>,
    ) -> Result<()> {
        let leaf = self.hash_block(path.leaf)?;
        let [behind, _] = self.neighbours(&leaf)?;
        let (forw, back) = leaf.links;
        let is_root = path.nodes.is_empty();
        let mut places = if is_root { Vec::new() } else { vec![path.leaf] };
        while places.len() < count {
            places.push(self.create()?);
        }
        let mut entries = Vec::with_capacity(count);
        for (index, &at) in places.iter().enumerate() {
            let before = index.checked_sub(1).and_then(|index| places.get(index));
            let links = (
                places.get(index + 1).map_or(forw, |next| number(*next)),
                before.map_or(back, |before| number(*before)),
            );
            let bytes = encode(index, &self.expected(at)?, links).map_err(malformed)?;
            let hash = self.leaf_view(&bytes)?.last_hash().unwrap_or(0);
            self.store(at, &bytes)?;
            entries.push(DaNodeEntry { hash: hash.into(), before: number(at).into() });
        }
        if let (Some(behind), Some(last)) = (behind, places.last()) {
            self.set_back(&behind, number(*last))?;
        }
        if is_root {
            let root = self.root();
            self.store_node(root, (0, 0, 1), &entries)
        } else {
            self.replace(&path.nodes, &entries)
        }
    }

    fn store_node(
        &mut self,
        at: FileBlock,
        fields: (u32, u32, u16),
        entries: &[DaNodeEntry],
    ) -> Result<()> {
        let expected = self.expected(at)?;
        let kind = self.node_kind();
        let bytes = DaNode::encode(self.geometry(), kind, &expected, fields, entries);
        self.store(at, &bytes.map_err(malformed)?)
    }

    /// Says in a block what is in front of it.
    pub(super) fn set_back(&mut self, block: &ProvedHashBlock, back: u32) -> Result<()> {
        let kind = self.leaf_kind();
        self.edit((block.at, kind), |_, edit| edit.set_back(back))
    }

    /// Replaces the entry at the end of `nodes` by these, and splits the node if it has no room.
    fn replace(&mut self, nodes: &[NodeEntry], entries: &[DaNodeEntry]) -> Result<()> {
        let Some((&(at, index), above)) = nodes.split_last() else {
            return Err(self.damaged("a leaf has no node above it"));
        };
        let kind = self.node_kind();
        let has_room = self.edit((at, kind), |geometry, edit| {
            da::splice_node(geometry, edit, index..index + 1, entries)
        })?;
        if has_room {
            return self.note_node(at, above);
        }
        let block = self.hash_block(at)?;
        let [behind, _] = self.neighbours(&block)?;
        let node = self.node(self.bytes(block.place)?)?;
        let node = node.ok_or_else(|| self.damaged("a node is a leaf"))?;
        let (level, forw, back) = (node.level, node.info.forw.get(), node.info.back.get());
        let mut all = node.entries.to_vec();
        all.splice(index..=index, entries.iter().copied());
        let (left, right) = all.split_at(all.len() / 2);
        let is_root = above.is_empty();
        // The kernel looks for no node on the highest level that the format has.
        if is_root && level + 1 >= MAX_LEVEL {
            return Err(self.no_space("one more level"));
        }
        let first = if is_root { self.create()? } else { at };
        let second = self.create()?;
        self.store_node(first, (number(second), back, level), left)?;
        self.store_node(second, (forw, number(first), level), right)?;
        if let Some(behind) = behind {
            self.set_back(&behind, number(second))?;
        }
        let entry = |half: &[DaNodeEntry], at| {
            half.last().map(|last| DaNodeEntry { before: number(at).into(), ..*last })
        };
        let halves: Vec<_> =
            [entry(left, first), entry(right, second)].into_iter().flatten().collect();
        if is_root {
            let root = self.root();
            self.store_node(root, (0, 0, level + 1), &halves)
        } else {
            self.replace(above, &halves)
        }
    }

    /// Brings the last hash of a leaf to the nodes above it.
    pub(crate) fn note_last(&mut self, path: &HashPath) -> Result<()> {
        let place = self.hold(path.leaf)?;
        let last = self.leaf_view(self.bytes(place)?)?.last_hash();
        last.map_or(Ok(()), |last| self.note_hash(&path.nodes, last))
    }

    /// Brings the last hash of the node at `at` to the nodes above it.
    fn note_node(&mut self, at: FileBlock, above: &[NodeEntry]) -> Result<()> {
        let place = self.hold(at)?;
        let node = self.node(self.bytes(place)?)?;
        let last = node.and_then(|node| node.entries.last().copied());
        last.map_or(Ok(()), |last| self.note_hash(above, last.hash.get()))
    }

    pub(super) fn note_hash(&mut self, nodes: &[NodeEntry], hash: u32) -> Result<()> {
        let kind = self.node_kind();
        for &(at, index) in nodes.iter().rev() {
            let place = self.hold(at)?;
            let node = self.node(self.bytes(place)?)?;
            let entries = node.map_or(&[][..], |node| node.entries);
            let entry = entries.get(index).copied();
            let entry = entry.ok_or_else(|| self.damaged("a node has lost an entry"))?;
            let is_last = index + 1 == entries.len();
            if entry.hash.get() == hash {
                return Ok(());
            }
            let before = index.checked_sub(1).and_then(|before| entries.get(before));
            let is_ordered = before.is_none_or(|before| before.hash.get() <= hash)
                && entries.get(index + 1).is_none_or(|next| hash <= next.hash.get());
            if !is_ordered {
                return Err(self.damaged(format!("block {at} would have hashes out of order")));
            }
            let entry = DaNodeEntry { hash: hash.into(), ..entry };
            self.edit((at, kind), |geometry, edit| {
                da::splice_node(geometry, edit, index..index + 1, &[entry])
            })?;
            if !is_last {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes a leaf without entries out of the tree. The only leaf stays, and so does one whose
    /// block cannot be given up.
    pub(crate) fn drop_leaf(&mut self, path: &HashPath) -> Result<()> {
        if path.nodes.is_empty() || !self.may_drop(path)? {
            return Ok(());
        }
        self.drop_block(&path.nodes, (path.leaf, 0))
    }

    /// Whether a leaf can be given up, with the nodes that have no other child: all of them, or the
    /// leaf stays.
    fn may_drop(&mut self, path: &HashPath) -> Result<bool> {
        let mut blocks = vec![path.leaf];
        for &(at, _) in path.nodes.iter().skip(1).rev() {
            let place = self.hold(at)?;
            if self.node(self.bytes(place)?)?.is_some_and(|node| node.entries.len() > 1) {
                break;
            }
            blocks.push(at);
        }
        self.may_free(&blocks)
    }

    /// Takes an empty leaf, or a node without entries, out of the tree.
    fn drop_block(&mut self, nodes: &[NodeEntry], (at, level): (FileBlock, u16)) -> Result<()> {
        self.unlink(at, level)?;
        self.free(at)?;
        let Some((&(parent, _), above)) = nodes.split_last() else {
            return Err(self.damaged("a leaf has no node above it"));
        };
        let place = self.hold(parent)?;
        let count = self.node(self.bytes(place)?)?.map_or(0, |node| node.entries.len());
        if count > 1 {
            self.replace(nodes, &[])?;
            return self.join(above);
        }
        if above.is_empty() {
            return self.empty_root();
        }
        self.drop_block(above, (parent, level + 1))
    }

    /// Makes the root a leaf without entries.
    fn empty_root(&mut self) -> Result<()> {
        let (root, geometry) = (self.root(), self.geometry());
        let expected = self.expected(root)?;
        let bytes = if self.is_directory {
            DirLeaf::encode(geometry, DaKind::DirNodeLeaf, &expected, (0, 0), &[], &[])
        } else {
            XattrLeaf::encode(geometry, &expected, (0, 0), &[])
        };
        self.store(root, &bytes.map_err(malformed)?)
    }

    /// Links the neighbours of a block to each other.
    fn unlink(&mut self, at: FileBlock, level: u16) -> Result<()> {
        let block = self.hash_block_on(at, level)?;
        let (forw, back) = block.links;
        let [next, before] = self.neighbours(&block)?;
        if let Some(next) = next {
            self.set_back(&next, back)?;
        }
        let Some(before) = before else { return Ok(()) };
        let kind = self.leaf_kind();
        self.edit((before.at, kind), |_, edit| edit.set_forw(forw))
    }
}
