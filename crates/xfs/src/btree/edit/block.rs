//! What is done to one block: entries come, go and change, and each byte that does is logged.

use std::ops::Range;

use offshoot_vfs::{Malformed, Result, Structure};
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsBtreeBuilder, XfsTree};
use offshoot_xfs_format::group::MOST_LEVELS;
use offshoot_xfs_format::{FsBlock, Ino, XfsGeometry};

use super::path::{EditStep, end_of};
use super::{XfsEditRoot, XfsTreeEdit};

/// Where the number of entries is in a header.
const COUNT: Range<usize> = 6..8;

/// Where the left sibling is in a header. The right one follows it.
const LEFT: usize = 8;

/// A side of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SiblingSide {
    Left,
    Right,
}

/// Entries as they are stored, apart from a block.
#[derive(Clone, Debug, Default)]
pub(super) struct TreeEntries {
    /// Records of a leaf, or keys of a node.
    stored: Vec<u8>,
    /// The pointers of a node.
    pointers: Vec<u8>,
}

impl TreeEntries {
    /// A record of a leaf.
    pub(super) fn record(record: &[u8]) -> Self {
        Self { stored: record.to_vec(), pointers: Vec::new() }
    }

    /// Records of a leaf, one behind the other.
    pub(super) fn records(stored: Vec<u8>) -> Self {
        Self { stored, pointers: Vec::new() }
    }

    /// Appends those of `other`.
    pub(super) fn append(&mut self, other: &Self) {
        self.stored.extend(&other.stored);
        self.pointers.extend(&other.pointers);
    }
}

/// The header of a block, and where its entries are.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockShape {
    pub(super) level: u16,
    pub(super) count: usize,
    pub(super) capacity: usize,
    pub(super) left: Option<u64>,
    pub(super) right: Option<u64>,
    header: usize,
    /// The bytes of a record or of a key.
    entry: usize,
    /// The bytes of a pointer; 0 in a leaf.
    pointer: usize,
}

impl BlockShape {
    fn of(block: &XfsBtreeBlock<'_>, geometry: &XfsGeometry) -> Self {
        let (tree, header) = (block.tree, block.header);
        let is_leaf = header.level == 0;
        Self {
            level: header.level,
            count: block.len(),
            capacity: tree.capacity(geometry, header.level),
            left: header.left,
            right: header.right,
            header: tree.header_len(geometry),
            entry: if is_leaf { tree.record_len() } else { tree.key_len() },
            pointer: if is_leaf { 0 } else { tree.pointer_len() },
        }
    }

    /// The least number of entries when it is not the root.
    pub(super) fn least(&self) -> usize {
        self.capacity / 2
    }

    /// The entries that still fit.
    pub(super) fn room(&self) -> usize {
        self.capacity - self.count
    }

    /// Where the records or keys of these entries are.
    fn stored(&self, entries: &Range<usize>) -> Range<usize> {
        let at = |index: usize| self.header + index * self.entry;
        at(entries.start)..at(entries.end)
    }

    /// Where the pointers of these entries are.
    fn pointers(&self, entries: &Range<usize>) -> Range<usize> {
        let at = |index: usize| self.header + self.capacity * self.entry + index * self.pointer;
        at(entries.start)..at(entries.end)
    }
}

impl XfsTreeEdit<'_> {
    /// Views a block.
    pub(super) fn view(&mut self, at: FsBlock) -> Result<XfsBtreeBlock<'_>> {
        let tree = self.tree();
        let bytes = self.blocks.read(at)?;
        Ok(XfsBtreeBlock::view(bytes, self.geometry, tree))
    }

    /// The shape of a block, whose number of entries fits.
    pub(super) fn shape(&mut self, at: FsBlock) -> Result<BlockShape> {
        let geometry = self.geometry;
        let shape = BlockShape::of(&self.view(at)?, geometry);
        if shape.count > shape.capacity || shape.level >= MOST_LEVELS {
            let problem = format!("{} entries on level {}", shape.count, shape.level);
            return Err(self.damaged(at, Malformed::new(Structure::BtreeBlock, problem)));
        }
        Ok(shape)
    }

    /// Overwrites bytes of a block.
    fn write(&mut self, at: FsBlock, offset: usize, bytes: &[u8]) -> Result<()> {
        if !bytes.is_empty() {
            self.blocks.change(at, offset..offset + bytes.len())?.copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Copies bytes of a block, which has them.
    fn copy(&mut self, at: FsBlock, range: Range<usize>) -> Result<Vec<u8>> {
        let bytes = self.blocks.read(at)?.get(range);
        Ok(bytes.unwrap_or_default().to_vec())
    }

    /// Copies entries of a block, which has them.
    pub(super) fn entries(&mut self, at: FsBlock, which: &Range<usize>) -> Result<TreeEntries> {
        let shape = self.shape(at)?;
        Ok(TreeEntries {
            stored: self.copy(at, shape.stored(which))?,
            pointers: self.copy(at, shape.pointers(which))?,
        })
    }

    /// Removes `removed` entries from entry `position` on, and inserts others in their place.
    ///
    /// Logs the bytes of the entries from there on, or those of the new ones if there are as many
    /// as old ones; and the number of entries if it changed.
    pub(super) fn splice(
        &mut self,
        at: FsBlock,
        position: usize,
        removed: usize,
        added: &TreeEntries,
    ) -> Result<()> {
        let shape = self.shape(at)?;
        let (end, more) = (position + removed, added.stored.len() / shape.entry);
        let count = (shape.count + more).checked_sub(removed);
        let Some(count) = count.filter(|&count| end <= shape.count && count <= shape.capacity)
        else {
            return Err(self.broken("a change that its block has no room for"));
        };
        let tail = if more == removed {
            TreeEntries::default()
        } else {
            self.entries(at, &(end..shape.count))?
        };
        let mut new = added.clone();
        new.append(&tail);
        let from = position..position;
        self.write(at, shape.stored(&from).start, &new.stored)?;
        self.write(at, shape.pointers(&from).start, &new.pointers)?;
        if count != shape.count {
            // At most the capacity of a block of 64 KiB.
            let count = u16::try_from(count).unwrap_or(u16::MAX);
            self.write(at, COUNT.start, &count.to_be_bytes())?;
        }
        Ok(())
    }

    /// Overwrites the record at a place of a leaf by one with the same keys: its place in the order
    /// stays, and what its parents have of it. Returns false, and changes nothing, if it has
    /// others, or if its order is not known: a leaf is proved by itself, so its first record may
    /// overlap one of the leaf to the left, and its last one may reach behind where the next leaf
    /// begins.
    pub(super) fn overwrite_same(&mut self, leaf: EditStep, record: &[u8]) -> Result<bool> {
        let (tree, geometry) = (self.tree(), self.geometry);
        let keys = |record: &[u8]| (tree.low_key(record), tree.high_key(record));
        let block = self.view(leaf.at)?;
        let is_same = block
            .record(leaf.index)
            .is_some_and(|old| old.len() == record.len() && keys(old) == keys(record));
        let has_before = leaf.index > 0 || block.header.left.is_none();
        let is_last = leaf.index + 1 == block.len();
        let is_cut = is_last && leaf.end.is_some_and(|end| end <= end_of(tree, record));
        let is_overwritten = is_same && has_before && !is_cut;
        if is_overwritten {
            let offset = BlockShape::of(&block, geometry).stored(&(leaf.index..leaf.index)).start;
            self.write(leaf.at, offset, record)?;
        }
        Ok(is_overwritten)
    }

    /// What the parent stores about a block with entries: its lowest key, and in the reverse map
    /// the highest one too.
    fn key_of(&mut self, at: FsBlock) -> Result<Vec<u8>> {
        let block = self.view(at)?;
        let tree = block.tree;
        let low = block.key(0);
        let high = match tree {
            XfsTree::ReverseMap => (0..block.len()).filter_map(|index| block.high_key(index)).max(),
            _ => low,
        };
        let (Some(low), Some(high)) = (low, high) else {
            return Err(self.broken("a child without entries"));
        };
        let mut key = Vec::with_capacity(tree.key_len());
        tree.push_key(&mut key, low, high);
        Ok(key)
    }

    /// The entry of a node that leads to a block with entries.
    pub(super) fn child_entry(&mut self, at: FsBlock) -> Result<TreeEntries> {
        let pointer = self.pointer_to(at)?.to_be_bytes();
        let len = self.tree().pointer_len();
        let pointers = pointer.get(pointer.len() - len..).unwrap_or_default().to_vec();
        Ok(TreeEntries { stored: self.key_of(at)?, pointers })
    }

    /// The pointer of the tree that means a block.
    pub(super) fn pointer_to(&self, at: FsBlock) -> Result<u64> {
        let XfsEditRoot::Group { ag, .. } = self.root else { return Ok(at.0) };
        let place = self.geometry.split(at).filter(|&(found, _)| found == ag);
        place
            .map(|(_, block)| block.0.into())
            .ok_or_else(|| self.broken("a block outside of the group of the tree"))
    }

    /// Stores in node `at` the key of its child `index`, block `child`. Returns whether it changed.
    pub(super) fn store_key(&mut self, at: FsBlock, index: usize, child: FsBlock) -> Result<bool> {
        let key = self.key_of(child)?;
        if self.view(at)?.stored_key(index) == Some(&key) {
            return Ok(false);
        }
        let offset = self.shape(at)?.stored(&(index..index)).start;
        self.write(at, offset, &key)?;
        Ok(true)
    }

    /// Allocates a block of the tree, without entries and siblings.
    pub(super) fn fresh(&mut self, near: FsBlock, level: u16) -> Result<FsBlock> {
        let (geometry, tree) = (self.geometry, self.tree());
        if level >= MOST_LEVELS {
            return Err(self.broken("more levels than any tree has"));
        }
        let owner = match self.root {
            XfsEditRoot::Group { .. } => Ino::NULL,
            XfsEditRoot::Fork { owner, .. } => owner,
        };
        let at = self.blocks.allocate(near)?;
        self.pointer_to(at)?;
        let Some(builder) = XfsBtreeBuilder::new(geometry, tree, at, owner, level) else {
            return Err(self.broken("a new block that is not in the volume"));
        };
        self.write(at, 0, builder.header())?;
        Ok(at)
    }

    /// Makes a leaf without entries of a node.
    pub(super) fn make_empty_leaf(&mut self, at: FsBlock) -> Result<()> {
        self.write(at, 4, &[0; 4])
    }

    /// Links `right` between `left` and the block that follows it.
    pub(super) fn link(&mut self, left: FsBlock, right: FsBlock) -> Result<()> {
        let further = self.sibling(left, SiblingSide::Right)?;
        self.set_sibling(right, SiblingSide::Left, Some(left))?;
        self.set_sibling(left, SiblingSide::Right, Some(right))?;
        self.set_sibling(right, SiblingSide::Right, further)?;
        further.map_or(Ok(()), |further| self.set_sibling(further, SiblingSide::Left, Some(right)))
    }

    /// Takes a block out of the chain of its level. Returns its left sibling.
    pub(super) fn unlink(&mut self, at: FsBlock) -> Result<Option<FsBlock>> {
        let (left, right) =
            (self.sibling(at, SiblingSide::Left)?, self.sibling(at, SiblingSide::Right)?);
        if let Some(left) = left {
            self.set_sibling(left, SiblingSide::Right, right)?;
        }
        if let Some(right) = right {
            self.set_sibling(right, SiblingSide::Left, left)?;
        }
        Ok(left)
    }

    /// A sibling of a block, which is on the same level and names it in turn.
    pub(super) fn sibling(&mut self, at: FsBlock, side: SiblingSide) -> Result<Option<FsBlock>> {
        let own = self.shape(at)?;
        let Some(pointer) = (if side == SiblingSide::Left { own.left } else { own.right }) else {
            return Ok(None);
        };
        let found = self.root.view().block_of(self.geometry, pointer);
        let shape = self.shape(found)?;
        let back = if side == SiblingSide::Left { shape.right } else { shape.left };
        if shape.level != own.level || back != Some(self.pointer_to(at)?) {
            let problem = format!("it is no sibling of block {at}, which names it");
            return Err(self.damaged(found, Malformed::new(Structure::BtreeBlock, problem)));
        }
        Ok(Some(found))
    }

    fn set_sibling(
        &mut self,
        at: FsBlock,
        side: SiblingSide,
        sibling: Option<FsBlock>,
    ) -> Result<()> {
        let pointer = match sibling {
            Some(sibling) => self.pointer_to(sibling)?,
            None => u64::MAX,
        };
        let (pointer, len) = (pointer.to_be_bytes(), self.tree().pointer_len());
        let pointer = pointer.get(pointer.len() - len..).unwrap_or_default();
        self.write(at, if side == SiblingSide::Left { LEFT } else { LEFT + len }, pointer)
    }
}
