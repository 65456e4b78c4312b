//! Changes to the trees: one engine for those of a group and for the extents of a fork.
//!
//! An [`XfsTreeEdit`] finds records and inserts, replaces and removes them. It splits, fills up and
//! joins blocks, and keeps sibling pointers, the keys of parents, and the high keys of the reverse
//! map. It knows no transaction: it reads, changes, allocates and frees blocks by the trait
//! [`XfsTreeBlocks`], which the caller implements for one tree.
//!
//! ```text
//! insert  leaf full -> move entries to a neighbour under the same parent that has room
//!                   -> else split it, and insert the new block into the parent, and so on
//! remove  leaf below half -> join it with a neighbour under the same parent
//!                         -> else move entries, so that both have the same
//! ```
//!
//! A block that is not the root is at least half full, as the kernel and `xfs_repair` demand; so
//! every such block has a neighbour under its parent. Only the children of a root in an inode, and
//! blocks of trees that were odd before, may have fewer entries and no neighbour.
//!
//! After an error some blocks of the tree are changed and others not: the caller cancels the
//! transaction. No error leads to a panic, and every loop ends after as many steps as the tree has
//! levels, whatever the blocks hold.

mod block;
mod fork;
mod grow;
mod overlap;
mod path;
mod shrink;
#[cfg(test)]
mod tests;

use std::ops::Range;

use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::btree::{XfsForkRoot, XfsSearchKey, XfsTree};
use offshoot_xfs_format::record::XfsTreeRecord;
use offshoot_xfs_format::{AgBlock, AgNumber, FsBlock, Ino, XfsGeometry};

use self::block::TreeEntries;
use self::path::{CursorGoal, EditStep};
use super::XfsTreeRoot;

/// The blocks of one tree, as a transaction sees and changes them.
///
/// Blocks are named by their place in the volume, also those of a group. Checksums and LSNs of
/// changed blocks are the work of the write-back.
pub(crate) trait XfsTreeBlocks {
    /// The bytes of a block, with the changes of this transaction. A block that comes from the
    /// device was verified as [`XfsTreeRoot::role`] says.
    fn read(&mut self, at: FsBlock) -> Result<&[u8]>;

    /// The bytes `range` of a block, to be overwritten. The transaction holds the block, and logs
    /// these bytes.
    fn change(&mut self, at: FsBlock, range: Range<usize>) -> Result<&mut [u8]>;

    /// Allocates a block for the tree, best near to block `near` of the tree. Its bytes are zeros,
    /// and are not read from the device. The implementor keeps the counters, such as
    /// `btreeblks`, and the owner of the block in the reverse map.
    fn allocate(&mut self, near: FsBlock) -> Result<FsBlock>;

    /// Gives back a block that the tree no longer has. Its buffer must not be written home.
    fn free(&mut self, at: FsBlock) -> Result<()>;

    /// Stores the root: block and levels in the header of the group, or the root in the fork.
    fn set_root(&mut self, root: &XfsEditRoot) -> Result<()>;
}

/// Where a tree that is changed begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum XfsEditRoot {
    /// In a block of a group.
    Group { tree: XfsTree, ag: AgNumber, block: AgBlock, levels: u32 },
    /// In a fork of an inode, where `room` children fit ([`XfsForkRoot::capacity`]).
    Fork { root: XfsForkRoot, owner: Ino, room: usize },
}

impl XfsEditRoot {
    /// Which tree it is.
    pub(crate) fn tree(&self) -> XfsTree {
        self.view().tree()
    }

    /// The root as a cursor needs it.
    pub(crate) fn view(&self) -> XfsTreeRoot<'_> {
        match self {
            &Self::Group { tree, ag, block, levels } => {
                XfsTreeRoot::Group { tree, ag, block, levels }
            }
            Self::Fork { root, owner, .. } => XfsTreeRoot::Fork { root, owner: *owner },
        }
    }
}

/// A tree that is changed, and a cursor in it.
///
/// The searches set the cursor and return the record at it. Where they return `None`, the cursor is
/// nowhere.
pub(crate) struct XfsTreeEdit<'a> {
    geometry: &'a XfsGeometry,
    blocks: &'a mut dyn XfsTreeBlocks,
    root: XfsEditRoot,
    /// The child of the root in the path, when that is in an inode.
    child: usize,
    /// The path, from the root block down to a leaf; empty when the cursor is nowhere.
    path: Vec<EditStep>,
}

impl<'a> XfsTreeEdit<'a> {
    pub(crate) fn new(
        geometry: &'a XfsGeometry,
        root: XfsEditRoot,
        blocks: &'a mut dyn XfsTreeBlocks,
    ) -> Self {
        Self { geometry, blocks, root, child: 0, path: Vec::new() }
    }

    /// The last record whose key is at most `key`.
    pub(crate) fn at_most<R: XfsTreeRecord>(&mut self, key: XfsSearchKey) -> Result<Option<R>> {
        self.locate(key)?;
        match self.record_here()? {
            Some((found, _)) if found > key => {
                self.step(CursorGoal::Last)?;
                self.record()
            }
            found => Ok(self.settle(found)),
        }
    }

    /// The first record whose key is at least `key`.
    pub(crate) fn at_least<R: XfsTreeRecord>(&mut self, key: XfsSearchKey) -> Result<Option<R>> {
        self.locate(key)?;
        if self.key_here()?.is_some_and(|found| found < key) {
            self.step(CursorGoal::First)?;
        }
        self.record()
    }

    /// The record with this key.
    pub(crate) fn exact<R: XfsTreeRecord>(&mut self, key: XfsSearchKey) -> Result<Option<R>> {
        self.locate(key)?;
        let found = self.record_here()?.filter(|(found, _)| *found == key);
        Ok(self.settle(found))
    }

    /// The record behind the cursor; `None` when the cursor is nowhere.
    pub(crate) fn next<R: XfsTreeRecord>(&mut self) -> Result<Option<R>> {
        self.step(CursorGoal::First)?;
        self.record()
    }

    /// The record in front of the cursor; `None` when the cursor is nowhere.
    pub(crate) fn previous<R: XfsTreeRecord>(&mut self) -> Result<Option<R>> {
        self.step(CursorGoal::Last)?;
        self.record()
    }

    /// Inserts a record where its key belongs. The cursor is nowhere after that.
    ///
    /// A record with its key, or in trees other than the reverse map one that it overlaps, is an
    /// error. So a caller that joins two records removes one before it makes the other longer.
    pub(crate) fn insert<R: XfsTreeRecord>(&mut self, record: &R) -> Result<()> {
        let key = self.tree().low_key(record.as_bytes());
        self.locate(key)?;
        let behind = usize::from(self.key_here()?.is_some_and(|found| found <= key));
        let Some(leaf) = self.path.last().copied() else { return Err(self.broken("no leaf")) };
        let position = leaf.index + behind;
        self.prove_order(leaf, position.checked_sub(1), position, record.as_bytes())?;
        let depth = self.path.len() - 1;
        self.insert_at(depth, position, &TreeEntries::record(record.as_bytes()))?;
        self.path.clear();
        Ok(())
    }

    /// Replaces the record at the cursor. Its key may change, but not its place in the order; what
    /// [`Self::insert`] says about overlaps holds here too. The cursor stays.
    pub(crate) fn replace<R: XfsTreeRecord>(&mut self, record: &R) -> Result<()> {
        let Some(leaf) = self.path.last().copied() else { return Err(self.nowhere()) };
        if self.overwrite_same(leaf, record.as_bytes())? {
            return Ok(());
        }
        let before = leaf.index.checked_sub(1);
        self.prove_order(leaf, before, leaf.index + 1, record.as_bytes())?;
        self.splice(leaf.at, leaf.index, 1, &TreeEntries::record(record.as_bytes()))?;
        self.refresh_keys(self.path.len() - 1, None)
    }

    /// Removes the record at the cursor. The cursor is nowhere after that.
    ///
    /// A tree in a fork that loses its last record keeps an empty leaf, which no volume may have:
    /// the caller makes a list of it by [`Self::take_list`] in the same transaction.
    pub(crate) fn remove(&mut self) -> Result<()> {
        let Some(leaf) = self.path.last().copied() else { return Err(self.nowhere()) };
        self.remove_at(self.path.len() - 1, leaf.index)?;
        self.settle_root()?;
        self.path.clear();
        Ok(())
    }

    fn tree(&self) -> XfsTree {
        self.root.tree()
    }

    /// Stores the root that `change` makes.
    fn change_root(&mut self, root: XfsEditRoot) -> Result<()> {
        self.root = root;
        self.blocks.set_root(&self.root)
    }

    /// The error about the tree as a whole.
    #[cold]
    fn broken(&self, problem: &str) -> Error {
        Error::corrupt(Structure::BtreeBlock, format!("tree {:?}: {problem}", self.tree()))
    }

    #[cold]
    fn nowhere(&self) -> Error {
        self.broken("a change without a record at the cursor")
    }

    /// The error about block `at`.
    #[cold]
    fn damaged(&self, at: FsBlock, problem: Malformed) -> Error {
        let Malformed { structure, problem } = problem;
        Error::corrupt(structure, format!("tree {:?}, block {at}: {problem}", self.tree()))
    }
}
