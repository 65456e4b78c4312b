//! Changes of the extents of a fork, which is a list in the inode or a tree: extents are mapped and
//! unmapped, and the one form becomes the other when it has to.
//!
//! Nothing here touches the owners or the references of the blocks that are mapped, and none of
//! them is freed: those are steps of their own. Only blocks of the tree itself are taken here.

mod place;
mod room;
#[cfg(test)]
pub(crate) mod tests;

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::btree::{XfsForkRoot, XfsTree};
use offshoot_xfs_format::record::{MOST_EXTENT_BLOCKS, XfsExtent, XfsExtentItem, XfsTreeRecord};
use offshoot_xfs_format::{AgNumber, FileBlock, FsBlock, Ino};

use crate::btree::edit::{XfsEditRoot, XfsTreeBlocks, XfsTreeEdit};
use crate::btree::{XfsTreeCursor, XfsTreeRoot, file_key};
use crate::buffer::{BufferRole, DiskRun, malformed};
use crate::group::{ExtentWish, ReverseOwner, allocate_anywhere};
use crate::trans::{ChangedFork, ForkName, XfsTransaction};
pub(crate) use place::{move_extent, replace_part, split_extent};
pub(crate) use room::{
    ForkPiece, HoleWish, first_hole, mapped, next_mapped, piece_at, previous_mapped,
    set_fork_offset, unmapping_cuts_extent, unmapping_needs_block,
};

/// What one step of a change of a fork has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ForkStep {
    /// What was unmapped: the last extent first.
    pub(crate) extents: Vec<XfsExtent>,
    /// Blocks that the tree has no longer. The caller frees them; the reverse map says that they
    /// are blocks of the tree ([`ReverseOwner::tree_block`]).
    pub(crate) tree_blocks: Vec<FsBlock>,
    /// Whether nothing is mapped in the range any more.
    pub(crate) is_done: bool,
}

/// The tree of a fork, as a transaction sees it.
struct ForkTree<'t, 'e> {
    t: &'t mut XfsTransaction<'e>,
    ino: Ino,
    fork: ForkName,
    freed: Vec<FsBlock>,
}

impl ForkTree<'_, '_> {
    fn run(&self, at: FsBlock) -> Result<DiskRun> {
        let geometry = self.t.geometry();
        let outside = || {
            let problem = format!("inode {}: block {at} is not in the volume", self.ino);
            Error::corrupt(Structure::BtreeBlock, problem)
        };
        let at = geometry.place_of(at).ok_or_else(outside)?;
        Ok(DiskRun { at, bytes: geometry.block_size() })
    }

    fn role(&self, at: FsBlock) -> BufferRole {
        BufferRole::TreeBlock(XfsTree::Extents, at, Some(self.ino))
    }
}

impl XfsTreeBlocks for ForkTree<'_, '_> {
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
        let geometry = self.t.geometry();
        let near = geometry.split(near);
        let owner = Some(ReverseOwner::tree_block(self.ino, self.fork));
        // A group that has blocks for all levels will do for the whole change.
        let levels = self.t.engine().most_levels();
        let left = levels.data.max(levels.attributes);
        let wish = ExtentWish { owner, left, ..ExtentWish::blocks(1) };
        let Some((ag, found)) = allocate_anywhere(self.t, near, &wish)? else {
            let what = format!("a block for the extents of inode {}", self.ino);
            return Err(Error::posix(Errno::NOSPC, what));
        };
        let at = geometry.fs_block(ag, found.start);
        let (run, role) = (self.run(at)?, self.role(at));
        self.t.fresh(run, role)?;
        self.t.inode(self.ino)?.add_blocks(1)?;
        Ok(at)
    }

    fn free(&mut self, at: FsBlock) -> Result<()> {
        let run = self.run(at)?;
        self.t.cancel(run)?;
        self.t.inode(self.ino)?.add_blocks(-1)?;
        self.freed.push(at);
        Ok(())
    }

    fn set_root(&mut self, root: &XfsEditRoot) -> Result<()> {
        let XfsEditRoot::Fork { root, .. } = root else {
            return Err(Error::corrupt(Structure::BtreeBlock, "a root of a group in an inode"));
        };
        self.t.inode(self.ino)?.set_fork(self.fork, ChangedFork::Btree(root.clone()));
        Ok(())
    }
}

/// The records of a fork around a place, in a list or in a tree.
trait ForkRecords {
    /// The last extent that begins at `at` or before.
    fn at_most(&mut self, at: FileBlock) -> Result<Option<XfsExtent>>;
    /// The first extent that begins at `at` or behind.
    fn at_least(&mut self, at: FileBlock) -> Result<Option<XfsExtent>>;
    /// Replaces an extent by these, which lie in its place.
    fn replace(&mut self, old: &XfsExtent, new: &[XfsExtent]) -> Result<()>;
    fn insert(&mut self, new: &XfsExtent) -> Result<()>;
    /// Whether one more record at `at` needs a block of the tree, or may need one. A list has room
    /// for `most`.
    fn is_full(&mut self, at: FileBlock, most: usize) -> Result<bool>;
}

impl ForkRecords for Vec<XfsExtentItem> {
    fn at_most(&mut self, at: FileBlock) -> Result<Option<XfsExtent>> {
        let behind = self.partition_point(|item| item.get().offset <= at);
        Ok(behind.checked_sub(1).and_then(|index| self.get(index)).map(|item| item.get()))
    }

    fn at_least(&mut self, at: FileBlock) -> Result<Option<XfsExtent>> {
        let index = self.partition_point(|item| item.get().offset < at);
        Ok(self.get(index).map(|item| item.get()))
    }

    fn replace(&mut self, old: &XfsExtent, new: &[XfsExtent]) -> Result<()> {
        let item = XfsExtentItem::from(*old);
        let index = self.iter().position(|found| *found == item).ok_or_else(|| missing(old))?;
        self.splice(index..=index, new.iter().map(|extent| XfsExtentItem::from(*extent)));
        Ok(())
    }

    fn insert(&mut self, new: &XfsExtent) -> Result<()> {
        let index = self.partition_point(|item| item.get().offset < new.offset);
        self.splice(index..index, [XfsExtentItem::from(*new)]);
        Ok(())
    }

    fn is_full(&mut self, _: FileBlock, most: usize) -> Result<bool> {
        Ok(self.len() >= most)
    }
}

impl ForkRecords for XfsTreeEdit<'_> {
    fn at_most(&mut self, at: FileBlock) -> Result<Option<XfsExtent>> {
        Ok(XfsTreeEdit::at_most::<XfsExtentItem>(self, file_key(at))?.map(XfsExtentItem::get))
    }

    fn at_least(&mut self, at: FileBlock) -> Result<Option<XfsExtent>> {
        Ok(XfsTreeEdit::at_least::<XfsExtentItem>(self, file_key(at))?.map(XfsExtentItem::get))
    }

    fn replace(&mut self, old: &XfsExtent, new: &[XfsExtent]) -> Result<()> {
        self.exact::<XfsExtentItem>(file_key(old.offset))?.ok_or_else(|| missing(old))?;
        let Some((first, rest)) = new.split_first() else { return self.remove() };
        XfsTreeEdit::replace(self, &XfsExtentItem::from(*first))?;
        rest.iter().try_for_each(|extent| ForkRecords::insert(self, extent))
    }

    fn insert(&mut self, new: &XfsExtent) -> Result<()> {
        XfsTreeEdit::insert(self, &XfsExtentItem::from(*new))
    }

    fn is_full(&mut self, at: FileBlock, _: usize) -> Result<bool> {
        self.is_leaf_full(file_key(at))
    }
}

#[cold]
fn missing(extent: &XfsExtent) -> Error {
    Error::corrupt(Structure::ExtentRecord, format!("{extent:?} is not there any more"))
}

pub(crate) fn end(extent: &XfsExtent) -> u64 {
    extent.offset.0 + u64::from(extent.count)
}

/// The part of an extent from `start` to `end`.
pub(crate) fn part(extent: &XfsExtent, start: u64, end: u64) -> Option<XfsExtent> {
    let inside = start.checked_sub(extent.offset.0)?;
    let count = u32::try_from(end.checked_sub(start)?).ok().filter(|count| *count > 0)?;
    let block = FsBlock(extent.start.0 + inside);
    Some(XfsExtent { offset: FileBlock(start), start: block, count, ..*extent })
}

/// Both as one extent, if the second follows the first in the file and on the device.
fn joined(first: &XfsExtent, second: &XfsExtent) -> Option<XfsExtent> {
    let follows = end(first) == second.offset.0
        && first.start.0 + u64::from(first.count) == second.start.0
        && first.is_unwritten == second.is_unwritten;
    let count = first.count.checked_add(second.count)?;
    (follows && count <= MOST_EXTENT_BLOCKS).then_some(XfsExtent { count, ..*first })
}

/// Maps an extent where nothing is mapped. Locks the inode, and the AGF if the tree grows.
pub(crate) fn map_extent(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    new: &XfsExtent,
) -> Result<ForkStep> {
    XfsExtentItem::from(*new).verify(t.geometry(), AgNumber(0)).map_err(malformed)?;
    let (change, tree_blocks) = edit(t, ino, fork, |records| {
        let left = records.at_most(new.offset)?;
        let right = records.at_least(FileBlock(new.offset.0 + 1))?;
        let is_mapped = left.is_some_and(|left| end(&left) > new.offset.0)
            || right.is_some_and(|right| right.offset.0 < end(new));
        if is_mapped {
            let problem = format!("inode {ino}: {new:?} is mapped, and a part of it was");
            return Err(Error::corrupt(Structure::ExtentRecord, problem));
        }
        let with_left = left.and_then(|left| Some((left, joined(&left, new)?)));
        let whole = with_left.map_or(*new, |(_, whole)| whole);
        let with_right = right.and_then(|right| Some((right, joined(&whole, &right)?)));
        let whole = with_right.map_or(whole, |(_, whole)| whole);
        match (with_left, with_right) {
            (Some((left, _)), Some((right, _))) => {
                records.replace(&right, &[])?;
                records.replace(&left, &[whole]).map(|()| -1)
            }
            (Some((left, _)), None) => records.replace(&left, &[whole]).map(|()| 0),
            (None, Some((right, _))) => records.replace(&right, &[whole]).map(|()| 0),
            (None, None) => records.insert(new).map(|()| 1),
        }
    })?;
    count(t, ino, fork, change, i64::from(new.count))?;
    Ok(ForkStep { tree_blocks, is_done: true, ..ForkStep::default() })
}

/// Unmaps up to `most` extents from `range`, a range of blocks of the file: the last ones first.
/// Locks the inode, and the AGF if a tree grows because an extent is cut in two.
pub(crate) fn unmap_extents(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    range: Range<u64>,
    most: usize,
) -> Result<ForkStep> {
    let mut step = ForkStep { is_done: range.is_empty(), ..ForkStep::default() };
    while !step.is_done && step.extents.len() < most {
        let mut removed = None;
        let (change, tree_blocks) = edit(t, ino, fork, |records| {
            let Some(last) = range.end.checked_sub(1) else { return Ok(0) };
            let found = records.at_most(FileBlock(last))?;
            let Some(old) = found.filter(|old| end(old) > range.start) else { return Ok(0) };
            let (from, to) = (old.offset.0.max(range.start), end(&old).min(range.end));
            let rests = [part(&old, old.offset.0, from), part(&old, to, end(&old))];
            let rests: Vec<_> = rests.into_iter().flatten().collect();
            records.replace(&old, &rests)?;
            removed = part(&old, from, to);
            Ok(i64::try_from(rests.len()).unwrap_or(0) - 1)
        })?;
        step.tree_blocks.extend(tree_blocks);
        step.is_done = removed.is_none();
        if let Some(removed) = removed {
            count(t, ino, fork, change, -i64::from(removed.count))?;
            step.extents.push(removed);
        }
    }
    Ok(step)
}

/// Counts extents and blocks that were mapped or unmapped.
fn count(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    extents: i64,
    blocks: i64,
) -> Result<()> {
    let inode = t.inode(ino)?;
    let sum = inode.extent_count(fork).checked_add_signed(extents);
    let sum = sum.ok_or_else(|| inode.damaged("more extents than it counts"))?;
    inode.set_extent_count(fork, sum)?;
    inode.add_blocks(blocks)
}

/// Proves that an inode counts as many extents as its fork has.
pub(crate) fn prove_extent_count(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
) -> Result<()> {
    let buffers = t.engine().buffers();
    let inode = t.inode(ino)?;
    // A list ends where its count does.
    let Some(ChangedFork::Btree(root)) = inode.fork(fork) else { return Ok(()) };
    // Not as blocks of the transaction, which would hold the whole tree.
    let mut cursor = XfsTreeCursor::new(buffers, XfsTreeRoot::Fork { root, owner: ino });
    cursor.seek(file_key(FileBlock(0)))?;
    let mut found = 0_u64;
    while cursor.record::<XfsExtentItem>().is_some() {
        found += 1;
        cursor.advance()?;
    }
    let counted = inode.extent_count(fork);
    if found == counted {
        return Ok(());
    }
    Err(inode.damaged(format!("{fork:?}: {found} extents, and {counted} are counted")))
}

/// Calls `change` with the records of a fork, and stores them in the form that they need. Returns
/// what `change` does, and the blocks that a tree has no longer.
fn edit(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    change: impl FnOnce(&mut dyn ForkRecords) -> Result<i64>,
) -> Result<(i64, Vec<FsBlock>)> {
    let geometry = t.geometry();
    let inode = t.inode(ino)?;
    let bytes = inode.room(fork, geometry)?;
    let most = bytes / size_of::<XfsExtentItem>();
    let contents = inode.fork(fork).cloned();
    match contents {
        Some(ChangedFork::Extents(mut items)) => {
            let outcome = change(&mut items)?;
            if items.len() <= most {
                t.inode(ino)?.set_fork(fork, ChangedFork::Extents(items));
                return Ok((outcome, Vec::new()));
            }
            let near = items.first().map_or(FsBlock(0), |item| item.get().start);
            let mut blocks = ForkTree { t, ino, fork, freed: Vec::new() };
            let room = XfsForkRoot::capacity(bytes);
            XfsTreeEdit::plant(geometry, (ino, room), near, &items, &mut blocks)?;
            Ok((outcome, blocks.freed))
        }
        Some(ChangedFork::Btree(root)) => {
            let root = XfsEditRoot::Fork { root, owner: ino, room: XfsForkRoot::capacity(bytes) };
            let mut blocks = ForkTree { t, ino, fork, freed: Vec::new() };
            let mut tree = XfsTreeEdit::new(geometry, root, &mut blocks);
            let outcome = change(&mut tree)?;
            let list = tree.take_list(most)?;
            let ForkTree { t, freed, .. } = blocks;
            if let Some(items) = list {
                t.inode(ino)?.set_fork(fork, ChangedFork::Extents(items));
            }
            Ok((outcome, freed))
        }
        _ => Err(inode.damaged("the fork has no extents")),
    }
}
