//! The tree of leaves in an attribute fork: finding, adding and removing attributes.
//!
//! ```text
//! block 0: node --> nodes --> leaves        or block 0: the only leaf
//! ```
//!
//! The root stays in block 0. When it is split its contents move to new blocks, and it becomes a
//! node above them. When it has one child, the contents of the child move to it.

use offshoot_vfs::Result;
use offshoot_xfs_format::attr::leaf::{self, XattrLeaf};
use offshoot_xfs_format::attr::{XattrContent, XattrFlags, XfsXattr};
use offshoot_xfs_format::da::{self, DaKind, DaNode, DaNodeEntry, MAX_LEVEL};
use offshoot_xfs_format::{FileBlock, XfsGeometry};

use super::OwnedXattr;
use super::fork::ChangedXattrs;
use crate::buffer::malformed;

pub(super) const ROOT: FileBlock = FileBlock(0);
const LEAF: DaKind = DaKind::AttrLeaf;
const NODE: DaKind = DaKind::AttrNode;

/// A node, and the number of an entry in it.
type NodeEntry = (FileBlock, usize);

/// The way to a leaf.
#[derive(Clone, Debug)]
pub(super) struct XattrPath {
    nodes: Vec<NodeEntry>,
    pub(super) leaf: FileBlock,
}

/// An attribute that was found.
#[derive(Clone, Debug)]
pub(super) struct FoundXattr {
    pub(super) path: XattrPath,
    /// Its number in the leaf.
    pub(super) index: usize,
    pub(super) value: FoundValue,
}

/// The value of an attribute that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FoundValue {
    Local(Vec<u8>),
    /// In blocks from this one on, with so many bytes.
    Remote(FileBlock, usize),
}

/// All attributes with a namespace and a name.
#[derive(Clone, Debug, Default)]
pub(super) struct FoundXattrs {
    pub(super) complete: Option<FoundXattr>,
    pub(super) incomplete: Vec<FoundXattr>,
}

fn number(at: FileBlock) -> u32 {
    u32::try_from(at.0).unwrap_or(u32::MAX)
}

/// The last hash in a leaf.
fn last_hash(leaf: &XattrLeaf<'_>) -> Option<u32> {
    leaf.hashes.last().map(|entry| entry.hash.get())
}

impl ChangedXattrs<'_, '_> {
    /// The way to the first leaf that may have `hash`, or to the last leaf.
    pub(super) fn find(&mut self, hash: u32) -> Result<XattrPath> {
        self.descend(Vec::new(), (ROOT, None), hash)
    }

    /// Goes on from the block at `at`, below a node of level `above`.
    fn descend(
        &mut self,
        mut nodes: Vec<NodeEntry>,
        (mut at, mut above): (FileBlock, Option<u16>),
        hash: u32,
    ) -> Result<XattrPath> {
        loop {
            let block = self.read(at)?;
            let node = self.node(&block)?;
            let level = node.as_ref().map_or(0, |node| node.level);
            if above.is_some_and(|above| above != level + 1) {
                return Err(self.damaged(format!("block {at} is not on its level")));
            }
            let Some(node) = node else { return Ok(XattrPath { nodes, leaf: at }) };
            let index = node.find(hash).unwrap_or(node.entries.len().saturating_sub(1));
            let child = node.entries.get(index);
            let child = child.ok_or_else(|| self.damaged(format!("block {at} has no children")))?;
            nodes.push((at, index));
            (at, above) = (FileBlock(child.before.get().into()), Some(level));
        }
    }

    /// The way to the next leaf.
    fn next(&mut self, path: &XattrPath) -> Result<Option<XattrPath>> {
        let mut nodes = path.nodes.clone();
        while let Some((at, index)) = nodes.pop() {
            let block = self.read(at)?;
            let node = self.node(&block)?;
            let next = node.and_then(|node| Some((node.entries.get(index + 1).copied()?, node)));
            if let Some((child, node)) = next {
                nodes.push((at, index + 1));
                let below = (FileBlock(child.before.get().into()), Some(node.level));
                return self.descend(nodes, below, 0).map(Some);
            }
        }
        Ok(None)
    }

    /// All attributes with the namespace and the name of `wanted`.
    pub(super) fn matches(&mut self, wanted: &OwnedXattr) -> Result<FoundXattrs> {
        let hash = wanted.hash()?;
        let mut left = self.inode()?.core().nblocks.get();
        let mut found = FoundXattrs::default();
        let mut next = Some(self.find(hash)?);
        while let Some(path) = next {
            let block = self.read(path.leaf)?;
            let leaf = self.leaf(&block)?;
            for (index, xattr) in leaf.with_hash(hash).filter(|(_, xattr)| wanted.is(xattr)) {
                let value = match xattr.value {
                    XattrContent::Local(value) => FoundValue::Local(value.to_vec()),
                    XattrContent::Remote { block, len } => FoundValue::Remote(block, len),
                };
                let one = FoundXattr { path: path.clone(), index, value };
                if xattr.flags.contains(XattrFlags::INCOMPLETE) {
                    found.incomplete.push(one);
                } else {
                    found.complete = Some(one);
                }
            }
            // The following leaves may have the hash too.
            next = match last_hash(&leaf) {
                Some(last) if last != hash => None,
                _ => self.next(&path)?,
            };
            left = left.checked_sub(1).ok_or_else(|| self.damaged("its leaves do not end"))?;
        }
        Ok(found)
    }

    /// Adds an attribute to the leaf of a path, which has its hash or the place for it.
    pub(super) fn insert(&mut self, path: &XattrPath, xattr: &XfsXattr<'_>) -> Result<()> {
        let has_room =
            self.edit((path.leaf, LEAF), |geometry, edit| leaf::insert(geometry, edit, xattr))?;
        if has_room { self.note_last(path) } else { self.split_leaf(path, xattr) }
    }

    /// Stores the attributes of a leaf and one more in two leaves, or in three when a large one
    /// comes between others.
    fn split_leaf(&mut self, path: &XattrPath, xattr: &XfsXattr<'_>) -> Result<()> {
        let block = self.read(path.leaf)?;
        let leaf = self.leaf(&block)?;
        let hash = xattr.hash().map_err(malformed)?;
        let place = leaf.hashes.partition_point(|entry| entry.hash.get() <= hash);
        let (forw, back) = (leaf.info.forw.get(), leaf.info.back.get());
        let mut all: Vec<_> = leaf.xattrs(0).collect();
        all.insert(place.min(all.len()), *xattr);
        let parts = parts(self.geometry(), &all, place);
        let is_root = path.nodes.is_empty();
        let mut places = if is_root { Vec::new() } else { vec![path.leaf] };
        while places.len() < parts.len() {
            places.push(self.create()?);
        }
        let mut entries = Vec::with_capacity(parts.len());
        for (index, (part, &at)) in parts.iter().zip(&places).enumerate() {
            let before = index.checked_sub(1).and_then(|index| places.get(index));
            let links = (
                places.get(index + 1).map_or(forw, |next| number(*next)),
                before.map_or(back, |before| number(*before)),
            );
            let hash = self.store_leaf(at, links, part)?;
            entries.push(DaNodeEntry { hash: hash.into(), before: number(at).into() });
        }
        if let Some(last) = places.last() {
            self.link_back(forw, *last)?;
        }
        if is_root {
            self.store_node(ROOT, (0, 0, 1), &entries)
        } else {
            self.replace(&path.nodes, &entries)
        }
    }

    /// Stores a leaf with these links and attributes. Returns its last hash.
    fn store_leaf(
        &mut self,
        at: FileBlock,
        links: (u32, u32),
        xattrs: &[XfsXattr<'_>],
    ) -> Result<u32> {
        let expected = self.expected(at)?;
        let bytes = XattrLeaf::encode(self.geometry(), &expected, links, xattrs);
        let bytes = bytes.map_err(malformed)?;
        self.store(at, &bytes)?;
        Ok(last_hash(&self.leaf(&bytes)?).unwrap_or(0))
    }

    fn store_node(
        &mut self,
        at: FileBlock,
        fields: (u32, u32, u16),
        entries: &[DaNodeEntry],
    ) -> Result<()> {
        let expected = self.expected(at)?;
        let bytes = DaNode::encode(self.geometry(), NODE, &expected, fields, entries);
        self.store(at, &bytes.map_err(malformed)?)
    }

    /// Makes the only leaf of a fork without blocks.
    pub(super) fn plant(&mut self, xattrs: &[XfsXattr<'_>]) -> Result<()> {
        let at = self.create()?;
        self.store_leaf(at, (0, 0), xattrs).map(drop)
    }

    /// Says in the block `at`, if there is one, that `back` is in front of it.
    fn link_back(&mut self, at: u32, back: FileBlock) -> Result<()> {
        if at == 0 {
            return Ok(());
        }
        self.edit((FileBlock(at.into()), LEAF), |_, edit| edit.set_back(number(back)))
    }

    /// Replaces the entry at the end of `nodes` by these, and splits the node if it has no room.
    fn replace(&mut self, nodes: &[NodeEntry], entries: &[DaNodeEntry]) -> Result<()> {
        let Some((&(at, index), above)) = nodes.split_last() else {
            return Err(self.damaged("a leaf has no node above it"));
        };
        let has_room = self.edit((at, NODE), |geometry, edit| {
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
        if is_root && level >= MAX_LEVEL {
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
            self.store_node(ROOT, (0, 0, level + 1), &halves)
        } else {
            self.replace(above, &halves)
        }
    }

    /// Brings the last hash of a leaf to the nodes above it.
    fn note_last(&mut self, path: &XattrPath) -> Result<()> {
        let block = self.read(path.leaf)?;
        let last = last_hash(&self.leaf(&block)?);
        last.map_or(Ok(()), |last| self.note_hash(&path.nodes, last))
    }

    /// Brings the last hash of the node at `at` to the nodes above it.
    fn note_node(&mut self, at: FileBlock, above: &[NodeEntry]) -> Result<()> {
        let block = self.read(at)?;
        let last = self.node(&block)?.and_then(|node| node.entries.last().copied());
        last.map_or(Ok(()), |last| self.note_hash(above, last.hash.get()))
    }

    fn note_hash(&mut self, nodes: &[NodeEntry], hash: u32) -> Result<()> {
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
            self.edit((at, NODE), |geometry, edit| {
                da::splice_node(geometry, edit, index..index + 1, &[entry])
            })?;
            if !is_last {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes an attribute out of its leaf, which may be empty then, and has its hash still above
    /// it.
    pub(super) fn take_out(&mut self, found: &FoundXattr) -> Result<()> {
        self.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::remove(geometry, edit, found.index)
        })
    }

    /// Removes an attribute. A leaf without attributes goes, and one with few is joined with its
    /// neighbour. The only leaf may be empty then.
    pub(super) fn remove(&mut self, found: &FoundXattr) -> Result<()> {
        self.take_out(found)?;
        let path = &found.path;
        let block = self.read(path.leaf)?;
        if !self.leaf(&block)?.hashes.is_empty() {
            self.note_last(path)?;
            return self.join(&path.nodes);
        }
        if path.nodes.is_empty() { Ok(()) } else { self.drop_block(&path.nodes, path.leaf) }
    }

    pub(super) fn mark_incomplete(&mut self, found: &FoundXattr) -> Result<()> {
        self.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::set_incomplete(geometry, edit, found.index, true)
        })
    }

    /// Says that an attribute is complete.
    pub(super) fn mark_complete(&mut self, found: &FoundXattr) -> Result<()> {
        self.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::set_incomplete(geometry, edit, found.index, false)
        })
    }

    /// Says where the value of an attribute is.
    pub(super) fn set_remote(
        &mut self,
        found: &FoundXattr,
        (block, len): (FileBlock, usize),
    ) -> Result<()> {
        self.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::set_remote(geometry, edit, found.index, block, len)
        })
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
            return self.store_leaf(ROOT, (0, 0), &[]).map(drop);
        }
        self.drop_block(above, parent)
    }

    /// Links the neighbours of a block to each other.
    fn unlink(&mut self, at: FileBlock) -> Result<()> {
        let block = self.read(at)?;
        let info = match self.node(&block)? {
            Some(node) => node.info,
            None => self.leaf(&block)?.info,
        };
        let (forw, back) = (info.forw.get(), info.back.get());
        self.link_back(forw, FileBlock(back.into()))?;
        if back == 0 {
            return Ok(());
        }
        self.edit((FileBlock(back.into()), LEAF), |_, edit| edit.set_forw(forw))
    }

    /// Joins the child at the end of `nodes` with a neighbour below the same node if both have few
    /// entries, and then that node with one of its neighbours, up to the root.
    fn join(&mut self, nodes: &[NodeEntry]) -> Result<()> {
        let Some((&(at, index), above)) = nodes.split_last() else { return self.collapse() };
        for first in [Some(index), index.checked_sub(1)].into_iter().flatten() {
            let block = self.read(at)?;
            let entries = self.node(&block)?.map_or(&[][..], |node| node.entries);
            let pair = entries.get(first).copied().zip(entries.get(first + 1).copied());
            let Some((left, right)) = pair else { continue };
            let both = [left, right].map(|entry| FileBlock(entry.before.get().into()));
            if self.merge(both)? {
                let joined = DaNodeEntry { before: left.before, ..right };
                self.edit((at, NODE), |geometry, edit| {
                    da::splice_node(geometry, edit, first..first + 2, &[joined])
                })?;
                break;
            }
        }
        self.join(above)
    }

    /// Moves the contents of the right one of two neighbours to the left one, if both together fill
    /// at most three quarters of a block. Returns whether it did.
    fn merge(&mut self, [left, right]: [FileBlock; 2]) -> Result<bool> {
        let (first, second) = (self.read(left)?, self.read(right)?);
        let geometry = self.geometry();
        match (self.node(&first)?, self.node(&second)?) {
            (None, None) => {
                let (first, second) = (self.leaf(&first)?, self.leaf(&second)?);
                let all: Vec<_> = first.xattrs(0).chain(second.xattrs(0)).collect();
                let taken: usize = all.iter().map(leaf::taken).sum();
                if taken > leaf::capacity(geometry) / 4 * 3 {
                    return Ok(false);
                }
                let forw = second.info.forw.get();
                self.store_leaf(left, (forw, first.info.back.get()), &all)?;
                self.link_back(forw, left)?;
            }
            (Some(first), Some(second)) => {
                let all = [first.entries, second.entries].concat();
                if all.len() > da::node_capacity(geometry, NODE) / 4 * 3 {
                    return Ok(false);
                }
                let forw = second.info.forw.get();
                self.store_node(left, (forw, first.info.back.get(), first.level), &all)?;
                self.link_back(forw, left)?;
            }
            _ => return Err(self.damaged("a leaf is beside a node")),
        }
        self.free(right)?;
        Ok(true)
    }

    /// As long as the root has one child, moves the contents of the child to the root.
    fn collapse(&mut self) -> Result<()> {
        loop {
            let block = self.read(ROOT)?;
            let entries = self.node(&block)?.map_or(&[][..], |node| node.entries);
            let &[only] = entries else { return Ok(()) };
            let child = FileBlock(only.before.get().into());
            let block = self.read(child)?;
            if let Some(node) = self.node(&block)? {
                self.store_node(ROOT, (0, 0, node.level), node.entries)?;
            } else {
                let all: Vec<_> = self.leaf(&block)?.xattrs(0).collect();
                self.store_leaf(ROOT, (0, 0), &all)?;
            }
            self.free(child)?;
        }
    }
}

/// Splits attributes, of which number `new` did not fit, into as few leaves as possible, about
/// equally full.
fn parts<'x, 'a>(
    geometry: &XfsGeometry,
    all: &'x [XfsXattr<'a>],
    new: usize,
) -> Vec<&'x [XfsXattr<'a>]> {
    let sum = |part: &[XfsXattr<'_>]| part.iter().map(leaf::taken).sum::<usize>();
    let capacity = leaf::capacity(geometry);
    let halves = (1..all.len()).map(|at| all.split_at(at));
    let halves = halves.map(|(left, right)| (sum(left), sum(right), [left, right]));
    let fitting = halves.filter(|(left, right, _)| *left <= capacity && *right <= capacity);
    if let Some((_, _, halves)) = fitting.min_by_key(|(left, right, _)| left.abs_diff(*right)) {
        return halves.to_vec();
    }
    let (left, rest) = all.split_at(new.min(all.len()));
    let (middle, right) = rest.split_at(rest.len().min(1));
    [left, middle, right].into_iter().filter(|part| !part.is_empty()).collect()
}
