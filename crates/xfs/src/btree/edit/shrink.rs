//! Entries that go: blocks that are less than half full take some from a neighbour, or join it.

use offshoot_vfs::Result;
use offshoot_xfs_format::{AgBlock, FsBlock};

use super::block::TreeEntries;
use super::{XfsEditRoot, XfsTreeEdit};

impl XfsTreeEdit<'_> {
    /// Removes entry `position` of the block of this depth, and keeps the keys above.
    pub(super) fn remove_at(&mut self, depth: usize, position: usize) -> Result<()> {
        let Some(at) = self.path.get(depth).map(|step| step.at) else {
            return Err(self.broken("a path without this level"));
        };
        self.splice(at, position, 1, &TreeEntries::default())?;
        let Some(own) = self.index_in_parent(depth) else { return Ok(()) };
        let shape = self.shape(at)?;
        if shape.count > 0 {
            self.refresh_keys(depth, None)?;
        }
        if shape.count >= shape.least() {
            return Ok(());
        }
        let left = self.child_of_parent(depth, own.checked_sub(1))?;
        let right = self.child_of_parent(depth, own.checked_add(1))?;
        let mut roomiest: Option<(usize, usize, FsBlock)> = None;
        for (index, other) in [left, right].into_iter().flatten() {
            let other_count = self.shape(other)?.count;
            if other_count + shape.count <= shape.capacity {
                let (left, right) = if index < own { (other, at) } else { (at, other) };
                return self.join(depth, left, right, own.max(index));
            }
            if roomiest.is_none_or(|(most, ..)| other_count > most) {
                roomiest = Some((other_count, index, other));
            }
        }
        match roomiest {
            Some((_, index, other)) => self.balance(depth, own, index, other),
            None if shape.count == 0 => self.drop_empty(depth, at),
            None => Ok(()),
        }
    }

    /// Moves the entries of `right`, child `index` of the parent of this depth, to `left`, and
    /// frees it.
    fn join(&mut self, depth: usize, left: FsBlock, right: FsBlock, index: usize) -> Result<()> {
        let (kept, more) = (self.shape(left)?.count, self.shape(right)?.count);
        let moved = self.entries(right, &(0..more))?;
        self.splice(left, kept, 0, &moved)?;
        if self.unlink(right)? != Some(left) {
            return Err(self.broken("neighbours under one parent that do not name each other"));
        }
        self.blocks.free(right)?;
        match depth.checked_sub(1).and_then(|above| self.path.get(above)) {
            Some(&parent) => drop(self.store_key(parent.at, index - 1, left)?),
            None => self.refresh_root(&[(index - 1, left)])?,
        }
        self.forget_child(depth, index)
    }

    /// Moves entries from a neighbour, child `index` of the parent of this depth, so that both have
    /// the same number.
    fn balance(&mut self, depth: usize, own: usize, index: usize, other: FsBlock) -> Result<()> {
        let Some(at) = self.path.get(depth).map(|step| step.at) else {
            return Err(self.broken("a path without this level"));
        };
        let (few, many) = (self.shape(at)?.count, self.shape(other)?.count);
        let moved = many.saturating_sub(few) / 2;
        let (from, to) = if index < own { (many - moved, 0) } else { (0, few) };
        let entries = self.entries(other, &(from..from + moved))?;
        self.splice(at, to, 0, &entries)?;
        self.splice(other, from, moved, &TreeEntries::default())?;
        self.refresh_keys(depth, Some((index, other)))
    }

    /// Frees a block without entries that has no neighbour under its parent. Only trees that were
    /// odd before have one. The only leaf of a fork stays.
    fn drop_empty(&mut self, depth: usize, at: FsBlock) -> Result<()> {
        if depth > 0 {
            self.unlink(at)?;
            self.blocks.free(at)?;
            return self.forget_child(depth, self.index_in_parent(depth).unwrap_or(0));
        }
        if let XfsEditRoot::Fork { mut root, owner, room } = self.root.clone()
            && root.level > 1
        {
            self.make_empty_leaf(at)?;
            root.level = 1;
            self.change_root(XfsEditRoot::Fork { root, owner, room })?;
        }
        Ok(())
    }

    /// Removes child `index` from the parent of this depth.
    fn forget_child(&mut self, depth: usize, index: usize) -> Result<()> {
        if let Some(above) = depth.checked_sub(1) {
            return self.remove_at(above, index);
        }
        let XfsEditRoot::Fork { mut root, owner, room } = self.root.clone() else {
            return Err(self.broken("a root that is in no inode"));
        };
        if index >= root.children.len() {
            return Err(self.broken("a child that its root does not have"));
        }
        root.children.remove(index);
        self.change_root(XfsEditRoot::Fork { root, owner, room })
    }

    /// Removes levels that the tree no longer needs.
    pub(super) fn settle_root(&mut self) -> Result<()> {
        let XfsEditRoot::Group { tree, ag, mut block, mut levels } = self.root else {
            return self.pull_up();
        };
        while levels > 1 {
            let at = self.geometry.fs_block(ag, block);
            let view = self.view(at)?;
            let (count, child) = (view.len(), view.pointer(0));
            if count > 1 {
                break;
            }
            if count == 1 {
                block = AgBlock(child.and_then(|at| u32::try_from(at).ok()).unwrap_or(u32::MAX));
                levels -= 1;
            } else {
                self.make_empty_leaf(at)?;
                levels = 1;
            }
            self.change_root(XfsEditRoot::Group { tree, ag, block, levels })?;
            if count == 1 {
                self.blocks.free(at)?;
            }
        }
        Ok(())
    }
}
