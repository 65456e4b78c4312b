//! What a fork has at a place, where it has holes, and the room that it has in the inode.

use std::ops::{ControlFlow, Range};

use offshoot_vfs::Result;
use offshoot_xfs_format::btree::{XfsForkRoot, XfsTree};
use offshoot_xfs_format::record::{XfsExtent, XfsExtentItem};
use offshoot_xfs_format::{FileBlock, Ino};

use super::{ForkRecords, ForkTree, edit, end, part};
use crate::btree::ForkSearch;
use crate::btree::edit::{XfsEditRoot, XfsTreeEdit};
use crate::buffer::{BufferRole, DiskRun};
use crate::trans::{ChangedFork, ForkName, XfsTransaction};

/// What `look` finds in the records of a fork.
fn look<T>(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    look: impl FnOnce(&mut dyn ForkRecords) -> Result<T>,
) -> Result<T> {
    let geometry = t.geometry();
    let inode = t.inode(ino)?;
    let most = XfsForkRoot::capacity(inode.room(fork, geometry)?);
    match inode.fork(fork).cloned() {
        Some(ChangedFork::Extents(mut items)) => look(&mut items),
        Some(ChangedFork::Btree(root)) => {
            let root = XfsEditRoot::Fork { root, owner: ino, room: most };
            let mut blocks = ForkTree { t, ino, fork, freed: Vec::new() };
            look(&mut XfsTreeEdit::new(geometry, root, &mut blocks))
        }
        _ => Err(inode.damaged("the fork has no extents")),
    }
}

/// The extent that has block `at` of a fork.
pub(crate) fn mapped(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    at: FileBlock,
) -> Result<Option<XfsExtent>> {
    if let Some(extent) = find_mapped(t, ino, fork, at)? {
        return Ok(Some(extent));
    }
    let found = next_mapped(t, ino, fork, at)?;
    Ok(found.filter(|extent| extent.offset <= at))
}

/// The same without a copy of the list or of the root. `None` also where something is odd: a
/// search with a cursor says what.
fn find_mapped(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    at: FileBlock,
) -> Result<Option<XfsExtent>> {
    let has_block = |extent: &XfsExtent| (extent.offset.0..end(extent)).contains(&at.0);
    let mut search = match t.inode(ino)?.fork(fork) {
        Some(ChangedFork::Extents(items)) => {
            let behind = items.partition_point(|item| item.get().offset <= at);
            let found = behind.checked_sub(1).and_then(|index| items.get(index));
            return Ok(found.map(|item| item.get()).filter(has_block));
        }
        Some(ChangedFork::Btree(root)) => ForkSearch::new(root, at),
        _ => None,
    };
    let geometry = t.geometry();
    while let Some(step) = search {
        let Some(place) = geometry.place_of(step.at) else { return Ok(None) };
        let run = DiskRun { at: place, bytes: geometry.block_size() };
        let role = BufferRole::TreeBlock(XfsTree::Extents, step.at, Some(ino));
        search = match step.next(geometry, t.read(run, role)?) {
            Ok(ControlFlow::Continue(step)) => Some(step),
            Ok(ControlFlow::Break(found)) => return Ok(found.filter(has_block)),
            Err(_) => None,
        };
    }
    Ok(None)
}

/// The extent that has block `at` of a fork, or else the next one.
pub(crate) fn next_mapped(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    at: FileBlock,
) -> Result<Option<XfsExtent>> {
    look(t, ino, fork, |records| {
        let found = records.at_most(at)?.filter(|extent| end(extent) > at.0);
        found.map_or_else(|| records.at_least(at), |extent| Ok(Some(extent)))
    })
}

/// The last extent that begins in front of block `at` of a fork.
pub(crate) fn previous_mapped(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    at: FileBlock,
) -> Result<Option<XfsExtent>> {
    let Some(before) = at.0.checked_sub(1) else { return Ok(None) };
    look(t, ino, fork, |records| records.at_most(FileBlock(before)))
}

/// Whether the fork may need a block when a range of its blocks is unmapped: it cuts an extent in
/// two, and there is no room for one more record.
pub(crate) fn unmapping_needs_block(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    range: Range<u64>,
) -> Result<bool> {
    let geometry = t.geometry();
    let most = t.inode(ino)?.room(fork, geometry)? / size_of::<XfsExtentItem>();
    look(t, ino, fork, |records| {
        Ok(cuts_extent(records, &range)? && records.is_full(FileBlock(range.start), most)?)
    })
}

/// Whether an extent of the fork is cut in two when a range of its blocks is unmapped.
pub(crate) fn unmapping_cuts_extent(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    range: Range<u64>,
) -> Result<bool> {
    look(t, ino, fork, |records| cuts_extent(records, &range))
}

fn cuts_extent(records: &mut dyn ForkRecords, range: &Range<u64>) -> Result<bool> {
    let found = records.at_most(FileBlock(range.start))?;
    Ok(found.is_some_and(|old| old.offset.0 < range.start && end(&old) > range.end))
}

/// The extent or the hole of a fork from a block on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ForkPiece {
    /// `None` for a hole.
    pub(crate) extent: Option<XfsExtent>,
    pub(crate) blocks: u64,
}

impl ForkPiece {
    /// Its first blocks.
    pub(crate) fn first(self, blocks: u64) -> Self {
        let extent = self.extent.and_then(|extent| {
            part(&extent, extent.offset.0, extent.offset.0.saturating_add(blocks))
        });
        Self { extent, blocks }
    }

    pub(crate) fn is_written(&self) -> bool {
        self.extent.is_some_and(|extent| !extent.is_unwritten)
    }

    /// Whether both map the same blocks, or none.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        let start = |piece: &Self| piece.extent.map(|extent| extent.start);
        start(self) == start(other)
    }
}

/// What a fork has from block `at` on, up to `most` blocks.
pub(crate) fn piece_at(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    at: u64,
    most: u64,
) -> Result<ForkPiece> {
    let behind = at.saturating_add(most);
    let found = next_mapped(t, ino, fork, FileBlock(at))?;
    Ok(match found.filter(|extent| extent.offset.0 < behind) {
        Some(extent) if extent.offset.0 <= at => {
            let behind = behind.min(end(&extent));
            ForkPiece { extent: part(&extent, at, behind), blocks: behind - at }
        }
        Some(extent) => ForkPiece { extent: None, blocks: extent.offset.0 - at },
        None => ForkPiece { extent: None, blocks: most },
    })
}

/// Where a hole in a fork is looked for.
#[derive(Clone, Debug)]
pub(crate) struct HoleWish {
    pub(crate) range: Range<u64>,
    /// The blocks in a row.
    pub(crate) count: u32,
    /// The first of them is a multiple of this.
    pub(crate) alignment: u64,
    /// The extents to look behind, from the start of the range on. If there are more, the place
    /// behind the last extent of the range will do.
    pub(crate) most_extents: usize,
}

/// Blocks in a row of a fork that no extent has: the first ones that are found.
pub(crate) fn first_hole(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    wish: &HoleWish,
) -> Result<Option<FileBlock>> {
    let HoleWish { range, count, alignment, most_extents } = wish;
    let behind = |extent: &XfsExtent| end(extent).next_multiple_of(*alignment);
    let hole = look(t, ino, fork, |records| {
        let (mut hole, mut left) = (range.start, *most_extents);
        while let Some(extent) = records.at_least(FileBlock(hole))? {
            if extent.offset.0 - hole >= u64::from(*count) {
                break;
            }
            hole = behind(&extent);
            left = left.saturating_sub(1);
            if left == 0 {
                let last = records.at_most(FileBlock(range.end.saturating_sub(1)))?;
                return Ok(last.map_or(hole, |last| hole.max(behind(&last))));
            }
        }
        Ok(hole)
    })?;
    Ok((hole + u64::from(*count) <= range.end).then_some(FileBlock(hole)))
}

/// Lets the attribute fork begin at `offset`, in units of 8 bytes behind the core. A list of
/// extents of the data fork that has no room any more becomes a tree, and the children of a root
/// move to a block. Locks the AGF for that.
pub(crate) fn set_fork_offset(t: &mut XfsTransaction<'_>, ino: Ino, offset: u8) -> Result<()> {
    let geometry = t.geometry();
    let inode = t.inode(ino)?;
    inode.set_fork_offset(offset);
    let bytes = inode.room(ForkName::Data, geometry)?;
    match inode.fork(ForkName::Data) {
        Some(ChangedFork::Extents(items)) if size_of_val(items.as_slice()) > bytes => {
            edit(t, ino, ForkName::Data, |_| Ok(0)).map(drop)
        }
        Some(ChangedFork::Btree(root)) if root.children.len() > XfsForkRoot::capacity(bytes) => {
            let most = XfsForkRoot::capacity(bytes);
            let root = XfsEditRoot::Fork { root: root.clone(), owner: ino, room: most };
            let mut blocks = ForkTree { t, ino, fork: ForkName::Data, freed: Vec::new() };
            XfsTreeEdit::new(geometry, root, &mut blocks).shrink_root()
        }
        _ => Ok(()),
    }
}
