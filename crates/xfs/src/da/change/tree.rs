//! Changes to a tree of hashes: the way to a leaf, splits, joins, and the loss of a level.
//!
//! ```text
//! the first block: node --> nodes --> leaves        or: the only leaf
//! ```
//!
//! The root stays in its block. When it is split its contents move to new blocks, and it becomes a
//! node above them. When it has one child, the contents of the child move to it.

use offshoot_vfs::Result;
use offshoot_xfs_format::attr::leaf::{self, XattrLeaf};
use offshoot_xfs_format::da::{self, DaExpected, DaInfo, DaKind, DaNode, DaNodeEntry, MAX_LEVEL};
use offshoot_xfs_format::dir::leaf::DirLeaf;
use offshoot_xfs_format::dir::leaf_start;
use offshoot_xfs_format::{FileBlock, Malformed};

use super::ChangedHashFork;
use crate::buffer::malformed;

/// A node, and the number of an entry in it.
type NodeEntry = (FileBlock, usize);

/// The way to a leaf.
#[derive(Clone, Debug)]
pub(crate) struct HashPath {
    pub(crate) nodes: Vec<NodeEntry>,
    pub(crate) leaf: FileBlock,
}

/// A leaf of either fork.
enum HashLeafView<'b> {
    Directory(DirLeaf<'b>),
    Attributes(XattrLeaf<'b>),
}

impl<'b> HashLeafView<'b> {
    fn info(&self) -> &'b DaInfo {
        match self {
            Self::Directory(leaf) => leaf.info,
            Self::Attributes(leaf) => leaf.info,
        }
    }

    fn last_hash(&self) -> Option<u32> {
        match self {
            Self::Directory(leaf) => leaf.hashes.last().map(|entry| entry.hash.get()),
            Self::Attributes(leaf) => leaf.hashes.last().map(|entry| entry.hash.get()),
        }
    }
}

fn number(at: FileBlock) -> u32 {
    u32::try_from(at.0).unwrap_or(u32::MAX)
}

fn child_of(entry: DaNodeEntry) -> FileBlock {
    FileBlock(entry.before.get().into())
}

impl ChangedHashFork<'_, '_> {
    /// The root of the tree.
    pub(crate) fn root(&self) -> FileBlock {
        if self.is_directory { leaf_start(self.geometry()) } else { FileBlock(0) }
    }

    fn node_kind(&self) -> DaKind {
        if self.is_directory { DaKind::DirNode } else { DaKind::AttrNode }
    }

    /// The kind of a leaf with neighbours.
    fn leaf_kind(&self) -> DaKind {
        if self.is_directory { DaKind::DirNodeLeaf } else { DaKind::AttrLeaf }
    }

    fn leaf_view<'b>(&self, block: &'b [u8]) -> Result<HashLeafView<'b>> {
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
        let root = self.root();
        self.descend(Vec::new(), (root, None), hash)
    }

    /// Goes on from the block at `at`, below a node of level `above`.
    fn descend(
        &mut self,
        mut nodes: Vec<NodeEntry>,
        (mut at, mut above): (FileBlock, Option<u16>),
        hash: u32,
    ) -> Result<HashPath> {
        loop {
            let block = self.read(at)?;
            let node = self.node(&block)?;
            let level = node.as_ref().map_or(0, |node| node.level);
            if above.is_some_and(|above| above != level + 1) {
                return Err(self.damaged(format!("block {at} is not on its level")));
            }
            let Some(node) = node else { return Ok(HashPath { nodes, leaf: at }) };
            let index = node.find(hash).unwrap_or(node.entries.len().saturating_sub(1));
            let child = node.entries.get(index);
            let child = child.ok_or_else(|| self.damaged(format!("block {at} has no children")))?;
            nodes.push((at, index));
            (at, above) = (child_of(*child), Some(level));
        }
    }

    /// The way to the next leaf.
    pub(crate) fn next(&mut self, path: &HashPath) -> Result<Option<HashPath>> {
        let mut nodes = path.nodes.clone();
        while let Some((at, index)) = nodes.pop() {
            let block = self.read(at)?;
            let node = self.node(&block)?;
            let next = node.and_then(|node| Some((node.entries.get(index + 1).copied()?, node)));
            if let Some((child, node)) = next {
                nodes.push((at, index + 1));
                return self.descend(nodes, (child_of(child), Some(node.level)), 0).map(Some);
            }
        }
        Ok(None)
    }

    /// Stores the contents of a leaf in `count` leaves. `encode` gives the bytes of each.
    pub(crate) fn split_leaf(
        &mut self,
        path: &HashPath,
        count: usize,
        mut encode: impl FnMut(usize, &DaExpected, (u32, u32)) -> Result<Vec<u8>, Malformed>,
    ) -> Result<()> {
        let block = self.read(path.leaf)?;
        let info = self.leaf_view(&block)?.info();
        let (forw, back) = (info.forw.get(), info.back.get());
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
        if let Some(last) = places.last() {
            self.link_back(forw, *last)?;
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

    /// Says in the block `at`, if there is one, that `back` is in front of it.
    fn link_back(&mut self, at: u32, back: FileBlock) -> Result<()> {
        if at == 0 {
            return Ok(());
        }
        let kind = self.leaf_kind();
        self.edit((FileBlock(at.into()), kind), |_, edit| edit.set_back(number(back)))
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
        let block = self.read(at)?;
        let node = self.node(&block)?.ok_or_else(|| self.damaged("a node is a leaf"))?;
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
        self.link_back(forw, second)?;
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
        let block = self.read(path.leaf)?;
        let last = self.leaf_view(&block)?.last_hash();
        last.map_or(Ok(()), |last| self.note_hash(&path.nodes, last))
    }

    /// Brings the last hash of the node at `at` to the nodes above it.
    fn note_node(&mut self, at: FileBlock, above: &[NodeEntry]) -> Result<()> {
        let block = self.read(at)?;
        let last = self.node(&block)?.and_then(|node| node.entries.last().copied());
        last.map_or(Ok(()), |last| self.note_hash(above, last.hash.get()))
    }

    fn note_hash(&mut self, nodes: &[NodeEntry], hash: u32) -> Result<()> {
        let kind = self.node_kind();
        for &(at, index) in nodes.iter().rev() {
            let block = self.read(at)?;
            let node = self.node(&block)?;
            let entries = node.map_or(&[][..], |node| node.entries);
            let entry = entries.get(index).copied();
            let entry = entry.ok_or_else(|| self.damaged("a node has lost an entry"))?;
            let is_last = index + 1 == entries.len();
            if entry.hash.get() == hash {
                return Ok(());
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

    /// Takes a leaf without entries out of the tree. The only leaf stays.
    pub(crate) fn drop_leaf(&mut self, path: &HashPath) -> Result<()> {
        if path.nodes.is_empty() { Ok(()) } else { self.drop_block(&path.nodes, path.leaf) }
    }

    /// Takes an empty leaf, or a node without entries, out of the tree.
    fn drop_block(&mut self, nodes: &[NodeEntry], at: FileBlock) -> Result<()> {
        self.unlink(at)?;
        self.free(at)?;
        let Some((&(parent, _), above)) = nodes.split_last() else {
            return Err(self.damaged("a leaf has no node above it"));
        };
        let block = self.read(parent)?;
        let count = self.node(&block)?.map_or(0, |node| node.entries.len());
        if count > 1 {
            self.replace(nodes, &[])?;
            return self.join(above);
        }
        if above.is_empty() {
            return self.empty_root();
        }
        self.drop_block(above, parent)
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
    fn unlink(&mut self, at: FileBlock) -> Result<()> {
        let block = self.read(at)?;
        let info = match self.node(&block)? {
            Some(node) => node.info,
            None => self.leaf_view(&block)?.info(),
        };
        let (forw, back) = (info.forw.get(), info.back.get());
        self.link_back(forw, FileBlock(back.into()))?;
        if back == 0 {
            return Ok(());
        }
        let kind = self.leaf_kind();
        self.edit((FileBlock(back.into()), kind), |_, edit| edit.set_forw(forw))
    }

    /// Joins the child at the end of `nodes` with a neighbour below the same node if both have few
    /// entries, and then that node with one of its neighbours, up to the root.
    pub(crate) fn join(&mut self, nodes: &[NodeEntry]) -> Result<()> {
        let Some((&(at, index), above)) = nodes.split_last() else { return self.collapse() };
        let kind = self.node_kind();
        for first in [Some(index), index.checked_sub(1)].into_iter().flatten() {
            let block = self.read(at)?;
            let entries = self.node(&block)?.map_or(&[][..], |node| node.entries);
            let pair = entries.get(first).copied().zip(entries.get(first + 1).copied());
            let Some((left, right)) = pair else { continue };
            if let Some(hash) = self.merge([left, right].map(child_of))? {
                let joined = DaNodeEntry { before: left.before, ..right };
                self.edit((at, kind), |geometry, edit| {
                    da::splice_node(geometry, edit, first..first + 2, &[joined])
                })?;
                self.note_hash(&[above, &[(at, first)]].concat(), hash)?;
                break;
            }
        }
        self.join(above)
    }

    /// Moves the contents of the right one of two neighbours to the left one, if both together fill
    /// at most three quarters of a block. Returns the last hash of the block then.
    fn merge(&mut self, [left, right]: [FileBlock; 2]) -> Result<Option<u32>> {
        let (first, second) = (self.read(left)?, self.read(right)?);
        let (forw, hash) = match (self.node(&first)?, self.node(&second)?) {
            (None, None) => {
                let (first, second) = (self.leaf_view(&first)?, self.leaf_view(&second)?);
                let expected = self.expected(left)?;
                let Some(bytes) = self.joined_leaf(&expected, &first, &second)? else {
                    return Ok(None);
                };
                let hash = self.leaf_view(&bytes)?.last_hash().unwrap_or(0);
                self.store(left, &bytes)?;
                (second.info().forw.get(), hash)
            }
            (Some(first), Some(second)) => {
                let all = [first.entries, second.entries].concat();
                let kind = self.node_kind();
                if all.len() > da::node_capacity(self.geometry(), kind) / 4 * 3 {
                    return Ok(None);
                }
                let (forw, back) = (second.info.forw.get(), first.info.back.get());
                self.store_node(left, (forw, back, first.level), &all)?;
                (forw, all.last().map_or(0, |last| last.hash.get()))
            }
            _ => return Err(self.damaged("a leaf is beside a node")),
        };
        self.link_back(forw, left)?;
        self.free(right)?;
        Ok(Some(hash))
    }

    /// The bytes of a leaf with the contents of two; `None` when they are too many, or none.
    fn joined_leaf(
        &self,
        expected: &DaExpected,
        first: &HashLeafView<'_>,
        second: &HashLeafView<'_>,
    ) -> Result<Option<Vec<u8>>> {
        let geometry = self.geometry();
        let links = (second.info().forw.get(), first.info().back.get());
        let bytes = match (first, second) {
            (HashLeafView::Attributes(first), HashLeafView::Attributes(second)) => {
                let all: Vec<_> = first.xattrs(0).chain(second.xattrs(0)).collect();
                let taken: usize = all.iter().map(leaf::taken).sum();
                if taken > leaf::capacity(geometry) / 4 * 3 {
                    return Ok(None);
                }
                XattrLeaf::encode(geometry, expected, links, &all)
            }
            (HashLeafView::Directory(first), HashLeafView::Directory(second)) => {
                let all: Vec<_> = first.live().chain(second.live()).collect();
                if all.is_empty() || all.len() > DirLeaf::capacity(geometry) / 4 * 3 {
                    return Ok(None);
                }
                DirLeaf::encode(geometry, DaKind::DirNodeLeaf, expected, links, &all, &[])
            }
            _ => return Err(self.damaged("a leaf is beside one of another kind")),
        };
        bytes.map(Some).map_err(malformed)
    }

    /// As long as the root has one child, moves the contents of the child to the root.
    fn collapse(&mut self) -> Result<()> {
        let root = self.root();
        loop {
            let block = self.read(root)?;
            let entries = self.node(&block)?.map_or(&[][..], |node| node.entries);
            let &[only] = entries else { return Ok(()) };
            let child = child_of(only);
            let mut bytes = self.read(child)?;
            let kind = self.kind(&bytes);
            let kind = kind.ok_or_else(|| self.damaged(format!("block {child} is no leaf")))?;
            let expected = self.expected(root)?;
            da::move_block(self.geometry(), kind, &mut bytes, &expected).map_err(malformed)?;
            self.store(root, &bytes)?;
            self.free(child)?;
        }
    }
}
