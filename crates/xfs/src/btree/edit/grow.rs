//! Entries that come: into a block with room, over to a neighbour, or into two halves.

use offshoot_vfs::Result;
use offshoot_xfs_format::{AgBlock, FileBlock, FsBlock};

use super::block::TreeEntries;
use super::{XfsEditRoot, XfsTreeEdit};

/// Two blocks that follow each other.
#[derive(Clone, Copy)]
struct BlockPair {
    left: FsBlock,
    right: FsBlock,
}

impl XfsTreeEdit<'_> {
    /// Inserts an entry as entry `position` of the block of this depth, and keeps the keys above.
    pub(super) fn insert_at(
        &mut self,
        depth: usize,
        position: usize,
        entry: &TreeEntries,
    ) -> Result<()> {
        let Some(at) = self.path.get(depth).map(|step| step.at) else {
            return Err(self.broken("a path without this level"));
        };
        if self.shape(at)?.room() > 0 {
            self.splice(at, position, 0, entry)?;
            return self.refresh_keys(depth, None);
        }
        if self.insert_with_neighbour(depth, at, position, entry)? {
            return Ok(());
        }
        self.split(depth, at, position, entry)
    }

    /// Moves entries to the neighbour that has more room, so that both have the same, and inserts
    /// the entry. Returns whether there is a neighbour with enough room.
    ///
    /// An eighth of a block must be free: where records come in order, a neighbour that is nearly
    /// full would otherwise take one record at a time, and each time both blocks would be logged.
    fn insert_with_neighbour(
        &mut self,
        depth: usize,
        at: FsBlock,
        position: usize,
        entry: &TreeEntries,
    ) -> Result<bool> {
        let Some(own) = self.index_in_parent(depth) else { return Ok(false) };
        let left = self.child_of_parent(depth, own.checked_sub(1))?;
        let right = self.child_of_parent(depth, own.checked_add(1))?;
        let full = self.shape(at)?;
        let mut best: Option<(usize, bool, usize, FsBlock)> = None;
        for (is_left, (index, block)) in
            [(true, left), (false, right)].into_iter().filter_map(|(side, at)| Some((side, at?)))
        {
            let room = self.shape(block)?.room();
            if room >= (full.capacity / 8).max(2) && best.is_none_or(|(most, ..)| room > most) {
                best = Some((room, is_left, index, block));
            }
        }
        let Some((room, is_left, index, block)) = best else { return Ok(false) };
        let moved = room / 2;
        if is_left {
            let entries = self.entries(at, &(0..moved))?;
            let taken = full.capacity - room;
            self.splice(block, taken, 0, &entries)?;
            self.splice(at, 0, moved, &TreeEntries::default())?;
            self.insert_in_pair(BlockPair { left: block, right: at }, taken + position, entry)?;
        } else {
            let kept = full.count - moved;
            let entries = self.entries(at, &(kept..full.count))?;
            self.splice(block, 0, 0, &entries)?;
            self.splice(at, kept, moved, &TreeEntries::default())?;
            self.insert_in_pair(BlockPair { left: at, right: block }, position, entry)?;
        }
        self.refresh_keys(depth, Some((index, block)))?;
        Ok(true)
    }

    /// Inserts an entry as entry `position` of two blocks taken together, both of which have room.
    fn insert_in_pair(
        &mut self,
        pair: BlockPair,
        position: usize,
        entry: &TreeEntries,
    ) -> Result<()> {
        let left = self.shape(pair.left)?.count;
        match position.checked_sub(left).filter(|&behind| behind > 0) {
            Some(behind) => self.splice(pair.right, behind, 0, entry),
            None => self.splice(pair.left, position, 0, entry),
        }
    }

    /// Moves the upper half of a block to a new one, and inserts the entry.
    fn split(
        &mut self,
        depth: usize,
        left: FsBlock,
        position: usize,
        entry: &TreeEntries,
    ) -> Result<()> {
        let shape = self.shape(left)?;
        let right = self.fresh(left, shape.level)?;
        let kept = shape.count - shape.count / 2;
        let moved = self.entries(left, &(kept..shape.count))?;
        self.splice(right, 0, 0, &moved)?;
        self.splice(left, kept, shape.count - kept, &TreeEntries::default())?;
        self.link(left, right)?;
        self.insert_in_pair(BlockPair { left, right }, position, entry)?;
        self.adopt(depth, left, right)
    }

    /// Makes a new block the right neighbour of that of this depth in their parent.
    fn adopt(&mut self, depth: usize, left: FsBlock, right: FsBlock) -> Result<()> {
        let Some(index) = self.index_in_parent(depth) else {
            return self.grow_root(left, right);
        };
        if let Some(above) = depth.checked_sub(1) {
            let Some(parent) = self.path.get(above).map(|step| step.at) else {
                return Err(self.broken("a path without this level"));
            };
            self.store_key(parent, index, left)?;
            let entry = self.child_entry(right)?;
            return self.insert_at(above, index + 1, &entry);
        }
        self.refresh_keys(depth, None)?;
        if self.insert_in_root(index + 1, right)? {
            return Ok(());
        }
        self.push_down(left)?;
        let entry = self.child_entry(right)?;
        self.insert_at(0, index + 1, &entry)
    }

    /// Puts a root above the two blocks that the old one has become.
    fn grow_root(&mut self, left: FsBlock, right: FsBlock) -> Result<()> {
        let XfsEditRoot::Group { tree, ag, levels, .. } = self.root else {
            return Err(self.broken("a root that is in no group"));
        };
        let level = self.shape(left)?.level + 1;
        let top = self.fresh(left, level)?;
        let mut children = self.child_entry(left)?;
        children.append(&self.child_entry(right)?);
        self.splice(top, 0, 0, &children)?;
        let block = AgBlock(u32::try_from(self.pointer_to(top)?).unwrap_or(AgBlock::NULL.0));
        self.change_root(XfsEditRoot::Group { tree, ag, block, levels: levels + 1 })
    }

    /// Inserts a child into a root that is in an inode, and returns whether it has room.
    fn insert_in_root(&mut self, index: usize, at: FsBlock) -> Result<bool> {
        let first = self.view(at)?.key(0);
        let XfsEditRoot::Fork { mut root, owner, room } = self.root.clone() else {
            return Err(self.broken("a root that is in no inode"));
        };
        if root.children.len() >= room {
            return Ok(false);
        }
        let Some(first) = first.filter(|_| index <= root.children.len()) else {
            return Err(self.broken("a child without entries"));
        };
        root.children.insert(index, (FileBlock(first.0[0]), at));
        self.change_root(XfsEditRoot::Fork { root, owner, room })?;
        Ok(true)
    }
}
