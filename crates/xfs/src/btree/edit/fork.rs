//! The root in an inode: it overflows into a block, and takes back what fits; and the ways from a
//! list of extents to a tree and back.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::btree::XfsForkRoot;
use offshoot_xfs_format::record::XfsExtentItem;
use offshoot_xfs_format::{FileBlock, FsBlock, Ino, XfsGeometry};
use zerocopy::IntoBytes;

use super::super::file_key;
use super::block::TreeEntries;
use super::path::EditStep;
use super::{XfsEditRoot, XfsTreeBlocks, XfsTreeEdit};

impl<'a> XfsTreeEdit<'a> {
    /// Makes a tree of the extents in a list, which must fit in a leaf, and stores its root. `most`
    /// children fit in the fork of `owner`; `near` is where the block is best allocated.
    pub(crate) fn plant(
        geometry: &'a XfsGeometry,
        (owner, most): (Ino, usize),
        near: FsBlock,
        items: &[XfsExtentItem],
        blocks: &'a mut dyn XfsTreeBlocks,
    ) -> Result<Self> {
        let Some(first) = items.first().map(|item| item.get().offset).filter(|_| most > 0) else {
            return Err(Error::corrupt(Structure::ExtentRecord, "a tree without extents"));
        };
        let root = XfsForkRoot { level: 1, children: Vec::new() };
        let mut edit = Self::new(geometry, XfsEditRoot::Fork { root, owner, room: most }, blocks);
        let leaf = edit.fresh(near, 0)?;
        edit.splice(leaf, 0, 0, &TreeEntries::records(items.as_bytes().to_vec()))?;
        let root = XfsForkRoot { level: 1, children: vec![(first, leaf)] };
        edit.change_root(XfsEditRoot::Fork { root, owner, room: most })?;
        Ok(edit)
    }

    /// Takes all extents out of the tree and frees its block, if it is one leaf with at most `most`
    /// extents. The caller then stores them as a list in the place of the root.
    pub(crate) fn take_list(&mut self, most: usize) -> Result<Option<Vec<XfsExtentItem>>> {
        let XfsEditRoot::Fork { root, .. } = &self.root else { return Ok(None) };
        let (1, &[(_, leaf)]) = (root.level, root.children.as_slice()) else { return Ok(None) };
        let block = self.view(leaf)?;
        if block.header.level > 0 || block.len() > most {
            return Ok(None);
        }
        let items = block.records().to_vec();
        self.path.clear();
        self.blocks.free(leaf)?;
        Ok(Some(items))
    }

    /// Leaves a root in an inode one child, because the others have no room there any more.
    pub(crate) fn shrink_root(&mut self) -> Result<()> {
        let XfsEditRoot::Fork { root, .. } = &self.root else { return Ok(()) };
        let near = root.children.first().map_or(FsBlock(0), |&(_, at)| at);
        self.path.clear();
        self.push_down(near)?;
        // It goes to the child, not to a record.
        self.path.clear();
        Ok(())
    }

    /// Moves all children of a root in an inode to a new block, near to block `near`, which becomes
    /// its only child.
    pub(super) fn push_down(&mut self, near: FsBlock) -> Result<()> {
        let XfsEditRoot::Fork { root, owner, room } = self.root.clone() else {
            return Err(self.broken("a root that is in no inode"));
        };
        let Some(&(first, _)) = root.children.first() else {
            return Err(self.broken("a root without children"));
        };
        let top = self.fresh(near, root.level)?;
        let mut children = TreeEntries::default();
        for &(_, at) in &root.children {
            children.append(&self.child_entry(at)?);
        }
        self.splice(top, 0, 0, &children)?;
        let root = XfsForkRoot { level: root.level + 1, children: vec![(first, top)] };
        self.path.insert(0, EditStep::last(top, self.child));
        self.child = 0;
        self.change_root(XfsEditRoot::Fork { root, owner, room })
    }

    /// Takes the children of the only child into the root in the inode, as long as they fit.
    pub(super) fn pull_up(&mut self) -> Result<()> {
        while let XfsEditRoot::Fork { root, owner, room } = &self.root
            && root.level > 1
            && let &[(_, at)] = root.children.as_slice()
        {
            let (level, owner, most) = (root.level - 1, *owner, *room);
            let shape = self.shape(at)?;
            if shape.level != level {
                return Err(self.broken("the child of the root is on another level"));
            }
            if shape.count > most {
                break;
            }
            let block = self.view(at)?;
            let children = (0..block.len())
                .filter_map(|index| Some((block.key(index)?, block.pointer(index)?)))
                .map(|(key, pointer)| (FileBlock(key.0[0]), FsBlock(pointer)))
                .collect();
            let root = XfsForkRoot { level, children };
            self.change_root(XfsEditRoot::Fork { root, owner, room: most })?;
            self.blocks.free(at)?;
        }
        Ok(())
    }

    /// Stores the first offsets of these children in a root that is in an inode.
    pub(super) fn refresh_root(&mut self, children: &[(usize, FsBlock)]) -> Result<()> {
        let XfsEditRoot::Fork { mut root, owner, room } = self.root.clone() else { return Ok(()) };
        let mut has_changed = false;
        for &(index, at) in children {
            let first = self.view(at)?.key(0);
            if let (Some(first), Some(child)) = (first, root.children.get_mut(index))
                && file_key(child.0) != first
            {
                child.0 = FileBlock(first.0[0]);
                has_changed = true;
            }
        }
        if has_changed {
            self.change_root(XfsEditRoot::Fork { root, owner, room })?;
        }
        Ok(())
    }
}
