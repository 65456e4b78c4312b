//! The trees of a group in a transaction: where their blocks come from, and where they go.

use std::ops::Range;

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::features::XfsRoCompat;
use offshoot_xfs_format::record::{XfsOwner, XfsTreeRecord};
use offshoot_xfs_format::{AgBlock, AgNumber, FsBlock};

use super::allocate::{ExtentWish, KeptBlocks, allocate};
use super::free::{FreedFrom, free_extent};
use super::headers::{add, agf, agi, change_agf, change_agi};
use super::held_back::above_reservation;
use super::{free_list, reverse::ReverseOwner};
use crate::btree::edit::{XfsEditRoot, XfsTreeBlocks, XfsTreeEdit};
use crate::buffer::{BufferRole, DiskRun};
use crate::trans::{AgExtent, CountChanges, XfsTransaction};

/// A tree of a group, as a transaction sees it.
pub(super) struct GroupTree<'t, 'e> {
    t: &'t mut XfsTransaction<'e>,
    tree: XfsTree,
    ag: AgNumber,
}

/// Calls `edit` with a tree of a group.
pub(super) fn edit<T>(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    tree: XfsTree,
    edit: impl FnOnce(&mut XfsTreeEdit<'_>) -> Result<T>,
) -> Result<T> {
    let (block, levels) = root(t, ag, tree)?;
    let geometry = t.geometry();
    let root = XfsEditRoot::Group { tree, ag, block: AgBlock(block), levels };
    let mut blocks = GroupTree { t, tree, ag };
    edit(&mut XfsTreeEdit::new(geometry, root, &mut blocks))
}

/// Sets the cursor to the record with a key, which another tree says that this one has.
pub(super) fn must_find<R: XfsTreeRecord>(
    tree: &mut XfsTreeEdit<'_>,
    key: XfsSearchKey,
) -> Result<R> {
    tree.exact::<R>(key)?.ok_or_else(|| {
        let which = R::TREES;
        Error::corrupt(Structure::BtreeBlock, format!("trees {which:?}: no record {key:?}"))
    })
}

/// The block and the levels of a root.
fn root(t: &mut XfsTransaction<'_>, ag: AgNumber, tree: XfsTree) -> Result<(u32, u32)> {
    let (block, levels) = match tree {
        XfsTree::Inodes | XfsTree::FreeInodes => {
            let agi = agi(t, ag)?;
            if tree == XfsTree::Inodes {
                (agi.root, agi.level)
            } else {
                (agi.free_root, agi.free_level)
            }
        }
        XfsTree::ReferenceCounts => {
            let agf = agf(t, ag)?;
            (agf.refcount_root, agf.refcount_level)
        }
        _ => {
            let agf = agf(t, ag)?;
            let index = root_index(tree)?;
            let roots = agf.roots.get(index).zip(agf.levels.get(index));
            roots.map(|(root, levels)| (*root, *levels)).ok_or_else(|| no_tree(tree))?
        }
    };
    Ok((block.get(), levels.get()))
}

/// Where an AGF has the root of a tree.
fn root_index(tree: XfsTree) -> Result<usize> {
    match tree {
        XfsTree::FreeByBlock => Ok(0),
        XfsTree::FreeBySize => Ok(1),
        XfsTree::ReverseMap => Ok(2),
        _ => Err(no_tree(tree)),
    }
}

#[cold]
fn no_tree(tree: XfsTree) -> Error {
    Error::corrupt(Structure::BtreeBlock, format!("groups have no tree {tree:?} there"))
}

/// Whether the blocks of a tree come from the free list, and go there.
fn is_fed_by_list(tree: XfsTree) -> bool {
    matches!(tree, XfsTree::FreeByBlock | XfsTree::FreeBySize | XfsTree::ReverseMap)
}

/// Whether a tree takes blocks that the group holds back for it, which stop to be free then. Those
/// of the reverse map count as free for as long as it has them.
fn is_held_back_for(tree: XfsTree) -> bool {
    matches!(tree, XfsTree::FreeInodes | XfsTree::ReferenceCounts)
}

impl GroupTree<'_, '_> {
    fn run(&self, at: FsBlock) -> Result<DiskRun> {
        let geometry = self.t.geometry();
        let outside = || {
            let problem = format!("tree {:?}: block {at} is not in the volume", self.tree);
            Error::corrupt(Structure::BtreeBlock, problem)
        };
        let at = geometry.place_of(at).ok_or_else(outside)?;
        Ok(DiskRun { at, bytes: geometry.block_size() })
    }

    fn role(&self, at: FsBlock) -> BufferRole {
        BufferRole::TreeBlock(self.tree, at, None)
    }

    /// Adds to the counters of the blocks of the tree.
    fn count(&mut self, change: i64) -> Result<()> {
        let (t, ag, tree) = (&mut *self.t, self.ag, self.tree);
        let held_back = match tree {
            XfsTree::FreeInodes | XfsTree::ReferenceCounts => -change,
            // Its blocks count as free, and no file gets them.
            XfsTree::FreeByBlock | XfsTree::FreeBySize => change,
            XfsTree::ReverseMap => above_reservation(t, ag, change)?,
            _ => 0,
        };
        let is_of_free = tree == XfsTree::FreeInodes;
        let free_inode_trees = if is_of_free { vec![(ag, change)] } else { Vec::new() };
        t.count(CountChanges { held_back, free_inode_trees, ..CountChanges::default() });
        match tree {
            XfsTree::Inodes | XfsTree::FreeInodes => {
                let counts = t.engine().superblock().ro_compat();
                if !counts.contains(XfsRoCompat::INOBTCNT) {
                    return Ok(());
                }
                change_agi(t, ag, |agi| {
                    let all = tree == XfsTree::Inodes;
                    add(if all { &mut agi.iblocks } else { &mut agi.fblocks }, change)
                })
            }
            XfsTree::ReferenceCounts => {
                change_agf(t, ag, |agf| add(&mut agf.refcount_blocks, change))
            }
            _ => change_agf(t, ag, |agf| {
                if tree == XfsTree::ReverseMap {
                    add(&mut agf.rmap_blocks, change)?;
                }
                add(&mut agf.btreeblks, change)
            }),
        }
    }

    fn owner(&self) -> XfsOwner {
        match self.tree {
            XfsTree::ReferenceCounts => XfsOwner::CountTree,
            XfsTree::Inodes | XfsTree::FreeInodes => XfsOwner::InodeTrees,
            _ => XfsOwner::FreeTrees,
        }
    }
}

impl XfsTreeBlocks for GroupTree<'_, '_> {
    fn read(&mut self, at: FsBlock) -> Result<&[u8]> {
        let (run, role) = (self.run(at)?, self.role(at));
        self.t.read(run, role)
    }

    fn change(&mut self, at: FsBlock, range: Range<usize>) -> Result<&mut [u8]> {
        let (run, role) = (self.run(at)?, self.role(at));
        self.t.read(run, role)?;
        self.t.change(run.at, range)
    }

    fn allocate(&mut self, near: FsBlock) -> Result<FsBlock> {
        let (ag, geometry) = (self.ag, self.t.geometry());
        let block = if is_fed_by_list(self.tree) {
            free_list::take(self.t, ag)?
        } else {
            let near = geometry.split(near).map(|(_, block)| block);
            let owner = Some(ReverseOwner::special(self.owner()));
            let is_kept_for_it = is_held_back_for(self.tree);
            let kept = if is_kept_for_it { KeptBlocks::OfReverseMap } else { KeptBlocks::All };
            let wish = ExtentWish { near, owner, kept, ..ExtentWish::blocks(1) };
            let mut found = allocate(self.t, ag, &wish)?;
            // A group that was filled when nothing was held back yet. A tree for which blocks are
            // held back grows in the middle of a chain, where a failure would end all writing.
            if found.is_none() && (is_kept_for_it || self.t.may_take_held_back()) {
                let wish = ExtentWish { kept: KeptBlocks::OfChains, ..wish };
                found = allocate(self.t, ag, &wish)?;
            }
            if found.is_none() && is_kept_for_it {
                let wish = ExtentWish { kept: KeptBlocks::None, ..wish };
                found = allocate(self.t, ag, &wish)?;
            }
            if found.is_some() && is_kept_for_it {
                self.t.use_tree_room(ag, 1);
            }
            found.ok_or_else(|| free_list::no_space(ag))?.start
        };
        self.count(1)?;
        let at = geometry.fs_block(ag, block);
        let (run, role) = (self.run(at)?, self.role(at));
        self.t.fresh(run, role)?;
        Ok(at)
    }

    fn free(&mut self, at: FsBlock) -> Result<()> {
        let run = self.run(at)?;
        let ag = self.ag;
        let Some((_, block)) = self.t.geometry().split(at) else { return Err(no_tree(self.tree)) };
        self.t.cancel(run)?;
        self.count(-1)?;
        let extent = AgExtent { start: block, count: 1 };
        if is_fed_by_list(self.tree) {
            free_list::give(self.t, ag, block)?;
            self.t.add_busy(ag, extent);
            return Ok(());
        }
        let owner = ReverseOwner::special(self.owner());
        free_extent(self.t, ag, extent, FreedFrom::Owner(owner))
    }

    fn set_root(&mut self, root: &XfsEditRoot) -> Result<()> {
        let XfsEditRoot::Group { tree, ag, block, levels } = root else {
            return Err(no_tree(self.tree));
        };
        let (block, levels) = (block.0.into(), (*levels).into());
        match tree {
            XfsTree::Inodes => change_agi(self.t, *ag, |agi| {
                (agi.root, agi.level) = (block, levels);
                Some(())
            }),
            XfsTree::FreeInodes => change_agi(self.t, *ag, |agi| {
                (agi.free_root, agi.free_level) = (block, levels);
                Some(())
            }),
            XfsTree::ReferenceCounts => change_agf(self.t, *ag, |agf| {
                (agf.refcount_root, agf.refcount_level) = (block, levels);
                Some(())
            }),
            _ => {
                let index = root_index(*tree)?;
                change_agf(self.t, *ag, |agf| {
                    *agf.roots.get_mut(index)? = block;
                    *agf.levels.get_mut(index)? = levels;
                    Some(())
                })
            }
        }
    }
}
