//! Neighbours that become one block, and a root that takes the place of its only child.

use offshoot_vfs::Result;
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::attr::leaf::{self, XattrLeaf};
use offshoot_xfs_format::da::{self, DaExpected, DaKind, DaNode, DaNodeEntry};
use offshoot_xfs_format::dir::leaf::DirLeaf;

use super::ChangedHashFork;
use super::proof::HashSide;
use super::tree::{HashLeafView, HashParent, NodeEntry, child_of, number, place_of};
use crate::buffer::malformed;

impl ChangedHashFork<'_, '_> {
    /// Joins the child at the end of `nodes` with a neighbour below the same node if both have few
    /// entries, and then that node with one of its neighbours, up to the root.
    pub(crate) fn join(&mut self, nodes: &[NodeEntry]) -> Result<()> {
        let Some((&(at, index), above)) = nodes.split_last() else { return self.collapse() };
        let kind = self.node_kind();
        for first in [Some(index), index.checked_sub(1)].into_iter().flatten() {
            let place = self.hold(at)?;
            let node = self.node(self.bytes(place)?)?;
            let node = node.ok_or_else(|| self.damaged(format!("block {at} is no node")))?;
            let (entries, level) = (node.entries, node.level.saturating_sub(1));
            let pair = entries.get(first).copied().zip(entries.get(first + 1).copied());
            let Some((left, right)) = pair else { continue };
            if let Some(hash) = self.merge([left, right].map(place_of), level)? {
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

    /// Moves the contents of the right one of two neighbours on a level to the left one, if both
    /// together fill at most three quarters of a block, and the block of the right one can be given
    /// up. Returns the last hash of the block then.
    fn merge(&mut self, places: [FileBlock; 2], level: u16) -> Result<Option<u32>> {
        let [left, right] = places;
        let first = self.hash_block_on(left, level)?;
        let second = self.neighbour(&first, HashSide::Next)?;
        let Some(second) = second.filter(|second| second.at == right) else {
            let problem = format!("block {left} does not name block {right}, which is behind it");
            return Err(self.damaged(problem));
        };
        let behind = self.neighbour(&second, HashSide::Next)?;
        let links = (second.links.0, first.links.1);
        let (first, second) = (self.copy(left)?, self.copy(right)?);
        let joined = match (self.node(&first)?, self.node(&second)?) {
            (None, None) => {
                let (first, second) = (self.leaf_view(&first)?, self.leaf_view(&second)?);
                let expected = self.expected(left)?;
                self.joined_leaf(&expected, &first, &second, links)?
            }
            (Some(first), Some(second)) => self.joined_node(left, &first, &second, links)?,
            _ => return Err(self.damaged("a leaf is beside a node")),
        };
        let Some((bytes, hash)) = joined else { return Ok(None) };
        if !self.may_free(&[right])? {
            return Ok(None);
        }
        self.store(left, &bytes)?;
        if let Some(behind) = behind {
            self.set_back(&behind, number(left))?;
        }
        self.free(right)?;
        Ok(Some(hash))
    }

    /// The bytes of the node at `at` with the entries of two, and its last hash; `None` when they
    /// are too many.
    fn joined_node(
        &mut self,
        at: FileBlock,
        first: &DaNode<'_>,
        second: &DaNode<'_>,
        (forw, back): (u32, u32),
    ) -> Result<Option<(Vec<u8>, u32)>> {
        let (geometry, kind) = (self.geometry(), self.node_kind());
        let all = [first.entries, second.entries].concat();
        if all.len() > da::node_capacity(geometry, kind) / 4 * 3 {
            return Ok(None);
        }
        let expected = self.expected(at)?;
        let bytes = DaNode::encode(geometry, kind, &expected, (forw, back, first.level), &all);
        let hash = all.last().map_or(0, |last| last.hash.get());
        bytes.map(|bytes| Some((bytes, hash))).map_err(malformed)
    }

    /// The bytes of a leaf with the contents of two, and its last hash; `None` when they are too
    /// many, or none.
    fn joined_leaf(
        &self,
        expected: &DaExpected,
        first: &HashLeafView<'_>,
        second: &HashLeafView<'_>,
        links: (u32, u32),
    ) -> Result<Option<(Vec<u8>, u32)>> {
        let geometry = self.geometry();
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
        let bytes = bytes.map_err(malformed)?;
        let hash = self.leaf_view(&bytes)?.last_hash();
        Ok(hash.map(|hash| (bytes, hash)))
    }

    /// As long as the root has one child, moves the contents of the child to the root.
    fn collapse(&mut self) -> Result<()> {
        let root = self.root();
        loop {
            let place = self.hold(root)?;
            let Some(node) = self.node(self.bytes(place)?)? else { return Ok(()) };
            if node.entries.len() > 1 {
                return Ok(());
            }
            let only = child_of(&node, 0);
            let (child, HashParent { level, range }) =
                only.ok_or_else(|| self.damaged(format!("block {root} has no children")))?;
            let child = self.hash_block_on(child, level.saturating_sub(1))?;
            self.prove_alone(&child)?;
            self.prove_range(&child, range)?;
            if !self.may_free(&[child.at])? {
                return Ok(());
            }
            let mut bytes = self.copy(child.at)?;
            let kind = if child.level > 0 { self.node_kind() } else { self.leaf_kind() };
            let expected = self.expected(root)?;
            da::move_block(self.geometry(), kind, &mut bytes, &expected).map_err(malformed)?;
            self.store(root, &bytes)?;
            self.free(child.at)?;
        }
    }
}
